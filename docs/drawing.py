"""Draws how a message becomes smaller: ``docs/results/how-light.svg`` and ``how-dark.svg``, for light and for dark pages."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

from measured import ROOT

WIDTH, HEIGHT, CELL = 900, 280, 24
#: Colours by theme: text, lines, signs, exponents, mantissas.
THEMES = {
    "light": ("#1f2328", "#59636e", "#d1d9e0", "#f2b8a2", "#b6d5f2"),
    "dark": ("#f0f6fc", "#9198a1", "#3d444d", "#a3523a", "#2f5f8f"),
}
#: Words of a block: sign, exponent and mantissa of bfloat16.
_WORDS = ("0 01111100 1010011", "1 01111101 0001110", "0 01111011 1110100")
#: Parts of a frame: text, width in units, colour of which field.
_FRAME = (("header", 70, 0), ("window", 70, 1), ("places in it, 2 to 3 bits", 190, 1), ("signs, mantissas", 170, 2))
_FONT = "ui-sans-serif, system-ui, sans-serif"


def picture(theme: str) -> str:
    """The drawing as SVG."""
    text, line, *fields = THEMES[theme]

    def said(x: float, y: float, words: str, *, anchor: str = "start", size: int = 14, bold: bool = False) -> str:
        weight = ' font-weight="600"' if bold else ""
        return (
            f'<text x="{x:g}" y="{y:g}" fill="{text}" font-size="{size}" text-anchor="{anchor}"{weight}>{words}</text>'
        )

    def box(x: float, y: float, width: float, fill: str, words: str, *, size: int = 13) -> str:
        rect = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{CELL}" fill="{fill}" stroke="{line}"/>'
        return rect + said(x + width / 2, y + 17, words, anchor="middle", size=size)

    def arrow(x: float, y: float, to: float) -> str:
        return f'<path d="M{x:g} {y:g}H{to - 8:g}m-6 -5l8 5l-8 5" fill="none" stroke="{line}" stroke-width="2"/>'

    parts = [said(10, 24, "Exponent coding, for every message", bold=True)]
    for row, word in enumerate(_WORDS):
        x, widths = 10.0, (20, 90, 80)
        for bits, width, fill in zip(word.split(), widths, fields, strict=True):
            parts.append(box(x, 38 + row * (CELL + 4), width, fill, bits))
            x += width
    parts.append(said(10, 140, "sign, exponent and mantissa of bf16: 16 bits", size=12))
    parts.append(arrow(208, 78, 252))
    begins = accumulate((width for _, width, _ in _FRAME), initial=262)
    parts += [box(x, 66, width, fields[field], words, size=12) for x, (words, width, field) in zip(begins, _FRAME)]
    parts.append(
        said(262, 112, "the exponents of a block lie in a narrow window: about 2.7 bits in place of 8", size=12)
    )
    parts.append(arrow(770, 78, 812) + said(818, 74, "wire", bold=True) + said(818, 92, "1.5 x", size=13))

    parts.append(said(10, 186, "Differences, where the receiver holds an earlier tensor", bold=True))
    parts.append(box(10, 200, 190, fields[2], "parameters of this step"))
    parts.append(box(10, 240, 190, fields[2], "parameters of the last step"))
    parts.append(said(105, 236, "xor", anchor="middle", size=12) + arrow(208, 232, 252))
    parts.append(box(262, 220, 330, fields[0], "mostly zeros: places and words that differ", size=12))
    parts.append(said(262, 262, "frozen parameters of LoRA travel once", size=12))
    parts.append(arrow(600, 232, 812) + said(818, 228, "wire", bold=True) + said(818, 246, "4 to 700 x", size=13))
    drawn = "\n".join(parts)
    place = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" font-family="{_FONT}"'
    title = "<title>A message becomes smaller</title>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {place}>\n{title}\n{drawn}\n</svg>\n'


def files() -> dict[Path, str]:
    """Every drawing and its text."""
    return {ROOT / "docs" / "results" / f"how-{theme}.svg": picture(theme) for theme in THEMES}
