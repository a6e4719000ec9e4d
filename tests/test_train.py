"""Whole trainings, plain and coded, on 2, 3 and 4 ranks: the same losses and parameters, bit for bit.

Starting processes costs far more than training here. One launch trains all modes of a rank count one after the other, with
this file as the program of each rank, and the tests share what the launches found.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import launch

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_gpt.py"
#: ranks -> what trains on them
MODES = {2: ("zero1", "zero2", "zero3", "moe"), 3: ("zero2", "zero3"), 4: ("zero2", "zero3")}
#: ranks -> DS_ZIPCCL of the coded launch; empty: the section of the example's own config file
CODED = dict.fromkeys(MODES, '{"enabled": true, "reduction": "match", "min_bytes": 4096, "delta": "auto"}') | {2: ""}
ROLES = {"zero1": {"zero_grad", "zero_param"}, "moe": {"zero_grad", "zero_param", "ep"}}
ROLES |= dict.fromkeys(("zero2", "zero3"), ROLES["zero1"])
STEPS = 4

Trained = Callable[[int, str], dict[str, Any]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """(ranks, "plain" or "coded") -> results by mode; each pair is launched once, when it is first asked for."""

    @functools.cache
    def get(ranks: int, variant: str) -> dict[str, Any]:
        zipccl = {"plain": "0", "coded": CODED[ranks]}[variant]
        folder = tmp_path_factory.mktemp(f"{variant}{ranks}")
        return launch(__file__, ranks, folder, "--modes", *MODES[ranks], DS_ZIPCCL=zipccl)

    return get


@pytest.mark.parametrize(("ranks", "mode"), [(ranks, mode) for ranks, modes in MODES.items() for mode in modes])
def test_plain_and_coded_agree(trained: Trained, ranks: int, mode: str) -> None:
    plain, coded = trained(ranks, "plain")[mode], trained(ranks, "coded")[mode]
    assert coded["losses"] == plain["losses"]
    assert coded["params_sha256"] == plain["params_sha256"]
    assert plain["replicas_equal"] and coded["replicas_equal"]
    assert plain["sent"]["coded_calls"] == 0
    assert {row["role"] for row in coded["rows"] if row["calls"]} == ROLES[mode]
    assert 1.3 * coded["sent"]["wire_bytes"] < coded["sent"]["raw_bytes"]


@pytest.mark.parametrize("ranks", [3, 4])
def test_differences_are_for_zero2(trained: Trained, ranks: int) -> None:
    """There every gather but the first of each place is a difference; ZeRO-3's memory is new every time."""
    gathers = {
        mode: next(row for row in trained(ranks, "coded")[mode]["rows"] if row["op"] == "all_gather_into_tensor")
        for mode in ("zero2", "zero3")
    }
    differences = gathers["zero2"]["differences"]
    assert set(differences) == {"", "nothing was gathered there"}
    assert differences[""] == (STEPS - 1) * differences["nothing was gathered there"]
    assert not gathers["zero3"]["differences"]


def test_training_moves(trained: Trained) -> None:
    """Equal bits mean something only where losses and parameters change."""
    for mode, results in trained(2, "plain").items():
        losses = [float.fromhex(loss) for loss in results["losses"]]
        assert len(set(losses)) == STEPS and losses[-1] < losses[0] - 0.1, mode
    hashes = [results["params_sha256"] for results in trained(2, "plain").values()]
    assert len(set(hashes)) > 1


def test_a_wrong_bit_shows(trained: Trained, tmp_path: Path) -> None:
    """Negative proof: a codec that flips the lowest bit of one element of each message, on one rank, is found out."""
    wrong = launch(__file__, 2, tmp_path, "--modes", "zero2", "zero3", "--wrong-bit", DS_ZIPCCL=CODED[2])
    for mode in ("zero2", "zero3"):
        assert wrong[mode]["sent"]["coded_calls"] == trained(2, "coded")[mode]["sent"]["coded_calls"]
        assert wrong[mode]["losses"] != trained(2, "plain")[mode]["losses"]
        assert wrong[mode]["params_sha256"] != trained(2, "plain")[mode]["params_sha256"]
        assert not wrong[mode]["replicas_equal"]


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
    ratio = both["coded"]["sent"]["raw_bytes"] / both["coded"]["sent"]["wire_bytes"]
    assert f"wire ratio, coded bytes:   {ratio:.3f}" in lines


def test_bench_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ds_zipccl.__main__ import main

    file = tmp_path / "rows.json"
    options = f"bench train --mode zero2 --ranks 2 --steps 3 --skip 1 --size tiny --json {file}"
    assert main(options.split()) == 0
    content = json.loads(file.read_text())
    plain, coded = content["rows"]
    assert [plain["variant"], coded["variant"]] == ["plain", "coded"]
    assert plain["params_sha256"] == coded["params_sha256"]
    assert plain["raw_bytes"] == plain["wire_bytes"] == coded["raw_bytes"] > coded["wire_bytes"]
    assert coded["speedup"] == pytest.approx(plain["step_ms"] / coded["step_ms"])
    assert content["verdicts"][0]["ratio_coded"] > coded["raw_bytes"] / coded["wire_bytes"] > 1
    assert "bits: equal" in capsys.readouterr().out


def test_bench_train_sees_what_is_wrong() -> None:
    from ds_zipccl.tools.bench_train import problems

    def runs() -> dict[str, list[dict[str, Any]]]:
        losses = [value.hex() for value in (2.0, 1.5, 1.25)]
        result = {"losses": losses, "params_sha256": "ab", "replicas_equal": True, "sent": {"coded_calls": 3}}
        return {"plain": [result | {"sent": {"coded_calls": 0}}], "coded": [copy.deepcopy(result)]}

    assert problems(runs()) == []
    damages = {
        "losses differ": {"losses": [value.hex() for value in (2.0, 1.5000000000000002, 1.25)]},
        "parameters differ": {"params_sha256": "ac"},
        "different parameters": {"replicas_equal": False},
        "nothing was coded": {"sent": {"coded_calls": 0}},
        "not finite": {"losses": [value.hex() for value in (2.0, 1.5, float("nan"))]},
    }
    for words, damage in damages.items():
        damaged = runs()
        damaged["coded"][0] |= damage
        assert any(words in problem for problem in problems(damaged)), words


def test_bench_train_without_a_script() -> None:
    from ds_zipccl.tools import ToolError
    from ds_zipccl.tools.bench_train import find_script

    assert find_script() == EXAMPLE
    with pytest.raises(ToolError, match="--script"):
        find_script(Path("/nowhere/train_gpt.py"))


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

    from ds_zipccl import stats
    from ds_zipccl.tools.bench_train import MODES as CONFIGS

    if args.wrong_bit and os.environ["RANK"] == "0":
        plant_wrong_bit()
    for mode in args.modes:
        config, options = CONFIGS[mode]
        given = ["--ds-config", str(EXAMPLE.parent / config), "--size", "tiny", "--steps", str(STEPS), *options]
        stats.reset()
        results = train_gpt.train(train_gpt.options().parse_args(given))
        if dist.get_rank() == 0:
            (args.folder / f"{mode}.json").write_text(json.dumps(results | {"rows": stats.rows()}))
    dist.barrier()
    dist.destroy_process_group()


def plant_wrong_bit() -> None:
    """Make the codec flip the lowest bit of the first element of each message it decodes in this process."""
    import torch

    from ds_zipccl.codecs.exponent import ExponentCodec

    right = ExponentCodec.decode

    def decode(self: Any, payload: torch.Tensor, block: int, words: torch.Tensor, route: str) -> None:
        right(self, payload, block, words, route)
        words.view(torch.int16)[0] ^= 1

    ExponentCodec.decode = decode  # type: ignore[method-assign]


if __name__ == "__main__":
    rank_program()
