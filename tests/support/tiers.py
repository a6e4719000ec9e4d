"""The short tier and the full one, and turns for tests that two workers must not run beside each other.

``make test`` runs the short tier: ``pytest -m "not full"``. ``make test-all`` and plain ``pytest`` run everything.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

#: Variants that take ten times as long as the native route or more. The short tier runs a part of their combinations.
SLOW = ("numba", "emulated")
#: Marks of tests that must not run beside each other: one worker has them all.
SERIAL = ("alone", "network")


def mark_full(items: Sequence[pytest.Item]) -> None:
    """Add the mark ``full`` to the tests of slow variants that the short tier leaves out.

    Of every parametrized test, each slow variant keeps combinations in which every value of every parameter is. A mark ``full`` that names
    variants leaves out these variants of the test, and not the others.
    """
    combinations: dict[tuple[str, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        variant = str(item.callspec.params.get("route", "")) if _has_parameters(item) else ""
        for mark in [mark for mark in item.own_markers if mark.name == "full"]:
            if mark.args and variant not in mark.args:
                item.own_markers.remove(mark)
        if variant in SLOW:
            assert isinstance(item, pytest.Function)
            combinations[item.nodeid.partition("[")[0], variant].append(item)
    for alike in combinations.values():
        kept = covering([{name: repr(value) for name, value in item.callspec.params.items()} for item in alike])
        for at in set(range(len(alike))) - kept:
            alike[at].add_marker(pytest.mark.full(reason="other combinations have each of these values"))


def covering(combinations: Sequence[Mapping[str, str]]) -> set[int]:
    """Places of a few combinations that have every value of every parameter among them."""
    missing = {pair for combination in combinations for pair in combination.items()}
    kept: set[int] = set()
    while missing:
        best = max(range(len(combinations)), key=lambda at: (len(missing & combinations[at].items()), -at))
        missing -= combinations[best].items()
        kept.add(best)
    return kept


def mark_groups(items: Sequence[pytest.Item]) -> None:
    """Tests that share a fixture of their module go to the same worker, and so do all tests with one of the marks ``SERIAL``."""
    for item in items:
        serial = next((name for name in SERIAL if item.get_closest_marker(name)), "")
        if serial:
            item.add_marker(pytest.mark.xdist_group(serial))
        elif any(definition.scope == "module" for definition in _fixtures(item)):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def _has_parameters(item: pytest.Item) -> bool:
    return hasattr(item, "callspec")


def _fixtures(item: pytest.Item) -> Iterator[pytest.FixtureDef[object]]:
    if isinstance(item, pytest.Function):
        for definitions in item._fixtureinfo.name2fixturedefs.values():
            yield definitions[-1]


class Turns:
    """Readers and writers: tests of several workers run at a time, except that a test marked ``alone`` has the machine to itself.

    Args:
        folder: one for all workers of this run.
    """

    def __init__(self, folder: Path) -> None:
        self._gate, self._floor = (
            os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC) for name in ("gate", "floor")
        )

    @contextlib.contextmanager
    def turn(self, alone: bool) -> Iterator[None]:
        """Wait for a turn; the test runs inside. Who waits to be alone holds the gate, so that tests that come later wait behind it."""
        kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        fcntl.flock(self._gate, kind)
        fcntl.flock(self._floor, kind)
        fcntl.flock(self._gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._floor, fcntl.LOCK_UN)
