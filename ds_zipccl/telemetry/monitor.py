"""Counters as events of DeepSpeed's monitor (TensorBoard, W&B, CSV)."""

from __future__ import annotations

from ds_zipccl.telemetry import counters

_PREFIX = "Train/zipccl"


def events(samples: int) -> list[tuple[str, float, int]]:
    """Return (name, value, ``samples``) for the totals of this process, and for each role's ratio and error since the events before.

    Args:
        samples: training samples so far, the axis of DeepSpeed's plots.
    """
    totals = counters.totals()
    values: dict[str, float] = {
        "logical_bytes": totals["logical_bytes"],
        "wire_bytes": totals["wire_bytes"],
        "ratio": totals["ratio"],
        "staging_bytes": totals["staging_bytes"],
    }
    if saved := [seconds for clock, (seconds, *_) in counters.saved().items() if clock]:
        values["seconds_saved"] = sum(saved)
    found = counters.since_last("events")
    for role, sent in found["roles"].items():
        values[f"{role}/ratio"] = sent["ratio"]
    for role, error in found["errors"].items():
        values[f"{role}/error"] = error
    for role, facts in found["feedback"].items():
        values |= {f"{role}/{name}": fact for name, fact in facts.items()}
    return [(f"{_PREFIX}/{name}", float(value), samples) for name, value in values.items()]
