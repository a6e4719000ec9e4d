"""``bench codec``: ratio and speed of codecs per route, compared with memcpy and, with ``--peers``, other compressors.

Columns (also the keys of the rows in ``--json``):

* ``route``: kernels. The raw codec has no kernels; "peer" is a compressor of another project. ``codec``, ``dtype``,
  ``data`` (a data set, or a tensor of a ``--corpus``), ``numel``: the codec and the tensor.
* ``ratio``: bytes of the tensor / bytes of its frame, header included.
* ``entropy_ratio``: ratio of a code that sends sign and mantissa whole, and each exponent in as many bits as the
  entropy of the tensor's exponents. Zeros, equal words, trailing zero bits and scales that vary within the tensor allow
  a higher ratio.
* ``encode_gbps``, ``decode_gbps``, ``memcpy_gbps``: 1e9 bytes of tensor per second, median, on ``--threads`` threads.
  memcpy is ``Tensor.copy_`` of the tensor's bytes. The three are timed in turn.
* ``encode_memcpy``, ``decode_memcpy``: the speeds / the memcpy speed of the same row. Quote these ratios, for tensors
  larger than any cache (64 MiB: ``--numel 32M`` of bf16): they depend less on the machine than GB/s.
* ``wrong``: decoded elements whose bits differ from the tensor's, the most of any timing.

The timed calls are ``compress`` and ``decompress`` with ``shaped=False, checksum=False`` and an ``out`` buffer, as on
the wire. Peers take and return bytes. The copy of their input and the check of their output are not timed.

``--codec delta`` codes words against a base. It takes the data sets that have a base, and has these further columns:

* ``changed``: share of the words that differ from their base. ``bound``: ratio of a code that knows only how often each
  difference occurs; "-" in the table and null in ``--json`` where it is infinite, as all differences are equal. A code
  that uses the exponents of the base beats this bound where the differences depend on them.
* ``in_place_gbps``, ``in_place_memcpy``: decoding into the memory of the base, as collectives do.
* ``--peers``: ``xor_zstd1`` is zstd level 1 of words XOR base, ``pairs`` the index (u32) and word of each change.

``--codec rows`` codes rows of ``--width`` elements, some of which repeat earlier rows or are scaled copies of them. The
rows are one segment, sent in fragments as row frames, as on the wire. The table has these further columns:

* ``fragments``: frames of the segment. A fragment without such rows is an ordinary frame.
* ``plain_ratio``, ``plain_encode_gbps``, ``plain_decode_gbps``: all fragments as ordinary frames (cascade).
  ``encode_plain``, ``decode_plain``: speed of row frames / speed of ordinary frames, timed in turn. The search for
  repeated rows is part of encoding. The sources of scaled rows are known, as to a sender from an earlier message.

A lossy codec is a name and its settings, in the order of the list below or as ``setting=value``:
``--codec round:3 taco_fp8 int:6:64 zfp:rate=8``. Name lossless codecs too for comparison. Further columns:

* ``bits``: bits of the frame / elements. ``ratio`` as above.
* ``error``: relative L2 error of the finite values. ``small_error``: mean relative error of the nonzero values below a
  tenth of the tensor's root mean square.
* ``wrong``: decoded elements whose bits differ from those of ``project``.

``--device cuda`` measures the CUDA kernels instead; benchmarks/codec/cuda.py explains its columns.

The exit status is 1 if any element is wrong, 3 if only a floor of ``--floors`` is missed, otherwise 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

from ds_zipccl.benchmarks.codec import delta, peers, sets
from ds_zipccl.benchmarks.codec import lossy as lossy_trial
from ds_zipccl.benchmarks.codec import rows as row_trial
from ds_zipccl.benchmarks.codec.trial import CODECS, PEER_ROUTE, Source, measure, ours, peers_of, stored, synthetic
from ds_zipccl.lossy import LossyCodec
from ds_zipccl.tools import ToolError, data, tables
from ds_zipccl.tools.tables import Column

MIB = (1, 4, 16, 64, 256, 1024)  # message sizes on CUDA


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench codec``."""
    option, dtypes = parser.add_argument, list(data.DEFAULT_DTYPES)
    option("--numel", nargs="+", type=data.numel, default=[1 << 22], metavar="N", help="elements (4M)")
    named = "bf16 fp16 fp32 e4m3 e5m2 (first three)"
    option("--dtype", nargs="+", type=data.dtype, default=dtypes, metavar="T", help=named)
    option(
        "--data", nargs="+", type=sets.codec_spec, metavar="D", help="data sets, see below (all; none with --corpus)"
    )
    option("--sigma", nargs="+", type=data.scale, default=[], metavar="S", help="scales of sets without a scale (1)")
    files = "measure the tensors of safetensors or torch files"
    option("--corpus", nargs="+", default=[], metavar="FILE", help=files)
    option("--tile", action="store_true", help="repeat a corpus tensor until it has --numel elements")
    option("--route", nargs="+", default=[], metavar="R", help="kernels (all that work here)")
    every = (*CODECS, delta.CODEC, row_trial.CODEC)
    codecs = f"codecs (all without a base): {', '.join(every)}, or lossy ones, see above"
    option("--codec", nargs="+", type=partial(lossy_trial.named, every), default=CODECS, metavar="C", help=codecs)
    widths = list(row_trial.WIDTHS)
    option("--width", nargs="+", type=int, default=widths, metavar="W", help="elements per row, with --codec rows")
    others = "compressors of other projects (not given: none; without names: all for these codecs)"
    option("--peers", nargs="*", choices=[*peers.PEERS, *peers.DIFFERENCES], help=others)
    option("--device", choices=("cpu", "cuda"), default="cpu", help="device to code on; cuda has other columns (cpu)")
    option("--mib", nargs="+", type=int, default=list(MIB), metavar="M", help="sizes with --device cuda (1 to 1024)")
    option("--floors", action="store_true", help="with --device cuda: compare with the figures that a GPU must reach")
    option("--threads", type=int, default=1, metavar="N", help="threads to measure with (1)")
    option("--block", type=int, choices=data.BLOCKS, default=1024, help="elements per block (1024)")
    option("--repeats", type=int, default=5, metavar="K", help="timings whose median is shown (5)")
    option("--json", metavar="FILE", help="write the rows here too")
    parser.epilog = f"{data.about()}\n{sets.about_pairs()}\n{sets.about_rows()}\n{lossy_trial.about()}"


def main(args: argparse.Namespace) -> int:
    """Run ``bench codec``; 1 if any element came back wrong, 3 if only a floor was missed, else 0."""
    for option in ("repeats", "threads"):
        if getattr(args, option) < 1:
            raise ToolError(f"--{option} must be at least 1, got {getattr(args, option)}")
    lossy = any(isinstance(name, LossyCodec) for name in args.codec)
    if args.device == "cuda":
        if row_trial.CODEC in args.codec:
            raise ToolError("--codec rows works with --device cpu only")
        from ds_zipccl.benchmarks.codec import cuda

        return cuda.main(args)
    if args.floors:
        raise ToolError("--floors is for --device cuda: no floors are known for a CPU")
    if args.tile and not args.corpus:
        raise ToolError("--tile is for the tensors of a --corpus: name its files")
    if args.codec == [delta.CODEC]:
        cases, coders = delta.pairs(args), delta.coders(args)
        measured = delta.rows(cases, coders, args.repeats)
        return _show(args, delta.COLUMNS, measured, len(cases) * len(coders))
    if args.codec == [row_trial.CODEC]:
        found = row_trial.cases(args)
        return _show(args, row_trial.COLUMNS, row_trial.rows(args, found), row_trial.count(args, found))
    for name in (delta.CODEC, row_trial.CODEC):
        if name in args.codec:
            raise ToolError(f"--codec {name} has its own data and columns: name it alone")
    if lossy:
        return _show(args, *_lossy(args))
    return _show(args, *_without_base(args))


def _lossy(args: argparse.Namespace) -> tuple[tuple[Column, ...], Iterator[dict[str, Any]], int]:
    """Columns, rows and number of rows for calls that name a lossy codec."""
    _demand_plain_data(args)
    if args.peers is not None:
        raise ToolError("--peers are lossless: name them without a lossy codec")
    coders, sources = lossy_trial.coders(args), lossy_trial.sources(args)
    if not sources:
        raise ToolError("no tensor of a dtype that lossy codecs take: bfloat16, float16 or float32")
    measured = lossy_trial.rows(sources, coders, args.block, args.repeats)
    return lossy_trial.columns(sources), measured, len(sources) * len(coders)


def _without_base(args: argparse.Namespace) -> tuple[tuple[Column, ...], Iterator[dict[str, Any]], int]:
    """Columns, rows and number of rows for the codecs that need no base."""
    _demand_plain_data(args)
    for name in args.peers or []:
        if name in peers.DIFFERENCES:
            raise ToolError(f"peer {name} codes words against a base: add --codec delta")
    coders = [*ours(args), *peers_of(args)]
    sources = [*stored(args), *synthetic(args)]
    if not sources:
        raise ToolError(
            f"{' '.join(args.corpus)} holds no tensor to measure"
            if args.corpus
            else "none of these data sets exists in any of these dtypes: bf16_in_fp32 is for fp32"
        )
    cases = [(source, [coder for coder in coders if coder.takes(source.dtype)]) for source in sources]
    measured = (row for source, able in cases for row in measure(source, able, args.block, args.repeats))
    return _columns(sources), measured, sum(len(able) for _, able in cases)


def _demand_plain_data(args: argparse.Namespace) -> None:
    for spec in args.data or []:
        if isinstance(spec, sets.Pair):
            raise ToolError(f"{spec} is a data set of words with a base: add --codec delta")
        if isinstance(spec, sets.RowSet):
            raise ToolError(f"{spec} is a data set of rows that repeat or scale earlier ones: add --codec rows")


def _show(args: argparse.Namespace, columns: tuple[Column, ...], measured: Iterator[dict[str, Any]], count: int) -> int:
    """Measure, print and write the rows; 1 if any element came back wrong, else 0."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)  # memcpy uses them too
    try:
        rows = tables.show(columns, tables.progress(measured, "bench codec", count))
    finally:
        torch.set_num_threads(threads)
    if args.json:
        packages = {_package(row["codec"]) for row in rows if row["route"] == PEER_ROUTE} - {""}
        versions = {package: tables.version(package) for package in sorted(packages)}
        settings = {"threads": args.threads, "block": args.block, "repeats": args.repeats, "peers": versions}
        tables.write_json(args.json, rows, args.command, **settings)
    wrong = sum(row["wrong"] for row in rows)
    if wrong:
        tables.complain(f"{wrong} elements came back with other bits than they had")
    return 1 if wrong else 0


def _package(peer: str) -> str:
    """Name for pip of a peer's package; "" if the peer is part of Python or of ds_zipccl."""
    return peers.PEERS[peer].package if peer in peers.PEERS else peers.DIFFERENCE_PACKAGES.get(peer, "")


def _columns(sources: list[Source]) -> tuple[Column, ...]:
    return (
        Column("route", width=6),
        Column("codec", width=8),
        Column("dtype", width=max(8, *(len(source.dtype) for source in sources))),
        Column("data", width=max(16, *(len(source.name) for source in sources))),
        Column("numel", ",d", 10),
        Column("ratio", ".3f", 7),
        Column("entropy_ratio", ".3f"),
        *tables.alike("encode_gbps decode_gbps memcpy_gbps", ".2f"),
        *tables.alike("encode_memcpy decode_memcpy", ".3f"),
        Column("wrong", "d"),
    )
