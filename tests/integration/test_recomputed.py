"""Activation checkpointing on real engines with ``recompute_base``: repeated messages go as hashes, with the bits of plain DeepSpeed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel import STEPS, WIDTH, Lab, assert_trained, bits, rank_program, results
from test_moe import LAYERS, auto_ep, native
from test_parallel import Layered, Ulysses, llama, of_tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

ONCE, REENTRANT = {"use_reentrant": False}, {"use_reentrant": True}


class Again(nn.Module):
    """A layer behind a dropout of its input, both under checkpointing; ``arguments``: of ``checkpoint``."""

    def __init__(self, layer: nn.Module, dropout: float = 0.0, **arguments: Any) -> None:
        super().__init__()
        self.layer, self.dropout, self.arguments = layer, nn.Dropout(dropout), arguments

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(lambda given: self.layer(self.dropout(given)), x, **self.arguments)


class First(nn.Module):
    """The output of a layer of experts."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)[0]
        return found


def dropped(lab: Lab, **arguments: Any) -> None:
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    one = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
    model = Layered([Again(First(MoE(WIDTH, one, 8, 2, 2)), 0.1, **arguments) for _ in range(LAYERS)])
    lab.start(model, 2, model_parameters=split([{"params": list(model.parameters()), "name": "all"}]))
    lab.train(lambda step: (lab.tokens(step),))


def ulysses(lab: Lab, **arguments: Any) -> None:
    group = dist.new_group(list(range(lab.ranks)))
    lab.start(Layered([Again(Ulysses(group), **arguments) for _ in range(LAYERS)]), 1)
    lab.train(lambda step: (lab.tokens(step),))


def auto_tp(lab: Lab, **arguments: Any) -> None:
    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
    lab.start(model, 1, tensor_parallel={"autotp_size": 2})
    lab.train(lambda step: (lab.tokens(step, lab.rank // 2),), of_tokens)


Case = Callable[[Lab], None]
make = functools.partial
#: Case -> the program; the role of its repeated messages; the most bytes of the role, as a part of those without a base; and the segments
#: that each rank sends as hashes in a step. With two experts for a token and biases, row frames make the forward pass cheaper than the
#: backward pass. Checkpointing that is not reentrant stops where the last tensor is there that the backward pass needs.
CASES: dict[str, tuple[Case, str, float, int]] = {
    "top-1": (make(native, checkpointing=ONCE), "ep", 0.68, 2 * LAYERS),
    "top-2 reentrant": (make(native, k=2, checkpointing=REENTRANT), "ep", 0.7, 2 * LAYERS),
    "mixtral": (make(auto_ep, checkpointing=ONCE), "ep", 0.68, 2 * LAYERS),
    "qwen reentrant": (make(auto_ep, family="qwen3", experts=16, k=4, checkpointing=REENTRANT), "ep", 0.68, 2 * LAYERS),
    "dropout reentrant": (make(dropped, **REENTRANT), "ep", 0.68, 2 * LAYERS),
    "other dropout": (make(dropped, preserve_rng_state=False, **ONCE), "ep", 1.0, 0),
    "ulysses": (make(ulysses, **ONCE), "sp", 0.74, 3 * LAYERS),
    "autotp reentrant": (make(auto_tp, **REENTRANT), "tp", 0.81, 4 * LAYERS),
}
AUTO = ("mixtral", "autotp reentrant")

Trained = Callable[[str], dict[str, Any]]
FULL = pytest.mark.full(reason="launches of minutes; tests/comm has the messages")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return a function mode -> results by case. Its first call for a mode launches two ranks."""
    pytest.importorskip("transformers")

    @functools.cache
    def get(mode: str) -> dict[str, Any]:
        names = AUTO if mode == "kept auto" else CASES
        return results(__file__, 2, mode, tmp_path_factory.mktemp("recomputed"), names)

    return get


def repeated(rank: Mapping[str, Any]) -> int:
    """Return the number of segments in the table of a rank that have gone as hashes."""
    lines = [
        line
        for line in rank["table"].splitlines()
        if line.endswith("segments repeated the forward pass, and went as hashes")
    ]
    return sum(int(line.split(": ")[1].split()[0]) for line in lines)


@FULL
@pytest.mark.parametrize("name", CASES)
def test_repeats_go_as_hashes(trained: Trained, name: str) -> None:
    plain, always, kept = (trained(mode)[name] for mode in ("plain", "always", "kept"))
    assert_trained(plain)
    assert bits(kept) == bits(always) == bits(plain)
    _, role, most, each = CASES[name]
    for before, after in zip(always, kept, strict=True):
        assert after["calls"] == before["calls"]
        assert repeated(before) == 0 and repeated(after) == each * STEPS
        assert after["sent"][role] <= most * before["sent"][role], after["sent"][role] / before["sent"][role]
        others = [{other: sent for other, sent in one["sent"].items() if other != role} for one in (before, after)]
        assert others[0] == others[1]
        assert "memory for messages kept for recomputations, at most" in after["table"]


@FULL
@pytest.mark.parametrize("name", AUTO)
def test_auto_has_the_bits_of_plain_runs(trained: Trained, name: str) -> None:
    """While schedules are tried in turn; messages that go plain are not kept."""
    assert bits(trained("kept auto")[name]) == bits(trained("plain")[name])


if __name__ == "__main__":
    rank_program({name: run for name, (run, *_) in CASES.items()})
