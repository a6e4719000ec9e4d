"""The receiver of a state."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ds_zipccl import codecs, devices, tensors
from ds_zipccl import frame as framing
from ds_zipccl.codecs import memory
from ds_zipccl.codecs.arrays import as_tensor
from ds_zipccl.frame import FrameError
from ds_zipccl.sync import message, words
from ds_zipccl.sync.errors import SyncError, SyncErrorCode
from ds_zipccl.sync.held import Held, Packer, snapshot
from ds_zipccl.sync.message import FULL, MAX_FRAGMENT, RECORD_BYTES, Head, Layout, Record, Slice, Stream

#: A record that waits for the proof of the whole message: the part, its fields and its slices, and whether it is a difference.
_Waiting = tuple[torch.Tensor, Record, list[Slice], bool]


class Receiver:
    """Holds a state and applies the messages of a sender to it: the whole of a message or nothing.

    The receiver keeps one copy of all tensors. ``apply`` decodes every record twice: first into a fragment of memory, to compare
    the hash of the new words, and into the tensors when all records are proven. So beside the copy it takes the coded message, a
    few percent of the state for a usual difference and up to two thirds for a full message of a state that is already there, and
    at most three fragments of memory. Tensors that are new are decoded once, into memory of their own, and need no room for their
    records.

    Coding uses ``torch.get_num_threads()`` threads. One thread at a time may use a receiver.

    Args:
        device: device of the state, CPU or CUDA.
        max_bytes: the largest state that a message may describe, in bytes; None: the memory of the device.
        route: kernels to use, see :data:`ds_zipccl.kernels.ROUTES`.

    Raises:
        ValueError: the device is neither a CPU nor CUDA.
    """

    def __init__(
        self, *, device: torch.device | str = "cpu", max_bytes: int | None = None, route: str = "auto"
    ) -> None:
        self._device = torch.device(device)
        if self._device.type not in codecs.DEVICES:
            raise ValueError(f"device must be one of {', '.join(codecs.DEVICES)}, got {device}")
        self._max_bytes = _memory_of(self._device) if max_bytes is None else max_bytes
        self._route = route
        self._held = Held()
        self._fragments, self._bases = words.Staging(), words.Staging()

    @property
    def version(self) -> int:
        """The version of the state; 0 where there is none: only a full message can be applied then."""
        return self._held.version

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The tensors by name, in the sender's order; empty where there is no state.

        They are the receiver's own memory. The next message changes them in place, also a full one where dtype and shape stay, so
        a model that took them by ``load_state_dict(receiver.state, assign=True)`` needs no copy. No other code may write to them:
        such an edit is found at the next message for the tensor, which is refused as HASH.
        """
        return {name: self._held.tensor(name) for name in self._held.layout} if self._held.version else {}

    def apply(self, frames: Iterable[Any]) -> dict[str, torch.Tensor]:
        """Apply a message and return :attr:`state`; blocks, on CUDA for the current stream.

        The state changes after every record was received, decoded and compared with the hash of its words, and not before. Where an error
        is raised earlier, state and version are as before the call. An error after that, such as a device that fails or an interrupt from
        the keyboard, leaves no state: version 0.

        Args:
            frames: the parts of a message as :meth:`Sender.pack` or :func:`load` gives them, in order: 1-D uint8 tensors of any
                device, or arrays of them, or bytes, bytearray or memoryview. They must stay as they are until the call returns. Where the
                iterator has a ``close`` method, it is called.

        Raises:
            SyncError: the message is damaged, incomplete, too large, or for another base; its code says which.
            TypeError: ``frames`` is no iterable of such parts.
            RouteUnavailable: no kernels here, or none of differences, which a full message does without.
        """
        if isinstance(frames, torch.Tensor | bytes | bytearray | memoryview):
            raise TypeError("frames must be the parts of a message, got one buffer: pass sync.load(io.BytesIO(buffer))")
        parts = iter(frames)
        close = getattr(parts, "close", None) or (lambda: None)
        try:
            with tensors.undisturbed():
                self._apply(map(_flat_part, parts))
        except BaseException:
            with contextlib.suppress(SyncError):  # the first error is the one to tell
                close()
            raise
        close()
        return self.state

    def snapshot(self) -> Iterator[torch.Tensor]:
        """The state as a full message of its own version: a receiver that starts again from it takes the sender's next message.

        Parts as of :meth:`Sender.pack`. They must be taken before the next ``apply``.

        Raises:
            SyncError: STATE, there is no state; REPLACED, from the iterator: there was a later ``apply``.
        """
        return snapshot(lambda: self._held, Packer(16 << 20, 1024, self._route))

    def _apply(self, parts: Iterator[torch.Tensor]) -> None:
        start = next(parts, None)
        if start is None:
            raise SyncError(SyncErrorCode.TRUNCATED, "no part at all, a message has at least one")
        head = message.parse_head(start.numpy().tobytes())
        base = self._base(head)
        layout = self._layout(head, base)
        new: dict[str, torch.Tensor] = {}
        waiting: list[_Waiting] = []
        index = 0
        for stream in message.streams(layout, list(layout if head.layout is None else head.layout), base):
            cursor = words.Cursor(stream, layout)
            while cursor.left:
                part = next(parts, None) if index < head.records else None
                if part is None:
                    raise SyncError(
                        SyncErrorCode.TRUNCATED,
                        f"the message ends after {index} records, {cursor.left} elements are missing",
                    )
                record = _record(part, index, head)
                header = _header(part[RECORD_BYTES:], stream, cursor.left)
                slices = cursor.take(header.numel)
                fragment = self._proven(part, record, header, slices, stream.delta)
                index += 1
                if stream.delta or not all(self._is_new(each.name, layout) for each in slices):
                    waiting.append((part, record, slices, stream.delta))
                    continue
                for each in slices:
                    if each.name not in new:
                        new[each.name] = words.empty(layout[each.name], self._device)
                words.scatter(fragment, slices, new)
        if index != head.records or next(parts, None) is not None:
            raise SyncError(SyncErrorCode.ORDER, f"{index} records make up the state, the message has more")
        for part, record, _, _ in waiting:  # again, because the memory of a part is the caller's
            if message.parse_record(part) != record:
                raise SyncError(
                    SyncErrorCode.DAMAGED,
                    f"record {record.index} changed after it was read: give each part memory of its own",
                )
        self._commit(head, layout, new, waiting)

    def _base(self, head: Head) -> Layout | None:
        """The layout of the base of a message; None for a full message."""
        if head.kind == FULL:
            return None
        held = self._held
        if (held.version, held.id) != (head.base_version, head.base_id):
            mine = f"this receiver has version {held.version}" if held.version else "this receiver has no state"
            if held.version == head.base_version:
                mine += " of another history"
            raise SyncError(
                SyncErrorCode.BASE,
                f"the message changes version {head.base_version} to {head.version}, {mine}: let the sender pack(state, full=True)",
            )
        return held.layout

    def _layout(self, head: Head, base: Layout | None) -> dict[str, message.Spec]:
        """The layout after the message, if a state and a message of that size are allowed."""
        layout = message.new_layout(head, base)
        total = sum(spec.nbytes for spec in layout.values())
        if total > self._max_bytes:
            raise SyncError(
                SyncErrorCode.LIMIT,
                f"a state of {total} bytes, at most {self._max_bytes}: pass max_bytes to the Receiver if that is right",
            )
        if head.records > message.most_records(layout):
            raise SyncError(
                SyncErrorCode.LIMIT,
                f"{head.records} records for {len(layout)} tensors, at most {message.most_records(layout)}",
            )
        return layout

    def _is_new(self, name: str, layout: Layout) -> bool:
        """Whether a tensor has no memory in the state held, so that nothing is lost when it is written."""
        old = self._held.words.get(name)
        return old is None or (old.dtype, old.numel()) != layout[name].words

    def _proven(
        self, part: torch.Tensor, record: Record, header: framing.Header, slices: list[Slice], delta: bool
    ) -> torch.Tensor:
        """The words of a record, until the next call, if they are the sender's."""
        base = self._bases.gather(slices, self._held.words.__getitem__) if delta else None
        fragment = self._fragments.room(header.numel, header.dtype, self._device)
        self._decode(part, fragment, base)
        if codecs.region_hash(fragment, route=self._route) != record.hash:
            raise SyncError(
                SyncErrorCode.HASH,
                f"record {record.index} does not give the sender's words of {slices[0].name!r}: the base of one side was edited. "
                "Let the sender pack(state, full=True)",
            )
        return fragment

    def _decode(self, part: torch.Tensor, out: torch.Tensor, base: torch.Tensor | None) -> None:
        try:
            codecs.decompress(part[RECORD_BYTES:].to(out.device), out, base=base, route=self._route)
        except FrameError as error:
            raise SyncError(SyncErrorCode.FRAME, f"the frame of a record: {error}") from error

    def _commit(
        self, head: Head, layout: dict[str, message.Spec], new: dict[str, torch.Tensor], waiting: list[_Waiting]
    ) -> None:
        """Make the proven message the state."""
        target = {}
        for name, spec in layout.items():
            if spec.tied_to is None:
                old = new.get(name) if self._is_new(name, layout) else self._held.words[name]
                target[name] = words.empty(spec, self._device) if old is None else old
        whole = Held(head.version, head.id, layout, target)
        self._held = Held(0, bytes(16), layout, target)  # an error from here on leaves no state
        for part, _, slices, delta in waiting:
            out = self._bases.gather(slices, target.__getitem__)
            self._decode(part, out, out if delta else None)
            if len(slices) > 1:  # otherwise these are the words of the tensor itself
                words.scatter(out, slices, target)
        self._held = whole


def _flat_part(part: Any) -> torch.Tensor:
    """A part as a 1-D uint8 CPU tensor."""
    part = as_tensor(part)
    if isinstance(part, torch.Tensor):
        memory.admit("a part", part, TypeError)
        if part.dtype != torch.uint8 or part.dim() != 1:
            raise TypeError(f"a part is a 1-D uint8 tensor or bytes, got {part.dtype} of shape {tuple(part.shape)}")
        return part.detach().cpu().contiguous()
    if not isinstance(part, bytes | bytearray | memoryview):
        raise TypeError(f"a part is a 1-D uint8 tensor or bytes, got {type(part).__name__}")
    return tensors.of_buffer(bytearray(part)) if len(part) else tensors.empty(0, torch.uint8)


def _record(part: torch.Tensor, index: int, head: Head) -> Record:
    """The fields of a part, if it is the record that has this index in the message."""
    record = message.parse_record(part)
    if record.message != head.id[:8]:
        raise SyncError(SyncErrorCode.ORDER, f"record {record.index} belongs to another message, wanted record {index}")
    if record.index != index:
        raise SyncError(
            SyncErrorCode.ORDER,
            f"record {record.index} came, wanted {index}: one is lost, comes twice or came too early",
        )
    return record


def _header(frame: torch.Tensor, stream: Stream, left: int) -> framing.Header:
    """The header of a frame, if the frame has elements of this stream that are still missing, ``left`` at most.

    Raises:
        SyncError: FRAME, the frame is no flat frame of the stream; LIMIT, its words are more than a record may have.
    """
    try:
        header = framing.parse(frame)
    except FrameError as error:
        raise SyncError(SyncErrorCode.FRAME, f"the frame of a record: {error}") from error
    flat = header.shape is None and header.checksum is None and header.frame_bytes == frame.numel()
    if header.dtype != stream.dtype or not flat or not 1 <= header.numel <= left:
        raise SyncError(
            SyncErrorCode.FRAME,
            f"a frame of {header.numel} {header.dtype} in {frame.numel()} bytes, wanted a flat one of 1 to {left} {stream.dtype}",
        )
    if header.numel * header.dtype.itemsize > MAX_FRAGMENT:
        raise SyncError(
            SyncErrorCode.LIMIT, f"{header.numel} {header.dtype} in a record, at most {MAX_FRAGMENT} bytes of them"
        )
    return header


def _memory_of(device: torch.device) -> int:
    """Bytes of memory of a device, of the host for the CPU."""
    runtime = devices.runtime(device)
    if runtime is not None:
        return int(runtime.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
