"""Where the repository's folders are, for tests and for the programs that they start."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ds_zipccl"
TESTS = ROOT / "tests"
EXAMPLES = ROOT / "examples"
#: Folders from which tests import each other, as in pyproject.toml.
IMPORTED = (ROOT, TESTS / "support", TESTS, *(TESTS / name for name in ("codec", "comm", "fuzz", "gpu")))
#: For programs that import what tests import.
PYTHONPATH = os.pathsep.join(map(str, IMPORTED))
