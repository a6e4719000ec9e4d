"""The frames of operations whose values a lossy codec may change.

A frame decodes to the values that :func:`ds_zipccl.codecs.project` makes of the sent ones, whether the frame is coded or raw: so results do
not depend on the choice between the two. The sender looks at every SAMPLED-th of its frames and counts the error of the rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ds_zipccl.codecs import compress, compress_bound, decompress, project
from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.context import Call
from ds_zipccl.comm.lossy.squared_error import squared_error
from ds_zipccl.frame import HEADER_BYTES, CodecId, Header, pack, parse
from ds_zipccl.lossy import Int, LossyCodec, Round, TacoFp8
from ds_zipccl.telemetry import counters

#: One frame in so many is decoded by its sender, for the error (seed: a decoder and a few passes then cost little).
SAMPLED = 16
#: The largest float32. A Hadamard transform of a group sums all its values; a group whose sums overflow stays as it is.
_LARGEST = torch.finfo(torch.float32).max
#: Formats of frames that hold values as they are.
_LOSSLESS = (CodecId.RAW, CodecId.EXPONENT)


class LossyFrames:
    """Makes the frames of one operation by ``codec``. Tensors are flat contiguous CPU tensors; all calls block."""

    def __init__(self, ctx: Call, codec: LossyCodec, block: int, route: str) -> None:
        self._ctx, self._codec, self._block, self._route = ctx, codec, block, route

    def compress(
        self, flat: torch.Tensor, coded: bool, buffers: PooledBuffers, own_place: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a frame of ``flat`` in memory of ``buffers``, raw unless ``coded``. The values that the frame decodes to are written to
        ``own_place``, which may be ``flat``."""
        frame = self._coded(flat, buffers) if coded else self._raw(flat, buffers)
        numel, dtype, device = flat.numel(), flat.dtype, flat.device
        self._count(flat, lambda scratch: decompress(frame, scratch.empty(numel, dtype, device), route=self._route))
        if own_place is not None:
            decompress(frame, own_place.data, route=self._route)
        return frame

    @property
    def rounded(self) -> int:
        """Return the mantissa bits to which the codec rounds every word by itself; 0 where it does not."""
        return self._codec.mantissa if isinstance(self._codec, Round) else 0

    def bound(self, numel: int, dtype: torch.dtype) -> int:
        """Return the most bytes of a frame of ``numel`` elements."""
        return compress_bound(numel, dtype, self._codec, lossy=True, block=self._block)

    def note(self, flat: torch.Tensor) -> None:
        """Count a frame of ``flat`` that another encoder has made."""
        self._count(flat, lambda scratch: self.carried(flat, scratch))

    def alone(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values that frames of ``tensor``, of any shape, would carry, for a message that goes without frames; count it as one
        frame."""
        values = project(tensor, self._codec, route=self._route)
        self._count(tensor.reshape(-1), lambda scratch: values.reshape(-1))
        return values

    def _count(self, flat: torch.Tensor, carried: Callable[[PooledBuffers], torch.Tensor]) -> None:
        """Count a frame of ``flat``, and the error of every SAMPLED-th one: ``carried`` returns its values, with memory of its argument."""
        call, codec, scratch = self._ctx, str(self._codec), PooledBuffers()
        counters.record_lossy(call.role, call.op, codec, 1)
        if next(call.state.lossy_numbers[call.op, call.role]) % SAMPLED == 0:
            sums = squared_error(flat, carried(scratch), self._route)
            counters.record_error(call.role, call.op, codec, *sums)
            scratch.release()

    def carried(self, flat: torch.Tensor, buffers: PooledBuffers) -> torch.Tensor:
        """Return the values that a frame of ``flat`` decodes to, in memory of ``buffers``."""
        out = buffers.empty(flat.numel(), flat.dtype, flat.device)
        return project(flat, self._codec, out=out, route=self._route)

    def _coded(self, flat: torch.Tensor, buffers: PooledBuffers) -> torch.Tensor:
        frame = compress(
            flat,
            self._codec,
            lossy=True,
            out=buffers.take(self.bound(flat.numel(), flat.dtype)),
            block=self._block,
            shaped=False,
            checksum=False,
            route=self._route,
        )
        # a frame of rounded values is a lossless one by itself; frames of other codecs fall back to those
        if not isinstance(self._codec, Round) and parse(frame).codec in _LOSSLESS:
            counters.record_exact(self._ctx.role, self._ctx.op, self._why_exact(flat), 1)
        return frame

    def _why_exact(self, flat: torch.Tensor) -> str:
        """Return the reason why a frame of ``flat`` is lossless."""
        largest = float(flat.abs().amax())  # NaN where there is one
        if not largest < float("inf"):
            return "not finite"
        codec = self._codec
        if isinstance(codec, (Int, TacoFp8)) and codec.hadamard and largest * codec.group > _LARGEST:
            return "overflow"
        return "smaller"

    def _raw(self, flat: torch.Tensor, buffers: PooledBuffers) -> torch.Tensor:
        frame = buffers.take(HEADER_BYTES + flat.nbytes)
        pack(Header(CodecId.RAW, flat.dtype, flat.numel(), frame.numel()), frame[:HEADER_BYTES])
        project(flat, self._codec, out=frame[HEADER_BYTES:].view(flat.dtype), route=self._route)
        return frame
