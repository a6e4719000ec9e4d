"""What a rank knows of its groups, worked out once: asking torch at every call would cost more than a small message takes."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, get_debug_level

from ds_zipccl.comm import topology, work
from ds_zipccl.comm.calibration import measure
from ds_zipccl.policy.cost_model import Profile

#: Kinds of messages whose plans are remembered (admission: programs repeat themselves).
REMEMBERED = 4096


class Members:
    """A group that this rank is in. ``plans`` and ``tuners`` belong to :mod:`ds_zipccl.comm.execution`, ``habits`` to
    :mod:`ds_zipccl.comm.frames`, as does ``denormals``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.plans: dict[tuple[Any, ...], Any] = {}
        self.tuners: dict[tuple[Any, ...], Any] = {}
        self.habits: dict[tuple[str, str], Any] = {}
        self.nodes: list[list[int]] | None = None
        self.places: dict[int, int] = {}  # of the default group: global rank -> node
        self.profile: Profile | None = None
        self.denormals: Any = None
        pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
        # torch then compares how many messages each rank has sent and received, and takes a difference for a wrong program
        detail = " under TORCH_DISTRIBUTED_DEBUG=DETAIL" if get_debug_level() == DebugLevel.DETAIL else ""
        self.backends = {device: name + detail for device, name in pairs}
        work.settle_at_exit()

    def backend(self, device: str) -> str:
        """Name of the backend that serves tensors on ``device``, such as "gloo"; "" where there is none."""
        return self.backends.get(device, "")


_members: WeakKeyDictionary[dist.ProcessGroup, Members] = WeakKeyDictionary()
_making = threading.Lock()


def resolved(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group itself, the default group for None.

    Raises:
        ValueError: torch.distributed is not initialised.
    """
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise ValueError("there is no process group yet; call torch.distributed.init_process_group first")
    return found


def known(group: dist.ProcessGroup | None) -> Members | None:
    """The group's members; None for a group that this rank is not in. ``group`` None is the default group.

    Raises:
        ValueError: torch.distributed is not initialised, or does not know the group.
    """
    group = resolved(group)
    if not isinstance(group, dist.ProcessGroup):  # torch's mark for a group that others are in
        return None
    members = _members.get(group)
    if members is None and dist.get_rank(group) >= 0:
        with _making:  # what is known of a group must be one thing for all threads
            members = _members.get(group) or _members.setdefault(group, Members(group))
    return members


def size_of(group: dist.ProcessGroup | None) -> int:
    """Ranks in the group; -1 where this rank is not in it."""
    members = known(group)
    return members.size if members else -1


def nodes_of(group: dist.ProcessGroup) -> list[list[int]]:
    """The ranks of a group that this rank is in, by node; none before :func:`calibrate`."""
    members, world = known(group), known(None)
    if members is None or world is None:
        return []
    if members.nodes is None and world.places:
        members.nodes = topology.by_node(group, world.places)
    return members.nodes or []


def calibrate(group: dist.ProcessGroup | None = None) -> Profile:
    """Measure link and codec of a group (None: the default group) for ``mode`` auto, and find which ranks share a node.

    A collective: every rank of the group calls it, while nothing else is under way on the group; blocks for less than 2 s. Groups that are
    not measured themselves are taken to be like the default group. Where nothing is measured every schedule is tried, gathers do not go by
    node, and sends are always coded.

    Raises:
        ValueError: the group has one rank, this rank is not in it, or its CPU tensors do not go over gloo.
        RuntimeError: a peer or the transport failed.
    """
    profile = measure(group)
    members = known(group)
    assert members is not None  # measure() has looked
    members.profile = profile
    if group is None or group is dist.group.WORLD:
        members.places = topology.find(resolved(None))
    return profile


def profile_of(members: Members) -> Profile | None:
    """What is known of the group's link; equal on all ranks."""
    world = None if members.profile else known(None)
    return members.profile or (world.profile if world else None)
