"""Counts of a step on NCCL groups, ZeRO-3 and experts: ``python -m ds_zipccl.benchmarks.comm.counted --json PATH``.

Rank 0 of each topology runs the schedules of the package on a group without peers. Collectives and kernels only count;
memory is reserved, never touched. Rank 0 stands for all ranks, because all run the same schedules. Frames have the
sizes that follow from the typical ratios of the cost model.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_zipccl import comm, kernels
from ds_zipccl.comm.group_state import group_state, resolve_group
from ds_zipccl.comm.transport import COLLECTIVE_TRANSPORTS
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.frame import HEADER_BYTES
from ds_zipccl.kernels.cuda.jobs import frame_bytes
from ds_zipccl.policy import admission, wire
from ds_zipccl.policy.cost_model import GATHER, RATIO, RDMA_REACH, SUM, DeviceProfile
from ds_zipccl.telemetry import counters
from ds_zipccl.tools import tables
from ds_zipccl.tools.tables import Column

_Q, _UP, _UP3 = 4096**2, 4096 * 11008, 4096 * 14336
#: MB of a gather of DeepSpeed -> elements of its parameters, of Llama 7B and Llama 3 8B: prefetches of some 5e7 elements.
GATHERS = {33: (_Q,), 67: (_Q,) * 2, 90: (_UP,), 117: (_UP3,), 124: (_Q, _UP), 235: (_UP3,) * 2}
#: Gathers of a layer of Llama 7B; elements of its embeddings; layers; elements per gradient bucket.
LAYER = (GATHERS[67],) * 2 + (GATHERS[90],) * 3
EMBEDDINGS = (32_000 * 4096,) * 2
LAYERS, BUCKET = 32, 500_000_000
#: Elements that a rank sends in an exchange of an expert layer: 8192 tokens, capacity factor 1.25; kinds of exchanges.
EXCHANGE, EXCHANGES = 8192 * 5 // 4 * 4096, ("dispatch", "combine", "combine.bwd", "dispatch.bwd")
#: Ratio of the exchanges in each step; it varies with the unused capacity. The first and the last step are counted.
EXCHANGE_RATIOS = (1.9, 1.6, 1.8, 2.1, 1.7, 2.0)
#: Nodes, and GPUs per node; their network of 100 Gbit/s per node.
TOPOLOGIES, PROFILE = ((2, 8), (4, 8)), DeviceProfile(RDMA_REACH * 100e9 / 8)
#: Bytes of a GPU's memory, and bytes free after the first step.
MEMORY = 80 << 30, 20 << 30
BACKEND, DEVICE = "fake", torch.device("cpu")
CONFIG = ZipcclConfig(enabled=True, mode="always", nccl="on", reduction="fp32")

COLUMNS = (
    Column("nodes", "d"),
    Column("each", "d"),
    Column("staging_mib", ",.0f"),
    *tables.alike(
        "waits_step waits_bucket fragments_layer collectives_layer collectives_bucket launches_layer launches_bucket",
        "d",
    ),
    *tables.alike("sent_gb plain_gb", ".1f"),
    *tables.alike("exchange_waits idle_waits_first idle_waits exchange_launches_first exchange_launches", "d"),
    *tables.alike("read_gb_first read_gb", ".2f"),
)


class Counting:
    """Collectives and kernels that only count: a :class:`~ds_zipccl.comm.transport.protocol.CollectiveTransport` and
    the kernel functions that its schedules call. ``between``: bytes that a node sends to other nodes; gathers of the
    backend are rings. ``calls``: counts by kind, including idle waits of the host and bytes that encoders read."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.nodes: Sequence[Sequence[int]] = ()
        self.between = 0.0
        self.ratio = 1.0
        self._issued = 0

    def __call__(self, group: dist.ProcessGroup) -> Counting:
        return self

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        self.calls["collective"] += 1
        self.between += whole.nbytes - part.nbytes

    def exchange(self, received: Mapping[int, torch.Tensor], sent: Mapping[int, torch.Tensor]) -> None:
        self.calls["collective"] += 1
        afar = sum(one.nbytes for rank, one in sent.items() if rank not in self.nodes[0])
        self.between += len(self.nodes[0]) * afar

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> None:
        self.calls["collective"] += 1
        afar = sum(size for rank, size in enumerate(sent_sizes) if rank not in self.nodes[0])
        self.between += len(self.nodes[0]) * afar * sent.itemsize

    def max(self, words: torch.Tensor) -> None:
        words[1:][words[1:] == 0] = words.max()  # the sizes of the other ranks
        self._issued = self.calls["collective"]

    def timeout(self, device: torch.device) -> timedelta:
        self.calls["idle wait"] += self.calls["collective"] == self._issued  # called before the host waits
        return timedelta(minutes=1)

    def frame_sizes(
        self, segments: Sequence[torch.Tensor], code: str, block: int, headers: torch.Tensor, bases: Any = None
    ) -> None:
        self.encode_frames(segments, code, block, headers.view(len(segments), -1))

    def encode_frames(
        self, segments: Sequence[torch.Tensor] = (), code: str = "", block: int = 0, slots: Any = ()
    ) -> None:
        self.calls["launch"] += 1
        self.calls["read"] += sum(words.nbytes for words in segments) if code != "raw" else 0
        for words, slot in zip(segments, slots, strict=True):
            frame_bytes(slot[:HEADER_BYTES].view(1, -1)).fill_(int(words.nbytes / self.ratio))

    def __getattr__(self, name: str) -> Any:
        if name in ("encode_gather", "decode_gather", "decode_frames", "decode_sum_frames"):
            self.calls["fragment"] += name == "encode_gather"
            return lambda *arguments, **named: self.encode_frames()
        raise AttributeError(name)


@contextmanager
def world(nodes: int, each: int, counting: Counting, device: str = DEVICE.type) -> Iterator[None]:
    """Make this process rank 0 of ``nodes`` nodes of ``each`` ranks, without peers, for tensors on ``device``."""
    dist.init_process_group(BACKEND, store=FakeStore(), rank=0, world_size=nodes * each)
    try:
        counting.nodes = [list(range(node * each, (node + 1) * each)) for node in range(nodes)]
        state = group_state(None)
        assert state is not None  # this process is in the default group
        state.nodes = [list(ranks) for ranks in counting.nodes]
        state.device_staging[device] = wire.device_staging(*MEMORY)
        state.device_profiles[device, BACKEND] = PROFILE
        yield
    finally:
        dist.destroy_process_group()


def _counts(counting: Counting, call: Callable[[], Any], kind: str = GATHER) -> Counter[str]:
    """Return the counts of a call; "wait": of the host, "between": bytes that a node sends to others."""
    counters.reset()
    counting.calls.clear()
    counting.between, counting.ratio = 0.0, RATIO[kind]
    call()
    waits = sum(row["host_waits"] for row in counters.rows())
    return Counter({**counting.calls, "wait": waits, "between": int(counting.between)})


def _gather(counting: Counting, ranks: int, sizes: Sequence[int]) -> Counter[str]:
    """Return the counts of a gather of parameters, whose sizes are agreed ahead; "agree": host waits of the agreement."""
    group = resolve_group(None)
    shards = [
        (comm.parameter(group, DEVICE.type, str(number), size // ranks), _words(size // ranks))
        for number, size in enumerate(sizes)
    ]
    own, whole, parameters = _words(sum(sizes) // ranks), _words(sum(sizes)), [one for one, _ in shards]
    waits = _counts(counting, lambda: comm.agree_sizes(shards, config=CONFIG))["wait"]
    named: Any = {"parameters": parameters, "config": CONFIG, "role": "zero_param"}
    return _counts(counting, lambda: comm.all_gather_into_tensor(whole, own, **named)) + Counter(agree=waits)


def count(nodes: int, each: int, counting: Counting) -> dict[str, Any]:
    """Return the counts of one step: the gathers of each layer and pass, and a sum per gradient bucket."""
    ranks, numel = nodes * each, sum(map(sum, LAYER))
    buckets = -(-(LAYERS * numel + sum(EMBEDDINGS)) // BUCKET)
    with world(nodes, each, counting):
        gathers = {sizes: _gather(counting, ranks, sizes) for sizes in dict.fromkeys((*LAYER, *GATHERS.values()))}
        source, shard = _words(BUCKET // ranks * ranks), _words(BUCKET // ranks)
        bucket = _counts(
            counting, lambda: comm.reduce_scatter_tensor(shard, source, config=CONFIG, role="zero_grad"), SUM
        )
        checks = _counts(counting, lambda: comm.check_frames(DEVICE, config=CONFIG))["wait"]
        staging = counters.memory()["staging buffers of frames"]
    layer = sum((gathers[sizes] for sizes in LAYER), Counter[str]())
    ring = 2 * (ranks - 1) / ranks  # bytes per bf16 element
    agreed = layer["agree"] // len(LAYER)  # one agreement has all parameters
    row = {
        "nodes": nodes,
        "each": each,
        "staging_mib": staging / 2**20,
        "waits_step": agreed + checks + 2 * LAYERS * layer["wait"] + buckets * bucket["wait"],
        "waits_bucket": bucket["wait"],
        "fragments_layer": layer["fragment"],
        "collectives_layer": layer["collective"],
        "collectives_bucket": bucket["collective"],
        "launches_layer": layer["launch"],
        "launches_bucket": bucket["launch"],
        "sent_gb": (2 * LAYERS * layer["between"] + buckets * bucket["between"]) / 1e9,
        "plain_gb": ring * (2 * LAYERS * numel + buckets * BUCKET) / 1e9,
    }
    for mb, sizes in GATHERS.items():
        one = gathers[sizes]
        row |= {f"fragments_{mb}": one["fragment"], f"collectives_{mb}": one["collective"]}
        row |= {f"sent_mb_{mb}": one["between"] / 1e6, f"plain_mb_{mb}": ring * sum(sizes) / 1e6}
    return row


def _exchanges(counting: Counting) -> dict[str, Any]:
    """Return the counts of the exchanges of an expert layer in the first step, which agrees on sizes, and the last."""
    source, target = _words(EXCHANGE), _words(EXCHANGE)
    steps = []
    for counting.ratio in EXCHANGE_RATIOS:
        counters.reset()
        counting.calls.clear()
        for kind in EXCHANGES:
            comm.all_to_all_single(target, source, config=CONFIG, role="ep", kind=kind)
        steps.append(dict(counting.calls))
    waits = sum(row["host_waits"] for row in counters.rows())
    return {"exchange_waits": waits} | {
        name + when: calls[key] / unit if unit > 1 else calls[key]
        for name, key, unit in (
            ("idle_waits", "idle wait", 1),
            ("exchange_launches", "launch", 1),
            ("read_gb", "read", 1e9),
        )
        for when, calls in (("_first", steps[0]), ("", steps[-1]))
    }


def _words(numel: int) -> torch.Tensor:
    return torch.empty(numel, dtype=torch.bfloat16)


def install(transport: Any, backend: Callable[[], Any]) -> None:
    """Let groups of :data:`BACKEND` have the schedules of NCCL groups on CPU tensors, by these collectives and kernels."""
    COLLECTIVE_TRANSPORTS[BACKEND] = transport
    admission.CODED_BACKENDS["cpu"] = (BACKEND,)
    admission.STREAM_BACKENDS += (BACKEND,)
    kernels.ROUTES["cpu"] = {"counted": backend}


def rows() -> list[dict[str, Any]]:
    """Return the counts of all :data:`TOPOLOGIES`. The backend stays installed in this process."""
    counting = Counting()
    install(counting, lambda: counting)
    found = [count(nodes, each, counting) for nodes, each in TOPOLOGIES]
    for row in found:
        with world(row["nodes"], row["each"], counting):
            row |= _exchanges(counting)
    return found


def run(
    about: str | None, module: str, columns: Sequence[Column], rows: Callable[..., list[dict[str, Any]]], made: str,
    devices: Sequence[str] = (),
) -> None:  # fmt: skip
    """Print the rows of a module that is called as a program, and write them to the file of ``--json``.

    Args:
        about, made: the description of the program, and the word of the documentation for its figures.
        devices: values of ``--device``, which ``rows`` then takes; the first is the default.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--json", help="file for the rows")
    if devices:
        parser.add_argument("--device", choices=devices, default=devices[0], help="of the tensors")
    args = parser.parse_args()
    found = rows(args.device) if devices else rows()
    tables.show(columns, found)
    if args.json:
        device = f"--device {args.device} " if devices and args.device != devices[0] else ""
        command = f"python -m ds_zipccl.benchmarks.comm.{module} {device}--json {args.json}"
        tables.write_json(args.json, found, command, made=made)


if __name__ == "__main__":
    run(__doc__, "counted", COLUMNS, rows, "Counted")
