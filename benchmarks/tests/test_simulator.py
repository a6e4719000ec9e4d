"""``make simai`` on a stand-in for the simulator with the same interface, whose bandwidths are known."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ds_zipccl.benchmarks.simai import compare

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
#: Twice the network cards' rate for sums; half of it is left for operations below 200 MB.
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
