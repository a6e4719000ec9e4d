"""Plots of ``plan`` and ``steps``: the PNG files of ``--plot``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ds_zipccl.tools import ToolError

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
