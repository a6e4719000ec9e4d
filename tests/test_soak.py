"""The soak of tests/soak.py, for seconds instead of half an hour, and a mistake that the soak must find."""

from __future__ import annotations

from typing import Any

import pytest
import ranks as runner
import soak
import torch

from ds_zipccl.comm.buffer_pool import KEEP_BYTES
from ds_zipccl.comm.host import frames

#: `make test-all` has a minute of other operations after the tests.
SECONDS = 5.0


@pytest.mark.full(reason="ten seconds; test_a_wrong_bit_is_found runs it too")
def test_a_short_soak() -> None:
    """In so short a time memory still grows, up to the bytes that the pool of buffers keeps."""
    for found in runner.run(soak.soak, soak.RANKS, SECONDS, 1, timeout=SECONDS + 200):
        assert found["operations"] >= 2 * soak.BLOCK and found["growth"] < KEEP_BYTES >> 20


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
