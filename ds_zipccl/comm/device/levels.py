"""The two levels of a group: the ranks of a node, and the ranks that have the same seat in their nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.comm import topology
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.lanes import Lane
from ds_zipccl.comm.group_state import resolve_group
from ds_zipccl.comm.transport.protocol import CollectiveTransport


@dataclass(frozen=True)
class Levels:
    """The levels of a group, as one rank sees them.

    ``nodes``: the group ranks of each node; one level has a node for each rank. ``node`` and ``seat``: the place of this rank.
    ``inside``: the ranks of the own node; None in one level. ``between``: the ranks of the own seat, in the order of the nodes.
    """

    nodes: Sequence[Sequence[int]]
    node: int
    seat: int
    inside: CollectiveTransport | None
    between: CollectiveTransport


#: The sum of the backend, as torch.distributed takes it.
SUM: Any = dist.ReduceOp.SUM
#: group -> its levels. Groups of levels live as long as the job, as every group of torch.distributed does that nobody destroys.
_levels: WeakKeyDictionary[dist.ProcessGroup, Levels] = WeakKeyDictionary()
#: default group -> global ranks -> group of a level. Groups with the same nodes or seats share it.
_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()


def levels_of(ctx: DeviceContext, nodes: Sequence[Sequence[int]]) -> Levels:
    """Return the levels of the context's group: two if ``nodes`` names the ranks of each node, one if it is empty.

    Every rank of the group calls in program order. The first call makes the groups of the levels, and blocks until all ranks have called.
    """
    if not nodes:
        return Levels([[rank] for rank in range(ctx.size)], ctx.rank, 0, None, ctx.transport)
    found = _levels.get(ctx.group)
    return _levels.setdefault(ctx.group, _make(ctx, nodes)) if found is None else found


def _make(ctx: DeviceContext, nodes: Sequence[Sequence[int]]) -> Levels:
    seats = topology.seats(nodes)
    node, seat = next((node, ranks.index(ctx.rank)) for node, ranks in enumerate(nodes) if ctx.rank in ranks)
    inside, between = (
        ctx.state.collective_transport(ctx.device.type, _group(ctx, split, number))
        for split, number in ((nodes, node), (seats, seat))
    )
    # The first operation connects the ranks, and blocks the host meanwhile (NVIDIA/nccl#783).
    with ctx.lanes.on(Lane.WIRE):
        words = tensors.filled(len(nodes[0]) + 1, 0, torch.float32, ctx.device)
        inside.reduce_scatter(words[:1], words[1:], SUM)
        sent, received = (tensors.filled(len(nodes), 0, torch.uint8, ctx.device) for _ in range(2))
        between.all_to_all(received, sent)
    return Levels(nodes, node, seat, inside, between)


def _group(ctx: DeviceContext, split: Sequence[Sequence[int]], number: int) -> dist.ProcessGroup:
    """Return a group of the ranks ``split[number]``, this rank among them. The ranks of ``split`` are those of the context's group."""
    world = resolve_group(None)
    made = _made.setdefault(world, {})
    ranks = tuple(dist.get_global_rank(ctx.group, rank) for rank in split[number])
    if ranks not in made:
        if world.bound_device_id is None:
            found = dist.new_group(
                list(ranks), backend=ctx.state.backend(ctx.device.type), use_local_synchronization=True
            )
        else:
            # With a bound device new_group splits the communicator of the default group, for which all ranks of the job must call
            # (torch, _new_process_group_helper). Here only the ranks of this group do.
            found = dist.split_group(ctx.group, [list(ranks) for ranks in split])
        assert isinstance(found, dist.ProcessGroup)  # this rank is in it
        made[ranks] = found
    return made[ranks]
