"""Every collective once, by name: for tests that run all of them on torch.distributed, on ours, or on both."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ds_zipccl import comm
from ds_zipccl.config import ZipcclConfig


def arguments(mine: torch.Tensor, ranks: int) -> dict[str, tuple[Any, ...]]:
    """Name of a collective -> arguments of one call with ``mine``, of which each rank has as much: the tensors that it writes come first.

    Elements behind the last that divides by ``ranks`` are left out.
    """
    mine = mine[: len(mine) // ranks * ranks]
    whole, shard = mine.repeat(ranks), mine[: len(mine) // ranks].clone()
    return {
        "all_gather": (list(whole.clone().chunk(ranks)), mine),
        "all_gather_into_tensor": (whole, mine),
        "all_gather_coalesced": ([whole.clone(), whole[: 4 * ranks].clone()], [mine, mine[:4]]),
        "broadcast": (mine.clone(), 1),
        "all_to_all": (list(torch.zeros_like(mine).chunk(ranks)), list(mine.chunk(ranks))),
        "all_to_all_single": (torch.zeros_like(mine), mine),
        "all_reduce": (mine.clone(),),
        "all_reduce_coalesced": ([mine.clone(), shard.clone()],),
        "reduce": (mine.clone(), 1),
        "reduce_scatter_tensor": (shard.clone(), mine),
        "reduce_scatter": (shard, list(mine.chunk(ranks))),
        "reduce_to_owners": (mine.clone(), [(len(mine), (0,))]),
    }


class Coded:
    """The operations of ds_zipccl.comm with a config, and more arguments by name, bound."""

    def __init__(self, config: ZipcclConfig, **more: Any) -> None:
        self._config, self._more = config, more

    def __getattr__(self, name: str) -> Any:
        return partial(getattr(comm, name), config=self._config, **self._more)
