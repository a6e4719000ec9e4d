"""``plan``: its table adds up and says what it stands on; operations, schedules and answers of NCCL groups."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import Capture, outcome

from ds_zipccl.__main__ import main
from ds_zipccl.cli.planning import speeds
from ds_zipccl.cli.planning.operations import TOTAL
from ds_zipccl.cli.planning.rows import Computing, step_time
from ds_zipccl.cli.planning.schedules import BASE_SPEED, COPY, HASH
from ds_zipccl.codecs import compress
from ds_zipccl.policy.cost_model import (
    DELTA_RATIO,
    GATHER,
    HOST_BUS,
    LAUNCH_S,
    RDMA_REACH,
    SUM,
    TCP_REACH,
    DeviceProfile,
    Topology,
    coded_seconds,
    plain_seconds,
)

#: 16 nodes of one GPU; no latency, so that times are in proportion to bytes.
WORDS = "plan --params 1e9 --gpus 16 --gpus-per-node 1 --network 10gbit/gpu --live 0 --hop 0 --gpu-profile assumed-1.0"


def planned(tmp_path: Path, *words: str) -> list[dict[str, Any]]:
    return list(outcome(tmp_path, WORDS, *words)["rows"])


def test_the_table_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = planned(tmp_path)
    assert [row["variant"] for row in rows] == ["plain", "coded"] * 4
    for total in rows[-2:]:
        parts = [row for row in rows if row["variant"] == total["variant"] and row["what"] != TOTAL]
        assert [part["op"] for part in parts] == ["all_gather", "all_gather", "reduce_scatter"]
        assert [part["calls"] for part in parts] == [20, 20, 2]
        for key in ("calls", "ms", "codec_ms"):
            assert total[key] == pytest.approx(sum(part[key] for part in parts))
    for row in rows:
        plain = next(other for other in rows if other["what"] == row["what"])
        assert row["speedup"] == pytest.approx(plain["ms"] / row["ms"])
    printed = capsys.readouterr().out
    assert len([line for line in printed.splitlines() if " plain   plain" in line]) == 3


def test_stages_accumulation_and_buckets(tmp_path: Path) -> None:
    def calls(*words: str) -> dict[str, int]:
        rows = planned(tmp_path, *words)
        return {f"{row['what']} {row['op']}": row["calls"] for row in rows if row["op"]}

    three = {"parameters, forward all_gather": 60, "parameters, backward all_gather": 60, "gradients reduce_scatter": 6}
    assert calls("--accumulation", "3") == three
    two = {"gradients all_reduce": 6, "gradients reduce_scatter": 6, "parameters all_gather": 2}
    assert calls("--zero", "2", "--accumulation", "3") == two
    one = {"gradients all_reduce": 2, "gradients reduce_scatter": 2, "parameters all_gather": 2}
    assert calls("--zero", "1", "--accumulation", "3") == one
    assert calls("--zero", "1", "--bucket", "3e8") == dict.fromkeys(one, 7)
    assert calls("--zero", "1", "--owner-only", "off") == {"gradients all_reduce": 2, "parameters all_gather": 2}
    based = {"parameters, first all_gather": 20, "parameters, again all_gather": 100, "gradients reduce_scatter": 6}
    assert calls("--zero3-base", "device", "--accumulation", "3") == based


THREE = {"parameters, forward": (3, "coded"), "parameters, backward": (3, "coded"), "gradients": (3, "coded")}
LORA = {what: (part / 30, how) for what, (part, how) in THREE.items()}


@pytest.mark.parametrize(
    ("words", "wanted"),
    [  # what: plain gathers of all parameters, how
        ("--zero 1", {"gradients": (2, "coded"), "parameters": (1, "differences")}),
        ("--zero 1 --accumulation 3", {"gradients": (2, "coded"), "parameters": (1, "differences")}),
        ("--zero 2 --accumulation 3", {"gradients": (6, "coded"), "parameters": (1, "differences")}),
        ("--zero 2 --delta off", {"gradients": (2, "coded"), "parameters": (1, "coded")}),
        ("--zero 3 --accumulation 3", THREE),
        ("--zero 3 --zero3-base host --accumulation 3",
         {"parameters, first": (1, "differences"), "parameters, again": (5, "copies"), "gradients": (3, "coded")}),
        # Only trained parameters have gradients. Frozen ones come from copies.
        ("--trainable 1e8 --zero 2", {"gradients": (1 / 5, "coded"), "parameters": (1 / 10, "differences")}),
        ("--trainable 1e8 --zero 3 --live 5e8", LORA | {"parameters, backward": (0.05, "coded")}
         | {"frozen, forward": (0.9, "copies"), "frozen, backward": (0.45, "copies")}),
        ("--trainable 1e8 --zero 3 --zero3-base off", LORA | dict.fromkeys(("frozen, forward", "frozen, backward"), (0.9, "coded"))),
    ],
)  # fmt: skip
def test_bytes_of_a_step(words: str, wanted: dict[str, tuple[float, str]], tmp_path: Path) -> None:
    rows = [row for row in planned(tmp_path, *words.split()) if row["what"] != TOTAL]
    gather = 1e3 * 2e9 * 15 / 16 / (10e9 / 8 * RDMA_REACH)
    found = {row["what"]: row["ms"] / gather for row in rows if row["variant"] == "plain"}
    assert found == pytest.approx({what: gathers for what, (gathers, _) in wanted.items()})
    coded = {row["what"]: row["how"] for row in rows if row["variant"] == "coded"}
    assert coded == {what: how for what, (_, how) in wanted.items()}


HOST, QUARTER = "of the host's memory on each node, once for all its GPUs", "a quarter of what is free there"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "auto keeps frozen parameters; all are trained here, see --trainable"),
        ("--trainable 2e8", f"auto keeps 8e+08 frozen parameters in 1.6 GB {HOST}, as far as {QUARTER} allows; the rest is sent"),
        ("--zero3-base host", f"host takes 2 GB {HOST}; a job with less stops at its start"),
        ("--zero3-base device --dtype fp32", "device takes 4 GB of each GPU"),
        ("--zero3-base off", ""),
        ("--delta off", ""),
        ("--zero 2", ""),
    ],
)  # fmt: skip
def test_the_memory_of_bases_is_said(tmp_path: Path, capsys: Capture, words: str, said: str) -> None:
    planned(tmp_path, *words.split())
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("memory:")]
    assert found == ([f"memory: zero3_base {said}"] if said else [])


def test_what_is_measured_of_differences() -> None:
    assert all(1e7 < speed < 1e12 for speed in (*speeds.measured_differences(), *speeds.measured_copies()))
    ratios = [speeds.delta_ratio(dtype) for dtype in ("bfloat16", "float16", "float32")]
    assert ratios == [DELTA_RATIO, pytest.approx(2.34, abs=0.01), pytest.approx(1.60, abs=0.01)]
    # the step that stands for those of trainings shrinks bf16 as they do, and what has not changed shrinks as the plan says or more
    before, after = speeds._step(1 << 20, "bfloat16")
    frame = compress(after, "delta", base=before, shaped=False, checksum=False)
    assert after.nbytes / frame.nbytes == pytest.approx(DELTA_RATIO, rel=0.02)


# ---- schedules, by the model with which they were designed

NODES = "plan --params 7e9 --gpus 32 --gpus-per-node 8 --live 0"
#: Network of a node -> seconds of communication a step: ZeRO-3 plain and coded, ZeRO-2 plain, and with owners, coding and differences at
#: ratio 8. Operations of 200 MB, a codec of 1 TB/s, no latency of rings. Plain is that of the design with rings that pass (n-1)/n: 31/24 of
#: its times where the network is slower than NVLink. Coded gathers of the slowest networks go in two levels. Sums above 100 Gbit/s are
#: plain.
DESIGN = {
    "8x400gbit/node": ("0.11", "0.11", "0.11", "0.11"),
    "8x200gbit/node": ("0.21", "0.21", "0.21", "0.21"),
    "8x100gbit/node": ("0.43", "0.40", "0.43", "0.36"),
    "400gbit/node": ("0.86", "0.74", "0.86", "0.66"),
    "200gbit/node": ("1.71", "1.41", "1.71", "1.26"),
    "100gbit/node": ("3.43", "2.10", "3.43", "0.92"),
    "25gbit-tcp/node": ("15.3", "8.5", "15.3", "3.5"),
    "10gbit-tcp/node": ("38.3", "20.8", "38.3", "8.4"),
}


def on_nccl(tmp_path: Path, *words: str) -> list[dict[str, Any]]:
    return list(outcome(tmp_path, NODES, "--gpu-profile", "assumed-1.0", *words)["rows"])


def seconds(rows: list[dict[str, Any]], network: str, variant: str) -> float:
    (row,) = [row for row in rows if (row["network"], row["what"], row["variant"]) == (network, TOTAL, variant)]
    return float(row["ms"]) / 1e3


def test_every_row_of_the_design(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--network", "--bucket", "1e8", "--gpu-profile", "assumed-1.0", "--hop", "0")
    three = on_nccl(tmp_path, "--zero", "3", *words)
    two = on_nccl(tmp_path, "--zero", "2", "--round-robin", "--delta-ratio", "8", *words)
    assert {row["network"] for row in three} == set(DESIGN)
    for network, wanted in DESIGN.items():
        found = [seconds(three, network, variant) for variant in ("plain", "coded")]
        found += [seconds(two, network, variant) for variant in ("plain", "coded")]
        for got, text in zip(found, wanted, strict=True):
            rounding = 0.5 * 10 ** -len(text.partition(".")[2])
            nearest = min(max(got, float(text) - rounding), float(text) + rounding)
            assert got == pytest.approx(nearest, rel=0.01), (network, text)
    printed = capsys.readouterr().out
    assert "1.0 TB/s, assumed" in printed
    default = "s a step, with the default config"
    assert printed.count(default) == 2 * len(DESIGN)
    assert f"8x400gbit/node: plain communication takes 0.11 {default} as long\n" in printed
    assert (
        f'8x100gbit/node: plain communication takes 0.428 {default} 0.4 s (1.07 times less), with "zero3_base"'
        in printed
    )
    assert f"10gbit-tcp/node: plain communication takes 38.3 {default} 8.38 s (4.57 times less)\n" in printed


def test_the_headline_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    """7B with adapters of 20M parameters, two nodes of 8 GPUs, 10 Gbit/s a node: one sentence with seconds."""
    words = "plan --params 7e9 --trainable 20e6 --gpus 16 --network".split()
    assert main([*words, *"10gbit-tcp/node --gpu-profile assumed-1.0".split()]) == 0
    printed = capsys.readouterr().out
    assert "memory: zero3_base auto keeps 6.98e+09 frozen parameters in 13.96 GB of the host's memory" in printed
    assert "or in 1.745 GB of each GPU, once for all GPUs of a node" in printed
    assert printed.splitlines()[-1].startswith(
        "answer, 10gbit-tcp/node: plain communication takes 23 s a step, with the default config 0.126 s (183 times less)"
    )
    assert main([*words, *"1.25Gbit-TCP/gpu --tflops 400 --tokens 8192 --gpu-profile assumed-1.0".split()]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith(
        "answer, 1.25gbit-tcp/gpu: plain communication takes 23 s a step, with the default config 0.126 s"
    )
    # 1e12 * 400 operations a second, 8 for each parameter and token: 1.15 s
    assert last.endswith("; a whole step takes 24.1 s, with the default config 1.27 s (19 times less)")


def test_lines_of_one_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = on_nccl(tmp_path, "--zero", "2", "--round-robin", "--network", "2x12gbit-tcp/node")
    assert [(row["op"], row["variant"], row["how"], row["calls"]) for row in rows] == [
        ("all_reduce", "plain", "plain", 14), ("reduce_scatter", "coded", "coded", 14),
        ("all_gather", "plain", "plain", 14), ("all_gather", "coded", "differences", 14), ("", "plain", "", 28), ("", "coded", "", 28),
    ]  # fmt: skip
    topology, profile = Topology(4, 8), DeviceProfile(2 * 12e9 / 8 * TCP_REACH)
    ring = plain_seconds(SUM, 1e9, topology, profile)
    assert rows[0]["ms"] == pytest.approx(14e3 * 2 * ring)
    assert rows[1]["ms"] == pytest.approx(14e3 * coded_seconds(SUM, 1e9, topology, profile))
    based = replace(profile, encode=BASE_SPEED * profile.encode, decode=BASE_SPEED * profile.decode)
    gather = coded_seconds(GATHER, 1e9, topology, based, DELTA_RATIO, waits=1) + 1e9 / HASH
    assert rows[3]["ms"] == pytest.approx(14e3 * gather)
    for variant in range(2):
        assert rows[4 + variant]["ms"] == pytest.approx(rows[variant]["ms"] + rows[2 + variant]["ms"])
        assert rows[4 + variant]["speedup"] == pytest.approx(rows[4]["ms"] / rows[4 + variant]["ms"])
    printed = capsys.readouterr().out
    assert "2x12gbit-tcp/node parameters           all_gather" in printed
    words = "--zero 2 --network 100gbit/node --delta off --owner-only off --ratio 2"
    rows = on_nccl(tmp_path, *words.split())
    assert [(row["op"], row["how"]) for row in rows[:4]] == [
        ("all_reduce", "plain"), ("all_reduce", "coded"), ("all_gather", "plain"), ("all_gather", "coded")
    ]  # fmt: skip
    assert 2 < rows[-1]["speedup"] < 2.6  # sums in two levels send 24/31 of the bytes


def test_buckets_that_few_ranks_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bucket of 2 of 32 ranks is all-reduced, because one node gets all of it."""
    spread = on_nccl(tmp_path, "--zero", "2", "--network", "100gbit/node", "--round-robin")
    assert "round_robin_gradients" not in capsys.readouterr().out
    rows = on_nccl(tmp_path, "--zero", "2", "--network", "100gbit/node")
    wanted = f'with "round_robin_gradients": true {spread[-1]["ms"] / 1e3:.3g} s (3.72 times less)\n'
    assert capsys.readouterr().out.endswith(wanted)
    topology, profile = Topology(4, 8), DeviceProfile(100e9 / 8 * RDMA_REACH)
    ours = coded_seconds(SUM, 1e9, topology, profile) + coded_seconds(GATHER, 1e9, topology, profile, waits=1)
    assert rows[1]["ms"] == pytest.approx(14e3 * ours)
    spread = on_nccl(tmp_path, "--zero", "2", "--network", "100gbit/node", "--bucket", "14e9")
    assert spread[1]["ms"] == pytest.approx(1e3 * coded_seconds(SUM, 14e9, topology, profile))


def test_bases_of_zero3(tmp_path: Path) -> None:
    """Gathers of parameters that have not changed send nothing. A base in the host's memory is as slow as its bus."""
    device, host = (
        on_nccl(tmp_path, "--network", "100gbit/node", "--zero3-base", kind, "--accumulation", "2")
        for kind in ("device", "host")
    )
    found = [(row["what"], row["how"], row["calls"]) for row in device[1:4:2]]
    assert found == [("parameters, first", "differences", 140), ("parameters, again", "copies", 420)]
    assert device[3]["ms"] == pytest.approx(420e3 * (LAUNCH_S + 1e8 / COPY))
    assert host[3]["ms"] == pytest.approx(420e3 * (LAUNCH_S + 1e8 / HOST_BUS))
    topology, profile = Topology(4, 8), DeviceProfile(100e9 / 8 * RDMA_REACH)
    based = replace(profile, encode=BASE_SPEED * profile.encode, decode=BASE_SPEED * profile.decode)
    gather = coded_seconds(GATHER, 1e8, topology, based, DELTA_RATIO) + 1e8 / HASH
    assert device[1]["ms"] == pytest.approx(140e3 * (gather + 2e8 / COPY))
    assert host[1]["ms"] == pytest.approx(140e3 * (gather + 1.25e8 / HOST_BUS))
    fast = on_nccl(tmp_path, "--network", "2x400gbit/node", "--zero3-base", "host")
    assert [row["how"] for row in fast[:4]] == ["plain", "plain", "plain", "plain"]


def test_measured_codecs_take_the_place_of_assumed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    row = {"route": "native", "codec": "cascade", "dtype": "bfloat16", "mib": 64, "ratio": 1.5}
    path = tmp_path / "cuda.json"
    path.write_text(json.dumps({"rows": [row | {"encode_gbps": 900, "decode_gbps": 1100}]}))

    def codec(*words: str) -> dict[str, Any]:
        return dict(outcome(tmp_path, NODES, "--network", "400gbit/node", *words)["codec"])

    monkeypatch.setattr(speeds, "MEASURED", tmp_path / "nothing.json")
    assert codec()["about"] == codec("--gpu-profile", "assumed-1.0")["about"]
    assert codec("--gpu-profile", "assumed-0.5")["encode"] == 0.5e12
    assert codec("--gpu-profile", str(path))["decode"] == 1.1e12
    monkeypatch.setattr(speeds, "MEASURED", path)
    monkeypatch.setattr(speeds, "_CHECKOUT", f"{tmp_path}/")
    assert codec()["about"].endswith("TB/s, measured in cuda.json")
    monkeypatch.setattr(speeds, "_CHECKOUT", "/elsewhere/")
    capsys.readouterr()
    found = codec()
    assert (found["encode"], found["decode"]) == (0.9e12, 1.1e12)
    assert f"encode 0.90, decode 1.10 TB/s, measured in {path}" in capsys.readouterr().out
    rows = [row | {"encode_gbps": 900, "decode_gbps": 1100}, row | {"mib": 4, "encode_gbps": 90, "decode_gbps": 1}]
    path.write_text(json.dumps({"rows": [rows[1], rows[0], rows[1] | {"mib": 99, "codec": "wide"}]}))
    assert codec() == found, "the largest message counts"


# ---- whole steps

LARGE = "plan --params 70e9 --gpus 1024 --gpus-per-node 8 --live 0 --gpu-profile assumed-1.0".split()


def test_parts_of_a_step() -> None:
    assert step_time(3.0, 2.0, 1.0, 0.0) == (3.0, 0.0, 2.0)
    half = step_time(3.0, 2.0, 1.0, 0.5)  # 1.5 of 2 seconds are hidden, with the same share of the coding
    assert half == (3.0, 0.75, 0.5) and half.total == 4.25 and half.share == 0.5 / 4.25
    assert step_time(3.0, 2.0, 1.0, 1.0) == (3.0, 1.0, 0.0)
    assert step_time(3.0, 0.0, 0.0, 1.0).share == 0.0
    assert Computing(100.0, 1000).seconds(1e9, 2) == pytest.approx(0.16)


def test_a_step_is_sped_up_less_than_its_communication(tmp_path: Path) -> None:
    words = (*LARGE, "--network", "8x100gbit/node", "--tflops", "400", "--tokens", "4096", "--hop", "0")
    found = outcome(tmp_path, *words)
    plain, coded, node = found["steps"]
    assert plain["gpus"] == 1024 and plain["computing_ms"] == pytest.approx(1e3 * 8 * 70e9 * 4096 / 400e12)
    for row in (plain, coded):
        assert row["step_ms"] == pytest.approx(row["computing_ms"] + row["ms"])
        assert row["exposed"] == pytest.approx(row["ms"] / row["step_ms"])
        assert row["tflops"] == pytest.approx(400 * row["computing_ms"] / row["step_ms"])
    assert plain["step_speedup"] == 1.0 and plain["codec_ms"] == 0
    assert 1.0 < coded["step_speedup"] < coded["speedup"]
    gathered = 140e9  # words that a rank encodes and decodes; sums of 128 nodes are plain
    assert coded["codec_ms"] == pytest.approx(1e3 * 2 * gathered / 1e12)
    assert node["variant"] == "node" and coded["between_gb"] > 1.1 * node["between_gb"]
    hidden_plain, hidden, _ = outcome(tmp_path, *words, "--overlap", "1")["steps"]
    assert hidden_plain["exposed"] == 0 and hidden_plain["step_ms"] == pytest.approx(plain["computing_ms"])
    assert hidden["step_speedup"] < 1, "kernels take their time from the computing that hides them"


def test_hops_and_the_picture_up_to_1024_gpus(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = (*LARGE, "--network", "8x400gbit/node", "100gbit/node", "--tflops", "400", "--tokens", "4096", "--hop", "5")
    picture = tmp_path / "plan.png"
    found = outcome(tmp_path, *words, "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted({row["gpus"] for row in found["scaling"]}) == [16, 32, 64, 128, 256, 512, 1024]
    networks = {(row["network"], row["variant"]) for row in found["scaling"]}
    assert networks == set(itertools.product(("8x400gbit/node", "100gbit/node"), ("plain", "coded", "node")))
    assert found["steps"] == [row for row in found["scaling"] if row["gpus"] == 1024]
    without = outcome(tmp_path, *words[:-1], "0")["steps"]
    for late, row in zip(found["steps"], without, strict=True):
        more, hops = late["ms"] - row["ms"], row["calls"] * 127 * 5e-3
        # a coded gather has several fragments, and a copy of a node has no hop
        least = 0 if row["variant"] == "node" else hops - 1
        assert more == pytest.approx(hops) if row["variant"] == "plain" else least < more <= 5 * hops


def test_without_computing_there_is_no_speed_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "steps" not in outcome(tmp_path, *LARGE, "--network", "100gbit/node")
    printed = capsys.readouterr().out
    assert "times of communication alone" in printed and "step_speedup" not in printed
