"""A mistake that the soak of tests/soak.py must find; ``make test-all`` runs a minute of the soak after the tests."""

from __future__ import annotations

from typing import Any

import pytest
import ranks as runner
import soak
import torch

from ds_zipccl.comm.host import frames


def flip_a_bit() -> None:
    """Give the last element of every large decoded tensor a wrong bit, from now on."""
    decompress = frames.decompress

    def wrong(frame: torch.Tensor, out: torch.Tensor, **settings: Any) -> torch.Tensor:
        decompress(frame, out, **settings)
        if out.numel() > 100_000:
            out.view(torch.uint8)[-1] ^= 1
        return out

    frames.decompress = wrong


def test_a_wrong_bit_is_found() -> None:
    with pytest.raises(runner.RankFailure, match="elements are wrong after operation"):
        runner.run(soak.soak, soak.RANKS, 30.0, 1, flip_a_bit)
