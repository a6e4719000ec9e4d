"""Deterministic words to code: made with integers only, so the same on every machine and with every library version."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Float:
    """A coded dtype by its bits (FORMAT.md section 2); ``word`` is numpy's unsigned integer of that size."""

    dtype: torch.dtype
    exponent: int
    mantissa: int
    word: type

    @property
    def sign(self) -> int:
        return 1 << (self.exponent + self.mantissa)

    @property
    def largest_exponent(self) -> int:
        return (1 << self.exponent) - 1


BF16 = Float(torch.bfloat16, 8, 7, np.uint16)
FP16 = Float(torch.float16, 5, 10, np.uint16)
FP32 = Float(torch.float32, 8, 23, np.uint32)
E4M3 = Float(torch.float8_e4m3fn, 4, 3, np.uint8)
E5M2 = Float(torch.float8_e5m2, 5, 2, np.uint8)
FLOATS = {"bf16": BF16, "fp16": FP16, "fp32": FP32, "e4m3": E4M3, "e5m2": E5M2}
#: The dtypes of sums and differences; gloo has no float8.
SUMMED = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
BLOCKS = (128, 256, 512, 1024)
CHUNK_BLOCKS = 16
CODES = ("cascade", "wide")


def hashes(count: int, seed: int) -> np.ndarray:
    """``count`` uint64 of splitmix64."""
    with np.errstate(over="ignore"):
        z = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def _below(count: int, seed: int, limit: int) -> np.ndarray:
    return (hashes(count, seed) >> np.uint64(11)) % np.uint64(limit)


def random_words(count: int, kind: Float, seed: int) -> np.ndarray:
    return (hashes(count, seed) >> np.uint64(8)).astype(kind.word)


def with_exponents(words: np.ndarray, exponents: np.ndarray, kind: Float) -> np.ndarray:
    """``words`` with their exponent fields replaced (modulo the field)."""
    field = kind.largest_exponent
    kept = words & kind.word(kind.sign | ((1 << kind.mantissa) - 1))
    return kept | ((exponents.astype(np.int64) & field).astype(kind.word) << kind.word(kind.mantissa))


def bell(count: int, kind: Float, seed: int) -> np.ndarray:
    """Exponents as of a bell-shaped distribution: each binade down is half as likely."""
    middle = kind.largest_exponent // 2 + 1 + seed % 5
    steps = np.zeros(count, dtype=np.int64)
    draws = hashes(count, seed + 1)
    for bit in range(1, 24):
        steps += (draws & np.uint64((1 << bit) - 1)) == 0
    lift = (draws >> np.uint64(40)) % np.uint64(8) == 0
    return with_exponents(random_words(count, kind, seed), middle - steps + lift, kind)


def _zeroed(words: np.ndarray, kind: Float, seed: int, per_1024: int, negative: bool) -> np.ndarray:
    zero = _below(len(words), seed + 7, 1024) < per_1024
    signs = (_below(len(words), seed + 8, 2) * np.uint64(kind.sign if negative else 0)).astype(kind.word)
    return np.where(zero, signs, words)


def _threshold(count: int, kind: Float, seed: int) -> np.ndarray:
    """One zero more or less than the sixteenth from which a block is SPARSE, when ``count`` is a block."""
    words = bell(count, kind, seed)
    words[:: 16 if seed % 2 else 17] = 0
    return words


def _specials(count: int, kind: Float, seed: int) -> np.ndarray:
    """NaNs with payloads, infinities, denormals, largest and smallest."""
    top = _below(count, seed, 2) * np.uint64(kind.largest_exponent)
    words = with_exponents(random_words(count, kind, seed + 1), top, kind)
    keep = _below(count, seed + 2, 4)[:, None] == np.arange(4)
    low = kind.word((1 << kind.mantissa) - 1)
    choices = [words, words & ~low, words | low, (words & ~low) | kind.word(1)]
    return np.select(list(keep.T), choices).astype(kind.word)


def _outliers(count: int, kind: Float, seed: int) -> np.ndarray:
    rare = _below(count, seed + 3, 40) == 0
    return np.where(rare, random_words(count, kind, seed + 4), bell(count, kind, seed))


def _spread(count: int, kind: Float, seed: int) -> np.ndarray:
    """Exponents spread over more binades than a bell's: CASCADE gives way to WIDE, or nearly so."""
    middle = kind.largest_exponent // 2
    steps = sum(_below(count, seed + i, 3 + seed % 4).astype(np.int64) for i in range(3))
    return with_exponents(random_words(count, kind, seed), middle - steps, kind)


def _trimmed(count: int, kind: Float, seed: int) -> np.ndarray:
    """Low bits that are zero in all words: fp32 that came from something shorter."""
    shift = kind.word(1 + seed % kind.mantissa)
    return bell(count, kind, seed) >> shift << shift


Texture = Callable[[int, Float, int], np.ndarray]
TEXTURES: dict[str, Texture] = {
    "zeros": lambda n, kind, seed: np.zeros(n, kind.word),
    "negative_zeros": lambda n, kind, seed: np.full(n, kind.sign, kind.word),
    "mixed_zeros": lambda n, kind, seed: _zeroed(np.zeros(n, kind.word), kind, seed, 1024, True),
    "constant": lambda n, kind, seed: np.full(n, random_words(1, kind, seed)[0], kind.word),
    "random": random_words,
    "bell": bell,
    "sparse": lambda n, kind, seed: _zeroed(bell(n, kind, seed), kind, seed, 300 + seed % 700, False),
    "sparse_signed": lambda n, kind, seed: _zeroed(bell(n, kind, seed), kind, seed, 80 + seed % 900, True),
    "threshold": _threshold,
    "specials": _specials,
    "outliers": _outliers,
    "spread": _spread,
    "trimmed": _trimmed,
    "trimmed_sparse": lambda n, kind, seed: _zeroed(_trimmed(n, kind, seed), kind, seed, 400, True),
    "ramp": lambda n, kind, seed: (np.arange(n) * (1 + seed % 97)).astype(kind.word),
}


def mixed(count: int, kind: Float, block: int, seed: int, names: tuple[str, ...] = tuple(TEXTURES)) -> np.ndarray:
    """``count`` words in which every block has a texture of its own."""
    words = np.empty(count, kind.word)
    chosen = _below(count // block + 1, seed, len(names))
    for at in range(0, count, block):
        here = words[at : at + block]
        here[:] = TEXTURES[names[int(chosen[at // block])]](len(here), kind, seed + at // block)
    return words


# --- bases: earlier states of the words


def _turned(words: np.ndarray, kind: Float) -> np.ndarray:
    """Words in the order of the floats, as numbers; those of 8 bits in that of bytes."""
    order, modulus = words.astype(np.int64), (1 << 8 * kind.word(0).nbytes) - 1
    return order if kind.word is np.uint8 else np.where(order & kind.sign, order ^ modulus, order | kind.sign)


def _turned_back(order: np.ndarray, kind: Float) -> np.ndarray:
    modulus = (1 << 8 * kind.word(0).nbytes) - 1
    order = order & modulus
    order = order if kind.word is np.uint8 else np.where(order & kind.sign, order ^ kind.sign, order ^ modulus)
    return order.astype(kind.word)


def _stepped(words: np.ndarray, kind: Float, seed: int, per_1024: int, reach: int, grow: bool = True) -> np.ndarray:
    """Some words moved by up to about ``reach`` units in the order of the floats, most by less; to ``grow``, small words by more."""
    count, draws = len(words), hashes(len(words), seed + 20)
    exponents = (words.astype(np.int64) >> kind.mantissa) & kind.largest_exponent
    lift = np.clip(int(exponents.max(initial=0)) - 2 - exponents, 0, kind.mantissa * grow)
    step = 1 + (draws >> np.uint64(32)).astype(np.int64) % (reach << lift)
    step = np.where(draws & np.uint64(1), step, -step)
    return _turned_back(_turned(words, kind) + np.where(_below(count, seed + 21, 1024) < per_1024, step, 0), kind)


def _replaced(words: np.ndarray, kind: Float, seed: int, per_1024: int) -> np.ndarray:
    return np.where(_below(len(words), seed + 22, 1024) < per_1024, random_words(len(words), kind, seed + 23), words)


BASES: dict[str, Callable[[np.ndarray, Float, int], np.ndarray]] = {
    "same": lambda words, kind, seed: words.copy(),
    "few_steps": lambda words, kind, seed: _stepped(words, kind, seed, 1 + seed % 60, 1),
    "steps": lambda words, kind, seed: _stepped(words, kind, seed, 200 + seed % 824, 1 + seed % 3),
    "long_steps": lambda words, kind, seed: _stepped(words, kind, seed, 1024, 1 << seed % 8),
    "few_units": lambda words, kind, seed: _stepped(words, kind, seed, 1 + seed % 60, 1, grow=False),
    "units": lambda words, kind, seed: _stepped(words, kind, seed, 200 + seed % 824, 1 + seed % 3, grow=False),
    "few_replaced": lambda words, kind, seed: _replaced(words, kind, seed, 1 + seed % 40),
    "steps_and_replaced": lambda words, kind, seed: _replaced(_stepped(words, kind, seed, 500, 2), kind, seed, 10),
    "half": lambda words, kind, seed: np.concatenate((words[: len(words) // 2], ~words[len(words) // 2 :])),
    "negated": lambda words, kind, seed: words ^ kind.word(kind.sign),
    "zeros": lambda words, kind, seed: np.zeros_like(words),
    "other": lambda words, kind, seed: random_words(len(words), kind, seed + 24),
}


def before(words: np.ndarray, kind: Float, block: int, seed: int, names: tuple[str, ...] = tuple(BASES)) -> np.ndarray:
    """A base of ``words`` in which every block has changed in a way of its own."""
    base = np.empty_like(words)
    chosen = _below(len(words) // block + 1, seed + 25, len(names))
    for at in range(0, len(words), block):
        base[at : at + block] = BASES[names[int(chosen[at // block])]](words[at : at + block], kind, seed + at // block)
    return base


def moved(words: np.ndarray, kind: Float, places: np.ndarray, units: np.ndarray) -> np.ndarray:
    """A base that differs from ``words`` at ``places`` by ``units``, in the order of the floats; of 8 bits in that of bytes."""
    order = _turned(words, kind)
    order[places] -= units
    return _turned_back(order, kind)


def changes(count: int, seed: int, reach: int = 1) -> np.ndarray:
    """Units by which words change: mostly 1, up or down, each further unit half as often, up to ``reach``."""
    draws = hashes(count, seed + 30)
    units = np.ones(count, np.int64)
    for bit in range(1, min(reach, 40)):
        units += (draws & np.uint64((1 << bit) - 1)) == 0
    return np.where(draws >> np.uint64(63), units, -units)


def some_places(numel: int, count: int, seed: int, run: int = 1) -> np.ndarray:
    """``count`` places below ``numel``, in order: single ones, or most of them in runs of ``run``."""
    starts = np.argsort(hashes(-(-numel // run), seed + 31), kind="stable")[: -(-count // run)]
    places = (starts[:, None] * run + np.arange(run)).reshape(-1)
    return np.sort(places[places < numel][:count])


def tensor(words: np.ndarray, kind: Float) -> torch.Tensor:
    """A flat tensor of ``kind.dtype`` with these bits; owns its memory."""
    result = torch.empty(len(words), dtype=kind.dtype)
    result.view(torch.uint8).numpy()[:] = words.view(np.uint8)
    return result


def words_of(tensor: torch.Tensor) -> list[int]:
    """The bits of the elements."""
    return tensor.reshape(-1).view(torch.uint8).numpy().view(f"u{tensor.itemsize}").tolist()


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads, inside the context, for the kernels."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_same_bits(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Fails unless dtype, shape and every bit agree; the message names the first word that does not."""
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    left = got.detach().reshape(-1).view(torch.uint8).view(-1, got.dtype.itemsize)
    right = wanted.detach().reshape(-1).view(torch.uint8).view(-1, got.dtype.itemsize)
    if not torch.equal(left, right):
        wrong = (left != right).any(1).nonzero().view(-1)
        at = int(wrong[0])
        raise AssertionError(
            f"{len(wrong)} of {got.numel()} words differ, the first at {at}: "
            f"got {bytes(left[at].tolist()).hex()}, wanted {bytes(right[at].tolist()).hex()}"
        )


def assert_same_sums(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """As :func:`assert_same_bits`, but NaNs of fp16 and fp32 may have any payload, and of bfloat16 are 0x7fc0."""
    got, nans = got.cpu(), wanted.isnan()
    assert torch.equal(got.isnan(), nans)
    assert_same_bits(got.masked_fill(nans, 0), wanted.masked_fill(nans, 0))
    if got.dtype is torch.bfloat16:
        assert (got[nans].view(torch.int16) == 0x7FC0).all()
