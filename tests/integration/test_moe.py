"""Mixtures of experts on real engines, DeepSpeed's own and AutoEP's: the bits of plain DeepSpeed, and all-to-alls of every kind coded."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron import Grid
from parallel import (
    CONTEXT,
    STEPS,
    VOCABULARY,
    WIDTH,
    Lab,
    Trained,
    assert_trained,
    bits,
    each,
    fixture_of,
    rank_program,
    results,
)
from places import EXAMPLES
from torch import nn
from torch.utils.checkpoint import checkpoint

LAYERS = 2

# ---- DeepSpeed's own layer -----------------------------------------------------------------------------------------


class Sparse(nn.Module):
    """Layers of experts with biases, behind a dropout if it is not 0, between an embedding and a head."""

    def __init__(
        self,
        experts: int,
        spread: int,
        k: int,
        checkpointing: Mapping[str, Any] | None,
        dropout: float = 0,
        **more: Any,
    ) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        one = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        more = {"capacity_factor": 1.25, "min_capacity": 2, **more}
        layers = (MoE(WIDTH, one, experts, spread, k, **more) for _ in range(LAYERS))
        self.layers = nn.ModuleList(nn.Sequential(nn.Dropout(dropout), layer) if dropout else layer for layer in layers)
        self.checkpointing = checkpointing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, balance = self.words(tokens), torch.zeros(())
        for layer in self.layers:
            y, extra, _ = layer(x) if self.checkpointing is None else checkpoint(layer, x, **self.checkpointing)
            x, balance = x + y, balance + extra.float()
        found = nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), (7 * tokens + 1).flatten() % VOCABULARY)
        return found + 0.01 * balance


def native(
    lab: Lab, k: int = 1, zero: int = 2, experts: int = 8, spread: int = 2,
    checkpointing: Mapping[str, Any] | None = None, **more: Any,
) -> None:  # fmt: skip
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    mpu = {"mpu": more.pop("mpu")} if "mpu" in more else {}
    model = Sparse(experts, spread, k, checkpointing, **more)
    groups = split([{"params": list(model.parameters()), "name": "all"}])
    lab.start(model, zero, model_parameters=groups, **mpu)
    lab.train(lambda step: (lab.tokens(step),))


def tensor_parallel(lab: Lab, **more: Any) -> None:
    """gather_tokens gives gloo tensors of a shape that torch refuses; our schedule takes them. Other runs get them flat."""
    import deepspeed

    gather = deepspeed.comm.all_gather_into_tensor

    def flat(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return gather(output, input.reshape(-1), *args, **kwargs)

    if lab.mode != "always":
        deepspeed.comm.all_gather_into_tensor = flat
    try:
        rank, lab.rank = lab.rank, lab.rank // 2  # ranks that share tensors see the same tokens
        native(lab, zero=1, mpu=Grid(2), **more)
        lab.rank = rank
    finally:
        deepspeed.comm.all_gather_into_tensor = gather


# ---- AutoEP --------------------------------------------------------------------------------------------------------


def auto_ep(
    lab: Lab, family: str = "mixtral", zero: Any = 2, experts: int = 8, k: int = 2, spread: int = 2,
    checkpointing: Mapping[str, Any] | None = None, **more: Any,
) -> None:  # fmt: skip
    sys.path.insert(0, str(EXAMPLES))
    import train_moe
    from gpt import Size

    size = Size(VOCABULARY, WIDTH, LAYERS, heads=2, context=CONTEXT, characters=0)
    model: Any = train_moe.hugging_face(size, family, experts, k)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(checkpointing))
    preset = {"mixtral": "mixtral", "qwen3": "qwen3_moe"}[family]
    expert_parallel = {"enabled": True, "autoep_size": spread, "preset_model": preset}
    lab.start(model, zero, expert_parallel=expert_parallel, **more)
    lab.train(lambda step: (torch.cat([lab.tokens(step), lab.tokens(step)[:, :1]], 1),))


#: Layers of the Mixtral that AutoTP shares out: those outside of the experts.
FOLDED = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.o_proj\.weight$"], "partition_type": "row"},
        {"patterns": [r".*\.[qkv]_proj\.weight$"], "partition_type": "column"},
    ],
}


def folding(lab: Lab) -> None:
    rank, lab.rank = lab.rank, lab.rank // 2  # ranks that share tensors see the same tokens
    auto_ep(lab, zero=1, tensor_parallel={"autotp_size": 2, "partition_config": FOLDED})
    lab.rank = rank


#: Arguments of torch's checkpoint().
AGAIN, REENTRANT = {"use_reentrant": False}, {"use_reentrant": True}
HOST_BASE = {"stage": 3, "stage3_param_persistence_threshold": 0}
Case = Callable[[Lab], None]
make = functools.partial
#: Ranks -> cases.
CASES: dict[int, dict[str, Case]] = {
    2: {
        "top-1": make(native),
        "top-1 zero1": make(native, zero=1),
        "top-1 residual": make(native, use_residual=True),
        "top-1 no drop": make(native, drop_tokens=False),
        "top-1 checkpointing": make(native, checkpointing=AGAIN),
        "top-2": make(native, k=2),
        "top-2 checkpointing, dropout": make(native, k=2, dropout=0.1, checkpointing=REENTRANT),
        "top-2 no drop": make(native, k=2, drop_tokens=False),
        "top-4": make(native, k=4, experts=16),
        "top-4 no drop": make(native, k=4, experts=16, drop_tokens=False),
        "mixtral zero1": make(auto_ep, zero=1),
        "mixtral": make(auto_ep),
        "mixtral zero3": make(auto_ep, zero=HOST_BASE),
        "qwen": make(auto_ep, family="qwen3", experts=16, k=4),
    },
    4: {
        "top-1, 2 of 4": make(native),
        "top-2 zero1, 2 of 4": make(native, k=2, zero=1),
        "top-2, 4 of 4": make(native, k=2, spread=4),
        "tensor parallel": make(tensor_parallel),
        "tensor parallel experts": make(tensor_parallel, enable_expert_tensor_parallelism=True),
        "mixtral": make(auto_ep, spread=4),
        "mixtral zero2 checkpointing, 2 of 4": make(auto_ep, checkpointing=AGAIN),
        "mixtral zero3 checkpointing, 2 of 4": make(auto_ep, zero=HOST_BASE, checkpointing=AGAIN),
        "qwen": make(auto_ep, family="qwen3", experts=32, k=4, spread=4),
        "folding": folding,
    },
}
#: Case -> the role of tensor-parallel groups, and its operations.
TENSORS = {
    "tensor parallel": {"tp": ["all_gather_into_tensor", "all_reduce"]},
    "tensor parallel experts": {"tp": ["all_gather_into_tensor", "all_reduce"]},
    "folding": {"tp": ["all_gather", "all_reduce"]},
}
#: Cases of the short tier, on two ranks.
SHORT = [(2, name) for name in ("top-2", "mixtral")]

trained = fixture_of(__file__, CASES)

KINDS = ("dispatch", "combine", "combine.bwd", "dispatch.bwd")


def kinds(ranks: list[dict[str, Any]]) -> dict[str, int]:
    """Return the number of coded exchanges by kind, which all ranks have in common."""
    found = [{kind: rank["calls"].get(f"all_to_all_single {kind}", 0) for kind in KINDS} for rank in ranks]
    assert found.count(found[0]) == len(found), found
    return found[0]


@each(CASES, SHORT)
def test_always_has_the_bits_of_plain_runs(trained: Trained, ranks: int, name: str) -> None:
    plain, coded = trained(ranks, "plain")[name], trained(ranks, "always")[name]
    assert_trained(plain)
    assert not any(rank["calls"] for rank in plain)
    assert bits(coded) == bits(plain)
    again = 2 if "checkpointing" in name else 1
    wanted = {kind: (1 if kind.endswith("bwd") else again) * LAYERS * STEPS for kind in KINDS}
    assert kinds(coded) == wanted
    summed = {"reduce_scatter_tensor"} if "zero3" in name else {"reduce_to_owners"}
    agreed = ["all_reduce"] if "no drop" in name or "zero3" in name else []  # a capacity, and gradients of experts
    for rank in coded:
        assert summed <= set(rank["calls"]) and not rank["whole"]
        assert rank["roles"] == {"ep": [*agreed, "all_to_all_single"]} | TENSORS.get(name, {})


@pytest.mark.full(reason="one more launch, of cases that only the full tier has")
def test_wrong_bit_changes_the_result(trained: Trained, tmp_path: Path) -> None:
    """The tests above see a single wrong bit per message of one rank."""
    names = ["top-2", "mixtral zero3"]
    wrong = results(__file__, 2, "wrong bit", tmp_path, names)
    for name in names:
        assert bits(wrong[name]) != bits(trained(2, "plain")[name])


if __name__ == "__main__":
    rank_program(CASES[int(os.environ["WORLD_SIZE"])])
