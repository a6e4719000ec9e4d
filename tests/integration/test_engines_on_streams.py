"""Real DeepSpeed engines on groups in stream order: the schedules of NCCL groups on CPUs, see benchmarks/links/slots.py.

With two ranks training has the bits of plain communication. On four ranks parameters and all-to-alls have them; the order of sums of more
than two ranks is that of tests/on_sim/test_device_sums.py.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import engines
import levels
import pytest
import test_engines as on_gloo
import tiers
import torch
from engines import ADAM, SOURCES, ZERO3, Lab, Model, bits, rank_program
from programs import launch, plain_and_coded
from torch import nn

from ds_zipccl.benchmarks.links import slots
from ds_zipccl.comm import topology
from ds_zipccl.integration import canary
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.ops import OPS
from ds_zipccl.policy import wire
from ds_zipccl.policy.admission import PassReason

SECTION = {"enabled": True, "mode": "always", "min_bytes": 1024, "nccl": "on", "nccl_min_bytes": 4096}
#: Sections: every operation coded, with our sums; and all but sums coded, on any number of ranks.
CODED = json.dumps({**SECTION, "reduction": "fp32"})
MOVES = json.dumps({**SECTION, "roles": {"zero_grad": "never"}})
AUTO = json.dumps({**SECTION, "nccl": "auto"})
#: A model of 1.8M parameters. Shards on two ranks are large enough for differences.
SIZES = {"VOCABULARY": 1024, "WIDTH": 512}
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


#: What a case of three steps gives to the engine.
SETTINGS: dict[str, dict[str, Any]] = {
    "zero1 apart": {"zero": {"stage": 1, "contiguous_gradients": False}},
    "zero2 apart": {"zero": {"stage": 2, "contiguous_gradients": False, "overlap_comm": True}},
    "zero3 apart": {"zero": ZERO3 | {"contiguous_gradients": False, "overlap_comm": False}},
    "zero2 longer": {"zero": {"stage": 2}},
    "zero3 longer": {"zero": ZERO3},
    "moe zero1": {"make": Experts, "groups": split, "zero": {"stage": 1}},
    "moe zero2": {"make": Experts, "groups": split, "zero": {"stage": 2}},
}


def trained(lab: Lab, name: str, steps: int = 3) -> None:
    lab.train_phase(lab.engine(**SETTINGS[name]), steps, "trained", {})


#: Cases of test_engines.py, which has more of the same kinds: what only repeats calls or divides parameters is there alone. Those of
#: ZeRO-3 that test_bases_of_engines.py has are not here.
SHARED = ("zero1", "zero2", "bf16 optimizer", "offload", "many buckets", "fp32 gradients", "beside ZeRO-3", "several engines",
         "checkpoint zero2", "without_gradients zero2", "overflow zero2", "out_of_step zero2", "edited_by_all bf16 optimizer",
         "zero3 plain", "zero3 all reduced", "zero3 hpz")  # fmt: skip
CASES = {name: on_gloo.CASES[name] for name in SHARED}
CASES |= {name: functools.partial(trained, name=name) for name in SETTINGS if "longer" not in name}
LONGER = {name: functools.partial(trained, name=name, steps=8) for name in SETTINGS if "longer" in name}
#: On four ranks: parameters and experts alone are coded.
MOVED = ("zero2", "zero3 plain", "zero3 hpz", "moe zero2")


# ---- tests ---------------------------------------------------------------------------------------------------------

Run = dict[str, list[dict[str, Any]]]
WITH = (Path(on_gloo.__file__), Path(levels.__file__), *SOURCES)
#: What the short tier trains.
SHORT = ("zero2", "zero3 plain", "moe zero2")
#: hpZ's groups of ranks stay in DeepSpeed for all later engines of a process, so that it has four ranks, and no engine of ZeRO-3 after it.
ON_TWO = [
    name if name in SHORT else pytest.param(name, marks=pytest.mark.full(reason="others are alike"))
    for name in CASES
    if name != "zero3 hpz"
]


def on_streams(section: str = CODED) -> dict[str, str]:
    """The environment of the schedules of NCCL groups, of nodes of one rank each."""
    return {"DS_ZIPCCL": section, "BACKEND": slots.NAME}


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
    """Negative proof: one wrong bit in a gather of one rank changes the results, unless the canary has met it."""
    cases = ("zero2", "zero3 plain")
    for plant, changes in {"behind the canary": True, "before the canary": False}.items():
        folder = tmp_path / plant
        folder.mkdir()
        wrong = launch(__file__, 2, folder, *cases, **on_streams(), PLANT=plant)
        for case in cases:
            assert (bits(wrong[case]) != bits(two[0][case])) == changes, (case, plant)


def flip_a_bit() -> None:
    """From now on the first element of every gathered tensor has a wrong bit."""
    decode = CudaBackend.decode_gather

    def wrong(self: CudaBackend, staging: torch.Tensor, table: Any, outs: Any, *more: Any, **named: Any) -> None:
        decode(self, staging, table, outs, *more, **named)
        first = outs if isinstance(outs, torch.Tensor) else outs[0]
        first.view(torch.uint8)[:1] ^= 1

    CudaBackend.decode_gather = wrong  # type: ignore[method-assign]


@pytest.mark.full
@pytest.mark.parametrize("plant", ["", "behind the canary"], ids=["right", "wrong"])
def test_with_auto_the_first_steps_decide(tmp_path: Path, plant: str) -> None:
    """Every step has the bits of plain training; where the first steps show a wrong bit, the gathers stay plain."""
    cases = ("zero2 longer", "zero3 longer")
    plain, auto = plain_and_coded(__file__, 2, tmp_path, *cases, sources=WITH, **on_streams(AUTO), PLANT=plant)
    for case in cases:
        assert bits(auto[case]) == bits(plain[case]), case
        gathers = rows(auto[case])[GATHERS]
        assert (sum(row["calls"] for row in gathers) > 0) == (not plant), gathers
    compared = [row["reasons"].get(PassReason.UNPROVEN.value, 0) for row in rows(auto[cases[0]])[GATHERS]]
    assert min(compared) > 0, "the second engine has the role proven"


@pytest.mark.full
def test_four_ranks_move_as_plain(tmp_path: Path) -> None:
    plain, coded = plain_and_coded(__file__, 4, tmp_path, *MOVED, sources=WITH, **on_streams(MOVES))
    for case in MOVED:
        assert bits(coded[case]) == bits(plain[case]), case
        assert sum(row["calls"] for row in rows(coded[case])[GATHERS]) > 0, case


@pytest.mark.full(reason="the kernels are slow")
def test_emulated_kernels_send_as_many_bytes(two: tuple[Run, Run], tmp_path: Path) -> None:
    """The emulated CUDA kernels in place of the C++ ones: the same bits, calls, bytes and differences."""
    case = "zero3 plain"
    found = launch(__file__, 2, tmp_path, case, **on_streams() | {"BACKEND": "emulated"})
    assert bits(found[case]) == bits(two[1][case]) and rows(found[case]) == rows(two[1][case])


if __name__ == "__main__":
    wire.GOOD_FORECASTS = 0  # frames of experts are sent ahead from the second step on
    if os.environ.get("BACKEND"):
        topology.here = lambda: os.environ["RANK"]
    if os.environ.get("PLANT") and os.environ["RANK"] == "1":
        plant = os.environ["PLANT"]
        if plant == "behind the canary":
            passed = canary.try_out
            canary.try_out = lambda *given: (passed(*given), flip_a_bit())[0]
        else:
            flip_a_bit()
    rank_program(CASES | LONGER, os.environ.get("BACKEND") or None, sizes=SIZES)
