"""Low-rank gradients between the stages of real pipelines: PipelineModule engines over gloo, on two and four ranks."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel import STEPS, VOCABULARY, WIDTH, Lab, assert_trained, rank_program
from programs import launch
from test_parallel import Head, Middle, Words, cross_entropy

from ds_zipccl.telemetry import counters

MICRO_BATCHES = 6
LOWRANK = {"codec": "lowrank", "rank": 4, "when": "backward"}
SECTION = {"enabled": True, "mode": "always", "min_bytes": 1024, "lossy": True, "roles": {"pp": LOWRANK}}


def use(**changes: Any) -> None:
    """Let the communication of this process follow a section from now on."""
    from deepspeed.comm import comm

    from ds_zipccl.config import parse_section

    job = comm.cdb.job
    job.config = parse_section({**SECTION, **changes})


def train(lab: Lab, stages: int = 0, micro_batches: int = MICRO_BATCHES, pp: Any = None, **section: Any) -> None:
    """Train a pipeline whose first steps are warm-ups of nothing: every step counts."""
    from deepspeed.pipe import LayerSpec, PipelineModule

    from ds_zipccl.integration import lossy_state

    lossy_state.drop("pp")
    use(roles={"pp": {**LOWRANK, **(pp or {})}} if pp is not False else {}, **section)
    specs = [LayerSpec(Words, VOCABULARY, WIDTH), *(LayerSpec(Middle, WIDTH, WIDTH) for _ in range(6))]
    model = PipelineModule(
        [*specs, LayerSpec(Head, WIDTH, VOCABULARY)],
        num_stages=stages or lab.ranks,
        loss_fn=cross_entropy,
        partition_method="uniform",
    )
    engine = lab.start(model, 0, gradient_accumulation_steps=micro_batches, gradient_clipping=0.0)

    def batches() -> Iterator[Any]:
        for step in range(micro_batches * STEPS):
            tokens = lab.tokens(step, engine.grid.get_data_parallel_id())
            yield tokens, tokens

    data = batches()
    for _ in range(STEPS):
        lab.losses.append(engine.train_batch(data).item().hex())
    lab.more |= {"stage": engine.stage_id, "stages": engine.num_stages, "lossy": counters.lossy()}


make = functools.partial
Case = Callable[[Lab], None]
CASES: dict[str, Case] = {
    "exact": make(train, pp=False),
    "epilogue": train,
    "all": make(train, pp={"send": "all"}),
    "lazy": make(train, pp={"send": "all", "error": "lazy"}),
    "lazy_run": make(train, pp={"send": "all", "error": "lazy_run"}),
}


def run(tmp_path: Path, ranks: int, *names: str) -> dict[str, list[dict[str, Any]]]:
    found = launch(__file__, ranks, tmp_path, "lossy", *names, DS_ZIPCCL=json.dumps(SECTION))
    return {name: found[name] for name in names}


def test_try(tmp_path: Path) -> None:
    found = run(tmp_path, 4, *CASES)
    for name, ranks in found.items():
        print(name, [float.fromhex(x) for x in ranks[0]["losses"]])
        for rank in ranks: print(rank["lossy"])
        print(ranks[3]["table"])


if __name__ == "__main__":
    rank_program(CASES)
