"""reduce: the bits of plain gloo."""

from __future__ import annotations

from collections.abc import Callable

import moves
import pytest
import ranks as runner
import sums


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_match_has_gloos_bits(ranks: int) -> None:
    runner.run(sums.as_gloo, ranks, sums.sizes_for(ranks), sums.SUMS["reduce"])


@pytest.mark.parametrize("plant", [moves.flip_a_bit, sums.other_order])
def test_a_fault_is_seen(plant: Callable[[], None]) -> None:
    with pytest.raises(runner.RankFailure, match="words differ"):
        runner.run(sums.as_gloo, 3, [20002, sums.MIB + 1], sums.SUMS["reduce"], plant)
