"""Whole trainings, plain and coded, on 2 and 3 ranks: the same losses and parameters, bit for bit.

Starting processes costs far more than training here. One launch trains all modes of a rank count one after the other, with
this file as the program of each rank, and the tests share what the launches found.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiers
from commands import python
from places import EXAMPLES, PACKAGE, ROOT
from programs import launch, reference

EXAMPLE = EXAMPLES / "train_gpt.py"
#: ranks -> trainings on as many ranks
MODES = {
    2: ("zero1", "zero2", "zero3", "moe", "zero2 overlap", "zero3 overlap"),
    3: ("zero2", "zero3"),
}
ON = {"enabled": True, "mode": "always", "min_bytes": 4096}
#: ranks -> section of the coded launch
CODED: dict[int, dict[str, Any]] = {2: ON, 3: ON | {"reduction": "match", "delta": "auto"}}
#: With lossy activations, for the example of tensor parallelism.
LOSSY = ON | {"min_bytes": 1024, "lossy": True, "roles": {"tp": {"codec": "round"}}}
#: Roles of coded calls.
ROLES = {"zero1": {"zero_grad", "zero_param"}, "moe": {"zero_grad", "zero_param", "ep"}}
ROLES |= dict.fromkeys(("zero2", "zero3", "zero2 overlap", "zero3 overlap"), ROLES["zero1"])
#: Sources of the results of a plain run: the example, its settings, and counters of nothing.
COUNTED = (EXAMPLES, PACKAGE / "telemetry", ROOT / "benchmarks" / "train" / "trial.py")
STEPS = 4
STEP_LOG = "steps.jsonl"

#: Cases, and those of the short tier: two ranks, where all trainings share a launch. The order of sums is seen with three.
ALL = [(ranks, mode) for ranks, modes in MODES.items() for mode in modes]
CASES = tiers.mostly_full(
    ALL, [(2, mode) for mode in MODES[2]], "two ranks are in the short tier; test_sums.py has sums of three"
)

Trained = Callable[[int, str], dict[str, Any]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return a function (ranks, "plain" or "coded") -> results by mode. Its first call for a pair launches the ranks."""

    @functools.cache
    def get(ranks: int, variant: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(f"{variant}{ranks}")
        if variant == "plain":
            return reference(__file__, ranks, folder, "--modes", *MODES[ranks], sources=COUNTED)
        logged = json.dumps(CODED[ranks] | {"step_log": str(folder / STEP_LOG)})
        return launch(__file__, ranks, folder, "--modes", *MODES[ranks], DS_ZIPCCL=logged)

    return get


@pytest.mark.parametrize(("ranks", "mode"), CASES)
def test_plain_and_coded_agree(trained: Trained, ranks: int, mode: str) -> None:
    plain, coded = trained(ranks, "plain")[mode], trained(ranks, "coded")[mode]
    assert coded["losses"] == plain["losses"]
    assert coded["params_sha256"] == plain["params_sha256"]
    assert plain["replicas_equal"] and coded["replicas_equal"]
    assert plain["sent"]["coded_calls"] == 0
    assert {row["role"] for row in coded["rows"] if row["calls"]} == ROLES[mode]
    least = 1.3 if mode.startswith("zero3") else 2
    assert least * coded["sent"]["wire_bytes"] < coded["sent"]["logical_bytes"]
    summed = {row["op"] for row in coded["rows"] if row["calls"] and row["role"] == "zero_grad"}
    assert summed == {"reduce_scatter_tensor" if mode.startswith("zero3") else "reduce_to_owners"}
    assert not any(row["whole"] for row in coded["rows"])


@pytest.mark.parametrize(("ranks", "mode"), CASES)
def test_steps_of_the_log_add_up(trained: Trained, ranks: int, mode: str) -> None:
    """Each byte and each difference is in the line of exactly one step."""
    coded = trained(ranks, "coded")[mode]
    lines, rows = coded["logged"], coded["rows"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["lr"] == [6e-4] * len(line["lr"]) != [] for line in lines)
    hashed = {"zero_param"} if mode.startswith("zero3") else set()  # gathered once more, after the last step
    for role in {row["role"] for row in rows} - hashed:
        for key in ("logical_bytes", "wire_bytes", "passed_bytes"):
            in_lines = [line["roles"].get(role, {}).get(key, 0) for line in lines]
            assert sum(in_lines) == sum(row[key] for row in rows if row["role"] == role)
            assert len(set(in_lines)) == 1 or (role, key) != ("zero_grad", "logical_bytes"), "every step sends as much"
    gathers = Counter(reason or "as differences" for row in rows for reason in Counter(row["differences"]).elements())
    assert sum((Counter(line["differences"]) for line in lines), Counter()) == gathers


def test_training_moves(trained: Trained) -> None:
    """Equal bits prove something only if losses and parameters change."""
    for mode, results in trained(2, "plain").items():
        losses = [float.fromhex(loss) for loss in results["losses"]]
        assert len(set(losses)) == STEPS and losses[-1] < losses[0] - 0.1, mode
    hashes = [results["params_sha256"] for results in trained(2, "plain").values()]
    assert len(set(hashes)) > 1


@pytest.mark.full(reason="one launch of four ranks")
def test_replicas_of_tensor_parallel_models_agree_and_a_wrong_one_shows(tmp_path: Path) -> None:
    """The example of tensor parallelism on two models of two ranks each, with lossy activations: ranks that hold the same agree on it."""
    pytest.importorskip("transformers")
    found = launch(__file__, 4, tmp_path, "--replicas", DS_ZIPCCL=json.dumps(LOSSY))
    right, split, shared = (found[name] for name in ("right", "split", "shared"))
    assert right["replicas_equal"] and right["sent"]["coded_calls"]
    assert not split["replicas_equal"], "a layer that is split differs between ranks at one place of their models"
    assert not shared["replicas_equal"], "a layer that is not split differs between ranks of one model"


@pytest.mark.full(reason="twenty seconds; test_bench_train runs the example, plain and coded")
def test_example_compares(tmp_path: Path) -> None:
    words = f"--compare --size tiny --steps 3 --results {tmp_path / 'both.json'}".split()
    done = python(str(EXAMPLE), *words, DS_ZIPCCL="")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr[-3000:]
    assert lines[-1] == "bit-identical: yes"
    assert "losses bit-identical:      yes" in lines
    assert any(line.startswith("parameters bit-identical:  yes") for line in lines)
    both = json.loads((tmp_path / "both.json").read_text())
    ratio = both["coded"]["sent"]["logical_bytes"] / both["coded"]["sent"]["wire_bytes"]
    assert f"wire ratio, coded bytes:   {ratio:.3f}" in lines


def test_example_sets_rate_and_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    from train_gpt import deepspeed_config, options

    config = deepspeed_config(options().parse_args("--lr 0.5 --schedule cosine --steps 200".split()))
    assert (config["optimizer"]["params"]["lr"], config["scheduler"]["params"]["warmup_num_steps"]) == (0.5, 10)


# ---- the program of one rank ---------------------------------------------------------------------------------------


def rank_program() -> None:
    """Train each mode in turn with the example's own code; rank 0 leaves MODE.json in the folder for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--modes", nargs="+", default=["zero3"])
    parser.add_argument("--replicas", action="store_true", help="of tensor-parallel models, right and wrong")
    args = parser.parse_args()
    sys.path.insert(0, str(EXAMPLE.parent))
    (train_replicas if args.replicas else train_modes)(args)
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


def train_modes(args: argparse.Namespace) -> None:
    import torch.distributed as dist
    import train_gpt

    from ds_zipccl.benchmarks.train.trial import WORKLOADS as CONFIGS
    from ds_zipccl.telemetry import counters

    for mode in args.modes:
        workload = CONFIGS[mode.split()[0]]
        content = json.loads((EXAMPLE.parent / workload.config).read_text())
        content["zero_optimization"]["overlap_comm"] = mode.endswith("overlap")
        file = args.folder / f"config{os.environ['RANK']}.txt"
        file.write_text(json.dumps(content))
        given = ["--ds-config", str(file), "--size", "tiny", "--steps", str(STEPS), *workload.options]
        example = getattr(importlib.import_module(Path(workload.script).stem), "EXAMPLE", train_gpt.Example())
        counters.reset()
        results = train_gpt.train(train_gpt.options(example).parse_args(given), example)
        if dist.get_rank() == 0:
            log = args.folder / STEP_LOG
            logged = [json.loads(line) for line in log.open()][-STEPS:] if log.exists() else []
            results |= {"rows": counters.rows(), "logged": logged}
            (args.folder / f"{mode}.json").write_text(json.dumps(results))


def train_replicas(args: argparse.Namespace) -> None:
    """Train three times: as it is, with another weight of a split layer, and with another weight of a whole one on both models."""
    import torch
    import torch.distributed as dist
    import train_gpt
    import train_tp

    hashed = train_gpt.parameters_hash
    given = ["--size", "tiny", "--steps", "2", "--tensor", "2"]
    # name of the run -> end of the name of a parameter, and the ranks on which it is another one
    runs = {"right": ("nothing", ()), "split": ("q_proj.weight", (3,)), "shared": ("input_layernorm.weight", (1, 3))}
    for name, (ending, ranks) in runs.items():

        def other(named: Any, zero3: bool, ending: str = ending, ranks: tuple[int, ...] = ranks) -> str:
            here = dist.get_rank() in ranks
            with torch.no_grad():
                changed = [(key, one + 1 if here and key.endswith(ending) else one) for key, one in named]
            return hashed(changed, zero3)

        train_gpt.parameters_hash = other
        results = train_gpt.train(train_gpt.options(train_tp.EXAMPLE).parse_args(given), train_tp.EXAMPLE)
        if dist.get_rank() == 0:
            (args.folder / f"{name}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    rank_program()
