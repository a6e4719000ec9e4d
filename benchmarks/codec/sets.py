"""Data sets of ``bench codec`` alone: words with a base, and rows that repeat. Equal name, size, dtype and seed give equal words."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_zipccl.tools.data import DATA, DEFAULT_DTYPES, Spec, spec

if TYPE_CHECKING:
    import torch


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


def about_pairs() -> str:
    """Return the data sets with a base as text for ``--help``."""
    lines = (f"  {name + ':' + entry.unit:14} {entry.about}" for name, entry in PAIRS.items())
    return "with --codec delta, words and their base:\n" + "\n".join(lines)


def about_rows() -> str:
    """Return the data sets of rows as text for ``--help``."""
    lines = (f"  {name + ':P%':14} {about}" for name, about in ROWS.items())
    return "with --codec rows, rows of --width elements:\n" + "\n".join(lines)
