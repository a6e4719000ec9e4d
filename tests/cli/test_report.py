"""The status of ``report`` and its last line, by what works here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from commands import outcome

from ds_zipccl import kernels
from ds_zipccl.__main__ import main
from ds_zipccl.kernels import build
from ds_zipccl.kernels.cuda import cupy_kernels

WORKS, FAILS = object, None  # loaders: object() stands for a route, None cannot be called
Loaders = tuple[object, ...]
GONE = build.BuildError("no CuPy (gone); pip install cupy-cuda13x")


def load(
    monkeypatch: pytest.MonkeyPatch, cpu: tuple[object, ...], cuda: tuple[object, ...], device: bool = False
) -> None:
    """Let the routes for CPU and CUDA tensors have these loaders, and let there be a GPU or not."""
    table = {"cpu": dict(zip(("native", "numba"), cpu)), "cuda": dict(zip(("native", "cupy"), cuda))}
    monkeypatch.setattr(kernels, "ROUTES", table)
    monkeypatch.setattr(kernels, "_loaded", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.parametrize(
    ("cpu", "cuda", "device", "wrong"),
    [
        ((WORKS, FAILS), (FAILS, FAILS), False, ""),
        ((FAILS, WORKS), (FAILS, WORKS), True, ""),
        ((FAILS, FAILS), (FAILS, FAILS), False, "CPU"),
        ((FAILS, FAILS), (WORKS, WORKS), True, "CPU"),
        ((WORKS, FAILS), (FAILS, FAILS), True, "CUDA"),
        ((FAILS, FAILS), (FAILS, FAILS), True, "CPU and CUDA"),
    ],
)
def test_status(
    cpu: Loaders,
    cuda: Loaders,
    device: bool,
    wrong: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    load(monkeypatch, cpu, cuda, device)
    assert main(["report"]) == (1 if wrong else 0)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"no route for {wrong} tensors works here") == bool(wrong)


@pytest.mark.parametrize(
    ("cuda", "required", "status"),
    [
        ((WORKS, WORKS), ["cuda"], 0),
        ((WORKS, FAILS), ["cuda"], 1),
        ((FAILS, WORKS), ["cuda"], 1),
        ((FAILS, FAILS), ["cuda"], 1),
        ((WORKS, FAILS), [], 0),
        ((WORKS, FAILS), ["cpu"], 0),
        ((), ["cuda"], 1),
        ((FAILS, FAILS), ["cpu", "cuda", "cuda"], 1),
    ],
)
def test_required_routes(
    cuda: Loaders, required: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load(monkeypatch, (WORKS,), cuda)
    assert main(["report", *(word for device in required for word in ("--require", device))]) == status
    wrong = "not every route for CUDA tensors works here, as --require wants"
    assert (wrong if status else "") in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("route", "compiles", "status", "wanted"),
    [
        ("native", None, 0, "cpu native   usable"),
        ("numba", None, 1, "no route numba works here; the reasons are under routes"),
        ("cupy", None, 0, "cuda cupy  compiles for sm_80, 90, 100, 120; no device here"),
        ("cupy", GONE, 1, f"BuildError: {GONE}"),
        ("cupy", GONE, 1, "no route cupy works here; the reasons are under routes"),
    ],
)
def test_one_route(
    route: str, compiles: Exception | None, status: int, wanted: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """CuPy compiles where no device is, once for each architecture."""
    capabilities: list[tuple[int, int]] = []

    def cubins(capability: tuple[int, int]) -> list[bytes]:
        capabilities.append(capability)
        if compiles:
            raise compiles
        return []

    monkeypatch.setattr(cupy_kernels, "cubins", cubins)
    monkeypatch.setattr(cupy_kernels, "architecture", lambda capability: "{}{}".format(*capability))
    load(monkeypatch, (WORKS, FAILS), (FAILS, FAILS))
    assert main(["report", "--route", route]) == status
    assert wanted in capsys.readouterr().out
    assert len(capabilities) == (0 if route != "cupy" else 1 if compiles else 4)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ('{"nccl": "on"}', "on, in DS_ZIPCCL: NCCL groups are coded"),
        ("1", "off, in DS_ZIPCCL: NCCL groups pass through"),
        ("", "off, the default; DS_ZIPCCL is unset, and the config file decides: NCCL groups pass through"),
        ('{"nccl": "yes"}', "ConfigError: "),
    ],
)
def test_nccl(
    section: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("DS_ZIPCCL", section)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    load(monkeypatch, (WORKS,), ())
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    found = outcome(tmp_path, "report")["nccl"]
    assert found["version"] == "2.29.7" and found['key "nccl"'].startswith(said)
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"].startswith("1 ")
    assert found["TORCH_NCCL_BLOCKING_WAIT"].startswith("(unset)")
    assert "NCCL_LAUNCH_ORDER_IMPLICIT" in capsys.readouterr().out
