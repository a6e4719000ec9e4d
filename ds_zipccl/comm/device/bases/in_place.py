"""Gathers into an output that may hold the result of the last gather: one agreement for the sizes of frames and for the proof.

The agreement carries the proof of :mod:`.proof` next to the sizes of both kinds of frames: the host waits once.
"""

from __future__ import annotations

import torch

from ds_zipccl import tensors
from ds_zipccl.comm.bases.in_place import InPlaceBase
from ds_zipccl.comm.bases.state import NOTHING_THERE, SOMETHING_ELSE
from ds_zipccl.comm.device.bases.proof import PROOF_WORDS, holds, proof
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.gather import Shard, encoded_sizes, gather_agreed, part_of, pieces_of, words_of
from ds_zipccl.comm.device.sizes import agree
from ds_zipccl.comm.device.streams import Stage
from ds_zipccl.telemetry import counters


def gather(ctx: DeviceContext, shard: Shard, base: InPlaceBase) -> None:
    """Gather a shard as a difference if all ranks hold the result of the last gather, otherwise in full. One wait of the host; the rest of
    the work is on the streams then. The copy of the own shard is memory of the device, written on the decoding stream; after an agreement
    that raised there is no copy."""
    places = list(shard.whole.split(shard.own.numel()))
    last = base.begin(ctx, places)
    ctx.streams.order(Stage.DECODE, Stage.ENCODE)  # an earlier gather has written `last` on the decoding stream
    pieces = pieces_of([shard.sizes], shard.own.element_size(), ctx.size, ctx.budget)
    lasts = None if last is None else [part_of(last, piece) for piece in pieces]
    words, count = words_of([shard], pieces), len(pieces)
    full = encoded_sizes(ctx, words)
    if last is None:
        with ctx.streams.on(Stage.ENCODE):
            rest = [tensors.filled(count + 1 + PROOF_WORDS * ctx.size, 1, torch.int64, ctx.device)]
    else:
        regions = [last if rank == ctx.rank else place for rank, place in enumerate(places)]
        delta = encoded_sizes(ctx, words, lasts)
        with ctx.streams.on(Stage.ENCODE):
            rest = [delta, tensors.filled(1, 0, torch.int64, ctx.device), proof(ctx, regions)]
    agreed = agree(ctx, [full, *rest])
    unproven, hashes = bool(agreed[2 * count]), agreed[2 * count + 1 :]  # some rank has no base
    reason = NOTHING_THERE if unproven else "" if holds(hashes) else SOMETHING_ELSE
    sizes = agreed[:count] if reason else agreed[count : 2 * count]
    gather_agreed(ctx, [shard], pieces, sizes, None if reason else lasts)
    with ctx.streams.on(Stage.DECODE):
        base.end(ctx, places, last)
    counters.record_difference(ctx.role, ctx.op, reason)
