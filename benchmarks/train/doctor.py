"""``bench doctor``: predictions of ``doctor`` for workloads of ``bench train``, compared with trainings on the same shaped links, as root.

Columns: ``workload``, ``link``. ``comm``, ``step``: measured times, plain / coded. ``comm_predicted``,
``step_predicted``: the same, predicted. ``comm_off``, ``step_off``: predicted / measured. ``comm`` compares
``exchange_ms`` of ``bench train``, which excludes the wait for late ranks, as the prediction does. The computing time of
``step`` is that of the plain run.

The exit status is 1 if a prediction is off by more than 20% or a training has wrong bits.
"""

from __future__ import annotations

import argparse
from typing import Any

from ds_zipccl.benchmarks.comm import launch
from ds_zipccl.benchmarks.comm.cases import Calibration, Case
from ds_zipccl.benchmarks.comm.variants import VARIANTS
from ds_zipccl.benchmarks.train import results, trial
from ds_zipccl.benchmarks.train.trial import Training
from ds_zipccl.cli import doctor_ranks
from ds_zipccl.cli.planning import user_job
from ds_zipccl.policy.cost_model import LinkProfile
from ds_zipccl.tools import ToolError, link, namespaces, tables
from ds_zipccl.tools.namespaces import Network
from ds_zipccl.tools.tables import Column

#: Workloads with traffic of parameters and gradients only.
WORKLOADS = ("zero1", "zero2", "zero3")
RANKS = 2
#: Greatest accepted relative error of a prediction.
TOLERANCE = 0.2
#: Variant -> ``"zipccl"`` section of its processes.
_RUNS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "coded": {"enabled": True, "reduction": "match"} | (VARIANTS["coded"].settings or {}),
}
COLUMNS = (
    Column("workload", width=8),
    Column("link", width=9),
    Column("comm", ".2f", 6),
    *tables.alike("comm_predicted comm_off", ".2f"),
    Column("step", ".2f", 6),
    *tables.alike("step_predicted step_off", ".2f"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench doctor``."""
    option = parser.add_argument
    about = f"trainings: {', '.join(WORKLOADS)} (all)"
    option("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="W", help=about)
    usual = "100mbit", "300mbit", "1gbit"
    about = f"networks between the two ranks, as in bench train ({' '.join(usual)})"
    option("--link", nargs="+", type=link.parse, default=[*map(link.parse, usual)], metavar="LINK", help=about)
    option("--steps", type=int, default=10, metavar="K", help="optimizer steps of a training (10)")
    option("--skip", type=int, default=3, metavar="K", help="first steps left out of the times (3)")
    option("--json", metavar="FILE", help="write the rows here too")


def main(args: argparse.Namespace) -> int:
    """Calibrate, train, compare; 1 if a prediction is off by more than :data:`TOLERANCE` or bits are wrong."""
    if not 0 <= args.skip < args.steps:
        raise ToolError(f"need --steps > --skip >= 0, got {args.steps} and {args.skip}")
    if None in args.link:
        raise ToolError("--link wants a rate, such as --link 300mbit")
    table, rows, problems = tables.Table(COLUMNS), [], []
    for spec in args.link:
        with namespaces.joined(spec, RANKS) as network:
            profile = _profile(network)
            for workload in args.workload:
                tables.complain(f"# {workload}, {link.name(spec)}")
                row, wrong = _compared(workload, spec, profile, network, args)
                rows.append(row)
                problems += [f"{workload}, {link.name(spec)}: {problem}" for problem in wrong]
                table.add(row)
    off = [row for row in rows if any(abs(row[key] - 1) > TOLERANCE for key in ("comm_off", "step_off"))]
    tables.say(f"within {TOLERANCE:.0%}: {len(rows) - len(off)} of {len(rows)}")
    for problem in problems:
        tables.complain(problem)
    if args.json:
        more = {"tolerance": TOLERANCE, "steps": args.steps, "skip": args.skip, "problems": problems}
        tables.write_json(args.json, rows, args.command, **more)
    return int(bool(off or problems))


def _profile(network: Network | None) -> LinkProfile:
    cases: list[Case | Calibration] = [Calibration(60)] * doctor_ranks.CALIBRATIONS
    return doctor_ranks.median([LinkProfile.from_json(one) for one in launch.launch(RANKS, cases, network)])


def _compared(
    workload: str, spec: link.LinkSpec, profile: LinkProfile, network: Network | None, args: argparse.Namespace
) -> tuple[dict[str, Any], list[str]]:
    """Train a workload on a link; return its row and the problems of its runs."""
    from ds_zipccl.cli.planning import job as job_plan  # imports torch, which `--help` does not need

    training = Training(trial.find_script(None, workload), workload, RANKS, args.steps, link=spec)
    runs = {variant: [trial.run(training, variant, section, network)] for variant, section in _RUNS.items()}
    plain, coded = results.rows(training, runs, args.skip)
    job = user_job.read(str(trial.config_of(training)))
    ratios = job_plan.ratios(job.dtype, None, None)
    params = runs["plain"][0]["parameters"]
    total = job_plan.predict(job, params, RANKS, profile, ratios)[-1]
    step = coded["speedup"]
    comm = plain["exchange_ms"] / coded["exchange_ms"]
    step_predicted = job_plan.step_speedup(total, plain["step_ms"] - plain["comm_ms"])
    row = {
        "workload": workload,
        "link": link.name(spec),
        "comm": comm,
        "comm_predicted": total["speedup"],
        "comm_off": total["speedup"] / comm,
        "step": step,
        "step_predicted": step_predicted,
        "step_off": step_predicted / step,
        "comm_ms_factor": coded["comm_speedup"],
        "plain_comm_ms": plain["exchange_ms"],
        "plain_ms_predicted": total["plain_ms"],
        "coded_comm_ms": coded["exchange_ms"],
        "coded_ms_predicted": total["ms"],
        "profile": profile.to_json(),
    }
    return row, results.problems(runs)
