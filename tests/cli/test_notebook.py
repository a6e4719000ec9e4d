"""The notebook of the recipes: its code cells run in order, without Jupyter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from places import EXAMPLES

NOTEBOOK = EXAMPLES / "recipes" / "two_ranks.ipynb"


def cells(kind: str) -> list[str]:
    content = json.loads(NOTEBOOK.read_text())
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
    assert all(not cell.get("outputs") for cell in content["cells"]), "outputs are of one machine, and grow the file"
    return ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == kind]


@pytest.mark.full(reason="three trainings of two ranks")
@pytest.mark.network
def test_cells_run_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With fewer steps than a reader takes."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    state: dict[str, Any] = {}
    steps = 0
    for number, code in enumerate(cells("code")):
        shorter = code.replace("STEPS = 20", "STEPS = 6")
        steps += shorter != code
        exec(compile(shorter, f"cell {number}", "exec"), state)
    assert steps == 1
    rows = state["rows"]
    assert list(rows) == ["plain", "raw", "coded"] and state["link"] in ("100mbit", "loopback")
    assert rows["coded"]["wire_bytes"] < rows["raw"]["wire_bytes"] <= rows["plain"]["wire_bytes"]
    times, sizes = state["figure"].axes
    assert [patch.get_height() for patch in sizes.patches] == [row["wire_bytes"] / 1e6 for row in rows.values()]
    assert len(times.patches) == 2 * len(rows)
    assert not list(tmp_path.iterdir()), "the notebook leaves no file behind"


def test_the_notebook_says_that_times_are_local() -> None:
    assert "of this machine only" in cells("markdown")[0]
