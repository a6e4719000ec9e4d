"""Sizes of frames that ranks agree on ahead: gathers whose parameters have agreed sizes need no wait of the host.

Frames are frames of parameters, not of the messages in which parameters travel: any set of parameters can be gathered in one message. Sizes
hold as long as no rank changes its shard. This time is a *version* of the parameter. Whatever changes shards ends versions by
:meth:`Agreed.forget`, on all ranks at the same point of the program: a rank with sizes and a rank without would call different collectives.

A shard that is written to within a version is no wrong word: the encoder codes the words that are there. A frame that does not fit its slot
has a flag in its header. Decoders on all other ranks refuse such a frame, write NaN, and report. The next agreement of any operation stops
all ranks, and names the parameter; :func:`check_frames` makes such an agreement, for the moment before words are final.

A parameter may have a base, see :mod:`.proof`. The agreement then has the sizes of differences, the kind and the version of the base and
the proof too: what a rank holds decides nothing unless all ranks hold it. The first gather of a version sends differences, or full frames
where the proof fails, and the base keeps the result. Later gathers of the version send nothing between nodes: they copy the base. Each rank
compares its own shard with the base, and reports a change; copies inside a node (:mod:`.node`) are compared from time to time.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.comm.bases.shared import BaseSlot
from ds_zipccl.comm.bases.state import AGREEMENT, NOTHING_THERE, SOMETHING_ELSE, GatheredParameter, Source
from ds_zipccl.comm.device import gather
from ds_zipccl.comm.device.bases import node, proof
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.gather import Piece, Plan, Shard
from ds_zipccl.comm.device.sizes import agree
from ds_zipccl.comm.device.streams import Stage
from ds_zipccl.comm.group_state import GroupState, group_state, resolve_group
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.frame import HEADER_BYTES
from ds_zipccl.policy import wire
from ds_zipccl.policy.base_copies import STRAIGHT_NODES
from ds_zipccl.telemetry import counters

#: Layouts of gathers that are kept (admission: programs repeat their gathers; versions end, and so do the layouts).
_PLANS = 1024
#: Gathers that copy bases between two agreements (seed: more than a training step has; a program without steps looks as often as this).
COPIES_UNCHECKED = 4096
#: Optimizer steps after which copies inside a node are compared again (default, not tuned: a thousandth of the gain).
LOOK_CHECKS = 1000


#: A frame whose size is asked for: the own shard of its parameter, the base of a difference, and its piece of the shard.
_Asked = tuple[torch.Tensor, BaseSlot | None, Piece]


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

    def codes(self, piece: Piece, source: Source) -> bool:
        """Return whether the size of a piece's frame depends on its words. Smaller pieces go raw, and those of dtypes that are coded as
        differences alone go raw without a base."""
        large = piece.numel * self.dtype.itemsize >= wire.RAW_BELOW_BYTES
        return large and (source is Source.DELTA or self.codec != "raw")


class Agreed(GatheredParameter):
    """A parameter with the sizes of its frames, on which the ranks of a group have agreed."""

    def __init__(self, name: str, numel: int, dtype: torch.dtype | None = None) -> None:
        super().__init__(name, numel, dtype)
        #: Bytes of the largest frame of each piece, while the version lasts; of differences only where all ranks hold the base.
        self.sizes: dict[Source, Sequence[int]] = {}
        #: A number of this process that no other agreement has; 0 before the first.
        self.version = 0
        self._kind: _Kind | None = None
        self._held = 0  # the largest version of any rank's base, when the version began

    def forget(self) -> None:
        """See :meth:`.GatheredParameter.forget`."""
        super().forget()
        self._kind = None

    def _agreed(self, kind: _Kind, sizes: Sequence[int], deltas: Sequence[int] | None = None, held: int = 0) -> None:
        """Begin a version. ``deltas`` None: the base is not filled, or the proof has failed. ``held``: the largest version of any base."""
        self._held = held
        self._kind, self.sizes, self.version = kind, {Source.FULL: sizes, Source.DELTA: deltas or ()}, next(_versions)
        self.source = Source.FULL if deltas is None else Source.DELTA

    def keep(self, ctx: DeviceContext, base: BaseSlot) -> None:
        """Note that the base holds the words of this version after a gather of :attr:`source`."""
        reason = SOMETHING_ELSE if base.filled else NOTHING_THERE
        counters.record_difference(ctx.role, ctx.op, reason if self.source is Source.FULL else "")
        if self.source is not Source.COPY:
            base.version = self._held + 1
        base.filled, self.source = True, Source.COPY


class _Unchecked:
    """``copies``: gathers of a group that have copied bases since its last agreement here; None if no gather by agreed sizes has come
    since. ``checks``: calls of :func:`check_frames`, one for each optimizer step. ``looked``: size classes of the copies inside a node that
    were compared since the last :data:`LOOK_CHECKS` of them."""

    def __init__(self) -> None:
        self.copies: int | None = None
        self.checks, self.looked = 0, set[int]()


_versions = itertools.count(1)
#: Versions and sources of the parameters of a gather -> its layouts. A version has one kind and one list of sizes for each source.
_plans: dict[tuple[tuple[int, Source], ...], Sequence[tuple[Source, Plan]]] = {}


def agree_all(
    ctx: DeviceContext, found: Sequence[tuple[Agreed, torch.Tensor]], dtype: torch.dtype | None = None
) -> int:
    """Agree on the sizes of parameters without agreed sizes; one wait of the host, or none where nothing is to be agreed on.

    The encoder reads the shards, and writes headers alone. Bases are read too, for the proof. The host has waited for this when the call
    returns.

    Args:
        found: parameters with the own shards, flat, on the device, ready on the current stream; in an order that is equal on all ranks.
        dtype: of the gather; None: that of each parameter.

    Returns:
        The number of parameters without agreed sizes before the call.
    """
    missing = [(one, words, _kind(ctx, dtype or one.dtype or words.dtype)) for one, words in found]
    missing = [(one, words, kind) for one, words, kind in missing if one._kind != kind]
    if not missing:
        return 0
    # Whether there is a base is equal on all ranks by construction; whether it is filled, and with what, the agreement shows.
    bases = [one.fitting(ctx.size, kind.dtype) for one, _, kind in missing]
    if any(base.filled for base in bases if base is not None):
        ctx.streams.order(Stage.DECODE, Stage.ENCODE)  # earlier gathers have written the bases
    labels: list[Hashable] = []
    asked: list[torch.Tensor] = []
    dtypes = dict.fromkeys(kind.dtype for *_, kind in missing)
    for dtype, source in itertools.product(dtypes, (Source.FULL, Source.DELTA)):
        coded: list[_Asked] = []
        for number, ((one, words, kind), base) in enumerate(zip(missing, bases, strict=True)):
            if kind.dtype is dtype and (source is Source.FULL or base is not None):
                some = [piece for piece in kind.pieces(one.numel) if kind.codes(piece, source)]
                coded += [(words, base if source is Source.DELTA else None, piece) for piece in some]
                labels += [(source, number, piece.start) for piece in some]
        if coded:
            asked.append(_sizes(ctx, coded, dtype))
    based = {number: base for number, base in enumerate(bases) if base is not None}
    if based:
        asked.append(proof.states_of(list(based.values()), ctx))
        labels += [("state", number, word) for number in based for word in range(proof.STATE_WORDS)]
    for number, base in based.items():
        asked.append(proof.proof_of(base, number, ctx))
        labels += [("proof", number, word) for word in range(proof.proof_words(base))]
    answer = dict(zip(labels, _agreement(ctx, asked), strict=True)) if asked else {}
    for number, (one, _, kind) in enumerate(missing):
        full, delta = (
            [
                answer.get((source, number, piece.start), piece.numel * kind.dtype.itemsize + HEADER_BYTES)
                for piece in kind.pieces(one.numel)
            ]
            for source in (Source.FULL, Source.DELTA)
        )
        if number not in based:
            one._agreed(kind, full)
            continue
        state = [answer["state", number, word] for word in range(proof.STATE_WORDS)]
        hashes = [answer["proof", number, word] for word in range(proof.proof_words(based[number]))]
        one._agreed(kind, full, delta if proof.proves(state, hashes) else None, proof.version_of(state))
    return len(missing)


def _sizes(ctx: DeviceContext, pieces: Sequence[_Asked], dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes of each frame as :func:`.gather.encoded_sizes` does, of pieces of shards in a dtype, all with a base or all without.
    In place of a base that is not filled, which no proof accepts, the words themselves are read.

    Words that are copied, from another dtype or from a base in host memory, are copied as many at a time as the memory for frames allows.
    That memory belongs to the encoding stream.
    """
    most = sum(piece.numel for *_, piece in pieces)
    if any(words.dtype is not dtype or (base and proof.is_away(base, ctx)) for words, base, _ in pieces):
        most = wire.frame_numel(ctx.budget // 3, dtype.itemsize, 1)
    chunks: list[list[_Asked]] = []
    left, found = 0, []
    for one in pieces:
        if left <= 0:
            chunks.append([])
            left = most
        chunks[-1].append(one)
        left -= one[2].numel
    with ctx.streams.on(Stage.ENCODE):
        for chunk in chunks:
            words = [gather.part_of(own, piece).to(dtype) for own, _, piece in chunk]
            lasts = [
                proof.on_device(gather.part_of(base.own(ctx.rank), piece), ctx) if base.filled else own
                for own, (_, base, piece) in zip(words, chunk, strict=True)
                if base
            ]
            found.append(gather.encoded_sizes(ctx, words, lasts or None))
        return torch.cat(found)


def gather_parameters(ctx: DeviceContext, own: torch.Tensor, whole: torch.Tensor, parameters: Sequence[Agreed]) -> None:
    """Gather shards of parameters, which lie end to end in ``own``, with agreed sizes, each its own way: no wait of the host.

    Where a parameter has no sizes, there is one wait; then all parameters of the gather have agreed sizes. See
    :func:`.gather.gather` for ``own`` and ``whole``.
    """
    shard = Shard(own, whole, [one.numel for one in parameters], [one.name for one in parameters])
    kind = _kind(ctx, own.dtype)
    if not own.numel() or (ctx.codec == "raw" and not any(one.fitting(ctx.size, kind.dtype) for one in parameters)):
        gather.gather(ctx, [shard])
        return
    if any(one._kind != kind for one in parameters):
        agree_all(ctx, list(zip(parameters, own.split(list(shard.sizes)), strict=True)), own.dtype)
    unchecked = ctx.state.of(_Unchecked)
    if (unchecked.copies or 0) >= COPIES_UNCHECKED:
        _agreement(ctx, [])
    unchecked.copies = unchecked.copies or 0
    held = [one.fitting(ctx.size, kind.dtype) for one in parameters]
    sources = [Source.FULL if base is None else one.source for one, base in zip(parameters, held, strict=True)]
    based = [(number, base) for number, base in enumerate(held) if base is not None]
    rows: Sequence[torch.Tensor] = whole.view(ctx.size, -1).split(list(shard.sizes), 1) if based else ()
    read = [(number, base) for number, base in based if sources[number] is not Source.FULL]
    lasts = _lay_out(ctx, shard, {number: (base, rows[number]) for number, base in read}, sources)
    starts = [0, *itertools.accumulate(shard.sizes)]
    for source, plan in _plans_of(ctx, shard, parameters, sources):
        places = [(piece.parameter, piece.start - starts[piece.parameter], piece.numel) for piece in plan.pieces]
        words = [lasts[number].narrow(0, *span) for number, *span in places] if source is Source.DELTA else None
        gather.send_planned(ctx, [shard], plan, words)
    gather.put_own(ctx, [shard])
    proof.keep([(base, rows[number]) for number, base in based if sources[number] is not Source.COPY], ctx)
    for number, base in based:
        parameters[number].keep(ctx, base)
    copied = [number for number, source in enumerate(sources) if source is Source.COPY]
    if copied:
        unchecked.copies += 1
        shards = own.split(list(shard.sizes))
        some = [lasts[number] for number in copied], [shards[number] for number in copied]
        names = [shard.names[number] for number in copied]
        proof.watch(proof.stage_of(read[0][1], ctx), *some, names, ctx)
        size_class = whole.nbytes.bit_length()
        if any(base.levels is not None for _, base in read) and size_class not in unchecked.looked:
            unchecked.looked.add(size_class)
            node.look(ctx, names, [rows[number] for number in copied], some[1])


def _lay_out(
    ctx: DeviceContext, shard: Shard, read: dict[int, tuple[BaseSlot, torch.Tensor]], sources: Sequence[Source]
) -> dict[int, torch.Tensor]:
    """Give an output the shards of the other ranks from bases, which are all of one kind. Return this rank's shards of the last gather, on
    the device, by the numbers of their parameters."""
    bases = list(read.values())
    if not bases or bases[0][0].levels is None:
        return dict(zip(read, proof.lay_out(bases, ctx), strict=True))
    if all(source is Source.COPY for source in sources) and len(bases[0][0].levels.nodes) <= STRAIGHT_NODES:
        node.copy_whole(ctx, bases, shard)
    else:
        node.copy_columns(ctx, bases)
    return {number: base.own(ctx.rank) for number, (base, _) in read.items()}


def _plans_of(
    ctx: DeviceContext, shard: Shard, parameters: Sequence[Agreed], sources: Sequence[Source]
) -> Sequence[tuple[Source, Plan]]:
    """Return the layouts of what a gather sends, by the sources of parameters."""
    key = tuple((one.version, source) for one, source in zip(parameters, sources, strict=True))
    plans = _plans.get(key)
    if plans is None:
        if len(_plans) >= _PLANS:
            _plans.clear()
        pieces = gather.pieces_of([shard.sizes], shard.own.element_size(), ctx.size, ctx.budget)
        found = []
        for source in (Source.FULL, Source.DELTA):
            some = [piece for piece in pieces if sources[piece.parameter] is source]
            its = [one for one, gives in zip(parameters, sources, strict=True) if gives is source]
            sizes = [size for one in its for size in one.sizes[source]]
            if some:
                # words that go as they are would meet the bases in the output
                partial = source is Source.DELTA or len(some) < len(pieces)
                found.append((source, gather.plan_of(ctx, [shard], some, sizes, partial=partial)))
        plans = _plans[key] = found
    return plans


def agree_ahead(
    parameters: Sequence[tuple[GatheredParameter, torch.Tensor]],
    group: dist.ProcessGroup,
    config: ZipcclConfig,
    role: str,
    codec: str,
) -> int:
    """Agree as :func:`agree_all`, outside of an operation. A collective."""
    with torch.inference_mode(), tensors.undisturbed():
        ctx = DeviceContext(AGREEMENT, group, config, role, codec, parameters[0][1].device)
        return agree_all(ctx, [(one, words) for one, words in parameters if isinstance(one, Agreed)])


def check_frames(device: torch.device, group: dist.ProcessGroup | None, config: ZipcclConfig, role: str) -> None:
    """See :func:`ds_zipccl.comm.engine.check_frames`."""
    state = group_state(group)
    unchecked = None if state is None else state.of(_Unchecked)
    if unchecked is None or unchecked.copies is None:
        return
    unchecked.checks += 1
    if unchecked.checks % LOOK_CHECKS == 0:
        unchecked.looked.clear()
    with torch.inference_mode(), tensors.undisturbed():
        _agreement(DeviceContext(AGREEMENT, resolve_group(group), config, role, config.codec, device), [])


def _agreement(ctx: DeviceContext, words: Sequence[torch.Tensor]) -> list[int]:
    ctx.state.of(_Unchecked).copies = None
    return agree(ctx, words)


def _kind(ctx: DeviceContext, dtype: torch.dtype) -> _Kind:
    return _Kind(ctx.state, dtype, ctx.codec, ctx.config.block, ctx.budget)
