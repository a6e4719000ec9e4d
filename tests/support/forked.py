"""Cases of a rank of :func:`programs.launch`, each in a process and a default group of its own, which cost far less than a start.

A case that hangs, dies or leaves something behind does not disturb the next ones.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def each(folder: Path, cases: Mapping[str, Callable[[dict[str, Any]], object]], limit: float) -> None:
    """Run the cases one after the other, and leave what each of them has found in ``folder/NAME.RANK.json``.

    Args:
        cases: by name. A case gets a dict, to which it adds what it finds. The key "error" is for its failure: the name of an exception's
            class with the keys "text" and "trace", "hang" after ``limit`` seconds, or the signal.
    """
    import deepspeed

    torch.set_num_threads(1)
    deepspeed.utils.logging.logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # DeepSpeed would compile it now, for minutes
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name, case in cases.items():
        file, stacks = (folder / f"{name}.{rank}.{kind}" for kind in ("json", "stacks"))
        if not (process := os.fork()):
            faulthandler.dump_traceback_later(max(0.01, limit - 2), file=stacks.open("w"))
            found: dict[str, Any] = {"error": ""}
            try:
                store, patience = f"file://{folder / name}.store", timedelta(seconds=limit)
                dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=patience)
                deepspeed.init_distributed()
                case(found)
                dist.barrier()
                dist.destroy_process_group()
            except BaseException as error:
                found |= {"error": type(error).__name__, "text": str(error), "trace": traceback.format_exc()}
            file.write_text(json.dumps(found))
            sys.stdout.flush()
            os._exit(0)
        deadline = time.monotonic() + limit
        while not (ended := os.waitpid(process, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.005)
        if not ended[0]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            file.write_text(json.dumps({"error": "hang", "trace": stacks.read_text() if stacks.exists() else ""}))
        elif ended[1]:
            file.write_text(json.dumps({"error": f"signal {ended[1]}"}))


def of_all_ranks(found: Mapping[str, Any], name: str, ranks: int) -> list[dict[str, Any]]:
    """Return the findings of a case among the files that :func:`programs.launch` returns."""
    return [found[f"{name}.{rank}"] for rank in range(ranks)]
