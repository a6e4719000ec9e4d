"""Kinds of expert all-to-alls: the call itself does not tell whether rows go to experts or come back, forward or backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ds_zipccl.integration import hints
from ds_zipccl.integration.lossy.calls import Calls

#: Kinds of the exchanges in the forward of a MoE layer, in the order of DeepSpeed's calls.
_FORWARD = ("dispatch", "combine")
#: Attribute of an exchange's node of the autograd graph: the kind of its forward.
_KEPT = "ds_zipccl_kind"


def forward_layer(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Surround the forward of a MoE layer, which has two exchanges, first dispatch, then combine."""
    with hints.hinting(kind="", coming=iter(_FORWARD)):
        return original(layer, *args, **kwargs)


def forward_exchange(original: Callable[..., Any], ctx: Any, *args: Any, **kwargs: Any) -> Any:
    """Tell the kind of an exchange. The node that autograd makes of it keeps the kind for the backward. A forward that activation
    checkpointing runs again in the backward thus has the kinds of a forward."""
    coming = hints.current().coming
    if coming is None:
        return original(ctx, *args, **kwargs)  # the native backward is a forward too, and its kind is set
    found = next(coming, "")
    setattr(ctx, _KEPT, found)
    with _exchange(found, "forward"):
        return original(ctx, *args, **kwargs)


def backward_exchange(original: Callable[..., Any], ctx: Any, *args: Any) -> Any:
    """Tell the kind of the backward of an exchange."""
    found = getattr(ctx, _KEPT, "")
    with _exchange(found and f"{found}.bwd", "backward"):
        return original(ctx, *args)


def _exchange(kind: str, direction: str) -> AbstractContextManager[None]:
    """Tell the kind of an exchange; if it is known, lossy codecs may change the rows."""
    lossy = {"lossy": Calls(("ep",), ("all_to_all_single",), direction)} if kind else {}
    return hints.hinting(kind=kind, coming=None, **lossy)
