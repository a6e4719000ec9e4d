"""PowerSGD on real engines: the sums of all layouts of gradients, their state, and what is refused.

The program of a rank surrounds every sum by PowerSGD: it sums a copy exactly, and adds up by the names of parameters what was to arrive
and what arrived. The difference must be in the errors of the ranks.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import digest
from parallel import Lab, in_fp16, poison, rank_program
from programs import launch
from test_parallel import Layered

from ds_zipccl.comm.lossy.low_rank_sum import Matrix
from ds_zipccl.config import ConfigError, parse_section
from ds_zipccl.integration import backend, hints
from ds_zipccl.integration.lossy import calls, powersgd
from ds_zipccl.telemetry import counters

RANK, STEPS = 4, 4
FP32 = {"bf16": {"enabled": False}}
BF16_OPTIMIZER = {"data_types": {"grad_accum_dtype": "fp32"}}


def section(**more: Any) -> str:
    codec = {"codec": "powersgd", "rank": RANK, "start_step": 1, **more}
    given = {"enabled": True, "mode": "always", "min_bytes": 1024, "lossy": True, "log_interval": 1}
    return json.dumps(given | {"roles": {"zero_grad": codec, "dp": codec}})


class Sums:
    """What was to arrive and what has arrived, by parameter; hashes of all sums."""

    def __init__(self) -> None:
        self.missing: dict[str, Any] = defaultdict(float)
        self.given: dict[str, float] = defaultdict(float)
        self.changed, self.hashes = 0, hashlib.sha256()

    def watch(self) -> Any:
        from ds_zipccl.integration.lossy.powersgd import PowerSum

        original = PowerSum.run

        def run(power: Any, tensor: torch.Tensor, op: Any, group: Any, *args: Any) -> None:
            exact = tensor.double().view(-1)
            dist.all_reduce(exact, group=group)
            original(power, tensor, op, group, *args)
            arrived = tensor.double().view(-1)
            self.changed += not torch.equal(exact, arrived)
            self.hashes.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            for place in power.places:
                part = slice(place.start, place.start + place.rows * place.columns)
                if bool(exact[part].isfinite().all()):
                    self.missing[place.name] = self.missing[place.name] + exact[part] - arrived[part]
                    self.given[place.name] += float(exact[part].abs().sum())

        PowerSum.run = run  # type: ignore[method-assign]
        return original


def trained(lab: Lab, zero: Any, overflow: int = -1, **more: Any) -> None:
    """Train; in step ``overflow`` one rank has a gradient that is not finite."""
    from ds_zipccl.integration.lossy import state
    from ds_zipccl.integration.lossy.powersgd import PowerSum

    sums, step = Sums(), 0
    original = sums.watch()
    model = Layered([torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)])
    poison(model.words.weight, float("nan"), lambda: step == overflow and lab.rank == 1)
    engine = lab.start(model, zero, gradient_clipping=0.0, **(in_fp16() if overflow >= 0 else more))
    entries: list[int] = []
    batches = engine.gradient_accumulation_steps()
    for step in range(STEPS):  # poison() asks for the step
        for batch in range(batches):
            loss = engine(lab.tokens(batches * step + batch))
            lab.losses.append(loss.item().hex())
            engine.backward(loss)
            engine.step()
        held = state.of(engine).entries()
        entries.append(sum(entry.error is not None for _, _, entry in held))
        if step == overflow:
            sums.missing.clear()
            sums.given.clear()
    PowerSum.run = original  # type: ignore[method-assign]
    left = {}
    for _, key, entry in state.of(engine).entries():
        error = entry.error.double().flatten()
        dist.all_reduce(error)
        scale = lab.more.get("unit", 1.0)
        left[key[0]] = float((sums.missing[key[0]] - scale * error).abs().sum()) / sums.given[key[0]]
    rows = [row for row in counters.rows() if row["op"] == "all_reduce" and row["role"] in ("zero_grad", "dp")]
    lab.more |= {
        "optimizer": type(engine.optimizer).__name__,
        "left": left,
        "changed": sums.changed,
        "hash": sums.hashes.hexdigest(),
        "entries": entries,
        "skipped": engine.skipped_steps,
        "rows": [str(row) for row in rows],
    }


def resumed(lab: Lab, zero: Any, **more: Any) -> None:
    """Refuse ZeRO-3. Train, with a checkpoint in the middle. A second engine repeats the second half, and a third one without the state."""
    from ds_zipccl.integration.lossy import checkpoints

    def model() -> torch.nn.Module:
        torch.manual_seed(1)
        return Layered([torch.nn.Linear(64, 64)])

    with pytest.raises(ConfigError, match="is for ZeRO-1, ZeRO-2 and jobs without ZeRO, got an engine with ZeRO-3"):
        lab.start(model(), 3, **more)
    folder, half = str(Path(sys.argv[1], "saved")), STEPS // 2
    hashes, losses = [], []
    for run in ("whole", "again", "without the state"):
        engine = lab.start(model(), zero, **more)
        if run != "whole":
            engine.load_checkpoint(folder)
        losses.append([])
        for step in range(0 if run == "whole" else half, STEPS):
            if run == "whole" and step == half:
                engine.save_checkpoint(folder)
            loss = engine(lab.tokens(step))
            losses[-1].append(loss.item().hex())
            engine.backward(loss)
            engine.step()
        hashes.append(digest(engine.module.parameters()))
        if run == "again":
            dist.barrier()
            if lab.rank == 1:  # one rank's file alone: all start anew
                checkpoints.file_of(folder, f"global_step{half}").unlink()
            dist.barrier()
        if run != "without the state":
            engine.destroy()
    lab.more |= {"hashes": hashes, "runs": losses}


def drifting(lab: Lab) -> None:
    """Rank 1 gets another bit."""
    original = powersgd.low_rank_sum

    def other(flat: torch.Tensor, *args: Any) -> None:
        original(flat, *args)
        if lab.rank == 1:
            flat.view(torch.int32)[0] ^= 1

    powersgd.low_rank_sum = other  # type: ignore[attr-defined]
    try:
        lab.start(Layered([torch.nn.Linear(64, 64)]), 0, **FP32)
        with pytest.raises(RuntimeError, match=r"different sums of gradients after PowerSGD, of words\.weight"):
            lab.train(lambda step: (lab.tokens(step),))
    finally:
        powersgd.low_rank_sum = original  # type: ignore[attr-defined]


make = functools.partial
CASES = {
    "stage 0": make(trained, zero=0, **FP32),  # first: the role is dp only where no engine of the process has had ZeRO
    "bf16 optimizer": make(trained, zero=1, **BF16_OPTIMIZER),
    "zero1": make(trained, zero=1),
    "zero2": make(trained, zero=2),
    "zero2 all": make(trained, zero={"stage": 2, "reduce_scatter": False}),
    "zero2 overlap": make(trained, zero={"stage": 2, "overlap_comm": True, "reduce_bucket_size": 9000}),
    "zero2 owners": make(trained, zero={"stage": 2, "use_multi_rank_bucket_allreduce": False}),
    "zero1 own": make(trained, zero={"stage": 1, "contiguous_gradients": False, "round_robin_gradients": True}),
    "accumulated": make(trained, zero=2, gradient_accumulation_steps=2),
    "predivided": make(
        trained, zero={"stage": 2, "reduce_scatter": False}, prescale_gradients=False, gradient_predivide_factor=4.0
    ),
    "drift": drifting,
    "resumed": make(resumed, zero=1),
    "resumed stage 0": make(resumed, zero=0, **FP32),
    "overflow": make(trained, zero=1, overflow=2),
}
RESUMED = [name for name in CASES if name.startswith("resumed")]
SHORT = ["stage 0", "zero2", "overflow"]
LAYOUTS = [name for name in CASES if name not in [*SHORT, *RESUMED, "drift"]]


def check(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        values = [float.fromhex(loss) for loss in rank["losses"]]
        assert len(set(values)) == len(values) and values[-1] < values[0], (name, values)
        assert rank["sha256"] == ranks[0]["sha256"] and rank["hash"] == ranks[0]["hash"], f"{name}: replicas"
        if name == "zero2 owners":  # sums for one rank stay exact
            assert not rank["changed"] and not rank["left"]
            continue
        assert rank["changed"] >= (STEPS - 1), (name, rank["changed"])
        assert len(rank["left"]) == 4, (name, rank["left"])  # words, head, two layers
        assert max(rank["left"].values()) < 1e-5, (name, rank["left"])
        assert rank["entries"] == ([0, 4, 0, 4] if name == "overflow" else [0, 4, 4, 4]), (name, rank["entries"])
        assert rank["skipped"] == (name == "overflow")


@pytest.mark.parametrize(
    "names",
    [SHORT, pytest.param(LAYOUTS, marks=pytest.mark.full(reason="the short tier has a layout of each kind"))],
    ids=["kinds", "layouts"],
)
def test_what_did_not_arrive_is_kept_in_all_layouts(names: list[str], tmp_path: Path) -> None:
    found = launch(__file__, 2, tmp_path, "lossy", *names, DS_ZIPCCL=section())
    for name in names:
        check(name, found[name])


@pytest.mark.full(reason="a launch with three engines a case; files are tested in one process in the short tier")
def test_a_checkpoint_has_what_a_training_needs_to_go_on_with_the_same_bits(tmp_path: Path) -> None:
    """In the same launch: a bit that differs between ranks stops the training."""
    found = launch(__file__, 2, tmp_path, "lossy", *RESUMED, "drift", DS_ZIPCCL=section())
    assert all(len(rank["losses"]) == 2 for rank in found["drift"]), "the second step is the first one with PowerSGD"
    for name in RESUMED:
        for rank in found[name]:
            whole, again, without = rank["hashes"]
            assert whole == again != without, name
            assert rank["runs"][0][STEPS // 2 :] == rank["runs"][1], name


def test_settings_that_an_engine_cannot_keep_are_refused() -> None:
    def engine(stage: int, pipeline: bool = False) -> Any:
        return types.SimpleNamespace(zero_optimization_stage=lambda: stage, pipeline_parallelism=pipeline)

    config, staged = (parse_section(json.loads(section(**more))) for more in ({}, {"stages": 2}))
    for stage in (0, 1, 2):
        powersgd.refuse(engine(stage), config)
    powersgd.refuse(engine(1, pipeline=True), staged)
    with pytest.raises(ConfigError, match="ZeRO-3"):
        powersgd.refuse(engine(3), config)
    with pytest.raises(ConfigError, match=r'\.stages": 2 counts pipeline stages, got an engine without a pipeline'):
        powersgd.refuse(engine(1), staged)


class Ranks:
    """An engine whose sums are asked for one at a time."""

    def __init__(self, stage: int = 0, step: int = 5) -> None:
        self.stage_id, self.global_steps, self.optimizer = stage, step, None
        self.module = torch.nn.Sequential(torch.nn.Linear(40, 24), torch.nn.Linear(24, 40))
        self.param_names = {one: name for name, one in self.module.named_parameters()}
        self.pipeline_parallelism = False
        whole = torch.zeros(sum(one.numel() for one in self.module.parameters()) + 7)
        self.whole, at = whole, 0
        for one in self.module.parameters():  # as in a flat buffer, padding behind
            one.grad = whole[at : at + one.numel()].view(one.shape)
            at += one.numel()

    def places(self, *parts: torch.Tensor, numel: int | None = None, **more: Any) -> list[tuple[str, int]] | bool | str:
        settings = parse_section(json.loads(section(**more))).lossy_roles["dp"]
        flat = torch.zeros(sum(part.numel() for part in parts) if numel is None else numel)
        _, ready = powersgd.of_engine_bucket(self, parts)
        found = ready(flat, settings)
        return [(one.name, one.start) for one in found.places] if isinstance(found, powersgd.PowerSum) else found


def test_parameters_are_found_by_the_memory_of_their_gradients() -> None:
    engine = Ranks()
    both = [("0.weight", 0), ("1.weight", 960 + 24)]
    assert engine.places(engine.whole) == both
    assert engine.places(*engine.whole.split(100)) == both, "slices that are neighbors"
    assert engine.places(*(one.grad for one in engine.module.parameters())) == both
    first, _, second, _ = (one.grad for one in engine.module.parameters())
    assert engine.places(second, first) == [("1.weight", 0), ("0.weight", 960)]
    assert engine.places(engine.whole[1:]) == [("1.weight", 983)], "a part of a matrix goes exactly"
    assert engine.places(engine.whole[:959]) == "no matrix"
    assert engine.places(torch.zeros(5000)) == "no matrix"
    assert engine.places(engine.whole, numel=5000) == "no matrix", "sizes do not add up"
    assert engine.places(engine.whole, rank=8) == "no matrix", "factors of more than half of the values"


def test_weights_that_stages_share_are_exact() -> None:
    engine = Ranks()
    engine.pipeline_parallelism = True
    shared = [(engine.module[0].weight, None)]
    engine.module.get_tied_weights_and_groups = lambda: shared
    assert engine.places(engine.whole) == [("1.weight", 960 + 24)]
    shared.clear()
    assert len(engine.places(engine.whole)) == 2


def test_first_steps_and_late_stages_are_exact() -> None:
    for stage in range(3):
        engine = Ranks(stage)
        assert (engine.places(engine.whole, stages=2) is not False) == (stage < 2)
        assert engine.places(engine.whole)
    for step in range(4):
        engine = Ranks(step=step)
        assert (engine.places(engine.whole, start_step=2) is not False) == (step >= 2)


@pytest.mark.usefixtures("no_counts")
def test_sums_that_stay_exact_are_counted_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that the backend does not make by PowerSGD as nobody waits for them."""
    config, engine = parse_section(json.loads(section())), Ranks()
    optimizer = types.SimpleNamespace()
    monkeypatch.setattr(powersgd, "_engine_of", lambda optimizer: engine)
    rest, meta = torch.zeros(5000), engine.whole.to("meta")
    sums: list[tuple[str, Any, torch.Tensor, str]] = [
        ("all_reduce", powersgd.of_engine_bucket(engine, [rest]), rest, "no matrix"),
        ("all_reduce", powersgd.of_engine_bucket(engine, [meta]), meta, "no lossy kernels on meta"),
        ("reduce", powersgd.of_zero_bucket(optimizer, [rest], None, 1), rest, "a sum for one rank"),
        ("all_reduce", powersgd.of_engine_bucket(Ranks(step=0), [rest]), rest, ""),
    ]
    for name, asked, flat, why in sums:
        counters.reset()
        with hints.hinting(lossy=calls.Calls(("dp",), (name,), detail=lambda asked=asked: asked)):
            assert calls.take_hint(config, "dp", name, flat, dist.ReduceOp.SUM) is None
        found = [(one["op"], one["codec"], one["frames"], one["exact"]) for one in counters.lossy()]
        assert found == ([(name, "powersgd rank 4", 1, {why: 1})] if why else [])


@pytest.mark.usefixtures("no_counts")
def test_a_sum_that_nobody_waits_for_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_section(json.loads(section()))
    settings = config.lossy_roles["dp"]
    power = powersgd.PowerSum(settings, settings.codec, [], 5, powersgd.State())
    monkeypatch.setattr(calls, "take_hint", lambda *args: power)
    monkeypatch.setattr(powersgd.PowerSum, "run", lambda *args: "ran")
    monkeypatch.setattr(backend.comm, "all_reduce", lambda *args, **kwargs: "exact")
    job = types.SimpleNamespace(config=config, role_of=lambda *args: "dp")
    fake = types.SimpleNamespace(job=job, _reduce_op=lambda op: op)
    monkeypatch.setattr(backend, "slice_owners", lambda *args, **kwargs: None)
    call = backend._coded("all_reduce")
    assert call(fake, torch.zeros(8)) == "ran" and not counters.lossy()
    assert call(fake, torch.zeros(8), async_op=True) == "exact"
    assert counters.lossy()[0]["exact"] == {"asynchronous": 1}


@pytest.mark.usefixtures("no_counts")
@pytest.mark.parametrize(("sent", "saved"), [(400, 600), (1400, 0)], ids=["factors", "matrices after factors"])
def test_no_sum_saves_less_than_nothing(sent: int, saved: int) -> None:
    settings = parse_section(json.loads(section())).lossy_roles["dp"]
    matrix = Matrix(0, 24, 40, torch.zeros(40, 4))
    powersgd.PowerSum(settings, settings.codec, [], 5, powersgd.State())._count(
        "dp", [matrix], torch.zeros(250), sent, 2
    )
    assert [row["logical_bytes"] for row in counters.rows()] == [saved]
    assert counters.lossy()[0]["exact"] == {"not finite": 1}


if __name__ == "__main__":
    rank_program(CASES)
