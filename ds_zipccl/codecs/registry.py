"""Which codecs there are: one table, from which names, decoders and dtypes derive.

A new codec is a module that makes a :class:`~ds_zipccl.codecs.spec.CodecSpec`, an entry in :data:`CODEC_SPECS`, and, for a payload format
of its own, an id in FORMAT.md and :class:`ds_zipccl.frame.CodecId`. A lossy codec is a value (:mod:`ds_zipccl.lossy`), whose module has the
functions of a :class:`~ds_zipccl.codecs.spec.LossySpec`: an entry in :data:`LOSSY_SPECS`. A format whose frames have an
encoder of their own, with arguments of their own, has no name there: its :class:`~ds_zipccl.codecs.spec.PayloadSpec` is an entry of
:data:`DECODERS` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch

from ds_zipccl.codecs import exponent, scaled, zfp
from ds_zipccl.codecs.exponent import CASCADE, DELTA, RAW, ROUNDED, WIDE
from ds_zipccl.codecs.known import BITS
from ds_zipccl.codecs.lowrank import LOWRANK
from ds_zipccl.codecs.rows import ROWS
from ds_zipccl.codecs.scaled import SCALED
from ds_zipccl.codecs.spec import LOSSY_DTYPES, CodecSpec, Coded, LossySpec, PayloadSpec
from ds_zipccl.codecs.zfp import ZFP1
from ds_zipccl.frame import DTYPE_IDS, CodecId
from ds_zipccl.lossy import Int, LossyCodec, Round, TacoFp8, Zfp

#: name -> codec, in the order in which lists of codecs show them.
CODEC_SPECS: dict[str, CodecSpec] = {spec.name: spec for spec in (RAW, CASCADE, WIDE, DELTA)}

#: Names of the codecs that code a tensor by itself.
CODECS: tuple[str, ...] = tuple(name for name, spec in CODEC_SPECS.items() if not spec.needs_base)
#: Names of the codecs that code a tensor against a base.
BASE_CODECS: tuple[str, ...] = tuple(name for name, spec in CODEC_SPECS.items() if spec.needs_base)
#: dtypes that some codec without a base makes smaller.
CODED_DTYPES: tuple[torch.dtype, ...] = tuple(
    dict.fromkeys(
        dtype for spec in CODEC_SPECS.values() if spec is not RAW and not spec.needs_base for dtype in spec.dtypes
    )
)
#: Class of a lossy codec -> ``payload_bound``, ``encode`` and ``project`` of the entry of a value, which is their first argument.
LOSSY_SPECS: dict[type[LossyCodec], tuple[Callable[..., int], Callable[..., list[Coded]], Callable[..., None]]] = {
    Round: (lambda codec, *sizes: ROUNDED.payload_bound(*sizes), exponent.encode_rounded, exponent.project_rounded),
    TacoFp8: (scaled.payload_bound, scaled.encode, scaled.project),
    Int: (scaled.payload_bound, scaled.encode, scaled.project),
    Zfp: (zfp.payload_bound, zfp.encode, zfp.project),
}
#: Formats that only lossy codecs, :mod:`.lowrank`, :mod:`.row_segment` and :mod:`.known` write.
_OTHERS: tuple[PayloadSpec, ...] = (ROUNDED, SCALED, LOWRANK, ZFP1, ROWS, BITS)
#: Codec byte of a frame -> the format that decodes it; codecs of one byte decode alike.
DECODERS: dict[CodecId, PayloadSpec] = {spec.frame_id: spec for spec in (*reversed(CODEC_SPECS.values()), *_OTHERS)}
_RENAMED = {former: name for name, spec in CODEC_SPECS.items() for former in spec.former_names}


def codec_spec(name: str) -> CodecSpec:
    """The codec of that name.

    Raises:
        ValueError: there is none; the message lists the names.
    """
    if name in CODEC_SPECS:
        return CODEC_SPECS[name]
    if name in _RENAMED:
        raise ValueError(f'codec is now "{_RENAMED[name]}", it was "{name}"; write "{_RENAMED[name]}"')
    raise ValueError(f"no codec {name!r}; known codecs: {', '.join(CODEC_SPECS)}")


def spec_for(codec: str, dtype: torch.dtype) -> CodecSpec:
    """The codec that codes tensors of ``dtype`` where the caller asks for ``codec``: that codec, or raw.

    Raises:
        ValueError: unknown codec, or a dtype that no frame holds.
    """
    spec = codec_spec(codec)
    if dtype not in DTYPE_IDS:
        raise ValueError(f"{dtype} has no place in a frame; view the tensor as one of {', '.join(map(str, DTYPE_IDS))}")
    return spec if dtype in spec.dtypes else RAW


def lossy_spec(codec: LossyCodec, dtype: torch.dtype) -> LossySpec:
    """The entry of a lossy codec, for tensors of ``dtype``.

    Raises:
        ValueError: a dtype that lossy codecs do not take, or a codec of matrices.
    """
    if dtype not in LOSSY_DTYPES:
        raise ValueError(f"{codec} codes {', '.join(map(str, LOSSY_DTYPES))}, got {dtype}; send it by a lossless codec")
    if type(codec) not in LOSSY_SPECS:
        raise ValueError(f"{codec} codes matrices, not the elements of a tensor; name it for a role of the section")
    return _lossy_spec(codec)


@cache
def _lossy_spec(codec: LossyCodec) -> LossySpec:
    bound, encode, project = LOSSY_SPECS[type(codec)]
    return LossySpec(
        codec=codec,
        block=exponent.block_size,
        payload_bound=partial(bound, codec),
        encode=partial(encode, codec),
        project=partial(project, codec),
    )
