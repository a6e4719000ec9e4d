"""Random programs: a seed decides a model and operations on it, of which some are those of some ranks alone. See :mod:`fsdp_programs`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class Op(NamedTuple):
    """An operation that all ranks run, in the same order. ``ranks``: those for which ``args`` that are of a rank count."""

    name: str
    ranks: tuple[int, ...]
    args: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.name} on {list(self.ranks)}: {', '.join(f'{key}={value!r}' for key, value in self.args.items())}"


class Program(NamedTuple):
    """``traits``: of the model and its settings. ``kept``: the places of its operations in the program of the seed."""

    command: str
    seed: int
    ranks: int
    section: str
    traits: Mapping[str, Any]
    ops: Sequence[Op]
    kept: Sequence[int]

    def __str__(self) -> str:
        head = f"seed {self.seed} on {self.ranks} ranks, section {self.section}, {dict(self.traits)}"
        rows = [f"{number:4} {op}" for number, op in zip(self.kept, self.ops, strict=True)]
        alone = f"alone: PYTHONPATH=.:tests/support:tests:tests/comm python {self.command} {self.seed}"
        return "\n".join([head, *rows, f"{alone} --ops {' '.join(map(str, self.kept))}"])

    def only(self, kept: Iterable[int]) -> Program:
        """The program with operations of these places alone."""
        found = sorted(set(kept) & set(self.kept))
        return self._replace(ops=[self.ops[self.kept.index(one)] for one in found], kept=found)


def some(draw: random.Random, ranks: int) -> tuple[int, ...]:
    """All ranks in half of the cases, one or all but one in the others."""
    one = draw.randrange(ranks)
    rest = tuple(rank for rank in range(ranks) if rank != one)
    return draw.choice([tuple(range(ranks)), tuple(range(ranks)), (one,), rest])


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """The program without operations that it fails without: first halves go, then smaller parts, then single ones."""
    size = len(program.kept) // 2
    while size:
        for at in range(0, len(program.kept), size):
            less = program.only([*program.kept[:at], *program.kept[at + size :]])
            if len(less.kept) < len(program.kept) and fails(less):
                program = less
                break
        else:
            size //= 2
    return program
