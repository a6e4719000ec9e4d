"""Real DeepSpeed engines with a base for ZeRO-3's gathers: the bits of plain communication, and differences after the first step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tiers
import torch
import torch.distributed as dist
from engines import DIFFERENCE, FIRST, OTHER, Lab, Trained, bits, rank_program, train_each

from ds_zipccl.comm.bases import versions
from ds_zipccl.comm.host import gather
from ds_zipccl.integration.zero import gathers
from ds_zipccl.telemetry import counters

CODED = {
    kind: f'{{"enabled": true, "mode": "always", "reduction": "match", "min_bytes": 4096, "zero3_base": "{kind}"}}'
    for kind in ("host", "device")
}
CODED["auto"] = CODED["host"].replace("always", "auto")
#: All parameters but biases are freed after use, in the forward pass too: the backward pass gathers them again.
ZERO3 = {
    "stage": 3,
    "stage3_param_persistence_threshold": 1000,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 200_000,
}

# ---- cases ---------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulating": {"gradient_accumulation_steps": 4},
    "overlap": {"zero": {"overlap_comm": True}},
    "one by one": {"zero": {"allgather_sequential": True}},
    "offload": {
        "zero": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
    },
    "all reduced": {"zero": {"reduce_scatter": False}},
    "hpz": {"zero": {"zero_hpz_partition_size": 2}},
}


def start(lab: Lab, name: str = "plain", **more: Any) -> Any:
    settings = SETTINGS[name]
    return lab.engine(**more, **{**settings, "zero": {**ZERO3, **settings.get("zero", {})}})


def steps(lab: Lab, name: str) -> None:
    engine = start(lab, name)
    lab.train(
        engine, 2
    )  # the first step gathers biases with the weights of their layers; biases stay, so later steps gather weights only
    lab.ends(
        "first", [FIRST] if name == "hpz" else [DIFFERENCE, FIRST]
    )  # hpZ's backward passes gather by its own shards
    lab.train_phase(engine, 3, "later", [DIFFERENCE])


def edited(lab: Lab) -> None:
    """Weights are edited as DeepSpeed's users do it: all ranks still hold the same base."""
    import deepspeed

    engine = start(lab)
    lab.train_phase(engine, 2, "before", [DIFFERENCE, FIRST])
    weights = [engine.module.head.weight, *(layer.weight for layer in engine.module.layers)]
    with deepspeed.zero.GatheredParameters(weights, modifier_rank=0):
        if lab.rank == 0:
            for weight in weights:
                weight.data.mul_(0.5)
    lab.train_phase(engine, 2, "after", [DIFFERENCE])


def checkpoint(lab: Lab) -> None:
    """The same engine loads an earlier state; a new engine goes on from there."""
    engine = start(lab)
    lab.train(engine, 2)
    engine.save_checkpoint(lab.folder / "saved", tag="two")
    lab.train_phase(engine, 2, "trained", [DIFFERENCE, FIRST])
    engine.load_checkpoint(lab.folder / "saved", tag="two")
    lab.train_phase(engine, 1, "loaded", [DIFFERENCE])
    other = start(lab, seed=2)
    other.load_checkpoint(lab.folder / "saved", tag="two")
    lab.train_phase(other, 2, "resumed in a new engine", [DIFFERENCE, FIRST])


def several_engines(lab: Lab) -> None:
    """Two engines step in turn, then one after the other: the memory goes with the engine."""
    first, second = start(lab), start(lab, seed=2)
    for engine in (first, second, first, second, second, first):
        lab.train(engine)
    lab.ends("in turn", [DIFFERENCE, FIRST])
    lab.train_phase(second, 1, "later", [DIFFERENCE])
    both = counters.memory().get("copies of gathered parameters", 0)
    del first, second, engine
    lab.destroy()
    lab.train_phase(start(lab, seed=3), 2, "new", [DIFFERENCE, FIRST])
    assert 2 * counters.memory().get("copies of gathered parameters", 0) == both


def made_anew(lab: Lab) -> None:
    """Engines come and go while schedules compete: ranks must agree, whatever memory the new engines find."""
    for seed in range(6):
        engine = start(lab, seed=seed)
        lab.train_phase(engine, 4, f"engine {seed}", [])
        del engine
        lab.destroy()


def overflow(lab: Lab) -> None:
    """One rank has an infinite loss at one step: every rank skips the step, and the next gathers find unchanged parameters."""
    engine = start(lab)
    lab.train_phase(engine, 2, "before", [DIFFERENCE, FIRST])
    for turn in range(2):
        lab.train(engine, scale=math.inf if lab.rank == turn else 1.0)
    lab.ends("skipped", [DIFFERENCE])
    lab.train_phase(engine, 2, "after", [DIFFERENCE])
    assert engine.skipped_steps == 2


def evaluated(lab: Lab) -> None:
    """Forward passes between steps, without a backward pass and in another order of layers, gather parameters in other combinations."""
    engine = start(lab)
    lab.train_phase(engine, 2, "before", [DIFFERENCE, FIRST])
    engine.eval()
    with torch.no_grad():
        for _ in range(2):
            lab.losses.append(engine(torch.arange(32).view(2, 16)).item().hex())
    engine.train()
    lab.ends("evaluated", [DIFFERENCE])
    lab.train_phase(engine, 2, "after", [DIFFERENCE])


def stale(lab: Lab, *, proven: bool) -> None:
    """One rank's copy of another rank's shard differs in a bit: the shard goes in full, or not where all hashes are planted as equal."""
    engine = start(lab)
    lab.train_phase(engine, 2, "before", [DIFFERENCE, FIRST])
    if lab.rank == 1 and (base := gathers.slot_of(engine.module.head.weight)) is not None:
        sign = -(1 << 15)  # no rounding hides a wrong sign, and no decoder sees it
        base.memory[0, 3].view(torch.int16).bitwise_xor_(sign)
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if not proven:
            for module in (gather, versions):
                patch.setattr(module, "region_hash", lambda region: bytes(16))
        lab.train_phase(engine, 1, "after", [DIFFERENCE, OTHER] if proven and lab.rank == 0 else [DIFFERENCE])
        lab.train_phase(engine, 1, "later", [DIFFERENCE])


CASES: dict[str, Callable[[Lab], None]] = {name: functools.partial(steps, name=name) for name in SETTINGS}
CASES |= {case.__name__: case for case in (edited, checkpoint, several_engines, overflow, evaluated)}
STALE, UNPROVEN = "stale", "stale, unproven"
CASES["made_anew"] = made_anew
CASES |= {STALE: functools.partial(stale, proven=True), UNPROVEN: functools.partial(stale, proven=False)}

#: (ranks, place of the base, case). The ranks of a node share "host" memory, including planted edits.
RUN = [
    (2, kind, name)
    for kind in ("host", "device")
    for name in CASES
    if name not in ("hpz", "made_anew") and (kind, name[:5]) != ("host", STALE)
]
RUN += [(4, "host", "plain"), (4, "host", "hpz")]  # in this order: hpZ's groups stay

#: In mode auto measurements decide which shards go as differences.
RUN_AUTO = [(2, "auto", name) for name in ("several_engines", "made_anew")]
#: Those of the short tier; tests without parameters need some of them.
SHORT = [(2, "host", name) for name in ("plain", "accumulating", "edited", "checkpoint")]
SHORT += [(2, "device", name) for name in ("plain", "overflow", STALE, UNPROVEN)]

# ---- tests ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    run = tiers.asked(request, "ranks", "kind", "case") | ({*SHORT} if tiers.without_parameters(request) else set())
    runs = [one for one in sorted(RUN + RUN_AUTO, key=lambda one: one[0]) if one in run]
    return train_each(__file__, tmp_path_factory.mktemp, runs, CODED)


def some(runs: Sequence[tuple[int, str, str]]) -> list[Any]:
    return tiers.mostly_full(runs, [run for run in SHORT if run in runs], "the others are alike")


@pytest.mark.parametrize(("ranks", "kind", "case"), some([run for run in RUN + RUN_AUTO if run[2] != UNPROVEN]))
def test_plain_and_coded_agree(trained: Trained, ranks: int, kind: str, case: str) -> None:
    assert bits(trained(ranks, kind, case)) == bits(trained(ranks, "off", case))


@pytest.mark.parametrize(("ranks", "kind", "case"), some(RUN))
def test_differences_after_the_first_gather(trained: Trained, ranks: int, kind: str, case: str) -> None:
    for rank, found in enumerate(trained(ranks, kind, case)):
        for phase in found["phases"]:
            assert phase["expected"] == sorted(phase["differences"]), f"rank {rank}, phase {phase['phase']}"


def test_differences_are_small(trained: Trained) -> None:
    for name, least in (("plain", 4), ("accumulating", 16)):
        for rank in trained(2, "host", name):
            assert rank["phases"][1]["ratio"] > least, name


def test_an_unproven_base_shows(trained: Trained) -> None:
    """Negative proof: without the hashes one wrong bit on one rank changes losses and weights, and these tests fail."""
    plain, wrong = ([rank["phases"] for rank in trained(2, kind, UNPROVEN)] for kind in ("off", "device"))
    shas = [[[phase["sha256"] for phase in phases] for phases in run] for run in (plain, wrong)]
    assert [first[0] for first in shas[0]] == [first[0] for first in shas[1]]
    assert any(right[1:] != found[1:] for right, found in zip(*shas, strict=True))


if __name__ == "__main__":
    rank_program(CASES)
