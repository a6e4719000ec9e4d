"""Start, watch and end the processes of ``bench comm``."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ds_zipccl.benchmarks.comm.cases import Calibration, Case
from ds_zipccl.benchmarks.links.backends import BACKENDS, Backend
from ds_zipccl.tools import ToolError
from ds_zipccl.tools.namespaces import Network

if TYPE_CHECKING:
    from torch.multiprocessing.spawn import ProcessContext

GOODBYE_S = 60  # seconds for the processes to end after their last row


def launch(
    ranks: int, cases: list[Case | Calibration], network: Network | None, backend: Backend = BACKENDS["gloo"]
) -> Iterator[dict[str, Any]]:
    """Start the processes, yield their rows as they arrive, and kill what is left at the end.

    Raises:
        ToolError: a process failed, or no row arrived within the timeout of a case.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.multiprocessing import get_context
    from torch.multiprocessing.spawn import spawn

    from ds_zipccl.benchmarks.comm.trial import take_part

    # This process holds the store, so that no other program can take its port, which the system chose, meanwhile.
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=cases[0].timeout), wait_for_workers=False)
    results = get_context("spawn").Queue()
    context = spawn(take_part, (ranks, network, store.port, cases, results, backend), nprocs=ranks, join=False)
    try:
        for _ in range(rows_of(cases)):
            yield _next(results, context, cases[0].timeout)
        deadline = time.monotonic() + GOODBYE_S
        while not _ended(context, timeout=1):
            if time.monotonic() > deadline:
                raise ToolError(f"all rows arrived, but the processes did not end within {GOODBYE_S} s")
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def rows_of(cases: list[Case | Calibration]) -> int:
    """Number of rows that :func:`launch` yields."""
    return sum(len(case.variants) if isinstance(case, Case) else 1 for case in cases)


def _next(results: Any, context: ProcessContext, timeout: float) -> dict[str, Any]:
    """Return the next row; blocks for at most ``timeout`` seconds.

    Raises:
        ToolError: a process failed, or no row arrived.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            row: dict[str, Any] = results.get(timeout=0.2)
            return row
        except queue.Empty:
            _ended(context, timeout=0)
    raise ToolError(f"no result within {timeout:g} s; all processes are killed. Raise --timeout or lower --numel")


def _ended(context: ProcessContext, timeout: float) -> bool:
    """Whether all processes have ended with status 0; waits up to ``timeout`` seconds for an end.

    Raises:
        ToolError: a process failed; torch kills the remaining processes.
    """
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

    try:
        return bool(context.join(timeout=timeout))
    except (ProcessRaisedException, ProcessExitedException) as error:
        raise ToolError(f"a rank failed: {str(error).strip()}") from error
