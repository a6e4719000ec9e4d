"""``bench codec``: ratio and speed of every codec on every route, beside memcpy and, if asked for, the compressors of others.

Columns (also the keys of the rows in ``--json``):

* ``route``: kernels; the raw codec has none, and "peer" is somebody else's compressor. ``codec``, ``dtype``, ``data`` (a data
  set, or a tensor of a ``--corpus``), ``numel``: what was coded by what.
* ``ratio``: bytes of the tensor / bytes of its frame, header included.
* ``entropy_ratio``: the ceiling of a code that sends sign and mantissa whole and each exponent in as many bits as the measured
  entropy of all of them. Zeros, equal words, trailing zero bits and scales that differ within the tensor are coded better.
* ``encode_gbps``, ``decode_gbps``, ``memcpy_gbps``: 1e9 bytes of tensor a second, medians, on ``--threads`` threads; memcpy is
  ``Tensor.copy_`` of the tensor's bytes, timed in turn with the two others.
* ``encode_memcpy``, ``decode_memcpy``: the speeds as a part of the memcpy speed of the same row. Quote these, of tensors that no
  cache holds (64 MiB: ``--numel 32M`` of bf16): they say more about another machine than GB/s do.
* ``wrong``: decoded elements whose bits differ from what was encoded, after every timing into a buffer that held other bits.

Timed calls are ``compress`` and ``decompress`` with ``shaped=False, checksum=False`` and an ``out`` buffer, as on the wire. Peers
get bytes and give bytes; the copy that their input is made of, and the look at what they gave, are not part of their times.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ds_zipccl.bench import ToolError, data, peers, tables
from ds_zipccl.bench.tables import Column

if TYPE_CHECKING:
    import torch

#: The names in ``ds_zipccl.codecs.CODECS``, in the order of their rows, raw first: what a coded frame is compared with. A literal, as the
#: codecs import torch; a test compares them.
CODECS = ("raw", "cascade", "wide")
NO_ROUTE = "none"
PEER_ROUTE = "peer"
IDLE_S = (
    0.05  # for the threads of OpenMP that copied to stop spinning: they would take the cores from what is timed next
)
MIB = (1, 4, 16, 64, 256, 1024)  # message sizes on CUDA
SAMPLE_S = 0.02  # seconds that one timing should at least take, so that the clock does not matter


@dataclass(frozen=True)
class Source:
    """A tensor to be measured. ``dtype``: torch name; ``load`` makes the flat CPU tensor."""

    name: str
    dtype: str
    numel: int
    load: Callable[[], torch.Tensor]


class Trial(Protocol):
    """One coder at work on one tensor.

    ``prepare`` comes untimed before encode and spoils what ``result`` gives until the next decode; ``repeatable``: one call of it
    serves any number of encodes.
    """

    repeatable: bool

    def prepare(self) -> None: ...
    def encode(self) -> None: ...
    def decode(self) -> None: ...
    def result(self) -> torch.Tensor: ...
    @property
    def coded_bytes(self) -> int: ...


@dataclass(frozen=True)
class Coder:
    """What codes: names for its rows, and how to set it to work on a tensor."""

    route: str
    codec: str
    begin: Callable[[torch.Tensor], Trial]
    takes: Callable[[str], bool] = lambda dtype: True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench codec``."""
    dtypes = list(data.DEFAULT_DTYPES)
    parser.add_argument("--numel", nargs="+", type=data.numel, default=[1 << 22], metavar="N", help="elements (4M)")
    parser.add_argument(
        "--dtype",
        nargs="+",
        type=data.dtype,
        default=dtypes,
        metavar="T",
        help="bf16 fp16 fp32 e4m3 e5m2 (first three)",
    )
    parser.add_argument(
        "--data", nargs="+", type=data.spec, metavar="D", help="data sets, see below (all; none with --corpus)"
    )
    parser.add_argument(
        "--sigma", nargs="+", type=data.scale, default=[], metavar="S", help="scales for sets named without (1)"
    )
    parser.add_argument(
        "--corpus", nargs="+", default=[], metavar="FILE", help="measure the tensors of safetensors or torch files"
    )
    parser.add_argument("--tile", action="store_true", help="repeat a corpus tensor until it has --numel elements")
    parser.add_argument("--route", nargs="+", default=[], metavar="R", help="kernels to use (all that work here)")
    parser.add_argument("--codec", nargs="+", choices=CODECS, default=CODECS, help="codecs (all)")
    parser.add_argument(
        "--peers", nargs="*", choices=peers.PEERS, help="compressors of others (none; all if none is named)"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where to code (cpu); cuda has other columns"
    )
    parser.add_argument(
        "--mib", nargs="+", type=int, default=list(MIB), metavar="M", help="sizes with --device cuda (1 to 1024)"
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads to measure with (1)")
    parser.add_argument("--block", type=int, choices=data.BLOCKS, default=1024, help="elements a block (1024)")
    parser.add_argument("--repeats", type=int, default=5, metavar="K", help="timings whose median is shown (5)")
    parser.add_argument("--json", metavar="FILE", help="write the rows here too")
    parser.epilog = data.about()


def main(args: argparse.Namespace) -> int:
    """Run ``bench codec``; 1 if any element came back wrong, else 0."""
    import torch

    for option in ("repeats", "threads"):
        if getattr(args, option) < 1:
            raise ToolError(f"--{option} must be at least 1, got {getattr(args, option)}")
    if args.device == "cuda":
        from ds_zipccl.bench import cuda

        return cuda.main(args)
    if args.tile and not args.corpus:
        raise ToolError("--tile is for the tensors of a --corpus: name its files")
    coders = [*_ours(args), *_others(args)]
    sources = [*_stored(args), *_synthetic(args)]
    if not sources:
        raise ToolError(
            f"{' '.join(args.corpus)} holds no tensor to measure"
            if args.corpus
            else "none of these data sets exists in any of these dtypes: bf16_in_fp32 is for fp32"
        )
    cases = [(source, [coder for coder in coders if coder.takes(source.dtype)]) for source in sources]
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)  # memcpy's too
    table, rows = tables.Table(_columns(sources)), []
    try:
        measured = (row for source, able in cases for row in _measure(source, able, args.block, args.repeats))
        for row in tables.progress(measured, "bench codec", sum(len(able) for _, able in cases)):
            rows.append(row)
            table.add(row)
    finally:
        torch.set_num_threads(threads)
    if args.json:
        packages = {peers.PEERS[row["codec"]].package for row in rows if row["route"] == PEER_ROUTE} - {""}
        versions = {package: tables.version(package) for package in sorted(packages)}
        settings = {"threads": args.threads, "block": args.block, "repeats": args.repeats, "peers": versions}
        tables.write_json(args.json, rows, args.command, **settings)
    wrong = sum(row["wrong"] for row in rows)
    if wrong:
        tables.complain(f"{wrong} elements came back with other bits than they had")
    return 1 if wrong else 0


def _columns(sources: list[Source]) -> tuple[Column, ...]:
    return (
        Column("route", width=6),
        Column("codec", width=8),
        Column("dtype", width=max(8, *(len(source.dtype) for source in sources))),
        Column("data", width=max(16, *(len(source.name) for source in sources))),
        Column("numel", ",d", 10),
        Column("ratio", ".3f", 7),
        Column("entropy_ratio", ".3f"),
        Column("encode_gbps", ".2f"),
        Column("decode_gbps", ".2f"),
        Column("memcpy_gbps", ".2f"),
        Column("encode_memcpy", ".3f"),
        Column("decode_memcpy", ".3f"),
        Column("wrong", "d"),
    )


# ---- what is coded -----------------------------------------------------------------------------------------


def _synthetic(args: argparse.Namespace) -> Iterator[Source]:
    named = args.data or ([] if args.corpus else [data.Spec(name) for name in data.DATA])
    specs = dict.fromkeys(spec.scaled(sigma) for spec in named for sigma in args.sigma or [None])
    for numel in args.numel:
        for dtype in args.dtype:
            for spec in specs:
                if spec.has(dtype):
                    yield Source(str(spec), dtype, numel, partial(spec.make, numel, dtype))


def _stored(args: argparse.Namespace) -> Iterator[Source]:
    """Tensors of the ``--corpus`` files; those that no frame holds are left out with a word."""
    from ds_zipccl.bench import files
    from ds_zipccl.frame import DTYPE_IDS

    for path in args.corpus:
        for name, load in files.tensors(path).items():
            tensor = load()
            known = tensor.dtype in DTYPE_IDS and tensor.is_contiguous()
            if not known or not tensor.numel():
                what = "it is empty" if known else f"no frame holds {tensor.dtype} with strides {tensor.stride()}"
                tables.complain(f"{name} left out: {what}")
                continue
            # Names repeat from file to file.
            name = name if len(args.corpus) == 1 else f"{Path(path).stem}:{name}"
            dtype = str(tensor.dtype).removeprefix("torch.")
            for copies in dict.fromkeys(math.ceil(n / tensor.numel()) if args.tile else 1 for n in args.numel):
                yield Source(name, dtype, copies * tensor.numel(), partial(_tiled, load, copies))


def _tiled(load: Callable[[], torch.Tensor], copies: int) -> torch.Tensor:
    tensor = load().flatten()
    return tensor if copies == 1 else tensor.repeat(copies)


# ---- what codes --------------------------------------------------------------------------------------------


def _ours(args: argparse.Namespace) -> Iterator[Coder]:
    routes = _routes(args.route)
    pairs = [(codec, NO_ROUTE if codec == "raw" else route) for codec in CODECS for route in routes]
    for codec, route in dict.fromkeys(pairs):
        if codec in args.codec:
            yield Coder(route, codec, partial(FrameTrial, codec=codec, route=route, block=args.block))


def _routes(wanted: list[str]) -> list[str]:
    """Routes to measure; one that was asked for by name must work."""
    from ds_zipccl import kernels

    reasons = kernels.why("cpu")
    for name in wanted:
        if reasons.get(name, "no such route"):
            raise ToolError(f"route {name}: {reasons.get(name) or 'no such route; known: ' + ', '.join(reasons)}")
    for name in reasons:
        if reasons[name] and not wanted:
            tables.complain(f"route {name} left out: {reasons[name]}")
    usable = wanted or [name for name, reason in reasons.items() if not reason]
    if not usable:
        raise ToolError("no route works here; `python -m ds_zipccl report` says why")
    return usable


def _others(args: argparse.Namespace) -> Iterator[Coder]:
    """Peers that were asked for and are installed."""
    names = list(peers.PEERS) if args.peers == [] else dict.fromkeys(args.peers or [])
    for name in names:
        peer = peers.PEERS[name]
        try:
            peer.load("bfloat16", args.threads)
        except ImportError as error:
            tables.complain(f"peer {name} left out: {error}; pip install {peer.package}")
            continue
        yield Coder(PEER_ROUTE, name, partial(peers.PeerTrial, name=name, threads=args.threads), peer.takes)


class FrameTrial:
    """One of our codecs and one tensor."""

    repeatable = True

    def __init__(self, tensor: torch.Tensor, codec: str, route: str, block: int) -> None:
        import torch

        from ds_zipccl import codecs

        self._tensor, self._codec, self._block = tensor, codec, block
        self._route = "auto" if route == NO_ROUTE else route
        bound = codecs.compress_bound(tensor.numel(), tensor.dtype, codec, block=block)
        self._out, self._back = torch.empty(bound, dtype=torch.uint8), torch.empty_like(tensor)
        self._frame = self._out

    def prepare(self) -> None:
        """Fill the output with bits that are all wrong."""
        import torch

        from ds_zipccl.bench.exponents import words

        torch.bitwise_not(words(self._tensor), out=words(self._back))

    def encode(self) -> None:
        from ds_zipccl import codecs

        compress = partial(codecs.compress, shaped=False, checksum=False, block=self._block, route=self._route)
        self._frame = compress(self._tensor, self._codec, out=self._out)

    def decode(self) -> None:
        from ds_zipccl import codecs

        codecs.decompress(self._frame, self._back, route=self._route)

    def result(self) -> torch.Tensor:
        return self._back

    @property
    def coded_bytes(self) -> int:
        return self._frame.numel()


# ---- measurement -------------------------------------------------------------------------------------------


def _measure(source: Source, coders: list[Coder], block: int, repeats: int) -> Iterator[dict[str, Any]]:
    """The rows of one tensor, which is made once."""
    from ds_zipccl.bench.exponents import Fields, exponents
    from ds_zipccl.frame import FrameError

    tensor = source.load()
    floating = tensor.is_floating_point()
    bound = Fields.of(tensor.dtype).ratio(exponents(tensor, block).entropy) if floating else None
    for coder in coders:
        row: dict[str, Any] = {"route": coder.route, "codec": coder.codec, "dtype": source.dtype, "data": source.name}
        row |= {"numel": source.numel, "ratio": None, "entropy_ratio": bound}
        speeds: dict[str, float] = {}
        trial = coder.begin(tensor)
        try:
            speeds, wrong = _run(tensor, trial, repeats)
            row["ratio"] = tensor.nbytes / trial.coded_bytes
        except FrameError as error:
            tables.complain(f"{coder.route} {coder.codec} {source.dtype} {source.name}: own frame refused: {error}")
            wrong = source.numel
        row |= {f"{name}_gbps": speeds.get(name) for name in ("encode", "decode", "memcpy")}
        for name in ("encode", "decode"):
            row[f"{name}_memcpy"] = speeds[name] / speeds["memcpy"] if speeds else None
        yield row | {"wrong": wrong}


def _run(tensor: torch.Tensor, trial: Trial, repeats: int) -> tuple[dict[str, float], int]:
    """Speeds in GB/s by step, and the most elements that were wrong after a timing."""
    import torch

    # Of fp8 elements, and of bytes at some addresses, copy_ is slower than a memcpy; of wide integers it never is.
    raw = tensor.view(torch.uint8)
    raw = raw if raw.numel() % 8 else raw.view(torch.int64)
    copied = torch.empty_like(raw)
    steps = {"memcpy": lambda: copied.copy_(raw), "encode": trial.encode, "decode": trial.decode}
    for call in (trial.prepare, *steps.values()):  # untimed: builds, page faults
        call()
    wrong = _wrong(trial.result(), tensor)
    calls = {name: _calls(step) if trial.repeatable or name == "memcpy" else 1 for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        trial.prepare()
        for name, step in steps.items():
            if torch.get_num_threads() > 1:
                time.sleep(IDLE_S)
            seconds[name].append(_seconds(step, calls[name]))
        wrong = max(wrong, _wrong(trial.result(), tensor))
    return {name: tensor.nbytes / statistics.median(times) / 1e9 for name, times in seconds.items()}, wrong


def _wrong(got: torch.Tensor, wanted: torch.Tensor) -> int:
    from ds_zipccl.bench.exponents import differing

    return differing(got, wanted) if got.numel() == wanted.numel() else wanted.numel()


def _seconds(step: Callable[[], object], calls: int = 1) -> float:
    """Seconds of one call, as the mean of ``calls`` in a row."""
    start = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - start) / calls


def _calls(step: Callable[[], object]) -> int:
    return max(1, int(SAMPLE_S / max(_seconds(step), 1e-9)))
