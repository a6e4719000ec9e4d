"""check = "shadow": the plain collective runs beside our schedule, on copies, and the results are compared.

Operations without sums must agree in every bit. Sums must agree in every bit too, with two exceptions. Any NaN equals any NaN. "fp32"
sums of three or more ranks, and "fp32" averages, may differ from the plain result ``want`` by rounding:
``|got - want| <= ranks * eps * sum(|x|)``, eps being the distance from 1 to the next number of the dtype.

The result of a lossy call is compared by its relative L2 error. With e the relative L2 error of one rounding of the contributions, a sum of
n ranks may be off by 1.15 times e sqrt((n - 1) / n) of the contributions' norm, because the own part is exact. An all-reduce rounds the sum
too. Other operations round once. Every contribution that is not finite must leave its mark.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from ds_zipccl import __version__, tensors
from ds_zipccl.codecs import project
from ds_zipccl.comm.work import CommError
from ds_zipccl.kernels import build
from ds_zipccl.lossy import LossyCodec

#: The differences that are allowed from the plain results: none; the payloads of NaNs; rounding as well; the error of a lossy codec.
Tolerance = Literal["bits", "nan", "rounding", "lossy"]
#: plain(inputs, outputs, async_op): the operation of torch.distributed on the given tensors.
Plain = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], bool], Any]

#: A lossy result may be off by this many times the error that the codec explains.
SLACK = 1.15
#: Name of the file of a rank with the words around a mistake, in the cache folder.
_SAVED = "zipccl_mismatch_{}.npz"
#: Bytes of an element -> the dtype of its bits.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ShadowMismatch(CommError):
    """The result of our schedule differs from the plain result."""


class Shadow:
    """The plain collective on copies. The constructor issues it on the calling thread, so that all ranks issue in program order."""

    def __init__(
        self,
        plain: Plain,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        tolerance: Tolerance,
        ranks: int,
    ) -> None:
        self._tolerance = tolerance
        self._ranks = ranks
        self._wanted = [tensor.detach().clone() for tensor in outputs]
        self._handles = [plain([tensor.detach().clone() for tensor in inputs], self._wanted, True)]
        self._magnitudes: list[torch.Tensor] = []
        if tolerance == "rounding":
            self._magnitudes = [tensor.detach().abs() for tensor in outputs]
            self._handles.append(plain([tensor.detach().abs() for tensor in inputs], self._magnitudes, True))

    def compare(self, outputs: Sequence[torch.Tensor], error: Callable[[str], CommError]) -> None:
        """Compare ``outputs`` with the plain result; blocks until the plain collective is done.

        Raises:
            ShadowMismatch: with the first difference, in a message made by ``error``.
        """
        for handle in self._handles:
            handle.wait()
        for number, (got, want) in enumerate(zip(outputs, self._wanted, strict=True)):
            wrong = self._wrong(number, got.detach().reshape(-1), want.reshape(-1))
            if bool(wrong.any()):
                index = int(wrong.byte().argmax())
                values = ", ".join(
                    f"{name} {_show(flat.reshape(-1)[index])}" for name, flat in (("got", got), ("wanted", want))
                )
                message = f"{int(wrong.sum())} of {wrong.numel()} wrong in output {number}, first at {index}: {values}"
                raise ShadowMismatch(str(error(message)))

    def _wrong(self, number: int, got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
        if self._tolerance == "rounding":
            return _beyond_rounding(got, want, self._magnitudes[number].reshape(-1), self._ranks)
        wrong = bits(got) != bits(want)
        return wrong if self._tolerance == "bits" else wrong & ~(got.isnan() & want.isnan())


class LossyShadow:
    """The plain collective on fp32 copies of the tensors of a lossy call, of the squares of their values, and of the squares of the errors
    that the codec makes in them. The constructor issues all three on the calling thread.

    ``summed``: the name of the reduction, "" for operations without a sum. ``twice``: the sum is rounded too.
    """

    def __init__(
        self,
        plain: Plain,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        codec: LossyCodec,
        ranks: int,
        summed: str,
        twice: bool,
    ) -> None:
        self._codec, self._ranks, self._twice = codec, ranks, twice
        self._share = (ranks - 1) / ranks if summed else 1.0
        self._divisor = ranks if summed == "AVG" else 1
        self._handles: list[Any] = []

        def beside(change: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
            there, back = ([change(tensor.detach()) for tensor in some] for some in (inputs, outputs))
            self._handles.append(plain(there, back, True))
            return back

        self._wanted = beside(lambda tensor: tensor.to(torch.float32, copy=True))
        self._squares = beside(lambda tensor: tensor.float().square())
        self._errors = beside(self._squared_errors)

    def _squared_errors(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the squares of the errors of one rounding, 0 where a value is not finite."""
        found = torch.empty_like(tensor, dtype=torch.float32)
        difference = project(tensor, self._codec).float() - tensor.float()
        return found.copy_(difference.square().masked_fill_(~tensor.isfinite(), 0.0))

    def compare(self, outputs: Sequence[torch.Tensor], error: Callable[[str], CommError]) -> None:
        """Compare ``outputs`` with the plain result; blocks until the plain collectives are done.

        Raises:
            ShadowMismatch: the relative L2 error is beyond SLACK times that of the codec, or a value that is not finite has become one
                that is. ``error`` makes the message.
        """
        for handle in self._handles:
            handle.wait()
        off = values = squares = errors = fourth = again = 0.0
        for number, (output, wanted) in enumerate(zip(outputs, self._wanted, strict=True)):
            got, want = output.detach().reshape(-1), wanted.reshape(-1)
            lost = ~want.isfinite() & got.isfinite()
            if bool(lost.any()):
                index = int(lost.byte().argmax())
                message = f"output {number} has {_show(got[index])} at {index}, wanted {want[index].item():g}"
                raise ShadowMismatch(str(error(message)))
            finite = got.isfinite() & self._squares[number].reshape(-1).isfinite()
            got, want = got[finite].double(), want[finite].double()
            mistakes = self._errors[number].reshape(-1)[finite].double()
            off += float((got - want).square().sum())
            values += float(want.square().sum())
            squares += float(self._squares[number].reshape(-1)[finite].double().sum())
            errors += float(mistakes.sum())
            fourth += float(mistakes.square().sum())
            if self._twice:
                rounded = wanted.to(output.dtype)
                twice = (project(rounded, self._codec).float() - rounded.float()).reshape(-1)[finite]
                again += float(twice.double().square().sum())
        if not outputs:
            return
        limits = torch.finfo(outputs[0].dtype)
        steps = limits.eps**2 / 4 * (values + again) + (self._ranks * torch.finfo(torch.float32).eps) ** 2 * squares
        # groups are cut at other elements than here, which counts where they differ by much: less than the typical error is no alarm
        typical = _typical_error(self._codec)
        share = max(errors / squares if squares else 0.0, typical**2)
        # contributions may be alike, or cancel each other
        sums = self._share * share * max(squares / self._divisor, values)
        if self._twice:
            again = max(again, typical**2 * values)
        # few values: their errors may happen to agree
        chance = min(self._ranks**0.5, 1 + 3 * fourth**0.5 / errors) if errors else 1.0
        least = limits.smallest_normal * limits.eps * sum(output.numel() for output in outputs) ** 0.5
        limit = SLACK * chance * (sums + again + steps) ** 0.5 + least
        if off**0.5 > limit:
            norm = values**0.5 or 1.0
            message = (
                f"relative L2 error {off**0.5 / norm:.4g} by {self._codec}, at most {limit / norm:.4g} is explained"
            )
            raise ShadowMismatch(str(error(message)))


@functools.cache
def _typical_error(codec: LossyCodec) -> float:
    """Return the relative L2 error that a codec makes in normally distributed numbers."""
    numbers = np.random.default_rng(0).standard_normal(1 << 14, dtype=np.float32)
    some = tensors.of_buffer(numbers).view(torch.float32)
    return float((project(some, codec) - some).norm() / some.norm())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bit patterns as integers."""
    return tensor.view(WORDS[tensor.element_size()])


def _beyond_rounding(got: torch.Tensor, want: torch.Tensor, magnitude: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return a mask of the elements where rounding does not explain the difference. Elements where sum(|x|) is not finite are not in it."""
    limits = torch.finfo(got.dtype)
    bound = ranks * (limits.eps * magnitude.double() + limits.smallest_normal * limits.eps)
    return ~((got.double() - want.double()).abs() <= bound) & magnitude.isfinite()


AnyShadow = Shadow | LossyShadow


def _show(value: torch.Tensor) -> str:
    return f"{value.item():g} ({hexadecimal(value)})"


def hexadecimal(value: torch.Tensor) -> str:
    """Return the bits of a tensor of one element, such as 0x7fc0."""
    return word_text(int(bits(value.reshape(1))[0]), value.element_size())


def word_text(word: int, nbytes: int) -> str:
    """Return a word of so many bytes, given with or without a sign, such as 0x7fc0."""
    return f"0x{word & (1 << 8 * nbytes) - 1:0{2 * nbytes}x}"


def saved_files() -> list[Path]:
    """Return the files of :func:`saved` that jobs of this user have left on this machine."""
    try:
        return sorted(build.cache_root().glob(_SAVED.format("*")))
    except (OSError, build.BuildError):
        return []


def saved(about: Mapping[str, Any], got: torch.Tensor, wanted: torch.Tensor) -> str:
    """Save words of two results for a bug report, and return a text with the file; each rank has one. Both hold bit patterns."""
    rank = dist.get_rank()
    about = {
        **about,
        "rank": rank,
        "ranks": dist.get_world_size(),
        "ds_zipccl": __version__,
        "torch": torch.__version__,
    }
    try:
        path = build.cache_root() / _SAVED.format(rank)
        path.touch(mode=0o600)  # or a folder with it could not be trusted
        np.savez(path, about=json.dumps(about), got=got.numpy(), wanted=wanted.numpy())
    except (OSError, build.BuildError) as error:
        return f"not saved: {error}"
    return f"saved in {path}"
