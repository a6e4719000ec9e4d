"""Programs that run kernels with a mistake planted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from places import PYTHONPATH


def assert_noticed(program: str, words: Sequence[str], seconds: int) -> None:
    """Run a program in a process of its own, as some mistakes end it. It must end with one of ``words`` on stderr, or by a signal.

    Args:
        program: plants the mistake, and checks results; a check that fails raises.
        seconds: limit of time.
    """
    path = f"import sys\nsys.path[:0] = {PYTHONPATH.split(os.pathsep)!r}\n"
    command = [sys.executable, "-c", f"{path}{program}\nprint('nothing noticed')"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    assert "nothing noticed" not in result.stdout
    assert "plant the mistake elsewhere" not in result.stderr, result.stderr[-2000:]
    killed = result.returncode < 0  # by a wild address
    assert killed or any(word in result.stderr for word in words), result.stderr[-2000:]
