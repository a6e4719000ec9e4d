"""``bench codec``: ratio and speed of every codec on every route, beside memcpy.

Columns (also the keys of the rows in ``--json``):

* ``route``: kernels; the raw codec has none. ``codec``, ``dtype``, ``data``, ``numel``: what was coded.
* ``ratio``: bytes of the tensor / bytes of its frame, header included.
* ``entropy_ratio``: the ceiling of a code that sends sign and mantissa whole and each exponent in as many bits as the measured
  entropy of all of them. Zeros, equal words and trailing zero bits are coded better than that.
* ``encode_gbps``, ``decode_gbps``, ``memcpy_gbps``: 1e9 bytes of tensor a second, medians. One thread each; memcpy is
  ``Tensor.copy_`` of the tensor, timed in turn with the two others.
* ``wrong``: decoded elements whose bits differ from what was encoded, after every timing into a buffer that held other bits.

Timed calls are ``compress`` and ``decompress`` with ``shaped=False, checksum=False`` and an ``out`` buffer, as on the wire.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ds_zipccl.tools import ToolError, data, tables
from ds_zipccl.tools.tables import Column

#: Codecs in the order of their rows: the uncoded frame is what a coded one is compared with.
CODECS = ("raw", "exponent")
NO_ROUTE = "none"
SAMPLE_S = 0.02  # seconds that one timing should at least take, so that the clock does not matter
COLUMNS = (
    Column("route", width=6),
    Column("codec", width=8),
    Column("dtype", width=8),
    Column("data", width=16),
    Column("numel", ",d", 10),
    Column("ratio", ".3f", 7),
    Column("entropy_ratio", ".3f"),
    Column("encode_gbps", ".2f"),
    Column("decode_gbps", ".2f"),
    Column("memcpy_gbps", ".2f"),
    Column("wrong", "d"),
)


@dataclass(frozen=True)
class Case:
    """One row to be measured."""

    route: str
    codec: str
    dtype: str
    data: data.Spec
    numel: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench codec``."""
    sets = [data.Spec(name) for name in data.DATA]
    dtypes = list(data.DEFAULT_DTYPES)
    parser.add_argument("--numel", nargs="+", type=data.numel, default=[1 << 22], metavar="N", help="elements (4M)")
    parser.add_argument("--dtype", nargs="+", type=data.dtype, default=dtypes, metavar="T", help="bf16 fp16 fp32 (all)")
    parser.add_argument(
        "--data", nargs="+", type=data.spec, default=sets, metavar="D", help="data sets, see below (all)"
    )
    parser.add_argument(
        "--sigma", nargs="+", type=data.scale, default=[], metavar="S", help="scales for sets named without (1)"
    )
    parser.add_argument("--route", nargs="+", default=[], metavar="R", help="kernels to use (all that work here)")
    parser.add_argument("--codec", nargs="+", choices=CODECS, default=CODECS, help="codecs (all)")
    parser.add_argument("--block", type=int, choices=data.BLOCKS, default=512, help="elements a block (512)")
    parser.add_argument("--repeats", type=int, default=5, metavar="K", help="timings whose median is shown (5)")
    parser.add_argument("--json", metavar="FILE", help="write the rows here too")
    parser.epilog = data.about()


def main(args: argparse.Namespace) -> int:
    """Run ``bench codec``; 1 if any element came back wrong, else 0."""
    import torch

    if args.repeats < 1:
        raise ToolError(f"--repeats must be at least 1, got {args.repeats}")
    cases = list(_cases(args, _routes(args.route)))
    if not cases:
        raise ToolError("none of these data sets exists in any of these dtypes: bf16_in_fp32 is for fp32")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the kernels run on the calling thread: memcpy gets one too
    table, rows = tables.Table(COLUMNS), []
    try:
        for case in tables.progress(cases, "bench codec"):
            rows.append(_measure(case, args.block, args.repeats))
            table.add(rows[-1])
    finally:
        torch.set_num_threads(threads)
    if args.json:
        tables.write_json(args.json, rows, args.command, threads=1, block=args.block, repeats=args.repeats)
    wrong = sum(row["wrong"] for row in rows)
    if wrong:
        tables.complain(f"{wrong} elements came back with other bits than they had")
    return 1 if wrong else 0


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


def _cases(args: argparse.Namespace, routes: list[str]) -> Iterator[Case]:
    codecs = [
        (codec, NO_ROUTE if codec == "raw" else route) for codec in CODECS for route in routes if codec in args.codec
    ]
    specs = dict.fromkeys(spec.scaled(sigma) for spec in args.data for sigma in args.sigma or [None])
    for numel in args.numel:
        for dtype in args.dtype:
            for spec in specs:
                for codec, route in dict.fromkeys(codecs):
                    if spec.has(dtype):
                        yield Case(route, codec, dtype, spec, numel)


def _measure(case: Case, block: int, repeats: int) -> dict[str, Any]:
    import torch

    from ds_zipccl import codecs
    from ds_zipccl.frame import FrameError
    from ds_zipccl.tools.exponents import Fields, differing, exponents, words

    tensor = case.data.make(case.numel, case.dtype)
    route = "auto" if case.route == NO_ROUTE else case.route
    out = torch.empty(codecs.compress_bound(case.numel, tensor.dtype, case.codec, block=block), dtype=torch.uint8)
    copied, back = torch.empty_like(tensor), torch.empty_like(tensor)
    frame = out

    def encode() -> None:
        nonlocal frame
        frame = codecs.compress(tensor, case.codec, out=out, block=block, shaped=False, checksum=False, route=route)

    def decode() -> None:
        codecs.decompress(frame, back, route=route)

    def spoil() -> None:
        torch.bitwise_not(words(tensor), out=words(back))

    wrong = 0
    try:
        for call in (encode, spoil, decode):  # untimed: builds, page faults
            call()
        wrong = differing(back, tensor)
        steps = {"memcpy": lambda: copied.copy_(tensor), "encode": encode, "decode": decode}
        calls = {name: _calls(step) for name, step in steps.items()}
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(repeats):
            spoil()
            for name, step in steps.items():
                seconds[name].append(_seconds(step, calls[name]))
            wrong = max(wrong, differing(back, tensor))
    except FrameError as error:
        tables.complain(f"{case.route} {case.codec} {case.dtype} {case.data}: own frame refused: {error}")
        return _row(case, None, Fields.of(tensor.dtype).ratio(exponents(tensor).entropy), {}, case.numel)
    raw_bytes = tensor.numel() * tensor.itemsize
    speeds = {name: raw_bytes / statistics.median(times) / 1e9 for name, times in seconds.items()}
    bound = Fields.of(tensor.dtype).ratio(exponents(tensor, block).entropy)
    return _row(case, raw_bytes / frame.numel(), bound, speeds, wrong)


def _row(case: Case, ratio: float | None, bound: float, speeds: dict[str, float], wrong: int) -> dict[str, Any]:
    return {
        "route": case.route,
        "codec": case.codec,
        "dtype": case.dtype,
        "data": str(case.data),
        "numel": case.numel,
        "ratio": ratio,
        "entropy_ratio": bound,
        "encode_gbps": speeds.get("encode"),
        "decode_gbps": speeds.get("decode"),
        "memcpy_gbps": speeds.get("memcpy"),
        "wrong": wrong,
    }


def _seconds(step: Callable[[], object], calls: int = 1) -> float:
    """Seconds of one call, as the mean of ``calls`` in a row."""
    start = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - start) / calls


def _calls(step: Callable[[], object]) -> int:
    return max(1, int(SAMPLE_S / max(_seconds(step), 1e-9)))
