"""A communicator of NCCL: what its ranks call is compared, waits for all ranks, and moves data. ``nccl.py`` has the rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sim import memory
from sim.device import Gpu
from sim.scheduler import Op, Place, here
from sim.streams import Stream

_REDUCED = {"SUM": torch.add, "AVG": torch.add, "MAX": torch.maximum, "MIN": torch.minimum}


@dataclass(eq=False)
class Call:
    """An operation of one rank."""

    kind: str
    #: What must be equal on all ranks.
    signature: dict[str, Any]
    rank: int
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    #: Elements sent to and received from each rank of the group, for all-to-all.
    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    number: int = -1
    place: Place = field(default_factory=here)
    #: Other communicators -> operations that this rank had issued there before.
    before: dict[Communicator, int] = field(default_factory=dict)
    op: Op | None = None
    #: Name of its stream, and its number there.
    at: tuple[str, int] = ("", 0)
    arrived: list[torch.Tensor] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.kind} at {self.place}"


class Communicator:
    """A communicator; all ranks share the object."""

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self.name = name
        self.ranks = list(ranks)
        #: Global rank -> its operations.
        self.calls: dict[int, list[Call]] = {rank: [] for rank in ranks}
        #: Ranks whose part has ended: their operations that have not got their data end without.
        self.aborted: set[int] = set()

    def issue(self, gpu: Gpu, call: Call, stream: Stream) -> None:
        """Put the next operation of a rank on a stream, after comparing it with those of the other ranks."""
        mine_ = self.calls[call.rank]
        call.number = len(mine_)
        self._compare(gpu, call)
        self._compare_orders(gpu, call, stream)
        mine_.append(call)
        gpu.counters.collectives[call.kind] += 1
        gpu.counters.collective_bytes[call.kind] += sum(tensor.nbytes for tensor in call.inputs)
        op = Op("collective", f"{call.kind} {call.number} of group {self.name}", lambda: self._finish(call))
        op.can_start = lambda: call.number == 0 or bool(mine_[call.number - 1].op.done)  # type: ignore[union-attr]
        op.begin = lambda: self._begin(gpu, call.number)
        op.ready = lambda: call.rank in self.aborted or self._all_started(call.number)
        op.why = lambda: self._missing(call)
        call.op, call.at = op, (stream.lane.name, stream.lane.count + 1)
        gpu.submit(op, call.inputs, call.outputs, stream.lane)
        # The first exchange makes the connections, and blocks the host meanwhile (NVIDIA/nccl#783).
        if gpu.machine.modes.connect and not call.number:
            peers = f"the other hosts, to connect group {self.name} at its first exchange"
            gpu.scheduler.turn(gpu.rank, lambda: all(self.calls.values()), peers)

    def _compare(self, gpu: Gpu, call: Call) -> None:
        for peer in (*self._peers(call), call):
            for name, value in call.signature.items():
                if call.kind != peer.kind or peer.signature.get(name) != value:
                    self._hang(gpu, call, peer, "kind" if call.kind != peer.kind else name)
            if call.sent:
                me, other = self.ranks.index(call.rank), self.ranks.index(peer.rank)
                for sender, at, receiver, to in ((call, other, peer, me), (peer, me, call, other)):
                    if sender.sent[at] != receiver.received[to]:
                        pair = (
                            f"rank {sender.rank} sends {sender.sent[at]} elements to rank {receiver.rank}, "
                            f"which receives {receiver.received[to]}"
                        )
                        gpu.machine.fail("would hang", f"{pair}\n  {sender}\n  {receiver}")

    def _peers(self, call: Call) -> list[Call]:
        return [calls[call.number] for calls in self.calls.values() if len(calls) > call.number]

    def _hang(self, gpu: Gpu, call: Call, peer: Call, what: str) -> None:
        lines = [f"operation {call.number} of group {self.name} differs in its {what}"]
        for one in (call, peer):
            about = ", ".join(f"{name} {value}" for name, value in one.signature.items())
            lines.append(f"  rank {one.rank}: {one.kind} ({about}) at {one.place}")
        gpu.machine.fail("would hang", "\n".join(lines))

    def _compare_orders(self, gpu: Gpu, call: Call, stream: Stream) -> None:
        for other in gpu.machine.communicators.values():
            shared = set(self.ranks) & set(other.ranks)
            if other is self or call.rank not in shared or call.rank in other.aborted:
                continue
            issued = other.calls[call.rank]
            call.before[other] = len(issued)
            for peer in self._peers(call):
                count = peer.before.get(other, len(issued)) if peer.rank in shared else len(issued)
                if count != len(issued):
                    first = issued[count] if count < len(issued) else other.calls[peer.rank][len(issued)]
                    gpu.machine.fail(
                        "may deadlock",
                        f"ranks {call.rank} and {peer.rank} issue operations of groups {self.name} and {other.name} in "
                        f"two orders\n  rank {call.rank}: {len(issued)} of {other.name}, then {call}\n  rank {peer.rank}: "
                        f"{count} of {other.name}, then {peer}\n  only one of them has issued by then: {first}",
                    )
            if gpu.machine.modes.strict_communicators and issued:
                name, number = issued[-1].at
                if max(stream.lane.clock.get(name, 0), gpu.known(name)) < number:
                    gpu.machine.fail(
                        "may deadlock", f"two groups at once on rank {call.rank}\n  {issued[-1]}\n  {call}"
                    )

    def _all_started(self, number: int) -> bool:
        """Return whether every rank's stream has come to the operation."""
        calls = self._calls(number)
        if calls is None or (self.aborted and not calls[0].arrived):
            return False
        return all(call.op.started for call in calls)  # type: ignore[union-attr]

    def _begin(self, gpu: Gpu, number: int) -> None:
        """Move the data when the last stream has come; a rank's result arrives at the end of its operation, before that it is poison."""
        if self._all_started(number):
            calls = self._calls(number)
            assert calls is not None
            _exchange(gpu, calls)
            for call in calls:
                for output in call.outputs:
                    _bytes(output).fill_(memory.POISON)

    def _calls(self, number: int) -> list[Call] | None:
        if not all(len(calls) > number for calls in self.calls.values()):
            return None
        return [self.calls[rank][number] for rank in self.ranks]

    def _finish(self, call: Call) -> None:
        if call.arrived or call.rank not in self.aborted:
            for output, value in zip(call.outputs, call.arrived, strict=True):
                output.copy_(value)

    def _missing(self, call: Call) -> str:
        parts = []
        for rank, calls in self.calls.items():
            if len(calls) <= call.number:
                last = f", the last one {calls[-1]}" if calls else ""
                parts.append(f"rank {rank}, which has issued {len(calls)} operations of the group{last}")
            elif not calls[call.number].op.started:  # type: ignore[union-attr]
                parts.append(f"the stream of rank {rank} to come to {calls[call.number]}")
        return "; ".join(parts) or "its predecessor in the group"


def reduction(operation: Any) -> str:
    """Return the name of a reduction, which torch gives as an enum or as an object around one."""
    found: str = getattr(operation, "op", operation).name
    if found not in _REDUCED:
        raise NotImplementedError(f"the simulated NCCL has {', '.join(_REDUCED)}, not {found}")
    return found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _exchange(gpu: Gpu, calls: list[Call]) -> None:
    """Compute what every rank receives."""
    kind, ranks = calls[0].kind, len(calls)
    if kind in ("all_reduce", "reduce_scatter", "reduce"):
        first = gpu.scheduler.random.randrange(ranks)
        operation = calls[0].signature["op"]
        total = calls[first].inputs[0].clone()
        for step in range(1, ranks):
            total = _REDUCED[operation](total, calls[(first + step) % ranks].inputs[0])
        if operation == "AVG":
            total = total / ranks
        parts = list(total.view(ranks, -1)) if kind == "reduce_scatter" else [total] * ranks
        if kind == "reduce":
            parts = [total if to == call.signature["root"] else call.inputs[0] for to, call in enumerate(calls)]
        for call, part in zip(calls, parts, strict=True):
            call.arrived = [part.clone().view(call.outputs[0].shape)]
    elif kind == "all_gather":
        whole = torch.cat([call.inputs[0].flatten() for call in calls])
        for call in calls:
            call.arrived = [whole.view(call.outputs[0].shape)]
    elif kind == "broadcast":
        for call in calls:
            call.arrived = [calls[call.signature["root"]].inputs[0].clone()]
    else:
        for to, call in enumerate(calls):
            call.arrived = [
                peer.inputs[to].clone().view(output.shape) for peer, output in zip(calls, call.outputs, strict=True)
            ]
