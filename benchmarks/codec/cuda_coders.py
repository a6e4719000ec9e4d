"""Coders of ``bench codec --device cuda`` that are called as a user calls them, and wait for the device: lossy codecs, and nvCOMP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ds_zipccl.lossy import LossyCodec

#: Algorithms of nvCOMP, with their options for 16-bit floats.
PEERS: dict[str, dict[str, str]] = {
    "nvcomp-ans": {"algorithm": "ANS", "data_type": "<f2"},
    "nvcomp-bitcomp": {"algorithm": "Bitcomp", "data_type": "<u2"},
}


def why_not(codec: LossyCodec, route: str, device: str) -> str:
    """Why a route has no rows of a lossy codec, "" if it has."""
    import torch

    from ds_zipccl import codecs, kernels

    try:
        codecs.project(torch.ones(8, device=device), codec, route=route)
    except kernels.RouteUnavailable as error:
        return str(error)
    return ""


class LossyCoder:
    """A lossy codec, by ``compress`` and ``decompress`` with buffers of the caller."""

    eager = True

    def __init__(self, tensors: Sequence[torch.Tensor], route: str, codec: LossyCodec, block: int) -> None:
        import torch

        from ds_zipccl import codecs

        like = tensors[0]
        bound = codecs.compress_bound(like.numel(), like.dtype, codec, lossy=True, block=block)
        self._tensors, self._codec, self._route, self._block = tensors, codec, route, block
        self._places = [torch.empty(bound, dtype=torch.uint8, device=like.device) for _ in tensors]
        self._frames = self._places.copy()
        self._outs = [torch.empty_like(tensor) for tensor in tensors]

    def encode(self, buffer: int) -> None:
        from ds_zipccl import codecs

        self._frames[buffer] = codecs.compress(
            self._tensors[buffer], self._codec, lossy=True, block=self._block, shaped=False, checksum=False, route=self._route,
            out=self._places[buffer],
        )  # fmt: skip

    def decode(self, buffer: int) -> None:
        from ds_zipccl import codecs

        codecs.decompress(self._frames[buffer], out=self._outs[buffer], route=self._route)

    def coded_bytes(self) -> int:
        return self._frames[0].numel()

    def result(self, buffer: int) -> torch.Tensor:
        return self._outs[buffer]

    def wanted(self, buffer: int) -> torch.Tensor:
        from ds_zipccl import codecs

        return codecs.project(self._tensors[buffer], self._codec, route=self._route)


class NvcompCoder:
    """nvCOMP through its Python interface, which allocates the results."""

    eager = True

    def __init__(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        import torch
        from nvidia import nvcomp

        stream = torch.cuda.current_stream().cuda_stream
        self._codec = nvcomp.Codec(**PEERS[name], cuda_stream=stream)
        self._tensors = tensors
        self._inputs = [nvcomp.as_array(tensor.view(torch.int16)) for tensor in tensors]
        self._coded: list[Any] = [None] * len(tensors)
        self._decoded: list[Any] = [None] * len(tensors)

    def encode(self, buffer: int) -> None:
        self._coded[buffer] = self._codec.encode(self._inputs[buffer])

    def decode(self, buffer: int) -> None:
        self._decoded[buffer] = self._codec.decode(self._coded[buffer])

    def coded_bytes(self) -> int:
        return int(self._coded[0].buffer_size)

    def result(self, buffer: int) -> torch.Tensor:
        import torch

        like = self._tensors[buffer]
        return torch.as_tensor(self._decoded[buffer], device=like.device).view(torch.uint8).view(like.dtype)

    def wanted(self, buffer: int) -> torch.Tensor:
        return self._tensors[buffer]
