"""Trainings of a small transformer under FSDP2, plain and with coded communication, on the ranks of this process group."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ds_zipccl import fsdp
from ds_zipccl.telemetry import counters

VOCABULARY, WIDTH, CONTEXT, BATCH, LAYERS = 128, 64, 16, 4, 3
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
ALWAYS = {"mode": "always", "min_bytes": 0}


class Block(nn.Module):
    """A layer of a transformer, with ``extra`` rows in its middle that no number of ranks divides."""

    def __init__(self, extra: int = 0) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH + extra), nn.Linear(4 * WIDTH + extra, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + torch.softmax(q @ k.transpose(-1, -2) / WIDTH**0.5, -1) @ v
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, extra: int = 0, tied: bool = False) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Block(extra) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), tokens.flatten())


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of rank 4."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.a, self.b = nn.Linear(frozen.in_features, 4, bias=False), nn.Linear(4, frozen.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.b(self.a(x))


def adapted(model: Model) -> Model:
    """The model with adapters in each block, and nothing else to train."""
    model.requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.up, block.down = Adapted(block.qkv), Adapted(block.up), Adapted(block.down)
    return model


class Lab:
    """One training: ``losses``, and ``facts`` about it, which plain and coded trainings have in common, bit for bit."""

    def __init__(self, rank: int, ranks: int, coded: bool, folder: str) -> None:
        self.rank, self.ranks, self.coded, self.folder = rank, ranks, coded, folder
        self.facts: list[tuple[str, str]] = []
        self.generator = torch.Generator().manual_seed(1 + rank)

    def start(
        self, make: Callable[[], nn.Module] = Model, section: Any = None, rate: float = 3e-5, **shard: Any
    ) -> Any:
        """Return a model of ``fully_shard``, of each block and of the whole, and set its optimizer. ``section``: further keys."""
        shard = {"mp_policy": BF16, **shard}
        torch.manual_seed(0)
        model = make()
        for block in getattr(model, "blocks", ()):
            fully_shard(block, **shard)
        return self.apply(fully_shard(model, **shard), section, rate)

    def apply(self, model: Any, section: Any = None, rate: float = 3e-5) -> Any:
        """As :meth:`start`, of a model that is sharded."""
        if self.coded:
            assert fsdp.apply(model, {**ALWAYS, **(section or {})}) is model
        if trained := [param for param in model.parameters() if param.requires_grad]:
            self.optimizer = torch.optim.AdamW(trained, rate)
        return model

    def batch(self) -> torch.Tensor:
        return torch.randint(VOCABULARY, (BATCH, CONTEXT), generator=self.generator)

    def loss(self, model: nn.Module) -> torch.Tensor:
        """The loss of a batch, noted."""
        loss = model(self.batch())
        self.note("loss", loss.detach())
        return loss

    def step(self, model: nn.Module) -> None:
        """Note the gradients, and take a step."""
        for name, param in model.named_parameters():
            if param.grad is not None:
                self.note(f"gradient of {name}", param.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, model: nn.Module, steps: int = 3) -> None:
        for _ in range(steps):
            self.loss(model).backward()
            self.step(model)

    def note(self, name: str, tensor: torch.Tensor) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        words = local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        self.facts.append((name, hashlib.sha256(words).hexdigest()[:16]))

    def end(self, model: nn.Module) -> None:
        """Note parameters and states of the optimizer."""
        for name, param in model.named_parameters():
            self.note(name, param)
            for key, value in self.optimizer.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    self.note(f"{key} of {name}", value)


@contextlib.contextmanager
def spoken() -> Iterator[io.StringIO]:
    """What this process prints."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        yield text


def sent(role: str = "") -> tuple[int, int]:
    """The bytes that this rank would send without this package, and those that it sends, since the last call of ``counters.reset``."""
    found = [row for row in counters.rows() if role in ("", row["role"])]
    passed = sum(row["passed_bytes"] for row in found)
    return sum(row["logical_bytes"] for row in found) + passed, sum(row["wire_bytes"] for row in found) + passed


def bits(
    rank: int, ranks: int, case: Callable[[Lab], Any], folder: str
) -> tuple[str, tuple[int, int], tuple[int, int]]:
    """Run a training plain and coded; fail where the bits of the two differ. Returns what the coded one has printed, and the bytes of all
    messages and of gathers, see :func:`sent`."""
    facts = {}
    for coded in (False, True):
        counters.reset()
        lab = Lab(rank, ranks, coded, f"{folder}/{coded}")
        with spoken() as text:
            model = case(lab)
        lab.end(model)
        facts[coded] = lab.facts
    assert len(facts[True]) > 10
    wrong = [here for here, there in zip(*facts.values(), strict=True) if here != there]
    assert not wrong, f"{len(wrong)} of {len(facts[True])} differ, first {wrong[:3]}"
    found = text.getvalue(), sent(), sent("zero_param")
    dist.barrier()
    return found
