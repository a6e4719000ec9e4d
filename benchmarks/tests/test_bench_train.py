"""``bench train``: rows, verdicts and plots of trainings, and the stopwatch of the examples."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import assert_refused, outcome
from places import EXAMPLES

from ds_zipccl import comm
from ds_zipccl.__main__ import main
from ds_zipccl.benchmarks.train import bench, trial, volume
from ds_zipccl.benchmarks.train.results import judge, problems, rows
from ds_zipccl.benchmarks.train.trial import Training, find_script
from ds_zipccl.tools import ToolError, link
from ds_zipccl.tools.step_logs import Step

EXAMPLE = EXAMPLES / "train_gpt.py"


@pytest.mark.full(reason="twenty seconds; test_train.py stays")
def test_bench_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "train.png"
    options = f"bench train --workload zero2 --steps 3 --skip 1 --size tiny --plot {picture} --variants coded raw"
    content = outcome(tmp_path, options)
    plain, raw, coded = content["rows"]
    assert [row["variant"] for row in content["rows"]] == ["plain", "raw", "coded"]
    assert {row["params_sha256"] for row in content["rows"]} == {plain["params_sha256"]}
    assert {row["logical_bytes"] for row in content["rows"]} == {plain["wire_bytes"]}
    assert plain["wire_bytes"] > coded["wire_bytes"]
    # each gradient goes only to its owner, which saves one of three parts: two of gradients, one of parameters
    assert raw["wire_bytes"] == pytest.approx(2 / 3 * raw["logical_bytes"], rel=0.06)
    for row in content["rows"]:
        assert (row["ranks"], row["nodes"], row["link"]) == (2, 1, "loopback")
        assert 0.5 < row["comm_ms"] < row["step_ms"]
        assert row["speedup"] == pytest.approx(plain["step_ms"] / row["step_ms"])
        assert row["comm_speedup"] == pytest.approx(plain["comm_ms"] / row["comm_ms"])
    (judged,) = content["verdicts"]
    assert judged["ratio_coded"] == {"coded": pytest.approx(3.3, abs=0.4)}
    assert judged["ratio_coded"]["coded"] > coded["logical_bytes"] / coded["wire_bytes"] > 1
    assert "bits: equal" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_settings_and_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[tuple[Any, ...]] = []

    def run(training: Any, variant: str, section: dict[str, Any] | None, network: Any) -> dict[str, Any]:
        ran.append((variant, section, training.options))
        return results(sent=results()["sent"] | {"coded_calls": 3 * (variant != "plain")})

    monkeypatch.setattr(bench, "run", run)
    words = "bench train --steps 3 --skip 1 --set zero3_base=host staging_mib=32 --variants raw coded --options"
    assert main([*words.split(), "--lr 2e-5"]) == 0
    more = {"zero3_base": "host", "staging_mib": 32}
    always = {"enabled": True, "reduction": "match", "mode": "always", **more}
    wanted = [("plain", None), ("raw", {**always, "codec": "raw"}), ("coded", always)]
    assert ran == [(variant, section, ("--lr", "2e-5")) for variant, section in wanted]


def test_a_workload_names_the_packages_that_it_misses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trial.importlib.util, "find_spec", lambda name: None if name == "peft" else object())
    said = "--workload lora needs peft, not installed here: pip install transformers peft"
    assert_refused("bench train --workload lora".split(), said, capsys)


def results(**changed: Any) -> dict[str, Any]:
    """Return the results of one run."""
    losses = [value.hex() for value in (2.0, 1.5, 1.25)]
    times = {"step_ms": [900.0, 10.0, 30.0], "comm_ms": [800.0, 2.0, 6.0]}
    sent = {"coded_calls": 3, "logical_bytes": 2000.0, "wire_bytes": 1000.0, "passed_bytes": 100.0}
    more = {"steps": None, "parameters": 100, "trained": 10, "micro_batches": 2}
    return {"losses": losses, "params_sha256": "ab", "replicas_equal": True, "sent": sent} | times | more | changed


def logged() -> list[Step]:
    """Return three steps with 400 logical bytes of gathers and 100 of gradients; step 1 has further traffic."""
    counts = [(400, 9000, 0), (400, 10, 0), (350, 20, 50)]
    return [
        Step(step, (0.5 / step,), {"zero_param": gathered, "zero_grad": (50, 20, 50)} | ({"dp": (0, 0, 9)} if step == 1 else {}), {})
        for step, gathered in enumerate(counts, 1)
    ]  # fmt: skip


def test_volume_is_counted_from_the_second_step_on() -> None:
    assert volume.unit_bytes(100, 4) == 150
    assert volume.gathered(logged()) == (800, 80)
    assert volume.gathered([]) == volume.gathered(logged()[:1]) == (0, 0)
    wanted = {
        "lr": [0.25, 0.5 / 3],
        "plain_m": [5, 5],
        "sent_m": [0.8, 1.4],
        "gather_m": [0.1, 0.7],
        "grad_m": [0.7, 0.7],
    }
    assert volume.series(logged(), 100) == wanted

    training = Training(EXAMPLE, "zero3", ranks=2, steps=3)
    lossy = [Step(step, (), {"zero_param": (0, 0, 200), "zero_grad": (0, 0, 25)}, {}) for step in (1, 2)]
    runs = {"plain": [results(sent=None)], "coded": [results(steps=logged())]}
    runs["zeropp"] = [results(steps=lossy, losses=[value.hex() for value in (2.0, 1.0, 1.5)], params_sha256="other")]
    plain, coded, zeropp = rows(training, runs, skip=1)
    found = [(row["gather_ratio"], row["step_m"]) for row in (plain, coded, zeropp)]
    assert found == [(1, 5), (10, pytest.approx(1.1)), (4, 2.25)]
    judged = judge(training, runs)
    assert judged["volume"]["coded"] == wanted and (judged["parameters"], judged["trained"]) == (100, 10)
    assert judged["deviation"] == {"largest": 0.5, "last": 0.25} and judged["problems"] == []


def test_bench_train_rows_are_medians_and_quotients() -> None:
    slow = {"step_ms": [1.0, 40.0, 50.0], "comm_ms": [1.0, 20.0, 30.0]}
    nothing = {"coded_calls": 0, "logical_bytes": 0.0, "wire_bytes": 0.0, "passed_bytes": 0.0}
    runs = {"plain": [results(**slow, sent=nothing), results(**slow, sent=nothing)], "coded": [results(), results()]}
    training = Training(EXAMPLE, "zero3", ranks=4, steps=3, link=link.parse("1gbit"), nodes=2)
    plain, coded = rows(training, runs, skip=1)
    assert [plain[key] for key in ("workload", "ranks", "nodes", "link")] == ["zero3", 4, 2, "1gbit"]
    assert [(row["step_ms"], row["comm_ms"]) for row in (plain, coded)] == [(45, 25), (20, 4)]
    assert [(row["speedup"], row["comm_speedup"]) for row in (plain, coded)] == [(1, 1), (45 / 20, 25 / 4)]
    assert [(row["logical_bytes"], row["wire_bytes"]) for row in (plain, coded)] == [(2100, 2100), (2100, 1100)]
    (alone,) = rows(training, {"plain": runs["plain"]}, skip=0)
    assert alone["logical_bytes"] is alone["wire_bytes"] is None


def test_plot_splits_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from ds_zipccl.benchmarks.train import plot
    from ds_zipccl.tools import plots

    times = {("plain", "loopback"): (300, 60), ("coded", "loopback"): (310, 70), ("plain", "1gbit"): (600, 360)}
    times |= {("coded", "1gbit"): (400, 150)}
    drawn = [
        {"workload": workload, "ranks": 4, "nodes": 1 if link == "loopback" else 2, "link": link, "variant": variant}
        | {"step_ms": step, "comm_ms": comm, "speedup": 600 / step, "comm_speedup": 360 / comm}
        for workload in ("zero2", "zero3", "moe")
        for (variant, link), (step, comm) in times.items()
    ]
    figures: list[Any] = []
    monkeypatch.setattr(plots.pyplot, "close", figures.append)
    plot.trainings(str(tmp_path / "out.png"), drawn)
    (figure,) = figures
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert [axes.get_title(loc="left") for axes in figure.axes] == [f"{m}, 4 ranks" for m in ("zero2", "zero3", "moe")]
    labels = ["DeepSpeed", "our schedule, compressed"]
    for axes in figure.axes:
        names = [label.get_text() for label in axes.get_yticklabels()]
        assert names == ["loopback", *labels, "1gbit, 2 nodes", *labels]
        widths = [[bar.get_width() for bar in bars] for bars in axes.containers]
        assert widths == [[240, 240, 240, 250], [60, 70, 360, 150]]
        texts = [text.get_text() for text in axes.texts]
        assert "400 ms · 1.50x, communication 2.40x" in texts and "600 ms" in texts and "360" in texts
    with pytest.raises(ToolError, match="cannot write /nowhere"):
        plot.trainings("/nowhere/out.png", drawn)


def test_bench_train_sees_what_is_wrong() -> None:
    def runs() -> dict[str, list[dict[str, Any]]]:
        more = {"adapters_sha256": "a", "merged_sha256": "m"}
        plain = results(sent={"coded_calls": 0}, **more)
        return {"plain": [plain], "raw": [results(**more)], "coded": [results(**more)]}

    assert problems(runs()) == []
    damages = {
        "losses differ": {"losses": [value.hex() for value in (2.0, 1.5000000000000002, 1.25)]},
        "parameters differ": {"params_sha256": "ac"},
        "adapters differ": {"adapters_sha256": "b"},
        "merged weights differ": {"merged_sha256": "n"},
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
    assert find_script() == EXAMPLE and find_script(workload="lora") == EXAMPLE.parent / "train_lora.py"
    with pytest.raises(ToolError, match="--script"):
        find_script(Path("/nowhere/train_gpt.py"))


@pytest.mark.full(reason="a minute of two trainings in two variants each")
@pytest.mark.parametrize("workload", ["lora", "finetune", "fsdp2", "fsdp2-lora"])
def test_frozen_and_slowly_changing_parameters(workload: str, tmp_path: Path) -> None:
    if workload.endswith("lora"):
        pytest.importorskip("peft")
    variants = "coded zeropp" if workload == "finetune" else "coded"
    words = f"bench train --workload {workload} --variants {variants} --steps 4 --skip 1 --size tiny"
    content = outcome(tmp_path, f"{words} --set zero3_base=host min_bytes=1024")
    plain, *lossy, coded = content["rows"]
    (judged,) = content["verdicts"]
    assert plain["params_sha256"] == coded["params_sha256"] and plain["gather_ratio"] == 1
    assert coded["step_m"] == pytest.approx(statistics.fmean(judged["volume"]["coded"]["sent_m"]))
    if workload.startswith("fsdp2"):
        assert coded["gather_ratio"] > (30 if workload == "fsdp2-lora" else 5) and coded["step_m"] < plain["step_m"] / 3
        return
    # Tiny models stay gathered from the forward to the backward pass: one gather, and gradients of the trained part.
    if workload == "lora":
        assert set(judged["hashes"]) == {"adapters_sha256", "merged_sha256"}
        assert judged["trained"] < 0.01 * judged["parameters"]
        assert plain["step_m"] == pytest.approx(1, abs=0.01) and coded["gather_ratio"] > 50
    else:
        assert judged["trained"] == judged["parameters"] and plain["step_m"] == pytest.approx(2, abs=0.01)
        assert coded["gather_ratio"] > 5 and coded["step_m"] < 1
        (zeropp,) = lossy  # one node: 8-bit weights, 16-bit gradients
        assert zeropp["gather_ratio"] == pytest.approx(2, abs=0.05) and zeropp["step_m"] == pytest.approx(1.5, abs=0.05)
        assert zeropp["params_sha256"] != plain["params_sha256"] and 0 < judged["deviation"]["largest"] < 0.1


def test_kernels_of_zeropp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values return within a step of their group, parts are in DeepSpeed's order, sums are over all devices."""
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    from zeropp import Quantizer

    kernels = Quantizer()
    values = torch.linspace(-3, 5, 512).view(8, 64).half()
    values[2] = 0
    for bits, nbytes in ((8, 512), (4, 256)):
        quantized, scales = kernels.quantize(values, 16, bits, kernels.Symmetric)
        assert (quantized.dtype, quantized.numel(), scales.shape) == (torch.int8, nbytes, (16,))
        back = kernels.dequantize(quantized, scales, 16, bits, kernels.Symmetric)
        assert back.shape == values.shape and not back[2].any()
        # The largest value of a group may be off by a whole step: 2^(bits - 1) exceeds the largest integer by one.
        assert ((back - values).view(16, -1).abs() <= scales.view(16, 1) + 2**-8).all()
        assert not torch.equal(back, values)
    parts = torch.arange(8.0).repeat_interleave(16)
    swizzled = kernels.dequantize(*kernels.swizzle_quant(parts, 8, 8, 0, 1, nodes=2, devices=4), 8, 8, 0)
    assert swizzled.view(8, 16)[:, 0].round().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    quantized, scales = kernels.quantize(torch.full((4, 32), 2.0), 4, 4, 0)
    total = kernels.dequantize(*kernels.quantized_reduction(quantized, scales, 4, 1, 4, 0, devices=4), 1, 4, 0)
    assert total.shape == (32,) and ((total.float() - 8).abs() <= 2).all()


class Handle:
    """Handle of an operation that ends 20 ms after the first wait."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> bool:
        self.waits += 1
        time.sleep(0.02 if self.waits == 1 else 0)
        return True

    def is_completed(self) -> bool:
        return self.waits > 0


class Backend:
    """The part of DeepSpeed's backend that a stopwatch sees: every collective takes 10 ms."""

    def barrier(self) -> None:
        time.sleep(0.01)

    def all_to_all_single(self, output: Any, input: Any, *, group: Any = None) -> None:
        self.barrier()

    def all_reduce(self, tensor: Any, group: Any = None, async_op: bool = False) -> Handle | None:
        self.barrier()  # a collective inside a collective
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

    # Plain and coded calls are timed equally. These functions run inside all_reduce, or are not calls of the backend.
    inside = {"calibrate", "allocate_bases", "reduce_to_owners", "agree_sizes", "check_frames", "parameter"}
    assert {name for name in comm.__all__ if name.islower()} - inside <= set(CALLS)
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
    assert spent(lambda: time.sleep(0.01)) == 0  # computing while the operation runs
    assert not handle.is_completed() and handle.wait.__qualname__
    assert spent(handle.wait) >= 20
    assert handle.is_completed() and handle.wait() is True
    assert spent(backend.get_rank) == 0
    with pytest.raises(ValueError, match="planted"):
        backend.broadcast(None)
    assert spent(backend.barrier) >= 10  # a failed call has stopped the stopwatch
