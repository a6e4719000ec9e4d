"""Sums of tensors that are the same on all ranks: the ranks compare hashes, and each rank adds its own tensor up by itself.

A rank cannot know by itself that its tensor is the same elsewhere. So each rank tells every other rank a hash of 16 bytes first. All ranks
see the same hashes, so that all of them add by themselves or none does.
"""

from __future__ import annotations

import torch

from ds_zipccl import tensors
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.group_state import region_hash
from ds_zipccl.comm.host.buffer_pool import PooledBuffers
from ds_zipccl.comm.host.pipeline import Exchange, Fragments, open_exchange
from ds_zipccl.comm.reduction_order import Reduction

HASH_BYTES = 16


class _Alike:
    """:class:`ds_zipccl.comm.reduction_order.Contributions` of ranks that all have the words of ``own``. ``copy`` has them as well: sums
    may be written to the memory of ``own``."""

    def __init__(self, rank: int, own: torch.Tensor, copy: torch.Tensor, exchange: Exchange) -> None:
        self.rank, self.own, self._copy, self._exchange = rank, own, copy, exchange

    def take(self, rank: int, into: torch.Tensor) -> torch.Tensor:
        return self._copy

    def add(self, rank: int, sums: torch.Tensor) -> None:
        self._exchange.add(self._copy, sums)

    def add_taken(self, taken: torch.Tensor, sums: torch.Tensor) -> None:
        self._exchange.add(taken, sums)


def sum_alike(ctx: OpContext, whole: torch.Tensor, reduction: Reduction, chunk: int, index: int) -> bool:
    """Write the sum of all ranks' tensors to flat ``whole`` if they are the same, and return whether they are; blocks.

    The sum has the bits of the sum over messages. ``chunk``: size of the message's chunks, in elements. ``index``: the exchange of the
    hashes.
    """
    own = tensors.of_buffer(bytearray(region_hash(whole)))
    answer = tensors.empty(HASH_BYTES, torch.uint8)
    alike = True
    with open_exchange(ctx, index, control=True) as exchange:
        for peer in ctx.peers:
            exchange.post_recv(peer, answer)
        exchange.send(own, *ctx.peers)
        for peer in ctx.peers:
            alike &= torch.equal(exchange.recv(peer, answer), own)
        if alike:
            flushing = ctx.flushing_ranks()
            at = 0
            for part in Fragments(ctx, [whole])[0]:
                buffers = PooledBuffers()
                copy = buffers.empty(part.numel(), part.dtype, part.device).copy_(part)
                same = _Alike(ctx.rank, part, copy, exchange)
                reduction.fold(same, part, [slice(at, at + part.numel())], chunk, flushing)
                buffers.release()
                at += part.numel()
            reduction.finish(whole, flushing[ctx.rank])
    return alike
