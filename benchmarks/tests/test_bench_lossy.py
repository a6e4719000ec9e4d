"""``bench codec`` for lossy codecs: their names with settings, and sizes and errors beside the lossless codec."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from commands import content

from ds_zipccl import codecs
from ds_zipccl.__main__ import main
from ds_zipccl.benchmarks.codec import lossy
from ds_zipccl.lossy import Int, Round, TacoFp8, Zfp

NAMES = {
    "round": Round(),
    "round:1": Round(1),
    "round:mantissa=6": Round(6),
    "taco_fp8": TacoFp8(),
    "taco_fp8:64:false": TacoFp8(64, False),
    "taco_fp8:hadamard=false": TacoFp8(hadamard=False),
    "int:6": Int(6),
    "int:4:group=32:hadamard=true": Int(4, 32, True),
    "zfp:rate=12": Zfp(12),
}


@pytest.mark.parametrize("text", NAMES)
def test_names_with_settings(text: str) -> None:
    assert lossy.codec(text) == NAMES[text]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--codec", "rund"], "no codec 'rund'; the lossy ones are round, taco_fp8, int, zfp"),
        (["--codec", "round:7"], "mantissa of round must be 1 to 6, got '7'"),
        (["--codec", "round:3:4"], "the settings of round are mantissa, each once"),
        (["--codec", "int:8:bits=6"], "the settings of int are bits, group, hadamard, each once"),
        (["--codec", "round", "delta"], "name it alone"),
        (["--codec", "round", "--peers", "lz4"], "--peers are lossless"),
        (["--codec", "round", "--data", "changed:1%"], "add --codec delta"),
        (["--codec", "round", "--dtype", "e4m3", "--data", "normal"], "no tensor of a dtype that lossy codecs take"),
    ],
)
def test_bad_requests_say_what_to_do(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["bench", "codec", *words])
    except SystemExit as leave:
        status = leave.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lossy.json"
    words = ["bench", "codec", "--numel", "64K", "--dtype", "bf16", "fp32", "--data", "normal", "--route", "native"]
    words += ["--repeats", "1", "--codec", "cascade", "round:3", "round:1", "--json", str(path)]
    assert main(words) == 0
    found = {(row["dtype"], row["codec"]): row for row in content(path)["rows"]}
    assert len(found) == 6 and all(row["wrong"] == 0 and row["encode_gbps"] > 0 for row in found.values())
    for dtype, mantissa in (("bfloat16", 7), ("float32", 23)):
        exact = found[dtype, "cascade"]
        assert (exact["error"], exact["small_error"]) == (0, 0)
        for k in (3, 1):
            row = found[dtype, f"round mantissa {k}"]
            assert row["bits"] == pytest.approx(exact["bits"] - mantissa + k, abs=0.1)
            assert row["error"] == pytest.approx(0.212 * 2.0**-k, rel=0.04)
            assert row["small_error"] == pytest.approx(0.175 * 2.0**-k, rel=0.06)
            assert row["ratio"] == pytest.approx(8 * (2 if dtype == "bfloat16" else 4) / row["bits"])
    right = codecs.project
    monkeypatch.setattr(codecs, "project", lambda *of, **more: right(*of, **more) + 1)  # what should arrive
    assert main(words) == 1
    assert "elements came back with other bits" in capsys.readouterr().err


def test_errors_are_of_finite_values() -> None:
    values = torch.tensor([3.0, -4.0, 0.1, 0.0, float("nan"), float("inf")])
    found = lossy.errors(values, torch.tensor([3.0, -4.5, 0.05, 0.0, float("nan"), float("inf")]))
    assert found["error"] == pytest.approx((0.2525 / 25.01) ** 0.5) and found["small_error"] == pytest.approx(0.5)
    assert lossy.errors(torch.zeros(3), torch.zeros(3)) == {"error": None, "small_error": None}
