"""The calls that a lossy codec may change: those that DeepSpeed's own code makes at the places in :data:`SITES`, and no others.

Operation and group do not tell enough. Over a tensor-parallel group travel sums of activations, and also sums of a cross-entropy, and
weights that are gathered to be saved. In a job with ZeRO every ``all_reduce`` has the role of gradients, a user's own metric too. So each
place gives a hint of the calls that it is about to make, and the backend asks for the hint. A call without a hint stays exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ReduceOp

from ds_zipccl.comm.group_state import group_size
from ds_zipccl.comm.lossy.factors import Factoring
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.integration import hints, hook_points
from ds_zipccl.integration.hook_points import HookPoint
from ds_zipccl.integration.lossy import pipeline, powersgd
from ds_zipccl.integration.lossy.powersgd import PowerSum
from ds_zipccl.integration.lossy.state import Ready
from ds_zipccl.lossy import LossyCodec
from ds_zipccl.role_settings import RoleSettings
from ds_zipccl.telemetry import counters

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(eq=False)
class Calls:
    """The next calls of one of ``ops``, names of :data:`ds_zipccl.ops.OPS`, with floating-point tensors, if they have one of ``roles``.
    Calls beyond their number, and calls of other threads, stay exact.

    ``direction``: "forward" or "backward"; "" where a role has no directions. ``detail`` returns the number of the calls, and a function
    that is called with the tensor of each call before the call, or None. Calls whose tensors are not of :data:`DTYPES`, such as sizes sent
    ahead, do not count. ``detail`` is called once, at the first of the calls, in jobs with lossy roles alone.
    """

    roles: Sequence[str]
    ops: Sequence[str]
    direction: str = ""
    detail: Callable[[], tuple[int, Ready | None]] = lambda: (1, None)

    @functools.cached_property
    def ready(self) -> Ready | None:
        """The function that is asked before each call."""
        self.left, ready = self.detail()
        return ready

    left: int = 0


def take_hint(
    config: ZipcclConfig, role: str, name: str, tensor: torch.Tensor, op: Any = None
) -> LossyCodec | Factoring | PowerSum | None:
    """Return the codec of a call with a hint, what makes factors of its tensor, or the sum to make in its place, and use up the hint;
    None for a call that must stay exact.

    All ranks run one program, so that ranks of one collective get one answer. Does not block.

    Args:
        role: of the call, as counted.
        name: of the operation.
        tensor: the tensor to send, or to sum.
        op: the operation of a sum; None for other calls.
    """
    found: Calls | None = hints.current().lossy if config.lossy_roles else None
    if found is None or name not in found.ops or tensor.dtype not in DTYPES or hook_points.lacking("lossy"):
        return None
    ready = found.ready
    if not found.left:
        return None
    found.left -= 1
    codec = config.lossy_of(role, found.direction) if role in found.roles else None
    if codec is None or op not in (None, ReduceOp.SUM, ReduceOp.AVG):
        return None
    allowed = ready is None or ready(tensor, config.lossy_roles[role])
    if isinstance(allowed, str):
        stays_exact(role, name, codec, allowed)
        return None
    return codec if allowed is True else allowed or None


def stays_exact(role: str, name: str, codec: LossyCodec, why: str) -> None:
    """Count a call of operation ``name`` that ``codec`` was for and that stays exact; the call counts as one frame."""
    counters.record_lossy(role, name, str(codec), 1)
    counters.record_exact(role, name, why, 1)


def _site(
    owner: str,
    name: str,
    first: tuple[str, ...] = (),
    asked: Callable[..., tuple[int, Ready | None]] = lambda *args, **kwargs: (1, None),
    *,
    roles: tuple[str, ...] = ("zero_grad",),
    ops: tuple[str, ...] = ("all_reduce",),
    direction: str = "",
) -> HookPoint:
    """Return a point whose function gives a hint of its calls. ``asked`` returns their :attr:`Calls.detail` from the arguments of the
    function, and relies on the leading parameters ``first``."""

    def hinting(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        detail = functools.partial(asked, *args, **kwargs)
        with hints.hinting(lossy=Calls(roles, ops, direction, detail)):
            return original(*args, **kwargs)

    return HookPoint(owner, name, hinting, first, roles=roles, untraced=True)


def _zero_padding(tensors: Sequence[torch.Tensor], group: Any = None) -> tuple[int, Ready]:
    """Return the number of the calls, one, and a function that zeroes the padding of ZeRO-3's gradients: uninitialised memory that shares
    groups of values with gradients.

    The buffer has a row for each rank. A row has a part of every tensor, each padded to the same length.
    """
    ranks, sizes = group_size(group), [tensor.numel() for tensor in tensors]
    parts = [-(-size // ranks) for size in sizes]

    def ready(buffer: torch.Tensor, settings: RoleSettings) -> bool:
        if buffer.numel() != ranks * sum(parts) or not buffer.is_contiguous():
            return False
        for rank, row in enumerate(buffer.view(ranks, -1)):
            for part, size, padded in zip(row.split(parts), sizes, parts, strict=True):
                part[max(0, min(padded, size - rank * padded)) :].zero_()
        return True

    return 1, ready


_ZERO12 = "deepspeed.runtime.zero.stage_1_and_2"
_STAGE3 = "deepspeed.runtime.zero.stage3"
_of_layers = functools.partial(_site, "deepspeed.module_inject.layers", roles=("tp",))
_of_stage = functools.partial(
    _site, "deepspeed.runtime.pipe.engine", first=("self", "buffer_id"), roles=("pp",), ops=("send", "isend")
)
#: The places. Each function makes one call, or as many as ``asked`` says, and runs no code of the user. Of the exchanges of the role
#: ``ep`` :mod:`ds_zipccl.integration.hooks` gives hints.
SITES = (
    _site(
        _ZERO12,
        "DeepSpeedZeroOptimizer.allreduce_bucket",
        ("self", "bucket", "communication_data_type", "rank"),
        powersgd.of_zero_bucket,
        ops=("all_reduce", "reduce"),
    ),
    _site(
        _ZERO12, "DeepSpeedZeroOptimizer.gradient_reduction_w_predivide", ("self", "tensor"), powersgd.of_zero_tensor
    ),
    _site(_STAGE3, "reduce_scatter_coalesced", ("tensors", "group"), _zero_padding, ops=("reduce_scatter_tensor",)),
    _site(
        "deepspeed.runtime.engine",
        "DeepSpeedEngine.allreduce_bucket",
        ("self", "bucket"),
        powersgd.of_engine_bucket,
        roles=("dp", "zero_grad"),
    ),
    _of_layers("RowParallel.forward", direction="forward"),
    _of_layers("ColumnParallel.backward", direction="backward"),
    _of_layers("AsyncColumnParallel.backward", direction="backward"),
    _of_stage("PipelineEngine._INSTRUCTION_MAP.SendActivation", asked=pipeline.activations, direction="forward"),
    _of_stage("PipelineEngine._INSTRUCTION_MAP.SendGrad", asked=pipeline.gradients, direction="backward"),
)
hook_points.declare(*SITES)


def unhooked(config: ZipcclConfig) -> dict[str, str]:
    """Return, for each role with a lossy codec whose calls cannot all have a hint, the reason, as a clause of the start-up line. Imports
    the modules of these roles, which adjusts them."""
    found = {role: hook_points.unwrapped(role) for role in config.lossy_roles}
    lacking = hook_points.lacking("lossy")  # after the modules of the roles are imported
    return {
        role: lacking or f"this DeepSpeed has no {', no '.join(names)}"
        for role, names in found.items()
        if names or lacking
    }
