"""Lossy codecs in ``analyze`` and ``plan``: their names, the sizes that are expected, and those of tensors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import content, outcome
from safetensors.torch import save_file
from test_plan import fast

from ds_zipccl import codecs
from ds_zipccl.cli import analyze
from ds_zipccl.lossy import Int, LossyCodec, Round, TacoFp8, Zfp
from ds_zipccl.policy.lossy_sizes import expected

__all__ = ["fast"]

PLAN = "plan --params 1e9 --gpus 16 --gpus-per-node 1 --live 0 --backend gloo --network 10gbit/gpu"


#: Measured on tensors of a GPT of 11M parameters in bfloat16: lossless bits of activations forward and backward and of gradients, and
#: the bits and the error of each codec.
LOSSLESS = (10.73, 11.34, 11.04)
MEASURED: list[tuple[LossyCodec, tuple[float, float, float], float]] = [
    (Round(5), (8.74, 9.36, 9.05), 0.007),
    (Round(3), (6.74, 7.36, 7.04), 0.0266),
    (Round(2), (5.75, 6.37, 6.04), 0.053),
    (Round(1), (4.76, 5.37, 5.04), 0.104),
    (TacoFp8(), (6.79, 6.75, 6.76), 0.0265),
    (TacoFp8(hadamard=False), (6.81, 7.28, 6.98), 0.0267),
    (Int(8), (8.13, 8.13, 8.13), 0.0065),
    (Int(6), (6.13, 6.13, 6.13), 0.0266),
    (Int(4), (4.13, 4.13, 4.13), 0.118),
]


@pytest.mark.parametrize(("codec", "bits", "error"), MEASURED, ids=str)
def test_expected_sizes_are_the_measured_ones(codec: LossyCodec, bits: tuple[float, ...], error: float) -> None:
    for lossless, wanted in zip(LOSSLESS, bits, strict=True):
        found = expected(codec, "bfloat16", lossless)
        assert found.bits == pytest.approx(wanted, rel=0.02)
        assert found.error == pytest.approx(error, rel=0.06)


def test_expected_sizes_of_other_dtypes() -> None:
    """Rounded values have as many bits in every dtype; nothing is cleared where the mantissa is short."""
    assert {expected(Round(2), dtype, 3 + bits).bits for dtype, bits in (("float16", 10), ("float32", 23))} == {5}
    assert expected(Zfp(12), "float32", 26).bits == 12
    assert expected(Zfp(12), "float32", 26).error == pytest.approx(3.4e-3, rel=0.02)
    with pytest.raises(ValueError, match="the size of frames of LossyCodec is not known"):
        expected(LossyCodec(), "bfloat16", 11)


def planned(folder: Path, *words: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["what"], row["variant"]): row for row in outcome(folder, PLAN, *words)["rows"]}


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_lossy_gradients_of_a_plan(stage: str, tmp_path: Path, fast: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes of gradients alone shrink, by the codec's bits."""
    words = ("--profile", fast, "--ratio", "1.5", "--zero", stage)
    before, after = planned(tmp_path, *words), planned(tmp_path, *words, "--gradients", "round:2")
    lossless = 16 / 1.5
    assert content(tmp_path / "outcome.json")["gradients"] == "round mantissa 2"
    assert "round mantissa 2: 5.67 bits a value instead of 10.67, relative L2 error 0.053" in capsys.readouterr().out
    for (what, variant), row in after.items():
        gain = before[what, variant]["wire_gb"] / row["wire_gb"]
        lossy = what == "gradients" and variant != "plain"
        if what != "total":
            assert gain == pytest.approx(lossless / (lossless - 5) if lossy else 1), (what, variant)
            assert (row["ms"] < before[what, variant]["ms"]) == lossy


def test_a_plan_says_where_lossy_gradients_cost_time(
    tmp_path: Path, fast: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a fast link the codec is slower than the link."""
    Path(fast).write_text(json.dumps(content(Path(fast)) | dict.fromkeys(("encode", "decode", "add"), 1e8)))
    words = ("--profile", fast, "--ratio", "1.5", "--zero", "3")
    planned(tmp_path, *words, "--gradients", "int:4")
    said = 'lossy gradients take longer than plain ones, and "auto" does not pass them: take the codec out'
    assert said in capsys.readouterr().out
    planned(tmp_path, *words)
    said = capsys.readouterr().out
    assert "lossy gradients" not in said and " coded   plain " in said


def test_analyze_measures_lossy_codecs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    tensors = {"a": torch.randn(70_000).bfloat16(), "b": torch.randn(3000), "ids": torch.arange(4000)}
    tensors["a"][:3] = torch.tensor([math.nan, math.inf, -math.inf])
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    found = outcome(tmp_path, f"analyze {path} --lossy round:2 round:5")
    rows = {(row["name"], row["codec"]): row for row in found["lossy"]}
    assert len(rows) == 4 and all(row["wrong"] == 0 for row in rows.values())
    for (name, codec), row in rows.items():
        bits = int(codec[-1])
        frame = codecs.compress(tensors[name], Round(bits), lossy=True, shaped=False, checksum=False)
        assert row["bits"] == 8 * frame.nbytes / tensors[name].numel()
        assert row["error"] == pytest.approx(0.212 * 2**-bits, rel=0.08)
        assert row["lossless"] - row["bits"] == pytest.approx({"a": 7, "b": 23}[name] - bits, abs=0.2)
        assert 0 < row["small_error"] < row["error"]
    assert "round mantissa 2" in capsys.readouterr().out


def test_wrong_values_are_seen() -> None:
    x = torch.tensor([3.0, 4.0, 0.0, 0.01, math.nan, math.inf])
    y = torch.tensor([3.0, 4.0, 0.0, 0.02, math.nan, math.inf])
    assert analyze.wrong(x, y, y) == 0 and analyze.wrong(x, y, x) == 1
    lost = torch.where(x.isfinite(), x, torch.zeros(()))
    assert analyze.wrong(x, lost, lost) == 2, "values that were not finite must stay"
