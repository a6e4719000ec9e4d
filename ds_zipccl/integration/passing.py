"""Calls that always pass, on groups in stream order on which nothing gains: told apart and counted in about a microsecond.

The way of a call to its decision takes some 20 us. Where nothing is ever coded, a step of 200 calls must not pay that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl.comm.device import choice
from ds_zipccl.comm.group_state import group_size
from ds_zipccl.integration import moe_calls
from ds_zipccl.ops import OPS
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.telemetry import counters

#: Operations -> bytes that a rank sends, in parts of its output, by the number of ranks.
SENT = {
    "all_gather_into_tensor": lambda ranks: (ranks - 1) / ranks,
    "all_to_all_single": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter_tensor": lambda ranks: ranks - 1.0,
}


class _Tally:
    """Calls of one operation and group that passed for ``reason``, and the bytes of their outputs, not counted yet; no reason: calls go the
    usual way. ``share``: bytes sent over bytes of the output."""

    __slots__ = ("calls", "nbytes", "reason", "role", "share")

    def __init__(self, role: str, share: float, reason: PassReason | None) -> None:
        self.role, self.share, self.reason = role, share, reason
        self.calls = self.nbytes = 0


class Passing:
    """The calls of a job on tensors of one device type that always pass. Calls of two threads at once may lose counts.

    ``role_of(name, group)``: the role of an operation.
    """

    def __init__(self, role_of: Callable[[str, dist.ProcessGroup | None], str], device: str) -> None:
        self._role_of, self._device = role_of, device
        self._tallies: dict[tuple[str, dist.ProcessGroup | None, str], _Tally] = {}
        self._places = {name: (OPS[name].parameters[0], OPS[name].parameters.index("group")) for name in SENT}
        counters.count_later(self.count)

    def takes(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call of an operation in :data:`SENT` passes for good; such a call is tallied."""
        first, place = self._places[name]
        output = args[0] if args else kwargs.get(first)
        if not isinstance(output, torch.Tensor) or output.device.type != self._device:
            return False
        group = args[place] if len(args) > place else kwargs.get("group")
        key = (name, group, moe_calls.kind())
        tally = self._tallies.get(key)
        if tally is None:
            tally = self._tallies[key] = self._begin(name, group)
        if tally.reason is None:
            return False
        tally.calls += 1
        tally.nbytes += output.numel() * output.itemsize
        return True

    def count(self) -> None:
        """Count the calls tallied so far, and forget their groups."""
        tallies, self._tallies = self._tallies, {}
        for (name, _, kind), tally in tallies.items():
            if tally.reason is not None:
                sent = int(tally.nbytes * tally.share)
                counters.record_passes(tally.role, name, tally.calls, sent, tally.reason.value, kind=kind)

    def _begin(self, name: str, group: dist.ProcessGroup | None) -> _Tally:
        reason = choice.never_coded(name, group, self._device)
        return _Tally(self._role_of(name, group), SENT[name](max(1, group_size(group))), reason)
