"""Random programs of FSDP2 and of ZeRO-3, and those that have failed once: coded as plain, bit for bit, after every operation.

A seed that fails prints its program, and the command that runs it alone. ``make soak-programs SEEDS=1000`` runs more seeds.
"""

from __future__ import annotations

from types import ModuleType

import drawn
import fsdp_programs
import pytest
import zero_programs
from tiers import TURN_RUNS

KINDS = [fsdp_programs, zero_programs]
#: Seeds of the full tier, by turns. The short one has the first of FSDP2, and some of ZeRO-3 on two ranks in one section: engines are slow.
SEEDS, SHORT = 200, {fsdp_programs: (24, {}), zero_programs: (10, {"ranks": 2, "section": "base"})}


def check(kind: ModuleType, programs: list[drawn.Program]) -> None:
    said = drawn.every(programs, kind.failures)
    assert not said, "\n\n".join(said)


@pytest.mark.full(reason="two minutes")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_random_programs_and_those_that_have_failed_once(kind: ModuleType) -> None:
    """The latter have negative seeds."""
    count, how = SHORT[kind]
    check(kind, [kind.program(seed, **how) for seed in range(-len(kind.KNOWN), count)])


@pytest.mark.full(reason="more seeds")
@pytest.mark.by_turns
@pytest.mark.parametrize("turn", range(TURN_RUNS))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_more_random_programs(kind: ModuleType, turn: int) -> None:
    check(kind, [kind.program(seed) for seed in range(turn, SEEDS, TURN_RUNS)])
