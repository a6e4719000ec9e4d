"""Frames to damage, and the ways to damage them: one table, each kind with the codes a decoder may answer."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

import corpus
import from_format
import torch

import ds_zipccl
from ds_zipccl.frame import FrameErrorCode

TRUNCATED, MAGIC, VERSION, CODEC, DTYPE, RESERVED, SHAPE, SIZE, CHECKSUM, MISMATCH, INDEX, BLOCK, OVERFLOWED = (
    FrameErrorCode
)
PAYLOAD = frozenset({INDEX, BLOCK})
ANY = frozenset(FrameErrorCode)
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
    def chunks(self) -> int:
        return -(-self.numel // (corpus.CHUNK_BLOCKS * self.block)) if self.coded else 0

    def table(self, chunk: int) -> tuple[int, int]:
        """Offset of a chunk's table, and its number of blocks."""
        offset = struct.unpack_from("<I", self.frame, self.payload_at + 4 * chunk)[0]
        left = self.numel - corpus.CHUNK_BLOCKS * self.block * chunk
        return self.payload_at + 16 * offset, min(corpus.CHUNK_BLOCKS, -(-left // self.block))


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
                for base in bases:
                    code = corpus.CODES[seed % 2] if base is None else "delta"
                    frame = ds_zipccl.compress(tensor, code, base=base, block=block, shaped=shaped, checksum=checksum)
                    found.append(Base(frame.numpy().tobytes(), tensor, True, payload_at, block, base))
    for tensor in (torch.arange(50), torch.ones(7, 3), torch.zeros(0, dtype=torch.int8)):
        frame = ds_zipccl.compress(tensor, "raw", checksum=checksum, shaped=tensor.dim() > 1)
        found.append(Base(frame.numpy().tobytes(), tensor, False, 32 if tensor.dim() == 1 else 48))
    if checksum:
        oldest = min(from_format.CHECKSUMS)
        found[::2] = [replace(base, frame=from_format.with_checksum(base.frame, oldest)) for base in found[::2]]
    return found


Mutate = Callable[[random.Random, Base], bytearray | None]


@dataclass(frozen=True)
class Kind:
    """A way to damage a frame. ``mutate`` gives None where it does not apply to the frame, or would not change it.

    Without a checksum the answer is one of ``codes``, or, where ``may_pass``, the frame is another valid one.
    """

    name: str
    mutate: Mutate
    codes: frozenset[FrameErrorCode]
    may_pass: bool


KINDS: list[Kind] = []


def _kind(*codes: FrameErrorCode, may_pass: bool = False) -> Callable[[Mutate], Mutate]:
    def register(mutate: Mutate) -> Mutate:
        KINDS.append(Kind(mutate.__name__, mutate, frozenset(codes), may_pass))
        return mutate

    return register


def _set_size(frame: bytearray, size: int) -> bytearray:
    struct.pack_into("<Q", frame, 24, size)
    return frame


def _other(rng: random.Random, value: int, limit: int) -> int:
    """A value below ``limit`` that is not ``value``."""
    return (value + rng.randrange(1, limit)) % limit


def _set_byte(rng: random.Random, base: Base, at: int) -> bytearray:
    frame = bytearray(base.frame)
    frame[at] = _other(rng, frame[at], 256)
    return frame


def _block(rng: random.Random, base: Base) -> tuple[int, int, int] | None:
    """Offset of a random chunk's table, the chunk's blocks, and the number of one of its blocks."""
    if not base.chunks:
        return None
    table, blocks = base.table(rng.randrange(base.chunks))
    return table, blocks, rng.randrange(blocks)


# --- the whole frame


@_kind(TRUNCATED)
def cut(rng: random.Random, base: Base) -> bytearray:
    return bytearray(base.frame[: rng.randrange(len(base.frame))])


@_kind(TRUNCATED, SIZE, INDEX, BLOCK)
def cut_and_say_so(rng: random.Random, base: Base) -> bytearray | None:
    size = rng.randrange(len(base.frame))
    return _set_size(bytearray(base.frame[:size]), size) if size >= 32 else None


@_kind(SIZE, INDEX, BLOCK)
def extend(rng: random.Random, base: Base) -> bytearray:
    more = rng.choice((1, 16, rng.randrange(1, 400)))
    frame = bytearray(base.frame) + rng.choice((bytes(more), rng.randbytes(more)))
    return _set_size(frame, len(frame))


@_kind(TRUNCATED, SIZE, INDEX, BLOCK)
def wrong_frame_bytes(rng: random.Random, base: Base) -> bytearray | None:
    size = rng.choice((rng.randrange(len(base.frame)), rng.getrandbits(64), 1 << rng.randrange(64), (1 << 64) - 1))
    frame = bytearray(base.frame) + rng.randbytes(rng.randrange(100))
    return _set_size(frame, size) if size != len(base.frame) else None


@_kind(*ANY)
def noise(rng: random.Random, base: Base) -> bytearray:
    return bytearray(rng.randbytes(rng.randrange(300)))


@_kind(*ANY, may_pass=True)
def noise_behind_a_good_header(rng: random.Random, base: Base) -> bytearray:
    at = rng.choice((base.payload_at, min(len(base.frame), base.payload_at + 16)))
    return bytearray(base.frame[:at]) + rng.randbytes(len(base.frame) - at)


# --- header


@_kind(MAGIC)
def magic(rng: random.Random, base: Base) -> bytearray:
    return _set_byte(rng, base, rng.randrange(4))


@_kind(VERSION)
def version(rng: random.Random, base: Base) -> bytearray:
    return _set_byte(rng, base, 4)


@_kind(CODEC, RESERVED, BLOCK, may_pass=True)
def codec(rng: random.Random, base: Base) -> bytearray:
    """Passes where a delta frame has no block that needs its base, or an exponent frame is taken for a delta frame."""
    return _set_byte(rng, base, 5)


@_kind(DTYPE, CODEC, SIZE, MISMATCH, BLOCK, may_pass=True)
def dtype(rng: random.Random, base: Base) -> bytearray:
    frame = bytearray(base.frame)
    frame[6] = _other(rng, frame[6], 20)
    return frame


@_kind(RESERVED, CHECKSUM, SHAPE, OVERFLOWED, may_pass=True)
def flags(rng: random.Random, base: Base) -> bytearray:
    return _set_byte(rng, base, 7)


@_kind(SHAPE, RESERVED, TRUNCATED, SIZE, INDEX, BLOCK, may_pass=True)
def dimensions(rng: random.Random, base: Base) -> bytearray:
    frame = bytearray(base.frame)
    frame[8] = _other(rng, frame[8], rng.choice((4, 256)))
    return frame


@_kind(RESERVED, SIZE, INDEX, BLOCK, may_pass=True)
def block_log2(rng: random.Random, base: Base) -> bytearray:
    frame = bytearray(base.frame)
    frame[9] = _other(rng, frame[9], rng.choice((13, 256)))
    return frame


@_kind(RESERVED)
def checksum_id_or_reserved(rng: random.Random, base: Base) -> bytearray:
    return _set_byte(rng, base, rng.randrange(10, 12))


@_kind(RESERVED)
def checksum(rng: random.Random, base: Base) -> bytearray:
    return _set_byte(rng, base, rng.randrange(12, 16))


@_kind(SHAPE, SIZE, INDEX, BLOCK, MISMATCH, may_pass=True)
def numel(rng: random.Random, base: Base) -> bytearray:
    frame = bytearray(base.frame)
    near = max(0, base.numel + rng.randrange(-70, 70))
    value = rng.choice((near, near * base.block, rng.getrandbits(64), 1 << rng.randrange(64), (1 << 64) - 1))
    struct.pack_into("<Q", frame, 16, value % (1 << 64))
    return frame


@_kind(SHAPE, may_pass=True)
def sizes(rng: random.Random, base: Base) -> bytearray | None:
    """Passes where numel is 0 and stays the product."""
    if base.payload_at == 32:
        return None
    frame = bytearray(base.frame)
    value = rng.choice((rng.randrange(100), rng.getrandbits(64), 1 << rng.randrange(64), (1 << 64) - 1))
    struct.pack_into("<Q", frame, 32 + 8 * rng.randrange(frame[8]), value)
    return frame


@_kind(RESERVED)
def padding_of_the_shape(rng: random.Random, base: Base) -> bytearray | None:
    at = 32 + 8 * base.frame[8]
    return _set_byte(rng, base, rng.randrange(at, base.payload_at)) if base.payload_at > at else None


# --- payload


@_kind(INDEX, BLOCK)
def chunk_offset(rng: random.Random, base: Base) -> bytearray | None:
    if not base.chunks:
        return None
    frame = bytearray(base.frame)
    at = base.payload_at + 4 * rng.randrange(base.chunks)
    value = struct.unpack_from("<I", frame, at)[0]
    value = rng.choice((value + rng.choice((-2, -1, 1, 2)), rng.getrandbits(32), 1 << rng.randrange(32), (1 << 32) - 1))
    struct.pack_into("<I", frame, at, value % (1 << 32))
    return frame


@_kind(BLOCK)
def unknown_mode(rng: random.Random, base: Base) -> bytearray | None:
    place = _block(rng, base)
    if place is None:
        return None
    table, blocks, b = place
    frame = bytearray(base.frame)
    at = table + blocks + 2 * b + 1
    frame[at] = frame[at] & 0x1F | rng.randrange(5 if base.base is None else 6, 8) << 5
    return frame


@_kind(BLOCK, may_pass=True)
def another_mode(rng: random.Random, base: Base) -> bytearray | None:
    """Passes only where a short block means something in both modes."""
    place = _block(rng, base)
    if place is None:
        return None
    table, blocks, b = place
    frame = bytearray(base.frame)
    at = table + blocks + 2 * b + 1
    frame[at] = frame[at] & 0x1F | ((frame[at] >> 5) + rng.randrange(1, 5)) % 5 << 5
    return frame


@_kind(BLOCK, may_pass=True)
def tail_bytes(rng: random.Random, base: Base) -> bytearray | None:
    """Passes only where a FILL of zeros becomes a FILL of a word."""
    place = _block(rng, base)
    if place is None:
        return None
    table, blocks, b = place
    frame = bytearray(base.frame)
    at = table + blocks + 2 * b
    entry = struct.unpack_from("<H", frame, at)[0]
    tail = rng.choice((entry + rng.choice((-2, -1, 1, 2, 4)), rng.getrandbits(13), 8191)) & 8191
    struct.pack_into("<H", frame, at, entry & 0xE000 | tail)
    return frame


@_kind(BLOCK)
def tail_bytes_of_a_coded_block(rng: random.Random, base: Base) -> bytearray | None:
    """The contents say how long a coded tail is, so a table that says otherwise is always refused."""
    place = _block(rng, base)
    if place is None:
        return None
    table, blocks, b = place
    at = table + blocks + 2 * b
    if base.frame[at + 1] >> 5 == 0 or base.frame[at : at + 2] == b"\0\xa0":  # FILL, or a CHANGE that changes nothing
        return None
    frame = bytearray(base.frame)
    entry = struct.unpack_from("<H", frame, at)[0]
    struct.pack_into("<H", frame, at, entry & 0xE000 | (entry + rng.choice((-3, -2, -1, 1, 2, 3))) & 8191)
    return frame


@_kind(BLOCK, may_pass=True)
def top(rng: random.Random, base: Base) -> bytearray | None:
    place = _block(rng, base)
    return _set_byte(rng, base, place[0] + place[2]) if place else None


@_kind(BLOCK, may_pass=True)
def trim(rng: random.Random, base: Base) -> bytearray | None:
    place = _block(rng, base)
    if place is None or base.tensor.dtype != torch.float32:
        return None
    table, blocks, b = place
    return _set_byte(rng, base, table + 3 * blocks + b)


# --- anywhere


@_kind(*ANY, may_pass=True)
def flip(rng: random.Random, base: Base) -> bytearray:
    frame = bytearray(base.frame)
    for bit in rng.sample(range(8 * len(frame)), rng.choice((1, 1, 2, 8))):
        frame[bit // 8] ^= 1 << bit % 8
    return frame


@_kind(*ANY, may_pass=True)
def random_bytes(rng: random.Random, base: Base) -> bytearray:
    frame = bytearray(base.frame)
    at = rng.randrange(len(frame))
    end = min(len(frame), at + rng.randrange(1, 40))
    frame[at:end] = rng.choice((rng.randbytes(end - at), bytes(end - at), b"\xff" * (end - at)))
    return frame


@_kind(*PAYLOAD, may_pass=True)
def flip_in_the_payload(rng: random.Random, base: Base) -> bytearray | None:
    if len(base.frame) == base.payload_at:
        return None
    return _set_byte(rng, base, rng.randrange(base.payload_at, len(base.frame)))


@_kind(*ANY, may_pass=True)
def move_bytes(rng: random.Random, base: Base) -> bytearray:
    frame = bytearray(base.frame)
    length = rng.randrange(1, 64)
    source, target = rng.randrange(len(frame)), rng.randrange(len(frame))
    piece = frame[source : source + length][: len(frame) - target]
    frame[target : target + len(piece)] = piece
    return frame


@_kind(*ANY, may_pass=True)
def lose_bytes(rng: random.Random, base: Base) -> bytearray:
    """Bytes missing from the middle, the frame filled up behind."""
    at, length = rng.randrange(len(base.frame)), rng.choice((1, 2, 16, rng.randrange(1, 100)))
    frame = bytearray(base.frame[:at] + base.frame[at + length :])
    return frame + rng.randbytes(len(base.frame) - len(frame))


def damaged(rng: random.Random, base: Base) -> tuple[Kind, bytearray]:
    """The frame damaged in a random way, truly different from the good one."""
    while True:
        kind = rng.choice(KINDS)
        frame = kind.mutate(rng, base)
        if frame is not None and frame[: len(base.frame)] != base.frame:
            return kind, frame
