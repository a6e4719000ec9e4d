"""NCCL, without NCCL: process groups of torch.distributed over a simulated machine.

Rules, with their sources:

* Every rank calls the k-th operation of a communicator with the same kind, dtype, count, reduction and root (NCCL user guide, "Collective
  Operations": otherwise "undefined behavior, including hangs, crashes, or data corruption"). For each pair of an all-to-all, the count
  sent is the count received ("Point-to-point communication").
* An operation ends on no rank before the stream of every rank has come to it. NCCL promises less; a program must not rely on more.
* Operations of one communicator run in the order of their calls, whatever their streams (NVIDIA/nccl, src/enqueue.cc: the launch stream
  waits for the communicator's stream). This order is no event: data still needs one.
* Several communicators: all ranks call in one order ("Using multiple NCCL communicators concurrently"). With ``strict_communicators``
  streams or waits must also serialise the operations, which NCCL wants before 2.26, and after it without NCCL_LAUNCH_ORDER_IMPLICIT.
* In place is the rank's own part of the large buffer, or nothing ("In-place Operations").
* Tensors are contiguous and on the rank's GPU (ProcessGroupNCCL.cpp, check_gpu_single_tensor).
* ``async_op=False``: on the caller's stream. ``async_op=True``: on a stream of the group, after the caller's stream; ``Work.wait()`` makes
  the current stream wait, not the host, and until then the handle keeps the tensors (ProcessGroupNCCL.cpp, torch 2.8 and later).
* A sum has no order: ranks are added from a random rank on, and every partial sum is rounded to the dtype (src/device/reduce_kernel.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from sim import memory
from sim.device import Event, Gpu, Stream, machine, mine
from sim.scheduler import Op, Place, here
from sim.tensor import DeviceTensor

#: torch's default for NCCL.
TIMEOUT = timedelta(minutes=10)
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
        op.ready = lambda: self._all_started(call.number)
        op.why = lambda: self._missing(call)
        call.op, call.at = op, (stream.lane.name, stream.lane.count + 1)
        gpu.submit(op, call.inputs, call.outputs, stream.lane)
        if gpu.machine.modes.connect and not call.number:  # nccl.md 2.1, NVIDIA/nccl#783: connections are made at the first exchange
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
            if other is self or call.rank not in shared:
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
                        f"{count} of {other.name}, then {peer}\n  only one of them issued before: {first}",
                    )
            if gpu.machine.modes.strict_communicators and issued and not issued[-1].op.done:  # type: ignore[union-attr]
                name, number = issued[-1].at
                if stream.lane.clock.get(name, 0) < number:
                    gpu.machine.fail("may deadlock", f"two groups at once on rank {call.rank}\n  {issued[-1]}\n  {call}")

    def _all_started(self, number: int) -> bool:
        """Return whether every rank's stream has come to the operation."""
        calls = self._calls(number)
        return calls is not None and all(call.op.started for call in calls)  # type: ignore[union-attr]

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


def _name(operation: Any) -> str:
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
    if kind in ("all_reduce", "reduce_scatter"):
        first = gpu.scheduler.random.randrange(ranks)
        operation = calls[0].signature["op"]
        total = calls[first].inputs[0].clone()
        for step in range(1, ranks):
            total = _REDUCED[operation](total, calls[(first + step) % ranks].inputs[0])
        if operation == "AVG":
            total = total / ranks
        parts = [total] * ranks if kind == "all_reduce" else list(total.view(ranks, -1))
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


class Work(dist.Work):
    """The handle of an operation on the group's own stream."""

    def __init__(self, gpu: Gpu, end: Event, keep: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._gpu = gpu
        self._end = end
        self._keep: Sequence[torch.Tensor] = keep

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._end.wait()
        self._keep = ()
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return self._end.query()

    def __del__(self) -> None:
        # ProcessGroupNCCL's watchdog keeps the tensors of a handle that nobody waits for until the operation has ended.
        if self._keep and not self._gpu.machine.closed:
            record = self._end._record
            if record is not None and record.op is not None and not record.done:
                keep = [self._keep]
                record.op.after.append(keep.clear)


class Group(dist.ProcessGroup):
    """A process group of one rank, with the methods that torch.distributed calls."""

    def __init__(self, gpu: Gpu, communicator: Communicator) -> None:
        rank = communicator.ranks.index(gpu.rank)
        super().__init__(rank, len(communicator.ranks))
        self._gpu = gpu
        self._communicator = communicator
        self._rank, self._size = rank, len(communicator.ranks)
        self._stream: Stream | None = None
        #: Handles of a group of calls in progress, None outside.
        self._handles: list[Any] | None = None

    def getBackendName(self) -> str:
        return "nccl"

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    @property
    def group_name(self) -> str:
        return self._communicator.name

    def new_group(self, ranks: list[int], **options: Any) -> Group | None:
        """Return this rank's part of a new group; torch.distributed.new_group calls this on every rank, in one order."""
        communicator = machine().communicator(options["group_name"], ranks)
        return Group(self._gpu, communicator) if self._gpu.rank in ranks else None

    def _get_backend(self, device: torch.device) -> Any:
        """Return what stands for ProcessGroupNCCL: its options have the timeout."""
        return SimpleNamespace(options=SimpleNamespace(_timeout=TIMEOUT, is_high_priority_stream=False))

    # --- collectives

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        opts = opts or dist.AllreduceOptions()
        (tensor,) = tensors
        signature = {"op": _name(opts.reduceOp), "count": tensor.numel(), "dtype": tensor.dtype}
        return self._run("all_reduce", signature, [tensor], [tensor], opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        (tensor,) = tensors
        signature = {"root": opts.rootRank, "count": tensor.numel(), "dtype": tensor.dtype}
        return self._run("broadcast", signature, [tensor], [tensor], opts)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        if output.numel() != tensor.numel() * self._size or output.dtype != tensor.dtype:
            raise ValueError(
                f"output tensor size must be equal to world_size times input tensor size, with one dtype; got "
                f"{output.numel()} {output.dtype} for {self._size} times {tensor.numel()} {tensor.dtype}"
            )
        self._in_place("all_gather", output, tensor)
        signature = {"count": tensor.numel(), "dtype": tensor.dtype}
        return self._run("all_gather", signature, [tensor], [output], opts)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Any:
        if tensor.numel() != output.numel() * self._size or output.dtype != tensor.dtype:
            raise ValueError(
                f"input tensor must be the same size as output size times world size, with one dtype; got "
                f"{tensor.numel()} {tensor.dtype} for {self._size} times {output.numel()} {output.dtype}"
            )
        self._in_place("reduce_scatter", tensor, output)
        signature = {"op": _name(opts.reduceOp), "count": output.numel(), "dtype": tensor.dtype}
        return self._run("reduce_scatter", signature, [tensor], [output], opts)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        if len(outputs) != self._size or len(inputs) != self._size:
            raise ValueError(f"all_to_all wants {self._size} tensors each way, got {len(outputs)} and {len(inputs)}")
        self._apart("all_to_all", inputs, outputs)
        return self._run("all_to_all", {"dtype": inputs[0].dtype}, inputs, outputs, opts, split=True)

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> Any:
        parts = []
        for whole, sizes in ((output, received), (tensor, sent)):
            if not sizes and whole.shape[0] % self._size:
                raise ValueError(f"all_to_all_single: {whole.shape[0]} rows for {self._size} ranks")
            sizes = list(sizes) or [whole.shape[0] // self._size] * self._size
            if len(sizes) != self._size or sum(sizes) != whole.shape[0]:
                raise ValueError(f"Split sizes do not match total dim 0 size: {sizes} for {whole.shape[0]} rows")
            self._dense("all_to_all", [whole])
            parts.append(list(whole.split(sizes)))
        self._apart("all_to_all", [tensor], [output])
        return self._run("all_to_all", {"dtype": tensor.dtype}, parts[1], parts[0], opts, split=True)

    def barrier(self, opts: Any = None) -> Any:
        """ProcessGroupNCCL::barrier: an all-reduce, for which the host waits."""
        one = self._gpu.allocate((1,), (1,), torch.int32)
        one.fill_(1)
        self.allreduce([one])
        self._gpu.synchronize_stream("barrier")

    # torch 2.6 to 2.12 have these names
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    # --- coalescing: one ncclGroup; each operation keeps its own number

    def _start_coalescing(self, device: torch.device) -> None:
        self._handles = []

    def _end_coalescing(self, device: torch.device) -> Any:
        handles, self._handles = self._handles, None
        return handles[-1] if handles else None

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        signature = {"op": _name(opts.reduceOp)}
        return [
            self._run("all_reduce", {**signature, "count": one.numel(), "dtype": one.dtype}, [one], [one], opts)
            for one in tensors
        ][-1]

    def all_gather_single_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> Any:
        return [self.all_gather_single(output, one, opts) for output, one in zip(outputs, inputs, strict=True)][-1]

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> Any:
        return [self.reduce_scatter_single(output, one, opts) for output, one in zip(outputs, inputs, strict=True)][-1]

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # --- one operation

    def _run(
        self,
        kind: str,
        signature: dict[str, Any],
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        opts: Any,
        split: bool = False,
    ) -> Any:
        gpu = self._gpu
        self._dense(kind, [*inputs, *outputs])
        gpu.forbid_in_capture(f"{kind}, which this simulation does not capture")
        call = Call(kind, signature, gpu.rank, [one.inner for one in inputs], [one.inner for one in outputs])  # type: ignore[attr-defined]
        if split:
            call.sent, call.received = [one.numel() for one in inputs], [one.numel() for one in outputs]
        caller = Stream(gpu.device, lane=gpu.current)
        if not getattr(opts, "asyncOp", False):
            self._communicator.issue(gpu, call, caller)
            return None
        if self._stream is None:
            self._stream = Stream(gpu.device, lane=gpu.lane(f"nccl {self._communicator.name}"))
        self._stream.wait_stream(caller)
        self._communicator.issue(gpu, call, self._stream)
        handle = Work(gpu, self._stream.record_event(), [*inputs, *outputs])
        if self._handles is not None:
            self._handles.append(handle)
        return handle

    def _dense(self, kind: str, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if not isinstance(tensor, DeviceTensor):
                self._gpu.machine.fail("tensor", f"{kind} at {here()}: NCCL wants tensors of the GPU, got {tensor.device}")
            elif tensor.gpu is not self._gpu or mine() is not self._gpu:
                self._gpu.machine.fail("device", f"{kind} at {here()}: a tensor or group of another rank")
            elif not tensor.is_contiguous():
                self._gpu.machine.fail("tensor", f"{kind} at {here()}: NCCL wants contiguous tensors")

    def _in_place(self, kind: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        own = whole.data_ptr() + self._rank * part.nbytes
        if part.data_ptr() != own:
            self._apart(kind, [whole], [part])

    def _apart(self, kind: str, some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
        for one in some:
            for other in others:
                if one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes:
                    lease: Any = getattr(one, "lease", None)
                    made = f"; the memory was allocated at {lease.block.allocated}" if lease else ""
                    self._gpu.machine.fail("overlap", f"{kind} at {here()}: input and output overlap, not in place{made}")
