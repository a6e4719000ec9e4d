"""Floors of ``bench codec --device cuda --floors``: figures that a GPU must reach. A missed floor gives exit status 3.

Rates in bytes per second are for H100 and H200 modules (SXM), whose multiprocessors are equal. A cascade encoder takes
25 instructions per element, three quarters of them in the integer pipe, which is half as wide as the issue rate: 1,450
to 1,660 GB/s. Barriers, look-back and half occupancy leave two thirds. An H200 encodes at 1,210 to 1,260 GB/s and
decodes at 1,180 to 1,230. Ratios to a figure of the same run are for every GPU; the sum of an H200 has 0.99.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Exit status of a benchmark with right bits that missed a floor.
SLOW = 3
Rows = Sequence[Mapping[str, Any]]
#: Parts of the names of the devices to which the rates apply.
DEVICES = ("H100 80GB HBM3", "H200")
#: Sizes in MiB, and elements per block, of the rows that floors use.
BIG, MIDDLE, SMALL, BLOCK = 256, 16, 1, 1024
#: Offset of misaligned words in bytes after a multiple of 16.
MISALIGNED = 2
#: Name of the host's time to encode and decode a gather, and its bound in microseconds.
GATHER, GATHER_US = "gather of 20 over 64 ranks", 150


@dataclass(frozen=True)
class Floor:
    """A figure and its bound.

    Args:
        figure: gives the figure from the rows, None if a row is missing.
        above: whether the bound is the least value; otherwise it is the greatest.
        anywhere: whether the floor applies to every GPU.
        optional: whether the figure needs a peer, which may be missing.
        mib: size of the rows; without a row of this size the floor is left out.
    """

    name: str
    bound: float
    unit: str
    figure: Callable[[Rows], float | None]
    above: bool = True
    anywhere: bool = False
    optional: bool = False
    mib: int = BIG

    def compare(self, rows: Rows, device: str) -> dict[str, Any]:
        """The floor, the figure, and ``met``; None if they cannot be compared."""
        got = self.figure(rows)
        met: bool | None = None if got is None else (got >= self.bound if self.above else got <= self.bound)
        note = ""
        if got is None:
            met, note = (None if self.optional else False), "not measured"
        elif not self.anywhere and not any(name in device for name in DEVICES):
            met, note = None, f"the bound applies to {' and '.join(DEVICES)}"
        wanted = f"{'at least' if self.above else 'at most'} {self.bound:g} {self.unit}".rstrip()
        return {"floor": self.name, "wanted": wanted, "got": got, "met": met} | ({"note": note} if note else {})


def _value(rows: Rows, codec: str, mib: int, key: str, offset: int = 0, block: int = BLOCK) -> float | None:
    """A figure of the first bf16 row with these properties."""
    for row in rows:
        place = (row["codec"], row["dtype"], row["mib"], row["offset"], row["block"])
        if place == (codec, "bfloat16", mib, offset, block):
            return row[key]  # type: ignore[no-any-return]
    return None


def _figure(codec: str, mib: int, key: str) -> Callable[[Rows], float | None]:
    return lambda rows: _value(rows, codec, mib, key)


def _quotient(
    above: Callable[[Rows], float | None], below: Callable[[Rows], float | None]
) -> Callable[[Rows], float | None]:
    def figure(rows: Rows) -> float | None:
        one, other = above(rows), below(rows)
        return one / other if one is not None and other else None

    return figure


def _sum_rate(rows: Rows) -> float | None:
    """Words per second of a sum of eight frames / words per second of a decoder, from the bytes that both moved."""
    moved, ratio = (
        _quotient(_figure("cascade", BIG, "sum_moved"), _figure("cascade", BIG, "decode_moved"))(rows),
        _figure("cascade", BIG, "ratio")(rows),
    )
    return None if moved is None or ratio is None else moved * 8 * (1 + ratio) / (8 + ratio)


def _floors() -> list[Floor]:
    found = []
    for key, step in (("encode_gbps", "encode"), ("decode_gbps", "decode")):
        for codec, rate in (("wide", 1100), ("cascade", 1000)):
            found.append(Floor(f"{codec} {step}, {BIG} MiB", rate, "GB/s", _figure(codec, BIG, key)))
            found.append(Floor(f"{codec} {step}, {MIDDLE} MiB", 400, "GB/s", _figure(codec, MIDDLE, key), mib=MIDDLE))

            def crooked(rows: Rows, codec: str = codec, key: str = key) -> float | None:
                return _value(rows, codec, BIG, key, offset=MISALIGNED)

            name = f"{codec} {step}, misaligned words / aligned words"
            found.append(Floor(name, 0.5, "", _quotient(crooked, _figure(codec, BIG, key)), anywhere=True))
        peer = _figure("nvcomp-ans", BIG, key)
        found.append(
            Floor(
                f"cascade / nvCOMP ANS, {step}", 3, "", _quotient(_figure("cascade", BIG, key), peer), True, True, True
            )
        )
    found.append(Floor("sum of eight frames / eight decodes", 0.9, "", _sum_rate, anywhere=True))
    pair = _figure("cascade", SMALL, "pair_us")
    found.append(Floor(f"encode and decode of {SMALL} MiB", 25, "us", pair, above=False, mib=SMALL))
    return found


FLOORS = _floors()


def compare(rows: Rows, device: str, python_us: Mapping[str, float]) -> list[dict[str, Any]]:
    """Compare each floor of the measured sizes with its figure."""
    gather = Floor(f"Python, {GATHER}", GATHER_US, "us", lambda rows: python_us.get(GATHER), above=False)
    sizes = {row["mib"] for row in rows}
    return [floor.compare(rows, device) for floor in FLOORS if floor.mib in sizes] + [gather.compare(rows, device)]


def missed(compared: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each floor that is not met."""
    return [
        f"{one['floor']}: {'not measured' if one['got'] is None else format(one['got'], '.4g')}, wanted {one['wanted']}"
        for one in compared
        if one["met"] is False
    ]
