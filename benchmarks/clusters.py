"""``plan --clusters``: predictions of whole steps, compared with step times that the authors of DeepSpeed published.

A step of ZeRO-3 moves 6 bytes per 16-bit parameter into every node. A GPU computes F operations per parameter and
token. The rate T of a GPU with K tokens therefore follows 1/T = 1/P + 6 / (F K B): a GPU computes at the rate P, a node
receives at the rate B. Two parameters are fitted. P comes from pairs of runs with the same network and different
tokens, in which B cancels. L is the bandwidth between network cards and GPUs, with 1/B = 1/L + 1/(rate of the node's
network cards). L is set so that the greatest overestimate equals the greatest underestimate.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from ds_zipccl.cli import tables
from ds_zipccl.cli.planning import rows as planning
from ds_zipccl.cli.planning import speeds
from ds_zipccl.cli.planning.operations import PLAIN, TOTAL
from ds_zipccl.cli.planning.rows import FLOPS, Computing, StepTime, step_time
from ds_zipccl.cli.planning.schedules import DeviceSchedules
from ds_zipccl.cli.tables import Column

#: Greatest accepted relative error of a fitted cell of plain ZeRO-3.
WITHIN = 0.10
#: Sizes of models that are shown but not fitted: the formula gives one rate for all sizes, and these differ from it.
APART = (18e9,)
SOURCE = (
    "DeepSpeed, blogs/zeropp, figures 6 to 8 (assets/images/eval1.png, eval2.png, eval3.png); 384 V100 GPUs, network cards of 100 "
    "Gbit/s, nodes of 16 GPUs (the paper, arXiv:2306.10209); TFLOPs of a GPU by ZeRO-3 and by ZeRO++, as printed on the bars"
)
#: Options of ``plan`` for the published runs. The ratio belongs to the coded rows, which are not used.
RUNS = {
    "zero": 3,
    "gpus": 384,
    "gpus_per_node": 16,
    "dtype": "float16",
    "accumulation": 1,
    "bucket": None,
    "live": 0,
    "trainable": None,
    "hop": 0.0,
    "ratio": 1.0,
}
#: Share of ZeRO-3's bytes between nodes that ZeRO++ sends: half of one gather, no second gather, a quarter of the sums.
FEWER = 0.25
#: Steps of the bisection for the path L, and its interval in 1e9 bytes per second.
_HALVINGS, _PATHS = 40, (1.0, 1e4)


class Cell(NamedTuple):
    """A published run. ``links``: network cards per node. ``tokens``: per GPU and micro-batch. ``plain``, ``fewer``:
    TFLOPs per GPU with ZeRO-3 and with ZeRO++."""

    figure: int
    params: float
    links: int
    tokens: int
    plain: float
    fewer: float


class Fit(NamedTuple):
    """The two fitted parameters: ``tflops`` of a GPU while it computes, and ``path`` (L) in 1e9 bytes per second."""

    tflops: float
    path: float


def _cells() -> Iterator[Cell]:
    bars: dict[tuple[int, int, int], dict[float, tuple[float, float]]] = {
        (6, 4, 1024): {18e9: (25, 35), 49e9: (23, 36), 91e9: (23, 36), 138e9: (23, 36)},
        (6, 4, 2048): {18e9: (40, 53), 49e9: (36, 51), 91e9: (36, 51), 138e9: (36, 50)},
        (7, 1, 1024): {18e9: (14, 31), 49e9: (11, 22), 91e9: (11, 22), 138e9: (11, 22)},
        (7, 1, 2048): {18e9: (26, 46), 49e9: (20, 38), 91e9: (20, 38), 138e9: (20, 38)},
        (8, 2, 2048): {18e9: (37, 50), 138e9: (32, 48)},
        (8, 8, 2048): {18e9: (47, 54), 138e9: (48, 55)},
    }
    for (figure, links, tokens), models in bars.items():
        for params, (plain, fewer) in models.items():
            yield Cell(figure, params, links, tokens, plain, fewer)


CELLS = tuple(_cells())
FITTED = tuple(cell for cell in CELLS if cell.params not in APART)

COLUMNS = (
    Column("figure", "d"),
    Column("size", width=4),
    *tables.alike("links tokens", "d"),
    Column("measured", ".0f"),
    Column("predicted", ".1f"),
    *tables.alike("off unseen", "+.1%", 7),
    Column("exposed", ".0%"),
    Column("fewer", ".0f"),
    Column("bytes_alone", ".1f"),
    Column("bytes_off", "+.0%"),
)


class Model:
    """The model of ``plan`` for the published runs. ``args``: parsed options of ``plan``."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = vars(args) | RUNS

    def step(self, cell: Cell, fit: Fit, share: float = 1.0) -> StepTime:
        """Return the time of a plain step that sends ``share`` of its bytes."""
        args = argparse.Namespace(**self._args | {"params": cell.params, "path": fit.path})
        network = speeds.network(f"{cell.links}x100gbit/node")
        rows = planning.step(DeviceSchedules.modelled(args, network, speeds.device_codec("assumed-1.0", args.dtype)))
        seconds = next(row["ms"] for row in rows if (row["what"], row["variant"]) == (TOTAL, PLAIN)) / 1e3
        return step_time(Computing(fit.tflops, cell.tokens).seconds(cell.params, 1), share * seconds, 0.0, 0.0)

    def tflops(self, cell: Cell, fit: Fit, share: float = 1.0) -> float:
        """Return the predicted TFLOPs per GPU."""
        return FLOPS * cell.params * cell.tokens / self.step(cell, fit, share).total / 1e12

    def off(self, cell: Cell, fit: Fit) -> float:
        """Return the relative error of the prediction: predicted / published - 1."""
        return self.tflops(cell, fit) / cell.plain - 1

    def fit(self, cells: Sequence[Cell]) -> Fit:
        """Return the two parameters that fit ``cells``, two of which must differ only in tokens."""
        rate = computing_rate(cells)
        low, high = _PATHS
        for _ in range(_HALVINGS):
            middle = Fit(rate, (low + high) / 2)
            errors = [self.off(cell, middle) for cell in cells]
            if max(errors) + min(errors) < 0:
                low = middle.path
            else:
                high = middle.path
        return Fit(rate, (low + high) / 2)


def computing_rate(cells: Sequence[Cell]) -> float:
    """Return P of the module's formula. 1/P is the mean of (K2/T2 - K1/T1) / (K2 - K1) over all pairs of cells that
    differ only in tokens."""
    pairs = [
        (few, many)
        for few, many in combinations(sorted(cells, key=lambda cell: cell.tokens), 2)
        if few.tokens < many.tokens and (few.figure, few.params, few.links) == (many.figure, many.params, many.links)
    ]
    inverse = [(many.tokens / many.plain - few.tokens / few.plain) / (many.tokens - few.tokens) for few, many in pairs]
    return len(inverse) / sum(inverse)


def rows(model: Model, fit: Fit) -> Iterator[dict[str, Any]]:
    """Yield a row per cell, with the columns of ``plan --help``."""
    unseen = {figure: model.fit([cell for cell in FITTED if cell.figure != figure]) for figure in (6, 7, 8)}
    for cell in CELLS:
        alone = model.tflops(cell, fit, FEWER)
        yield {
            "figure": cell.figure,
            "size": f"{cell.params / 1e9:g}B",
            "links": cell.links,
            "tokens": cell.tokens,
            "fitted": cell in FITTED,
            "measured": cell.plain,
            "predicted": model.tflops(cell, fit),
            "off": model.off(cell, fit),
            "unseen": model.off(cell, unseen[cell.figure]),
            "exposed": model.step(cell, fit).share,
            "fewer": cell.fewer,
            "bytes_alone": alone,
            "bytes_off": alone / cell.fewer - 1,
        }


def main(args: argparse.Namespace) -> int:
    """Run ``plan --clusters``; 0, or 1 if the model is off by more than :data:`WITHIN`."""
    model = Model(args)
    fit = model.fit(FITTED)
    found = list(rows(model, fit))
    worst = max(abs(row["off"]) for row in found if row["fitted"])
    tables.say(f"published: {SOURCE}")
    tables.say(
        f"fitted:    a GPU computes {fit.tflops:.1f} TFLOPs; {fit.path:.1f} GB/s between network cards and GPUs of a node"
    )
    tables.show(COLUMNS, found)
    tables.say(f"greatest error of the fitted cells: {worst:.1%}, limit {WITHIN:.0%}")
    if args.json:
        tables.write_json(
            args.json, found, args.command, made="Computed", source=SOURCE, fit=fit._asdict(), worst=worst
        )
    return int(worst > WITHIN)
