"""Counters as figures of a run, for DeepSpeed's monitors (TensorBoard, W&B, CSV) and for the logs of a trainer."""

from __future__ import annotations

from typing import Any

from ds_zipccl.telemetry import counters

_PREFIX = "Train/zipccl"


def figures(reader: str) -> dict[str, float]:
    """Return name -> value: the totals of this process, and the ratio and error of each role since the same ``reader`` last asked."""
    totals = counters.totals()
    values: dict[str, Any] = {**totals, "saved_bytes": totals["logical_bytes"] - totals["wire_bytes"]}
    if (seconds := counters.seconds_saved()) is not None:
        values["seconds_saved"] = seconds
    found = counters.since_last(reader)
    values |= {f"{role}/ratio": sent["ratio"] for role, sent in found["roles"].items()}
    values |= {f"{role}/error": error for role, error in found["errors"].items()}
    values |= {f"{role}/{name}": fact for role, facts in found["feedback"].items() for name, fact in facts.items()}
    return {name: float(value) for name, value in values.items()}


def events(samples: int) -> list[tuple[str, float, int]]:
    """Return (name, value, ``samples``) for each figure since the events before.

    Args:
        samples: training samples so far, the axis of DeepSpeed's plots.
    """
    return [(f"{_PREFIX}/{name}", value, samples) for name, value in figures("events").items()]
