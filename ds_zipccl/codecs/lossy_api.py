"""The values that a lossy frame carries, without the frame."""

from __future__ import annotations

import torch

from ds_zipccl import tensors
from ds_zipccl.codecs import memory
from ds_zipccl.codecs.registry import spec_for
from ds_zipccl.lossy import LossyCodec


def project(
    tensor: torch.Tensor, codec: LossyCodec, *, out: torch.Tensor | None = None, route: str = "auto"
) -> torch.Tensor:
    """The values that a frame of ``tensor`` by ``codec`` decodes to, bit for bit; blocks.

    Args:
        tensor: bfloat16, float16 or float32, of any shape; a non-contiguous tensor is copied first.
        codec: the lossy codec; a scaled one takes the tensor's first element as the first of a group.
        out: contiguous tensor of the dtype, shape and device of ``tensor``: ``tensor`` itself, or apart from it.
        route: kernels to use, see :data:`ds_zipccl.kernels.ROUTES`.

    Returns:
        ``out``, or a new tensor of the dtype and shape of ``tensor``.

    Raises:
        ValueError, TypeError: as :func:`ds_zipccl.compress`; ValueError also for an ``out`` of another kind, or one that overlaps a part of
            ``tensor``.
        RuntimeError: as :func:`ds_zipccl.decompress`.
        RouteUnavailable: no kernels of the codec here.
    """
    with tensors.undisturbed():
        memory.admit("tensor", tensor)
        spec = spec_for(codec, tensor.dtype)
        words = memory.flatten(tensor)
        if out is None:
            flat = tensors.empty(words.numel(), words.dtype, words.device)
            spec.project(words, flat, route)
            return flat.view(tensor.shape)
        memory.admit("out", out)
        kind = (tensor.dtype, tensor.shape, tensor.device)
        if (out.dtype, out.shape, out.device) != kind or not out.is_contiguous():
            raise ValueError(
                f"out must be a contiguous tensor of {tensor.dtype} and shape {tuple(tensor.shape)} on {tensor.device}, "
                f"got {out.dtype} of shape {tuple(out.shape)} with strides {out.stride()} on {out.device}"
            )
        flat = memory.flat_view(out)
        if flat.data_ptr() != words.data_ptr():
            memory.keep_apart([memory.span(flat)], [memory.span(words)])
        memory.note_write(out)
        spec.project(words, flat, route)
        return out
