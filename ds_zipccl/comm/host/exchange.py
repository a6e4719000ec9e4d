"""All-to-alls, straight or by node.

By node, all that a rank sends to another node goes to one rank there in a single segment, and is handed on inside the node.

Rank i of a node is the counterpart of rank i of every other node. A rank sends its counterpart the segments for all ranks of the
counterpart's node, laid end to end in the order of the ranks. The counterpart decompresses each fragment, and forwards to its neighbors
their parts in raw frames: links inside a node are fast, and coding would only take time there. Segments for the own node go straight.

So the codec sees the segments for all ranks of a node as one: a row that goes to several ranks of a node enters the node once. A rank sends
a message to each other node instead of to each rank there. Row frames refer to earlier rows of the segment. So the counterpart keeps the
received part of a segment, up to ``staging_mib`` for all other nodes together; larger segments go in ordinary frames.
A rank knows only the sizes of its own segments. The ranks of a node tell each other the sizes that they expect. A sender tells its
counterpart the sizes of the parts, which must be those that the ranks of the node expect.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_zipccl import tensors
from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.host.frames import FrameCoder
from ds_zipccl.comm.host.pipeline import Exchange, Fragments, detached, open_exchange, run_pipeline
from ds_zipccl.comm.host.rows import coder_of
from ds_zipccl.comm.request import Request
from ds_zipccl.comm.topology import Levels

#: Exchanges in flight, which share the memory for frames: between nodes, inside the node, and the parts that are forwarded.
_EXCHANGES = 3


def exchange_by_node(ctx: OpContext, request: Request, whole: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    """Send the segments of ``whole`` to the ranks, and write the segment from rank r to ``outputs[r]``. Blocks.

    All tensors are flat. All nodes of ``ctx.nodes`` have the same number of ranks. Segments are laid end to end, so that values must
    be rounded each by itself, if they are.

    Raises:
        CommError: as any exchange; and a rank sends other sizes than the ranks of this node expect.
    """
    coder = coder_of(ctx, request, [whole])
    # a fragment of an output is written before the same elements of the input are sent: no source may share memory with it
    (whole,) = detached([whole], outputs, [whole[:0]])
    with (
        open_exchange(ctx, 0, control=True) as control,
        open_exchange(ctx, 1, coder) as across,
        open_exchange(ctx, 2, FrameCoder(ctx, raw=True, exact=coder.exact)) as inside,
        open_exchange(ctx, 3, control=True) as onward,
    ):
        _NodeExchange(ctx, request, coder, (control, across, inside, onward), whole, outputs).run()


class _Stream:
    """The parts that rank ``source`` of another node sends to the ranks of this node, ``sizes`` elements each, laid end to end in ``steps``
    fragments. Rank ``carrier`` of this node receives the stream."""

    def __init__(self, ctx: OpContext, source: int, carrier: int, sizes: Sequence[int], itemsize: int) -> None:
        self.source, self.carrier, self._sizes, self.total = source, carrier, sizes, sum(sizes)
        self.fragment = ctx.fragment_numel(self.total, itemsize, _EXCHANGES)
        self.steps = -(-self.total // self.fragment)

    def numel(self, step: int) -> int:
        """Return the elements of a fragment; 0 beyond the last fragment."""
        return max(0, min(self.fragment, self.total - step * self.fragment))

    def part(self, at: int, step: int) -> tuple[slice, slice]:
        """Return the elements of part ``at`` in a fragment, as a slice of the fragment and as a slice of the part."""
        begin, before = step * self.fragment, sum(self._sizes[:at])
        first = max(begin, before)
        last = max(first, min(begin + self.fragment, before + self._sizes[at]))
        return slice(first - begin, last - begin), slice(first - before, last - before)


class _NodeExchange:
    """The steps of an all-to-all by node, see :meth:`run`. The constructor blocks until the neighbors have told the sizes that they expect.
    ``exchanges``: of the sizes, between nodes, inside the node, and of the parts that are forwarded."""

    def __init__(
        self,
        ctx: OpContext,
        request: Request,
        coder: FrameCoder,
        exchanges: Sequence[Exchange],
        whole: torch.Tensor,
        outputs: Sequence[torch.Tensor],
    ) -> None:
        self._ctx, self._outputs, self._buffers = ctx, outputs, PooledBuffers()
        self._control, self._across, self._inside, self._onward = exchanges
        sources = whole.split(list(request.segments.leaving))
        outputs[ctx.rank].copy_(sources[ctx.rank])
        levels = Levels.of(ctx.nodes, ctx.rank, ctx.size)
        self._node, self._local_rank = levels.node_ranks, levels.local_rank
        *self._others, _ = levels.turns
        self._counterparts = [ranks[self._local_rank] for ranks in self._others]
        self._neighbors = [rank for rank in self._node if rank != ctx.rank]
        self._told: dict[int, torch.Tensor] = {}  # counterpart -> the sizes of its parts
        #: ``coming[i][r]``: elements from rank r to rank i of this node.
        self._coming: Sequence[Sequence[int]] = [[output.numel() for output in outputs]] * len(self._node)
        if request.numel is None:
            self._tell_sizes(sources)
        segments = [_laid(whole, sources, ranks) for ranks in self._others]
        self._leaving = Fragments(ctx, segments, _EXCHANGES)
        # only segments that the counterpart keeps
        leaving = zip(self._counterparts, segments, strict=True)
        coder.search({peer: segment for peer, segment in leaving if self._is_kept(segment.numel())})
        self._straight = Fragments(ctx, [sources[rank] for rank in self._neighbors], _EXCHANGES)
        self._straight_in = Fragments(ctx, [outputs[rank] for rank in self._neighbors], _EXCHANGES)
        streams = [
            _Stream(ctx, source, carrier, [coming[source] for coming in self._coming], whole.element_size())
            for ranks in self._others
            for source, carrier in zip(ranks, self._node, strict=True)
        ]
        self._carried = [stream for stream in streams if stream.carrier == ctx.rank]
        # in the order in which their carrier sends: that of the nodes after this node, which is equal on all ranks of a node
        self._handed = [stream for stream in streams if stream.carrier != ctx.rank]
        #: What has been received of a stream, where row frames may refer to it.
        self._kept = {
            stream.source: self._buffers.empty(stream.total, whole.dtype)
            for stream in self._carried
            if coder.refers and self._is_kept(stream.total)
        }
        most = max((stream.numel(0) for stream in self._carried if stream.source not in self._kept), default=0)
        # one at a time: parts are copied into frames
        self._fragment = self._buffers.empty(most, whole.dtype)
        counts = (self._leaving.steps, self._straight.steps, self._straight_in.steps)
        self._steps = max(*counts, *(stream.steps for stream in streams))

    def _tell_sizes(self, sources: Sequence[torch.Tensor]) -> None:
        """Tell the neighbors the sizes that this rank expects, and the counterparts those of their parts. Blocks until the neighbors have
        told theirs."""
        ctx, (own, *_) = self._ctx, self._coming
        numbers = tensors.of_numbers(own, torch.int64)
        told = {rank: torch.empty_like(numbers) for rank in self._neighbors}
        self._told = {rank: torch.empty_like(numbers[: len(self._node)]) for rank in self._counterparts}
        for rank, place in (*told.items(), *self._told.items()):
            self._control.post_recv(rank, place)
        self._control.send(numbers, *told)
        for ranks, counterpart in zip(self._others, self._counterparts, strict=True):
            parts = tensors.of_numbers([sources[rank].numel() for rank in ranks], torch.int64)
            self._control.send(parts, counterpart)
        self._coming = [
            own if rank == ctx.rank else self._control.recv(rank, told[rank]).tolist() for rank in self._node
        ]
        for rank, found in zip(self._node, self._coming, strict=True):
            sent = sources[rank].numel()
            if min(found) < 0 or found[ctx.rank] != sent:
                raise ctx.error(
                    f"global rank {ctx.global_rank(rank)} expects segments of {found} elements, and {sent} elements are for it; give split "
                    f"sizes that agree"
                )

    def _verify_sizes(self) -> None:
        """Wait for the sizes that the counterparts send, and compare them with the sizes that the ranks of this node expect. A second call
        does nothing.

        Raises:
            CommError: a counterpart sends other sizes.
        """
        while self._told:
            rank, place = self._told.popitem()
            sent = self._control.recv(rank, place).tolist()
            wanted = [coming[rank] for coming in self._coming]
            if sent != wanted:
                raise self._ctx.error(
                    f"global rank {self._ctx.global_rank(rank)} sends segments of {sent} elements to the ranks of this node, which "
                    f"expect {wanted}; give split sizes that agree"
                )

    def _is_kept(self, numel: int) -> bool:
        """Return whether the receiver of a segment of ``numel`` elements keeps all of it, equally on both sides."""
        return numel * self._outputs[0].element_size() * len(self._others) <= self._ctx.config.staging

    def _place(self, stream: _Stream, step: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the memory for a fragment, and the kept elements in front of it."""
        numel, kept = stream.numel(step), self._kept.get(stream.source)
        if kept is None:
            return self._fragment[:numel], None
        begin = min(step * stream.fragment, kept.numel())
        return kept[begin : begin + numel], kept[:begin]

    def run(self) -> None:
        """Run the exchange; blocks until the outputs are written and all frames are posted."""
        run_pipeline(self._steps, self._post, self._forward, self._take)
        self._verify_sizes()
        self._buffers.release()

    def _post(self, step: int) -> None:
        """Post the receives between nodes, the receives inside the node, and the own sends of a step."""
        self._across.next_step()
        self._inside.next_step()
        if step:
            self._expect(step)
            self._send(step)
        else:  # the sizes arrive while the first fragments are compressed; gloo ends a process that gets more than it expects
            self._send(step)
            self._verify_sizes()
            self._expect(step)

    def _expect(self, step: int) -> None:
        for stream in self._carried:
            self._across.post_recv(stream.source, self._place(stream, step)[0])
        for neighbor, place in zip(self._neighbors, self._straight_in.at(step), strict=True):
            self._inside.post_recv(neighbor, place)

    def _send(self, step: int) -> None:
        leaving = dict(zip(self._counterparts, self._leaving.at(step), strict=True))
        self._across.send_each(leaving, self._counterparts)
        for neighbor, fragment in zip(self._neighbors, self._straight.at(step), strict=True):
            self._inside.send(fragment, neighbor)

    def _forward(self, step: int) -> None:
        """Take the frames of a step: the own parts go to the outputs, other parts to the neighbors."""
        self._onward.next_step()
        for stream in self._handed:
            self._onward.post_recv(stream.carrier, self._outputs[stream.source][stream.part(self._local_rank, step)[1]])
        for neighbor, place in zip(self._neighbors, self._straight_in.at(step), strict=True):
            self._inside.recv(neighbor, place)
        for stream in self._carried:
            place, earlier = self._place(stream, step)
            fragment = self._across.recv(stream.source, place, earlier=earlier)
            for at, rank in enumerate(self._node):
                here, there = stream.part(at, step)
                if rank == self._ctx.rank:
                    self._outputs[stream.source][there].copy_(fragment[here])
                else:
                    self._onward.send(fragment[here], rank)

    def _take(self, step: int) -> None:
        """Take the parts that the neighbors have forwarded."""
        for stream in self._handed:
            self._onward.recv(stream.carrier, self._outputs[stream.source][stream.part(self._local_rank, step)[1]])


def _laid(whole: torch.Tensor, sources: Sequence[torch.Tensor], ranks: Sequence[int]) -> torch.Tensor:
    """Return the segments of ``whole`` for ``ranks``, laid end to end: a view where the ranks follow each other, otherwise a copy."""
    first, last = ranks[0], ranks[-1]
    if list(ranks) != list(range(first, last + 1)):
        return torch.cat([sources[rank] for rank in ranks])
    begin = sum(source.numel() for source in sources[:first])
    return whole[begin : begin + sum(sources[rank].numel() for rank in ranks)]


# ---- the collectives


def exchange(ctx: OpContext, request: Request, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    """Segment r of the input goes to rank r, segment r of the output comes from it: tensors of a list, or parts of one tensor."""
    if request.op == "all_to_all_single":
        outputs = outputs[0].split(request.segments.coming)
        if ctx.nodes:
            exchange_by_node(ctx, request, inputs[0], outputs)
            return
        inputs = inputs[0].split(request.segments.leaving)
    coder = coder_of(ctx, request, inputs)
    sources = detached(inputs, outputs, outputs)
    leaving, coming = Fragments(ctx, sources), Fragments(ctx, [outputs[peer] for peer in ctx.peers])
    outputs[ctx.rank].copy_(sources[ctx.rank])
    with open_exchange(ctx, coder=coder) as exchange:
        # A frame refers to rows of earlier frames. In the home of a segment, an arriving fragment writes over them.
        lasting = [peer for peer in ctx.peers if sources[peer].data_ptr() != outputs[peer].data_ptr()]
        coder.search({peer: sources[peer] for peer in lasting})
        received = dict.fromkeys(ctx.peers, 0)  # elements

        def post(step: int) -> None:
            exchange.next_step()
            for peer, place in zip(ctx.peers, coming.at(step), strict=True):
                exchange.post_recv(peer, place)
            exchange.send_each(leaving.at(step), ctx.peers[::-1])

        def take(step: int) -> None:
            for peer, place in zip(ctx.peers, coming.at(step), strict=True):
                exchange.recv(peer, place, earlier=outputs[peer][: received[peer]])
                received[peer] += place.numel()

        run_pipeline(max(leaving.steps, coming.steps), post, take)
