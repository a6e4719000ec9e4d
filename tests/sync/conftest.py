"""Small fragments, so that small states have many records of all kinds."""

from __future__ import annotations

import random

import pytest
import states
import torch

from ds_zipccl.sync import Receiver, message, words


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(request.node.name)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of 1 KiB are large, and a state may have records of 64 bytes."""
    monkeypatch.setattr(words, "SMALL", 1024)
    monkeypatch.setattr(message, "_LEAST_FRAGMENT", 64)


@pytest.fixture
def pair(small: None) -> states.Pair:
    """A sender, a receiver with its first state, the next state, and its message: records of differences and of whole tensors."""
    chance = random.Random(7)
    made, received = states.sender(), Receiver()
    sizes = {"a": 5000, "b": 40, "c": 30}
    state = {name: states.some(numel, torch.bfloat16, chance) for name, numel in sizes.items()}
    state |= {"i": states.some(12, torch.int64, chance), "gone": states.some(5, torch.float32, chance)}
    received.apply(made.pack(state))
    state = states.copy(state)
    del state["gone"]
    state["a"].view(torch.int16)[::70] += 1
    state["b"][3] = 1.5
    state["new"] = states.some(300, torch.float32, chance)
    return made, received, state, list(made.pack(state))
