"""NVIDIA's Multi-Process Service for the ranks that share a GPU: without it the GPU runs one process at a time, by turns of milliseconds.

The service has its pipes and logs in the scratch folder of the run, so that only the processes that get :func:`variables` use it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import figures

CONTROL = "nvidia-cuda-mps-control"
PIPE = "CUDA_MPS_PIPE_DIRECTORY"
#: Hardware queues of a process: processes share a pool under MPS, and streams that share a queue wait for each other (seed: without MPS 8).
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
#: Seconds for the daemon to start, and for it and its server to end.
SECONDS = 8.0


def control() -> str:
    """The path of the control program.

    Raises:
        FileNotFoundError: it is not on ``PATH``.
    """
    if found := shutil.which(CONTROL):
        return found
    raise FileNotFoundError(f"no {CONTROL} on PATH: it comes with NVIDIA's driver")


def variables(scratch: Path) -> dict[str, str]:
    """Variables of the daemon and of the processes that use it."""
    return {PIPE: str(scratch / "mps"), "CUDA_MPS_LOG_DIRECTORY": str(scratch / "mps-log")}


def start(scratch: Path | None) -> dict[str, str]:
    """Start the daemon, which stays until :func:`stop`, and return the variables of its users.

    Raises:
        RuntimeError: it did not start; says why.
    """
    if scratch is None:
        raise RuntimeError(f"no folder for {CONTROL}: {figures.SCRATCH} is not set")
    found = variables(scratch)
    for folder in found.values():
        Path(folder).mkdir(exist_ok=True)
    try:
        # Its output goes to a file: the daemon would hold a pipe open. The figures are those of the step that starts it.
        with (scratch / "mps-output").open("w+") as output:
            status = subprocess.run(
                [control(), "-d"], env={**os.environ, **found}, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=SECONDS
            ).returncode  # fmt: skip
            output.seek(0)
            said = output.read().strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        stop(scratch)
        raise RuntimeError(str(error)) from error
    if status:
        raise RuntimeError(f"{CONTROL} -d ended with status {status}: {said}")
    return found | {QUEUES: "8"}


def stop(scratch: Path | None) -> None:
    """End the daemon, its server, and every process that still uses them. Does nothing where none was started."""
    if scratch is None or not Path(variables(scratch)[PIPE]).is_dir():
        return
    found = variables(scratch)
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [control()], input="quit\n", env={**os.environ, **found}, text=True, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, timeout=SECONDS,
        )  # fmt: skip
    for number in (0, signal.SIGKILL):
        for pid in users(scratch) if number else ():
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        deadline = time.monotonic() + SECONDS / 4
        while users(scratch) and time.monotonic() < deadline:
            time.sleep(0.05)
    shutil.rmtree(found[PIPE], ignore_errors=True)


def users(scratch: Path) -> list[int]:
    """Processes that were started with the service's variables: the daemon, its server, ranks."""
    wanted, found = f"{PIPE}={variables(scratch)[PIPE]}".encode(), []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in entry.read_bytes().split(b"\0") and int(entry.parent.name) != os.getpid():
                found.append(int(entry.parent.name))
    return found


def scratch() -> Path | None:
    """The scratch folder of this run, None where no step runs."""
    return Path(os.environ[figures.SCRATCH]) if figures.SCRATCH in os.environ else None
