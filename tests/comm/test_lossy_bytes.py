"""Bytes of lossy calls beside those of lossless ones, and lossless calls beside lossy ones: their frames do not change."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import corpus
import lossy_calls
import pytest
import ranks as runner
import torch
import torch.distributed as dist
from lossy_calls import CODECS, api, normal
from sums import CODED

from ds_zipccl import comm
from ds_zipccl.codecs import project
from ds_zipccl.comm.transport.gloo import GlooTransport
from ds_zipccl.lossy import LossyCodec, Round, Zfp
from ds_zipccl.telemetry import counters

SIZE, WIDTH = 480_000, 96
#: No call sends more than this many times the lossless bytes.
MOST = 1.03


def dense(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return normal(rank, SIZE, dtype)


def half_empty(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """As the buffers of a layer of experts: 45 of 100 rows are empty."""
    rows = normal(rank, SIZE, dtype).view(-1, WIDTH)
    rows[torch.arange(len(rows)) % 20 >= 11] = 0
    return rows.view(-1)


def sparse(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """As the gradient of an embedding: 95 of 100 rows are zero."""
    rows = normal(rank, SIZE, dtype).view(-1, WIDTH)
    rows[torch.arange(len(rows)) % 20 > 0] = 0
    return rows.view(-1)


def sent(call: Callable[..., Any], everyone: Sequence[torch.Tensor], rank: int, codec: LossyCodec | None) -> int:
    """Bytes that a call sends from this rank."""
    counters.reset()
    call(api(codec), everyone, rank, codec or Round(), dist.ReduceOp.SUM, False)
    return sum(row["wire_bytes"] for row in counters.rows())


def bytes_sent(rank: int, ranks: int) -> list[tuple[str, float]]:
    calls = (
        lossy_calls.all_reduce,
        lossy_calls.reduce_scatter_tensor,
        lossy_calls.to_several_owners,
        lossy_calls.exchange,
    )
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        for fill in (dense, half_empty, sparse):
            everyone = [fill(peer, dtype) for peer in range(ranks)]
            for call in calls:
                lossless = sent(call, everyone, rank, None)
                for codec in CODECS:
                    if not isinstance(codec, Zfp):  # a fixed rate, for comparison only
                        share = sent(call, everyone, rank, codec) / lossless
                        found.append((f"{call.__name__} of {fill.__name__} {dtype} by {codec}", share))
    return found


@pytest.mark.full(reason="large messages")
def test_never_more_bytes_than_lossless() -> None:
    for found in runner.run(bytes_sent, 2):
        for name, share in found:
            assert share <= MOST, f"{name}: {share:.3f} of the lossless bytes"
        dense_bf16 = {name: share for name, share in found if "of dense torch.bfloat16 by round mantissa 3" in name}
        assert dense_bf16["exchange of dense torch.bfloat16 by round mantissa 3"] < 0.7


def rows_sent(rank: int, ranks: int, copies: int) -> list[float]:
    """An exchange of experts in which each row goes to a rank ``copies`` times: shares of the lossless bytes."""
    width, rows = 64, 1200
    everyone = []
    for peer in range(ranks):
        of_peer = normal(peer, ranks * rows * width, torch.bfloat16).view(ranks, rows, width)
        everyone.append(of_peer[:, torch.arange(rows) // copies].reshape(-1, width))

    def exchanged(codec: LossyCodec | None) -> int:
        counters.reset()
        output = torch.empty_like(everyone[rank])
        api(codec).all_to_all_single(output, everyone[rank], role="ep", kind="dispatch")
        parts = [whole.chunk(ranks)[rank].contiguous().view(-1) for whole in everyone]
        wanted = [part if peer == rank or codec is None else project(part, codec) for peer, part in enumerate(parts)]
        corpus.assert_same_bits(output.view(-1), torch.cat(wanted))
        return sum(row["wire_bytes"] for row in counters.rows())

    lossless = exchanged(None)
    return [exchanged(codec) / lossless for codec in CODECS if not isinstance(codec, Zfp)]


@pytest.mark.full(reason="large messages")
def test_repeated_rows_travel_once() -> None:
    """Rows that every value of a codec repeats are left out; without that, lossy frames of them would be larger than lossless ones."""
    for copies, most in ((1, 0.85), (8, MOST)):
        for shares in runner.run(rows_sent, 2, copies):
            assert max(shares) <= most, f"{copies} copies: {shares} of the lossless bytes"


def of_a_step(rank: int, ranks: int, codec: LossyCodec | None, plant: Callable[[], None] | None = None) -> list[str]:
    """Hashes of all frames that lossless calls send, in order, beside calls with ``codec`` of the same operation and role, or alone."""
    if plant is not None:
        plant()
    posted: list[str] = []
    post_send = GlooTransport.post_send
    lossless = False

    def noted(self: Any, buffer: torch.Tensor, *more: Any) -> Any:
        if lossless:
            posted.append(hashlib.sha256(buffer.numpy().tobytes()).hexdigest())
        return post_send(self, buffer, *more)

    GlooTransport.post_send = noted  # type: ignore[method-assign]
    for step in range(3):
        for size in (900, 40_009):
            mine = normal(rank, size, torch.bfloat16, step)
            # words that no codec makes smaller switch coding off for a while
            noise = torch.from_numpy(corpus.hashes(size, step).astype("int32")).view(torch.float32)
            for values in (mine, noise):
                lossless = False
                if codec is not None:
                    api(codec).all_reduce(values.clone(), role="zero_grad")
                lossless = True
                api(None).all_reduce(values.clone(), role="zero_grad")
                whole = values.new_empty(size * ranks)
                comm.all_gather_into_tensor(whole, values, config=CODED, role="zero_param")
                corpus.assert_same_bits(whole.chunk(ranks)[rank], values)
    return posted


def check_neighbours(plant: Callable[[], None] | None = None) -> None:
    with_codec, without = (runner.run(of_a_step, 2, codec, plant) for codec in (Round(1), None))
    assert with_codec[0] and with_codec == without, "frames of lossless calls differ"


def test_frames_of_lossless_calls_do_not_change() -> None:
    check_neighbours()
