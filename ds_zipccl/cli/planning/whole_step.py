"""The whole step of ``plan`` on NCCL groups: its options, its rows, and the numbers of GPUs of its picture."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ds_zipccl.cli import ToolError, tables
from ds_zipccl.cli.planning.step import TOTAL
from ds_zipccl.cli.planning.step_time import FLOPS, Computing, step_time
from ds_zipccl.cli.tables import Column

COLUMNS = (
    Column("network", width=17),
    Column("variant", width=7),
    Column("ms", ".1f", 10),
    Column("codec_ms", ".1f", 10),
    Column("computing_ms", ".1f", 10),
    Column("step_ms", ".1f", 10),
    Column("exposed", ".0%"),
    Column("tflops", ".1f"),
    Column("step_speedup", ".2f"),
)


class Option(NamedTuple):
    """An option of ``plan`` on NCCL groups: its type, its default, its placeholder and its meaning."""

    type: Any
    default: Any
    metavar: str
    about: str


#: Name -> option.
OPTIONS = {
    "path": Option(
        float, math.inf, "GBPS", "1e9 bytes a second between network cards and GPUs of a node, which bytes pass in turn (no limit)"
    ),
    "hop": Option(float, 0.0, "US", "microseconds that an operation takes more for every further node (0)"),
    "tflops": Option(float, None, "T", "1e12 operations a second of a GPU that computes: adds the time of the whole step"),
    "tokens": Option(tables.count(1e9), None, "K", "tokens of a GPU in a micro-batch; goes with --tflops"),
    "flops": Option(float, FLOPS, "F", f"operations for a parameter and a token ({FLOPS:g}; 6 where no activations are computed again)"),
    "overlap": Option(float, 0.0, "S", "share of the computing that hides communication (0)"),
    "plot": Option(str, None, "PNG", "draw the time of a step for up to --gpus GPUs (needs matplotlib)"),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``plan`` for whole steps."""
    for name, option in OPTIONS.items():
        parser.add_argument(
            f"--{name}",
            type=option.type,
            default=option.default,
            metavar=option.metavar,
            help=f"with --backend nccl: {option.about}",
        )


def refuse(args: argparse.Namespace) -> None:
    """Refuse the options of whole steps.

    Raises:
        ToolError: there is one.
    """
    given = [f"--{name}" for name, option in OPTIONS.items() if getattr(args, name) != option.default]
    if given:
        raise ToolError(f"{', '.join(given)}: the time of a whole step is planned for NCCL groups alone")


def computing(args: argparse.Namespace) -> Computing | None:
    """Return the computing that the options describe, or None where they leave it out.

    Raises:
        ToolError: an option is out of range, or lacks another option.
    """
    if not args.path > 0 or not 0 <= args.hop < math.inf:
        raise ToolError(f"--path must be above 0 and --hop at least 0, got {args.path:g} and {args.hop:g}")
    if args.tflops is None and args.tokens is None and args.plot is None:
        return None
    if args.tflops is None or args.tokens is None:
        raise ToolError(f"the time of a step wants --tflops and --tokens, got {args.tflops} and {args.tokens}")
    try:
        return Computing(args.tflops, args.tokens, args.flops, args.overlap)
    except ValueError as error:
        raise ToolError(str(error)) from error


def rows(
    args: argparse.Namespace, communication: Sequence[dict[str, Any]], work: Computing
) -> Iterator[dict[str, Any]]:
    """The totals of ``communication`` with the time of the whole step, columns as in ``plan --help``. ``communication``: the rows of
    ``args.gpus`` GPUs, plain ones first."""
    busy = work.seconds(args.params, args.accumulation)
    plain: dict[str, float] = {}
    for row in communication:
        if row["what"] == TOTAL:
            time = step_time(busy, row["ms"] / 1e3, row["codec_ms"] / 1e3, work.overlap)
            plain.setdefault(row["network"], time.total)
            yield row | {
                "gpus": args.gpus,
                "computing_ms": 1e3 * busy,
                "step_ms": 1e3 * time.total,
                "exposed": time.share,
                "tflops": work.operations(args.params, args.accumulation) / time.total / 1e12,
                "step_speedup": plain[row["network"]] / time.total,
            }


def counts(args: argparse.Namespace) -> list[int]:
    """Numbers of GPUs of the picture: two nodes, four, eight and so on, and all."""
    nodes = args.gpus // args.gpus_per_node
    doubled = (2**power for power in range(1, nodes.bit_length()))
    return [args.gpus_per_node * count for count in sorted({*doubled, nodes})]
