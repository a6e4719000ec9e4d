"""The sums of AutoEP + AutoTP folding that are probably of equal tensors, learned from DeepSpeed's functions."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ds_zipccl.integration import hook_points, hooks, moe_calls  # noqa: F401  hooks has the table of points


def modules() -> tuple[Any, Any, list[bool]]:
    """Modules with DeepSpeed's names, and what each of their calls found."""
    found: list[bool] = []

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            found.append(moe_calls.replicated())
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            found.append(moe_calls.replicated())
            return gradient

    def reduce(gradient: torch.Tensor, *, tp_group: Any) -> str:
        found.append(moe_calls.replicated())
        if tp_group is None:
            raise ValueError("as planted")
        return "sum"

    rows, gradients = ModuleType("rows"), ModuleType("gradients")
    rows._AllGatherVariableRows, gradients.reduce_autoep_folding_gradient = Gather, reduce  # type: ignore[attr-defined]
    return rows, gradients, found


def test_the_backward_of_gathered_rows() -> None:
    rows, _, found = modules()
    hook_points.adopt(rows, "deepspeed.moe.ep_tp_dispatch")
    before = rows._AllGatherVariableRows.backward
    hook_points.adopt(rows, "deepspeed.moe.ep_tp_dispatch")
    assert rows._AllGatherVariableRows.backward is before
    rows._AllGatherVariableRows.apply(torch.ones(3, requires_grad=True)).sum().backward()
    assert found == [False, True] and not moe_calls.replicated()


def test_gradients_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has the name by itself where it was loaded first."""
    _, gradients, found = modules()
    name = "reduce_autoep_folding_gradient"
    engine = SimpleNamespace(**{name: getattr(gradients, name)})
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.engine", engine)  # type: ignore[arg-type]
    hook_points.adopt(gradients, "deepspeed.module_inject.auto_ep_folding")
    hook_points.adopt(gradients, "deepspeed.module_inject.auto_ep_folding")
    for module in (gradients, engine):
        assert getattr(module, name)(torch.ones(3), tp_group=1) == "sum"
        with pytest.raises(ValueError, match="as planted"):
            getattr(module, name)(torch.ones(3), tp_group=None)
    assert found == [True] * 4 and not moe_calls.replicated()


def test_a_deepspeed_without_the_names() -> None:
    empty = ModuleType("empty")
    hook_points.adopt(empty, "deepspeed.moe.ep_tp_dispatch")
    hook_points.adopt(empty, "deepspeed.module_inject.auto_ep_folding")
    assert not {"_AllGatherVariableRows", "reduce_autoep_folding_gradient"} & set(vars(empty))
