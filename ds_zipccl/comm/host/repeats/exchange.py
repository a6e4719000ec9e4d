"""One exchange of an operation whose segments are kept, or may repeat kept ones: see :mod:`ds_zipccl.comm.host.repeats.memory`."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import torch

from ds_zipccl.codecs.api import open_frame
from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.host.frames import FrameCoder
from ds_zipccl.comm.host.repeats.memory import Places, Repeats, Segment
from ds_zipccl.frame import CodecId, FrameError, FrameErrorCode, Header


class _Arriving:
    """The segment of ``nbytes`` that arrives. ``digests``: those of its fragments so far, None if one has come in full."""

    def __init__(self, nbytes: int, kept: Segment | None) -> None:
        self.nbytes = self.left = nbytes
        self.kept = kept
        self.digests: list[bytes] | None = []


class RepeatedSegments:
    """Exchange ``index`` of an operation. ``coder`` makes and reads its frames."""

    def __init__(self, repeats: Repeats, index: int, coder: FrameCoder) -> None:
        self._repeats, self._index, self._coder = repeats, index, coder
        self._known: defaultdict[int, deque[bytes]] = defaultdict(deque)
        self._arriving: dict[int, _Arriving] = {}

    def announce(self, fragments: Sequence[torch.Tensor], peers: Sequence[int]) -> bool:
        """Begin the next segment for each of ``peers``, which has ``fragments``: keep their hashes, or find out whether the segment goes
        as hashes. Return whether all segments do."""
        nbytes = sum(fragment.nbytes for fragment in fragments)
        digests: list[bytes] = []
        for peer in peers:
            slot = self._repeats.begin(self._repeats.leaving, self._index, peer)
            assert slot.nbytes == nbytes, f"a segment of {nbytes} bytes, and {slot.nbytes} were reserved"
            if slot.kept is None and not self._repeats.like(peer, nbytes):
                continue
            digests = digests or [self._coder.hash(fragment) for fragment in fragments]
            if slot.kept is not None:
                for digest, fragment in zip(digests, fragments, strict=True):
                    slot.kept.add(digest, fragment.nbytes)
            elif self._repeats.repeats(peer, nbytes, digests):
                self._known[peer].extend(digests)
        return all(self._known[peer] for peer in peers)

    def next_hash(self, peer: int) -> bytes | None:
        """Return the hash that goes to ``peer`` in place of the next fragment; None where the fragment goes in full."""
        known = self._known[peer]
        return known.popleft() if known else None

    def decompress(
        self, frame: torch.Tensor, peer: int, out: torch.Tensor, earlier: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As :meth:`.frames.FrameCoder.decompress`, for the next fragment of ``peer``; keep its frame, or take the frame that
        is kept in place of a hash.

        Raises:
            CommError: also where the frame is the hash of a fragment that this rank does not keep.
        """
        arriving = self._segment(peer)
        with self._coder.refusing(peer):
            header = open_frame(frame)[0]
        arriving.left -= out.nbytes
        if self._repeats.again and header.codec is CodecId.KNOWN:
            with self._coder.refusing(peer):
                self._decompress_kept(frame, header, peer, out, earlier)
            if not arriving.left and arriving.digests:
                self._repeats.taken(peer, arriving.nbytes, arriving.digests)
            return out
        self._coder.decompress(frame, peer, out, earlier=earlier)
        arriving.digests = None
        if arriving.kept is not None:
            arriving.kept.add(self._coder.hash(out), out.nbytes, frame[: header.frame_bytes].clone())
        return out

    def decompress_add(self, frame: torch.Tensor, peer: int, dtype: torch.dtype, sums: torch.Tensor) -> None:
        """As :meth:`ds_zipccl.comm.host.frames.FrameCoder.decompress_add`, and as :meth:`decompress`."""
        buffers = PooledBuffers()
        taken = buffers.empty(sums.numel(), dtype, sums.device)
        self._coder.add(self.decompress(frame, peer, taken), sums)
        buffers.release()

    def _decompress_kept(
        self, frame: torch.Tensor, header: Header, peer: int, out: torch.Tensor, earlier: torch.Tensor | None
    ) -> None:
        arriving = self._arriving[peer]
        if (header.dtype, header.numel) != (out.dtype, out.numel()):
            raise FrameError(
                FrameErrorCode.MISMATCH,
                f"the hash is that of {header.numel} {header.dtype}, wanted {out.numel()} {out.dtype}",
            )
        digest = frame[header.payload_at : header.frame_bytes].numpy().tobytes()
        digests = None if arriving.digests is None else [*arriving.digests, digest]
        kept = None if digests is None else self._repeats.kept(peer, arriving.nbytes, digests)
        if kept is None:
            raise FrameError(
                FrameErrorCode.MISMATCH,
                f"the frame is the hash {digest.hex()} of a message of the forward pass that this rank does not keep, as an earlier "
                "message failed or the ranks have made different calls; make the same calls on all ranks, or switch recompute_base off",
            )
        self._coder.decompress_kept(kept, peer, out, earlier)
        if self._coder.hash(out) != digest:
            raise FrameError(FrameErrorCode.MISMATCH, "the words of the frame that this rank keeps have another hash")
        arriving.digests = digests

    def _segment(self, peer: int) -> _Arriving:
        """Return the segment of ``peer`` that arrives."""
        arriving = self._arriving.get(peer)
        if arriving is None or not arriving.left:
            arriving = self._arriving[peer] = _Arriving(*self._repeats.begin(self._repeats.coming, self._index, peer))
        return arriving


def segments_of(leaving: Sequence[int], coming: Sequence[int], ctx: OpContext) -> Sequence[Places]:
    """Return the places of an exchange of one segment from each rank to each other one; sizes in elements."""
    return [
        Places(*({peer: [sizes[peer]] if sizes[peer] else [] for peer in ctx.peers} for sizes in (leaving, coming)))
    ]


def summed_shards(ctx: OpContext, numels: Sequence[int], itemsize: int, exchanges: int = 1) -> Places:
    """Return the places of the contributions to sums of shards, ``numels[r]`` elements for rank r: each fragment is a segment.
    ``exchanges``: as for :class:`ds_zipccl.comm.host.pipeline.Fragments`."""
    sizes = []
    for numel in numels:
        each = ctx.fragment_numel(numel, itemsize, exchanges)
        sizes.append([min(each, numel - at) for at in range(0, numel, each)])
    return Places({peer: sizes[peer] for peer in ctx.peers}, dict.fromkeys(ctx.peers, sizes[ctx.rank]))


def gathered_shards(ctx: OpContext, numels: Sequence[int], itemsize: int, exchanges: int = 1) -> Places:
    """Return the places of a gather of shards, ``numels[r]`` elements of rank r. As :func:`summed_shards`."""
    leaving, coming = summed_shards(ctx, numels, itemsize, exchanges)
    return Places(coming, leaving)
