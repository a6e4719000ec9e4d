"""The context of one operation on this rank: group, ranks, byte counts and error messages; tags and transport of messages."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ds_zipccl import kernels, tensors
from ds_zipccl.comm.group_state import hash_key, state_of
from ds_zipccl.comm.transport import TRANSPORTS
from ds_zipccl.comm.transport.protocol import TAGS_PER_COLLECTIVE, TagRange
from ds_zipccl.comm.work import CommError
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.frame import FrameError, FrameErrorCode
from ds_zipccl.policy import wire

#: Bytes of a text for the other ranks (admission: the beginning tells enough).
_TEXT_BYTES = 512


def packed(text: str) -> bytearray:
    """Return a text, or its beginning, as bytes for :func:`unpacked`, equally many for every text."""
    return bytearray(text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES))


def unpacked(part: torch.Tensor) -> str:
    """Return the text in the bytes of :func:`packed`, 1-D uint8 in host memory."""
    return bytes(part.tolist()).decode(errors="replace").strip()


class Call:
    """One operation of this rank, for messages and counters. ``rank`` and ``size`` are those of the group; ``kind``: of an expert
    exchange. ``logical_bytes`` and ``wire_bytes`` count the frames sent. ``rounding``: makes the frames whose values may change, None where
    none do."""

    def __init__(self, op: str, group: dist.ProcessGroup, config: ZipcclConfig, role: str) -> None:
        state = state_of(group)
        self.op, self.group, self.config, self.role, self.state = op, group, config, role, state
        self.rank, self.size = state.rank, state.size
        self.kind = ""
        self.rounding: Any = None  # of a class above this module
        self.logical_bytes = self.wire_bytes = 0

    def count(self, logical_bytes: int, wire_bytes: int) -> None:
        """Count frames sent."""
        self.logical_bytes += logical_bytes
        self.wire_bytes += wire_bytes

    def where(self) -> str:
        """Return the operation, its group and this rank, for messages."""
        name = getattr(self.group, "group_name", "?")
        return (
            f"{self.op} (group {name!r} of {self.size} ranks, role {self.role}, global rank {self.state.global_rank})"
        )

    def global_rank(self, peer: int) -> int:
        """Return the global rank of ``peer``, a rank of this group."""
        return self.state.ranks[peer]

    @contextmanager
    def refusing(self, peer: int) -> Iterator[None]:
        """Turn FrameError into CommError, which names the sender ``peer``, a rank of this group."""
        try:
            yield
        except FrameError as error:
            differ = "; the two ranks are at different calls, or use different tensors in this one"
            hint = differ if error.code == FrameErrorCode.MISMATCH else ""
            raise self.error(f"frame from global rank {self.global_rank(peer)} refused: {error}{hint}") from error

    def error(self, problem: str) -> CommError:
        """Return an error with the operation, the group, this rank and the problem."""
        return CommError(f"{self.where()}: {problem}")

    def naming(self, doing: str, peer: int | None = None) -> _Naming:
        """Add the operation, the action ``doing`` and ``peer``, a group rank, to errors of the transport. ``peer`` is None where the
        action names the rank.

        Raises:
            CommError: from the transport's error.
        """
        return _Naming(self, doing, peer)


class OpContext(Call):
    """One operation of this rank. Contexts are made in program order on every rank, because each takes the next tags of the group.

    ``rank``, ``peers`` and all ranks in schedules are group ranks. ``peers`` is the order of receives, nearest lower rank first; gloo's
    ring adds in the same order. ``nodes``: the ranks by node where the schedule goes by node. ``codec``: the codec of frames without a
    base. ``with_base``: frames may be differences. ``hash_key``: see :func:`.group_state.hash_key`.

    Args:
        tag: first tag; the group's next tags if None.
        sums: the operation adds. The first such operation of a group asks how the backend of each rank adds.
        rows: row frames may carry the operation's tensors. The first such operation of a group asks which ranks have their kernels.
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
        with_base: bool = False,
        sums: bool = False,
        rows: bool = False,
    ) -> None:
        super().__init__(op, group, config, role)
        state = self.state
        self.codec, self.with_base, self.nodes = codec, with_base, nodes
        self.peers = [(self.rank - step) % self.size for step in range(1, self.size)]
        self.transport = TRANSPORTS[state.backend("cpu")](group)  # admission lets no other backend and device through
        self._tag = state.next_tag() if tag is None else tag
        if sums and state.flushing is None:
            state.flushing = self.transport.ask_flushing()
        self._flushing = state.flushing
        if state.hash_key is None:
            state.hash_key = hash_key()
        self.hash_key = state.hash_key
        if rows and config.route not in state.row_kernels:
            kernel_backend = kernels.preferred(config.route, "cpu")
            lacking = kernels.lacking(functools.partial(kernels.row_route, kernel_backend, "cpu"))
            flag, tag = tensors.of_numbers([bool(lacking)], torch.uint8), TagRange.CALIBRATION + 1
            state.row_kernels[config.route] = SmallGather(self, flag, "flags of row kernels", tag).all
        self._row_kernels = state.row_kernels.get(config.route) if rows else None

    def tag(self, index: int) -> int:
        """Return the tag of exchange ``index``."""
        assert index < TAGS_PER_COLLECTIVE, (
            f"exchange {index} of {TAGS_PER_COLLECTIVE} has the tag of another operation"
        )
        return self._tag + index

    def fragment_numel(self, numel: int, itemsize: int, exchanges: int) -> int:
        """Return the elements of each fragment of a tensor of ``numel`` elements, with ``exchanges`` exchanges in flight. The last
        fragment may be shorter."""
        return wire.fragment_numel(numel, itemsize, self.size, self.config.staging // exchanges)

    def flushing_ranks(self) -> Sequence[bool]:
        """Return for each rank whether its backend flushes denormals in sums. Blocks until all ranks have begun their first sum.

        Raises:
            CommError: the transport failed.
        """
        if self._flushing is None:
            return [False] * self.size
        with self.naming("waiting for the other ranks' first sum on this group"):
            return self._flushing()

    def has_row_kernels(self) -> bool:
        """Return whether all ranks can make and read row frames: a rank without them must not be sent one. Equal on all ranks. Blocks until
        all ranks have begun their first operation that may have rows.

        Raises:
            CommError: the transport failed.
        """
        return self._row_kernels is not None and not self._row_kernels().any()


class _Naming(NamedTuple):  # no generator: every message enters several, and a generator takes twice the calls
    ctx: Call
    doing: str
    peer: int | None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, CommError):
            name = "" if self.peer is None else f" global rank {self.ctx.global_rank(self.peer)}"
            raise self.ctx.error(f"{self.doing}{name}: {error}") from error


class SmallGather:
    """An all-gather of small tensors of one shape. The constructor posts the messages with ``tag``, and does not block.
    ``what`` names the contents in errors."""

    def __init__(self, ctx: OpContext, mine: torch.Tensor, what: str, tag: int) -> None:
        self._waiting, self._lock = f"{ctx.where()}: waiting for {what}", threading.Lock()
        self._all = [mine, *(torch.empty_like(mine) for _ in ctx.peers)]
        self._handles: list[dist.Work] = []
        for peer, theirs in zip(ctx.peers, self._all[1:], strict=True):
            with ctx.naming(f"exchanging {what} with", peer):
                self._handles += [ctx.transport.post_recv(theirs, peer, tag), ctx.transport.post_send(mine, peer, tag)]

    def all(self) -> torch.Tensor:
        """Return the tensors of all ranks, stacked, this rank first and then its peers. Blocks until all have arrived; may be called again,
        from any thread.

        Raises:
            CommError: the tensor of a rank did not arrive.
        """
        # one wait ends a receive of gloo; all who come here wait for messages that are posted on all ranks
        with self._lock:
            try:
                for handle in self._handles:
                    handle.wait()
            except RuntimeError as error:
                raise CommError(f"{self._waiting}: {error}") from error
            self._handles = []
        return torch.stack(self._all)
