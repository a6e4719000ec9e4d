"""Random programs: a seed decides a model and operations on it, of which some are those of some ranks alone. See :mod:`fsdp_programs`."""

from __future__ import annotations

import argparse
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


def known(command: str, known: Mapping[str, Any], seed: int, traits: Mapping[str, Any]) -> Program:
    """The program of a negative seed on two ranks: -1 is the first of ``known``. Each has a section, traits, and operations:
    their names, ranks and arguments."""
    section, more, ops = list(known.values())[-1 - seed]
    found = [Op(name, ranks, {"number": 0, **args}) for name, ranks, args in ops]
    return Program(command, seed, 2, section, {**traits, **more}, found, range(len(found)))


class Kind(NamedTuple):
    """A kind of operation: how often it is drawn, how its arguments are, and what it does."""

    weight: int
    args: Callable[[random.Random, Mapping[str, Any]], dict[str, Any]]
    run: Callable[..., None]


def nothing(draw: random.Random, traits: Mapping[str, Any]) -> dict[str, Any]:
    """No arguments."""
    return {}


def operations(
    draw: random.Random, ranks: int, traits: Mapping[str, Any], kinds: Mapping[str, Kind], without: Sequence[str] = ()
) -> list[Op]:
    """Nine to seventeen operations of the kinds that are not ``without``. One in five is for the second model."""
    names, found = [name for name in kinds if name not in without], []
    for name in ["evaluate", *draw.choices(names, [kinds[one].weight for one in names], k=draw.randrange(8, 17))]:
        args = {"number": int(draw.random() < 0.2), **kinds[name].args(draw, traits)}
        found.append(Op(name, some(draw, ranks), args))
    return found


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


def main(text: str | None, program: Callable[..., Program], failures: Callable[..., list[str]]) -> int:
    """A command that runs programs: the status."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--ops", type=int, nargs="+", help="the places of the operations that run")
    parser.add_argument("--ranks", type=int, default=0, help="instead of those of the seed")
    parser.add_argument("--section", default="", help="instead of that of the seed")
    parser.add_argument("--plain", action="store_true", help="compare plain with plain")
    parser.add_argument("--shrink", action="store_true", help="print as few operations as fail")
    args = parser.parse_args()
    programs = [program(seed, args.ranks, args.section) for seed in range(args.seed, args.seed + args.seeds)]
    said = every(
        [one.only(args.ops or one.kept) for one in programs], lambda some: failures(some, coded=not args.plain)
    )
    if said and args.shrink:
        said = failures([shrink(one, lambda less: bool(failures([less]))) for one in programs[:1]])
    print("\n\n".join(said) or "all bits equal")
    return int(bool(said))


def every(programs: Iterable[Program], failures: Callable[[list[Program]], list[str]]) -> list[str]:
    """What ``failures`` says of programs, some of equal ranks and section at a time: a launch has a time limit."""
    groups: dict[Any, list[Program]] = {}
    for one in programs:
        groups.setdefault((one.ranks, one.section), []).append(one)
    launches = [some[at : at + 40] for some in groups.values() for at in range(0, len(some), 40)]
    return [text for some in launches for text in failures(some)]
