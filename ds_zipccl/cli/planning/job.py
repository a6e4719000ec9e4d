"""The step that the doctor predicts: the lines of ``plan`` for a user's job on a measured link, and the choice of each line."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ds_zipccl.cli.planning import operations, speeds
from ds_zipccl.cli.planning.operations import CODED, COPIED, EXPONENTS, GRADIENTS, LOSSY, PLAIN, TOTAL, StepTraffic
from ds_zipccl.cli.planning.schedules import DeviceSchedules, Row
from ds_zipccl.cli.planning.user_job import UserJob
from ds_zipccl.integration import bypassed
from ds_zipccl.policy import admission, cost_model
from ds_zipccl.policy.admission import Message, PassReason
from ds_zipccl.policy.cost_model import DELTA_RATIO, LinkProfile, lossy_size
from ds_zipccl.policy.settled import Settled
from ds_zipccl.tools import ToolError, files

#: Bytes of a sample that are compressed for its ratio (seed: a tenth of a second).
SAMPLE_BYTES = 64 << 20
#: Operation of the step -> operation of the table of operations.
_OPS = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor", "all_reduce": "all_reduce"}


@dataclass(frozen=True)
class Ratios:
    """Ratio of values by themselves, ratio of parameters against those of the last step, and the source of both, for the user."""

    values: float
    differences: float | None
    about: str


def ratios(dtype: str, sample: str | None, delta_ratio: float | None) -> Ratios:
    """Return the ratios of a job; of a ``sample`` file the first 64 MiB in tensors of ``dtype`` (torch name) count.

    Raises:
        ToolError: the file cannot be read, or holds no tensor of the dtype.
    """
    whence = f"{delta_ratio:g}, --delta-ratio" if delta_ratio else f"{DELTA_RATIO:g}, the default"
    about = f"ratio of differences {whence}"
    if sample is None:
        return Ratios(speeds.normal_ratio(dtype), delta_ratio, f"default: normal {dtype} values; {about}")
    from ds_zipccl.codecs import compress

    logical = wire = 0
    for load in files.tensors(sample).values():
        tensor = load()
        if str(tensor.dtype) != f"torch.{dtype}" or tensor.layout != torch.strided or not tensor.numel():
            continue
        flat = tensor.detach().contiguous().view(-1)[: (SAMPLE_BYTES - logical) // tensor.itemsize]
        logical += flat.nbytes
        wire += compress(flat, speeds.CODEC, shaped=False, checksum=False).nbytes
        if logical >= SAMPLE_BYTES - 8:
            break
    if not logical:
        raise ToolError(f"{sample} holds no tensor of {dtype}, the dtype of the job: name tensors as they are sent")
    return Ratios(logical / wire, delta_ratio, f"{sample}: {logical / 1e6:.1f} MB of {dtype}; {about}")


def unpredicted(job: UserJob, device: str, backend: str, settled: Settled | None = None) -> str:
    """Return the reason why no step is predicted; "" where one is. ``settled``: of groups in stream order."""
    codec = job.config.lossy_of("zero_grad")
    other = [one.name for one in bypassed.found(bypassed.Facts(job.content)) if one.of_zero]
    if codec is not None and codec.matrices:
        return f"gradients go by {codec}, and the size of its frames depends on the layers of the model"
    if job.stage == 0:
        fsdp = "FSDP2 takes ds_zipccl.fsdp.apply(model) in place of a config; plan --zero 3 predicts it, on NCCL with --zero3-base off"
        return f"ZeRO stage 0 has no prediction: wanted is stage 1, 2 or 3; {fsdp}"
    if backend in admission.STREAM_BACKENDS and (settled is None or settled.profile is None):
        return "nothing of this job is coded" if settled is None else f"{settled}"
    if backend not in admission.CODED_BACKENDS.get(device, ()):
        return PassReason.BACKEND.of(f"{backend} on {device}") + ": nothing will be coded"
    if other:
        return f"no model predicts the traffic of {', '.join(other)}"
    return 'the codec is "raw": nothing is compressed' if job.config.codec == "raw" else ""


def predict(
    job: UserJob, params: int, ranks: int, profile: LinkProfile, found: Ratios, device: str = "cpu", trainable: int | None = None
) -> list[dict[str, Any]]:  # fmt: skip
    """Return a row for each line of a step, and a total; gloo groups of all ranks. ``trainable``: of ``params``, those that are trained;
    None: all.

    Keys: ``what``, ``op``, ``role``; ``plain_ms``, ``coded_ms``; ``ms``, the expected time; ``choice``, "coded", "exponents" (no
    differences), "copies" (of a base) or "plain", and ``reason`` for plain lines; ``speedup``.

    Raises:
        ToolError: the lossy codec of gradients sends more than no codec.
    """
    args = _options(job, params, ranks, found, trainable)
    lines = operations.traffic(args)
    schedules = _HostSchedules(args, _codings(args, profile, found.values, {line.coding for line in lines}))
    return _with_total([_chosen(schedules, line, job, device) for line in lines])


def predict_on_device(
    job: UserJob, params: int, settled: Settled, found: Ratios, trainable: int | None = None
) -> list[Row]:
    """Return rows as :func:`predict` does, of groups in stream order whose speeds were measured. ``coded_ms`` is the time of the schedules
    that a job chooses."""
    assert settled.profile is not None  # otherwise unpredicted() has a reason
    args = _options(job, params, settled.topology.ranks, found, trainable)
    vars(args).update(gpus_per_node=settled.topology.each, ratio=found.values, backend="nccl")
    groups = DeviceSchedules(args, settled.profile, settled=settled.sums)
    planned = []
    for line in groups.lines():
        gradients, chosen = line.what == GRADIENTS, groups.chosen(line)
        plain, ours = chosen[PLAIN], chosen[CODED]
        sums = PassReason.PLAIN_SUMS if gradients and not groups.sums.dtypes else PassReason.LINK_IS_FASTER
        why = PassReason.SMALL if operations.is_small(args, line) else sums
        reason = why.value if ours["how"] == PLAIN else ""
        planned.append(_row(line, ours["op"], (plain["ms"], ours["ms"], ours["ms"]), ours["how"], reason))
    return _with_total(planned)


def _row(line: StepTraffic, op: str, ms: tuple[float, float, float], choice: str, reason: str) -> dict[str, Any]:
    plain, coded, expected = ms
    times = {"plain_ms": plain, "coded_ms": coded, "ms": expected}
    row = {"what": line.what, "op": op, "role": operations.role_of(line), **times, "choice": choice, "reason": reason}
    return row | {"speedup": plain / expected}


def _with_total(planned: list[dict[str, Any]]) -> list[dict[str, Any]]:
    total = {key: sum(row[key] for row in planned) for key in ("plain_ms", "coded_ms", "ms")}
    empty = {"what": TOTAL, "op": "", "role": "", "choice": "", "reason": ""}
    return [*planned, empty | total | {"speedup": total["plain_ms"] / total["ms"]}]


def _options(job: UserJob, params: int, ranks: int, found: Ratios, trainable: int | None) -> argparse.Namespace:
    """Return the options of ``plan`` that stand for a job."""
    here = {"params": params, "trainable": trainable, "gpus": ranks, "gpus_per_node": 1}
    known = {"delta_ratio": found.differences, "bucket": None, "backend": "gloo"}
    return argparse.Namespace(**here, **known, **job.options())


def step_speedup(total: dict[str, Any], computing_ms: float) -> float:
    """Return the factor on whole steps that compute for ``computing_ms`` and communicate one after the other."""
    return float((computing_ms + total["plain_ms"]) / (computing_ms + total["ms"]))


# ---- schedules of gloo groups, with one rank of each node --------------------------------------------


def _codings(
    args: argparse.Namespace, profile: LinkProfile, ratio: float, wanted: Collection[str]
) -> dict[str, tuple[LinkProfile, float]]:
    """Return the speeds and the ratio of each coding that is ``wanted``, and of exponents. Those with a base are measured here."""
    found = {EXPONENTS: (profile, ratio)}
    if LOSSY in wanted:
        lossless = 8 * operations.ITEMSIZE[args.dtype] / ratio
        size = lossy_size(args.gradients, args.dtype, lossless)
        if size is None or size.bits >= lossless:
            bits = f"{size.bits:.2f} bits per value" if size else "a size that no rule gives"
            raise ToolError(f"{args.gradients} takes {bits}, without loss it is {lossless:.2f}: take the codec out")
        found[LOSSY] = profile, ratio * lossless / size.bits
    if operations.CHANGED in wanted:
        lacking = speeds.no_differences()
        speed = (profile.encode, profile.decode) if lacking else speeds.measured_differences()
        copies = 2 if args.zero == 3 else 0  # ZeRO-1 and ZeRO-2 gather onto the base itself
        ratio = args.delta_ratio or speeds.delta_ratio(args.dtype)
        found[operations.CHANGED] = cost_model.against_base(profile, *speed, copies), ratio
    if COPIED in wanted:  # `copy` is the speed of a copy, `encode` that of a comparison
        copy, compare = speeds.measured_copies()
        found[COPIED] = replace(profile, copy=copy, encode=compare), 1.0
    return found


@dataclass(frozen=True)
class _HostSchedules:
    """Milliseconds of schedules, by the speeds and ratios of ``codings``."""

    args: argparse.Namespace
    codings: Mapping[str, tuple[LinkProfile, float]]

    def plain(self, line: StepTraffic) -> float:
        """Of the operation of the backend."""
        # Gathers of large frozen weights run side by side; gloo then takes no longer than a ring (measured with LoRA on shaped links).
        schedule = PLAIN if line.what in operations.FROZEN else "gloo"
        return line.times * self._once(line, line.op, schedule, EXPONENTS)

    def coded(self, line: StepTraffic, coding: str) -> float:
        """Of our schedule with a coding."""
        if coding != COPIED:
            return line.times * line.slower * self._once(line, line.coded_op or line.op, CODED, coding)
        # Each gather asks all ranks and compares the own shard.
        profile, _ = self.codings[COPIED]
        sizes = operations.operations(self.args, line)
        nbytes, calls = sum(size * count for size, count in sizes), sum(count for _, count in sizes)
        copying: float = nbytes / profile.copy + nbytes / self.args.gpus / profile.encode
        return 1e3 * line.times * (calls * (profile.call + profile.alpha) + copying)

    def _once(self, line: StepTraffic, op: str, schedule: str, coding: str) -> float:
        profile, ratio = self.codings[coding]
        predict = partial(cost_model.predict, op, schedule, ranks=self.args.gpus, profile=profile, ratio=ratio)
        seconds: float = sum(count * predict(size) for size, count in operations.operations(self.args, line))
        return 1e3 * seconds


def _chosen(schedules: _HostSchedules, line: StepTraffic, job: UserJob, device: str) -> dict[str, Any]:
    """The row of a line: its schedules, and the one that admission and the mode of its role choose; copies and lossy lines by no times."""
    gradients, config, role = line.what == GRADIENTS, job.config, operations.role_of(line)
    op = line.coded_op or line.op
    message = Message(
        op=_OPS[op],
        dtype=getattr(torch, job.dtype),
        numel=min(round(line.part * schedules.args.params), line.bucket),
        ranks=schedules.args.gpus,
        device=device,
        backend="gloo",
        role=role,
        reduce_op="SUM" if gradients else None,
        plain_sums=gradients and config.reduction == "plain",
    )
    plain, coded = schedules.plain(line), schedules.coded(line, line.coding)
    reason = admission.admit(message, config).reason
    choice, expected = operations.HOW[COPIED] if line.coding == COPIED else "coded", coded
    if operations.mode_of(schedules.args, line) == "auto" and line.coding not in (COPIED, LOSSY):
        if (alone := schedules.coded(line, EXPONENTS)) < expected:
            choice, expected = "exponents", alone
        if cost_model.WORTH_BELOW * plain < expected and not reason:
            reason = PassReason.LINK_IS_FASTER.value + ", as predicted"
    if reason:
        choice, expected = PLAIN, plain
    return _row(line, op, (plain, coded, expected), choice, reason)
