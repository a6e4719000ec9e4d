"""A coarse net for convergence: a GPT of 0.3M parameters on bytes, with and without lossy messages, from one seed and on the same data.

Ranks communicate through ds_zipccl.comm; gradients of layers are summed by low_rank_sum, gradients between stages go as the
hooks of the pipeline engine send them. Mistakes that cost accuracy are among the trainings. A small model says nothing about large ones:
the net only catches codecs that are plainly broken.
"""

from __future__ import annotations

import math

import convergence
import pytest
import ranks as runner
from convergence import PAIRS, Plan, by_low_rank

from ds_zipccl.lossy import Round, TacoFp8

#: A training may lose this part of the loss of the exact one; factors may lose more, and a mistake must cost :data:`CLEARLY` times as much.
#:
#: After 75 steps the cost of codecs without factors is 0.04 % at most, of factors between stages 0.4 to 0.5 %. The two mistakes cost 4.3 %
#: and 12 %. PowerSGD of rank 4 costs 4.1 % with feedback and 9.7 % without. Twice as many layers or steps take twice as long, and tell
#: mistakes from healthy codecs no better.
#:
#: The cost of PowerSGD follows from the text. Of four layers, with feedback, it is 3.0 % on this text, after 150 steps 3.6 % (two seeds:
#: 3.6 and 3.7 %), on prose (Markdown files) 1.9 %; without, 9.2, 9.1 and 5.7 %. A second implementation has 3.6 % after 150 steps, too, and
#: exact sums of the embeddings and the head improve that by half a point only. So 3 %, a gate for other texts, is too strict here: the gate
#: is wider, and :data:`GAIN` tells feedback from none.
HEALTHY, LOW_RANK, POWER_SGD, CLEARLY = 0.01, 0.02, 0.05, 2
#: Feedback of errors must be better than none by so much.
GAIN = 0.03
RANKS = 4
SUMS = "data parallel"
PLANS = {
    "exact": Plan(SUMS),
    "round": Plan(SUMS, Round(1)),
    "factors": Plan(SUMS, rank=4),
    "forgetting": Plan(SUMS, rank=4, feedback=False),
    "activations by round": Plan(PAIRS, Round(3)),
    "activations by taco_fp8": Plan(PAIRS, TacoFp8()),
    "without scale": Plan(PAIRS, cast=True),
    "stages, off": by_low_rank(16, send="epilogue"),
    "stages, lazy": by_low_rank(16, send="epilogue", error="lazy"),
    "stages, lazy_run": by_low_rank(16, send="epilogue", error="lazy_run"),
    "stages, rank 1": by_low_rank(1, send="all"),
}

pytestmark = [pytest.mark.full(reason="eleven trainings, more than a minute together"), pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def changes() -> dict[str, float]:
    """The change of the loss by each plan; all plans in one launch."""
    found: dict[str, float] = {}
    for losses in runner.run(convergence.trained, RANKS, PLANS, timeout=1150.0):
        assert all(found.get(name, loss) == loss for name, loss in losses.items()), "ranks have different weights"
        found |= losses
    assert found.keys() == PLANS.keys() and all(map(math.isfinite, found.values())), found
    assert found["exact"] < 2.6, "a model that has learnt nothing proves nothing"
    return {name: loss / found["exact"] - 1 for name, loss in found.items()}


def test_sums_of_activations(changes: dict[str, float]) -> None:
    assert max(changes["activations by round"], changes["activations by taco_fp8"]) <= HEALTHY, changes
    assert changes["without scale"] >= CLEARLY * HEALTHY, changes


def test_sums_of_gradients(changes: dict[str, float]) -> None:
    assert changes["round"] <= HEALTHY and changes["factors"] <= POWER_SGD, changes
    assert changes["forgetting"] >= changes["factors"] + GAIN, changes


def test_gradients_between_stages(changes: dict[str, float]) -> None:
    assert max(changes[f"stages, {error}"] for error in ("off", "lazy", "lazy_run")) <= LOW_RANK, changes
    assert changes["stages, rank 1"] >= CLEARLY * LOW_RANK, changes
