"""Programs that torch.compile has compiled on one rank and given up on another: all ranks send the same messages."""

from __future__ import annotations

import types
from typing import Any

import pytest
import ranks as runner
import torch
import torch.distributed as dist

from ds_zipccl.config import ZipcclConfig
from ds_zipccl.integration import hints, hook_points, hooks, torch_calls  # noqa: F401  hooks has the table of points
from ds_zipccl.integration.job import Job

pytestmark = pytest.mark.full(reason="torch's compiler takes seconds to load")

CALLS, LIMIT, WIDTH = 12, 4, 16


def layer_of_experts(seen: list[str]) -> torch.nn.Module:
    """A layer whose rows travel twice, as those of DeepSpeed do. Here they stay; ``seen`` gets the kind of each exchange."""

    @torch.compiler.disable
    def exchange(x: torch.Tensor) -> torch.Tensor:
        seen.append(hints.current().kind)
        return x.clone()

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return exchange(x)

        @staticmethod
        def backward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return exchange(x)

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Exchange.apply(Exchange.apply(x).relu())

    module = types.ModuleType("layers")
    module.MOELayer, module._AllToAll = Layer, Exchange
    hook_points.adopt(module, "deepspeed.moe.sharded_moe")
    return Layer()


def traced_without_kinds(layers: Any) -> None:
    """Plant a mistake: a layer tells no kinds while torch.compile traces it."""
    watched, original = layers.forward, layers.forward.__wrapped__

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return original(self, x) if torch.compiler.is_dynamo_compiling() else watched(self, x)

    layers.forward = forward


def kinds(rank: int, ranks: int) -> tuple[list[str], list[str]]:
    """The kinds of a compiled layer, and of one with the mistake. The sizes of rank 1 change from call to call, until torch.compile
    gives up."""
    found: tuple[list[str], list[str]] = ([], [])
    hook_points.skip_frames()
    for mistaken, seen in enumerate(found):
        layer = layer_of_experts(seen)
        if mistaken:
            traced_without_kinds(type(layer))
        compiled = torch.compile(layer, backend="eager", dynamic=False)
        torch._dynamo.config.recompile_limit = LIMIT
        for call in range(CALLS):
            x = torch.randn(8 + (call if rank else 0), WIDTH, requires_grad=True)
            compiled(x).sum().backward()
    return found


def test_compiled_layers_have_the_kinds_of_others() -> None:
    (first, planted), (second, also_planted) = runner.run(kinds, 2)
    assert first == second == ["dispatch", "combine", "combine.bwd", "dispatch.bwd"] * CALLS
    assert planted != also_planted, "a layer that looks at the compiler is seen"


def direct_calls(rank: int, ranks: int) -> tuple[bool, bool]:
    """Whether direct sums are right in a program that rank 1 has stopped compiling, and under a coalescing manager."""
    from deepspeed.utils import groups

    group, job = dist.new_group([0, 1]), Job()
    groups.mpu = types.SimpleNamespace(get_tensor_model_parallel_group=lambda: group)
    job.config = ZipcclConfig(enabled=True, min_bytes=0, mode="always", torch_distributed=True)
    torch_calls.wrap(job)
    torch._dynamo.config.recompile_limit = LIMIT

    def summed(x: torch.Tensor, own: list[int]) -> torch.Tensor:
        y = x * min(1, len(own))
        dist.all_reduce(y, group=group)
        return y + 1

    compiled = torch.compile(summed, backend="eager", dynamic=False)
    ones = torch.ones(4000, dtype=torch.bfloat16)
    sums = [compiled(ones, [0] * (call + 1 if rank else 3)) for call in range(CALLS)]
    one, other = ones.clone(), 2 * ones
    with dist._coalescing_manager(group=group, async_ops=True) as handle:
        dist.all_reduce(one, group=group)
        dist.all_reduce(other, group=group)
    handle.wait()
    return all(bool((each == 3).all()) for each in sums), bool((one == 2).all() and (other == 4).all())


def test_direct_calls_of_compiled_programs() -> None:
    assert runner.run(direct_calls, 2, timeout=60) == [(True, True)] * 2
