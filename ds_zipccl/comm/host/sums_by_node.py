"""Sums in two levels: inside each node in raw frames, then between the ranks of one local rank in coded frames.

Rank l of a node has local rank l. It first sums, for every node i, the shard of rank l of node i over its own node. Then the ranks of a
local rank send each other these sums of nodes: the elements of a shard enter a node once for each other node, in one frame. Links inside
a node are fast, and coding would only take time there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.host.pipeline import Exchange, Fragments, Received
from ds_zipccl.comm.reduction_order import Reduction, add_in_fp32
from ds_zipccl.comm.spans import within


class NodeAdder:
    """As :class:`.sums.ShardAdder`, in two levels; :mod:`ds_zipccl.comm.reduction_order` has the order of the sum.

    ``inside`` and ``between``: the exchanges inside the node and between the nodes.
    """

    def __init__(
        self,
        ctx: OpContext,
        inside: Exchange,
        between: Exchange,
        shards: Fragments,
        reduction: Reduction,
        spans: Sequence[slice],
    ) -> None:
        self._ctx, self._inside, self._between = ctx, inside, between
        self._shards, self._reduction, self._spans = shards, reduction, spans
        at = next(number for number, ranks in enumerate(ctx.nodes) if ctx.rank in ranks)
        self._node = ctx.nodes[at]
        self._local_rank = [ranks[self._node.index(ctx.rank)] for ranks in ctx.nodes]
        #: All nodes, the own one last: every rank begins with another node, so that not all frames enter one node at a time.
        self._turns = [*ctx.nodes[at + 1 :], *ctx.nodes[: at + 1]]
        self._seat_in_turn = [*self._local_rank[at + 1 :], *self._local_rank[: at + 1]]
        #: Steps that are posted: own contributions to the sums of this node, as in ``_seat_in_turn``.
        self._posted: deque[list[torch.Tensor]] = deque()
        #: Steps that are added in the node: the own fragment, its sum over the node, and the memory of the sum.
        self._added: deque[tuple[torch.Tensor, torch.Tensor, PooledBuffers]] = deque()
        self._taken = 0  # elements taken

    @property
    def stages(self) -> tuple[Callable[[int], None], ...]:
        """As :attr:`.reduce_scatter.ShardAdder.stages`."""
        return (self._post, self._add_in_node)

    def _post(self, step: int) -> None:
        """Post the receives and sends of a step inside the node."""
        self._inside.next_step()
        fragments = self._shards.at(step)
        neighbors = [rank for rank in self._node if rank != self._ctx.rank]
        for neighbor in neighbors:
            for rank in self._seat_in_turn:
                self._inside.post_recv(neighbor, fragments[rank])
        for neighbor in neighbors:
            local_rank = self._node.index(neighbor)
            for ranks in self._turns:
                self._inside.send(fragments[ranks[local_rank]], neighbor)
        self._posted.append([fragments[rank] for rank in self._seat_in_turn])

    def _add_in_node(self, step: int) -> None:
        """Add the frames of the neighbors for every rank of the local rank, and send each rank the sum of this node."""
        self._between.next_step()
        *others, own = self._posted.popleft()
        *peers, _ = self._seat_in_turn
        for peer in peers:
            self._between.post_recv(peer, own)
        for peer, contribution in zip(peers, others, strict=True):
            buffers = PooledBuffers()
            self._between.send(self._sum_of_node(contribution, buffers), peer)
            buffers.release()
        self._added.append((own, self._sum_of_node(own, buffers := PooledBuffers()), buffers))

    def _sum_of_node(self, contribution: torch.Tensor, buffers: PooledBuffers) -> torch.Tensor:
        """Return the sum of ``contribution`` over this node, in memory of ``buffers``."""
        total = buffers.empty(contribution.numel(), contribution.dtype, contribution.device)
        if total.numel():
            received = Received(self._ctx.rank, self._inside, contribution)
            add_in_fp32(received, self._node, total, self._ctx.flushing_ranks())
        return total

    def take(self, out: torch.Tensor | None = None) -> tuple[torch.Tensor, list[slice]]:
        """As :meth:`.reduce_scatter.ShardAdder.take`. ``out`` holds the average already if the reduction is AVG."""
        own, total, buffers = self._added.popleft()
        out = own if out is None else out
        begin, self._taken = self._taken, self._taken + out.numel()
        if out.numel():
            flushing = self._ctx.flushing_ranks()
            # the first rank of a node decides: a sum must not depend on the local rank that makes it
            flushes = {rank: flushing[ranks[0]] for rank, ranks in zip(self._local_rank, self._ctx.nodes, strict=True)}
            received = Received(self._ctx.rank, self._between, total)
            add_in_fp32(received, self._local_rank, out, flushes, self._reduction.divisor)
        buffers.release()
        return out, within(self._spans, begin, self._taken)

    def finish(self, out: torch.Tensor) -> None:
        """Do nothing: sums in fp32 are divided before they are rounded."""
