"""Sums in two levels: nodes that ranks of one machine pretend to be, the documented order on the host, and bytes between nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl import comm
from ds_zipccl.comm import topology
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.comm.transport import TRANSPORTS
from ds_zipccl.comm.transport.gloo import GlooTransport

Nodes = Sequence[Sequence[int]]

#: Sums, and a gather, of a tensor whose elements the ranks share evenly: the message of which bytes between nodes are counted.
CALLS: dict[str, Callable[..., Any]] = {
    "reduce_scatter_tensor": lambda x, ranks, **more: comm.reduce_scatter_tensor(
        x.new_empty(len(x) // ranks), x, **more
    ),
    "reduce_scatter": lambda x, ranks, **more: comm.reduce_scatter(
        x.new_empty(len(x) // ranks), list(x.chunk(ranks)), **more
    ),
    "all_reduce": lambda x, ranks, **more: comm.all_reduce(x, **more),
    "balanced": lambda x, ranks, **more: comm.reduce_to_owners(
        x, [(len(x) // ranks, (rank,)) for rank in range(ranks)], **more
    ),
    "gather": lambda x, ranks, **more: comm.all_gather_into_tensor(
        x.new_empty(len(x)), x[: len(x) // ranks].clone(), **more
    ),
    "one owner": lambda x, ranks, **more: comm.reduce_to_owners(x, [(len(x), (1,))], **more),
    "all own all": lambda x, ranks, **more: comm.reduce_to_owners(x, [(len(x), range(ranks))], **more),
}


def nodes_of(nodes: int, each: int) -> list[list[int]]:
    """Nodes of ``each`` ranks that follow each other."""
    return [list(range(node * each, (node + 1) * each)) for node in range(nodes)]


def pretend(nodes: Nodes) -> None:
    """From now on the default group has these nodes; its subgroups too, if they are new."""
    state = group_state(None)
    assert state is not None
    state.nodes = [list(ranks) for ranks in nodes]
    state.places = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}


def in_two_levels(contributions: Sequence[torch.Tensor], nodes: Nodes, average: bool = False) -> torch.Tensor:
    """The documented order: node by node in fp32 in rank order, divided, rounded once; then the nodes in fp32 in their order, rounded
    once."""
    sums = [in_order([contributions[rank] for rank in ranks], len(contributions) if average else 1) for ranks in nodes]
    return in_order(sums, 1)


def in_one_level(contributions: Sequence[torch.Tensor], average: bool = False) -> torch.Tensor:
    """In fp32 in rank order, rounded once."""
    return in_order(contributions, len(contributions) if average else 1)


def in_order(summands: Sequence[torch.Tensor], divisor: int) -> torch.Tensor:
    """In fp32 in their order, divided, rounded once."""
    total = summands[0].float()
    for summand in summands[1:]:
        total = total + summand.float()
    rounded = (total / divisor).to(summands[0].dtype)
    return rounded.masked_fill(rounded.isnan(), torch.nan)


def in_one_level_only() -> None:
    """From now on no group has two levels."""
    topology.levels = lambda nodes: False


class Summed:
    """The collectives on tensors that hold the sums already."""

    def all_reduce(self, tensor: torch.Tensor, *more: Any) -> None:
        pass

    all_reduce_coalesced = reduce = all_reduce

    def reduce_scatter_tensor(self, output: torch.Tensor, input: torch.Tensor, *more: Any) -> None:
        output.copy_(input[len(output) * dist.get_rank() :][: len(output)])

    def reduce_scatter(self, output: torch.Tensor, shards: list[torch.Tensor], *more: Any) -> None:
        output.copy_(shards[dist.get_rank()])


class CountingTransport(GlooTransport):
    """gloo, with the bytes that this rank sends to ranks of other nodes, and inside its own, counted in ``between`` and ``inside``."""

    between = inside = 0

    def post_send(self, buffer: torch.Tensor, peer: int, tag: int) -> dist.Work:
        state = group_state(self._group)
        assert state is not None and state.nodes
        if any({state.rank, peer} <= set(ranks) for ranks in state.nodes):
            CountingTransport.inside += buffer.nbytes
        else:
            CountingTransport.between += buffer.nbytes
        return super().post_send(buffer, peer, tag)

    @classmethod
    def begin(cls) -> None:
        """Count from now on, from 0."""
        TRANSPORTS["gloo"] = cls
        cls.between = cls.inside = 0
