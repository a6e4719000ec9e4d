#!/usr/bin/env python3
"""A model of Hugging Face whose layers DeepSpeed's AutoTP splits over two ranks. ds_zipccl needs its section in the DeepSpeed config.

    pip install transformers
    torchrun --nproc-per-node 2 examples/recipes/autotp.py

Every layer sums activations over its ranks, and those sums are coded. The model is tiny and comes from a config, and its text is this file:
no download.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve()
SHAPE = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4, use_cache=False
)


def main() -> None:
    parser = argparse.ArgumentParser(description="AutoTP on a Llama")
    parser.add_argument("--deepspeed", default=str(HERE.with_suffix(".json")), help="DeepSpeed config")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher; nothing reads it")
    options = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(0)  # ranks that split a model start from the same weights, and see the same text
    model = LlamaForCausalLM(SHAPE)  # yours: AutoModelForCausalLM.from_pretrained(name)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=options.deepspeed)

    text = torch.tensor(list(HERE.read_bytes()))
    source = torch.Generator().manual_seed(0)
    for step in range(options.steps):
        starts = torch.randint(len(text) - 64, (8,), generator=source).tolist()
        tokens = torch.stack([text[start : start + 64] for start in starts]).to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        print(f"rank {dist.get_rank()} step {step} loss {loss.item():.9g}", flush=True)
    dist.barrier()  # Python must not end while gloo drops a tensor of the last collective
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
