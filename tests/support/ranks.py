"""Run a function on n ranks: one process each, a group over loopback, one clear failure if any of them fails.

A case is a module-level function ``case(rank, ranks, *arguments)``. A rank calls init_process_group(), the case, barrier() and
destroy_process_group(). Processes come from a fork server that has imported torch once, so a rank starts in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from places import PYTHONPATH

#: For the fork server and all ranks: several ranks share few cores, and gloo must not look names up.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
#: Seconds that the other ranks have to fail too, once one has failed.
GRACE = 2.0
#: torch's words where ranks have not met.
_UNCONNECTED = "Gloo connectFullMesh failed"
#: Imported once by the fork server of a worker. FSDP2 and optimizers of torch import the compiler, for a second in each rank.
_PRELOAD = ["torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.testing", "pytest", "ds_zipccl.comm"]


_Case = TypeVar("_Case", bound=Callable[..., Any])
#: A case and its arguments.
_Call = tuple[Callable[..., Any], tuple[Any, ...]]


class RankFailure(AssertionError):
    """Some ranks failed, died or did not finish; the message has the words of each."""


def run(
    case: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    timeout: float = 120.0,
    backend: str = "gloo",
    plant: Callable[[], None] | None = None,
) -> list[Any]:
    """Run ``case(rank, ranks, *arguments)`` on each rank, and return the results in the order of the ranks. Blocks.

    Args:
        backend: of the default group: "gloo", or the name of :mod:`ds_zipccl.benchmarks.links.slots`.
        plant: makes a mistake; each rank calls it before the case.
        timeout: seconds, also of the group. Then all ranks are killed; after a failure the other ranks have ``GRACE`` seconds.

    Raises:
        RankFailure: with the traceback of every rank that failed.
    """
    call = (case, arguments) if plant is None else (_mistaken, (plant, case, *arguments))
    return [results[0] for results in _launch([call], ranks, timeout, backend)]


def _mistaken(rank: int, ranks: int, plant: Callable[[], None], case: Callable[..., Any], *arguments: Any) -> Any:
    plant()
    return case(rank, ranks, *arguments)


def run_each(ranks: int, *cases: Callable[..., Any] | tuple[Any, ...], timeout: float = 120.0) -> None:
    """As :func:`run` for one case after the other, by one launch. The first case that fails ends it.

    Each case has processes and a group of its own: a rank imports the file of the test once, and forks for each case.

    Args:
        cases: ``case`` or ``(case, *arguments)``.
        timeout: seconds of each case.
    """
    calls = [(case[0], case[1:]) if isinstance(case, tuple) else (case, ()) for case in cases]
    _launch(calls, ranks, timeout, "gloo")


#: (file of tests, number of ranks, whether only the full tier runs them) -> cases and their reasons for that tier.
_together: dict[tuple[str, int, bool], list[tuple[tuple[Any, ...], str]]] = defaultdict(list)


def together(ranks: int, *arguments: Any, full: str = "", file: str = "") -> Callable[[_Case], _Case]:
    """A case that runs with the others of its number of ranks and its file, or of ``file``, as :func:`run_each` does.

    Args:
        full: why it runs in the full tier only.
    """

    def noted(case: _Case) -> _Case:
        _together[file or case.__module__, ranks, bool(full)].append(((case, *arguments), full))
        return case

    return noted


def programs(module: str, *short: int) -> Callable[..., None]:
    """The test of a file that runs its cases :func:`together`, a launch for each number of ranks. ``short``: those in the short tier, if
    that has not all of them."""
    import pytest

    rows = []
    for (file, ranks, full), noted in sorted(_together.items()):
        if file == module:
            reasons = "; ".join(dict.fromkeys(reason for _, reason in noted))
            longer = full or (short and ranks not in short)
            marks = [pytest.mark.full(reason=reasons or "another number of ranks stays")] if longer else []
            rows.append(
                pytest.param(ranks, [case for case, _ in noted], marks=marks, id=f"{ranks} ranks{', full' * full}")
            )

    @pytest.mark.parametrize(("ranks", "cases"), rows)
    def test(ranks: int, cases: list[tuple[Any, ...]]) -> None:
        run_each(ranks, *cases)

    return test


def _launch(calls: Sequence[_Call], ranks: int, timeout: float, backend: str, again: bool = True) -> list[Any]:
    """The results of each rank, in the order of ``calls``.

    All are called once more where gloo has not connected a new default group: no code of the package has run then.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    processes, pipes = [], {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(ranks):
                mine, theirs = context.Pipe(duplex=False)
                what = (theirs, calls, rank, ranks, os.path.join(folder, "store"), timeout, backend)
                processes.append(context.Process(target=_rank, args=what, daemon=True))
                processes[-1].start()
                theirs.close()
                pipes[mine] = rank
            answers = _collect(pipes, len(calls), timeout)
    finally:
        for process in processes:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):  # it has not come as far as setsid()
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    failures = [f"rank {rank}: {text}" for rank, (good, text) in sorted(answers.items()) if not good]
    if again and any(_UNCONNECTED in text for text in failures):
        print(f"ranks: repeated, {_UNCONNECTED}", file=sys.stderr)
        return _launch(calls, ranks, timeout, backend, again=False)
    if failures:
        names = ", ".join(case.__name__ for case, _ in calls)
        raise RankFailure("\n".join([f"{names} on {ranks} ranks", *failures]))
    return [answers[rank][1] for rank in range(ranks)]


def at_once(*programs: Callable[[], object]) -> None:
    """Run functions in threads of this process, until all have ended. The error of one of them is raised."""
    with ThreadPoolExecutor(len(programs)) as pool:
        for ended in [pool.submit(program) for program in programs]:
            ended.result()


def whole_programs(*arguments: Sequence[str], timeout: float = 120.0) -> list[tuple[int, str, str]]:
    """Run an interpreter for each list of arguments, all at a time, which start and end as a user's do.

    Returns:
        (exit status, stdout, stderr) of each, in order.

    Raises:
        subprocess.TimeoutExpired: an interpreter did not end in ``timeout`` seconds; all are killed.
    """
    environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": PYTHONPATH}
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen([sys.executable, *more], env=environment, stdout=pipe, stderr=pipe, text=True)
        for more in arguments
    ]
    try:
        said = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


def _collect(pipes: dict[Connection, int], count: int, timeout: float) -> dict[int, tuple[bool, Any]]:
    """rank -> (True, its ``count`` results) or (False, reason)."""
    answers: dict[int, tuple[bool, Any]] = {}
    results: dict[int, list[Any]] = {rank: [] for rank in pipes.values()}
    pending = dict(pipes)
    deadline = time.monotonic() + timeout
    while pending:
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            answers.update({rank: (False, "did not finish") for rank in pending.values()})
            break
        for pipe in ready:
            rank = pending[pipe]
            try:
                good, result = pipe.recv()
            except EOFError:
                good, result = False, "died without a word"
            if good:
                results[rank].append(result)
                if len(results[rank]) < count:
                    deadline = time.monotonic() + timeout
                    continue
                result = results[rank]
            else:
                deadline = min(deadline, time.monotonic() + GRACE)
            del pending[pipe]
            answers[rank] = (good, result)
    return answers


def _rank(
    pipe: Connection, calls: Sequence[_Call], rank: int, ranks: int, store: str, timeout: float, backend: str
) -> None:
    """Send the result of every call, or the traceback of one that fails: it is the last."""
    os.setsid()
    if len(calls) == 1:
        _one(pipe, *calls[0], rank, ranks, store, timeout, backend)
        return
    for number, call in enumerate(calls):
        process = os.fork()
        if not process:
            good = _one(pipe, *call, rank, ranks, f"{store}{number}", timeout, backend)
            os._exit(not good)
        if os.waitpid(process, 0)[1]:
            return


def _one(
    pipe: Connection,
    case: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    ranks: int,
    store: str,
    timeout: float,
    backend: str,
) -> bool:
    import torch
    import torch.distributed as dist

    try:
        torch.set_num_threads(1)
        if backend != "gloo":
            from ds_zipccl.benchmarks.links import slots

            slots.install()
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout)
        )
        result = case(rank, ranks, *arguments)
        dist.barrier()
        dist.destroy_process_group()
        pipe.send((True, result))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        return False
    return True
