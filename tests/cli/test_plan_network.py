"""``plan --backend nccl``: NCCL groups on GPUs, by the model with which their schedules were designed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import outcome

from ds_zipccl.__main__ import main
from ds_zipccl.cli.planning import speeds
from ds_zipccl.cli.planning.operations import TOTAL
from ds_zipccl.cli.planning.schedules import BASE_SPEED, COPY, HASH
from ds_zipccl.policy.cost_model import DELTA_RATIO
from ds_zipccl.policy.device_rules import (
    AGREEMENT_S,
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

NODES = "plan --params 7e9 --gpus 32 --gpus-per-node 8 --live 0"
#: Network of a node -> seconds of communication a step: ZeRO-3 plain and coded, ZeRO-2 plain, with owners, and with owners, coding and
#: differences at ratio 8. Operations of 100 MB, a codec of 1 TB/s. They are those of the design with rings that pass (n-1)/n: plain and
#: owners take 31/24 of its times where the network is slower than NVLink, and sums in two levels as long as there.
DESIGN = {
    "8x400gbit/node": ("0.11", "0.11", "0.11", "0.07", "0.07"),
    "8x200gbit/node": ("0.21", "0.21", "0.21", "0.14", "0.11"),
    "8x100gbit/node": ("0.43", "0.34", "0.43", "0.29", "0.15"),
    "400gbit/node": ("0.86", "0.62", "0.86", "0.57", "0.25"),
    "200gbit/node": ("1.71", "1.16", "1.71", "1.14", "0.44"),
    "100gbit/node": ("3.43", "2.26", "3.43", "2.28", "0.82"),
    "25gbit-tcp/node": ("15.3", "9.8", "15.3", "10.2", "3.5"),
    "10gbit-tcp/node": ("38.3", "24.5", "38.3", "25.5", "8.6"),
}
#: Seconds of the host waits of 280 gathers: the design reckoned with them, and the gathers of ZeRO-3 no longer have them.
WAITS = 280 * AGREEMENT_S


def on_nccl(tmp_path: Path, *words: str) -> list[dict[str, Any]]:
    return list(outcome(tmp_path, NODES, "--gpu-profile", "assumed-1.0", *words)["rows"])


def seconds(rows: list[dict[str, Any]], network: str, variant: str) -> float:
    (row,) = [row for row in rows if (row["network"], row["what"], row["variant"]) == (network, TOTAL, variant)]
    return float(row["ms"]) / 1e3


def test_every_row_of_the_design(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--network", "--bucket", "1e8", "--gpu-profile", "assumed-1.0")
    three = on_nccl(tmp_path, "--zero", "3", *words)
    two = on_nccl(tmp_path, "--zero", "2", "--round-robin", "--delta-ratio", "8", *words)
    assert {row["network"] for row in three} == set(DESIGN)
    for network, wanted in DESIGN.items():
        gathers = [row["how"] for row in three if row["network"] == network and row["op"] == "all_gather"]
        coded = seconds(three, network, "coded") + WAITS * ("coded" in gathers)
        found = (seconds(three, network, "plain"), coded)
        found += tuple(seconds(two, network, variant) for variant in ("plain", "owners", "coded"))
        for got, text in zip(found, wanted, strict=True):
            rounding = 0.5 * 10 ** -len(text.partition(".")[2])
            nearest = min(max(got, float(text) - rounding), float(text) + rounding)
            assert got == pytest.approx(nearest, rel=0.05), (network, text)
    printed = capsys.readouterr().out
    assert "1.0 TB/s, assumed" in printed
    default = "s a step, with the default config as long (NCCL groups pass), with"
    assert printed.count(default) == 2 * len(DESIGN)
    assert f'8x400gbit/node: plain communication takes 0.11 {default} "nccl": "on" as long\n' in printed
    times = f'38.3 {default} "nccl": "on" 24.5 s (1.56 times less), with "nccl": "on" and'
    assert f"10gbit-tcp/node: plain communication takes {times}" in printed


def test_the_headline_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    """7B with adapters of 20M parameters, two nodes of 8 GPUs, 10 Gbit/s a node: one sentence with seconds."""
    words = "plan --params 7e9 --trainable 20e6 --gpus 16 --network".split()
    assert main([*words, *"10gbit-tcp/node --gpu-profile assumed-1.0".split()]) == 0
    printed = capsys.readouterr().out
    assert "memory: zero3_base auto keeps 6.98e+09 frozen parameters: 13.96 GB of every node" in printed
    assert printed.splitlines()[-1] == (
        "answer, 10gbit-tcp/node: plain communication takes 23 s a step, with the default config as long (NCCL groups pass), "
        'with "nccl": "on" 0.585 s (39.3 times less)'
    )
    assert main([*words, "1.25gbit-tcp/gpu"]) == 0
    assert "answer, 1.25gbit-tcp/gpu: plain communication takes 23 s a step" in capsys.readouterr().out


def test_lines_of_one_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = on_nccl(tmp_path, "--zero", "2", "--round-robin", "--network", "2x50gbit-tcp/node")
    assert [(row["op"], row["variant"], row["how"], row["calls"]) for row in rows] == [
        ("all_reduce", "plain", "plain", 14), ("reduce_scatter", "owners", "plain", 14), ("reduce_scatter", "coded", "coded", 14),
        ("all_gather", "plain", "plain", 14), ("all_gather", "owners", "plain", 14), ("all_gather", "coded", "differences", 14),
        ("", "plain", "", 28), ("", "owners", "", 28), ("", "coded", "", 28),
    ]  # fmt: skip
    topology, profile = Topology(4, 8), DeviceProfile(2 * 50e9 / 8 * TCP_REACH)
    ring = plain_seconds(SUM, 1e9, topology, profile)
    assert rows[0]["ms"] == pytest.approx(14e3 * 2 * ring) and rows[1]["ms"] == pytest.approx(14e3 * ring)
    assert rows[2]["ms"] == pytest.approx(14e3 * coded_seconds(SUM, 1e9, topology, profile))
    based = replace(profile, encode=BASE_SPEED * profile.encode, decode=BASE_SPEED * profile.decode)
    gather = coded_seconds(GATHER, 1e9, topology, based, DELTA_RATIO, waits=1) + 1e9 / HASH
    assert rows[5]["ms"] == pytest.approx(14e3 * gather)
    for variant in range(3):
        assert rows[6 + variant]["ms"] == pytest.approx(rows[variant]["ms"] + rows[3 + variant]["ms"])
        assert rows[6 + variant]["speedup"] == pytest.approx(rows[6]["ms"] / rows[6 + variant]["ms"])
    printed = capsys.readouterr().out
    assert "2x50gbit-tcp/node parameters           all_gather" in printed
    words = "--zero 2 --network 100gbit/node --delta off --owner-only off --ratio 2"
    rows = on_nccl(tmp_path, *words.split())
    assert [(row["op"], row["how"]) for row in rows[:4]] == [
        ("all_reduce", "plain"), ("all_reduce", "coded"), ("all_gather", "plain"), ("all_gather", "coded")
    ]  # fmt: skip
    assert 2 < rows[-1]["speedup"] < 2.6  # sums in two levels send 24/31 of the bytes


def test_buckets_that_few_ranks_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bucket of 2 of 32 ranks: NCCL reduces it to each, which passes every node; ours is all-reduced, because one node gets all of it."""
    rows = on_nccl(tmp_path, "--zero", "2", "--network", "100gbit/node")
    assert "round_robin_gradients is faster" in capsys.readouterr().out
    topology, profile = Topology(4, 8), DeviceProfile(100e9 / 8 * RDMA_REACH)
    assert rows[1]["ms"] == pytest.approx(14e3 * plain_seconds(SUM, 1e9, topology, profile) * 4 / 3)
    ours = coded_seconds(SUM, 1e9, topology, profile) + coded_seconds(GATHER, 1e9, topology, profile, waits=1)
    assert rows[2]["ms"] == pytest.approx(14e3 * ours)
    spread = on_nccl(tmp_path, "--zero", "2", "--network", "100gbit/node", "--bucket", "14e9")
    assert "round_robin_gradients is faster" in capsys.readouterr().out
    assert spread[1]["ms"] == pytest.approx(1e3 * plain_seconds(SUM, 14e9, topology, profile))
    assert spread[2]["ms"] == pytest.approx(1e3 * coded_seconds(SUM, 14e9, topology, profile))


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    found = codec()
    assert (found["encode"], found["decode"]) == (0.9e12, 1.1e12)
    capsys.readouterr()
    codec()
    assert f"encode 0.90, decode 1.10 TB/s, measured in {path}" in capsys.readouterr().out
