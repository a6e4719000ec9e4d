"""The calls that a lossy codec may change: those that DeepSpeed's own code makes at the places in :data:`SITES`, and no others.

Operation and group do not tell enough. Over a tensor-parallel group travel sums of activations, and also sums of a cross-entropy, and
weights that are gathered to be saved. In a job with ZeRO every ``all_reduce`` has the role of gradients, a user's own metric too. So each
place gives a hint of the calls that it is about to make, and the backend asks for the hint. A call without a hint stays exact.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.distributed import ReduceOp

from ds_zipccl.comm.group_state import group_size
from ds_zipccl.comm.lossy.factors import Factoring
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.integration import hook_points
from ds_zipccl.integration.lossy import pipeline, powersgd
from ds_zipccl.integration.lossy.powersgd import PowerSum
from ds_zipccl.lossy import LossyCodec
from ds_zipccl.role_settings import RoleSettings
from ds_zipccl.telemetry import counters

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Gets the tensor that is about to be sent, and the settings of its role; returns whether the call may be changed, what makes factors of
#: the tensor, the sum to make in place of the call, or the reason, to be counted, why the call stays exact.
Ready = Callable[[torch.Tensor, RoleSettings], "bool | str | Factoring | PowerSum"]


@dataclass(eq=False)
class _Hint:
    """The next calls of one of ``ops`` with floating-point tensors, if they have one of ``roles``. ``detail`` returns their number and
    the function that is asked before each; it is called once, at the first of them, in jobs with lossy roles alone."""

    roles: tuple[str, ...]
    ops: tuple[str, ...]
    direction: str
    detail: Callable[[], tuple[int, Ready | None]]

    @functools.cached_property
    def ready(self) -> Ready | None:
        """The function that is asked before each call."""
        self.left, ready = self.detail()
        return ready

    left: int = 0


_hint: ContextVar[_Hint | None] = ContextVar("ds_zipccl_hint", default=None)


@contextmanager
def hint(
    roles: Sequence[str],
    ops: Sequence[str],
    direction: str = "",
    detail: Callable[[], tuple[int, Ready | None]] = lambda: (1, None),
) -> Iterator[None]:
    """Give a hint of the calls that this thread makes in the ``with`` block. Calls beyond their number, and calls of other threads, stay
    exact.

    Args:
        roles: the roles that the calls may have.
        ops: their operations, names of :data:`ds_zipccl.ops.OPS`.
        direction: "forward" or "backward"; "" where a role has no directions.
        detail: returns the number of the calls, and a function that is called with the tensor of each call before the call, or None. Calls
            whose tensors are not of :data:`DTYPES`, such as sizes sent ahead, do not count. A job without lossy roles does not ask.
    """
    with hook_points.setting(_hint, _Hint(tuple(roles), tuple(ops), direction, detail)):
        yield


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
    found = _hint.get() if config.lossy_roles else None
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


@dataclass(frozen=True)
class Site:
    """A function of DeepSpeed whose calls have a hint.

    ``name``: "Class.method", or a function. ``table``: attribute of the class, a dict of functions that the class calls instead of its
    methods. ``count``: number of the calls, from the arguments. ``ready``: from the arguments. ``first``: names of the leading
    parameters, which these two rely on.
    """

    roles: tuple[str, ...]
    module: str
    name: str
    ops: tuple[str, ...] = ("all_reduce",)
    direction: str = ""
    table: str = ""
    count: Callable[..., int] = lambda *args, **kwargs: 1
    ready: Callable[..., Ready] | None = None
    first: tuple[str, ...] = ()


def _zero_padding(tensors: Sequence[torch.Tensor], group: Any = None) -> Ready:
    """Return a function that zeroes the padding of ZeRO-3's gradients, uninitialised memory that shares groups of values with gradients.

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

    return ready


_ZERO12 = "deepspeed.runtime.zero.stage_1_and_2"
_LAYERS = "deepspeed.module_inject.layers"
_PIPELINE = "deepspeed.runtime.pipe.engine"
_SENDS = ("send", "isend")
_EXCHANGE = "all_to_all_single"
#: The places. Each method makes one call, or as many as ``count`` says, and runs no code of the user.
SITES = (
    Site(
        ("zero_grad",),
        _ZERO12,
        "DeepSpeedZeroOptimizer.allreduce_bucket",
        ("all_reduce", "reduce"),
        ready=powersgd.of_zero_bucket,
        first=("self", "bucket", "communication_data_type", "rank"),
    ),
    Site(
        ("zero_grad",),
        _ZERO12,
        "DeepSpeedZeroOptimizer.gradient_reduction_w_predivide",
        ready=powersgd.of_zero_tensor,
        first=("self", "tensor"),
    ),
    Site(
        ("zero_grad",),
        "deepspeed.runtime.zero.stage3",
        "reduce_scatter_coalesced",
        ("reduce_scatter_tensor",),
        ready=_zero_padding,
        first=("tensors", "group"),
    ),
    Site(
        ("dp", "zero_grad"),
        "deepspeed.runtime.engine",
        "DeepSpeedEngine.allreduce_bucket",
        ready=powersgd.of_engine_bucket,
        first=("self", "bucket"),
    ),
    Site(("tp",), _LAYERS, "RowParallel.forward", direction="forward"),
    Site(("tp",), _LAYERS, "ColumnParallel.backward", direction="backward"),
    Site(("tp",), _LAYERS, "AsyncColumnParallel.backward", direction="backward"),
    Site(
        ("pp",),
        _PIPELINE,
        "PipelineEngine._exec_send_activations",
        _SENDS,
        "forward",
        "_INSTRUCTION_MAP",
        pipeline.activations,
        pipeline.is_activation,
        ("self", "buffer_id"),
    ),
    Site(
        ("pp",),
        _PIPELINE,
        "PipelineEngine._exec_send_grads",
        _SENDS,
        "backward",
        "_INSTRUCTION_MAP",
        pipeline.gradients,
        pipeline.of_gradients,
        ("self", "buffer_id"),
    ),
)
#: Further places, of the role ``ep``: module and class of the exchanges of which :mod:`.moe_calls` gives a hint.
_EXCHANGES = (("deepspeed.moe.sharded_moe", "_AllToAll"), ("deepspeed.module_inject.auto_ep_layer", "_AllToAllV"))
#: Operations of calls with a hint.
OPERATIONS = frozenset({_EXCHANGE, *(op for site in SITES for op in site.ops)})


def exchange(direction: str) -> AbstractContextManager[None]:
    """Give a hint of the exchange of rows that a MoE layer is about to make."""
    return hint(("ep",), (_EXCHANGE,), direction)


def watch(module: ModuleType) -> None:
    """Let the functions of ``module`` in :data:`SITES` give a hint of their calls. Repeating does nothing; a name that is missing, or that
    takes other parameters, is left out, and :func:`missing` has the name."""
    for site in SITES:
        if site.module == module.__name__:
            _watch(module, site)


def _watch(module: ModuleType, site: Site) -> None:
    owner, _, name = site.name.rpartition(".")
    holder = getattr(module, owner, None) if owner else module
    if holder is None:
        return
    if site.table:
        table = getattr(holder, site.table, {})
        for key, function in table.items():
            if getattr(function, "__name__", "") == name and _fits(function, site):
                table[key] = _hinting(function, site)
        return
    function = getattr(holder, name, None)
    if function is not None and _fits(function, site):
        hook_points.put(holder, name, _hinting(function, site))


def _fits(function: Callable[..., Any], site: Site) -> bool:
    """Return whether a function is to give a hint of its calls: not one that does already, nor one with other parameters."""
    return not hasattr(function, hook_points.MARK) and not hook_points.misfit(function, site.first)


def _hinting(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    def hinting(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def detail() -> tuple[int, Ready | None]:
            ready = site.ready(*args, **kwargs) if site.ready is not None else None
            return site.count(*args, **kwargs), ready

        with hint(site.roles, site.ops, site.direction, detail):
            return original(*args, **kwargs)

    return hook_points.surrounded(original, hinting, untraced=True)


def missing(config: ZipcclConfig) -> dict[str, list[str]]:
    """Return, for each role with a lossy codec, the names of :data:`SITES` that this DeepSpeed lacks: calls there stay exact.

    Imports the modules of these roles, which adjusts them.
    """
    found: dict[str, list[str]] = {}
    for role in config.lossy_roles:
        places = [(site.module, site.name, site.table) for site in SITES if role in site.roles]
        if role == "ep":
            places = [(module, f"{name}.forward", "") for module, name in _EXCHANGES]
        if names := [text for place in places if (text := _without_hint(*place))]:
            found[role] = names
    return found


def _without_hint(module: str, name: str, table: str) -> str:
    """Return the name of a place whose calls have no hint, with the reason where the name is there; "" where they are."""
    try:
        found: Any = sys.modules.get(module) or importlib.import_module(module)
    except ImportError:
        return name
    owner, _, last = name.rpartition(".")
    found = getattr(found, owner, None) if owner else found
    functions = getattr(found, table, {}).values() if table else [getattr(found, last, None)]
    called = [one for one in functions if one is not None and (not table or one.__name__ == last)]
    if any(hasattr(one, hook_points.MARK) for one in called):
        return ""
    return f"{name} as this package knows it" if called else name


def unhooked(config: ZipcclConfig) -> dict[str, str]:
    """Return, for each role with a lossy codec whose calls cannot all have a hint, the reason, as a clause of the start-up line."""
    found = {role: f"this DeepSpeed has no {', no '.join(names)}" for role, names in missing(config).items()}
    lacking = hook_points.lacking("lossy")  # after the modules of the roles are imported
    return {role: lacking for role in config.lossy_roles} if lacking else found
