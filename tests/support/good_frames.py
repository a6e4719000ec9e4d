"""Good frames of every kind, to damage: see :mod:`mutations`."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import corpus
import from_format
import torch

import ds_zipccl

#: Textures of long frames.
LONG_TEXTURES = ("zeros", "constant", "negative_zeros", "sparse", "bell")


@dataclass(frozen=True)
class Base:
    """A good frame and where its parts are; offsets in bytes from the start of the frame."""

    frame: bytes
    tensor: torch.Tensor
    coded: bool
    payload_at: int = 32
    block: int = 0
    base: torch.Tensor | None = None  # of a delta frame

    @property
    def numel(self) -> int:
        return self.tensor.numel()

    @property
    def against(self) -> torch.Tensor:
        """A base to decode with; frames other than delta frames must not care."""
        return self.tensor if self.base is None else self.base

    @property
    def bytewise(self) -> bool:
        """Whether the words of the frame are bytes: of differences of a dtype that is no float of 16 or 32 bits."""
        return self.base is not None and self.tensor.dtype not in ds_zipccl.codecs.SUMMED_DTYPES

    @property
    def words(self) -> int:
        return self.tensor.nbytes if self.bytewise else self.numel

    @property
    def chunks(self) -> int:
        return -(-self.words // (corpus.CHUNK_BLOCKS * self.block)) if self.coded else 0

    def spans(self, lists: bool) -> list[tuple[int, int, int]]:
        """Number, start and end of each chunk with a table, or of each LIST."""
        entries = struct.unpack_from(f"<{self.chunks}I", self.frame, self.payload_at)
        mask = (1 << 32) - 1 if self.base is None else (1 << 31) - 1
        starts = [*(self.payload_at + 16 * (entry & mask) for entry in entries), len(self.frame)]
        return [
            (chunk, start, end)
            for chunk, (entry, start, end) in enumerate(zip(entries, starts, starts[1:], strict=False))
            if start < end and (entry > mask) == lists
        ]

    def blocks(self, chunk: int) -> int:
        """Number of a chunk's blocks."""
        left = self.words - corpus.CHUNK_BLOCKS * self.block * chunk
        return min(corpus.CHUNK_BLOCKS, -(-left // self.block))


def bases(checksum: bool, largest: int = 4200) -> list[Base]:
    """Frames of every codec, coded dtype, block size and mode, with and without a shape, of up to ``largest`` elements.

    With ``checksum``, every other frame has the checksum that encoders no longer write.
    """
    found = []
    for at, kind in enumerate(corpus.FLOATS.values()):
        for block in corpus.BLOCKS:
            for seed, numel in enumerate((0, 1, 5, 100, block, block + 1, 700, 2100, 17 * 128 + 3, 4200)):
                if numel > largest or (numel > 2100 and block > 128):
                    continue
                seed = 100 * at + 10 * (block % 11) + seed
                names = tuple(corpus.TEXTURES) if numel < 2101 else LONG_TEXTURES
                tensor = corpus.tensor(corpus.mixed(numel, kind, block, seed, names), kind)
                shaped = seed % 3 != 0
                if shaped:
                    tensor = tensor.view((numel // 2, 2, 1) if numel % 2 == 0 else (numel,))
                payload_at = 32 + (8 * tensor.dim() + 15) // 16 * 16 if shaped else 32
                bases = [None]
                if kind in corpus.SUMMED.values():
                    words = tensor.reshape(-1).view(torch.uint8).numpy().view(kind.word)
                    bases.append(corpus.tensor(corpus.before(words, kind, block, seed), kind))
                bases.append(_few_changes(tensor, kind, seed))
                for base in bases:
                    code = corpus.CODES[seed % 2] if base is None else "delta"
                    frame = ds_zipccl.compress(tensor, code, base=base, block=block, shaped=shaped, checksum=checksum)
                    found.append(Base(frame.numpy().tobytes(), tensor, True, payload_at, block, base))
    for seed in range(12):
        words = corpus.mixed(960, corpus.E4M3, 128, seed)
        tensor = corpus.tensor(words, corpus.E4M3)
        base = _few_changes(tensor, corpus.E4M3, seed) if seed % 4 else corpus.tensor(words[::-1].copy(), corpus.E4M3)
        tensor, base = tensor.view(torch.int64), base.view(torch.int64)
        frame = ds_zipccl.compress(tensor, "delta", base=base, block=128, shaped=False, checksum=checksum)
        found.append(Base(frame.numpy().tobytes(), tensor, True, 32, 128, base))
    for tensor in (torch.arange(50), torch.ones(7, 3), torch.zeros(0, dtype=torch.int8)):
        frame = ds_zipccl.compress(tensor, "raw", checksum=checksum, shaped=tensor.dim() > 1)
        found.append(Base(frame.numpy().tobytes(), tensor, False, 32 if tensor.dim() == 1 else 48))
    if checksum:
        oldest = min(from_format.CHECKSUMS)
        found[::2] = [replace(base, frame=from_format.with_checksum(base.frame, oldest)) for base in found[::2]]
    return found


def _few_changes(tensor: torch.Tensor, kind: corpus.Float, seed: int) -> torch.Tensor:
    """A flat base of ``tensor`` that most or all of its words are equal to."""
    words = tensor.reshape(-1).view(torch.uint8).numpy().view(kind.word)
    share = (3, 9, 20, 200, 5000)[seed % 5]
    places = corpus.some_places(len(words), -(-len(words) // share) if share < 5000 else 0, seed, run=1 + seed % 3)
    return corpus.tensor(corpus.moved(words, kind, places, corpus.changes(len(places), seed, 1 + seed % 12)), kind)
