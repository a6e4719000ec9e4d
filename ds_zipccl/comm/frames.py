"""Frames of one operation between the ranks of a group: tags, coding, errors.

Frames are bytes that travel by paired sends and receives on the caller's own group. gloo accepts a receive buffer larger than
what was sent, so a receive is posted with the bound of the frame and no sizes are exchanged: the header has the true length.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ds_zipccl import kernels
from ds_zipccl.codecs import CODECS, compress, compress_bound, compress_segments, decompress, decompress_add
from ds_zipccl.comm import host_staging
from ds_zipccl.comm.buffer_pool import Lease
from ds_zipccl.comm.denormals import Denormals
from ds_zipccl.comm.group_state import known
from ds_zipccl.comm.work import CommError
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.frame import FrameError
from ds_zipccl.kernels import sums as plain_sums
from ds_zipccl.policy import wire

#: Tags in each of our ranges (admission). The ranges lie above the tags that programs use and below 2**31.
TAGS = 1 << 28
COLLECTIVE_TAG = 1 << 30
P2P_TAG = COLLECTIVE_TAG + TAGS
SHADOW_TAG = P2P_TAG + TAGS
#: Exchanges of one collective (admission: gathers by node have two, and differences one before and one after them).
ROUNDS = 4

#: Operations issued so far on each group; goes with the group, so that a group made anew starts afresh on all ranks.
_issued: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
_issued_lock = threading.Lock()


class _Habit:
    """Frames of one kind that do not shrink go uncoded for a while: coding them is time lost."""

    def __init__(self) -> None:
        self._left = 0

    def skips(self) -> bool:
        """Whether the next frame goes uncoded."""
        self._left -= self._left > 0
        return self._left > 0

    def note(self, codec: str, logical_bytes: int, wire_bytes: int) -> None:
        """A frame was made, of so many bytes; those of an exponent code tell something."""
        if codec not in ("raw", "delta") and wire.incompressible(logical_bytes, wire_bytes):
            self._left = wire.RAW_FRAMES + 1


def next_tag(group: dist.ProcessGroup) -> int:
    """Tag of the next collective of ``group``: the first of ROUNDS tags. To be called in program order."""
    with _issued_lock:
        issued = _issued.setdefault(group, count())
        return COLLECTIVE_TAG + next(issued) % (TAGS // ROUNDS) * ROUNDS


class Link:
    """One coded operation of this rank: its group, its tag, its codec, and what it has sent.

    ``rank``, ``peers`` and all ranks below are ranks of the group. ``peers`` is the order in which to receive, nearest below
    first; it is also the order in which gloo's ring adds. ``logical_bytes`` and ``wire_bytes`` count what was sent. ``nodes``:
    the ranks by node where the schedule goes by node. ``differs``: what all ranks hold already goes as a difference; ``codec`` is
    that of all other frames. ``sums``: the operation adds; the first one of a group asks how its backend does (:mod:`.denormals`).
    """

    def __init__(
        self,
        op: str,
        group: dist.ProcessGroup,
        config: ZipcclConfig,
        role: str,
        codec: str,
        *,
        tag: int | None = None,
        nodes: Sequence[Sequence[int]] = (),
        sums: bool = False,
    ) -> None:
        self.op = op
        self.group = group
        members = known(group)
        assert members is not None  # others have no operation here
        self.rank, self.size = members.rank, members.size
        self.peers = [(self.rank - step) % self.size for step in range(1, self.size)]
        self.nodes = nodes
        self.logical_bytes = 0
        self.wire_bytes = 0
        self._config = config
        self.role = role
        self.differs = codec == "delta"
        self.codec = config.codec if self.differs else codec
        self._tag = next_tag(group) if tag is None else tag
        if sums and members.denormals is None and members.backend("cpu") == "gloo":
            members.denormals = Denormals(group)
        self.denormals: Denormals | None = members.denormals
        self._habit = members.habits.setdefault((op, role), _Habit())

    def tag(self, index: int) -> int:
        """Tag of round ``index``."""
        assert index < ROUNDS, f"round {index} of {ROUNDS} has the tag of another operation"
        return self._tag + index

    def piece_numel(self, numel: int, itemsize: int, rounds: int) -> int:
        """Elements of the pieces that so many go in, in so many rounds at a time; the last one may be shorter."""
        return wire.fragment_numel(numel, itemsize, self.size, (self._config.staging_mib << 20) // rounds)

    def error(self, what: str) -> CommError:
        """``what`` went wrong, with where."""
        return CommError(f"{self.where()}: {what}")

    def where(self) -> str:
        """Names the operation, its group and this rank."""
        name = getattr(self.group, "group_name", "?")
        return f"{self.op} (group {name!r} of {self.size} ranks, role {self.role}, global rank {dist.get_rank()})"

    def global_rank(self, peer: int) -> int:
        """Rank in the default group of a rank of this group."""
        return dist.get_global_rank(self.group, peer)

    def encode(self, flat: torch.Tensor, lease: Lease, base: torch.Tensor | None = None) -> torch.Tensor:
        """Frame of a flat tensor, a difference if there is a base."""
        codec = self._codec_now(flat.nbytes) if base is None else "delta"
        frame = self._encode(flat, codec, lease, base)
        self._habit.note(codec, flat.nbytes, frame.nbytes)
        return frame

    def _codec_now(self, nbytes: int) -> str:
        codec = wire.frame_codec(self.codec, nbytes)
        return "raw" if codec != "raw" and self._habit.skips() else codec

    def _encode(self, flat: torch.Tensor, codec: str, lease: Lease, base: torch.Tensor | None) -> torch.Tensor:
        block = self._config.block
        if host_staging.is_staged(flat):
            return host_staging.encode(flat, codec, block, self._config.route, lease)
        buffer = lease.bytes(compress_bound(flat.numel(), flat.dtype, codec, block=block))
        route = self._config.route
        return compress(flat, codec, base=base, out=buffer, block=block, shaped=False, checksum=False, route=route)

    def encode_all(self, flats: Sequence[torch.Tensor], lease: Lease) -> list[torch.Tensor]:
        """Frames of flat tensors of one dtype, in one call of the kernels."""
        block = self._config.block
        if host_staging.is_staged(flats[0]):
            return [host_staging.encode(flat, self.codec, block, self._config.route, lease) for flat in flats]
        codec = self._codec_now(min(flat.nbytes for flat in flats))
        buffers = [lease.bytes(compress_bound(flat.numel(), flat.dtype, codec, block=block)) for flat in flats]
        frames = compress_segments(flats, buffers, codec, block=block, route=self._config.route)
        self._habit.note(codec, sum(flat.nbytes for flat in flats), sum(frame.nbytes for frame in frames))
        return frames

    def add(self, values: torch.Tensor, sums: torch.Tensor) -> None:
        """Add flat ``values`` to flat ``sums``, of their dtype or float32."""
        if host_staging.is_staged(sums):
            plain_sums.add(sums, values)
        else:
            kernels.add(values, sums, self._config.route)

    def flushing_ranks(self) -> Sequence[bool]:
        """Whether the backend of each rank flushes denormals when it adds; blocks until all ranks have begun their first sum.

        Raises:
            CommError: the transport failed.
        """
        if self.denormals is None:
            return [False] * self.size
        with self.naming("asking whether ranks flush denormals"):
            return self.denormals.flushing_ranks()

    def landing(self, flat: torch.Tensor, lease: Lease) -> torch.Tensor:
        """Buffer that holds any frame of as many elements as ``flat``, whatever codec the sender chooses."""
        block = self._config.block
        bounds = (compress_bound(flat.numel(), flat.dtype, codec, block=block) for codec in CODECS)
        return lease.bytes(max(bounds))

    def decode(
        self, frame: torch.Tensor, peer: int, out: torch.Tensor, base: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Decode the frame of ``peer`` into flat ``out``; ``base`` is for frames that are differences.

        Raises:
            CommError: from FrameError: it is damaged, or holds another dtype or number of elements.
        """
        with self._refusing(peer):
            if host_staging.is_staged(out):
                return host_staging.decode(frame, out, self._config.route)
            return decompress(frame, out, base=base, route=self._config.route)

    def decode_add(self, frame: torch.Tensor, peer: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        """Add what the frame of ``peer`` holds, of ``dtype``, to flat ``sums``.

        Raises:
            CommError: as :meth:`decode`.
        """
        with self._refusing(peer):
            if host_staging.is_staged(sums):
                return host_staging.decode_add(frame, dtype, sums, self._config.route)
            decompress_add(frame, sums, dtype=dtype, route=self._config.route)

    @contextmanager
    def _refusing(self, peer: int) -> Iterator[None]:
        try:
            yield
        except FrameError as error:
            raise self.error(f"frame from global rank {self.global_rank(peer)} refused: {error}") from error

    def count(self, logical_bytes: int, wire_bytes: int) -> None:
        """Account for one frame sent."""
        self.logical_bytes += logical_bytes
        self.wire_bytes += wire_bytes

    @contextmanager
    def naming(self, doing: str, peer: int | None = None) -> Iterator[None]:
        """Give errors of the transport a place: what was being done, with ``peer``, a rank of the group, where it is not in the words.

        Raises:
            CommError: from what the transport raised.
        """
        try:
            yield
        except CommError:
            raise
        except RuntimeError as error:
            whom = "" if peer is None else f" global rank {self.global_rank(peer)}"
            raise self.error(f"{doing}{whom}: {error}") from error
