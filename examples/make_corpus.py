#!/usr/bin/env python3
"""Write tensors of a real training step to a safetensors file, to measure codecs with.

    python examples/make_corpus.py --out out/corpus.safetensors
    python -m ds_zipccl bench codec --corpus out/corpus.safetensors

The GPT of train_gpt.py learns for a few dozen steps in one process of plain PyTorch, kept the way that DeepSpeed's bf16 and ZeRO
optimizers keep it: bf16 parameters, gradients and activations, fp32 master weights and AdamW state. What the last step held is
written: what data parallelism sends (grad, param), what pipelines send (act), what expert parallelism sends (moe), and what is
sent in other dtypes. Tensors are flat and fused, as they are when they are sent, except moe.dispatch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from gpt import GPT, SIZES, Block, Linear
from safetensors.torch import save_file
from source_text import batches, read_text, tokenise
from torch import Tensor, nn
from tqdm import tqdm

LIMIT = 5 << 20  # bytes of one tensor of the file
RUN = 1 << 16  # elements taken together where a tensor has to be cut down
EXPERTS = 8
CAPACITY = 1.25  # slots of all experts together / tokens, as in train_gpt.py
ROUTER_STEPS = 20
MOE_BATCHES = 8  # whose tokens are dispatched together


# ---- training ----------------------------------------------------------------------------------------------


class Training:
    """A model of bf16 parameters with fp32 masters. ``outputs`` are those of the latest forward pass, in its order."""

    def __init__(self, size: str, steps: int, batch: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.size = SIZES[size]
        self.model = GPT(self.size).bfloat16()
        self.parameters = dict(self.model.named_parameters())
        self.masters = [parameter.detach().float() for parameter in self.parameters.values()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
        warmup = max(1, steps // 5)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1, (step + 1) / warmup))
        tokens = tokenise(read_text(None, self.size.characters), self.size.vocabulary)
        self.source = batches(tokens, batch, self.size.context, seed, 0, 1)
        self.outputs: list[Tensor] = []
        for block in self.model.blocks:
            for module in (*(part for part in block.modules() if isinstance(part, Linear)), block):
                module.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: object, output: Tensor | tuple[Tensor, Tensor]) -> None:
        output = output[0] if isinstance(module, Block) else output
        if output.requires_grad:
            output.retain_grad()
        self.outputs.append(output)

    def backward(self) -> float:
        """One batch's loss; gradients are in the parameters and in ``outputs`` then."""
        self.outputs.clear()
        self.model.zero_grad()
        loss = self.model(next(self.source))
        loss.backward()
        return loss.item()

    def update(self) -> None:
        """fp32 step of the masters from the bf16 gradients; parameters are the masters, rounded."""
        for master, parameter in zip(self.masters, self.parameters.values()):
            master.grad = parameter.grad.float()
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.schedule.step()
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        for master, parameter in zip(self.masters, self.parameters.values()):
            parameter.copy_(master)

    @torch.no_grad()
    def forward(self, dtype: torch.dtype) -> list[Tensor]:
        """Outputs for a new batch of the model with its masters rounded to ``dtype``; it stays a model of that dtype."""
        self.outputs.clear()
        self.model.to(dtype)
        self._round()
        self.model(next(self.source))
        return self.outputs

    def state(self, name: str) -> list[Tensor]:
        """AdamW's ``name``, fp32, one tensor a parameter."""
        return [self.optimizer.state[master][name] for master in self.masters]


# ---- experts -----------------------------------------------------------------------------------------------


def feed_forward_inputs(training: Training) -> Tensor:
    """What the middle layer's feed-forward part sees, bf16 [tokens, width]: the input of its experts if it had any."""
    seen: list[Tensor] = []
    layer = training.model.blocks[training.size.layers // 2]
    hook = layer.feed_forward.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].flatten(0, 1)))
    for _ in range(MOE_BATCHES):
        training.forward(torch.bfloat16)
    hook.remove()
    return torch.cat(seen)


def dispatch(tokens: Tensor) -> Tensor:
    """Tokens in their experts' slots, [EXPERTS, capacity, width]: top-1 routing, surplus tokens dropped, free slots zero.

    The router learns what makes its load even and nothing else, for a few steps only: as in any training that is not long
    under way, some experts have too many tokens and some too few.
    """
    router = nn.Linear(tokens.shape[1], EXPERTS, bias=False)
    learner = torch.optim.AdamW(router.parameters(), lr=1e-3)
    for _ in range(ROUTER_STEPS):
        shares = router(tokens.float()).softmax(-1)
        load = F.one_hot(shares.argmax(-1), EXPERTS).float().mean(0)
        learner.zero_grad()
        (EXPERTS * (shares.mean(0) * load).sum()).backward()
        learner.step()
    with torch.no_grad():
        chosen = F.one_hot(router(tokens.float()).argmax(-1), EXPERTS)
    capacity = int(CAPACITY * len(tokens) / EXPERTS)
    slots = tokens.new_zeros(EXPERTS, capacity, tokens.shape[1])
    for expert, mine in enumerate(chosen.bool().unbind(1)):
        kept = tokens[mine][:capacity]
        slots[expert, : len(kept)] = kept
    return slots


# ---- file --------------------------------------------------------------------------------------------------


def fuse(parts: Iterable[Tensor]) -> Tensor:
    """``parts`` flat and joined in one dtype; of more than LIMIT bytes evenly spread runs, so that every part keeps its share."""
    flat = torch.cat([part.detach().flatten() for part in parts])
    runs = LIMIT // flat.itemsize // RUN
    if flat.nbytes <= LIMIT:
        return flat
    starts = [index * (len(flat) - RUN) // (runs - 1) for index in range(runs)]
    return torch.cat([flat[start : start + RUN] for start in starts])


def cast(parts: Iterable[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """``parts`` in another dtype; each is scaled to the whole range of an fp8 one by its largest magnitude."""
    top = torch.finfo(dtype).max if dtype.itemsize == 1 else None
    return [
        (part.float() * (top / part.float().abs().max().clamp_min(1e-30)) if top else part).to(dtype) for part in parts
    ]


def collect(training: Training, steps: int) -> dict[str, Tensor]:
    """Train, and the tensors of the last step by name."""
    with tqdm(range(steps), unit="step", desc="train", disable=None) as bar:
        for step in bar:
            bar.set_postfix(loss=f"{training.backward():.4f}")
            if step < steps - 1:
                training.update()
    parameters = training.parameters
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    outputs = [output.detach() for output in training.outputs]
    output_gradients = [output.grad for output in training.outputs]

    def of(start: str) -> list[Tensor]:
        return [gradient for name, gradient in gradients.items() if name.startswith(start)]

    last = training.size.layers - 1
    before = fuse(parameters.values())  # fuse copies
    training.update()
    tensors = {
        "grad.model": fuse(gradients.values()),
        "grad.blocks": fuse(of("blocks.")),
        "grad.embedding": fuse(of("words.")),
        "grad.head": fuse(of("head.")),
        "grad.layer0.attention": fuse(of("blocks.0.attention.")),
        "grad.layer0.feed_forward": fuse(of("blocks.0.feed_forward.")),
        f"grad.layer{last}.attention": fuse(of(f"blocks.{last}.attention.")),
        "param.before": before,
        "param.after": fuse(parameters.values()),
        "act.forward": fuse(outputs),
        "act.backward": fuse(output_gradients),
        "grad.model_fp32": fuse(cast(gradients.values(), torch.float32)),
        "adam.exp_avg": fuse(training.state("exp_avg")),
        "master.model": fuse(training.masters),
        "act.forward_e4m3": fuse(cast(outputs, torch.float8_e4m3fn)),
        "grad.model_e5m2": fuse(cast(gradients.values(), torch.float8_e5m2)),
    }
    training.model.zero_grad()
    tensors["moe.dispatch"] = dispatch(feed_forward_inputs(training))
    tensors["act.forward_fp16"] = fuse(training.forward(torch.float16))  # of fp32: bf16 has zeros as lowest bits
    return tensors


def describe(tensors: dict[str, Tensor]) -> None:
    """Print what is in the file; zeros are elements of +0 and -0."""
    width = max(map(len, tensors))
    print(f"{'name':{width}} {'dtype':13} {'numel':>10} {'MB':>6} {'zeros':>6}")
    for name, tensor in tensors.items():
        zeros = (tensor.float() == 0).float().mean().item()
        dtype = str(tensor.dtype).removeprefix("torch.")
        print(f"{name:{width}} {dtype:13} {tensor.numel():>10,} {tensor.nbytes / 1e6:>6.1f} {zeros:>6.1%}")


def main(words: Sequence[str] | None = None) -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="safetensors file to write")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the model (default: small, 11M parameters)")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(words)
    if args.steps < 1 or args.batch < 1:
        parser.error(f"--steps and --batch must be at least 1, got {args.steps} and {args.batch}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    tensors = collect(Training(args.size, args.steps, args.batch, args.seed), args.steps)
    about = f"--size {args.size} --steps {args.steps} --batch {args.batch} --seed {args.seed}"
    save_file(tensors, args.out, metadata={"options": about})  # one entry: several would be in any order
    describe(tensors)
    return 0


if __name__ == "__main__":
    sys.exit(main())
