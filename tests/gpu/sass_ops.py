"""The instructions of sass.py: name -> function that translates one. Here those of a lane.

sass_lanes.py has what lanes do together, branches and memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from sass import (
    LANES,
    SHARED_WINDOW,
    Code,
    Instruction,
    Mask,
    SassLauncher,
    Step,
    UnknownInstruction,
    Warp,
    is_predicate,
    low,
    predicate,
    put,
    put_predicate,
    signed,
    u64,
    value,
)

Translate = Callable[[Instruction, Code, SassLauncher], Step]
OPS: dict[str, Translate] = {}
ONE = np.uint32(1)
FULL = np.uint64(0xFFFFFFFF)


def op(*names: str) -> Callable[[Translate], Translate]:
    def register(function: Translate) -> Translate:
        for name in names:
            OPS[name] = function
        return function

    return register


def find(ins: Instruction) -> Translate:
    """The translation of an instruction; a uniform one is that of its vector form, if it has none of its own."""
    import sass_lanes  # noqa: F401 (it adds to the table)

    stem = ins.op.split(".")[0]
    if stem in OPS:
        return OPS[stem]
    if stem.startswith("U") and stem[1:] in OPS:
        return OPS[stem[1:]]
    raise UnknownInstruction(f"{ins.text}: the interpreter does not know {ins.op}; add it to tests/gpu/sass_ops.py")


class Operands:
    """Operands of an instruction, by place: values, pairs, predicates."""

    def __init__(self, ins: Instruction, code: Code, launcher: SassLauncher) -> None:
        self.ins, self.code, self.launcher = ins, code, launcher
        self.texts = ins.operands
        self.flags = ins.op.split(".")[1:]

    def get(self, i: int, pair: int = 0) -> Callable[[Warp], Any]:
        return value(self.texts[i], self.ins, self.launcher, self.code.name, pair)

    def get64(self, i: int) -> Callable[[Warp], Any]:
        first, second = self.get(i), self.get(i, 1)
        return lambda w: u64(first(w)) | u64(second(w)) << np.uint64(32)

    def put64(self, text: str) -> Callable[[Warp, Any, Mask], None]:
        first, second = put(text), put(text, 1)

        def write(w: Warp, x: Any, m: Mask) -> None:
            first(w, low(x), m)
            second(w, (x >> np.uint64(32)).astype(np.uint32), m)

        return write

    def predicates_from(self, i: int) -> int:
        """The place after the predicates that begin at ``i``."""
        while i < len(self.texts) and is_predicate(self.texts[i]):
            i += 1
        return i


def plain(function: Callable[..., Any], count: int) -> Translate:
    """d = function(a, b, ...) of 32 bits."""

    def build(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
        o = Operands(ins, code, launcher)
        gets, to = [o.get(1 + i) for i in range(count)], put(o.texts[0])
        return lambda w, m: to(w, function(*(get(w) for get in gets)), m)

    return build


OPS["MOV"] = OPS["R2UR"] = plain(lambda a: a, 1)
OPS["POPC"] = plain(lambda a: np.bitwise_count(a).astype(np.uint32), 1)
OPS["VIADD"] = OPS["UVIADD"] = plain(lambda a, b: a + b, 2)
OPS["IABS"] = plain(lambda a: np.abs(signed(a).astype(np.int64)).astype(np.uint32), 1)


def reverse(a: Any) -> Any:
    return sum(((a >> np.uint32(i) & ONE) << np.uint32(31 - i) for i in range(32)), np.uint32(0))


OPS["BREV"] = plain(reverse, 1)
OPS["FADD"] = plain(lambda a, b: (a.view(np.float32) + b.view(np.float32)).view(np.uint32), 2)
OPS["FMUL"] = plain(lambda a, b: (a.view(np.float32) * b.view(np.float32)).view(np.uint32), 2)
OPS["I2F"] = OPS["I2FP"] = plain(
    lambda a: np.nextafter(a.astype(np.float32), np.float32(np.inf), where=a.astype(np.float32).astype(np.float64) < a,
                           out=a.astype(np.float32)).view(np.uint32), 1)  # fmt: skip
OPS["MUFU"] = plain(lambda a: (np.float32(1) / a.view(np.float32)).view(np.uint32), 1)
OPS["F2I"] = plain(lambda a: np.clip(a.view(np.float32).astype(np.float64), 0, 2**32 - 1).astype(np.uint32), 1)


@op("HFMA2")
def hfma2(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    """A constant on its way to a register: 0 * 0 + two numbers of 16 bits, the upper one first."""
    texts = [text for text in ins.operands[1:] if not is_predicate(text)]
    if (
        len(texts) != 4
        or [text.lstrip("-") for text in texts[:2]] != ["RZ", "RZ"]
        or ins.op not in ("HFMA2", "HFMA2.MMA")
    ):
        raise UnknownInstruction(ins.text)
    high, low_ = (int(np.array([float(text)], np.float16).view(np.uint16)[0]) for text in texts[2:])
    to, x = put(ins.operands[0]), np.array([high << 16 | low_], np.uint32)
    return lambda w, m: to(w, x, m)


@op("CS2R", "S2R", "S2UR")
def special(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    name = ins.operands[1]
    to = put(ins.operands[0])
    if ins.op.startswith("CS2R"):
        if name != "SRZ":
            raise UnknownInstruction(ins.text)
        both = (to,) if ".32" in ins.op else (to, put(ins.operands[0], 1))

        def zero(w: Warp, m: Mask) -> None:
            for each in both:
                each(w, np.zeros(1, np.uint32), m)

        return zero
    lanes = np.arange(LANES, dtype=np.uint32)
    table: dict[str, Callable[[Warp], Any]] = {
        "SR_TID.X": lambda w: lanes + np.uint32(LANES * w.number),
        "SR_LANEID": lambda w: lanes,
        "SR_LTMASK": lambda w: (ONE << lanes) - ONE,
        "SR_CTAID.X": lambda w: np.array([w.block.index], np.uint32),
        "SR_CTAID.Y": lambda w: np.array([0], np.uint32),
        "SR_CgaCtaId": lambda w: np.zeros(1, np.uint32),
        "SR_SWINHI": lambda w: np.array([SHARED_WINDOW], np.uint32),
    }
    if name not in table:
        raise UnknownInstruction(ins.text)
    read = table[name]
    return lambda w, m: to(w, read(w), m)


@op("LOP3")
def lop3(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    o = Operands(ins, code, launcher)
    outs = [put_predicate(o.texts[0])] if is_predicate(o.texts[0]) else []
    at = len(outs)
    to, gets, table = put(o.texts[at]), [o.get(at + 1 + i) for i in range(3)], int(o.texts[at + 4], 16)
    used = [bool((table ^ (table >> (1 << i))) & sum(1 << j for j in range(8) if not j >> i & 1)) for i in (2, 1, 0)]

    def step(w: Warp, m: Mask) -> None:
        a, b, c = (get(w) if need else np.zeros(1, np.uint32) for get, need in zip(gets, used))
        result = np.zeros(1, np.uint32)
        for i in range(8):
            if table >> i & 1:
                result = result | (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        to(w, result, m)
        for each in outs:
            each(w, result != 0, m)

    return step


@op("PLOP3")
def plop3(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    texts = ins.operands
    outs, gets = [put_predicate(text) for text in texts[:2]], [predicate(text) for text in texts[2:5]]
    tables = [int(text, 16) for text in texts[5:7]]

    def step(w: Warp, m: Mask) -> None:
        a, b, c = (get(w) for get in gets)
        index = a.astype(int) * 4 + b.astype(int) * 2 + c.astype(int)
        for out, table in zip(outs, tables):
            out(w, (table >> index & 1).astype(bool), m)

    return step


@op("SHF")
def shf(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    o = Operands(ins, code, launcher)
    first, shift, second, to = o.get(1), o.get(2), o.get(3), put(o.texts[0])
    left, wide = o.flags[0] == "L", "U64" in o.flags or "S64" in o.flags
    high, wraps, arithmetic = "HI" in o.flags, "W" in o.flags, "S32" in o.flags or "S64" in o.flags
    most = 64 if wide else 32

    def step(w: Warp, m: Mask) -> None:
        count = shift(w).astype(np.uint64)
        count = count & np.uint64(most - 1) if wraps else np.minimum(count, np.uint64(most))
        both = u64(first(w)) | u64(second(w)) << np.uint64(32)
        over = count >= 64
        count = np.where(over, np.uint64(63), count)
        if arithmetic:
            both = (both.astype(np.int64) >> count.astype(np.int64)).astype(np.uint64)
        else:
            both = np.where(over, np.uint64(0), both << count if left else both >> count)
        to(w, low(both >> np.uint64(32)) if high else low(both), m)

    if left and not high and not wide:
        return lambda w, m: to(
            w,
            low(u64(first(w)) << np.minimum(shift(w) & np.uint32(31 if wraps else 0xFFFFFFFF), 32).astype(np.uint64)),
            m,
        )
    return step


@op("SEL", "FSEL")
def sel(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    o = Operands(ins, code, launcher)
    a, b, which, to = o.get(1), o.get(2), predicate(o.texts[3]), put(o.texts[0])
    return lambda w, m: to(w, np.where(which(w), a(w), b(w)), m)


@op("PRMT")
def prmt(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    o = Operands(ins, code, launcher)
    if o.flags:
        raise UnknownInstruction(ins.text)
    a, selector, b, to = o.get(1), o.get(2), o.get(3), put(o.texts[0])

    def step(w: Warp, m: Mask) -> None:
        both, choice = u64(a(w)) | u64(b(w)) << np.uint64(32), u64(selector(w))
        result = np.zeros(1, np.uint32)
        for i in range(4):
            nibble = choice >> np.uint64(4 * i) & np.uint64(15)
            byte = both >> (np.uint64(8) * (nibble & np.uint64(7))) & np.uint64(255)
            byte = np.where(nibble >= 8, np.where(byte >= 128, np.uint64(255), np.uint64(0)), byte)
            result = result | low(byte) << np.uint32(8 * i)
        to(w, result, m)

    return step


@op("P2R")
def p2r(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    mask, to = int(ins.operands[3], 16), put(ins.operands[0])
    if ins.operands[2] != "RZ" or ins.op != "P2R":
        raise UnknownInstruction(ins.text)
    return lambda w, m: to(
        w, sum((w.p[i].astype(np.uint32) << np.uint32(i) for i in range(7) if mask >> i & 1), np.zeros(1, np.uint32)), m
    )


@op("R2P")
def r2p(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    o = Operands(ins, code, launcher)
    source, mask = o.get(1), int(o.texts[2], 16)

    def step(w: Warp, m: Mask) -> None:
        x = source(w)
        for i in range(7):
            if mask >> i & 1:
                np.copyto(w.p[i], (x >> np.uint32(i) & ONE).astype(bool), where=m)

    return step


@op("FLO")
def flo(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    o = Operands(ins, code, launcher)
    if "U32" not in o.flags:
        raise UnknownInstruction(ins.text)
    source, to, distance = o.get(1), put(o.texts[0]), "SH" in o.flags

    def step(w: Warp, m: Mask) -> None:
        x = source(w)
        top = np.frexp(x.astype(np.float64))[1].astype(np.int64) - 1  # exact below 2^53
        result = np.where(x == 0, -1, 31 - top if distance else top)
        to(w, (result & 0xFFFFFFFF).astype(np.uint32), m)

    return step


# ---- integers that are added, multiplied and compared, with their carries ----------------------------------------------


@op("IMAD")
def imad(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    o = Operands(ins, code, launcher)
    at = [i for i, text in enumerate(o.texts) if not is_predicate(text)]
    a, b = o.get(at[1]), o.get(at[2])
    if "WIDE" in o.flags or "HI" in o.flags:
        if "U32" not in o.flags:
            raise UnknownInstruction(ins.text)
        c = o.get64(at[3])
        wide = o.put64(o.texts[0])
        high = put(o.texts[0])
        if "HI" in o.flags:
            return lambda w, m: high(w, ((u64(a(w)) * u64(b(w)) + c(w)) >> np.uint64(32)).astype(np.uint32), m)
        return lambda w, m: wide(w, u64(a(w)) * u64(b(w)) + c(w), m)
    third, to = o.get(at[3]), put(o.texts[0])
    if "X" in o.flags:
        if o.texts[-1].startswith("!"):
            raise UnknownInstruction(ins.text)
        carry = predicate(o.texts[-1])
        if any(text.startswith("-") and not text.startswith("-0x") for text in (o.texts[at[2]], o.texts[at[3]])):
            raise UnknownInstruction(ins.text)
        return lambda w, m: to(w, a(w) * b(w) + third(w) + carry(w).astype(np.uint32), m)
    return lambda w, m: to(w, a(w) * b(w) + third(w), m)


@op("IADD3", "IADD")
def iadd3(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    o = Operands(ins, code, launcher)
    first = o.predicates_from(1)
    carries = [put_predicate(text) for text in o.texts[1:first]]
    terms = []
    place = first
    while place < len(o.texts) and not is_predicate(o.texts[place]):
        text = o.texts[place]
        if text.startswith("-") and not text.startswith("-0x"):
            inner = value(text[1:], ins, launcher, code.name)
            terms.append(lambda w, inner=inner: np.uint64(1 << 32) - u64(inner(w)))  # as ~x + 1, with its carry
        else:
            inner = o.get(place)
            terms.append(lambda w, inner=inner: u64(inner(w)))
        place += 1
    entering = [predicate(text) for text in o.texts[place:]] if "X" in o.flags else []
    to = put(o.texts[0])

    def step(w: Warp, m: Mask) -> None:
        total = sum((term(w) for term in terms), np.zeros(1, np.uint64))
        for each in entering:
            total = total + u64(each(w))
        to(w, low(total), m)
        for i, carry in enumerate(carries):
            carry(w, total >> np.uint64(32) > i, m)

    return step


@op("LEA")
def lea(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    o = Operands(ins, code, launcher)
    at = o.predicates_from(1)
    carries = [put_predicate(text) for text in o.texts[1:at]]
    rest = [i for i in range(at, len(o.texts)) if not is_predicate(o.texts[i])]
    high = "HI" in o.flags
    a, b = o.get(rest[0]), o.get(rest[1])
    c = o.get(rest[2]) if high else None
    shift = np.uint64(int(o.texts[rest[-1]], 16))
    entering = predicate(o.texts[-1]) if "X" in o.flags else None
    if "SX32" in o.flags or any(o.texts[i].startswith("-") for i in rest[:1]):
        raise UnknownInstruction(ins.text)
    to = put(o.texts[0])

    def step(w: Warp, m: Mask) -> None:
        if c is not None:
            total = u64(low((u64(a(w)) | u64(c(w)) << np.uint64(32)) >> (np.uint64(32) - shift)))
        else:
            total = u64(low(u64(a(w)) << shift))
        total = total + u64(b(w))
        if entering is not None:
            total = total + u64(entering(w))
        to(w, low(total), m)
        for carry in carries:
            carry(w, total >> np.uint64(32) > 0, m)

    return step


@op("ISETP")
def isetp(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    o = Operands(ins, code, launcher)
    compare = o.flags[0]
    unsigned, extended = "U32" in o.flags, "EX" in o.flags
    joined = next(flag for flag in o.flags if flag in ("AND", "OR", "XOR"))
    outs = [put_predicate(text) for text in o.texts[:2]]
    a, b, with_, lower = o.get(2), o.get(3), predicate(o.texts[4]), predicate(o.texts[5]) if extended else None
    functions: dict[str, Callable[[Any, Any], Any]] = {
        "EQ": lambda x, y: x == y, "NE": lambda x, y: x != y, "LT": lambda x, y: x < y,
        "LE": lambda x, y: x <= y, "GT": lambda x, y: x > y, "GE": lambda x, y: x >= y,
    }  # fmt: skip

    def step(w: Warp, m: Mask) -> None:
        x, y = a(w), b(w)
        if not unsigned:
            x, y = signed(x), signed(y)
        if lower is None:
            result = functions[compare](x, y)
        elif compare == "NE":
            result = (x != y) | lower(w)
        elif compare == "EQ":
            result = (x == y) & lower(w)
        else:
            result = functions[compare[0] + "T"](x, y) | (x == y) & lower(w)
        other = with_(w)
        for out, found in zip(outs, (result, ~result)):
            out(w, found & other if joined == "AND" else found | other if joined == "OR" else found ^ other, m)

    return step


@op("VIMNMX", "IMNMX", "VIMNMX3", "VIADDMNMX")
def extremes(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    o = Operands(ins, code, launcher)
    texts = [text for text in o.texts if not is_predicate(text)]
    gets = [value(text, ins, launcher, code.name) for text in texts[1:]]
    least, to = predicate(o.texts[-1]), put(texts[0])
    kinds = {("U32",): np.uint32, ("U16x2",): np.uint16, ("S16x2",): np.int16, (): np.int32}
    if (kind := kinds.get(tuple(o.flags))) is None:
        raise UnknownInstruction(ins.text)
    adds = ins.op.lstrip("U").startswith("VIADDMNMX")

    def step(w: Warp, m: Mask) -> None:
        xs = [np.broadcast_to(get(w), (LANES,)) for get in gets]
        if adds:
            xs = [xs[0] + xs[1], *xs[2:]]
        xs = [np.ascontiguousarray(x).view(kind) for x in xs]
        small, large = xs[0], xs[0]
        for x in xs[1:]:
            small, large = np.minimum(small, x), np.maximum(large, x)
        to(w, np.where(least(w), small.view(np.uint32), large.view(np.uint32)), m)

    return step


@op("IDP")
def idp(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    o = Operands(ins, code, launcher)
    if o.flags != ["4A", "U8", "U8"]:
        raise UnknownInstruction(ins.text)
    a, b, c, to = o.get(1), o.get(2), o.get(3), put(o.texts[0])
    byte = np.uint32(255)

    def step(w: Warp, m: Mask) -> None:
        x, y, total = a(w), b(w), c(w)
        for i in range(0, 32, 8):
            total = total + (x >> np.uint32(i) & byte) * (y >> np.uint32(i) & byte)
        to(w, total, m)

    return step
