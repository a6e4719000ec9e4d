"""The instructions of sass.py that add, multiply and compare integers, with their carries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from sass import (
    LANES,
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
from sass_ops import Operands, op


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
