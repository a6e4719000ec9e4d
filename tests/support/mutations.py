"""Good frames of every kind, and the ways to damage them: one table, each with the codes that a decoder may answer."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

import corpus
import from_format
import torch

import ds_zipccl
from ds_zipccl.frame import CodecId, FrameErrorCode

TRUNCATED, MAGIC, VERSION, CODEC, DTYPE, RESERVED, SHAPE, SIZE, CHECKSUM, MISMATCH, INDEX, BLOCK, OVERFLOWED, ROWS = (
    FrameErrorCode
)
#: Codec bytes of frames that some routes have no kernels for: test_zfp.py and its like damage them by the others. A frame of another codec
#: with the byte of row frames is refused before kernels are asked.
LOSSY = (CodecId.ROUNDED, CodecId.SCALED, CodecId.LOWRANK, CodecId.ZFP1)
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


# --- ways to damage them

Mutate = Callable[[random.Random, Base, bytearray], bytearray | None]


@dataclass(frozen=True)
class Kind:
    """A way to damage a frame. ``mutate`` gets a copy, and gives None where it does not apply to the frame, or would not change it.

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


def _set_byte(rng: random.Random, frame: bytearray, at: int) -> bytearray:
    frame[at] = _other(rng, frame[at], 256)
    return frame


def _block(rng: random.Random, base: Base) -> tuple[int, int, int] | None:
    """Offset of a random chunk's table, the chunk's blocks, and the number of one of its blocks."""
    tables = base.spans(lists=False)
    if not tables:
        return None
    chunk, table, _ = rng.choice(tables)
    blocks = base.blocks(chunk)
    return table, blocks, rng.randrange(blocks)


def _entry(rng: random.Random, base: Base) -> int | None:
    """Offset of the entry of a random block: 16 bits, the mode in the upper three."""
    place = _block(rng, base)
    return None if place is None else place[0] + place[1] + 2 * place[2]


# --- the whole frame


@_kind(TRUNCATED)
def cut(rng: random.Random, base: Base, frame: bytearray) -> bytearray:
    return frame[: rng.randrange(len(frame))]


@_kind(TRUNCATED, SIZE, INDEX, BLOCK, may_pass=True)
def cut_and_say_so(rng: random.Random, base: Base, frame: bytearray) -> bytearray | None:
    """Passes where zeros are cut from the end of a LIST, or all of the only chunk, which is SAME then."""
    size = rng.randrange(len(frame))
    return _set_size(frame[:size], size) if size >= 32 else None


@_kind(SIZE, INDEX, BLOCK, may_pass=True)
def extend(rng: random.Random, base: Base, frame: bytearray) -> bytearray:
    """Passes where zeros follow a LIST, or make the table of a SAME chunk."""
    more = rng.choice((1, 16, rng.randrange(1, 400)))
    frame += rng.choice((bytes(more), rng.randbytes(more)))
    return _set_size(frame, len(frame))


@_kind(TRUNCATED, SIZE, INDEX, BLOCK, may_pass=True)
def wrong_frame_bytes(rng: random.Random, base: Base, frame: bytearray) -> bytearray | None:
    """Passes as cut_and_say_so."""
    size = rng.choice((rng.randrange(len(base.frame)), rng.getrandbits(64), 1 << rng.randrange(64), (1 << 64) - 1))
    frame += rng.randbytes(rng.randrange(100))
    return _set_size(frame, size) if size != len(base.frame) else None


@_kind(*ANY)
def noise(rng: random.Random, base: Base, frame: bytearray) -> bytearray:
    return bytearray(rng.randbytes(rng.randrange(300)))


@_kind(*ANY, may_pass=True)
def noise_behind_a_good_header(rng: random.Random, base: Base, frame: bytearray) -> bytearray:
    at = rng.choice((base.payload_at, min(len(frame), base.payload_at + 16)))
    return frame[:at] + rng.randbytes(len(frame) - at)


# --- header

#: Field of the header -> its bytes, limits for another value of one of them, codes, and whether the frame may pass.
_FIELDS: dict[str, tuple[range, tuple[int, ...], set[FrameErrorCode], bool]] = {
    "magic": (range(4), (256,), {MAGIC}, False),
    "version": (range(4, 5), (256,), {VERSION}, False),
    "dtype": (range(6, 7), (20,), {DTYPE, CODEC, SIZE, MISMATCH, BLOCK}, True),
    "flags": (range(7, 8), (256,), {RESERVED, CHECKSUM, SHAPE, OVERFLOWED}, True),
    "dimensions": (range(8, 9), (4, 256), {SHAPE, RESERVED, TRUNCATED, SIZE, INDEX, BLOCK}, True),
    "block_log2": (range(9, 10), (13, 256), {RESERVED, SIZE, INDEX, BLOCK}, True),
    "checksum_id_or_reserved": (range(10, 12), (256,), {RESERVED}, False),
    "checksum": (range(12, 16), (256,), {RESERVED}, False),
}


def _another_value(places: range, limits: tuple[int, ...]) -> Mutate:
    def mutate(rng: random.Random, base: Base, frame: bytearray) -> bytearray:
        at = rng.choice(places)
        frame[at] = _other(rng, frame[at], rng.choice(limits))
        return frame

    return mutate


KINDS += [
    Kind(name, _another_value(places, limits), frozenset(codes), may_pass)
    for name, (places, limits, codes, may_pass) in _FIELDS.items()
]


@_kind(CODEC, RESERVED, SIZE, MISMATCH, INDEX, BLOCK, ROWS, may_pass=True)
def codec(rng: random.Random, base: Base, frame: bytearray) -> bytearray | None:
    """Passes where a delta frame has no block that needs its base, or an exponent frame is taken for a delta frame. A codec that there is
    in a part of the cases."""
    _set_byte(rng, frame, 5)
    if rng.random() < 0.3:
        frame[5] = _other(rng, base.frame[5], 10)
    return frame if frame[5] not in LOSSY else None


@_kind(SHAPE, SIZE, INDEX, BLOCK, MISMATCH, may_pass=True)
def numel(rng: random.Random, base: Base, frame: bytearray) -> bytearray:
    near = max(0, base.numel + rng.randrange(-70, 70))
    value = rng.choice((near, near * base.block, rng.getrandbits(64), 1 << rng.randrange(64), (1 << 64) - 1))
    struct.pack_into("<Q", frame, 16, value % (1 << 64))
    return frame


@_kind(SHAPE, may_pass=True)
def sizes(rng: random.Random, base: Base, frame: bytearray) -> bytearray | None:
    """Passes where numel is 0 and stays the product."""
    if base.payload_at == 32:
        return None
    value = rng.choice((rng.randrange(100), rng.getrandbits(64), 1 << rng.randrange(64), (1 << 64) - 1))
    struct.pack_into("<Q", frame, 32 + 8 * rng.randrange(frame[8]), value)
    return frame


@_kind(RESERVED)
def padding_of_the_shape(rng: random.Random, base: Base, frame: bytearray) -> bytearray | None:
    at = 32 + 8 * base.frame[8]
    return _set_byte(rng, frame, rng.randrange(at, base.payload_at)) if base.payload_at > at else None


# --- payload


@_kind(INDEX, BLOCK)
def chunk_offset(rng: random.Random, base: Base, frame: bytearray) -> bytearray | None:
    if not base.chunks:
        return None
    at = base.payload_at + 4 * rng.randrange(base.chunks)
    value = struct.unpack_from("<I", frame, at)[0]
    value = rng.choice((value + rng.choice((-2, -1, 1, 2)), rng.getrandbits(32), 1 << rng.randrange(32), (1 << 32) - 1))
    struct.pack_into("<I", frame, at, value % (1 << 32))
    return frame


@_kind(BLOCK)
def unknown_mode(rng: random.Random, base: Base, frame: bytearray) -> bytearray | None:
    if (at := _entry(rng, base)) is None:
        return None
    unknown = (5, 6, 7) if base.base is None else (2, 3, 4, 6, 7) if base.bytewise else (6, 7)
    frame[at + 1] = frame[at + 1] & 0x1F | rng.choice(unknown) << 5
    return frame


@_kind(BLOCK, may_pass=True)
def another_mode(rng: random.Random, base: Base, frame: bytearray) -> bytearray | None:
    """Passes only where a short block means something in both modes."""
    if (at := _entry(rng, base)) is None:
        return None
    frame[at + 1] = frame[at + 1] & 0x1F | ((frame[at + 1] >> 5) + rng.randrange(1, 5)) % 5 << 5
    return frame


@_kind(BLOCK, may_pass=True)
def tail_bytes(rng: random.Random, base: Base, frame: bytearray) -> bytearray | None:
    """Passes only where a FILL of zeros becomes a FILL of a word."""
    if (at := _entry(rng, base)) is None:
        return None
    entry = struct.unpack_from("<H", frame, at)[0]
    tail = rng.choice((entry + rng.choice((-2, -1, 1, 2, 4)), rng.getrandbits(13), 8191)) & 8191
    struct.pack_into("<H", frame, at, entry & 0xE000 | tail)
    return frame


@_kind(BLOCK)
def tail_bytes_of_a_coded_block(rng: random.Random, base: Base, frame: bytearray) -> bytearray | None:
    """The contents say how long a coded tail is, so a table that says otherwise is always refused."""
    if (at := _entry(rng, base)) is None:
        return None
    if base.frame[at + 1] >> 5 == 0 or base.frame[at : at + 2] == b"\0\xa0":  # FILL, or a CHANGE that changes nothing
        return None
    entry = struct.unpack_from("<H", frame, at)[0]
    struct.pack_into("<H", frame, at, entry & 0xE000 | (entry + rng.choice((-3, -2, -1, 1, 2, 3))) & 8191)
    return frame


@_kind(BLOCK, may_pass=True)
def top(rng: random.Random, base: Base, frame: bytearray) -> bytearray | None:
    place = _block(rng, base)
    return _set_byte(rng, frame, place[0] + place[2]) if place else None


@_kind(BLOCK, may_pass=True)
def trim(rng: random.Random, base: Base, frame: bytearray) -> bytearray | None:
    place = _block(rng, base)
    if place is None or not (base.tensor.dtype == torch.float32 or base.frame[5] == CodecId.ROUNDED):
        return None
    table, blocks, b = place
    return _set_byte(rng, frame, table + 3 * blocks + b)


@_kind(INDEX, BLOCK, may_pass=True)
def another_form(rng: random.Random, base: Base, frame: bytearray) -> bytearray | None:
    """Passes in the rare case that a table is a LIST too, or the other way round."""
    if not base.chunks:
        return None
    frame[base.payload_at + 4 * rng.randrange(base.chunks) + 3] ^= 0x80
    return frame


def _list(rng: random.Random, base: Base) -> tuple[int, int, int] | None:
    """Start, first byte behind the sets, and end of a random LIST."""
    lists = base.spans(lists=True)
    if not lists:
        return None
    _, start, end = rng.choice(lists)
    return start, start + 1 + 3 * base.frame[start], end


@_kind(BLOCK, may_pass=True)
def head_of_a_list(rng: random.Random, base: Base, frame: bytearray) -> bytearray | None:
    """Passes where another m or r gives other places."""
    place = _list(rng, base)
    return _set_byte(rng, frame, rng.randrange(*place[:2])) if place else None


@_kind(BLOCK)
def ones_of_a_list(rng: random.Random, base: Base, frame: bytearray) -> bytearray | None:
    """A one more or less behind the fixed part, in the padding too: a LIST has as many as its levels have words."""
    place = _list(rng, base)
    if place is None:
        return None
    start, at, end = place
    sets = list(struct.iter_unpack("<HB", base.frame[start + 1 : at]))
    escapes = sets[5][0] if len(sets) == 6 else 0
    item = 1 if base.bytewise else base.tensor.dtype.itemsize
    rest = 8 * (at + escapes * item) + sum(m * r for m, r in sets) + sets[0][0]
    bit = rng.randrange(rest, 8 * end)
    frame[bit // 8] ^= 1 << bit % 8
    return frame


@_kind(BLOCK, may_pass=True)
def bits_of_a_list(rng: random.Random, base: Base, frame: bytearray) -> bytearray | None:
    """Passes where bits move inside ``low``, ``sign`` and ``rest``, and no place leaves its set."""
    place = _list(rng, base)
    if place is None:
        return None
    _, at, end = place
    one, other = (rng.randrange(at, end) for _ in range(2))
    frame[one], frame[other] = frame[other], frame[one]
    return frame


# --- anywhere


@_kind(*ANY, may_pass=True)
def flip(rng: random.Random, base: Base, frame: bytearray) -> bytearray:
    for bit in rng.sample(range(8 * len(frame)), rng.choice((1, 1, 2, 8))):
        frame[bit // 8] ^= 1 << bit % 8
    return frame


@_kind(*ANY, may_pass=True)
def random_bytes(rng: random.Random, base: Base, frame: bytearray) -> bytearray:
    at = rng.randrange(len(frame))
    end = min(len(frame), at + rng.randrange(1, 40))
    frame[at:end] = rng.choice((rng.randbytes(end - at), bytes(end - at), b"\xff" * (end - at)))
    return frame


@_kind(*PAYLOAD, may_pass=True)
def flip_in_the_payload(rng: random.Random, base: Base, frame: bytearray) -> bytearray | None:
    if len(base.frame) == base.payload_at:
        return None
    return _set_byte(rng, frame, rng.randrange(base.payload_at, len(base.frame)))


@_kind(*ANY, may_pass=True)
def move_bytes(rng: random.Random, base: Base, frame: bytearray) -> bytearray:
    length = rng.randrange(1, 64)
    source, target = rng.randrange(len(frame)), rng.randrange(len(frame))
    piece = frame[source : source + length][: len(frame) - target]
    frame[target : target + len(piece)] = piece
    return frame


@_kind(*ANY, may_pass=True)
def lose_bytes(rng: random.Random, base: Base, frame: bytearray) -> bytearray:
    """Bytes missing from the middle, the frame filled up behind."""
    at, length = rng.randrange(len(base.frame)), rng.choice((1, 2, 16, rng.randrange(1, 100)))
    frame = bytearray(base.frame[:at] + base.frame[at + length :])
    return frame + rng.randbytes(len(base.frame) - len(frame))


def damaged(rng: random.Random, base: Base) -> tuple[Kind, bytearray]:
    """The frame damaged in a random way, truly different from the good one."""
    while True:
        kind = rng.choice(KINDS)
        frame = kind.mutate(rng, base, bytearray(base.frame))
        foreign = frame is not None and len(frame) > 5 and frame[5] in LOSSY and frame[5] != base.frame[5]
        if frame is not None and not foreign and frame[: len(base.frame)] != base.frame:
            return kind, frame
