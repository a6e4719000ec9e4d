"""Host time of coded calls on NCCL groups: what a call counts, and its time in units of a plain gather."""

from __future__ import annotations

import json
from typing import Any

import pytest
from places import ROOT
from pytest import MonkeyPatch

from ds_zipccl.benchmarks.comm import host_time
from ds_zipccl.comm.device.streams import Stage, Streams

#: Call -> times a plain gather that it may take, in the least of many calls: half as much again as on a quiet machine.
MOST = {
    "gather that passes": 3.0,
    "gather, 90 MB": 18.0,
    "gather, 90 MB, no agreed sizes": 60.0,
    "agreement on a parameter": 40.0,
    "reduce-scatter, 100 MB": 70.0,
    "all-to-all, 84 MB": 90.0,
}
COUNTS = ("records", "waits", "contexts", "launches", "collectives", "host_waits")


def counted(rows: list[dict[str, Any]]) -> dict[str, tuple[int, ...]]:
    return {row["call"]: tuple(row[name] for name in COUNTS) for row in rows}


def of_the_docs() -> dict[str, tuple[int, ...]]:
    return counted(json.loads((ROOT / "docs" / "results" / "host_time.json").read_text())["rows"])


@pytest.mark.flaky(reruns=2)
def test_calls_take_the_time_of_so_many_plain_gathers() -> None:
    rows = host_time.rows(times=100)
    assert counted(rows) == of_the_docs()
    plain = rows[0]["min_us"]
    found = {row["call"]: row["min_us"] / plain for row in rows}
    print(", ".join(f"{name}: {times:.1f}" for name, times in found.items()))
    assert all(found[name] <= most for name, most in MOST.items()), found


def test_another_event_of_a_piece_is_noticed(monkeypatch: MonkeyPatch) -> None:
    order = Streams.order

    def twice(self: Streams, first: Stage, second: Stage) -> None:
        order(self, first, second)
        self._work[first] += 1  # otherwise the second wait would be left out
        order(self, first, second)

    monkeypatch.setattr(Streams, "order", twice)
    found, wanted = counted(host_time.rows(times=1)), of_the_docs()
    assert {name for name in wanted if found[name] != wanted[name]} == set(list(wanted)[2:])
