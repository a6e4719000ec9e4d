"""Tensors, coders and timings of ``bench codec``."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ds_zipccl.benchmarks.codec import peers
from ds_zipccl.tools import ToolError, data, tables

if TYPE_CHECKING:
    import torch

    from ds_zipccl.lossy import LossyCodec

#: Keys of ``ds_zipccl.codecs.CODECS`` in the order of rows, the baseline first. A literal: ``codecs`` imports torch.
#: A test compares the two.
CODECS = ("raw", "cascade", "wide")
NO_ROUTE = "none"
PEER_ROUTE = "peer"
#: Seconds after which the OpenMP threads of a copy have stopped spinning, which takes cores from the next timing.
IDLE_S = 0.05
SAMPLE_S = 0.02  # least seconds of one timing, so that the clock's resolution does not matter


@dataclass(frozen=True)
class Source:
    """A tensor to measure. ``dtype``: torch name. ``load``: makes or reads the flat CPU tensor."""

    name: str
    dtype: str
    numel: int
    load: Callable[[], torch.Tensor]


class Trial(Protocol):
    """One coder and one tensor.

    ``prepare``: untimed, before an encode; makes ``result`` wrong until the next decode. ``repeatable``: one
    ``prepare`` serves any number of encodes. ``more``: name -> untimed preparation and decoder, for further decoders.
    """

    repeatable: bool
    more: Mapping[str, tuple[Callable[[], None], Callable[[], None]]]

    def prepare(self) -> None: ...
    def encode(self) -> None: ...
    def decode(self) -> None: ...
    def result(self) -> torch.Tensor: ...
    @property
    def coded_bytes(self) -> int: ...


@dataclass(frozen=True)
class Coder:
    """A codec on a route, or a peer: names in rows, constructor of a trial, and whether a dtype (torch name) fits."""

    route: str
    codec: str
    begin: Callable[[torch.Tensor], Trial]
    takes: Callable[[str], bool] = lambda dtype: True


# ---- tensors -----------------------------------------------------------------------------------------


def synthetic(args: argparse.Namespace) -> Iterator[Source]:
    """Yield tensors of ``--data``; without ``--data`` and ``--corpus``, of all data sets."""
    named = args.data or ([] if args.corpus else [data.Spec(name) for name in data.DATA])
    specs = dict.fromkeys(spec.scaled(sigma) for spec in named for sigma in args.sigma or [None])
    for numel in args.numel:
        for dtype in args.dtype:
            for spec in specs:
                if spec.has(dtype):
                    yield Source(str(spec), dtype, numel, partial(spec.make, numel, dtype))


def stored(args: argparse.Namespace) -> Iterator[Source]:
    """Yield the tensors of the ``--corpus`` files. A line on stderr names each tensor that no frame can hold.

    Raises:
        ToolError: a file cannot be read.
    """
    from ds_zipccl.frame import DTYPE_IDS
    from ds_zipccl.tools import files

    for path in args.corpus:
        for name, load in files.tensors(path).items():
            tensor = load()
            known = tensor.dtype in DTYPE_IDS and tensor.is_contiguous()
            if not known or not tensor.numel():
                reason = "it is empty" if known else f"no frame holds {tensor.dtype} with strides {tensor.stride()}"
                tables.complain(f"{name} left out: {reason}")
                continue
            # Two files may have the same names.
            name = name if len(args.corpus) == 1 else f"{Path(path).stem}:{name}"
            dtype = str(tensor.dtype).removeprefix("torch.")
            for copies in dict.fromkeys(math.ceil(n / tensor.numel()) if args.tile else 1 for n in args.numel):
                yield Source(name, dtype, copies * tensor.numel(), partial(_tiled, load, copies))


def _tiled(load: Callable[[], torch.Tensor], copies: int) -> torch.Tensor:
    tensor = load().flatten()
    return tensor if copies == 1 else tensor.repeat(copies)


# ---- coders --------------------------------------------------------------------------------------------


def ours(args: argparse.Namespace) -> Iterator[Coder]:
    """Yield the lossless codecs of ``--codec`` on the routes of ``--route``.

    Raises:
        ToolError: a route does not work here.
    """
    routes = usable_routes(args.route)
    pairs = [(codec, NO_ROUTE if codec == "raw" else route) for codec in CODECS for route in routes]
    for codec, route in dict.fromkeys(pairs):
        if codec in args.codec:
            yield Coder(route, codec, partial(FrameTrial, codec=codec, route=route, block=args.block))


def usable_routes(wanted: list[str], kernels_of: Callable[[str, str], object] | None = None) -> list[str]:
    """Routes to measure: the ``wanted`` ones, or all that work here if ``wanted`` is empty. ``kernels_of``: a function of
    :mod:`ds_zipccl.kernels` that raises RouteUnavailable where a route has no kernels of the codec.

    Raises:
        ToolError: a wanted route does not work here, or no route works.
    """
    from ds_zipccl import kernels

    reasons = kernels.why("cpu")
    if kernels_of is not None:
        reasons = {name: why or kernels.lacking(partial(kernels_of, name, "cpu")) for name, why in reasons.items()}
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


def peers_of(args: argparse.Namespace) -> Iterator[Coder]:
    """Yield the installed peers of ``--peers``. A line on stderr names each missing peer."""
    names = list(peers.PEERS) if args.peers == [] else dict.fromkeys(args.peers or [])
    for name in names:
        peer = peers.PEERS[name]
        try:
            peer.load("bfloat16", args.threads)
        except ImportError as error:
            tables.complain(f"peer {name} left out: {error}; pip install {peer.package}")
            continue
        yield Coder(PEER_ROUTE, name, partial(peers.PeerTrial, name=name, threads=args.threads), peer.takes)


def spoil(back: torch.Tensor, tensor: torch.Tensor) -> None:
    """Fill the output ``back`` with the complement of the bits of ``tensor``."""
    import torch

    from ds_zipccl.tools.exponents import words

    torch.bitwise_not(words(tensor), out=words(back))


class FrameTrial:
    """One codec of ds_zipccl and one tensor."""

    repeatable = True
    more: Mapping[str, tuple[Callable[[], None], Callable[[], None]]] = {}

    def __init__(self, tensor: torch.Tensor, codec: str | LossyCodec, route: str, block: int) -> None:
        import torch

        from ds_zipccl import codecs

        self._tensor, self._codec, self._block, self._lossy = tensor, codec, block, not isinstance(codec, str)
        self._route = "auto" if route == NO_ROUTE else route
        bound = codecs.compress_bound(tensor.numel(), tensor.dtype, codec, lossy=self._lossy, block=block)
        self._out, self._back = torch.empty(bound, dtype=torch.uint8), torch.empty_like(tensor)
        self._frame = self._out

    def prepare(self) -> None:
        spoil(self._back, self._tensor)

    def encode(self) -> None:
        from ds_zipccl import codecs

        compress = partial(codecs.compress, shaped=False, checksum=False, block=self._block, route=self._route)
        self._frame = compress(self._tensor, self._codec, lossy=self._lossy, out=self._out)

    def decode(self) -> None:
        from ds_zipccl import codecs

        codecs.decompress(self._frame, self._back, route=self._route)

    def result(self) -> torch.Tensor:
        return self._back

    @property
    def coded_bytes(self) -> int:
        return self._frame.numel()


# ---- timings -------------------------------------------------------------------------------------------


def measure(source: Source, coders: list[Coder], block: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each coder; the tensor is made once."""
    from ds_zipccl.tools.exponents import Fields, exponents

    tensor = source.load()
    floating = tensor.is_floating_point()
    bound = Fields.of(tensor.dtype).ratio(exponents(tensor, block).entropy) if floating else None
    for coder in coders:
        row: dict[str, Any] = {"route": coder.route, "codec": coder.codec, "dtype": source.dtype, "data": source.name}
        row |= {"numel": source.numel, "ratio": None, "entropy_ratio": bound}
        trial = coder.begin(tensor)
        about = f"{coder.route} {coder.codec} {source.dtype} {source.name}"
        speeds, wrong = accepted(about, source.numel, partial(run, tensor, trial, repeats))
        if speeds:
            row["ratio"] = tensor.nbytes / trial.coded_bytes
        yield row | figures(speeds) | {"wrong": wrong}


def accepted(about: str, numel: int, call: Callable[[], tuple[dict[str, float], int]]) -> tuple[dict[str, float], int]:
    """Speeds and wrong elements of a call; if a decoder refuses the frame, {}, ``numel`` and a line on stderr."""
    from ds_zipccl.frame import FrameError

    try:
        return call()
    except FrameError as error:
        tables.complain(f"{about}: own frame refused: {error}")
        return {}, numel


def figures(speeds: Mapping[str, float], names: Sequence[str] = ("encode", "decode")) -> dict[str, float | None]:
    """Columns: speeds of ``names`` and of memcpy in GB/s, and their quotients; None without measured speeds."""
    found = {f"{name}_gbps": speeds.get(name) for name in (*names, "memcpy")}
    return found | {f"{name}_memcpy": speeds[name] / speeds["memcpy"] if speeds else None for name in names}


def run(
    tensor: torch.Tensor, trial: Trial, repeats: int, wanted: torch.Tensor | None = None
) -> tuple[dict[str, float], int]:
    """Speeds in GB/s of memcpy, encode, decode and the trial's further decoders; most wrong elements of any timing.

    ``wanted``: right result of a decoder; None: the tensor itself.
    """
    import torch

    wanted = tensor if wanted is None else wanted

    # copy_ of fp8 elements, or of bytes at some addresses, is slower than memcpy; copy_ of int64 is not.
    raw = tensor.view(torch.uint8)
    raw = raw if raw.numel() % 8 else raw.view(torch.int64)
    copied = torch.empty_like(raw)
    steps = {"memcpy": lambda: copied.copy_(raw), "encode": trial.encode, "decode": trial.decode}
    for call in (trial.prepare, *steps.values()):  # untimed: builds kernels and touches pages
        call()
    wrong = wrong_of(trial.result(), wanted)
    for before, decode in trial.more.values():
        before()
        decode()
    calls = {name: calls_of(step) if trial.repeatable or name == "memcpy" else 1 for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in [*steps, *trial.more]}
    for _ in range(repeats):
        trial.prepare()
        for name, step in steps.items():
            if torch.get_num_threads() > 1:
                time.sleep(IDLE_S)
            seconds[name].append(seconds_of(step, calls[name]))
        wrong = max(wrong, wrong_of(trial.result(), wanted))
        for name, (before, decode) in trial.more.items():
            before()
            seconds[name].append(seconds_of(decode))
            wrong = max(wrong, wrong_of(trial.result(), wanted))
    return {name: tensor.nbytes / statistics.median(times) / 1e9 for name, times in seconds.items()}, wrong


def wrong_of(got: torch.Tensor, wanted: torch.Tensor) -> int:
    """Number of elements whose bits differ; all elements if the sizes differ."""
    from ds_zipccl.tools.exponents import differing

    return differing(got, wanted) if got.numel() == wanted.numel() else wanted.numel()


def seconds_of(step: Callable[[], object], calls: int = 1) -> float:
    """Seconds per call, the mean of ``calls`` consecutive calls."""
    start = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - start) / calls


def calls_of(step: Callable[[], object]) -> int:
    """Number of calls that together take about :data:`SAMPLE_S` seconds."""
    return max(1, int(SAMPLE_S / max(seconds_of(step), 1e-9)))
