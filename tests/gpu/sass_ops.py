"""The instructions of sass.py: name -> function that translates one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from sass import (
    FIRST,
    LANES,
    SHARED_WINDOW,
    Code,
    Instruction,
    Mask,
    SassLauncher,
    Step,
    UnknownInstruction,
    Warp,
    address,
    bits_of,
    is_predicate,
    lanes_of,
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
    if len(texts) != 4 or [text.lstrip("-") for text in texts[:2]] != ["RZ", "RZ"] or "." in ins.op and ins.op != "HFMA2.MMA":
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
        "SR_CgaCtaId": lambda w: np.zeros(1, np.uint32),
        "SR_SWINHI": lambda w: np.array([SHARED_WINDOW], np.uint32),
    }
    if name not in table:
        raise UnknownInstruction(ins.text)
    read = table[name]
    return lambda w, m: to(w, read(w), m)


@op("IMAD")
def imad(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    o = Operands(ins, code, launcher)
    rest = [text for text in o.texts if not is_predicate(text)]
    at = [o.texts.index(text) for text in rest]
    if len(rest) != 4:
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
        if o.texts[at[3]].startswith("-") or o.texts[at[2]].startswith("-"):
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
        return lambda w, m: to(w, low(u64(first(w)) << np.minimum(shift(w) & np.uint32(31 if wraps else 0xFFFFFFFF), 32).astype(np.uint64)), m)
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


@op("SEL", "FSEL")
def sel(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    o = Operands(ins, code, launcher)
    a, b, which, to = o.get(1), o.get(2), predicate(o.texts[3]), put(o.texts[0])
    return lambda w, m: to(w, np.where(which(w), a(w), b(w)), m)


@op("VIMNMX", "IMNMX", "VIMNMX3", "VIADDMNMX")
def extremes(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    o = Operands(ins, code, launcher)
    texts = [text for text in o.texts if not is_predicate(text)]
    gets = [value(text, ins, launcher, code.name) for text in texts[1:]]
    least, to = predicate(o.texts[-1]), put(texts[0])
    halves = "U16x2" in o.flags
    if not ("U32" in o.flags or halves) or (set(o.flags) - {"U32", "U16x2"}):
        raise UnknownInstruction(ins.text)
    adds = ins.op.lstrip("U").startswith("VIADDMNMX")

    def step(w: Warp, m: Mask) -> None:
        xs = [np.broadcast_to(get(w), (LANES,)) for get in gets]
        if adds:
            xs = [xs[0] + xs[1], *xs[2:]]
        if halves:
            xs = [np.ascontiguousarray(x).view(np.uint16) for x in xs]
        small, large = xs[0], xs[0]
        for x in xs[1:]:
            small, large = np.minimum(small, x), np.maximum(large, x)
        if halves:
            small, large = small.view(np.uint32), large.view(np.uint32)
        to(w, np.where(least(w), small, large), m)

    return step


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
    return lambda w, m: to(w, sum((w.p[i].astype(np.uint32) << np.uint32(i) for i in range(7) if mask >> i & 1), np.zeros(1, np.uint32)), m)


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


# ---- lanes of a warp -------------------------------------------------------------------------------------------------


@op("SHFL")
def shfl(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    o = Operands(ins, code, launcher)
    good, to, source, count, clamp = put_predicate(o.texts[0]), put(o.texts[1]), o.get(2), o.get(3), o.get(4)
    lanes = np.arange(LANES)

    def step(w: Warp, m: Mask) -> None:
        x, n = np.broadcast_to(source(w), (LANES,)).copy(), np.broadcast_to(count(w), (LANES,)).astype(np.int64)
        if (clamp(w) & np.uint32(0x1F00)).any():
            raise UnknownInstruction(ins.text)
        if "IDX" in o.flags:
            place, inside = n & 31, np.ones(LANES, bool)
        elif "UP" in o.flags:
            place = lanes - n
            inside = place >= 0
        else:
            raise UnknownInstruction(ins.text)
        place = np.where(inside, place, lanes)
        if not m[place[m]].all():
            raise RuntimeError(f"a shuffle reads a lane that is not there: {ins.text}")
        to(w, x[place], m)
        good(w, inside, m)

    return step


@op("VOTE", "VOTEU")
def vote(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    texts, kind = ins.operands, ins.op.split(".")[1]
    source = predicate(texts[-1])
    outs = [(is_predicate(text), put_predicate(text) if is_predicate(text) else put(text)) for text in texts[:-1]]

    def step(w: Warp, m: Mask) -> None:
        x = np.broadcast_to(source(w), (LANES,)) & (lanes := w.mask & m)
        result = bool(x.any()) if kind == "ANY" else bool((x == lanes).all())
        for is_one, out in outs:
            out(w, np.array([result]) if is_one else np.array([bits_of(x)], np.uint32), m)

    return step


@op("REDUX", "CREDUX")
def redux(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    o = Operands(ins, code, launcher)
    to, source = put(o.texts[0]), o.get(1)
    folds: dict[str, Any] = {"SUM": np.add, "MIN": np.minimum, "MAX": np.maximum, "OR": np.bitwise_or}
    fold = folds.get(o.flags[0], np.add if not o.flags else None)
    if fold is None or "S32" in o.flags and o.flags[0] != "SUM":
        raise UnknownInstruction(ins.text)

    def step(w: Warp, m: Mask) -> None:
        x = np.broadcast_to(source(w), (LANES,))[m]
        to(w, np.array([fold.reduce(x, dtype=np.uint32)], np.uint32), m)

    return step


# ---- branches --------------------------------------------------------------------------------------------------------


def target(ins: Instruction, code: Code) -> int:
    return code.labels[ins.operands[-1].strip("`()")]


@op("BRA", "CALL")
def bra(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    to = target(ins, code)
    here = next(i for i, each in enumerate(code.instructions) if each is ins)
    if "DIV" in ins.op or "CONV" in ins.op:  # asks whether lanes have diverged; they meet here in any case
        o = Operands(ins, code, launcher)
        uniform = o.get(0)
        goes = "CONV" in ins.op

        def meet(w: Warp, m: Mask) -> Any:
            wanted = lanes_of(int(uniform(w)[0]))
            if (wanted & w.live & ~w.mask).any():
                return w.wait(wanted, here, to if goes else here + 1)
            if goes:
                w.place = to
            return None

        return meet
    also = [predicate(text) for text in ins.operands[:-1] if is_predicate(text)]

    def step(w: Warp, m: Mask) -> Any:
        taken = m.copy()
        for each in also:
            taken = taken & each(w)
        if not taken.any():
            return None
        if (taken == w.mask).all():
            w.place = to
            return None
        w.groups.append((taken, to))
        w.mask = w.mask & ~taken
        return None

    return step


@op("RET")
def ret(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    source = value(ins.operands[0].split()[0], ins, launcher, code.name)
    places = {each.address: i for i, each in enumerate(code.instructions)}

    def step(w: Warp, m: Mask) -> None:
        if m.any():
            w.place = places[int(source(w)[int(m.argmax())])]

    return step


@op("EXIT")
def leave(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    def step(w: Warp, m: Mask) -> Any:
        if not m.any():
            return None
        w.live &= ~m
        w.mask = w.mask & ~m
        w.recheck()
        return None if w.mask.any() else True

    return step


@op("BSSY")
def bssy(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    number = int(ins.operands[0][1:])

    def step(w: Warp, m: Mask) -> None:
        w.barriers[number][m] = bits_of(m)

    return step


@op("BSYNC")
def bsync(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    number = int(ins.operands[0][1:])
    here = next(i for i, each in enumerate(code.instructions) if each is ins)

    def step(w: Warp, m: Mask) -> Any:
        if not m.any():
            return None
        if (m != w.mask).any():
            raise UnknownInstruction(f"{ins.text}: only part of a group waits")
        wanted = lanes_of(w.barriers[number][int(m.argmax())])
        if not (wanted & w.live & ~m).any():
            return None
        return w.wait(wanted, here, here + 1)

    return step


@op("BREAK")
def break_(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    number = int(ins.operands[-1][1:])

    def step(w: Warp, m: Mask) -> None:
        if m.any():
            w.barriers[number] &= ~np.uint64(bits_of(m))
            w.recheck()

    return step


@op("WARPSYNC")
def warpsync(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    here = next(i for i, each in enumerate(code.instructions) if each is ins)
    if "COLLECTIVE" in ins.op or "EXCLUSIVE" in ins.op:
        raise UnknownInstruction(f"{ins.text}: lanes have diverged before an operation of the warp")

    def step(w: Warp, m: Mask) -> Any:
        if not (w.live & ~m).any():
            return None
        return w.wait(np.ones(LANES, bool), here, here + 1)

    return step


@op("BAR")
def bar(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    def step(w: Warp, m: Mask) -> Any:
        if (w.live & ~m).any():
            raise RuntimeError("part of a warp waits for the block")
        return True

    return step


@op("NOP", "YIELD", "MEMBAR", "ERRBAR", "CGAERRBAR", "CCTL", "NANOSLEEP", "DEPBAR", "FENCE")
def nothing(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    return lambda w, m: None


# ---- memory ----------------------------------------------------------------------------------------------------------


def width(ins: Instruction) -> int:
    """Bytes of an access."""
    for flag, count in (("128", 16), ("64", 8), ("U8", 1), ("S8", 1), ("U16", 2), ("S16", 2)):
        if flag in ins.op.split("."):
            return count
    return 4


def places(ins: Instruction, launcher: SassLauncher) -> Callable[[Warp, Mask], tuple[Any, Any]]:
    """The memory (bytes) and the places of the lanes in it; every place is a multiple of the width of the access."""
    stem = ins.op.split(".")[0]
    text = next(text for text in ins.operands if "[" in text and not text.startswith("c["))
    shared, local, generic = stem in ("LDS", "STS", "ATOMS"), stem in ("LDL", "STL"), stem in ("LD", "ST")
    at, count = address(text, wide=not shared and not local), width(ins)

    def find(w: Warp, m: Mask) -> tuple[Any, Any]:
        where = np.broadcast_to(at(w), (LANES,))[m]
        if (where % count).any():
            raise RuntimeError(f"misaligned: {ins.text}: {where[where % count != 0][0]:#x}")
        if shared:
            return w.block.shared, where & 0xFFFFFFFF
        if local:
            return w.local.reshape(-1), (where & 0xFFFFFFFF) + np.arange(LANES)[m] * w.local.shape[1]
        if generic and (where >> 32 == SHARED_WINDOW).any():
            if not (where >> 32 == SHARED_WINDOW).all():
                raise UnknownInstruction(f"{ins.text}: shared and other memory at once")
            return w.block.shared, where & 0xFFFFFFFF
        return launcher.memory, where - FIRST

    return find


@op("LDG", "LD", "LDS", "LDL")
def load_(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    find, count = places(ins, launcher), width(ins)
    outs = [put(ins.operands[0], i) for i in range(max(1, count // 4))]
    kind = {1: np.uint8, 2: np.uint16}.get(count, np.uint32)
    if any(flag in ins.op.split(".") for flag in ("S8", "S16")):
        raise UnknownInstruction(ins.text)
    unit = min(count, 4)

    def step(w: Warp, m: Mask) -> None:
        memory, where = find(w, m)
        view = memory.view(kind) if memory is not launcher.memory else launcher.views[unit]
        for i, out in enumerate(outs):
            result = np.zeros(LANES, np.uint32)
            result[m] = view[where // unit + i]
            out(w, result, m)

    return step


@op("STG", "ST", "STS", "STL")
def store(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    o = Operands(ins, code, launcher)
    find, count = places(ins, launcher), width(ins)
    sources = [o.get(len(o.texts) - 1, i) for i in range(max(1, count // 4))]
    unit = min(count, 4)
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[unit]

    def step(w: Warp, m: Mask) -> None:
        memory, where = find(w, m)
        view = memory.view(kind) if memory is not launcher.memory else launcher.views[unit]
        for i, source in enumerate(sources):
            view[where // unit + i] = np.broadcast_to(source(w), (LANES,))[m].astype(kind)

    return step


@op("ATOMS", "ATOMG", "ATOM", "RED", "REDG")
def atomic(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    o = Operands(ins, code, launcher)
    find, count = places(ins, launcher), width(ins)
    last = len(o.texts) - 1
    source = o.get64(last) if count == 8 else o.get(last)
    texts = [text for text in o.texts[: next(i for i, text in enumerate(o.texts) if "[" in text)] if not is_predicate(text)]
    outs = [put(text, i) for text in texts for i in range(count // 4)]
    folds: dict[str, Callable[[int, int], int]] = {"ADD": lambda a, b: a + b, "OR": lambda a, b: a | b, "MIN": min}
    fold = folds[next(flag for flag in o.flags if flag in folds)]

    def step(w: Warp, m: Mask) -> None:
        memory, where = find(w, m)
        view = memory.view(np.uint32) if memory is not launcher.memory else launcher.views[4]
        before = np.zeros((LANES, 2), np.uint32)
        for lane, place, x in zip(np.flatnonzero(m), where // 4, np.broadcast_to(source(w), (LANES,))[m]):
            old = int(view[place]) | (int(view[place + 1]) << 32 if count == 8 else 0)
            new = fold(old, int(x)) & ((1 << 8 * count) - 1)
            before[lane] = old & 0xFFFFFFFF, old >> 32
            view[place] = new & 0xFFFFFFFF
            if count == 8:
                view[place + 1] = new >> 32
        for i, out in enumerate(outs):
            out(w, before[:, i], m)

    return step


@op("LDC", "LDCU")
def load_constant(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    o = Operands(ins, code, launcher)
    count = width(ins)
    if count < 4:
        raise UnknownInstruction(ins.text)
    pairs = [(put(o.texts[0], i), o.get(1, i)) for i in range(count // 4)]

    def step(w: Warp, m: Mask) -> None:
        found = [source(w) for _, source in pairs]
        for (to, _), x in zip(pairs, found):
            to(w, x, m)

    return step
