"""Kinds of expert all-to-alls, with DeepSpeed's own layer and exchanges; a single process, in which an exchange copies its input. And the
sums of AutoEP + AutoTP folding that are probably of equal tensors, learned from DeepSpeed's functions."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ds_zipccl.integration import hints, hook_points, hooks  # noqa: F401  hooks has the table of points

FORWARD = ["dispatch", "combine"]
BACKWARD = ["combine.bwd", "dispatch.bwd"]
WIDTH, EXPERTS = 8, 4


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kinds of all exchanges, in the order of the calls."""
    from deepspeed.module_inject import auto_ep_layer
    from deepspeed.moe import sharded_moe

    kinds: list[str] = []

    def all_to_all_single(output: torch.Tensor, input: torch.Tensor, *splits: Any, **more: Any) -> None:
        kinds.append(hints.current().kind)
        output.copy_(input)

    for module in (sharded_moe, auto_ep_layer):
        monkeypatch.setattr(module, "dist", types.SimpleNamespace(all_to_all_single=all_to_all_single))
    hook_points.adopt(sharded_moe, "deepspeed.moe.sharded_moe")
    yield kinds
    assert hints.current().kind == ""


def native(count: int = 1) -> torch.nn.Module:
    """Layers of DeepSpeed-MoE that believe in two ranks."""
    from deepspeed.moe.experts import Experts
    from deepspeed.moe.sharded_moe import MOELayer, TopKGate

    def layer() -> torch.nn.Module:
        gate, experts = TopKGate(WIDTH, EXPERTS, k=2), Experts(torch.nn.Linear(WIDTH, WIDTH), EXPERTS // 2)
        return MOELayer(gate, experts, "ep_size_2", 2, EXPERTS // 2)

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(layer() for _ in range(count))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for one in self.layers:
                x = x + one(x, None)
            return x

    return Layers()


def rows() -> torch.Tensor:
    return torch.randn(16, WIDTH, requires_grad=True)


def test_every_layer_has_four_kinds(seen: list[str]) -> None:
    result = native(count=2)(rows())
    assert seen == FORWARD + FORWARD
    result.sum().backward()
    assert seen[4:] == BACKWARD + BACKWARD


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_runs_again_is_a_forward(seen: list[str], reentrant: bool) -> None:
    checkpoint(native(), rows(), use_reentrant=reentrant).sum().backward()
    assert seen == FORWARD + FORWARD + BACKWARD


def test_backwards_out_of_order_keep_their_kinds(seen: list[str]) -> None:
    """Two forwards before their backwards, as in a pipeline, and one whose backward never runs."""
    layer = native()
    results = [layer(rows()).sum() for _ in range(3)]
    results[1].backward()
    results[0].backward()
    assert seen[6:] == BACKWARD + BACKWARD


def test_a_layer_that_fails_leaves_no_kind(seen: list[str]) -> None:
    layer = native()
    layer.layers[0].experts = torch.nn.Identity()
    layer.layers[0].experts.register_forward_pre_hook(_fail)
    with pytest.raises(RuntimeError, match="no expert"):
        layer(rows())
    layer.layers[0].experts = torch.nn.Identity()
    layer(rows())
    assert seen == ["dispatch", *FORWARD]


def _fail(*unused: Any) -> None:
    raise RuntimeError("no expert")


def test_an_exchange_of_another_module_has_no_kind(seen: list[str]) -> None:
    from deepspeed.moe.sharded_moe import _AllToAll

    _AllToAll.apply(None, rows()).sum().backward()
    assert seen == ["", ""]


def test_more_exchanges_than_known_have_no_kind(seen: list[str]) -> None:
    from deepspeed.moe import sharded_moe

    layer = native()
    exchange: Callable[..., torch.Tensor] = sharded_moe._AllToAll.apply
    for module in (layer.layers[0], layer.layers[0].experts):
        module.register_forward_hook(lambda module, args, output: exchange(None, output))
    layer(rows())
    assert seen == [*FORWARD, "", ""], "the second exchange of a forward is taken for the combine"


def test_counts_between_exchanges_of_auto_ep_have_no_kind(seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.module_inject import auto_ep_layer

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            counts = torch.tensor([8, 8], dtype=torch.int32)
            plan = auto_ep_layer._split_plan_from_expert_counts(counts, 2, 1, None)
            x = auto_ep_layer._AllToAllV.apply(None, x, plan.input_splits, plan.output_splits)
            return auto_ep_layer._AllToAllV.apply(None, 2 * x, plan.output_splits, plan.input_splits)

    class Exchange(auto_ep_layer._AllToAllV):  # not to be watched twice, as the hooks may have done it
        forward, backward = auto_ep_layer._AllToAllV.forward, auto_ep_layer._AllToAllV.backward

    monkeypatch.setattr(auto_ep_layer, "_AllToAllV", Exchange)
    module = types.ModuleType("auto_ep")
    module.AutoEPMoELayer, module._AllToAllV = Layer, Exchange  # type: ignore[attr-defined]
    hook_points.adopt(module, "deepspeed.module_inject.auto_ep_layer")
    Layer()(rows()).sum().backward()
    assert seen == ["", *FORWARD, *BACKWARD]


def test_a_module_without_these_names_is_left_alone() -> None:
    module = types.ModuleType("older")
    hook_points.adopt(module, "deepspeed.moe.sharded_moe")
    assert set(vars(module)) == {"__name__", "__doc__", "__package__", "__loader__", "__spec__"}

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(rows: torch.Tensor) -> torch.Tensor:  # a context of its own: setup_context
            return rows

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    module.MOELayer, module._AllToAll = Layer, Exchange  # type: ignore[attr-defined]
    kept = Layer.forward, Exchange.forward
    hook_points.adopt(module, "deepspeed.moe.sharded_moe")
    assert (Layer.forward, Exchange.forward) == kept
