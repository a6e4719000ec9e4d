"""Activation checkpointing on real engines with ``recompute_base``: repeated messages go as hashes, with the bits of plain DeepSpeed."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from parallel import STEPS, Lab, Trained, assert_trained, bits, each, fixture_of, rank_program
from test_moe import LAYERS, auto_ep, native
from test_parallel import auto_tp, ulysses
from torch import nn
from torch.utils.checkpoint import checkpoint

ONCE, REENTRANT = {"use_reentrant": False}, {"use_reentrant": True}
#: The forward pass that is repeated draws other numbers.
OTHER = ONCE | {"preserve_rng_state": False}


class Again(nn.Module):
    """A layer under checkpointing that is not reentrant."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.layer, x, **ONCE)


Case = Callable[[Lab], None]
make = functools.partial
#: Case -> the program; the role of its repeated messages; the most bytes of the role, as a part of those without a base; and the segments
#: that each rank sends as hashes in a step. With two experts for a token and biases, row frames make the forward pass cheaper than the
#: backward pass. Checkpointing that is not reentrant stops where the last tensor is there that the backward pass needs.
CASES: dict[str, tuple[Case, str, float, int]] = {
    "top-1": (make(native, checkpointing=ONCE), "ep", 0.68, 2 * LAYERS),
    "top-2 reentrant": (make(native, k=2, checkpointing=REENTRANT), "ep", 0.7, 2 * LAYERS),
    "mixtral": (make(auto_ep, checkpointing=ONCE), "ep", 0.68, 2 * LAYERS),
    "dropout reentrant": (make(native, k=2, dropout=0.1, checkpointing=REENTRANT), "ep", 0.7, 2 * LAYERS),
    "other dropout": (make(native, k=2, dropout=0.1, checkpointing=OTHER), "ep", 1.0, 0),
    "ulysses": (make(ulysses, zero=1, wrap=Again), "sp", 0.74, 3 * LAYERS),
    "autotp reentrant": (make(auto_tp, checkpointing=REENTRANT), "tp", 0.81, 4 * LAYERS),
}
trained = fixture_of(__file__, {2: CASES})


def repeated(rank: Mapping[str, Any]) -> int:
    """Return the number of segments in the table of a rank that have gone as hashes."""
    told = re.findall(r": (\d+) .*segments repeated the forward pass, and went as hashes$", rank["table"], re.MULTILINE)
    return sum(map(int, told))


@each({2: CASES})
def test_repeats_go_as_hashes(trained: Trained, ranks: int, name: str) -> None:
    """In auto, while schedules are tried in turn, messages that go plain are not kept."""
    plain, always, kept, auto = (trained(ranks, mode)[name] for mode in ("plain", "always", "kept", "kept auto"))
    assert_trained(plain)
    assert bits(auto) == bits(kept) == bits(always) == bits(plain)
    _, role, most, segments = CASES[name]
    for before, after in zip(always, kept, strict=True):
        assert after["calls"] == before["calls"]
        assert repeated(before) == 0 and repeated(after) == segments * STEPS
        assert after["sent"].pop(role) <= most * before["sent"].pop(role), (before["table"], after["table"])
        assert after["sent"] == before["sent"], "other roles"
        assert "memory for messages kept for recomputations, at most" in after["table"]


if __name__ == "__main__":
    rank_program({name: run for name, (run, *_) in CASES.items()})
