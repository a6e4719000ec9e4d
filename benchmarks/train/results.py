"""Rows and verdict of one configuration of ``bench train``, from the results of its runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from ds_zipccl.benchmarks.comm import variants
from ds_zipccl.benchmarks.train import volume
from ds_zipccl.benchmarks.train.trial import Results, Training
from ds_zipccl.tools.step_logs import EXPERTS

#: Suffix of the keys of hashes in a result.
HASH = "_sha256"
_HASHED = {"params_sha256": "parameters", "adapters_sha256": "adapters", "merged_sha256": "merged weights"}
#: DeepSpeed's ZeRO++, a variant beyond :data:`variants.VARIANTS`. It is lossy: its bits are not compared.
ZEROPP = "zeropp"

Runs = Mapping[str, list[Results]]  # variant -> its runs, plain first


def rows(training: Training, runs: Runs, skip: int) -> list[dict[str, Any]]:
    """Return a row per variant with the columns of ``bench train --help``; times exclude the first ``skip`` steps."""

    def median(key: str, variant: str) -> float:
        return float(statistics.median(ms for result in runs[variant] for ms in result[key][skip:]))

    def ratio_of(variant: str, to: str) -> float | None:
        """Return ``quiet_ms`` of a variant / ``quiet_ms`` of variant ``to``."""
        mine, other = quiet[variant], quiet.get(to)
        return mine / other if mine and other else None

    def sent(variant: str, key: str) -> int | None:
        counted = runs[variant][0]["sent"]
        return round(counted[key] + counted["passed_bytes"]) if counted else None

    volumes = {variant: _volume(training, results[0]) for variant, results in runs.items()}
    ours = [variant for variant in runs if variant not in ("plain", ZEROPP)]
    plain_m = next((volumes[variant]["plain_m"] for variant in ours if volumes[variant]), None)
    logical = next((sent(variant, "logical_bytes") for variant in ours), None)
    plain_gathers = next((volume.gathered(runs[variant][0]["steps"] or ())[0] for variant in ours), 0)

    def gather_ratio(variant: str) -> float | None:
        wire = volume.gathered(runs[variant][0]["steps"] or ())[1]
        return 1.0 if variant == "plain" else plain_gathers / wire if wire and plain_gathers else None

    exchanges = {variant: _exchanges(results, skip) for variant, results in runs.items()}
    quiet = {variant: _quiet_ms(steps) if steps else None for variant, steps in exchanges.items()}
    found = []
    for variant, results in runs.items():
        step_ms, comm_ms = median("step_ms", variant), median("comm_ms", variant)
        loss = float.fromhex(results[0]["losses"][-1])
        row = {
            **training.place,
            "variant": variant,
            "step_ms": step_ms,
            "comm_ms": comm_ms,
            "exchange_ms": statistics.median(map(sum, steps)) if (steps := exchanges[variant]) else None,
            "quiet_ms": quiet[variant],
            "of_plain": ratio_of(variant, "plain"),
            "of_coded": ratio_of(variant, "coded"),
            "logical_bytes": logical if variant in ("plain", ZEROPP) else sent(variant, "logical_bytes"),
            "wire_bytes": logical if variant == "plain" else sent(variant, "wire_bytes"),
            "gather_ratio": gather_ratio(variant),
            "step_m": _mean(plain_m if variant == "plain" else volumes[variant].get("sent_m")),
            "loss_last": loss if math.isfinite(loss) else None,
            "params_sha256": results[0]["params_sha256"],
            "speedup": median("step_ms", "plain") / step_ms,
            "comm_speedup": median("comm_ms", "plain") / comm_ms,
        }
        if results[0].get("stage_ms"):
            row |= {f"{part}_ms": ms for part, ms in _parts_ms(results, "stage_ms", skip).items()}
        if results[0].get("role_ms"):
            row["role_ms"] = _parts_ms(results, "role_ms", skip)
            row["ep_ms"] = row["role_ms"].get(EXPERTS)
        if training.backend.streams:
            waits = (results[0]["sent"] or {}).get("host_waits", 0)
            row |= {"backend": training.backend.name, "host_waits": waits / training.steps}
        if training.backend.nodes:
            row["between_mb"] = (
                None if results[0]["between"] is None or variant == "plain" else results[0]["between"] / 1e6
            )
        found.append(row)
    return found


def _exchanges(results: list[Results], skip: int) -> list[list[float]] | None:
    """Return the times of the calls of each step of all runs; None if a run has no times."""
    if not all(result.get("exchange_ms") for result in results):
        return None
    return [calls for result in results for calls in result["exchange_ms"][skip:]]


def _quiet_ms(steps: list[list[float]]) -> float | None:
    """Return the sum of each call's shortest time of all steps; None if steps differ in their number of calls."""
    return sum(map(min, zip(*steps, strict=True))) if len(set(map(len, steps))) == 1 else None


def _parts_ms(results: list[Results], key: str, skip: int) -> dict[str, float]:
    """Return the medians, over the steps of all runs, of the times in ``key``, by role or pipeline part."""
    steps = [step for result in results for step in result[key][skip:]]
    parts = sorted({part for step in steps for part in step})
    return {part: float(statistics.median(step.get(part, 0.0) for step in steps)) for part in parts}


def _volume(training: Training, result: Results) -> dict[str, list[float]]:
    """Return the series of :mod:`volume` of a run; {} without a step log."""
    unit = volume.unit_bytes(result["parameters"], training.ranks)
    return volume.series(result["steps"], unit) if result["steps"] else {}


def _mean(values: list[float] | None) -> float | None:
    return statistics.fmean(values) if values else None


def judge(training: Training, runs: Runs, lossy: bool = False) -> dict[str, Any]:
    """Return the verdict: ratio over compressed calls, sizes of the model and its trained part, further hashes, figures
    of each variant, deviations of lossy losses, and problems.

    ``lossy``: the settings of all runs except plain change values. These runs are then compared with each other,
    because rounding depends neither on the schedule nor on frames. Lossy variants are compared with themselves.
    """
    ours = next((variant for variant in runs if variant not in ("plain", ZEROPP)), "")
    changed = [variant for variant in runs if variant != ZEROPP and variants.find(variant).changes]
    plain = runs["plain"][0]
    counted = {variant: results[0]["sent"] for variant, results in runs.items()}
    return {
        "ratio_coded": {
            variant: sent["logical_bytes"] / sent["wire_bytes"]
            for variant, sent in counted.items()
            if variant != ZEROPP and variants.find(variant).compressed and sent and sent["coded_calls"]
        },
        "parameters": plain["parameters"],
        "trained": plain["trained"],
        "hashes": {key: plain[key] for key in plain if key.endswith(HASH) and key != "params_sha256"},
        "sent": counted,
        "step_ms": {variant: [round(ms, 1) for ms in results[0]["step_ms"]] for variant, results in runs.items()},
        "volume": {variant: _volume(training, results[0]) for variant, results in runs.items() if results[0]["steps"]},
        "experts": {variant: volume.experts(results[0]["steps"] or ()) for variant, results in runs.items()},
        "deviation": deviation(runs, ZEROPP),
        "lossy": deviation(runs, ours) if lossy else {},
        "changed": {variant: deviation(runs, variant) for variant in changed},
        "problems": problems(
            {variant: runs[variant] for variant in runs if variant != ZEROPP}, training.same_sums and not lossy
        ),
    }


def deviation(runs: Runs, variant: str) -> dict[str, float | None]:
    """Return the largest and the last difference between the losses of a variant and the plain losses; None if not
    finite, {} without the variant."""
    if variant not in runs:
        return {}
    pairs = zip(runs[variant][0]["losses"], runs["plain"][0]["losses"], strict=True)
    differences = [abs(float.fromhex(lossy) - float.fromhex(loss)) for lossy, loss in pairs]
    found = {"largest": max(differences), "last": differences[-1]}
    return {key: value if all(map(math.isfinite, differences)) else None for key, value in found.items()}


def problems(runs: Runs, same_sums: bool = True) -> list[str]:
    """Return the problems of the runs of one configuration.

    Args:
        same_sums: whether all runs must have the bits of the first plain run. Otherwise plain runs are compared with
            the first plain run, further runs with the first of these. Lossy variants are compared with themselves.
    """
    found = []
    known = {name: variants.find(name) for name in runs}
    like_ours = (name for name, one in known.items() if one.settings is not None and not one.changes)
    ours = "plain" if same_sums else next(like_ours, "plain")
    for variant, result in ((variant, result) for variant, results in runs.items() for result in results):
        kind = known[variant]
        against = variant if kind.changes or kind.settings is None else ours
        first = runs[against][0]
        differing = [step for step, pair in enumerate(zip(result["losses"], first["losses"]), 1) if len(set(pair)) > 1]
        hashes = [key for key in first if key.endswith(HASH)]
        calls = result["sent"]["coded_calls"] if result["sent"] else 0
        checks: dict[str, Any] = {
            f"losses differ from the first {against} run's at steps {differing}": differing,
            **{
                f"{_HASHED.get(key, key)} differ from the first {against} run's": result[key] != first[key]
                for key in hashes
            },
            "ranks ended with different parameters": not result["replicas_equal"],
            "a loss is not finite": not all(math.isfinite(float.fromhex(loss)) for loss in result["losses"]),
            "nothing was coded: is ds_zipccl installed with its entry point?": kind.always and not calls,
            f"{calls:.0f} calls were coded": kind.settings is None and calls,
        }
        found += [f"{variant} run: {problem}" for problem, wrong in checks.items() if wrong]
    return found
