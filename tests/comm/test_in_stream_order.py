"""Collectives in stream order by processes on CPUs: the schedules of NCCL groups over gloo (tests/support/shim.py)."""

from __future__ import annotations

from typing import Any

import moves
import pytest
import ranks as runner
import shim
import torch

from ds_zipccl.comm.device import sizes
from ds_zipccl.comm.device.reports import Reports
from ds_zipccl.comm.device.streams import Streams
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.ops import OPS

CODED: dict[str, Any] = {"nccl": "on", "nccl_min_bytes": 0}
#: Ways to call operations that have a schedule on a device.
CALLS = tuple(
    move
    for calls in moves.MOVES.values()
    for move in calls
    if OPS[
        next(name for name in sorted(moves.NAMES, key=len, reverse=True) if move.__name__.startswith(name))
    ].on_device
)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    shim.build()


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)])
def test_every_bit_arrives(ranks: int) -> None:
    runner.run(moves.moves, ranks, CALLS, None, CODED, backend=shim.NAME)


def wrong_words() -> None:
    """From now on the first element of every gathered tensor has a wrong bit."""
    decode = CudaBackend.decode_gather

    def wrong(self: CudaBackend, staging: torch.Tensor, table: Any, outs: Any, *more: Any, **named: Any) -> None:
        decode(self, staging, table, outs, *more, **named)
        outs[0].view(torch.uint8)[:1] ^= 1

    CudaBackend.decode_gather = wrong  # type: ignore[method-assign]


def test_a_wrong_bit_is_noticed() -> None:
    with pytest.raises(runner.RankFailure, match="all_gather"):
        runner.run(moves.moves, 2, CALLS[:1], wrong_words, CODED, backend=shim.NAME)


def test_memory_that_is_kept_is_written_in_any_mode() -> None:
    """Agreements are in inference mode and outside; a tensor of inference mode could be written only there."""
    streams = Streams(torch.device("cpu"))
    with torch.inference_mode():
        kept = [sizes._host(streams, 5000), Reports(streams.device).words, streams._new(64).memory]
    assert not any(one.is_inference() for one in kept)
