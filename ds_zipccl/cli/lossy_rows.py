"""Rows of ``analyze --lossy``: size and error of a tensor by lossy codecs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ds_zipccl.benchmarks.codec.lossy import errors
from ds_zipccl.cli.tables import Column
from ds_zipccl.lossy import LossyCodec

if TYPE_CHECKING:
    import torch

LOSSY_COLUMNS = (
    Column("codec", width=30),
    Column("lossless", ".2f"),
    Column("bits", ".2f", 6),
    Column("error", ".4f", 7),
    Column("small_error", ".4f"),
    Column("wrong", "d"),
)


def lossy_rows(
    name: str, tensor: torch.Tensor, wanted: Sequence[LossyCodec], ratio: float, block: int, route: str
) -> Iterator[dict[str, Any]]:
    """Yield a row for each codec, none for a tensor that no lossy codec takes. ``ratio``: of the lossless frame."""
    import torch

    from ds_zipccl import codecs

    if tensor.dtype not in codecs.LOSSY_DTYPES or tensor.layout != torch.strided or not tensor.numel():
        return
    tensor = tensor.detach().contiguous()
    for codec in wanted:
        frame = codecs.compress(tensor, codec, lossy=True, block=block, shaped=False, checksum=False, route=route)
        rounded = codecs.project(tensor, codec, route=route)
        yield {
            "name": name,
            "codec": str(codec),
            "lossless": 8 * tensor.element_size() / ratio,
            "bits": 8 * frame.numel() / tensor.numel(),
            **errors(tensor, rounded),
            "wrong": wrong(tensor, rounded, codecs.decompress(frame, route=route)),
        }


def wrong(tensor: torch.Tensor, rounded: torch.Tensor, decoded: torch.Tensor) -> int:
    """Return the number of decoded elements that are not the rounded ones, and of values that were not finite and have changed."""
    from ds_zipccl.cli.exponents import differing

    lost = ~tensor.isfinite().flatten()
    return differing(decoded, rounded) + differing(rounded.flatten()[lost], tensor.flatten()[lost])
