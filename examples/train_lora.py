#!/usr/bin/env python3
"""Train LoRA adapters of a Llama under ZeRO-3, with Hugging Face's transformers and peft. The model is made from a config: no download.

    pip install transformers peft
    python examples/train_lora.py --compare               # plain and coded from one seed: same adapters, same merged weights?
    torchrun --nproc-per-node 2 examples/train_lora.py

Everything but the model is that of train_gpt.py, also the options. The adapters are peft's default for a Llama: rank 8, on the projections
of queries and values. Their weights are trained. All other weights are frozen, and ZeRO-3 gathers them in every step all the same.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import warnings
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import train_gpt
from torch import Tensor, nn

try:
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    raise SystemExit(f"this example needs transformers and peft ({error}): pip install transformers peft") from error


@dataclass(frozen=True)
class Size:
    """Shape of the model and of its data."""

    vocabulary: int
    width: int
    feed_forward: int
    layers: int
    context: int  # tokens per sequence
    characters: int  # how much of the text is read


SIZES = {
    "tiny": Size(2048, 256, 704, 2, context=16, characters=400_000),  # 3M parameters, 0.6% of them adapters
    "small": Size(4096, 1024, 2816, 4, context=32, characters=4_000_000),  # 60M, 0.2%
    "medium": Size(8192, 2048, 5632, 4, context=64, characters=4_000_000),  # 239M, 0.1%
}


class Llama(nn.Module):
    """A Llama with adapters; called with tokens it returns the loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        heads = size.width // 64
        config = LlamaConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.width,
            intermediate_size=size.feed_forward,
            num_hidden_layers=size.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=size.context + 1,
            use_cache=False,
        )
        adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
        self.model = get_peft_model(LlamaForCausalLM(config), adapters)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


def build(args: argparse.Namespace, world: int) -> tuple[nn.Module, list]:
    """The model, and the group of its adapters."""
    model = Llama(SIZES[args.size])
    return model, [{"params": [parameter for parameter in model.parameters() if parameter.requires_grad]}]


def hashes(model: nn.Module, zero3: bool) -> dict[str, str]:
    """sha256 of the adapters alone, and of the weights with which the adapters are merged as peft merges them."""
    import deepspeed

    adapters = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    merged = hashlib.sha256()
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            with deepspeed.zero.GatheredParameters(list(layer.parameters())) if zero3 else nullcontext():
                weight = layer.get_base_layer().weight.detach()
                weight = weight + layer.get_delta_weight("default").detach().to(weight.dtype)
            merged.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
            merged.update(weight.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return {"adapters_sha256": train_gpt.parameters_hash(adapters, zero3), "merged_sha256": merged.hexdigest()}


EXAMPLE = train_gpt.Example(
    script=__file__, config="ds_config_lora.json", about=__doc__ or "", sizes=SIZES, build=build, hashes=hashes
)

if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning, module="peft")
    sys.exit(train_gpt.main(EXAMPLE))
