"""Programs with a planted mistake: where the mistake is, and whether a few seeds notice it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

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


def faulty(wanted: Sequence[str], function: Any, ranks: int, *arguments: Any, **options: Any) -> str:
    """The text of the fault that a few seeds find: of the kind ``wanted[0]``, with the place of each further marker, once or more often."""
    fault = noticed(function, ranks, *arguments, **options)
    (kind, *markers), file = wanted, Path(function.__code__.co_filename).name
    assert fault.kind == kind, fault
    for marker in set(markers):
        assert str(fault).count(line(file, marker)) >= markers.count(marker), fault
    return str(fault)


#: Programs with a mistake -> what :func:`faulty` shall find, and on which machine.
Mistakes = dict[Callable[..., Any], tuple[tuple[str, ...], world.Modes | None]]


def mistake(table: Mistakes, *wanted: str, modes: world.Modes | None = None) -> Callable[[Any], Any]:
    """Enter a program of two ranks into a table. ``modes``: the machine on which alone it is wrong."""

    def enter(function: Any) -> Any:
        table[function] = wanted, modes
        return function

    return enter


def shown(table: Mistakes, program: Callable[..., Any]) -> None:
    """Fail unless a few seeds find the mistake of a program, and where it is right on other machines, none there."""
    wanted, modes = table[program]
    for seed in range(FEW // 2 if modes else 0):
        world.run(program, 2, seed=seed)
    faulty(wanted, program, 2, modes=modes or world.Modes())


def filled(rank: int, numel: int, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of the rank's GPU."""
    return torch.full((numel,), value, dtype=dtype, device=f"cuda:{rank}")
