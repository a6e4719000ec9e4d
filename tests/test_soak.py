"""A mistake that the soak of tests/soak.py must find; ``make test-all`` runs a minute of the soak after the tests."""

from __future__ import annotations

import pytest
import ranks as runner
import soak
from moves import flip_a_bit


def test_a_wrong_bit_is_found() -> None:
    with pytest.raises(runner.RankFailure, match="elements are wrong after operation"):
        runner.run(soak.soak, soak.RANKS, 30.0, 1, flip_a_bit)
