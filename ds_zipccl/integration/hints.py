"""What the running functions of DeepSpeed tell of the calls that they are about to make: one variable, of this thread, and its type.

A call of ``deepspeed.comm`` has tensors and a group, which do not tell the parameters of a gather, the owners of a sum, or the layer of an
exchange. The functions that know them are at the points of :mod:`.hooks`; each surrounds DeepSpeed's function by a hint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple


class Hint(NamedTuple):
    """``parameters``: of ZeRO-3 by number, asked for and not gathered yet, in DeepSpeed's order. ``bucket``: of gradients that are about to
    be all-reduced, see :class:`.zero.buckets.Bucket`. A call takes what it uses out of these two.

    ``coming``: kinds of the exchanges that the running forward of a MoE layer still has in front of it, None outside of such a forward.
    ``kind``: of the expert exchange that is running: "dispatch", "combine", "combine.bwd" or "dispatch.bwd"; "" outside of an exchange of
    rows, such as for the counts of rows, and where DeepSpeed's MoE layer is not known. All ranks run one program, and torch.compile traces
    none of the hooks, so that all ranks get one kind.

    ``role``: of the calls over data that the running method of DeepSpeed makes, whatever their names; "" in all other methods.
    ``lossy``: the calls that a lossy codec may change, see :class:`.lossy.calls.Calls`. ``seen``: the running call was seen, and calls of
    torch.distributed within it go on to torch's functions; they may come by way of other modules. ``stepping``: ZeRO stage of the engine
    that is taking an optimizer step; 0: no engine is. ``started``: takes the handles of asynchronous calls, for one who waits for all.
    ``collected``: garbage collection destroys an engine, on this rank alone.
    """

    parameters: dict[int, Any] = {}  # the defaults stay empty: calls only take from these two
    bucket: list[Any] = []
    coming: Iterator[str] | None = None
    kind: str = ""
    role: str = ""
    lossy: Any = None
    seen: bool = False
    stepping: int = 0
    started: list[Any] | None = None
    collected: bool = False


_NOTHING = Hint()
_current: ContextVar[Hint] = ContextVar("ds_zipccl_hint", default=_NOTHING)
#: Returns the hint of the running call.
current = _current.get


@contextmanager
def hinting(**told: Any) -> Iterator[None]:
    """Let the fields ``told`` of :class:`Hint` hold in the ``with`` block; the others stay."""
    token = _current.set(_current.get()._replace(**told))
    try:
        yield
    finally:
        _current.reset(token)


def during(**told: Any) -> Callable[..., Any]:
    """Return a function for :attr:`.hook_points.HookPoint.around` during whose calls the fields ``told`` hold."""

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with hinting(**told):
            return original(*args, **kwargs)

    return around
