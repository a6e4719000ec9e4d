"""The kernels of csrc/cuda as a fixture: emulated on the CPU and, on a machine with a GPU, by both launchers; and folders of builds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import emulation
import pytest
import torch
import variants

from ds_zipccl import kernels
from ds_zipccl.kernels import build
from ds_zipccl.kernels.cpp import slots
from ds_zipccl.kernels.cuda import backend
from ds_zipccl.kernels.cuda import launches as cuda_launches
from ds_zipccl.kernels.cuda.backend import CudaBackend


@pytest.fixture(params=["emulated", "slots", "cuda-native", "cuda-cupy"])
def kernel(request: pytest.FixtureRequest) -> Iterator[tuple[CudaBackend, torch.device]]:
    if request.param == "slots":
        if request.module.__name__ in ("test_cuda_lossy", "test_cuda_rows", "test_self_test"):
            pytest.skip("these calls are those of the C++ backend")
        yield slots.load(), torch.device("cpu")
        return
    if reason := variants.Variant(request.param).why_not():
        pytest.skip(f"{request.param} is not usable here: {reason}")
    found = kernels.route(request.param)
    yield (found, torch.device("cpu")) if isinstance(found, CudaBackend) else (found.route, torch.device("cuda", 0))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[backend.Launch]]:
    """Every launch of the test, as the observer was told of it."""
    seen: list[backend.Launch] = []
    monkeypatch.setattr(cuda_launches, "observer", seen.append)
    yield seen


@pytest.fixture
def ordered() -> Iterator[emulation.EmulatedLauncher]:
    """The emulation, in which a test sets the order of threads."""
    launcher = emulation.launcher()
    yield launcher
    launcher.seed(0)
    launcher.residents(3)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is built goes to a folder of the test's own."""
    monkeypatch.setenv("DS_ZIPCCL_CACHE", str(tmp_path / "cache"))
    build._placed.cache_clear()
    yield
    build._placed.cache_clear()
