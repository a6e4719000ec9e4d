"""The simulator stands in for torch.cuda, so that it needs a machine without GPUs."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def no_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("the simulated GPU takes the place of torch.cuda; this machine has a GPU")
