"""all_gather, all_gather_into_tensor, all_gather_coalesced: every bit arrives."""

from __future__ import annotations

import moves
import pytest
import ranks as runner


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_bit_arrives(ranks: int) -> None:
    runner.run(moves.moves, ranks, moves.MOVES["all_gather"])


@pytest.mark.parametrize("ranks", [2, 3])
def test_alias(ranks: int) -> None:
    """An output that is an input, or the own part of it."""
    runner.run(moves.moves, ranks, moves.ALIASES["all_gather"])


def test_a_wrong_bit_is_seen() -> None:
    with pytest.raises(runner.RankFailure, match=r"rank 1: (.|\n)*words differ"):
        runner.run(moves.moves, 2, moves.MOVES["all_gather"], moves.flip_a_bit)
