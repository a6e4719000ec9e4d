"""Hints of the calls that a lossy codec may change: in one process, with DeepSpeed's own functions."""

from __future__ import annotations

import importlib
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from ds_zipccl.config import ZipcclConfig, parse_section
from ds_zipccl.integration import hints, hook_points, hooks  # noqa: F401  the table of points
from ds_zipccl.integration.lossy import calls as lossy_calls
from ds_zipccl.integration.lossy import pipeline
from ds_zipccl.integration.lossy.calls import Calls, take_hint
from ds_zipccl.lossy import Round

CODEC = {"codec": "round", "mantissa": 3}
LOSSY = ("zero_grad", "dp", "tp", "pp", "ep")


def section(**roles: Any) -> ZipcclConfig:
    return parse_section({"enabled": True, "lossy": True, "roles": roles})


TP = section(tp=CODEC)
X = torch.zeros(4)
SETTINGS = TP.lossy_roles["tp"]


# ---- hints


def hint(*args: Any) -> Any:
    return hints.hinting(lossy=Calls(*args))


def summed() -> Any:
    """What a sum over a tensor group gets."""
    return take_hint(TP, "tp", "all_reduce", X, ReduceOp.SUM)


def test_a_hint_holds_for_one_call_in_its_block() -> None:
    assert summed() is None
    with hint(["tp"], ["all_reduce"], "forward"):
        assert [summed(), summed()] == [Round(3), None]
    with hint(["tp"], ["all_reduce"], "forward", lambda: (2, None)):
        assert [summed() for _ in range(3)] == [Round(3), Round(3), None]
    with hint(["tp"], ["all_reduce"], "forward"):
        pass
    assert summed() is None, "a hint that was not used"
    with pytest.raises(RuntimeError), hint(["tp"], ["all_reduce"]):
        raise RuntimeError
    assert summed() is None


@pytest.mark.parametrize(
    ("role", "name", "dtype", "op"),
    [
        ("zero_grad", "all_reduce", torch.float32, ReduceOp.SUM),
        ("tp", "all_gather_into_tensor", torch.float32, None),
        ("tp", "all_reduce", torch.int64, ReduceOp.SUM),
        ("tp", "all_reduce", torch.float64, ReduceOp.SUM),
        ("tp", "all_reduce", torch.float32, ReduceOp.MAX),
    ],
)
def test_other_calls_stay_exact(role: str, name: str, dtype: torch.dtype, op: Any) -> None:
    config = section(tp=CODEC, zero_grad=CODEC)
    with hint(["tp"], ["all_reduce"]):
        assert take_hint(config, role, name, X.to(dtype), op) is None
    with hint(["tp"], ["all_reduce"]):
        assert take_hint(config, "tp", "all_reduce", X, ReduceOp.SUM)


def test_other_threads_stay_exact() -> None:
    found: list[Any] = []
    with hint(["tp"], ["all_reduce"]):
        thread = threading.Thread(target=lambda: found.append(take_hint(TP, "tp", "all_reduce", X)))
        thread.start()
        thread.join()
        assert take_hint(TP, "tp", "all_reduce", X)
    assert found == [None]


def test_when_names_the_direction() -> None:
    config = section(tp=CODEC | {"when": "backward"})
    for direction, wanted in {"forward": None, "backward": Round(3)}.items():
        with hint(["tp"], ["all_reduce"], direction):
            assert take_hint(config, "tp", "all_reduce", X) == wanted


# ---- DeepSpeed's functions


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The operations and directions that the module of AutoTP's layers has hints of, where each call is taken."""
    from deepspeed.module_inject import layers

    calls: list[tuple[str, str]] = []

    def call(name: str) -> Callable[..., Any]:
        def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            found = hints.current().lossy
            way = found.direction if found else ""
            calls.append((name, way if take_hint(TP, "tp", name, tensor, ReduceOp.SUM) else "exact"))
            return types.SimpleNamespace(wait=lambda: None)

        return run

    names = ("all_reduce", "all_gather_into_tensor", "inference_all_reduce")
    fake = {name: call(name) for name in names} | {"get_rank": lambda group=None: 0}
    monkeypatch.setattr(layers, "dist", types.SimpleNamespace(**fake))
    monkeypatch.setattr(layers, "pg_utils", types.SimpleNamespace(is_parallel=lambda group: True))
    hook_points.adopt(layers)
    return calls


def test_layers_of_auto_tp_give_hints_of_their_sums(seen: list[tuple[str, str]]) -> None:
    from deepspeed.module_inject import layers

    x = torch.randn(3, 4, requires_grad=True)
    layers.RowParallel.apply(None, x, False).sum().backward()
    assert seen == [("all_reduce", "forward")]
    layers.ColumnParallel.apply(None, x).sum().backward()
    assert seen[1:] == [("all_reduce", "backward")]
    layers.AsyncColumnParallel.apply(None, x, torch.randn(5, 4, requires_grad=True), None).sum().backward()
    assert seen[2:] == [("all_reduce", "backward")]


def test_gathers_and_scatters_of_a_head_and_inference_stay_exact(seen: list[tuple[str, str]]) -> None:
    from deepspeed.module_inject import layers

    x = torch.randn(3, 4, requires_grad=True)
    layers.GatherFromTensorParallelRegion.apply(object(), x, (4, 4)).sum().backward()
    layers.ScatterToTensorParallelRegion.apply(None, x, (2, 2), 0).sum().backward()
    layers.RowParallel.apply(None, x.detach(), True)
    assert seen == [(name, "exact") for name in ("all_gather_into_tensor", "all_reduce", "inference_all_reduce")]


def test_a_stage_gives_hints_of_activations_and_not_the_mask() -> None:
    x, mask = torch.zeros(2), torch.zeros(2, dtype=torch.bool)

    class Stage(types.SimpleNamespace):
        has_attention_mask = is_grad_partitioned = False
        __hash__ = object.__hash__

    def count(asked: Any, outputs: Any, masked: bool) -> int:
        stage = Stage(pipe_buffers={"outputs": [outputs], "inputs": [outputs]}, has_bool_tensors=masked)
        return int(asked(stage, buffer_id=0)[0])

    assert count(pipeline.activations, x, False) == 1
    assert count(pipeline.activations, (x, x), False) == 2
    assert count(pipeline.activations, (torch.arange(3), x), False) == 1, "sizes of a shared tensor"
    assert count(pipeline.activations, (x, mask.half()), True) == 1
    assert count(pipeline.gradients, (x, mask), True) == count(pipeline.gradients, x, False) == 1


# ---- names


def test_this_deepspeed_has_all_names() -> None:
    config = section(**dict.fromkeys(LOSSY, CODEC))
    for owner in {point.owner for point in hook_points.POINTS.values() if point.roles}:
        hook_points.adopt(importlib.import_module(owner))
    assert not lossy_calls.unhooked(config)


def test_missing_names_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.module_inject import layers
    from deepspeed.runtime.pipe import engine

    monkeypatch.delattr(layers, "AsyncColumnParallel")
    monkeypatch.setattr(engine.PipelineEngine, "_INSTRUCTION_MAP", {})
    monkeypatch.setattr(hook_points, "_unfit", {})
    for module in (layers, engine):
        hook_points.adopt(module)  # without an error
    assert lossy_calls.unhooked(section(tp=CODEC, pp=CODEC)) == {
        "tp": "this DeepSpeed has no AsyncColumnParallel.backward",
        "pp": "this DeepSpeed has no PipelineEngine._INSTRUCTION_MAP.SendActivation, no PipelineEngine._INSTRUCTION_MAP.SendGrad",
    }
    assert lossy_calls.unhooked(section(dp=CODEC)) == {}


def test_positions_that_a_stage_sends_are_no_activations() -> None:
    """Of the tensors of a tuple, those through which gradients flow; and the part of a tensor that ranks share out."""
    hidden, positions, more = torch.ones(4, requires_grad=True), torch.arange(4.0), torch.ones(3, requires_grad=True)

    def hints_of(outputs: Any, **engine: Any) -> list[bool]:
        _, ready = pipeline.activations(types.SimpleNamespace(pipe_buffers={"outputs": [outputs]}, **engine), 0)
        return [ready(tensor, SETTINGS) for tensor in (outputs if isinstance(outputs, tuple) else (outputs,))]

    assert hints_of((hidden, positions, more)) == [True, False, True]
    assert hints_of(torch.ones(4)) == [True]
    sizes, part = torch.ones(3, dtype=torch.int64), torch.ones(2)
    assert hints_of((sizes, part, positions), is_pipe_partitioned=True) == [False, True, False]


def test_a_job_without_lossy_roles_asks_a_place_for_nothing() -> None:
    def detail() -> Any:
        raise AssertionError("the place was asked")

    with hint(["tp"], ["all_reduce"], "forward", detail):
        assert take_hint(section(), "tp", "all_reduce", X, ReduceOp.SUM) is None
        with pytest.raises(AssertionError, match="was asked"):
            take_hint(TP, "tp", "all_reduce", X, ReduceOp.SUM)
