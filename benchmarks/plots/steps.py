"""The picture of ``steps --plot``: ratio per step and role, and the learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ds_zipccl.cli import ToolError

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker
except ImportError as error:
    raise ToolError(f"--plot needs matplotlib ({error}): pip install matplotlib, or leave --plot out") from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ds_zipccl.cli.step_logs import Step

_GREY = "#7b8794"
_WIDE = 5  # highest / lowest ratio above which the axis is logarithmic


def save(path: str, logs: Mapping[str, Sequence[Step]]) -> None:
    """Write the PNG file ``path``: a panel per log, a line per role and kind, and the first learning rate on an axis of its own.

    Raises:
        ToolError: the file cannot be written.
    """
    size = (9.0, 0.4 + 3.2 * len(logs))
    figure, axes = pyplot.subplots(len(logs), 1, figsize=size, squeeze=False, sharey=True)
    roles = sorted({role for steps in logs.values() for step in steps for role in step.parts()})
    colours = {role: f"C{index}" for index, role in enumerate(roles)}
    try:
        for panel, (name, steps) in zip(axes.flat, logs.items()):
            _draw(panel, steps, colours)
            panel.set_title(name, fontsize=11, loc="left", fontweight="bold")
        ratios = [ratio for steps in logs.values() for step in steps for role in roles if (ratio := step.ratio(role))]
        if ratios and max(ratios) > _WIDE * min(ratios):
            _logarithmic(axes.flat[0])
        axes.flat[-1].set_xlabel("optimizer step", fontsize=9)
        figure.tight_layout()
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise ToolError(f"cannot write {path}: {error.strerror}") from error
    finally:
        pyplot.close(figure)


def _draw(axes: Axes, steps: Sequence[Step], colours: Mapping[str, str]) -> None:
    """Draw one panel."""
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
    axes.grid(axis="y", which="both", color="#e4e7eb")
    axes.spines["top"].set_visible(False)


def _line(steps: Sequence[Step], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Points of a line, with a break where the steps go back, because another run begins there."""
    across, up, before = [], [], -1
    for step, value in zip(steps, values, strict=True):
        if step.step <= before:
            across.append(math.nan)
            up.append(math.nan)
        across.append(step.step)
        up.append(value)
        before = step.step
    return across, up


def _logarithmic(axes: Axes) -> None:
    """Label decades, and 2 and 5 between them, with plain numbers, on this panel and on all that share its axis."""
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(ticker.LogLocator(subs=(2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
