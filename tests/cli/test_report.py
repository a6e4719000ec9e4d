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


NO_ROUTE, NOT_EVERY = (
    "no route for {} tensors works here",
    "not every route for CUDA tensors works here, as --require wants",
)


@pytest.mark.parametrize(
    ("cpu", "cuda", "gpu", "required", "last"),
    [
        ((WORKS, FAILS), (FAILS, FAILS), False, "", ""),
        ((FAILS, WORKS), (FAILS, WORKS), True, "", ""),
        ((FAILS, FAILS), (FAILS, FAILS), False, "", NO_ROUTE.format("CPU")),
        ((FAILS, FAILS), (WORKS, WORKS), True, "", NO_ROUTE.format("CPU")),
        ((WORKS, FAILS), (FAILS, FAILS), True, "", NO_ROUTE.format("CUDA")),
        ((FAILS, FAILS), (FAILS, FAILS), True, "", NO_ROUTE.format("CPU and CUDA")),
        ((WORKS,), (WORKS, WORKS), False, "cuda", ""),
        ((WORKS,), (WORKS, FAILS), False, "cuda", NOT_EVERY),
        ((WORKS,), (FAILS, WORKS), False, "cuda", NOT_EVERY),
        ((WORKS,), (FAILS, FAILS), False, "cuda", NOT_EVERY),
        ((WORKS,), (WORKS, FAILS), False, "", ""),
        ((WORKS,), (WORKS, FAILS), False, "cpu", ""),
        ((WORKS,), (), False, "cuda", NOT_EVERY),
        ((WORKS,), (FAILS, FAILS), False, "cpu cuda cuda", NOT_EVERY),
    ],
)
def test_status(
    cpu: Loaders, cuda: Loaders, gpu: bool, required: str, last: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    load(monkeypatch, cpu, cuda, gpu)
    words = [word for device in required.split() for word in ("--require", device)]
    assert main(["report", *words]) == (1 if last else 0)
    said = capsys.readouterr().out.splitlines()[-1]
    assert last in said if last else not said.startswith(("no route", "not every"))


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
