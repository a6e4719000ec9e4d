#!/usr/bin/env python3
"""Train a GPT whose layers are spread over stages, with DeepSpeed's PipelineModule. First and last stage share one embedding.

    python examples/train_pipeline.py --compare                                        # two stages: same bits plain and coded?
    python examples/train_pipeline.py --compare --ranks 4                              # two stages, each on two ranks
    python examples/train_pipeline.py --ranks 4 --stages 4 --size tiny --accumulation 8

Everything but the model is that of train_gpt.py, also the options. --accumulation is the number of micro-batches of a step. A stage sends
a message of batch x context x width values to the next stage for each micro-batch, and gets a gradient of the same size back.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.nn.functional as F
import train_gpt
from gpt import ON_GPU, Block, Size
from torch import Tensor, nn

SIZES = {
    "tiny": Size(vocabulary=512, width=64, layers=4, heads=2, context=32, characters=400_000),  # 0.3M parameters
    "small": Size(vocabulary=4096, width=256, layers=4, heads=4, context=128, characters=4_000_000),  # 4M
    "medium": Size(vocabulary=16384, width=512, layers=8, heads=8, context=256, characters=12_000_000),  # 35M
    "wide": Size(vocabulary=1024, width=512, layers=4, heads=8, context=64, characters=400_000),  # 13M, large messages
    "words": Size(vocabulary=16384, width=256, layers=4, heads=4, context=64, characters=4_000_000),  # 7M, 4M in words
}


class Words(nn.Embedding):
    """Vectors of words. The first stage looks them up, the last one compares with them."""

    def __init__(self, size: Size) -> None:
        super().__init__(size.vocabulary, size.width)
        nn.init.normal_(self.weight, std=0.02)


class Places(nn.Embedding):
    def __init__(self, size: Size) -> None:
        super().__init__(size.context, size.width)
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(torch.arange(x.shape[1], device=x.device))


class Layer(Block):
    """A transformer layer without experts."""

    def __init__(self, size: Size) -> None:
        super().__init__(size, None)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


def logits(words: Words, x: Tensor) -> Tensor:
    compute = x.dtype if ON_GPU else torch.float32
    return F.linear(x.to(compute), words.weight.to(compute))


def loss(values: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(values.float().flatten(0, 1), targets.flatten())


def split(args: argparse.Namespace, world: int) -> int:
    """Stages of a model."""
    layers = SIZES[args.size].layers
    if world % args.stages or layers % args.stages:
        raise SystemExit(
            f"--stages must divide {world} ranks and {layers} layers of --size {args.size}, got {args.stages}"
        )
    return args.stages


def seed(number: int) -> None:
    torch.manual_seed(int(number))  # DeepSpeed counts layers in NumPy's integers


def build(args: argparse.Namespace, world: int) -> tuple[nn.Module, list]:
    """The stage of this rank, and its parameters. Each layer starts from a seed of its own, whatever its stage."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    size = SIZES[args.size]
    layers = [
        TiedLayerSpec("words", Words, size),
        LayerSpec(Places, size),
        *(LayerSpec(Layer, size) for _ in range(size.layers)),
        LayerSpec(nn.RMSNorm, size.width),
        TiedLayerSpec("words", Words, size, forward_fn=logits),
    ]
    model = PipelineModule(
        layers,
        split(args, world),
        loss_fn=loss,
        partition_method="type:Layer",  # as many transformer layers on each stage
        seed_layers=True,
        seed_fn=seed,
        base_seed=1000 * args.seed,
    )
    return model, [parameter for parameter in model.parameters() if parameter.requires_grad]


def step(engine: nn.Module, batches: train_gpt.Batches) -> Tensor:
    """All micro-batches of a step; returns their mean loss, on every stage."""
    return engine.train_batch((tokens[:, :-1], tokens[:, 1:]) for tokens in batches)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stages", type=int, default=2, metavar="N", help="stages of the model (default: 2)")


EXAMPLE = train_gpt.Example(
    script=__file__,
    config="ds_config_pipeline.json",
    options=options,
    about=__doc__ or "",
    sizes=SIZES,
    build=build,
    split=split,
    neighbours=False,
    shared=lambda name: name.startswith("tied_modules."),
    step=step,
)

if __name__ == "__main__":
    sys.exit(train_gpt.main(EXAMPLE))
