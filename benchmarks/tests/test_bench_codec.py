"""``bench codec`` with words and their base, rows that repeat earlier rows, lossy codecs, stored tensors and peers."""

from __future__ import annotations

import itertools
from collections import Counter
from math import log2
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import outcome
from safetensors.torch import save_file

from ds_zipccl import codecs
from ds_zipccl.__main__ import main
from ds_zipccl.benchmarks.codec import delta, lossy, peers, rows, sets
from ds_zipccl.lossy import Int, Round, TacoFp8, Zfp
from ds_zipccl.tools import data

WORDS = "bench codec --route native --dtype bf16 --repeats 1 --codec"


# ---- words with a base ---------------------------------------------------------------------------------


def _orders(tensor: torch.Tensor) -> torch.Tensor:
    """Return the words as integers in the order of the floats."""
    words = tensor.view(torch.int16).long() & 0xFFFF
    return torch.where(words >= 0x8000, 0xFFFF - words, words + 0x8000)


def test_pairs_are_what_their_names_say() -> None:
    words, base = sets.Pair("changed", 3.0).make(1 << 18, "bfloat16")
    moved = (_orders(words) - _orders(base)).abs()
    share = float((moved > 0).float().mean())
    assert share == pytest.approx(0.03, rel=0.05)
    assert set(moved.unique().tolist()) == {0, 1, 2}
    assert float((moved == 2).float().mean()) == pytest.approx(0.015 * share, rel=0.3)
    assert base.float().std() == pytest.approx(0.02, rel=0.01)
    words, base = sets.Pair("changed", 0.0).make(1000, "float32")
    assert torch.equal(words, base)

    changed = []
    for rate in (1e-3, 1e-4, 1e-5):
        words, base = sets.Pair("adamw", rate).make(1 << 16, "bfloat16")
        changed.append(float((words != base).float().mean()))
    assert changed[0] > 0.8 > changed[1] > 0.2 > changed[2] > 0.02


def test_rows_of_differences_are_true(tmp_path: Path) -> None:
    pytest.importorskip("zstandard", reason="pip install ds-zipccl[bench]")
    names = ["changed:0%", "changed:5%", "adamw:0.0003"]
    found = outcome(tmp_path, f"{WORDS} delta --numel 128K --peers --data", *names)
    wanted = list(itertools.product(names, ("delta", "xor_zstd1", "pairs")))
    assert [(row["data"], row["codec"]) for row in found["rows"]] == wanted
    assert list(found["peers"]) == ["zstandard"]
    for row in found["rows"]:
        assert list(row) == [column.key for column in delta.COLUMNS]
        assert row["wrong"] == 0
        pair = sets.codec_spec(row["data"])
        assert isinstance(pair, sets.Pair) and str(pair) == row["data"]
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


@pytest.mark.parametrize("decoder", ["delta", "delta in place", "rows"])
def test_wrong_elements_of_each_decoder_count(decoder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = codecs.decompress

    def flips_two(frame: torch.Tensor, out: torch.Tensor, **more: Any) -> torch.Tensor:
        right(frame, out, **more)
        if (out is more.get("base")) == (decoder == "delta in place"):
            out.view(torch.int16)[[3, 900]] ^= 1
        return out

    monkeypatch.setattr(codecs, "decompress", flips_two)
    words = "rows --width 256 --data repeated:50%" if decoder == "rows" else "delta --data changed:5%"
    found = outcome(tmp_path, f"{WORDS} {words} --numel 4K", status=1)
    assert [row["wrong"] for row in found["rows"]] == [2]


# ---- rows that repeat earlier rows ------------------------------------------------------------------------


@pytest.mark.parametrize("percent", [0.0, 30.0, 100.0])
def test_rows_are_what_their_names_say(percent: float) -> None:
    width, numel = 48, 48 * 200 + 7
    words, sources = sets.RowSet("repeated", percent).make(numel, width, "bfloat16")
    matrix, own = words[: 48 * 200].view(200, 48), torch.arange(200)
    copies = sources != own
    assert int(copies.sum()) == min(199, round(2 * percent))
    assert bool((sources[copies] < own[copies]).all())
    assert torch.equal(matrix[sources.long()], matrix)
    first = {tuple(row): i for i, row in reversed(list(enumerate(matrix.view(torch.int16).tolist())))}
    assert [first[tuple(row)] for row in matrix.view(torch.int16).tolist()] == sources.tolist()

    words, sources = sets.RowSet("scaled", percent).make(numel, width, "float32")
    matrix = words[: 48 * 200].view(200, 48)
    factors = matrix / matrix[sources.long()]
    assert bool((factors.max(1).values - factors.min(1).values < 1e-5).all())
    assert int((factors[:, 0] < 1).sum()) >= round(2 * percent) - 1


def test_rows_of_row_frames_are_true(tmp_path: Path) -> None:
    names = ["repeated:0%", "repeated:50%", "scaled:50%"]
    none, half, scaled = outcome(tmp_path, f"{WORDS} rows --numel 640K --width 200 --data", *names)["rows"]
    for row, name in zip((none, half, scaled), names, strict=True):
        assert list(row) == [column.key for column in rows.COLUMNS]
        assert (row["data"], row["width"], row["fragments"], row["wrong"]) == (name, 200, 2, 0)
        assert row["encode_plain"] == pytest.approx(row["encode_gbps"] / row["plain_encode_gbps"])
    assert none["ratio"] == none["plain_ratio"]
    assert half["ratio"] == pytest.approx(2 * half["plain_ratio"], rel=0.02)
    assert scaled["ratio"] > 1.6 * scaled["plain_ratio"]


# ---- lossy codecs ----------------------------------------------------------------------------------------


def test_names_with_settings() -> None:
    names = {
        "round": Round(),
        "round:1": Round(1),
        "round:mantissa=6": Round(6),
        "int:6": Int(6),
        "zfp:rate=12": Zfp(12),
    }
    names |= {
        "taco_fp8": TacoFp8(),
        "taco_fp8:64:false": TacoFp8(64, False),
        "taco_fp8:hadamard=false": TacoFp8(hadamard=False),
    }
    names["int:4:group=32:hadamard=true"] = Int(4, 32, True)
    assert {text: lossy.codec(text) for text in names} == names


def test_rows_of_lossy_codecs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{WORDS} cascade round:3 round:1 --numel 64K --dtype bf16 fp32 --data normal"
    found = {(row["dtype"], row["codec"]): row for row in outcome(tmp_path, words)["rows"]}
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
    monkeypatch.setattr(codecs, "project", lambda *of, **more: right(*of, **more) + 1)  # the expected result is wrong
    assert main(words.split()) == 1
    assert "elements came back with other bits" in capsys.readouterr().err


def test_errors_are_of_finite_values() -> None:
    values = torch.tensor([3.0, -4.0, 0.1, 0.0, float("nan"), float("inf")])
    found = lossy.errors(values, torch.tensor([3.0, -4.5, 0.05, 0.0, float("nan"), float("inf")]))
    assert found["error"] == pytest.approx((0.2525 / 25.01) ** 0.5) and found["small_error"] == pytest.approx(0.5)
    assert lossy.errors(torch.zeros(3), torch.zeros(3)) == {"error": None, "small_error": None}


# ---- tensors of files, and peers -----------------------------------------------------

DTYPES = ("bf16", "fp16", "fp32", "e4m3", "e5m2")


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    tensors = {"grad.rows": torch.randn(3, 1000).bfloat16(), "steps": torch.arange(500), "empty": torch.empty(0)}
    tensors["scale"] = torch.randn(700).to(torch.float8_e5m2)
    save_file(tensors, tmp_path / "stored.safetensors")
    return tmp_path / "stored.safetensors"


def test_codec_measures_the_tensors_of_a_file(stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "bench codec --codec raw --repeats 1 --corpus"
    sizes = {"grad.rows": ("bfloat16", 3000), "steps": ("int64", 500), "scale": ("float8_e5m2", 700)}
    rows = outcome(tmp_path, words, str(stored), "--peers", "zlib1")["rows"]
    wanted = [(codec, name, *size) for name, size in sorted(sizes.items()) for codec in ("raw", "zlib1")]
    found = [(row["codec"], row["data"], row["dtype"], row["numel"]) for row in rows]
    assert sorted(found, key=lambda row: row[1:]) == sorted(wanted, key=lambda row: row[1:])
    assert all(row["wrong"] == 0 and (row["entropy_ratio"] is None) == (row["data"] == "steps") for row in rows)
    assert "empty left out: it is empty" in capsys.readouterr().err

    rows = outcome(tmp_path, words, str(stored), "--tile", "--numel", "4K", "3000")["rows"]
    tiled = {"grad.rows": (3000, 6000), "steps": (3000, 4500), "scale": (3500, 4200)}
    assert {(row["data"], row["numel"]) for row in rows} == {(name, n) for name, sizes in tiled.items() for n in sizes}

    again = tmp_path / "again.pt"
    torch.save({"scale": torch.ones(5)}, again)
    rows = outcome(tmp_path, words, str(again), str(stored), *"--data zeros --dtype fp16 --numel 9".split())["rows"]
    assert {row["data"] for row in rows} == {"again:scale", "stored:grad.rows", "stored:steps", "stored:scale", "zeros"}


def test_codec_peers_are_checked_like_codecs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Peers that are right, wrong or missing, and a peer that changes its input."""

    def load(compress: Any, decompress: Any) -> Any:
        return peers.Peer(lambda dtype, threads: peers.Functions(compress, decompress))

    def spoils(raw: memoryview) -> bytes:
        coded = bytes(raw)
        raw[:] = bytes(len(raw))
        return coded

    def absent(dtype: str, threads: int) -> peers.Functions:
        raise ImportError("planted absence")

    table = {
        "zlib1": peers.PEERS["zlib1"],
        "spoils": load(spoils, bytes),
        "flips": load(bytes, lambda coded: bytes([coded[0] ^ 1]) + coded[1:]),
        "short": load(bytes, lambda coded: coded[:-1]),
        "absent": peers.Peer(absent, "a-package"),
        "fp32 only": peers.Peer(absent, dtypes=("float32",)),
    }
    monkeypatch.setattr(peers, "PEERS", table)
    words = "bench codec --numel 5000 --dtype bf16 --data normal --codec raw --repeats 2 --peers"
    rows = {row["codec"]: row for row in outcome(tmp_path, words, status=1)["rows"] if row["route"] == "peer"}
    assert {name: row["wrong"] for name, row in rows.items()} == {"zlib1": 0, "spoils": 0, "flips": 1, "short": 5000}
    assert rows["zlib1"]["ratio"] > 1.1 > rows["spoils"]["ratio"] == 1
    printed = capsys.readouterr().err
    assert printed.count("peer absent left out: planted absence; pip install a-package") == 1


@pytest.mark.parametrize("name", peers.PEERS)
def test_codec_peers_that_are_here(name: str, tmp_path: Path) -> None:
    package = peers.PEERS[name].package
    if package:
        pytest.importorskip(package, reason="pip install ds-zipccl[bench]", exc_type=ImportError)
    words = f"bench codec --numel 100003 --data normal --codec raw --repeats 1 --peers {name} --dtype"
    found = outcome(tmp_path, words, *DTYPES)
    rows = [row for row in found["rows"] if row["route"] == "peer"]
    assert [row["dtype"] for row in rows] == [data.DTYPES[dtype] for dtype in DTYPES]
    assert all(row["wrong"] == 0 and 0.98 < row["ratio"] < 1.6 for row in rows)
    assert list(found["peers"]) == ([package] if package else [])
