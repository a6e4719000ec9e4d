"""Traces repeat, results are those of the record, and the comparison of two traces names each difference."""

from __future__ import annotations

import pytest
import traces
from places import TESTS

#: Calls, whose results depend on no CPU; and a training.
CALLS, TRAINING = ["owners", "bases"], ["train zero3 frozen"]


@pytest.mark.full(reason="two launches of DeepSpeed; the short tier has no trace")
def test_a_trace_repeats() -> None:
    first, second = (traces.record(CALLS + TRAINING, [2]) for _ in range(2))
    assert first == second
    assert {line[0] for line in first} == set("#>=<")
    kept = traces.read(TESTS / "support" / "traces.gz")
    begin = [kept.index(f"# {name}, rank {rank} of 2") for name in CALLS for rank in range(2)]
    ends = [next((at for at in range(place + 1, len(kept)) if kept[at][0] == "#"), len(kept)) for place in begin]
    wanted = [kept[0], *(line for place, end in zip(begin, ends, strict=True) for line in kept[place:end])]
    made = [line for line in first[: first.index(f"# {TRAINING[0]}, rank 0 of 2")]]
    _, results = traces.differences(wanted, made)
    assert not results, "results that are no longer those of tests/support/traces.gz:\n" + "\n".join(results)


def test_each_difference_is_named() -> None:
    old = [
        "# machine",
        "# a",
        "> 0 1 all_gather+0 10 aa",
        "> 0 1 all_gather+0 20 bb",
        "= 0 broadcast 4",
        "< sum 11",
        "# b",
        "< x 1",
    ]
    assert traces.differences(old, ["# another machine", *old[1:]]) == ([], [])
    new = [old[0], "# a", "> 0 1 all_gather+0 10 ab", "> 0 1 all_gather+0 20 bb", "> 0 1 all_gather+1 5 cc", "< sum 12"]
    messages, results = traces.differences(old, new)
    assert messages == [
        "b: in one record only",
        "a: > 0 1 all_gather+0 10 aa -> > 0 1 all_gather+0 10 ab",
        "a: new: > 0 1 all_gather+1 5 cc",
        "a: gone: = 0 broadcast 4",
    ]
    assert results == ["a: < sum 11 -> < sum 12"]
