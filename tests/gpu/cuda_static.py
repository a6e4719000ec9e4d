"""``make cuda-static``: what each CUDA kernel takes of a multiprocessor, without a GPU; written to ``docs/results/cuda_static.json``.

CuPy compiles csrc/cuda/kernels.cuh for every architecture. The assembler reports registers, stack frames and spills. The machine code then
runs on the CPU (sass.py) over a chunk of 16 blocks of 1024 elements, which gives the issue slots an element: instructions that all warps
issue for the chunk, the headers and tables among them, times 32 lanes, by the elements. Every result is compared with that of the CPU's
route.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import builds
import sass
import torch
from places import ROOT

from ds_zipccl import kernels
from ds_zipccl.cli.tables import Column, Table, write_json
from ds_zipccl.codecs import compress, compress_bound
from ds_zipccl.kernels import build
from ds_zipccl.kernels.cuda import backend, cupy_kernels, interface, launches
from ds_zipccl.kernels.cuda.jobs import TRIMMED
from ds_zipccl.lossy import Round

RESULTS = ROOT / "docs" / "results" / "cuda_static.json"
REMEDY = "if the change is meant, run `make cuda-static` and commit docs/results/cuda_static.json"
ELEMENTS = 16 * 1024
SUMMANDS = 2
#: Bits of rounded words.
MANTISSA = 3
#: Rows of the chunk, for kernels that take rows.
ROWS = 16
#: Share by which a kernel may be worse than the committed results.
TOLERANCE = 0.10
THREADS = 256


@dataclass(frozen=True)
class Limits:
    """Of a multiprocessor: CUDA C++ Programming Guide, "Compute Capabilities", table of technical specifications."""

    threads: int
    blocks: int
    shared_bytes: int
    registers: int = 64 * 1024
    #: Of shared memory that the system takes of each block.
    reserved_bytes: int = 1024


ARCHITECTURES = {
    80: Limits(2048, 32, 164 * 1024),
    90: Limits(2048, 32, 228 * 1024),
    100: Limits(2048, 32, 228 * 1024),
    120: Limits(1536, 24, 100 * 1024),
}
#: Those whose machine code the interpreter knows. It does not know the 64-bit instructions that sm_120 has.
INTERPRETED = (80, 90, 100)


def blocks_of(limits: Limits, registers: int, shared: int) -> int:
    """Blocks of 256 threads that a multiprocessor holds. Registers are given to warps in units of 256, shared memory in units of 128."""
    warps = THREADS // 32
    by_registers = limits.registers // (-(-registers * 32 // 256) * 256) // warps
    by_shared = limits.shared_bytes // (-(-(shared + limits.reserved_bytes) // 128) * 128)
    return min(by_registers, by_shared, limits.threads // THREADS, limits.blocks)


# ---- the compiler's report -------------------------------------------------------------------------------------------


def cubin(architecture: int) -> tuple[Path, str]:
    """The machine code of all kernels by CuPy's NVRTC, and the words of the assembler; kept by content."""
    options = (*cupy_kernels.OPTIONS, "--ptxas-options=-v", "-Werror=all-warnings")
    parts = [cupy_kernels.version().encode(), *options, cupy_kernels.source()]

    def compile_(target: Path) -> None:
        words: list[str] = []
        code = cupy_kernels.compiled(cupy_kernels.source(), options, str(architecture), words.append)
        report = "".join(words).encode()
        target.write_bytes(len(report).to_bytes(8, "little") + report + code)

    both = builds.kept(f"cuda_static_{architecture}", parts, compile_)
    content = both.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    only = builds.kept(f"cubin_{architecture}", [content[end:]], lambda target: target.write_bytes(content[end:]))  # type: ignore[func-returns-value, arg-type, return-value]
    return only, content[8:end].decode()


def resources(report: str) -> dict[str, dict[str, int]]:
    """Kernel -> registers, static shared memory, stack frame and spilled bytes."""
    found = re.findall(
        r"Compiling entry function '(\w+)' for '\w+'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers([^\n]*)",
        report,
        re.DOTALL,
    )
    return {
        name: {
            "registers": int(registers),
            "static_shared_bytes": int(shared[1]) if (shared := re.search(r"(\d+) bytes smem", rest)) else 0,
            "stack_bytes": int(stack),
            "spill_bytes": int(stores) + int(loads),
        }
        for name, stack, stores, loads, registers, rest in found
    }


def dynamic_shared(kernel: str) -> int:
    """Bytes of shared memory with which the route launches the kernel."""
    what = max((name for name in interface.SHARED_BYTES if kernel.startswith(f"zipccl_{name}")), key=len)
    itemsize = next((dtype.itemsize for dtype, kind in backend.DTYPES.items() if f"_{kind}" in kernel), 1)
    return interface.SHARED_BYTES[what][itemsize]


# ---- issue slots -----------------------------------------------------------------------------------------------------


def nvdisasm() -> str:
    """Path of the disassembler.

    Raises:
        BuildError: there is none.
    """
    import importlib.util
    import shutil

    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in Path(folder).glob("*/bin/nvdisasm"):
            return str(path)
    found = shutil.which("nvdisasm")
    if not found:
        raise build.BuildError("no nvdisasm; pip install nvidia-cuda-nvdisasm")
    return found


def gaussian(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Typical words; the formats of eight bits scaled so that none is zero or subnormal, as a zero leads to the code for rare blocks."""
    x = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed))
    if dtype.itemsize > 1:
        return (x * 0.02).to(dtype)
    x = (x * 8).to(dtype)
    return torch.where(x.float() == 0, torch.ones(ELEMENTS), x.float()).to(dtype)


class WholeChunks(launches.Launches):
    """The launches of large messages, whose chunks are not cut."""

    def split(self, what: str, itemsize: int, chunks: int, device: torch.device) -> int:
        return 0


def few_changed(numbers: torch.Tensor) -> torch.Tensor:
    """3 % of the numbers moved, by up to seven units."""
    draw = torch.Generator().manual_seed(2)
    units = torch.randint(1, 8, numbers.shape, generator=draw) * (torch.rand(numbers.shape, generator=draw) < 0.03)
    return numbers + units.to(numbers.dtype)


def run_delta(route: backend.CudaBackend, plain: kernels.KernelBackend, new: torch.Tensor, base: torch.Tensor) -> None:
    """Code ``new`` against ``base`` and back, in blocks of 1024.

    Raises:
        AssertionError: a result differs from that of the CPU's route.
    """
    payloads = [torch.zeros(compress_bound(ELEMENTS, base.dtype, "delta"), dtype=torch.uint8) for _ in range(2)]
    sizes = [each.encode_delta(new, base, 1024, out) for each, out in zip((route, plain), payloads)]
    assert sizes[0] == sizes[1] and torch.equal(*(payload[: sizes[0]] for payload in payloads)), base.dtype
    out = torch.empty_like(base)
    route.decode_delta(payloads[0][: sizes[0]], base, 1024, out)
    assert torch.equal(out.view(torch.uint8), new.view(torch.uint8)), base.dtype


def run_rounded(route: backend.CudaBackend, plain: kernels.LossyBackend, words: torch.Tensor) -> None:
    """Code ``words`` of :data:`MANTISSA` bits and back, and round them alone, in blocks of 1024.

    Raises:
        AssertionError: a result differs from that of the CPU's route.
    """
    room = compress_bound(ELEMENTS, words.dtype, Round(MANTISSA), lossy=True, block=1024)
    payloads = [torch.zeros(room, dtype=torch.uint8) for _ in range(2)]
    sizes = [each.encode_rounded([words], MANTISSA, 1024, [out])[0] for each, out in zip((route, plain), payloads)]
    assert sizes[0] == sizes[1] and torch.equal(*(payload[: sizes[0][0]] for payload in payloads)), words.dtype
    rounded = [torch.empty_like(words) for _ in range(2)]
    for each, out in zip((route, plain), rounded):
        each.round_words(words, MANTISSA, out)
    assert torch.equal(*rounded), words.dtype
    if words.dtype in TRIMMED:
        out = torch.empty_like(words)
        route.decode_rounded(payloads[0][: sizes[0][0]], 1024, out)
        assert torch.equal(out, rounded[0]), words.dtype


def run_all(launcher: sass.SassLauncher) -> None:
    """Run every kernel on one chunk.

    Raises:
        AssertionError: a result differs from that of the CPU's route.
    """
    route, plain = backend.CudaBackend(launcher, "cpu"), kernels.route("native")
    route._launches = WholeChunks(launcher, "cpu", None)
    for dtype, kind in backend.DTYPES.items():
        words = gaussian(dtype)
        for code in ("wide", "cascade"):  # the slots of a decoder are those of the last
            frame = compress(words, code, block=1024, shaped=False, checksum=False, route="native")
            slot = torch.zeros(compress_bound(ELEMENTS, dtype), dtype=torch.uint8)
            route.encode_frames([words], code, 1024, [slot])
            assert torch.equal(slot[: frame.numel()], frame), (kind, code)
            launcher.counts.pop(f"zipccl_decode_{kind}", None)
            out, status = torch.empty_like(words), backend.new_status(words.device)
            route.decode_frames([frame], 1024, [out], status)
            backend.raise_failure(status)
            assert torch.equal(out.view(torch.uint8), words.view(torch.uint8)), (kind, code)
        if dtype.itemsize == 1:
            continue
        run_rounded(route, kernels.lossy_route("native", "cpu", "encode_rounded"), words)
        base = words
        changed = (base.float() + 1e-5 * torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(1))).to(dtype)
        units = torch.int16 if dtype.itemsize == 2 else torch.int32
        for new in (few_changed(base.view(units)).view(dtype), changed):  # LIST, and the TABLE that is counted
            launcher.counts.pop(f"zipccl_encode_{kind}_delta", None)
            launcher.counts.pop(f"zipccl_decode_{kind}_delta", None)
            run_delta(route, plain, new, base)
        sums, status = torch.empty_like(base), backend.new_status(base.device)
        route.decode_sum_frames([frame] * SUMMANDS, 1024, dtype, sums, status)
        backend.raise_failure(status)
        assert torch.equal(sums, (words.float() * SUMMANDS).to(dtype)), kind
        sources, factors = torch.arange(ROWS, dtype=torch.int32).flip(0), torch.linspace(0.5, 1.5, ROWS)
        predictions = [torch.empty_like(words) for _ in range(2)]
        for each, out in zip((route, plain), predictions):
            each.predict_rows(words, ELEMENTS // ROWS, sources, factors, out)
        assert torch.equal(*predictions), kind
    data = gaussian(torch.bfloat16).view(torch.uint8)
    run_delta(route, plain, few_changed(data[:ELEMENTS]), data[:ELEMENTS])
    assert route.region_hash(data) == plain.region_hash(data)
    rows, sources = data.view(ROWS, -1).repeat(2, 1)[: ROWS + 2].view(-1), torch.empty(ROWS + 2, dtype=torch.int32)
    table = torch.zeros(4 * ROWS, dtype=torch.int32)
    assert route.find_rows(rows, 2 * ELEMENTS // ROWS, 0, sources, table) == 2
    assert sources.tolist() == [*range(ROWS), 0, 1]


# ---- rows ------------------------------------------------------------------------------------------------------------


def elements(kernel: str) -> int:
    """Elements that a kernel reads or writes in :func:`run_all`: of all summands, and the hash takes words of 16 bits."""
    return ELEMENTS * SUMMANDS if "decode_sum" in kernel else ELEMENTS


def rows_of(architecture: int) -> list[dict[str, Any]]:
    path, report = cubin(architecture)
    launcher = sass.load(nvdisasm(), path, architecture) if architecture in INTERPRETED else None
    if launcher is not None:
        run_all(launcher)
    limits = ARCHITECTURES[architecture]
    rows = []
    for kernel, found in sorted(resources(report).items()):
        dynamic, slots = dynamic_shared(kernel), None
        # The interpreter has no numbers of 64 bits with a fraction, which the sums of rows are.
        if launcher is not None and kernel in launcher.counts:
            slots = round(launcher.issued(kernel) * 32 / elements(kernel), 2)
        rows.append({
            "kernel": kernel.removeprefix("zipccl_"),
            "architecture": f"sm_{architecture}",
            **found,
            "dynamic_shared_bytes": dynamic,
            "blocks": blocks_of(limits, found["registers"], dynamic + found["static_shared_bytes"]),
            "slots": slots,
        })  # fmt: skip
    return rows


def rows(architectures: Sequence[int] = tuple(ARCHITECTURES)) -> list[dict[str, Any]]:
    """A row for each of ``architectures`` and every kernel.

    Raises:
        BuildError: no CuPy or nvdisasm, or NVRTC failed.
    """
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(cubin, architectures))
    return [row for architecture in architectures for row in rows_of(architecture)]


def worse(now: list[dict[str, Any]], before: list[dict[str, Any]]) -> Iterator[str]:
    """Say where a kernel spills, has a stack frame, or is more than :data:`TOLERANCE` worse than ``before``."""
    known = {(row["kernel"], row["architecture"]): row for row in before}
    for row in now:
        name = f"{row['kernel']} {row['architecture']}"
        for key in ("spill_bytes", "stack_bytes"):
            if row[key]:
                yield f"{name}: {key} is {row[key]}, wanted is 0: keep arrays in registers, or lower the blocks in kernels.cuh"
        old = known.pop((row["kernel"], row["architecture"]), None)
        if old is None:
            yield f"{name} is not in {RESULTS.name}; {REMEDY}"
            continue
        for key in ("registers", "slots"):
            if row[key] is not None and row[key] > (old[key] or 0) * (1 + TOLERANCE):
                yield f"{name}: {key} was {old[key]} and is {row[key]}; {REMEDY}"
        if row["blocks"] < old["blocks"] * (1 - TOLERANCE):
            yield f"{name}: blocks was {old['blocks']} and is {row['blocks']}; {REMEDY}"
    for kernel, architecture in known:
        yield f"{kernel} {architecture} is in {RESULTS.name} and no longer in the sources; {REMEDY}"


def main() -> int:
    """Print and write the table.

    Returns:
        Exit status: 1 if a kernel spills or has a stack frame.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=str(RESULTS))
    arguments = parser.parse_args()
    found = rows()
    keys = ("registers", "dynamic_shared_bytes", "stack_bytes", "spill_bytes", "blocks")
    table = Table(
        [Column("kernel", "", 24), Column("architecture"), *(Column(key, "d") for key in keys), Column("slots", ".2f")]
    )
    for row in found:
        table.add(row)
    limits = {f"sm_{architecture}": asdict(each) for architecture, each in ARCHITECTURES.items()}
    write_json(
        arguments.out, found, "make cuda-static", compiler=cupy_kernels.version(), limits=limits,
        data=f"a chunk of {ELEMENTS} Gaussian words in blocks of 1024; sums of {SUMMANDS} frames; differences of u8: 3 % of bytes; words "
        f"rounded to {MANTISSA} bits; slots: instructions that warps issue, times 32, by elements",
    )  # fmt: skip
    bad = [row for row in found if row["spill_bytes"] or row["stack_bytes"]]
    for row in bad:
        print(f"{row['kernel']} {row['architecture']} spills or has a stack frame", file=sys.stderr)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
