"""Counters: sums, snapshots, threads, the table."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ds_zipccl import stats


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    stats.reset()
    yield
    stats.reset()


def test_rows() -> None:
    stats.record("zero_grad", "all_reduce", 3000, 2000)
    stats.record("zero_grad", "all_reduce", 1500, 1000)
    stats.record_pass("zero_grad", "all_reduce", 10, "smaller than min_bytes")
    stats.record_pass("dp", "broadcast", 8, "dtype int64")
    stats.record_pass("dp", "broadcast", 8, "dtype int64")
    assert stats.rows() == [
        {
            "role": "dp", "op": "broadcast", "calls": 0, "raw_bytes": 0, "wire_bytes": 0, "ratio": 1.0,
            "passed": 2, "passed_bytes": 16, "reasons": {"dtype int64": 2}, "differences": {}, "whole": {},
            "choices": {},
        },
        {
            "role": "zero_grad", "op": "all_reduce", "calls": 2, "raw_bytes": 4500, "wire_bytes": 3000, "ratio": 1.5,
            "passed": 1, "passed_bytes": 10, "reasons": {"smaller than min_bytes": 1}, "differences": {}, "whole": {},
            "choices": {},
        },
    ]  # fmt: skip
    assert stats.totals() == {"raw_bytes": 4500, "wire_bytes": 3000, "ratio": 1.5, "staging_bytes": 0}


def test_rows_are_a_snapshot() -> None:
    stats.record_pass("dp", "send", 1, "not enabled")
    rows = stats.rows()
    stats.record_pass("dp", "send", 1, "not enabled")
    assert rows[0]["passed"] == 1 and rows[0]["reasons"] == {"not enabled": 1}


def test_nothing_counted() -> None:
    assert stats.rows() == [] and stats.totals() == {"raw_bytes": 0, "wire_bytes": 0, "ratio": 1.0, "staging_bytes": 0}


def test_threads() -> None:
    def count() -> None:
        for _ in range(2000):
            stats.record("dp", "send", 3, 2)
            stats.record_pass("dp", "send", 1, "not enabled")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (row,) = stats.rows()
    assert (row["calls"], row["raw_bytes"], row["wire_bytes"]) == (8000, 24000, 16000)
    assert (row["passed"], row["passed_bytes"], row["reasons"]) == (8000, 8000, {"not enabled": 8000})


def test_table() -> None:
    stats.record("zero_param", "all_gather_into_tensor", 3_000_000, 2_000_000)
    stats.record_pass("dp", "all_reduce", 40_000, "smaller than min_bytes")
    stats.record_pass("dp", "all_reduce", 40_000, "dtype int64")
    assert stats.table().splitlines() == [
        "role        op                      coded    MB  sent MB  ratio  passed    MB  why passed",
        "dp          all_reduce                  0  0.00     0.00  1.000       2  0.08  dtype int64 (1), smaller than min_bytes (1)",
        "zero_param  all_gather_into_tensor      1  3.00     2.00  1.500       0  0.00",
        "total                                   1  3.00     2.00  1.500",
    ]
    for _ in range(2):
        stats.record_whole("zero_grad", "all_reduce", "a reason")
    line = "zero_grad all_reduce: 2 calls not owner-only: a reason"
    assert stats.table().splitlines()[-1] == line
