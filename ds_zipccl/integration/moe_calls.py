"""Calls of MoE layers: kinds of expert all-to-alls, and sums of equal tensors.

An all-to-all itself does not tell whether rows go to experts or come back, forward or backward. Sums of AutoEP + AutoTP folding may have
the same tensor on all ranks of the tensor group: in the backward of the gather that restores routed rows, each rank holds the same
gradient, and after the backward pass the same gradients of parameters that are not split. DeepSpeed adds both over the tensor group all
the same, to have the sum of equal parts.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from ds_zipccl.integration import hook_points
from ds_zipccl.integration.lossy import calls as lossy_calls

#: Kinds of the exchanges in the forward of a MoE layer, in the order of DeepSpeed's calls.
_FORWARD = ("dispatch", "combine")
#: Attribute of an exchange's node of the autograd graph: the kind of its forward.
_KEPT = "ds_zipccl_kind"

#: Kinds of the exchanges that the running forward of a MoE layer still has in front of it; None outside of such a forward.
_next: ContextVar[Iterator[str] | None] = ContextVar("ds_zipccl_moe_next", default=None)
#: Kind of the exchange that is running.
_kind: ContextVar[str] = ContextVar("ds_zipccl_moe_kind", default="")
#: Whether the sum that is running is one of equal tensors.
_replicated: ContextVar[bool] = ContextVar("ds_zipccl_replicated", default=False)


def kind() -> str:
    """Return the kind of the running expert exchange: "dispatch", "combine", "combine.bwd" or "dispatch.bwd".

    The kind is "" outside of an exchange of rows, such as for the counts of rows, and where DeepSpeed's MoE layer is not known. All ranks
    run one program, and torch.compile traces none of the functions here, so that all ranks get one kind.
    """
    return _kind.get()


def watch_layer(module: ModuleType, layer: str, exchange: str) -> None:
    """Tell the kinds of the exchanges of a MoE layer from now on. Repeating the call does nothing, nor does a module without these names,
    which :mod:`.hook_points` notes.

    A forward has two exchanges, first dispatch, then combine. The node that autograd makes of an exchange keeps the kind for the backward.
    A forward that activation checkpointing runs again in the backward thus has the kinds of a forward.

    Args:
        module: the DeepSpeed module that defines both classes.
        layer: name of the ``nn.Module`` class of the layer.
        exchange: name of the ``autograd.Function`` class that calls ``all_to_all_single`` for rows.
    """
    layers, exchanges = getattr(module, layer, None), getattr(module, exchange, None)
    points = {f"{layer}.forward": layers, f"{exchange}.forward": exchanges, f"{exchange}.backward": exchanges}
    fit = [hook_points.fits(name, owner) for name, owner in points.items()]
    if layers is None or not all(fit) or hasattr(layers.forward, "ds_zipccl"):
        return
    _watch_forward(layers)
    _watch_exchange(exchanges)


def _watch_forward(layers: Any) -> None:
    original = layers.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _running("", iter(_FORWARD)):
            return original(self, *args, **kwargs)

    forward.ds_zipccl = True  # type: ignore[attr-defined]
    layers.forward = hook_points.untraced_frame(forward)


def _watch_exchange(exchanges: Any) -> None:
    forward, backward = exchanges.forward, exchanges.backward

    @functools.wraps(forward)
    def watched_forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        coming = _next.get()
        if coming is None:
            return forward(ctx, *args, **kwargs)  # the native backward is a forward too, and its kind is set
        found = next(coming, "")
        setattr(ctx, _KEPT, found)
        with _running(found, None), _hint(found, "forward"):
            return forward(ctx, *args, **kwargs)

    @functools.wraps(backward)
    def watched_backward(ctx: Any, *args: Any) -> Any:
        found = getattr(ctx, _KEPT, "")
        with _running(f"{found}.bwd" if found else "", None), _hint(found, "backward"):
            return backward(ctx, *args)

    exchanges.forward = staticmethod(lossy_calls.marked(watched_forward))
    exchanges.backward = staticmethod(lossy_calls.marked(watched_backward))


def _hint(found: str, direction: str) -> AbstractContextManager[None]:
    """Give lossy codecs a hint of the exchange of a kind, if the kind is known."""
    return lossy_calls.exchange(direction) if found else nullcontext()


@contextmanager
def _running(found: str, coming: Iterator[str] | None) -> Iterator[None]:
    tokens = _kind.set(found), _next.set(coming)
    try:
        yield
    finally:
        _kind.reset(tokens[0])
        _next.reset(tokens[1])


def replicated() -> bool:
    """Return whether the running sum is one whose tensor is probably the same on all ranks; equal on all ranks."""
    return _replicated.get()


def watch_rows(module: ModuleType) -> None:
    """Note the sums in the backward of ``_AllGatherVariableRows``, of ``deepspeed.moe.ep_tp_dispatch``. Repeating does nothing, nor does a
    module without the name."""
    gather = getattr(module, "_AllGatherVariableRows", None)
    original = hook_points.fitting("_AllGatherVariableRows.backward", gather)
    if gather is not None and original is not None and not hasattr(original, "ds_zipccl"):
        gather.backward = staticmethod(hook_points.running(original, _replicated, True))


def watch_gradients(module: ModuleType) -> None:
    """Note the sums in ``reduce_autoep_folding_gradient``, of ``deepspeed.module_inject.auto_ep_folding``. Repeating does nothing, nor does
    a module without the name."""
    name = "reduce_autoep_folding_gradient"
    original: Any = hook_points.fitting(name, module)
    if original is None or hasattr(original, "ds_zipccl"):
        return
    noted = hook_points.running(original, _replicated, True)
    for holder in (module, sys.modules.get("deepspeed.runtime.engine")):  # the engine may have copied the name already
        if getattr(holder, name, None) is original:
            setattr(holder, name, noted)
