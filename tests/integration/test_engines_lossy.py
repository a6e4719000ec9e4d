"""Lossy roles on real engines: DeepSpeed's calls with a hint change, and nothing else does.

The program of a rank watches every call of the backend: the plain backend runs the call too, on copies, and the results are compared. On
two ranks the exact result of a sum does not depend on an order.
"""

from __future__ import annotations

import functools
import json
import sys
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_moe
import test_parallel
import torch
import torch.distributed as dist
from parallel import STEPS, Lab, assert_trained, in_fp16, poison, rank_program
from programs import launch

ROUND = {"codec": "round", "mantissa": 1}
MIB = 1 << 20


def section(*roles: str, codec: Any = ROUND, **more: Any) -> str:
    given = {"enabled": True, "mode": "always", "min_bytes": 1024, **more}
    return json.dumps(given | ({"lossy": True, "roles": dict.fromkeys(roles, codec)} if roles else {}))


# ---- watching ------------------------------------------------------------------------------------------------------

#: Counts of this rank: "ROLE hinted" calls, "ROLE changed" results, "ROLE exact" results.
seen: Counter[str] = Counter()
#: Operation -> places of its results and of its inputs among the arguments, in the order of DeepSpeed's names.
_PLACES = {
    "all_reduce": ("tensor", "tensor"),
    "reduce_scatter_tensor": ("output_tensor", "input_tensor"),
    "all_gather_into_tensor": ("output_tensor", "input_tensor"),
    "all_to_all_single": ("output", "input"),
}
_TAG = 9


def watch(mistake: str) -> None:
    """Count and compare all calls of this process from now on.

    ``mistake``: "unhinted": calls need no hint; "padding": padding is not zeroed; anything else: none.
    """
    from deepspeed.comm.torch import TorchBackend

    from ds_zipccl.integration.backend import ZipcclBackend
    from ds_zipccl.integration.lossy import calls
    from ds_zipccl.ops import OPS

    original = calls.take_hint

    def take_hint(config: Any, role: str, *args: Any) -> Any:
        found = original(config, role, *args)
        seen[f"{role} hinted"] += found is not None
        return config.lossy_of(role) if mistake == "unhinted" else found

    calls.take_hint = take_hint
    if mistake == "padding":
        unready = functools.cached_property(lambda self: setattr(self, "left", self.detail()[0]))  # None
        unready.__set_name__(calls.Calls, "ready")
        calls.Calls.ready = unready

    def compare(role: str, result: torch.Tensor, exact: torch.Tensor) -> None:
        same = torch.equal(*(one.flatten().view(torch.uint8) for one in (result, exact)))
        seen[f"{role} {'exact' if same else 'changed'}"] += 1

    def watched(name: str) -> Callable[..., Any]:
        ours, plain, parameters = getattr(ZipcclBackend, name), getattr(TorchBackend, name), OPS[name].parameters

        @functools.wraps(ours)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = dict(zip(parameters, args, strict=False)) | kwargs
            output, input = (given[key] for key in _PLACES[name])
            copy = input.clone()
            exact = copy if output is input else torch.empty_like(output)
            plain(self, **{**given, **dict(zip(_PLACES[name], (exact, copy), strict=True)), "async_op": False})
            handle = ours(self, *args, **kwargs)
            if handle is not None:
                handle.wait()
            compare(self.job.role_of(name, given.get("group")), output, exact)
            return handle

        return call

    for name in _PLACES:
        setattr(ZipcclBackend, name, watched(name))
    send, recv = ZipcclBackend.send, ZipcclBackend.recv

    @functools.wraps(send)
    def sent(self: Any, tensor: torch.Tensor, dst: int, *args: Any, **kwargs: Any) -> None:
        send(self, tensor, dst, *args, **kwargs)
        dist.send(tensor, dst, tag=_TAG)

    @functools.wraps(recv)
    def received(self: Any, tensor: torch.Tensor, src: int, *args: Any, **kwargs: Any) -> Any:
        found = recv(self, tensor, src, *args, **kwargs)
        exact = torch.empty_like(tensor)
        dist.recv(exact, src, tag=_TAG)
        compare("pp", tensor, exact)
        return found

    ZipcclBackend.send, ZipcclBackend.recv = sent, received  # type: ignore[attr-defined]


def watched(run: Callable[[Lab], None], lab: Lab) -> None:
    seen.clear()
    run(lab)
    lab.more["seen"] = dict(seen)


# ---- cases ---------------------------------------------------------------------------------------------------------


def own_sum(lab: Lab, group: Any = None) -> torch.Tensor:
    """A user's own all-reduce of 1 MiB."""
    import deepspeed

    x = torch.randn(MIB // 4, generator=torch.Generator().manual_seed(lab.rank))
    deepspeed.comm.all_reduce(x, group=group)
    return x


def tensors(lab: Lab) -> None:
    """AutoTP; then everything else that goes over its group."""
    from deepspeed.sequence.cross_entropy import vocab_parallel_cross_entropy
    from deepspeed.utils import groups

    watched(test_parallel.auto_tp, lab)
    seen.clear()
    group = groups.get_tensor_model_parallel_group()
    logits = torch.randn(1, 20_000, 8, generator=torch.Generator().manual_seed(lab.rank))
    vocab_parallel_cross_entropy(logits, torch.arange(20_000).view(1, -1) % 16, group)
    lab.more["of losses"] = sum(seen.values())
    for layer in lab.engine.module.modules():
        if hasattr(layer, "_all_gather_shards") and hasattr(layer, "gather_output"):
            layer._all_gather_shards(layer.weight.detach().repeat(1, 16), layer._partition_sizes, 0)
    own_sum(lab, group)
    lab.more["after"] = dict(seen)


def in_hooks(lab: Lab) -> None:
    """ZeRO-2 with a user's own sums in the middle of backward passes."""
    original = lab.start

    def start(model: torch.nn.Module, *args: Any, **more: Any) -> Any:
        def hook(grad: torch.Tensor) -> None:
            own_sum(lab)
            lab.more["hooks"] = lab.more.get("hooks", 0) + 1

        model.head.weight.register_hook(hook)
        return original(model, *args, **more)

    lab.start = start  # type: ignore[method-assign]
    dense(lab, 2)


def dense(lab: Lab, zero: Any, **more: Any) -> None:
    lab.start(test_parallel.Layered([torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)]), zero, **more)
    lab.train(lambda step: (lab.tokens(step),))
    own_sum(lab)


def padded(lab: Lab, filled: float) -> None:
    """ZeRO-3 whose uninitialised memory holds one value. Two ranks pad tensors of odd sizes."""
    from deepspeed.runtime.comm import coalesced_collectives as module

    def empty(size: int, **more: Any) -> torch.Tensor:
        return torch.full((size,), filled, **more)

    module.torch = types.SimpleNamespace(**vars(torch) | {"empty": empty})
    try:
        model = test_parallel.Layered([torch.nn.Linear(64, 64)])
        model.odd = torch.nn.Parameter(torch.ones(333))
        forward = model.forward
        model.forward = lambda tokens: forward(tokens) * model.odd.mean()
        lab.start(model, {"stage": 3, "stage3_param_persistence_threshold": 0})
        lab.train(lambda step: (lab.tokens(step),))
        lab.more["shards"] = [shard(one, lab).double().sum().item().hex() for one in model.parameters()]
    finally:
        module.torch = torch


def shard(parameter: Any, lab: Lab) -> torch.Tensor:
    """The elements of a parameter that a rank holds; their padding is uninitialised memory of DeepSpeed too."""
    held = parameter.ds_tensor.detach()
    return held[: max(0, min(held.numel(), parameter.ds_numel - lab.rank * held.numel()))]


def planted(lab: Lab, value: float) -> None:
    """ZeRO-2 in fp16; in the second step one rank has a gradient that is not finite."""
    model, step = test_parallel.Layered([torch.nn.Linear(64, 64)]), 0
    poison(model.words.weight, value, lambda: step == 1 and lab.rank == 1)
    engine = lab.start(model, 2, gradient_clipping=0.0, **in_fp16())
    skipped, hashes = [], []
    for step in range(STEPS):  # poison() asks for the step
        loss = engine(lab.tokens(step))
        lab.losses.append(loss.item().hex())
        engine.backward(loss)
        engine.step()
        skipped.append(engine.skipped_steps)
        hashes.append(float(sum(p.detach().double().sum() for p in engine.module.parameters())).hex())
    lab.more |= {"skipped": skipped, "hashes": hashes}


make = functools.partial
Case = Callable[[Lab], None]
CASES: dict[str, Case] = {
    "tp": tensors,
    "tp overlap": make(watched, make(test_parallel.auto_tp, zero=2, tp_overlap_comm=True)),
    "zero1": make(watched, make(dense, zero=1)),
    "zero2": make(watched, in_hooks),
    "zero2 all": make(watched, make(dense, zero={"stage": 2, "reduce_scatter": False})),
    "zero3": make(watched, make(dense, zero={"stage": 3, "stage3_param_persistence_threshold": 0})),
    "stage 0": make(watched, make(dense, zero=0)),
    "pipeline": make(watched, make(test_parallel.pipeline, zero=0, mask=False)),
    "pipeline mask": make(watched, make(test_parallel.pipeline, zero=1, mask=True)),
    "experts": make(watched, test_moe.native),
    "auto ep": make(watched, test_moe.auto_ep),
    "padding 0": make(padded, filled=0.0),
    "padding 1e38": make(padded, filled=1e38),
    "nan": make(planted, value=float("nan")),
    "inf": make(planted, value=float("inf")),
    "finite": make(planted, value=0.5),
}


def run(tmp_path: Path, wanted: str, *names: str, mode: str = "lossy") -> list[list[dict[str, Any]]]:
    """Return the results of the cases on both ranks. ``mode``: "lossy", or a mistake of :func:`watch`."""
    found = launch(__file__, 2, tmp_path, mode, *names, DS_ZIPCCL=wanted)
    return [found[name] for name in names]


def totals(ranks: list[dict[str, Any]], key: str = "seen") -> Counter[str]:
    return sum((Counter(rank[key]) for rank in ranks), Counter())


FULL = pytest.mark.full(reason="launches of seconds; the short tier has tensor parallelism and ZeRO-2")


def check_hinted(ranks: list[dict[str, Any]], role: str, hinted: int) -> None:
    """As many messages changed as had a hint, all of one role."""
    assert_trained(ranks)
    found = totals(ranks)
    assert found[f"{role} hinted"] == found[f"{role} changed"] == hinted, found
    assert sum(count for name, count in found.items() if name.endswith("changed")) == hinted, found


def test_hinted_sums_change_and_all_else_of_their_groups_is_exact(tmp_path: Path) -> None:
    ranks, zero2 = run(tmp_path, section("tp", "zero_grad", owner_only="off"), "tp", "zero2")
    # A layer has two sums in the forward and five in the backward, the head one in the backward, on each of two ranks.
    check_hinted(ranks, "tp", 2 * STEPS * (7 * test_parallel.LAYERS + 1))
    after = totals(ranks, "after")
    assert after["tp exact"] >= 2 * (3 + 5 * test_parallel.LAYERS + 1), after  # losses, weights, a user's own sum
    assert set(after) == {"tp exact"}, after
    assert all(rank["of losses"] >= 3 for rank in ranks)
    assert all(rank["hooks"] == STEPS for rank in zero2)
    check_hinted(zero2, "zero_grad", 2 * STEPS)
    assert totals(zero2)["zero_grad exact"] >= 2 * (STEPS + 1), "a user's own sums"


@FULL
@pytest.mark.parametrize(
    "role_of",
    [
        {
            "stage 0": "dp",  # first: the role is dp only where no engine of the process has had ZeRO
            "tp overlap": "tp",
            "pipeline": "pp",
            "pipeline mask": "pp",
            "experts": "ep",
            "auto ep": "ep",
        },
        {"zero1": "zero_grad", "zero2 all": "zero_grad", "zero3": "zero_grad"},
    ],
    ids=["models", "gradients"],
)
def test_hinted_messages_change_and_no_others(tmp_path: Path, role_of: dict[str, str]) -> None:
    found = run(tmp_path, section(*role_of.values(), owner_only="off"), *role_of)
    for (name, role), ranks in zip(role_of.items(), found, strict=True):
        hinted = totals(ranks)[f"{role} hinted"]
        assert hinted >= 2 * STEPS, name
        check_hinted(ranks, role, hinted)


@FULL
def test_a_call_that_is_lossy_without_a_hint_is_seen(tmp_path: Path) -> None:
    tp, zero2 = run(tmp_path, section("tp", "zero_grad", owner_only="off"), "tp", "zero2", mode="unhinted")
    assert totals(tp, "after")["tp changed"]
    found = totals(zero2)
    assert found["zero_grad changed"] > found["zero_grad hinted"]


@FULL
@pytest.mark.parametrize("codec", [ROUND, {"codec": "taco_fp8"}], ids=["round", "taco_fp8"])
def test_garbage_in_padding_changes_nothing_and_what_is_not_finite_arrives(
    tmp_path: Path, codec: dict[str, Any]
) -> None:
    names = ["padding 0", "padding 1e38", "nan", "inf", "finite"]
    zeros, garbage, *planted = run(tmp_path, section("zero_grad", codec=codec), *names)
    assert_trained(zeros)
    for one, other in zip(zeros, garbage, strict=True):
        assert (one["losses"], one["shards"]) == (other["losses"], other["shards"])
    for name, ranks in zip(names[2:], planted, strict=True):
        for rank in ranks:
            assert rank["skipped"] == ([0, 0, 0] if name == "finite" else [0, 1, 1])
            assert (rank["hashes"][0] == rank["hashes"][1]) == (name != "finite")
            assert rank["hashes"][1] != rank["hashes"][2], "training goes on"


@FULL
def test_padding_that_is_not_zeroed_is_seen(tmp_path: Path) -> None:
    wanted = section("zero_grad", codec={"codec": "taco_fp8"})
    zeros, garbage = run(tmp_path, wanted, "padding 0", "padding 1e38", mode="padding")
    assert any(one["shards"] != other["shards"] for one, other in zip(zeros, garbage, strict=True))


if __name__ == "__main__":
    watch(mistake=sys.argv[2])
    rank_program(CASES)
