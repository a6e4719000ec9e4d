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
from test_engines_frozen import Quantised
from tiers import mostly_full

from ds_zipccl.comm import CommError
from ds_zipccl.comm.bases import proof

CASES = ("trained", "frozen", "edited", "checkpoint", "skipped")
PROGRAM = str(agreed.__file__)


def written(lab: Lab, between_batches: bool) -> None:
    """A direct write to a shard of rank 1 stops all ranks before the step: before the first gather of a version its difference is larger
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
    with pytest.raises(CommError) as raised:  # the agreement of a coded sum comes first, where there is one
        for _ in range(1 if between_batches else 2):
            lab.backward(engine)
            engine.step()
    lab.losses.append(str(raised.value))
    assert engines.sha256(engine.module) == before
    lab.ends("after", {})


def freeze(model: engines.Model) -> Any:
    """Freeze all weights but the head's; return what is trained."""
    for module in (model.embedding, *model.layers):
        module.weight.requires_grad_(False)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


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

    def ends(self, lab: Lab, phase: str) -> None:
        lab.ends(phase, {})
        lab.phases[-1] |= {"proofs": self.proofs, "copies": self.copies}
        self.proofs = self.copies = 0


def partly_frozen(lab: Lab) -> None:
    """Four of five weights are frozen. A load of a checkpoint costs proofs of each of them, and no step does."""
    with pytest.MonkeyPatch.context() as patch:
        counting = Counting(patch)
        engine = agreed.start(lab, freeze)
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
    import deepspeed

    with pytest.MonkeyPatch.context() as patch:
        counting = Counting(patch)
        torch.manual_seed(1)
        config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {**agreed.ZERO3}}
        engine, *_ = deepspeed.initialize(model=engines.Model(), config=config)
        lab.engines.append(engine)
        engine.eval()
        for phase in ("first", "later"):
            with torch.no_grad():
                for _ in range(3):
                    lab.losses.append(engine(torch.arange(32).view(2, 16)).item().hex())
            counting.ends(lab, phase)


def quantised(lab: Lab) -> None:
    """A frozen weight of int8: without a base its gathers would pass."""
    trained = lambda model: [parameter for parameter in model.parameters() if parameter.requires_grad]  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        counting = Counting(patch)
        engine = agreed.start(lab, trained, make=Quantised)
        lab.train(engine, 1)
        counting.ends(lab, "1 step")
        lab.train(engine, 2)
        counting.ends(lab, "2 steps")
        engine.save_checkpoint(lab.folder / "saved", tag="three")
        engine.load_checkpoint(lab.folder / "saved", tag="three")
        lab.train(engine, 2)
        counting.ends(lab, "loaded")


def written_frozen(lab: Lab) -> None:
    """A direct write to a frozen shard of rank 1 after two steps: no rank takes another step."""
    engine = agreed.start(lab, freeze)
    lab.train(engine, 2)
    if lab.rank == 1:
        with torch.no_grad():
            engine.module.layers[1].weight.ds_tensor.mul_(0.5)
    before = engines.sha256(engine.module)
    with pytest.raises(CommError) as raised:
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


@pytest.mark.full(reason="the test above has frozen parameters with bases of all")
def test_frozen_parameters_are_copies_of_their_bases(tmp_path: Path) -> None:
    """By default: no wait and no word on the wire after the first gather, and no proof of a base but after an event."""
    (tmp_path / "plain").mkdir(), (tmp_path / "coded").mkdir()
    run = coded(__file__, tmp_path / "coded", 2, "auto", *FROZEN)
    plain = reference(__file__, 2, tmp_path / "plain", *FROZEN, sources=(*SOURCES, Path(PROGRAM)))
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
                assert not quiet or not agreed.waited(phase["rows"], agreed.GATHERS), phase
    for rank in run["inference"]:
        _, later = rank["phases"]
        assert later["copies"] == 0 and agreed.AGREEMENTS not in later["rows"], "no step would check copies"
    assert "nothing for 5 frozen parameters" in said and "no optimizer step checks copies" in said
    for rank in run["quantised"]:
        _, first, steps, loaded = rank["phases"]
        assert [agreed.waited(phase["rows"], agreed.GATHERS) for phase in (first, steps, loaded)] == [0, 0, 1]
        assert steps["copies"] == 2 * 2 and set(steps["differences"]) == set(loaded["differences"]) == {""}
    for rank in run["partly_frozen"]:
        steps = next(phase for phase in rank["phases"] if phase["phase"] == "3 steps")
        assert steps["copies"] == 3 * (2 * 4 - 1) and set(steps["differences"]) == {""}, "not the embedding's backward"


#: Case -> program, zero3_base, words of the error.
WRITTEN = {
    "between batches": (
        functools.partial(written, between_batches=True),
        "host",
        "layers.1.weight: gathered before, and changed since",
    ),
    "between steps": (
        functools.partial(written, between_batches=False),
        "host",
        "layers.1.weight of group rank 1 refused",
    ),
    "frozen": (written_frozen, "auto", "layers.1.weight: gathered before, and changed since"),
}
FROZEN = {case.__name__: case for case in (partly_frozen, inference, quantised)}


@pytest.mark.full
@pytest.mark.parametrize("case", WRITTEN)
def test_a_direct_write_stops_all_ranks(tmp_path: Path, case: str) -> None:
    _, kind, said = WRITTEN[case]
    for rank in coded(__file__, tmp_path, 2, kind, case)[case]:
        assert said in rank["losses"][-1]


if __name__ == "__main__":
    for _name, _value in agreed.SIZES.items():
        setattr(engines, _name, _value)
    rank_program(FROZEN | {name: program for name, (program, *_) in WRITTEN.items()}, os.environ.get("BACKEND"))
