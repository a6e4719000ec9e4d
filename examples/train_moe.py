#!/usr/bin/env python3
"""Train mixtures of experts: DeepSpeed's own, or Mixtral and Qwen3-MoE of Hugging Face by AutoEP, made from a config: no download.

    python examples/train_moe.py --compare --experts 8 --top-k 1 --bias --batch 16   # DeepSpeed-MoE
    pip install transformers
    python examples/train_moe.py --compare --model mixtral --experts 8 --top-k 2
    python examples/train_moe.py --compare --model qwen3 --experts 32 --top-k 4 --ranks 4

Everything but the models is that of train_gpt.py, also the options. A rank has many tokens beside few parameters that are not of
experts, as in large mixtures of experts: most bytes are those of all-to-alls. Experts are the smaller, the more of them a token has.
"""

from __future__ import annotations

import argparse
import math
import sys

import train_gpt
from gpt import Size
from torch import Tensor, nn

SIZES = {
    "tiny": Size(vocabulary=512, width=128, layers=2, heads=2, context=64, characters=400_000),
    "small": Size(vocabulary=512, width=256, layers=3, heads=4, context=128, characters=4_000_000),
    "medium": Size(vocabulary=4096, width=512, layers=6, heads=8, context=256, characters=12_000_000),
}
#: --model -> names of its classes in transformers, and of the config's field for the number of experts and their width
FAMILIES = {
    "mixtral": ("Mixtral", "num_local_experts", "intermediate_size"),
    "qwen3": ("Qwen3Moe", "num_experts", "moe_intermediate_size"),
}


def hugging_face(size: Size, family: str, experts: int, top_k: int) -> nn.Module:
    """A causal language model of transformers; called with tokens it returns the loss, without one for balanced experts."""
    try:
        import transformers
    except ImportError as error:
        raise SystemExit(f"--model {family} needs transformers ({error}): pip install transformers") from error
    prefix, number, width = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        head_dim=size.width // size.heads,
        max_position_embeddings=size.context + 1,
        num_experts_per_tok=top_k,
        use_cache=False,
        **{number: experts, width: math.ceil(size.width * 16 / 3 / top_k / 32) * 32},
    )
    base = getattr(transformers, f"{prefix}ForCausalLM")

    def forward(self: nn.Module, tokens: Tensor) -> Tensor:
        tokens = tokens[:, :-1]  # as many as the other models see
        return base.forward(self, input_ids=tokens, labels=tokens).loss

    model = type(base.__name__, (base,), {"forward": forward})(config)  # AutoEP finds layers by names from the model on
    for module in model.modules():
        if hasattr(module, "_can_record_outputs"):
            module._can_record_outputs = {}  # of routers: AutoEP of DeepSpeed 0.19 would fail at those of transformers 5.23
    return model


def build(args: argparse.Namespace, world: int) -> tuple[nn.Module, list]:
    """The model, and groups of its trained parameters."""
    size = SIZES[args.size]
    if args.model == "native":
        return train_gpt.build_gpt(args, world, size)
    model = hugging_face(size, args.model, args.experts, args.top_k)
    return model, list(model.parameters())


def configure(config: dict, args: argparse.Namespace, world: int) -> dict:
    """The config with a section for AutoEP where the model is one of Hugging Face."""
    if args.model == "native":
        return config
    spread = args.spread or math.gcd(args.experts, world)
    preset = {"mixtral": "mixtral", "qwen3": "qwen3_moe"}[args.model]
    return config | {"expert_parallel": {"enabled": True, "autoep_size": spread, "preset_model": preset}}


def options(parser: argparse.ArgumentParser) -> None:
    """Add --model, and change the defaults of experts."""
    models = ("native", *FAMILIES)
    parser.add_argument("--model", choices=models, default="native", help="native: DeepSpeed-MoE (default: native)")
    parser.set_defaults(experts=8, top_k=2)


EXAMPLE = train_gpt.Example(
    script=__file__,
    config="ds_config_moe.json",
    options=options,
    configure=configure,
    about=__doc__ or "",
    sizes=SIZES,
    build=build,
)

if __name__ == "__main__":
    sys.exit(train_gpt.main(EXAMPLE))
