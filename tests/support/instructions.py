"""``make cpu-instructions``: instructions an element of the C++ kernels, of x86-64 and 64-bit Arm, to ``docs/results/instructions.json``.

QEMU runs the fuzzer with the word ``repeat`` (tests/fuzz/cases.h) and logs every instruction. A kernel runs once, and then twice, over
a message; the difference has neither start nor end of the program. Instructions are no time: an instruction of AVX2 is for 32 bytes, one of
NEON for 16, and processors differ in how many they start in a cycle.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import arm
import torch
from places import ROOT

from ds_zipccl import codecs
from ds_zipccl.kernels import build
from ds_zipccl.tools.tables import Column, Table, write_json

RESULTS = ROOT / "docs" / "results" / "instructions.json"
ELEMENTS = 2 * 1024
LEVELS = {"x86_64": ("avx2",), "aarch64": ("neon", "scalar")}
#: Without the copies of glibc that repeat one instruction, which QEMU logs for each byte.
CPU = {"x86_64": ("-cpu", "max,erms=off,fsrm=off"), "aarch64": ()}
#: Data -> dtype, share of the elements that differ from the base by a unit (None: no base), and kernels.
DATA: dict[str, tuple[torch.dtype, float | None, tuple[str, ...]]] = {
    "bf16": (torch.bfloat16, None, ("encode", "decode", "add", "hash")),
    "fp32": (torch.float32, None, ("encode", "decode")),
    "bf16, 1 % changed": (torch.bfloat16, 0.01, ("encode", "decode")),
    "bf16, 30 % changed": (torch.bfloat16, 0.3, ("encode", "decode")),
}


def case(dtype: torch.dtype, share: float | None) -> bytes:
    """A message of normally distributed values as a file of cases (tests/fuzz/cases.h)."""
    draw = torch.Generator().manual_seed(1)
    words = (torch.randn(ELEMENTS, generator=draw) * 0.02).to(dtype)
    bits = words.view({2: torch.int16, 4: torch.int32}[words.itemsize])
    base = None
    if share is not None:
        base = (bits + (torch.rand(ELEMENTS, generator=draw) < share)).to(bits.dtype).view(dtype)
    frame = codecs.compress(words, "cascade" if base is None else "delta", base=base, shaped=False, checksum=False)
    return arm.case(words, base, frame, 0 if base is None else 2, 0, words)


def programs() -> dict[str, Path]:
    """Machine -> the fuzzer for it: with the library of the native route here, and by GCC for Arm, where it is installed."""
    return {"x86_64": arm.fuzzer_here().path(), "aarch64": arm.fuzzer(arm.cross).path()}


def executed(machine: str, program: Path, *arguments: str) -> int:
    """Return the number of instructions that a program executes.

    Raises:
        RuntimeError: it fails.
    """
    qemu = emulators()[machine]
    single = subprocess.run([qemu, "-help"], capture_output=True, text=True).stdout
    option = "-one-insn-per-tb" if "-one-insn-per-tb" in single else "-singlestep"  # the name until QEMU 8
    command = [qemu, *CPU[machine], option, "-d", "exec,nochain", str(program), *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        assert process.stderr
        count = sum(line.startswith(b"Trace") for line in process.stderr)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}")
    return count


def emulators() -> dict[str, str]:
    return {machine: arm.emulator(machine, always=True)[0] for machine in LEVELS}


def counts() -> Iterator[dict[str, str | float]]:
    """A row for each kernel, data and level, after a check of the results."""
    made = programs()
    with tempfile.TemporaryDirectory() as folder:
        for data, (dtype, share, kernels) in DATA.items():
            file = Path(folder) / "case"
            file.write_bytes(case(dtype, share))
            for machine, program in made.items():
                command = [emulators()[machine], *CPU[machine], str(program), "check", str(file), *LEVELS[machine]]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                for kernel in kernels:
                    for level in LEVELS[machine]:
                        once, twice = (
                            executed(machine, program, "repeat", kernel, times, str(file), level) for times in "12"
                        )
                        yield {
                            "kernel": kernel,
                            "data": data,
                            "machine": machine,
                            "level": level,
                            "instructions": round((twice - once) / ELEMENTS, 2),
                        }


def main() -> None:
    if platform.machine() != "x86_64":
        sys.exit("the programs for x86-64 are made on such a machine")
    table = Table([Column(key, width=18) for key in ("kernel", "data", "machine", "level", "instructions")])
    rows = []
    for row in counts():
        table.add(row)
        rows.append(row)
    compilers = {
        machine: build._identity(compiler()).decode().splitlines()[0]
        for machine, compiler in (("x86_64", build.compiler), ("aarch64", arm.cross))
    }
    write_json(str(RESULTS), rows, "make cpu-instructions", elements=ELEMENTS, compilers=compilers)


if __name__ == "__main__":
    main()
