"""NCCL: one rank, and several ranks that share one GPU. ``make gpu`` runs this.

NCCL refuses two ranks on one GPU where both have the same host hash. ``NCCL_HOSTID`` replaces the hash, so each rank is a node of its own,
and data go through sockets: real NCCL and real hangs, but no figures for speed. Every rank is a process with a time limit.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import figures
import mps
import nccl_rank
import pytest
import where
from step_runner import end_tree

from ds_zipccl.tools.gpus import HOST_ID, SHARED_GPU

PROGRAM = Path(nccl_rank.__file__)
#: Tried in turn by the probe, behind the same with the Multi-Process Service: further settings, for machines that forbid a part.
WITH_MPS = "with MPS"
VARIANTS: dict[str, dict[str, str]] = {
    "as planned": {},
    "without cuMem, shared memory and peer access": {
        "NCCL_CUMEM_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0", "NCCL_SHM_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_RAS_ENABLE": "0",
    },
}  # fmt: skip
PROBE_SECONDS, ONE_RANK_SECONDS = 20.0, 25.0
#: Seconds of the step for both groups of ranks, where no step runs; those that the first may take; those left for pytest's end.
SHARED_SECONDS, FIRST_SHARE, SPARE_SECONDS = 95.0, 0.45, 6.0
_BEGUN = time.monotonic()
#: Seconds for the other ranks to fail, once one has failed.
GRACE = 4.0
_TAIL = 2500


@pytest.fixture(autouse=True)
def gpu() -> None:
    if where.missing():
        pytest.skip(where.missing())


def launch(program: str, ranks: int, seconds: float, settings: Mapping[str, str]) -> list[dict[str, Any]]:
    """Run a program of nccl_rank.py on ``ranks`` processes, and return the report of each.

    Raises:
        AssertionError: a rank failed, or hung; all are ended. The message has their words.
        Late: no rank failed, and the last check was still going on.
    """
    with tempfile.TemporaryDirectory(prefix="ds_zipccl-nccl-") as name:
        folder = Path(name)
        processes = []
        for rank in range(ranks):
            environment = {**os.environ, **settings, "PYTHONFAULTHANDLER": "1"}
            environment.pop(figures.VARIABLE, None)  # figures are the parent's
            if ranks > 1:
                environment[HOST_ID] = f"rank{rank}"
            if where.DRY:
                environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            words = [str(PROGRAM), program, str(rank), str(ranks), str(folder / "store"), str(folder / f"report{rank}")]
            with (folder / f"output{rank}").open("w") as output:
                processes.append(
                    subprocess.Popen([sys.executable, *words], stdout=output, stderr=subprocess.STDOUT, env=environment)
                )
        deadline, last, hangs = time.monotonic() + seconds * where.PATIENCE, time.time(), True
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if any(process.poll() for process in processes):
                deadline = min(deadline, time.monotonic() + GRACE)
            if (now := max([last, *(path.stat().st_mtime for path in folder.glob("report*"))])) > last:
                last = now
                figures.alive()
            time.sleep(0.05)
        late = [rank for rank, process in enumerate(processes) if process.poll() is None]
        if late and not any(process.poll() for process in processes):
            hangs, words = figures.overdue(time.time() - last, seconds * where.PATIENCE)
        for process in processes:
            end_tree(process)
        reports = [figures.read(folder / f"report{rank}") for rank in range(ranks)]
        said = [(folder / f"output{rank}").read_text(errors="replace") for rank in range(ranks)]
    problems = []
    for rank, (process, report) in enumerate(zip(processes, reports)):
        if process.returncode:
            end = f"did not end in time, in {report.get('begun')}" if rank in late else f"status {process.returncode}"
            end += "" if hangs else f", {words}"
            problems.append(f"rank {rank} of {ranks}, {program}: {end}\n{said[rank][-_TAIL:]}")
    if not hangs:
        raise figures.Late("\n".join(problems))
    assert not problems, "\n".join(problems)
    return reports


def _figures(reports: list[dict[str, Any]]) -> dict[str, Any]:
    return {"seconds": reports[0]["done"], **reports[0]["figures"]}


def test_one_rank_on_nccl() -> None:
    """What a call looks like: signatures, streams, graphs; and our calls on a group of one, which pass."""
    (report,) = launch("one_rank", 1, ONE_RANK_SECONDS, {"NCCL_DEBUG": "WARN"})
    figures.put(one_rank=_figures([report]))


def test_probe_of_two_ranks_on_nccl() -> None:
    """Whether ranks can share a GPU here, with which settings, and how long the smallest collective takes then."""
    failures: dict[str, str] = {}
    late = True
    for name, further in {WITH_MPS: None, **VARIANTS}.items():
        try:
            settings = SHARED_GPU | (mps.start(mps.scratch()) if further is None else further)
            reports = launch("probe", 2, PROBE_SECONDS, {**settings, "NCCL_DEBUG": "INFO"})
        except (AssertionError, RuntimeError) as error:
            failures[name] = str(error)
            late &= isinstance(error, (figures.Late, RuntimeError))
            figures.put(failures=failures)
            if further is None:
                mps.stop(mps.scratch())
            continue
        tiny_ms = max(report["figures"]["tiny_ms"] for report in reports)
        figures.put(works=name, settings=settings, tiny_ms=tiny_ms, probe=_figures(reports))
        figures.tell("nccl", settings)
        figures.tell("tiny_ms", tiny_ms)
        return
    said = "\n\n".join(f"{name}: {text}" for name, text in failures.items())
    raise figures.Late(said) if late else AssertionError(said)


@pytest.fixture
def settings() -> Iterator[dict[str, str]]:
    """The settings with which the probe worked."""
    yield figures.told("nccl") or dict(SHARED_GPU)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_a_gpu_on_nccl(ranks: int, settings: dict[str, str]) -> None:
    """Our calls: the bits of plain moves, sums in their order, subgroups, capture; waits of the host, counted."""
    left = figures.seconds(SHARED_SECONDS) / where.PATIENCE - (time.monotonic() - _BEGUN) - SPARE_SECONDS
    seconds = max(20.0, FIRST_SHARE * left if ranks == 2 else left)
    reports = launch(f"shared_gpu_{ranks}", ranks, seconds, {**settings, "NCCL_DEBUG": "WARN"})
    figures.put(**{f"ranks_{ranks}": _figures(reports)})
