"""Fixtures of tests that run the package on the simulated GPU."""

from __future__ import annotations

import pytest
from sim.conftest import no_gpu  # noqa: F401

from ds_zipccl import kernels
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.policy import wire
from on_sim import launcher


@pytest.fixture(scope="session")
def route() -> CudaBackend:
    """The package's CUDA kernels, emulated, for runs of the simulator."""
    kernels.route()  # the CPU's route is built, if at all, before a rank needs it
    return launcher.route()


@pytest.fixture
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are coded from 256 bytes on: the emulated kernels are slow."""
    monkeypatch.setattr(wire, "RAW_BELOW_BYTES", 256)
