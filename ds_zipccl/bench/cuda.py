"""``bench codec --device cuda``: the CUDA kernels at message sizes, beside a copy and nvCOMP.

Columns (also the keys of the rows in ``--json``):

* ``route``: native (nvcc), nvrtc, or "peer". ``codec``, ``dtype``, ``mib``: codec, and dtype and size of the tensor.
* ``ratio``: bytes of the tensor / bytes of its frame.
* ``encode_gbps``, ``decode_gbps``: 1e9 bytes of tensor a second; ``copy_gbps``: of a device-to-device copy of the tensor in the same run.
* ``encode_moved``, ``decode_moved``: bytes that must be read and written per second / bytes that the copy reads and writes per second.
* ``sum_moved``: the same for the sum of eight frames into one tensor: eight frames read, one tensor written.
* ``pair_us``: one encode and one decode, from the call to their end on the device, launched from Python.
* ``wrong``: decoded elements whose bits differ.

Data are normal. Buffers rotate through more than 256 MiB, which no L2 cache holds. Calls are recorded as CUDA graphs, so that times are
the device's; figures are medians of ``--repeats`` replays. Peers are called through their Python interface, one buffer after another.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ds_zipccl.bench import ToolError, tables
from ds_zipccl.bench.tables import Column

if TYPE_CHECKING:
    import torch

ROTATE_BYTES = 256 << 20
SUMMANDS = 8
COLUMNS = (
    Column("route", width=6),
    Column("codec", width=8),
    Column("dtype", width=8),
    Column("mib", "d"),
    Column("ratio", ".3f"),
    Column("encode_gbps", ".0f"),
    Column("decode_gbps", ".0f"),
    Column("copy_gbps", ".0f"),
    Column("encode_moved", ".3f"),
    Column("decode_moved", ".3f"),
    Column("sum_moved", ".3f"),
    Column("pair_us", ".1f"),
    Column("wrong", "d"),
)
#: Algorithms of nvCOMP, with their options for 16-bit floats.
PEERS: dict[str, dict[str, str]] = {
    "nvcomp-ans": {"algorithm": "ANS", "data_type": "<f2"},
    "nvcomp-bitcomp": {"algorithm": "Bitcomp", "data_type": "<u2"},
}


class Coder(Protocol):
    """``encode(i)`` codes buffer i; ``decode(i)`` decodes it to its output. Neither blocks unless ``eager``."""

    eager: bool

    def encode(self, buffer: int) -> None: ...
    def decode(self, buffer: int) -> None: ...
    def coded_bytes(self) -> int: ...
    def result(self, buffer: int) -> torch.Tensor: ...


class FrameCoder:
    """Our kernels on whole frames in slots."""

    eager = False

    def __init__(self, tensors: Sequence[torch.Tensor], route: str, codec: str, block: int) -> None:
        import torch

        from ds_zipccl import codecs, kernels
        from ds_zipccl.kernels.cuda import new_status

        like = tensors[0]
        bound = codecs.compress_bound(like.numel(), like.dtype, codec, block=block)
        self._route: Any = kernels.route(route, "cuda")
        self._codec, self._block, self._tensors = codec, block, tensors
        self.slots = [torch.empty(bound, dtype=torch.uint8, device=like.device) for _ in tensors]
        self._outs = [torch.empty_like(tensor) for tensor in tensors]
        self._status = new_status(like.device)

    def encode(self, buffer: int) -> None:
        self._route.encode_frames([self._tensors[buffer]], self._codec, self._block, [self.slots[buffer]])

    def decode(self, buffer: int) -> None:
        self._route.decode_frames([self.slots[buffer]], self._block, [self._outs[buffer]], self._status)

    def sum(self, sums: torch.Tensor) -> None:
        """Sum of :data:`SUMMANDS` frames."""
        slots = [self.slots[i % len(self.slots)] for i in range(SUMMANDS)]
        self._route.decode_sum_frames(slots, self._block, sums.dtype, sums, self._status)

    def coded_bytes(self) -> int:
        from ds_zipccl import frame

        return frame.parse(self.slots[0][: frame.MAX_HEADER_BYTES].cpu(), self.slots[0].numel()).frame_bytes

    def result(self, buffer: int) -> torch.Tensor:
        from ds_zipccl.kernels.cuda import raise_failure

        raise_failure(self._status)
        return self._outs[buffer]


class NvcompCoder:
    """nvCOMP through its Python interface, which allocates the results."""

    eager = True

    def __init__(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        import torch
        from nvidia import nvcomp

        stream = torch.cuda.current_stream().cuda_stream
        self._codec = nvcomp.Codec(**PEERS[name], cuda_stream=stream)
        self._inputs = [nvcomp.as_array(tensor.view(torch.int16)) for tensor in tensors]
        self._dtype = tensors[0].dtype
        self._coded: list[Any] = [None] * len(tensors)
        self._decoded: list[Any] = [None] * len(tensors)

    def encode(self, buffer: int) -> None:
        self._coded[buffer] = self._codec.encode(self._inputs[buffer])

    def decode(self, buffer: int) -> None:
        self._decoded[buffer] = self._codec.decode(self._coded[buffer])

    def coded_bytes(self) -> int:
        return int(self._coded[0].buffer_size)

    def result(self, buffer: int) -> torch.Tensor:
        import torch

        return torch.as_tensor(self._decoded[buffer], device="cuda").view(torch.uint8).view(self._dtype)


def main(args: argparse.Namespace) -> int:
    """Run ``bench codec --device cuda``; 1 if any element came back wrong, else 0."""
    import torch

    if not torch.cuda.is_available():
        raise ToolError("torch sees no CUDA device; `python -m ds_zipccl report` lists the routes that work here")
    coders = list(_coders(args))
    table, rows = tables.Table(COLUMNS), []
    cases = [(dtype, mib, coder) for dtype in args.dtype for mib in args.mib for coder in coders]
    for dtype, mib, (route, codec, begin) in tables.progress(cases, "bench codec", len(cases)):
        try:
            row = measure(dtype, mib, begin, args.repeats)
        except (RuntimeError, TypeError, ValueError) as error:
            if route != "peer":
                raise
            tables.complain(f"{codec} {dtype} {mib} MiB: {type(error).__name__}: {error}")
            continue
        rows.append({"route": route, "codec": codec, "dtype": dtype, "mib": mib, **row})
        table.add(rows[-1])
    if args.json:
        device = torch.cuda.get_device_properties(0)
        settings = {
            "device": device.name, "memory_bytes": device.total_memory, "cuda": torch.version.cuda,
            "block": args.block, "repeats": args.repeats, "nvcomp": tables.version("nvidia-nvcomp-cu13"),
        }  # fmt: skip
        tables.write_json(args.json, rows, args.command, **settings)
    return 1 if any(row["wrong"] for row in rows) else 0


def _coders(args: argparse.Namespace) -> Iterator[tuple[str, str, Callable[[Sequence[torch.Tensor]], Coder]]]:
    from ds_zipccl import kernels

    reasons = kernels.why("cuda")
    usable = [name for name in args.route or reasons if not reasons.get(name, "no such route")]
    for name in args.route or reasons:
        if name not in usable:
            tables.complain(f"route {name} left out: {reasons.get(name, 'no such route')}")
    if not usable:
        raise ToolError("no CUDA route works here; `python -m ds_zipccl report` says why")
    for route in usable:
        for codec in args.codec:
            if codec != "raw":
                yield route, codec, partial(FrameCoder, route=route, codec=codec, block=args.block)
    if args.peers is None:
        return
    try:
        from nvidia import nvcomp  # noqa: F401
    except ImportError as error:
        tables.complain(f"nvCOMP left out: {error}; pip install nvidia-nvcomp-cu13")
        return
    for name in PEERS:
        yield "peer", name, partial(NvcompCoder, name=name)


def measure(
    dtype: str, mib: int, begin: Callable[[Sequence[torch.Tensor]], Coder], repeats: int
) -> dict[str, float | int | None]:
    """Figures of one row."""
    import torch

    kind = getattr(torch, dtype)
    size = mib << 20
    count = max(2, -(-ROTATE_BYTES // size))
    generator = torch.Generator("cuda").manual_seed(1)
    normal = torch.randn(size // kind.itemsize, device="cuda", generator=generator).to(kind)
    tensors = [normal.roll(i) for i in range(count)]
    coder = begin(tensors)
    for i in range(count):
        coder.encode(i)
        coder.decode(i)
    copies = [torch.empty_like(normal) for _ in range(min(count, 2))]
    every = range(count)

    def each(step: Callable[[int], None]) -> None:
        for i in every:
            step(i)

    encode = _seconds(lambda: each(coder.encode), repeats, coder.eager) / count
    wrong = 0
    decode = _seconds(lambda: each(coder.decode), repeats, coder.eager) / count
    for i in every:
        wrong += int((coder.result(i).view(torch.uint8) != tensors[i].view(torch.uint8)).sum())
    copy = _seconds(lambda: [copies[i % 2].copy_(tensors[i]) for i in every], repeats, False) / count
    coded, moved = coder.coded_bytes(), 2 * size / copy
    summed = None
    if isinstance(coder, FrameCoder):
        sums = torch.empty_like(normal)
        seconds = _seconds(lambda: coder.sum(sums), repeats, False)
        summed = (SUMMANDS * coded + size) / seconds / moved
        wanted = tensors[0].float()
        for i in range(1, SUMMANDS):
            wanted = wanted + tensors[i % count].float()
        wrong += int((sums != wanted.to(kind)).sum())
    return {
        "ratio": size / coded,
        "encode_gbps": size / encode / 1e9,
        "decode_gbps": size / decode / 1e9,
        "copy_gbps": size / copy / 1e9,
        "encode_moved": (size + coded) / encode / moved,
        "decode_moved": (size + coded) / decode / moved,
        "sum_moved": summed,
        "pair_us": 1e6 * statistics.median(_pair(coder) for _ in range(20)),
        "wrong": wrong,
    }


def _seconds(calls: Callable[[], object], repeats: int, eager: bool) -> float:
    """Device seconds of the calls: of a replay of their graph, or if ``eager`` of the calls themselves."""
    import torch

    run = calls
    if not eager:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        run = graph.replay
    run()
    times: list[float] = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _pair(coder: Coder) -> float:
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    coder.encode(0)
    coder.decode(0)
    torch.cuda.synchronize()
    return time.perf_counter() - start
