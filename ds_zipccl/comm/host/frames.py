"""The frames of one operation: the codec of each frame, the memory of its bytes, and the refusal of bad frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from ds_zipccl import kernels
from ds_zipccl.codecs import (
    CODECS,
    RowSegment,
    compress,
    compress_bound,
    compress_segments,
    decompress,
    decompress_add,
)
from ds_zipccl.codecs.known import NO_KEY
from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.group_state import hash_key, region_hash
from ds_zipccl.comm.lossy.frames import LossyFrames
from ds_zipccl.comm.work import CommError
from ds_zipccl.frame import FrameError
from ds_zipccl.kernels import sums as plain_sums
from ds_zipccl.policy import row_rules, wire
from ds_zipccl.telemetry import ranges


class Rows(NamedTuple):
    """The rows of an operation's tensors: elements of a row, 0 where there are none, and ``kind`` of the operation's request."""

    width: int
    kind: str


def rows_of(ctx: OpContext, width: int, kind: str) -> Rows | None:
    """Return the rows of an operation whose senders may choose frames by rows, equally on all ranks but for the width; None otherwise.
    Blocks in the first operations of a group, see :meth:`ds_zipccl.comm.context.OpContext.has_row_kernels`."""
    if not row_rules.may_have_rows(ctx.config, ctx.op, ctx.role, ctx.codec):
        return None
    if ctx.staging is None and not ctx.has_row_kernels():
        return None
    return Rows(width if ctx.staging is None else 0, kind)


class FrameCoder:
    """Compresses and decompresses tensors of one operation. Tensors are flat and contiguous, on the operation's device.

    All calls on CPU tensors block. Other calls are made inside of the context's ``working()``; where frames go through host memory,
    compressing blocks, and decompressing is done at the end of ``working()``. ``raw``: all frames are raw. ``rows``: senders may choose
    blocks of one row. ``exact``: the frames carry values as they are, whatever the operation allows.
    """

    def __init__(self, ctx: OpContext, raw: bool = False, rows: Rows | None = None, exact: bool = False) -> None:
        self._ctx = ctx
        self._chosen = "raw" if raw else ctx.codec
        self._block: int = ctx.config.block
        self._least_block: int = ctx.config.block
        self._route = kernels.preferred(ctx.config.route, ctx.device)
        if rows is not None:
            self._block = row_rules.block(ctx.config.block, rows.width, rows.kind)
            self._least_block = row_rules.LEAST_BLOCK
        self._staging = ctx.staging
        self._lossy = None
        if ctx.lossy is not None and not exact:
            assert ctx.staging is None, "admission lets no lossy codec through for tensors that are staged"
            self._lossy = LossyFrames(ctx, ctx.lossy, self._block, self._route)

    @property
    def route(self) -> str:
        """Return the kernels of the operation."""
        return self._route

    def compress(
        self,
        flat: torch.Tensor,
        buffers: PooledBuffers,
        base: torch.Tensor | None = None,
        own_place: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the frame of ``flat`` in memory of ``buffers``; with ``base``, the frame is a difference against ``base``.

        ``own_place``: flat memory that gets the values of a lossy frame as its receivers see them; it may be ``flat``. Other frames do not
        write there.
        """
        codec = self._codec(flat.nbytes) if base is None else "delta"
        with ranges.inside(ranges.ENCODE):
            if self._lossy is not None:
                frame = self._lossy.compress(flat, codec != "raw", buffers, own_place)
            elif self._staging is not None:
                (frame,) = self._staging.compress([flat], codec, self._block, buffers)
            else:
                out = buffers.take(compress_bound(flat.numel(), flat.dtype, codec, block=self._block))
                frame = compress(
                    flat, codec, base=base, out=out, block=self._block, shaped=False, checksum=False, route=self._route
                )
        if base is None and codec != "raw":
            self._ctx.backoff.note(not wire.incompressible(flat.nbytes, frame.nbytes))
        return frame

    @property
    def lossy(self) -> bool:
        """Return whether a lossy codec changes the values in frames."""
        return self._lossy is not None

    @property
    def rounded(self) -> int:
        """Return the mantissa bits to which the codec rounds every word by itself; 0 where it does not. Literal rows of such words are
        rounded frames; with other lossy codecs they are lossless ones."""
        return 0 if self._lossy is None else self._lossy.rounded

    def compared(self, flat: torch.Tensor, buffers: PooledBuffers) -> torch.Tensor:
        """Return words whose rows are equal only where frames of ``flat`` carry equal values: ``flat``; or, in memory of ``buffers``, what
        frames carry where that depends on more than the row."""
        return flat if self._lossy is None or self.rounded else self._lossy.carried(flat, buffers)

    def row_segment(self, words: torch.Tensor, width: int, buffers: PooledBuffers) -> RowSegment:
        """Return the sender's side of a segment in rows of ``width`` elements, with memory of ``buffers`` while it is used."""
        below, scratch = wire.RAW_BELOW_BYTES, buffers.empty
        return RowSegment(
            words, width, block=self._block, raw_below=below, rounded=self.rounded, route=self._route, scratch=scratch
        )

    def compress_rows(
        self, segment: RowSegment, begin: int, flat: torch.Tensor, buffers: PooledBuffers
    ) -> torch.Tensor | None:
        """Return the row frame of ``flat``, the elements of ``segment`` from ``begin`` on, in memory of ``buffers``; None where an ordinary
        frame is as good."""
        numel, dtype = flat.numel(), flat.dtype
        bound = compress_bound(numel, dtype, self._chosen, block=self._block)
        if self._lossy is not None and self.rounded:
            bound = max(bound, self._lossy.bound(numel, dtype))
        with ranges.inside(ranges.ENCODE):
            frame = segment.frame(begin, begin + numel, buffers.take(bound), self._chosen)
        if frame is not None and self._lossy is not None and self.rounded:
            self._lossy.note(flat)
        return frame

    def compress_each(self, flats: Sequence[torch.Tensor], buffers: PooledBuffers) -> list[torch.Tensor]:
        """Return the frames of tensors of one dtype, compressed in one kernel call."""
        codec, block = self._codec(min(flat.nbytes for flat in flats)), self._block
        with ranges.inside(ranges.ENCODE):
            if self._lossy is not None:
                frames = [self._lossy.compress(flat, codec != "raw", buffers) for flat in flats]
            elif self._staging is not None:
                frames = self._staging.compress(flats, codec, block, buffers)
            else:
                outs = [buffers.take(compress_bound(flat.numel(), flat.dtype, codec, block=block)) for flat in flats]
                frames = compress_segments(flats, outs, codec, block=block, route=self._route)
        if codec != "raw":
            logical, sent = sum(flat.nbytes for flat in flats), sum(frame.nbytes for frame in frames)
            self._ctx.backoff.note(not wire.incompressible(logical, sent))
        return frames

    def _codec(self, nbytes: int) -> str:
        codec = wire.frame_codec(self._chosen, nbytes)
        return "raw" if codec != "raw" and self._ctx.backoff.skips() else codec

    def recv_buffer(self, numel: int, dtype: torch.dtype, buffers: PooledBuffers) -> torch.Tensor:
        """Return memory, 1-D uint8, that holds a frame of ``numel`` elements by any codec that the sender may choose."""
        take = buffers.take if self._staging is None else buffers.take_pinned
        return take(max(compress_bound(numel, dtype, codec, block=self._least_block) for codec in CODECS))

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
            if self._staging is not None:
                return self._staging.decompress(frame, out, partial(self._refusal, peer))
            key = NO_KEY if base is None else hash_key()
            data = out.data  # torch's collectives count no version either
            decompress(frame, data, base=base, earlier=earlier, key=key, route=self._route)
            return out

    def decompress_kept(
        self, frame: torch.Tensor, peer: int, out: torch.Tensor, earlier: torch.Tensor | None = None
    ) -> None:
        """As :meth:`decompress`, for a frame in any host memory, of an earlier message of ``peer``."""
        buffers = PooledBuffers()
        if self._staging is not None:
            frame = buffers.take_pinned(frame.numel()).copy_(frame)
        self.decompress(frame, peer, out, earlier=earlier)
        buffers.release()

    def hash(self, words: torch.Tensor) -> bytes:
        """Return the hash of flat words, with the key of the job; blocks, and waits for the device of the words."""
        if self._staging is None:
            return region_hash(words, route=self._route)
        return self._staging.hash(words, hash_key())

    def decompress_add(self, frame: torch.Tensor, peer: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        """Add the values in the frame of ``peer``, whose dtype is ``dtype``, to ``sums``.

        Raises:
            CommError: as :meth:`decompress`.
        """
        with ranges.inside(ranges.DECODE, self.refusing(peer)):
            if self._staging is not None:
                return self._staging.decompress_add(frame, dtype, sums, partial(self._refusal, peer))
            decompress_add(frame, sums.data, dtype=dtype, route=self._route)

    def add(self, values: torch.Tensor, sums: torch.Tensor) -> None:
        """Add ``values`` to ``sums``, of their dtype or float32."""
        add = plain_sums.add if self._staging is not None else kernels.adder(self._route, self._ctx.device)
        add(values, sums)

    @contextmanager
    def refusing(self, peer: int) -> Iterator[None]:
        """Turn FrameError into CommError, which names the sender ``peer``."""
        try:
            yield
        except FrameError as error:
            raise self._refusal(peer, error) from error

    def _refusal(self, peer: int, error: FrameError) -> CommError:
        return self._ctx.error(f"frame from global rank {self._ctx.global_rank(peer)} refused: {error}")
