"""Trainings of a small GPT on bytes whose sums and sends go through ds_zipccl.comm: tensor parallel, data parallel, and in a pipeline.

All start from one seed and see the same sequences. A training is named by a plan; some plans have a mistake planted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from places import EXAMPLES
from torch import Tensor, nn

from ds_zipccl import comm
from ds_zipccl.codecs import lowrank
from ds_zipccl.comm.lossy.low_rank_sum import Matrix, low_rank_sum
from ds_zipccl.config import parse_section
from ds_zipccl.integration.lossy import pipeline, state
from ds_zipccl.lossy import LossyCodec, LowRank
from ds_zipccl.role_settings import RoleSettings

sys.path.insert(0, str(EXAMPLES))

LAYERS, WIDTH, HEADS, CONTEXT = 2, 96, 4, 64
STEPS, BATCH, RATE, MICRO_BATCHES = 75, 16, 2e-3, 8
ALWAYS = parse_section({"enabled": True, "mode": "always", "min_bytes": 1024})
#: Returns the sum of all ranks' tensors.
Total = Callable[[Tensor], Tensor]


# ---- the model


def attention(qkv: Tensor) -> Tensor:
    """Attention of half of the heads."""
    q, k, v = qkv.unflatten(-1, (3, HEADS // 2, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
    mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2).flatten(2)


class Shared(torch.autograd.Function):
    """The input of a column-parallel layer, whose gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, total: Total, x: Tensor) -> Tensor:
        ctx.total = total
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, ctx.total(grad)


class Summed(torch.autograd.Function):
    """The output of a row-parallel layer, summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, total: Total, x: Tensor) -> Tensor:
        return total(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


class Half(nn.Module):
    """Two linear layers and a function between them, cut into halves. A rank of two keeps one half."""

    def __init__(self, inner: int, outer: int, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.columns = nn.ModuleList(nn.Linear(WIDTH, inner // 2, bias=False) for _ in range(2))
        self.rows = nn.ModuleList(nn.Linear(outer // 2, WIDTH, bias=False) for _ in range(2))
        self.between = between

    def keep(self, rank: int) -> None:
        """Drop the other half."""
        self.columns, self.rows = self.columns[rank : rank + 1], self.rows[rank : rank + 1]

    def forward(self, x: Tensor, total: Total | None) -> Tensor:
        x = self.norm(x)
        x = x if total is None else Shared.apply(total, x)
        parts = [row(self.between(column(x))) for column, row in zip(self.columns, self.rows, strict=True)]
        return sum(parts) if total is None else Summed.apply(total, parts[0])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList()
        for _ in range(LAYERS):
            self.blocks.append(Half(3 * WIDTH, WIDTH, attention))
            self.blocks.append(Half(4 * WIDTH, 4 * WIDTH, nn.functional.gelu))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def begin(self, tokens: Tensor) -> Tensor:
        return self.words(tokens[:, :-1]) + self.places.weight

    def middle(self, x: Tensor, blocks: range, total: Total | None = None) -> Tensor:
        for number in blocks:
            x = x + self.blocks[number](x, total)
        return x

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())

    def forward(self, tokens: Tensor, total: Total | None = None) -> Tensor:
        return self.loss(self.middle(self.begin(tokens), range(len(self.blocks)), total), tokens)


@cache
def text() -> Tensor:
    from source_text import read_text

    return torch.frombuffer(bytearray(read_text(None, 300_000).encode()[:300_000]), dtype=torch.uint8).long()


def batch(step: int, count: int = BATCH) -> Tensor:
    """The sequences of a step, [count, CONTEXT + 1]."""
    starts = torch.randint(len(text()) - CONTEXT - 1, (count,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text()[at : at + CONTEXT + 1] for at in starts.tolist()])


def judged() -> Tensor:
    """Sequences on which trained models are compared."""
    return batch(10**6, 128)


def fresh(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


# ---- plans


@dataclass(frozen=True)
class Plan:
    """How the ranks of a training communicate. ``way``: a key of WAYS. ``codec``: of their sums; None: exact sums. ``cast``: the mistake of
    float8 without a scale. ``rank``: of PowerSGD; 0: none. ``feedback``: of PowerSGD. ``settings``: of the gradients
    between pipeline stages."""

    way: str
    codec: LossyCodec | None = None
    cast: bool = False
    rank: int = 0
    feedback: bool = True
    settings: RoleSettings | None = None

    def total(self, values: Tensor, role: str, group: dist.ProcessGroup | None = None) -> Tensor:
        """The sum of the tensors of a group's ranks."""
        if self.cast:
            summed = _cast(values)
            dist.all_reduce(summed, group=group)
            return _cast(summed)
        summed = values.clone()
        comm.all_reduce(summed, group=group, config=ALWAYS, role=role, lossy=self.codec)
        return summed


def _cast(values: Tensor) -> Tensor:
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).to(values.dtype)


def trained(rank: int, ranks: int, plans: dict[str, Plan], steps: int = STEPS) -> dict[str, float]:
    """The loss after the training of each plan, but for those plans of which this rank has no part."""
    found = {name: WAYS[plan.way](rank, ranks, plan, steps) for name, plan in plans.items() if plan.way != PAIRS}
    pairs = [dist.new_group([first, first + 1]) for first in range(0, ranks, 2)]
    for name in [name for name, plan in plans.items() if plan.way == PAIRS][rank // 2 :: len(pairs)]:
        found[name] = tensor_parallel(rank % 2, pairs[rank // 2], plans[name], steps)
    return found


# ---- tensor parallel


def tensor_parallel(rank: int, pair: dist.ProcessGroup, plan: Plan, steps: int) -> float:
    """Two ranks share each layer; activations and their gradients are summed. Each pair of ranks has a training of its own."""
    model = fresh(0)
    for block in model.blocks:
        block.keep(rank)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step), lambda values: plan.total(values, "tp", pair)).backward()
        optimizer.step()
    exact = Plan(PAIRS)
    with torch.no_grad():
        return float(model(judged(), lambda values: exact.total(values, "tp", pair)))


# ---- data parallel


def data_parallel(rank: int, ranks: int, plan: Plan, steps: int) -> float:
    """Each rank has a part of the sequences; gradients are averaged."""
    model = fresh(0)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, RATE)
    factors = Factors(plan, parameters, ranks) if plan.rank else None
    for step in range(steps):
        grads = torch.autograd.grad(model(batch(step).chunk(ranks)[rank]) / ranks, parameters)
        flat = torch.cat([grad.flatten() for grad in grads])
        flat = plan.total(flat, "dp") if factors is None else factors.total(flat)
        for one, grad in zip(parameters, flat.split([one.numel() for one in parameters]), strict=True):
            one.grad = grad.view_as(one)
        optimizer.step()
    with torch.no_grad():
        return float(model(judged()))


class Factors:
    """The matrices of all gradients laid end to end, for sums by PowerSGD."""

    def __init__(self, plan: Plan, parameters: list[nn.Parameter], ranks: int) -> None:
        self._plan, self._ranks = plan, ranks
        self.matrices: list[Matrix] = []
        start = 0
        for number, one in enumerate(parameters):
            if one.dim() == 2:
                rows, columns = one.shape
                factor = lowrank.first_factor(columns, lowrank.factor_rank(rows, columns, plan.rank), number)
                self.matrices.append(Matrix(start, rows, columns, factor, keeps=plan.feedback))
            start += one.numel()

    def total(self, flat: Tensor) -> Tensor:
        """The sums of all ranks' gradients: of matrices approximately, of vectors exactly."""
        low_rank_sum(flat, self.matrices, self._ranks, lambda part: part.copy_(self._plan.total(part, "dp")), "auto")
        assert all(one.arrived for one in self.matrices)
        return flat


# ---- in a pipeline


class Stage:
    """What the hooks of the pipeline engine read of it."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.stage_id, self.num_stages, self.prev_stage, self.micro_batches = rank, ranks, rank - 1, MICRO_BATCHES
        self.is_grad_partitioned, self.grid = False, self
        self.pipe_buffers: dict[str, list[Tensor]] = {"inputs": []}

    def stage_to_global(self, stage_id: int) -> int:
        return stage_id


def in_a_pipeline(rank: int, ranks: int, plan: Plan, steps: int) -> float:
    """Each rank has a part of the layers. All micro-batches go forward, and then backward in their order."""
    model = fresh(0)
    count = len(model.blocks) // ranks
    blocks = range(rank * count, rank * count + count)
    mine = [*model.blocks[blocks.start : blocks.stop].parameters()]
    mine += [*model.words.parameters(), *model.places.parameters()] if rank == 0 else []
    mine += [*model.norm.parameters(), *model.head.parameters()] if rank == ranks - 1 else []
    optimizer = torch.optim.AdamW(mine, RATE)

    def onward(tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Input and output of this stage; the output of the last one is the loss."""
        if rank == 0:
            x = model.begin(tokens)
        else:
            x = torch.empty(len(tokens), CONTEXT, WIDTH)
            comm.recv(x, rank - 1, config=ALWAYS, role="pp")
        x = x if rank == 0 else x.requires_grad_(torch.is_grad_enabled())
        out = model.middle(x, blocks)
        if rank == ranks - 1:
            return x, model.loss(out, tokens)
        comm.send(out.detach(), rank + 1, config=ALWAYS, role="pp")
        return x, out

    engine = Stage(rank, ranks)
    for step in range(steps):
        optimizer.zero_grad()
        pipeline.begin_batch(engine)
        passed = [onward(tokens) for tokens in batch(step).chunk(MICRO_BATCHES)]
        engine.pipe_buffers["inputs"] = [x for x, _ in passed]
        for number, (x, out) in enumerate(passed):
            if rank == ranks - 1:
                (out / MICRO_BATCHES).backward()
            else:
                grad = torch.empty_like(out)
                comm.recv(grad, rank + 1, config=ALWAYS, role="pp")
                out.backward(grad)
            if rank:
                _send_back(engine, number, x, plan.settings)
        optimizer.step()
        if plan.settings is not None and plan.settings.error == "lazy":
            for _, _, entry in state.of(engine).entries():
                entry.error = None
    with torch.no_grad():
        _, loss = onward(judged())
        loss = loss.clone() if rank == ranks - 1 else torch.zeros(())
    dist.broadcast(loss, ranks - 1)
    return float(loss)


def _send_back(engine: Stage, number: int, x: Tensor, settings: RoleSettings | None) -> None:
    """Send the gradient of a stage's input, as the hook of the engine does."""
    assert x.grad is not None
    lossy: Any = None
    if settings is not None:
        ready = pipeline.gradients(engine, number)[1](x.grad, settings)
        lossy = (settings.codec if ready is True else ready) or None
    comm.send(x.grad, engine.prev_stage, config=ALWAYS, role="pp", lossy=lossy)


def by_low_rank(rank: int, **more: Any) -> Plan:
    return Plan("in a pipeline", settings=RoleSettings(LowRank(rank), when="backward", **more))


PAIRS = "tensor parallel"
WAYS: dict[str, Callable[[int, int, Plan, int], float]] = {
    "data parallel": data_parallel,
    "in a pipeline": in_a_pipeline,
}
