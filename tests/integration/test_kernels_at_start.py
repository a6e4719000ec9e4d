"""The kernels that are loaded when a section switches coding on, before the first step."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch

from ds_zipccl import devices, kernels
from ds_zipccl.config import DEFAULT, ZipcclConfig
from ds_zipccl.integration import backend, canary, start_up


class Job:
    """A rank of an accelerator, with routes that note their loading, and the device on which they are loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, accelerator: str) -> None:
        self.loaded: list[tuple[str, str, str]] = []
        self.device = "cuda:0"
        self.fails: set[tuple[str, str]] = set()
        self.patch = monkeypatch
        names = {"cpu": ("native", "numba"), "cuda": ("native", "cupy")}
        table = {device: {name: self._loader(device, name) for name in names[device]} for device in names}
        monkeypatch.setattr(kernels, "ROUTES", table)
        monkeypatch.setattr(kernels, "_loaded", {})
        monkeypatch.setattr(backend, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: accelerator))
        monkeypatch.setitem(devices.RUNTIMES, "cuda", SimpleNamespace(device=self._current))  # type: ignore[misc]
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)

    def _loader(self, device: str, name: str) -> Callable[[], Any]:
        def load() -> Any:
            self.loaded.append((device, name, self.device))
            if (device, name) in self.fails:
                raise RuntimeError("planted")
            return object()

        return load

    @contextlib.contextmanager
    def _current(self, device: torch.device) -> Iterator[None]:
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise RuntimeError("CUDA error: invalid device ordinal")
        before, self.device = self.device, str(device)
        yield
        self.device = before


@pytest.mark.parametrize(
    ("accelerator", "route", "loaded"),
    [
        ("cpu", "auto", [("cpu", "native")]),
        ("cpu", "numba", [("cpu", "numba")]),
        ("cpu", "cupy", [("cpu", "native")]),
        ("cuda", "auto", [("cpu", "native"), ("cuda", "native")]),
        ("cuda", "numba", [("cpu", "numba"), ("cuda", "native")]),
        ("cuda", "cupy", [("cpu", "native"), ("cuda", "cupy")]),
    ],
)
def test_routes_of_the_jobs_devices(
    accelerator: str, route: str, loaded: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A route that only another device has gives way to the best one."""
    job = Job(monkeypatch, accelerator)
    start_up.load_kernels(ZipcclConfig(enabled=True, route=route), backend._device())  # type: ignore[arg-type]
    assert [entry[:2] for entry in job.loaded] == loaded


@pytest.mark.parametrize(("visible", "current", "wanted"), [(8, 0, ["3"]), (1, 0, ["0"]), (2, 1, ["1"]), (0, 0, [])])
def test_the_device_of_this_rank(
    monkeypatch: pytest.MonkeyPatch, visible: int, current: int, wanted: list[str]
) -> None:
    """Ray and SLURM give each rank its own device alone. Without any device nothing is loaded, and nothing raises."""
    job = Job(monkeypatch, "cuda")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    start_up.load_kernels(DEFAULT, backend._device())
    assert job.loaded == [("cpu", "native", "cuda:0"), *(("cuda", "native", f"cuda:{one}") for one in wanted)]
    assert job.device == "cuda:0"


def test_no_cuda_kernels_do_not_stop_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, "cuda")
    job.fails = {("cuda", "native"), ("cuda", "cupy")}
    start_up.load_kernels(DEFAULT, backend._device())
    assert kernels.tried("cuda") == {"native": "RuntimeError: planted", "cupy": "RuntimeError: planted"}
    job.fails = {("cpu", "native"), ("cpu", "numba")}
    monkeypatch.setattr(kernels, "_loaded", {})
    start_up.load_kernels(DEFAULT, backend._device())
    assert kernels.tried("cpu") == {"native": "RuntimeError: planted", "numba": "RuntimeError: planted"}


#: What a rank with numba alone says of the functions that its kernels lack.
NUMBA_ALONE = "rank 1: no kernels for cpu tensors here. numba: it has no "


def without_a_compiler(rank: int, size: int) -> list[tuple[list[str], str, str]]:
    """What each lossy config raises, and ``rows`` and ``delta`` that all ranks use: with all kernels, and where rank 1 has numba alone."""
    numbers: tuple[dict[str, int], ...] = ({"mantissa": 3}, {"bits": 8}, {}, {"rate": 8})
    codecs = [{"codec": name, **more} for name, more in zip(("round", "int", "taco_fp8", "zfp"), numbers, strict=True)]
    never = replace(DEFAULT, roles={"ep": "never"}, delta="off")
    found = []
    for missing in (False, True):
        if rank and missing:
            kernels.ROUTES["cpu"].pop("native")
            kernels._loaded.clear()
        said = []
        for codec in codecs:
            try:
                start_up.with_all_kernels(
                    ZipcclConfig(enabled=True, lossy=True, roles={"dp": codec}), backend._device()
                )
                said.append("")
            except kernels.RouteUnavailable as error:
                said.append(str(error))
        assert start_up.with_all_kernels(never, backend._device()) == never
        config = start_up.with_all_kernels(DEFAULT, backend._device())
        found.append((said, config.rows, config.delta))
    return found


def test_one_rank_without_a_compiler_refuses_lossy_roles_everywhere() -> None:
    """And sends no row frames and no differences: the rank without a compiler could not read them."""
    answers = ranks.run(without_a_compiler, 2)
    assert answers[0] == answers[1]
    everything, (said, *features) = answers[0]
    assert everything == ([""] * 4, "auto", "auto") and features == ["off", "off"] and len(said) == 4
    for text in said:
        assert text.startswith(f"ranks [1] lack the lossy codecs of the roles; {NUMBA_ALONE}")
        assert text.endswith(
            "; install a C++ compiler or a wheel of ds_zipccl with its library, or name no lossy codec"
        )


def test_the_lines_about_rows_and_differences(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (
        "[ds_zipccl] rows is off: ranks [1, 3] have no kernels of row frames; rank 1: no compiler\n"
        "[ds_zipccl] delta is off: ranks [3] have no kernels of differences; rank 3: a reason\n"
    )
    monkeypatch.setattr(start_up, "group_state", lambda group: None)
    monkeypatch.setattr(start_up, "resolve_group", lambda group: group)
    monkeypatch.setattr(start_up.topology, "tell", lambda group, text: next(told))
    for rank in (1, 0):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        told = iter(
            [{0: "", 1: "", 3: ""}, {0: "", 1: "no compiler", 3: "another reason"}, {0: "", 1: "", 3: "a reason"}]
        )
        assert start_up.with_all_kernels(DEFAULT, backend._device()) == replace(DEFAULT, rows="off", delta="off")
        assert capsys.readouterr().out == ("" if rank else lines)


def test_the_canary_is_for_several_nodes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its faults, and ranks without kernels, are in tests/on_sim/test_planted_faults.py."""
    Job(monkeypatch, "cuda")
    state = SimpleNamespace(size=3, rank=0, streams=lambda device: device == "cuda")
    monkeypatch.setattr(start_up, "group_state", lambda group: state)
    monkeypatch.setattr(start_up, "resolve_group", lambda group: group)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    others = {0: "", 1: "", 2: ""}
    told = itertools.cycle([{}, others])  # first of kernels for CPU tensors
    monkeypatch.setattr(start_up.topology, "tell", lambda group, text: {**next(told), 0: text})
    on = ZipcclConfig(enabled=True, nccl="on", rows="off")
    monkeypatch.setattr(start_up.canary, "try_out", lambda config, device: canary.Outcome())
    assert start_up.with_all_kernels(on, backend._device()) == on
    assert capsys.readouterr().out == "[ds_zipccl] canary: gather, exchanges and sums right in 0.00 s\n"
    inside, apart = [[0, 1, 2]], [[0], [1], [2]]
    for mode, nodes, tried in (("auto", inside, ""), ("auto", apart, "canary"), ("always", inside, "canary")):
        monkeypatch.setattr(start_up, "nodes_of_job", lambda nodes=nodes: nodes)
        told = itertools.cycle([{}, others])
        assert start_up.with_all_kernels(replace(on, nccl="auto", mode=mode), backend._device()).nccl == "auto"  # type: ignore[arg-type]
        assert (tried in (said := capsys.readouterr().out)) and bool(said) == bool(tried), (mode, nodes)


@pytest.mark.parametrize(
    ("variable", "home", "deterministic", "said"),
    [
        ("", "", False, ""),
        ("NCCL_ALGO", "", False, "NCCL_ALGO is set"),
        ("", "# NCCL_ALGO=Ring\n NCCL_PROTO = LL\n", False, "NCCL_PROTO is set"),
        ("", "#NCCL_ALGO=Ring\nNCCL_DEBUG=INFO", False, ""),
        ("NCCL_PROTO", "", True, "torch.use_deterministic_algorithms is on"),
    ],
)
def test_who_wants_nccls_own_sums(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, home: str, deterministic: bool, said: str
) -> None:
    for name in ("NCCL_ALGO", "NCCL_PROTO"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "Ring")
    (tmp_path / "conf").write_text(home)
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "conf"))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    assert start_up._wants_own_sums() == said
