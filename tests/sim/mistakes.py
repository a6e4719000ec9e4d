"""Programs with a planted mistake: where the mistake is, and whether a few seeds notice it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from sim import world
from sim.scheduler import Fault

#: Seeds within which a planted mistake must be noticed.
FEW = 12


@functools.cache
def line(file: str, marker: str) -> str:
    """The place of the one line with a comment ``<marker>``, as faults name it."""
    lines = (Path(__file__).parent / file).read_text().splitlines()
    (number,) = [at for at, text in enumerate(lines, 1) if f"# <{marker}>" in text]
    return f"sim/{file}:{number}"


def noticed(
    function: Any, ranks: int, *arguments: Any, seeds: int = FEW, run: Any = world.run, **options: Any
) -> Fault:
    """The fault that one of a few seeds finds."""
    for seed in range(seeds):
        try:
            run(function, ranks, *arguments, seed=seed, **options)
        except Fault as fault:
            return fault
        except AssertionError:  # the program has noticed wrong values itself; another seed may name the reason
            continue
    raise AssertionError(f"none of {seeds} seeds noticed")
