"""The time of a whole step: computing, and the communication that computing does not hide. Numbers in, numbers out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

#: Floating point operations for a parameter and a token: 2 forward, 4 backward, and 2 where activations are computed again.
FLOPS = 8.0


@dataclass(frozen=True)
class Computing:
    """The computing of one GPU.

    ``tflops``: 1e12 operations a second that the GPU reaches while it computes. ``tokens``: those of one GPU in a micro-batch. ``flops``:
    operations for a parameter and a token. ``overlap``: share of the computing, 0 to 1, during which communication goes on.

    Raises:
        ValueError: a number is outside its range.
    """

    tflops: float
    tokens: float
    flops: float = FLOPS
    overlap: float = 0.0

    def __post_init__(self) -> None:
        above = {name: getattr(self, name) for name in ("tflops", "tokens", "flops")}
        if not all(0 < value < math.inf for value in above.values()) or not 0 <= self.overlap <= 1:
            raise ValueError(
                f"wanted are tflops, tokens and flops above 0 and finite, and overlap from 0 to 1; got {above}, overlap {self.overlap}"
            )

    def operations(self, params: float, micro: int) -> float:
        """Return the operations of one GPU in a step of ``micro`` micro-batches."""
        return self.flops * params * self.tokens * micro

    def seconds(self, params: float, micro: int) -> float:
        """Return the seconds that one GPU computes in a step of ``micro`` micro-batches."""
        return self.operations(params, micro) / (1e12 * self.tflops)


class StepTime(NamedTuple):
    """Seconds of a step, which add up: ``computing``; ``delayed``, by which the codec slows computing down; ``exposed`` communication."""

    computing: float
    delayed: float
    exposed: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self)

    @property
    def share(self) -> float:
        """The share of the step in which GPUs only communicate."""
        return self.exposed / self.total


def step_time(computing: float, communication: float, coding: float, overlap: float) -> StepTime:
    """Return the time of a step.

    Args:
        computing: seconds.
        communication: seconds of all operations, one after the other; coding that the wire does not hide is part of them.
        coding: seconds that the kernels of the codec take of a GPU.
        overlap: share of the computing during which communication goes on.

    Communication is hidden up to ``overlap`` of the computing. Coding that runs during hidden communication takes its time from computing,
    because both want the same multiprocessors.
    """
    hidden = min(communication, overlap * computing)
    delayed = coding * hidden / communication if communication else 0.0
    return StepTime(computing, delayed, communication - hidden)


def behind(network: float, path: float) -> float:
    """Return the bytes a second of a node whose bytes pass ``network``, then ``path`` between the network cards and the GPUs, and not both
    at once. An infinite ``path`` costs nothing."""
    return 1 / (1 / network + 1 / path)
