"""Run a function on n simulated ranks. See the package's docstring."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed.nn  # now: it keeps the default group of the moment of its import
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed import multi_threaded_pg

from sim import cuda, device
from sim.communicator import Communicator
from sim.device import Counters, Gpu
from sim.nccl import Group
from sim.scheduler import Fault, Scheduler, Stopped, here
from sim.store import Store
from sim.tensor import PinnedTensor

#: Bytes of GPU memory of a rank.
ARENA_BYTES = 64 << 20
#: That of the wheels of torch 2.13.
NCCL_VERSION = (2, 29, 7)


@dataclass(frozen=True)
class Modes:
    """Properties that some machines have."""

    #: CUDA_DEVICE_MAX_CONNECTIONS=1: nothing passes the head of the one hardware queue.
    one_queue: bool = False
    #: CUDA_MODULE_LOADING=LAZY, the default of CUDA 12.2 and later: the first launch of a kernel waits for an idle device.
    lazy_loading: bool = False
    #: A collective holds all multiprocessors from its start to its end.
    busy: bool = False
    #: The first operation of a group blocks each host until all hosts have come to it.
    connect: bool = False
    #: Operations of two groups must be serialised by streams or waits (NCCL without NCCL_LAUNCH_ORDER_IMPLICIT).
    strict_communicators: bool = False
    #: Report races. Without, only wrong results show them.
    races: bool = True
    #: Compare all memory of the GPU before and after a kernel: it writes only what it says it does, so that no race is missed.
    declared: bool = False
    #: Where nothing can move, hosts that poll go on until they give up, and streams may have work left at the end of the run: for programs
    #: in which a rank never comes. Without, that is a deadlock.
    patient: bool = False


#: A machine for each property, and one with all of them.
ALL_MODES = (
    Modes(),
    *(Modes(**{name: True}) for name in ("one_queue", "lazy_loading", "busy", "connect", "declared")),
    Modes(one_queue=True, lazy_loading=True, busy=True, connect=True, strict_communicators=True),
)


@dataclass(frozen=True)
class Outcome:
    """Results and counters, in the order of the ranks."""

    values: list[Any]
    counters: list[Counters]


class Machine:
    """All GPUs of a run, and the threads of their ranks."""

    def __init__(self, ranks: int, seed: int, modes: Modes, arena_bytes: int) -> None:
        self.ranks = ranks
        self.modes = modes
        self.scheduler = Scheduler(ranks, seed, modes.one_queue, modes.busy, modes.patient)
        self.gpus = [Gpu(self, rank, arena_bytes) for rank in range(ranks)]
        self.store = Store()
        self.communicators: dict[str, Communicator] = {}
        #: After the run memory may be freed in any order.
        self.closed = False
        self._ranks: dict[int, int] = {}

    def mine(self) -> Gpu:
        """Return the GPU of the calling thread."""
        rank = self._ranks.get(threading.get_ident())
        if rank is None:
            raise RuntimeError(f"thread {threading.current_thread().name} is no rank's; only ranks use simulated GPUs")
        return self.gpus[rank]

    def gpu(self, which: Any) -> Gpu:
        """Return the GPU of a device, which must be the calling rank's."""
        gpu = self.mine()
        index = which if isinstance(which, int) else torch.device(which).index
        if index not in (None, gpu.rank):
            self.fail("device", f"rank {gpu.rank} uses the GPU of rank {index}, at {here()}")
        return gpu

    def communicator(self, name: str, ranks: Sequence[int]) -> Communicator:
        """Return the communicator of a group, the same object on all ranks."""
        found = self.communicators.setdefault(name, Communicator(name, ranks))
        if found.ranks != list(ranks):
            self.fail("would hang", f"group {name} has ranks {found.ranks} on one rank and {list(ranks)} on another")
        return found

    def fail(self, kind: str, text: str) -> NoReturn:
        """End the run with a fault."""
        self.scheduler.fail(Fault(kind, text))

    def host(self, rank: int, function: Callable[..., Any], arguments: Sequence[Any], values: list[Any]) -> None:
        """Run the function on one rank, in its thread."""
        me = self.scheduler.hosts[rank]
        self._ranks[threading.get_ident()] = rank
        me.baton.acquire()
        try:
            if self.scheduler.failure is None:
                _enter_group(self, rank)
                values[rank] = function(rank, self.ranks, *arguments)
        except Stopped:
            return
        except BaseException as error:
            with contextlib.suppress(Stopped):
                self.scheduler.fail(error)
            return
        with contextlib.suppress(Stopped):
            self.scheduler.end(rank)


def run(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    seed: int = 0,
    modes: Modes = Modes(),
    arena_bytes: int = ARENA_BYTES,
    trace: Callable[[str], None] | None = None,
    timeout: float = 120.0,
    installed: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Outcome:
    """Run ``function(rank, ranks, *arguments)`` on each rank, each with a GPU ``cuda:rank`` and the default group of "nccl".

    Args:
        seed: decides every choice of the scheduler.
        trace: gets the name of each operation when it ends.
        timeout: seconds until a rank counts as stuck, in a call that is not of the simulator.
        installed: what a library under test needs for the time of the run.

    Raises:
        Fault: the program has a mistake. A rank's own error is raised as it is.
    """
    machine = Machine(ranks, seed, modes, arena_bytes)
    machine.scheduler.trace = trace
    values: list[Any] = [None] * ranks
    collecting = gc.isenabled()
    gc.disable()  # memory must not be freed by chance
    try:
        with _installed(machine), installed():
            threads = [
                threading.Thread(
                    target=machine.host, args=(rank, function, arguments, values), name=f"rank {rank}", daemon=True
                )
                for rank in range(ranks)
            ]
            for thread in threads:
                thread.start()
            machine.scheduler.random.choice(machine.scheduler.hosts).baton.release()
            if not machine.scheduler.over.wait(timeout):
                raise Fault("stuck", f"no end after {timeout} seconds\n{_stacks(threads)}")
            for thread in threads:
                thread.join(timeout)
    finally:
        machine.closed = True
        if collecting:
            gc.enable()
    if machine.scheduler.failure is not None:
        raise machine.scheduler.failure
    return Outcome(values, [gpu.counters for gpu in machine.gpus])


def _stacks(threads: Sequence[threading.Thread]) -> str:
    """Return where each thread is."""
    frames = sys._current_frames()
    return "\n".join(
        f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threads
        if thread.ident in frames
    )


def _enter_group(machine: Machine, rank: int) -> None:
    group = Group(machine.gpus[rank], machine.communicator("world", range(machine.ranks)))
    c10d._world.pg_map[group] = ("nccl", machine.store)  # type: ignore[assignment,index]
    c10d._world.pg_names[group] = "world"
    c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend("nccl")))
    c10d._world.pg_group_ranks[group] = {one: one for one in range(machine.ranks)}
    c10d._world.default_pg = group


class Constructors:
    """torch's constructors, with pinned memory of the simulation."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def empty(self, *size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if not pin_memory:
            return self._original.empty(*size, **options)  # type: ignore[no-any-return]
        like = self._original.empty(*size, **{**options, "device": "meta"})
        gpu = device.mine()
        inner = gpu.allocator.pinned(like.nbytes)[: like.nbytes].view(like.dtype).view(like.shape)
        return PinnedTensor(gpu, inner)

    def tensor(self, data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        """torch.tensor copies to the device below the level at which subclasses see a call."""
        made: torch.Tensor = self._original.tensor(data, **options)
        return made if device is None else made.to(device)


@contextlib.contextmanager
def replacing(replaced: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Have another value in attributes, each (owner, name, value), until the end."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@contextlib.contextmanager
def _installed(machine: Machine) -> Iterator[None]:
    """Replace torch.cuda's streams, torch's memory of GPUs and torch.distributed's groups."""
    _guard()
    constructors = Constructors(torch._C._VariableFunctions)
    library = torch.library.Library("aten", "IMPL", "CUDA")
    replaced = [
        (torch, "empty", constructors.empty),
        (torch, "tensor", constructors.tensor),
        (c10d, "_world", multi_threaded_pg.ThreadLocalWorld()),
        (c10d, "default_pg_nccl_timeout", c10d.default_pg_timeout),
        (torch.cuda.nccl, "version", lambda: NCCL_VERSION),
        *((torch.cuda, name, getattr(cuda, name)) for name in cuda.REPLACED),
    ]
    device._machines.append(machine)
    try:
        library.impl("empty.memory_format", _empty)
        library.impl("empty_strided", _empty_strided)
        for overload in ("arange", "arange.start", "arange.start_step"):
            library.impl(overload, _arange)
        torch._C._distributed_c10d._set_thread_isolation_mode(True)  # names of groups are a thread's own
        with replacing(replaced):
            yield
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        library._destroy()
        device._machines.remove(machine)


def _empty(size: Sequence[int], *, dtype: Any = None, device: Any = None, **options: Any) -> torch.Tensor:
    like = torch.empty(size, dtype=dtype, device="meta")
    return _gpu_of(device).allocate(like.shape, like.stride(), like.dtype)


def _empty_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, device: Any = None, **options: Any
) -> torch.Tensor:
    return _gpu_of(device).allocate(tuple(size), tuple(stride), dtype or torch.get_default_dtype())


def _arange(*bounds: Any, dtype: Any = None, device: Any = None, **options: Any) -> torch.Tensor:
    """torch makes it by a resize of an empty tensor, which the simulator does not have."""
    values = torch.arange(*bounds, dtype=dtype)
    result = _gpu_of(device).allocate(values.shape, values.stride(), values.dtype)
    target = result.inner
    result.gpu.launch("kernel", "torch arange", lambda: target.copy_(values), [], [target])
    return result


def _gpu_of(which: Any) -> Gpu:
    return device.mine() if which is None else device.machine().gpu(which)


_guards: list[ctypes.CDLL] = []


def _guard() -> None:
    """Give a torch without CUDA a guard for CUDA devices, once a process; see guard.cpp."""
    if torch.backends.cuda.is_built():  # tests/sim/conftest.py keeps away from real GPUs
        torch._C._ensureCUDADeviceGuardSet()
    elif not _guards:
        _guards.append(ctypes.CDLL(str(_compiled())))


def _compiled() -> Path:
    """The library of guard.cpp, kept for this source and this torch."""
    source, folder = Path(__file__).with_name("guard.cpp"), Path(torch.__file__).parent
    digest = hashlib.sha256(source.read_bytes() + f"{torch.__version__} {folder}".encode()).hexdigest()[:20]
    kept = Path.home() / ".cache" / "simulated_gpu" / f"guard_{digest}.so"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        options = ("-O1", "-std=c++20", "-fPIC", "-shared", f"-I{folder / 'include'}", f"-L{folder / 'lib'}")
        with tempfile.TemporaryDirectory(dir=kept.parent) as made:
            library = Path(made) / kept.name
            command = [
                os.environ.get("CXX", "c++"),
                *options,
                str(source),
                "-o",
                str(library),
                "-Wl,--no-as-needed",
                "-lc10",
            ]
            subprocess.run(command, check=True)
            library.replace(kept)
    return kept
