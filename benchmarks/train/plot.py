"""The plot of ``bench train``: the parts of a step's time, computing and waiting for communication."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ds_zipccl.benchmarks.comm import variants
from ds_zipccl.tools import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COMPUTE, _COMMUNICATION = "#b9c2cc", "#1f5a99"
_NARROW = 0.06  # part of the longest bar below which a number does not fit


def trainings(path: str, rows: plots.Rows) -> None:
    """Write the PNG file ``path``: a panel per workload and ranks, a group of bars per link, a bar per variant.

    Args:
        rows: rows of ``bench train``, at least one.

    Raises:
        ToolError: the file cannot be written.
    """
    panels: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        links = panels.setdefault(f"{row['workload']}, {row['ranks']} ranks", {})
        nodes = f", {row['nodes']} nodes" if 1 < row["nodes"] < row["ranks"] else ""
        links.setdefault(row["link"] + nodes, []).append(row)
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    bars = max(sum(1 + len(group) for group in links.values()) for links in panels.values())
    size = (7.5 * columns, 0.6 + lines * (1.1 + 0.27 * bars))
    with plots.drawn(path, (lines, columns), size, headroom=0.35) as (figure, axes):
        for spare in axes.flat[len(panels) :]:
            spare.remove()
        for panel, (title, links) in zip(axes.flat, panels.items()):
            _draw_training(panel, links)
            panel.set_title(title, fontsize=11, loc="left", fontweight="bold")
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper right", ncols=2, fontsize=9, frameon=False)


def _draw_training(axes: Axes, links: Mapping[str, plots.Rows]) -> None:
    """Draw one panel: below the name of each link its variants."""
    names, bars = [], []
    for link, group in links.items():
        names += [link, *(variants.find(row["variant"]).label for row in group)]
        bars += [None, *group]
    places = [(place, row) for place, row in enumerate(bars) if row]
    longest = max(row["step_ms"] for _, row in places)
    left = [0.0] * len(places)
    for label, colour, ink in (("computing", _COMPUTE, "black"), ("communication", _COMMUNICATION, "white")):
        widths = [row["comm_ms"] if colour is _COMMUNICATION else row["step_ms"] - row["comm_ms"] for _, row in places]
        drawn = axes.barh([place for place, _ in places], widths, left=left, height=0.8, color=colour, label=label)
        inside = [f"{width:.0f}" if width > _NARROW * longest else "" for width in widths]
        axes.bar_label(drawn, inside, label_type="center", color=ink, fontsize=8)
        left = [start + width for start, width in zip(left, widths)]
    for place, row in places:
        gain = f" · {row['speedup']:.2f}x, communication {row['comm_speedup']:.2f}x"
        text = f"{row['step_ms']:.0f} ms{'' if row['variant'] == 'plain' else gain}"
        axes.text(row["step_ms"] + 0.01 * longest, place, text, va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    for tick, bar in zip(axes.get_yticklabels(), bars):
        tick.set_fontweight("normal" if bar else "bold")
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.6 * longest)  # room for the text after a bar
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel("median step (ms); 1.50x: DeepSpeed takes 1.5 times as long", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
