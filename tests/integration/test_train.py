"""Whole trainings, plain and coded, on 2, 3 and 4 ranks: the same losses and parameters, bit for bit.

Starting processes costs far more than training here. One launch trains all modes of a rank count one after the other, with
this file as the program of each rank, and the tests share what the launches found.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiers
from places import EXAMPLES, PACKAGE, ROOT
from programs import launch, reference

EXAMPLE = EXAMPLES / "train_gpt.py"
#: ranks -> trainings on as many ranks
MODES = {
    2: ("zero1", "zero2", "zero3", "moe", "zero2 overlap", "zero3 overlap"),
    3: ("zero2", "zero3"),
    4: ("zero2", "zero3"),
}
#: ranks -> DS_ZIPCCL of the coded launch
CODED = dict.fromkeys(
    MODES, '{"enabled": true, "mode": "always", "reduction": "match", "min_bytes": 4096, "delta": "auto"}'
)
CODED |= {2: '{"enabled": true, "mode": "always", "min_bytes": 4096}'}
AUTO = '{"enabled": true, "min_bytes": 4096, "delta": "auto"}'
#: Roles of coded calls; dp: the broadcasts of the start.
ROLES = {"zero1": {"dp", "zero_grad", "zero_param"}, "moe": {"dp", "zero_grad", "zero_param", "ep"}}
ROLES |= dict.fromkeys(("zero2", "zero3", "zero2 overlap", "zero3 overlap"), ROLES["zero1"])
#: Sources of the results of a plain run: the example, its settings, and counters of nothing.
COUNTED = (EXAMPLES, PACKAGE / "telemetry", ROOT / "benchmarks" / "train" / "trial.py")
STEPS = 4
STEP_LOG = "steps.jsonl"

#: Those of the short tier: two ranks, where all trainings share a launch. The order of sums is seen with three.
SHORT = (2,)
MORE = "two ranks are in the short tier; test_sums.py has sums of three"

Trained = Callable[[int, str], dict[str, Any]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return a function (ranks, "plain", "coded" or "auto") -> results by mode. Its first call for a pair launches the ranks."""

    @functools.cache
    def get(ranks: int, variant: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(f"{variant}{ranks}")
        if variant == "plain":
            return reference(__file__, ranks, folder, "--modes", *MODES[ranks], sources=COUNTED)
        logged = json.dumps({**json.loads(CODED[ranks]), "step_log": str(folder / STEP_LOG)})
        zipccl = {"coded": logged, "auto": AUTO}[variant]
        return launch(__file__, ranks, folder, "--modes", *MODES[ranks], DS_ZIPCCL=zipccl)

    return get


ALL = [(ranks, mode) for ranks, modes in MODES.items() for mode in modes]


@pytest.mark.parametrize(("ranks", "mode"), tiers.mostly_full(ALL, [run for run in ALL if run[0] in SHORT], MORE))
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


@pytest.mark.parametrize("mode", MODES[3])
@pytest.mark.full(reason="ten seconds; comm/test_candidates.py has the competition")
def test_schedules_compete_without_a_trace(trained: Trained, mode: str) -> None:
    """The bits are those of the plain run while all schedules are tried in turn."""
    plain, auto = trained(3, "plain")[mode], trained(3, "auto")[mode]
    assert (auto["losses"], auto["params_sha256"]) == (plain["losses"], plain["params_sha256"])
    assert {"trying schedules"} <= {reason for row in auto["rows"] for reason in row["reasons"]}
    if mode == "zero3":  # many gathers a step; other operations still try the plain collective after so few steps
        assert auto["sent"]["coded_calls"] > 0


@pytest.mark.full(reason=MORE)
@pytest.mark.parametrize("ranks", [3, 4])
def test_differences_are_for_zero2(trained: Trained, ranks: int) -> None:
    """ZeRO-2 gathers differences into each place after the first gather; ZeRO-3 gathers into new memory every time."""
    gathers = {
        mode: next(row for row in trained(ranks, "coded")[mode]["rows"] if row["op"] == "all_gather_into_tensor")
        for mode in ("zero2", "zero3")
    }
    differences = gathers["zero2"]["differences"]
    assert set(differences) == {"", "nothing was gathered there"}
    assert differences[""] == (STEPS - 1) * differences["nothing was gathered there"]
    assert not gathers["zero3"]["differences"]


@pytest.mark.parametrize(
    ("ranks", "mode"),
    tiers.mostly_full(
        [(ranks, mode) for ranks in (2, 3) for mode in MODES[ranks]], [(2, mode) for mode in MODES[2]], MORE
    ),
)
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


def test_steps_shows_the_log_of_a_training(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ds_zipccl.__main__ import main

    coded, file, picture = trained(3, "coded"), tmp_path / "rows.json", tmp_path / "steps.png"
    assert main(["steps", coded["zero2"]["log"], "--json", str(file), "--plot", str(picture)]) == 0
    rows = {row["role"]: row for row in json.loads(file.read_text())["rows"]}
    lines = [line for mode in MODES[3] for line in coded[mode]["logged"]]
    for role in ("zero_param", "zero_grad"):
        sent = [line["roles"][role] for line in lines]
        raw, wire, passed = (
            sum(counts[key] for counts in sent) for key in ("logical_bytes", "wire_bytes", "passed_bytes")
        )
        assert (rows[role]["steps"], rows[role]["ratio"]) == (len(lines), (raw + passed) / (wire + passed))
        assert rows[role]["max"] == max(counts["ratio"] for counts in sent) > rows[role]["min"] > 1
    assert "as differences" in capsys.readouterr().out and picture.read_bytes().startswith(b"\x89PNG")


def test_training_moves(trained: Trained) -> None:
    """Equal bits prove something only if losses and parameters change."""
    for mode, results in trained(2, "plain").items():
        losses = [float.fromhex(loss) for loss in results["losses"]]
        assert len(set(losses)) == STEPS and losses[-1] < losses[0] - 0.1, mode
    hashes = [results["params_sha256"] for results in trained(2, "plain").values()]
    assert len(set(hashes)) > 1


def test_a_wrong_bit_shows(trained: Trained, tmp_path: Path) -> None:
    """Negative proof: with a codec that flips the lowest bit of one element of each message on one rank, these tests fail."""
    wrong = launch(__file__, 2, tmp_path, "--modes", "zero2", "zero3", "--wrong-bit", DS_ZIPCCL=CODED[2])
    for mode in ("zero2", "zero3"):
        assert wrong[mode]["sent"]["coded_calls"] == trained(2, "coded")[mode]["sent"]["coded_calls"]
        assert wrong[mode]["losses"] != trained(2, "plain")[mode]["losses"]
        assert wrong[mode]["params_sha256"] != trained(2, "plain")[mode]["params_sha256"]
        assert not wrong[mode]["replicas_equal"]


@pytest.mark.full(reason="twenty seconds; test_bench_train runs the example, plain and coded")
def test_example_compares(tmp_path: Path) -> None:
    options = ["--compare", "--size", "tiny", "--steps", "3", "--results", str(tmp_path / "both.json")]
    environment = {key: value for key, value in os.environ.items() if key != "DS_ZIPCCL"}
    command = [sys.executable, str(EXAMPLE), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
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
    parser.add_argument("--wrong-bit", action="store_true", help="every message that rank 0 decodes gets one wrong bit")
    args = parser.parse_args()
    sys.path.insert(0, str(EXAMPLE.parent))
    import torch.distributed as dist
    import train_gpt
    from parallel import plant_wrong_bit

    from ds_zipccl.benchmarks.train.trial import WORKLOADS as CONFIGS
    from ds_zipccl.telemetry import counters

    if args.wrong_bit and os.environ["RANK"] == "0":
        plant_wrong_bit()
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
            results |= {"rows": counters.rows(), "log": str(log), "logged": logged}
            (args.folder / f"{mode}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    rank_program()
