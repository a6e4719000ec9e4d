"""The simulator stands in for torch.cuda, so that it needs a machine without GPUs."""

from __future__ import annotations

import pytest
import torch

from ds_zipccl import kernels
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.policy import wire
from sim import launcher


@pytest.fixture(autouse=True)
def no_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("the simulated GPU takes the place of torch.cuda; this machine has a GPU")


@pytest.fixture(scope="session")
def route() -> CudaBackend:
    """The package's CUDA kernels, emulated, for runs of the simulator."""
    kernels.route()  # the CPU's route is built, if at all, before a rank needs it
    return launcher.route()


@pytest.fixture
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are coded from 256 bytes on: the emulated kernels are slow."""
    monkeypatch.setattr(wire, "RAW_BELOW_BYTES", 256)
