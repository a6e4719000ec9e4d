"""Rows and verdict of one configuration of ``bench train``, from the results of its runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from ds_zipccl.bench.train_trial import Results, Training
from ds_zipccl.bench.variants import VARIANTS

Runs = Mapping[str, list[Results]]  # variant -> its runs, plain first


def rows(training: Training, runs: Runs, skip: int) -> list[dict[str, Any]]:
    """One row for each variant, columns as in ``bench train --help``; the times leave out the first ``skip`` steps."""

    def median(key: str, variant: str) -> float:
        return float(statistics.median(ms for result in runs[variant] for ms in result[key][skip:]))

    def sent(variant: str, key: str) -> int | None:
        counted = runs[variant][0]["sent"]
        return round(counted[key] + counted["passed_bytes"]) if counted else None

    logical = next((sent(variant, "logical_bytes") for variant in runs if variant != "plain"), None)
    found = []
    for variant, results in runs.items():
        step_ms, comm_ms = median("step_ms", variant), median("comm_ms", variant)
        loss = float.fromhex(results[0]["losses"][-1])
        row = {
            **training.place,
            "variant": variant,
            "step_ms": step_ms,
            "comm_ms": comm_ms,
            "logical_bytes": logical if variant == "plain" else sent(variant, "logical_bytes"),
            "wire_bytes": logical if variant == "plain" else sent(variant, "wire_bytes"),
            "loss_last": loss if math.isfinite(loss) else None,
            "params_sha256": results[0]["params_sha256"],
            "speedup": median("step_ms", "plain") / step_ms,
            "comm_speedup": median("comm_ms", "plain") / comm_ms,
        }
        if training.backend.streams:
            waits = (results[0]["sent"] or {}).get("host_waits", 0)
            row |= {"backend": training.backend.name, "host_waits": waits / training.steps}
        found.append(row)
    return found


def verdict(runs: Runs, same_sums: bool = True) -> dict[str, Any]:
    """Ratio over compressed calls alone, size of the model, counters of every variant, and the problems; ``same_sums`` as in
    :func:`problems`."""
    counted = {variant: results[0]["sent"] for variant, results in runs.items()}
    return {
        "ratio_coded": {
            variant: sent["logical_bytes"] / sent["wire_bytes"]
            for variant, sent in counted.items()
            if VARIANTS[variant].compressed and sent and sent["coded_calls"]
        },
        "parameters": runs["plain"][0]["parameters"],
        "sent": counted,
        "problems": problems(runs, same_sums),
    }


def problems(runs: Runs, same_sums: bool = True) -> list[str]:
    """Everything wrong with the runs of one configuration; empty if nothing is.

    Args:
        same_sums: whether the order of our sums is that of the plain ones. Otherwise our runs are compared with the first of ours, and
            plain runs with the first plain one.
    """
    found = []
    ours = next((name for name in runs if not same_sums and VARIANTS[name].settings is not None), "plain")
    for variant, result in ((variant, result) for variant, results in runs.items() for result in results):
        against = "plain" if VARIANTS[variant].settings is None else ours
        first = runs[against][0]
        differing = [step for step, pair in enumerate(zip(result["losses"], first["losses"]), 1) if len(set(pair)) > 1]
        calls = result["sent"]["coded_calls"] if result["sent"] else 0
        checks = {
            f"losses differ from the first {against} run's at steps {differing}": differing,
            f"parameters differ from the first {against} run's": result["params_sha256"] != first["params_sha256"],
            "ranks ended with different parameters": not result["replicas_equal"],
            "a loss is not finite": not all(math.isfinite(float.fromhex(loss)) for loss in result["losses"]),
            "nothing was coded: is ds_zipccl installed with its entry point?": VARIANTS[variant].always and not calls,
            f"{calls:.0f} calls were coded": VARIANTS[variant].settings is None and calls,
        }
        found += [f"{variant} run: {problem}" for problem, wrong in checks.items() if wrong]
    return found
