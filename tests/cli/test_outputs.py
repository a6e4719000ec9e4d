"""Files that commands write: told before the measurement where they cannot be written, and as before until there are results."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from commands import assert_refused

from ds_zipccl.__main__ import COMMANDS, main
from ds_zipccl.cli import ToolError

#: Every command that writes a file, with an option of each kind that it has.
WRITERS = [
    *[[*words, "--json"] for words in COMMANDS],
    *[[*words, "--plot"] for words in (("analyze", "-"), ("bench", "train"), ("steps", "-"), ("plan",))],
]


@pytest.mark.parametrize("words", WRITERS, ids=" ".join)
def test_files_that_cannot_be_written_are_told_at_once(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command itself does not begin."""
    name = COMMANDS[tuple(word for word in words if word[0] != "-")][0]
    monkeypatch.setattr(f"ds_zipccl.{name}.main", lambda args: pytest.fail("the command has begun"))
    if words[0] in ("analyze", "steps") and words[-2] != "-":
        words = [words[0], "-", words[-1]]
    for path in (tmp_path, tmp_path / "missing" / "x", "/proc/x", ""):
        assert_refused([*words, str(path)], "cannot write", capsys)


def test_files_are_as_before_until_there_are_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new, old, link, pipe = (tmp_path / name for name in ("new", "old", "link", "pipe"))
    old.write_text("kept")
    link.symlink_to(tmp_path / "later")
    os.mkfifo(pipe)
    seen = []

    def begin(args: Any) -> int:
        seen.append(old.read_text())
        assert not new.exists() and link.is_symlink() and not link.exists()
        raise ToolError("no result")

    monkeypatch.setattr("ds_zipccl.cli.report.main", begin)
    for path in (new, old, link, pipe):
        assert main(["report", "--json", str(path)]) == 2
    assert (
        seen == ["kept"] * 4 and old.read_text() == "kept" and sorted(os.listdir(tmp_path)) == ["link", "old", "pipe"]
    )
    monkeypatch.setenv("RANK", "1")
    assert main(["report", "--json", "/nonexistent/x"]) == 2  # rank 0 writes, here or on another machine
    assert len(seen) == 5


def test_one_file_for_table_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "x.png")
    assert_refused(["analyze", "-", "--json", path, "--plot", path], "are one file", capsys)
