"""All ranks run one configuration. Agreed through the rendezvous store, so that a rank that stays away costs an error, not a hang."""

from __future__ import annotations

import itertools
import json
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ds_zipccl.config import ConfigError

ABSENT = "absent"
_PREFIX = "ds_zipccl/config"
_PATIENCE = timedelta(seconds=30)  # between two messages about ranks that are missing
_rounds = itertools.count()
_last_round: int | None = None


def canonical(section: dict[str, Any] | None) -> str:
    """A section as text that is equal for equal sections; None means there is none."""
    return ABSENT if section is None else json.dumps(section, sort_keys=True, default=repr)


def agree(text: str, timeout: timedelta) -> None:
    """Compare ``text`` with what the other ranks of the world say; blocks until all have said something.

    A rank that says :data:`ABSENT` does not wait: whoever merely has the package installed owes nobody anything. It learns of a
    difference from :func:`verdict` when the others have given up.

    Raises:
        ConfigError: ranks differ, or some rank said nothing within ``timeout``; the message names them.
    """
    global _last_round
    _last_round = next(_rounds)
    ranks, me = dist.get_world_size(), dist.get_rank()
    store = _get_default_store()
    keys = [f"{_PREFIX}/{_last_round}/{rank}" for rank in range(ranks)]
    store.set(keys[me], text)
    if text == ABSENT:
        return
    _wait(store, keys, timeout)
    said = [store.get(key).decode(errors="replace") for key in keys]
    if len(set(said)) > 1:
        message = _difference(said)
        store.set(f"{_PREFIX}/{_last_round}/verdict", message)
        raise ConfigError(message)


def _wait(store: dist.Store, keys: list[str], timeout: timedelta) -> None:
    """Wait for the keys of all ranks, saying now and then which are missing."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            return store.wait(keys, min(_PATIENCE, timeout))
        except RuntimeError:  # torch's DistStoreError is one
            silent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        hint = (
            f"ranks {silent} have not said which zipccl section they use; they may be late. If not: is ds_zipccl installed there, "
            "and not switched off by DS_ZIPCCL=0? All ranks need the same package and the same section"
        )
        if time.monotonic() >= deadline:
            raise ConfigError(hint)
        print(f"[ds_zipccl] waiting: {hint}", flush=True)


def verdict() -> str | None:
    """What the other ranks found wrong in the last round, if anything; does not wait."""
    key = f"{_PREFIX}/{_last_round}/verdict"
    try:
        store = _get_default_store()
        return store.get(key).decode() if store.check([key]) else None
    except (RuntimeError, ValueError):  # no store any more: nothing to add to the caller's own error
        return None


def _difference(said: list[str]) -> str:
    """Names the keys on which ranks differ, with the ranks that hold each value."""
    sections = [{} if text == ABSENT else json.loads(text) for text in said]
    lines = ["the zipccl configuration differs between ranks:"]
    if ABSENT in said:
        lines.append(f"  no section at all: ranks {[rank for rank, text in enumerate(said) if text == ABSENT]}")
    for key in sorted(set().union(*sections)):
        holders: dict[str, list[int]] = {}
        for rank, section in enumerate(sections):
            if said[rank] != ABSENT:
                value = json.dumps(section[key]) if key in section else "not set"
                holders.setdefault(value, []).append(rank)
        if len(holders) > 1:
            lines.append(f"  {key}: " + "; ".join(f"{value} on ranks {ranks}" for value, ranks in holders.items()))
    lines.append("give every rank the same ds_config and the same DS_ZIPCCL")
    return "\n".join(lines)
