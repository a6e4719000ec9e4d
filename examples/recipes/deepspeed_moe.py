#!/usr/bin/env python3
"""A model with DeepSpeed's mixture of experts, whose experts all ranks share out. ds_zipccl needs its section in the DeepSpeed config.

    torchrun --nproc-per-node 2 examples/recipes/deepspeed_moe.py

Rows of tokens go to their experts and come back by all-to-alls, which are coded. The text is this file: no download.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import Tensor, nn

HERE = Path(__file__).resolve()


class Model(nn.Module):
    """Predicts a byte from the byte before. Tokens in: int64 of shape [batch, length]; loss out."""

    def __init__(self, width: int, experts: int, ranks: int) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.words = nn.Embedding(256, width)
        self.experts = MoE(width, expert, num_experts=experts, ep_size=ranks, k=2, capacity_factor=1.25)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens[:, :-1])
        y, balance, _ = self.experts(x)
        loss = F.cross_entropy(self.head(x + y).float().flatten(0, 1), tokens[:, 1:].flatten())
        return loss + 0.01 * balance.float()


def main() -> None:
    parser = argparse.ArgumentParser(description="DeepSpeed-MoE")
    parser.add_argument("--deepspeed", default=str(HERE.with_suffix(".json")), help="DeepSpeed config")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher; nothing reads it")
    options = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = Model(width=128, experts=8, ranks=dist.get_world_size())
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=options.deepspeed)

    text = torch.tensor(list(HERE.read_bytes()))
    source = torch.Generator().manual_seed(dist.get_rank())
    for step in range(options.steps):
        starts = torch.randint(len(text) - 65, (8,), generator=source).tolist()
        tokens = torch.stack([text[start : start + 65] for start in starts])
        loss = engine(tokens.to(engine.device))
        engine.backward(loss)
        engine.step()
        print(f"rank {dist.get_rank()} step {step} loss {loss.item():.9g}", flush=True)
    dist.barrier()  # Python must not end while gloo drops a tensor of the last collective
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
