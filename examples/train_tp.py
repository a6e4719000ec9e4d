#!/usr/bin/env python3
"""Train a Llama of Hugging Face whose layers DeepSpeed's AutoTP splits over ranks. The model is made from a config: no download.

    pip install transformers
    python examples/train_tp.py --compare                          # two ranks split every layer: same bits plain and coded?
    python examples/train_tp.py --compare --ranks 4                # four ranks do
    python examples/train_tp.py --compare --ranks 4 --tensor 2     # two pairs, each with a model of its own

Everything but the model is that of train_gpt.py, also the options. A layer sums activations over its ranks twice in the forward pass, and
their gradients five times in the backward pass. Each is a message of batch x context x width x 2 bytes: 4 MiB with --size small.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import train_gpt
from gpt import Size
from torch import Tensor, nn

SIZES = {
    "tiny": Size(vocabulary=512, width=128, layers=2, heads=4, context=32, characters=400_000),  # 0.6M parameters
    "small": Size(vocabulary=2048, width=512, layers=2, heads=8, context=128, characters=4_000_000),  # 8M
    "medium": Size(vocabulary=4096, width=1024, layers=4, heads=16, context=256, characters=12_000_000),  # 59M
}


def llama(size: Size) -> nn.Module:
    """A Llama; called with tokens it returns the loss."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise SystemExit(f"this example needs transformers ({error}): pip install transformers") from error
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.width * 11 // 4,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=size.context + 1,
        use_cache=False,
    )

    def forward(self: nn.Module, tokens: Tensor) -> Tensor:
        tokens = tokens[:, :-1]  # a message of a power of two
        return LlamaForCausalLM.forward(self, input_ids=tokens, labels=tokens).loss

    return type("LlamaForCausalLM", (LlamaForCausalLM,), {"forward": forward})(config)  # AutoTP finds layers by names


def split(args: argparse.Namespace, world: int) -> int:
    """Ranks that share one model."""
    size = args.tensor or world
    if world % size or SIZES[args.size].heads % size:
        heads = SIZES[args.size].heads
        raise SystemExit(f"--tensor must divide {world} ranks and {heads} heads of --size {args.size}, got {size}")
    return size


def build(args: argparse.Namespace, world: int) -> tuple[nn.Module, list]:
    """The model, and its parameters."""
    model = llama(SIZES[args.size])
    return model, list(model.parameters())


def configure(config: dict[str, Any], args: argparse.Namespace, world: int) -> dict[str, Any]:
    """The config with the number of ranks that share a model."""
    return config | {"tensor_parallel": config.get("tensor_parallel", {}) | {"autotp_size": split(args, world)}}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensor", type=int, metavar="N", help="ranks that share one model (default: all)")


EXAMPLE = train_gpt.Example(
    script=__file__,
    config="ds_config_tp.json",
    options=options,
    configure=configure,
    about=__doc__ or "",
    sizes=SIZES,
    build=build,
    split=split,
)

if __name__ == "__main__":
    sys.exit(train_gpt.main(EXAMPLE))
