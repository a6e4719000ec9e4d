"""check = "shadow": the plain collective runs beside our schedule, on copies, and the results are compared.

Operations without sums must agree in every bit. Sums must agree in every bit too, with two exceptions. Any NaN equals any NaN. "fp32"
sums of three or more ranks, and "fp32" averages, may differ from the plain result ``want`` by rounding:
``|got - want| <= ranks * eps * sum(|x|)``, eps being the distance from 1 to the next number of the dtype.

A lossy call that moves values must agree in every bit with the plain collective on the values of the codec. Lossy sums are not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from ds_zipccl.comm.work import CommError

#: The differences that are allowed from the plain results: none; the payloads of NaNs; rounding as well; a lossy sum is not compared.
Tolerance = Literal["bits", "nan", "rounding", "lossy"]
#: plain(inputs, outputs, async_op): the operation of torch.distributed on the given tensors.
Plain = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], bool], Any]

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
            return beyond_rounding(got, want, self._magnitudes[number].reshape(-1), self._ranks)
        wrong = bits(got) != bits(want)
        return wrong if self._tolerance == "bits" else wrong & ~(got.isnan() & want.isnan())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bit patterns as integers."""
    return tensor.view(WORDS[tensor.element_size()])


def beyond_rounding(got: torch.Tensor, want: torch.Tensor, magnitude: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return a mask of the elements where rounding does not explain the difference. Elements where sum(|x|) is not finite are not in it."""
    limits = torch.finfo(got.dtype)
    bound = ranks * (limits.eps * magnitude.double() + limits.smallest_normal * limits.eps)
    return ~((got.double() - want.double()).abs() <= bound) & magnitude.isfinite()


def _show(value: torch.Tensor) -> str:
    return f"{value.item():g} ({hexadecimal(value)})"


def hexadecimal(value: torch.Tensor) -> str:
    """Return the bits of a tensor of one element, such as 0x7fc0."""
    return word_text(int(bits(value.reshape(1))[0]), value.element_size())


def word_text(word: int, nbytes: int) -> str:
    """Return a word of so many bytes, given with or without a sign, such as 0x7fc0."""
    return f"0x{word & (1 << 8 * nbytes) - 1:0{2 * nbytes}x}"
