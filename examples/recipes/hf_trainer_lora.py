#!/usr/bin/env python3
"""LoRA on ZeRO-3 with Trainer of Hugging Face and peft. ds_zipccl needs its section in the DeepSpeed config, and no line here.

    pip install transformers accelerate peft
    torchrun --nproc-per-node 2 examples/recipes/hf_trainer_lora.py

The model is tiny and comes from a config, and its text is this file: no download. Replace both.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

HERE = Path(__file__).resolve()
SHAPE = LlamaConfig(
    vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, use_cache=False
)


def main() -> None:
    parser = argparse.ArgumentParser(description="LoRA on ZeRO-3 with Trainer")
    parser.add_argument("--deepspeed", default=str(HERE.with_suffix(".json")), help="DeepSpeed config")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--out", default="out/hf_trainer_lora", help="folder for the adapter")
    parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher; nothing reads it")
    options = parser.parse_args()

    training = TrainingArguments(  # comes before the model, as from_pretrained divides weights under ZeRO-3
        output_dir=options.out,
        deepspeed=options.deepspeed,
        per_device_train_batch_size=4,
        max_steps=options.steps,
        learning_rate=1e-3,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    set_seed(0)
    model = LlamaForCausalLM(SHAPE).bfloat16()  # yours: AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16")
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))

    tokens = torch.tensor(list(HERE.read_bytes()))  # yours: the numbers of a tokenizer
    data = [{"input_ids": row, "labels": row} for row in tokens[: len(tokens) // 64 * 64].view(-1, 64)]
    trainer = Trainer(model=model, args=training, train_dataset=data)
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()  # Python must not end while gloo drops a tensor of the last gather


if __name__ == "__main__":
    main()
