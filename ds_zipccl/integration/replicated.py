"""Sums of AutoEP + AutoTP folding whose tensor is the same on all ranks of the tensor group.

In the backward of the gather that restores routed rows, each rank holds the same gradient. After the backward pass each rank holds the same
gradients of parameters that are not split. DeepSpeed adds both over the tensor group all the same, to have the sum of equal parts.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from ds_zipccl.integration import hook_points

_expected: ContextVar[bool] = ContextVar("ds_zipccl_replicated", default=False)


def expected() -> bool:
    """Return whether the running sum is one whose tensor is probably the same on all ranks; equal on all ranks."""
    return _expected.get()


def watch_rows(module: ModuleType) -> None:
    """Note the sums in the backward of ``_AllGatherVariableRows``, of ``deepspeed.moe.ep_tp_dispatch``. Repeating does nothing, nor does a
    module without the name."""
    gather = getattr(module, "_AllGatherVariableRows", None)
    original = hook_points.fitting("_AllGatherVariableRows.backward", gather)
    if gather is not None and original is not None and not hasattr(original, "ds_zipccl"):
        gather.backward = staticmethod(hook_points.running(original, _expected, True))


def watch_gradients(module: ModuleType) -> None:
    """Note the sums in ``reduce_autoep_folding_gradient``, of ``deepspeed.module_inject.auto_ep_folding``. Repeating does nothing, nor does
    a module without the name."""
    name = "reduce_autoep_folding_gradient"
    original: Any = hook_points.fitting(name, module)
    if original is None or hasattr(original, "ds_zipccl"):
        return
    noted = hook_points.running(original, _expected, True)
    for holder in (module, sys.modules.get("deepspeed.runtime.engine")):  # the engine may have copied the name already
        if getattr(holder, name, None) is original:
            setattr(holder, name, noted)
