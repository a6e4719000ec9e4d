"""Plots of ``analyze``, ``plan`` and ``steps``: the PNG files of ``--plot``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ds_zipccl.kernels.numba.layout import ABOVE, CASCADE, CODE_OF_K, SPARSE, TIER1_BITS, TIERS, WIDE
from ds_zipccl.tools import ToolError
from ds_zipccl.tools.exponents import MODES, Fields, block_tables, exponent_blocks

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker
except ImportError as error:
    raise ToolError(f"--plot needs matplotlib ({error}): pip install matplotlib, or leave --plot out") from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ds_zipccl.tools.step_logs import Step

Rows = Sequence[Mapping[str, Any]]
_GREY, _GRID, _RED = "#7b8794", "#e4e7eb", "#c44e52"


@contextmanager
def drawn(
    path: str, panels: tuple[int, int], size: tuple[float, float], headroom: float = 0.0, **more: Any
) -> Iterator[Any]:
    """Give a figure and the axes of its panels, and write it to ``path``. ``headroom``: inches above the panels.

    Raises:
        ToolError: the file cannot be written.
    """
    figure, axes = pyplot.subplots(*panels, figsize=size, squeeze=False, **more)
    try:
        yield figure, axes
        figure.tight_layout(rect=(0, 0, 1, 1 - headroom / size[1]))
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise ToolError(f"cannot write {path}: {error.strerror}") from error
    finally:
        pyplot.close(figure)


def _plain_numbers(axis: Any) -> None:
    """Label ticks without exponents."""
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("{x:g}")


# ---- analyze: histogram of the exponents, and the window of the coder --------------------------------------

_TIERS = ("#1f5a99", "#4f8fd0", "#94bfe6", "#d3e4f5")  # colors, first tier to fourth
#: Mode of a block -> mode that defines its tiers (FORMAT.md 2.1).
_TIERS_OF = {CASCADE: CASCADE, SPARSE: CASCADE, WIDE: WIDE}
_REACH = 16  # binades shown on either side of a window's top; the outer bars hold all farther ones


class Histograms:
    """Histograms of exponents per dtype, absolute and relative to the window of the block."""

    def __init__(self, block: int) -> None:
        self._block = block
        self._found: dict[torch.dtype, _Counts] = {}

    def add(self, tensor: torch.Tensor, frame: torch.Tensor) -> None:
        """Add a float CPU tensor and its exponent frame, which has the block size of this object."""
        values = 1 << Fields.of(tensor.dtype).exponent
        counts = self._found.setdefault(tensor.dtype, _Counts(values))
        tops, modes = block_tables(frame)
        at = 0
        for part in exponent_blocks(tensor, self._block):
            here = slice(at, at := at + len(part))
            counts.fields += np.bincount(part.reshape(-1), minlength=values)
            counts.modes += np.bincount(modes[here], minlength=len(MODES))
            for mode, tiers in _TIERS_OF.items():
                chosen = modes[here] == mode
                top = tops[here][chosen].astype(np.int64)
                counts.tops[tiers] += np.bincount(top, minlength=256)
                inside = part[chosen]
                distance = np.clip(inside - top[:, None], -_REACH, _REACH)[inside > 0]
                counts.aligned[tiers] += np.bincount(distance + _REACH, minlength=2 * _REACH + 1)

    def save(self, path: str, title: str) -> None:
        """Write the PNG file ``path``.

        Raises:
            ToolError: there is no tensor to draw, or the file cannot be written.
        """
        if not self._found:
            raise ToolError("nothing to plot: no tensor of a coded dtype")
        size = (13, 0.6 + 4.6 * len(self._found))
        with drawn(path, (len(self._found), 2), size) as (figure, axes):
            for (dtype, counts), (left, right) in zip(self._found.items(), axes, strict=True):
                _draw_fields(left, dtype, counts)
                _draw_aligned(right, counts, self._block)
            figure.suptitle(f"Exponents of {title}" if len(title) <= 90 else f"Exponents of {title[:87]}...")


class _Counts:
    """Histograms (int64): exponent fields, modes of blocks, and per mode with tiers: tops of blocks, and exponents
    minus the top of their block, clipped."""

    def __init__(self, values: int) -> None:
        self.fields = np.zeros(values, dtype=np.int64)
        self.aligned = {mode: np.zeros(2 * _REACH + 1, dtype=np.int64) for mode in _TIERS_OF.values()}
        self.tops = {mode: np.zeros(256, dtype=np.int64) for mode in _TIERS_OF.values()}
        self.modes = np.zeros(len(MODES), dtype=np.int64)


def _tier(mode: int, distance: int) -> int | None:
    """Return the tier (0 to 3) of an exponent ``distance`` above its block's top, or None (FORMAT.md 2.1)."""
    codes = CODE_OF_K[mode, :, (ABOVE - distance) % 256]
    named = [tier for tier in range(TIERS) if codes[tier] < (3 if tier else (1 << TIER1_BITS[mode]) - 1)]
    return named[0] if named else None


def _draw_fields(axes: Axes, dtype: torch.dtype, counts: _Counts) -> None:
    """Draw the shares of the binades, and the window of the block with the median top."""
    bias = Fields.of(dtype).bias
    seen = np.flatnonzero(counts.fields[1:]) + 1
    shares = 100 * counts.fields / max(1, counts.fields.sum())
    axes.bar(seen - bias, shares[seen], width=0.85, color="#444444", zorder=2)
    mode = max(counts.tops, key=lambda mode: counts.tops[mode].sum())
    tops = counts.tops[mode]
    if tops.any():
        median = int(np.searchsorted(np.cumsum(tops), tops.sum() / 2)) - bias
        tiers = {distance: _tier(mode, distance) for distance in range(-_REACH, _REACH + 1)}
        spans = [distance for distance, tier in tiers.items() if tier is not None]
        axes.axvspan(
            median + min(spans) - 0.5, median + max(spans) + 0.5, color="#e6eff8", label="window of the median block"
        )
        first = [distance for distance, tier in tiers.items() if tier == 0]
        label = f"its first tier ({TIER1_BITS[mode]} bits)"
        axes.axvspan(median + min(first) - 0.5, median + max(first) + 0.5, color="#b5d2ee", label=label)
        axes.legend(fontsize=8, loc="upper left")
    name = str(dtype).removeprefix("torch.")
    axes.set_title(f"{name}, {counts.fields.sum():,} elements, {shares[0]:.2g}% zero or denormal", fontsize=10)
    axes.set_xlabel("binade of |x| (exponent e: 2^e <= |x| < 2^(e+1))")
    axes.set_ylabel("share of elements (%)")


def _draw_aligned(axes: Axes, counts: _Counts, block: int) -> None:
    """Draw shares by distance from the top of the block's window, colored by tier."""
    distances = np.arange(-_REACH, _REACH + 1)
    total = max(1, sum(int(aligned.sum()) for aligned in counts.aligned.values()))
    base = np.zeros(len(distances))
    for tier, colour in [*enumerate(_TIERS), (None, _RED)]:
        shares = np.zeros(len(distances))
        for mode, aligned in counts.aligned.items():
            mine = np.array([_tier(mode, int(distance)) == tier for distance in distances])
            shares += 100 * np.where(mine, aligned, 0) / total
        label = "no tier" if tier is None else f"tier {tier + 1}"
        axes.bar(distances, shares, width=0.85, bottom=base, color=colour, label=f"{label}: {shares.sum():.3g}%")
        base += shares
    axes.legend(fontsize=8, loc="upper left")
    total = max(1, counts.modes.sum())
    modes = ", ".join(f"{100 * n / total:.3g}% {mode}" for mode, n in zip(MODES, counts.modes, strict=True) if n)
    axes.set_title(f"relative to the window of the element's block\nblocks of {block}: {modes}", fontsize=10)
    axes.set_xlabel("exponent minus top of its block's window")
    axes.set_ylabel("share of windowed elements (%)")


# ---- plan: the time of a step by network and number of GPUs ------------------------------------------------


def scaling(path: str, rows: Rows) -> None:
    """Write the PNG file ``path``: a line per network and variant, and one for computing. ``rows``: rows of steps.

    Raises:
        ToolError: the file cannot be written.
    """
    counts = sorted({row["gpus"] for row in rows})
    with drawn(path, (1, 1), (9.0, 5.0)) as (_, ((axes,),)):
        for index, network in enumerate(dict.fromkeys(row["network"] for row in rows)):
            for variant, style in (("plain", "-"), ("coded", "--")):
                line = [row for row in rows if (row["network"], row["variant"]) == (network, variant)]
                across, up = [row["gpus"] for row in line], [row["step_ms"] / 1e3 for row in line]
                axes.plot(across, up, style, color=f"C{index}", linewidth=1.3, label=f"{network}, {variant}")
        axes.axhline(rows[0]["computing_ms"] / 1e3, color=_GREY, linewidth=1, linestyle=":", label="computing alone")
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set_yscale("log")
        _plain_numbers(axes.yaxis)
        axes.set_xlabel("GPUs", fontsize=9)
        axes.set_ylabel("predicted seconds of a step", fontsize=9)
        axes.grid(axis="y", which="both", color=_GRID)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), title="network of a node")


# ---- steps: ratio per step and role, and the learning rate -------------------------------------------------

_WIDE = 5  # highest / lowest ratio above which the axis is logarithmic


def ratios(path: str, logs: Mapping[str, Sequence[Step]]) -> None:
    """Write the PNG file ``path``: a panel per log, a line per role and kind, and the first learning rate.

    Raises:
        ToolError: the file cannot be written.
    """
    roles = sorted({role for steps in logs.values() for step in steps for role in step.parts()})
    colours = {role: f"C{index}" for index, role in enumerate(roles)}
    with drawn(path, (len(logs), 1), (9.0, 0.4 + 3.2 * len(logs)), sharey=True) as (_, axes):
        for panel, (name, steps) in zip(axes.flat, logs.items()):
            _draw_log(panel, steps, colours)
            panel.set_title(name, fontsize=11, loc="left", fontweight="bold")
        found = [ratio for steps in logs.values() for step in steps for role in roles if (ratio := step.ratio(role))]
        if found and max(found) > _WIDE * min(found):  # for all panels, which share the axis
            axes.flat[0].set_yscale("log")
            axes.flat[0].yaxis.set_minor_locator(ticker.LogLocator(subs=(2, 5)))
            _plain_numbers(axes.flat[0].yaxis)
        axes.flat[-1].set_xlabel("optimizer step", fontsize=9)


def _draw_log(axes: Axes, steps: Sequence[Step], colours: Mapping[str, str]) -> None:
    """Draw the panel of one log."""
    rates = [step.rates[0] if step.rates else math.nan for step in steps]
    if not all(map(math.isnan, rates)):
        behind = axes.twinx()
        behind.plot(*_line(steps, rates), color=_GREY, linewidth=1, linestyle="--", label="learning rate")
        behind.set_ylabel("learning rate", fontsize=9, color=_GREY)
        behind.tick_params(axis="y", labelcolor=_GREY, labelsize=8)
        behind.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        behind.set_ylim(bottom=0)
        behind.spines["top"].set_visible(False)
    for role, colour in colours.items():
        ratios = [step.ratio(role) for step in steps]
        if any(ratios):
            drawn = [math.nan if ratio is None else ratio for ratio in ratios]
            axes.plot(*_line(steps, drawn), color=colour, linewidth=1.3, label=role)
    if axes.lines:
        axes.legend(fontsize=9, frameon=False, loc="lower right", bbox_to_anchor=(0.94, 1), ncols=len(colours))
    axes.set_ylabel("logical / wire bytes", fontsize=9)
    axes.grid(axis="y", which="both", color=_GRID)
    axes.spines["top"].set_visible(False)


def _line(steps: Sequence[Step], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the points of a line, with a break where steps go back because a new run begins."""
    across, up, before = [], [], -1
    for step, value in zip(steps, values, strict=True):
        if step.step <= before:
            across.append(math.nan)
            up.append(math.nan)
        across.append(step.step)
        up.append(value)
        before = step.step
    return across, up
