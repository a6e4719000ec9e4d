"""Agreement of all ranks on one section, through the rendezvous store: an absent rank costs an error, not a hang."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from ds_zipccl import __version__
from ds_zipccl.comm import topology
from ds_zipccl.comm.group_state import resolve_group
from ds_zipccl.config import ConfigError

#: Text of a rank without a section.
ABSENT = "absent"
#: A rank without a section waits this long at most (seed): its user did not ask for coding.
_COURTESY = timedelta(seconds=60)
#: Time for all ranks to read a disagreement before the rank that hosts the store leaves (seed).
_FAREWELL = timedelta(seconds=10)


def canonical(section: Mapping[str, Any] | None) -> str:
    """Return the text of a section, equal for equal sections; :data:`ABSENT` for None."""
    return ABSENT if section is None else json.dumps(section, sort_keys=True, default=repr)


def agree(text: str, timeout: timedelta, zero_stage: int | None = None) -> frozenset[int]:
    """Compare ``text`` with the texts of all ranks of the job, and return the ZeRO stages of all ranks' engines: roles follow from them. A
    collective; blocks until every rank has brought its text.

    A rank with :data:`ABSENT` stops waiting after a minute, without an error: the package may be installed on some machines only and used
    on none.

    Raises:
        ConfigError: ranks differ, or a rank brought no text within ``timeout``; the message names the ranks.
    """
    group = resolve_group(None)
    mine = text if text == ABSENT else _with_version(text)
    patience = min(timeout, _COURTESY) if text == ABSENT else timeout
    mine += "\n" if zero_stage is None else f"\n{zero_stage}"  # a section is one line
    brought, silent = topology.collect(
        group, mine, "sections", patience, lambda late: print(f"[ds_zipccl] waiting: {_missing(late)}", flush=True)
    )
    said = {rank: one.partition("\n")[0] for rank, one in brought.items()}
    if len(set(said.values())) > 1:
        topology.collect(group, "", "sections read", _FAREWELL)
        raise ConfigError(_difference(said))
    if silent and text != ABSENT:
        raise ConfigError(_missing(silent))
    return frozenset(int(stage) for one in brought.values() if (stage := one.partition("\n")[2]))


def _with_version(text: str) -> str:
    """Return ``text`` with the version of the package: ranks choose schedules by themselves, and only equal versions choose equally."""
    section = json.loads(text)
    if not isinstance(section, dict):  # no rank accepts it, once all have compared theirs
        section = {"section": section}
    return json.dumps({"version of ds_zipccl": __version__, **section}, sort_keys=True)


def _missing(silent: list[int]) -> str:
    return (
        f"ranks {silent} have not said which zipccl section they use. They may be late. Else make sure that ds_zipccl is installed there "
        "and not switched off by DS_ZIPCCL=0: all ranks need the same package and the same section"
    )


def _difference(said: dict[int, str]) -> str:
    """Return a message with the keys on which ranks differ, and the ranks that have each value."""
    sections = {rank: json.loads(text) for rank, text in said.items() if text != ABSENT}
    lines = ["the zipccl configuration differs between ranks:"]
    if len(sections) < len(said):
        lines.append(f"  no section at all: ranks {[rank for rank in said if rank not in sections]}")
    for key in sorted(set().union(*sections.values())):
        holders: dict[str, list[int]] = {}
        for rank, section in sections.items():
            value = json.dumps(section[key]) if key in section else "not set"
            holders.setdefault(value, []).append(rank)
        if len(holders) > 1:
            lines.append(f"  {key}: " + "; ".join(f"{value} on ranks {ranks}" for value, ranks in holders.items()))
    lines.append("give every rank the same package, the same section and the same DS_ZIPCCL")
    return "\n".join(lines)
