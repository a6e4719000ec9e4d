"""DeepSpeed's traffic through the backend: its counts and roles, compiled models, layouts of tensors, parameters of new engines."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from backend_programs import PRELUDE, launch, succeed

ON = '{"mode": "always", "min_bytes": 1024}'

COMPILED = """
from deepspeed.moe.layer import MoE
from deepspeed.sequence.layer import DistributedAttention
deepspeed.init_distributed()
from ds_zipccl.telemetry import counters

def sums(x): y = torch.sin(x); dist.all_reduce(y); return torch.cos(y)
def gathers(x): y = torch.sin(x); o = torch.empty(2 * y.numel()); dist.all_gather_into_tensor(o, y); return torch.cos(o)
def scatters(x): y = torch.sin(x); o = torch.empty(y.numel() // 2); dist.reduce_scatter_tensor(o, y); return torch.cos(o)
def exchanges(x): y = torch.sin(x); o = torch.empty_like(y); dist.all_to_all_single(o, y); return torch.cos(o)
def broadcasts(x): y = torch.sin(x); dist.broadcast(y, 0); return torch.cos(y)

x = torch.randn(10000, generator=torch.Generator().manual_seed(rank))
for function in (sums, gathers, scatters, exchanges, broadcasts):
    counters.reset()
    want, got = function(x), torch.compile(function, backend="eager")(x)
    assert torch.equal(want, got), function
    (row,) = counters.rows()
    assert row["calls"] == 2, (function, row)
def whole(x): y = torch.sin(x); dist.all_reduce(y); return torch.cos(y)
try:
    torch.compile(whole, backend="eager", fullgraph=True)(x)
    raise SystemExit("fullgraph=True went through")
except Exception as error:
    assert "compile without fullgraph=True" in str(error), error

class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.moe = MoE(64, torch.nn.Linear(64, 64), num_experts=2, ep_size=2, k=1, use_residual=False)
    def forward(self, x):
        return self.moe(x)[0]

class Heads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(64, 192)
        self.attention = DistributedAttention(torch.nn.functional.scaled_dot_product_attention, dist.new_group([0, 1]), 2, 1)
    def forward(self, x):
        q, k, v = self.qkv(x).view(1, -1, 4, 48).split(16, -1)
        return self.attention(q, k, v, batch_dim_idx=0)

def digest(model, compiled):
    torch.manual_seed(3)
    e, *_ = deepspeed.initialize(model=model(), config={
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}})
    if compiled:
        e.compile(backend="eager")
    for step in range(2):
        data = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(step + rank)).bfloat16()
        e.backward(e(data).float().square().mean())
        e.step()
    return [p.detach().float().sum().item() for p in e.module.parameters()]
for model in (Experts, Heads):
    assert digest(model, False) == digest(model, True), model
leave()
"""


@pytest.mark.full(reason="torch's compiler takes twenty seconds")
def test_compiled_models_train(tmp_path: Path) -> None:
    succeed(tmp_path, COMPILED, fresh=True, DS_ZIPCCL=ON, TORCHDYNAMO_DISABLE="")


MIXED = """
from datetime import timedelta
from ds_zipccl.telemetry import counters
deepspeed.init_distributed(timeout=timedelta(seconds=20))
t, o = torch.full((100_000,), rank + 1.0).bfloat16(), torch.zeros(100_000).bfloat16()
peer = 1 - rank
for turn in range(2):
    if rank == turn:
        handles = dist.batch_isend_irecv([dist.P2POp(dist.isend, t, peer), dist.P2POp(dist.irecv, o, peer)])
        assert len(handles) == 2
        for handle in handles:
            handle.wait()
    else:
        dist.recv(o, peer); dist.send(t, peer)
    assert o.eq(peer + 1).all()
    o.zero_()
assert {row["op"]: row["calls"] for row in counters.rows()} == {"send": 2, "recv": 2}, counters.rows()

# operations without a coded schedule are counted
counters.reset()
dist.gather(t, [torch.empty_like(t) for _ in range(2)] if rank == 0 else None, 0)
dist.scatter(o, [t, t] if rank == 0 else None, 0)
dist.inference_all_reduce(o, dist.ReduceOp.SUM, torch.distributed.group.WORLD)
assert {row["op"]: (row["passed"], row["passed_bytes"], *row["reasons"]) for row in counters.rows()} == {
    op: (1, 200_000, f"no coded schedule for {op}") for op in ("gather", "scatter", "inference_all_reduce")}, counters.rows()

# a sparse tensor beside a ZeRO-2 engine
e = engine(None)
x = (torch.eye(300) * (rank + 1)).to_sparse()
dist.all_reduce(x)
assert torch.equal(x.to_dense(), 3 * torch.eye(300))

# DeepSpeed does not know the group of Domino's layers
counters.reset()
group = torch.distributed.new_group([0, 1])
model = torch.nn.Linear(256, 256)
model.TP_group = group
torch.manual_seed(1)
e = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=e.config)[0]
handle = dist.all_reduce(torch.ones(100_000).bfloat16(), group=group, async_op=True)
handle.wait()
dist.all_gather([torch.empty(50_000).bfloat16() for _ in range(2)], torch.ones(50_000).bfloat16())
steps(e, 1)
found = {(row["role"], row["op"]) for row in counters.rows() if row["calls"]}
assert {("tp", "all_reduce"), ("dp", "all_gather"), ("zero_grad", "reduce_to_owners")} <= found, found
assert ("zero_param", "all_gather_into_tensor") in found, found
assert not any(row["whole"] for row in counters.rows()), counters.rows()
leave()
"""


def test_sends_counts_and_roles(tmp_path: Path) -> None:
    succeed(tmp_path, MIXED, DS_ZIPCCL=ON)


MISSING = """
from datetime import timedelta
deepspeed.init_distributed(timeout=timedelta(seconds=5))
dist.all_reduce(torch.ones(10))
"""


@pytest.mark.full(reason="waits for a timeout; test_sections_that_every_rank_refuses stays")
def test_a_rank_without_a_section_costs_the_jobs_own_timeout(tmp_path: Path) -> None:
    start = time.monotonic()
    (first, said), (second, _) = launch(tmp_path, PRELUDE + MISSING, fresh=True, DS_ZIPCCL=["1", "0"])
    assert first and second and "ranks [1] have not said which zipccl section they use" in said
    assert time.monotonic() - start < 60
