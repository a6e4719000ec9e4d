"""The tiers leave no value untested, and tests that run alone are alone; builds and references are kept by content."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections import defaultdict
from pathlib import Path

import builds
import programs
import pytest
import tiers


def test_a_covering_part_has_every_value() -> None:
    parameters = {"kind": "ab", "block": "wxyz", "code": "01"}
    whole = [dict(zip(parameters, values)) for values in itertools.product(*parameters.values())]
    kept = tiers.covering(whole)
    assert len(kept) == 4, "as many as the parameter with the most values has"
    for name, values in parameters.items():
        assert {whole[at][name] for at in kept} == set(values)
    assert tiers.covering([{}]) == set() and tiers.covering([{"route": "numba"}]) == {0}


def test_no_slow_variant_is_left_out(request: pytest.FixtureRequest) -> None:
    """Every test of this session that the short tier runs at all runs with each slow variant, unless its mark names the variant."""
    tests: dict[str, dict[str, list[pytest.Mark | None]]] = defaultdict(lambda: defaultdict(list))
    for item in request.session.items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and "route" in item.callspec.params:
            variants = tests[item.nodeid.partition("[")[0]]
            variants[str(item.callspec.params["route"])].append(item.get_closest_marker("full"))
    for name, variants in tests.items():
        if any(None in marks for marks in variants.values()):
            for variant, marks in variants.items():
                assert None in marks or all(mark and mark.args for mark in marks), (name, variant)


def _take(folder: Path, alone: bool, log: Path) -> None:
    turns = tiers.Turns(folder)
    for _ in range(30):
        with turns.turn(alone):
            with log.open("a") as file:
                file.write(f"{alone:d} begins\n")
            time.sleep(0.002)
            with log.open("a") as file:
                file.write(f"{alone:d} ends\n")


def test_turns(tmp_path: Path) -> None:
    """Between the two lines of a test that runs alone there is no other line, and such a test gets its turn among the rest."""
    log, context = tmp_path / "log", multiprocessing.get_context("fork")
    workers = [context.Process(target=_take, args=(tmp_path, alone, log)) for alone in (False, False, True)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    lines = log.read_text().splitlines()
    begins = [at for at, line in enumerate(lines) if line == "1 begins"]
    assert len(begins) == 30 and all(lines[at + 1] == "1 ends" for at in begins)
    ends = [line for line in lines if line.startswith("0")]
    assert any(pair == ("0 begins", "0 begins") for pair in itertools.pairwise(ends)), "two at a time otherwise"
    assert begins[0] < len(lines) - 60, "nobody waits until all the rest is over"


def test_files_are_kept_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ZIPCCL_CACHE", str(tmp_path))
    made = []

    def make(target: Path) -> None:
        made.append(target)
        target.write_text(str(len(made)))

    first = builds.kept("trial", ["ab", "c"], make)
    assert builds.kept("trial", ["ab", "c"], make) == first and first.read_text() == "1"
    assert builds.kept("trial", ["a", "bc"], make).read_text() == "2"

    def fail(target: Path) -> None:
        target.write_text("half of it")
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        builds.kept("trial", ["other"], fail)
    assert builds.kept("trial", ["other"], make).read_text() == "3"


def test_binaries_by_the_text_of_their_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the place of the sources; a mistake that cannot be planted any more is an error."""
    places = [tmp_path / name for name in ("here", "there")]
    for place in places:
        place.mkdir()
        (place / "one.cpp").write_text("int main() { return 1; }")
    here, there = (builds.Binary("trial", {"csrc": place}, {"csrc/one.cpp": ()}, ()) for place in places)
    assert here.path() == there.path()
    change = {"csrc/one.cpp": (("return 1", "return 2"),)}
    assert builds.Binary("trial", here.folders, here.sources, (), changes=change).path() != here.path()
    gone = {"csrc/one.cpp": (("return 3", "return 2"),)}
    with pytest.raises(AssertionError, match=r"no longer in csrc/one\.cpp"):
        builds.Binary("trial", here.folders, here.sources, (), changes=gone).path()


def test_references_are_kept_until_a_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ZIPCCL_CACHE", str(tmp_path / "cache"))
    program, launches = tmp_path / "program.py", []
    monkeypatch.setattr(programs, "launch", lambda *given, **more: launches.append(given) or {"n": len(launches)})
    for keep, text, wanted in ((True, "1", 1), (True, "1", 1), (True, "2", 2), (True, "1", 1), (False, "1", 3)):
        monkeypatch.setattr(programs, "KEEP_REFERENCES", keep)
        program.write_text(text)
        assert programs.reference(str(program), 2, tmp_path) == {"n": wanted}
