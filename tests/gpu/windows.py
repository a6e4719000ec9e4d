"""A training whose plain and coded steps take turns in one process: what coding gains where the machine drifts. Ranks share the GPU.

    python tests/gpu/windows.py --workload lora --size medium --link 10gbit --json FILE [--window 8] [--pairs 6]

Windows of plain and of coded steps follow each other, and a plain one ends them. All ranks switch at the same steps, because the number of
a step alone decides; the schedules are those between which mode auto chooses. Each coded window is compared with the mean of the plain
windows beside it. No speed-up is printed where this rig decides the time, not the network: where a step sends less than 250 MB, or the
calls and waits of the host take more than 5% of a coded step. Status 3 where a window was not plain or coded as planned.
"""

from __future__ import annotations

import argparse
import os
import runpy
import statistics
import sys
from collections.abc import Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import figures
import where

from ds_zipccl.policy import trial
from ds_zipccl.policy.trial import CODED, PLAIN, Turn

#: Variable of the ranks: the script that trains, steps of a window, and pairs of windows.
SCRIPT = "ZIPCCL_WINDOWS"
#: Coded steps before the first window: copies of weights are made, allocators settle.
WARM_UP = 12
#: Bytes that a plain step sends at least, and the most of a step that may be the rig's, for a speed-up to be printed.
LEAST_BYTES, MOST_OF_RIG = 250e6, 0.05


def turns(window: int, pairs: int) -> list[int]:
    """The schedule of each step."""
    windows = [PLAIN, CODED] * pairs + [PLAIN]
    return [CODED] * WARM_UP + [schedule for schedule in windows for _ in range(window)]


def rank(script: str, window: str, pairs: str) -> None:
    """Train as the script does, by these turns in place of a trial's."""

    def plan(self: trial.StepTrial) -> Iterator[Turn]:
        yield from map(Turn, turns(int(window), int(pairs)))
        yield from repeat(Turn(PLAIN))  # the gathers after the training

    trial.StepTrial._plan = plan  # type: ignore[method-assign]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def compared(run: dict[str, Any], window: int, pairs: int, tiny_ms: float) -> dict[str, Any]:
    """The figures of a run. ``run``: its results; ``tiny_ms``: the time of the smallest collective of this rig."""
    planned = turns(window, pairs)
    sent = [sum(wire + passed for _, wire, passed in step.sent.values()) for step in run["steps"]]
    coded = [any(logical for logical, _, _ in step.sent.values()) for step in run["steps"]]
    starts = range(WARM_UP, len(planned), window)

    def medians(of: Sequence[float]) -> list[float]:
        return [statistics.median(of[start : start + window]) for start in starts]

    times, volume, host = medians(run["step_ms"]), medians(sent), medians(run["comm_ms"])
    beside = [(before + after) / 2 for before, after in zip(times[:-2:2], times[2::2])]
    saved = [plain - now for plain, now in zip(beside, times[1::2])]
    (plain_ms, coded_ms), nbytes = (statistics.median(times[at::2]) for at in range(2)), statistics.median(volume[::2])
    waits = run["sent"]["host_waits"] / planned.count(CODED)
    rig_ms = waits * tiny_ms + statistics.median(host[1::2])
    found = {
        "windows_ms": times, "window_bytes": volume, "plain_ms": plain_ms, "coded_ms": coded_ms, "saved_ms": statistics.median(saved),
        "least_saved_ms": min(saved), "most_saved_ms": max(saved),
        "tiny_ms": tiny_ms, "host_waits": waits, "calls_ms": host, "rig_ms": rig_ms,
        "as_planned": all(is_coded == (planned[at] == CODED) for at, is_coded in enumerate(coded) if at >= WARM_UP),
    }  # fmt: skip
    most_ms = MOST_OF_RIG * coded_ms
    reasons = {
        f"a plain step sends {nbytes / 1e6:.0f} MB, wanted at least {LEAST_BYTES / 1e6:.0f}": nbytes < LEAST_BYTES,
        f"calls and waits of the host take {rig_ms:.1f} ms, wanted at most {most_ms:.1f}": rig_ms > most_ms,
        "some coded window had plain steps, or the other way round": not found["as_planned"],
    }  # fmt: skip
    why = [reason for reason, holds in reasons.items() if holds]
    speedups = sorted(plain / now for plain, now in zip(beside, times[1::2]))
    return found | ({"no_speedup": why} if why else {"speedup": statistics.median(speedups), "speedups": speedups})


def main() -> int:
    from ds_zipccl.benchmarks.links.backends import BACKENDS
    from ds_zipccl.benchmarks.train import trial as runs
    from ds_zipccl.tools import link, namespaces

    if where.DRY:
        import dry_bench  # noqa: F401  (groups in stream order on CPUs stand for NCCL's)
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--workload", choices=runs.WORKLOADS, required=True)
    add("--size", default="medium")
    add("--link", type=link.parse, required=True)
    add("--window", type=int, default=8, help="steps of a window (8)")
    add("--pairs", type=int, default=6, help="pairs of windows (6)")
    add("--json", type=Path, required=True)
    args = parser.parse_args()
    script, backend, ranks = runs.find_script(workload=args.workload), BACKENDS["nccl"], 2
    steps = len(turns(args.window, args.pairs))
    os.environ[SCRIPT] = f"{args.window} {args.pairs} {script}"
    limit, here = 0.95 * figures.seconds(1800), Path(__file__)
    training = runs.Training(here, args.workload, ranks, steps, args.size, limit, args.link, backend=backend)
    section = {"enabled": True, "mode": "auto", "nccl": "on", "reduction": "plain"}
    section |= {"nccl_min_bytes": 0} if where.DRY else {}
    with namespaces.joined(args.link, ranks) as network:
        run = runs.run(training, "windows", section, network)
    found = compared(run, args.window, args.pairs, figures.told("tiny_ms") or 0.0)
    figures.put(workload=args.workload, link=link.name(args.link), window=args.window, **found)
    figures.write(args.json, {"step_ms": run["step_ms"], "sent": run["sent"], "parameters": run["parameters"], **found})
    for key, value in found.items():
        print(f"{key}: {value}", flush=True)
    return 0 if found["as_planned"] else figures.SLOW


if __name__ == "__main__":
    if "RANK" in os.environ:
        window, pairs, script = os.environ[SCRIPT].split(" ", 2)
        rank(script, window, pairs)
    else:
        sys.exit(main())
