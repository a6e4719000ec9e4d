#!/usr/bin/env python3
"""Full fine-tuning on FSDP2 with Accelerate. One line is for ds_zipccl: ``fsdp.apply(model)``. Accelerate shards on GPUs alone.

    pip install transformers accelerate
    accelerate launch --config_file examples/recipes/accelerate_fsdp2.yaml examples/recipes/accelerate_fsdp2.py

The model is tiny and comes from a config, and its text is this file: no download. Replace both.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from ds_zipccl import fsdp

SHAPE = LlamaConfig(
    vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, use_cache=False
)


def main() -> None:
    parser = argparse.ArgumentParser(description="full fine-tuning on FSDP2 with Accelerate")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps")
    parser.add_argument("--out", default="out/accelerate_fsdp2", help="folder for the model")
    options = parser.parse_args()

    accelerator = Accelerator()  # accelerate launch names the settings of FSDP2
    set_seed(0)
    model = LlamaForCausalLM(SHAPE)  # yours: AutoModelForCausalLM.from_pretrained(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)

    tokens = torch.tensor(list(Path(__file__).read_bytes()))  # yours: the numbers of a tokenizer
    data = [{"input_ids": row, "labels": row} for row in tokens[: len(tokens) // 64 * 64].view(-1, 64)]
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2, shuffle=True))
    fsdp.apply(model, {"zero3_base": "host"})

    model.train()
    for batch in islice(loader, options.steps):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"loss {loss.item():.9g}")

    weights = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        options.out, is_main_process=accelerator.is_main_process, state_dict=weights
    )
    accelerator.wait_for_everyone()  # Python must not end while gloo drops a tensor of the last gather
    accelerator.end_training()


if __name__ == "__main__":
    main()
