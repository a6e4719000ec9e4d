"""Commands as a user runs them, and the contents of the files that they write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from places import ROOT

from ds_zipccl.__main__ import main

Capture = pytest.CaptureFixture[str]


def python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``python`` with ``words`` in a process of its own; blocks for 400 seconds at most."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment, cwd=ROOT)


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m ds_zipccl`` with ``words``."""
    return python("-m", "ds_zipccl", *words, **environment)


def assert_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``python -m ds_zipccl`` with ``words`` ends with status 2, and says ``message`` on stderr."""
    try:
        status = main(words)
    except SystemExit as leave:
        status = leave.code
    assert status == 2
    assert message in capsys.readouterr().err


def outcome(folder: Path, words: str, *more: str, status: int = 0) -> dict[str, Any]:
    """What ``python -m ds_zipccl`` with ``words`` and ``more`` writes with ``--json``; it ends with ``status``."""
    path = folder / "outcome.json"
    assert main([*words.split(), *more, "--json", str(path)]) == status
    return content(path)


def content(path: Path) -> dict[str, Any]:
    """The JSON object in the file at ``path``."""
    return dict(json.loads(path.read_text()))


def shannon(tensor: torch.Tensor) -> float:
    """Entropy of the exponents of ``tensor`` in bits a word, from the bit layout alone."""
    word, mantissa, mask = {
        torch.bfloat16: (np.uint16, 7, 255),
        torch.float16: (np.uint16, 10, 31),
        torch.float32: (np.uint32, 23, 255),
        torch.float8_e4m3fn: (np.uint8, 3, 15),
        torch.float8_e5m2: (np.uint8, 2, 31),
    }[tensor.dtype]
    words = np.frombuffer(tensor.contiguous().view(torch.uint8).numpy().tobytes(), dtype=word)
    _, counts = np.unique((words >> mantissa) & mask, return_counts=True)
    shares = counts / len(words)
    return float(-(shares * np.log2(shares)).sum())
