"""The instructions of sass.py on the lanes of a warp together, branches, and memory."""

from __future__ import annotations

import re
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
    predicate,
    put,
    put_predicate,
    read_constant,
    value,
)
from sass_ops import Operands, op

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
    fold = folds.get(o.flags[0]) if o.flags else np.add
    if fold is None or ("S32" in o.flags and fold is not np.add):
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


@op("BRX")
def brx(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    """Each lane goes to the sum of its register, a number and the next address."""
    found = re.match(r"(R\d+) (-?0x[0-9a-f]+)", ins.operands[0])
    if not found:
        raise UnknownInstruction(ins.text)
    source = value(found[1], ins, launcher, code.name)
    ahead = ins.address + 16 + int(found[2], 16)
    places = {each.address: i for i, each in enumerate(code.instructions)}

    def step(w: Warp, m: Mask) -> Any:
        if (m != w.mask).any():
            raise UnknownInstruction(f"{ins.text}: only part of a group branches")
        targets = np.broadcast_to(source(w), (LANES,)).astype(np.int64) + ahead
        for each in np.unique(targets[m]):
            w.groups.append((m & (targets == each), places[int(each)]))
        return True

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
    if stem == "ATOMG" and "CAS" in ins.op:  # whose address the disassembler shows without its size
        text = re.sub(r"\[R(\d+)(?!\.)\b", r"[R\1.64", text)
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
    if kind == "CAS" and count == 8:
        raise UnknownInstruction(ins.text)
    fold, compared = folds[kind], o.get(last - 1) if kind == "CAS" else source

    def step(w: Warp, m: Mask) -> None:
        memory, where = find(w, m)
        view = memory.view(np.uint32) if memory is not launcher.memory else launcher.views[4]
        before = np.zeros((LANES, 2), np.uint32)
        numbers = (np.broadcast_to(each(w), (LANES,))[m] for each in (source, compared))
        for lane, place, x, wanted in zip(np.flatnonzero(m), where // 4, *numbers):
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
def load_constant(ins: Instruction, code: Code, launcher: SassLauncher) -> Step:
    count = width(ins)
    if count < 4:
        raise UnknownInstruction(ins.text)
    to, text = ins.operands
    pairs = [(put(to, i), read_constant(text, launcher, code.name, 4 * i)) for i in range(count // 4)]

    def step(w: Warp, m: Mask) -> None:
        found = [source(w, m) for _, source in pairs]
        for (to, _), x in zip(pairs, found):
            to(w, x, m)

    return step
