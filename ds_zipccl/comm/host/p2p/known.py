"""Side tensors of sends, such as masks and token numbers: a tensor that equals the last one of its channel goes as a hash.

A channel is the sends of one rank to another one on one tag of a group. For each kind of tensor, a dtype and a size, the sender keeps the
hash of the last tensor, and the receiver a copy of it. Both sides remember in the same order and with the same limit, so that they always
know the same kinds:

* Sends of a channel are put in order by the sender's lock: the hash is kept where the message is posted.
* Messages of a channel arrive in that order. The receiver decodes them in that order too, whatever the order of the program's ``wait()``:
  a receive first ends the earlier receives of its channel. Their messages have arrived, so that nothing waits for the program.
* The limit of a channel is a function of the config and of the tag, and the kind that was sent least recently goes first.

A message that fails leaves the two sides apart. The hash then tells: the receiver refuses, and no wrong tensor is ever taken for the right
one. The state lives as long as the group, so that a new group starts afresh on all ranks.
"""

from __future__ import annotations

import contextlib
import threading

import torch

from ds_zipccl.comm.buffer_pool import Latest
from ds_zipccl.comm.group_state import GroupState, of_all_groups
from ds_zipccl.comm.work import Work
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy import wire
from ds_zipccl.policy.admission import SIDE_DTYPES
from ds_zipccl.telemetry import counters

#: Tags with channels that remember (admission). All tags of a pair of ranks together keep at most ``staging_mib``.
TAGS = 4

#: dtype and elements of a tensor.
Kind = tuple[torch.dtype, int]


def limit(config: ZipcclConfig) -> int:
    """Return the most bytes of the tensors that a channel remembers."""
    return config.staging // TAGS


def remembers(dtype: torch.dtype, numel: int, tag: int, config: ZipcclConfig) -> bool:
    """Return whether both sides remember a send: its dtype is not coded, and its channel has room. Equal on both sides."""
    nbytes = numel * dtype.itemsize
    return dtype in SIDE_DTYPES and tag < TAGS and wire.RAW_BELOW_BYTES <= nbytes <= limit(config)


class Sent(Latest[Kind, bytes]):
    """The sender's side of a channel: the hashes of the last tensors. The lock is held while a message is posted and remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Inbox:
    """The receiver's side of the channels of one tag. ``open``: the receives that have not ended, as they were posted. The lock is held
    while a receive is posted, and where one ends."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open: list[Receipt] = []
        self._copies: dict[int, Latest[Kind, torch.Tensor]] = {}

    def copies(self, source: int) -> Latest[Kind, torch.Tensor]:
        """Return the copies of the channel of rank ``source``."""
        return self._copies.setdefault(source, Latest())

    def nbytes(self) -> int:
        """Return the bytes of all copies."""
        return sum(latest.nbytes for latest in tuple(self._copies.values()))


class Receipt:
    """The place of one receive in the order of its channel. Made, and given its handle ``work``, while the inbox's lock is held. The handle
    is kept until the receive ends, as the program may drop it, and no longer: it refers to the group. ``ordered``: the receive's own tensor
    is of a kind that is remembered. A sender's may be so where the receive's is not: such receives should end in order."""

    def __init__(self, inbox: Inbox, peer: int | None, most: int, ordered: bool) -> None:
        self._inbox, self._peer, self._most = inbox, peer, most
        self._earlier = tuple(inbox.open) if ordered else ()
        self.work: Work | None = None
        if ordered:
            inbox.open.append(self)

    def take_turn(self, source: int) -> None:
        """Block until the earlier receives of the channel of ``source``, from which this one's message has arrived, have ended.

        A receive from any rank takes the message that arrives first. So if this is one, earlier ones have their messages. If this is one
        from ``source``, an earlier one from any rank belongs to another channel: otherwise chance would decide which receive gets which
        message.
        """
        for other in self._earlier:
            mine = other._peer == source or (other._peer is None and self._peer is None)
            if mine and (work := other.work) is not None:
                with contextlib.suppress(Exception):  # its own wait() raises
                    work.wait()

    def end(self) -> None:
        """Give the place up, after the tensor was kept or the receive has failed."""
        with self._inbox.lock:
            self._inbox.open[:] = (one for one in self._inbox.open if one is not self)
        self._earlier, self.work = (), None

    def copy(self, source: int, kind: Kind) -> torch.Tensor | None:
        """Return the copy of the last tensor of a kind of the channel, flat; None without one. Valid until :meth:`keep`."""
        return self._inbox.copies(source).get(kind)

    def keep(self, source: int, flat: torch.Tensor) -> None:
        """Remember a tensor of the channel, the contents of ``flat``. Bytes are copied: a copy of bools may not keep bytes above 1."""
        kind, latest, content = (flat.dtype, flat.numel()), self._inbox.copies(source), flat.view(torch.uint8)
        kept = latest.get(kind)
        if kept is None:
            kept = content.clone().view(flat.dtype)
        else:
            kept.view(torch.uint8).copy_(content)
        latest.put(kind, kept, kept.nbytes, self._most)


class _Channels:
    """The last side tensors of sends: hashes of the sender, copies of the receiver."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int], Sent] = {}
        self.inboxes: dict[int, Inbox] = {}


def sent(state: GroupState, peer: int, tag: int) -> Sent:
    """Return the hashes of this rank's sends to rank ``peer`` of a group."""
    return state.of(_Channels).sent.setdefault((peer, tag), Sent())


def inbox(state: GroupState, tag: int) -> Inbox:
    """Return the channels of a tag of a group to this rank."""
    return state.of(_Channels).inboxes.setdefault(tag, Inbox())


def _kept_bytes() -> int:
    return sum(box.nbytes() for channels in of_all_groups(_Channels) for box in list(channels.inboxes.values()))


counters.count_memory("copies of side tensors received", _kept_bytes)
