"""Activation checkpointing on real engines: the messages of a repeated forward pass have the bits of plain DeepSpeed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from parallel import Lab, Trained, assert_trained, bits, each, fixture_of, rank_program
from test_moe import auto_ep, native
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


make = functools.partial
#: Case -> the program. Checkpointing that is not reentrant stops where the last tensor is there that the backward pass needs.
CASES: dict[str, Callable[[Lab], None]] = {
    "top-1": make(native, checkpointing=ONCE),
    "top-2 reentrant": make(native, k=2, checkpointing=REENTRANT),
    "mixtral": make(auto_ep, checkpointing=ONCE),
    "dropout reentrant": make(native, k=2, dropout=0.1, checkpointing=REENTRANT),
    "other dropout": make(native, k=2, dropout=0.1, checkpointing=OTHER),
    "ulysses": make(ulysses, zero=1, wrap=Again),
    "autotp reentrant": make(auto_tp, checkpointing=REENTRANT),
}
trained = fixture_of(__file__, {2: CASES})


@each({2: CASES})
def test_bits_are_those_of_plain(trained: Trained, ranks: int, name: str) -> None:
    plain, always, auto = (trained(ranks, mode)[name] for mode in ("plain", "always", "auto"))
    assert_trained(plain)
    assert bits(auto) == bits(always) == bits(plain)


if __name__ == "__main__":
    rank_program(CASES)
