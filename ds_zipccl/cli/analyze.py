"""``analyze``: entropy of the exponents and ratio of the tensors of a file, or of synthetic data.

Columns (also the keys of the rows in ``--json``). The last row is the total, with entropies weighted by elements:

* ``name``, ``dtype``, ``numel``; ``zeros``: share of elements that are +0 or -0.
* ``entropy``: bits per exponent with one code for the whole tensor. ``block_entropy``: bits per exponent with a code for each block of
  ``--block`` elements.
* ``bound``: ratio of a code that sends sign and mantissa whole and each exponent in ``block_entropy`` bits.
* ``ratio``: bytes of the tensor / bytes of its frame, headers included. Zeros, equal words and trailing zero bits (fp32 from bf16) can
  raise the ratio above ``bound``.
* ``modes``: number of blocks of each mode that the encoder chose (FORMAT.md section 2).
* ``wrong``: elements whose bits differ after decompress().

``bench codec --corpus FILE --codec round:3`` measures lossy codecs on the tensors of a file. Tensors of dtypes without a codec travel raw,
with ratio 1. A file is a safetensors file, or a torch.save() file of tensors in dicts and lists. A torch file with any other object is
refused, and nothing in it is executed.

The exit status is 1 if any element is wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from ds_zipccl.tools import ToolError, data, tables
from ds_zipccl.tools.tables import Column

if TYPE_CHECKING:
    import torch

    from ds_zipccl.tools.files import Loader

DEFAULT_SPEC = data.Spec("normal")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``analyze``."""
    option = parser.add_argument
    option("file", metavar="FILE", help="safetensors or torch file; - for synthetic data (--data)")
    option("--data", nargs="+", type=data.spec, metavar="D", help="data sets for -, see below (normal)")
    option("--numel", type=data.numel, default=1 << 20, metavar="N", help="elements of synthetic data (1M)")
    kinds = "bf16 fp16 fp32 of synthetic data (bf16)"
    option("--dtype", nargs="+", type=data.dtype, default=["bfloat16"], metavar="T", help=kinds)
    option("--block", type=int, choices=data.BLOCKS, default=1024, help="elements per block (1024)")
    option("--route", default="auto", metavar="R", help="kernels (auto: the first that works)")
    option("--json", metavar="FILE", help="write the rows here too")
    parser.epilog = data.about()


def main(args: argparse.Namespace) -> int:
    """Run ``analyze``; 1 if any element came back wrong, else 0."""
    if args.file != "-" and args.data:
        raise ToolError(f"--data is for synthetic data: write - instead of {args.file}")
    from ds_zipccl.tools import files

    tensors = dict(_synthetic(args)) if args.file == "-" else files.tensors(args.file)
    if not tensors:
        raise ToolError(f"{args.file} holds no tensor")
    table, rows = tables.Table(_columns(max(map(len, tensors)))), []
    for name, load in tables.progress(tensors.items(), "analyze", len(tensors)):
        rows.append(_row(name, load(), args.block, args.route))
        table.add(rows[-1])
    rows.append(_total(rows))
    table.add(rows[-1])
    if args.json:
        tables.write_json(args.json, rows, args.command, block=args.block)
    return 1 if rows[-1]["wrong"] else 0


def _columns(name_width: int) -> tuple[Column, ...]:
    sizes = (Column("name", width=name_width), Column("dtype", width=13), Column("numel", ",d", 13))
    found = (*tables.alike("entropy block_entropy", ".3f"), Column("bound", ".3f", 6), Column("ratio", ".3f", 7))
    return (*sizes, Column("zeros", ".1%", 6), *found, Column("wrong", "d"), Column("modes"))


def _synthetic(args: argparse.Namespace) -> Iterable[tuple[str, Loader]]:
    for spec in args.data or [DEFAULT_SPEC]:
        for dtype in args.dtype:
            if not spec.has(dtype):
                raise ToolError(f"{spec.name} exists in {', '.join(data.DATA[spec.name].dtypes)}, not in {dtype}")
            yield f"{spec} {dtype}", partial(spec.make, args.numel, dtype)


def _row(name: str, tensor: torch.Tensor, block: int, route: str) -> dict[str, Any]:
    """Row of a tensor. The total adds up the keys without a column."""
    import torch

    from ds_zipccl import codecs
    from ds_zipccl.tools.exponents import MODES, Fields, block_modes, differing, exponents

    nbytes = tensor.numel() * tensor.element_size()
    row: dict[str, Any] = {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "numel": tensor.numel()}
    row |= dict.fromkeys(("zeros", "entropy", "block_entropy")) | {"bound": 1.0, "ratio": 1.0, "wrong": 0}
    row |= dict.fromkeys(("logical_bytes", "bound_bytes", "frame_bytes"), nbytes) | {"modes": {}}
    if tensor.dtype not in codecs.CODED_DTYPES or tensor.layout != torch.strided or not tensor.numel():
        return row
    tensor = tensor.detach().contiguous()
    found = exponents(tensor, block)
    frame = codecs.compress(tensor, block=block, shaped=False, checksum=False, route=route)
    modes = block_modes(frame)
    bound = Fields.of(tensor.dtype).ratio(found.within_blocks)
    return row | {
        "zeros": 1 - int(torch.count_nonzero(tensor.float())) / tensor.numel(),
        "entropy": found.entropy,
        "block_entropy": found.within_blocks,
        "bound": bound,
        "ratio": nbytes / frame.numel(),
        "wrong": differing(codecs.decompress(frame, route=route), tensor),
        "bound_bytes": nbytes / bound,
        "frame_bytes": frame.numel(),
        "modes": {name: count for number, name in enumerate(MODES) if (count := int((modes == number).sum()))},
    }


def _total(rows: list[dict[str, Any]]) -> dict[str, Any]:
    added = ("numel", "wrong", "logical_bytes", "bound_bytes", "frame_bytes")
    sums = {key: sum(row[key] for row in rows) for key in added}
    modes = dict.fromkeys(mode for row in rows for mode in row["modes"])
    coded = [row for row in rows if row["entropy"] is not None]
    weight = sum(row["numel"] for row in coded)
    weighted = ("zeros", "entropy", "block_entropy")
    means = {key: sum(row[key] * row["numel"] for row in coded) / weight if weight else None for key in weighted}
    return {
        **{"name": "total", "dtype": "", **sums, **means},
        "modes": {mode: count for mode in modes if (count := sum(row["modes"].get(mode, 0) for row in rows))},
        "bound": sums["logical_bytes"] / sums["bound_bytes"] if sums["logical_bytes"] else 1.0,
        "ratio": sums["logical_bytes"] / sums["frame_bytes"] if sums["logical_bytes"] else 1.0,
    }
