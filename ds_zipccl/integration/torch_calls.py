"""Direct calls of torch.distributed over tensor- and sequence-parallel groups, which Megatron-DeepSpeed and GPT-NeoX make.

Those programs look the functions up in the module ``torch.distributed`` at each call, so that a function put there sees the call. Calls of
other groups, and calls out of torch, DeepSpeed's backend and this package, go on to torch's function.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ds_zipccl import comm
from ds_zipccl.integration import hints, hook_points
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
_DEFAULTS = {"op": dist.ReduceOp.SUM, "group": None, "async_op": False}
_job: Job | None = None


def wrap(job: Job) -> None:
    """Code direct calls of the functions in :data:`CALLS` for ``job``, over the groups that its ``mpu`` names as tensor or sequence
    parallel. Repeating does nothing but replace the job."""
    global _job
    _job = job
    hook_points.adopt(torch, "torch.distributed")


def _around(name: str) -> Callable[..., Any]:
    op, parameters = CALLS[name]
    defaults = {key: value for key, value in _DEFAULTS.items() if key in parameters}
    run = getattr(comm, op)

    def coded(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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
        with hints.hinting(seen=True):
            if op in BYPASSED and _job.bypass is not None and _job.bypass.takes(op, values, {}):
                return plain()
            return run(*values, config=_job.config, role=role, uncompressed_call=plain)

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            # on all ranks, those included that have stopped compiling
            return hook_points.outside_graphs(coded)(original, *args, **kwargs)
        if hints.current().seen or _caller().startswith(_WITHIN):
            return original(*args, **kwargs)
        return coded(original, *args, **kwargs)

    return around


def _caller() -> str:
    """Return the name of the module that called the wrapper of the function that calls this one."""
    return str(sys._getframe(3).f_globals.get("__name__", ""))


hook_points.declare(
    *(
        HookPoint(
            "torch.distributed",
            f"distributed.{name}",
            _around(name),
            parameters,
            without=f"direct calls of {name} stay plain",
            optional=name.startswith("_"),  # former names
        )
        for name, (_, parameters) in CALLS.items()
    )
)
