"""The GPT of train_gpt.py, with or without DeepSpeed's mixture of experts."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ON_GPU = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR", "cuda") == "cuda"


@dataclass(frozen=True)
class Size:
    """Shape of the model and of its data."""

    vocabulary: int  # commonest words and symbols; the rest is one "unknown" token
    width: int
    layers: int
    heads: int
    context: int  # tokens per sequence
    characters: int  # how much of the text is read


SIZES = {
    "tiny": Size(vocabulary=2048, width=128, layers=2, heads=2, context=32, characters=400_000),  # 1M parameters
    "small": Size(vocabulary=8192, width=320, layers=5, heads=5, context=64, characters=4_000_000),  # 11M
    "medium": Size(vocabulary=16384, width=512, layers=12, heads=8, context=256, characters=12_000_000),  # 54M
}


class Linear(nn.Linear):
    """Everything kept or sent is bf16; products on a CPU are fp32, which is far faster there."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias)
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        compute = x.dtype if ON_GPU else torch.float32
        bias = None if self.bias is None else self.bias.to(compute)
        return F.linear(x.to(compute), self.weight.to(compute), bias).to(x.dtype)


class SwiGLU(nn.Module):
    def __init__(self, width: int, bias: bool = False) -> None:
        super().__init__()
        hidden = math.ceil(width * 8 / 3 / 64) * 64
        self.gate, self.up = Linear(width, hidden, bias), Linear(width, hidden, bias)
        self.down = Linear(hidden, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = Linear(width, 3 * width), Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        compute = x.dtype if ON_GPU else torch.float32
        qkv = self.qkv(x).to(compute).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width).to(x.dtype))


@dataclass(frozen=True)
class Experts:
    """The experts of a layer: number, experts of a token, ranks that share out one set of them, and whether they have biases."""

    number: int
    top_k: int
    spread: int
    bias: bool


class Block(nn.Module):
    """One transformer layer; with experts its feed-forward part is DeepSpeed's mixture of experts."""

    def __init__(self, size: Size, experts: Experts | None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.attention = Attention(size.width, size.heads)
        self.feed_forward: nn.Module = SwiGLU(size.width, experts is not None and experts.bias)
        if experts:
            from deepspeed.moe.layer import MoE

            one = self.feed_forward
            self.feed_forward = MoE(
                size.width, one, experts.number, experts.spread, experts.top_k, capacity_factor=1.25
            )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.norm1(x))
        y = self.feed_forward(self.norm2(x))
        y, balance = (y[0], y[1]) if isinstance(y, tuple) else (y, x.new_zeros(()))
        return x + y, balance


class GPT(nn.Module):
    """Decoder-only transformer; called with tokens it returns the loss."""

    def __init__(self, size: Size, experts: Experts | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.context, size.width)
        nn.init.normal_(self.words.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(size, experts) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = Linear(size.width, size.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.words(inputs) + self.places(torch.arange(inputs.shape[1], device=tokens.device))
        balance = x.new_zeros(())
        for block in self.blocks:
            x, extra = block(x)
            balance = balance + extra
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()) + 0.01 * balance.float()
