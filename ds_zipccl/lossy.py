"""The lossy codecs as values: one class for each, with its settings. Only a caller that names one gets a lossy frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

#: Group sizes of scaled codecs, in elements.
GROUPS = (32, 64, 128, 256, 512)


def takes(values: Sequence[Any], got: Any) -> bool:
    """Return whether a setting with ``values``, all of one type, takes ``got``."""
    return type(got) is type(values[0]) and got in values  # True is an int for Python


@dataclass(frozen=True)
class LossyCodec:
    """A lossy codec and its settings. The subclasses are the codecs; equal settings are equal values.

    Raises:
        ValueError: a setting is impossible; the text names the setting, the value got and the values wanted.
    """

    name: ClassVar[str]
    #: Setting -> the values that the setting takes.
    wanted: ClassVar[dict[str, Sequence[Any]]]
    #: It codes matrices: a tensor without its shape has no frame.
    matrices: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for one in fields(self):
            got, values = getattr(self, one.name), self.wanted[one.name]
            if not takes(values, got):
                said = f"{values[0]} to {values[-1]}" if len(values) > 5 else ", ".join(map(str, values))
                raise ValueError(f"{one.name} of {self.name} must be {said}, got {got!r}")

    def __str__(self) -> str:
        said = (
            f"{key} {value}" if value is not True else key for key, value in asdict(self).items() if value is not False
        )
        return " ".join((self.name, *said))


@dataclass(frozen=True)
class Round(LossyCodec):
    """Values rounded to ``mantissa`` bits on their own grid, then coded without further loss."""

    mantissa: int = 3

    name = "round"
    wanted = {"mantissa": range(1, 7)}


@dataclass(frozen=True)
class TacoFp8(LossyCodec):
    """Float8 (E4M3) with a scale, a power of two, for each ``group`` of elements, after a Hadamard transform of the group."""

    group: int = 128
    hadamard: bool = True

    name = "taco_fp8"
    bits = 8
    wanted = {"group": GROUPS, "hadamard": (False, True)}


@dataclass(frozen=True)
class Int(LossyCodec):
    """Integers of ``bits`` bits with a scale for each ``group`` of elements."""

    bits: int = 8
    group: int = 128
    hadamard: bool = False

    name = "int"
    wanted = {"bits": (8, 6, 4), "group": GROUPS, "hadamard": (False, True)}


@dataclass(frozen=True)
class Zfp(LossyCodec):
    """The published ZFP stream in one dimension, ``rate`` bits per value."""

    rate: int = 8

    name = "zfp"
    wanted = {"rate": range(4, 25)}


@dataclass(frozen=True)
class LowRank(LossyCodec):
    """Two factors with ``rank`` columns each in place of a matrix, by one power iteration, rounded to 5 mantissa bits."""

    rank: int = 16

    name = "lowrank"
    matrices = True
    wanted = {"rank": range(1, 1025)}


@dataclass(frozen=True)
class PowerSgd(LossyCodec):
    """Sums of gradients by PowerSGD: two factors with ``rank`` columns each are summed in place of a matrix."""

    rank: int = 32

    name = "powersgd"
    matrices = True
    wanted = {"rank": range(1, 1025)}


#: name -> class, in the order in which lists of codecs show them.
LOSSY_CODECS: dict[str, type[LossyCodec]] = {one.name: one for one in (Round, TacoFp8, Int, Zfp, LowRank, PowerSgd)}
