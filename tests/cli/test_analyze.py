"""``analyze``, its data sets and its statistics."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Capture, assert_refused, outcome, shannon
from safetensors.torch import save_file

from ds_zipccl import codecs
from ds_zipccl.__main__ import main
from ds_zipccl.benchmarks.codec import trial
from ds_zipccl.tools import data
from ds_zipccl.tools.exponents import Fields, block_modes, differing, entropy, exponents


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    scales = torch.exp2(torch.randint(-6, 7, (64, 1)))
    return {
        "layer.weight": (torch.randn(64, 1024) * scales).bfloat16(),
        "layer.bias": torch.randn(5000),
        "ids": torch.arange(4000),
    }


def analysis(path: Path) -> list[dict[str, Any]]:
    return list(outcome(path.parent, f"analyze {path}")["rows"])


def check(rows: list[dict[str, Any]], tensors: dict[str, torch.Tensor]) -> None:
    """Rows against figures computed here."""
    assert {row["name"] for row in rows[:-1]} == set(tensors)
    raw = coded = 0
    for row in rows[:-1]:
        tensor = tensors[row["name"]]
        raw += tensor.nbytes
        assert (row["numel"], row["wrong"]) == (tensor.numel(), 0)
        assert f"torch.{row['dtype']}" == str(tensor.dtype)
        if tensor.is_floating_point():
            frame = codecs.compress(tensor, shaped=False, checksum=False)
            coded += frame.nbytes
            assert row["ratio"] == pytest.approx(tensor.nbytes / frame.nbytes)
            assert row["entropy"] == pytest.approx(shannon(tensor))
            assert row["zeros"] == pytest.approx(float((tensor == 0).double().mean()))
            bits = 8 * tensor.element_size()
            assert row["bound"] == pytest.approx(bits / (bits - 8 + row["block_entropy"]))
        else:
            coded += tensor.nbytes
            assert (row["ratio"], row["bound"], row["entropy"]) == (1, 1, None)
    assert rows[-1]["name"] == "total"
    assert rows[-1]["ratio"] == pytest.approx(raw / coded)
    coded_rows = [row for row in rows[:-1] if row["entropy"] is not None]
    mean = sum(row["entropy"] * row["numel"] for row in coded_rows) / sum(row["numel"] for row in coded_rows)
    assert rows[-1]["entropy"] == pytest.approx(mean)
    assert rows[-1]["numel"] == sum(tensor.numel() for tensor in tensors.values())


def test_analyze_safetensors(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    rows = analysis(path)
    check(rows, tensors)
    weight = next(row for row in rows if row["name"] == "layer.weight")
    assert weight["entropy"] > weight["block_entropy"] + 0.5  # every row, which is one block, has a scale of its own
    assert weight["block_entropy"] == pytest.approx(2.545, abs=0.02)


@pytest.mark.parametrize("zipped", [True, False])
def test_analyze_torch_file(tensors: dict[str, torch.Tensor], tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "model.pt"
    nested = {
        "model": {"layer": {"weight": tensors["layer.weight"]}},
        "state": [{"bias": tensors["layer.bias"]}, 3, ("text", tensors["ids"])],
    }
    torch.save(nested, path, _use_new_zipfile_serialization=zipped)
    names = {"layer.weight": "model.layer.weight", "layer.bias": "state.0.bias", "ids": "state.2.1"}
    check(analysis(path), {names[name]: tensor for name, tensor in tensors.items()})


def test_analyze_takes_any_tensor(tmp_path: Path) -> None:
    path = tmp_path / "odd.pt"
    odd = {
        "transposed": torch.randn(30, 40).t(),
        "empty": torch.empty(0),
        "scalar": torch.tensor(1.5),
        "sparse": torch.eye(4).to_sparse(),
        "float8": torch.randn(64).to(torch.float8_e4m3fn),
        "uint16": torch.zeros(9, dtype=torch.uint16),
        "nan": torch.full((700,), float("nan"), dtype=torch.float16),
    }
    torch.save(odd, path)
    rows = {row["name"]: row for row in analysis(path)}
    assert {name: rows[name]["numel"] for name in odd} == {name: tensor.numel() for name, tensor in odd.items()}
    assert rows["total"]["wrong"] == 0
    assert rows["float8"]["entropy"] > 0
    assert rows["uint16"]["ratio"] == rows["sparse"]["ratio"] == rows["empty"]["ratio"] == 1


class Payload:
    """Unpickling one creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("zipped", [True, False])
def test_analyze_never_executes_a_pickle(tmp_path: Path, zipped: bool, capsys: Capture) -> None:
    path, proof = tmp_path / "model.pt", tmp_path / "executed"
    torch.save({"x": torch.zeros(3), "y": Payload(proof)}, path, _use_new_zipfile_serialization=zipped)
    assert main(["analyze", str(path)]) == 2
    complaint = capsys.readouterr().err
    assert "refused" in complaint and "safetensors" in complaint
    assert "weights_only" not in complaint  # torch's text tells how to execute it after all
    assert not proof.exists()
    torch.load(path, weights_only=False)
    assert proof.exists()  # the trap was a real one


def test_analyze_refuses_half_a_file(tensors: dict[str, torch.Tensor], tmp_path: Path, capsys: Capture) -> None:
    for save, path in ((torch.save, tmp_path / "model.pt"), (save_file, tmp_path / "model.safetensors")):
        save(tensors, path)
        path.write_bytes(path.read_bytes()[:3000])
        assert_refused(["analyze", str(path)], "not a sound", capsys)


def test_analyze_counts_wrong_elements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = codecs.decompress

    def negates_the_first(frame: torch.Tensor, **more: Any) -> torch.Tensor:
        result = right(frame, **more)
        result[0] = -result[0]  # zeros: 0.0 == -0.0, only the bits differ
        return result

    monkeypatch.setattr(codecs, "decompress", negates_the_first)
    found = outcome(tmp_path, "analyze - --data zeros --numel 4K", status=1)
    assert [row["wrong"] for row in found["rows"]] == [1, 1]


@pytest.mark.parametrize("name", data.DATA)
def test_data_repeats_and_says_its_name(name: str) -> None:
    entry = data.DATA[name]
    spec = data.spec(f"{name}:0.25" if entry.scaled else name)
    assert data.spec(str(spec)) == spec
    for dtype in entry.dtypes:
        tensor = spec.make(3001, dtype)
        assert (tensor.numel(), str(tensor.dtype)) == (3001, f"torch.{dtype}")
        assert not differing(tensor, spec.make(3001, dtype))
        if name not in ("zeros", "constant"):
            assert differing(tensor, spec.make(3001, dtype, seed=1)) > 50


def test_data_is_what_it_is_called() -> None:
    make = {name: data.spec(f"{name}:0.5" if entry.scaled else name) for name, entry in data.DATA.items()}
    x = {name: spec.make(1 << 18, "float32") for name, spec in make.items()}
    assert x["normal"].std().item() == pytest.approx(0.5, rel=0.01)
    assert x["laplace"].abs().mean().item() == pytest.approx(0.5, rel=0.01)
    assert x["student_t3"].abs().median().item() == pytest.approx(0.5 * 0.7649, rel=0.01)  # upper quartile of t3
    assert (x["sparse20"] == 0).float().mean().item() == pytest.approx(0.2, abs=0.005)
    assert (x["embedding"] == 0).float().mean().item() == pytest.approx(0.97, abs=0.04)
    assert not differing(x["bf16_in_fp32"], x["bf16_in_fp32"].bfloat16().float())
    assert not x["zeros"].any() and (x["constant"] == 0.5).all()
    assert shannon(x["random"]) > 7.99
    assert shannon(x["rows"]) > shannon(x["normal"]) + 0.5


def test_exponent_statistics() -> None:
    two_scales = torch.cat([torch.full((512,), 1.0), torch.full((512,), 4.0)])
    found = exponents(two_scales, 512)
    assert (found.entropy, found.within_blocks) == (pytest.approx(1.0), 0.0)
    mixed = torch.tensor([1.0, 4.0]).repeat(256)
    assert exponents(mixed, 512).within_blocks == pytest.approx(1.0 + 1 / (2 * 512 * math.log(2)))
    tensor = data.spec("normal").make(100_003, "float16")  # the last block is a part
    assert exponents(tensor).entropy == pytest.approx(shannon(tensor))
    assert exponents(tensor).counts.sum() == 100_003
    assert exponents(torch.empty(0)).entropy == exponents(torch.empty(0)).within_blocks == 0
    assert float(entropy(np.array([4, 4, 4, 4]))) == 2.0
    fp8 = ((torch.float8_e4m3fn, (4, 3)), (torch.float8_e5m2, (5, 2)))
    for dtype, bits in ((torch.bfloat16, (8, 7)), (torch.float16, (5, 10)), (torch.float32, (8, 23)), *fp8):
        assert (Fields.of(dtype).exponent, Fields.of(dtype).mantissa) == bits


def test_modes_of_blocks_are_those_that_the_encoder_chose() -> None:
    normal = data.spec("normal").make(512, "bfloat16")
    noise = data.spec("random").make(512, "bfloat16")
    sparse = data.spec("sparse20").make(300, "bfloat16")
    wide = (normal * torch.exp2(torch.arange(512) % 6)).bfloat16()
    blocks = [torch.zeros(512).bfloat16(), noise, normal, normal * 16, *[noise] * 14, wide, *[noise] * 15, sparse]
    tensor = torch.cat(blocks)
    assert block_modes(codecs.compress(tensor, block=512)).tolist() == [0, 1, 2, 2, *[1] * 14, 4, *[1] * 15, 3]


def test_choices_are_those_of_the_codec() -> None:
    assert data.BLOCKS == codecs.exponent.BLOCKS
    coded = list(codecs.CODED_DTYPES)
    assert [getattr(torch, name) for name in data.DEFAULT_DTYPES] == coded[: len(data.DEFAULT_DTYPES)]
    assert tuple(codecs.CODECS) == trial.CODECS


def test_differing_looks_at_bits() -> None:
    assert differing(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])) == 1
    nans = torch.tensor([0x7FC0, 0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    assert differing(nans, nans) == 0
    assert differing(nans, nans.flip(0)) == 2
    assert differing(nans, nans.flip(0), any_nan=True) == 0
    assert differing(nans, torch.ones(2, dtype=torch.bfloat16), any_nan=True) == 2
