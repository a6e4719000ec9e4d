"""Random programs on the simulated GPU and NCCL, one for each seed and number of ranks; each result is compared.

python tests/on_sim/soak.py 1000                    # seeds 0 to 999, each on 2, 3, 4 and 8 ranks
python tests/on_sim/soak.py --first 77 --ranks 4 -- 1  # seed 77 on 4 ranks
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ds_zipccl import kernels
from ds_zipccl.kernels.cuda.backend import CudaBackend
from on_sim import launcher, random_programs

#: Seconds between two lines of progress.
_PROGRESS_S = 10


@functools.cache
def route() -> CudaBackend:
    """The kernels of this process."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    kernels.route()
    return launcher.route()


def work(seed: int, ranks: int) -> Counter[str] | str:
    """Run a program. Returns its calls by kind, or the text of its failure."""
    try:
        return random_programs.run(seed, route(), ranks)
    except random_programs.Failure as failure:
        return str(failure)


def soak(seeds: Sequence[int], ranks: Sequence[int], processes: int) -> tuple[Counter[str], list[str]]:
    """Run the programs, and print the progress. Returns the calls by kind, and the texts of all failures."""
    calls: Counter[str] = Counter()
    failures: list[str] = []
    begun = looked = time.monotonic()
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(work, seed, count) for seed in seeds for count in ranks]
        for done, one in enumerate(as_completed(running), 1):
            if isinstance(found := one.result(), str):
                failures.append(found)
                print(f"soak-sim: FAILED: {found}", flush=True)
            else:
                calls += found
            if time.monotonic() - looked > _PROGRESS_S:
                looked, said = time.monotonic(), f"{done} of {len(running)} programs"
                print(f"soak-sim: {said}, {looked - begun:.0f} s, {len(failures)} failed", flush=True)
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
