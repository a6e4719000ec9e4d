"""``plan``: its table adds up, says what it stands on, and refuses what makes no sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_zipccl.__main__ import main
from ds_zipccl.costs import Profile, predict
from ds_zipccl.tools import comm_trial, speeds, validate
from ds_zipccl.tools.plan import TOTAL

ROOT = Path(__file__).resolve().parents[1]
FAST = Profile(((1.0, 1e-5), (1e9, 1.0)), 1e12, 1e12, 1e12, 1e12, 1e12, 1e-6)
CODEC = str(ROOT / "docs/results/codec.json")
WORDS = "plan --params 1e9 --gpus 16 --gpus-per-node 4 --link 10gbit".split()


def content(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


@pytest.fixture
def fast(tmp_path: Path) -> str:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(FAST.to_json()))
    return str(path)


def planned(tmp_path: Path, *words: str) -> list[dict[str, Any]]:
    path = tmp_path / "plan.json"
    assert main([*WORDS, *words, "--json", str(path)]) == 0
    return list(content(path)["rows"])


def test_the_table_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = planned(tmp_path, "--profile", CODEC)
    assert [row["variant"] for row in rows] == ["plain", "coded, flat", "coded, by nodes"] * 4
    for total in rows[-3:]:
        parts = [row for row in rows if row["variant"] == total["variant"] and row["what"] != TOTAL]
        assert [part["op"] for part in parts] == ["all_gather", "all_gather", "reduce_scatter"]
        assert [part["calls"] for part in parts] == [20, 20, 2]
        for key in ("calls", "wire_gb", "ms"):
            assert total[key] == pytest.approx(sum(part[key] for part in parts))
    for row in rows:
        plain = next(other for other in rows if other["what"] == row["what"])
        assert row["speedup"] == pytest.approx(plain["ms"] / row["ms"])
    printed = capsys.readouterr().out
    assert "codec.json: cascade, normal bfloat16, 33,554,432 elements, route native" in printed
    assert "encode 8.7, decode 12.1, add 12.1 GB/s; ratio 1.502" in printed
    assert "10 Gbit/s of one GPU" in printed
    assert len([line for line in printed.splitlines() if "plain" in line]) == 4


def test_bytes_and_times_of_a_gather(tmp_path: Path, fast: str) -> None:
    plain, flat, nodes, *_ = planned(tmp_path, "--profile", fast, "--ratio", "2")
    # 4 nodes of 4 GPUs, 2 GB of parameters: each GPU's share is a quarter, of which three quarters leave the node
    assert plain["wire_gb"] == pytest.approx(2 / 4 * 3 / 4)
    assert nodes["wire_gb"] == pytest.approx(plain["wire_gb"] / 2)
    assert flat["wire_gb"] == pytest.approx(2 * 15 / 16 * 12 / 15 / 2)
    line = Profile.from_json(FAST.to_json() | {"transfer": [[1.0, 1e-5 + 0.8e-9], [1e9, 1e-5 + 0.8]]})
    assert plain["ms"] == pytest.approx(20e3 * predict("all_gather", "plain", 1e8 / 4, 4, line))
    assert nodes["ms"] == pytest.approx(20e3 * predict("all_gather", "coded", 1e8 / 4, 4, line, 2.0))
    crossing = Profile.from_json(FAST.to_json() | {"transfer": [[1 / 0.8, 1e-5 + 0.8e-9], [1e9 / 0.8, 1e-5 + 0.8]]})
    assert flat["ms"] == pytest.approx(20e3 * predict("all_gather", "coded", 1e8, 16, crossing, 2.0))
    assert nodes["speedup"] > 1.5 > 1 > flat["speedup"]


def test_stages_accumulation_and_buckets(tmp_path: Path, fast: str) -> None:
    def calls(*words: str) -> dict[str, int]:
        return {
            f"{row['what']} {row['op']}": row["calls"]
            for row in planned(tmp_path, "--profile", fast, *words)
            if row["op"]
        }

    three = {"parameters, forward all_gather": 60, "parameters, backward all_gather": 60, "gradients reduce_scatter": 6}
    assert calls("--accumulation", "3") == three
    assert calls("--zero", "2", "--accumulation", "3") == {"gradients all_reduce": 6, "parameters all_gather": 2}
    assert calls("--zero", "1", "--accumulation", "3") == {"gradients all_reduce": 2, "parameters all_gather": 2}
    assert calls("--zero", "1", "--bucket", "3e8") == {"gradients all_reduce": 7, "parameters all_gather": 7}
    rows = planned(tmp_path, "--profile", fast, "--gpus-per-node", "1")
    assert [row["variant"] for row in rows] == ["plain", "coded"] * 4


def test_where_coding_does_not_pay(tmp_path: Path, fast: str, capsys: pytest.CaptureFixture[str]) -> None:
    planned(tmp_path, "--profile", CODEC, "--link", "800gbit", "--gpus-per-node", "1")
    assert "coded: coding does not pay for parameters, forward (all_gather), " in capsys.readouterr().out
    planned(tmp_path, "--profile", fast, "--gpus-per-node", "1")
    assert "does not pay" not in capsys.readouterr().out


def test_this_machine_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(tmp_path, "--dtype", "fp16")
    printed = capsys.readouterr().out
    assert "this machine's CPU" in printed and "ratio 1.17" in printed


def test_the_link_of_a_profile(fast: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--params", "1e9", "--gpus", "2", "--gpus-per-node", "1"]
    assert main([*words, "--profile", fast]) == 0
    assert "8 Gbit/s of one GPU, measured in" in capsys.readouterr().out
    assert main([*words, "--profile", CODEC]) == 2
    assert "add --link" in capsys.readouterr().err


def test_cuda_rows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "cuda.json"
    row = {
        "route": "native",
        "codec": "cascade",
        "dtype": "bfloat16",
        "mib": 64,
        "ratio": 1.5,
        "encode_gbps": 900,
        "decode_gbps": 800,
    }
    rows = [row | {"mib": 4, "encode_gbps": 90}, row, row | {"codec": "window"}, row | {"dtype": "float32"}]
    path.write_text(json.dumps({"rows": rows}))
    found = speeds.read(str(path), "bfloat16")
    assert (found.profile.encode, found.profile.decode, found.ratio) == (9e11, 8e11, 1.5)
    assert "64 MiB" in found.about


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--params", "0"], "70e9"),
        (["--params", "many"], "70e9"),
        (["--gpus", "18"], "two nodes"),
        (["--gpus", "4"], "two nodes"),
        (["--gpus-per-node", "0"], "two nodes"),
        (["--link", "loopback"], "one --link"),
        (["--link", "1gbit", "2gbit"], "one --link"),
        (["--zero", "4"], "1, 2, 3"),
        (["--accumulation", "0"], "at least 1"),
        (["--ratio", "0"], "above 0"),
        (["--latency", "-1"], "above 0"),
        (["--dtype", "e4m3"], "float32"),
        (["--profile", "/nonexistent"], "cannot read"),
        (["--profile", str(ROOT / "docs/results/train.json")], "holds no speeds"),
        (["--profile", str(ROOT / "pyproject.toml")], "cannot read"),
        (["--validate", "--ranks", "1"], "at least 2"),
    ],
)
def test_nonsense_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main([*WORDS, *words]) == 2
    except SystemExit as left:
        assert left.code == 2
    assert message in capsys.readouterr().err


def test_bare_plan_says_what_it_wants(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 2
    assert "--params and --gpus, or --validate" in capsys.readouterr().err


def test_validate_and_what_it_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "validate.json"
    words = ["plan", "--validate", "--op", "all_gather", "broadcast", "--numel", "64K", "--repeats", "1"]
    assert main([*words, "--json", str(path)]) in (
        0,
        1,
    )  # on loopback, of small messages, beside other programs: anything
    found = content(path)
    assert [(row["op"], row["variant"]) for row in found["rows"]] == [
        (op, variant) for op in ("all_gather", "broadcast") for variant in ("plain", "raw", "coded")
    ]
    (entry,) = found["profiles"]
    profile = Profile.from_json(entry["profile"])
    for row in found["rows"]:
        assert row["off"] == pytest.approx(row["predicted_ms"] / row["measured_ms"])
        assert (row["ideal_ms"] is None) == (row["variant"] != "plain")
        if row["variant"] == "raw":
            assert row["predicted_ms"] == pytest.approx(1e3 * predict(row["op"], "raw", 128 << 10, 2, profile))
    assert "raw and coded" in capsys.readouterr().out
    assert main(["plan", "--params", "1e9", "--gpus", "2", "--gpus-per-node", "1", "--profile", str(path)]) == 0


@pytest.mark.parametrize(
    ("variant", "factor", "status"), [("raw", 1.25, 1), ("coded", 0.75, 1), ("coded", 1.15, 0), ("plain", 3, 0)]
)
def test_the_verdict(variant: str, factor: float, status: int) -> None:
    rows = [{"variant": name, "off": 1.0, "wrong": 0} for name in ("plain", "raw", "coded")]
    rows.append({"variant": variant, "off": factor, "wrong": 0})
    assert validate._verdict(rows) == status
    rows[0]["wrong"] = 1
    assert validate._verdict(rows) == 1


def off_part(rank: int, *more: Any) -> None:
    """``take_part`` with a calibration that finds everything a thousand times faster."""
    profile = Profile(((1.0, 1e-9), (1e12, 1e-3)), 1e15, 1e15, 1e15, 1e15, 1e15, 0)
    comm_trial.calibrate.measure = lambda: profile
    REAL_PART(rank, *more)


REAL_PART = comm_trial.take_part


def test_a_wrong_model_is_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(comm_trial, "take_part", off_part)
    assert main(["plan", "--validate", "--op", "all_gather", "--numel", "1M", "--repeats", "1"]) == 1
    assert "off by more than 20% for 2 rows" in capsys.readouterr().err
