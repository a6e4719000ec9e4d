"""One process of ``bench comm``: time each variant of an operation in turn, count bytes and waits, check the bits."""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ds_zipccl import comm, devices, ops
from ds_zipccl.benchmarks.comm.cases import Calibration, Case, bandwidths, elements
from ds_zipccl.benchmarks.comm.variants import VARIANTS, Variant
from ds_zipccl.benchmarks.links.backends import BACKENDS, Backend
from ds_zipccl.comm.group_state import find_nodes
from ds_zipccl.comm.transport import calibration
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.telemetry import counters
from ds_zipccl.tools import link, namespaces
from ds_zipccl.tools.exponents import differing, words

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

    from ds_zipccl.tools.namespaces import Network

LOOPBACKS = ("lo", "lo0")  # names of the loopback interface on Linux and macOS


def take_part(
    rank: int,
    ranks: int,
    network: Network | None,
    port: int,
    cases: list[Case | Calibration],
    results: Queue[dict[str, Any]],
    backend: Backend = BACKENDS["gloo"],
) -> None:
    """Run all ``cases`` as one of ``ranks`` processes; rank 0 puts the rows into ``results``. Blocks to the end.

    Args:
        network: this process moves to its node of the network; None for loopback.
        port: port of the rendezvous store.
    """
    os.environ.update(backend.environment(ranks, rank, network is not None))  # before any library reads them
    if network:
        namespaces.enter(network.namespace(rank))  # before any thread is started
    threading.Thread(target=_follow_parent, daemon=True).start()
    host = network.host if network else "127.0.0.1"
    loopback = next((name for _, name in socket.if_nameindex() if name in LOOPBACKS), None)
    if network:
        os.environ["GLOO_SOCKET_IFNAME"] = namespaces.INTERFACE
    elif loopback:  # gloo would pick the interface of the host name, which may not exist
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    # The deprecated names exist in every torch that DeepSpeed runs on.
    warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)
    torch.set_num_threads(1)
    patience = timedelta(seconds=cases[0].timeout)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, None, False, patience
    )
    more: dict[str, Any] = {}
    device = torch.device(backend.device)
    if device.type == "cuda":
        device = more["device_id"] = torch.device("cuda", backend.local_rank(rank))
        torch.cuda.set_device(device)
    backend.prepare()
    dist.init_process_group(backend.name, store=store, rank=rank, world_size=ranks, timeout=patience, **more)
    if backend.nodes:
        find_nodes()
    if any(isinstance(case, Case) and "auto" in case.variants for case in cases):
        comm.calibrate()
    for case in cases:
        rows = (
            [calibration.measure().to_json()]
            if isinstance(case, Calibration)
            else measure(case, rank, ranks, network, backend, device)
        )
        for row in rows:
            if rank == 0:
                results.put(row)
    dist.barrier()  # gloo sometimes aborts if a process leaves early
    dist.destroy_process_group()


def _follow_parent() -> None:
    """End this process when its parent has ended, for whatever reason."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def measure(
    case: Case, rank: int, ranks: int, network: Network | None, backend: Backend, device: torch.device
) -> list[dict[str, Any]]:
    """Return a row of the case for each variant; the rows are equal on all ranks."""
    trial = Trial(case, rank, ranks, backend, device)
    runs = torch.zeros(case.repeats + 1, len(case.variants), len(astuple(Run())), dtype=torch.float64)
    for repeat in range(case.repeats + 1):  # the first run builds kernels and touches pages: only its bits count
        for index, variant in enumerate(case.variants):
            runs[repeat, index] = torch.tensor(astuple(trial.run(variant)), dtype=torch.float64)
    most, summed = runs.to(device, copy=True), runs.to(device, copy=True)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(summed)
    logical_bytes = elements(case.numel, ops.TRAFFIC[case.op].plain, ranks) * trial.itemsize
    rows = []
    for index, variant in enumerate(case.variants):
        slowest = [Run(*one) for one in most[:, index].tolist()]
        median = statistics.median(one.seconds for one in slowest[1:])
        wire_bytes = int(slowest[-1].sent) or logical_bytes
        row = {
            "op": case.op,
            "dtype": case.dtype,
            "numel": case.numel,
            "ranks": ranks,
            "nodes": network.nodes if network else backend.nodes or 1,
            "link": link.name(network.spec if network else None),
            "variant": variant,
            "time_us": median * 1e6,
            **bandwidths(case.op, case.numel * trial.itemsize, ranks, median),
            "logical_bytes": logical_bytes,
            "wire_bytes": wire_bytes,
            "wrong": max(int(Run(*one).wrong) for one in summed[:, index].tolist()),
        }
        if backend.streams:
            row |= {"backend": backend.name, "ratio": logical_bytes / wire_bytes, "host_waits": slowest[-1].host_waits}
        if backend.nodes:
            row["between_bytes"] = int(slowest[-1].between) if slowest[-1].sent else None
        rows.append(row)
    return rows


def _config(variant: Variant, backend: Backend) -> ZipcclConfig | None:
    if variant.settings is None:
        return None
    settings = variant.settings | backend.settings | ({"min_bytes": 0} if variant.always else {})
    return ZipcclConfig(enabled=True, **settings)


@dataclass(frozen=True)
class Run:
    """One measurement of a variant on this rank, per call. ``wrong``: elements that differ from the wanted result.
    ``sent``: bytes, 0 for plain. ``host_waits``: waits for the device. ``between``: bytes that a node sends to others."""

    seconds: float = 0.0
    wrong: float = 0.0
    sent: float = 0.0
    host_waits: float = 0.0
    between: float = 0.0


class Clock:
    """A clock of calls: events of the current stream on devices with streams, otherwise the host's time."""

    def __init__(self, device: torch.device) -> None:
        self._runtime = devices.runtime(device)

    def now(self) -> Any:
        """Return a mark of the stream or of the host, without waiting."""
        if self._runtime is None:
            return time.perf_counter()
        event = self._runtime.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, spans: Sequence[tuple[Any, Any]]) -> float:
        """Return the mean time between the two marks of each span. Waits for the last mark."""
        if self._runtime is None:
            return float(statistics.mean(end - begin for begin, end in spans))
        spans[-1][1].synchronize()
        return float(statistics.mean(begin.elapsed_time(end) for begin, end in spans)) / 1e3


class Trial:
    """Buffers of one case on one rank, and the wanted result, which is that of the plain collective.

    NCCL promises no order of additions. On its groups of more than two ranks, ds_zipccl must therefore give fp32 sums
    in rank order, rounded once, and plain sums are compared with the first plain sum.
    """

    def __init__(self, case: Case, rank: int, ranks: int, backend: Backend, device: torch.device) -> None:
        self._op = op = ops.TRAFFIC[case.op]
        self._iterations = case.iterations
        inputs = elements(case.numel, op.inputs, ranks)
        self._source = case.data.make(inputs, case.dtype, seed=rank).to(device)
        numel = self._source.numel() if op.outputs is None else elements(case.numel, op.outputs, ranks)
        self._output = self._source.new_zeros(numel)
        self.itemsize = self._source.element_size()
        self._configs = {name: _config(variant, backend) for name, variant in VARIANTS.items()}
        self._clock = Clock(device)
        self._between = backend.between
        self._wanted = dict.fromkeys(VARIANTS, self._output.clone())
        self.run("plain")
        self._wanted = dict.fromkeys(VARIANTS, self._output.clone())
        if op.sums and backend.streams and ranks > 2:
            whole, each = torch.zeros(inputs), ranks // (backend.nodes or 1)
            for first in range(0, ranks, each):  # in fp32 inside a node, rounded once, then in the order of the nodes
                summands = [case.data.make(inputs, case.dtype, seed=peer) for peer in range(first, first + each)]
                inside = torch.zeros(inputs)
                for one in summands:
                    inside += one.float()
                whole += inside.to(summands[0].dtype).float()
            own = whole if op.outputs is None else whole[rank * numel : (rank + 1) * numel]
            ours = own.to(self._output.dtype).to(device)
            self._wanted |= {name: ours for name, config in self._configs.items() if config is not None}

    def run(self, variant: str) -> Run:
        """Run the operation :attr:`Case.iterations` times on all ranks, and compare the last result.

        Raises:
            RuntimeError: the policy passed the operation to the plain collective, which is not the variant of the row.
        """
        config = self._configs[variant]
        module: Any = dist if config is None else comm
        more = {} if config is None else {"config": config}
        spans = []
        counters.reset()
        dist.barrier()
        before = self._between()
        for _ in range(self._iterations):
            self._prepare(variant)
            begin = self._clock.now()
            self._op.call(module, self._output, self._source, **more)
            spans.append((begin, self._clock.now()))
        seconds = self._clock.seconds(spans)
        rows = counters.rows()
        passed = [reason for row in rows for reason in row["reasons"]]
        if passed and VARIANTS[variant].always:
            raise RuntimeError(f"{variant} must not pass through, but the operation did: {', '.join(passed)}")
        wrong = differing(self._output, self._wanted[variant], any_nan=self._op.sums)
        waits = sum(row["host_waits"] for row in rows)
        sent = counters.totals()["wire_bytes"] // self._iterations
        between = (self._between() - before) / self._iterations
        return Run(seconds, wrong, sent, waits / self._iterations, between)

    def _prepare(self, variant: str) -> None:
        """Fill the output with the input of an in-place operation, or with wrong bits, which count if they stay."""
        if self._op.outputs is None:
            self._output.copy_(self._source)
        else:
            torch.bitwise_not(words(self._wanted[variant]), out=words(self._output))
