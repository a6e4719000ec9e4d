"""Real ZeRO-3 engines whose gathers have agreed sizes, on groups in stream order on CPUs (tests/support/shim.py).

Waits of the host are counted by phase. A change of parameters by a function of DeepSpeed ends versions; a change behind our back gives the
right bits, or stops all ranks before the next optimizer step.
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
import shim
import tiers
import torch
import torch.distributed as dist
from engines import SOURCES, Lab, Model, bits, rank_program
from programs import launch, plain_and_coded
from test_engines_zero3 import ZERO3

from ds_zipccl.comm import CommError
from ds_zipccl.integration.zero import versions
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


def one_by_one(lab: Lab) -> None:
    lab.train_phase(start(lab, zero={"allgather_sequential": True}), 3, "3 steps", {})


def hpz(lab: Lab) -> None:
    lab.train_phase(start(lab, zero={"zero_hpz_partition_size": 2}), 3, "3 steps", {})


def autocast(lab: Lab) -> None:
    """Shards of 32 bits, gathered in 16."""
    options = {"bf16": {"enabled": False}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    engine = start(lab, **options)
    assert all(one.dtype is torch.bfloat16 for one in versions.agreed_of([engine.module.head.weight]))
    lab.train_phase(engine, 3, "3 steps", {})


def frozen(lab: Lab) -> None:
    def groups(model: Model) -> Any:
        model.embedding.requires_grad_(False)
        return [parameter for parameter in model.parameters() if parameter.requires_grad]

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


def set_fp32(lab: Lab) -> None:
    """Parameters of 32 bits, whose shards are the optimizer's own copies."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    engine = start(lab, bf16={"enabled": False})
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


def stopped(lab: Lab, by: Callable[[Any], None]) -> None:
    """A change that is not seen on rank 1, or on all ranks, whose frames do not fit: no rank takes the step."""
    engine = start(lab)
    lab.train_phase(engine, 1, "before", {})
    by(engine)
    assert_no_step(lab, engine)


def assert_no_step(lab: Lab, engine: Any, batches: int = 1) -> None:
    """All ranks stop in the next batches, before a step; the error is the last loss."""
    before = engines.sha256(engine.module)
    with pytest.raises(CommError) as raised:  # the agreement of a coded sum comes first, where there is one
        for _ in range(batches):
            lab.backward(engine)
            engine.step()
    lab.losses.append(str(raised.value))
    assert engines.sha256(engine.module) == before
    lab.ends("after", {})


def direct_write(engine: Any) -> None:
    shard = engine.module.layers[1].weight.ds_tensor
    if dist.get_rank() == 1:
        with torch.no_grad():
            shard.copy_(noise(shard, 5))


def planted(engine: Any) -> None:
    """Versions that no change ends, on all ranks."""
    import deepspeed

    weight = engine.module.layers[1].weight
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions, "forget", lambda params: None)
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            weight.data.copy_(noise(weight.data, 7))


CASES: dict[str, Callable[[Lab], None]] = {
    case.__name__: case
    for case in (trained, one_by_one, autocast, hpz, frozen, edited, set_fp32, checkpoint, skipped, written)
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


STOPPED: dict[str, Callable[[Any], None]] = {"direct write": direct_write, "planted": planted}
#: Refused frames stay known, so that each of these has processes of its own.
ALONE: dict[str, Callable[[Lab], None]] = {
    "read": read,
    **{name: functools.partial(stopped, by=by) for name, by in STOPPED.items()},
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
    "set_fp32": {"set": STEP, "2 steps": (1, 4)},
    "checkpoint": {"another": STEP, "loaded": (0, 2), "trained": STEP},
    "skipped": {"1 step": STEP, "2 skipped": (0, 4), "1 step more": STEP},
    "written": {"before": STEP, "after": STEP},
}
SHORT = ("trained", "edited")
Run = dict[str, list[dict[str, Any]]]


def on_streams(**more: Any) -> dict[str, str]:
    """The environment of coded runs; ``more``: keys of the section."""
    shim.build()
    return {"DS_ZIPCCL": json.dumps(SECTION | more), "BACKEND": shim.NAME}


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """Plain and coded results of those cases on two ranks that were asked for."""
    cases = [name for name in CASES if (name,) in tiers.asked(request, "case")]
    return plain_and_coded(__file__, 2, tmp_path_factory.mktemp("two"), *cases, sources=SOURCES, **on_streams())


def waited(rows: dict[str, Any], name: str) -> int:
    return int(rows[name]["host_waits"]) if name in rows else 0


@pytest.mark.parametrize(
    "case", tiers.mostly_full([name for name in CASES if name != "hpz"], SHORT, "others are alike")
)
def test_agreed_sizes_change_no_bit_and_gathers_do_not_wait(two: tuple[Run, Run], case: str) -> None:
    plain, coded = two
    assert bits(coded[case]) == bits(plain[case])
    for rank in coded[case]:
        found = {phase["phase"]: phase["rows"] for phase in rank["phases"]}
        waits = {phase: (waited(found[phase], GATHERS), waited(found[phase], AGREEMENTS)) for phase in WAITS[case]}
        assert waits == WAITS[case]
        assert all(found[phase][GATHERS]["calls"] for phase in WAITS[case] if phase != "loaded")


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
@pytest.mark.parametrize("case", ALONE)
def test_all_ranks_stop(tmp_path: Path, case: str) -> None:
    run = launch(__file__, 3 if case == "direct write" else 2, tmp_path, case, **on_streams())[case]
    said = [rank["losses"][-1] for rank in run]
    for rank, text in enumerate(said):
        assert "layers.1.weight of group rank" in text and "larger than agreed" in text, f"rank {rank}: {text}"
    if case == "direct write":
        assert all("layers.1.weight of group rank 1 refused" in text for text in said)


if __name__ == "__main__":
    rank_program(CASES | ALONE, os.environ.get("BACKEND"), sizes=SIZES)
