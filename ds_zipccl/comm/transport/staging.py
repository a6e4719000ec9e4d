"""Frames of tensors on a device, made and read there and sent from host memory. gloo's sends and receives take host memory only.

The host waits for the device where it needs bytes: twice for frames that are made together (for their headers, which have their sizes, then
for their payloads), and once at the end of the operation. Between these waits all work is queued on a stream of the operation's own.

A rank without working kernels for the device compresses on the host. Each rank decides alone, because the frames are the same.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ds_zipccl import codecs, devices, kernels, tensors
from ds_zipccl.codecs import api, exponent, memory
from ds_zipccl.codecs.known import hashed
from ds_zipccl.codecs.registry import spec_for
from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.work import CommError
from ds_zipccl.frame import HEADER_BYTES, CodecId, FrameError, FrameErrorCode, Header, pack, pad16, parse
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.kernels.cuda.status import NO_FAILURE, raise_failure
from ds_zipccl.kernels.sums import add

#: Device types whose frames go through host memory.
STAGED = {"cuda"}

#: Turns the refusal of a frame into the error that the operation raises.
Refusal = Callable[[FrameError], Exception]
#: Status words of frames whose decompression is queued, and the refusal of each frame.
_Statuses = tuple[torch.Tensor, list[Refusal]]
#: Status words that are filled together (seed).
_STATUS_WORDS = 64


#: (runtime, device) -> streams without an operation. torch keeps the memory of temporaries for each stream, so streams are used again.
_idle: defaultdict[tuple[devices.Runtime, torch.device], list[Any]] = defaultdict(list)
_lock = threading.Lock()


class SideStream:
    """The stream of one operation on a device; nothing for a device without streams. A stream of the caller also has work that is queued
    after the call, and waiting for the stream would wait for that work too.

    The constructor runs at the call, on the caller's thread: the operation's work follows the work that the caller has queued by then on
    its current stream. The operation does not wait for work that the caller queues later.
    """

    def __init__(self, device: torch.device) -> None:
        self._runtime, self._device = devices.runtime(device), device
        if self._runtime is not None:
            self._called = self._runtime.Event()
            self._called.record(self._runtime.current_stream(device))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the stream the calling thread's current stream. Any thread may call, once.

        The end blocks until the operation's work is done, also after an error: afterwards no stream has to wait for the outputs, the
        memory of all tensors may be freed, and a graph may be captured.
        """
        if self._runtime is None:
            yield
            return
        key = self._runtime, self._device
        with _lock:
            stream = _idle[key].pop() if _idle[key] else self._runtime.Stream(self._device)
        try:
            with self._runtime.stream(stream):
                stream.wait_event(self._called)
                try:
                    yield
                finally:
                    self.wait()
        finally:
            with _lock:
                _idle[key].append(stream)

    def wait(self) -> None:
        """Block until the work is done that the calling thread, inside of :meth:`current`, has queued."""
        if self._runtime is not None:
            self._runtime.current_stream(self._device).synchronize()


@functools.cache
def _frame_kernels(device: str, route: str) -> CudaBackend | None:
    """Return the kernels that make and read whole frames on a device type; None without such kernels. The first call may build them."""
    try:
        found = kernels.route(kernels.preferred(route, device), device)
    except kernels.RouteUnavailable:
        return None
    return found if isinstance(found, CudaBackend) else None


class HostStaging:
    """The frames of one operation's tensors on a device.

    The constructor runs at the call, on the caller's thread. All other calls are made inside of :meth:`working`. Tensors on the device are
    flat and contiguous, frames lie in host memory.
    """

    def __init__(self, device: torch.device, route: str) -> None:
        self._device, self._route = device, route
        self._side = SideStream(device)
        self._unread: list[_Statuses] = []

    @contextmanager
    def working(self) -> Iterator[None]:
        """Queue the operation's work on a stream of its own. The end blocks until the work is done, and raises the error of a refused
        frame."""
        with self._side.current():
            yield
            read = self._fetch_statuses()
        _raise_refusals(read)

    def compress(
        self, flats: Sequence[torch.Tensor], codec: str, block: int, buffers: PooledBuffers
    ) -> list[torch.Tensor]:
        """Return the frames of tensors of one dtype, in memory of ``buffers``; blocks. Raises the error of a frame that was refused."""
        spec = spec_for(codec, flats[0].dtype)
        assert not spec.needs_base, f"{codec} frames of tensors on {self._device}: admission lets none through"
        if spec.frame_id == CodecId.RAW:
            return self._compress_raw(flats, buffers)
        route = _frame_kernels(self._device.type, self._route)
        bounds = [codecs.compress_bound(flat.numel(), flat.dtype, codec, block=block) for flat in flats]
        if route is None:
            return [
                codecs.compress(flat.cpu(), codec, out=buffers.take(bound), block=block, shaped=False, checksum=False)
                for flat, bound in zip(flats, bounds, strict=True)
            ]
        for flat in flats:
            exponent.check_size(flat, block)
        stride = pad16(max(bounds))
        rows = tensors.empty(len(flats) * stride, torch.uint8, self._device).view(-1, stride)
        slots = [row[:bound] for row, bound in zip(rows, bounds, strict=True)]
        route.encode_frames(flats, codec, block, slots)
        headers = _fetch(rows[:, :HEADER_BYTES])
        read = self._fetch_statuses()
        self._side.wait()
        _raise_refusals(read)
        sizes = [parse(header, bound).frame_bytes for header, bound in zip(headers, bounds, strict=True)]
        frames = [buffers.take_pinned(size) for size in sizes]
        for frame, slot in zip(frames, slots, strict=True):
            _copy(frame, slot[: frame.numel()])
        self._side.wait()
        return frames

    def _compress_raw(self, flats: Sequence[torch.Tensor], buffers: PooledBuffers) -> list[torch.Tensor]:
        frames = [buffers.take_pinned(HEADER_BYTES + flat.nbytes) for flat in flats]
        for flat, frame in zip(flats, frames, strict=True):
            pack(Header(CodecId.RAW, flat.dtype, flat.numel(), frame.numel()), frame[:HEADER_BYTES])
            _copy(frame[HEADER_BYTES:], flat.view(torch.uint8))
        read = self._fetch_statuses()
        self._side.wait()
        _raise_refusals(read)
        return frames

    def decompress(self, frame: torch.Tensor, out: torch.Tensor, refusal: Refusal) -> torch.Tensor:
        """Queue the decompression of a frame into ``out`` and return ``out``. ``frame`` lies in memory of :meth:`PooledBuffers.take_pinned`
        and may be given back at once.

        Raises:
            FrameError: the frame is damaged, or its dtype or number of elements differs from ``out``. A payload that contradicts itself is
                found later: :meth:`compress` or the end of :meth:`working` then raises what ``refusal`` returns.
        """
        header, spec = api.open_frame(frame)
        if spec.needs_base:
            raise FrameError(
                FrameErrorCode.CODEC, f"a {spec.name} frame needs the base of its encoder; none is on a device"
            )
        if header.codec not in (CodecId.RAW, CodecId.EXPONENT):
            raise FrameError(FrameErrorCode.CODEC, f"a {spec.name} frame is not for tensors on a device")
        memory.decoded_room(out, header, (header.dtype,), self._device)
        route = _frame_kernels(self._device.type, self._route)
        if header.codec == CodecId.RAW:
            _copy(out.view(torch.uint8), frame[header.payload_at : header.frame_bytes])
        elif route is None:
            out.copy_(codecs.decompress(frame, tensors.empty(out.numel(), out.dtype)))
        else:
            slot = tensors.empty(header.frame_bytes, torch.uint8, self._device)
            _copy(slot, frame[: header.frame_bytes])
            route.decode_frames([slot], header.block, [out], self._new_status(refusal))
        return out

    def decompress_add(self, frame: torch.Tensor, dtype: torch.dtype, sums: torch.Tensor, refusal: Refusal) -> None:
        """Queue the addition of the values in a frame, of ``dtype``, to ``sums``, of that dtype or float32. As :meth:`decompress`."""
        add(self.decompress(frame, tensors.empty(sums.numel(), dtype, self._device), refusal), sums)

    def hash(self, words: torch.Tensor, key: bytes) -> bytes:
        """Return the hash of flat ``words``, see :func:`ds_zipccl.region_hash`; blocks. Decompression that is queued is done then; a frame
        may be refused later all the same."""
        if _frame_kernels(self._device.type, self._route) is None:
            return codecs.region_hash(words.cpu(), key=key)
        return hashed(words.view(torch.uint8), key, kernels.preferred(self._route, self._device.type))

    def _new_status(self, refusal: Refusal) -> torch.Tensor:
        """Return the status word of a frame; ``refusal`` makes the error of the operation from the frame's error."""
        if not self._unread or len(self._unread[-1][1]) == _STATUS_WORDS:
            self._unread.append((tensors.filled(_STATUS_WORDS, NO_FAILURE, torch.int64, self._device), []))
        words, refusals = self._unread[-1]
        refusals.append(refusal)
        return words[len(refusals) - 1 : len(refusals)]

    def _fetch_statuses(self) -> list[_Statuses]:
        """Queue the copy of all new status words, for :func:`_raise_refusals` after the next wait."""
        unread, self._unread = self._unread, []
        return [(_fetch(words[: len(refusals)]), refusals) for words, refusals in unread]


def _raise_refusals(read: Sequence[_Statuses]) -> None:
    for words, refusals in read:
        for word, refusal in zip(words.split(1), refusals, strict=True):
            try:
                raise_failure(word)
            except FrameError as error:
                raise refusal(error) from error


def _fetch(there: torch.Tensor) -> torch.Tensor:
    """Queue the copy of a small tensor to host memory."""
    here = tensors.pinned(there.nbytes).view(there.dtype).view(there.shape)
    _copy(here, there)
    return here


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    """Queue a copy between host and device on the current stream."""
    to.copy_(source, non_blocking=True)


def refuse_capture(op: str, device: torch.device) -> None:
    """Raise CommError if the current stream of ``device`` records a graph: a replay would not send. The plain collective of a backend that
    takes host memory fails in a capture too."""
    if devices.is_capturing(device):
        raise CommError(
            f"{op}: got a call while a graph of {device} is captured, wanted a call outside of captures: on this group frames go through "
            f"host memory, and a graph cannot hold them; call before or after the capture, or pass a group whose backend is NCCL"
        )
