"""The DeepSpeed communication backend. Every ``deepspeed.comm`` collective goes through it, and is coded or passed through."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.torch import TorchBackend
from torch.distributed import ReduceOp

from ds_zipccl import comm
from ds_zipccl.comm.group_state import group_size
from ds_zipccl.comm.ops import reduce_to_owners
from ds_zipccl.comm.ops.reduce_to_owners import Owners
from ds_zipccl.integration import hints, hook_points, start_up, torch_calls
from ds_zipccl.integration.hook_points import HookPoint
from ds_zipccl.integration.job import BYPASSED, Job, of_process, overriding_section
from ds_zipccl.integration.lossy import calls as lossy_calls
from ds_zipccl.integration.lossy.powersgd import PowerSum
from ds_zipccl.integration.zero import buckets, gathers
from ds_zipccl.ops import OPS
from ds_zipccl.policy import admission
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.telemetry import counters

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
        if self.job.config.torch_distributed:
            with hints.hinting(seen=True):
                handle = coded(self, *args, **kwargs)
        else:
            handle = coded(self, *args, **kwargs)
        if handle is not None and (started := hints.current().started) is not None:
            started.append(handle)
        return handle

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
            if (device := values[0].device.type) == "cpu":
                return run(*values, **more)
            counters.record_pass(role, name, _nbytes(values[0]), PassReason.P2P_DEVICE.of(device))
            return plain(self, *values)
        more["uncompressed_call"] = functools.partial(plain, self, *values)
        if name == "all_reduce" and (owners := slice_owners(self.job, *values, role=role)):
            return comm.reduce_to_owners(values[0], owners, *values[1:3], **more)
        if (name, role) == ("all_gather_into_tensor", "zero_param"):
            if gathers.is_secondary(values[0].device, given["group"]):
                sent = one.sent_bytes(_nbytes(values[0]), group_size(given["group"]))
                counters.record_pass(role, name, sent, PassReason.SECONDARY.value)
                return plain(self, *values)
            more |= gather_parameters(values[0], given["group"])
        if name == "all_to_all_single":
            more["kind"] = hints.current().kind
        return run(*values, **more)

    return coded


def _nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor of any layout."""
    return int(tensor.numel() * tensor.element_size())


def gather_parameters(output: torch.Tensor, group: Any) -> dict[str, Any]:
    """Return what is known of the parameters of a gather into ``output``, as keywords: its base, or the parameters.

    ZeRO-1 and ZeRO-2 gather in place, during optimizer steps: the output still holds the parameters of the previous step. ZeRO-3 gathers
    into new memory.
    """
    if hints.current().stepping in (1, 2):
        return {"base": comm.IN_PLACE}
    return {"parameters": gathers.parameters_of(gathers.take_parameters(output, group))}


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
            ConfigError: the section is invalid, or differs between ranks, or from the section of another engine or model of this process.
        """
        job, device = of_process(), _device()
        begins = start_up.accept(job, section, device, zero_stage)
        if (config := job.config) is None or self.job is job:
            return
        hook_points.skip_frames()
        job.untraced = {
            name: hook_points.outside_graphs(getattr(type(self), name).coded)
            if op.coded
            else getattr(TorchBackend, name)
            for name, op in OFFERED.items()
        }
        job.groups.update(self.job.groups)
        self.job = job
        if config.torch_distributed:
            torch_calls.wrap(job)
        if begins:
            start_up.begin(job, config, device, lossy_calls.unhooked(config), hook_points.lacking("sums"))

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


def _device() -> torch.device:
    """Return the device that DeepSpeed gives to this rank, which need not be current yet; the current one where the rank sees fewer devices
    than its node has ranks."""
    name = get_accelerator().device_name()
    if name != "cuda":
        return torch.device(name)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", torch.cuda.current_device() if 0 < torch.cuda.device_count() <= local else local)
