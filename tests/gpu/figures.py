"""Figures of a step of ``make gpu``: a JSON object in the file that ``ZIPCCL_FIGURES`` names, whole at every moment."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

VARIABLE = "ZIPCCL_FIGURES"
#: Seconds that the step may take.
LIMIT = "ZIPCCL_LIMIT"
#: Folder in which the steps of one run tell each other things.
SCRATCH = "ZIPCCL_SCRATCH"
#: Status of a step whose results are right as far as it came, and that missed a floor or its time.
SLOW = 3
#: Seconds without a sign of life after which work that reaches its limit counts as hung, and half of a shorter limit.
QUIET_SECONDS = 20.0


class Late(AssertionError):
    """Work reached its limit of time and was still going on: the limit was a budget, and nothing hangs."""


def overdue(silent: float, limit: float) -> tuple[bool, str]:
    """Whether work that reached its limit hangs, and words for it. ``silent``: seconds since its last sign of life."""
    if silent >= min(QUIET_SECONDS, limit / 2):
        return True, f"hung: still running after {limit:.0f} s, without a sign of life in the last {silent:.0f} s"
    return False, f"late: still at work after {limit:.0f} s"


def alive() -> None:
    """A sign of life of this step, for work that shows none in its output."""
    if VARIABLE in os.environ:
        Path(os.environ[VARIABLE]).touch()


def read(path: Path) -> dict[str, Any]:
    """The figures that a step has written so far; none if it wrote nothing that can be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write(path: Path, content: Any) -> None:
    """Write JSON; a reader sees the old content or the new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(content, indent=1, default=str) + "\n")
    os.replace(part, path)


def put(**values: Any) -> None:
    """Add figures to those of this step; nothing where no step runs."""
    if VARIABLE in os.environ:
        path = Path(os.environ[VARIABLE])
        write(path, read(path) | values)


def seconds(otherwise: float) -> float:
    """Seconds that this step may take; ``otherwise`` where no step runs."""
    return float(os.environ.get(LIMIT, otherwise))


def tell(name: str, content: Any) -> None:
    """Tell the later steps of this run; nothing where no step runs."""
    if SCRATCH in os.environ:
        write(Path(os.environ[SCRATCH]) / f"{name}.json", content)


def told(name: str) -> Any:
    """What an earlier step told, None if nothing."""
    path = Path(os.environ.get(SCRATCH, os.devnull)) / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None
