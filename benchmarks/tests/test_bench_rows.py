"""``bench codec --codec rows``: its data, and row frames beside ordinary frames."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from commands import assert_refused, content

from ds_zipccl import codecs
from ds_zipccl.__main__ import main
from ds_zipccl.benchmarks import data
from ds_zipccl.benchmarks.codec import rows

WORDS = ["bench", "codec", "--codec", "rows", "--route", "native", "--dtype", "bf16", "--repeats", "1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "repeated:10%"], "add --codec rows"),
        (["--data", "repeated:10", "--codec", "rows"], "percentage"),
        (["--data", "scaled:101%", "--codec", "rows"], "percentage"),
        (["--data", "normal", "--codec", "rows"], "no rows that follow"),
        (["--codec", "rows", "raw"], "name it alone"),
        (["--codec", "rows", "--width", "0"], "at least 1"),
        (["--codec", "rows", "--device", "cuda"], "cpu alone"),
    ],
)
def test_bad_requests_say_what_to_do(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(["bench", "codec", *words], message, capsys)


@pytest.mark.parametrize("percent", [0.0, 30.0, 100.0])
def test_rows_are_what_their_names_say(percent: float) -> None:
    width, numel = 48, 48 * 200 + 7
    words, sources = data.RowSet("repeated", percent).make(numel, width, "bfloat16")
    matrix, own = words[: 48 * 200].view(200, 48), torch.arange(200)
    copies = sources != own
    assert int(copies.sum()) == min(199, round(2 * percent))
    assert bool((sources[copies] < own[copies]).all())
    assert torch.equal(matrix[sources.long()], matrix)
    first = {tuple(row): i for i, row in reversed(list(enumerate(matrix.view(torch.int16).tolist())))}
    assert [first[tuple(row)] for row in matrix.view(torch.int16).tolist()] == sources.tolist()

    words, sources = data.RowSet("scaled", percent).make(numel, width, "float32")
    matrix = words[: 48 * 200].view(200, 48)
    factors = matrix / matrix[sources.long()]
    assert bool((factors.max(1).values - factors.min(1).values < 1e-5).all())
    assert int((factors[:, 0] < 1).sum()) >= round(2 * percent) - 1


def test_rows_are_true(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    names = ["repeated:0%", "repeated:50%", "scaled:50%"]
    assert main([*WORDS, "--numel", "640K", "--width", "200", "--data", *names, "--json", str(path)]) == 0
    none, half, scaled = content(path)["rows"]
    for row, name in zip((none, half, scaled), names, strict=True):
        assert list(row) == [column.key for column in rows.COLUMNS]
        assert (row["data"], row["width"], row["fragments"], row["wrong"]) == (name, 200, 2, 0)
        assert row["encode_plain"] == pytest.approx(row["encode_gbps"] / row["plain_encode_gbps"])
    assert none["ratio"] == none["plain_ratio"]
    assert half["ratio"] == pytest.approx(2 * half["plain_ratio"], rel=0.02)
    assert scaled["ratio"] > 1.6 * scaled["plain_ratio"]


def test_a_wrong_element_is_counted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    good = codecs.decompress

    def wrong(frame: torch.Tensor, out: torch.Tensor, **options: object) -> torch.Tensor:
        good(frame, out, **options)  # type: ignore[arg-type]
        out.view(torch.int16)[-1] ^= 1
        return out

    monkeypatch.setattr(codecs, "decompress", wrong)
    assert main([*WORDS, "--numel", "64K", "--width", "256", "--data", "repeated:50%"]) == 1
    assert "1 elements came back with other bits" in capsys.readouterr().err
