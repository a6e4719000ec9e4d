"""Real ZeRO-3 engines with bases for differences, on groups in stream order on CPUs: the engines of test_engines_agreed.py."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import engines
import pytest
import test_engines_agreed as agreed
import test_engines_frozen as frozen
import torch
from engines import SOURCES, Lab, bits, rank_program
from programs import launch, plain_and_coded
from tiers import mostly_full

from ds_zipccl.comm.bases import proof

CASES = ("trained", "frozen", "edited", "checkpoint", "skipped")
PROGRAM = str(agreed.__file__)


def written(lab: Lab, steps: int = 1, batches: int = 0, groups: Any = engines.Model.parameters, **config: Any) -> None:
    """A direct write to a shard of rank 1 stops all ranks before the step: before the first gather of a version its difference is larger
    than agreed; between two batches of a step, after a gather, no rank gets the words. After it no rank gets those of a frozen shard."""
    engine = agreed.start(lab, groups, **config)
    lab.train(engine, steps)
    for _ in range(batches):
        lab.backward(engine)
        engine.step()
    if lab.rank == 1:
        with torch.no_grad():
            engine.module.layers[1].weight.ds_tensor.mul_(0.5)
    agreed.assert_no_step(lab, engine, engine.gradient_accumulation_steps() - batches)


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
    with pytest.MonkeyPatch.context() as patch:
        frozen.inference(lab, Counting(patch).ends)


def quantised(lab: Lab) -> None:
    """A frozen weight of int8: without a base its gathers would pass."""
    trained = lambda model: [parameter for parameter in model.parameters() if parameter.requires_grad]  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        counting = Counting(patch)
        engine = agreed.start(lab, trained, make=frozen.Quantised)
        lab.train(engine, 1)
        counting.ends(lab, "1 step")
        lab.train(engine, 2)
        counting.ends(lab, "2 steps")
        engine.save_checkpoint(lab.folder / "saved", tag="three")
        engine.load_checkpoint(lab.folder / "saved", tag="three")
        lab.train(engine, 2)
        counting.ends(lab, "loaded")


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
    plain, run = plain_and_coded(PROGRAM, 2, tmp_path, *cases, sources=SOURCES, **agreed.on_streams(zero3_base=kind))
    for case in cases:
        check(plain, run, case)


@pytest.mark.full(reason="the test above has frozen parameters with bases of all")
def test_frozen_parameters_are_copies_of_their_bases(tmp_path: Path) -> None:
    """By default: no wait and no word on the wire after the first gather, and no proof of a base but after an event."""
    sources = (*SOURCES, Path(PROGRAM), Path(frozen.__file__))
    plain, run = plain_and_coded(
        __file__, 2, tmp_path, *FROZEN, sources=sources, **agreed.on_streams(zero3_base="auto")
    )
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
_TWO = {"gradient_accumulation_steps": 2}
_CHANGED = "layers.1.weight: gathered before, and changed since"
WRITTEN = {
    "between batches": (functools.partial(written, batches=1, **_TWO), "host", _CHANGED),
    "between steps": (functools.partial(written, **_TWO), "host", "layers.1.weight of group rank 1 refused"),
    "frozen": (functools.partial(written, steps=2, groups=freeze), "auto", _CHANGED),
}
FROZEN = {case.__name__: case for case in (partly_frozen, inference, quantised)}


@pytest.mark.full
@pytest.mark.parametrize("case", WRITTEN)
def test_a_direct_write_stops_all_ranks(tmp_path: Path, case: str) -> None:
    _, kind, said = WRITTEN[case]
    for rank in launch(__file__, 2, tmp_path, case, **agreed.on_streams(zero3_base=kind))[case]:
        assert said in rank["losses"][-1]


if __name__ == "__main__":
    programs = FROZEN | {name: program for name, (program, *_) in WRITTEN.items()}
    rank_program(programs, os.environ.get("BACKEND"), sizes=agreed.SIZES)
