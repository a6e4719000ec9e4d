"""Bases on a device: the words of an earlier gather, and the proof that all ranks hold them.

The proof of a region is the largest hash of any rank and the largest inverted hash, which shows the least hash: they are equal if all
ranks hold equal words. An agreement carries them next to the sizes of frames. A proof reads the region once.

The :class:`.BaseSlot` of a parameter lies on the device, a copy for each rank or a part of one (:mod:`.node`), or in host memory, a copy
for all ranks of a node. Host memory is read and written by copies in stream order. The ranks of a node write different shards. Their
writes follow the gather's own collective, before which every rank has read the old words. A collective of one word follows the writes, and
every later read follows that.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from ds_zipccl import tensors
from ds_zipccl.codecs.known import key_words
from ds_zipccl.comm.bases.shared import BaseSlot, copy_others
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.sizes import to_device
from ds_zipccl.comm.device.streams import Stage
from ds_zipccl.comm.group_state import hash_key
from ds_zipccl.comm.topology import grid

#: Words of a proof of one region: both halves of the hash, each followed by the inverted half.
PROOF_WORDS = 4
#: Words of the state of a base, and that of one that is not filled.
STATE_WORDS, _EMPTY = 2, -1
#: Bits of a state below those of the version.
_KIND_BITS = 2
#: Less than every word of a proof.
_LEAST = -(1 << 63)


def proof(ctx: DeviceContext, regions: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the words that prove, after :func:`.sizes.agree`, that all ranks hold equal regions: int64 on the device.

    Reads all regions, on the encoding stream: as many bytes as they have.
    """
    with ctx.streams.on(Stage.ENCODE):
        hashes = tensors.empty(2 * len(regions), torch.int64, ctx.device)
        ctx.route.hash_regions(regions, hashes, key_words(hash_key()))
        return torch.stack([hashes, ~hashes], dim=1).view(-1)


def holds(words: Sequence[int]) -> bool:
    """Return whether agreed words of :func:`proof` prove that all ranks hold equal regions."""
    return all(most == ~inverted for most, inverted in zip(words[::2], words[1::2], strict=True))


def states_of(bases: Sequence[BaseSlot], ctx: DeviceContext) -> torch.Tensor:
    """Return the words, :data:`STATE_WORDS` of each base, that show after :func:`.sizes.agree` whether all ranks hold bases of one kind and
    version. Once before an agreement."""
    found = []
    for base in bases:
        state = (base.version << _KIND_BITS | (base.levels is not None) << 1 | base.shared) if base.filled else _EMPTY
        found += [state, ~state]
    with ctx.streams.on(Stage.ENCODE):
        return to_device(ctx.streams, found)


def proves(state: Sequence[int], hashes: Sequence[int]) -> bool:
    """Return whether agreed words of :func:`states_of` and :func:`proof_of` prove that all ranks hold a base."""
    return state[0] != _EMPTY and holds(state) and holds(hashes)


def version_of(state: Sequence[int]) -> int:
    """Return the largest version of any rank's base; -1 if no rank has filled it."""
    return state[0] >> _KIND_BITS


def proof_words(base: BaseSlot) -> int:
    """Return the number of words of :func:`proof_of`: ranks of a node that hold different shards have a proof each."""
    return PROOF_WORDS * (1 if base.levels is None else len(base.levels.node_ranks))


def proof_of(base: BaseSlot, number: int, ctx: DeviceContext) -> torch.Tensor:
    """Return the proof of a whole base; of several ranks that share the memory one reads it. ``number`` tells bases apart."""
    with ctx.streams.on(Stage.ENCODE):
        words = tensors.filled(proof_words(base), _LEAST, torch.int64, ctx.device)
        place = 0 if base.levels is None else base.levels.local_rank
        if base.filled and base.node_ranks[number % len(base.node_ranks)] == ctx.rank:
            own = proof(ctx, [on_device(base.memory.view(-1), ctx)])
            words[place * PROOF_WORDS : (place + 1) * PROOF_WORDS].copy_(own)
        return words


def stage_of(base: BaseSlot, ctx: DeviceContext) -> Stage:
    """Return the stream that reads a base for an output.

    Shared memory is read on the encoding stream: the gather's own collective follows the read, and the writes of all ranks follow the
    collective. So does the exchange inside a node.
    """
    return Stage.ENCODE if is_away(base, ctx) or base.shared or base.levels is not None else Stage.DECODE


def lay_out(bases: Sequence[tuple[BaseSlot, torch.Tensor]], ctx: DeviceContext) -> list[torch.Tensor]:
    """Copy the shards of all other ranks from each base to the rows of an output. The decoding stream follows.

    Returns:
        This rank's shards of the last gather, on the device, ready on :func:`stage_of`; without a copy on every stream.
    """
    own = []
    for stage, alike in itertools.groupby(bases, lambda one: stage_of(one[0], ctx)):
        with ctx.streams.on(stage):
            for base, rows in alike:
                if is_away(base, ctx):  # a copy of several rows at once would have a temporary
                    for rank, (row, words) in enumerate(zip(rows, base.memory, strict=True)):
                        if rank != ctx.rank:
                            row.copy_(words, non_blocking=True)
                else:
                    copy_others(base.memory, rows, ctx.rank)
                own.append(on_device(base.own(ctx.rank), ctx))
    if bases:
        ctx.streams.order(Stage.ENCODE, Stage.DECODE)
    return own


def keep(bases: Sequence[tuple[BaseSlot, torch.Tensor]], ctx: DeviceContext) -> None:
    """Copy the rows of an output, the shards of all ranks, to each base: on the decoding stream, after the gather has given them."""
    if not bases:
        return
    with ctx.streams.on(Stage.DECODE):
        for base, rows in bases:
            if base.levels is not None:
                base.memory.copy_(grid(rows, base.levels.nodes)[:, base.levels.local_rank])
                continue
            count, place = len(base.node_ranks), list(base.node_ranks).index(ctx.rank)
            part = slice(place * ctx.size // count, (place + 1) * ctx.size // count)
            words = rows[part].contiguous() if is_away(base, ctx) else rows[part]
            base.memory[part].copy_(words, non_blocking=True)
    if any(base.shared for base, _ in bases):
        ctx.streams.order(Stage.DECODE, Stage.WIRE)
        with ctx.streams.on(Stage.WIRE):
            ctx.transport.max(tensors.filled(1, 0, torch.int64, ctx.device))
        for stage in (Stage.ENCODE, Stage.DECODE):
            ctx.streams.order(Stage.WIRE, stage)
    elif any(stage_of(base, ctx) is Stage.ENCODE for base, _ in bases):
        ctx.streams.order(Stage.DECODE, Stage.ENCODE)


def watch(
    stage: Stage,
    lasts: Sequence[torch.Tensor],
    shards: Sequence[torch.Tensor],
    names: Sequence[str],
    ctx: DeviceContext,
) -> None:
    """Report the parameters whose shards are not the words of their last gather any more. Reads both on a stream; the next agreement
    raises."""
    with ctx.streams.on(stage):
        hashes = tensors.empty(4 * len(lasts), torch.int64, ctx.device)
        ctx.route.hash_regions([*lasts, *shards], hashes, key_words(hash_key()))
        ctx.reports.note_changes(ctx.where(), names, *hashes.view(2, -1))
    ctx.streams.order(stage, Stage.DECODE)


def is_away(base: BaseSlot, ctx: DeviceContext) -> bool:
    """Return whether a base is in host memory, and the gathers on a device."""
    return base.memory.device.type != ctx.device.type


def on_device(words: torch.Tensor, ctx: DeviceContext) -> torch.Tensor:
    """Return words of a base on the device. A copy is made on the current stream."""
    if words.device.type == ctx.device.type:
        return words
    return tensors.empty(words.numel(), words.dtype, ctx.device).copy_(words, non_blocking=True)
