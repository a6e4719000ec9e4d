"""``bench codec --device cuda``: the CUDA kernels at message sizes, compared with a copy and nvCOMP.

Columns (also the keys of the rows in ``--json``):

* ``route``: native (nvcc), cupy, or "peer". ``codec``, ``dtype``, ``mib``: the codec, and dtype and size of the tensor.
* ``block``: elements per block. ``offset``: bytes from a multiple of 16 to the first word.
* ``ratio``: bytes of the tensor / bytes of its frame.
* ``encode_gbps``, ``decode_gbps``: 1e9 bytes of tensor per second. ``copy_gbps``: the same for a copy on the device.
* ``encode_moved``, ``decode_moved``: memory traffic per second (tensor and frame) / that of the copy.
* ``sum_moved``: the same for the sum of eight frames, which reads eight frames and writes one tensor.
* ``pair_us``: one encode and one decode called from Python, until both have ended on the device.
* ``wrong``: decoded bytes that differ from the tensor's, with a lossy codec from those of ``project``; and wrong sums.

Data are normal. Buffers rotate through at least 256 MiB, which no L2 cache holds. CUDA graphs replay the calls, so that
only the device's time counts; figures are medians of ``--repeats`` replays. Lossy codecs and peers are called from
Python, one buffer after another, and may wait for the device. ``--floors`` adds rows of the lossless codecs with
misaligned words and with blocks of 128, and compares the rows with the figures that a GPU must reach. The rows of peers
come first at each size. ``--json`` is written after every row. It also has ``left_out``, the reason for each missing
row, and ``python_us``, the host's time by route for calls with 1 and 20 tensors and for a gather over 64 ranks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ds_zipccl.benchmarks.codec import floors
from ds_zipccl.tools import ToolError, tables
from ds_zipccl.tools.tables import Column

if TYPE_CHECKING:
    import torch

    from ds_zipccl.lossy import LossyCodec

#: Device of the tensors; tests set the device of the emulated kernels.
DEVICE = "cuda"
MIB_BYTES, ROTATE_BYTES = 1 << 20, 256 << 20
SUMMANDS = 8
COLUMNS = (
    Column("route", width=6), Column("codec", width=16), Column("dtype", width=8), Column("mib", "d"), Column("block", "d"),
    Column("offset", "d"), Column("ratio", ".3f"), Column("encode_gbps", ".0f"), Column("decode_gbps", ".0f"),
    Column("copy_gbps", ".0f"), Column("encode_moved", ".3f"), Column("decode_moved", ".3f"), Column("sum_moved", ".3f"),
    Column("pair_us", ".1f"), Column("wrong", "d"),
)  # fmt: skip

#: Peer -> options of nvCOMP for 16-bit floats.
PEERS: dict[str, dict[str, str]] = {
    "nvcomp-ans": {"algorithm": "ANS", "data_type": "<f2"},
    "nvcomp-bitcomp": {"algorithm": "Bitcomp", "data_type": "<u2"},
}
#: Tensors per call for the host's time, their elements, and calls per timing. Small tensors keep the device idle.
PYTHON_TENSORS, PYTHON_NUMEL, PYTHON_CALLS = (1, 20), 4096, 40
#: Ranks of the gather of which the host's time is measured.
PYTHON_RANKS = 64


@dataclass(frozen=True)
class Case:
    """A row to be measured."""

    route: str
    codec: str
    dtype: str
    mib: int
    block: int
    begin: Callable[[Sequence[torch.Tensor]], Coder]
    offset: int = 0

    def place(self) -> dict[str, Any]:
        """Columns that identify the row."""
        return {key: getattr(self, key) for key in ("route", "codec", "dtype", "mib", "block", "offset")}


class Coder(Protocol):
    """``encode(i)`` codes buffer i; ``decode(i)`` decodes the frame to output i. Both may block only if ``eager``."""

    eager: bool

    def encode(self, buffer: int) -> None: ...
    def decode(self, buffer: int) -> None: ...
    def coded_bytes(self) -> int: ...
    def result(self, buffer: int) -> torch.Tensor: ...
    def wanted(self, buffer: int) -> torch.Tensor: ...


class FrameCoder:
    """The CUDA kernels of ds_zipccl on whole frames in slots."""

    eager = False

    def __init__(self, tensors: Sequence[torch.Tensor], route: str, codec: str, block: int) -> None:
        import torch

        from ds_zipccl import codecs, kernels
        from ds_zipccl.kernels.cuda.backend import new_status

        like = tensors[0]
        bound = codecs.compress_bound(like.numel(), like.dtype, codec, block=block)
        self._route: Any = kernels.route(route, DEVICE)
        self._codec, self._block, self._tensors = codec, block, tensors
        self.slots = [torch.empty(bound, dtype=torch.uint8, device=like.device) for _ in tensors]
        self._outs = [_like(tensor) for tensor in tensors]
        self._status = new_status(like.device)

    def encode(self, buffer: int) -> None:
        self._route.encode_frames([self._tensors[buffer]], self._codec, self._block, [self.slots[buffer]])

    def decode(self, buffer: int) -> None:
        self._route.decode_frames([self.slots[buffer]], self._block, [self._outs[buffer]], self._status)

    def encode_all(self) -> None:
        """Encode all tensors in one call."""
        self._route.encode_frames(self._tensors, self._codec, self._block, self.slots)

    def decode_all(self) -> None:
        """Decode all frames in one call."""
        self._route.decode_frames(self.slots, self._block, self._outs, self._status)

    def sum(self, sums: torch.Tensor) -> None:
        """Write the sum of :data:`SUMMANDS` frames to ``sums``."""
        slots = [self.slots[i % len(self.slots)] for i in range(SUMMANDS)]
        self._route.decode_sum_frames(slots, self._block, sums.dtype, sums, self._status)

    def coded_bytes(self) -> int:
        from ds_zipccl import frame

        return frame.parse(self.slots[0][: frame.MAX_HEADER_BYTES].cpu(), self.slots[0].numel()).frame_bytes

    def result(self, buffer: int) -> torch.Tensor:
        from ds_zipccl.kernels.cuda.backend import raise_failure

        raise_failure(self._status)
        return self._outs[buffer]

    def wanted(self, buffer: int) -> torch.Tensor:
        return self._tensors[buffer]


class LossyCoder:
    """A lossy codec through ``compress`` and ``decompress``, which write to buffers of this object."""

    eager = True

    def __init__(self, tensors: Sequence[torch.Tensor], route: str, codec: LossyCodec, block: int) -> None:
        import torch

        from ds_zipccl import codecs

        like = tensors[0]
        bound = codecs.compress_bound(like.numel(), like.dtype, codec, lossy=True, block=block)
        self._tensors, self._codec, self._route, self._block = tensors, codec, route, block
        self._places = [torch.empty(bound, dtype=torch.uint8, device=like.device) for _ in tensors]
        self._frames = self._places.copy()
        self._outs = [torch.empty_like(tensor) for tensor in tensors]

    def encode(self, buffer: int) -> None:
        from ds_zipccl import codecs

        self._frames[buffer] = codecs.compress(
            self._tensors[buffer], self._codec, lossy=True, block=self._block, shaped=False, checksum=False, route=self._route,
            out=self._places[buffer],
        )  # fmt: skip

    def decode(self, buffer: int) -> None:
        from ds_zipccl import codecs

        codecs.decompress(self._frames[buffer], out=self._outs[buffer], route=self._route)

    def coded_bytes(self) -> int:
        return self._frames[0].numel()

    def result(self, buffer: int) -> torch.Tensor:
        return self._outs[buffer]

    def wanted(self, buffer: int) -> torch.Tensor:
        from ds_zipccl import codecs

        return codecs.project(self._tensors[buffer], self._codec, route=self._route)


class NvcompCoder:
    """nvCOMP through its Python interface, which allocates the results."""

    eager = True

    def __init__(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        import torch
        from nvidia import nvcomp

        stream = torch.cuda.current_stream().cuda_stream
        self._codec = nvcomp.Codec(**PEERS[name], cuda_stream=stream)
        self._tensors = tensors
        self._inputs = [nvcomp.as_array(tensor.view(torch.int16)) for tensor in tensors]
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

        like = self._tensors[buffer]
        return torch.as_tensor(self._decoded[buffer], device=like.device).view(torch.uint8).view(like.dtype)

    def wanted(self, buffer: int) -> torch.Tensor:
        return self._tensors[buffer]


def main(args: argparse.Namespace) -> int:
    """Run ``bench codec --device cuda``; 1 if an element is wrong or a row of ds_zipccl failed, 3 if only a floor was missed, else 0."""
    import torch

    if not torch.cuda.is_available():
        raise ToolError("torch sees no CUDA device; `python -m ds_zipccl report` lists the routes that work here")
    device = torch.cuda.get_device_properties(0)
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    settings: dict[str, Any] = {
        "device": device.name, "memory_bytes": device.total_memory, "cuda": torch.version.cuda,
        "block": args.block, "repeats": args.repeats, "nvcomp": tables.version("nvidia-nvcomp-cu13"), "left_out": left_out,
    }  # fmt: skip

    def save() -> None:
        if args.json:
            tables.write_json(args.json, rows, args.command, **settings)

    table, failed = tables.Table(COLUMNS), 0
    cases = list(_cases(args, left_out))
    for case in tables.progress(cases, "bench codec", len(cases)):
        place = case.place()
        try:
            rows.append({**place, **measure(case, args.repeats)})
        except Exception as error:  # the remaining rows are still useful
            left_out[" ".join(map(str, place.values()))] = f"{type(error).__name__}: {error}"
            failed += case.route != "peer"
            continue
        finally:
            save()
        table.add(rows[-1])
    routes = list(dict.fromkeys(case.route for case in cases if case.route != "peer"))
    settings["python_us"] = {route: python_times(route) for route in routes}
    for route, times in settings["python_us"].items():
        for name, microseconds in times.items():
            tables.say(f"Python, {route}, {name}: {microseconds:.1f} us")
    if args.floors:
        settings["floors"] = floors.compare(rows, device.name, settings["python_us"][routes[0]])
    save()
    for name, reason in left_out.items():
        tables.complain(f"{name} left out: {reason}")
    missed = floors.missed(settings.get("floors", ()))
    for line in missed:
        tables.complain(f"floor missed: {line}")
    return 1 if failed or any(row["wrong"] for row in rows) else floors.SLOW if missed else 0


def _cases(args: argparse.Namespace, left_out: dict[str, str]) -> Iterator[Case]:
    """Yield the rows to measure, and name in ``left_out`` the routes and peers that do not work here."""
    from ds_zipccl import kernels

    usable = []
    for name in args.route or kernels.ROUTES[DEVICE]:
        try:
            kernels.route(name, DEVICE)
            usable.append(name)
        except (kernels.RouteUnavailable, ValueError) as error:
            left_out[f"route {name}"] = str(error)
    if not usable:
        raise ToolError(f"no CUDA route works here: {left_out}; see `python -m ds_zipccl report`")
    codecs = [codec for codec in args.codec if codec != "raw"]
    pairs = [(route, codec) for route in usable for codec in codecs]
    for route, codec in pairs.copy():
        if not isinstance(codec, str) and (reason := _why_not(codec, route, DEVICE)):
            left_out[f"{route} {codec}"] = reason
            pairs.remove((route, codec))

    def ours(route: str, codec: str | LossyCodec, dtype: str, mib: int, block: int, offset: int = 0) -> Case:
        coder: Any = FrameCoder if isinstance(codec, str) else LossyCoder
        return Case(route, str(codec), dtype, mib, block, partial(coder, route=route, codec=codec, block=block), offset)

    names = list(PEERS) if args.peers is not None and _nvcomp(left_out) else []
    for dtype in args.dtype:
        for mib in args.mib:
            for name in names:
                yield Case("peer", name, dtype, mib, args.block, partial(NvcompCoder, name=name))
            yield from (ours(route, codec, dtype, mib, args.block) for route, codec in pairs)
        if args.floors:
            for codec in [codec for codec in codecs if isinstance(codec, str)]:
                yield ours(usable[0], codec, dtype, floors.BIG, floors.BLOCK, floors.MISALIGNED)
                yield ours(usable[0], codec, dtype, floors.BIG, 128)


def _why_not(codec: LossyCodec, route: str, device: str) -> str:
    """Why a route cannot run a lossy codec; "" if it can."""
    import torch

    from ds_zipccl import codecs, kernels

    try:
        codecs.project(torch.ones(8, device=device), codec, route=route)
    except kernels.RouteUnavailable as error:
        return str(error)
    return ""


def _nvcomp(left_out: dict[str, str]) -> bool:
    try:
        from nvidia import nvcomp  # noqa: F401
    except ImportError as error:
        left_out["nvCOMP"] = f"{error}; pip install nvidia-nvcomp-cu13"
        return False
    return True


def _like(tensor: torch.Tensor, offset: int | None = None) -> torch.Tensor:
    """An uninitialized tensor like ``tensor``, ``offset`` bytes after a multiple of 16; None: as ``tensor`` is."""
    import torch

    shift = (tensor.data_ptr() % 16 if offset is None else offset) // tensor.itemsize
    return torch.empty(tensor.numel() + shift, dtype=tensor.dtype, device=tensor.device)[shift:]


def measure(case: Case, repeats: int) -> dict[str, float | int | None]:
    """Measure one row and return its figures."""
    import torch

    kind = getattr(torch, case.dtype)
    size = case.mib * MIB_BYTES
    count = max(2, -(-ROTATE_BYTES // size))
    generator = torch.Generator(DEVICE).manual_seed(1)
    normal = torch.randn(size // kind.itemsize, device=DEVICE, generator=generator).to(kind)
    tensors = [_like(normal, case.offset).copy_(normal.roll(i)) for i in range(count)]
    coder = case.begin(tensors)
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
        wrong += int((coder.result(i).view(torch.uint8) != coder.wanted(i).view(torch.uint8)).sum())
    copy = _seconds(lambda: [copies[i % 2].copy_(tensors[i]) for i in every], repeats, False) / count
    coded, moved = coder.coded_bytes(), 2 * size / copy
    summed = None
    if isinstance(coder, FrameCoder):
        sums = _like(tensors[0])
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


def python_times(route: str) -> dict[str, float]:
    """Microseconds of the host per call of a route, without waiting for the device; medians of nine batches."""
    import torch

    found: dict[str, float] = {}
    for count in PYTHON_TENSORS:
        tensors = [torch.zeros(PYTHON_NUMEL, dtype=torch.bfloat16, device=DEVICE) for _ in range(count)]
        coder = FrameCoder(tensors, route, "cascade", 1024)
        calls = {"encode": coder.encode_all, "decode": coder.decode_all}
        found |= {f"{name} of {count}": _host_us(call) for name, call in calls.items()}
    encode, decode = _gather_calls(tensors, route)
    found[floors.GATHER] = _host_us(encode) + _host_us(decode)
    return found


def _gather_calls(tensors: Sequence[torch.Tensor], route: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """The encode and the decode call of one rank in a gather of ``tensors`` over :data:`PYTHON_RANKS` ranks."""
    import torch

    from ds_zipccl import codecs, kernels
    from ds_zipccl.kernels.cuda.backend import CudaBackend, GatherTable, Parameter, new_status

    like, calls = tensors[0], kernels.route(route, DEVICE)
    assert isinstance(calls, CudaBackend)
    room = codecs.compress_bound(like.numel(), like.dtype, "cascade", block=1024)
    parameters = [Parameter(tensor.numel(), -(-room // 16) * 16) for tensor in tensors]
    table = GatherTable(parameters, like.dtype, 1024, PYTHON_RANKS)
    part = torch.zeros(table.part_bytes, dtype=torch.uint8, device=DEVICE)
    calls.encode_gather(tensors, "cascade", table, part)
    staging = part.repeat(PYTHON_RANKS)
    outs = [torch.empty(PYTHON_RANKS * tensor.numel(), dtype=like.dtype, device=DEVICE) for tensor in tensors]
    status = new_status(like.device)
    return (
        lambda: calls.encode_gather(tensors, "cascade", table, part),
        lambda: calls.decode_gather(staging, table, outs, 0, status),
    )


def _host_us(call: Callable[[], None]) -> float:
    """Microseconds of the host per call."""
    import torch

    times = []
    for _ in range(9):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(PYTHON_CALLS):
            call()
        times.append((time.perf_counter() - start) / PYTHON_CALLS)
    torch.cuda.synchronize()
    return 1e6 * statistics.median(times)


def _seconds(calls: Callable[[], object], repeats: int, eager: bool) -> float:
    """Device seconds of a replay of the calls as a CUDA graph, or of the calls themselves if ``eager``; the median."""
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
