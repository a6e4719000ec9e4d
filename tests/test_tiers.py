"""The tiers leave no value untested, and tests that run alone are alone; builds and references are kept by content."""

from __future__ import annotations

import itertools
import os
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from unittest import mock

import builds
import programs
import pytest
import tiers
from places import ROOT


def test_a_covering_part_has_every_value() -> None:
    parameters = {"kind": "ab", "block": "wxyz", "code": "01"}
    whole = [dict(zip(parameters, values)) for values in itertools.product(*parameters.values())]
    kept = tiers.covering(whole)
    assert len(kept) == 4, "as many as the parameter with the most values has"
    for name, values in parameters.items():
        assert {whole[at][name] for at in kept} == set(values)
    first = [whole[at] for at in kept]
    other = [whole[at] for at in tiers.covering(whole, first)]
    assert len(other) == 4 and all(one not in first for one in other), "another variant takes others"
    assert tiers.covering([]) == set() and tiers.covering([{}]) == tiers.covering([{"route": "numba"}]) == {0}


def test_no_variant_is_left_out(request: pytest.FixtureRequest) -> None:
    """Every test of this session that the short tier runs at all runs with each variant, unless its mark names the variant."""
    tests: dict[str, dict[str, list[pytest.Mark | None]]] = defaultdict(lambda: defaultdict(list))
    for item in request.session.items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and "route" in item.callspec.params:
            variants = tests[item.nodeid.partition("[")[0]]
            variants[str(item.callspec.params["route"])].append(item.get_closest_marker("full"))
    for name, variants in tests.items():
        if any(None in marks for marks in variants.values()):
            for variant, marks in variants.items():
                assert None in marks or all(mark and mark.args for mark in marks), (name, variant)


def test_workers_get_timings_and_long_files_first(tmp_path: Path) -> None:
    for name in tiers.LONG:
        assert (ROOT / name).is_file(), f"{name} has another name now: change tiers.LONG"
    names = ["comm/test_b.py", tiers.LONG[2], "comm/test_a.py", tiers.LONG[0], tiers.LONG[2], "test_c.py", "test_c.py"]
    items = [mock.Mock(path=tmp_path / name, number=number) for number, name in enumerate(names)]
    for other in items[:-1]:
        other.get_closest_marker.return_value = None
    tiers.in_order(items, tmp_path, short=False)
    assert [item.number for item in items] == [3, 1, 4, 0, 2, 5, 6]
    tiers.in_order(items, tmp_path, short=True)
    assert [item.number for item in items] == [6, 5, 3, 1, 4, 0, 2]


def test_planted_mistakes_have_turns() -> None:
    turns: list[int] = []
    for run in range(tiers.TURN_RUNS):
        items = [mock.Mock() for _ in range(10)]
        for other in items[::4]:
            other.get_closest_marker.return_value = None
        tiers.by_turns(items, str(run))
        turns += [number for number, item in enumerate(items) if not item.add_marker.called]
    assert sorted(turns) == sorted([*range(10), *[0, 4, 8] * (tiers.TURN_RUNS - 1)]), (
        "the marked ones once, the others always"
    )


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
    old, used = builds.kept("trial", ["other"], make), time.time() - builds.KEEP_SECONDS - 60
    assert old.read_text() == "3"
    os.utime(old, (used, used))
    os.utime(first, (used, used))
    assert builds.kept("trial", ["ab", "c"], make) == first
    builds.kept("trial", ["new"], make)
    assert first.exists() and not old.exists(), "files that no run has used for a month are removed"


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


def test_an_object_is_compiled_again_if_what_it_includes_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ZIPCCL_CACHE", str(tmp_path / "cache"))
    files = {
        "one.cpp": '#include "a.h"\nint one = A;',
        "a.h": '#include "b.h"',
        "b.h": "#define A 1",
        "two.cpp": "int main() {}",
    }
    (tmp_path / "csrc").mkdir()
    for name, text in files.items():
        (tmp_path / "csrc" / name).write_text(text)
    trial = builds.Binary("trial", {"csrc": tmp_path / "csrc"}, {"csrc/one.cpp": (), "csrc/two.cpp": ()}, ())
    counts = []
    for change in ({}, {"csrc/b.h": (("A 1", "A 2"),)}, {"csrc/two.cpp": (("main() {}", "main() { return 1; }"),)}):
        replace(trial, changes=change).path()
        counts.append(len([one for one in (tmp_path / "cache").rglob("test_object_*") if not one.suffix]))
    assert counts == [2, 3, 4]


def test_references_are_kept_until_a_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ZIPCCL_CACHE", str(tmp_path / "cache"))
    program, launches = tmp_path / "program.py", []
    monkeypatch.setattr(programs, "launch", lambda *given, **more: launches.append(given) or {"n": len(launches)})
    for keep, text, wanted in ((True, "1", 1), (True, "1", 1), (True, "2", 2), (True, "1", 1), (False, "1", 3)):
        monkeypatch.setattr(programs, "KEEP_REFERENCES", keep)
        program.write_text(text)
        assert programs.reference(str(program), 2, tmp_path) == {"n": wanted}
