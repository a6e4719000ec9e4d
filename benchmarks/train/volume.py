"""Bytes of a training step in units of the model. M = 2 bytes x elements x (n - 1) / n is the bytes per rank of one
gather of all 16-bit parameters over n ranks. Plain ZeRO-3 sends 3 M per micro-batch: parameters for the forward and for
the backward pass, and gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ds_zipccl.telemetry import counters
from ds_zipccl.tools.step_logs import EXPERTS, Step

#: First step that counts. The gathers of step 1 have no base, and its log line includes the traffic before training.
SECOND = 2
GATHERS, GRADIENTS = "zero_param", "zero_grad"


def unit_bytes(elements: int, ranks: int) -> float:
    """Return M in bytes for a model of ``elements`` 16-bit parameters."""
    return 2 * elements * (ranks - 1) / ranks


def gathered(steps: Sequence[Step]) -> tuple[int, int]:
    """Return logical and sent bytes of the gathers of parameters from the second step on."""
    counts = [step.sent[GATHERS] for step in steps if step.step >= SECOND and GATHERS in step.sent]
    return (
        sum(logical + passed for logical, _, passed in counts),
        sum(wire + passed for _, wire, passed in counts),
    )


def series(steps: Sequence[Step], unit: float) -> dict[str, list[float]]:
    """Return values per step from the second step on. In units of ``unit``: ``plain_m`` (logical bytes of all roles),
    ``sent_m`` (sent bytes), ``gather_m`` and ``grad_m`` (parts of these). ``lr``: rate of the first parameter group."""
    later = [step for step in steps if step.step >= SECOND]

    def sent(step: Step, *roles: str) -> float:
        return sum(wire + passed for role, (_, wire, passed) in step.sent.items() if role in roles) / unit

    return {
        "lr": [step.rates[0] if step.rates else 0.0 for step in later],
        "plain_m": [
            round(sum(logical + passed for logical, _, passed in step.sent.values()) / unit, 5) for step in later
        ],
        "sent_m": [round(sent(step, *step.sent), 5) for step in later],
        "gather_m": [round(sent(step, GATHERS), 5) for step in later],
        "grad_m": [round(sent(step, GRADIENTS), 5) for step in later],
    }


def experts(steps: Sequence[Step]) -> dict[str, Any]:
    """Return figures of the exchanges of experts from the second step on: ``share`` of the logical bytes of all roles,
    and ``ratios`` of all exchanges ("ep") and by kind; {} without exchanges."""
    sums: dict[str, list[int]] = {}
    for step in steps:
        for part, counts in step.parts().items() if step.step >= SECOND else ():
            sums[part] = [total + one for total, one in zip(sums.get(part, (0, 0, 0)), counts, strict=True)]
    if EXPERTS not in sums:
        return {}
    roles = {role for step in steps for role in step.sent}
    logical = {part: counted + passed for part, (counted, _, passed) in sums.items()}
    return {
        "share": logical[EXPERTS] / max(1, sum(logical.get(role, 0) for role in roles)),
        "ratios": {
            part: counters.ratio(*counts) for part, counts in sorted(sums.items()) if part.split()[0] == EXPERTS
        },
    }
