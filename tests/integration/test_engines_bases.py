"""Real ZeRO-3 engines with bases for differences, on groups in stream order on CPUs: the engines of test_engines_agreed.py."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import engines
import pytest
import shim
import test_engines_agreed as agreed
import torch
from engines import SOURCES, Lab, bits, rank_program
from programs import launch, reference
from tiers import mostly_full

from ds_zipccl.comm import CommError

CASES = ("trained", "frozen", "edited", "checkpoint", "skipped")
PROGRAM = str(agreed.__file__)


def written(lab: Lab, between_batches: bool) -> None:
    """A direct write to a shard of rank 1 stops all ranks before the step: before the first gather of an epoch its difference is larger
    than agreed; between two batches of a step, after a gather, no rank gets the words."""
    engine = agreed.start(lab, gradient_accumulation_steps=2)
    lab.train(engine, 1)
    if between_batches:
        lab.backward(engine)
        engine.step()
    if lab.rank == 1:
        with torch.no_grad():
            engine.module.layers[1].weight.ds_tensor.mul_(0.5)
    before = engines.sha256(engine.module)
    with pytest.raises(CommError) as raised:  # the verdict of a coded sum comes first, where there is one
        for _ in range(1 if between_batches else 2):
            lab.backward(engine)
            engine.step()
    lab.losses.append(str(raised.value))
    assert engines.sha256(engine.module) == before
    lab.ends("after", {})


def coded(program: str, folder: Path, ranks: int, kind: str, *cases: str) -> agreed.Run:
    shim.build()
    section = json.dumps({**agreed.SECTION, "zero3_base": kind})
    return launch(program, ranks, folder, *cases, DS_ZIPCCL=section, BACKEND=shim.NAME)


def check(plain: agreed.Run, run: agreed.Run, case: str) -> None:
    """Bits of plain communication; no more waits of the host than without bases; differences."""
    assert bits(run[case]) == bits(plain[case])
    for rank in run[case]:
        found = {phase["phase"]: phase["rows"] for phase in rank["phases"]}
        waits = {
            phase: (agreed.waited(found[phase], agreed.GATHERS), agreed.waited(found[phase], agreed.AGREEMENTS))
            for phase in agreed.WAITS[case]
        }
        assert waits == agreed.WAITS[case]
        counts: Any = [phase["differences"] for phase in rank["phases"]]
        assert sum(count.get("", 0) for count in counts) > sum(count[why] for count in counts for why in count if why)


@pytest.mark.parametrize("kind", mostly_full(["device", "host"], ["host"], "the other is alike"))
def test_bases_change_no_bit(tmp_path: Path, kind: str) -> None:
    cases = CASES[:1] if kind == "host" else CASES
    (tmp_path / "plain").mkdir(), (tmp_path / "coded").mkdir()
    run = coded(PROGRAM, tmp_path / "coded", 2, kind, *cases)
    plain = reference(PROGRAM, 2, tmp_path / "plain", *cases, sources=SOURCES)
    for case in cases:
        check(plain, run, case)


WRITTEN = {
    "between batches": (
        functools.partial(written, between_batches=True),
        "layers.1.weight: gathered before, and changed since",
    ),
    "between steps": (functools.partial(written, between_batches=False), "layers.1.weight of group rank 1 refused"),
}


@pytest.mark.full
@pytest.mark.parametrize("case", WRITTEN)
def test_a_direct_write_stops_all_ranks(tmp_path: Path, case: str) -> None:
    for rank in coded(__file__, tmp_path, 2, "host", case)[case]:
        assert WRITTEN[case][1] in rank["losses"][-1]


if __name__ == "__main__":
    for _name, _value in agreed.SIZES.items():
        setattr(engines, _name, _value)
    rank_program({name: program for name, (program, _) in WRITTEN.items()}, os.environ.get("BACKEND"))
