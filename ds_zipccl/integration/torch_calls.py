"""Direct calls of torch.distributed over tensor- and sequence-parallel groups, which Megatron-DeepSpeed and GPT-NeoX make.

Those programs look the functions up in the module ``torch.distributed`` at each call, so that a function put there sees the call. Calls of
other groups, and calls out of torch, DeepSpeed's backend and this package, go on to torch's function.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ds_zipccl import comm
from ds_zipccl.integration import hook_points
from ds_zipccl.integration.hook_points import HookPoint
from ds_zipccl.integration.job import BYPASSED, Job

#: Modules whose calls are part of a collective that was seen already, or not for this module.
_WITHIN = ("ds_zipccl.", "deepspeed.comm.", "torch.")
_REDUCE = ("op", "group", "async_op")
_GATHER = ("all_gather_into_tensor", ("output_tensor", "input_tensor", "group", "async_op"))
_SCATTER = ("reduce_scatter_tensor", ("output", "input", *_REDUCE))
#: Function of torch.distributed -> the operation, and torch's names of its parameters, in the order of those of ds_zipccl.comm.
CALLS = {
    "all_reduce": ("all_reduce", ("tensor", *_REDUCE)),
    "all_gather": ("all_gather", ("tensor_list", "tensor", "group", "async_op")),
    "all_gather_into_tensor": _GATHER,
    "_all_gather_base": _GATHER,
    "reduce_scatter": ("reduce_scatter", ("output", "input_list", *_REDUCE)),
    "reduce_scatter_tensor": _SCATTER,
    "_reduce_scatter_base": _SCATTER,
}
hook_points.declare(
    *(
        HookPoint(
            "torch.distributed",
            f"distributed.{name}",
            f"direct calls of {name} stay plain",
            first=parameters,
            optional=name.startswith("_"),  # former names
        )
        for name, (_, parameters) in CALLS.items()
    )
)
_DEFAULTS = {"op": dist.ReduceOp.SUM, "group": None, "async_op": False}


class _State(threading.local):
    """Whether this thread is inside of a call that was seen. Its own calls of torch.distributed may come by way of other modules:
    DeepSpeed's backend, or a program that traces torch.distributed."""

    inside = False


_state = _State()
_job: Job | None = None


@contextmanager
def seen() -> Iterator[None]:
    """Surround a call that was seen: calls of torch.distributed in this thread go on to torch's functions."""
    before, _state.inside = _state.inside, True
    try:
        yield
    finally:
        _state.inside = before


def wrap(job: Job) -> None:
    """Code direct calls of the functions in :data:`CALLS` for ``job``, over the groups that its ``mpu`` names as tensor or sequence
    parallel. Repeating does nothing but replace the job."""
    global _job
    _job = job
    for name in CALLS:
        original = hook_points.fitting(f"distributed.{name}", dist)
        if original is not None and not hasattr(original, hook_points.MARK):
            setattr(dist, name, _wrapped(name, original))


def _wrapped(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    op, parameters = CALLS[name]
    defaults = {key: value for key, value in _DEFAULTS.items() if key in parameters}
    run = getattr(comm, op)

    def coded(*args: Any, **kwargs: Any) -> Any:
        given = {**defaults, **dict(zip(parameters, args, strict=False)), **kwargs}
        group = given["group"]
        role = "" if group is None or _job is None or _job.config is None else _job.model_parallel_role(group)
        if not role or len(args) > len(parameters) or given.keys() != {*parameters}:
            return original(*args, **kwargs)  # which has the error of wrong arguments
        if group in c10d._world.pg_coalesce_state:
            return original(*args, **kwargs)  # torch sends the operations of a coalescing manager together
        assert _job is not None
        values = [given[key] for key in parameters]
        plain = functools.partial(original, *args, **kwargs)
        with seen():
            if op in BYPASSED and _job.bypass is not None and _job.bypass.takes(op, values, {}):
                return plain()
            return run(*values, config=_job.config, role=role, uncompressed_call=plain)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            # on all ranks, those included that have stopped compiling
            return hook_points.outside_graphs(coded)(*args, **kwargs)
        if _state.inside or _caller().startswith(_WITHIN):
            return original(*args, **kwargs)
        return coded(*args, **kwargs)

    setattr(call, hook_points.MARK, True)
    return call


def _caller() -> str:
    """Return the name of the module that called the function that calls this one."""
    return str(sys._getframe(2).f_globals.get("__name__", ""))
