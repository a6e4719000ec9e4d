"""The two levels of a group: the ranks of a node, and the ranks that have the same local rank in their nodes.

Levels have no groups of their own. An exchange of some ranks is the group's own all-to-all, in which all other ranks have nothing for each
other: a group of its own would need a name, or a communicator, on which ranks with different histories of groups do not agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ds_zipccl.comm import topology
from ds_zipccl.comm.device.context import DeviceContext


@dataclass(frozen=True)
class Levels:
    """The levels of a group, as one rank sees them.

    ``nodes``: the group ranks of each node; one level has a node for each rank. ``node`` and ``local_rank``: the place of this rank.
    ``node_ranks``: the ranks of the own node. ``peers``: the ranks of the own local_rank, in the order of the nodes. Both ascend.
    """

    nodes: Sequence[Sequence[int]]
    node: int
    local_rank: int
    node_ranks: Sequence[int]
    peers: Sequence[int]


def levels_of(ctx: DeviceContext, nodes: Sequence[Sequence[int]]) -> Levels:
    """Return the levels of the context's group: two if ``nodes`` names the ranks of each node, one if it is empty."""
    found = nodes or [[rank] for rank in range(ctx.size)]
    node, local_rank = next((node, ranks.index(ctx.rank)) for node, ranks in enumerate(found) if ctx.rank in ranks)
    return Levels(found, node, local_rank, found[node], topology.local_ranks(found)[local_rank])


def exchange(
    ctx: DeviceContext,
    ranks: Sequence[int],
    received: torch.Tensor,
    sent: torch.Tensor,
    received_sizes: Sequence[int],
    sent_sizes: Sequence[int],
) -> None:
    """Exchange pieces of flat tensors among ``ranks``, ascending, this rank among them; sizes in elements, one for each of them. All ranks
    of the group call, each with the ranks of its own node or local rank. Work of the current stream."""
    sizes = [[0] * ctx.size, [0] * ctx.size]
    for found, some in zip(sizes, (received_sizes, sent_sizes), strict=True):
        for rank, size in zip(ranks, some, strict=True):
            found[rank] = size
    ctx.transport.all_to_all(received, sent, *sizes)
