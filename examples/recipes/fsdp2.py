#!/usr/bin/env python3
"""LoRA or full fine-tuning with FSDP2 of PyTorch. One line is for ds_zipccl: ``fsdp.apply(model)``. DeepSpeed is not needed.

    torchrun --nproc-per-node 2 examples/recipes/fsdp2.py --lora

The model is tiny and made in place, and its text is this file: no download. Replace both.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ds_zipccl import fsdp

WIDTH, CONTEXT, BATCH = 256, 64, 2


class LoRA(nn.Module):
    """A frozen linear layer with a trained product of rank 8; peft's layers do as well."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, 8, bias=False), nn.Linear(8, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def main() -> None:
    parser = argparse.ArgumentParser(description="FSDP2 with compressed communication")
    parser.add_argument("--lora", action="store_true", help="train adapters on frozen weights")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--out", default="", help="file for the weights")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(256, WIDTH), *blocks, nn.Linear(WIDTH, 256))
    if options.lora:
        model.requires_grad_(False)
        for block in blocks:
            block[0], block[2] = LoRA(block[0]), LoRA(block[2])

    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    fsdp.apply(model, {} if options.lora else {"zero3_base": "host"})

    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=2e-5)
    tokens = torch.tensor(list(Path(__file__).read_bytes()), device=device)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(options.steps):
        starts = torch.randint(len(tokens) - CONTEXT - 1, (BATCH,), generator=generator).tolist()
        rows = torch.stack([tokens[at : at + CONTEXT + 1] for at in starts])
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.9g}", flush=True)

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if options.out and dist.get_rank() == 0:
        torch.save(weights, options.out)
    dist.barrier()  # Python must not end while gloo drops a tensor of the last collective
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
