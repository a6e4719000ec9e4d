"""Calls of MoE layers: kinds of expert all-to-alls, and sums of equal tensors.

An all-to-all itself does not tell whether rows go to experts or come back, forward or backward. Sums of AutoEP + AutoTP folding may have
the same tensor on all ranks of the tensor group: in the backward of the gather that restores routed rows, each rank holds the same
gradient, and after the backward pass the same gradients of parameters that are not split. DeepSpeed adds both over the tensor group all
the same, to have the sum of equal parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
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


def forward_layer(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Surround the forward of a MoE layer, which has two exchanges, first dispatch, then combine."""
    with _running("", iter(_FORWARD)):
        return original(layer, *args, **kwargs)


def forward_exchange(original: Callable[..., Any], ctx: Any, *args: Any, **kwargs: Any) -> Any:
    """Tell the kind of an exchange. The node that autograd makes of it keeps the kind for the backward. A forward that activation
    checkpointing runs again in the backward thus has the kinds of a forward."""
    coming = _next.get()
    if coming is None:
        return original(ctx, *args, **kwargs)  # the native backward is a forward too, and its kind is set
    found = next(coming, "")
    setattr(ctx, _KEPT, found)
    with _running(found, None), _hint(found, "forward"):
        return original(ctx, *args, **kwargs)


def backward_exchange(original: Callable[..., Any], ctx: Any, *args: Any) -> Any:
    """Tell the kind of the backward of an exchange."""
    found = getattr(ctx, _KEPT, "")
    with _running(f"{found}.bwd" if found else "", None), _hint(found, "backward"):
        return original(ctx, *args)


def _hint(found: str, direction: str) -> AbstractContextManager[None]:
    """Give lossy codecs a hint of the exchange of a kind, if the kind is known."""
    return lossy_calls.exchange(direction) if found else nullcontext()


@contextmanager
def _running(found: str, coming: Iterator[str] | None) -> Iterator[None]:
    with hook_points.setting(_kind, found), hook_points.setting(_next, coming):
        yield


def replicated() -> bool:
    """Return whether the running sum is one whose tensor is probably the same on all ranks; equal on all ranks."""
    return _replicated.get()


#: Around functions that make such sums.
sum_replicated = hook_points.during(_replicated, True)
