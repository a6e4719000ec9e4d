"""The DeepSpeed communication backend. Every ``deepspeed.comm`` collective goes through it, and is coded or passed through."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.torch import TorchBackend
from torch.distributed import ReduceOp

from ds_zipccl import comm, devices, kernels, tensors
from ds_zipccl.comm import engine as comm_engine
from ds_zipccl.comm import topology
from ds_zipccl.comm.group_state import find_nodes, group_nodes, group_size, group_state, resolve_group
from ds_zipccl.comm.ops import reduce_to_owners
from ds_zipccl.comm.ops.reduce_to_owners import Owners
from ds_zipccl.comm.transport import TRANSPORTS
from ds_zipccl.config import ROLES, ZipcclConfig
from ds_zipccl.integration import hints, hook_points, start_line, torch_calls
from ds_zipccl.integration.hook_points import HookPoint
from ds_zipccl.integration.job import BYPASSED, Bypass, Job, overriding_section
from ds_zipccl.integration.lossy import calls as lossy_calls
from ds_zipccl.integration.lossy.powersgd import PowerSum
from ds_zipccl.integration.zero import buckets, gathers
from ds_zipccl.ops import OPS
from ds_zipccl.policy import admission
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.telemetry import counters, table
from ds_zipccl.telemetry.step_log import StepLog

_method = functools.partial(HookPoint, "deepspeed.comm.torch")
hook_points.declare(
    *(
        _method(f"TorchBackend.{name}", first=("self", *op.parameters), without=f"{name} stays plain")
        for name, op in OPS.items()
        if name != reduce_to_owners.NAME  # no backend of DeepSpeed has it
    ),
    _method("TorchBackend.batch_isend_irecv", first=("self", "p2p_op_list"), without="batches of sends stay plain"),
)
#: The collectives that this DeepSpeed has: name -> operation.
OFFERED = {
    name: op
    for name, op in OPS.items()
    if name != reduce_to_owners.NAME and hook_points.fits(f"TorchBackend.{name}", TorchBackend)
}
_DEFAULTS = {
    "op": ReduceOp.SUM,
    "group": None,
    "async_op": False,
    "tag": 0,
    "src": None,
    "output_split_sizes": None,
    "input_split_sizes": None,
}
#: A lossy function that the C++ kernels have, and numba lacks.
_LOSSY_FUNCTION = "encode_rounded"
#: What to do about ranks without C++ kernels.
_REMEDY = "install a C++ compiler or a wheel of ds_zipccl with its library"
#: Operation and role of ZeRO's parameter gathers.
_PARAMETER_GATHER = ("all_gather_into_tensor", "zero_param")


def _collective(name: str) -> Callable[..., Any]:
    """Return the backend's method for one collective: DeepSpeed's own until a section switches coding on, then the coded one."""
    plain, coded = getattr(TorchBackend, name), _coded(name)
    may_bypass = name in BYPASSED

    @functools.wraps(plain)
    def method(self: ZipcclBackend, *args: Any, **kwargs: Any) -> Any:
        if self.job.config is None:
            return plain(self, *args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return self.job.untraced[name](self, *args, **kwargs)
        if may_bypass and self.job.bypass is not None and self.job.bypass.takes(name, args, kwargs):
            return plain(self, *args, **kwargs)
        if not self.job.config.torch_distributed:
            return coded(self, *args, **kwargs)
        with hints.hinting(seen=True):
            return coded(self, *args, **kwargs)

    method.coded = coded  # type: ignore[attr-defined]
    return method


def _coded(name: str) -> Callable[..., Any]:
    """Return the coded method for one collective; for one without a coded schedule DeepSpeed's own, counted."""
    plain, one = getattr(TorchBackend, name), OPS[name]
    run = getattr(comm, name) if one.coded else None
    own = next((key for key in one.parameters if key.startswith("input")), one.parameters[0])

    @functools.wraps(plain)
    def coded(self: ZipcclBackend, *args: Any, **kwargs: Any) -> Any:
        given = {**_DEFAULTS, **dict(zip(one.parameters, args, strict=False)), **kwargs}
        role = self.job.role_of(name, given["group"])
        if run is None:
            counters.record_pass(role, name, _nbytes(given["tensor"]), PassReason.NO_SCHEDULE.of(name))
            return plain(self, *args, **kwargs)
        op = given["op"] = self._reduce_op(given["op"]) if "op" in one.parameters else None
        values = [given[key] for key in one.parameters]
        config = self.job.config
        assert config is not None  # only the coded method asks
        more: dict[str, Any] = {"config": config, "role": role}
        if config.lossy_roles and (codec := lossy_calls.take_hint(config, role, name, given[own], op)) is not None:
            if isinstance(codec, PowerSum):
                if not given["async_op"]:
                    return codec.run(values[0], op, given["group"], config, role)
                lossy_calls.stays_exact(role, name, codec.codec, "asynchronous")
            else:
                more["lossy"] = codec
        if one.point_to_point:
            device = values[0].device.type
            if device == "cpu":
                return run(*values, **more)
            counters.record_pass(role, name, _nbytes(values[0]), PassReason.P2P_DEVICE.of(device))
            return plain(self, *values)
        more["uncompressed_call"] = functools.partial(plain, self, *values)
        if name == "all_reduce" and (owners := slice_owners(self.job, *values, role=role)):
            return comm.reduce_to_owners(values[0], owners, *values[1:3], **more)
        if (name, role) == _PARAMETER_GATHER:
            if gathers.is_secondary(values[0].device, given["group"]):
                sent = one.sent_bytes(_nbytes(values[0]), group_size(given["group"]))
                counters.record_pass(role, name, sent, PassReason.SECONDARY.value)
                return plain(self, *values)
            more |= gather_parameters(values[0], given["group"])
            if "parts" in more:
                return comm.gather_parts(*values, **more)
        if name == "all_to_all_single":
            more["kind"] = hints.current().kind
        if name == "all_reduce":
            more["replicated"] = hints.current().replicated
        return run(*values, **more)

    return coded


def _nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor of any layout."""
    return int(tensor.numel() * tensor.element_size())


def gather_parameters(output: torch.Tensor, group: Any) -> dict[str, Any]:
    """Return what is known of the parameters of a gather into ``output``: the base, and the agreed sizes of their frames; or the parts.

    ZeRO-1 and ZeRO-2 gather in place, during optimizer steps: the output still holds the parameters of the previous step. ZeRO-3 gathers
    into new memory.
    """
    if hints.current().stepping in (1, 2):
        return {"base": comm.IN_PLACE}
    params = gathers.take_parameters(output, group)
    parts = gathers.parts_of(params, output.dtype)
    if parts and not tensors.is_traced(type(output)):
        return {"parts": parts}
    return {"base": gathers.base_of(params, output.dtype), "agreed": gathers.agreed_of(params)}


def slice_owners(job: Job, tensor: torch.Tensor, op: Any, group: Any, async_op: bool, *, role: str) -> Owners | None:
    """Return the owner ranks of each slice of a gradient bucket, or None if every rank gets the full sum.

    Sums of ZeRO-1 and ZeRO-2 whose owners are not known are counted.
    """
    owned = buckets.take_owners(tensor, op, group, async_op)
    assert job.config is not None  # only the coded method asks
    if job.config.owner_only == "off":
        return None
    expected = owned is None and role == "zero_grad" and job.zero_stages & {1, 2}
    if expected and not admission.is_small(_nbytes(tensor), job.config):
        counters.record_whole(role, "all_reduce", buckets.UNKNOWN)
    return owned


class ZipcclBackend(TorchBackend):  # type: ignore[misc]
    """DeepSpeed's TorchBackend with coded collectives. Every call passes through until a section switches coding on."""

    job: Job

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.job = Job()
        super().__init__(*args, **kwargs)
        if overriding_section() is not None:
            self.configure(None)

    @classmethod
    def adopt(cls, backend: TorchBackend) -> None:
        """Make ``backend``, which DeepSpeed uses already, one of this class. :meth:`configure` follows with the next engine."""
        backend.__class__ = cls
        cast(ZipcclBackend, backend).job = Job()

    def configure(self, section: Mapping[str, Any] | None, zero_stage: int | None = None) -> None:
        """Accept a section, and switch coding on if the section says so. A collective of all ranks; blocks.

        Args:
            section: the ``"zipccl"`` section of an engine's DeepSpeed config, None if the config has none. ``DS_ZIPCCL``, and then the
                section given to :func:`ds_zipccl.install`, precede it.
            zero_stage: the ZeRO stage of the engine, None if there is no engine.

        Raises:
            ConfigError: the section is invalid, or differs between ranks, or from the section of another engine of this process.
        """
        if zero_stage is not None:
            self.job.zero_stages |= {zero_stage}
        config = self.job.accept(section)
        if config is None:
            return
        _load_kernels(config)
        config = _with_all_kernels(config)
        if not config.enabled:
            return
        hook_points.skip_frames()
        self.job.untraced = {
            name: hook_points.outside_graphs(getattr(type(self), name).coded)
            if op.coded
            else getattr(TorchBackend, name)
            for name, op in OFFERED.items()
        }
        self.job.config = config
        if config.torch_distributed:
            torch_calls.wrap(self.job)
        profile = None
        if _measurable():
            if any(config.mode_of(role) == "auto" for role in ROLES):  # their schedules compete
                profile = comm.calibrate()
            else:
                find_nodes()  # sums depend on the nodes, and must not depend on the mode
        settled = self._settle(config)
        unhooked = lossy_calls.unhooked(config)
        if torch.distributed.get_rank() == 0:
            groups, device, nodes = start_line.groups_here(), _device().type, group_nodes(resolve_group(None))
            covered = start_line.describe(groups, device, config, settled)
            first = start_line.start_line(config, profile, covered, nodes, settled)
            features = start_line.lossy_line(groups, device, config, unhooked), start_line.fused_line(config)
            for line in filter(None, (first, *hook_points.lines(), *features)):
                print(line, flush=True)
            atexit.register(table.show, "at the end")
            self.job.step_log = StepLog(config.step_log) if config.step_log else None

    def _settle(self, config: ZipcclConfig) -> comm_engine.Settled | None:
        """Settle sums and moves of groups in stream order; None where the job has none that is coded. A collective; blocks."""
        settled = comm_engine.settle(config, _device())
        if settled is not None and not any(config.mode_of(role) == "always" for role in ROLES):
            self.job.bypass = Bypass(self.job.role_of, settled.device)
        return settled

    def batch_isend_irecv(self, p2p_op_list: list[Any]) -> list[Any]:
        """Start all sends and receives, those of CPU tensors by :meth:`isend` and :meth:`irecv`; return their handles.

        Each send is coded by itself: the peer may receive it by :meth:`recv`, outside of a batch.
        """
        if self.job.config is None:
            return super().batch_isend_irecv(p2p_op_list)  # type: ignore[no-any-return]
        elsewhere = [op for op in p2p_op_list if op.tensor.device.type != "cpu"]
        handles = super().batch_isend_irecv(elsewhere) if elsewhere else []
        for op in p2p_op_list:
            if op.tensor.device.type == "cpu":
                handles.append(getattr(self, op.op)(op.tensor, op.peer, op.group, op.tag))
        return [handle for handle in handles if handle is not None]


for _name in OFFERED:
    setattr(ZipcclBackend, _name, _collective(_name))
if not hook_points.fits("TorchBackend.batch_isend_irecv", TorchBackend):
    del ZipcclBackend.batch_isend_irecv


def _load_kernels(config: ZipcclConfig) -> None:
    """Build and load the kernels now, not in the middle of the first step, where a CUDA kernel must not be loaded any more.

    Kernels prove themselves meanwhile. Without CUDA kernels the job runs, and CUDA tensors are compressed on the host; the start-up line
    has the reason. What happens without kernels for CPU tensors, :func:`_with_all_kernels` decides.
    """
    with contextlib.suppress(kernels.RouteUnavailable):
        kernels.route(kernels.preferred(config.route, "cpu"), "cpu")
    device = _device()
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError), devices.RUNTIMES["cuda"].device(device):  # also of the device itself
            kernels.route(kernels.preferred(config.route, "cuda"), "cuda")


def _with_all_kernels(config: ZipcclConfig) -> ZipcclConfig:
    """Return the config with the features off for which a rank has no kernels, as the other ranks would wait for it; rank 0 says which, and
    why. Without kernels for CPU tensors that is coding itself. A collective of all ranks for each feature that the config asks for; blocks.

    Raises:
        RouteUnavailable: a rank has no kernels of the lossy codecs, on all ranks.
    """
    device, state = _device(), group_state(None)
    streams = state is not None and state.size > 1 and state.streams(device.type)
    host = kernels.preferred(config.route, "cpu")
    features: tuple[tuple[str, bool, Callable[[], object], str], ...] = (
        (
            "lossy",
            config.lossy and bool(config.lossy_roles),
            lambda: kernels.lossy_route(host, "cpu", _LOSSY_FUNCTION),
            f"lack the lossy codecs of the roles; {{}}; {_REMEDY}, or name no lossy codec",
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
            f"have no kernels of row frames; {{}}; {_REMEDY}",
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
        if not (missing := {rank: said for rank, said in told.items() if said}):
            continue
        rank, said = next(iter(missing.items()))
        why = f"ranks {sorted(missing)} {what.format(f'rank {rank}: {said}')}"
        if key == "lossy":
            raise kernels.RouteUnavailable(why)
        if torch.distributed.get_rank() == 0:
            print(f"[ds_zipccl] {'coding' if key == 'enabled' else key} is off: {why}", flush=True)
        if key == "enabled":
            return replace(config, enabled=False)
        config = replace(config, **{key: "off"})  # type: ignore[arg-type]
    return config


def _device() -> torch.device:
    """Return the device that DeepSpeed gives to this rank, which need not be current yet; the current one where the rank sees fewer devices
    than its node has ranks."""
    name = get_accelerator().device_name()
    if name != "cuda":
        return torch.device(name)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", torch.cuda.current_device() if 0 < torch.cuda.device_count() <= local else local)


def _measurable() -> bool:
    """Whether ranks can exchange messages of this package over a link that can be measured."""
    state = group_state(None)
    return state is not None and state.size > 1 and state.backend("cpu") in TRANSPORTS
