"""``plan`` with computing: whole steps, the share of exposed communication, and published steps."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import outcome
from places import ROOT

from ds_zipccl.benchmarks import clusters
from ds_zipccl.benchmarks.simai import compare
from ds_zipccl.cli.planning import schedules
from ds_zipccl.cli.planning.rows import Computing, step_time
from ds_zipccl.cli.planning.speeds import behind

#: (links, tokens) -> TFLOPs of plain ZeRO-3 and of ZeRO++ with 138B parameters, read from the bars a second time.
BARS = {
    (1, 1024): (11, 22), (1, 2048): (20, 38), (2, 2048): (32, 48), (4, 1024): (23, 36), (4, 2048): (36, 50), (8, 2048): (48, 55)
}  # fmt: skip


def planned(tmp_path: Path, *words: str, status: int = 0) -> dict[str, Any]:
    return outcome(tmp_path, "plan", *words, status=status)


# ---- published steps -------------------------------------------------------------------------------------------------


PUBLISHED = json.loads((ROOT / "docs" / "results" / "plan_clusters.json").read_text())


def test_every_published_cell() -> None:
    """A second implementation of the formula gives the same predictions. Two parameters fit all cells of three sizes
    within 10%."""
    fit, rows = PUBLISHED["fit"], PUBLISHED["rows"]
    assert set(fit) == {"tflops", "path"}
    fitted = [row for row in rows if row["fitted"]]
    assert sorted({row["size"] for row in fitted}) == ["138B", "49B", "91B"] and len(fitted) == 14
    large = [row for row in rows if row["size"] == "138B"]
    assert {(row["links"], row["tokens"]): (row["measured"], row["fewer"]) for row in large} == BARS
    for row in rows:
        node = 1 / (1 / (0.95 * 12.5e9 * row["links"]) + 1e-9 / fit["path"])
        talking = 6 * 383 / 384 / (8 * row["tokens"] * node)
        computing = 1e-12 / fit["tflops"]
        assert row["predicted"] == pytest.approx(1e-12 / (computing + talking))
        assert row["exposed"] == pytest.approx(talking / (computing + talking))
        assert row["bytes_alone"] == pytest.approx(1e-12 / (computing + talking / 4))
        assert row["off"] == pytest.approx(row["predicted"] / row["measured"] - 1)
    offs = [row["off"] for row in fitted]
    assert PUBLISHED["worst"] == pytest.approx(max(map(abs, offs))) and PUBLISHED["worst"] <= 0.10
    assert max(offs) == pytest.approx(-min(offs), abs=1e-6)
    assert min(row["bytes_off"] for row in fitted) > 0.25


@pytest.mark.full(reason="a fit takes ten seconds")
def test_the_documented_results_are_those_of_this_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(tmp_path, "--clusters")
    assert PUBLISHED["fit"] == pytest.approx(fit := found["fit"]) and PUBLISHED["source"] == found["source"]
    assert f"computes {fit['tflops']:.1f} TFLOPs; {fit['path']:.1f} GB/s" in capsys.readouterr().out
    for old, new in zip(PUBLISHED["rows"], found["rows"], strict=True):
        assert old == pytest.approx(new)


def test_cells_of_a_figure_are_predicted_unseen() -> None:
    rows = {(row["links"], row["tokens"], row["size"]): row for row in PUBLISHED["rows"]}
    assert clusters.computing_rate([cell for cell in clusters.FITTED if cell.figure != 6]) == pytest.approx(110)
    assert abs(rows[4, 1024, "91B"]["unseen"]) < 0.10
    assert rows[8, 2048, "138B"]["unseen"] < -0.10, "the documentation says that figure 8 is off by more"


@pytest.mark.full(reason="two more fits take twenty seconds")
def test_a_wrong_model_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the path, or with one wrong figure, no fit brings all cells within 10%."""
    with monkeypatch.context() as patched:
        patched.setattr(schedules, "behind", lambda network, path: network)
        planned(tmp_path, "--clusters", status=1)
    wrong = [cell._replace(plain=24) if cell.links == 8 else cell for cell in clusters.FITTED]
    monkeypatch.setattr(clusters, "FITTED", wrong)
    monkeypatch.setattr(clusters, "CELLS", wrong)
    planned(tmp_path, "--clusters", status=1)


def test_fitted_parameters_are_options(tmp_path: Path) -> None:
    """``plan`` with the fitted parameters predicts the cell of a run."""
    (cell,) = [row for row in PUBLISHED["rows"] if (row["links"], row["size"]) == (2, "138B")]
    words = "--params 138e9 --gpus 384 --gpus-per-node 16 --dtype fp16 --ratio 1.2 --network 2x100gbit/node --live 0 --tokens 2048".split()
    fit = ["--hop=0", f"--path={PUBLISHED['fit']['path']}", f"--tflops={PUBLISHED['fit']['tflops']}"]
    plain, _ = planned(tmp_path, *words, *fit)["steps"]
    assert plain["variant"] == "plain" and plain["tflops"] == pytest.approx(cell["predicted"])
    assert plain["exposed"] == pytest.approx(cell["exposed"])


# ---- whole steps -----------------------------------------------------------------------------------------------------

LARGE = "--params 70e9 --gpus 1024 --gpus-per-node 8 --live 0 --gpu-profile assumed-1.0".split()


def test_parts_of_a_step() -> None:
    assert step_time(3.0, 2.0, 1.0, 0.0) == (3.0, 0.0, 2.0)
    half = step_time(3.0, 2.0, 1.0, 0.5)  # 1.5 of 2 seconds are hidden, with the same share of the coding
    assert half == (3.0, 0.75, 0.5) and half.total == 4.25 and half.share == 0.5 / 4.25
    assert step_time(3.0, 2.0, 1.0, 1.0) == (3.0, 1.0, 0.0)
    assert step_time(3.0, 0.0, 0.0, 1.0).share == 0.0
    assert Computing(100.0, 1000).seconds(1e9, 2) == pytest.approx(0.16)
    assert behind(100.0, float("inf")) == 100.0 and behind(30.0, 60.0) == pytest.approx(20.0)


def test_a_step_is_sped_up_less_than_its_communication(tmp_path: Path) -> None:
    words = (*LARGE, "--network", "8x100gbit/node", "--tflops", "400", "--tokens", "4096", "--hop", "0")
    found = planned(tmp_path, *words)
    plain, coded = found["steps"]
    assert plain["gpus"] == 1024 and plain["computing_ms"] == pytest.approx(1e3 * 8 * 70e9 * 4096 / 400e12)
    for row in (plain, coded):
        assert row["step_ms"] == pytest.approx(row["computing_ms"] + row["ms"])
        assert row["exposed"] == pytest.approx(row["ms"] / row["step_ms"])
        assert row["tflops"] == pytest.approx(400 * row["computing_ms"] / row["step_ms"])
    assert plain["step_speedup"] == 1.0 and plain["codec_ms"] == 0
    assert 1.0 < coded["step_speedup"] < coded["speedup"]
    gathered = 140e9  # words that a rank encodes and decodes; sums of 128 nodes are plain
    assert coded["codec_ms"] == pytest.approx(1e3 * 2 * gathered / 1e12)
    hidden_plain, hidden = planned(tmp_path, *words, "--overlap", "1")["steps"]
    assert hidden_plain["exposed"] == 0 and hidden_plain["step_ms"] == pytest.approx(plain["computing_ms"])
    assert hidden["step_speedup"] < 1, "kernels take their time from the computing that hides them"


def test_hops_and_the_picture_up_to_1024_gpus(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = (*LARGE, "--network", "8x400gbit/node", "100gbit/node", "--tflops", "400", "--tokens", "4096", "--hop", "5")
    picture = tmp_path / "plan.png"
    found = planned(tmp_path, *words, "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted({row["gpus"] for row in found["scaling"]}) == [16, 32, 64, 128, 256, 512, 1024]
    networks = {(row["network"], row["variant"]) for row in found["scaling"]}
    assert networks == set(itertools.product(("8x400gbit/node", "100gbit/node"), ("plain", "coded")))
    assert found["steps"] == [row for row in found["scaling"] if row["gpus"] == 1024]
    without = planned(tmp_path, *words[:-1], "0")["steps"]
    for late, row in zip(found["steps"], without, strict=True):
        more, hops = late["ms"] - row["ms"], row["calls"] * 127 * 5e-3
        # a coded gather has several fragments
        assert more == pytest.approx(hops) if row["variant"] == "plain" else hops - 1 < more <= 5 * hops


def test_without_computing_there_is_no_speed_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "steps" not in planned(tmp_path, *LARGE, "--network", "100gbit/node")
    printed = capsys.readouterr().out
    assert "times of communication alone" in printed and "step_speedup" not in printed


# ---- ``make simai`` on a stand-in for the simulator, whose bandwidths are known --------------------------------------

HEADER = """
#pragma once
#include <cstdint>
#include <string>
#include <vector>
using Rows = std::vector<std::vector<std::string>>;
enum class GPUType { H100 };
struct BusBwResult { float busbw; int is_nvlink; };
Rows readCSV(const std::string &path);
BusBwResult cal_busbw(GPUType, float inside, float card, float cards, int nodes, char *op, int gpus, char *nic);
float cal_ratio(Rows, Rows, Rows, uint64_t bytes, int ranks, int tp, uint32_t gpus, char *group, char *op, bool nvlink);
"""
#: Sums have twice the rate of the network cards; operations below 200 MB have half of their rate.
SOURCE = """
#include "astra-sim/system/calbusbw.h"
Rows readCSV(const std::string &) { return {}; }
BusBwResult cal_busbw(GPUType, float, float card, float cards, int, char *op, int, char *) {
  return {card * cards * (std::string(op) == "reducescatter" ? 2 : 1), 0};
}
float cal_ratio(Rows, Rows, Rows, uint64_t bytes, int, int, uint32_t, char *, char *, bool) { return bytes < 200000000 ? 0.5 : 1; }
"""


@pytest.mark.full(reason="compiles a program; the package does not need it")
def test_ten_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    system = tmp_path / compare.SOURCES / "astra-sim" / "system"
    ratios = tmp_path / compare.SOURCES / "inputs" / "ratio"
    system.mkdir(parents=True)
    ratios.mkdir(parents=True)
    (system / "calbusbw.h").write_text(HEADER)
    (system / "calbusbw.cc").write_text(SOURCE)
    shares = [0.8] * 12  # of every size up to 1 GiB; the last row has the full bandwidth
    table = [["Size", *map(str, range(12))], [str(1 << 26), *map(str, shares)], [str(1 << 34), *["0.9"] * 12]]
    (ratios / "nic_ratio.csv").write_text("\n".join(",".join(row) for row in table))
    path = tmp_path / "simai.json"
    monkeypatch.setattr(sys, "argv", ["compare.py", str(tmp_path), "--json", str(path)])
    assert compare.main() == 0
    content = json.loads(path.read_text())
    rows = {(row["params"], row["zero"], row["gpus"], row["network"]): row for row in content["rows"]}
    assert len(rows) == 10

    implied = [(1 << 26) * (8 * m - 1) / (8 * m) / 370e9 * (0.9 / 0.8 - 1) / (m - 1) for m in (16, 32)]
    assert content["hop_us"] == pytest.approx(1e6 * sum(implied) / 2)  # the median over 4 to 128 nodes

    three = rows["7e9", 3, 128, "8x100gbit"]  # gathers of 100 MB, forward and backward, and sums of 1 GB
    one = 14e9 * 127 / 128 / (8 * 12.5e9 * 0.95) * 1e3
    assert three["calls"] == 2 * 140 + 14
    assert three["simai_ms"] == pytest.approx(2.5 * one, rel=1e-5)
    assert three["simai_sizes_ms"] == pytest.approx(4.5 * one, rel=1e-5)
    ours = 3 * one  # the same rings
    assert three["ours_ms"] == pytest.approx(ours)
    assert three["ours_hop_ms"] == pytest.approx(ours + three["calls"] * 15 * content["hop_us"] / 1e3)
    assert three["off"] == pytest.approx(three["ours_ms"] / three["simai_ms"] - 1)
    two = rows["7e9", 2, 16, "8x100gbit"]
    assert two["simai_ms"] == pytest.approx(3 * 14e9 * 15 / 16 / (8 * 12.5e9 * 0.95) * 1e3, rel=1e-5)
    assert "a further node takes" in capsys.readouterr().out
