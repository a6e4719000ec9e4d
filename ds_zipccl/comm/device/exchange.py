"""All-to-alls on a device: frames of segments for other nodes go into slots, whose sizes both sides know before the words are sent.

Segments for ranks of the own node go as raw frames: these ranks are reached without a network. With equal segments, the ranks agree on one
size of slots. Otherwise each pair of ranks has a size of its own, and the ranks exchange them. Either takes one wait of the host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.codecs import compress_bound
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.gather import encoded_sizes, slot_of
from ds_zipccl.comm.device.sizes import agree, exchange_words
from ds_zipccl.comm.device.streams import Stage
from ds_zipccl.comm.group_state import device_profile, group_nodes, group_state, resolve_group
from ds_zipccl.frame import HEADER_BYTES
from ds_zipccl.policy import cost_model, wire

#: Most frames of a pair of ranks (admission: larger numbers that arrive are refused, because a loop runs so often).
_MOST_PIECES = 1 << 24


class _Backoffs(defaultdict[Hashable, wire.Backoff]):
    """Kind of call -> the backoff of its coded calls in a group. Equal on all ranks."""

    def __init__(self) -> None:
        super().__init__(lambda: wire.Backoff(wire.PLAIN_EXCHANGES))


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


def pays_now(group: dist.ProcessGroup, op: str, role: str, tensor: torch.Tensor, numel: int | None) -> bool:
    """Return whether the next exchange of ``numel`` elements (None: uneven) is coded in mode auto. Every rank asks once before each call.
    Groups inside one node are passed before.

    Equal segments are coded where the typical ratio of the dtype pays. Ranks know nothing of each other's uneven segments, so that the
    first call is coded. After a coded call, whose sizes all ranks know, the next PLAIN_EXCHANGES calls are plain if that one did not pay.

    Args:
        tensor: has the dtype and the device.
    """
    state = group_state(group)
    assert state is not None  # a rank outside the group does not ask
    if numel is not None:
        nbytes = numel * tensor.itemsize * wire.between_nodes(group_nodes(group), state.size)
        if not _pays(group, tensor.device.type, nbytes, nbytes / cost_model.typical_ratio(tensor.dtype)):
            return False
    return not state.of(_Backoffs)[_kind(op, role, tensor.dtype, numel)].skips()


def _pays(group: dist.ProcessGroup, device: str, nbytes: float, coded: float) -> bool:
    """Return whether coding an exchange of a group gains. All ranks of a node exchange at a time, also in groups like this one."""
    nodes = group_nodes(resolve_group(None))
    return cost_model.exchange_gains(nbytes, coded, max(map(len, nodes), default=1), device_profile(device))


def _kind(op: str, role: str, dtype: torch.dtype, numel: int | None) -> Hashable:
    """Return the kind of a call. Kinds are few: sizes of a kind differ by less than a factor of two."""
    return op, role, dtype, None if numel is None else numel.bit_length()


def exchange_even(ctx: DeviceContext, source: torch.Tensor, target: torch.Tensor) -> None:
    """Exchange equal segments of flat tensors; segment r of ``source`` goes to rank r. One wait of the host, none for raw frames."""
    (source,) = _apart(ctx, [source], [target])
    numel = source.numel() // ctx.size
    if not numel:
        return
    piece = wire.even_piece(numel, source.itemsize, ctx.size, ctx.budget)
    afar = _afar(ctx)
    sizes = [HEADER_BYTES + source.nbytes]
    if ctx.codec != "raw":
        found = encoded_sizes(ctx, [part for peer in afar for part in source.split(numel)[peer].split(piece)])
        with ctx.streams.on(Stage.ENCODE):
            most = found.view(len(afar), -1).amax(0)
        sizes = agree(ctx, [most])
        nbytes = int(source.nbytes * wire.between_nodes(group_nodes(ctx.group), ctx.size))
        _note(ctx, source.dtype, source.numel(), nbytes, nbytes * sum(sizes) / (numel * source.itemsize))
    largest = max(sizes)
    if not wire.shrinks(min(piece, numel) * source.itemsize, largest):
        with ctx.streams.wire():
            ctx.transport.all_to_all(target, source)
        ctx.count(source.nbytes // ctx.size * (ctx.size - 1), source.nbytes // ctx.size * (ctx.size - 1))
        return
    frames = [largest if peer in afar else 0 for peer in range(ctx.size)]
    leaving, coming = (
        [_Segment(words, piece, frame) for words, frame in zip(flat.split(numel), frames, strict=True)]
        for flat in (source, target)
    )
    _in_steps(ctx, leaving, coming, -(-numel // piece), 1)


def exchange_uneven(ctx: DeviceContext, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Exchange flat tensors; ``sources[r]`` goes to rank r, ``targets[r]`` comes from rank r. One wait of the host.

    Raises:
        CommError: a rank has refused a frame of an earlier operation: all ranks raise. Or a rank sends another number of words than this
            rank expects, or a size that no frame has: this rank raises, and the other ranks do after the group's timeout.
    """
    sources = _apart(ctx, sources, targets)
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
    _in_steps(ctx, leaving, coming, pieces, wire.pieces_of_step(most, ctx.budget))


def _apart(
    ctx: DeviceContext, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Return the sources, copied where one shares memory with a target: targets are written while later sources are read."""
    written = [(flat.data_ptr(), flat.data_ptr() + flat.nbytes) for flat in targets if flat.numel()]

    def shared(flat: torch.Tensor) -> bool:
        begin, end = flat.data_ptr(), flat.data_ptr() + flat.nbytes
        return any(begin < last and first < end for first, last in written)

    if not any(map(shared, sources)):
        return sources
    with ctx.streams.on(Stage.DECODE):  # the last stream that reads the copies
        copies = [flat.clone() if shared(flat) else flat for flat in sources]
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


def _in_steps(
    ctx: DeviceContext, leaving: Sequence[_Segment], coming: Sequence[_Segment], pieces: int, together: int
) -> None:
    """Send ``pieces`` frames of each segment, ``together`` of them in a step, and copy the own segment."""
    for first in range(0, pieces, together):
        _step(ctx, leaving, coming, first, first + together)
    ctx.copy(leaving[ctx.rank].words, coming[ctx.rank].words)


def _step(ctx: DeviceContext, leaving: Sequence[_Segment], coming: Sequence[_Segment], first: int, last: int) -> None:
    sent, received = (
        [() if rank == ctx.rank else segment.slots(first, last) for rank, segment in enumerate(segments)]
        for segments in (leaving, coming)
    )
    sent_sizes, received_sizes = ([sum(slot.nbytes for slot in slots) for slots in all_] for all_ in (sent, received))
    leaves, comes = sum(sent_sizes), sum(received_sizes)
    streams, block = ctx.streams, ctx.config.block
    with streams.staging(leaves + comes, ctx.budget) as staging:
        outgoing, incoming = staging[:leaves], staging[leaves:]
        filled = _cut(outgoing, sent)
        with streams.on(Stage.ENCODE):
            for raw, code in ((False, ctx.codec), (True, "raw")):
                some = [(slot.words, place) for slot, place in filled if slot.raw == raw]
                ctx.route.encode_frames([words for words, _ in some], code, block, [place for _, place in some])
        with streams.wire():
            ctx.transport.all_to_all(incoming, outgoing, received_sizes, sent_sizes)
        with streams.on(Stage.DECODE):
            got = _cut(incoming, received)
            report = ctx.reports.word(ctx.where(), _names(ctx, received))
            ctx.route.decode_frames([place for _, place in got], block, [slot.words for slot, _ in got], report)
    ctx.count(sum(slot.words.nbytes for slot, _ in filled), leaves)


def _cut(memory: torch.Tensor, slots: Sequence[Sequence[_Slot]]) -> list[tuple[_Slot, torch.Tensor]]:
    """Return each slot with its part of the memory."""
    flat = [slot for some in slots for slot in some]
    return list(zip(flat, memory.split([slot.nbytes for slot in flat]), strict=True)) if flat else []


def _names(ctx: DeviceContext, slots: Sequence[Sequence[_Slot]]) -> tuple[str, ...]:
    """Return names of frames for reports, where each peer has one. Other calls would have a name each."""
    if any(len(some) != 1 for rank, some in enumerate(slots) if rank != ctx.rank):
        return ()
    return tuple(f"the frame of group rank {rank}" for rank in range(ctx.size) if rank != ctx.rank)
