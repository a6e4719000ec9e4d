"""The ``"step_log"``: a file that gets one JSON line after every optimizer step, about what this rank sent in it.

    {"step": 20, "lr": [0.0003], "roles": {"zero_param": {"logical_bytes": 0, "wire_bytes": 0, "passed_bytes": 0, "ratio": 1.0}},
     "differences": {"as differences": 3, "a rank holds something else": 1}}

logical_bytes and wire_bytes are of coded calls, passed_bytes of the others, ratio = (raw + passed) / (wire + passed). A line tells what was
sent since the one before, so that all together are everything; the first has what came before training, such as broadcast weights.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence

from ds_zipccl.telemetry import counters

AS_DIFFERENCES = "as differences"


class StepLog:
    """Adds lines to the end of a file; there may be some of an earlier process.

    A file that cannot be written ends the log and not the training, with one message: only this rank knows, and if it stopped, the others
    would wait for it.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: io.FileIO | None = None
        try:
            # Unbuffered: a line is in the file when its step is over, whatever happens to the process then.
            self._file = open(path, "ab+", buffering=0)  # noqa: SIM115 (lives as long as the process)
            if self._file.tell():
                self._file.seek(-1, io.SEEK_END)
                if self._file.read(1) != b"\n":  # an earlier process was stopped in the middle of a line
                    self._write(b"\n")
        except (OSError, ValueError) as error:
            self._give_up(error)

    def write(self, step: int, rates: Sequence[float]) -> None:
        """Add the line of ``step``, during which the parameter groups had these learning ``rates``."""
        if self._file is None:
            return
        found = counters.since_last("step_log")
        differences = {reason or AS_DIFFERENCES: count for reason, count in found["differences"].items()}
        line = {"step": step, "lr": list(rates), "roles": found["roles"], "differences": differences}
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
            "It must be a file in a folder that exists on the machine of rank 0, with room left",
            flush=True,
        )
