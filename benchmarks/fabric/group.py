"""The process group of the fabric: this process is rank 0, and its peers do not exist.

A collective takes the seconds of :mod:`ds_zipccl.policy.cost_model`, on a stream of the group, as one of NCCL does;
``wait()`` of its handle lets the current stream follow. Peers send what this rank sends, as far as its size fits. On
CPUs large results stay as they are. So no value of a training means anything.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ds_zipccl.benchmarks.fabric.clock import Clock, CudaClock
from ds_zipccl.comm.device.bases.proof import PROOF_WORDS
from ds_zipccl.comm.group_state import group_nodes, group_profile
from ds_zipccl.policy import cost_model
from ds_zipccl.policy.cost_model import GATHER, SUM, DeviceProfile, Topology

#: Name of the backend in torch.distributed.
NAME = "fabric"
#: Results of more bytes stay as they are on CPUs: a program reads flags, norms, sizes and texts.
READ_BYTES = 1 << 20
#: What a rank tells in an agreement in the place of another rank's proof.
_UNSET = -(1 << 63)


#: torch's classes, whose methods take other arguments in every release.
_Work: Any = c10d.Work
_Group: Any = dist.ProcessGroup


class Handle(_Work):  # type: ignore[misc]
    """A collective in flight."""

    def __init__(self, clock: Clock, event: Any, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._clock, self._event, self._outputs = clock, event, list(outputs)

    def wait(self, timeout: Any = None) -> bool:
        self._clock.current.wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def get_future(self) -> Any:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class Group(_Group):  # type: ignore[misc]
    """``counts``: of all groups of this process: collectives, their seconds on the wire, and bytes that a node sends to
    others. ``profile``: the speeds between all ranks."""

    clock: Clock
    profile: DeviceProfile
    counts: defaultdict[str, float] = defaultdict(float)

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        self._ranks, self._stream = ranks, self.clock.new()
        self._most = math.inf if isinstance(self.clock, CudaClock) else READ_BYTES

    def size(self) -> int:
        return self._ranks

    def getBackendName(self) -> str:
        return NAME

    @property
    def pg_name(self) -> str:
        return str(c10d._world.pg_names[cast(Any, self)])

    @property
    def group_name(self) -> str:
        return self.pg_name

    # --- the wire

    def _shape(self) -> tuple[Topology, DeviceProfile]:
        nodes = group_nodes(self) or [list(range(self._ranks))]
        return Topology.of(nodes), group_profile(self, self.profile)

    def _moved(self, seconds: float, between: float, outputs: Sequence[torch.Tensor]) -> Handle:
        """Put a collective on the stream of the group."""
        clock, stream = self.clock, self._stream
        if clock.current != clock.default:  # of one of our schedules
            clock.pass_on(self.profile.launch)
        stream.wait_event(clock.current.record_event())
        with clock.on(stream):
            clock.busy(seconds)
        for name, number in {"collectives": 1, "wire_s": seconds, "between": between}.items():
            self.counts[name] += number
        return Handle(clock, stream.record_event(), outputs)

    def _rings(self, kinds: Sequence[str], nbytes: int, outputs: Sequence[torch.Tensor]) -> Handle:
        topology, profile = self._shape()
        seconds = sum(cost_model.plain_seconds(kind, nbytes, topology, profile) for kind in kinds)
        sent = len(kinds) * nbytes * (1 - 1 / self._ranks) if topology.nodes > 1 else 0
        return self._moved(seconds, sent, outputs)

    def _pairs(self, sizes: Sequence[int], outputs: Sequence[torch.Tensor]) -> Handle:
        """``sizes``: bytes that this rank sends to each rank. The ranks of its node send as much."""
        topology, profile = self._shape()
        own = next((set(ranks) for ranks in group_nodes(self) if self.rank() in ranks), set(range(self._ranks)))
        inside = sum(size for rank, size in enumerate(sizes) if rank in own and rank != self.rank())
        afar = topology.each * sum(size for rank, size in enumerate(sizes) if rank not in own)
        wire = max(afar / profile.network, inside / profile.inside)
        return self._moved(cost_model.exchange_latency(topology, profile) + wire, afar, outputs)

    def _put(self, place: torch.Tensor, words: torch.Tensor) -> None:
        if place.numel() == words.numel() and place.nbytes <= self._most:
            place.copy_(words.view(place.shape))

    # --- the collectives that torch.distributed calls; older releases know some by other names

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Handle:
        if output.nbytes <= self._most:
            output.view(self._ranks, -1).copy_(own.clone().view(1, -1))  # may be a part of the output
        return self._rings([GATHER], output.nbytes, [output])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Handle:
        for places, own in zip(outputs, inputs, strict=True):
            for place in places:
                self._put(place, own)
        return self._rings([GATHER], sum(own.nbytes for own in inputs) * self._ranks, outputs[0])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Handle:
        return [self.all_gather_single(*both) for both in zip(outputs, inputs, strict=True)][-1]

    def reduce_scatter_single(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> Handle:
        with self.clock.beside():
            output.view(-1).copy_(whole.view(-1)[: output.numel()])
        return self._rings([SUM], whole.nbytes, [output])

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Handle:
        for place, parts in zip(outputs, inputs, strict=True):
            place.copy_(parts[self.rank()])
        return self._rings([SUM], sum(part.nbytes for parts in inputs for part in parts), outputs)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Handle:
        return [self.reduce_scatter_single(*both) for both in zip(outputs, inputs, strict=True)][-1]

    def allreduce(self, some: Any, opts: Any = None) -> Handle:
        for words in some:
            if words.dtype is torch.int64 and bool((unset := words == _UNSET).any()):
                words[unset] = words.roll(PROOF_WORDS)[unset]  # the other ranks hold what this one holds
        return self._rings([SUM, GATHER], sum(one.nbytes for one in some), some)

    def allreduce_coalesced(self, some: Any, opts: Any = None) -> Handle:
        return self.allreduce(some)

    def reduce(self, some: Any, opts: Any = None) -> Handle:
        return self._rings([SUM], some[0].nbytes, some)

    def broadcast(self, some: Any, opts: Any = None) -> Handle:
        return self._rings([GATHER], some[0].nbytes, some)

    def all_to_all_single(
        self, output: torch.Tensor, whole: torch.Tensor, output_sizes: Any, sizes: Any, opts: Any = None
    ) -> Handle:
        rows = max(1, whole.shape[0])
        self._put(output, whole)
        return self._pairs(
            [size * (whole.nbytes // rows) for size in list(sizes) or [rows // self._ranks] * self._ranks], [output]
        )

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Handle:
        for place, words in zip(outputs, inputs, strict=True):
            self._put(place, words)
        return self._pairs([one.nbytes for one in inputs], outputs)

    def barrier(self, opts: Any = None) -> Handle:
        return self._moved(0.0, 0, [])

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
