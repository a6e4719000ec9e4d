"""Gradient sums of real DeepSpeed engines on groups in stream order, two nodes of two and four ranks: one order from the first step on,
whether sums are coded yet or not, in another run, after a checkpoint and where it was loaded.

``Settled`` is that of mode always: sums of two ranks and more are ours. The order itself is that of tests/on_sim/test_device_sums.py.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from engines import ZERO3, Lab, bits, rank_program
from programs import launch
from test_engines_on_streams import Experts, on_streams, split

from ds_zipccl.benchmarks.links import slots
from ds_zipccl.comm import topology
from ds_zipccl.comm.group_state import state_of
from ds_zipccl.integration import start_up
from ds_zipccl.integration.job import Job
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.policy.settled import DTYPES, Sums

AUTO = {"enabled": True, "mode": "always", "min_bytes": 1024, "nccl_min_bytes": 4096}
#: Sections: without coding until step 4; coded from the first call on.
SECTIONS = {"auto": json.dumps(AUTO), "on": json.dumps({**AUTO, "nccl": "on", "reduction": "fp32"})}
#: fp16 starts with a scale of the loss by which most gradients are finite, and those of one rank are not in one step.
FP16 = {"bf16": {"enabled": False}, "fp16": {"enabled": True, "initial_scale_power": 12, "hysteresis": 1}}
SETTINGS: dict[str, dict[str, Any]] = {
    "zero1": {"zero": {"stage": 1}},
    "zero2": {"zero": {"stage": 2, "overlap_comm": True}},
    "zero3": {"zero": ZERO3},
    "zero3 fp32": {"zero": ZERO3, "communication_data_type": "fp32"},
    "zero2 accumulating": {
        "zero": {"stage": 2, "reduce_scatter": False},
        "gradient_accumulation_steps": 2,
        "prescale_gradients": True,
        "gradient_predivide_factor": 2.0,
    },
    "zero2 fp16": FP16,
    "moe": {"make": Experts, "groups": split, "zero": {"stage": 2}},
}
STEPS = 6


def trained(lab: Lab, name: str) -> None:
    engine = lab.engine(**SETTINGS[name])
    for step in range(STEPS):
        lab.train(engine, scale=float("inf") if "fp16" in name and (lab.rank, step) == (1, 2) else 1.0)
        lab.ends(f"step {step + 1}", {})
    assert engine.skipped_steps == ("fp16" in name)


def resumed(lab: Lab, name: str) -> None:
    """A job that never stops, then a rollback in the same engine, and a new engine: three times the same end."""
    engine, folder, ends = lab.engine(**SETTINGS[name]), lab.folder / "saved", []
    lab.train(engine, 3)
    engine.save_checkpoint(folder, tag="three", client_state={"mine": 7})
    coming = lab.batches.get_state()
    for turn in range(3):
        if turn:
            engine = engine if turn == 1 else lab.engine(seed=2, **SETTINGS[name])
            _, given = engine.load_checkpoint(folder, tag="three")
            assert given == {"mine": 7} | {key: one for key, one in given.items() if key != "mine"}
            assert not any("zipccl" in key for key in given), "what the user saved comes back, and nothing else"
            lab.batches.set_state(coming)
        lab.train(engine, 3)
        ends.append((engines.digest(engine.module.parameters()), lab.losses[-3:]))
        lab.ends(f"end {turn}", {})
    assert ends[0] == ends[1] == ends[2] and state_of(None).device_sums.dtypes == DTYPES


def records(lab: Lab) -> None:
    """What checkpoints bring: the same order, no record, another world, different records on the ranks, damage."""
    engine, job = lab.engine(), start_up_job()
    known = start_up.record(job)
    assert json.loads(known) == [list(DTYPES), 0, 2, 4]
    start_up.resume(job, None, loaded=False)
    assert state_of(None).device_sums.dtypes == DTYPES, "no rank has loaded a checkpoint"
    start_up.resume(job, known, loaded=lab.rank < 2)  # one node alone has a folder with one
    assert state_of(None).device_sums.dtypes == ()
    for found, dtypes in (
        ('[["bfloat16"], 0, 2, 4]', ("bfloat16",)),
        (None, ()),
        ('[["bfloat16"], 99000000, 2, 4]', ()),
        ('[["float16", "bfloat16"], 100, 4, 8]', ("bfloat16", "float16")),
        ("[[], 0, 2, 4]" if lab.rank == 3 else '[["bfloat16"], 0, 2, 4]', ()),
        (known if lab.rank else None, ()),
        (torch.ones(3), ()),
        ('[["bfloat16"], 2]', ()),
        ("[" * 100_000, ()),
        ('[["bfloat16"], Infinity, "x", 4]', ()),
        (known, DTYPES),
    ):
        start_up.resume(job, found)
        assert state_of(None).device_sums.ours("dp", "bfloat16", 1 << 20) == ("bfloat16" in dtypes), found
        lab.train(engine)
        reasons = {reason for row in engines.counters.rows() if row["role"] == "zero_grad" for reason in row["reasons"]}
        assert (PassReason.PLAIN_SUMS.value in reasons) == ("bfloat16" not in dtypes), (found, reasons)
        engines.counters.reset()
    state_of(None).device_sums = Sums(DTYPES)
    lab.ends("records", {})


def start_up_job() -> Job:
    from deepspeed.comm import comm

    return comm.cdb.job  # type: ignore[no-any-return]


CASES: dict[str, Callable[[Lab], None]] = {name: functools.partial(trained, name=name) for name in SETTINGS}
CASES |= {f"{name} resumed": functools.partial(resumed, name=name) for name in ("zero2", "zero3")} | {
    "records": records
}
SHORT = ("zero2", "zero3", "zero3 resumed", "records")
Run = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Run, str]]:
    """The results of each section, and what rank 0 has printed."""
    import tiers

    asked = tiers.asked(request, "case")
    cases, found = [name for name in CASES if (name,) in asked or name in SHORT], {}
    for name, section in SECTIONS.items():
        folder = tmp_path_factory.mktemp(name)
        some = [case for case in cases if name == "auto" or case in SETTINGS]
        run = launch(__file__, 4, folder, *some, timeout=480, **on_streams(section))
        found[name] = run, (folder / "said").read_text()
    return found


@pytest.mark.parametrize(
    "case", [name if name in SHORT else pytest.param(name, marks=pytest.mark.full(reason="alike")) for name in SETTINGS]
)
def test_sums_have_the_same_bits_coded_or_not(both: dict[str, tuple[Run, str]], case: str) -> None:
    (auto, _), (coded, _) = both.values()
    assert bits(auto[case]) == bits(coded[case])
    assert len({str(phase["sha256"]) for phase in auto[case][0]["phases"]}) >= STEPS - 1, "or nothing was trained"
    for rank in auto[case]:
        sums = [row for phase in rank["phases"] for name, row in phase["rows"].items() if name.startswith("zero_grad ")]
        assert not any({PassReason.PLAIN_SUMS.value, PassReason.UNPROVEN.value} & set(row["reasons"]) for row in sums)
        assert any(row["calls"] for row in sums)


@pytest.mark.parametrize("case", ["zero3 resumed", pytest.param("zero2 resumed", marks=pytest.mark.full)])
def test_a_resumed_job_has_the_bits_of_one_that_never_stopped(both: dict[str, tuple[Run, str]], case: str) -> None:
    """The ranks compare."""
    assert len(both["auto"][0][case]) == 4


@pytest.mark.full(reason="eight ranks")
def test_two_nodes_of_four_ranks(tmp_path: Path) -> None:
    cases, found = ("zero2", "zero3", "moe"), []
    for name, section in SECTIONS.items():
        (tmp_path / name).mkdir()
        found.append(launch(__file__, 8, tmp_path / name, *cases, timeout=480, **on_streams(section)))
    for case in cases:
        auto, coded = (bits(run[case]) for run in found)
        assert auto == coded, case


def test_lines(both: dict[str, tuple[Run, str]]) -> None:
    said = both["auto"][1]
    assert "in two levels gradient sums of bfloat16, float16, float32 in fp32 (as the mode of zero_grad is" in said
    assert "sums of zero_grad coded from step 5 on, as all words compared were right" in said
    after = [line.partition(": ")[2] for line in said.splitlines() if "after the checkpoint: " in line]
    ours = "gradient sums of bfloat16, float16, float32 in fp32 (as in the checkpoint)"
    assert after.count(ours) >= 3
    assert "sums by the backend itself (the ranks have found different records in the checkpoint)" in after
    assert any("no record of an order of sums" in line and '"reduction": "fp32"' in line for line in after)
    assert any("saved on 4 nodes with 8 ranks, so that bits change" in line for line in after)


if __name__ == "__main__":
    import sys

    if os.environ.get("BACKEND"):
        topology.here = lambda: str(2 * int(os.environ["RANK"]) // int(os.environ["WORLD_SIZE"]))
    if os.environ["RANK"] == "0":
        os.dup2(os.open(Path(sys.argv[1], "said"), os.O_CREAT | os.O_WRONLY), 1)
    rank_program(CASES, slots.NAME)
