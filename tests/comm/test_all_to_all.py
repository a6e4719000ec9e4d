"""all_to_all, all_to_all_single: every bit arrives."""

from __future__ import annotations

import moves
import pytest
import ranks as runner


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_bit_arrives(ranks: int) -> None:
    runner.run(moves.moves, ranks, moves.MOVES["all_to_all"])


@pytest.mark.parametrize("ranks", [2, 3])
def test_alias(ranks: int) -> None:
    """An output that is an input, or the own part of it."""
    runner.run(moves.moves, ranks, moves.ALIASES["all_to_all"])


def test_a_wrong_bit_is_seen() -> None:
    with pytest.raises(runner.RankFailure, match=r"rank 1: (.|\n)*words differ"):
        runner.run(moves.moves, 2, moves.MOVES["all_to_all"], moves.flip_a_bit)
