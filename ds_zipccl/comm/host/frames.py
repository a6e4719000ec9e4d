"""The frames of one operation: the codec of each frame, the memory of its bytes, and the refusal of bad frames."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ds_zipccl import kernels, tensors
from ds_zipccl.codecs import CODECS, compress, compress_bound, compress_segments, decompress, decompress_add
from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.context import OpContext
from ds_zipccl.policy import wire
from ds_zipccl.telemetry import ranges


class FrameCoder:
    """Compresses and decompresses tensors of one operation, flat and contiguous ones. All calls block.

    ``raw``: all frames are raw. ``exact``: the frames carry values as they are, whatever the operation allows. ``block``: of the frames,
    where it is not the configured one. ``route``: the kernels.
    """

    #: Frames may refer to words in front of them in their segment, which the receiver then holds.
    refers = False

    def __init__(self, ctx: OpContext, raw: bool = False, exact: bool = False, block: int = 0) -> None:
        self._ctx = ctx
        self._chosen = "raw" if raw else ctx.codec
        self._block: int = block or ctx.config.block
        self._least_block: int = self._block
        self.route = kernels.preferred(ctx.config.route, "cpu")
        # no exact frame depends on frames whose values change
        self._backoff = ctx.state.backoff(ctx.op, ctx.role, "exact" if ctx.rounding is None else "rounded")
        self.refusing = ctx.refusing
        self._rounding: Any = None if exact else ctx.rounding
        self.exact = self._rounding is None

    def search(self, segments: Mapping[int, torch.Tensor]) -> None:
        """Look for what frames may leave out of segments: group rank of the receiver -> flat contiguous tensor, which must not change
        before its last frame. Nothing here."""

    def own_frame(self, peer: int, flat: torch.Tensor) -> tuple[torch.Tensor, PooledBuffers] | None:
        """Return the frame that ``peer`` gets of ``flat``, the next part of its segment of :meth:`search`, and the memory of the frame;
        None where the frame for every rank is as good."""
        return None

    def end(self) -> None:
        """End the search, after the last frame."""

    def compress(
        self,
        flat: torch.Tensor,
        buffers: PooledBuffers,
        base: torch.Tensor | None = None,
        own_place: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the frame of ``flat`` in memory of ``buffers``; with ``base``, the frame is a difference against ``base``.

        ``own_place``: flat memory that gets the values of a frame as its receivers see them, where the frame changes them; it may be
        ``flat``.
        """
        return self.compress_each([flat], buffers, base, own_place)[0]

    def compress_each(
        self,
        flats: Sequence[torch.Tensor],
        buffers: PooledBuffers,
        base: torch.Tensor | None = None,
        own_place: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Return the frames of tensors of one dtype, compressed in one kernel call. Only a single tensor may have a base or an own place,
        as for :meth:`compress`."""
        block = self._block
        codec = "delta" if base is not None else wire.frame_codec(self._chosen, min(flat.nbytes for flat in flats))
        if codec not in ("delta", "raw") and self._backoff.skips():
            codec = "raw"
        with ranges.inside(ranges.ENCODE):
            if self._rounding is not None:
                frames = [self._rounding.compress(flat, codec, block, buffers.take, own_place) for flat in flats]
            else:
                outs = [buffers.take(compress_bound(flat.numel(), flat.dtype, codec, block=block)) for flat in flats]
                named: dict[str, Any] = {"block": block, "route": self.route}
                frames = (
                    compress_segments(flats, outs, codec, **named)
                    if len(flats) > 1
                    else [compress(flats[0], codec, base=base, out=outs[0], shaped=False, checksum=False, **named)]
                )
        if base is None and codec != "raw":
            logical, sent = sum(flat.nbytes for flat in flats), sum(frame.nbytes for frame in frames)
            self._backoff.note(not wire.incompressible(logical, sent))
        return frames

    def recv_buffer(self, numel: int, dtype: torch.dtype, buffers: PooledBuffers) -> torch.Tensor:
        """Return memory, 1-D uint8, that holds a frame of ``numel`` elements by any codec that the sender may choose."""
        return buffers.take(max(compress_bound(numel, dtype, codec, block=self._least_block) for codec in CODECS))

    def decompress(
        self,
        frame: torch.Tensor,
        peer: int,
        out: torch.Tensor,
        base: torch.Tensor | None = None,
        earlier: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Decompress the frame of ``peer`` into ``out`` and return ``out``. ``base``: the base of a frame that is a difference.
        ``earlier``: the words of the segment in front of the frame, directly in front of ``out`` in memory.

        Raises:
            CommError: from FrameError: the frame is damaged, or its dtype or number of elements differs from ``out``.
        """
        with ranges.inside(ranges.DECODE, self.refusing(peer)):
            data = out.data  # torch's collectives count no version either
            decompress(frame, data, base=base, earlier=earlier, route=self.route)
            return out

    def decompress_add(self, frame: torch.Tensor, peer: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        """Add the values in the frame of ``peer``, whose dtype is ``dtype``, to ``sums``.

        Raises:
            CommError: as :meth:`decompress`.
        """
        with ranges.inside(ranges.DECODE, self.refusing(peer)):
            decompress_add(frame, sums.data, dtype=dtype, route=self.route)

    def add(self, values: torch.Tensor, sums: torch.Tensor) -> None:
        """Add ``values`` to ``sums``, of their dtype or float32."""
        kernels.adder(self.route, "cpu")(values, sums)


@contextmanager
def written_as(flat: torch.Tensor, dtype: torch.dtype, numel: int) -> Iterator[torch.Tensor]:
    """Give ``numel`` elements of ``dtype`` to write in the place of the first bytes of ``flat``, which has as many."""
    if (flat.dtype, flat.numel()) == (dtype, numel):
        yield flat
        return
    part = flat.view(torch.uint8)[: numel * dtype.itemsize]
    aligned = part.data_ptr() % dtype.itemsize == 0 and part.storage_offset() % dtype.itemsize == 0
    words = (part if aligned else tensors.empty(part.numel(), torch.uint8)).view(dtype)
    yield words
    if not aligned:
        part.copy_(words.view(torch.uint8))
