"""Virtual environments that have the packages of this one but for some."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path


def without(folder: Path, *lacking: str) -> str:
    """Make an environment in ``folder`` without the packages ``lacking``, and without this one; return its interpreter.

    Packages are links, so that what is installed there changes nothing here.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=100)
    (site,) = folder.glob("lib/python3*/site-packages")
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    for path in Path(found.origin).parent.parent.iterdir():
        if not path.name.startswith((*lacking, "__editable__", "ds_zipccl")) and path.suffix != ".pth":
            (site / path.name).symlink_to(path)
    return str(folder / "bin" / "python")
