"""The short tier and the full one, and turns for tests that two workers must not run beside each other.

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

#: Variants that take ten times as long as the native route or more. The short tier runs a part of their combinations.
SLOW = ("numba", "emulated")


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


def mostly_full(names: Iterable[str], short: Sequence[str], reason: str) -> list[Any]:
    """Values for ``pytest.mark.parametrize``: those in ``short`` for both tiers, the rest of ``names`` for the full one."""
    found = list(names)
    assert set(short) <= set(found), f"got {short} for the short tier; the names are {found}"
    return [name if name in short else pytest.param(name, marks=pytest.mark.full(reason=reason)) for name in found]


def _has_parameters(item: pytest.Item) -> bool:
    return hasattr(item, "callspec")


class Turns:
    """Readers and writers: tests of several workers run at a time, except that a test marked ``alone`` has the machine to itself.

    Of the tests marked ``network`` one runs at a time.

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
