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


@dataclass(frozen=True)
class PairSet:
    """A data set of words and their base. ``about``, ``unit``: for ``--help``, ``unit`` stands for the number.
    ``fill``: (size, torch name of the dtype, number, generator) -> words, base."""

    about: str
    unit: str
    fill: Callable[[int, str, float, torch.Generator], tuple[torch.Tensor, torch.Tensor]]
    #: Numbers that ``bench codec --codec delta`` measures by default.
    usual: tuple[float, ...]
    dtypes: tuple[str, ...] = DEFAULT_DTYPES


def _changed(numel: int, dtype: str, percent: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    base = torch.empty(numel).normal_(0, _WEIGHT, generator=generator).to(getattr(torch, dtype))
    wide = torch.int32 if base.itemsize == 4 else torch.int16
    draws = torch.empty(numel).uniform_(generator=generator)
    step = (draws < percent / 100).to(wide)
    step += (draws < percent / 100 * 0.015).to(wide)
    step *= torch.empty(numel).uniform_(generator=generator).lt_(0.5).mul_(2).sub_(1).to(wide)
    # The next greater number has greater bits if it is positive, and smaller bits if it is negative. A step that would
    # change the sign, which is very rare at this size, leaves the word as it is.
    bits = base.view(wide)
    moved = bits + torch.where(bits < 0, -step, step)
    return torch.where(moved ^ bits < 0, bits, moved).view(base.dtype), base


def _adamw(numel: int, dtype: str, rate: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    wanted: torch.dtype = getattr(torch, dtype)
    weights = torch.empty(numel).normal_(0, _WEIGHT, generator=generator)
    scales = torch.empty(numel).normal_(generator=generator).exp_()
    mean, square, base = torch.zeros(numel), torch.zeros(numel), weights.to(wanted)
    for step in range(1, _STEPS + 1):
        gradient = torch.empty(numel).normal_(generator=generator).mul_(scales)
        mean.lerp_(gradient, 0.1)
        square.mul_(0.95).addcmul_(gradient, gradient, value=0.05)
        base = weights.to(wanted)
        weights.addcdiv_(mean, (square / (1 - 0.95**step)).sqrt_().add_(1e-8), value=-rate / (1 - 0.9**step))
    return weights.to(wanted), base


_WEIGHT = 0.02  # deviation of the weights
_STEPS = 12  # of AdamW: its means have forgotten their start

#: Name -> data set of words and their base.
PAIRS: dict[str, PairSet] = {
    "changed": PairSet(
        "Gaussian weights, deviation 0.02; a random P percent differ by a unit in the last place, 1.5% of these by two",
        "P%", _changed, (0.0, 0.1, 1.0, 3.0, 5.0, 10.0, 20.0, 60.0),
    ),
    "adamw": PairSet(
        f"such weights before and after step {_STEPS} of AdamW in fp32 (betas 0.9 0.95, rate LR, gradients are noise)",
        "LR", _adamw, (1e-3, 3e-4, 1e-4, 1e-5),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """A data set of words and their base, and its number. :func:`codec_spec` parses the text of ``str()``."""

    name: str
    number: float

    def __str__(self) -> str:
        return f"{self.name}:{self.number:g}{'%' * (self.name == 'changed')}"

    def has(self, dtype: str) -> bool:
        """Whether the set exists in a dtype (torch name)."""
        return dtype in PAIRS[self.name].dtypes

    def make(self, numel: int, dtype: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return words and base, flat CPU tensors of ``numel`` elements of a dtype (torch name)."""
        import torch

        return PAIRS[self.name].fill(numel, dtype, self.number, torch.Generator().manual_seed(seed))


#: Name -> data set of Gaussian rows, of which a percentage repeats or scales earlier rows.
ROWS = {
    "repeated": "P percent of the rows equal earlier rows",
    "scaled": "P percent of the rows are earlier rows times a factor from 0.25 to 1, rounded",
}


@dataclass(frozen=True)
class RowSet:
    """A data set of rows and its percentage. :func:`codec_spec` parses the text of ``str()``."""

    name: str
    percent: float

    def __str__(self) -> str:
        return f"{self.name}:{self.percent:g}%"

    def make(self, numel: int, width: int, dtype: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return words, a flat CPU tensor of ``numel`` elements of a dtype (torch name), and for each whole row the
        number of its source row, int32. A drawn row, such as the first one, is its own source."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        words = torch.empty(numel).normal_(generator=generator).to(getattr(torch, dtype))
        rows = numel // width
        sources = torch.arange(rows)
        copies = 1 + torch.randperm(max(0, rows - 1), generator=generator)[: round(rows * self.percent / 100)]
        drawn = torch.ones(rows, dtype=torch.bool)
        drawn[copies] = False
        before = drawn.cumsum(0)[copies]  # drawn rows before each copy
        places = torch.empty(len(copies)).uniform_(generator=generator).mul_(before).long().minimum(before - 1)
        sources[copies] = drawn.nonzero().view(-1)[places]
        matrix = words[: rows * width].view(rows, width)
        found = matrix[sources[copies]]
        if self.name == "scaled":
            factors = torch.empty(len(copies), 1).uniform_(0.25, 1, generator=generator)
            found = (found.float() * factors).to(words.dtype)
        matrix[copies] = found
        return words, sources.int()


def codec_spec(text: str) -> Spec | Pair | RowSet:
    """Parse as :func:`spec`, or ``changed:P%``, ``adamw:LR``, ``repeated:P%``, ``scaled:P%`` (argparse type)."""
    name, _, number = text.partition(":")
    if name not in PAIRS and name not in ROWS:
        if name in DATA:
            return spec(text)
        raise argparse.ArgumentTypeError(f"no data set {name!r}; known: {', '.join([*DATA, *PAIRS, *ROWS])}")
    shares = name != "adamw"
    try:
        if shares:
            if number[-1:] == "%" and 0 <= float(number[:-1]) <= 100:
                percent = float(number[:-1])
                return RowSet(name, percent) if name in ROWS else Pair(name, percent)
        elif 0 < float(number) < 1:
            return Pair(name, float(number))
    except ValueError:
        pass
    wanted = f"a percentage from 0% to 100%, such as {name}:1%" if shares else "a rate, such as adamw:1e-4"
    raise argparse.ArgumentTypeError(f"{name} has {wanted}; got {text!r}")


def usual_rows() -> list[RowSet]:
    """Return the sets of rows that are measured by default."""
    return [RowSet("repeated", 0), RowSet("repeated", 25), RowSet("repeated", 50), RowSet("scaled", 50)]


def usual_pairs() -> list[Pair]:
    """Return the pairs that are measured by default."""
    return [Pair(name, number) for name, entry in PAIRS.items() for number in entry.usual]


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


def about_pairs() -> str:
    """Return the data sets with a base as text for ``--help``."""
    lines = (f"  {name + ':' + entry.unit:14} {entry.about}" for name, entry in PAIRS.items())
    return "with --codec delta, words and their base:\n" + "\n".join(lines)


def about_rows() -> str:
    """Return the data sets of rows as text for ``--help``."""
    lines = (f"  {name + ':P%':14} {about}" for name, about in ROWS.items())
    return "with --codec rows, rows of --width elements:\n" + "\n".join(lines)
