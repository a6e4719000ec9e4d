"""A rank of tests that gathers parameters with bases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl import comm
from ds_zipccl.codecs import decompress
from ds_zipccl.comm.host import cached
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.telemetry import counters

CONFIG = ZipcclConfig(enabled=True, mode="always", min_bytes=0)
#: Elements of a shard: of many bytes, too few for differences, of an odd number of bytes.
SHARDS = (40_000, 1_000, 70_001)
FULL, OTHER = "nothing was gathered there", "a rank holds something else"
MISS, VERSION = cached.CHANGED, cached.VERSION


def refusing(numel: int) -> Callable[..., torch.Tensor]:
    """A function in place of ``decompress`` that finds a damaged frame where the output has ``numel`` elements."""

    def damaged(frame: torch.Tensor, out: torch.Tensor, *arguments: Any, **more: Any) -> torch.Tensor:
        if out.numel() == numel:
            frame = frame.clone()
            frame[4] = 9
        return decompress(frame, out, *arguments, **more)

    return damaged


class Rank:
    """What a ZeRO-3 rank does with frozen parameters: gather some of them at a time into new memory, and step."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        kind: str = "host",
        config: ZipcclConfig = CONFIG,
        dtype: torch.dtype = torch.bfloat16,
        sizes: Sequence[int] = SHARDS,
    ) -> None:
        self.rank, self.ranks, self.config, self.dtype, self.sizes = rank, ranks, config, dtype, sizes
        self.shards = [self._words(number, shard, rank) for number, shard in enumerate(sizes)]
        self.slots = comm.allocate_bases([(shard, dtype) for shard in sizes], kind, dist.group.WORLD)
        self.cached = [
            comm.parameter(dist.group.WORLD, "cpu", f"p{number}", shard, dtype) for number, shard in enumerate(sizes)
        ]
        for one, slot in zip(self.cached, self.slots, strict=True):
            one.hold(slot)

    def _words(self, number: int, shard: int, rank: int) -> torch.Tensor:
        made = torch.randn(shard, generator=torch.Generator().manual_seed(10 * number + rank))
        return (100 * made).to(self.dtype)

    def start(self, chosen: Sequence[int], later: bool = True, also: int = 0) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Output, wanted output and handle of a gather of parameters, and of ``also`` elements of one without a base."""
        own = torch.cat([self.shards[number] for number in chosen] + [self._words(9, also, self.rank)])
        wanted = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(wanted, own.view(torch.uint8).view(self.dtype))
        parameters = [self.cached[number] for number in chosen]
        parameters += [comm.parameter(dist.group.WORLD, "cpu", "other", also)] * bool(also)
        whole = torch.full((own.numel() * self.ranks,), 77).to(self.dtype)
        handle = comm.all_gather_into_tensor(
            whole, own, None, later, parameters=parameters, config=self.config, role="zero_param"
        )
        return whole, torch.cat(wanted), handle

    def gather(self, *chosen: int, later: bool = True, also: int = 0) -> tuple[dict[str, int], int]:
        """Outcomes of a gather, which is checked, and the bytes that it sent."""
        counters.reset()
        whole, wanted, handle = self.start(chosen, later, also)
        if later:
            assert handle.wait() and handle.is_completed()
        assert torch.equal(whole.view(torch.uint8), wanted.view(torch.uint8))
        rows = {row["op"]: row for row in counters.rows()}
        self.agreements = rows["agreement"]["calls"] if "agreement" in rows else 0
        row = rows["all_gather_into_tensor"]
        return row["differences"], row["wire_bytes"] + row["passed_bytes"]

    def step(self, *trained: int) -> None:
        for number in trained:
            self.shards[number][5:9] += 1

    def settle(self) -> Rank:
        """Gather everything twice; return this rank."""
        self.gather(0, 1, 2)
        assert self.gather(0, 1, 2) == ({"": 1}, 0)
        return self
