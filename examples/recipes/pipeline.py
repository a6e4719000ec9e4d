#!/usr/bin/env python3
"""A model whose layers are spread over two stages, by DeepSpeed's PipelineModule. ds_zipccl needs its section in the DeepSpeed config.

    torchrun --nproc-per-node 2 examples/recipes/pipeline.py

Stages send activations on and gradients back, and those messages are coded. The text is this file: no download.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn

HERE = Path(__file__).resolve()
WIDTH = 128


class Layer(nn.Module):
    """A feed-forward layer with a way around it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description="PipelineModule in two stages")
    parser.add_argument("--deepspeed", default=str(HERE.with_suffix(".json")), help="DeepSpeed config")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher; nothing reads it")
    options = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(0)
    layers = [
        LayerSpec(nn.Embedding, 256, WIDTH),
        *(LayerSpec(Layer) for _ in range(4)),
        LayerSpec(nn.Linear, WIDTH, 256),
    ]
    model = PipelineModule(layers, num_stages=2, loss_fn=loss_of)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=options.deepspeed)

    text = torch.tensor(list(HERE.read_bytes()))
    source = torch.Generator().manual_seed(0)

    def batches():
        while True:
            starts = torch.randint(len(text) - 65, (8,), generator=source).tolist()
            tokens = torch.stack([text[start : start + 65] for start in starts])
            yield tokens[:, :-1], tokens[:, 1:]

    stream = batches()
    for step in range(options.steps):
        loss = engine.train_batch(stream)
        print(f"rank {dist.get_rank()} step {step} loss {loss.item():.9g}", flush=True)
    dist.barrier()  # Python must not end while gloo drops a tensor of the last collective
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
