"""Synthetic data sets for benchmarks and ``analyze``. Equal name, size, dtype and seed give equal words.

Only functions import torch: the command line parser lists the data sets without it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: Name on the command line -> name of the torch dtype.
DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}
DTYPES |= {name: name for name in DTYPES.values()}
#: Allowed elements per block (FORMAT.md section 1, block_log2).
BLOCKS = (128, 256, 512, 1024)
DEFAULT_DTYPES = ("bfloat16", "float16", "float32")

#: (uninitialized float32 vector, scale, generator) -> values, which may use the memory of the vector.
Fill = Callable[["torch.Tensor", float, "torch.Generator"], "torch.Tensor"]

_ROW = 768  # elements that are zero together in `embedding` and share a scale in `rows`


@dataclass(frozen=True)
class DataSet:
    """A data set. ``fill``: makes the values; None: random bits. ``scaled``: whether it has a scale."""

    about: str
    fill: Fill | None
    scaled: bool = True
    dtypes: tuple[str, ...] = tuple(dict.fromkeys(DTYPES.values()))


def _normal(x: torch.Tensor, sigma: float, generator: torch.Generator) -> torch.Tensor:
    return x.normal_(0, sigma, generator=generator)


def _laplace(x: torch.Tensor, sigma: float, generator: torch.Generator) -> torch.Tensor:
    signs = x.new_empty(x.shape).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
    return x.exponential_(1 / sigma, generator=generator).mul_(signs)


def _student_t3(x: torch.Tensor, sigma: float, generator: torch.Generator) -> torch.Tensor:
    squared = x.new_zeros(x.shape)
    for _ in range(3):
        squared += x.new_empty(x.shape).normal_(generator=generator).square_()
    return _normal(x, sigma, generator).div_((squared / 3).sqrt_())


def _sparse20(x: torch.Tensor, sigma: float, generator: torch.Generator) -> torch.Tensor:
    zero = x.new_empty(x.shape).uniform_(generator=generator) < 0.2
    return _normal(x, sigma, generator).masked_fill_(zero, 0)


def _row_draws(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a uniform number from 0 to 1 per row."""
    return x.new_empty(-(-x.numel() // _ROW)).uniform_(generator=generator)


def _each(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the value of its row for each element."""
    return rows.repeat_interleave(_ROW)[: x.numel()]


def _embedding(x: torch.Tensor, sigma: float, generator: torch.Generator) -> torch.Tensor:
    draws = _row_draws(x, generator)
    seen = max(1, round(0.03 * draws.numel()))  # rows of the tokens in a batch
    zero = draws < draws.topk(seen).values[-1]
    return _normal(x, sigma, generator).masked_fill_(_each(zero, x), 0)


def _rows(x: torch.Tensor, sigma: float, generator: torch.Generator) -> torch.Tensor:
    scales = _row_draws(x, generator).mul_(8).sub_(4).exp2_()
    return _normal(x, sigma, generator).mul_(_each(scales, x))


#: Name -> data set.
DATA: dict[str, DataSet] = {
    "normal": DataSet("Gaussian of deviation S", _normal),
    "laplace": DataSet("Laplace of scale S", _laplace),
    "student_t3": DataSet("Student t, 3 degrees of freedom, times S: heavy tails", _student_t3),
    "rows": DataSet(f"Gaussian whose deviation differs from row to row ({_ROW} elements) by up to 256x", _rows),
    "sparse20": DataSet("Gaussian with 20% zeros, scattered", _sparse20),
    "embedding": DataSet(f"Gaussian, 97% of the rows ({_ROW} elements) zero, like an embedding's gradient", _embedding),
    "bf16_in_fp32": DataSet(
        "Gaussian rounded to bfloat16: low mantissa bits zero", lambda x, s, g: _normal(x, s, g).bfloat16().float(),
        dtypes=("float32",),
    ),
    "zeros": DataSet("all zero", lambda x, s, g: x.zero_(), scaled=False),
    "constant": DataSet("every element S", lambda x, s, g: x.fill_(s)),
    "random": DataSet("random bits, including NaNs; not compressible", None, scaled=False),
}  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """A data set and its scale. :func:`spec` parses the text of ``str()``."""

    name: str
    sigma: float | None = None

    def __str__(self) -> str:
        return self.name if self.sigma is None else f"{self.name}:{self.sigma:g}"

    def has(self, dtype: str) -> bool:
        """Whether the set exists in a dtype (torch name)."""
        return dtype in DATA[self.name].dtypes

    def scaled(self, sigma: float | None) -> Spec:
        """Return the set with scale ``sigma``; the set itself if it has a scale or cannot have one."""
        return Spec(self.name, sigma) if self.sigma is None and DATA[self.name].scaled else self

    def make(self, numel: int, dtype: str, seed: int = 0) -> torch.Tensor:
        """Return a flat CPU tensor of ``numel`` elements of a dtype (torch name)."""
        import torch

        wanted: torch.dtype = getattr(torch, dtype)
        generator = torch.Generator().manual_seed(seed)
        fill = DATA[self.name].fill
        if fill is None:
            words = torch.empty(numel * wanted.itemsize, dtype=torch.uint8).random_(0, 256, generator=generator)
            return words.view(wanted)
        sigma = 1.0 if self.sigma is None else self.sigma
        return fill(torch.empty(numel), sigma, generator).to(wanted)


def spec(text: str) -> Spec:
    """Parse ``NAME`` or ``NAME:S`` with a scale S, by default 1 (argparse type)."""
    name, colon, number = text.partition(":")
    if name not in DATA:
        raise argparse.ArgumentTypeError(f"no data set {name!r}; known: {', '.join(DATA)}")
    if not colon:
        return Spec(name)
    if not DATA[name].scaled:
        raise argparse.ArgumentTypeError(f"{name!r} has no scale; leave out {colon}{number}")
    return Spec(name, scale(number))


def scale(text: str) -> float:
    """Parse a finite number above 0 (argparse type)."""
    try:
        sigma = float(text)
    except ValueError:
        sigma = 0.0
    if not 0 < sigma < float("inf"):
        raise argparse.ArgumentTypeError(f"a scale is a number above 0 such as 1e-3, got {text!r}")
    return sigma


def numel(text: str) -> int:
    """Parse a number of elements: 4096, 64K, 16M (argparse type; K, M, G are powers of 1024)."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    digits, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1)
    if not digits.isdigit() or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of elements; write 4096, 64K or 16M")
    return int(digits) * unit


def dtype(text: str) -> str:
    """Parse a dtype; returns its torch name (argparse type)."""
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"no dtype {text!r}; known: {', '.join(DTYPES)}")
    return DTYPES[text]


def about() -> str:
    """Return the data sets as text for ``--help``."""
    width = max(map(len, DATA)) + 1
    lines = (f"  {name + ':S' if entry.scaled else name:{width + 2}} {entry.about}" for name, entry in DATA.items())
    return "data sets (S: scale, default 1):\n" + "\n".join(lines)
