"""The counters as plain text: a table of roles and operations, lines for memory, lossy frames, differences, owners, choices and host
waits, and a legend."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ds_zipccl.lossy import LOSSY_CODECS
from ds_zipccl.telemetry import counters
from ds_zipccl.telemetry.counters import Lossy, Row

_HEADER = ("role", "op", "coded", "logical MB", "wire MB", "ratio", "passed", "MB", "why passed")
_TEXTS = {0, 1, len(_HEADER) - 1}  # columns aligned to the left


#: Pattern of a word that the table may have -> the line that explains the word.
_LEGEND = {
    r"(?m)^\S+ +agreement\b": "agreement: ranks agree on sizes or earlier values before gathers; plain communication sends no such message",
    r" shards went as differences": "shards: this rank's parts of gathered tensors, where others may hold those of an earlier gather",
}


def render() -> str:
    """Return the rows with aligned columns and the total over coded calls, in MB of 10^6 bytes; then one line per further fact, and
    lines that explain words of the table."""
    rows, totals = counters.rows(), counters.totals()
    total = _amounts(sum(row["calls"] for row in rows), totals["logical_bytes"], totals["wire_bytes"], totals["ratio"])
    called = [row for row in rows if row["calls"] or row["passed"]]
    lines = _aligned([_HEADER, *map(_cells, called), ("total", "", *total, "", "", "")])
    if totals["staging_bytes"]:
        lines.append(f"memory for frames: {totals['staging_bytes'] / 1e6:.1f} MB at most")
    lines += [f"memory for {what}: {nbytes / 1e6:.1f} MB" for what, nbytes in sorted(counters.memory().items())]
    lines += map(_lossy, counters.lossy())
    for facts in (_differences, _whole, _choices, _host_waits):
        lines += [line for row in rows for line in facts(row)]
    text = "\n".join(lines)
    return "\n".join([text, *(line for word, line in _LEGEND.items() if re.search(word, text))])


def show(when: str) -> None:
    """Print the table of rank 0 with the time of its counts, such as "at the end"; nothing where none grew since the table before."""
    if counters.grown("table"):
        print(f"[ds_zipccl] traffic of rank 0 {when}\n{render()}\n[ds_zipccl] {time_saved()}", flush=True)


def time_saved() -> str:
    """Return the last line: what trials measured of the steps that followed them. Nothing else counts."""
    clocks = counters.saved()
    _, _, steps = clocks.pop("", (0.0, 0.0, 0))
    said = [
        f"{seconds / max(1, steps):.2g} s per step, {seconds:.3g} s in all, +- {error:.2g} s, in {number} {clock}"
        for clock, (seconds, error, number) in sorted(clocks.items())
    ]
    return f"time saved, plain less coded by the times of trials: {'; '.join(said) or 'not measured'}"


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index in _TEXTS else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def _cells(row: Row) -> tuple[str, ...]:
    """Return the cells of one row, in the order of the header."""
    why = ", ".join(f"{reason} ({count})" for reason, count in sorted(row["reasons"].items()))
    *amounts, ratio = _amounts(row["calls"], row["logical_bytes"], row["wire_bytes"], row["ratio"])
    if row["wire_bytes"] and not row["logical_bytes"]:
        ratio = "-"  # messages in addition to the plain ones
    return (row["role"], _call(row), *amounts, ratio, str(row["passed"]), f"{row['passed_bytes'] / 1e6:.2f}", why)


def _call(row: Row) -> str:
    """Return the operation of a row, such as "all_to_all_single dispatch"."""
    return f"{row['op']} {row['kind']}".rstrip()


def _amounts(calls: int, logical_bytes: int, wire_bytes: int, ratio: float) -> tuple[str, str, str, str]:
    return str(calls), f"{logical_bytes / 1e6:.2f}", f"{wire_bytes / 1e6:.2f}", counters.ratio_text(ratio)


#: Reasons why a frame went exact that a line has in any case.
_EXACT = ("not finite", "smaller")


#: Codecs that send factors in place of a matrix.
_LOW_RANK = tuple(name for name, kind in LOSSY_CODECS.items() if kind.matrices)


def _lossy(one: Lossy) -> str:
    """Return the line of a lossy role and operation, such as "tp all_reduce: round mantissa 3, relative L2 error 0.0265 per rounding"."""
    error = "no frame sampled" if one["error"] is None else f"relative L2 error {one['error']:.3g} per rounding"
    said = [one["codec"] or "a lossy codec", error, *_feedback(one), f"ratio {one['ratio']:.2f}"]
    counts = {**dict.fromkeys(_EXACT, 0), **one["exact"]}
    (first, count), *more = counts.items()
    exact = [f"{count} of {one['frames']} frames exact ({first})", *(f"{number} exact ({why})" for why, number in more)]
    return f"{one['role']} {one['op']}: {', '.join(said)}; {', '.join(exact)}"


def _feedback(one: Lossy) -> Iterator[str]:
    """Yield the energy that low-rank messages have captured, the size of errors that ride on later messages, and rho: feedback of errors
    in a pipeline helps where rho, the cosine of a stage's inputs in consecutive micro-batches, is beyond 1/2."""
    if one["error"] is not None and one["codec"].startswith(_LOW_RANK):
        yield f"captured energy {1 - one['error'] ** 2:.3g}"
    if one["kept"] is not None:
        yield f"|E|/|G| {one['kept']:.3g}"
    if one["alike"] is not None:
        yield f"rho {one['alike']:.3g}"


def _differences(row: Row) -> Iterator[str]:
    """Yield a line where shards may go as differences: their number, and the reasons of the shards that went in full."""
    counts = dict(row["differences"])
    total, hits = sum(counts.values()), counts.pop("", 0)
    why = "".join(f", {reason} ({count})" for reason, count in sorted(counts.items()))
    if total:
        yield f"{row['role']} {_call(row)}: {hits} of {total} shards went as differences{why}"


def _whole(row: Row) -> Iterator[str]:
    """Yield a line for every reason why sums went to all ranks, not to their owners only."""
    for reason, count in sorted(row["whole"].items()):
        yield f"{row['role']} {_call(row)}: {count} calls not owner-only: {reason}"


def _choices(row: Row) -> Iterator[str]:
    """Yield a line where the schedule was chosen by measurement."""
    for what, (latest, count) in sorted(row["choices"].items()):
        switches = f"; switched {count - 1} times" if count > 1 else ""
        yield f"{row['role']} {_call(row)}, {what}: {latest}{switches}"


def _host_waits(row: Row) -> Iterator[str]:
    """Yield a line where the host waited for the device: once a call for sizes of frames, or in agreements, which are no calls."""
    if row["host_waits"]:
        calls = f" in {row['calls']} coded calls" if row["calls"] else ""
        yield f"{row['role']} {_call(row)}: the host waited {row['host_waits']} times for the device{calls}"
