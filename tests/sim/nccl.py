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
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from sim.communicator import Call, Communicator, reduction
from sim.device import Captured, Gpu, machine, mine
from sim.scheduler import here
from sim.streams import Event, Stream
from sim.tensor import DeviceTensor

#: torch's default for NCCL.
TIMEOUT = timedelta(minutes=10)


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
        # ProcessGroupNCCL's watchdog keeps the tensors of a handle that nobody waits for until it has seen the operation end: whoever
        # gets their memory comes after the operation.
        record = self._end._record
        if self._keep and record is not None and not self._gpu.machine.closed:
            gpu, keep = self._gpu, [self._keep]
            if record.op is None or record.done:
                gpu.seen(record.clock)
            else:
                record.op.after += [lambda: gpu.seen(record.clock), keep.clear]


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
        """Return what stands for ProcessGroupNCCL: its options have the timeout; ``abort`` ends the operations of this rank."""
        options = SimpleNamespace(_timeout=TIMEOUT, is_high_priority_stream=False)
        return SimpleNamespace(options=options, abort=lambda: self._communicator.aborted.add(self._gpu.rank))

    # --- collectives

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        opts = opts or dist.AllreduceOptions()
        (tensor,) = tensors
        return self._run("all_reduce", {"op": reduction(opts.reduceOp)}, [tensor], [tensor], opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        (tensor,) = tensors
        return self._run("broadcast", {"root": opts.rootRank}, [tensor], [tensor], opts)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """On ranks that are not the root the tensor keeps its values."""
        (tensor,) = tensors
        signature = {"op": reduction(opts.reduceOp), "root": opts.rootRank}
        return self._run("reduce", signature, [tensor], [tensor], opts)

    def allgather(self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """ProcessGroupNCCL gathers into a flat temporary and copies from it, on the stream of the operation."""
        (tensor,), (parts,) = tensors, outputs
        flat = self._gpu.allocate((self._size * tensor.numel(),), (1,), tensor.dtype)
        if getattr(opts, "asyncOp", False):
            raise NotImplementedError(
                "the simulated NCCL has no asynchronous all_gather of a list; use all_gather_into_tensor"
            )
        self.all_gather_single(flat, tensor, opts)
        for part, got in zip(parts, flat.view(self._size, -1).unbind(), strict=True):
            part.view(-1).copy_(got)

    def send(self, *args: Any, **kwargs: Any) -> Any:
        """Two-sided operations are not for schedules: unbatched ones make a communicator for each pair (ProcessGroupNCCL::pointToPoint)."""
        raise NotImplementedError("the simulated NCCL has collectives alone; use all_to_all")

    recv = send

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        if output.numel() != tensor.numel() * self._size or output.dtype != tensor.dtype:
            raise ValueError(
                f"output tensor size must be equal to world_size times input tensor size, with one dtype; got "
                f"{output.numel()} {output.dtype} for {self._size} times {tensor.numel()} {tensor.dtype}"
            )
        self._in_place("all_gather", output, tensor)
        return self._run("all_gather", {}, [tensor], [output], opts)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Any:
        if tensor.numel() != output.numel() * self._size or output.dtype != tensor.dtype:
            raise ValueError(
                f"input tensor must be the same size as output size times world size, with one dtype; got "
                f"{tensor.numel()} {tensor.dtype} for {self._size} times {output.numel()} {output.dtype}"
            )
        self._in_place("reduce_scatter", tensor, output)
        return self._run("reduce_scatter", {"op": reduction(opts.reduceOp)}, [tensor], [output], opts)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        if len(outputs) != self._size or len(inputs) != self._size:
            raise ValueError(f"all_to_all wants {self._size} tensors each way, got {len(outputs)} and {len(inputs)}")
        self._apart("all_to_all", inputs, outputs)
        return self._run("all_to_all", {}, inputs, outputs, opts, split=True)

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
        return self._run("all_to_all", {}, parts[1], parts[0], opts, split=True)

    def barrier(self, opts: Any = None) -> Any:
        """ProcessGroupNCCL::barrier: an all-reduce, for which the host waits."""
        one = self._gpu.allocate((1,), (1,), torch.int32)
        one.fill_(1)
        handle = self.allreduce([one])
        if handle is not None:
            handle.wait()
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
        return [self.allreduce([one], opts) for one in tensors][-1]

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
        given, taken = [one.inner for one in inputs], [one.inner for one in outputs]  # type: ignore[attr-defined]
        count = {} if split else {"count": given[0].numel()}
        signature = {**signature, **count, "dtype": given[0].dtype}
        on_own = getattr(opts, "asyncOp", False)

        def issue(stream: Stream | None = None) -> None:
            """Put the operation on a stream, the current one if none is given."""
            call = Call(kind, signature, gpu.rank, given, taken)
            if split:
                call.sent, call.received = [one.numel() for one in given], [one.numel() for one in taken]
            self._communicator.issue(gpu, call, stream or Stream(gpu.device, lane=gpu.current))

        if gpu.capture is not None:  # captured on the capturing stream (NCCL user guide, "Using NCCL with CUDA Graphs")
            gpu.capture.append(Captured("collective", kind, issue, [], []))
            return Work(gpu, Event(), []) if on_own else None
        caller = Stream(gpu.device, lane=gpu.current)
        if not on_own:
            issue()
            return None
        if self._stream is None:
            self._stream = Stream(gpu.device, lane=gpu.lane(f"nccl {self._communicator.name}"))
        self._stream.wait_stream(caller)
        issue(self._stream)
        handle = Work(gpu, self._stream.record_event(), [*inputs, *outputs])
        if self._handles is not None:
            self._handles.append(handle)
        return handle

    def _dense(self, kind: str, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if not isinstance(tensor, DeviceTensor):
                self._gpu.machine.fail(
                    "tensor", f"{kind} at {here()}: NCCL wants tensors of the GPU, got {tensor.device}"
                )
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
                    self._gpu.machine.fail(
                        "overlap", f"{kind} at {here()}: input and output overlap, not in place{made}"
                    )
