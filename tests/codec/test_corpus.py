"""examples/make_corpus.py: the tensors it promises, and our codecs give every one of them back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from places import EXAMPLES
from safetensors.torch import load_file

from ds_zipccl import compress, decompress
from ds_zipccl.tools.exponents import differing

pytestmark = pytest.mark.full(reason="six seconds")
PROGRAM = EXAMPLES / "make_corpus.py"
# Two layers of width 128, 2048 words, batches of 8 x 32 tokens.
ATTENTION, FEED_FORWARD, WORDS = 4 * 128 * 128, 3 * 128 * 384, 2048 * 128
BLOCKS = 2 * (ATTENTION + FEED_FORWARD + 2 * 128)
MODEL = 2 * WORDS + 32 * 128 + BLOCKS + 128
OUTPUTS = 2 * 8 * 32 * (3 * 128 + 128 + 2 * 384 + 128 + 128)
NUMEL = {
    "grad.blocks": BLOCKS,
    "grad.embedding": WORDS,
    "grad.head": WORDS,
    "grad.layer0.attention": ATTENTION,
    "grad.layer0.feed_forward": FEED_FORWARD,
    "grad.layer1.attention": ATTENTION,
    "moe.dispatch": 8 * 320 * 128,
    **dict.fromkeys(("grad.model", "param.before", "param.after"), MODEL),
    **dict.fromkeys(("grad.model_fp32", "adam.exp_avg", "master.model", "grad.model_e5m2"), MODEL),
    **dict.fromkeys(("act.forward", "act.backward", "act.forward_fp16", "act.forward_e4m3"), OUTPUTS),
}
DTYPES = {
    "grad.model_fp32": torch.float32,
    "adam.exp_avg": torch.float32,
    "master.model": torch.float32,
    "act.forward_fp16": torch.float16,
    "act.forward_e4m3": torch.float8_e4m3fn,
    "grad.model_e5m2": torch.float8_e5m2,
}


def make(path: Path, *options: str) -> str:
    words = [sys.executable, str(PROGRAM), "--out", str(path), "--size", "tiny", "--steps", "3", *options]
    result = subprocess.run(
        words, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A tiny corpus, and what was printed."""
    path = tmp_path_factory.mktemp("corpus") / "new" / "corpus.safetensors"
    return path, make(path)


@pytest.fixture(scope="module")
def tensors(made: tuple[Path, str]) -> dict[str, torch.Tensor]:
    return load_file(made[0])


def zeros(tensor: torch.Tensor) -> float:
    return (tensor.float() == 0).float().mean().item()


def test_names_sizes_and_dtypes(made: tuple[Path, str], tensors: dict[str, torch.Tensor]) -> None:
    assert {name: tensor.numel() for name, tensor in tensors.items()} == NUMEL
    assert all(tensor.dtype == DTYPES.get(name, torch.bfloat16) for name, tensor in tensors.items())
    assert {line.split()[0] for line in made[1].splitlines()[1:]} == set(NUMEL)
    assert tensors["moe.dispatch"].shape == (8, 320, 128)


def test_tensors_are_what_they_are_called(tensors: dict[str, torch.Tensor]) -> None:
    assert zeros(tensors["grad.model"]) > 0.1, "rows of words that the batch does not have"
    assert zeros(tensors["grad.embedding"]) > 0.8
    assert zeros(tensors["grad.blocks"]) < 0.05
    assert not differing(tensors["grad.model_fp32"], tensors["grad.model"].float())
    assert differing(tensors["adam.exp_avg"], tensors["adam.exp_avg"].bfloat16().float()) > 500_000
    assert not differing(tensors["param.after"], tensors["master.model"].bfloat16())
    changed = differing(tensors["param.before"], tensors["param.after"])
    assert 0 < changed < tensors["param.after"].numel()
    slots = tensors["moe.dispatch"].flatten(0, 1)
    empty = (slots == 0).all(-1).float().mean().item()
    assert 0.2 < empty < 0.95
    assert zeros(tensors["moe.dispatch"]) == pytest.approx(empty, abs=0.01)
    for tensor in tensors.values():
        assert tensor.float().isfinite().all() and tensor.float().std() > 0


def test_frames_give_the_same_bits(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        back = decompress(compress(tensor))
        assert (back.shape, back.dtype) == (tensor.shape, tensor.dtype), name
        assert differing(back, tensor) == 0, name


def test_seed_decides_what_is_written(made: tuple[Path, str], tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    make(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == made[0].read_bytes()
    make(tmp_path / "other.safetensors", "--seed", "2")
    other = load_file(tmp_path / "other.safetensors")
    assert {name: tensor.shape for name, tensor in other.items()} == {name: t.shape for name, t in tensors.items()}
    assert differing(other["grad.model"], tensors["grad.model"]) > 500_000
