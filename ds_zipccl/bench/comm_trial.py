"""What one process of ``bench comm`` does: run every variant of a collective in turn, time it, count it, check it."""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import threading
import time
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ds_zipccl import comm, ops
from ds_zipccl.bench import link
from ds_zipccl.bench.comm_cases import OPS, VARIANTS, Calibration, Case, Op
from ds_zipccl.bench.exponents import differing, words
from ds_zipccl.comm import calibration
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy import tuner_rules
from ds_zipccl.telemetry import counters

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

    from ds_zipccl.bench.link import Link

LOOPBACKS = ("lo", "lo0")  # names of that interface on Linux, macOS


def take_part(
    rank: int,
    ranks: int,
    network: Link | None,
    port: int,
    cases: list[Case | Calibration],
    results: Queue[dict[str, Any]],
) -> None:
    """Run all ``cases`` as one of ``ranks`` processes that meet at the store on ``port``; rank 0 puts rows into ``results``.

    ``network``: where this process belongs; None for loopback.
    """
    if network:
        link.enter(network.namespace(rank))  # before any thread is started
    threading.Thread(target=_follow_parent, daemon=True).start()
    host = network.host if network else "127.0.0.1"
    loopback = next((name for _, name in socket.if_nameindex() if name in LOOPBACKS), None)
    if network:
        os.environ["GLOO_SOCKET_IFNAME"] = link.INTERFACE
    elif loopback:  # else gloo picks the interface that the host name belongs to, which need not exist
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    # Newer names of the same collectives; the ones used here exist in every torch that DeepSpeed runs on.
    warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)
    torch.set_num_threads(1)
    patience = timedelta(seconds=cases[0].timeout)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, None, False, patience
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=patience)
    if any(isinstance(case, Case) and "auto" in case.variants for case in cases):
        comm.calibrate()
    for case in cases:
        rows = (
            [calibration.measure().to_json()] if isinstance(case, Calibration) else measure(case, rank, ranks, network)
        )
        for row in rows:
            if rank == 0:
                results.put(row)
    dist.barrier()  # gloo aborts now and then where a process leaves before the others
    dist.destroy_process_group()


def _follow_parent() -> None:
    """End this process when the one that started it is gone, however it went."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def measure(case: Case, rank: int, ranks: int, network: Link | None) -> list[dict[str, Any]]:
    """One row for each variant; the same on every rank."""
    op = OPS[case.op]
    trial = Trial(op, case, rank, ranks)
    shape = (len(case.variants), case.repeats + 1)
    seconds, wrong, sent = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape).long(), torch.zeros(shape).long()
    for _ in range(settling(case.op) if "auto" in case.variants else 0):
        trial.run("auto")
    for repeat in range(case.repeats + 1):  # the first time builds kernels and touches pages; only its bits count
        for index, variant in enumerate(case.variants):
            seconds[index, repeat], wrong[index, repeat], sent[index, repeat] = trial.run(variant)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    dist.all_reduce(wrong)
    dist.all_reduce(sent, dist.ReduceOp.MAX)
    logical_bytes = int(case.numel * op.sent(ranks)) * trial.itemsize
    return [
        {
            "op": case.op,
            "dtype": case.dtype,
            "numel": case.numel,
            "ranks": ranks,
            "nodes": network.nodes if network else 1,
            "link": str(network or link.LOOPBACK),
            "variant": variant,
            "time_us": statistics.median(seconds[index, 1:].tolist()) * 1e6,
            "logical_bytes": logical_bytes,
            "wire_bytes": int(sent[index, -1]) or logical_bytes,
            "wrong": int(wrong[index].max()),
        }
        for index, variant in enumerate(case.variants)
    ]


def settling(op: str) -> int:
    """Calls that ``auto`` takes to choose between four schedules at most."""
    soon, late = tuner_rules.DELAY_CALLS
    return 4 * tuner_rules.TRIAL_CALLS + (late if ops.OPS[op].one_sided else soon) + 1


class Trial:
    """Buffers of one case on one rank, and what the plain collective makes of them."""

    def __init__(self, op: Op, case: Case, rank: int, ranks: int) -> None:
        self._op = op
        self._source = case.data.make(int(case.numel * op.inputs(ranks)), case.dtype, seed=rank)
        numel = self._source.numel() if op.outputs is None else int(case.numel * op.outputs(ranks))
        self._output = self._source.new_zeros(numel)
        self._wanted = self._output.clone()
        self.itemsize = self._source.element_size()
        self._configs = {
            name: None if settings is None else ZipcclConfig(enabled=True, **settings)
            for name, settings in VARIANTS.items()
        }
        self.run("plain")
        self._wanted = self._output.clone()

    def run(self, variant: str) -> tuple[float, int, int]:
        """Run once, on all ranks together: seconds, elements that differ from the plain result, bytes sent (0 for plain).

        Raises:
            RuntimeError: the policy let the operation pass, so that the row would not be what its name says.
        """
        if self._op.outputs is None:
            self._output.copy_(self._source)
        else:  # bits that are wrong everywhere: a result that is left out shows
            torch.bitwise_not(words(self._wanted), out=words(self._output))
        config = self._configs[variant]
        module: Any = dist if config is None else comm
        more = {} if config is None else {"config": config}
        counters.reset()
        dist.barrier()
        start = time.perf_counter()
        self._op.call(module, self._output, self._source, **more)
        seconds = time.perf_counter() - start
        passed = [reason for row in counters.rows() for reason in row["reasons"]]
        if passed and variant != "auto":
            raise RuntimeError(f"{variant} was asked for, but the operation passed uncoded: {', '.join(passed)}")
        wrong = differing(self._output, self._wanted, any_nan=self._op.sums)
        return seconds, wrong, int(counters.totals()["wire_bytes"])
