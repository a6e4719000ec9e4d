"""The exponent codec (FORMAT.md section 2): sizes here, words and payload bytes in :mod:`ds_zipccl.kernels`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_zipccl import kernels
from ds_zipccl.frame import CHUNK_BLOCKS, CodecId, pad16

BLOCKS = (128, 256, 512, 1024)
_TABLE_BYTES = {
    torch.bfloat16: 3, torch.float16: 3, torch.float32: 4, torch.float8_e4m3fn: 3, torch.float8_e5m2: 3
}  # per block # fmt: skip
_MAX_PAYLOAD = 16 << 32  # chunk offsets are 32 bits in units of 16 bytes


def _ceil(count: int, unit: int) -> int:
    return (count + unit - 1) // unit


class ExponentCodec:
    """See :class:`ds_zipccl.codecs.Codec`. ``code``: "cascade" (best ratio) or "wide" (fastest); frames of both are decoded alike."""

    ID = CodecId.EXPONENT
    DTYPES = tuple(_TABLE_BYTES)

    def __init__(self, code: str) -> None:
        self._code = code

    def block(self, wanted: int) -> int:
        if wanted not in BLOCKS:
            raise ValueError(f"block {wanted} is not possible; choose one of {', '.join(map(str, BLOCKS))}")
        return wanted

    def payload_floor(self, numel: int, dtype: torch.dtype, block: int) -> int:
        """Bytes of a payload in which every block is zero: index and tables."""
        chunk = block * CHUNK_BLOCKS
        full, rest = divmod(numel, chunk)
        table = _TABLE_BYTES[dtype]
        last = pad16(table * _ceil(rest, block))
        return pad16(4 * _ceil(numel, chunk)) + full * pad16(table * CHUNK_BLOCKS) + last

    def payload_bound(self, numel: int, dtype: torch.dtype, block: int) -> int:
        """Bytes of a payload in which every block is as large as raw, with all paddings; also the room that encoders work in."""
        full, rest = divmod(numel, block)
        bodies = full * block * dtype.itemsize + pad16(rest * dtype.itemsize)
        return self.payload_floor(numel, dtype, block) + bodies + 16 * _ceil(numel, block * CHUNK_BLOCKS)

    def check_size(self, words: torch.Tensor, block: int) -> None:
        """Raises ValueError where chunk offsets would not hold the payload."""
        if self.payload_bound(words.numel(), words.dtype, block) > _MAX_PAYLOAD:
            raise ValueError(f"{words.numel()} elements are too many for one frame; cut the tensor")

    def encode(
        self, segments: Sequence[torch.Tensor], block: int, outs: Sequence[torch.Tensor], route: str
    ) -> list[int]:
        for words in segments:
            self.check_size(words, block)
        if not segments:
            return []
        return kernels.route(route, segments[0].device.type).encode(segments, self._code, block, outs)

    def decode(self, payload: torch.Tensor, block: int, words: torch.Tensor, route: str) -> None:
        kernels.route(route, words.device.type).decode(payload, block, words)

    def decode_add(self, payload: torch.Tensor, block: int, dtype: torch.dtype, sums: torch.Tensor, route: str) -> None:
        kernels.route(route, sums.device.type).decode_add(payload, block, dtype, sums)
