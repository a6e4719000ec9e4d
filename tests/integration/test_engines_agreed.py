"""Real ZeRO-3 engines whose gathers have agreed sizes, on groups in stream order on CPUs (benchmarks/links/slots.py).

Waits of the host are counted by phase. A change of parameters by a function of DeepSpeed ends versions; a change behind our back gives the
right bits, or stops all ranks before the next optimizer step. The same engines with bases for differences: no more waits, and no proof of a
base but after an event.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
import pytest
import test_engines_versions as on_gloo
import tiers
import torch
import torch.distributed as dist
from engines import SOURCES, ZERO3, Lab, Model, bits, rank_program
from programs import launch, plain_and_coded
from torch import nn

from ds_zipccl.benchmarks.links import slots
from ds_zipccl.comm import CommError
from ds_zipccl.comm.device.bases import proof
from ds_zipccl.integration.zero import gathers
from ds_zipccl.policy.admission import PassReason

SECTION = {
    "enabled": True,
    "mode": "always",
    "min_bytes": 1024,
    "nccl": "on",
    "nccl_min_bytes": 4096,
    "reduction": "fp32",
}
SIZES = {"VOCABULARY": 128, "WIDTH": 128}
GATHERS, AGREEMENTS = "zero_param all_gather_into_tensor", "zero_param agreement"

# ---- cases ---------------------------------------------------------------------------------------------------------


def start(lab: Lab, groups: Callable[[Model], Any] = Model.parameters, **config: Any) -> Any:
    engine = lab.engine(groups=groups, **{**config, "zero": {**ZERO3, **config.get("zero", {})}})
    lab.ends("made", {})
    return engine


def trained(lab: Lab) -> None:
    engine = start(lab, gradient_accumulation_steps=2)
    lab.train_phase(engine, 3, "3 steps", {})
    engine.eval()
    with torch.no_grad():
        lab.losses.append(engine(torch.arange(32).view(2, 16)).item().hex())
    lab.ends("evaluated", {})


def three_steps(lab: Lab, **zero: Any) -> None:
    lab.train_phase(start(lab, zero=zero), 3, "3 steps", {})


def autocast(lab: Lab) -> None:
    """Shards of 32 bits, gathered in 16."""
    options = {"bf16": {"enabled": False}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    engine = start(lab, **options)
    assert all(one.dtype is torch.bfloat16 for one in gathers.parameters_of([engine.module.head.weight]))
    lab.train_phase(engine, 3, "3 steps", {})


def frozen(lab: Lab) -> None:
    def groups(model: Model) -> Any:
        model.embedding.requires_grad_(False)
        return on_gloo.trained(model)

    engine = start(lab, groups)
    lab.train_phase(engine, 2, "2 steps", {})
    change(lab, [engine.module.embedding.weight])
    lab.train_phase(engine, 2, "changed", {})


def change(lab: Lab, weights: list[Any]) -> None:
    import deepspeed

    with deepspeed.zero.GatheredParameters(weights, modifier_rank=0):
        if lab.rank == 0:
            for weight in weights:
                weight.data.copy_(noise(weight.data, 7))


def edited(lab: Lab) -> None:
    """Weights become words that do not shrink, between steps and between batches of a step."""
    engine = start(lab, gradient_accumulation_steps=2)
    lab.train_phase(engine, 1, "1 step", {})
    change(lab, [engine.module.layers[0].weight])
    lab.train_phase(engine, 1, "edited between steps", {})
    lab.backward(engine)
    engine.step()
    change(lab, [engine.module.layers[1].weight, engine.module.layers[2].weight])
    lab.backward(engine)
    engine.step()
    lab.ends("edited between batches", {})


def set_outside(lab: Lab, **config: Any) -> None:
    """Set parameters by DeepSpeed's functions for that. Shards of 32 bits are the optimizer's own copies; others change with a step."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    engine = start(lab, **config)
    lab.train(engine, 1)
    first, second = engine.module.layers[0].weight, engine.module.layers[1].weight
    safe_set_full_fp32_param(first, noise(torch.empty(first.ds_shape), 3))
    shard = torch.empty(second.ds_tensor.ds_numel)
    safe_set_local_fp32_param(second, noise(shard, 4 + lab.rank))
    lab.ends("set", {})
    lab.train_phase(engine, 2, "2 steps", {})


def checkpoint(lab: Lab) -> None:
    engine = start(lab)
    change(lab, [engine.module.layers[0].weight])
    lab.train(engine, 1)
    engine.save_checkpoint(lab.folder / "saved", tag="one")
    lab.ends("saved", {})
    other = start(lab, seed=2)
    lab.train_phase(other, 1, "another", {})
    other.load_checkpoint(lab.folder / "saved", tag="one")
    lab.ends("loaded", {})
    lab.train_phase(other, 1, "trained", {})


def skipped(lab: Lab) -> None:
    engine = start(lab)
    lab.train_phase(engine, 1, "1 step", {})
    for turn in range(2):
        lab.train(engine, scale=math.inf if lab.rank == turn else 1.0)
    lab.ends("2 skipped", {})
    lab.train_phase(engine, 1, "1 step more", {})
    assert engine.skipped_steps == 2


def noise(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Finite words whose frames are as large as the words: signs and exponents of any value below 1."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(1, 120, like.shape, generator=generator).float() - 127
    signs = torch.randint(0, 2, like.shape, generator=generator).float() * 2 - 1
    return (signs * (1 + torch.rand(like.shape, generator=generator)) * torch.exp2(exponents)).to(like.dtype)


def written(lab: Lab) -> None:
    """A direct write whose frame still fits."""
    engine = start(lab)
    lab.train_phase(engine, 1, "before", {})
    with torch.no_grad():
        engine.module.layers[0].weight.ds_tensor.mul_(0.5)
    lab.train_phase(engine, 1, "after", {})


def stopped(
    lab: Lab, by: Callable[[Any], None], steps: int = 1, batches: int = 0, groups: Any = Model.parameters, **config: Any
) -> None:
    """A change after ``steps`` and ``batches`` of the next step, by rank 1 or by all ranks: all ranks stop in the batches that are left,
    before the step. The error is the last loss."""
    engine = start(lab, groups, **config)
    lab.train_phase(engine, steps, "before", {})
    for _ in range(batches):
        lab.backward(engine)
        engine.step()
    by(engine)
    before = engines.digest(engine.module.parameters())
    with pytest.raises(CommError) as raised:  # the agreement of a coded sum comes first, where there is one
        for _ in range(engine.gradient_accumulation_steps() - batches):
            lab.backward(engine)
            engine.step()
    lab.losses.append(str(raised.value))
    assert engines.digest(engine.module.parameters()) == before
    lab.ends("after", {})


def direct_write(engine: Any) -> None:
    """Words whose frames do not fit."""
    shard = engine.module.layers[1].weight.ds_tensor
    if dist.get_rank() == 1:
        with torch.no_grad():
            shard.copy_(noise(shard, 5))


def planted(engine: Any) -> None:
    """Versions that no change ends, on all ranks."""
    import deepspeed

    weight = engine.module.layers[1].weight
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathers, "forget", lambda params: None)
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            weight.data.copy_(noise(weight.data, 7))


CASES: dict[str, Callable[[Lab], None]] = {
    case.__name__: case for case in (trained, autocast, frozen, edited, set_outside, checkpoint, skipped, written)
}
CASES |= {
    "one_by_one": functools.partial(three_steps, allgather_sequential=True),
    "hpz": functools.partial(three_steps, zero_hpz_partition_size=2),
    "set fp32": functools.partial(set_outside, bf16={"enabled": False}),
}


def read(lab: Lab) -> None:
    """A program reads parameters whose shards were changed behind our back: it gets none."""
    import deepspeed

    engine = start(lab)
    lab.train(engine, 1)
    direct_write(engine)
    with pytest.raises(CommError) as raised, deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        pytest.fail("wrong words")
    lab.losses.append(str(raised.value))
    lab.ends("after", {})


# ---- cases with bases ----------------------------------------------------------------------------------------------


def halved(engine: Any) -> None:
    """A direct write to a shard of rank 1: before the first gather of a version its difference is larger than agreed; between two batches
    of a step, after a gather, no rank gets the words. After the step no rank gets those of a frozen shard."""
    if dist.get_rank() == 1:
        with torch.no_grad():
            engine.module.layers[1].weight.ds_tensor.mul_(0.5)


def freeze(model: Model) -> Any:
    """Freeze all weights but the head's; return what is trained."""
    for module in (model.embedding, *model.layers):
        module.weight.requires_grad_(False)
    return on_gloo.trained(model)


class Counting:
    """Calls of the functions that read a base: for a proof, and for a copy to the output."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.proofs = self.copies = 0

        def proof_of(*arguments: Any, original: Any = proof.proof_of) -> Any:
            self.proofs += 1
            return original(*arguments)

        def lay_out(found: Any, *arguments: Any, original: Any = proof.lay_out) -> Any:
            self.copies += len(found)
            return original(found, *arguments)

        patch.setattr(proof, "proof_of", proof_of)
        patch.setattr(proof, "lay_out", lay_out)

    def ends(self, lab: Lab, phase: str, *expected: str) -> None:
        lab.ends(phase, {})
        lab.phases[-1] |= {"proofs": self.proofs, "copies": self.copies}
        self.proofs = self.copies = 0


def partly_frozen(lab: Lab) -> None:
    """Four of five weights are frozen. A load of a checkpoint costs proofs of each of them, and no step does."""
    with pytest.MonkeyPatch.context() as patch:
        counting = Counting(patch)
        engine = start(lab, freeze)
        lab.train(engine, 1)
        counting.ends(lab, "1 step")
        lab.train(engine, 3)
        counting.ends(lab, "3 steps")
        engine.save_checkpoint(lab.folder / "saved", tag="four")
        engine.load_checkpoint(lab.folder / "saved", tag="four")
        counting.ends(lab, "loaded")
        lab.train(engine, 2)
        counting.ends(lab, "2 steps")


def inference(lab: Lab) -> None:
    """Without an optimizer all parameters are frozen, but no step checks copies of bases: there are none."""
    with pytest.MonkeyPatch.context() as patch:
        on_gloo.inference(lab, Counting(patch).ends)


class Stored(nn.Module):
    """A layer whose weight is stored in 8 bits, as that of a quantised model."""

    def __init__(self) -> None:
        super().__init__()
        words = torch.randn(engines.WIDTH, 4 * engines.WIDTH).mul(20).clamp(-127, 127).to(torch.int8)
        self.weight = nn.Parameter(words, requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 0.01 * (hidden @ self.weight.to(hidden.dtype)).unflatten(-1, (4, -1)).sum(-2)


class Quantised(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Stored()


def quantised(lab: Lab) -> None:
    """A frozen weight of int8: without a base its gathers would pass."""
    with pytest.MonkeyPatch.context() as patch:
        counting = Counting(patch)
        engine = start(lab, on_gloo.trained, make=Quantised)
        lab.train(engine, 1)
        counting.ends(lab, "1 step")
        lab.train(engine, 2)
        counting.ends(lab, "2 steps")
        engine.save_checkpoint(lab.folder / "saved", tag="three")
        engine.load_checkpoint(lab.folder / "saved", tag="three")
        lab.train(engine, 2)
        counting.ends(lab, "loaded")


PROVEN = {case.__name__: case for case in (partly_frozen, inference, quantised)}
_TWO = {"gradient_accumulation_steps": 2}
LARGER, REFUSED = ("layers.1.weight of group rank", "larger than agreed"), ("layers.1.weight of group rank 1 refused",)
CHANGED = ("layers.1.weight: gathered before, and changed since",)
#: Case -> program, ranks, zero3_base, words of the error. Refused frames stay known, so that each has processes of its own.
STOPS: dict[str, tuple[Callable[[Lab], None], int, str, tuple[str, ...]]] = {
    "read": (read, 2, "auto", LARGER),
    "direct write": (functools.partial(stopped, by=direct_write), 3, "auto", LARGER + REFUSED),
    "planted": (functools.partial(stopped, by=planted), 2, "auto", LARGER),
    "between batches": (functools.partial(stopped, by=halved, batches=1, **_TWO), 2, "host", CHANGED),
    "between steps": (functools.partial(stopped, by=halved, **_TWO), 2, "host", REFUSED),
    "frozen shard": (functools.partial(stopped, by=halved, steps=2, groups=freeze), 2, "auto", CHANGED),
}

# ---- tests ---------------------------------------------------------------------------------------------------------

#: Case -> phase -> waits of the host for gathers, and for agreements: two for each step, two for each load of a checkpoint, and one
#: for each GatheredParameters, whose words a program may save.
STEP = (0, 2)
WAITS: dict[str, dict[str, tuple[int, int]]] = {
    "trained": {"3 steps": (0, 6), "evaluated": (0, 0)},
    "one_by_one": {"3 steps": (0, 6)},
    "autocast": {"3 steps": (0, 6)},
    "frozen": {"2 steps": (0, 4), "changed": (1, 5)},
    "edited": {"1 step": STEP, "edited between steps": (1, 3), "edited between batches": (2, 3)},
    "set_outside": {"set": STEP, "2 steps": (0, 4)},
    "set fp32": {"set": STEP, "2 steps": (1, 4)},
    "checkpoint": {"another": STEP, "loaded": (0, 2), "trained": STEP},
    "skipped": {"1 step": STEP, "2 skipped": (0, 4), "1 step more": STEP},
    "written": {"before": STEP, "after": STEP},
}
SHORT = ("trained", "edited")
Run = dict[str, list[dict[str, Any]]]


def on_streams(**more: Any) -> dict[str, str]:
    """The environment of coded runs; ``more``: keys of the section."""
    return {"DS_ZIPCCL": json.dumps(SECTION | more), "BACKEND": slots.NAME}


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """Plain and coded results of those cases on two ranks that were asked for."""
    cases = [name for name in CASES if (name,) in tiers.asked(request, "case")]
    return plain_and_coded(__file__, 2, tmp_path_factory.mktemp("two"), *cases, sources=SOURCES, **on_streams())


def waited(rows: dict[str, Any], name: str) -> int:
    return int(rows[name]["host_waits"]) if name in rows else 0


def check(case: str, plain: Run, coded: Run) -> None:
    """The bits of plain communication, and no wait of the host but those of the table."""
    assert bits(coded[case]) == bits(plain[case]), case
    for rank in coded[case]:
        found = {phase["phase"]: phase["rows"] for phase in rank["phases"]}
        waits = {phase: (waited(found[phase], GATHERS), waited(found[phase], AGREEMENTS)) for phase in WAITS[case]}
        assert waits == WAITS[case], case
        assert all(found[phase][GATHERS]["calls"] for phase in WAITS[case] if phase != "loaded"), case


@pytest.mark.parametrize(
    "case", tiers.mostly_full([name for name in CASES if name != "hpz"], SHORT, "others are alike")
)
def test_agreed_sizes_change_no_bit_and_gathers_do_not_wait(two: tuple[Run, Run], case: str) -> None:
    check(case, *two)


@pytest.mark.full
def test_secondary_gathers_pass(tmp_path: Path) -> None:
    """Four ranks with secondary shards in pairs: backward passes gather inside a pair."""
    environment = on_streams(roles={"zero_grad": "never"})
    plain, coded = plain_and_coded(__file__, 4, tmp_path, "hpz", sources=SOURCES, **environment)
    assert bits(coded["hpz"]) == bits(plain["hpz"])
    for rank in coded["hpz"]:
        row = rank["phases"][-1]["rows"][GATHERS]
        assert row["calls"] and not row["host_waits"] and row["reasons"][PassReason.SECONDARY.value]


@pytest.mark.full
@pytest.mark.parametrize("case", STOPS)
def test_all_ranks_stop(tmp_path: Path, case: str) -> None:
    _, ranks, kind, words = STOPS[case]
    for number, rank in enumerate(launch(__file__, ranks, tmp_path, case, **on_streams(zero3_base=kind))[case]):
        assert all(some in rank["losses"][-1] for some in words), f"rank {number}: {rank['losses'][-1]}"


@pytest.mark.parametrize("kind", tiers.mostly_full(["device", "host"], [], "several trainings each"))
def test_bases_change_no_bit(tmp_path: Path, kind: str) -> None:
    cases = ("trained",) if kind == "host" else ("trained", "frozen", "edited", "checkpoint", "skipped")
    plain, run = plain_and_coded(__file__, 2, tmp_path, *cases, sources=SOURCES, **on_streams(zero3_base=kind))
    for case in cases:
        check(case, plain, run)
        for counts in ([phase["differences"] for phase in rank["phases"]] for rank in run[case]):
            others = sum(count[why] for count in counts for why in count if why)
            assert sum(count.get("", 0) for count in counts) > others, case


@pytest.mark.full(reason="the test above has frozen parameters with bases of all")
def test_frozen_parameters_are_copies_of_their_bases(tmp_path: Path) -> None:
    """By default: no wait and no word on the wire after the first gather, and no proof of a base but after an event."""
    sources = (*SOURCES, Path(on_gloo.__file__))
    plain, run = plain_and_coded(__file__, 2, tmp_path, *PROVEN, sources=sources, **on_streams(zero3_base="auto"))
    said = (tmp_path / "coded/rank0.txt").read_text()
    for case, count in (("partly_frozen", 4), ("inference", 5), ("quantised", 1)):
        assert bits(run[case]) == bits(plain[case])
        kept = case != "inference"
        assert (f"shared by the 2 ranks of a node, for {count} frozen parameters" in said) is kept
        for rank in run[case]:
            phases = {phase["phase"]: phase for phase in rank["phases"]}
            proofs = {name: phase["proofs"] for name, phase in phases.items() if phase.get("proofs")}
            # a load agrees after the optimizer's part, and after the whole; the next gather of int8 agrees for itself
            assert proofs == {"partly_frozen": {"loaded": 2 * 4}, "inference": {}, "quantised": {"loaded": 1}}[case]
            for name, phase in phases.items():
                quiet = name != "made" and case != "quantised"
                assert not quiet or not waited(phase["rows"], GATHERS), phase
    for rank in run["inference"]:
        _, later = rank["phases"]
        assert later["copies"] == 0 and AGREEMENTS not in later["rows"], "no step would check copies"
    assert "nothing for 5 frozen parameters" in said and "no optimizer step checks copies" in said
    for rank in run["quantised"]:
        _, first, steps, loaded = rank["phases"]
        assert [waited(phase["rows"], GATHERS) for phase in (first, steps, loaded)] == [0, 0, 1]
        assert steps["copies"] == 2 * 2 and set(steps["differences"]) == set(loaded["differences"]) == {""}
    for rank in run["partly_frozen"]:
        steps = next(phase for phase in rank["phases"] if phase["phase"] == "3 steps")
        assert steps["copies"] == 3 * (2 * 4 - 1) and set(steps["differences"]) == {""}, "not the embedding's backward"


if __name__ == "__main__":
    programs = CASES | PROVEN | {name: program for name, (program, *_) in STOPS.items()}
    rank_program(programs, os.environ.get("BACKEND"), sizes=SIZES)
