"""``bench codec --codec delta``: data with a base, the bound, and the codec beside its peers."""

from __future__ import annotations

from collections import Counter
from math import log2
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import assert_refused, content

from ds_zipccl import codecs
from ds_zipccl.__main__ import main
from ds_zipccl.benchmarks import data
from ds_zipccl.benchmarks.codec import delta

WORDS = ["bench", "codec", "--codec", "delta", "--route", "native", "--dtype", "bf16", "--repeats", "1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "changed:1%"], "add --codec delta"),
        (["--data", "changed:1", "--codec", "delta"], "percentage"),
        (["--data", "changed:101%", "--codec", "delta"], "percentage"),
        (["--data", "adamw:2", "--codec", "delta"], "a rate"),
        (["--data", "normal", "--codec", "delta"], "has no base"),
        (["--codec", "delta", "raw"], "name it alone"),
        (["--codec", "delta", "--dtype", "e4m3"], "bf16, fp16 and fp32"),
        (["--codec", "delta", "--peers", "lz4"], "codes no differences"),
        (["--peers", "pairs"], "add --codec delta"),
    ],
)
def test_bad_requests_say_what_to_do(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(["bench", "codec", *words], message, capsys)


def _orders(tensor: torch.Tensor) -> torch.Tensor:
    """Words as numbers in the order of the floats."""
    words = tensor.view(torch.int16).long() & 0xFFFF
    return torch.where(words >= 0x8000, 0xFFFF - words, words + 0x8000)


def test_pairs_are_what_their_names_say() -> None:
    words, base = data.Pair("changed", 3.0).make(1 << 18, "bfloat16")
    moved = (_orders(words) - _orders(base)).abs()
    share = float((moved > 0).float().mean())
    assert share == pytest.approx(0.03, rel=0.05)
    assert set(moved.unique().tolist()) == {0, 1, 2}
    assert float((moved == 2).float().mean()) == pytest.approx(0.015 * share, rel=0.3)
    assert base.float().std() == pytest.approx(0.02, rel=0.01)
    words, base = data.Pair("changed", 0.0).make(1000, "float32")
    assert torch.equal(words, base)

    changed = []
    for rate in (1e-3, 1e-4, 1e-5):
        words, base = data.Pair("adamw", rate).make(1 << 16, "bfloat16")
        changed.append(float((words != base).float().mean()))
    assert changed[0] > 0.8 > changed[1] > 0.2 > changed[2] > 0.02


def test_rows_are_true(tmp_path: Path) -> None:
    pytest.importorskip("zstandard", reason="pip install ds-zipccl[bench]")
    path = tmp_path / "delta.json"
    names = ["changed:0%", "changed:5%", "adamw:0.0003"]
    assert main([*WORDS, "--numel", "128K", "--data", *names, "--peers", "--json", str(path)]) == 0
    found = content(path)
    assert [(row["data"], row["codec"]) for row in found["rows"]] == [
        (name, codec) for name in names for codec in ("delta", "xor_zstd1", "pairs")
    ]
    assert list(found["peers"]) == ["zstandard"]
    for row in found["rows"]:
        assert list(row) == [column.key for column in delta.COLUMNS]
        assert row["wrong"] == 0
        pair = data.codec_spec(row["data"])
        assert isinstance(pair, data.Pair) and str(pair) == row["data"]
        words, base = pair.make(row["numel"], row["dtype"])
        moved = _orders(words) - _orders(base)
        changes = int((moved != 0).sum())
        assert row["changed"] == changes / row["numel"]
        shares = [count / row["numel"] for count in Counter(moved.tolist()).values()]
        entropy = -sum(share * log2(share) for share in shares)
        assert row["bound"] == (pytest.approx(16 / entropy) if entropy else None)
        if row["codec"] == "delta":
            frame = codecs.compress(words, "delta", base=base, shaped=False, checksum=False)
            assert row["ratio"] == words.nbytes / frame.nbytes
        if row["codec"] == "pairs":
            assert row["ratio"] == words.nbytes / max(1, 6 * changes)
        for name in ("encode", "decode", "in_place"):
            assert row[f"{name}_memcpy"] == pytest.approx(row[f"{name}_gbps"] / row["memcpy_gbps"])


@pytest.mark.parametrize("in_place", [False, True])
def test_wrong_elements_of_each_way_to_decode_count(
    in_place: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = codecs.decompress

    def flips_two(frame: torch.Tensor, out: torch.Tensor, base: torch.Tensor, **more: Any) -> torch.Tensor:
        right(frame, out, base=base, **more)
        if (out is base) == in_place:
            out.view(torch.int16)[[3, 900]] ^= 1
        return out

    monkeypatch.setattr(codecs, "decompress", flips_two)
    path = tmp_path / "wrong.json"
    assert main([*WORDS, "--numel", "4K", "--data", "changed:5%", "--json", str(path)]) == 1
    assert [row["wrong"] for row in content(path)["rows"]] == [2]
