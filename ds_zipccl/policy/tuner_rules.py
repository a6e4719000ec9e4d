"""How the tuner chooses between schedules by their measured times. Pure: numbers in, numbers out."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ds_zipccl.policy.admission import Message

#: Calls of each candidate in its first trial and in a later one; the first of them warms up and does not count (seed).
TRIAL_CALLS, PROBE_CALLS = 7, 3
#: Calls that differences take before they are timed: of one tensor, so that all others of a step have had theirs; of all, where tensors are
#: not told apart; of all in any case (seed).
SETTLE_CALLS = (2, 6, 4096)
#: Calls between sending measurements and using them: where ranks have met at every timed call, so that all have come as far, and
#: where they have not (admission: a program that lets a rank run farther ahead than this could wait for itself).
DELAY_CALLS = (4, 64)
#: Messages that have no size in common count as if they were of this power of two of bytes (seed).
ANY_SIZE = 20
#: Calls between checks of a choice whose calls take more than CHECK_SECONDS, and of the others (seed: a check costs about 0.2 ms).
CHECK_CALLS, CHECK_SECONDS = (32, 256), 2e-3
#: Calls of the current choice that a check looks at, the last ones (seed).
CHECKED_CALLS = 3
#: Checks until the other candidates are tried again; doubles each time up to the second number (seed).
REVIEW_CHECKS = (2, 32)
#: Another candidate must take less than this share of the current one's time (seed: above the noise of medians of three).
HYSTERESIS = 0.95
#: A time this many times longer or shorter than the estimate starts a new trial at once (seed).
DRIFT = 1.3
#: Weight of a new measurement in an estimate (seed).
FOLLOW = 0.5


def size_class(message: Message) -> int:
    """Messages of one class share a choice: a power of two of bytes; 0 where ranks may see different sizes."""
    return 0 if message.nbytes is None else message.nbytes.bit_length()


def size_text(size: int) -> str:
    """A size class in words."""
    return f"up to {(1 << size) / (1 << 20):.3g} MiB" if size else "any size"


def choose(current: int, estimates: Sequence[float]) -> int:
    """The candidate with the shortest time in seconds (inf where unknown); ``current`` unless another is clearly shorter, or where its own
    time could not be told."""
    if math.isinf(estimates[current]):
        return current
    best = min(range(len(estimates)), key=estimates.__getitem__)
    return best if estimates[best] < HYSTERESIS * estimates[current] else current


def follow(estimate: float, seconds: float) -> float:
    """The estimate after another measurement; inf stands for none."""
    if math.isinf(seconds) or math.isinf(estimate):
        return min(estimate, seconds)
    return estimate + FOLLOW * (seconds - estimate)


def drifted(estimate: float, seconds: float) -> bool:
    """Whether a measurement is so far from the estimate that the other candidates deserve another trial."""
    return math.isfinite(seconds) and not estimate / DRIFT < seconds < estimate * DRIFT


def check_calls(seconds: float) -> int:
    """Calls between two checks of a choice that takes so many seconds a call: what ranks tell each other must cost next to nothing."""
    return CHECK_CALLS[0] if seconds > CHECK_SECONDS else CHECK_CALLS[1]


def probed(current: int, estimates: Sequence[float], review: int) -> list[int]:
    """The candidates that review number ``review`` tries again: one twice as slow every second time, and so on."""
    others = [index for index in range(len(estimates)) if index != current]
    behind = {
        index: estimates[index] / estimates[current] if math.isfinite(estimates[current]) else 1.0 for index in others
    }
    rarity = {index: int(min(8.0, max(1.0, behind[index]))).bit_length() - 1 for index in others}
    return [index for index in others if review % (1 << rarity[index]) == 0]
