"""Real ZeRO-3 engines with frozen parameters: the bits of plain communication, no frames from the second step on, and no unseen edit."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from engines import BATCH, CONTEXT, FIRST, SOURCES, ZERO3, Lab, Model, bits, digest, rank_program, slot_of
from programs import launch, plain_and_coded, reference
from tiers import mostly_full

from ds_zipccl.comm import topology, work
from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.host import cached
from ds_zipccl.comm.host import gather as host_gather
from ds_zipccl.telemetry import counters

#: (zero3_base, mode) of the runs. With auto frozen parameters have bases, otherwise all parameters have.
RUNS = {
    "auto": ("auto", "always"),
    "all": ("device", "always"),
    "by node": ("host", "always"),
    "by time": ("host", "auto"),
}
MISS = cached.CHANGED


class Frozen(Model):
    """A model whose biases are trained, which stay gathered."""

    def __init__(self, *more: str) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith("bias") or name.startswith(more or "nothing"))


#: The head is trained too. DeepSpeed gathers it together with frozen layers.
Mixed = functools.partial(Frozen, "head")


def trained(model: Model) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def start(lab: Lab, make: Callable[[], Model] = Frozen, **more: Any) -> Any:
    return lab.engine(make=make, groups=trained, zero={**ZERO3, **more.pop("zero", {})}, **more)


def ends(lab: Lab, phase: str, *misses: str) -> None:
    """End a phase in which no frozen parameter was sent, but after ``misses``, of any rank."""
    rows = {row["op"]: row for row in counters.rows() if row["role"] == "zero_param"}
    sent = rows["all_gather_into_tensor"]["wire_bytes"] if rows else 0
    messages = rows["agreement"]["wire_bytes"] if "agreement" in rows else 0
    lab.ends(phase, sorted(misses))
    lab.phases[-1] |= {"sent": sent, "messages": messages} | bases(lab.engines[0])


def bases(engine: Any) -> dict[str, Any]:
    """The parameters that have a base and those that should, as nothing trains them and they are not always gathered; and their bytes."""
    named = list(engine.module.named_parameters())
    trains = hasattr(engine.optimizer, "step")
    free = [(name, one) for name, one in named if not (one.requires_grad and trains) and not one.ds_persist]
    return {
        "held": [name for name, one in named if slot_of(one) is not None],
        "frozen": [name for name, _ in free],
        "memory": counters.memory().get("copies of gathered parameters", 0),
        "bytes": sum(one.ds_numel * one.ds_tensor.element_size() for _, one in free),
    }


def train(lab: Lab, engine: Any, steps: int, *phase: str) -> None:
    """Take steps, and end a phase."""
    lab.train(engine, steps)
    ends(lab, *phase)


def plain(lab: Lab, make: Callable[[], Model] = Frozen, **more: Any) -> None:
    engine = start(lab, make, **more)
    train(lab, engine, 1, "first", FIRST)
    train(lab, engine, 3, "later")


def inference(lab: Lab, ends: Callable[..., None] = ends) -> None:
    """An engine without an optimizer: no parameter is marked as frozen, and none is ever trained."""
    import deepspeed

    torch.manual_seed(1)
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {**ZERO3}}
    engine, *_ = deepspeed.initialize(model=Model(), config=config)
    lab.engines.append(engine)
    engine.eval()
    with torch.no_grad():
        for phase in ("first", "later"):
            for _ in range(3):
                lab.losses.append(engine(torch.arange(32).view(2, 16)).item().hex())
            ends(lab, phase, *[FIRST] * (phase == "first"))


#: Changes of a frozen shard by one rank, behind DeepSpeed's back.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "by data": lambda shard: shard.data[-3:].fill_(1.5),
    "by copy": lambda shard: shard.copy_(0.5 * shard),
    "one bit": lambda shard: shard.data.view(torch.int16)[-1:].bitwise_xor_(1),
    "by numpy": lambda shard: shard.data.view(torch.int16).numpy()[:100].fill(0x3C00),
    "other memory": lambda shard: setattr(shard, "data", -0.5 * shard.detach()),
}


def edited(lab: Lab) -> None:
    """Frozen tensors are edited between steps: behind DeepSpeed's back on one rank or on all, and by its functions."""
    import deepspeed

    engine = start(lab)
    weights = [layer.weight for layer in engine.module.layers]
    for layer in engine.module.layers:  # a changed bit may change no loss
        layer.register_forward_pre_hook(lambda layer, *given: lab.losses.append(digest([layer.weight.data])))
    train(lab, engine, 2, "before", FIRST)
    for number, (name, change) in enumerate(CHANGES.items()):
        shard = weights[number % 3].ds_tensor
        version = shard._version
        if lab.rank == number % 2:
            with torch.no_grad():
                change(shard)
        assert shard._version == version or name == "by copy", "or a counter would tell"
        train(lab, engine, 1, name, MISS)
    weights[2].ds_tensor.data = weights[2].ds_tensor.data.clone().mul_(-1)
    train(lab, engine, 1, "by all", MISS)
    for _ in range(2 if lab.rank else 0):
        CHANGES["one bit"](weights[1].ds_tensor)
    train(lab, engine, 1, "and back")
    for sign in (1, -1):  # an adapter is merged, used and unmerged
        with deepspeed.zero.GatheredParameters(weights, modifier_rank=0):
            if lab.rank == 0:
                for weight in weights:
                    weight.data.add_(sign * torch.eye(len(weight), dtype=weight.dtype))
        lab.train(engine)
        with torch.no_grad():
            lab.losses.append(engine(torch.arange(BATCH * CONTEXT).view(BATCH, CONTEXT)).item().hex())
    train(lab, engine, 1, "merged", "sends")
    with deepspeed.zero.GatheredParameters(weights):
        lab.losses.append(str(sum(weight.double().sum().item() for weight in weights)))
        weights[0].data.fill_(7.0)  # plain DeepSpeed forgets it
    train(lab, engine, 1, "read")


def checkpoint(lab: Lab) -> None:
    """Frozen weights are changed, and an earlier state is loaded into them, by the same engine and by a new one."""
    import deepspeed

    engine = start(lab)
    lab.train(engine, 2)
    engine.save_checkpoint(lab.folder / "saved", tag="two")
    with deepspeed.zero.GatheredParameters(list(engine.module.layers.parameters()), modifier_rank=0):
        if lab.rank == 0:
            engine.module.layers[1].weight.data.zero_()
    train(lab, engine, 2, "changed", FIRST, "sends")
    engine.load_checkpoint(lab.folder / "saved", tag="two")
    train(lab, engine, 2, "loaded", "sends")
    other = start(lab, seed=2)
    other.load_checkpoint(lab.folder / "saved", tag="two")
    train(lab, other, 2, "resumed in a new engine", FIRST, "sends")


def several_engines(lab: Lab) -> None:
    """Engines step in turn; one is destroyed; the layers of its module are trained by a new engine."""
    first, second = start(lab), start(lab, Mixed, seed=2)
    for engine in (first, second, first, second, second, first):
        lab.train(engine)
    ends(lab, "in turn", FIRST, "sends")
    first.destroy()
    lab.train(second)
    module = first.module
    module.layers.requires_grad_(True)
    third = start(lab, lambda: module)
    lab.train(third, 3)
    train(lab, second, 1, "unfrozen", "sends")


def unwaited(lab: Lab) -> None:
    """Weights are gathered where DeepSpeed waits for none of several gathers; up to 0.19.7 it waits for the last one alone."""
    import deepspeed

    engine, gather, run = start(lab), deepspeed.comm.all_gather_into_tensor, work.Work._run
    lab.train(engine)

    def lazy(*args: Any, **kwargs: Any) -> Any:
        return mock.Mock() if gather(*args, **kwargs) is not None else None

    def slow(handle: Any, job: Callable[[], None]) -> None:
        time.sleep(0.1)
        run(handle, job)

    weights = [layer.weight for layer in engine.module.layers]
    for weight in weights:  # or nothing is sent
        weight.ds_tensor.data.mul_(1 + lab.rank)
    with contextlib.ExitStack() as patches:
        if os.environ["DS_ZIPCCL"] != "0":
            patches.enter_context(mock.patch.object(deepspeed.comm, "all_gather_into_tensor", lazy))
            patches.enter_context(mock.patch.object(work.Work, "_run", slow))
        with deepspeed.zero.GatheredParameters(weights):
            lab.losses.append(digest([weight.data for weight in weights]))


CASES: dict[str, Callable[[Lab], None]] = {
    "plain": plain,
    "mixed": functools.partial(plain, make=Mixed),
    "none": lambda lab: train(lab, start(lab, Model), 2, "2 steps", "sends"),
    "inference": inference,
    "accumulating": functools.partial(plain, make=Mixed, gradient_accumulation_steps=3),
    "overlap": functools.partial(plain, zero={"overlap_comm": True}),
    "one by one": functools.partial(plain, zero={"allgather_sequential": True}),
    "offload": functools.partial(
        plain,
        zero={"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        zero_force_ds_cpu_optimizer=False,
    ),
    "edited": edited,
    "checkpoint": checkpoint,
    "several engines": several_engines,
    "unwaited": unwaited,
}
HPZ = functools.partial(plain, zero={"zero_hpz_partition_size": 2})


def by_node(lab: Lab) -> None:
    """Two nodes of two ranks: DeepSpeed's secondary shards, and our bases, are those of a node."""
    topology.here = lambda: f"node {lab.rank // 2}"
    HPZ(lab)
    slot = slot_of(lab.engines[0].module.layers[0].weight)
    lab.losses.append("" if slot is None else f"{slot.node_ranks}")


def in_a_step(lab: Lab, when: str) -> None:
    """Rank 1 writes to a shard, between a forward and its backward pass or for one batch in the middle of a step."""
    zero = {"stage3_prefetch_bucket_size": 0}  # plain DeepSpeed would read a shard while the program writes
    engine = start(lab, gradient_accumulation_steps=2, zero=zero)
    lab.train(engine, 1)
    lab.backward(engine)
    engine.step()

    def write(scale: float) -> None:
        if lab.rank == 1:
            engine.module.layers[1].weight.ds_tensor.data.mul_(scale)

    if when == "for a batch":
        write(0.5)
        lab.backward(engine)
        write(2.0)
    else:
        loss = engine(torch.arange(BATCH * CONTEXT).view(BATCH, CONTEXT))
        lab.losses.append(loss.item().hex())
        write(0.5)
        engine.backward(loss)
    engine.step()
    ends(lab, "changed", MISS, "sends")


CASES |= {when: functools.partial(in_a_step, when=when) for when in ("for a batch", "in a batch")}
PROGRAMS = CASES | {"hpz": HPZ, "hpz by node": by_node}

# ---- planted mistakes ----------------------------------------------------------------------------------------------

_gather = host_gather.gather_differences


def blind_gather(ctx: Any, own: torch.Tensor, places: Any, base: Any) -> None:
    """A gather with a base that claims that no word has ever changed."""
    buffers = PooledBuffers()
    last = base.begin(ctx, places, buffers)
    if last is None:
        _gather(ctx, own, places, base)
    else:
        places[ctx.rank].copy_(last)
        counters.record_difference(ctx.role, ctx.op, "")
    buffers.release()


#: Each makes a frozen weight that has changed look unchanged, to the question or to gathers by messages.
MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "questions": (cached, "same_bits", lambda *tensors: True),
    "gathers": (host_gather, "gather_differences", blind_gather),
}

# ---- tests ---------------------------------------------------------------------------------------------------------


def section(run: str) -> str:
    base, mode = RUNS[run]
    return f'{{"enabled": true, "mode": "{mode}", "min_bytes": 4096, "reduction": "match", "zero3_base": "{base}"}}'


SOME = ("none", "mixed", "edited", "in a batch")
#: (run, cases). The runs differ in the parameters that have bases, and in the schedules.
GROUPS = {
    "auto": ("auto", SOME),
    "auto, more": ("auto", tuple(name for name in CASES if name not in SOME)),
    "all": ("all", SOME),
    "by time": ("by time", SOME),
}


@pytest.mark.parametrize("name", mostly_full(GROUPS, ["auto"], "more settings, more events"))
def test_frozen_parameters_change_no_bit_and_send_nothing(tmp_path: Any, name: str) -> None:
    run, cases = GROUPS[name]
    wanted, coded = plain_and_coded(__file__, 2, tmp_path, *cases, sources=SOURCES, DS_ZIPCCL=section(run))
    for case in cases:
        assert bits(coded[case]) == bits(wanted[case]), case
        for number, phase in enumerate(coded[case][0]["phases"]) if run == "auto" else ():
            check(case, phase, [rank["phases"][number] for rank in coded[case]])


def check(case: str, phase: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """Nothing is sent where nothing was changed; every miss is named; proofs are small."""
    where = f"{case}, {phase['phase']}: {phase}"
    assert all(rank["messages"] < 20_000 for rank in ranks), where
    if case in ("plain", "mixed", "none", "inference"):
        assert all(rank["held"] == rank["frozen"] and rank["memory"] == rank["bytes"] for rank in ranks), where
    for why in phase["expected"]:
        assert why == "sends" or any(why in rank["differences"] for rank in ranks), where
    if not phase["expected"]:
        assert all(rank["differences"].keys() <= {""} for rank in ranks), where
        assert all(rank["sent"] == 0 for rank in ranks) or case in ("mixed", "accumulating"), where


@pytest.mark.full(reason="more launches; the short tier has edits between steps")
def test_a_write_changes_no_bit_unless_a_mistake_is_planted(tmp_path: Path) -> None:
    folders = {name: tmp_path / (name or "none") for name in ("plain", "", *MISTAKES)}
    for folder in folders.values():
        folder.mkdir()
    cases = ("edited", "for a batch", "in a batch")
    wanted = reference(__file__, 2, folders.pop("plain"), *cases, sources=SOURCES)
    for mistake, folder in folders.items():
        coded = launch(__file__, 2, folder, *cases, DS_ZIPCCL=section("auto"), MISTAKE=mistake)
        for case in cases:
            assert (bits(coded[case]) == bits(wanted[case])) == (not mistake), f"{case}, mistake: {mistake}"


@pytest.mark.full(reason="four ranks")
@pytest.mark.parametrize(("run", "cases"), [("auto", ("mixed", "hpz")), ("by node", ("hpz by node",))])
def test_hpz(tmp_path: Any, run: str, cases: tuple[str, ...]) -> None:
    wanted, coded = plain_and_coded(__file__, 4, tmp_path, *cases, sources=SOURCES, DS_ZIPCCL=section(run))
    for number, rank in enumerate(coded["hpz by node"] if run == "by node" else ()):
        assert (
            rank["losses"].pop() == str([[0, 1], [2, 3]][number // 2])
            and not wanted["hpz by node"][number]["losses"].pop()
        )
    assert all(bits(coded[case]) == bits(wanted[case]) for case in cases)


if __name__ == "__main__":
    if os.environ.get("MISTAKE"):
        setattr(*MISTAKES[os.environ["MISTAKE"]])
    rank_program(PROGRAMS)
