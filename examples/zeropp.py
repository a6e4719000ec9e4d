"""DeepSpeed's ZeRO++ on CPUs: torch versions of its CUDA quantization kernels, for ``train_gpt.py --zeropp``.

DeepSpeed's own code runs around them: which tensors are quantized, in which groups, and what is sent. The kernels follow DeepSpeed's
``csrc/quantization`` with symmetric quantization: ``round(value x 2^bits / (2 x largest))`` of a group, and an fp32 scale for each group.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor


class Quantizer:
    """What ``QuantizerBuilder().load()`` returns. Values of 4 bits lie in pairs, the low one first."""

    Symmetric = 0

    def quantize(self, values: Tensor, groups: int, bits: int, kind: int) -> tuple[Tensor, Tensor]:
        """int8 ``[..., n]`` (8 bits) or ``[..., n / 2]`` (4 bits) for ``values`` of ``[..., n]``, and scales ``[groups]``."""
        grouped = values.float().view(groups, -1)
        largest = grouped.abs().amax(1, keepdim=True)
        scale = torch.where(largest == 0, torch.ones_like(largest), (1 << bits) / (2 * largest))
        half = 1 << (bits - 1)
        whole = (grouped * scale).round().clamp(-half, half - 1).to(torch.int8)
        if bits == 4:
            pairs = whole.view(groups, -1, 2)
            whole = (pairs[..., 0] & 15) | (pairs[..., 1] << 4)
        shape = [*values.shape[:-1], values.shape[-1] * bits // 8]
        return whole.reshape(shape), (1 / scale).view(-1)  # flat: gloo wants one shape in a gather

    def dequantize(self, quantized: Tensor, scales: Tensor, groups: int, bits: int, kind: int) -> Tensor:
        """fp16 values, of the shape that :meth:`quantize` took."""
        whole = quantized.view(groups, -1)
        if bits == 4:
            low = (whole << 4) >> 4  # of int8: the sign comes back
            whole = torch.stack([low, whole >> 4], -1).view(groups, -1)
        values = (whole.float() * scales.view(groups, 1)).half()
        return values.reshape([*quantized.shape[:-1], quantized.shape[-1] * 8 // bits])

    def swizzle_quant(
        self, values: Tensor, groups: int, bits: int, kind: int, pipelining: int, nodes: int, devices: int
    ) -> tuple[Tensor, Tensor]:
        """:meth:`quantize` of flat ``values``, whose part for rank ``node * devices + device`` comes to ``device * nodes + node``."""
        parts = values.reshape(nodes, devices, -1).transpose(0, 1)
        return self.quantize(parts.reshape(-1), groups, bits, kind)

    def quantized_reduction(
        self, quantized: Tensor, scales: Tensor, groups: int, groups_out: int, bits: int, kind: int, devices: int
    ) -> tuple[Tensor, Tensor]:
        """The sum of the parts of ``devices`` ranks, quantized again in ``groups_out`` groups."""
        values = self.dequantize(quantized, scales, groups, bits, kind).view(devices, -1)
        return self.quantize(values.sum(0), groups_out, bits, kind)


class QuantizerBuilder:
    """Stands for DeepSpeed's builder, which refuses CPUs."""

    def load(self, verbose: bool = True) -> Quantizer:
        return Quantizer()


def on(config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config`` with ZeRO++; on CPUs its kernels become those of torch. A node has ``LOCAL_WORLD_SIZE`` ranks."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if get_accelerator().device_name() == "cpu":
        os.environ["LOCAL_SIZE"] = local  # DeepSpeed's number of devices of a node; NUMA nodes otherwise
        deepspeed.ops.op_builder.QuantizerBuilder = QuantizerBuilder
    more = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": int(local)}
    return config | {"zero_optimization": config["zero_optimization"] | more}
