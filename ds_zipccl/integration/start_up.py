"""The start of a job on which all ranks have agreed: kernels, the measured link, the order of sums, the start-up line. Nothing here knows
DeepSpeed."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ds_zipccl import comm, devices, kernels
from ds_zipccl.comm import engine as comm_engine
from ds_zipccl.comm import topology
from ds_zipccl.comm.group_state import find_nodes, group_nodes, group_state, nodes_of_job, resolve_group, state_of
from ds_zipccl.comm.transport import TRANSPORTS
from ds_zipccl.config import ROLES, ZipcclConfig
from ds_zipccl.integration import canary, hook_points, start_line
from ds_zipccl.integration.job import Bypass, Job
from ds_zipccl.policy.settled import DTYPES, Settled, Sums
from ds_zipccl.telemetry import table
from ds_zipccl.telemetry.step_log import StepLog

#: A lossy function that the C++ kernels have, and numba lacks.
_LOSSY_FUNCTION = "encode_rounded"
#: Variables by which a user chooses NCCL's own order of sums.
_NCCL_ORDER = ("NCCL_ALGO", "NCCL_PROTO")
_NOT_RIGHT = "did not get the words of the canary right; {}"
_NOT_LOADED = "not loaded"
_DIFFERENT_RECORDS = "the ranks have found different records in the checkpoint"
_NO_RECORD = 'the checkpoint has no record of an order of sums ("reduction": "fp32" or "plain" pins them)'


def accept(job: Job, section: Mapping[str, Any] | None, device: torch.device, zero_stage: int | None = None) -> bool:
    """Agree on a section with all ranks, and set the config of the job where the section switches coding on. A collective; blocks.

    Returns:
        Whether coding was switched on now; :func:`begin` must follow.

    Raises:
        ConfigError: see :meth:`.Job.accept`.
    """
    config = job.accept(section, zero_stage)
    if config is not None:
        load_kernels(config, device)
        config = with_all_kernels(config, device)
        job.config = config if config.enabled else None
    return config is not None and config.enabled


def begin(
    job: Job, config: ZipcclConfig, device: torch.device, unhooked: Mapping[str, str], unrecorded: str = ""
) -> None:
    """Measure the link, settle the sums of groups in stream order, and print the start-up lines on rank 0. A collective; blocks.

    Args:
        config: the config of the job, after :func:`with_all_kernels`.
        device: of the model's tensors on this rank.
        unhooked: role with a lossy codec -> why some of its calls stay exact.
        unrecorded: why checkpoints of the job cannot have the order of its sums, which is then the backend's own; "" where they can.
    """
    profile = None
    if _measurable():
        if any(config.mode_of(role) == "auto" for role in ROLES):  # their schedules compete
            profile = comm.calibrate()
        else:
            find_nodes()  # sums depend on the nodes, and must not depend on the mode
    said: Mapping[int, str] = {}
    if _in_stream_order(device) and config.nccl != "off":
        said = topology.tell(resolve_group(None), unrecorded or _wants_own_sums())
    settled = _settle(job, config, device, next(filter(None, said.values()), ""))
    if torch.distributed.get_rank() == 0:
        groups, nodes = start_line.groups_here(), group_nodes(resolve_group(None))
        covered = start_line.describe(groups, device.type, config, settled)
        first = start_line.start_line(config, profile, covered, nodes, settled)
        features = start_line.lossy_line(groups, device.type, config, unhooked), start_line.fused_line(config)
        print(*filter(None, (first, *hook_points.lines(), *features)), sep="\n", flush=True)
        atexit.register(table.show, "at the end")
        os.register_at_fork(after_in_child=lambda: atexit.unregister(table.show))
        job.step_log = StepLog(config.step_log) if config.step_log else None


def _wants_own_sums() -> str:
    """Return why the user wants the backend's own sums on this rank, "" if nothing says so."""
    if torch.are_deterministic_algorithms_enabled():
        return "torch.use_deterministic_algorithms is on"
    names = set(os.environ)
    for path in (os.environ.get("NCCL_CONF_FILE", "~/.nccl.conf"), "/etc/nccl.conf"):
        with contextlib.suppress(OSError):
            names |= {line.split("=")[0].strip() for line in Path(path).expanduser().read_text().splitlines()}
    return next((f"{name} is set" for name in _NCCL_ORDER if name in names), "")


def record(job: Job) -> str:
    """Return the order of gradient sums in stream order as a checkpoint has it, as json: their dtypes and least bytes, and the nodes
    and ranks of the job; "" where the job has settled none."""
    if job.settled is None:
        return ""
    found = job.settled.topology
    sums = state_of(None).device_sums or job.settled.sums
    return json.dumps([sums.dtypes, sums.least, found.nodes, found.ranks])


def resume(job: Job, found: object, *, loaded: bool = True) -> None:
    """Take the order of gradient sums of a checkpoint, and print the clause about it anew on rank 0. Where ranks have found different
    records, or no sound one, sums are the backend's own; where no rank has loaded a checkpoint, nothing changes. A collective of all ranks;
    blocks.

    Args:
        found: a text of :func:`record`; anything else is no record.
        loaded: whether DeepSpeed has loaded a checkpoint on this rank. With folders of their own, nodes may differ.
    """
    if job.settled is None or job.config is None:
        return
    own = (found if isinstance(found, str) else "") if loaded else _NOT_LOADED
    texts = set(topology.tell(resolve_group(None), own).values())
    if texts == {_NOT_LOADED}:
        return
    sums, saved = _read(texts.pop() if len(texts) == 1 else "")
    now, here = _read(record(job))
    said = f"; saved on {saved}, so that bits change" if sums is not None and sums.dtypes and saved != here else ""
    if job.config.reduction == "auto":
        why = _DIFFERENT_RECORDS if texts else _NO_RECORD
        state_of(None).device_sums = sums or Sums(why=why)
    elif sums not in (None, now):
        said = f"; saved with {sums}, so that bits change"
    if job.bypass is not None:
        job.bypass.count()  # what passes for good is found anew
    if torch.distributed.get_rank() == 0:
        print(f"[ds_zipccl] after the checkpoint: {state_of(None).device_sums}{said}", flush=True)


def _read(text: str) -> tuple[Sums | None, str]:
    """Return the sums of a text of :func:`record`, None if it is no sound one, and a clause about nodes and ranks."""
    try:
        found, least, nodes, ranks = json.loads(text)
        sums = Sums(tuple(name for name in DTYPES if name in found), int(least), "as in the checkpoint")
        return sums, f"{int(nodes)} nodes with {int(ranks)} ranks"
    except (OverflowError, TypeError, ValueError, RecursionError):
        return None, ""


def _settle(job: Job, config: ZipcclConfig, device: torch.device, asked: str) -> Settled | None:
    """Settle sums and moves of groups in stream order. Where these may all pass, the job has a way past the engines."""
    settled = job.settled = comm_engine.settle(config, device, asked)
    if settled is not None and not config.always_codes:
        job.bypass = Bypass(job.role_of, settled.device)
    return settled


def load_kernels(config: ZipcclConfig, device: torch.device) -> None:
    """Build and load the kernels now, not in the middle of the first step, where a CUDA kernel must not be loaded any more.

    Kernels prove themselves meanwhile. Without CUDA kernels the job runs, and CUDA tensors are compressed on the host; the start-up line
    has the reason. What happens without kernels for CPU tensors, :func:`with_all_kernels` decides.
    """
    with contextlib.suppress(kernels.RouteUnavailable):
        kernels.route(kernels.preferred(config.route, "cpu"), "cpu")
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError), devices.RUNTIMES["cuda"].device(device):  # also of the device itself
            kernels.route(kernels.preferred(config.route, "cuda"), "cuda")


def with_all_kernels(config: ZipcclConfig, device: torch.device) -> ZipcclConfig:
    """Return the config with the features off for which a rank has no kernels, as the other ranks would wait for it; rank 0 says which, and
    why. Without kernels for CPU tensors that is coding itself. A collective of all ranks for each feature that the config asks for; blocks.

    Raises:
        RouteUnavailable: a rank has no kernels of the lossy codecs, on all ranks.
    """
    streams = _in_stream_order(device)
    if config.nccl == "auto" and streams and not config.always_codes:
        streams = len(nodes_of_job()) > 1  # inside one node nothing is coded, nor tried
    host = kernels.preferred(config.route, "cpu")
    features: tuple[tuple[str, bool, Callable[[], object], str], ...] = (
        (
            "lossy",
            config.lossy and bool(config.lossy_roles),
            lambda: kernels.lossy_route(host, "cpu", _LOSSY_FUNCTION),
            "lack the lossy codecs of the roles; {}, or name no lossy codec",
        ),
        (
            "enabled",
            True,
            lambda: kernels.route(host, "cpu"),
            "have no kernels for CPU tensors, and every call stays plain on all ranks; {}",
        ),
        (
            "rows",
            config.rows != "off" and config.mode_of("ep") != "never",
            lambda: kernels.row_route(host, "cpu"),
            "have no kernels of row frames; {}",
        ),
        (
            "delta",
            config.delta != "off" and config.codec != "raw" and device.type == "cpu",
            lambda: kernels.delta_route(host, "cpu"),
            "have no kernels of differences; {}",
        ),
        (
            "nccl",
            config.nccl != "off" and streams,
            lambda: kernels.route(kernels.preferred(config.route, device.type), device.type),
            "have no kernels; {}",
        ),
    )
    for key, wanted, load, what in features:
        told = topology.tell(resolve_group(None), kernels.lacking(load)) if wanted else {}
        if missing := {rank: said for rank, said in told.items() if said}:
            why = _of_ranks(missing, what)
            if key == "lossy":
                raise kernels.RouteUnavailable(why)
            config = _without(config, key, why)
            if not config.enabled:
                return config
    if config.nccl != "off" and streams:
        outcome = canary.try_out(config, device)
        if outcome:
            config = _without(config, "nccl", _of_ranks(outcome, _NOT_RIGHT))
        elif outcome.sums:
            config = _without(config, "reduction", _of_ranks(outcome.sums, _NOT_RIGHT))
        elif torch.distributed.get_rank() == 0:
            print(f"[ds_zipccl] canary: gather, exchanges and sums right in {outcome.seconds:.2f} s", flush=True)
    return config


def try_groups(job: Job, device: torch.device, groups: Iterable[Any]) -> None:
    """Prove sums on clones of the groups of this rank whose gradients are ours to sum, where these are others than the default group. Where
    one is wrong, all sums of the job are the backend's own. A collective of all ranks; blocks."""
    if job.config is None or job.settled is None or not job.settled.sums.dtypes:
        return
    found = {tuple(state.ranks): one for one in groups if (state := group_state(one)) is not None}
    world = torch.distributed.get_world_size()
    tried = [one for ranks, one in found.items() if len(ranks) < world and len(group_nodes(one)) > 1]
    outcome = canary.try_out(job.config, device, tried)
    if wrong := {**outcome, **outcome.sums}:
        why = _of_ranks(wrong, _NOT_RIGHT)
        job.config = _without(job.config, "reduction", why)
        state_of(None).device_sums = Sums(why=why)


def _of_ranks(said: Mapping[int, str], what: str) -> str:
    rank, first = next(iter(said.items()))
    return f"ranks {sorted(said)} {what.format(f'rank {rank}: {first}')}"


def _without(config: ZipcclConfig, key: str, why: str) -> ZipcclConfig:
    said = {"enabled": "coding is off", "reduction": "sums are the backend's own"}
    off: dict[str, Any] = {"enabled": False, "reduction": "plain"}
    if torch.distributed.get_rank() == 0:
        print(f"[ds_zipccl] {said.get(key, f'{key} is off')}: {why}", flush=True)
    return replace(config, **{key: off.get(key, "off")})


def _in_stream_order(device: torch.device) -> bool:
    """Whether there are several ranks, and their tensors on a device go in the order of streams."""
    state = group_state(None)
    return state is not None and state.size > 1 and state.streams(device.type)


def _measurable() -> bool:
    """Whether ranks can exchange messages of this package over a link that can be measured."""
    state = group_state(None)
    return state is not None and state.size > 1 and state.backend("cpu") in TRANSPORTS
