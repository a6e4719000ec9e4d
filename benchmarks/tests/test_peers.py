"""``bench codec`` beyond our codecs and synthetic data: the tensors of files, and the compressors of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import outcome
from safetensors.torch import save_file

from ds_zipccl.benchmarks import data
from ds_zipccl.benchmarks.codec import peers

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
    """Peers that are right, that are not, that spoil their input, and that are not there."""

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
