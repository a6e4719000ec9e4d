"""A tiny Llama made from a config, with adapters and quantised weights; engines of such models; and the bytes of their gathers.

No file is downloaded. The gathers of frozen weights are the messages of :data:`LARGE` bytes and more: adapters and norms are smaller.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engines import BATCH, CONTEXT, Lab, digest
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ds_zipccl.telemetry import counters

VOCABULARY = 256
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "use_cache": False,
}  # fmt: skip
#: Bytes: no gather of adapters or norms alone has as many; each gather of a frozen matrix has more.
LARGE = 16384
#: As HF Trainer sets them with "auto"; adapters of rank 4 stay gathered, and frozen matrices do not.
ZERO3 = {
    "stage": 3,
    "stage3_param_persistence_threshold": 2560,
    "stage3_prefetch_bucket_size": 60_000,
    "stage3_max_live_parameters": 100_000,
    "stage3_max_reuse_distance": 0,
}


def llama(**config: Any) -> LlamaForCausalLM:
    """Return the model, in bf16, with all parameters trainable. ``config`` overrides :data:`SHAPE`."""
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **config})).bfloat16()


def with_adapters(model: Any, *names: str, checkpointing: bool = True, **lora: Any) -> Any:
    """Return the model with LoRA adapters of rank 4, the first one active. Frozen parameters need no gradient from here on."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    config = LoraConfig(**{"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], **lora})
    first, *others = names or ("default",)
    found = get_peft_model(model, config, adapter_name=first, autocast_adapter_dtype=False)
    for name in others:
        found.add_adapter(name, config)
    with torch.no_grad():
        for name, param in found.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.05)  # else adapters that were not trained change nothing, merged or not
    if checkpointing:
        found.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        found.enable_input_require_grads()
    return found


class Quantised(nn.Linear):
    """A linear layer whose frozen weight is stored in whole numbers: int8, or uint8 with two weights of 4 bits a byte in one column."""

    def __init__(self, layer: nn.Linear, packed: bool) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, dtype=torch.bfloat16)
        largest = 7 if packed else 127
        step = layer.weight.detach().float().abs().amax(1, keepdim=True) / largest
        whole = (layer.weight.detach().float() / step).round().clamp(-largest, largest)
        if packed:
            pairs = (whole + 8).to(torch.uint8).view(-1, 2)
            stored = (pairs[:, :1] << 4) | pairs[:, 1:]
        else:
            stored = whole.to(torch.int8)
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.step = nn.Parameter(step.bfloat16(), requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        whole = self.weight
        if whole.dtype is torch.uint8:
            whole = torch.cat([whole >> 4, whole & 15], 1).to(torch.int8) - 8
        return nn.functional.linear(input, whole.view(self.out_features, -1).to(input.dtype) * self.step)


def quantise(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Replace the linear layers of all blocks: those of the attention in int8, those of the MLP in uint8."""
    for block in model.model.layers:
        for part in (block.self_attn, block.mlp):
            for name, layer in list(part.named_children()):
                if isinstance(layer, nn.Linear):
                    setattr(part, name, Quantised(layer, packed=part is block.mlp))
    return model


class Meter:
    """Bytes of this rank's gathers of frozen weights: as plain DeepSpeed sends them, and as they were sent.

    The second figure covers plain gathers, and all messages of this package's schedules to other ranks, hashes and words of control
    included. Only gathers of frozen weights are large enough for a schedule, if ``min_bytes`` is :data:`LARGE`, with broadcasts left out.
    """

    def __init__(self) -> None:
        import deepspeed.comm.comm as comm

        self.plain = self.sent = 0
        backend, group = type(comm.cdb), dist.ProcessGroup
        self._wrap(backend, "all_gather_into_tensor", self._ask)
        self._wrap(group, "send", self._send)
        for name in ("_allgather_base", "all_gather_single"):  # as torch before 2.13 names it, and as torch 2.13 does
            if hasattr(group, name):
                self._wrap(group, name, self._pass)

    @staticmethod
    def _wrap(owner: Any, name: str, note: Callable[..., None]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def noting(*args: Any, **kwargs: Any) -> Any:
            note(*args[1:], **kwargs)
            return original(*args, **kwargs)

        setattr(owner, name, noting)

    def _ask(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if output_tensor.nbytes >= LARGE:
            self.plain += output_tensor.nbytes - input_tensor.nbytes

    def _pass(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if output_tensor.nbytes >= LARGE:
            self.sent += output_tensor.nbytes - input_tensor.nbytes

    def _send(self, tensors: list[torch.Tensor], *args: Any) -> None:
        self.sent += sum(tensor.nbytes for tensor in tensors)

    def read(self) -> dict[str, int]:
        """Return the bytes since the last call."""
        found = {"plain": self.plain, "sent": self.sent}
        self.plain = self.sent = 0
        return found


_meter: Meter | None = None


class LlamaLab(Lab):
    """A case with engines of tiny Llamas."""

    def __init__(self, folder: Path) -> None:
        global _meter
        super().__init__(folder)
        folder.mkdir(exist_ok=True)
        _meter = _meter or Meter()
        self.meter = _meter
        self.meter.read()

    def start(self, model: Any, zero: dict[str, Any] | None = None, **config: Any) -> Any:
        """Return a new engine for a model. ``config`` and ``zero`` override the settings of the engine, and of ZeRO."""

        def trained(model: Any) -> list[Any]:
            return [param for param in model.parameters() if param.requires_grad]

        return self.engine(make=lambda: model, groups=trained, zero={**ZERO3, **(zero or {})}, **config)

    def loss(self, engine: Any) -> torch.Tensor:
        """Return the loss of the next batch."""
        tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT), generator=self.batches)
        found: torch.Tensor = engine(input_ids=tokens, labels=tokens).loss
        self.losses.append(found.item().hex())
        return found

    def backward(self, engine: Any, scale: float = 1.0) -> None:
        engine.backward(self.loss(engine) * scale)

    def ask(self, engine: Any) -> None:
        """Note a loss without training."""
        engine.eval()
        with torch.no_grad():
            self.loss(engine)
        engine.train()

    def train_phase(self, engine: Any, steps: int, phase: str, *more: str) -> None:  # type: ignore[override]
        self.train(engine, steps)
        self.phase(phase, *more)

    def phase(self, name: str, *more: str) -> None:
        """End a phase: note the bytes of its gathers, the outcomes for this rank's shards, and the bits of all engines."""
        differences: dict[str, int] = {}
        for row in counters.rows():
            if row["role"] == "zero_param":
                for outcome, count in row["differences"].items():
                    differences[outcome] = differences.get(outcome, 0) + count
        bits = [*(digest(engine.module.parameters()) for engine in self.engines), *more]
        done = sum(len(phase["losses"]) for phase in self.phases)
        found = {"phase": name, **self.meter.read(), "differences": differences, "bits": bits}
        self.phases.append(found | {"losses": self.losses[done:]})
        counters.reset()


def of_files(folder: Path) -> str:
    """Return a hash of the tensors in all files of weights in a folder."""
    from safetensors.torch import load_file

    found = hashlib.sha256()
    for file in sorted([*folder.rglob("*.safetensors"), *folder.rglob("pytorch_model.bin")]):
        tensors = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
        for name, tensor in sorted(tensors.items()):
            found.update((name + digest([tensor])).encode())
    return found.hexdigest()


@contextmanager
def gathered(params: Any, rank: int | None = 0) -> Iterator[None]:
    """Gather parameters, and keep the changes that ``rank`` makes; those of no rank, if None."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(params), modifier_rank=rank):
        yield


def frozen(engine: Any, name: str) -> Any:
    """Return the one frozen parameter whose name ends with ``name``."""
    (found,) = (param for key, param in engine.module.named_parameters() if key.endswith(name))
    assert not found.requires_grad, name
    return found


def section(**more: Any) -> str:
    """Return a section of ds_zipccl in which gathers of frozen weights, and no others, are coded."""
    return json.dumps({"enabled": True, "mode": "always", "min_bytes": LARGE, "roles": {"dp": "never"}, **more})
