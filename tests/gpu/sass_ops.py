"""The instructions of sass.py: name -> function that translates one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sass import (
    LANES,
    SHARED_WINDOW,
    Get,
    Instruction,
    Mask,
    Operands,
    Step,
    UnknownInstruction,
    Warp,
    bits_of,
    is_predicate,
    lanes_of,
    low,
    predicate,
    put,
    read_constant,
    signed,
    u64,
)  # fmt: skip

Translate = Callable[[Operands], Step]
OPS: dict[str, Translate] = {}
ONE = np.uint32(1)


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


def plain(function: Callable[..., Any], count: int, flags: list[str] | None = None) -> Translate:
    """d = function(a, b, ...) of 32 bits. ``flags``: the only ones that the instruction may have."""

    def build(o: Operands) -> Step:
        o.refuse(flags not in (None, o.flags))
        gets, to = [o.get(1 + i) for i in range(count)], put(o.texts[0])
        return lambda w, m: to(w, function(*(get(w) for get in gets)), m)

    return build


OPS["MOV"] = OPS["R2UR"] = plain(lambda a: a, 1)
OPS["POPC"] = plain(lambda a: np.bitwise_count(a).astype(np.uint32), 1)
OPS["VIADD"] = OPS["UVIADD"] = plain(lambda a, b: a + b, 2)
OPS["IABS"] = plain(lambda a: np.abs(signed(a).astype(np.int64)).astype(np.uint32), 1)


def reverse(a: Any) -> Any:
    return sum(((a >> np.uint32(i) & ONE) << np.uint32(31 - i) for i in range(32)), np.uint32(0))


def permute(a: Any, selector: Any, b: Any) -> Any:
    both, choice = u64(a) | u64(b) << np.uint64(32), u64(selector)
    result = np.zeros(1, np.uint32)
    for i in range(4):
        nibble = choice >> np.uint64(4 * i) & np.uint64(15)
        byte = both >> (np.uint64(8) * (nibble & np.uint64(7))) & np.uint64(255)
        byte = np.where(nibble >= 8, np.where(byte >= 128, np.uint64(255), np.uint64(0)), byte)
        result = result | low(byte) << np.uint32(8 * i)
    return result


def dot(a: Any, b: Any, total: Any) -> Any:
    for i in map(np.uint32, range(0, 32, 8)):
        total = total + (a >> i & np.uint32(255)) * (b >> i & np.uint32(255))
    return total


OPS["BREV"] = plain(reverse, 1)
OPS["PRMT"] = plain(permute, 3, [])
OPS["IDP"] = plain(dot, 3, ["4A", "U8", "U8"])
OPS["SEL"] = OPS["FSEL"] = plain(lambda a, b, first: np.where(first, a, b), 3)
OPS["FADD"] = plain(lambda a, b: (a.view(np.float32) + b.view(np.float32)).view(np.uint32), 2)
OPS["FMUL"] = plain(lambda a, b: (a.view(np.float32) * b.view(np.float32)).view(np.uint32), 2)
OPS["I2F"] = OPS["I2FP"] = plain(
    lambda a: np.nextafter(a.astype(np.float32), np.float32(np.inf), where=a.astype(np.float32).astype(np.float64) < a,
                           out=a.astype(np.float32)).view(np.uint32), 1)  # fmt: skip
OPS["MUFU"] = plain(lambda a: (np.float32(1) / a.view(np.float32)).view(np.uint32), 1)
OPS["F2I"] = plain(lambda a: np.clip(a.view(np.float32).astype(np.float64), 0, 2**32 - 1).astype(np.uint32), 1)


@op("HFMA2")
def hfma2(o: Operands) -> Step:
    """A constant on its way to a register: 0 * 0 + two numbers of 16 bits, the upper one first."""
    texts = [text for text in o.texts[1:] if not is_predicate(text)]
    o.refuse(len(texts) != 4 or [text.lstrip("-") for text in texts[:2]] != ["RZ", "RZ"])
    o.refuse(o.ins.op not in ("HFMA2", "HFMA2.MMA"))
    high, low_ = (int(np.array([float(text)], np.float16).view(np.uint16)[0]) for text in texts[2:])
    to, x = put(o.texts[0]), np.array([high << 16 | low_], np.uint32)
    return lambda w, m: to(w, x, m)


@op("CS2R", "S2R", "S2UR")
def special(o: Operands) -> Step:
    name, of_zeros = o.texts[1], o.ins.op.startswith("CS2R")
    outs = [put(o.texts[0], pair) for pair in range(2 if of_zeros and "32" not in o.flags else 1)]
    lanes = np.arange(LANES, dtype=np.uint32)
    table: dict[str, Callable[[Warp], Any]] = {
        "SR_TID.X": lambda w: lanes + np.uint32(LANES * w.number),
        "SR_LANEID": lambda w: lanes,
        "SR_LTMASK": lambda w: (ONE << lanes) - ONE,
        "SR_CTAID.X": lambda w: np.array([w.block.index], np.uint32),
        **dict.fromkeys(("SR_CTAID.Y", "SR_CgaCtaId", "SRZ"), lambda w: np.zeros(1, np.uint32)),
        "SR_SWINHI": lambda w: np.array([SHARED_WINDOW], np.uint32),
    }
    o.refuse(name not in table or of_zeros != (name == "SRZ"))
    read = table[name]

    def step(w: Warp, m: Mask) -> None:
        for out in outs:
            out(w, read(w), m)

    return step


@op("LOP3")
def lop3(o: Operands) -> Step:
    outs = [put(o.texts[0])] if is_predicate(o.texts[0]) else []
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
def plop3(o: Operands) -> Step:
    texts = o.texts
    outs, gets = [put(text) for text in texts[:2]], [predicate(text) for text in texts[2:5]]
    tables = [int(text, 16) for text in texts[5:7]]

    def step(w: Warp, m: Mask) -> None:
        a, b, c = (get(w) for get in gets)
        index = a.astype(int) * 4 + b.astype(int) * 2 + c.astype(int)
        for out, table in zip(outs, tables):
            out(w, (table >> index & 1).astype(bool), m)

    return step


@op("SHF")
def shf(o: Operands) -> Step:
    left, wide = o.flags[0] == "L", "U64" in o.flags or "S64" in o.flags
    high, wraps, arithmetic = "HI" in o.flags, "W" in o.flags, not left and ("S32" in o.flags or "S64" in o.flags)
    most = 64 if wide else 32

    def shifted(first: Any, shift: Any, second: Any) -> Any:
        count = u64(shift)
        count = count & np.uint64(most - 1) if wraps else np.minimum(count, np.uint64(most))
        both = u64(first) | u64(second) << np.uint64(32)
        over = count >= 64
        count = np.where(over, np.uint64(63), count)
        if arithmetic:
            both = (both.astype(np.int64) >> count.astype(np.int64)).astype(np.uint64)
        else:
            both = np.where(over, np.uint64(0), both << count if left else both >> count)
        return low(both >> np.uint64(32)) if high else low(both)

    return plain(shifted, 3)(o)


@op("P2R")
def p2r(o: Operands) -> Step:
    mask, to = int(o.texts[3], 16), put(o.texts[0])
    o.refuse(o.texts[2] != "RZ" or o.ins.op != "P2R")
    return lambda w, m: to(
        w, sum((w.p[i].astype(np.uint32) << np.uint32(i) for i in range(7) if mask >> i & 1), np.zeros(1, np.uint32)), m
    )


@op("R2P")
def r2p(o: Operands) -> Step:
    source, mask = o.get(1), int(o.texts[2], 16)

    def step(w: Warp, m: Mask) -> None:
        x = source(w)
        for i in range(7):
            if mask >> i & 1:
                np.copyto(w.p[i], (x >> np.uint32(i) & ONE).astype(bool), where=m)

    return step


@op("FLO")
def flo(o: Operands) -> Step:
    o.refuse("U32" not in o.flags)

    def place(x: Any) -> Any:
        top = np.frexp(x.astype(np.float64))[1].astype(np.int64) - 1  # exact below 2^53
        result = np.where(x == 0, -1, 31 - top if "SH" in o.flags else top)
        return (result & 0xFFFFFFFF).astype(np.uint32)

    return plain(place, 1)(o)


# ---- integers that are added, multiplied and compared, with their carries ----------------------------------------------


@op("IMAD")
def imad(o: Operands) -> Step:
    at = [i for i, text in enumerate(o.texts) if not is_predicate(text)]
    a, b = o.get(at[1]), o.get(at[2])
    if "WIDE" in o.flags or "HI" in o.flags:
        o.refuse("U32" not in o.flags)
        c = o.get64(at[3])
        wide = o.put64(o.texts[0])
        high = put(o.texts[0])
        if "HI" in o.flags:
            return lambda w, m: high(w, ((u64(a(w)) * u64(b(w)) + c(w)) >> np.uint64(32)).astype(np.uint32), m)
        return lambda w, m: wide(w, u64(a(w)) * u64(b(w)) + c(w), m)
    third, to = o.get(at[3]), put(o.texts[0])
    if "X" in o.flags:
        o.refuse(o.texts[-1].startswith("!"))
        carry = predicate(o.texts[-1])
        o.refuse(any(text.startswith("-") and not text.startswith("-0x") for text in (o.texts[at[2]], o.texts[at[3]])))
        return lambda w, m: to(w, a(w) * b(w) + third(w) + carry(w).astype(np.uint32), m)
    return lambda w, m: to(w, a(w) * b(w) + third(w), m)


def added(o: Operands, terms: Sequence[Get]) -> Step:
    """The sum of terms and of the carries that enter it; the carries that leave it are the predicates behind the register."""
    carries, to = [put(text) for text in itertools.takewhile(is_predicate, o.texts[1:])], put(o.texts[0])
    entering = [predicate(text) for text in o.texts[1 + len(carries) :] if is_predicate(text) and "X" in o.flags]

    def step(w: Warp, m: Mask) -> None:
        total = sum((u64(term(w)) for term in (*terms, *entering)), np.zeros(1, np.uint64))
        to(w, low(total), m)
        for i, carry in enumerate(carries):
            carry(w, total >> np.uint64(32) > i, m)

    return step


@op("IADD3", "IADD")
def iadd3(o: Operands) -> Step:
    def term(text: str) -> Get:
        if text.startswith("-") and not text.startswith("-0x"):
            inner = o.value(text[1:])
            return lambda w: np.uint64(1 << 32) - u64(inner(w))  # as ~x + 1, with its carry
        return o.value(text)

    return added(o, [term(text) for text in o.texts[1:] if not is_predicate(text)])


@op("LEA")
def lea(o: Operands) -> Step:
    texts = [text for text in o.texts[1:] if not is_predicate(text)]
    a, b = o.value(texts[0]), o.value(texts[1])
    c = o.value(texts[2]) if "HI" in o.flags else None
    shift = np.uint64(int(texts[-1], 16))
    o.refuse("SX32" in o.flags or texts[0].startswith("-"))

    def shifted(w: Warp) -> Any:
        if c is not None:
            return low((u64(a(w)) | u64(c(w)) << np.uint64(32)) >> (np.uint64(32) - shift))
        return low(u64(a(w)) << shift)

    return added(o, [shifted, b])


@op("ISETP")
def isetp(o: Operands) -> Step:
    compare = o.flags[0]
    unsigned, extended = "U32" in o.flags, "EX" in o.flags
    joined = next(flag for flag in o.flags if flag in ("AND", "OR", "XOR"))
    outs = [put(text) for text in o.texts[:2]]
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
def extremes(o: Operands) -> Step:
    texts = [text for text in o.texts if not is_predicate(text)]
    gets = [o.value(text) for text in texts[1:]]
    least, to = predicate(o.texts[-1]), put(texts[0])
    kinds = {("U32",): np.uint32, ("U16x2",): np.uint16, ("S16x2",): np.int16, (): np.int32}
    o.refuse((kind := kinds.get(tuple(o.flags))) is None)
    adds = o.ins.op.lstrip("U").startswith("VIADDMNMX")

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


# ---- lanes of a warp -------------------------------------------------------------------------------------------------


@op("SHFL")
def shfl(o: Operands) -> Step:
    good, to, source, count, clamp = put(o.texts[0]), put(o.texts[1]), o.get(2), o.get(3), o.get(4)
    lanes = np.arange(LANES)
    o.refuse("IDX" not in o.flags and "UP" not in o.flags)

    def step(w: Warp, m: Mask) -> None:
        x, n = np.broadcast_to(source(w), (LANES,)).copy(), np.broadcast_to(count(w), (LANES,)).astype(np.int64)
        o.refuse((clamp(w) & np.uint32(0x1F00)).any())
        place = n & 31 if "IDX" in o.flags else lanes - n
        inside = place >= 0
        place = np.where(inside, place, lanes)
        if not m[place[m]].all():
            raise RuntimeError(f"a shuffle reads a lane that is not there: {o.ins.text}")
        to(w, x[place], m)
        good(w, inside, m)

    return step


@op("VOTE", "VOTEU")
def vote(o: Operands) -> Step:
    texts, kind = o.texts, o.ins.op.split(".")[1]
    source = predicate(texts[-1])
    outs = [(is_predicate(text), put(text)) for text in texts[:-1]]

    def step(w: Warp, m: Mask) -> None:
        x = np.broadcast_to(source(w), (LANES,)) & (lanes := w.mask & m)
        result = bool(x.any()) if kind == "ANY" else bool((x == lanes).all())
        for is_one, out in outs:
            out(w, np.array([result]) if is_one else np.array([bits_of(x)], np.uint32), m)

    return step


@op("REDUX", "CREDUX")
def redux(o: Operands) -> Step:
    to, source = put(o.texts[0]), o.get(1)
    folds: dict[str, Any] = {"SUM": np.add, "MIN": np.minimum, "MAX": np.maximum, "OR": np.bitwise_or}
    fold = folds.get(o.flags[0]) if o.flags else np.add
    o.refuse(fold is None or ("S32" in o.flags and fold is not np.add))

    def step(w: Warp, m: Mask) -> None:
        x = np.broadcast_to(source(w), (LANES,))[m]
        to(w, np.array([fold.reduce(x, dtype=np.uint32)], np.uint32), m)

    return step


# ---- branches --------------------------------------------------------------------------------------------------------


@op("BRA", "CALL")
def bra(o: Operands) -> Step:
    to = o.code.labels[o.texts[-1].strip("`()")]
    here, goes = o.here, "CONV" in o.ins.op
    if "DIV" in o.ins.op or goes:  # asks whether lanes have diverged; they meet here in any case
        uniform = o.get(0)

        def meet(w: Warp, m: Mask) -> Any:
            wanted = lanes_of(int(uniform(w)[0]))
            if (wanted & w.live & ~w.mask).any():
                return w.wait(wanted, here, to if goes else here + 1)
            if goes:
                w.place = to
            return None

        return meet
    also = [predicate(text) for text in o.texts[:-1] if is_predicate(text)]

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


@op("BRX")
def brx(o: Operands) -> Step:
    """Each lane goes to the sum of its register, a number and the next address."""
    found = re.match(r"(R\d+) (-?0x[0-9a-f]+)", o.texts[0])
    o.refuse(found is None)
    source = o.value(found[1])
    ahead = o.ins.address + 16 + int(found[2], 16)
    places = o.code.places()

    def step(w: Warp, m: Mask) -> Any:
        o.refuse((m != w.mask).any(), "only part of a group branches")
        targets = np.broadcast_to(source(w), (LANES,)).astype(np.int64) + ahead
        for each in np.unique(targets[m]):
            w.groups.append((m & (targets == each), places[int(each)]))
        return True

    return step


@op("RET")
def ret(o: Operands) -> Step:
    source = o.value(o.texts[0].split()[0])
    places = o.code.places()

    def step(w: Warp, m: Mask) -> None:
        if m.any():
            w.place = places[int(source(w)[int(m.argmax())])]

    return step


@op("EXIT")
def leave(o: Operands) -> Step:
    def step(w: Warp, m: Mask) -> Any:
        if not m.any():
            return None
        w.live &= ~m
        w.mask = w.mask & ~m
        w.recheck()
        return None if w.mask.any() else True

    return step


@op("BSSY")
def bssy(o: Operands) -> Step:
    number = int(o.texts[0][1:])

    def step(w: Warp, m: Mask) -> None:
        w.barriers[number][m] = bits_of(m)

    return step


@op("BSYNC")
def bsync(o: Operands) -> Step:
    number = int(o.texts[0][1:])
    here = o.here

    def step(w: Warp, m: Mask) -> Any:
        if not m.any():
            return None
        o.refuse((m != w.mask).any(), "only part of a group waits")
        wanted = lanes_of(w.barriers[number][int(m.argmax())])
        if not (wanted & w.live & ~m).any():
            return None
        return w.wait(wanted, here, here + 1)

    return step


@op("BREAK")
def break_(o: Operands) -> Step:
    number = int(o.texts[-1][1:])

    def step(w: Warp, m: Mask) -> None:
        if m.any():
            w.barriers[number] &= ~np.uint64(bits_of(m))
            w.recheck()

    return step


@op("WARPSYNC")
def warpsync(o: Operands) -> Step:
    here = o.here
    o.refuse("COLLECTIVE" in o.ins.op or "EXCLUSIVE" in o.ins.op, "lanes have diverged before an operation of the warp")

    def step(w: Warp, m: Mask) -> Any:
        if not (w.live & ~m).any():
            return None
        return w.wait(np.ones(LANES, bool), here, here + 1)

    return step


@op("BAR")
def bar(o: Operands) -> Step:
    def step(w: Warp, m: Mask) -> Any:
        if (w.live & ~m).any():
            raise RuntimeError("part of a warp waits for the block")
        return True

    return step


@op("NOP", "YIELD", "MEMBAR", "ERRBAR", "CGAERRBAR", "CCTL", "NANOSLEEP", "DEPBAR", "FENCE")
def nothing(o: Operands) -> Step:
    return lambda w, m: None


# ---- memory ----------------------------------------------------------------------------------------------------------


@op("LDG", "LD", "LDS")
def load_(o: Operands) -> Step:
    count = o.width()
    find, outs = o.places(min(count, 4)), [put(o.texts[0], i) for i in range(max(1, count // 4))]
    o.refuse(any(flag in o.flags for flag in ("S8", "S16")))

    def step(w: Warp, m: Mask) -> None:
        view, places = find(w, m)
        for i, out in enumerate(outs):
            result = np.zeros(LANES, np.uint32)
            result[m] = view[places + i]
            out(w, result, m)

    return step


@op("STG", "ST", "STS")
def store(o: Operands) -> Step:
    count = o.width()
    find, sources = o.places(min(count, 4)), [o.get(len(o.texts) - 1, i) for i in range(max(1, count // 4))]

    def step(w: Warp, m: Mask) -> None:
        view, places = find(w, m)
        for i, source in enumerate(sources):
            view[places + i] = np.broadcast_to(source(w), (LANES,))[m].astype(view.dtype)

    return step


@op("ATOMS", "ATOMG", "ATOM", "RED", "REDG")
def atomic(o: Operands) -> Step:
    find, count = o.places(4), o.width()
    last = len(o.texts) - 1
    source = o.get64(last) if count == 8 else o.get(last)
    texts = [
        text for text in o.texts[: next(i for i, text in enumerate(o.texts) if "[" in text)] if not is_predicate(text)
    ]
    outs = [put(text, i) for text in texts for i in range(count // 4)]
    #: The number in memory, the last operand, and the one before that, which only CAS has.
    folds: dict[str, Callable[[int, int, int], int]] = {
        "ADD": lambda a, b, _: a + b, "OR": lambda a, b, _: a | b, "MIN": lambda a, b, _: min(a, b),
        "CAS": lambda a, b, wanted: b if a == wanted else a,
    }  # fmt: skip
    kind = next(flag for flag in o.flags if flag in folds)
    o.refuse(kind == "CAS" and count == 8)
    fold, compared = folds[kind], o.get(last - 1) if kind == "CAS" else source

    def step(w: Warp, m: Mask) -> None:
        view, places = find(w, m)
        before = np.zeros((LANES, 2), np.uint32)
        numbers = (np.broadcast_to(each(w), (LANES,))[m] for each in (source, compared))
        for lane, place, x, wanted in zip(np.flatnonzero(m), places, *numbers):
            old = int(view[place]) | (int(view[place + 1]) << 32 if count == 8 else 0)
            new = fold(old, int(x), int(wanted)) & ((1 << 8 * count) - 1)
            before[lane] = old & 0xFFFFFFFF, old >> 32
            view[place] = new & 0xFFFFFFFF
            if count == 8:
                view[place + 1] = new >> 32
        for i, out in enumerate(outs):
            out(w, before[:, i], m)

    return step


@op("LDC", "LDCU")
def load_constant(o: Operands) -> Step:
    count = o.width()
    o.refuse(count < 4)
    to, text = o.texts
    pairs = [(put(to, i), read_constant(text, o.launcher, o.code.name, 4 * i)) for i in range(count // 4)]

    def step(w: Warp, m: Mask) -> None:
        found = [source(w, m) for _, source in pairs]
        for (to, _), x in zip(pairs, found):
            to(w, x, m)

    return step
