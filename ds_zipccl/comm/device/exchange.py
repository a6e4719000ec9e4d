"""All-to-alls on a device: frames of segments for other nodes go into slots, whose sizes both sides know before the words are sent.

Segments for ranks of the own node go as raw frames: these ranks are reached without a network. With equal segments, the ranks agree on one
size of slots; the frames travel meanwhile where their sizes can be forecast. Otherwise each pair of ranks has a size of its own, and
the ranks exchange them. Either takes one wait of the host.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.codecs import compress_bound
from ds_zipccl.codecs.memory import overlapping
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.gather import encoded_sizes, slot_of
from ds_zipccl.comm.device.sizes import agree, agreement, exchange_words
from ds_zipccl.comm.device.streams import Stage
from ds_zipccl.comm.group_state import device_profile, group_nodes, resolve_group, state_of
from ds_zipccl.comm.request import Request
from ds_zipccl.frame import HEADER_BYTES
from ds_zipccl.kernels.cuda.jobs import frame_bytes
from ds_zipccl.policy import cost_model, wire

#: Most frames of a pair of ranks (admission: larger numbers that arrive are refused, because a loop runs so often).
_MOST_PIECES = 1 << 24


class _Backoffs(defaultdict[Hashable, wire.Backoff]):
    """Kind of call -> the backoff of its coded calls in a group. Equal on all ranks."""

    def __init__(self) -> None:
        super().__init__(lambda: wire.Backoff(wire.PLAIN_EXCHANGES))


class _Forecasts(wire.Forecast):
    """The forecasts of the sizes of a group's exchanges. Equal on all ranks."""


class _Slot(NamedTuple):
    """Words and the bytes of their slot; ``raw``: the frame is a raw one."""

    words: torch.Tensor
    nbytes: int
    raw: bool


@dataclass(frozen=True, slots=True)
class _Segment:
    """The words for one peer, or of one. ``piece``: elements of a frame. ``frame``: the most bytes of a frame; 0: frames are raw."""

    words: torch.Tensor
    piece: int
    frame: int

    def slots(self, first: int, last: int) -> list[_Slot]:
        """Return the slots of the frames from ``first`` to before ``last``. Both sides find equal sizes."""
        if not first and self.piece >= self.words.numel() > 0:
            return [_Slot(self.words, *slot_of(self.words.nbytes, self.frame))]
        found = []
        for start in range(first * self.piece, min(last * self.piece, self.words.numel()), self.piece):
            words = self.words[start : start + self.piece]
            found.append(_Slot(words, *slot_of(words.nbytes, self.frame)))
        return found


class _Words(NamedTuple):
    """The numbers that one rank sends to another one before an uneven exchange. The first two come from the device.

    ``frame``: the most bytes of a frame for the receiver. ``coded`` and ``between``: bytes of frames, and of words, for all ranks of other
    nodes. ``numel``: elements for the receiver. ``piece``: elements of a frame. ``pieces``: the most frames for a rank, or of one.
    ``step_bytes``: see
    :func:`ds_zipccl.policy.wire.step_bytes`.
    """

    frame: int
    coded: int
    numel: int
    piece: int
    pieces: int
    between: int
    step_bytes: Sequence[int]

    @classmethod
    def of(cls, row: Sequence[int]) -> _Words:
        frame, coded, numel, piece, pieces, between, *step_bytes = row
        return cls(frame, coded, numel, piece, pieces, between, step_bytes)


def pays_now(request: Request) -> bool:
    """Return whether the next exchange is coded in mode auto, equal on all ranks. Groups inside one node are passed before.

    Equal segments are coded where the typical ratio of the dtype pays. Ranks know nothing of each other's uneven segments, so that the
    first call is coded. After a coded call, whose sizes all ranks know, the next PLAIN_EXCHANGES calls are plain if that one did not pay:
    :func:`note_plain` counts them.
    """
    group, tensor = resolve_group(request.group), request.tensor
    if request.numel is not None:
        nbytes = request.numel * tensor.itemsize * wire.between_nodes(group_nodes(group), dist.get_world_size(group))
        if not _pays(group, tensor.device.type, nbytes, nbytes / cost_model.typical_ratio(tensor.dtype)):
            return False
    return not _backoff(request).skipping


def note_plain(request: Request) -> None:
    """Count an exchange that was plain because an earlier one did not pay. All ranks call."""
    _backoff(request).skips()


def _backoff(request: Request) -> wire.Backoff:
    kind = _kind(request.op, request.options.role, request.tensor.dtype, request.numel)
    return state_of(request.group).of(_Backoffs)[kind]


def _pays(group: dist.ProcessGroup, device: str, nbytes: float, coded: float) -> bool:
    """Return whether coding an exchange of a group gains. All ranks of a node exchange at a time, also in groups like this one."""
    nodes = group_nodes(resolve_group(None))
    return cost_model.exchange_gains(nbytes, coded, max(map(len, nodes), default=1), device_profile(device))


def _kind(op: str, role: str, dtype: torch.dtype, numel: int | None) -> Hashable:
    """Return the kind of a call. Kinds are few: sizes of a kind differ by less than a factor of two."""
    return op, role, dtype, None if numel is None else numel.bit_length()


def exchange_even(ctx: DeviceContext, source: torch.Tensor, target: torch.Tensor) -> None:
    """Exchange equal segments of flat tensors; segment r of ``source`` goes to rank r. One wait of the host, none for raw frames.

    Where the sizes of frames can be forecast, frames travel while the host waits. If one of some rank is larger than its slot, all ranks
    send all frames again; the host knows before frames are decoded, and so before the caller's work reads words.
    """
    (source,) = apart(ctx, [source], [target])
    numel = source.numel() // ctx.size
    if not numel:
        return
    piece = wire.even_piece(numel, source.itemsize, ctx.size, ctx.budget, ctx.cut.exchange(source.nbytes))
    nbytes, afar = min(piece, numel) * source.itemsize, _afar(ctx)
    leaves, comes = source.split(numel), target.split(numel)

    def steps_of(frame: int) -> list[_Step]:
        frames = [frame if peer in afar else 0 for peer in range(ctx.size)]
        leaving, coming = (
            [_Segment(words, piece, one) for words, one in zip(some, frames, strict=True)] for some in (leaves, comes)
        )
        return [_Step(ctx, leaving, coming, number, number + 1) for number in range(-(-numel // piece))]

    sizes, slot = [HEADER_BYTES + source.nbytes], 0
    if ctx.codec != "raw":
        kind = _kind(ctx.op, ctx.role, source.dtype, source.numel())
        forecast, site = ctx.state.of(_Forecasts), (kind, ctx.kind, ctx.codec, ctx.config.block)
        if 2 * source.nbytes <= ctx.budget:  # words, not slots: the ranks of a smaller node have other slots
            slot = wire.slot_bytes(forecast.slot(site, nbytes))
        if slot and wire.shrinks(nbytes, slot):
            sizes = _send_ahead(ctx, steps_of(slot), slot)
        else:
            slot = 0
            found = encoded_sizes(ctx, [part for peer in afar for part in leaves[peer].split(piece)])
            with ctx.streams.on(Stage.ENCODE):
                most = found.view(len(afar), -1).amax(0)
            sizes = agree(ctx, [most])
        forecast.note(site, ctx.kind, nbytes, max(sizes))
        between = int(source.nbytes * wire.between_nodes(group_nodes(ctx.group), ctx.size))
        _note(ctx, source.dtype, source.numel(), between, between * sum(sizes) / (numel * source.itemsize))
    largest = max(sizes)
    if largest > slot and not wire.shrinks(nbytes, largest):
        with ctx.streams.wire():
            ctx.transport.all_to_all(target, source)
        ctx.count(source.nbytes // ctx.size * (ctx.size - 1), source.nbytes // ctx.size * (ctx.size - 1))
        return
    for step in steps_of(largest) if largest > slot else ():
        step.run()
    ctx.copy(leaves[ctx.rank], comes[ctx.rank])


def _send_ahead(ctx: DeviceContext, steps: Sequence[_Step], slot: int) -> list[int]:
    """Send coded frames in slots of ``slot`` bytes, for which some may be too large, and decode them if none is. Return the bytes of the
    largest frame of any rank, by step. The host waits for these while the words of the last step, at least, are on their way."""
    with ctx.streams.staging(sum(step.nbytes for step in steps), ctx.budget) as staging:
        first, *rest = steps
        parts = staging.split([step.nbytes for step in steps])
        first.encode(parts[0])
        if rest:
            first.send()
        for step, part in zip(rest, parts[1:], strict=True):
            step.encode(part)
        with ctx.streams.on(Stage.ENCODE):
            most = [torch.cat(sizes).amax(0, keepdim=True) for step in steps if (sizes := step.coded_sizes())]
        agreed = agreement(ctx, most)
        for step in rest or steps:
            step.send()
        found = agreed()
        for step in steps if max(found) <= slot else ():
            step.decode()
    return found


def exchange_uneven(ctx: DeviceContext, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Exchange flat tensors; ``sources[r]`` goes to rank r, ``targets[r]`` comes from rank r. One wait of the host.

    Raises:
        CommError: a rank has refused a frame of an earlier operation: all ranks raise. Or a rank sends another number of words than this
            rank expects, or a size that no frame has: this rank raises, and the other ranks do after the group's timeout.
    """
    sources = apart(ctx, sources, targets)
    peers = [peer for peer in range(ctx.size) if peer != ctx.rank]
    afar = _afar(ctx) if ctx.codec != "raw" else []
    itemsize = targets[ctx.rank].itemsize
    piece = wire.uneven_piece(itemsize, ctx.size, ctx.budget)
    numels = [tensor.numel() for peer in peers for tensor in (sources[peer], targets[peer])]
    pieces, between = -(-max(numels) // piece), sum(sources[peer].nbytes for peer in afar)
    step_bytes = wire.step_bytes(numels, itemsize, piece)
    numbers = [[tensor.numel(), piece, pieces, between, *step_bytes] for tensor in sources]
    sent, received = (
        [_Words.of(row) for row in rows] for rows in exchange_words(ctx, _frames(ctx, sources, afar, piece), numbers)
    )
    for peer in peers:
        _check(ctx, peer, received[peer], targets[peer], piece, peer in afar)
    if afar:
        _note(ctx, targets[0].dtype, None, max(one.between for one in received), max(one.coded for one in received))
    most = [max(sizes) for sizes in zip(*(one.step_bytes for one in received), strict=True)]
    leaving, coming = (
        [_Segment(words, piece, one.frame) for words, one in zip(tensors, told, strict=True)]
        for tensors, told in ((sources, sent), (targets, received))
    )
    pieces = max(one.pieces for one in received)
    together = wire.pieces_of_step(most, ctx.budget)
    for first in range(0, pieces, together):
        _Step(ctx, leaving, coming, first, first + together).run()
    ctx.copy(sources[ctx.rank], targets[ctx.rank])


def apart(
    ctx: DeviceContext, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Return the sources, copied where one shares memory with a target: targets are written while later sources are read."""
    shared = overlapping(sources, targets)
    if not any(shared):
        return sources
    with ctx.streams.on(Stage.DECODE):  # the last stream that reads the copies
        copies = [flat.clone() if hit else flat for flat, hit in zip(sources, shared, strict=True)]
    ctx.streams.order(Stage.DECODE, Stage.ENCODE)
    return copies


def _afar(ctx: DeviceContext) -> list[int]:
    """Return the ranks whose segments are coded: those of other nodes; all peers where the group has one node, or none is known."""
    nodes = group_nodes(ctx.group)
    own = next((ranks for ranks in nodes if ctx.rank in ranks), ()) if len(nodes) > 1 else ()
    return [peer for peer in range(ctx.size) if peer != ctx.rank and peer not in own]


def _frames(ctx: DeviceContext, sources: Sequence[torch.Tensor], afar: Sequence[int], piece: int) -> torch.Tensor:
    """Return, int64 on the device, a row for each rank: the most bytes of a frame for that rank, and the bytes of all frames."""
    with ctx.streams.on(Stage.ENCODE):
        zero = tensors.filled(1, 0, torch.int64, ctx.device)
        if not afar:
            return zero.expand(ctx.size, 2)
        parts = {peer: sources[peer].split(piece) for peer in afar}
        sizes = encoded_sizes(ctx, [part for some in parts.values() for part in some])
        found = sizes.split([len(some) for some in parts.values()])
        most = {
            peer: some if len(some) == 1 else some.amax(0, keepdim=True) for peer, some in zip(afar, found, strict=True)
        }
        rows = torch.cat([most.get(peer, zero) for peer in range(ctx.size)])
        return torch.stack([rows, sizes.sum().expand(ctx.size)], 1)


def _check(ctx: DeviceContext, peer: int, words: _Words, target: torch.Tensor, piece: int, coded: bool) -> None:
    """Refuse numbers of a peer with which its frames cannot be received."""
    name = f"global rank {dist.get_global_rank(ctx.group, peer)}"
    if words.numel != target.numel():
        raise ctx.error(
            f"{name} sends {words.numel} elements, this rank expects {target.numel()}; give equal sizes on both ranks"
        )
    bound = compress_bound(min(piece, target.numel()), target.dtype, ctx.codec, block=ctx.config.block)
    least, most = (HEADER_BYTES, bound) if coded else (0, 0)
    numbers = (words.coded, words.between, *words.step_bytes)
    wrong = not least <= words.frame <= most or not 0 <= words.pieces <= _MOST_PIECES or min(numbers) < 0
    if wrong or words.piece != piece:
        raise ctx.error(
            f"{name} announces {words.pieces} frames of {words.piece} elements and up to {words.frame} bytes, wanted at most "
            f"{_MOST_PIECES} of {piece} elements and {least} to {most} bytes; check that all ranks run one version with one "
            "configuration, then the network"
        )


def _note(ctx: DeviceContext, dtype: torch.dtype, numel: int | None, nbytes: float, coded: float) -> None:
    """Note the bytes of words and frames of a coded exchange, equal on all ranks, for :func:`pays_now`."""
    pays = _pays(ctx.group, ctx.device.type, nbytes, coded)
    ctx.state.of(_Backoffs)[_kind(ctx.op, ctx.role, dtype, numel)].note(pays)


class _Step:
    """The frames from ``first`` to before ``last`` of each segment, which travel together. ``nbytes``: of their staging memory."""

    def __init__(
        self, ctx: DeviceContext, leaving: Sequence[_Segment], coming: Sequence[_Segment], first: int, last: int
    ) -> None:
        self._ctx = ctx
        self._sent, self._received = (
            [() if rank == ctx.rank else segment.slots(first, last) for rank, segment in enumerate(segments)]
            for segments in (leaving, coming)
        )
        self._leaves, self._comes = (
            [sum(slot.nbytes for slot in slots) for slots in some] for some in (self._sent, self._received)
        )
        self.nbytes = sum(self._leaves) + sum(self._comes)

    def run(self) -> None:
        """Put all work of the step on the streams."""
        with self._ctx.streams.staging(self.nbytes, self._ctx.budget) as staging:
            self.encode(staging)
            self.send()
            self.decode()

    def encode(self, staging: torch.Tensor) -> None:
        ctx = self._ctx
        self._outgoing, self._incoming = staging.split([sum(self._leaves), sum(self._comes)])
        filled = _cut(self._outgoing, self._sent)
        with ctx.streams.on(Stage.ENCODE):
            for raw, code in ((False, ctx.codec), (True, "raw")):
                some = [(slot.words, place) for slot, place in filled if slot.raw == raw]
                words, places = [words for words, _ in some], [place for _, place in some]
                ctx.route.encode_frames(words, code, ctx.config.block, places)
        ctx.count(0, sum(self._leaves))

    def coded_sizes(self) -> list[torch.Tensor]:
        """Return the bytes of all coded frames, int64; of one that is too large for its slot too. Work of the current stream."""
        found, end = [], 0
        slots = [slot for some in self._sent for slot in some]
        for (raw, nbytes), alike in itertools.groupby(slots, lambda slot: (slot.raw, slot.nbytes)):
            begin, end = end, end + nbytes * len(list(alike))
            if not raw:
                found.append(frame_bytes(self._outgoing[begin:end].view(-1, nbytes)).contiguous())
        return found

    def send(self) -> None:
        streams = self._ctx.streams
        streams.order(Stage.ENCODE, Stage.WIRE)
        with streams.on(Stage.WIRE):
            self._ctx.transport.all_to_all(self._incoming, self._outgoing, self._comes, self._leaves)
        self._arrived = streams.record(Stage.WIRE)

    def decode(self) -> None:
        ctx = self._ctx
        with ctx.streams.on(Stage.DECODE):
            ctx.streams.join(self._arrived)
            got = _cut(self._incoming, self._received)
            report = ctx.reports.word(ctx.where(), _names(ctx, self._received))
            ctx.route.decode_frames(
                [place for _, place in got], ctx.config.block, [slot.words for slot, _ in got], report
            )
        ctx.count(sum(slot.words.nbytes for some in self._sent for slot in some), 0)


def _cut(memory: torch.Tensor, slots: Sequence[Sequence[_Slot]]) -> list[tuple[_Slot, torch.Tensor]]:
    """Return each slot with its part of the memory."""
    flat = [slot for some in slots for slot in some]
    return list(zip(flat, memory.split([slot.nbytes for slot in flat]), strict=True)) if flat else []


def _names(ctx: DeviceContext, slots: Sequence[Sequence[_Slot]]) -> tuple[str, ...]:
    """Return names of frames for reports, where each peer has one. Other calls would have a name each."""
    if any(len(some) != 1 for rank, some in enumerate(slots) if rank != ctx.rank):
        return ()
    return tuple(f"the frame of group rank {rank}" for rank in range(ctx.size) if rank != ctx.rank)
