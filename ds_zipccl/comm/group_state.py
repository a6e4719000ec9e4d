"""The state that a rank keeps of each of its groups: asking torch at every call would cost more than a small message takes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import count
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, get_debug_level

from ds_zipccl.comm import topology, work
from ds_zipccl.comm.calibration import measure
from ds_zipccl.comm.transport import TRANSPORTS
from ds_zipccl.comm.transport.protocol import TAGS_PER_COLLECTIVE, TAGS_PER_RANGE, SumSwitches, TagRange, Transport
from ds_zipccl.policy import wire
from ds_zipccl.policy.cost_model import LinkProfile


class RawBackoff:
    """Frames of one operation and role that did not shrink go uncoded for a while: coding them is time lost."""

    def __init__(self) -> None:
        self._left = 0

    def skips(self) -> bool:
        """Return whether the next frame goes uncoded."""
        self._left -= self._left > 0
        return self._left > 0

    def note(self, logical_bytes: int, wire_bytes: int) -> None:
        """Take in the size of a coded frame."""
        if wire.incompressible(logical_bytes, wire_bytes):
            self._left = wire.RAW_FRAMES + 1


class GroupState:
    """A group that this rank is in. It goes with the group, so that a group made anew starts afresh on all ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._backoffs: dict[tuple[str, str], RawBackoff] = {}
        self.nodes: list[list[int]] | None = None
        self.places: dict[int, int] = {}  # of the default group: global rank -> node
        self.profiles: dict[str, LinkProfile] = {}  # by backend
        self.sum_switches: SumSwitches | None = None
        pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
        # torch then compares how many messages each rank has sent and received, and takes a difference for a wrong program
        detail = " under TORCH_DISTRIBUTED_DEBUG=DETAIL" if get_debug_level() == DebugLevel.DETAIL else ""
        self.backends = {device: name + detail for device, name in pairs}
        self._issued = count()
        self._issued_lock = threading.Lock()
        work.settle_at_exit()

    def backend(self, device: str) -> str:
        """Return the name of the backend that serves tensors on ``device``, such as "gloo"; "" where none does."""
        return self.backends.get(device, "")

    def transport(self, device: str, group: dist.ProcessGroup) -> Transport:
        """Return the transport of tensors on ``device``; admission has found one for their backend."""
        return TRANSPORTS[self.backend(device)](group)

    def backoff(self, op: str, role: str) -> RawBackoff:
        """Return the backoff of an operation's frames."""
        return self._backoffs.setdefault((op, role), RawBackoff())

    def next_tag(self) -> int:
        """Return the first tag of the next collective, which has TAGS_PER_COLLECTIVE of them. To be called in program order."""
        with self._issued_lock:
            number = next(self._issued) % (TAGS_PER_RANGE // TAGS_PER_COLLECTIVE)
            return TagRange.COLLECTIVE + number * TAGS_PER_COLLECTIVE


_states: WeakKeyDictionary[dist.ProcessGroup, GroupState] = WeakKeyDictionary()
_making = threading.Lock()


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group itself, the default group for None.

    Raises:
        ValueError: torch.distributed is not initialized.
    """
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise ValueError("there is no process group yet; call torch.distributed.init_process_group first")
    return found


def group_state(group: dist.ProcessGroup | None) -> GroupState | None:
    """Return the state of a group, the default group for None; None for a group that this rank is not in.

    Raises:
        ValueError: torch.distributed is not initialized, or does not know the group.
    """
    group = resolve_group(group)
    if not isinstance(group, dist.ProcessGroup):  # torch's mark for a group of other ranks
        return None
    state = _states.get(group)
    if state is None and dist.get_rank(group) >= 0:
        with _making:  # the state of a group must be one object for all threads
            state = _states.get(group) or _states.setdefault(group, GroupState(group))
    return state


def group_size(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks of the group; -1 where this rank is not in it."""
    state = group_state(group)
    return state.size if state else -1


def is_member(group: dist.ProcessGroup | None) -> bool:
    """Return whether this rank is in the group."""
    return group_state(group) is not None


def group_rank(group: dist.ProcessGroup | None, global_rank: int | None, rank: int | None) -> int:
    """Return the rank in the group, given as one of global rank and group rank.

    Raises:
        ValueError: both or none is given, or the global rank is not in the group.
    """
    if (global_rank is None) == (rank is None):
        raise ValueError(f"give either a global rank or a group rank, got {global_rank} and {rank}")
    if rank is not None:
        return rank
    assert global_rank is not None  # one of both is given
    return dist.get_group_rank(resolve_group(group), global_rank)


def group_nodes(group: dist.ProcessGroup) -> Sequence[Sequence[int]]:
    """Return the ranks of a group that this rank is in, by node; none before :func:`calibrate`."""
    state, world = group_state(group), group_state(None)
    if state is None or world is None:
        return []
    if state.nodes is None and world.places:
        state.nodes = topology.by_node(group, world.places)
    return state.nodes or []


def calibrate(group: dist.ProcessGroup | None = None) -> LinkProfile:
    """Measure link and codec of a group (None: the default group) for ``mode`` auto, and find the ranks that share a node.

    A collective: every rank of the group calls it, while nothing else is under way on the group; blocks for less than 2 s. A group that is
    not measured itself is taken to be like the default group. Where nothing is measured every schedule is tried, gathers do not go by
    node, and sends are always coded.

    Raises:
        ValueError: the group has one rank, this rank is not in it, or its CPU tensors do not go over gloo.
        RuntimeError: a peer or the transport failed.
    """
    profile = measure(group)
    state = group_state(group)
    assert state is not None  # measure() has looked
    state.profiles[state.backend("cpu")] = profile
    if group is None or group is dist.group.WORLD:
        state.places = topology.find(resolve_group(None))
    return profile


def link_profile(state: GroupState, device: str) -> LinkProfile | None:
    """Return the measured profile of the link that tensors on ``device`` go by, equal on all ranks; None where nothing was measured."""
    backend = state.backend(device)
    if backend in state.profiles:
        return state.profiles[backend]
    world = group_state(None)
    return world.profiles.get(backend) if world else None
