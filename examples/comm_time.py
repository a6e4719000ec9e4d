"""How long a program stands still for communication: a stopwatch around DeepSpeed's collectives (train_gpt.py --comm-time)."""

from __future__ import annotations

import functools
import inspect
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

#: What DeepSpeed's communication backend offers, as far as it moves data or waits for other ranks.
CALLS = (
    "all_gather all_gather_base all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce "
    "all_reduce_coalesced inference_all_reduce reduce reduce_scatter reduce_scatter_tensor all_to_all all_to_all_single "
    "broadcast broadcast_object_list gather scatter send recv isend irecv barrier monitored_barrier"
).split()
#: Role of calls without another one, and of all calls where ds_zipccl, which names roles, is not installed.
OTHER = "other"


class CommTime:
    """A stopwatch that runs while the program is inside a collective's call, or inside ``wait()`` of its handle.

    What an asynchronous operation does meanwhile is not counted: the program computes. On a GPU both return before the
    operation is done, and what is counted is the host's time.
    """

    def __init__(self) -> None:
        self._ms: Counter[str] = Counter()  # by role
        self._calls: list[float] = []  # ms of each call and of each wait, in their order
        self._running = False
        self._role_of: Callable[[str, Any], str] = lambda name, group: OTHER

    @property
    def ms(self) -> float:
        """Milliseconds so far, of all roles."""
        return sum(self._ms.values())

    def times(self, before: Mapping[str, float] | None = None) -> dict[str, float]:
        """Milliseconds so far by role, without those of an earlier answer."""
        return {role: ms - (before or {}).get(role, 0.0) for role, ms in sorted(self._ms.items())}

    def calls(self) -> list[float]:
        """Milliseconds of each call, and of each ``wait()``, since the last time that this was asked."""
        calls, self._calls = self._calls, []
        return calls

    def watch(self, backend: Any) -> None:
        """Count every collective that is called on ``backend``, ``deepspeed.comm.comm.cdb``, from now on."""
        for name in CALLS:
            if hasattr(backend, name):
                setattr(backend, name, self.timed(getattr(backend, name), name))

    def learn(self, engine: Any) -> None:
        """Name the roles of calls as ds_zipccl does, whether it codes them or not."""
        try:
            from ds_zipccl.integration.job import Job
        except ImportError:
            return
        job = Job(zero_stages=frozenset({engine.zero_optimization_stage()}))
        job.learn_groups(engine.module)
        self._role_of = job.role_of

    def timed(self, call: Callable[..., Any], name: str = "", role: str = "") -> Callable[..., Any]:
        """``call``, counted for ``role``, or for that of the collective ``name``; its handle, if it returns one, too."""
        signature = inspect.signature(call) if name else None

        @functools.wraps(call)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._running:  # a collective that is made of others counts once
                return call(*args, **kwargs)
            mine = role
            if signature is not None:
                mine = self._role_of(name, signature.bind_partial(*args, **kwargs).arguments.get("group"))
            self._running, started = True, time.perf_counter()
            try:
                result = call(*args, **kwargs)
            finally:
                self._running = False
                self._calls.append(1000 * (time.perf_counter() - started))
                self._ms[mine or OTHER] += self._calls[-1]
            return TimedHandle(result, self, mine) if hasattr(result, "wait") else result

        return counted


def exchanging(ranks: list[list[list[float]]]) -> list[list[float]] | None:
    """Milliseconds of each call of each step without the waiting for ranks that come later: the shortest time of all ranks, which is
    that of the rank that came last. None where ranks made different calls.

    Args:
        ranks: of each rank, of each step, the times of its calls.
    """
    steps = list(zip(*ranks, strict=True))
    if any(len(set(map(len, calls))) > 1 for calls in steps):
        return None
    return [[min(times) for times in zip(*calls, strict=True)] for calls in steps]


class StageTime:
    """A stopwatch for a stage of DeepSpeed's PipelineEngine: :attr:`ms` since :meth:`clear`, in milliseconds. Nothing with other engines.

    ``epilogue``: from the end of the stage's last forward pass of a step to its optimizer step. ``reductions``: in sums of gradients, of
    tied weights and over the ranks that share the stage.
    """

    def __init__(self, engine: Any) -> None:
        self.ms: dict[str, float] = {}
        self._forward_ended = 0.0
        steps = getattr(engine, "_INSTRUCTION_MAP", None)
        if steps is None:
            return
        from deepspeed.runtime.pipe import schedule

        wrappers = {
            schedule.ForwardPass: self._forward,
            schedule.OptimizerStep: self._step,
            schedule.ReduceTiedGrads: self._reduction,
            schedule.ReduceGrads: self._reduction,
        }
        own = {kind: functools.partial(wrap, steps[kind]) for kind, wrap in wrappers.items()}
        engine._INSTRUCTION_MAP = {**steps, **own}  # of this engine, before that of its class

    def clear(self) -> dict[str, float]:
        """The times so far; begin again."""
        ms, self.ms = self.ms, {}
        return ms

    def _forward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        call(*args, **kwargs)
        self._forward_ended = time.perf_counter()

    def _step(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.ms["epilogue"] = 1000 * (time.perf_counter() - self._forward_ended)
        call(*args, **kwargs)

    def _reduction(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        started = time.perf_counter()
        call(*args, **kwargs)
        self.ms["reductions"] = self.ms.get("reductions", 0.0) + 1000 * (time.perf_counter() - started)


class TimedHandle:
    """A collective's handle with a counted ``wait()``."""

    def __init__(self, handle: Any, clock: CommTime, role: str = OTHER) -> None:
        self._handle, self._wait = handle, clock.timed(handle.wait, role=role)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        return self._wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)
