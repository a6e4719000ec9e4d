"""``bench train``: whole training runs, plain and coded, from one seed. No timing without checking the bits.

Every run is ``examples/train_gpt.py`` in processes of its own; the variants take turns, plain first. Columns:

* ``mode``: what trained.
* ``ranks``, ``nodes``, ``link``: processes, the nodes that share them out in blocks, and what joins the nodes: loopback (one node),
  or with ``--link RATE`` a network of that rate, shaped by token buckets (:mod:`ds_zipccl.bench.link`; needs root and iproute2).
  Every rank is a node of its own unless ``--nodes`` says otherwise.
* ``variant``: ``plain`` (``DS_ZIPCCL=0``); ``raw``, our schedules with uncoded frames; ``coded``; ``auto``, whichever of the three is
  fastest for a message, which takes 25 blocking calls of its kind to find out, or 85 asynchronous ones. All have ``reduction: match``,
  which promises the plain run's bits, and the keys of ``--set``, which :func:`ds_zipccl.config.parse_section` checks.
* ``step_ms``: median of rank 0's steps, the first few left out.
* ``comm_ms``: median over the same steps of the time that rank 0's program spent in calls of collectives and in ``wait()`` of
  their handles, other ranks' delays included. What overlaps with computing is not in it.
* ``logical_bytes``: what bandwidth-optimal uncoded schedules of the operations that DeepSpeed calls send, per rank (mean) and run. ALL its
  traffic counts, from initialisation to the gather of the final parameters: coded calls and calls that passed uncoded.
* ``wire_bytes``: the same with coded calls at what they really sent, headers included: with ZeRO-1 and ZeRO-2 less even in raw
  frames, as gradients go to their owners only. The plain row carries ``logical_bytes``
  here: what the plain backend's own schedules move cannot be seen from outside.
* ``loss_last``: mean over ranks, nothing where it is not finite.
* ``params_sha256``: over all final parameters of all ranks (the table shows 16 digits).
* ``speedup``: plain ``step_ms`` / this row's ``step_ms``.
* ``comm_speedup``: plain ``comm_ms`` / this row's ``comm_ms``.

Below the rows of a configuration: the ratio over coded bytes alone, and ``bits: equal`` or everything that is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_zipccl.bench import ToolError, link
from ds_zipccl.bench.tables import Column, Table, complain, say, write_json
from ds_zipccl.bench.train_trial import MODES, Results, Training, find_script, run
from ds_zipccl.config import ConfigError, parse_section

#: variant -> the section of its processes; None: coding is off. Runs take turns in this order.
VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "raw": {"enabled": True, "reduction": "match", "mode": "always", "codec": "raw"},
    "coded": {"enabled": True, "reduction": "match", "mode": "always"},
    "auto": {"enabled": True, "reduction": "match", "mode": "auto"},
}
COLUMNS = (
    Column("mode", width=5),
    Column("ranks", "d"),
    Column("nodes", "d"),
    Column("link", width=8),
    Column("variant"),
    Column("step_ms", ".1f", 8),
    Column("comm_ms", ".1f", 8),
    Column("logical_bytes", ",d", 15),
    Column("wire_bytes", ",d", 15),
    Column("loss_last", ".6f"),
    Column("params_sha256", width=16),
    Column("speedup", ".3f"),
    Column("comm_speedup", ".3f"),
)

Runs = Mapping[str, list[Results]]  # variant -> its runs, plain first


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench train``."""
    option = parser.add_argument
    option("--mode", nargs="+", choices=MODES, default=["zero3"], help="what to train (default: zero3)")
    which = f"of {', '.join(VARIANTS)}; plain always runs (default: plain coded)"
    option("--variants", nargs="+", choices=VARIANTS, default=["plain", "coded"], metavar="V", help=which)
    option("--ranks", nargs="+", type=int, default=[2], metavar="N", help="local ranks (default: 2)")
    link.add_arguments(parser)
    option("--steps", type=int, default=20, metavar="K", help="optimizer steps per run (default: 20)")
    option("--skip", type=int, default=3, help="first steps left out of step_ms and comm_ms (default: 3)")
    option("--repeat", type=int, default=1, help="runs of each variant, alternating (default: 1)")
    option(
        "--size", choices=("tiny", "small", "medium"), default="small", help="model (default: small, 11M parameters)"
    )
    option(
        "--set",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help='keys of the "zipccl" section for all runs but plain ones',
    )
    option(
        "--options",
        type=shlex.split,
        default=[],
        metavar="TEXT",
        help="more of the script's: '--lr 2e-5 --accumulation 4'",
    )
    option("--script", type=Path, metavar="FILE", help="training script (default: the package's examples/train_gpt.py)")
    option("--timeout", type=float, default=1800, metavar="S", help="seconds for one run (default: 1800)")
    option("--json", metavar="FILE", help="write rows and verdicts here")
    option("--plot", metavar="FILE", help="draw steps, computing and communication apart, into this PNG file")


def _codes(variant: str) -> bool:
    """Whether frames of the variant are coded, not raw."""
    section = VARIANTS[variant]
    return section is not None and section.get("codec") != "raw"


def _section(variant: str, settings: Sequence[str]) -> dict[str, Any] | None:
    """The section of a variant's processes with ``settings``, each "key=value" in which the value is JSON, or a string without quotes.

    Raises:
        ToolError: a setting is none.
    """
    section = VARIANTS[variant]
    if section is None:
        return None
    section = dict(section)
    for setting in settings:
        key, equals, value = setting.partition("=")
        try:
            section[key] = json.loads(value)
        except json.JSONDecodeError:
            section[key] = value
        if not equals or key in (VARIANTS[variant] or {}):
            raise ToolError(
                f"--set wants KEY=VALUE with a key that {variant} runs do not set themselves, got {setting}"
            )
    try:
        parse_section(section)
    except ConfigError as error:
        raise ToolError(str(error)) from None
    return section


def problems(runs: Runs) -> list[str]:
    """Everything wrong with one configuration's runs; empty where nothing is."""
    found = []
    first = runs["plain"][0]
    for variant, result in ((variant, result) for variant, results in runs.items() for result in results):
        differing = [step for step, pair in enumerate(zip(result["losses"], first["losses"]), 1) if len(set(pair)) > 1]
        calls = result["sent"]["coded_calls"] if result["sent"] else 0
        section = VARIANTS[variant]
        must_code = section is not None and section.get("mode") != "auto"  # where the policy decides, passing is right
        checks = {
            f"losses differ from the first plain run's at steps {differing}": differing,
            "parameters differ from the first plain run's": result["params_sha256"] != first["params_sha256"],
            "ranks ended with different parameters": not result["replicas_equal"],
            "a loss is not finite": not all(math.isfinite(float.fromhex(loss)) for loss in result["losses"]),
            "nothing was coded: is ds_zipccl installed with its entry point?": must_code and not calls,
            f"{calls:.0f} calls were coded": section is None and calls,
        }
        found += [f"{variant} run: {problem}" for problem, wrong in checks.items() if wrong]
    return found


def rows(training: Training, runs: Runs, skip: int) -> list[dict[str, Any]]:
    """One row per variant, columns as in the module's docstring; ``skip`` first steps are left out of the times."""

    def median(key: str, variant: str) -> float:
        return float(statistics.median(ms for result in runs[variant] for ms in result[key][skip:]))

    def sent(variant: str, key: str) -> int | None:
        counted = runs[variant][0]["sent"]
        return round(counted[key] + counted["passed_bytes"]) if counted else None

    uncoded = next((sent(variant, "logical_bytes") for variant in runs if variant != "plain"), None)
    found = []
    for variant, results in runs.items():
        step_ms, comm_ms = median("step_ms", variant), median("comm_ms", variant)
        loss = float.fromhex(results[0]["losses"][-1])
        row = {
            **training.place,
            "variant": variant,
            "step_ms": step_ms,
            "comm_ms": comm_ms,
            "logical_bytes": uncoded if variant == "plain" else sent(variant, "logical_bytes"),
            "wire_bytes": uncoded if variant == "plain" else sent(variant, "wire_bytes"),
            "loss_last": loss if math.isfinite(loss) else None,
            "params_sha256": results[0]["params_sha256"],
            "speedup": median("step_ms", "plain") / step_ms,
            "comm_speedup": median("comm_ms", "plain") / comm_ms,
        }
        found.append(row)
    return found


def _measure(training: Training, args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and verdict of one configuration; a failed run is a problem in the verdict and gives no rows."""
    runs: dict[str, list[Results]] = {variant: [] for variant in VARIANTS if variant in ("plain", *args.variants)}
    try:
        with link.joined(training.link, training.ranks, training.nodes) as network:
            for variant in list(runs) * args.repeat:
                runs[variant].append(run(training, variant, _section(variant, args.set), network))
    except ToolError as error:
        return [], training.place | {"ratio_coded": {}, "problems": [str(error)]}
    counted = {variant: results[0]["sent"] for variant, results in runs.items()}
    verdict = {
        "ratio_coded": {
            variant: sent["logical_bytes"] / sent["wire_bytes"]
            for variant, sent in counted.items()
            if sent and sent["coded_calls"] and _codes(variant)
        },
        "parameters": runs["plain"][0]["parameters"],
        "sent": counted,
        "problems": problems(runs),
    }
    return rows(training, runs, args.skip), training.place | verdict


def main(args: argparse.Namespace) -> int:
    """Run ``bench train``; returns the exit status: 0 where every run worked and every bit is equal, else 1.

    Raises:
        ToolError: the options do not fit together, there is no training script, or a file cannot be written.
    """
    if args.repeat < 1 or not 0 <= args.skip < args.steps:
        raise ToolError(
            f"need --repeat >= 1 and --steps > --skip >= 0, got {args.repeat}, {args.steps} and {args.skip}"
        )
    link.check(args.link, args.ranks, args.nodes)
    for variant in args.variants:
        _section(variant, args.set)  # before hours of measuring
    script = find_script(args.script)
    if args.plot:
        from ds_zipccl.bench import plot_train  # before hours of measuring: matplotlib may be missing
    table, written, verdicts = Table(COLUMNS), [], []
    for mode, ranks, rate in itertools.product(args.mode, args.ranks, args.link):
        options = tuple(args.options)
        training = Training(script, mode, ranks, args.steps, args.size, args.timeout, rate, args.nodes, options)
        found, verdict = _measure(training, args)
        for row in found:
            table.add(row | {"params_sha256": row["params_sha256"][:16]})
        ratios = ", ".join(f"{variant} {ratio:.3f}" for variant, ratio in verdict["ratio_coded"].items())
        bits = "NOT proven equal" if verdict["problems"] else "equal"
        where = f"{mode}, {ranks} ranks, {rate or link.LOOPBACK}"
        say(f"# {where}: {f'ratio over coded bytes {ratios}; ' if ratios else ''}bits: {bits}")
        for problem in verdict["problems"]:
            complain(f"{where}: {problem}")
        written += found
        verdicts.append(verdict)
    if args.json:
        more = {"verdicts": verdicts, "steps": args.steps, "skip": args.skip, "size": args.size, "repeat": args.repeat}
        write_json(args.json, written, args.command, **more)
    if args.plot and written:
        plot_train.save(args.plot, written)
    return int(any(verdict["problems"] for verdict in verdicts))
