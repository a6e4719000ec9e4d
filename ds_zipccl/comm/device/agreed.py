"""Sizes of frames that ranks agree on ahead: gathers whose parameters have agreed sizes need no wait of the host.

Frames are frames of parameters, not of the messages in which parameters travel: any set of parameters can be gathered in one message. Sizes
hold as long as no rank changes its shard. This time is an *epoch* of the parameter. Whatever changes shards ends epochs by
:meth:`Agreed.forget`, on all ranks at the same point of the program: a rank with sizes and a rank without would call different collectives.

A shard that is written to within an epoch is no wrong word: the encoder codes the words that are there. A frame that does not fit its slot
has a flag in its header. Decoders on all other ranks refuse such a frame, write NaN, and report. The next verdict of any operation stops
all ranks, and names the parameter; :func:`check` is such a verdict, for the moment before words are final.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakSet

import torch

from ds_zipccl.comm.device import gather
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.gather import Piece, Plan, Shard
from ds_zipccl.comm.device.lanes import Lane
from ds_zipccl.comm.device.verdict import agree
from ds_zipccl.comm.group_state import GroupState
from ds_zipccl.frame import HEADER_BYTES
from ds_zipccl.kernels.jobs import MAX_JOBS
from ds_zipccl.policy import wire

#: Layouts of gathers that are kept (admission: programs repeat their gathers; epochs end, and so do the layouts).
_PLANS = 1024


class _Kind(NamedTuple):
    """Everything but its words on which the sizes of a parameter's frames depend. Equal on all ranks."""

    group: GroupState
    dtype: torch.dtype
    codec: str
    block: int
    budget: int

    def pieces(self, numel: int) -> list[Piece]:
        """Return the pieces of a parameter."""
        return gather.pieces_of([[numel]], self.dtype.itemsize, self.group.size, self.budget)

    def codes(self, piece: Piece) -> bool:
        """Return whether the size of a piece's frame depends on its words. Smaller pieces go raw."""
        return piece.numel * self.dtype.itemsize >= wire.RAW_BELOW_BYTES


class Agreed:
    """The sizes of the frames of one parameter, on which the ranks of a group have agreed.

    Every rank of the group has such an object for its own shard. Calls are equal on all ranks, in program order.

    Args:
        name: of the parameter, for messages.
        numel: elements of a rank's shard, equal on all ranks.
        dtype: in which shards are gathered; None: that of the shards.
    """

    __slots__ = ("_kind", "dtype", "name", "numel", "sizes", "version")

    def __init__(self, name: str, numel: int, dtype: torch.dtype | None = None) -> None:
        self.name, self.numel, self.dtype = name, numel, dtype
        #: Bytes of the largest frame of each piece, while the epoch lasts.
        self.sizes: Sequence[int] = ()
        #: A number of this process that no other agreement has; 0 before the first.
        self.version = 0
        self._kind: _Kind | None = None

    def forget(self) -> None:
        """End the epoch. All ranks of the group call, before one of them uses the changed shard."""
        self._kind = None

    def holds(self, kind: _Kind) -> bool:
        """Return whether there are agreed sizes for gathers of a kind."""
        return self._kind == kind

    def _agreed(self, kind: _Kind, sizes: Sequence[int]) -> None:
        self._kind, self.sizes, self.version = kind, sizes, next(_versions)


_versions = itertools.count(1)
#: Groups that have gathered by agreed sizes since their last verdict here.
_unchecked: WeakSet[GroupState] = WeakSet()
#: Versions of the parameters of a gather -> its layout. A version has one kind and one list of sizes.
_plans: dict[tuple[int, ...], Plan] = {}


def agree_all(
    ctx: DeviceContext, found: Sequence[tuple[Agreed, torch.Tensor]], dtype: torch.dtype | None = None
) -> int:
    """Agree on the sizes of parameters without agreed sizes; one wait of the host, or none where nothing is to be agreed on.

    The encoder reads the shards, and writes headers alone. The host has waited for this when the call returns.

    Args:
        found: parameters with the own shards, flat, on the device, ready on the current stream; in an order that is equal on all ranks.
        dtype: of the gather; None: that of each parameter.

    Returns:
        The number of parameters without agreed sizes before the call.
    """
    missing = [(one, words, _kind(ctx, dtype or one.dtype or words.dtype)) for one, words in found]
    missing = [(one, words, kind) for one, words, kind in missing if not one.holds(kind)]
    if not missing:
        return 0
    coded: dict[torch.dtype, list[torch.Tensor]] = {}
    for one, words, kind in missing:
        for piece in filter(kind.codes, kind.pieces(one.numel)):
            coded.setdefault(kind.dtype, []).append(words[piece.start : piece.start + piece.numel])
    answer = iter(_verdict(ctx, [_sizes(ctx, some, kind) for kind, some in coded.items()]) if coded else ())
    sizes = {kind: iter([next(answer) for _ in some]) for kind, some in coded.items()}
    for one, _, kind in missing:
        one._agreed(
            kind,
            [
                next(sizes[kind.dtype]) if kind.codes(piece) else piece.numel * kind.dtype.itemsize + HEADER_BYTES
                for piece in kind.pieces(one.numel)
            ],
        )
    return len(missing)


def _sizes(ctx: DeviceContext, words: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes of each frame as :func:`.gather.encoded_sizes` does, of words in a dtype.

    Words of another dtype are converted as many at a time as the memory for frames allows. That memory belongs to the encoding lane.
    """
    if all(part.dtype is dtype for part in words):
        return gather.encoded_sizes(ctx, words)
    found = []
    with ctx.lanes.on(Lane.ENCODE):
        first = 0
        while first < len(words):
            last, nbytes = first, 0
            while last < len(words) and last - first < MAX_JOBS and (last == first or nbytes < ctx.budget // 2):
                nbytes += words[last].numel() * dtype.itemsize
                last += 1
            found.append(gather.encoded_sizes(ctx, [part.to(dtype) for part in words[first:last]]))
            first = last
        return torch.cat(found)


def gather_parameters(ctx: DeviceContext, own: torch.Tensor, whole: torch.Tensor, parameters: Sequence[Agreed]) -> None:
    """Gather shards of parameters, which lie end to end in ``own``, with agreed sizes: no wait of the host.

    Where a parameter has none, there is one wait; then all parameters of the gather have agreed sizes. See
    :func:`.gather.gather` for ``own`` and ``whole``.
    """
    shard = Shard(own, whole, [one.numel for one in parameters], [one.name for one in parameters])
    if ctx.codec == "raw" or not own.numel():
        gather.gather(ctx, [shard])
        return
    kind = _kind(ctx, own.dtype)
    if not all(one.holds(kind) for one in parameters):
        agree_all(ctx, list(zip(parameters, own.split(list(shard.sizes)), strict=True)), own.dtype)
    key = tuple(one.version for one in parameters)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _PLANS:
            _plans.clear()
        pieces = gather.pieces_of([shard.sizes], own.element_size(), ctx.size, ctx.budget)
        sizes = [size for one in parameters for size in one.sizes]
        plan = _plans[key] = gather.plan_of(ctx, [shard], pieces, sizes)
    _unchecked.add(ctx.state)
    gather.gather_planned(ctx, [shard], plan)


def is_checked(group: GroupState) -> bool:
    """Return whether no gather by agreed sizes has followed the group's last verdict; equal on all ranks."""
    return group not in _unchecked


def check(ctx: DeviceContext) -> None:
    """Raise if a rank has refused a frame so far. A collective of the group; one wait of the host.

    Raises:
        CommError: a frame was refused, on whatever group of the device. All ranks raise.
    """
    _verdict(ctx, [])


def _verdict(ctx: DeviceContext, words: Sequence[torch.Tensor]) -> list[int]:
    _unchecked.discard(ctx.state)
    return agree(ctx, words)


def _kind(ctx: DeviceContext, dtype: torch.dtype) -> _Kind:
    return _Kind(ctx.state, dtype, ctx.codec, ctx.config.block, ctx.budget)
