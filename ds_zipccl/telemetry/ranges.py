"""Named ranges of torch's profilers: the work on frames, and the waits for messages.

A range costs a look at one attribute where no profiler runs. In groups that exchange messages ``encode`` and ``decode`` are the time of the
codec, and ``wire`` is the time that a thread waits for messages. In groups in the order of streams they are the work that a call puts on
the three streams; a profiler that records the device shows the ranges there too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.autograd import profiler

ENCODE, WIRE, DECODE = "ds_zipccl.encode", "ds_zipccl.wire", "ds_zipccl.decode"
#: Part of an operation -> its range.
RANGES = {"encode": ENCODE, "wire": WIRE, "decode": DECODE}
_NOTHING = nullcontext()


def inside(name: str, context: AbstractContextManager[Any] = _NOTHING) -> AbstractContextManager[Any]:
    """Return a context that is ``context``, and a range of this name while a profiler of torch runs in this process."""
    return _recorded(name, context) if profiler._is_profiler_enabled else context


@contextmanager
def _recorded(name: str, context: AbstractContextManager[Any]) -> Iterator[None]:
    with profiler.record_function(name), context:
        yield
