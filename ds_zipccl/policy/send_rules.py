"""The rules for sends in mode auto: which ones are messages of ours, and whether these are coded. Pure: numbers in, numbers out."""

from __future__ import annotations

import torch

from ds_zipccl.policy import wire
from ds_zipccl.policy.cost_model import LinkProfile, typical_ratio

#: Sends of each way whose times count (seed: their median bears three disturbed ones), and sends between two further trials.
TRIAL_SENDS, SENDS_BETWEEN_TRIALS = 7, 64
#: A send is worth a trial if its predicted time is below this share of the plain send's (seed: our message, where it falls back to
#: raw, costs an announcement and a wait for it).
WORTH_BELOW = 0.85
#: The other way is taken if its time is below this share of the time of the chosen one (seed: noise must not move the choice).
SWITCH_BELOW = 0.95


def next_trial(coded: int, raw: int, call: int) -> bool | None:
    """Return whether the trial that send number ``call`` is goes raw; None where it is no trial. ``coded``, ``raw``: trials so far.

    Both ways take turns, first one way first and then the other, so that a slow change of the link meets both alike.
    """
    trials = coded + raw
    if trials >= 2 * TRIAL_SENDS and call % SENDS_BETWEEN_TRIALS:
        return None
    if coded != raw:
        return coded > raw
    return trials // 2 % 2 == 1


def raw_is_faster(coded: float, raw: float, chosen: bool | None) -> bool:
    """Return the way from now on, True for raw. Seconds of each way; ``chosen``: the way so far, None without a choice."""
    if chosen is None:
        return raw < coded
    return not coded < SWITCH_BELOW * raw if chosen else raw < SWITCH_BELOW * coded


def worth_a_trial(nbytes: int, dtype: torch.dtype, profile: LinkProfile, staging: int) -> bool:
    """Return whether a send of ``nbytes`` goes as a message of ours, which can fall back to raw. ``staging``: bytes of memory for
    frames. Equal on both sides.

    Raw, our message never beats a plain send. So the plain send is left where the model sees no clear gain.
    """
    return seconds(nbytes, dtype, profile, staging) < WORTH_BELOW * profile.send_seconds(nbytes)


def seconds(nbytes: int, dtype: torch.dtype, profile: LinkProfile, staging: int) -> float:
    """Return the predicted seconds of a send in coded frames; of a dtype that is not coded, of one that the receiver knows already.

    Nothing hides compressing the first fragment and decompressing the last one. The announcement of several fragments takes as long as the
    smallest message.
    """
    ratio = typical_ratio(dtype)
    if ratio == 1.0:
        return 2 * nbytes / profile.copy + profile.send_seconds(0)
    size = dtype.itemsize
    piece = min(nbytes, size * wire.fragment_numel(nbytes // size, size, 2, staging))
    announced = profile.send_seconds(0) if piece < nbytes else 0.0
    rest = max(profile.send_seconds(nbytes / ratio), (nbytes - piece) / min(profile.encode, profile.decode))
    return announced + piece / profile.encode + rest + piece / profile.decode
