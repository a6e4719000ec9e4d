"""The example of tensor parallelism on two models of two ranks each, with lossy activations: ranks that hold the same agree on it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
from places import EXAMPLES
from programs import launch

LOSSY = '{"enabled": true, "mode": "always", "min_bytes": 1024, "lossy": true, "roles": {"tp": {"codec": "round"}}}'

pytestmark = pytest.mark.full(reason="one launch of four ranks")


def test_replicas_agree_and_a_wrong_one_shows(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found = launch(__file__, 4, tmp_path, DS_ZIPCCL=LOSSY)
    right, split, shared = (found[name] for name in ("right", "split", "shared"))
    assert right["replicas_equal"] and right["sent"]["coded_calls"]
    assert not split["replicas_equal"], "a layer that is split differs between ranks at one place of their models"
    assert not shared["replicas_equal"], "a layer that is not split differs between ranks of one model"


def rank_program() -> None:
    """Train three times: as it is, with another weight of a split layer, and with another weight of a whole one on both models."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    sys.path.insert(0, str(EXAMPLES))
    import torch
    import torch.distributed as dist
    import train_gpt
    import train_tp
    from torch import nn

    hashed = train_gpt.parameters_hash
    given = ["--size", "tiny", "--steps", "2", "--tensor", "2"]
    # name of the run -> end of the name of a parameter, and the ranks on which it is another one
    runs = {"right": ("", ()), "split": ("q_proj.weight", (3,)), "shared": ("input_layernorm.weight", (1, 3))}
    for name, (ending, ranks) in runs.items():

        def other(
            named: list[tuple[str, nn.Parameter]], zero3: bool, ending: str = ending, ranks: tuple[int, ...] = ranks
        ) -> str:
            named = list(named)
            with torch.no_grad():
                for at, (one, parameter) in enumerate(named):
                    if ending and one.endswith(ending) and dist.get_rank() in ranks:
                        named[at] = (one, nn.Parameter(parameter + 1))
            return hashed(named, zero3)

        train_gpt.parameters_hash = other
        results = train_gpt.train(train_gpt.options(train_tp.EXAMPLE).parse_args(given), train_tp.EXAMPLE)
        if dist.get_rank() == 0:
            (folder / f"{name}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    rank_program()
