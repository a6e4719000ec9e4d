"""Run a file as the program of n ranks, as a launcher would.

The import of DeepSpeed costs more than a short training. One process per launch, with the environment under test, imports DeepSpeed and
forks the ranks.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from places import PYTHONPATH

#: Seconds for all ranks to fail after the first failure.
GRACE = 5.0


def launch(
    program: str, ranks: int, folder: Path, *options: str, timeout: float = 240, **environment: str
) -> dict[str, Any]:
    """Run ``python program folder *options`` once per rank. Blocks until all ranks have ended; none is left behind.

    Returns:
        Contents of the JSON files that the ranks left in ``folder``, by stem.

    Raises:
        AssertionError: a rank failed or did not end in ``timeout`` seconds; the message has the end of each rank's output.
    """
    fixed = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore::FutureWarning"}
    # Without this DeepSpeed's optimizers load torch's compiler, in six seconds per rank; no program here compiles a model.
    fixed |= {"TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": PYTHONPATH}
    command = [sys.executable, __file__, str(timeout), str(ranks), program, str(folder), *options]
    process = subprocess.Popen(command, env={**os.environ, **fixed, **environment}, start_new_session=True)
    try:
        status = process.wait(timeout + 60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    said = "\n".join(f"{file.stem}: {file.read_text(errors='replace')[-2000:]}" for file in folder.glob("rank*.txt"))
    assert status == 0, said
    return {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}


def _ranks(timeout: float, ranks: int, argv: list[str]) -> int:
    """Fork the ranks and wait for them; return 0 if all succeed."""
    import deepspeed  # noqa: F401
    import torch._dynamo  # noqa: F401  (else the first optimizer of every rank imports it, disabled or not)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=_rank, args=(rank, argv), daemon=True) for rank in range(ranks)]
    for process in started:
        process.start()
    deadline = time.monotonic() + timeout
    while None in (states := [process.exitcode for process in started]) and time.monotonic() < deadline:
        if any(states):
            deadline = min(deadline, time.monotonic() + GRACE)
        time.sleep(0.02)
    for process in started:
        process.kill()
    return int(states != [0] * ranks)


def _rank(rank: int, argv: list[str]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    with (Path(argv[1]) / f"rank{rank}.txt").open("wb") as output:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(output.fileno(), stream.fileno())
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    sys.exit(_ranks(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
