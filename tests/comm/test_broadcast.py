"""broadcast: every bit arrives."""

from __future__ import annotations

import moves
import pytest
import ranks as runner


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_bit_arrives(ranks: int) -> None:
    runner.run(moves.moves, ranks, moves.MOVES["broadcast"])


def test_a_wrong_bit_is_seen() -> None:
    with pytest.raises(runner.RankFailure, match=r"rank 1: (.|\n)*words differ"):
        runner.run(moves.moves, 2, moves.MOVES["broadcast"], moves.flip_a_bit)
