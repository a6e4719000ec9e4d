"""The rules by which the tuner chooses between schedules from measured times. Pure: numbers in, numbers out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

#: Calls of each candidate in its first trial, and in a later trial. The first call warms up and does not count (seed).
TRIAL_CALLS, PROBE_CALLS = 7, 3
#: Calls by differences before a call is timed (seed): of one tensor, so that every tensor of a step has had a call; of all tensors, where
#: tensors have no token; of all tensors, in any case.
SETTLE_CALLS = (2, 6, 4096)
#: Calls between the last timed call and the use of its time: where ranks have met at every timed call (seed: the times then arrive before
#: they are used), and where they have not (admission: a program in which a rank runs farther ahead than this could deadlock).
DELAY_CALLS = (4, 64)
#: The rounds of the first trial of an all-to-all, in calls of each candidate, and the calls from a round to its result (seed: a step has
#: few calls of a kind, and a candidate that is clearly slower shows in three calls).
EXCHANGE_ROUNDS, EXCHANGE_DELAY = (3, 4), 1
#: A candidate whose fastest call takes this many times the median call of the best candidate is not tried further in a trial (seed).
CLEARLY_SLOWER = 1.3
#: Calls of a stream of messages whose sizes each rank knows only of itself, from one agreement on their size to the next (seed: a step of
#: a model has as many calls of a kind as layers, and an agreement costs some 50 us).
SIZE_CALLS = 8
#: The size of such messages leaves its class when it is this many times out of the class (seed: sizes change a little in every call).
SIZE_MARGIN = 1.25
#: A timed call counts if its size is at most this many times smaller or larger than the nominal one (seed: the time of a message is not
#: proportional to its size).
SIZE_RATIO = 8
#: Calls between checks of a choice: for calls longer than CHECK_SECONDS, and for shorter calls (seed: a check costs about 0.2 ms).
CHECK_CALLS, CHECK_SECONDS = (32, 256), 2e-3
#: Calls that a check times, the last calls before the check (seed).
CHECKED_CALLS = 3
#: Checks before the other candidates are tried again: the first number at first, twice as many each time, up to the second number (seed).
REVIEW_CHECKS = (2, 32)
#: Another candidate must take less than this share of the current candidate's time (seed: above the noise of medians of three).
HYSTERESIS = 0.95
#: A time longer or shorter than the estimate by this factor starts a new trial at once (seed).
DRIFT = 1.3
#: Weight of a new measurement in an estimate (seed).
FOLLOW = 0.5
#: The measurement of the link is wrong if plain collectives take so many times longer or shorter than predicted (seed: the prediction of
#: gloo's own schedules is right within a half); bytes from which on the link decides on their time (seed).
LINK_ERROR, LINK_BYTES = 3.0, 4 << 20


def link_error(predicted: float, seconds: float, met: bool) -> float:
    """Return the factor by which the link is slower than it was measured, from the predicted and the agreed seconds of plain collectives; 1
    where they agree well enough. Ranks that have not met may have waited for each other, so that only a short time tells something."""
    factor = seconds / predicted
    wrong = 0 < factor < 1 / LINK_ERROR or (met and LINK_ERROR < factor < math.inf)
    return factor if wrong else 1.0


def size_class(nbytes: int) -> int:
    """Return the size class of a message of ``nbytes`` bytes, the exponent of a power of two. Messages of one class share a choice."""
    return nbytes.bit_length()


def followed_class(size: int, nbytes: int) -> int:
    """Return the size class of messages of about ``nbytes`` bytes after messages of class ``size``; 0 stands for no messages."""
    inside = size and (1 << size >> 1) / SIZE_MARGIN <= nbytes < (1 << size) * SIZE_MARGIN
    return size if inside else size_class(max(1, nbytes))


def size_text(size: int) -> str:
    """Return a size class in words."""
    return f"up to {(1 << size) / (1 << 20):.3g} MiB"


def remaining(estimates: Sequence[float], fastest: Mapping[int, float]) -> list[int]:
    """Return the candidates that are not clearly slower than the best one. ``estimates``: seconds of each candidate; ``fastest``: candidate
    -> seconds of its fastest call, of those that have been timed."""
    best = min(estimates)
    return [index for index in range(len(estimates)) if not fastest.get(index, 0.0) > CLEARLY_SLOWER * best]


def choose(current: int, estimates: Sequence[float]) -> int:
    """Return the candidate with the shortest estimate in seconds (inf where unknown) if it is clearly shorter than the estimate of
    ``current``. Otherwise, and if the estimate of ``current`` is unknown, return ``current``."""
    if math.isinf(estimates[current]):
        return current
    best = min(range(len(estimates)), key=estimates.__getitem__)
    return best if estimates[best] < HYSTERESIS * estimates[current] else current


def follow(estimate: float, seconds: float) -> float:
    """Return the estimate after another measurement, in seconds; inf stands for no measurement."""
    if math.isinf(seconds) or math.isinf(estimate):
        return min(estimate, seconds)
    return estimate + FOLLOW * (seconds - estimate)


def drifted(estimate: float, seconds: float) -> bool:
    """Return whether a measurement is so far from the estimate that the other candidates need another trial."""
    return math.isfinite(seconds) and not estimate / DRIFT < seconds < estimate * DRIFT


def check_calls(seconds: float) -> int:
    """Return the calls between two checks of a choice that takes ``seconds`` a call: the exchange of times must cost next to nothing."""
    return CHECK_CALLS[0] if seconds > CHECK_SECONDS else CHECK_CALLS[1]


def probed(current: int, estimates: Sequence[float], review: int) -> list[int]:
    """Return the candidates that review number ``review`` tries again. A candidate twice as slow is tried in every second review, a
    candidate four times as slow in every fourth, a slower one at most in every eighth."""
    rivals = [index for index in range(len(estimates)) if index != current]
    behind = {
        index: estimates[index] / estimates[current] if math.isfinite(estimates[current]) else 1.0 for index in rivals
    }
    rarity = {index: int(min(8.0, max(1.0, behind[index]))).bit_length() - 1 for index in rivals}
    return [index for index in rivals if review % (1 << rarity[index]) == 0]
