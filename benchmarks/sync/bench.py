"""``bench sync``: bytes and speed of weight sync, beside pairs of index and value and beside XOR with zstd.

Every row sends bfloat16 weights, of which ``changed`` percent of the words moved by one unit since the message before, each word
by itself. Columns (also the keys of the rows in ``--json``):

* ``changed``: percent of the words. ``way``: "sync" is ``ds_zipccl.sync``; "pairs" has a u32 index and a u16 value for each changed word;
  "xor_zstd1" is XOR with the base and zstd at level 1.
* ``ratio``: bytes of the weights / bytes of the message. ``times``: bytes of the message / bytes of sync's.
* ``pack_gbps``, ``apply_gbps``: 1e9 bytes of weights a second, medians, on ``--threads`` threads, the copy of the base included. The ways
  take turns. sync also hashes all words on both sides, and decodes twice, so that a message is applied whole or not at all; the
  others prove nothing.
* ``pack_memcpy``, ``apply_memcpy``: the speeds / the speed of ``Tensor.copy_`` of the same weights.
* ``wrong``: words that arrived with other bits.

The exit status is 1 if any word is wrong.
"""

from __future__ import annotations

import argparse
import statistics

from ds_zipccl.benchmarks.sync import trial
from ds_zipccl.cli import ToolError, tables
from ds_zipccl.cli.tables import Column

COLUMNS = (
    Column("changed", "g"),
    Column("way", width=9),
    Column("ratio", ".1f", 7),
    Column("times", ".2f", 6),
    Column("pack_gbps", ".2f"),
    Column("apply_gbps", ".2f"),
    Column("pack_memcpy", ".3f"),
    Column("apply_memcpy", ".3f"),
    Column("wrong", "d"),
)


def _percent(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 100:
        raise argparse.ArgumentTypeError(f"a part of the words is 0 to 100 percent, got {text!r}")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench sync``."""
    option = parser.add_argument
    option(
        "--changed", nargs="+", type=_percent, default=[0.1, 1, 2, 3, 5, 20], metavar="P", help="percent (0.1 to 20)"
    )
    option("--mib", type=int, default=64, metavar="M", help="MiB of weights (64)")
    option("--threads", type=int, default=1, metavar="N", help="threads to measure with (1)")
    option("--repeats", type=int, default=5, metavar="K", help="timings whose median is shown (5)")
    option("--json", metavar="FILE", help="write the rows here too")


def main(args: argparse.Namespace) -> int:
    """Run ``bench sync``; 1 if any word came back wrong, else 0."""
    import torch

    for option in ("mib", "threads", "repeats"):
        if getattr(args, option) < 1:
            raise ToolError(f"--{option} must be at least 1, got {getattr(args, option)}")
    ways: dict[str, trial.Way] = {"sync": trial.OurWay(), "pairs": trial.Pairs()}
    try:
        ways["xor_zstd1"] = trial.XorZstd(args.threads)
    except ImportError as error:
        tables.complain(f"xor_zstd1 left out: {error}; pip install zstandard")
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    table, rows = tables.Table(COLUMNS), []
    try:
        for changed in tables.progress(args.changed, "bench sync"):
            found = trial.measure(list(ways.values()), args.mib, changed / 100, args.repeats)
            state = trial.weights(args.mib)
            total = sum(tensor.nbytes for tensor in state.values())
            copy = trial.copied(state, args.repeats)
            for way, times in zip(ways, found, strict=True):
                pack, apply = statistics.median(times.pack), statistics.median(times.apply)
                row = {
                    "changed": changed, "way": way, "ratio": total / times.size if times.size else None,
                    "times": times.size / found[0].size, "pack_gbps": total / pack / 1e9,
                    "apply_gbps": total / apply / 1e9, "pack_memcpy": copy / pack, "apply_memcpy": copy / apply,
                    "memcpy_gbps": total / copy / 1e9, "wrong": times.wrong,
                }  # fmt: skip
                rows.append(row)
                table.add(row)
    finally:
        torch.set_num_threads(threads)
    if args.json:
        settings = {"threads": args.threads, "mib": args.mib, "repeats": args.repeats}
        tables.write_json(args.json, rows, args.command, **settings, zstandard=tables.version("zstandard"))
    wrong = sum(row["wrong"] for row in rows)
    if wrong:
        tables.complain(f"{wrong} words came back with other bits than they had")
    return 1 if wrong else 0
