"""Real DeepSpeed engines with difference coding of the parameter gather, by ZeRO-1 and ZeRO-2, and by ZeRO-3 with a base for its gathers.

In every situation training has the bits of plain communication, and a shard goes as a difference exactly where all ranks still hold the
parameters of the last gather.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tiers
import torch
import torch.distributed as dist
from engines import DIFFERENCE, FIRST, OTHER, ZERO3, Lab, Model, Trained, bits, rank_program, slot_of, train_each

from ds_zipccl.comm.host import cached, gather
from ds_zipccl.telemetry import counters

CODED, HOST, DEVICE, OFF = "coded", "host", "device", "off"
#: Sections of the coded runs; the last two are for ZeRO-3.
SECTIONS = {CODED: '{"enabled": true, "mode": "always", "reduction": "match", "min_bytes": 4096}'}
SECTIONS |= {kind: SECTIONS[CODED].replace("}", f', "zero3_base": "{kind}"}}') for kind in (HOST, DEVICE)}

# ---- cases of all stages -------------------------------------------------------------------------------------------

STAGE1 = {"zero": {"stage": 1}}
#: Settings whose gathers are alike: the first in full, every later one a difference.
SETTINGS: dict[str, dict[str, Any]] = {
    "zero1": STAGE1,
    "zero2": {},
    "zero1 accumulating": STAGE1 | {"gradient_accumulation_steps": 4},
    "zero2 accumulating": {"gradient_accumulation_steps": 4},
    "bf16 optimizer": STAGE1 | {"data_types": {"grad_accum_dtype": "fp32"}},
    # Without the last key DeepSpeed would compile its own Adam for the CPU now.
    "offload": {"zero": {"offload_optimizer": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": False},
    "overlap": {"zero": {"overlap_comm": True}},
    "round robin": {"zero": {"round_robin_gradients": True}},
    "many buckets": {"zero": {"reduce_bucket_size": 20_000, "overlap_comm": True, "round_robin_gradients": True}},
    "fp32 gradients": STAGE1 | {"communication_data_type": "fp32"},
}
SETTINGS3: dict[str, dict[str, Any]] = {
    "zero3 plain": {},
    "zero3 accumulating": {"gradient_accumulation_steps": 4},
    "zero3 all reduced": {"zero": {"reduce_scatter": False}},
    "zero3 hpz": {"zero": {"zero_hpz_partition_size": 2}},
}


def start(lab: Lab, name: str = "zero3 plain", **more: Any) -> Any:
    settings = (SETTINGS | SETTINGS3)[name]
    return lab.engine(**more, **settings | {"zero": (ZERO3 if name in SETTINGS3 else {}) | settings.get("zero", {})})


def plain_steps(lab: Lab, name: str) -> None:
    engine = start(lab, name)
    assert (type(engine.optimizer).__name__ == "BF16_Optimizer") == (name == "bf16 optimizer")
    lab.train_phase(engine, 1, "first", {FIRST: 1})
    lab.train_phase(engine, 3, "later", {DIFFERENCE: 3})


def groups(model: Model) -> list[dict[str, Any]]:
    """Return decayed weights, weights with a higher rate, and biases, whose shards are too small for differences."""
    return [
        {"params": [layer.weight for layer in model.layers], "weight_decay": 0.1},
        {"params": [model.embedding.weight, model.head.weight], "lr": 3e-3},
        {"params": [layer.bias for layer in model.layers]},
    ]


def parameter_groups(lab: Lab, name: str) -> None:
    engine = start(lab, name, groups=groups)
    for steps, expected in ((1, {FIRST: 2}), (2, {DIFFERENCE: 4})):
        lab.train_phase(engine, steps, f"{steps} steps", expected)


def whole(engine: Any) -> torch.Tensor:
    """Return this rank's copy of all parameters, the output of the gather."""
    (flat,) = getattr(engine.optimizer, "bf16_groups_flat", None) or engine.optimizer.bit16_groups_flat
    return flat.detach()


def checkpoint(lab: Lab, name: str) -> None:
    """The same engine loads an earlier state, then the present one; a new engine goes on from there."""
    engine = start(lab, name)
    lab.train(engine, 2)
    engine.save_checkpoint(lab.folder / "saved", tag="two")
    lab.train_phase(engine, 2, "trained", {FIRST: 1, DIFFERENCE: 3})
    engine.load_checkpoint(lab.folder / "saved", tag="two")
    lab.ends("loaded", {})
    lab.train_phase(engine, 1, "after an earlier state", {OTHER: 1})
    lab.train(engine)
    engine.save_checkpoint(lab.folder / "saved", tag="four")
    engine.load_checkpoint(lab.folder / "saved", tag="four")
    lab.train_phase(engine, 1, "after the present state", {DIFFERENCE: 2})
    other = start(lab, name, seed=2)
    other.load_checkpoint(lab.folder / "saved", tag="four")
    lab.ends("loaded into a new engine", {})
    lab.train_phase(other, 2, "resumed there", {FIRST: 1, DIFFERENCE: 1})


def several_engines(lab: Lab, *names: str) -> None:
    """Two engines step in turn. Then engines follow each other. Memory for bases goes with its engine, and later ones may get it."""
    first, second = (start(lab, name, seed=seed) for seed, name in enumerate(names, 1))
    for engine in (first, second, first, second, second, first):
        lab.train(engine)
    lab.ends("in turn", {FIRST: 2, DIFFERENCE: 4})
    both = counters.memory().get("copies of gathered parameters", 0)
    del first, second, engine  # references would keep their memory
    for turn in range(3):
        lab.destroy()
        lab.train_phase(start(lab, names[0], seed=3), 3, f"new {turn}", {FIRST: 1, DIFFERENCE: 2})
        assert 2 * counters.memory().get("copies of gathered parameters", 0) == both


def beside_zero3(lab: Lab) -> None:
    """A ZeRO-3 engine beside the first: its gathers go into new memory and never as differences."""
    zero3 = lab.engine(seed=2, zero={"stage": 3, "stage3_param_persistence_threshold": 0})
    zero2 = lab.engine()
    for expected in ({FIRST: 1}, {DIFFERENCE: 1}, {DIFFERENCE: 1}):
        lab.train_phase(zero2, 1, "ZeRO-2", expected)
        lab.train_phase(zero3, 1, "ZeRO-3", {})
    lab.engine(seed=3, zero={"stage": 0})
    lab.train_phase(zero2, 1, "ZeRO-2 beside a later engine without ZeRO", {DIFFERENCE: 1})


def without_gradients(lab: Lab, name: str) -> None:
    """Batches without a step gather nothing. Steps without gradients, before Adam has momentum, gather unchanged parameters."""
    engine = start(lab, name)
    lab.train(engine, scale=0.0)
    lab.ends("in full", {FIRST: 1})
    lab.train(engine, 2, scale=0.0)
    lab.ends("the same again", {DIFFERENCE: 2})
    lab.train_phase(engine, 1, "moved", {DIFFERENCE: 1})
    for _ in range(2):
        lab.backward(engine)
        engine.zero_grad()
        engine.optimizer.zero_grad()
    lab.ends("zero_grad only", {})
    lab.train(engine)
    lab.train(engine, scale=0.0)
    lab.ends("moved by momentum", {DIFFERENCE: 2})


def overflow(lab: Lab, name: str) -> None:
    """One rank has an infinite loss at one step: every rank skips the step and its gather."""
    engine = start(lab, name)
    lab.train_phase(engine, 2, "before", {FIRST: 1, DIFFERENCE: 1})
    for turn in range(2):
        lab.train(engine, scale=math.inf if lab.rank == turn else 1.0)
    lab.ends("skipped", {})
    lab.train_phase(engine, 2, "after", {DIFFERENCE: 2})
    assert engine.skipped_steps == 2 and engine.global_steps == 6


def out_of_step(lab: Lab, name: str) -> None:
    """The last rank restores its parameters of two gathers ago: all ranks agree on its own shard only."""
    engine = start(lab, name)
    lab.train(engine)
    before = whole(engine).clone()
    lab.train_phase(engine, 2, "before", {FIRST: 1, DIFFERENCE: 2})
    last = lab.rank == lab.ranks - 1
    if last:
        whole(engine).copy_(before)
    lab.train_phase(engine, 1, "after", {DIFFERENCE: 1} if last else {OTHER: 1})
    lab.train_phase(engine, 1, "later", {DIFFERENCE: 1})
    if last:  # DeepSpeed overwrites it from its own weights before the gather
        whole(engine).chunk(lab.ranks)[lab.rank].zero_()
    lab.train_phase(engine, 1, "own shard edited", {DIFFERENCE: 1})


def edited_by_all(lab: Lab, name: str) -> None:
    """Every rank edits all parameters through the module. The next step loses the edit, or the optimizer's refreshed weights keep it."""
    engine = start(lab, name)
    lab.train_phase(engine, 2, "before", {FIRST: 1, DIFFERENCE: 1})
    for keep in (False, True):
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.data.mul_(0.875)
        if keep:
            engine.optimizer.refresh_fp32_params()
        lab.train_phase(engine, 1, f"edited, {keep=}", {OTHER: 1})
        lab.train_phase(engine, 1, f"later, {keep=}", {DIFFERENCE: 1})
    engine.optimizer.update_lp_params()  # a gather outside of a step goes without a base
    lab.ends("gathered again", {})


def one_bit(lab: Lab, name: str, *, proven: bool) -> None:
    """One rank's copy of another rank's shard differs in a bit: the shard goes in full, or not where all hashes are planted as equal."""
    engine, dense = start(lab, name), name in SETTINGS
    lab.train_phase(engine, 2, "before", {FIRST: 1, DIFFERENCE: 1})
    slot = None if dense else slot_of(engine.module.head.weight)
    if lab.rank == 1 and (dense or slot is not None):
        copy = whole(engine) if slot is None else slot.memory[0]
        copy[1000].view(torch.int16).bitwise_xor_(-(1 << 15))  # no rounding hides a wrong sign, no decoder sees it
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        for module in () if proven else (gather, cached):
            patch.setattr(module, "region_hash", lambda *given: b"an equal hash...")
        found = {OTHER: 1} if dense else {DIFFERENCE: 1, OTHER: 1}
        lab.train_phase(engine, 1, "after", found if proven and lab.rank == 0 else {DIFFERENCE: 1})
        lab.train_phase(engine, 1, "later", {DIFFERENCE: 1})


# ---- cases of ZeRO-3: outcomes without counts. test_bases_of_engines.py has the ways by which parameters change ---------


def steps(lab: Lab, name: str) -> None:
    engine = start(lab, name)
    # the first step gathers biases with the weights of their layers; biases stay, so later steps gather weights only
    lab.train(engine, 2)
    # hpZ's backward passes gather by its own shards
    lab.ends("first", {FIRST: 1} if name == "zero3 hpz" else {FIRST: 1, DIFFERENCE: 1})
    lab.train_phase(engine, 3, "later", {DIFFERENCE: 1})


DENSE: dict[str, Callable[[Lab], None]] = {name: functools.partial(plain_steps, name=name) for name in SETTINGS}
DENSE |= {
    f"{case.__name__} {name}": functools.partial(case, name=name)
    for number, case in enumerate(
        (parameter_groups, checkpoint, without_gradients, overflow, out_of_step, edited_by_all)
    )
    for name in (
        "zero2",
        "bf16 optimizer",
        ("zero1", "offload")[number % 2],
    )  # these two by the class of optimizer of ZeRO-2
}
DENSE |= {
    "several engines": lambda lab: several_engines(lab, "zero2", "zero1"),
    "beside ZeRO-3": beside_zero3,
    "one bit": functools.partial(one_bit, name="zero2", proven=True),
    "one bit, unproven": functools.partial(one_bit, name="zero2", proven=False),
}
ZERO3_CASES: dict[str, Callable[[Lab], None]] = {name: functools.partial(steps, name=name) for name in SETTINGS3}
ZERO3_CASES |= {
    "zero3 stale": functools.partial(one_bit, name="zero3 plain", proven=True),
    "zero3 stale, unproven": functools.partial(one_bit, name="zero3 plain", proven=False),
}
CASES = DENSE | ZERO3_CASES
#: Negative proofs.
UNPROVEN = [(CODED, "one bit, unproven"), (DEVICE, "zero3 stale, unproven")]

#: (ranks, kind, case). The ranks of a node share memory of the "host", including planted edits. hpZ's groups stay for later engines.
RUN = [(2, CODED, name) for name in DENSE] + [(3, CODED, name) for name in ("zero2", "out_of_step zero2", "one bit")]
RUN += [(2, DEVICE, name) for name in ZERO3_CASES if name != "zero3 hpz"]
RUN += [(2, HOST, name) for _, kind, name in RUN if kind == DEVICE and "stale" not in name]
RUN += [(4, HOST, "zero3 plain"), (4, HOST, "zero3 hpz")]
#: One of each kind; tests without parameters need some of them.
SHORT = [(2, CODED, name) for name in (
    "zero1", "zero2", "bf16 optimizer", "many buckets", "checkpoint zero2", "without_gradients zero2", "overflow zero2",
    "out_of_step zero2", "edited_by_all zero2", "several engines", "one bit", "one bit, unproven",
)]  # fmt: skip
SHORT += [(2, HOST, f"zero3 {name}") for name in ("plain", "accumulating")]
SHORT += [(2, DEVICE, f"zero3 {name}") for name in ("plain", "stale", "stale, unproven")]

# ---- tests ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    run = tiers.asked(request, "ranks", "kind", "case") | ({*SHORT} if tiers.without_parameters(request) else set())
    runs = [one for one in sorted(RUN, key=lambda one: one[0]) if one in run]
    return train_each(__file__, tmp_path_factory.mktemp, runs, SECTIONS)


def some(runs: Sequence[tuple[int, str, str]]) -> Any:
    values = tiers.mostly_full(runs, [run for run in SHORT if run in runs], "the others are alike")
    return pytest.mark.parametrize(("ranks", "kind", "case"), values)


@some([run for run in RUN if run[1:] not in UNPROVEN])
def test_plain_and_coded_agree(trained: Trained, ranks: int, kind: str, case: str) -> None:
    assert bits(trained(ranks, kind, case)) == bits(trained(ranks, OFF, case))


@some(RUN)
def test_a_difference_exactly_where_the_base_is_shared(trained: Trained, ranks: int, kind: str, case: str) -> None:
    for rank, found in enumerate(trained(ranks, kind, case)):
        for phase in found["phases"]:
            expected, outcomes = phase["expected"], phase["differences"]
            if case in ZERO3_CASES:
                expected, outcomes = set(expected), set(outcomes)
            assert expected == outcomes, f"rank {rank}, phase {phase['phase']}"


@some([run for run in RUN if run[1] == CODED])
def test_training_moves(trained: Trained, ranks: int, kind: str, case: str) -> None:
    """Equal bits prove something only if losses and parameters change, and if plain runs are plain."""
    for rank in trained(ranks, OFF, case):
        assert all(math.isfinite(float.fromhex(loss)) for loss in rank["losses"])
        assert len(set(rank["losses"])) == len(rank["losses"])
        assert len({tuple(phase["sha256"]) for phase in rank["phases"]}) > 1
        assert not any(phase["differences"] for phase in rank["phases"])


def test_differences_are_small(trained: Trained) -> None:
    for rank in trained(2, CODED, "zero2"):
        first, later = rank["phases"]
        assert later["ratio"] > 1.8 * first["ratio"] > 2.5
    for rank in trained(2, CODED, "without_gradients zero2"):
        assert {phase["phase"]: phase["ratio"] for phase in rank["phases"]}["the same again"] > 100
    for name, least in (("zero3 plain", 4), ("zero3 accumulating", 16)):
        for rank in trained(2, HOST, name):
            assert rank["phases"][1]["ratio"] > least, name


def test_an_unproven_base_shows(trained: Trained) -> None:
    """Negative proof: without the hashes one wrong bit on one rank changes the parameters, and these tests fail."""
    assert bits(trained(2, OFF, "one bit, unproven")) == bits(trained(2, OFF, "one bit"))
    for kind, case in UNPROVEN:
        plain, wrong = ([rank["phases"] for rank in trained(2, one, case)] for one in (OFF, kind))
        shas = [[[phase["sha256"] for phase in phases] for phases in run] for run in (plain, wrong)]
        assert [first[0] for first in shas[0]] == [first[0] for first in shas[1]], case
        assert any(right[1:] != found[1:] for right, found in zip(*shas, strict=True)), case


if __name__ == "__main__":
    rank_program(CASES)
