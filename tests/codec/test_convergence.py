"""A coarse net for convergence: a GPT of 0.5M parameters on bytes, with and without lossy sums, from one seed and on the same data.

One process computes the parts of all ranks, and the sum that their collective gives: a part that travels is rounded, the owner of a slice
adds its own part exactly, and what the owner sends is rounded again. Mistakes that cost accuracy are among the runs. A small model says
nothing about large ones: the net only catches codecs that are plainly broken.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import cache

import pytest
import torch
from places import EXAMPLES
from torch import Tensor, nn

from ds_zipccl import codecs
from ds_zipccl.lossy import Int, LossyCodec, Round, TacoFp8

sys.path.insert(0, str(EXAMPLES))

LAYERS, WIDTH, HEADS, CONTEXT = 4, 96, 4, 64
STEPS, BATCH, RATE = 60, 16, 2e-3
#: A run with a codec may lose this part of the loss of the run without one; a mistake must cost more than the second.
HEALTHY, BROKEN = 0.015, 0.03
#: Makes of a rank's part the values that arrive.
Project = Callable[[Tensor], Tensor]

pytestmark = pytest.mark.full(reason="trainings of seconds each")


def by(codec: LossyCodec) -> Project:
    return lambda values: codecs.project(values.contiguous(), codec)


def cast(values: Tensor) -> Tensor:
    """The mistake: FP8 without a scale."""
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).to(values.dtype)


def total(parts: list[Tensor], project: Project) -> Tensor:
    """The sum that all ranks get of their flat parts."""
    slices = [part.tensor_split(len(parts)) for part in parts]
    done = []
    for owner in range(len(parts)):
        found = slices[owner][owner].clone()
        for rank, slice_ in enumerate(slices):
            found += project(slice_[owner]) if rank != owner else 0
        done.append(project(found))
    return torch.cat(done)


class Sum(torch.autograd.Function):
    """The sum of a row-parallel layer: lossy forward, gradients of the parts as they come."""

    @staticmethod
    def forward(ctx: object, project: Project, *parts: Tensor) -> Tensor:
        return total([part.flatten() for part in parts], project).view_as(parts[0])

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, grad, grad


class Share(torch.autograd.Function):
    """The input of a column-parallel layer, once for each rank: the gradients of the ranks are summed, lossily."""

    @staticmethod
    def forward(ctx: object, project: Project, x: Tensor) -> tuple[Tensor, ...]:
        ctx.project = project  # type: ignore[attr-defined]
        return x.clone(), x.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor | None, ...]:
        summed = total([grad.flatten() for grad in grads], ctx.project)  # type: ignore[attr-defined]
        return None, summed.view_as(grads[0])


class Split(nn.Module):
    """A column-parallel layer, a function of each rank's part, and a row-parallel layer, over two ranks."""

    def __init__(self, inner: int, outer: int, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.column = nn.ModuleList(nn.Linear(WIDTH, inner // 2, bias=False) for _ in range(2))
        self.row = nn.ModuleList(nn.Linear(outer // 2, WIDTH, bias=False) for _ in range(2))
        self.between = between

    def forward(self, x: Tensor, project: Project | None) -> Tensor:
        x = self.norm(x)
        given = (x, x) if project is None else Share.apply(project, x)
        parts = [row(self.between(column(one))) for one, column, row in zip(given, self.column, self.row, strict=True)]
        return parts[0] + parts[1] if project is None else Sum.apply(project, *parts)


def attention(qkv: Tensor) -> Tensor:
    """Attention of the heads of one rank."""
    q, k, v = qkv.unflatten(-1, (3, HEADS // 2, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
    mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList()
        for _ in range(LAYERS):
            self.blocks.append(Split(3 * WIDTH, WIDTH, attention))
            self.blocks.append(Split(4 * WIDTH, 4 * WIDTH, nn.functional.gelu))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor, project: Project | None) -> Tensor:
        x = self.words(tokens[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = x + block(x, project)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


@cache
def text() -> Tensor:
    from source_text import read_text

    return torch.frombuffer(bytearray(read_text(None, 300_000).encode()[:300_000]), dtype=torch.uint8).long()


def batch(step: int, count: int) -> Tensor:
    starts = torch.randint(len(text()) - CONTEXT - 1, (count,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text()[at : at + CONTEXT + 1] for at in starts.tolist()])


def trained(tensors: Project | None = None, data: Project | None = None) -> float:
    """Return the loss after the training, on other pieces of the same text.

    Args:
        tensors: for sums of activations, and of their gradients, over two ranks that share the layers; None: exact sums.
        data: for sums of gradients over four ranks that share the sequences; None: exact sums.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    parameters = list(model.parameters())
    for step in range(STEPS):
        tokens = batch(step, BATCH)
        if data is None:
            optimizer.zero_grad()
            model(tokens, tensors).backward()
        else:
            parts = []
            for own in tokens.chunk(4):
                grads = torch.autograd.grad(model(own, None) / 4, parameters)
                parts.append(torch.cat([grad.flatten() for grad in grads]))
            summed = total(parts, data).split([one.numel() for one in parameters])
            for one, grad in zip(parameters, summed, strict=True):
                one.grad = grad.view_as(one)
        optimizer.step()
    with torch.no_grad():
        loss = model(batch(10**6, 128), None).item()
    torch.set_num_threads(threads)
    return loss


@pytest.fixture(scope="module")
def exact() -> float:
    loss = trained()
    assert loss < 2.8, "a model that has learnt nothing proves nothing"
    return loss


def change(loss: float, exact: float) -> float:
    assert math.isfinite(loss)
    return loss / exact - 1


@pytest.mark.parametrize("codec", [Round(3), TacoFp8()], ids=str)
def test_sums_of_activations_by_a_codec_train_as_exact_ones(codec: LossyCodec, exact: float) -> None:
    assert change(trained(tensors=by(codec)), exact) <= HEALTHY


def test_the_net_catches_sums_of_activations_without_a_scale(exact: float) -> None:
    assert change(trained(tensors=cast), exact) >= BROKEN


def test_sums_of_gradients_by_a_codec_train_as_exact_ones(exact: float) -> None:
    assert change(trained(data=by(Int(bits=6))), exact) <= HEALTHY


def test_the_net_catches_sums_of_gradients_without_a_scale(exact: float) -> None:
    assert change(trained(data=cast), exact) >= BROKEN
