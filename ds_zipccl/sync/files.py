"""Messages in files and over sockets. A message in a stream is its parts, one after another."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ds_zipccl import tensors
from ds_zipccl.sync import message
from ds_zipccl.sync.errors import SyncError, SyncErrorCode


def save(frames: Iterable[Any], f: str | os.PathLike[str] | BinaryIO) -> int:
    """Write a message to a file or a stream, part by part as it is packed; blocks.

    A file is written under another name in the same folder, and takes its name when it is complete and on the disk.

    Args:
        frames: the parts, as :meth:`Sender.pack` gives them.
        f: path, or binary file with ``write``, for example ``socket.makefile("wb")``. A binary file is flushed and stays open.

    Returns:
        Bytes written.
    """
    if not isinstance(f, str | os.PathLike):
        size = _write(frames, f)
        f.flush()
        return size
    path = Path(f)
    own = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    with open(own, "xb") as file:  # not of tempfile, whose files only their owner may read, whatever the umask says
        try:
            size = _write(frames, file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(own, path)
        except BaseException:
            own.unlink()
            raise
    return size


def _write(frames: Iterable[Any], file: Any) -> int:
    size = 0
    for part in frames:
        data = memoryview(part.detach().cpu().contiguous().numpy().data if isinstance(part, torch.Tensor) else part)
        data = data.cast("B")
        size += data.nbytes
        while data:  # a raw stream may take a part of it
            count = file.write(data)
            if count is None:
                raise BlockingIOError("the stream does not block: pass one that does")
            data = data[count:]
    return size


def load(f: str | os.PathLike[str] | BinaryIO) -> Iterator[torch.Tensor]:
    """Read a message for :meth:`Receiver.apply`, part by part as parts are asked for; blocks. Nothing is unpickled.

    Args:
        f: path of a file with one message, or binary file with ``readinto``, for example ``socket.makefile("rb")``. A binary file is read
            to the end of the message and stays open, so that the next message can follow. An iterator that is closed early, as ``apply``
            does where it refuses a message, reads the rest first.

    Returns:
        The parts: 1-D uint8 CPU tensors. At most one part is in memory here.

    Raises:
        SyncError: from the iterator: TRUNCATED, FORMAT or LIMIT. A stream cannot be read on after it: connect again.
        EOFError: from the iterator: a binary file ends before the first byte of a message.
    """
    if not isinstance(f, str | os.PathLike):
        return _parts(f)
    return _parts_of_file(f)


def _parts_of_file(path: str | os.PathLike[str]) -> Iterator[torch.Tensor]:
    with open(path, "rb") as file:
        try:
            yield from _parts(file)
        except EOFError:
            raise SyncError(SyncErrorCode.TRUNCATED, f"{os.fspath(path)} is empty") from None
        if file.read(1):
            raise SyncError(SyncErrorCode.FORMAT, f"{os.fspath(path)} has bytes after the end of its message")


def _parts(file: BinaryIO) -> Iterator[torch.Tensor]:
    left = 0
    try:
        start = _read(file, message.HEAD_BYTES, message.head_bytes)
        left = message.parse_head(start.numpy().tobytes()).records
        yield start
        while left:
            part = _read(file, message.RECORD_BYTES, message.record_bytes)
            left -= 1
            yield part
    except GeneratorExit:
        for _ in range(left):
            _read(file, message.RECORD_BYTES, message.record_bytes)
        raise


def _read(file: BinaryIO, least: int, whole: Callable[[bytes], int]) -> torch.Tensor:
    """A part whose first ``least`` bytes tell the size of the ``whole``."""
    start = bytearray(least)
    _fill(file, memoryview(start), first=least == message.HEAD_BYTES)
    part = tensors.empty(whole(bytes(start)), torch.uint8)
    view = memoryview(part.numpy().data)
    view[:least] = start
    _fill(file, view[least:])
    return part


def _fill(file: Any, view: memoryview, first: bool = False) -> None:
    """Read the bytes of ``view``; ``first``: they begin a message, which a stream need not have."""
    at = 0
    while at < len(view):
        count = file.readinto(view[at:])
        if not count:
            if first and not at:
                raise EOFError("the stream ends, and no message follows")
            raise SyncError(SyncErrorCode.TRUNCATED, f"the stream ends {len(view) - at} bytes before the end of a part")
        at += count
