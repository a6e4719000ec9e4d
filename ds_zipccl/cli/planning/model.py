"""The parameters of a model, and those that its adapter trains, from the JSON files that transformers and peft write beside weights."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ds_zipccl.cli.planning.operations import DEFAULTS
from ds_zipccl.cli.planning.user_job import Reader
from ds_zipccl.tools import ToolError, tables

FILE, ADAPTER = "config.json", "adapter_config.json"
#: Limits, for files of strangers: layers of a model, and the time in which a regular expression has to match.
MOST_LAYERS, MATCH_SECONDS = 100_000, 30
#: Keys of an adapter whose effect on its size is not known here; "bias" is another one.
_OPEN = ("exclude_modules", "layers_to_transform", "lora_bias", "rank_pattern", "target_parameters", "modules_to_save")
_EXPERT = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
#: Name in a layer -> inputs, outputs and whether there are biases, of a linear layer.
Linears = dict[str, tuple[int, int, bool]]


@dataclass(frozen=True)
class Model:
    """A decoder with ``layers`` named ``prefix`` and a number. ``norms``: parameters of the norms of a layer; ``rest``: those outside of
    layers, embedding and output layer. ``experts``: number in a layer, used by a token, parameters of one; ``sparse``: layers that have
    them in place of ``mlp``."""

    kind: str
    layers: int
    hidden: int
    vocabulary: int
    prefix: str
    attention: Linears
    mlp: Linears
    norms: int
    rest: int
    tied: bool
    experts: tuple[int, int, int] = (0, 0, 0)
    sparse: Collection[int] = ()

    @property
    def routed(self) -> int:
        """Parameters of all experts."""
        return len(self.sparse) * self.experts[0] * self.experts[2]

    @property
    def params(self) -> int:
        """All parameters."""
        linears = [*self.attention.values()] * self.layers + [*self.mlp.values()] * (self.layers - len(self.sparse))
        routed = self.routed + len(self.sparse) * self.experts[0] * self.hidden
        outer = self.hidden * self.vocabulary * (1 if self.tied else 2) + self.rest
        return sum(out * (into + bias) for into, out, bias in linears) + self.layers * self.norms + routed + outer

    @property
    def active(self) -> int:
        """Parameters with which a token is computed."""
        number, used, each = self.experts
        return self.params - len(self.sparse) * (number - used) * each

    def sizes(self) -> dict[str, tuple[int, int] | None]:
        """Full name of each linear layer -> inputs and outputs; None for experts, whose modules depend on the release of transformers."""
        found: dict[str, tuple[int, int] | None] = {}
        for layer in range(self.layers):
            own = self.attention if layer in self.sparse else self.attention | self.mlp
            found |= {f"{self.prefix}.{layer}.{name}": size[:2] for name, size in own.items()}
            experts = _EXPERT if layer in self.sparse else ()
            found |= {f"{self.prefix}.{layer}.mlp.experts.0.{name}": None for name in experts}
        return found

    def __str__(self) -> str:
        experts = f", {self.experts[0]} experts, {self.active:.4g} active" if self.sparse else ""
        return f"{self.kind}, {self.layers} layers of width {self.hidden:,}, {self.params:.4g} parameters{experts}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options for the size of a model."""
    option, number = parser.add_argument, tables.count(1e15)
    option("--params", type=number, metavar="P", help="parameters of the model, such as 70e9")
    option("--trainable", type=number, metavar="P", help="parameters that are trained, such as 20e6 with LoRA (all)")
    about = f"in place of --params: {FILE} of transformers, or its folder; for {', '.join(FAMILIES)}"
    option("--model", metavar="FILE", help=about)
    about = f"in place of --trainable: {ADAPTER} of peft, or its folder (full fine-tuning)"
    option("--adapter", metavar="FILE", help=about)


def fill(args: argparse.Namespace, **known: Any) -> argparse.Namespace:
    """Return ``args`` with the parameters of the files of the model, and with ``known`` values, else :data:`DEFAULTS`, where the command
    line has none. ``about``: a line about the model, "" without a file. ``active``: parameters with which a token is computed. ``moe``: the
    model if ranks share its experts out, else None.

    Raises:
        ToolError: a file cannot be read, or does not tell the parameters; or more are trained than there are.
    """
    if args.adapter and not args.model:
        raise ToolError("--adapter adds to a model: name --model too, or --trainable in place of --adapter")
    known = DEFAULTS | known | {"about": "", "active": args.params}
    if args.model:
        model, beside = read(args.model), _file(args.model, FILE).with_name(ADAPTER)
        trained, said = adapter(args.adapter, model) if args.adapter and args.trainable is None else (None, "")
        if not (args.adapter or args.trainable) and beside.is_file():
            said = f"; all are trained: for LoRA add --adapter {beside}"
        known |= {"about": f"{model}{said}", "trainable": trained}
        if args.params is None:  # adapters come on top of the model
            known |= {"params": model.params + (trained or 0), "active": model.active + (trained or 0)}
            known |= {"moe": model if model.sparse else None}
    given = {key: value for key, value in vars(args).items() if value is not None}
    found = argparse.Namespace(**vars(args) | known | given)
    if (moe := found.moe) is not None:
        shared, found.moe = found.expert_parallel, moe if found.expert_parallel > 1 else None
        found.about += f"; {'all' if shared == 1 else moe.experts[0] // shared} experts on every rank"
    if found.trainable is not None and found.trainable > (found.params or 0):
        got = f"{found.trainable:,} of {found.params or 0:,}"
        raise ToolError(f"--trainable is a part of --params or --model: wanted is at most that, got {got}")
    return found


def _file(path: str, name: str) -> Path:
    return Path(path) / name if Path(path).is_dir() else Path(path)


def read(path: str) -> Model:
    """Return the model of the file or folder at ``path``.

    Raises:
        ToolError: the file cannot be read, is of no known family, or lacks a key.
    """
    file, remedy = str(_file(path, FILE)), "give --params in place of --model"
    content = tables.read_json(file, "the config of the model ")
    kind = content.get("model_type")
    if kind not in FAMILIES:
        raise ToolError(f'{file}: "model_type" is {kind!r}, known are {", ".join(FAMILIES)}; {remedy}')
    whole = partial(Reader(file, [], remedy).whole, content)
    if (layers := whole("n_layer" if kind == "gpt2" else "num_hidden_layers")) > MOST_LAYERS:
        raise ToolError(f"{file}: got {layers:,} layers, at most {MOST_LAYERS:,} are planned for; {remedy}")
    return FAMILIES[kind](kind, content, whole)


def _gated(kind: str, content: Mapping[str, Any], whole: Callable[..., int]) -> Model:
    """Llama and its descendants."""
    hidden, heads, layers = map(whole, ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    wide = whole("intermediate_size")
    head = whole("head_dim", 128 if kind == "qwen3" else hidden // heads)
    grouped = head * whole("num_key_value_heads", heads if kind == "llama" else None)
    biased = kind in ("llama", "qwen3", "qwen3_moe") and content.get("attention_bias") is True
    widths = {"q_proj": heads * head, "k_proj": grouped, "v_proj": grouped}
    attention = {f"self_attn.{name}": (hidden, out, biased or kind == "qwen2") for name, out in widths.items()}
    attention["self_attn.o_proj"] = heads * head, hidden, biased
    bias = kind == "llama" and content.get("mlp_bias") is True
    mlp = {"mlp.gate_proj": (hidden, wide, bias), "mlp.up_proj": (hidden, wide, bias)}
    mlp["mlp.down_proj"] = wide, hidden, bias
    experts, sparse = (0, 0, 0), list(range(layers))
    if kind == "mixtral":
        experts = whole("num_local_experts"), whole("num_experts_per_tok"), 3 * hidden * wide
    elif kind == "qwen3_moe":
        experts = whole("num_experts"), whole("num_experts_per_tok"), 3 * hidden * whole("moe_intermediate_size")
        dense, every = content.get("mlp_only_layers") or (), whole("decoder_sparse_step", 1)
        sparse = [layer for layer in sparse if layer not in dense and not (layer + 1) % every]
    norms = 2 * hidden + (2 * head if kind.startswith("qwen3") else 0)
    rest, tied = hidden, content.get("tie_word_embeddings") is True
    outer = (norms, rest, tied, experts, sparse if experts[0] else ())
    return Model(kind, layers, hidden, whole("vocab_size"), "model.layers", attention, mlp, *outer)


def _gpt2(kind: str, content: Mapping[str, Any], whole: Callable[..., int]) -> Model:
    hidden = whole("n_embd")
    wide, rest = whole("n_inner", 4 * hidden), hidden * (2 + whole("n_positions"))
    attention = {"attn.c_attn": (hidden, 3 * hidden, True), "attn.c_proj": (hidden, hidden, True)}
    mlp = {"mlp.c_fc": (hidden, wide, True), "mlp.c_proj": (wide, hidden, True)}
    outer = (4 * hidden, rest, content.get("tie_word_embeddings") is not False)
    return Model(kind, whole("n_layer"), hidden, whole("vocab_size"), "transformer.h", attention, mlp, *outer)


def _gpt_neox(kind: str, content: Mapping[str, Any], whole: Callable[..., int]) -> Model:
    hidden, wide, layers = whole("hidden_size"), whole("intermediate_size"), whole("num_hidden_layers")
    bias = content.get("attention_bias") is not False
    attention = {"attention.query_key_value": (hidden, 3 * hidden, bias), "attention.dense": (hidden, hidden, bias)}
    mlp = {"mlp.dense_h_to_4h": (hidden, wide, True), "mlp.dense_4h_to_h": (wide, hidden, True)}
    outer = (4 * hidden, 2 * hidden, content.get("tie_word_embeddings") is True)
    return Model(kind, layers, hidden, whole("vocab_size"), "gpt_neox.layers", attention, mlp, *outer)


#: "model_type" -> the function that makes its model.
FAMILIES: dict[str, Callable[..., Model]] = {"gpt2": _gpt2, "gpt_neox": _gpt_neox}
FAMILIES |= dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"), _gated)


def adapter(path: str, model: Model) -> tuple[int, str]:
    """Return the parameters of the adapter in the file or folder at ``path``, all of them trained, and a clause about it.

    Raises:
        ToolError: the file cannot be read, is not of LoRA, or its size is not known here.
    """
    file, remedy = str(_file(path, ADAPTER)), "give --trainable in place of --adapter"
    content = tables.read_json(file, "the config of the adapter ")
    rank, targets = Reader(file, [], remedy).whole(content, "r"), content.get("target_modules") or ()
    try:
        sizes = model.sizes()
        chosen = [sizes[name] for name in _matching(list(sizes), targets)]
    except (re.error, subprocess.SubprocessError) as error:
        why = error if isinstance(error, re.error) else f"it did not end in {MATCH_SECONDS} seconds"
        raise ToolError(f"{file}: target_modules is no regular expression: {why}; {remedy}") from None
    usual = {"peft_type": "LORA", "bias": "none"} | dict.fromkeys(_OPEN)
    odd = [f"{key} {content[key]!r}" for key, value in usual.items() if content.get(key) and content[key] != value]
    linear = [size for size in chosen if size]
    if odd or not linear or len(linear) < len(chosen):
        within = "in experts" if chosen else f"that the layers of {model.kind} do not have"
        what = " and ".join(odd) or f"target_modules {targets!r}, {within}"
        raise ToolError(f"{file}: no size is known of {what}; {remedy}")
    trained = sum(rank * (into + out) + (out if content.get("use_dora") else 0) for into, out in linear)
    return trained, f"; LoRA of rank {rank} on {len(linear)} modules, {trained:.4g} parameters, by {file}"


def _matching(names: list[str], targets: Any) -> list[str]:
    """Return the modules that peft adapts: names are ends of full names, and one text is "all-linear" or a regular expression. Another
    process matches the latter, as some take years."""
    if not isinstance(targets, str) or targets == "all-linear":
        return [name for name in names if targets == "all-linear" or name.endswith(tuple(f".{one}" for one in targets))]
    re.compile(targets)
    program = (
        "import json, re, sys; text, names = json.load(sys.stdin); print(*(n for n in names if re.fullmatch(text, n)))"
    )
    run = partial(subprocess.run, capture_output=True, text=True, check=True, timeout=MATCH_SECONDS)
    return run([sys.executable, "-c", program], input=json.dumps([targets, names])).stdout.split()
