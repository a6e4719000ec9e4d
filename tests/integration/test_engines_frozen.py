"""Real ZeRO-3 engines with frozen parameters and the default of zero3_base: bases for these parameters, in memory that the ranks share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from engines import SOURCES, Lab, Model, bits, rank_program
from programs import plain_and_coded
from test_engines_zero3 import ZERO3
from torch import nn

from ds_zipccl.integration.zero import gathers
from ds_zipccl.telemetry import counters

SECTION = {"enabled": True, "mode": "always", "min_bytes": 4096}
SIZES = {"VOCABULARY": 1024, "WIDTH": 512}
#: Bytes of the weights: embedding, a layer.
EMBEDDING, LAYER = 2 * 1024 * 512, 2 * 512 * 512

# ---- cases ---------------------------------------------------------------------------------------------------------


def start(lab: Lab, freeze: Callable[[Model], list[Any]], **config: Any) -> Any:
    def groups(model: Model) -> Any:
        for module in freeze(model):
            module.requires_grad_(False)
        return [parameter for parameter in model.parameters() if parameter.requires_grad]

    return lab.engine(groups=groups, **{**config, "zero": ZERO3})


def ends(lab: Lab, phase: str) -> None:
    lab.ends(phase, {})
    lab.phases[-1]["memory"] = counters.memory().get("copies of gathered parameters", 0)


def train(lab: Lab, engine: Any, steps: int, phase: str) -> None:
    """Take steps, and end a phase."""
    lab.train(engine, steps)
    ends(lab, phase)


def held(engine: Any) -> list[str]:
    """Names of the parameters that have a base."""
    return [name for name, one in engine.module.named_parameters() if gathers.slot_of(one) is not None]


def some(lab: Lab) -> None:
    """The embedding and two layers are frozen, the last layer and the head are trained."""
    engine = start(lab, lambda model: [model.embedding, model.layers[0], model.layers[1]])
    ends(lab, "made")
    lab.phases[-1]["held"] = held(engine)
    train(lab, engine, 2, "2 steps")
    train(lab, engine, 2, "4 steps")
    lab.destroy()
    ends(lab, "destroyed")


def none(lab: Lab) -> None:
    engine = start(lab, lambda model: [])
    train(lab, engine, 2, "2 steps")
    lab.phases[-1]["held"] = held(engine)


def inference(lab: Lab, ends: Callable[[Lab, str], None] = ends) -> None:
    """An engine without an optimizer: no parameter is marked as frozen, and none is ever trained."""
    import deepspeed

    torch.manual_seed(1)
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {**ZERO3}}
    engine, *_ = deepspeed.initialize(model=Model(), config=config)
    lab.engines.append(engine)
    engine.eval()
    for phase in ("first", "later"):
        with torch.no_grad():
            for _ in range(3):
                lab.losses.append(engine(torch.arange(32).view(2, 16)).item().hex())
        ends(lab, phase)
    lab.phases[-1]["held"] = held(engine)


class Stored(nn.Module):
    """A layer whose weight is stored in 8 bits, as that of a quantised model."""

    def __init__(self) -> None:
        super().__init__()
        words = torch.randn(engines.WIDTH, 4 * engines.WIDTH).mul(20).clamp(-127, 127).to(torch.int8)
        self.weight = nn.Parameter(words, requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 0.01 * (hidden @ self.weight.to(hidden.dtype)).unflatten(-1, (4, -1)).sum(-2)


class Quantised(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Stored()


def quantised(lab: Lab) -> None:
    """A frozen layer of int8 between layers that are trained, checkpointed and loaded."""
    engine = start(lab, lambda model: [model.layers[1]], make=Quantised)
    assert engine.module.layers[1].weight.dtype is torch.int8
    train(lab, engine, 2, "2 steps")
    lab.phases[-1]["held"] = held(engine)
    train(lab, engine, 2, "4 steps")
    engine.save_checkpoint(lab.folder / "saved", tag="four")
    lab.train(engine)
    engine.load_checkpoint(lab.folder / "saved", tag="four")
    train(lab, engine, 2, "loaded")


CASES: dict[str, Callable[[Lab], None]] = {case.__name__: case for case in (some, none, inference, quantised)}

# ---- tests ---------------------------------------------------------------------------------------------------------

Run = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run, str]:
    """Results of plain and of coded engines, and the text of rank 0 of these."""
    folder = tmp_path_factory.mktemp("runs")
    found = plain_and_coded(__file__, 2, folder, *CASES, sources=SOURCES, DS_ZIPCCL=json.dumps(SECTION))
    return *found, (folder / "coded/rank0.txt").read_text()


@pytest.mark.parametrize("case", CASES)
def test_no_bit_changes(runs: tuple[Run, Run, str], case: str) -> None:
    plain, coded, _ = runs
    assert bits(coded[case]) == bits(plain[case])


def test_frozen_parameters_alone_have_bases(runs: tuple[Run, Run, str]) -> None:
    """Biases stay gathered. The memory is there from the first step on, and goes with the engine."""
    for rank in runs[1]["some"]:
        made, _, later, destroyed = rank["phases"]
        assert made["held"] == ["embedding.weight", "layers.0.weight", "layers.1.weight"]
        assert made["memory"] == later["memory"] == EMBEDDING + 2 * LAYER and not destroyed["memory"]
    for rank in runs[1]["none"]:
        assert rank["phases"][-1]["held"] == [] and not rank["phases"][-1]["memory"]
    for rank in runs[1]["inference"]:
        assert len(rank["phases"][-1]["held"]) == 5
    for rank in runs[1]["quantised"]:
        assert rank["phases"][0]["held"] == ["layers.1.weight"] and rank["phases"][0]["memory"] == 2 * LAYER


def test_the_memory_is_said_where_something_is_frozen(runs: tuple[Run, Run, str]) -> None:
    said = [line for line in runs[2].splitlines() if "zero3_base auto:" in line]
    assert said == [
        f"[ds_zipccl] zero3_base auto: {nbytes / 1e6:.1f} MB, shared by the 2 ranks of a node, for {count} frozen parameters"
        for nbytes, count in ((EMBEDDING + 2 * LAYER, 3), (2 * EMBEDDING + 3 * LAYER, 5), (2 * LAYER, 1))
    ]


def test_nothing_goes_in_full_after_the_first_gather(runs: tuple[Run, Run, str]) -> None:
    for case, phase in (("some", 2), ("inference", 1), ("quantised", 1), ("quantised", 2)):
        for rank in runs[1][case]:
            later = rank["phases"][phase]
            assert set(later["differences"]) == {""} and later["differences"][""], (case, later)


@pytest.mark.full(reason="the choice has tests without engines")
def test_as_many_as_the_limit_allows(tmp_path: Path) -> None:
    """1 MiB holds the embedding, and no layer beside it."""
    limit = json.dumps({**SECTION, "zero3_base_mib": 1})
    plain, limited = plain_and_coded(__file__, 2, tmp_path, "some", sources=SOURCES, DS_ZIPCCL=limit)
    assert bits(limited["some"]) == bits(plain["some"])
    assert all(rank["phases"][0]["held"] == ["embedding.weight"] for rank in limited["some"])
    said = (tmp_path / "coded/rank0.txt").read_text().replace("\n", " ")
    assert "for 1 of 3 frozen parameters: 1.0 MB are allowed on a node, see zero3_base_mib" in said


if __name__ == "__main__":
    rank_program(CASES, sizes=SIZES)
