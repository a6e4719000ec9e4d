"""Low-rank gradients between the stages of real pipelines: PipelineModule engines over gloo, on two and four ranks.

The program of a rank sends every tensor of a pipeline a second time, exactly, and compares.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from parallel import STEPS, VOCABULARY, WIDTH, Lab, assert_trained, bits, in_fp16, rank_program
from programs import launch
from test_engines_lossy import totals, watch, watched
from test_parallel import Head, Middle, Words, cross_entropy

from ds_zipccl.telemetry import counters

MICRO_BATCHES = 6
LOWRANK = {"codec": "lowrank", "rank": 4, "when": "backward"}
SECTION = {"enabled": True, "mode": "always", "min_bytes": 1024, "lossy": True, "roles": {"pp": LOWRANK}}
FULL = pytest.mark.full(reason="launches of 10 s; the short tier has two stages and the epilogue")


def use(pp: dict[str, Any] | None, **section: Any) -> None:
    """Let the communication of this process follow another section from now on. ``pp`` None: no role is lossy."""
    from deepspeed.comm import comm

    from ds_zipccl.config import parse_section

    comm.cdb.job.config = parse_section(SECTION | section | {"roles": {} if pp is None else {"pp": LOWRANK | pp}})


class Poisoned(Middle):
    """The first layer of the last of two stages: in the second step the gradient that goes to the other stage is not finite."""

    step = 0

    def forward(self, given: Any) -> Any:  # type: ignore[override]
        if given.requires_grad and Poisoned.step == 1:
            given.register_hook(lambda grad: grad.index_fill(-1, torch.tensor([3]), float("nan")))
        return super().forward(given)


def train(
    lab: Lab,
    pp: dict[str, Any] | None,
    micro_batches: int = MICRO_BATCHES,
    poisoned: bool = False,
    folder: Path | None = None,
    missing: bool = False,
    **section: Any,
) -> None:
    """Train a pipeline of as many stages as there are ranks. With ``folder`` a new engine takes the last step, from a checkpoint; with
    ``missing``, without the state of rank 1."""
    from deepspeed.pipe import LayerSpec, PipelineModule

    from ds_zipccl.integration.lossy import checkpoints, state

    use(pp, **{key: one for key, one in section.items() if key != "fp32"})
    middle = [Middle, Middle, Middle, Poisoned if poisoned else Middle, Middle, Middle]
    specs = [LayerSpec(Words, VOCABULARY, WIDTH), *(LayerSpec(one, WIDTH, WIDTH) for one in middle)]
    specs.append(LayerSpec(Head, WIDTH, VOCABULARY))

    def build() -> PipelineModule:
        return PipelineModule(specs, num_stages=lab.ranks, loss_fn=cross_entropy, partition_method="uniform")

    more: dict[str, Any] = {"gradient_accumulation_steps": micro_batches, "gradient_clipping": 0.0}
    if section.pop("fp32", False):  # DeepSpeed's optimizer for bf16 does not load what it saves without ZeRO
        more |= {"bf16": {"enabled": False}}
    if poisoned:
        more |= in_fp16()
    engine = lab.start(build(), 0, **more)

    def batches() -> Iterator[Any]:
        for step in range(micro_batches * STEPS):
            tokens = lab.tokens(step, engine.grid.get_data_parallel_id())
            yield tokens, tokens

    data, skipped, kept = batches(), [], []
    for Poisoned.step in range(STEPS):
        if folder is not None and Poisoned.step == STEPS - 1:
            engine.save_checkpoint(str(folder))
            engine.destroy()
            if missing and lab.rank == 1:
                checkpoints.file_of(str(folder), f"global_step{STEPS - 1}").unlink()
            engine = lab.start(build(), 0, **more)
            engine.load_checkpoint(str(folder))
        lab.losses.append(engine.train_batch(data).item().hex())
        skipped.append(engine.skipped_steps)
        kept.append(sum(one.error is not None for _, _, one in state.of(engine).entries()))
    lab.more |= {"stage": engine.stage_id, "lossy": counters.lossy(), "skipped": skipped, "kept": kept}
    Poisoned.step = 0


def one_more(lab: Lab) -> None:
    """The planted mistake: a stage counts one send too many to its epilogue."""
    from ds_zipccl.integration.lossy import pipeline

    right = pipeline.compresses
    with mock.patch.object(pipeline, "compresses", lambda *given: right(*given[:3], given[3] + 1)):
        train(lab, {})


def nan_to_zero(lab: Lab) -> None:
    """The planted mistake: what is not finite becomes zero."""
    from ds_zipccl.integration.lossy.pipeline import _Link

    right = _Link._step

    def step(self: Any, given: torch.Tensor, *more: Any) -> Any:
        return right(self, given.nan_to_num(), *more)

    with mock.patch.object(_Link, "_step", step):
        train(lab, {"send": "all", "error": "lazy_run"}, poisoned=True)


def messages(lab: Lab) -> None:
    """Rank 1 sends gradients of several fragments to rank 0, in every way that a message can take."""
    from ds_zipccl import comm
    from ds_zipccl.comm.ops import p2p
    from ds_zipccl.config import parse_section
    from ds_zipccl.integration.lossy import pipeline, state
    from ds_zipccl.lossy import LowRank
    from ds_zipccl.policy.admission import Decision, PassReason
    from ds_zipccl.role_settings import RoleSettings

    rows, width, calls = 2000, 256, 8
    ways: dict[str, dict[str, Any]] = {
        "coded": {},
        "staging 1": {"staging_mib": 1},
        "auto": {"mode": "auto"},
        "shadow": {"check": "shadow"},
        "plain": {},
        "small": {"min_bytes": 1 << 30},
    }
    faster = mock.patch.object(p2p, "decide_message", lambda *given: Decision.passing(PassReason.LINK_IS_FASTER))
    found = {}
    for way, more in ways.items():
        config, digests = parse_section(SECTION | {"roles": {}} | more), []
        own = state.State()
        link = pipeline._Link(RoleSettings(LowRank(8), error="lazy_run"), (0, "backward", 0), width, 2, own)
        for call in range(calls):
            x = torch.randn(rows, width, generator=torch.Generator().manual_seed(call)).bfloat16()
            if call == 3:
                x[7, 5] = float("inf")
            with faster if way == "plain" else contextlib.nullcontext():
                if lab.rank == 1:
                    comm.send(x, 0, config=config, role="pp", lossy=link)
                else:
                    got = torch.empty_like(x)
                    comm.recv(got, 1, config=config, role="pp")
            if lab.rank == 0:
                digests.append([hashlib.sha256(got.view(torch.uint8).numpy()).hexdigest(), torch.equal(got, x)])
        found[way] = digests
    lab.more["found"] = found
    train(lab, None)


def resumed(lab: Lab, kept: str) -> None:
    """Train on with a new engine from a checkpoint of the step before the last. ``kept``: "all", or "no state" for the planted mistake, or
    "a file is missing", of rank 1."""
    from ds_zipccl.integration.lossy import checkpoints

    never = mock.patch.object(checkpoints, "load", lambda *given: None)
    with never if kept == "no state" else contextlib.nullcontext():
        folder, missing = Path(sys.argv[1], "checkpoint"), kept == "a file is missing"
        train(lab, {"send": "all", "error": "lazy_run"}, folder=folder, fp32=True, missing=missing)


make = functools.partial
Case = Callable[[Lab], None]
TRAININGS: dict[str, Case] = {
    "exact": make(train, pp=None),
    "epilogue": make(train, pp={}),
    "epilogue auto": make(train, pp={}, mode="auto"),
    "all": make(train, pp={"send": "all"}),
    "lazy": make(train, pp={"send": "all", "error": "lazy"}),
    "lazy_run": make(train, pp={"send": "all", "error": "lazy_run"}),
    "rank of the matrix": make(train, pp={"send": "all", "rank": WIDTH, "error": "lazy_run"}),
    "one, epilogue": make(train, pp={}, micro_batches=1),
    "one, all": make(train, pp={"send": "all"}, micro_batches=1),
    "not resumed": make(train, pp={"send": "all", "error": "lazy_run"}, fp32=True),
    "resumed": make(resumed, kept="all"),
    "resumed without state": make(resumed, kept="no state"),
    "resumed, a file is missing": make(resumed, kept="a file is missing"),
    "nan": make(train, pp={"send": "all", "error": "lazy_run"}, poisoned=True),
    "nan to zero": nan_to_zero,
    "one more": one_more,
}
CASES: dict[str, Case] = {name: make(watched, case) for name, case in TRAININGS.items()} | {"messages": messages}


def run(tmp_path: Path, ranks: int, *names: str) -> dict[str, list[dict[str, Any]]]:
    found = launch(__file__, ranks, tmp_path, "lossy", *names, DS_ZIPCCL=json.dumps(SECTION))
    for name in names:
        assert_trained(found[name])
    return {name: found[name] for name in names}


def check_epilogue(ranks: list[dict[str, Any]], micro_batches: int = MICRO_BATCHES) -> None:
    """Each stage codes its last sends, and no other message of the pipeline changes."""
    stages = len(ranks)
    for rank in ranks:
        wanted = STEPS * min(micro_batches, stages - rank["stage"]) if rank["stage"] else 0
        assert sum(one["frames"] for one in rank["lossy"]) == wanted, (rank["stage"], rank["lossy"])
    check_changed(ranks)


def check_changed(ranks: list[dict[str, Any]]) -> None:
    found = totals(ranks)
    assert found["pp changed"] == found["pp hinted"] > 0, found
    assert found["pp exact"] >= STEPS * MICRO_BATCHES * (len(ranks) - 1), "activations"
    assert not [name for name in found if name.endswith("changed") and not name.startswith("pp")], found


def test_the_last_stage_codes_its_last_send(tmp_path: Path) -> None:
    found = run(tmp_path, 2, "exact", "epilogue")
    check_epilogue(found["epilogue"])
    assert bits(found["epilogue"]) != bits(found["exact"])
    assert not totals(found["exact"])["pp changed"]


@FULL
def test_a_pipeline_of_four_stages(tmp_path: Path) -> None:
    names = [name for name in TRAININGS if not name.startswith("nan") and "resumed" not in name]
    found = run(tmp_path, 4, *names)
    check_epilogue(found["epilogue"])
    assert bits(found["epilogue"]) == bits(found["epilogue auto"]), "the way of a message changes no value"
    with pytest.raises(AssertionError):
        check_epilogue(found["one more"])
    for name in ("all", "lazy", "lazy_run"):
        check_changed(found[name])
        for rank in found[name]:
            feedback = name != "all" and rank["stage"]
            (said,) = rank["lossy"] or [None]
            if said:
                assert said["frames"] == STEPS * MICRO_BATCHES and said["error"] < 1
                assert bool(said["kept"]) == bool(said["alike"]) == bool(feedback)
                assert ("|E|/|G|" in rank["table"]) == ("rho" in rank["table"]) == bool(feedback)
                assert "captured energy" in rank["table"] and "memory for error feedback" in rank["table"]
            assert rank["kept"] == [int(name == "lazy_run" and rank["stage"] > 0)] * STEPS
    different = ["exact", "epilogue", "all", "lazy", "lazy_run"]
    assert len({str(bits(found[name])) for name in different}) == len(different)
    assert bits(found["rank of the matrix"]) == bits(found["exact"]), "such shapes go exact"
    assert bits(found["one, epilogue"]) == bits(found["one, all"])
    first = {name: {rank["losses"][0] for rank in found[name]} for name in different}
    assert len(set(map(str, first.values()))) == 1, "forward messages are exact"


@FULL
def test_a_checkpoint_has_the_state_of_the_links(tmp_path: Path) -> None:
    found = run(tmp_path, 2, *(name for name in TRAININGS if "resumed" in name))
    whole = bits(found["not resumed"])
    assert bits(found["resumed"]) == whole
    assert bits(found["resumed without state"]) == bits(found["resumed, a file is missing"]) != whole


@FULL
def test_what_is_not_finite_arrives_and_every_way_has_the_same_values(tmp_path: Path) -> None:
    found = launch(__file__, 2, tmp_path, "lossy", "nan", "nan to zero", "messages", DS_ZIPCCL=json.dumps(SECTION))
    for rank in found["nan"]:
        assert rank["skipped"] == [0, 1, 1], "the step is not taken"
        assert rank["kept"] == [rank["stage"], 0, rank["stage"]], "no error survives"
    assert any(rank["skipped"] != [0, 1, 1] for rank in found["nan to zero"])
    ways = found["messages"][0]["found"]
    exact = ways.pop("small")
    assert all(same for _, same in exact)
    for way, digests in ways.items():
        assert digests == ways["coded"], way
    assert [same for _, same in ways["coded"]] == [call == 3 for call in range(len(exact))]


if __name__ == "__main__":
    watch(mistake=sys.argv[2])
    rank_program(CASES)
