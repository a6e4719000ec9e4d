"""The picture of ``plan --plot``: the time of a step by network and number of GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ds_zipccl.cli import ToolError

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker
except ImportError as error:
    raise ToolError(f"--plot needs matplotlib ({error}): pip install matplotlib, or leave --plot out") from error

_GREY = "#7b8794"
#: Variant -> line style; other variants are left out.
_STYLES = {"plain": "-", "coded": "--"}


def save(path: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the PNG file ``path``: a line per network and variant, and one for the computing. ``rows``: of whole steps.

    Raises:
        ToolError: the file cannot be written.
    """
    figure, axes = pyplot.subplots(figsize=(9.0, 5.0))
    counts = sorted({row["gpus"] for row in rows})
    try:
        for index, network in enumerate(dict.fromkeys(row["network"] for row in rows)):
            for variant, style in _STYLES.items():
                line = [row for row in rows if (row["network"], row["variant"]) == (network, variant)]
                axes.plot(
                    [row["gpus"] for row in line],
                    [row["step_ms"] / 1e3 for row in line],
                    style,
                    color=f"C{index}",
                    linewidth=1.3,
                    label=f"{network}, {variant}",
                )
        axes.axhline(rows[0]["computing_ms"] / 1e3, color=_GREY, linewidth=1, linestyle=":", label="computing alone")
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set_yscale("log")
        for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            axis(ticker.StrMethodFormatter("{x:g}"))
        axes.set_xlabel("GPUs", fontsize=9)
        axes.set_ylabel("predicted seconds of a step", fontsize=9)
        axes.grid(axis="y", which="both", color="#e4e7eb")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), title="network of a node")
        figure.tight_layout()
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise ToolError(f"cannot write {path}: {error.strerror}") from error
    finally:
        pyplot.close(figure)
