"""Gathers as differences whose frames stay on the device: one agreement for the sizes of frames and for the proof.

The agreement carries the proof of :mod:`ds_zipccl.comm.bases.proof` next to the sizes of both kinds of frames: the host waits once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_zipccl import tensors
from ds_zipccl.comm.bases.proof import NOTHING_THERE, PROOF_WORDS, SOMETHING_ELSE, holds, proof
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.gather import Piece, Shard, encoded_sizes, gather_agreed, part_of, pieces_of, words_of
from ds_zipccl.comm.device.sizes import agree
from ds_zipccl.comm.device.streams import Stage


def gather(ctx: DeviceContext, shard: Shard, last: torch.Tensor | None) -> str:
    """Gather a shard into an output that may hold the result of the last gather. One wait of the host; the rest of the work is on the
    streams then.

    Args:
        last: this rank's shard of the last gather, flat; None: there was no gather that the output can hold.

    Returns:
        The reason why the shards go in full; "" where they go as differences. It is the same on all ranks.
    """
    ctx.streams.order(Stage.DECODE, Stage.ENCODE)  # an earlier gather has written `last` on the decoding stream
    pieces = pieces_of([shard.sizes], shard.own.element_size(), ctx.size, ctx.budget)
    lasts = None if last is None else [part_of(last, piece) for piece in pieces]
    full, delta, unproven, hashes = _agree(ctx, shard, pieces, last, lasts)
    reason = NOTHING_THERE if unproven else "" if holds(hashes) else SOMETHING_ELSE
    if reason:
        gather_agreed(ctx, [shard], pieces, full)
    else:
        gather_agreed(ctx, [shard], pieces, delta, lasts)
    return reason


def _agree(
    ctx: DeviceContext,
    shard: Shard,
    pieces: Sequence[Piece],
    last: torch.Tensor | None,
    lasts: Sequence[torch.Tensor] | None,
) -> tuple[list[int], list[int], bool, list[int]]:
    """Return the largest frame of each piece without a base and as a difference, whether a rank has no base, and the agreed proof."""
    words, count = words_of([shard], pieces), len(pieces)
    full = encoded_sizes(ctx, words)
    if last is None:
        with ctx.streams.on(Stage.ENCODE):
            rest = [tensors.filled(count + 1 + PROOF_WORDS * ctx.size, 1, torch.int64, ctx.device)]
    else:
        regions = list(shard.whole.split(shard.own.numel()))
        regions[ctx.rank] = last
        delta = encoded_sizes(ctx, words, lasts)
        with ctx.streams.on(Stage.ENCODE):
            rest = [delta, tensors.filled(1, 0, torch.int64, ctx.device), proof(ctx, regions)]
    agreed = agree(ctx, [full, *rest])
    return agreed[:count], agreed[count : 2 * count], bool(agreed[2 * count]), agreed[2 * count + 1 :]
