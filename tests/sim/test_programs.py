"""Right programs: no seed reports anything, in any mode. Programs with a planted mistake: some of a few seeds notices, and the fault names
the places."""

from __future__ import annotations

from typing import Any

import pytest

from sim import programs, world
from sim.mistakes import faulty

#: Ranks and seeds: a seed for each machine; together a thousand.
SHORT = [(ranks, len(world.ALL_MODES)) for ranks in (2, 3, 4)]
ALL = [pytest.param(*pair, marks=pytest.mark.full(reason="more seeds")) for pair in ((2, 600), (3, 250), (4, 150))]


@pytest.mark.parametrize(("ranks", "seeds"), [*SHORT, *ALL])
def test_right_programs(ranks: int, seeds: int) -> None:
    """Three programs, by turns in each mode."""
    for seed in range(seeds):
        options: dict[str, Any] = {"seed": seed, "modes": world.ALL_MODES[seed % len(world.ALL_MODES)]}
        world.run(programs.gathers, ranks, **options)
        world.run(programs.sums, ranks, **options)
        got = world.run(programs.agreement, ranks, "polled" if seed % 2 else "", **options)
        assert got.values == [9 + ranks] * ranks


RACES = {
    "encoder does not wait for the caller": ("words", "encode"),
    "staging buffer reused before its last reader": ("encode", "gather"),
    "event waited before it is recorded": ("encode", "gather", "unrecorded"),
    "event recorded on the wrong stream": ("encode", "gather"),
    "wire does not wait for the encoder": ("encode", "gather"),
    "swapped streams": ("encode", "gather"),
    "decoder does not wait for the wire": ("gather", "decode"),
    "decoder does not wait for the memory of the caller": ("status", "decode"),
    "buffer freed early": ("decode", "reuse"),
    "input changed in flight": ("encode", "change"),
    "caller does not wait for the decoder": ("decode", "use"),
}


@pytest.mark.parametrize("mistake", RACES)
def test_races_of_gathers(mistake: str) -> None:
    faulty(("race", *RACES[mistake]), programs.gathers, 2, mistake)


#: The status word that is not waited for says "no failure" before and after.
SILENT = {"decoder does not wait for the memory of the caller"}


@pytest.mark.parametrize("mistake", sorted(set(RACES) - SILENT))
def test_wrong_values_of_gathers(mistake: str) -> None:
    """The scheduler delays and the memory is poisoned so that the results show a mistake without any help of the clocks."""

    def wrong(seed: int) -> bool:
        try:
            world.run(programs.gathers, 2, mistake, seed=seed, modes=world.Modes(races=False))
        except AssertionError:
            return True
        return False

    assert any(wrong(seed) for seed in range(60))


AGREEMENTS = {
    "side stream without wait": ("word", "reduce"),
    "host read without a wait": ("to host", "host read"),
    "host writes a buffer in flight": ("to host", "host write"),
}


@pytest.mark.parametrize("mistake", AGREEMENTS)
def test_races_of_agreements(mistake: str) -> None:
    faulty(("race", *AGREEMENTS[mistake]), programs.agreement, 2, mistake)


def test_counts_that_differ_on_a_pair() -> None:
    said = faulty(("would hang", "all to all", "all to all"), programs.sums, 3, "size of one pair")
    assert "rank 1 sends 528 elements to rank 0, which receives 544" in said


def test_host_waits_and_bytes() -> None:
    """A gather has no host wait of its own; an agreement has one; sums have one and send frames of the agreed size."""
    waits = [reason for reason, _ in world.run(programs.gathers, 2).counters[0].waits]
    assert len(waits) == 6 and all("pageable" in reason for reason in waits)  # each call's words, and its result
    ((reason, place),) = world.run(programs.agreement, 2).counters[1].waits
    assert "Event.synchronize" in reason and "programs.py" in str(place)
    counters = world.run(programs.sums, 4).counters[2]
    assert sum("Event.synchronize" in reason for reason, _ in counters.waits) == 1
    assert counters.collective_bytes == {"all_reduce": 8, "all_to_all": 4 * 544}
    assert counters.launches["stub encode"] == counters.launches["stub decode_sum"] == 1
    assert 0 < counters.peak_bytes < 1 << 20


def test_a_seed_repeats() -> None:
    """The same seed gives the same order of operations; seeds give many orders."""

    def order(seed: int) -> tuple[str, ...]:
        found: list[str] = []
        world.run(programs.gathers, 3, seed=seed, trace=found.append)
        return tuple(found)

    orders = [order(seed) for seed in range(5)]
    assert orders == [order(seed) for seed in range(5)]
    assert len(set(orders)) == 5
