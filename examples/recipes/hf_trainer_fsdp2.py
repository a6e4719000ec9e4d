#!/usr/bin/env python3
"""LoRA on FSDP2 with Trainer of Hugging Face and peft. The callback is for ds_zipccl. Trainer shards by Accelerate, on GPUs alone.

    pip install transformers accelerate peft
    torchrun --nproc-per-node 2 examples/recipes/hf_trainer_fsdp2.py

The model is tiny and comes from a config, and its text is this file: no download. Replace both.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from ds_zipccl import fsdp

HERE = Path(__file__).resolve()
SHAPE = LlamaConfig(
    vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, use_cache=False
)


class Compressed(TrainerCallback):
    """Trainer shards the model before the first step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        fsdp.apply(model)


def main() -> None:
    parser = argparse.ArgumentParser(description="LoRA on FSDP2 with Trainer")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--out", default="out/hf_trainer_fsdp2", help="folder for the adapter")
    options = parser.parse_args()

    training = TrainingArguments(
        output_dir=options.out,
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        per_device_train_batch_size=4,
        max_steps=options.steps,
        learning_rate=1e-3,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    set_seed(0)
    model = LlamaForCausalLM(SHAPE)  # yours: AutoModelForCausalLM.from_pretrained(name)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))

    tokens = torch.tensor(list(HERE.read_bytes()))  # yours: the numbers of a tokenizer
    data = [{"input_ids": row, "labels": row} for row in tokens[: len(tokens) // 64 * 64].view(-1, 64)]
    trainer = Trainer(model=model, args=training, train_dataset=data, callbacks=[Compressed()])
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()  # Python must not end while gloo drops a tensor of the last gather


if __name__ == "__main__":
    main()
