"""The state that a rank keeps of each of its groups. Asking torch at every call would take longer than a small message."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ds_zipccl import codecs
from ds_zipccl.comm import topology, work
from ds_zipccl.comm.transport import COLLECTIVE_TRANSPORTS
from ds_zipccl.comm.transport.protocol import BODY_TAGS, TAGS_PER_COLLECTIVE, TAGS_PER_RANGE, TagRange
from ds_zipccl.policy import wire
from ds_zipccl.policy.cost_model import DeviceProfile, LinkProfile
from ds_zipccl.policy.settled import Sums

_T = TypeVar("_T")


class GroupState:
    """Ranks, backends, tags issued and measured profiles of a group that has this rank. The state lives as long as the
    group, so that a new group starts afresh on all ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._backoffs: dict[tuple[str, ...], wire.Backoff] = {}
        self._objects: dict[type[Any], Any] = {}
        self.nodes: list[list[int]] | None = None
        self.places: dict[int, int] = {}  # of the default group: global rank -> node
        self.profile: LinkProfile | None = None  # as measured
        #: Of the default group: the gradient sums of groups in stream order where `reduction` is auto; None: no job has settled them.
        self.device_sums: Sums | None = None
        #: Of groups in stream order, by device and backend.
        self.device_profiles: dict[tuple[str, str], DeviceProfile] = {}
        #: Of the default group: bytes of the staging buffers by device, where the config names none; see :mod:`.device.reserve`.
        self.device_staging: dict[str, int] = {}
        #: Of the default group: some rank could not reserve them.
        self.unreserved = False
        #: See :meth:`.transport.protocol.Transport.ask_flushing`; None before the first sum.
        self.flushing: Callable[[], Sequence[bool]] | None = None
        #: By the name of the kernel backend: flags of ranks without kernels of row frames. Asked by the first operation that may have rows.
        self.row_kernels: dict[str, Callable[[], torch.Tensor]] = {}
        self.hash_key: bytes | None = None  # see hash_key()
        #: Global ranks of the group, and that of this rank: an operation may outlive destroy_process_group(), and torch's tables do not.
        self.ranks, self.global_rank = dist.get_process_group_ranks(group), dist.get_rank()
        pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
        self.backends = {device: name + _comparing(group, device) for device, name in pairs}
        #: Time that the host waits for the other ranks of a group in stream order; None: the timeout of the group.
        self.patience: timedelta | None = None
        self._issued = count()
        self._announced = count()
        self._issued_lock = threading.Lock()
        work.threads.used = True

    def of(self, kind: type[_T]) -> _T:
        """Return this group's object of a class, which is made by the first call. All threads get the same object, and so a module keeps
        its state of a group without a table of its own."""
        found = self._objects.get(kind)
        if found is None:
            found = self._objects.setdefault(kind, kind())
        return cast(_T, found)

    def backend(self, device: str) -> str:
        """Return the name of the backend of tensors on ``device``, such as "gloo"; "" where the device has no backend."""
        return self.backends.get(device, "")

    def streams(self, device: str) -> bool:
        """Return whether the transport of tensors on ``device`` is one in stream order."""
        return self.backend(device) in COLLECTIVE_TRANSPORTS

    def backoff(self, *kind: str, skipped: int = wire.RAW_FRAMES, patience: int = 1) -> wire.Backoff:
        """Return the backoff of attempts of a kind, such as an operation's frames: after one that did not shrink, the next ones are raw,
        because compressing them is time lost. ``skipped``, ``patience``: see :class:`ds_zipccl.policy.wire.Backoff`."""
        return self._backoffs.setdefault(kind, wire.Backoff(skipped, patience))

    def next_tag(self) -> int:
        """Return the first of the TAGS_PER_COLLECTIVE tags of the next collective. Every rank calls in program order."""
        with self._issued_lock:
            number = next(self._issued) % (TAGS_PER_RANGE // TAGS_PER_COLLECTIVE)
            return TagRange.COLLECTIVE + number * TAGS_PER_COLLECTIVE

    def next_body(self) -> int:
        """Return the number of the next announced send of this rank, from 0 to BODY_TAGS - 1."""
        return next(self._announced) % BODY_TAGS


def _comparing(group: dist.ProcessGroup, device: str) -> str:
    """Return a clause about a backend that torch has wrapped: under DETAIL it compares the ranks' numbers of messages, and refuses programs
    where they differ. A group is wrapped when it is made, on all ranks; the debug level is a matter of one rank."""
    with suppress(RuntimeError):  # no backend for the device here
        if type(group._get_backend(torch.device(device))).__name__ == "_ProcessGroupWrapper":
            return " under TORCH_DISTRIBUTED_DEBUG=DETAIL"
    return ""


_states: WeakKeyDictionary[dist.ProcessGroup, GroupState] = WeakKeyDictionary()
_making = threading.Lock()


def of_all_groups(kind: type[_T]) -> list[_T]:
    """Return the objects of a class that :meth:`GroupState.of` has made for the groups that live."""
    return [state._objects[kind] for state in list(_states.values()) if kind in state._objects]


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group itself, the default group for None.

    Raises:
        ValueError: torch.distributed is not initialized.
    """
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise ValueError("wanted a process group, got none; call torch.distributed.init_process_group first")
    return found


def group_state(group: dist.ProcessGroup | None) -> GroupState | None:
    """Return the state of a group, or None if this rank is not in the group. ``group`` None is the default group.

    Raises:
        ValueError: torch.distributed is not initialized, or does not know the group.
    """
    group = resolve_group(group)
    if not isinstance(group, dist.ProcessGroup):  # torch's mark for a group without this rank
        return None
    state = _states.get(group)
    if state is None and dist.get_rank(group) >= 0:
        with _making:  # all threads must get the same object
            state = _states.get(group) or _states.setdefault(group, GroupState(group))
    return state


def state_of(group: dist.ProcessGroup | None) -> GroupState:
    """Return the state of a group that this rank belongs to; every rank belongs to the default group, None. Raises as
    :func:`group_state`."""
    state = group_state(group)
    assert state is not None  # the caller has an operation in the group
    return state


def hash_key() -> bytes:
    """Return the key of this job's hashes: random bytes that one rank has drawn, which no writer of training data knows. An operation uses
    that of its context, as it may outlive the default group.

    The first call blocks for the rendezvous store; no rank waits for another one there.
    """
    world = state_of(None)
    if world.hash_key is None:
        world.hash_key = topology.secret()
    return world.hash_key


def region_hash(words: torch.Tensor, key: bytes | None = None, *, route: str = "auto") -> bytes:
    """Return :func:`ds_zipccl.region_hash` with a key, :func:`hash_key` if None; blocks."""
    return codecs.region_hash(words, key=hash_key() if key is None else key, route=route)


def group_size(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks of the group; -1 if this rank is not in the group."""
    state = group_state(group)
    return state.size if state else -1


def is_member(group: dist.ProcessGroup | None) -> bool:
    """Return whether this rank is in the group."""
    return group_state(group) is not None


def group_rank(group: dist.ProcessGroup | None, global_rank: int | None, rank: int | None) -> int:
    """Return the group rank of a rank that is given either as a global rank or as a group rank.

    Raises:
        ValueError: both or neither is given, or the rank is not in the group.
    """
    if (global_rank is None) == (rank is None):
        raise ValueError(f"give either a global rank or a group rank, got {global_rank} and {rank}")
    if rank is None:
        assert global_rank is not None  # exactly one is given
        rank = dist.get_group_rank(resolve_group(group), global_rank)
    if not 0 <= rank < group_size(group):  # backends may crash on such a rank
        raise ValueError(f"wanted a rank of the group, 0 to {group_size(group) - 1}, got {rank}")
    return rank


def group_nodes(group: dist.ProcessGroup) -> Sequence[Sequence[int]]:
    """Return the group ranks of each node; an empty list before :func:`find_nodes`, and if this rank is not in the group."""
    state = group_state(group)
    if state is None:
        return []
    if state.nodes is None and (places := state_of(None).places):  # an operation may outlive the default group
        state.nodes = topology.by_node(group, places)
    return state.nodes or []


def find_nodes() -> None:
    """Find the ranks that share a node. A collective: every rank of the default group calls, and blocks.

    Before, gathers do not go by node and sums do not go in two levels.
    """
    state_of(None).places = topology.find(resolve_group(None))


def nodes_of_job() -> Sequence[Sequence[int]]:
    """Return the ranks of each node of the default group, which are found now if they are unknown. A collective as :func:`find_nodes`."""
    world = resolve_group(None)
    if not group_nodes(world):
        find_nodes()
    return group_nodes(world)


def link_profile(state: GroupState) -> LinkProfile | None:
    """Return the measured profile of the link and of the codec of CPU tensors, equal on all ranks: that of the default group where the
    group has none and the same backend; None without a measurement."""
    world = group_state(None)
    if state.profile is not None or world is None or world.backend("cpu") != state.backend("cpu"):
        return state.profile
    return world.profile


def device_profile(device: str) -> DeviceProfile | None:
    """Return the measured profile of the default group for tensors on ``device`` in stream order, equal on all ranks; None without a
    measurement, see :func:`.device.choice.settle`."""
    world = group_state(None)
    return world.device_profiles.get((device, world.backend(device))) if world else None


def group_profile(group: dist.ProcessGroup, profile: DeviceProfile) -> DeviceProfile:
    """Return the profile of a group, of that of the default group: the other ranks of its nodes have groups like this one, and use their
    part of the network at the same time. Nodes are known, or the profile stays."""
    own, whole = group_nodes(group), group_nodes(resolve_group(None))
    if not own or not whole:
        return profile
    part = max(map(len, own)) / max(map(len, whole))
    return replace(profile, network=part * profile.network)
