"""The kernels that are loaded when a section switches coding on, before the first step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch

from ds_zipccl import devices, kernels
from ds_zipccl.config import DEFAULT, ZipcclConfig
from ds_zipccl.integration import backend


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
    backend._load_kernels(DEFAULT.__class__(enabled=True, route=route))  # type: ignore[arg-type]
    assert [entry[:2] for entry in job.loaded] == loaded


def test_the_device_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, "cuda")
    monkeypatch.setenv("LOCAL_RANK", "3")
    backend._load_kernels(DEFAULT)
    assert job.loaded == [("cpu", "native", "cuda:0"), ("cuda", "native", "cuda:3")] and job.device == "cuda:0"


@pytest.mark.parametrize(("visible", "current", "wanted"), [(1, 0, ["cuda:0"]), (2, 1, ["cuda:1"]), (0, 0, [])])
def test_a_rank_that_sees_fewer_devices(
    monkeypatch: pytest.MonkeyPatch, visible: int, current: int, wanted: list[str]
) -> None:
    """As under Ray and SLURM, which give each rank its own device alone. Without any device nothing is loaded, and nothing raises."""
    job = Job(monkeypatch, "cuda")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    backend._load_kernels(DEFAULT)
    assert [device for kind, _, device in job.loaded if kind == "cuda"] == wanted


def test_no_cuda_kernels_do_not_stop_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, "cuda")
    job.fails = {("cuda", "native"), ("cuda", "cupy")}
    backend._load_kernels(DEFAULT)
    assert kernels.tried("cuda") == {"native": "RuntimeError: planted", "cupy": "RuntimeError: planted"}
    job.fails = {("cpu", "native"), ("cpu", "numba")}
    monkeypatch.setattr(kernels, "_loaded", {})
    with pytest.raises(kernels.RouteUnavailable, match="no kernels for cpu tensors here"):
        backend._load_kernels(DEFAULT)


def without_a_compiler(rank: int, size: int) -> list[str]:
    """Rank 1 has numba alone; what each of two lossy configs raises."""
    if rank:
        kernels.ROUTES["cpu"].pop("native")
    said = []
    for codec in ({"codec": "zfp", "rate": 8}, {"codec": "int", "bits": 8}):
        config = ZipcclConfig(enabled=True, lossy=True, roles={"dp": codec})
        try:
            backend._check_codecs(config)
            said.append("")
        except kernels.RouteUnavailable as error:
            said.append(str(error))
    return said


def test_one_rank_without_a_codec_refuses_the_role_everywhere() -> None:
    """ZFP has no kernels of numba; the ranks that have a compiler would wait for the rank without one."""
    answers = ranks.run(without_a_compiler, 2)
    assert answers[0] == answers[1] and not answers[0][1]
    assert answers[0][0].startswith(
        "ranks [1] lack a lossy codec of the roles; rank 1: no kernels for cpu tensors here. numba: "
    )


def test_one_rank_without_kernels_switches_nccl_off_everywhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks with kernels would wait for that rank."""
    job = Job(monkeypatch, "cuda")
    state = SimpleNamespace(size=3, rank=0, streams=lambda device: device == "cuda")
    monkeypatch.setattr(backend, "group_state", lambda group: state)
    monkeypatch.setattr(backend, "resolve_group", lambda group: group)
    others = {0: "", 1: "", 2: ""}
    monkeypatch.setattr(backend.topology, "tell", lambda group, text: {**others, 0: text})
    on = ZipcclConfig(enabled=True, nccl="on")
    assert backend._only_with_kernels(on) == on and not capsys.readouterr().out
    others[2] = "no compiler"
    assert backend._only_with_kernels(on) == replace(on, nccl="off")
    assert capsys.readouterr().out == "[ds_zipccl] nccl is off: ranks [2] have no kernels; rank 2: no compiler\n"
    job.fails = {("cuda", "native"), ("cuda", "cupy")}
    monkeypatch.setattr(kernels, "_loaded", {})
    assert backend._only_with_kernels(on).nccl == "off"
    assert "ranks [0, 2]" in capsys.readouterr().out
