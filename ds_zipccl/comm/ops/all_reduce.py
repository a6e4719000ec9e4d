"""all_reduce, all_reduce_coalesced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.decision import decide
from ds_zipccl.comm.device import sums
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.levels import levels_of
from ds_zipccl.comm.execution import execute, is_small, pass_small, sent_to_peers
from ds_zipccl.comm.group_state import group_size
from ds_zipccl.comm.host.gather import open_gather
from ds_zipccl.comm.host.pipeline import Fragments, run_pipeline
from ds_zipccl.comm.host.repeats.exchange import gathered_shards, summed_shards
from ds_zipccl.comm.host.repeats.memory import Places, is_again
from ds_zipccl.comm.host.replicated import sum_alike
from ds_zipccl.comm.host.sums import open_adder
from ds_zipccl.comm.reduction_order import Reduction
from ds_zipccl.comm.request import Request, lossy_here, set_sum
from ds_zipccl.comm.shadow_check import Plain
from ds_zipccl.comm.spans import cut, length
from ds_zipccl.comm.work import JoinedWork
from ds_zipccl.config import DEFAULT, ZipcclConfig
from ds_zipccl.lossy import LossyCodec

#: Kind of the sums of tensors that may be the same on all ranks: counters and the choice of a schedule tell them from other sums.
_REPLICATED = "replicated"
#: Exchange of hashes; the sum over messages has the exchanges 0 and 1.
_HASHES = 2


@dataclass(frozen=True, slots=True)
class ReduceScatterGather:
    """Each rank sums a shard of the tensors laid end to end, and gathers each fragment of the sum as soon as it is ready."""

    reduction: Reduction
    nodes: Sequence[Sequence[int]]

    def run(self, ctx: OpContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        chunk = ctx.transport.ring_chunk("all_reduce", whole.numel(), whole.element_size())
        slices = cut(whole.numel(), chunk, ctx.size)
        shards = Fragments(ctx, [whole[part] for part in slices], exchanges=2)
        places = [Fragments(ctx, [whole[part]], exchanges=2) for part in slices]
        no_bases = Fragments(ctx, [])
        with (
            open_adder(ctx, shards, self.reduction, [slices[ctx.rank]], chunk) as adder,
            open_gather(ctx, len(adder.stages), places) as gathering,
        ):

            def add(step: int) -> None:
                gathering.expect(step)
                adder.take(shards.at(step)[ctx.rank])
                gathering.send(places[ctx.rank], no_bases, step)

            run_pipeline(shards.steps, *adder.stages, add, *gathering.stages)
        adder.finish(whole)
        if len(outputs) > 1:
            for flat, part in zip(outputs, whole.split([flat.numel() for flat in outputs]), strict=True):
                flat.copy_(part)

    def enqueue(self, ctx: DeviceContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        sums.all_reduce(ctx, levels_of(ctx, self.nodes), outputs, self.reduction.divisor)


@dataclass(frozen=True, slots=True)
class _Replicated:
    """A sum of a tensor that may be the same on all ranks; where it is, only hashes travel. Otherwise the sum goes as ``otherwise``."""

    otherwise: ReduceScatterGather

    def run(self, ctx: OpContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        (whole,) = outputs
        if ctx.staging is None and not ctx.nodes and whole.numel():
            chunk = ctx.transport.ring_chunk("all_reduce", whole.numel(), whole.element_size())
            if sum_alike(ctx, whole, self.otherwise.reduction, chunk, _HASHES):
                ctx.count(2 * whole.nbytes * (ctx.size - 1) // ctx.size, 0)  # as the plain collective sends
                return
        self.otherwise.run(ctx, inputs, outputs)

    def enqueue(self, ctx: DeviceContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        self.otherwise.enqueue(ctx, inputs, outputs)


def _places(ctx: OpContext, numel: int, itemsize: int) -> Sequence[Places]:
    """Return the segments of :class:`ReduceScatterGather`: contributions, then sums."""
    chunk = ctx.transport.ring_chunk("all_reduce", numel, itemsize)
    numels = [length(part) for part in cut(numel, chunk, ctx.size)]
    return [places(ctx, numels, itemsize, exchanges=2) for places in (summed_shards, gathered_shards)]


def all_reduce(
    tensor: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
    uncompressed_call: Callable[[], Any] | None = None,
    replicated: bool = False,
    lossy: LossyCodec | None = None,
) -> Any:
    """``torch.distributed.all_reduce``: in place, the same bits on every rank.

    ``replicated``, equal on all ranks: the tensor probably has the same bits on all ranks. The ranks then compare hashes of 16 bytes first.
    If all are equal, each rank adds up by itself, with the bits of the sum over messages, and nothing else travels. Groups in the order of
    streams and CUDA tensors take no notice.

    With ``lossy``, equal tensors are added exactly, others lossily. Every schedule of a lossy sum compares the hashes first, so that the
    tensors alone decide which of the two, not a time, a schedule or a size of memory.
    """
    if is_small(tensor, config):
        call = uncompressed_call or (lambda: dist.all_reduce(tensor, op, group, async_op))
        sent = 2 * sent_to_peers(tensor.nbytes, group)
        return pass_small("all_reduce", role, sent, call, kind=_REPLICATED if replicated else "")

    def plain(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], later: bool) -> Any:
        return dist.all_reduce(outputs[0], op, group, later)

    kind = _REPLICATED if replicated else ""
    return _all_reduce("all_reduce", [tensor], op, group, async_op, config, role, plain, uncompressed_call, lossy, kind)


def all_reduce_coalesced(
    tensors: list[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
    uncompressed_call: Callable[[], Any] | None = None,
    lossy: LossyCodec | None = None,
) -> Any:
    """``torch.distributed.all_reduce_coalesced``: one all-reduce over the tensors laid end to end, in place."""

    def plain(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], later: bool) -> Any:
        handle = dist.all_reduce_coalesced(list(outputs), op, group, later)
        return JoinedWork("all_reduce_coalesced", [handle], outputs) if handle is not None else None

    return _all_reduce(
        "all_reduce_coalesced", tensors, op, group, async_op, config, role, plain, uncompressed_call, lossy
    )


def _all_reduce(
    name: str,
    tensors: Sequence[torch.Tensor],
    op: Any,
    group: dist.ProcessGroup | None,
    async_op: bool,
    config: ZipcclConfig,
    role: str,
    plain: Plain,
    uncompressed_call: Callable[[], Any] | None,
    lossy: LossyCodec | None,
    kind: str = "",
) -> Any:
    ranks = group_size(group)
    numel = sum(tensor.numel() for tensor in tensors)
    lossy = lossy_here(lossy, next(((one.dtype, one.device) for one in tensors), None), group, name, role)
    request = Request(
        name,
        [],
        tensors,
        group,
        async_op,
        config,
        role,
        plain=plain,
        numel=numel,
        sent=2 * numel * (ranks - 1) / ranks,
        uncompressed_call=uncompressed_call,
        memory_order=name == "all_reduce",  # the plain all-reduce of several tensors lays copies end to end
        kind=kind,
        again=is_again(config, role),
        places=lambda ctx: _places(ctx, numel, tensors[0].element_size()),
        lossy=lossy,
    )
    reduction, _, nodes = set_sum(request, op)
    schedule = ReduceScatterGather(reduction, nodes)
    return execute(decide(request), request, _Replicated(schedule) if kind else schedule)
