"""Machine code of the CUDA kernels, read by nvdisasm and executed on the CPU, an instruction of a warp at a time.

An issue slot is one instruction of one warp. The counts are exact for given data, but for two things: a real machine may run the parts of
a diverged warp apart for longer, and it repeats instructions that wait. NVIDIA documents the names of the instructions ("CUDA Binary
Utilities", instruction set reference) and not their operands; tests therefore compare the results with those of the CPU.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

LANES, WARPS = 32, 8
#: Bytes of the constant bank 0 before the parameters of a kernel (EIATTR_PARAM_CBANK of the cubins).
PARAMETERS = {80: 0x160, 90: 0x210, 100: 0x380}
#: Where the constant bank 0 holds the number of blocks; before the parameters.
GRID = {80: 0xC, 90: 0xC, 100: 0x370}
#: The upper half of an address that means shared memory; no address of a process has it.
SHARED_WINDOW = 0x01000000
SHARED_BYTES = 256 * 1024
#: All memory of this process, from here on.
FIRST = 4096
NUMBERS = {1: np.uint8, 2: np.uint16, 4: np.uint32}

Mask = Any  # np.ndarray of 32 bool, one for uniform instructions
Step = Callable[["Warp", Mask], None]


class UnknownInstruction(NotImplementedError):
    """The interpreter does not know an instruction: add it to :data:`OPS`."""


@dataclass
class Instruction:
    guard: str
    op: str
    operands: list[str]
    address: int
    text: str
    step: Step | None = None


@dataclass
class Code:
    """A kernel."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def places(self) -> dict[int, int]:
        """Address of an instruction -> its place."""
        return {each.address: place for place, each in enumerate(self.instructions)}


def _operands(text: str) -> list[str]:
    return [part.strip() for part in re.split(r",\s*(?![^(]*\))", text.strip())] if text.strip() else []


def parse(listing: str) -> dict[str, Code]:
    """Kernels of a listing of ``nvdisasm -c``."""
    codes: dict[str, Code] = {}
    code = None
    for line in listing.splitlines():
        if found := re.match(r"\s*\.text\.(\w+):", line):
            code = codes.setdefault(found[1], Code(found[1]))
        elif found := re.match(r"(\.L\w+):", line):
            if code:
                code.labels[found[1]] = len(code.instructions)
        elif code and (
            found := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", line)
        ):
            text = re.sub(r"\(\*.*?\*\)|\.reuse", "", found[4])  # notes of the disassembler
            code.instructions.append(
                Instruction(found[2] or "", found[3], _operands(text), int(found[1], 16), line.strip())
            )
    return codes


def constants(cubin: bytes) -> dict[tuple[int, str], bytes]:
    """(bank, kernel) -> constants that the compiler put there."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    heads = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * size) for i in range(count)]
    text = heads[names][4]
    found = {}
    for head in heads:
        name = cubin[text + head[0] : cubin.index(b"\0", text + head[0])].decode()
        if match := re.fullmatch(r"\.nv\.constant(\d+)(?:\.(\w+))?", name):
            found[int(match[1]), match[2] or ""] = cubin[head[4] : head[4] + head[5]]
    return found


class Warp:
    """Registers of a warp and the places of its lanes."""

    def __init__(self, block: Block, number: int) -> None:
        self.block, self.number = block, number
        self.r = np.zeros((256, LANES), np.uint32)
        self.ur = np.zeros((256, 1), np.uint32)
        self.p = np.zeros((8, LANES), bool)
        self.up = np.zeros((8, 1), bool)
        self.p[7] = self.up[7] = True
        #: Lanes that a convergence barrier waits for, by barrier and lane.
        self.barriers = np.zeros((16, LANES), np.uint64)
        everyone = np.ones(LANES, bool)
        #: Groups that can run: lanes and the place of their next instruction.
        self.groups: list[tuple[Mask, int]] = [(everyone, 0)]
        #: Place -> lanes that wait there.
        self.waiting: dict[int, Mask] = {}
        self.live = everyone.copy()
        self.mask = everyone
        self.place = 0

    def run(self, counts: Counter[int]) -> str:
        """Run until the warp waits for its block ("bar") or has ended ("exit")."""
        instructions = self.block.code.instructions
        while self.groups:
            self.mask, self.place = self.groups.pop()
            while True:
                here = instructions[self.place]
                counts[self.place] += 1
                if here.step is None:
                    here.step = translate(here, self.block.code, self.block.launcher)
                self.place += 1
                if here.step(self, self.mask) is not None:  # type: ignore[func-returns-value]
                    if here.op.startswith("BAR"):
                        self.groups.append((self.mask, self.place))
                        return "bar"
                    break
        if self.waiting:
            raise RuntimeError(f"lanes wait for ever: {[instructions[at].text for at in self.waiting]}")
        return "exit"

    # Lanes that wait and the groups that go on.

    def wait(self, wanted: Mask, place: int, after: int) -> bool:
        """Lanes of this group wait at ``place`` until all ``wanted`` do, then go on at ``after``."""
        here = self.waiting.pop(place, np.zeros(LANES, bool)) | self.mask
        if not (wanted & self.live & ~here).any():
            self.groups.append((here, after))
        else:
            self.waiting[place] = here
        return True

    def recheck(self) -> None:
        """After lanes have left barriers or ended."""
        for place, here in list(self.waiting.items()):
            instruction = self.block.code.instructions[place]
            if instruction.op.startswith("BSYNC"):
                wanted = lanes_of(self.barriers[int(instruction.operands[0][1:])][int(here.argmax())])
            else:
                wanted = np.ones(LANES, bool)
            if not (wanted & self.live & ~here).any():
                del self.waiting[place]
                self.groups.append((here, place + 1))


def lanes_of(bits: Any) -> Mask:
    return (int(bits) >> np.arange(LANES) & 1).astype(bool)


def bits_of(mask: Mask) -> int:
    return int((mask.astype(np.uint64) << np.arange(LANES, dtype=np.uint64)).sum())


class Block:
    """A block of threads: its shared memory and warps."""

    def __init__(self, launcher: SassLauncher, code: Code, index: int, bank: bytes) -> None:
        self.launcher, self.code, self.index = launcher, code, index
        self.bank = np.frombuffer(bank, np.uint8)
        self.shared = np.full(SHARED_BYTES, 0xA5, np.uint8)
        self.warps = [Warp(self, number) for number in range(WARPS)]

    def run(self, counts: Counter[int]) -> None:
        running = self.warps
        while running:
            running = [warp for warp in running if warp.run(counts) == "bar"]


# ---- operands --------------------------------------------------------------------------------------------------------


def u64(x: Any) -> Any:
    return x.astype(np.uint64)


def low(x: Any) -> Any:
    return (x & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def signed(x: Any) -> Any:
    return x.astype(np.uint32).view(np.int32)


Get = Callable[[Warp], Any]


def constant(value: int) -> Get:
    array = np.array([value & 0xFFFFFFFF], np.uint32)
    return lambda w: array


def read_constant(text: str, launcher: SassLauncher, kernel: str, extra: int = 0) -> Callable[..., Any]:
    """Reads a constant; for the lanes of a mask, if one is given, as the address of another lane may be anything."""
    found = re.fullmatch(r"c\[(0x[0-9a-f]+|UR?\w+)\]\[(.*)\]", text)
    if not found:
        raise UnknownInstruction(text)
    bank = int(found[1], 16)
    at = address(f"[{found[2]}]", wide=False)
    table = np.frombuffer(launcher.banks.get((bank, kernel)) or launcher.banks.get((bank, "")) or b"", np.uint8)

    def get(w: Warp, m: Mask | None = None) -> Any:
        where = at(w).astype(np.int64) + extra
        if m is not None and len(where) > 1:
            where = np.where(m, where, 0)
        source = w.block.bank if bank == 0 else table
        return sum(source[where + i].astype(np.uint32) << np.uint32(8 * i) for i in range(4))

    return get


def value(text: str, ins: Instruction, launcher: SassLauncher, kernel: str, pair: int = 0) -> Get:
    """The 32 bits of an operand; of the register ``pair`` after it. Or a predicate."""
    if is_predicate(text):
        return predicate(text)
    if text.startswith("-") and not text.startswith("-0x") and not re.match(r"-\d", text):
        inner = value(text[1:], ins, launcher, kernel, pair)
        return lambda w: (~inner(w)) + np.uint32(1)
    if text.startswith("~"):
        inner = value(text[1:], ins, launcher, kernel, pair)
        return lambda w: ~inner(w)
    if text.startswith("|"):
        inner = value(text[1:-1], ins, launcher, kernel, pair)
        return lambda w: inner(w) & np.uint32(0x7FFFFFFF)
    if text in ("RZ", "URZ", "SRZ"):
        return constant(0)
    if found := re.fullmatch(r"(U?)R(\d+)(?:\.(\w+))?", text):
        number = int(found[2]) + pair
        part = found[3]
        if part and part.startswith("B"):
            shift = np.uint32(8 * int(part[1]))
            return lambda w: w.r[number] >> shift & np.uint32(255)
        if part not in (None, "64", "U32", "H0_H0"):
            raise UnknownInstruction(f"{ins.text}: operand {text}")
        return (lambda w: w.ur[number]) if found[1] else (lambda w: w.r[number])
    if re.fullmatch(r"-?0x[0-9a-f]+", text):
        return constant(int(text, 16) >> 32 * pair)
    if re.fullmatch(r"[-+]?(\d+(\.\d+)?([eE][-+]?\d+)?|INF|QNAN)", text):
        return constant(struct.unpack("<I", struct.pack("<f", float(text.replace("QNAN", "nan"))))[0])
    if text.startswith("c["):
        return read_constant(text, launcher, kernel, 4 * pair)
    raise UnknownInstruction(f"{ins.text}: operand {text}")


def predicate(text: str) -> Get:
    negated = text.startswith("!")
    name = text.lstrip("!")
    uniform, number = name.startswith("U"), 7 if name.endswith("T") else int(name[-1])

    def get(w: Warp) -> Any:
        found = w.up[number] if uniform else w.p[number]
        return ~found if negated else found

    return get


def is_predicate(text: str) -> bool:
    return re.fullmatch(r"!?U?P[0-7T]", text) is not None


def address(text: str, wide: bool) -> Get:
    """The sum in the brackets; 64 bits if a register is said to be."""
    inside = re.search(r"\[([^\[\]]*)\]$", text)
    assert inside, text
    parts: list[Get] = []
    for term in inside[1].replace("+-", "+~").split("+"):
        if not term:
            continue
        if re.fullmatch(r"[-~]?0x[0-9a-f]+", term):
            amount = int(term.replace("~", "-"), 16)
            parts.append(lambda w, amount=amount: np.array([amount], np.int64))  # type: ignore[misc]
        elif found := re.fullmatch(r"(U?)R(\d+|Z)(?:\.(64|U32|X\d+))?(?:\.(U32|64))?", term):
            if found[2] == "Z":
                continue
            number, uniform = int(found[2]), bool(found[1])
            scale = int(found[3][1:]) if found[3] and found[3][0] == "X" else 1
            both = found[3] == "64" or (uniform and wide and ".64" in inside[1])

            def part(
                w: Warp, number: int = number, uniform: bool = uniform, scale: int = scale, both: bool = both
            ) -> Any:
                file = w.ur if uniform else w.r
                found = file[number].astype(np.int64) * scale
                return found | file[number + 1].astype(np.int64) << 32 if both else found

            parts.append(part)
        else:
            raise UnknownInstruction(text)
    return lambda w: sum((part(w) for part in parts), np.zeros(1, np.int64))


def put(text: str, pair: int = 0) -> Callable[[Warp, Any, Mask], None]:
    """Writes a register, or the one ``pair`` after it, or a predicate."""
    if text in ("RZ", "URZ", "PT", "UPT"):
        return lambda w, x, m: None
    found = re.fullmatch(r"(UR|R|UP|P)(\d+)", text)
    if not found:
        raise UnknownInstruction(text)
    file, number = found[1].lower(), int(found[2]) + pair  # a field of the warp
    if file.startswith("u"):

        def write(w: Warp, x: Any, m: Mask) -> None:
            if m.any():
                getattr(w, file)[number] = x[int(m.argmax())] if len(x) > 1 else x

        return write
    return lambda w, x, m: np.copyto(getattr(w, file)[number], x, where=m)


class Operands:
    """Operands of an instruction, by place: values, pairs, predicates."""

    def __init__(self, ins: Instruction, code: Code, launcher: SassLauncher) -> None:
        self.ins, self.code, self.launcher = ins, code, launcher
        self.texts = ins.operands
        self.flags = ins.op.split(".")[1:]

    def value(self, text: str, pair: int = 0) -> Get:
        return value(text, self.ins, self.launcher, self.code.name, pair)

    def get(self, i: int, pair: int = 0) -> Get:
        return self.value(self.texts[i], pair)

    def get64(self, i: int) -> Get:
        first, second = self.get(i), self.get(i, 1)
        return lambda w: u64(first(w)) | u64(second(w)) << np.uint64(32)

    def put64(self, text: str) -> Callable[[Warp, Any, Mask], None]:
        first, second = put(text), put(text, 1)

        def write(w: Warp, x: Any, m: Mask) -> None:
            first(w, low(x), m)
            second(w, (x >> np.uint64(32)).astype(np.uint32), m)

        return write

    def refuse(self, unknown: Any, why: str = "") -> None:
        """Raise UnknownInstruction if this form of the instruction is ``unknown``."""
        if unknown:
            raise UnknownInstruction(f"{self.ins.text}: {why}" if why else self.ins.text)

    @property
    def here(self) -> int:
        """The place of the instruction."""
        return next(i for i, each in enumerate(self.code.instructions) if each is self.ins)

    def width(self) -> int:
        """Bytes of an access."""
        for flag, count in (("128", 16), ("64", 8), ("U8", 1), ("S8", 1), ("U16", 2), ("S16", 2)):
            if flag in self.flags:
                return count
        return 4

    def places(self, unit: int) -> Callable[[Warp, Mask], tuple[Any, Any]]:
        """The memory as numbers of ``unit`` bytes, and the places of the lanes in it; an address is a multiple of the access's width."""
        stem = self.ins.op.split(".")[0]
        text = next(text for text in self.texts if "[" in text and not text.startswith("c["))
        if stem == "ATOMG" and "CAS" in self.flags:  # whose address the disassembler shows without its size
            text = re.sub(r"\[R(\d+)(?!\.)\b", r"[R\1.64", text)
        shared, generic = stem in ("LDS", "STS", "ATOMS"), stem in ("LD", "ST")
        at, count = address(text, wide=not shared), self.width()

        def find(w: Warp, m: Mask) -> tuple[Any, Any]:
            where = np.broadcast_to(at(w), (LANES,))[m]
            if (where % count).any():
                raise RuntimeError(f"misaligned: {self.ins.text}: {where[where % count != 0][0]:#x}")
            inside = where >> 32 == SHARED_WINDOW
            if shared or (generic and inside.any()):
                self.refuse(not shared and not inside.all(), "shared and other memory at once")
                return w.block.shared.view(NUMBERS[unit]), (where & 0xFFFFFFFF) // unit
            return self.launcher.views[unit], (where - FIRST) // unit

        return find


def translate(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    """The function that executes an instruction."""
    from sass_ops import find  # the table of instructions

    action = find(ins)(Operands(ins, code, launcher))
    if not ins.guard:
        return action
    guard = predicate(ins.guard[1:])
    branches = ins.op.split(".")[0] in ("BRA", "EXIT", "RET", "CALL", "BREAK", "BSYNC", "WARPSYNC")

    def guarded(w: Warp, m: Mask) -> Any:
        wanted = m & guard(w)
        if wanted.any() or branches:
            return action(w, wanted)
        return None

    return guarded


class SassLauncher:
    """Launcher of :class:`ds_zipccl.kernels.cuda.backend.CudaBackend` for CPU tensors: runs the blocks of a kernel one after the other."""

    def __init__(self, listing: str, cubin: bytes, architecture: int) -> None:
        self.codes = parse(listing)
        self.banks = constants(cubin)
        self.architecture = architecture
        #: Kernel -> place of an instruction -> times issued.
        self.counts: dict[str, Counter[int]] = {}
        everything = (ctypes.c_uint8 * ((1 << 47) - 2 * FIRST)).from_address(FIRST)
        #: The memory as numbers of 1, 2 and 4 bytes.
        self.views = {size: np.frombuffer(everything, np.uint8).view(kind) for size, kind in NUMBERS.items()}

    def launch(
        self, kernel: str, grid: tuple[int, int], shared_bytes: int, params: ctypes.Structure, stream: int
    ) -> None:
        across, rows = grid
        assert rows == 1, "no launch here has ranks"
        start = PARAMETERS[self.architecture]
        bank = bytearray(start + ctypes.sizeof(params) + 16)
        bank[start : start + ctypes.sizeof(params)] = bytes(params)
        struct.pack_into("<I", bank, GRID[self.architecture], across)
        struct.pack_into("<I", bank, 0x28 if self.architecture < 100 else 0x37C, 2048)  # the stack
        counts = self.counts.setdefault(kernel, Counter())
        for index in range(across):
            Block(self, self.codes[kernel], index, bytes(bank)).run(counts)

    def issued(self, kernel: str) -> int:
        """Instructions that warps have issued in all launches of a kernel."""
        return self.counts[kernel].total()


def load(nvdisasm: str, cubin: Path, architecture: int) -> SassLauncher:
    """The launcher of the kernels of a cubin."""
    import subprocess

    listing = subprocess.run(
        [nvdisasm, "-c", str(cubin)], capture_output=True, text=True, check=True, timeout=300
    ).stdout
    return SassLauncher(listing, cubin.read_bytes(), architecture)
