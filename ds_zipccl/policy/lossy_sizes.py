"""Bits a value and error that a lossy codec is expected to have on dense tensors, such as gradients and activations of a transformer.

The rules reproduce measurements on tensors of a GPT of 11M parameters within 2%. ``analyze --lossy`` measures your tensors.
"""

from __future__ import annotations

from typing import NamedTuple

from ds_zipccl.lossy import Int, LossyCodec, Round, TacoFp8, Zfp

#: Mantissa bits by dtype, torch's names.
MANTISSA = {"bfloat16": 7, "float16": 10, "float32": 23}
#: Relative L2 error of ``round`` with k bits is this times 2^-k (derived: rounding errors uniform, mantissas log-uniform).
_ROUND_ERROR = 0.212
#: Bits of a float8 code after a Hadamard transform and a lossless stage (measured: the transform makes all tensors alike).
_TRANSFORMED_BITS = 6.70
_TACO_MANTISSA = 3
_TACO_ERROR = 0.0265
_INT_ERRORS = {8: 0.0065, 6: 0.0266, 4: 0.118}
#: Error of ``zfp`` at 8 bits a value; every further bit halves the error (measured on normal values).
_ZFP_ERROR_AT_8 = 0.055


class Expected(NamedTuple):
    """Bits a value of the frames, and relative L2 error of one rounding."""

    bits: float
    error: float


def expected(codec: LossyCodec, dtype: str, lossless_bits: float) -> Expected:
    """Return what a codec, which codes no matrices, is expected to take of a dense tensor.

    Args:
        dtype: torch's name of a dtype of :data:`MANTISSA`.
        lossless_bits: bits a value of the lossless codec on the same tensor.
    """
    if isinstance(codec, Round):
        # The lossless coding sends the mantissa whole: every bit that rounding clears is a bit less. No more is cleared than there is.
        cleared = max(0, MANTISSA[dtype] - codec.mantissa)
        return Expected(lossless_bits - cleared, _ROUND_ERROR * 2.0**-codec.mantissa if cleared else 0.0)
    if isinstance(codec, TacoFp8):
        left = lossless_bits - max(0, MANTISSA[dtype] - _TACO_MANTISSA)
        bits = _TRANSFORMED_BITS if codec.hadamard else min(8.0, left)
        return Expected(bits + 8 / codec.group, _TACO_ERROR)
    if isinstance(codec, Int):
        return Expected(codec.bits + 16 / codec.group, _INT_ERRORS[codec.bits])
    if isinstance(codec, Zfp):
        return Expected(float(codec.rate), _ZFP_ERROR_AT_8 * 2.0 ** (8 - codec.rate))
    raise ValueError(f"the size of frames of {type(codec).__name__} is not known")
