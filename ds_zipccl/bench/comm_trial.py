"""One process of ``bench comm``: run every variant of an operation in turn, take its time, count its bytes, check its bits."""

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
from ds_zipccl.bench import link, namespaces
from ds_zipccl.bench.comm_cases import Calibration, Case, bandwidths, elements
from ds_zipccl.bench.exponents import differing, words
from ds_zipccl.bench.variants import VARIANTS, Variant
from ds_zipccl.comm import calibration
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy import tuner_rules
from ds_zipccl.telemetry import counters

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

    from ds_zipccl.bench.namespaces import Network

LOOPBACKS = ("lo", "lo0")  # names of the loopback interface on Linux and macOS


def take_part(
    rank: int,
    ranks: int,
    network: Network | None,
    port: int,
    cases: list[Case | Calibration],
    results: Queue[dict[str, Any]],
) -> None:
    """Run all ``cases`` as one of ``ranks`` processes; rank 0 puts the rows into ``results``. Blocks until the last row is measured.

    Args:
        network: network whose node this process moves to; None for loopback.
        port: of the store at which the processes meet.
    """
    if network:
        namespaces.enter(network.namespace(rank))  # before any thread is started
    threading.Thread(target=_follow_parent, daemon=True).start()
    host = network.host if network else "127.0.0.1"
    loopback = next((name for _, name in socket.if_nameindex() if name in LOOPBACKS), None)
    if network:
        os.environ["GLOO_SOCKET_IFNAME"] = namespaces.INTERFACE
    elif loopback:  # otherwise gloo picks the interface of the host name, which need not exist
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    # The deprecated names exist in every torch that DeepSpeed runs on.
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
    dist.barrier()  # gloo aborts now and then where one process leaves early
    dist.destroy_process_group()


def _follow_parent() -> None:
    """End this process when its parent is gone, whatever ended the parent."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def measure(case: Case, rank: int, ranks: int, network: Network | None) -> list[dict[str, Any]]:
    """Rows of the case, one for each variant; the same on every rank."""
    trial = Trial(case, rank, ranks)
    shape = (len(case.variants), case.repeats + 1)
    seconds, wrong, sent = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape).long(), torch.zeros(shape).long()
    for _ in range(settling(case.op) if "auto" in case.variants else 0):
        trial.run("auto")
    for repeat in range(case.repeats + 1):  # the first time builds kernels and touches pages; only its bits are checked
        for index, variant in enumerate(case.variants):
            seconds[index, repeat], wrong[index, repeat], sent[index, repeat] = trial.run(variant)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    dist.all_reduce(wrong)
    dist.all_reduce(sent, dist.ReduceOp.MAX)
    logical_bytes = elements(case.numel, ops.TRAFFIC[case.op].plain, ranks) * trial.itemsize
    medians = [statistics.median(times) for times in seconds[:, 1:].tolist()]
    return [
        {
            "op": case.op,
            "dtype": case.dtype,
            "numel": case.numel,
            "ranks": ranks,
            "nodes": network.nodes if network else 1,
            "link": link.name(network.spec if network else None),
            "variant": variant,
            "time_us": medians[index] * 1e6,
            **bandwidths(case.op, case.numel * trial.itemsize, ranks, medians[index]),
            "logical_bytes": logical_bytes,
            "wire_bytes": int(sent[index, -1]) or logical_bytes,
            "wrong": int(wrong[index].max()),
        }
        for index, variant in enumerate(case.variants)
    ]


def settling(op: str) -> int:
    """Calls that the tuner needs at most to choose one of four schedules."""
    soon, late = tuner_rules.DELAY_CALLS
    return 4 * tuner_rules.TRIAL_CALLS + (late if ops.OPS[op].one_sided else soon) + 1


def _config(variant: Variant) -> ZipcclConfig | None:
    if variant.settings is None:
        return None
    settings = variant.settings | ({"min_bytes": 0} if variant.always else {})
    return ZipcclConfig(enabled=True, **settings)


class Trial:
    """Buffers of one case on one rank, and the result of the plain collective."""

    def __init__(self, case: Case, rank: int, ranks: int) -> None:
        self._op = op = ops.TRAFFIC[case.op]
        self._source = case.data.make(elements(case.numel, op.inputs, ranks), case.dtype, seed=rank)
        numel = self._source.numel() if op.outputs is None else elements(case.numel, op.outputs, ranks)
        self._output = self._source.new_zeros(numel)
        self._wanted = self._output.clone()
        self.itemsize = self._source.element_size()
        self._configs = {name: _config(variant) for name, variant in VARIANTS.items()}
        self.run("plain")
        self._wanted = self._output.clone()

    def run(self, variant: str) -> tuple[float, int, int]:
        """Run the operation once on all ranks: seconds, elements that differ from the plain result, bytes sent (0 for plain).

        Raises:
            RuntimeError: the policy let the operation pass, so that the row would not measure its variant.
        """
        if self._op.outputs is None:
            self._output.copy_(self._source)
        else:  # every bit is wrong: an element that is not written counts as wrong
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
        if passed and VARIANTS[variant].always:
            raise RuntimeError(f"{variant} was asked for, but the operation passed through: {', '.join(passed)}")
        wrong = differing(self._output, self._wanted, any_nan=self._op.sums)
        return seconds, wrong, int(counters.totals()["wire_bytes"])
