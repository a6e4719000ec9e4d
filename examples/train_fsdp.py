#!/usr/bin/env python3
"""Train a small GPT, or LoRA adapters of a Llama, with PyTorch's FSDP2 in place of DeepSpeed.

    python examples/train_fsdp.py --compare               # plain and coded from one seed: same bits?
    python examples/train_fsdp.py --adapters --compare    # needs pip install transformers peft
    torchrun --nproc-per-node 2 examples/train_fsdp.py

Everything but the engine is that of train_gpt.py, also the options, and DeepSpeed is needed for them alone. A config has those keys of
DeepSpeed's that mean something here: batch, accumulation, clipping, AdamW; and the section of ds_zipccl, which fsdp.apply takes.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import train_gpt
from comm_time import CommTime
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ds_zipccl import fsdp


class Timed:
    """A collective of FSDP2 on a stopwatch."""

    def __init__(self, own: Any, clock: CommTime, role: str) -> None:
        self.allocate, self._call = own.allocate, clock.timed(own, role=role)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


class Engine:
    """A model of FSDP2, in the dtypes of a mixed precision in bf16, with the methods of DeepSpeed's engine that train_gpt.py calls."""

    def __init__(self, model: nn.Module, groups: list, config: dict, clock: CommTime) -> None:
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
        for layer in layers:
            fully_shard(layer, mp_policy=precision)
        self.module, self.config = fsdp.apply(fully_shard(model, mp_policy=precision), config["zipccl"]), config
        self.device = next(model.parameters()).device
        # fully_shard has replaced the parameters of the groups
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, **config["optimizer"]["params"])
        self._micro = 0
        for module in model.modules():
            if isinstance(module, FSDPModule):
                torchs = module._get_fsdp_state()._fsdp_param_group
                module.set_custom_all_gather(Timed(torchs._all_gather_comm, clock, "zero_param"))
                module.set_custom_reduce_scatter(Timed(torchs._reduce_scatter_comm, clock, "zero_grad"))

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.config["train_micro_batch_size_per_gpu"]

    def gradient_accumulation_steps(self) -> int:
        return self.config["gradient_accumulation_steps"]

    def zero_optimization_stage(self) -> int:
        return 0  # of DeepSpeed

    def __call__(self, tokens: Tensor) -> Tensor:
        self._micro += 1
        self.module.set_requires_gradient_sync(self._micro % self.gradient_accumulation_steps() == 0)
        return self.module(tokens)

    def backward(self, loss: Tensor) -> None:
        (loss / self.gradient_accumulation_steps()).backward()

    def step(self) -> None:
        if self._micro % self.gradient_accumulation_steps() == 0:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.config["gradient_clipping"])
            self._optimizer.step()
            self._optimizer.zero_grad()


def join(args: argparse.Namespace, clock: CommTime) -> None:
    dist.init_process_group(args.backend or ("nccl" if train_gpt.ON_GPU else "gloo"))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--adapters", action="store_true", help="LoRA adapters of a Llama in place of the GPT")


EXAMPLE = train_gpt.Example(
    script=__file__, config="ds_config_fsdp.json", about=__doc__ or "", options=options, join=join, start=Engine
)


def example() -> train_gpt.Example:
    """The training that the command line asks for."""
    if "--adapters" not in sys.argv:
        return EXAMPLE
    import train_lora

    return replace(EXAMPLE, config="ds_config_fsdp_lora.json", sizes=train_lora.SIZES, build=train_lora.build)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning, module="peft")
    sys.exit(train_gpt.main(example()))
