"""Tensor parallelism as Megatron-DeepSpeed and GPT-NeoX have it, written for the tests.

The code is our own. It makes the calls that their ``mappings.py`` and ``layers.py`` make, in the same ways: functions are looked up in
``torch.distributed`` at each call, groups come from getters, calls are in autograd functions, and some are asynchronous with handles.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Grid:
    """An ``mpu`` as Megatron's. ``tensor`` neighbours share layers, and ranks with the same place in such a group share data."""

    def __init__(self, tensor: int) -> None:
        ranks = list(range(dist.get_world_size()))
        self.tensor = _own_group([ranks[first : first + tensor] for first in ranks[::tensor]])
        self.data = _own_group([ranks[first::tensor] for first in range(tensor)])

    def get_tensor_model_parallel_group(self) -> Any:
        return self.tensor

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.tensor.size()

    def get_tensor_model_parallel_rank(self) -> int:
        return self.tensor.rank()

    def get_data_parallel_group(self) -> Any:
        return self.data

    def get_data_parallel_world_size(self) -> int:
        return self.data.size()

    def get_data_parallel_rank(self) -> int:
        return self.data.rank()

    get_model_parallel_group = get_tensor_model_parallel_group
    get_model_parallel_world_size = get_tensor_model_parallel_world_size
    get_model_parallel_rank = get_tensor_model_parallel_rank


def _own_group(members: list[list[int]]) -> Any:
    groups = {tuple(ranks): dist.new_group(ranks) for ranks in members}
    return next(group for ranks, group in groups.items() if dist.get_rank() in ranks)


_grid: Grid | None = None


def begin(grid: Grid) -> None:
    """Use the groups of ``grid`` from now on; a module of the state of parallelism holds them in Megatron too."""
    global _grid
    _grid = grid


def tensor_group() -> Any:
    assert _grid is not None
    return _grid.get_tensor_model_parallel_group()


# ---- the collectives


def reduced(tensor: torch.Tensor) -> torch.Tensor:
    torch.distributed.all_reduce(tensor, group=tensor_group())
    return tensor


def gathered_columns(tensor: torch.Tensor) -> torch.Tensor:
    """The own place in the list is the input itself."""
    places = [torch.empty_like(tensor) for _ in range(tensor_group().size())]
    places[tensor_group().rank()] = tensor
    torch.distributed.all_gather(places, tensor, group=tensor_group())
    return torch.cat(places, dim=-1).contiguous()


def gathered_rows(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.new_empty(tensor.shape[0] * tensor_group().size(), *tensor.shape[1:])
    torch.distributed.all_gather_into_tensor(whole, tensor.contiguous(), group=tensor_group())
    return whole


def scattered_rows(tensor: torch.Tensor) -> torch.Tensor:
    part = tensor.new_empty(tensor.shape[0] // tensor_group().size(), *tensor.shape[1:])
    torch.distributed._reduce_scatter_base(part, tensor.contiguous(), group=tensor_group())
    return part


# ---- the autograd functions


class _LeaveRegion(torch.autograd.Function):
    """Sum the parts of all ranks; the gradient goes to each."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return reduced(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _LeaveRegionByRows(torch.autograd.Function):
    """Sum the parts of all ranks, and keep the own rows; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return scattered_rows(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gathered_rows(gradient)


class _GatherColumns(torch.autograd.Function):
    """Gather columns; each rank keeps the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return gathered_columns(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.chunk(tensor_group().size(), -1)[tensor_group().rank()].contiguous()


class _EnterRegion(torch.autograd.Function):
    """Multiply by the own columns of a weight. Collectives of the backward pass run while it computes. ``by_rows``: each rank has some rows
    of the input, which are gathered, in the backward pass again."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, weight: torch.Tensor, by_rows: bool) -> torch.Tensor:
        ctx.save_for_backward(tensor, weight)
        ctx.by_rows = by_rows
        return (gathered_rows(tensor) if by_rows else tensor) @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        tensor, weight = ctx.saved_tensors
        if ctx.by_rows:
            whole = tensor.new_empty(tensor.shape[0] * tensor_group().size(), *tensor.shape[1:])
            handle = torch.distributed.all_gather_into_tensor(whole, tensor, group=tensor_group(), async_op=True)
            found = gradient @ weight
            handle.wait()
            own = torch.empty_like(tensor)
            handle = torch.distributed._reduce_scatter_base(own, found, group=tensor_group(), async_op=True)
        else:
            whole, own = tensor, gradient @ weight
            handle = torch.distributed.all_reduce(own, group=tensor_group(), async_op=True)
        of_weight = gradient.flatten(0, -2).t() @ whole.flatten(0, -2)
        handle.wait()
        return own, of_weight, None


class Blocks(nn.Module):
    """Blocks of two layers, by columns and by rows, each on a part of the ranks, and a head whose logits are gathered."""

    def __init__(self, width: int, layers: int, by_rows: bool) -> None:
        super().__init__()
        parts = tensor_group().size()
        self.first = nn.ParameterList(nn.Parameter(torch.randn(4 * width // parts, width) / 8) for _ in range(layers))
        self.second = nn.ParameterList(nn.Parameter(torch.randn(width, 4 * width // parts) / 8) for _ in range(layers))
        self.head = nn.Parameter(torch.randn(width // parts, width) / 8)
        self.by_rows = by_rows

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.by_rows:
            tensor = tensor.chunk(tensor_group().size())[tensor_group().rank()].contiguous()
        for first, second in zip(self.first, self.second, strict=True):
            inner = torch.relu(_EnterRegion.apply(tensor, first, self.by_rows)) @ second.t()
            tensor = tensor + (_LeaveRegionByRows if self.by_rows else _LeaveRegion).apply(inner)
        logits = _GatherColumns.apply(_EnterRegion.apply(tensor, self.head, self.by_rows))
        return logits.float().square().mean()
