#!/usr/bin/env python3
"""LoRA on ZeRO-3 with SFTTrainer or DPOTrainer of TRL. ds_zipccl needs its section in the DeepSpeed config, and no line here.

    pip install trl peft
    torchrun --nproc-per-node 2 examples/recipes/trl_lora.py
    torchrun --nproc-per-node 2 examples/recipes/trl_lora.py --dpo

Model and tokenizer are tiny and made in place, and the text is this file: no download. Replace all three.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

HERE = Path(__file__).resolve()
SHAPE = LlamaConfig(
    vocab_size=264, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, use_cache=False
)


def tokenizer_of_bytes() -> PreTrainedTokenizerFast:
    """A token per byte, and one that ends a text and fills batches."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


def main() -> None:
    parser = argparse.ArgumentParser(description="LoRA on ZeRO-3 with TRL")
    parser.add_argument("--dpo", action="store_true", help="DPOTrainer, not SFTTrainer")
    parser.add_argument("--full", action="store_true", help="train all weights; DPO then refers to a second model")
    parser.add_argument("--deepspeed", default=str(HERE.with_name("hf_trainer_lora.json")), help="DeepSpeed config")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--out", default="out/trl_lora", help="folder for the adapter")
    parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher; nothing reads it")
    options = parser.parse_args()

    training = (DPOConfig if options.dpo else SFTConfig)(  # comes before the model, as with Trainer
        output_dir=options.out,
        deepspeed=options.deepspeed,
        per_device_train_batch_size=4,
        max_steps=options.steps,
        learning_rate=1e-3,
        max_length=128,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )

    def llama() -> LlamaForCausalLM:
        set_seed(0)
        return LlamaForCausalLM(SHAPE).bfloat16()  # yours: AutoModelForCausalLM.from_pretrained(name)

    lines = [line for line in HERE.read_text().splitlines() if line]  # yours: a data set of the hub
    given = dict(
        model=llama(),
        args=training,
        processing_class=tokenizer_of_bytes(),  # yours: AutoTokenizer.from_pretrained(name)
        peft_config=None if options.full else LoraConfig(r=8, target_modules=["q_proj", "v_proj"]),
    )
    if options.dpo:
        pairs = [{"prompt": f"{line}\n", "chosen": after, "rejected": line} for line, after in pairwise(lines)]
        reference = llama() if options.full else None  # LoRA refers to the model without its adapter
        trainer = DPOTrainer(train_dataset=Dataset.from_list(pairs), ref_model=reference, **given)
    else:
        trainer = SFTTrainer(train_dataset=Dataset.from_list([{"text": line} for line in lines]), **given)
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()  # Python must not end while gloo drops a tensor of the last gather


if __name__ == "__main__":
    main()
