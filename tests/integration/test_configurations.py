"""Random configurations of DeepSpeed and this package train as plain DeepSpeed does, or fail as it does; ``make fuzz-config`` has more."""

from __future__ import annotations

import configurations
import pytest
from configurations import CONFIG, MODELS, PRECISIONS, TOGETHER, ZERO, configuration, differences

from ds_zipccl.config import KEYS

#: Seeds of all turns.
SEEDS = 300


@pytest.mark.full(reason="a launch of a minute for each twenty")
@pytest.mark.by_turns
@pytest.mark.timeout(TOGETHER * 2 * configurations.LIMIT_S)
@pytest.mark.parametrize("first", range(0, SEEDS, TOGETHER))
def test_the_bits_of_plain_or_its_error(first: int) -> None:
    told = configurations.check(range(first, first + TOGETHER))
    assert not told, "\n".join(told)


def test_every_key_is_drawn_and_a_seed_repeats() -> None:
    drawn = [configuration(seed) for seed in range(SEEDS)]
    assert drawn == [configuration(seed) for seed in range(SEEDS)]
    assert {key for one in drawn for key in one["section"]} == set(KEYS)
    assert {key for one in drawn for key in one["config"]["zero_optimization"]} == {*ZERO, "stage"}
    configs = [one["config"] for one in drawn]
    assert {*CONFIG, *(key for one in PRECISIONS.values() for key in one)} <= {key for one in configs for key in one}
    assert {(one["model"], one["config"]["zero_optimization"]["stage"]) for one in drawn} >= {
        (model, stage) for model in MODELS for stage in range(4) if (model, stage) != ("moe", 3)
    }


@pytest.mark.full(reason="six launches")
def test_other_bits_and_hangs_are_found() -> None:
    """Three ranks whose sums have another order than gloo's; and no time for anything, plain or coded."""
    wanted = configuration(0) | {"ranks": 3, "model": "dense", "actions": ["train"] * 2, "init": False}
    wanted["config"] = {"bf16": {"enabled": True}, "optimizer": configurations.OPTIMIZERS[0]}
    wanted["config"]["zero_optimization"] = {"stage": 1}
    same, other = (
        {"enabled": True, "mode": "always", "min_bytes": 0, "reduction": order} for order in ("match", "fp32")
    )
    told = differences({"same": wanted | {"section": same}, "other": wanted | {"section": other}})
    assert list(told) == ["other"], told
    assert "rank 0: hang" in differences({"late": wanted | {"section": same}}, limit=0.05)["late"]
