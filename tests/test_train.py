"""Whole trainings, plain and coded, on 2, 3 and 4 ranks: the same losses and parameters, bit for bit.

Starting processes costs far more than training here. One launch trains all modes of a rank count one after the other, with
this file as the program of each rank, and the tests share what the launches found.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import launch

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_gpt.py"
#: ranks -> what trains on them
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
ROLES = {"zero1": {"zero_grad", "zero_param"}, "moe": {"zero_grad", "zero_param", "ep"}}
ROLES |= dict.fromkeys(("zero2", "zero3", "zero2 overlap", "zero3 overlap"), ROLES["zero1"])
STEPS = 4
STEP_LOG = "steps.jsonl"

Trained = Callable[[int, str], dict[str, Any]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """(ranks, "plain", "coded" or "auto") -> results by mode; each pair is launched once, when it is first asked for."""

    @functools.cache
    def get(ranks: int, variant: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(f"{variant}{ranks}")
        logged = json.dumps({**json.loads(CODED[ranks]), "step_log": str(folder / STEP_LOG)})
        zipccl = {"plain": "0", "coded": logged, "auto": AUTO}[variant]
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
    least = 1.3 if mode.startswith("zero3") else 2
    assert least * coded["sent"]["wire_bytes"] < coded["sent"]["raw_bytes"]
    summed = {row["op"] for row in coded["rows"] if row["calls"] and row["role"] == "zero_grad"}
    assert summed == {"reduce_scatter_tensor" if mode.startswith("zero3") else "reduce_to_owners"}
    assert not any(row["whole"] for row in coded["rows"])


@pytest.mark.parametrize("mode", MODES[3])
def test_schedules_compete_without_a_trace(trained: Trained, mode: str) -> None:
    """While every schedule is tried in turn, the bits are those of the plain run."""
    plain, auto = trained(3, "plain")[mode], trained(3, "auto")[mode]
    assert (auto["losses"], auto["params_sha256"]) == (plain["losses"], plain["params_sha256"])
    assert {"plain is faster"} <= {reason for row in auto["rows"] for reason in row["reasons"]}
    if mode == "zero3":  # many gathers a step; others are still trying the plain collective after so few steps
        assert auto["sent"]["coded_calls"] > 0


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


@pytest.mark.parametrize(("ranks", "mode"), [(ranks, mode) for ranks in (2, 3) for mode in MODES[ranks]])
def test_steps_of_the_log_add_up(trained: Trained, ranks: int, mode: str) -> None:
    """Every byte and every difference is in the line of one step."""
    coded = trained(ranks, "coded")[mode]
    lines, rows = coded["logged"], coded["rows"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["lr"] == [6e-4] * len(line["lr"]) != [] for line in lines)
    hashed = {"zero_param"} if mode.startswith("zero3") else set()  # gathered once more, after the last step
    for role in {row["role"] for row in rows} - hashed:
        for key in ("raw_bytes", "wire_bytes", "passed_bytes"):
            in_lines = [line["roles"].get(role, {}).get(key, 0) for line in lines]
            assert sum(in_lines) == sum(row[key] for row in rows if row["role"] == role)
            assert len(set(in_lines)) == 1 or (role, key) != ("zero_grad", "raw_bytes"), "every step sends as much"
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
        raw, wire, passed = (sum(counts[key] for counts in sent) for key in ("raw_bytes", "wire_bytes", "passed_bytes"))
        assert (rows[role]["steps"], rows[role]["ratio"]) == (len(lines), (raw + passed) / (wire + passed))
        assert rows[role]["max"] == max(counts["ratio"] for counts in sent) > rows[role]["min"] > 1
    assert "as differences" in capsys.readouterr().out and picture.read_bytes().startswith(b"\x89PNG")


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


def test_example_sets_rate_and_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    from train_gpt import deepspeed_config, options

    config = deepspeed_config(options().parse_args("--lr 0.5 --schedule cosine --steps 200".split()))
    assert (config["optimizer"]["params"]["lr"], config["scheduler"]["params"]["warmup_num_steps"]) == (0.5, 10)


def test_bench_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ds_zipccl.__main__ import main

    file, picture = tmp_path / "rows.json", tmp_path / "train.png"
    options = (
        f"bench train --mode zero2 --variants coded raw --steps 3 --skip 1 --size tiny --json {file} --plot {picture}"
    )
    assert main(options.split()) == 0
    content = json.loads(file.read_text())
    plain, raw, coded = content["rows"]
    assert [row["variant"] for row in content["rows"]] == ["plain", "raw", "coded"]
    assert plain["params_sha256"] == raw["params_sha256"] == coded["params_sha256"]
    assert plain["raw_bytes"] == plain["wire_bytes"] == raw["raw_bytes"] == coded["raw_bytes"] > coded["wire_bytes"]
    # gradients go to their owners only: of three parts, two of gradients and one of parameters, one stays
    assert raw["wire_bytes"] == pytest.approx(2 / 3 * raw["raw_bytes"], rel=0.06)
    for row in content["rows"]:
        assert (row["ranks"], row["nodes"], row["link"]) == (2, 1, "loopback")
        assert 0.5 < row["comm_ms"] < row["step_ms"]
        assert row["speedup"] == pytest.approx(plain["step_ms"] / row["step_ms"])
        assert row["comm_speedup"] == pytest.approx(plain["comm_ms"] / row["comm_ms"])
    (verdict,) = content["verdicts"]
    assert verdict["ratio_coded"] == {"coded": pytest.approx(2.4, abs=0.4)}
    assert verdict["ratio_coded"]["coded"] > coded["raw_bytes"] / coded["wire_bytes"] > 1
    assert "bits: equal" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


def results(**changed: Any) -> dict[str, Any]:
    """What one run leaves behind."""
    losses = [value.hex() for value in (2.0, 1.5, 1.25)]
    times = {"step_ms": [900.0, 10.0, 30.0], "comm_ms": [800.0, 2.0, 6.0]}
    sent = {"coded_calls": 3, "raw_bytes": 2000.0, "wire_bytes": 1000.0, "passed_bytes": 100.0}
    return {"losses": losses, "params_sha256": "ab", "replicas_equal": True, "sent": sent} | times | changed


def test_bench_train_rows_are_medians_and_quotients() -> None:
    from ds_zipccl.tools.bench_train import rows
    from ds_zipccl.tools.train_trial import Training

    slow = {"step_ms": [1.0, 40.0, 50.0], "comm_ms": [1.0, 20.0, 30.0]}
    nothing = {"coded_calls": 0, "raw_bytes": 0.0, "wire_bytes": 0.0, "passed_bytes": 0.0}
    runs = {"plain": [results(**slow, sent=nothing), results(**slow, sent=nothing)], "coded": [results(), results()]}
    training = Training(EXAMPLE, "zero3", ranks=4, steps=3, link="1gbit", nodes=2)
    plain, coded = rows(training, runs, skip=1)
    assert [plain[key] for key in ("mode", "ranks", "nodes", "link")] == ["zero3", 4, 2, "1gbit"]
    assert [(row["step_ms"], row["comm_ms"]) for row in (plain, coded)] == [(45, 25), (20, 4)]
    assert [(row["speedup"], row["comm_speedup"]) for row in (plain, coded)] == [(1, 1), (45 / 20, 25 / 4)]
    assert [(row["raw_bytes"], row["wire_bytes"]) for row in (plain, coded)] == [(2100, 2100), (2100, 1100)]
    (alone,) = rows(training, {"plain": runs["plain"]}, skip=0)
    assert alone["raw_bytes"] is alone["wire_bytes"] is None


def test_plot_splits_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from ds_zipccl.tools import ToolError, plot_train

    times = {("plain", "loopback"): (300, 60), ("coded", "loopback"): (310, 70), ("plain", "1gbit"): (600, 360)}
    times |= {("coded", "1gbit"): (400, 150)}
    drawn = [
        {"mode": mode, "ranks": 4, "nodes": 1 if link == "loopback" else 2, "link": link, "variant": variant}
        | {"step_ms": step, "comm_ms": comm, "speedup": 600 / step, "comm_speedup": 360 / comm}
        for mode in ("zero2", "zero3", "moe")
        for (variant, link), (step, comm) in times.items()
    ]
    figures: list[Any] = []
    monkeypatch.setattr(plot_train.pyplot, "close", figures.append)
    plot_train.save(str(tmp_path / "out.png"), drawn)
    (figure,) = figures
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert [axes.get_title(loc="left") for axes in figure.axes] == [f"{m}, 4 ranks" for m in ("zero2", "zero3", "moe")]
    for axes in figure.axes:
        names = [label.get_text() for label in axes.get_yticklabels()]
        assert names == ["loopback", "plain", "coded", "1gbit, 2 nodes", "plain", "coded"]
        widths = [[bar.get_width() for bar in bars] for bars in axes.containers]
        assert widths == [[240, 240, 240, 250], [60, 70, 360, 150]]
        texts = [text.get_text() for text in axes.texts]
        assert "400 ms · 1.50x, communication 2.40x" in texts and "600 ms" in texts and "360" in texts
    with pytest.raises(ToolError, match="cannot write /nowhere"):
        plot_train.save("/nowhere/out.png", drawn)


def test_bench_train_sees_what_is_wrong() -> None:
    from ds_zipccl.tools.bench_train import problems

    def runs() -> dict[str, list[dict[str, Any]]]:
        return {"plain": [results(sent={"coded_calls": 0})], "raw": [results()], "coded": [results()]}

    assert problems(runs()) == []
    damages = {
        "losses differ": {"losses": [value.hex() for value in (2.0, 1.5000000000000002, 1.25)]},
        "parameters differ": {"params_sha256": "ac"},
        "different parameters": {"replicas_equal": False},
        "nothing was coded": {"sent": {"coded_calls": 0}},
        "not finite": {"losses": [value.hex() for value in (2.0, 1.5, float("nan"))]},
    }
    for words, damage in damages.items():
        for variant in ("raw", "coded"):
            damaged = runs()
            damaged[variant][0] |= damage
            found = problems(damaged)
            assert any(words in problem for problem in found) and all(problem.startswith(variant) for problem in found)
    coded_plain = runs() | {"plain": [results()]}
    assert problems(coded_plain) == ["plain run: 3 calls were coded"]


def test_bench_train_without_a_script() -> None:
    from ds_zipccl.tools import ToolError
    from ds_zipccl.tools.train_trial import find_script

    assert find_script() == EXAMPLE
    with pytest.raises(ToolError, match="--script"):
        find_script(Path("/nowhere/train_gpt.py"))


class Handle:
    """Of an operation that takes 20 ms from the first wait on."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> bool:
        self.waits += 1
        time.sleep(0.02 if self.waits == 1 else 0)
        return True

    def is_completed(self) -> bool:
        return self.waits > 0


class Backend:
    """As much of DeepSpeed's backend as a stopwatch sees: every collective takes 10 ms."""

    def barrier(self) -> None:
        time.sleep(0.01)

    def all_reduce(self, tensor: Any, async_op: bool = False) -> Handle | None:
        self.barrier()  # made of another collective
        return Handle() if async_op else None

    def broadcast(self, tensor: Any) -> None:
        time.sleep(0.01)
        raise ValueError("planted")

    def get_rank(self) -> int:
        time.sleep(0.03)
        return 0


def test_time_in_collectives_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    from comm_time import CALLS, CommTime

    from ds_zipccl import comm

    # plain and coded are timed alike; sums for their owners are made in the backend's all_reduce
    collectives = {name for name in comm.__all__ if name.islower()} - {"calibrate", "reduce_to_owners"}
    assert collectives <= set(CALLS)
    backend, clock = Backend(), CommTime()
    clock.watch(backend)

    def spent(action: Callable[[], Any]) -> float:
        before, started = clock.ms, time.perf_counter()
        action()
        assert clock.ms - before <= 1000 * (time.perf_counter() - started)
        return clock.ms - before

    assert backend.all_reduce(None) is None
    assert spent(lambda: backend.all_reduce(None)) >= 10
    handle = backend.all_reduce(None, async_op=True)
    assert spent(lambda: time.sleep(0.01)) == 0  # computing, while the operation is in flight
    assert not handle.is_completed() and handle.wait.__qualname__
    assert spent(handle.wait) >= 20
    assert handle.is_completed() and handle.wait() is True
    assert spent(backend.get_rank) == 0
    with pytest.raises(ValueError, match="planted"):
        backend.broadcast(None)
    assert spent(backend.barrier) >= 10  # the stopwatch also stops where a call fails


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
    from ds_zipccl.tools.train_trial import MODES as CONFIGS

    if args.wrong_bit and os.environ["RANK"] == "0":
        plant_wrong_bit()
    for mode in args.modes:
        config, options = CONFIGS[mode.split()[0]]
        content = json.loads((EXAMPLE.parent / config).read_text())
        content["zero_optimization"]["overlap_comm"] = mode.endswith("overlap")
        file = args.folder / f"config{os.environ['RANK']}.txt"
        file.write_text(json.dumps(content))
        given = ["--ds-config", str(file), "--size", "tiny", "--steps", str(STEPS), *options]
        stats.reset()
        results = train_gpt.train(train_gpt.options().parse_args(given))
        if dist.get_rank() == 0:
            log = args.folder / STEP_LOG
            logged = [json.loads(line) for line in log.open()][-STEPS:] if log.exists() else []
            results |= {"rows": stats.rows(), "log": str(log), "logged": logged}
            (args.folder / f"{mode}.json").write_text(json.dumps(results))
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
