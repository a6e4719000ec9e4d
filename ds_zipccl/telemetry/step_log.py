"""The ``"step_log"``: a file with one JSON line per optimizer step about the traffic of this rank.

    {"step": 20, "lr": [0.0003], "time": 1795766400.25, "seconds_saved": 3.5,
     "roles": {"zero_param": {"logical_bytes": 0, "wire_bytes": 0, "passed_bytes": 4096, "ratio": 1.0}},
     "kinds": {},
     "differences": {"as differences": 3, "a rank holds something else": 1}}

``time`` is that of the line, in seconds since 1970. ``seconds_saved`` is there once a trial has measured any, and counts from the start on.
``kinds`` has the same counts of calls with a kind, which are in those of their role too: of the exchanges of experts "ep dispatch",
"ep combine", "ep combine.bwd" and "ep dispatch.bwd". ``logical_bytes`` and ``wire_bytes`` are of coded calls, ``passed_bytes`` of passed
calls; ratio = (logical + passed) / (wire + passed). A role whose lossy frames were sampled has the key ``error`` too, the relative L2 error
of one rounding. Where errors ride on later messages, ``kept`` is the size of those errors over that of the values, and ``alike`` the cosine
of a pipeline stage's inputs in consecutive micro-batches.
A line covers the traffic since the line before, so the lines together cover the whole traffic. The first line includes the traffic before
training, such as the broadcast of weights.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Sequence

from ds_zipccl.telemetry import counters

AS_DIFFERENCES = "as differences"


class StepLog:
    """Appends lines to a file, which may hold lines of an earlier process.

    A file that cannot be written ends the log with one message. Training goes on: no other rank knows of the file, and all of them would
    wait for a rank that stopped.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: io.FileIO | None = None
        try:
            # Unbuffered: a line is in the file at the end of its step, even if the process is killed right then.
            self._file = open(path, "ab+", buffering=0)  # noqa: SIM115 (lives as long as the process)
            if self._file.tell():
                self._file.seek(-1, io.SEEK_END)
                if self._file.read(1) != b"\n":  # an earlier process was stopped in the middle of a line
                    self._write(b"\n")
        except (OSError, ValueError) as error:
            self._give_up(error)

    def write(self, step: int, rates: Sequence[float]) -> None:
        """Append the line of optimizer step ``step``; ``rates`` are the learning rates of its parameter groups."""
        if self._file is None:
            return
        found = counters.since_last("step_log")
        errors = {role: {"error": error, **found["feedback"].get(role, {})} for role, error in found["errors"].items()}
        line = {
            "step": step,
            "lr": list(rates),
            "time": round(time.time(), 3),
            **({} if (seconds := counters.seconds_saved()) is None else {"seconds_saved": seconds}),
            "roles": {role: {**sent, **errors.get(role, {})} for role, sent in found["roles"].items()},
            "kinds": found["kinds"],
            "differences": {reason or AS_DIFFERENCES: count for reason, count in found["differences"].items()},
        }
        try:
            self._write(f"{json.dumps(line)}\n".encode())
        except OSError as error:
            self._give_up(error)

    def _write(self, line: bytes) -> None:
        written = self._file.write(line) if self._file is not None else len(line)
        if written != len(line):
            raise OSError(f"{written} of {len(line)} bytes written")

    def _give_up(self, error: Exception) -> None:
        self._file = None
        why = getattr(error, "strerror", None) or error
        print(
            f'[ds_zipccl] cannot write the "step_log" {self._path}: {why}; training goes on without it. '
            "Name a file in an existing folder on the machine of rank 0, with room left",
            flush=True,
        )
