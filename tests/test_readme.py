"""README.md says what the code says: its generated sections are up to date and its commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ds_zipccl.__main__ import parse
from ds_zipccl.tools import readme

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_generated_sections_are_up_to_date() -> None:
    assert set(re.findall(r"<!-- begin (\w+) -->", README)) == set(readme.SECTIONS)
    assert readme.generate(README) == README, "run python -m ds_zipccl.tools.readme"


def test_an_edited_section_is_noticed() -> None:
    edited = README.replace("`min_bytes`", "`min_byte`")
    assert readme.generate(edited) != edited


@pytest.mark.parametrize("command", re.findall(r"^    python -m ds_zipccl (.+?)(?:  |\n)", README, re.MULTILINE))
def test_commands_parse(command: str) -> None:
    assert callable(parse(shlex.split(command)).main)


@pytest.mark.parametrize("target", re.findall(r"\bmake (\w+)", README))
def test_make_targets_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_first_screen_has_both_commands() -> None:
    first = "\n".join(README.splitlines()[:24])
    assert "make demo" in first and "make test" in first
