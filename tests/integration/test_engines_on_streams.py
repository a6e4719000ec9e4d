"""Real DeepSpeed engines on groups in stream order: the schedules of NCCL groups on CPUs, see tests/support/shim.py.

With two ranks training has the bits of plain communication. On four ranks parameters and all-to-alls have them, and sums have the bits of
the documented order, by the host.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
import levels
import pytest
import shim
import test_engines as zero12
import test_engines_by_node as sums
import test_engines_zero3 as zero3
import tiers
import torch
from engines import ADAM, SOURCES, Lab, Model, bits, rank_program
from programs import launch, plain_and_coded, reference
from torch import nn

from ds_zipccl.comm import topology
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.ops import OPS

SECTION = {"enabled": True, "mode": "always", "min_bytes": 1024, "nccl": "on", "nccl_min_bytes": 4096}
#: Sections: every operation coded, with our sums; and all but sums coded, on any number of ranks.
CODED = json.dumps({**SECTION, "reduction": "fp32"})
MOVES = json.dumps({**SECTION, "roles": {"zero_grad": "never"}})
#: Emulated kernels are slow: a model of 80,000 parameters. Shards on two ranks are large enough for differences.
SIZES = {"VOCABULARY": 128, "WIDTH": 128}
#: Coded operations of each kind of engine: role and name.
GATHERS = "zero_param all_gather_into_tensor"
OWNERS, SCATTERS, EXPERTS = "zero_grad reduce_to_owners", "zero_grad reduce_scatter_tensor", "ep all_to_all_single"
#: Reasons to pass that large messages of these engines may have.
MAY_PASS = ("dtype uint8", "group of one rank", "smaller than min_bytes", "reduce op MAX")

# ---- cases ---------------------------------------------------------------------------------------------------------


class Experts(Model):
    """The model with two experts, one on each of two ranks, in place of a layer."""

    def __init__(self) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.moe = MoE(engines.WIDTH, nn.Linear(engines.WIDTH, engines.WIDTH), num_experts=2, ep_size=2, k=1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + torch.relu(layer(hidden))
        hidden = hidden + self.moe(hidden)[0]
        follow = (7 * tokens + 1) % engines.VOCABULARY
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), follow.flatten())


def split(model: Model) -> Any:
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    everything = {"params": list(model.parameters()), "name": "all", **ADAM}
    del everything["torch_adam"]
    return split_params_into_different_moe_groups_for_optimizer(everything)


def experts(lab: Lab, stage: int, **more: Any) -> None:
    engine = lab.engine(make=Experts, groups=split, zero={"stage": stage}, **more)
    lab.train_phase(engine, 3, "trained", {})


def options(lab: Lab, **zero: Any) -> None:
    """Train with options of the section ``zero_optimization``."""
    more = zero3.ZERO3 if zero["stage"] == 3 else {}
    lab.train_phase(lab.engine(zero={**more, **zero}), 3, "trained", {})


def set_from_outside(lab: Lab) -> None:
    """Weights of a ZeRO-3 engine are set by DeepSpeed's functions for that, between steps and between batches of a step."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    engine = zero3.start(lab, "accumulating")
    lab.train_phase(engine, 2, "before", {})
    for weight in (engine.module.head.weight, engine.module.layers[0].weight):
        safe_set_full_fp32_param(weight, safe_get_full_fp32_param(weight) * 0.5)
    lab.train_phase(engine, 1, "set between steps", {})
    for batch in range(engine.gradient_accumulation_steps()):
        lab.backward(engine)
        engine.step()
        if batch == 1:
            weight = engine.module.layers[1].weight
            safe_set_full_fp32_param(weight, torch.randn(weight.ds_shape, generator=torch.Generator().manual_seed(5)))
    lab.train_phase(engine, 1, "set between batches", {})


def frozen(lab: Lab) -> None:
    """Parameters of a ZeRO-3 engine that no optimizer has."""

    def trained(model: Model) -> Any:
        model.embedding.requires_grad_(False)
        return [parameter for parameter in model.parameters() if parameter.requires_grad]

    engine = zero3.start(lab, groups=trained)
    lab.train_phase(engine, 3, "trained", {})


OPTIONS: dict[str, dict[str, Any]] = {
    "zero1 apart": {"stage": 1, "contiguous_gradients": False},
    "zero2 apart": {"stage": 2, "contiguous_gradients": False, "overlap_comm": True},
    "zero3 apart": {"stage": 3, "contiguous_gradients": False, "overlap_comm": False},
    "zero3 round robin": {"stage": 3, "round_robin_gradients": True},
}
EDITS: dict[str, Callable[[Lab], None]] = {"zero3 set from outside": set_from_outside, "zero3 frozen": frozen}
EXPERT_CASES: dict[str, Callable[[Lab], None]] = {
    f"moe zero{stage}": functools.partial(experts, stage=stage) for stage in (1, 2)
}
OTHERS = ("beside ZeRO-3", "several engines", "parameter_groups zero2", "checkpoint zero1", "checkpoint zero2",
          "checkpoint bf16 optimizer", "without_gradients zero2", "overflow zero2", "out_of_step zero2",
          "edited_by_all zero2", "edited_by_all bf16 optimizer")  # fmt: skip
CASES = {name: zero12.CASES[name] for name in (*zero12.SETTINGS, *OTHERS)}
CASES |= {
    f"zero3 {name}": zero3.CASES[name]
    for name in (*zero3.SETTINGS, "edited", "checkpoint", "several_engines", "overflow", "evaluated")
}
CASES |= {name: functools.partial(options, **settings) for name, settings in OPTIONS.items()} | EDITS | EXPERT_CASES
#: On four ranks: parameters and experts alone are coded.
MOVED = ("zero2", "zero3 plain", "zero3 hpz", "moe zero2")
#: On four ranks: stage -> nodes of the ranks and their documented order. The cases of the order have its name.
SUMMED = {1: "one level", 2: "two levels"}
BY_HOST = {f"{stage} {order}": sums.CASES[f"{stage} {order}"] for stage in sums.STAGES for order in SUMMED.values()}
IN_ORDER = {f"{stage} in order": functools.partial(sums.train, stage=stage, order="") for stage in sums.STAGES}

# ---- tests ---------------------------------------------------------------------------------------------------------

Run = dict[str, list[dict[str, Any]]]
WITH = (Path(zero12.__file__), Path(zero3.__file__), Path(sums.__file__), Path(levels.__file__), *SOURCES)
#: What the short tier trains.
SHORT = ("zero2", "zero3 plain", "moe zero2")
#: hpZ's groups of ranks stay in DeepSpeed for all later engines of a process, so that it has four ranks, and no engine of ZeRO-3 after it.
ON_TWO = [
    name if name in SHORT else pytest.param(name, marks=pytest.mark.full(reason="others are alike"))
    for name in CASES
    if name != "zero3 hpz"
]


def on_streams(section: str = CODED, node: int = 1) -> dict[str, str]:
    """The environment of the schedules of NCCL groups; ``node``: ranks of a node."""
    shim.build()
    return {"DS_ZIPCCL": section, "BACKEND": shim.NAME, "RANKS_OF_NODE": str(node)}


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """Plain and coded results of those cases on two ranks that were asked for."""
    asked = tiers.asked(request, "case")
    cases = [name for name in CASES if (name,) in asked or name in SHORT]
    return plain_and_coded(__file__, 2, tmp_path_factory.mktemp("two"), *cases, sources=WITH, **on_streams())


@pytest.mark.parametrize("case", ON_TWO)
def test_two_ranks_train_as_plain(two: tuple[Run, Run], case: str) -> None:
    plain, coded = two
    assert bits(coded[case]) == bits(plain[case])
    assert len(set(coded[case][0]["losses"])) > 1, "or nothing was trained"


def rows(run: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of all ranks and phases, by role and operation."""
    found: dict[str, list[dict[str, Any]]] = {}
    for rank in run:
        for phase in rank["phases"]:
            for name, row in phase["rows"].items():
                found.setdefault(name, []).append(row)
    return found


def has_schedule(name: str) -> bool:
    return OPS[name.split()[1]].on_device


@pytest.mark.parametrize("case", ON_TWO)
def test_large_messages_are_coded(two: tuple[Run, Run], case: str) -> None:
    found = rows(two[1][case])
    wanted = {GATHERS, SCATTERS if "zero3" in case else OWNERS} | ({EXPERTS} if "moe" in case else set())
    whole = "bf16 optimizer" in case or case in ("zero1 apart", "zero2 apart", "zero3 all reduced")
    if whole:  # DeepSpeed reads whole buckets
        wanted = {GATHERS, "zero_grad all_reduce"}
    for name in filter(has_schedule, wanted):
        assert sum(row["calls"] for row in found[name]) > 0, f"{name}: {found[name]}"
    for name, some in found.items():
        for row in some:
            strange = set(row["reasons"]) - set(MAY_PASS)
            assert not strange or not has_schedule(name), f"{name}: {row}"


@pytest.mark.full
def test_a_wrong_bit_shows(two: tuple[Run, Run], tmp_path: Path) -> None:
    """Negative proof: one wrong bit in a gather of one rank changes the results."""
    for case in ("zero2", "zero3 plain"):
        (tmp_path / case).mkdir()
        wrong = launch(__file__, 2, tmp_path / case, case, **on_streams(), PLANT="1")
        assert bits(wrong[case]) != bits(two[0][case])


def flip_a_bit() -> None:
    """From now on the first element of every gathered tensor has a wrong bit."""
    decode = CudaBackend.decode_gather

    def wrong(self: CudaBackend, staging: torch.Tensor, table: Any, outs: Any, *more: Any, **named: Any) -> None:
        decode(self, staging, table, outs, *more, **named)
        first = outs if isinstance(outs, torch.Tensor) else outs[0]
        first.view(torch.uint8)[:1] ^= 1

    CudaBackend.decode_gather = wrong  # type: ignore[method-assign]


@pytest.mark.full
def test_four_ranks_move_as_plain(tmp_path: Path) -> None:
    plain, coded = plain_and_coded(__file__, 4, tmp_path, *MOVED, sources=WITH, **on_streams(MOVES))
    for case in MOVED:
        assert bits(coded[case]) == bits(plain[case]), case
        assert sum(row["calls"] for row in rows(coded[case])[GATHERS]) > 0, case


@pytest.mark.full
@pytest.mark.parametrize("node", SUMMED)
@pytest.mark.skipif(not all(has_schedule(name) for name in (OWNERS, SCATTERS)), reason="sums have no schedule yet")
def test_four_ranks_sum_in_the_documented_order(tmp_path: Path, node: int) -> None:
    (tmp_path / "plain").mkdir(), (tmp_path / "coded").mkdir()
    plain = reference(__file__, 4, tmp_path / "plain", *BY_HOST, sources=WITH)
    for stage in sums.STAGES:
        one, other = (bits(plain[f"{stage} {order}"]) for order in SUMMED.values())
        assert one != other, "or the orders would not have been told apart"
    coded = launch(__file__, 4, tmp_path / "coded", *IN_ORDER, **on_streams(node=node))
    for stage in sums.STAGES:
        assert bits(coded[f"{stage} in order"]) == bits(plain[f"{stage} {SUMMED[node]}"]), stage


if __name__ == "__main__":
    if "RANKS_OF_NODE" in os.environ:
        topology.here = lambda: str(int(os.environ["RANK"]) // int(os.environ["RANKS_OF_NODE"]))
    if "PLANT" in os.environ and os.environ["RANK"] == "1":
        flip_a_bit()
    rank_program(CASES | BY_HOST | IN_ORDER, os.environ.get("BACKEND"), sizes=SIZES)
