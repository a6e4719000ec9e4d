"""The picture of ``analyze --plot``: histogram of the exponents, and the window of the coder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ds_zipccl.cli import ToolError
from ds_zipccl.cli.exponents import MODES, Fields, block_tables, exponent_blocks
from ds_zipccl.kernels.numba.layout import ABOVE, CASCADE, CODE_OF_K, SPARSE, TIER1_BITS, TIERS, WIDE

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
except ImportError as error:
    raise ToolError(f"--plot needs matplotlib ({error}): pip install matplotlib, or leave --plot out") from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TIERS = ("#1f5a99", "#4f8fd0", "#94bfe6", "#d3e4f5")  # colors, first tier to fourth
_OUTSIDE = "#c44e52"
#: Mode of a block -> mode whose tiers code its elements (FORMAT.md 2.1).
_TIERS_OF = {CASCADE: CASCADE, SPARSE: CASCADE, WIDE: WIDE}
_REACH = 16  # binades shown on either side of a window's top; the outermost bars hold all that lie farther


class Histograms:
    """Exponents of tensors, absolute and relative to the window of their block; per dtype."""

    def __init__(self, block: int) -> None:
        self._block = block
        self._found: dict[torch.dtype, _Counts] = {}

    def add(self, tensor: torch.Tensor, frame: torch.Tensor) -> None:
        """Count a float CPU tensor and its exponent frame (of this object's block size)."""
        values = 1 << Fields.of(tensor.dtype).exponent
        counts = self._found.setdefault(tensor.dtype, _Counts(values))
        tops, modes = block_tables(frame)
        at = 0
        for part in exponent_blocks(tensor, self._block):
            here = slice(at, at := at + len(part))
            counts.plain += np.bincount(part.reshape(-1), minlength=values)
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
        figure, axes = pyplot.subplots(len(self._found), 2, figsize=(13, 0.6 + 4.6 * len(self._found)), squeeze=False)
        try:
            for (dtype, counts), (left, right) in zip(self._found.items(), axes, strict=True):
                _draw_plain(left, dtype, counts)
                _draw_aligned(right, counts, self._block)
            figure.suptitle(f"Exponents of {title}" if len(title) <= 90 else f"Exponents of {title[:87]}...")
            figure.tight_layout()
            figure.savefig(path, format="png", dpi=110)
        except OSError as error:
            raise ToolError(f"cannot write {path}: {error.strerror}") from error
        finally:
            pyplot.close(figure)


class _Counts:
    """Histograms (int64): exponent fields; modes of blocks; and, for each mode with tiers of its own, exponents minus their block's
    top, clipped, and tops of blocks."""

    def __init__(self, values: int) -> None:
        self.plain = np.zeros(values, dtype=np.int64)
        self.aligned = {mode: np.zeros(2 * _REACH + 1, dtype=np.int64) for mode in _TIERS_OF.values()}
        self.tops = {mode: np.zeros(256, dtype=np.int64) for mode in _TIERS_OF.values()}
        self.modes = np.zeros(len(MODES), dtype=np.int64)


def _tier(mode: int, distance: int) -> int | None:
    """Tier (0 to 3) that codes an exponent ``distance`` above its block's top; None if no tier does (FORMAT.md 2.1)."""
    codes = CODE_OF_K[mode, :, (ABOVE - distance) % 256]
    named = [tier for tier in range(TIERS) if codes[tier] < (3 if tier else (1 << TIER1_BITS[mode]) - 1)]
    return named[0] if named else None


def _draw_plain(axes: Axes, dtype: torch.dtype, counts: _Counts) -> None:
    """Shares of the binades, and the window of the block with the median top."""
    bias = Fields.of(dtype).bias
    seen = np.flatnonzero(counts.plain[1:]) + 1
    shares = 100 * counts.plain / max(1, counts.plain.sum())
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
    axes.set_title(f"{name}, {counts.plain.sum():,} elements, {shares[0]:.2g}% zero or denormal", fontsize=10)
    axes.set_xlabel("binade of |x| (exponent e: 2^e <= |x| < 2^(e+1))")
    axes.set_ylabel("share of elements (%)")


def _draw_aligned(axes: Axes, counts: _Counts, block: int) -> None:
    """Shares by distance from the top of the block's own window, colored by tier."""
    distances = np.arange(-_REACH, _REACH + 1)
    total = max(1, sum(int(aligned.sum()) for aligned in counts.aligned.values()))
    base = np.zeros(len(distances))
    for tier, colour in [*enumerate(_TIERS), (None, _OUTSIDE)]:
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
