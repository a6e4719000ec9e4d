"""Random programs on the simulated GPU and NCCL, one for each seed and number of ranks; each result is compared.

python tests/on_sim/soak.py 1000                    # seeds 0 to 999, each on 2, 3, 4 and 8 ranks
python tests/on_sim/soak.py --first 77 --ranks 4 1  # seed 77 on 4 ranks
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ds_zipccl import kernels
from on_sim import launcher, random_programs

#: Seconds between two lines of progress.
_PROGRESS_S = 10


def work(part: int, parts: int, seeds: Sequence[int], ranks: Sequence[int], results: multiprocessing.Queue) -> None:
    """Run every ``parts``-th program from number ``part`` on; put the counts of each, or the text of its failure, into the queue."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    kernels.route()
    route = launcher.route()
    for seed, count in [(seed, count) for seed in seeds for count in ranks][part::parts]:
        try:
            results.put(random_programs.run(seed, route, count))
        except random_programs.Failure as failure:
            results.put(str(failure))


def soak(seeds: Sequence[int], ranks: Sequence[int], processes: int) -> tuple[Counter[str], list[str]]:
    """Run the programs, and print the progress. Returns the calls by kind, and the texts of all failures."""
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue = context.Queue()
    workers = [
        context.Process(target=work, args=(part, processes, seeds, ranks, results), daemon=True)
        for part in range(processes)
    ]
    for worker in workers:
        worker.start()
    calls: Counter[str] = Counter()
    failures: list[str] = []
    begun = looked = time.monotonic()
    total = len(seeds) * len(ranks)
    for done in range(1, total + 1):
        while True:
            try:
                found = results.get(timeout=_PROGRESS_S)
                break
            except multiprocessing.queues.Empty:
                if not any(worker.is_alive() for worker in workers):
                    raise RuntimeError(f"all processes ended after {done - 1} of {total} programs") from None
        if isinstance(found, str):
            failures.append(found)
            print(f"soak-sim: FAILED: {found}", flush=True)
        else:
            calls += found
        if time.monotonic() - looked > _PROGRESS_S:
            looked = time.monotonic()
            print(f"soak-sim: {done} of {total} programs, {looked - begun:.0f} s, {len(failures)} failed", flush=True)
    for worker in workers:
        worker.join()
    return calls, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="?", default=1000, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--ranks", type=int, nargs="+", default=sorted(random_programs.RANKS))
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    args = parser.parse_args()
    calls, failures = soak(range(args.first, args.first + args.seeds), args.ranks, args.processes)
    for kind, count in sorted(calls.items()):
        print(f"soak-sim: {count:6} {kind}")
    print(f"soak-sim: {args.seeds} seeds on {', '.join(map(str, args.ranks))} ranks: {len(failures)} programs failed")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
