"""Tensors of every layout and dtype: the result of the plain collective or its error, never an error of ours."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import ranks as runner
import tiers
import torch
import torch.distributed as dist

from ds_zipccl import comm
from ds_zipccl.config import ZipcclConfig

ALWAYS = ZipcclConfig(enabled=True, mode="always", min_bytes=0)
CONFIGS = {mode: replace(ALWAYS, mode=mode) for mode in ("always", "auto", "never")}
NUMEL = 6000


def _numbers(dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(NUMEL) % 3).to(dtype)


#: name -> a tensor of it; the same on all ranks, so that sums are the same whatever the layout.
KINDS: dict[str, Callable[[], torch.Tensor]] = {
    **{
        str(dtype).removeprefix("torch."): partial(_numbers, dtype)
        for dtype in (
            torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
            torch.int64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
            torch.uint16, torch.uint32, torch.uint64,
        )
    },
    "complex32": lambda: torch.view_as_complex(_numbers(torch.float16).view(-1, 2)),
    "sparse_coo": lambda: torch.eye(80).to_sparse(),
    "sparse_csr": lambda: torch.eye(80).to_sparse_csr(),
    "mkldnn": lambda: torch.ones(80, 80).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(NUMEL), 0.5, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(5, 8)], layout=torch.jagged),
    "meta": lambda: torch.empty(NUMEL, device="meta"),
    "of no dimension": lambda: torch.tensor(1.5),
    "empty": lambda: torch.empty(0),
    "empty bfloat16": lambda: torch.empty(0, 3).bfloat16(),
    "strided": lambda: torch.arange(12000.0).view(100, 120)[:, ::2],
    "transposed": lambda: torch.arange(6000.0).view(60, 100).t(),
    "channels last": lambda: torch.arange(2400.0).view(2, 3, 20, 20).to(memory_format=torch.channels_last),
    "conjugate": lambda: torch.ones(NUMEL, dtype=torch.complex64).conj(),
    "parameter": lambda: torch.nn.Parameter(torch.ones(NUMEL)),
}  # fmt: skip


# Each returns the tensors that hold the result, and makes the call.


def all_reduce(api: Any, tensor: torch.Tensor) -> Any:
    return [tensor], api.all_reduce(tensor)


def all_reduce_later(api: Any, tensor: torch.Tensor) -> Any:
    handle = api.all_reduce(tensor, async_op=True)
    handle.wait()
    return [tensor], None


def all_reduce_coalesced(api: Any, tensor: torch.Tensor) -> Any:
    return [tensor], api.all_reduce_coalesced([tensor])


def reduce(api: Any, tensor: torch.Tensor) -> Any:
    return [tensor] if dist.get_rank() == 0 else [], api.reduce(tensor, 0)


def broadcast(api: Any, tensor: torch.Tensor) -> Any:
    return [tensor], api.broadcast(tensor, 0)


def all_gather(api: Any, tensor: torch.Tensor) -> Any:
    places = [torch.clone(tensor) for _ in range(2)]
    return places, api.all_gather(places, tensor)


def all_gather_into_tensor(api: Any, tensor: torch.Tensor) -> Any:
    whole = torch.cat([tensor, tensor]) if tensor.dim() else torch.stack([tensor, tensor])
    return [whole], api.all_gather_into_tensor(whole, tensor)


def all_to_all_single(api: Any, tensor: torch.Tensor) -> Any:
    out = torch.clone(tensor)
    return [out], api.all_to_all_single(out, tensor)


def all_to_all(api: Any, tensor: torch.Tensor) -> Any:
    out = [torch.clone(tensor), torch.clone(tensor)]
    return out, api.all_to_all(out, [tensor, tensor])


def reduce_scatter_tensor(api: Any, tensor: torch.Tensor) -> Any:
    whole = torch.cat([tensor, tensor]) if tensor.dim() else torch.stack([tensor, tensor])
    return [tensor], api.reduce_scatter_tensor(tensor, whole)


def reduce_scatter(api: Any, tensor: torch.Tensor) -> Any:
    return [tensor], api.reduce_scatter(tensor, [torch.clone(tensor), torch.clone(tensor)])


def exchange(api: Any, tensor: torch.Tensor) -> Any:
    out, peer = torch.clone(tensor), 1 - dist.get_rank()
    for handle in [api.isend(tensor, peer), api.irecv(out, peer)]:
        handle.wait()
    return [out], None


OPERATIONS = (
    all_reduce, all_reduce_later, all_reduce_coalesced, reduce, broadcast, all_gather, all_gather_into_tensor,
    all_to_all_single, all_to_all, reduce_scatter_tensor, reduce_scatter, exchange,
)  # fmt: skip


#: What torch's own gives an arbitrary result for, or ends the process.
CRASHES = {
    (all_to_all_single, "of no dimension"),
    (reduce_scatter_tensor, "of no dimension"),
    (reduce_scatter, "strided"),
}


class _Coded:
    def __init__(self, config: ZipcclConfig) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return partial(getattr(comm, name), config=self._config)


def outcome(operation: Callable[..., Any], api: Any, make: Callable[[], torch.Tensor]) -> tuple[str, Any]:
    """("done", what the tensors hold as text) or ("error", its type)."""
    try:
        with torch.no_grad():
            tensor = make()
    except Exception as error:
        return "unmade", type(error).__name__
    try:
        with torch.no_grad():
            outputs, _ = operation(api, tensor)
    except Exception as error:
        return "error", type(error).__name__
    if outputs and outputs[0].device.type == "meta":
        return "done", ""
    return "done", [str((out.to_dense() if out.layout != torch.strided else out).tolist()) for out in outputs]


def _meet(number: int) -> None:
    """A barrier that does not care about collectives that failed before it, as gloo's does."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"met/{number}/{dist.get_rank()}", "")
    store.wait([f"met/{number}/{rank}" for rank in range(dist.get_world_size())])


def every_kind(rank: int, ranks: int, names: list[str]) -> list[str]:
    """Where ours does otherwise than the plain collective."""
    wrong, meetings = [], itertools.count()
    for operation, name in itertools.product(OPERATIONS, names):
        if (operation, name) not in CRASHES:
            wanted = outcome(operation, dist, KINDS[name])
            _meet(next(meetings))
            for mode, config in CONFIGS.items():
                got = outcome(operation, _Coded(config), KINDS[name])
                # ours may take what gloo refuses, as long as the result is right: those are other tests' affair
                if got != wanted and not (wanted[0] == "error" and got[0] == "done"):
                    wrong.append(
                        f"{operation.__name__}, {name}, {mode}: wanted {wanted[0]} {str(wanted[1])[:60]}, got {str(got)[:90]}"
                    )
                _meet(next(meetings))
    return wrong


@pytest.mark.parametrize("part", tiers.mostly_full(range(3), [1], "the parts are alike"))
def test_every_layout_and_dtype(part: int) -> None:
    names = [name for name in KINDS if hasattr(torch, "complex32") or name != "complex32"][part::3]
    assert runner.run(every_kind, 2, names, timeout=60) == [[], []]


def test_sparse_tensors_are_summed() -> None:
    runner.run(sparse, 2)


def sparse(rank: int, ranks: int) -> None:
    for config in CONFIGS.values():
        tensor = (torch.eye(300) * (rank + 1)).to_sparse()
        comm.all_reduce(tensor, config=config)
        assert torch.equal(tensor.to_dense(), 3 * torch.eye(300))
