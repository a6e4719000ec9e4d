"""all_to_all, all_to_all_single."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.decision import decide
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.exchange import exchange_even, exchange_uneven
from ds_zipccl.comm.execution import execute, is_small, pass_small, sent_to_peers
from ds_zipccl.comm.group_state import group_size
from ds_zipccl.comm.request import Request
from ds_zipccl.comm.schedules.pipeline import Fragments, detached, open_exchange, run_pipeline
from ds_zipccl.config import DEFAULT, ZipcclConfig


@dataclass(frozen=True, slots=True)
class _ExchangeLists:
    """Input r goes to rank r; output r comes from rank r."""

    def run(self, ctx: OpContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        _exchange_segments(ctx, inputs, outputs)

    def enqueue(self, ctx: DeviceContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        exchange_uneven(ctx, inputs, outputs)


@dataclass(frozen=True, slots=True)
class _ExchangeSegments:
    """Segments of one input go to the ranks, segments of one output come from the ranks. ``leaving`` and ``coming``: their elements.
    ``even``: all segments of all ranks are equal."""

    leaving: Sequence[int]
    coming: Sequence[int]
    even: bool

    def run(self, ctx: OpContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        _exchange_segments(ctx, inputs[0].split(self.leaving), outputs[0].split(self.coming))

    def enqueue(self, ctx: DeviceContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        if self.even:
            exchange_even(ctx, inputs[0], outputs[0])
        else:
            exchange_uneven(ctx, inputs[0].split(self.leaving), outputs[0].split(self.coming))


def _exchange_segments(ctx: OpContext, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    sources = detached(inputs, outputs, outputs)
    leaving, coming = Fragments(ctx, sources), Fragments(ctx, [outputs[peer] for peer in ctx.peers])
    outputs[ctx.rank].copy_(sources[ctx.rank])
    with open_exchange(ctx) as exchange:

        def post(step: int) -> None:
            exchange.next_step()
            for peer, place in zip(ctx.peers, coming.at(step), strict=True):
                exchange.post_recv(peer, place)
            exchange.send_each(leaving.at(step), ctx.peers[::-1])

        def take(step: int) -> None:
            for peer, place in zip(ctx.peers, coming.at(step), strict=True):
                exchange.recv(peer, place)

        run_pipeline(max(leaving.steps, coming.steps), post, take)


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
    uncompressed_call: Callable[[], Any] | None = None,
) -> Any:
    """``torch.distributed.all_to_all``: ``input_tensor_list[r]`` goes to rank r. Sizes may differ, even where gloo refuses them."""
    leaving, coming = [[tensor.numel() for tensor in tensors] for tensors in (input_tensor_list, output_tensor_list)]
    request = Request(
        "all_to_all",
        input_tensor_list,
        output_tensor_list,
        group,
        async_op,
        config,
        role,
        plain=lambda inputs, outputs, later: dist.all_to_all(list(outputs), list(inputs), group, later),
        numel=None,
        sent=_elements_for_peers(leaving, group),
        uncompressed_call=uncompressed_call,
        problem=_misfit(leaving, coming, group),
        plain_fits=False,  # gloo refuses sizes that differ
    )
    return execute(decide(request), request, _ExchangeLists())


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
    uncompressed_call: Callable[[], Any] | None = None,
) -> Any:
    """``torch.distributed.all_to_all_single``: rows of dimension 0 go to other ranks, in equal parts or by the split sizes.

    Either all ranks give split sizes or none does.
    """
    even = not input_split_sizes and not output_split_sizes
    if even and is_small(input, config):
        call = uncompressed_call or (lambda: dist.all_to_all_single(output, input, None, None, group, async_op))
        return pass_small("all_to_all_single", role, sent_to_peers(input.nbytes, group), call)
    leaving, coming = _segments(input, input_split_sizes, group), _segments(output, output_split_sizes, group)
    request = Request(
        "all_to_all_single",
        [input],
        [output],
        group,
        async_op,
        config,
        role,
        plain=lambda inputs, outputs, later: dist.all_to_all_single(
            outputs[0], inputs[0], output_split_sizes, input_split_sizes, group, later
        ),
        numel=input.numel() if even else None,
        sent=_elements_for_peers(leaving, group),
        uncompressed_call=uncompressed_call,
        problem=_unsplit(input, leaving) or _unsplit(output, coming) or _misfit(leaving, coming, group),
    )
    return execute(decide(request), request, _ExchangeSegments(leaving, coming, even))


def _segments(tensor: torch.Tensor, rows: Sequence[int] | None, group: dist.ProcessGroup | None) -> list[int]:
    """Return the elements of each rank's segment."""
    if not rows:
        ranks = group_size(group)
        return [tensor.numel() // ranks] * ranks
    return [rows_of_rank * math.prod(tensor.shape[1:]) for rows_of_rank in rows]


def _elements_for_peers(sizes: Sequence[int], group: dist.ProcessGroup | None) -> int:
    rank = dist.get_rank(group)
    return sum(size for peer, size in enumerate(sizes) if peer != rank)


def _unsplit(tensor: torch.Tensor, sizes: Sequence[int]) -> str:
    """Return the reason why a tensor does not split into segments of ``sizes`` elements; "" if the tensor does."""
    if sum(sizes) == tensor.numel():
        return ""
    return f"a tensor of shape {tuple(tensor.shape)} does not split into segments of {list(sizes)} elements"


def _misfit(inputs: Sequence[int], outputs: Sequence[int], group: dist.ProcessGroup | None) -> str:
    """Return the reason why segments of ``inputs`` and ``outputs`` elements cannot be exchanged; "" if they can."""
    ranks, rank = group_size(group), dist.get_rank(group)
    if len(inputs) != ranks or len(outputs) != ranks:
        return f"one segment for each of {ranks} ranks is wanted, got {len(inputs)} inputs and {len(outputs)} outputs"
    if inputs[rank] != outputs[rank]:
        return f"this rank's own segment has {inputs[rank]} elements as input and {outputs[rank]} as output"
    return ""
