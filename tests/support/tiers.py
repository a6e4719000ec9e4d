"""The short tier and the full one, and turns for tests that workers must not run beside each other.

``make test`` runs the short tier: ``pytest -m "not full"``. ``make test-all`` and plain ``pytest`` run everything.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

#: Files whose tests take more than a minute, the longest first, and shorter ones that would come last. Workers get them first, as a long
#: file that begins last leaves the other worker without work. Seconds of a run are in the list at its end. The first one compiles what
#: numba has for a minute, and two other workers would do so too, later, at the same time.
LONG = (
    "tests/codec/test_codec.py",
    "tests/integration/test_fsdp.py",
    "tests/gpu/test_gpu_steps.py",
    "benchmarks/tests/test_bench_train.py",
    "tests/integration/test_configurations.py",
    "tests/integration/test_recipes.py",
    "tests/integration/test_engines_on_streams.py",
    "tests/integration/test_bases_of_engines.py",
    "tests/codec/test_cuda_sanitizers.py",
    "tests/integration/test_moe.py",
    "tests/codec/test_cuda_planted.py",
    "tests/integration/test_parallel.py",
    "tests/integration/test_engines.py",
    "tests/test_packaging.py",
)
#: Runs in which each test marked ``by_turns`` has its turn once, on average.
TURN_RUNS = 5
#: Variants that take ten times as long as the native route or more.
SLOW = ("numba", "emulated")
#: The variants that keep all their combinations in the short tier: a fast route that has no other instruction set beside it.
WHOLE = ("", "native")


def is_short(config: pytest.Config) -> bool:
    """Whether this run is the short tier."""
    return bool(config.option.markexpr == "not full")


def mark_full(items: Sequence[pytest.Item]) -> None:
    """Add the mark ``full`` to the tests of variants that the short tier leaves out.

    Of every parametrized test, each variant keeps combinations in which every value of every parameter is, and others than the variants
    before it where it can. A mark ``full`` that names variants leaves out these variants of the test, and not the others.
    """
    combinations: dict[str, dict[str, list[pytest.Function]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        variant = str(item.callspec.params.get("route", "")) if _has_parameters(item) else ""
        for mark in [mark for mark in item.own_markers if mark.name == "full"]:
            if mark.args and variant not in mark.args:
                item.own_markers.remove(mark)
        if variant not in WHOLE and item.get_closest_marker("full") is None:
            assert isinstance(item, pytest.Function)
            combinations[item.nodeid.partition("[")[0]][variant].append(item)
    for variants in combinations.values():
        taken: list[Mapping[str, str]] = []
        for alike in variants.values():
            values = [
                {name: repr(value) for name, value in item.callspec.params.items() if name != "route"} for item in alike
            ]
            kept = covering(values, taken)
            taken += [values[at] for at in kept]
            for at in set(range(len(alike))) - kept:
                alike[at].add_marker(pytest.mark.full(reason="other combinations have each of these values"))


def leave_out_repetitions(items: list[pytest.Item]) -> None:
    """Leave out the tests on NCCL's schedules where the dry run of ``make gpu`` is among ``items``: they are steps of it."""
    if any(item.name == "test_a_dry_run_of_every_step_passes" for item in items):
        items[:] = [item for item in items if item.path.name not in ("test_nccl.py", "test_stress.py")]


def by_turns(items: Sequence[pytest.Item], run: str) -> None:
    """Skip four of five tests marked ``by_turns``, others in another run: those that compile a kernel with a mistake, to prove that a
    test can fail, which are a seventh of all tests, and random programs.

    Args:
        run: hexadecimal number of this run, which all workers have.
    """
    marked = [item for item in items if item.get_closest_marker("by_turns") is not None]
    for number, item in enumerate(marked, start=int(run, 16)):
        if number % TURN_RUNS:
            item.add_marker(pytest.mark.skip(reason="another run has this test; a run of its file has all"))


def repeat_timings(items: Sequence[pytest.Item]) -> None:
    """Let the tests that compare times fail three times before they count as failed: a neighbor of this machine may disturb one.

    A mistake in the code fails each time. The last lines of pytest count the repetitions.
    """
    for item in items:
        if item.get_closest_marker("alone") is not None:
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=10))


def in_order(items: list[pytest.Item], root: Path, short: bool) -> None:
    """Put the files of :data:`LONG` first; in the short tier, files with tests marked ``alone`` before them, these tests in front.

    At the start no worker is in the middle of a long test, for which a test marked ``alone`` would have to wait. In the full tier it
    would have to wait for the first builds there.

    Args:
        root: the folder in which the names of the files begin.
    """
    alone = {item for item in items if short and item.get_closest_marker("alone") is not None}
    quiet = {item.path for item in alone}
    place = {root / name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: (item.path not in quiet, item not in alone, place.get(item.path, len(place))))


def covering(combinations: Sequence[Mapping[str, str]], taken: Sequence[Mapping[str, str]] = ()) -> set[int]:
    """Places of a few combinations, one at least, that have every value of every parameter among them; those in ``taken`` come last."""
    missing = {pair for combination in combinations for pair in combination.items()}
    kept = set() if missing or not combinations else {0}
    while missing:
        best = max(
            range(len(combinations)),
            key=lambda at: (len(missing & combinations[at].items()), combinations[at] not in taken, -at),
        )
        missing -= combinations[best].items()
        kept.add(best)
    return kept


def mostly_full(values: Iterable[Any], short: Sequence[Any], reason: str) -> list[Any]:
    """Values for ``pytest.mark.parametrize``: those in ``short`` for both tiers, the rest of ``values`` for the full one.

    A value is that of one parameter, or a tuple of as many as there are parameters.
    """
    found, full = list(values), pytest.mark.full(reason=reason)
    assert all(value in found for value in short), f"got {short} for the short tier; the values are {found}"
    of_each = [value if isinstance(value, tuple) else (value,) for value in found]
    return [
        pytest.param(*each, marks=() if value in short else full) for value, each in zip(found, of_each, strict=True)
    ]


def asked(request: pytest.FixtureRequest, *parameters: str) -> set[tuple[Any, ...]]:
    """Values of ``parameters`` among the tests of the fixture's file that this run has, so that the fixture makes nothing else."""
    found = [
        item.callspec.params for item in request.session.items if item.path == request.path and _has_parameters(item)
    ]  # type: ignore[attr-defined]
    return {tuple(params[name] for name in parameters) for params in found if set(parameters) <= set(params)}


def without_parameters(request: pytest.FixtureRequest) -> bool:
    """Whether this run has tests of the fixture's file that have no parameters."""
    return any(item.path == request.path and not _has_parameters(item) for item in request.session.items)


def _has_parameters(item: pytest.Item) -> bool:
    return hasattr(item, "callspec")


class Turns:
    """Readers and writers: tests of several workers run at a time, except that a test marked ``alone`` has the machine to itself. Of those
    marked ``network`` one runs at a time.

    Args:
        folder: one for all workers of this run.
    """

    def __init__(self, folder: Path) -> None:
        self._gate, self._floor, self._network = (
            os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC) for name in ("gate", "floor", "network")
        )

    @contextlib.contextmanager
    def turn(self, alone: bool = False, network: bool = False) -> Iterator[None]:
        """Wait for a turn; the test runs inside. A test that waits to be alone holds the gate, so that later tests wait behind it."""
        kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        if network:
            fcntl.flock(self._network, fcntl.LOCK_EX)
        fcntl.flock(self._gate, kind)
        fcntl.flock(self._floor, kind)
        fcntl.flock(self._gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._floor, fcntl.LOCK_UN)
            fcntl.flock(self._network, fcntl.LOCK_UN)
