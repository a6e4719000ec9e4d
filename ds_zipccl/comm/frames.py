"""The frames of one operation: the codec of each frame, the memory of its bytes, and the refusal of bad frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from ds_zipccl import kernels
from ds_zipccl.codecs import CODECS, compress, compress_bound, compress_segments, decompress, decompress_add
from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.work import CommError
from ds_zipccl.frame import FrameError
from ds_zipccl.kernels import sums as plain_sums
from ds_zipccl.policy import wire


class FrameCoder:
    """Compresses and decompresses tensors of one operation. Tensors are flat and contiguous, on the operation's device.

    All calls on CPU tensors block. Other calls are made inside of the context's ``working()``; where frames go through host memory,
    compressing blocks, and decompressing is done at the end of ``working()``. ``uncoded``: all frames are raw.
    """

    def __init__(self, ctx: OpContext, uncoded: bool = False) -> None:
        self._ctx = ctx
        self._chosen = "raw" if uncoded else ctx.codec
        self._block, self._route = ctx.config.block, kernels.preferred(ctx.config.route, ctx.device)
        self._staging = ctx.staging

    def compress(self, flat: torch.Tensor, buffers: PooledBuffers, base: torch.Tensor | None = None) -> torch.Tensor:
        """Return the frame of ``flat`` in memory of ``buffers``; with ``base``, the frame is a difference against ``base``."""
        codec = self._codec(flat.nbytes) if base is None else "delta"
        if self._staging is not None:
            (frame,) = self._staging.compress([flat], codec, self._block, buffers)
        else:
            out = buffers.take(compress_bound(flat.numel(), flat.dtype, codec, block=self._block))
            frame = compress(
                flat, codec, base=base, out=out, block=self._block, shaped=False, checksum=False, route=self._route
            )
        if base is None and codec != "raw":
            self._ctx.backoff.note(flat.nbytes, frame.nbytes)
        return frame

    def compress_each(self, flats: Sequence[torch.Tensor], buffers: PooledBuffers) -> list[torch.Tensor]:
        """Return the frames of tensors of one dtype, compressed in one kernel call."""
        codec = self._codec(min(flat.nbytes for flat in flats))
        if self._staging is not None:
            frames = self._staging.compress(flats, codec, self._block, buffers)
        else:
            outs = [buffers.take(compress_bound(flat.numel(), flat.dtype, codec, block=self._block)) for flat in flats]
            frames = compress_segments(flats, outs, codec, block=self._block, route=self._route)
        if codec != "raw":
            self._ctx.backoff.note(sum(flat.nbytes for flat in flats), sum(frame.nbytes for frame in frames))
        return frames

    def _codec(self, nbytes: int) -> str:
        codec = wire.frame_codec(self._chosen, nbytes)
        return "raw" if codec != "raw" and self._ctx.backoff.skips() else codec

    def recv_buffer(self, numel: int, dtype: torch.dtype, buffers: PooledBuffers) -> torch.Tensor:
        """Return memory, 1-D uint8, that holds a frame of ``numel`` elements by any codec that the sender may choose."""
        take = buffers.take if self._staging is None else buffers.take_pinned
        return take(max(compress_bound(numel, dtype, codec, block=self._block) for codec in CODECS))

    def decompress(
        self, frame: torch.Tensor, peer: int, out: torch.Tensor, base: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Decompress the frame of ``peer`` into ``out`` and return ``out``. ``base``: the base of a frame that is a difference.

        Raises:
            CommError: from FrameError: the frame is damaged, or its dtype or number of elements differs from ``out``.
        """
        with self._refusing(peer):
            if self._staging is not None:
                return self._staging.decompress(frame, out, partial(self._refusal, peer))
            return decompress(frame, out, base=base, route=self._route)

    def decompress_add(self, frame: torch.Tensor, peer: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        """Add the values in the frame of ``peer``, whose dtype is ``dtype``, to ``sums``.

        Raises:
            CommError: as :meth:`decompress`.
        """
        with self._refusing(peer):
            if self._staging is not None:
                return self._staging.decompress_add(frame, dtype, sums, partial(self._refusal, peer))
            decompress_add(frame, sums, dtype=dtype, route=self._route)

    def add(self, values: torch.Tensor, sums: torch.Tensor) -> None:
        """Add ``values`` to ``sums``, of their dtype or float32."""
        add = plain_sums.add if self._staging is not None else kernels.adder(self._route, self._ctx.device)
        add(values, sums)

    @contextmanager
    def _refusing(self, peer: int) -> Iterator[None]:
        try:
            yield
        except FrameError as error:
            raise self._refusal(peer, error) from error

    def _refusal(self, peer: int, error: FrameError) -> CommError:
        return self._ctx.error(f"frame from global rank {self._ctx.global_rank(peer)} refused: {error}")
