"""README.md says what the code says: its generated sections are up to date and its commands exist."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from places import ROOT

from ds_zipccl.__main__ import parse
from ds_zipccl.bench import readme

README = (ROOT / "README.md").read_text()


def test_generated_sections_are_up_to_date() -> None:
    assert set(re.findall(r"<!-- begin (\w+) -->", README)) == set(readme.SECTIONS)
    assert readme.generate(README) == README, "run python -m ds_zipccl.bench.readme"


def test_an_edited_section_is_noticed() -> None:
    edited = README.replace("`min_bytes`", "`min_byte`")
    assert readme.generate(edited) != edited


def test_training_results_of_every_age_are_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Columns that results do not have are left out; the picture stands above the table where there is one."""
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    folder = tmp_path / "docs" / "results"
    folder.mkdir(parents=True)
    old = {
        "workload": "zero3",
        "ranks": 2,
        "link": "1gbit",
        "variant": "coded",
        "step_ms": 440.7,
        "logical_bytes": 3 << 20,
    }
    old |= {"wire_bytes": 2 << 20, "params_sha256": "0123456789abcdef", "speedup": 1.463}
    new = old | {"nodes": 2, "comm_ms": 99.6, "comm_speedup": 2.349}

    def shown(row: dict[str, object]) -> str:
        (folder / "train.json").write_text(json.dumps({"command": "bench train", "rows": [row]}))
        return readme.SECTIONS["train"]()

    assert shown(old).splitlines()[-1] == "| zero3 | 2 | 1gbit | coded | 441 | 3.1 | 2.1 | 0123456789ab | 1.46 |"
    last = "| zero3 | 2 | 2 | 1gbit | coded | 441 | 100 | 3.1 | 2.1 | 0123456789ab | 1.46 | 2.35 |"
    assert shown(new).splitlines()[-1] == last
    assert "comm ms" in shown(new) and "![" not in shown(new)
    (folder / "train.png").touch()
    assert shown(new).startswith("![Steps, computing and communication apart](docs/results/train.png)\n\n`bench train`")


@pytest.mark.parametrize("command", re.findall(r"^    python -m ds_zipccl (.+?)(?:  |\n)", README, re.MULTILINE))
def test_commands_parse(command: str) -> None:
    assert callable(parse(shlex.split(command)).main)


@pytest.mark.parametrize("target", re.findall(r"\bmake (\w+)", README))
def test_make_targets_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_first_screen_has_both_commands() -> None:
    first = "\n".join(README.splitlines()[:24])
    assert "make demo" in first and "make test" in first
