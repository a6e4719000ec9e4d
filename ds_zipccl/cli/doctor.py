"""``doctor``: link, codec and hooks of a job on its real ranks, and the predicted gain for its DeepSpeed config. At most 30 s.

    torchrun --nproc-per-node 2 -m ds_zipccl doctor --ds-config ds_config.json --params 1.3e9 --step-ms 420 --explain

Start the doctor by the launcher of the job, on all nodes: ``torchrun``, ``deepspeed --no_local_rank --module ds_zipccl doctor ...`` or
``accelerate launch -m ds_zipccl doctor ...``. Without a launcher it starts ``--ranks`` processes on this machine, joined by ``--link``.
Rank 0 alone prints. A rank that fails ends the doctor on all ranks, with its reason. ``report`` builds the kernels, which may take longer
than 30 s once. Lines:

* link: measured between the real ranks. Over gloo each rank sends to the next and receives from the previous one at the same time; the
  slowest rank counts; codec: speeds of one thread of that rank. NCCL groups of several nodes are proven and measured as a job does it at
  its start: kernels, a canary of gather, exchanges and sums, network, codec, an agreement.
* kernels: each backend that was loaded on rank 0: the cases of its self-test and their time, or why it is not used.
* hooks: the modules of DeepSpeed that the package has adjusted in these processes. A missing hook has its reason.
* job: the traffic that will be coded here, values that the config leaves open, and features whose traffic bypasses the package.
* expected: a table with a line for each kind of traffic of a step, by the model of ``plan`` with this config, this link and ``--params``.
  plain_ms: the backend's own schedules. coded_ms: coded schedules; on NCCL groups those that the job chooses. choice: the schedule of the
  mode of the role, by which ms follows; reason: why a line passes. Mode auto also has raw frames, which are not predicted.

Roles other than zero_param and zero_grad are not predicted. FSDP2 has no config for the doctor: ``plan --zero 3`` predicts it. The ratio is
that of ``--sample``, tensors as the job sends them, or of normal values. Communication that overlaps with computing costs less than
predicted, coded or not. Several ranks of a node share a link: predictions are of one rank per node.

``--report`` also times the gathers and sums of two ZeRO-3 layers, plain and coded in turn, and writes one file for an issue of ds_zipccl:
numbers, versions, names of GPUs and of DeepSpeed's modules. Names of hosts, users, paths and jobs, addresses, variables and error texts do
not get into it, and nothing is sent. Layers have 67 MB on GPUs and 4 MB on CPUs; on slow networks, or after a late start, raise --timeout:
a quarter of it is for the windows. NCCL groups inside one node are proven too.

The exit status is 1 if a hook is missing. ``bench doctor`` compares predictions with trainings.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ds_zipccl.cli import doctor_ranks
from ds_zipccl.cli.doctor_ranks import AgreedError, Ranks
from ds_zipccl.cli.planning import model, user_job
from ds_zipccl.cli.planning.operations import TOTAL
from ds_zipccl.cli.planning.user_job import UserJob
from ds_zipccl.cli.report import proofs
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.tools import ToolError, link, namespaces, tables
from ds_zipccl.tools.tables import Column

if TYPE_CHECKING:
    from ds_zipccl.policy.cost_model import LinkProfile
    from ds_zipccl.policy.settled import Settled

_TIMES = (*tables.alike("plain_ms coded_ms ms", ".1f", 10), Column("speedup", ".2f"))
COLUMNS = (Column("what", width=20), Column("role", width=10), *_TIMES, Column("choice", width=9), Column("reason"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``doctor``."""
    option = parser.add_argument
    option("--ds-config", metavar="FILE", help="the DeepSpeed config of the job (none: link, codec and hooks alone)")
    model.add_arguments(parser)
    about = "milliseconds of a step without communication, measured"
    option("--step-ms", type=tables.positive, metavar="MS", help=about)
    option("--sample", metavar="FILE", help="safetensors or torch file of tensors like the job's (normal values)")
    option("--delta-ratio", type=tables.positive, metavar="R", help="ratio of differences of parameters (4)")
    option("--ranks", type=int, default=2, metavar="N", help="processes on this machine, without a launcher (2)")
    link.add_arguments(parser)
    option("--timeout", type=tables.positive, default=30, metavar="S", help="seconds until the doctor gives up (30)")
    about = "the outcome in sentences too: coded, plain and why, gain, what to change"
    option("--explain", action="store_true", help=about)
    option("--json", metavar="FILE", help="write everything here too")
    about = "time coded layers too, and write one anonymous file about this cluster, for an issue of ds_zipccl"
    option("--report", metavar="FILE", help=about)


def main(args: argparse.Namespace) -> int:
    """Run ``doctor``; 1 if a hook is missing."""
    _check(args)
    if not doctor_ranks.launched():
        return _start_ranks(args)
    with doctor_ranks.limit(args.timeout):
        try:
            return _take_part(args)
        except AgreedError:
            if int(os.environ["RANK"]):
                return 2  # rank 0 tells the reason
            raise


def _check(args: argparse.Namespace) -> None:
    sized = args.params or args.model
    if args.step_ms is not None and not sized:
        raise ToolError("--step-ms is for predictions: name --params too, the number of parameters of the model")
    if sized and args.ds_config is None:
        raise ToolError("--params and --model are for predictions: name --ds-config too, the config of the job")
    if args.ranks < 2:
        raise ToolError(f"--ranks must be at least 2, got {args.ranks}: one rank sends nothing")
    if len(args.link) != 1:
        raise ToolError(f"the doctor takes one --link, got {len(args.link)}")
    link.check(args.link, [args.ranks], args.nodes)


def _start_ranks(args: argparse.Namespace) -> int:
    _read(args)  # a wrong file is told before processes start
    tables.complain(f"# no launcher: starting {args.ranks} ranks on this machine, {link.name(args.link[0])}")
    words = shlex.split(args.command)[len(shlex.split("python -m ds_zipccl")) :]
    with namespaces.joined(args.link[0], args.ranks, args.nodes) as network:
        return doctor_ranks.local(words, args.ranks, network, args.timeout + 10)


def _take_part(args: argparse.Namespace) -> int:
    """Run as one rank of the launcher's."""
    first = os.environ["RANK"] == "0"
    if first:
        tables.complain(f"# waiting for {os.environ['WORLD_SIZE']} ranks, loading DeepSpeed")
    found = doctor_ranks.meet(lambda: f"{_read(args)[0] or ''} {bool(args.report)}", args.timeout)
    job, args = _read(args)
    if first:
        tables.complain("# measuring link and codec")
    profile, config = None if found.streams else doctor_ranks.measure(), _asked(job)
    settled, proven = doctor_ranks.settle(config, found, bool(args.report))
    if args.report:
        from ds_zipccl.cli import cluster_report  # imports torch, as explain

        facts = {"zero_stage": job and job.stage, "dtype": job and job.dtype, "profile": profile, "settled": settled}
        said = cluster_report.make(args.report, args.timeout, found, (config, proven), facts)
    doctor_ranks.leave()
    missing = _missing(found)
    if not first:
        return int(bool(missing))
    ranks = len(found.reports)
    if profile is None:
        tables.say(f"link:  {found.groups[1]}, {ranks} ranks: {settled or 'plain, for the reason above'}")
    else:
        speeds = ("encode", "decode", "add", "copy", "add_raw")
        coding = ", ".join(f"{name} {getattr(profile, name) / 1e9:.1f}" for name in speeds)
        tables.say(
            f"link:  gloo, {ranks} ranks on {found.nodes} {'node' if found.nodes == 1 else 'nodes'}: "
            f"{8e-6 * profile.bandwidth:.0f} Mbit/s, a small message {1e6 * profile.alpha:.0f} us"
        )
        tables.say(f"codec: {coding} GB/s, one thread")
    kernels = _proofs()
    for name, how in kernels.items():
        tables.say(f"kernels: {name}: {how}")
    tables.say(f"hooks: {len(found.reports[0].hooks)} modules of DeepSpeed known, {len(missing)} missing")
    remedy = _remedy(found) if missing else ""
    for line in [*missing, *([f"to do: {remedy}"] if missing else [])]:
        tables.say(f"       {line}")
    more: dict[str, Any] = {
        "backend": found.groups[1],
        "ranks": ranks,
        "nodes": found.nodes,
        "profile": profile.to_json() if profile else asdict(settled.profile) if settled and settled.profile else None,
        "kernels": kernels,
        "hooks": [dict(report.hooks) for report in found.reports],
        "missing": missing,
        "remedy": remedy,
    }
    rows: list[dict[str, Any]] = []
    if job is not None:
        predicted = _predict(args, job, found, profile, settled)
        rows = predicted.pop("rows")
        more |= predicted
    if args.explain:
        from ds_zipccl.cli import explain  # imports torch, which `doctor --help` does not need

        more["explained"] = list(explain.sentences(more | {"rows": rows}))
        for sentence in ["", *more["explained"]]:
            tables.say(sentence)
    if args.json:
        tables.write_json(args.json, rows, args.command, **more)
    if args.report:
        tables.say(said)
    return int(bool(missing))


def _read(args: argparse.Namespace) -> tuple[UserJob | None, argparse.Namespace]:
    """Return the job, None without a config, and the options with the sizes of the model's files."""
    ranks = int(os.environ.get("WORLD_SIZE", args.ranks))
    hidden = args.model and model.read(args.model).hidden
    return user_job.read(args.ds_config, ranks, hidden) if args.ds_config else None, model.fill(args)


def _asked(job: UserJob | None) -> ZipcclConfig:
    """Return the config by which groups are proven and measured, also where that of the job leaves them alone, or codes them whatever their
    speeds."""
    config = replace(job.config if job else ZipcclConfig(), enabled=True, mode="auto")
    return replace(config, nccl="auto") if config.nccl == "off" else config


def _proofs() -> Mapping[str, str]:
    """See :func:`ds_zipccl.cli.report.proofs`; of the kernels for CUDA too, where there is a device."""
    import torch

    from ds_zipccl import kernels

    if torch.cuda.is_available():
        kernels.lacking(lambda: kernels.route("auto", "cuda"))
    return proofs()


def _missing(found: Ranks) -> list[str]:
    """A line for each hook that did not work, with the ranks where it did not."""
    where: dict[str, list[str]] = {}
    for rank, report in enumerate(found.reports):
        for name, reason in report.hooks.items():
            if reason not in ("", "absent"):
                where.setdefault(f"{name}: {reason}", []).append(f"rank {rank} on {report.host}")
    return [f"{problem} ({', '.join(ranks)})" for problem, ranks in where.items()]


def _remedy(found: Ranks) -> str:
    if any(doctor_ranks.DEEPSPEED in report.hooks for report in found.reports):
        return "pip install deepspeed where it is missing; pip install 'ds-zipccl[deepspeed]' brings one"
    known = "pip install ds_zipccl where the job runs, or a release of it that knows this DeepSpeed"
    return f"{known}; report has the cause in its section activation"


def _predict(
    args: argparse.Namespace, job: UserJob, found: Ranks, profile: LinkProfile | None, settled: Settled | None
) -> dict[str, Any]:
    """Print the job and the prediction; return both for the file. ``profile``: of gloo. ``settled``: of groups in stream order, None where
    they stay plain."""
    from ds_zipccl.cli.planning import job as job_plan
    from ds_zipccl.cli.planning import speeds
    from ds_zipccl.integration import bypassed
    from ds_zipccl.integration.start_line import coverage_here

    if profile and job.config.delta == "auto" and (lacking := speeds.no_differences()):
        job = replace(job, config=replace(job.config, delta="off"), notes=(*job.notes, f"delta is off: {lacking}"))
    ranks = len(found.reports)
    device, backend = found.groups
    pipelined = bool(job.content.get("pipeline"))
    covered = coverage_here(job.config) if job.config.enabled else 'nothing will be coded: "enabled" is not true'
    tables.say(f"job:   ZeRO-{job.stage}, {job.dtype}: {covered}")
    facts = bypassed.Facts(job.content, device, backend, pipelined)
    features = [{"name": one.name, "cost": one.cost, "remedy": one.remedy} for one in bypassed.found(facts)]
    known: dict[str, Any] = {"covered": covered, "bypassed": features}
    notes = [*job.notes, *bypassed.lines(facts)]
    if job.expert_parallel > 1:
        notes.append("expert_parallel: predicted with all experts on every rank; plan knows how ranks share them out")
    if 1 < found.nodes < ranks and not found.streams:
        notes.append(f"{ranks} ranks share the links of {found.nodes} nodes: the prediction is of one rank per node")
    for note in notes:
        tables.say(f"       {note}")
    if args.about:
        tables.say(f"model: {args.about}")
    reason = "no --params or --model" if args.params is None else job_plan.unpredicted(job, device, backend, settled)
    if reason:
        tables.say(f"expected: not predicted: {reason}")
        return known | {"rows": [], "notes": notes, "unpredicted": reason}
    ratios = job_plan.ratios(job.dtype, args.sample, args.delta_ratio)
    tables.say(f"ratio: {ratios.values:.3f}, {ratios.about}")
    if profile is not None:
        rows = job_plan.predict(job, args.params, ranks, profile, ratios, device, args.trainable)
    else:
        assert settled is not None  # otherwise there is a reason
        rows = job_plan.predict_on_device(job, args.params, settled, ratios, args.trainable)
    total = next(row for row in tables.show(COLUMNS, rows) if row["what"] == TOTAL)
    speedup = None if args.step_ms is None else job_plan.step_speedup(total, args.step_ms)
    step = "step not predicted without --step-ms" if speedup is None else f"step {speedup:.2f}x"
    tables.say(f"expected: communication {total['speedup']:.2f}x of {backend}'s own schedules, {step}")
    if found.nodes == 1 and not found.streams:
        shared = f"{ranks} ranks share the cores of one machine{'' if args.link[0] else ' and its loopback'}"
        why = f"{shared}, where coding takes time from computing and mode auto stays plain"
        notes.append(f"this does not hold here: {why}; it is for one rank per node")
        tables.say(f"       {notes[-1]}")
    known |= {"ratio": ratios.values, "ratio_about": ratios.about}
    return known | {"rows": rows, "notes": notes, "comm_speedup": total["speedup"], "step_speedup": speedup}
