"""The frames of operations whose values a lossy codec may change.

A frame decodes to the values that :func:`ds_zipccl.codecs.project` makes of the sent ones, whether the frame is coded or raw: so results do
not depend on the choice between the two. A lossy sum is an ``fp32`` sum in one level, whatever ``reduction`` is: the contributions of the
peers are decoded frames, the own one is exact. The sender looks at every SAMPLED-th of its frames and counts the error of the rounding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import count

import torch

from ds_zipccl import kernels
from ds_zipccl.codecs import compress, compress_bound, decompress, project
from ds_zipccl.codecs.memory import write_header
from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.context import Call
from ds_zipccl.comm.lossy.squared_error import squared_error
from ds_zipccl.frame import HEADER_BYTES, CodecId, Header, parse
from ds_zipccl.lossy import Int, LossyCodec, Round, TacoFp8
from ds_zipccl.telemetry import counters

#: One frame in so many is decoded by its sender, for the error (seed: a decoder and a few passes then cost little).
SAMPLED = 16
#: The largest float32. A Hadamard transform of a group sums all its values; a group whose sums overflow stays as it is.
_LARGEST = torch.finfo(torch.float32).max
#: Returns memory for so many bytes, uint8.
Take = Callable[[int], torch.Tensor]
#: Formats of frames that hold values as they are.
_LOSSLESS = (CodecId.RAW, CodecId.EXPONENT)


class _Numbers(defaultdict[tuple[str, str], Iterator[int]]):
    """Operation and role -> the numbers of their frames in a group, from 0 on."""

    def __init__(self) -> None:
        super().__init__(count)


class LossyFrames:
    """Makes the frames of one operation by ``codec``. Tensors are flat and contiguous; all calls block, on CUDA for the current stream."""

    def __init__(self, ctx: Call, codec: LossyCodec) -> None:
        # not the context, which may hold this object
        self._role, self._op, self._numbers = ctx.role, ctx.op, ctx.state.of(_Numbers)[ctx.op, ctx.role]
        self._codec, self._named = codec, ctx.config.route
        #: The mantissa bits to which the codec rounds every word by itself; 0 where it does not.
        self.rounded = codec.mantissa if isinstance(codec, Round) else 0

    def _route(self, flat: torch.Tensor) -> str:
        return kernels.preferred(self._named, flat.device.type)

    def compress(
        self, flat: torch.Tensor, codec: str, block: int, take: Take, own_place: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a frame of ``flat``, in memory of ``take``, raw if ``codec`` of the operation is. The values that the frame decodes to
        are written to ``own_place``, which may be ``flat``."""
        frame = self._raw(flat, take) if codec == "raw" else self._coded(flat, block, take)
        numel, dtype, device = flat.numel(), flat.dtype, flat.device
        self._count(
            flat, lambda scratch: decompress(frame, scratch.empty(numel, dtype, device), route=self._route(flat))
        )
        if own_place is not None:
            decompress(frame, own_place.data, route=self._route(flat))
        return frame

    def bound(self, numel: int, dtype: torch.dtype, block: int) -> int:
        """Return the most bytes of a frame of ``numel`` elements."""
        return compress_bound(numel, dtype, self._codec, lossy=True, block=block)

    def note(self, flat: torch.Tensor) -> None:
        """Count a frame of ``flat`` that another encoder has made."""
        self._count(flat, lambda scratch: self.carried(flat, scratch))

    def alone(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values that frames of ``tensor``, of any shape, would carry, for a message that goes without frames; count it as one
        frame."""
        values = project(tensor, self._codec, route=self._route(tensor))
        self._count(tensor.reshape(-1), lambda scratch: values.reshape(-1))
        return values

    def _count(self, flat: torch.Tensor, carried: Callable[[PooledBuffers], torch.Tensor]) -> None:
        """Count a frame of ``flat``, and the error of every SAMPLED-th one: ``carried`` returns its values, with memory of its argument."""
        codec, scratch = str(self._codec), PooledBuffers()
        counters.record_lossy(self._role, self._op, codec, 1)
        if next(self._numbers) % SAMPLED == 0:
            sums = squared_error(flat, carried(scratch), self._route(flat))
            counters.record_error(self._role, self._op, codec, *sums)
            scratch.release()

    def carried(self, flat: torch.Tensor, buffers: PooledBuffers) -> torch.Tensor:
        """Return the values that a frame of ``flat`` decodes to, in memory of ``buffers``."""
        out = buffers.empty(flat.numel(), flat.dtype, flat.device)
        return project(flat, self._codec, out=out, route=self._route(flat))

    def _coded(self, flat: torch.Tensor, block: int, take: Take) -> torch.Tensor:
        frame = compress(
            flat,
            self._codec,
            lossy=True,
            out=take(self.bound(flat.numel(), flat.dtype, block)),
            block=block,
            shaped=False,
            checksum=False,
            route=self._route(flat),
        )
        # a frame of rounded values is a lossless one by itself; frames of other codecs fall back to those
        if not self.rounded and parse(frame[:HEADER_BYTES].cpu(), frame.numel()).codec in _LOSSLESS:
            counters.record_exact(self._role, self._op, self._why_exact(flat), 1)
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

    def _raw(self, flat: torch.Tensor, take: Take) -> torch.Tensor:
        frame = take(HEADER_BYTES + flat.nbytes)
        project(flat, self._codec, out=frame[HEADER_BYTES:].view(flat.dtype), route=self._route(flat))
        return write_header(Header(CodecId.RAW, flat.dtype, flat.numel(), frame.numel()), frame)
