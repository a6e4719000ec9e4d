"""``make results``: which files of docs/results it measures again, and what a command that fails leaves."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
from places import ROOT

sys.path += [str(ROOT / "release"), str(ROOT / "docs")]  # behind tests/gpu, which has a wheels.py too
measured, results = (importlib.import_module(name) for name in ("measured", "results"))


def test_a_file_is_measured_once_for_a_state_of_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "docs" / "results"
    monkeypatch.setattr(measured, "ROOT", tmp_path)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "RESULTS", folder)
    folder.mkdir(parents=True), (tmp_path / "ds_zipccl").mkdir()
    code = tmp_path / "ds_zipccl" / "code.py"
    half = "open('new').read()[: 9 if 'half' in sys.argv[2] else None]"
    code.write_text(f"import sys; open(sys.argv[2], 'w').write({half}); sys.exit('good' not in sys.argv[2])")
    for name in ("good", "fails", "other", "check", "half"):
        place = folder / f"{'good' if name == 'other' else name}.json"
        command = f"python ds_zipccl/code.py --json {place.relative_to(tmp_path)}"
        had = {"rows": [{"n": 1}] * (2 if name == "fails" else 1), "command": command}
        (folder / f"{name}.json").write_text(json.dumps(had))
    (tmp_path / "new").write_text(
        json.dumps({"rows": [{"n": 2}], "command": "python ds_zipccl/code.py --json docs/results/good.json"})
    )

    def rows() -> list[int]:
        names = ("good", "fails", "other", "check", "half")
        return [json.loads((folder / f"{name}.json").read_text())["rows"][0]["n"] for name in names]

    assert results.main([]) == 1 and rows() == [2, 1, 1, 2, 1]
    assert "other: skipped, kept for comparison" in capsys.readouterr().out
    (tmp_path / "new").write_text("{}")
    assert results.main(["good"]) == 0 and rows() == [2, 1, 1, 2, 1], "measured with these sources"
    before = results.sources()
    code.write_text(f'"""What it does."""\n{code.read_text()}  # why\n')
    assert results.sources() == before, "comments decide no figure"
    code.write_text(f"{code.read_text()}1\n")
    assert results.main(["good", "--list"]) == 0 and "[1/1] good: python" in capsys.readouterr().out
