"""all_to_all, all_to_all_single."""

from __future__ import annotations

import functools
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
from ds_zipccl.comm.host.exchange_by_node import exchange_by_node
from ds_zipccl.comm.host.frames import Rows, rows_of
from ds_zipccl.comm.host.pipeline import Fragments, detached, open_exchange, run_pipeline
from ds_zipccl.comm.host.repeats.exchange import segments_of
from ds_zipccl.comm.host.repeats.memory import is_again
from ds_zipccl.comm.request import Request, lossy_here
from ds_zipccl.config import DEFAULT, ZipcclConfig
from ds_zipccl.lossy import LossyCodec
from ds_zipccl.policy import admission


@dataclass(frozen=True, slots=True)
class _ExchangeLists:
    """Input r goes to rank r; output r comes from rank r. ``row_width``, ``kind``: see :class:`ds_zipccl.comm.request.Request`."""

    row_width: int
    kind: str

    def run(self, ctx: OpContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        _exchange_segments(ctx, inputs, outputs, rows_of(ctx, self.row_width, self.kind))

    def enqueue(self, ctx: DeviceContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        exchange_uneven(ctx, inputs, outputs)


@dataclass(frozen=True, slots=True)
class _ExchangeSegments:
    """Segments of one input go to the ranks, segments of one output come from the ranks. ``leaving`` and ``coming``: their elements.
    ``even``: all segments of all ranks are equal. ``row_width``, ``kind``: see :class:`ds_zipccl.comm.request.Request`."""

    leaving: Sequence[int]
    coming: Sequence[int]
    even: bool
    row_width: int
    kind: str

    def run(self, ctx: OpContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        rows, places = rows_of(ctx, self.row_width, self.kind), outputs[0].split(self.coming)
        if ctx.nodes:
            exchange_by_node(ctx, inputs[0], self.leaving, places, self.even, rows, _is_small(ctx, inputs))
        else:
            _exchange_segments(ctx, inputs[0].split(self.leaving), places, rows)

    def enqueue(self, ctx: DeviceContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        if self.even:
            exchange_even(ctx, inputs[0], outputs[0])
        else:
            exchange_uneven(ctx, inputs[0].split(self.leaving), outputs[0].split(self.coming))


def _exchange_segments(
    ctx: OpContext, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], rows: Rows | None
) -> None:
    sources = detached(inputs, outputs, outputs)
    exact = _is_small(ctx, inputs)
    leaving, coming = Fragments(ctx, sources), Fragments(ctx, [outputs[peer] for peer in ctx.peers])
    outputs[ctx.rank].copy_(sources[ctx.rank])
    with open_exchange(ctx, rows=rows, exact=exact) as exchange:
        for peer in ctx.peers:
            exchange.announce(leaving[peer], peer)
        # A frame refers to rows of earlier frames. In the home of a segment, an arriving fragment writes over them.
        lasting = [peer for peer in ctx.peers if sources[peer].data_ptr() != outputs[peer].data_ptr()]
        lasting = [peer for peer in lasting if not exchange.goes_as_hashes(peer)]
        sent_rows = exchange.search_rows({peer: sources[peer] for peer in lasting})
        received = dict.fromkeys(ctx.peers, 0)  # elements

        def post(step: int) -> None:
            exchange.next_step()
            for peer, place in zip(ctx.peers, coming.at(step), strict=True):
                exchange.post_recv(peer, place)
            exchange.send_each(leaving.at(step), ctx.peers[::-1], sent_rows)

        def take(step: int) -> None:
            for peer, place in zip(ctx.peers, coming.at(step), strict=True):
                exchange.recv(peer, place, earlier=outputs[peer][: received[peer]])
                received[peer] += place.numel()

        run_pipeline(max(leaving.steps, coming.steps), post, take)
        if sent_rows is not None:
            sent_rows.release()


def _is_small(ctx: OpContext, inputs: Sequence[torch.Tensor]) -> bool:
    """Return whether the tensors that this rank sends are too small to be lossy. Ranks may differ: a frame tells its values."""
    return admission.is_small(sum(flat.nbytes for flat in inputs), ctx.config)


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
    uncompressed_call: Callable[[], Any] | None = None,
    row_width: int | None = None,
    kind: str = "",
    lossy: LossyCodec | None = None,
) -> Any:
    """``torch.distributed.all_to_all``: ``input_tensor_list[r]`` goes to rank r. Sizes may differ, even where gloo refuses them.

    ``row_width``, ``kind``: as for :func:`all_to_all_single`; None is the last dimension that all inputs have in common.
    """
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
        row_width=_row_width(input_tensor_list) if row_width is None else row_width,
        kind=kind,
        again=is_again(config, role),
        places=functools.partial(segments_of, leaving, coming),
        lossy=lossy_here(
            lossy, next(((one.dtype, one.device) for one in input_tensor_list), None), group, "all_to_all", role
        ),
    )
    return execute(decide(request), request, _ExchangeLists(request.row_width, kind))


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
    row_width: int | None = None,
    kind: str = "",
    lossy: LossyCodec | None = None,
) -> Any:
    """``torch.distributed.all_to_all_single``: rows of dimension 0 go to other ranks, in equal parts or by the split sizes.

    Either all ranks give split sizes or none does.

    Args:
        row_width: elements of a row that may occur several times, with ``role`` "ep"; None: the input's last dimension where it has two
            dimensions or more; 0: no rows. Ranks may differ.
        kind: "dispatch", "combine", "dispatch.bwd" or "combine.bwd" where the call is an exchange of a layer of experts, equal on all
            ranks.
    """
    even = not input_split_sizes and not output_split_sizes
    if even and is_small(input, config):
        call = uncompressed_call or (lambda: dist.all_to_all_single(output, input, None, None, group, async_op))
        return pass_small("all_to_all_single", role, sent_to_peers(input.nbytes, group), call, kind=kind)
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
        row_width=_row_width([input]) if row_width is None else row_width,
        kind=kind,
        again=is_again(config, role),
        places=functools.partial(segments_of, leaving, coming),
        lossy=lossy_here(lossy, (input.dtype, input.device), group, "all_to_all_single", role),
    )
    schedule = _ExchangeSegments(leaving, coming, even, request.row_width, kind)
    return execute(decide(request), request, schedule)


def _row_width(tensors: Sequence[torch.Tensor]) -> int:
    """Return the last dimension that all tensors have in common; 0 where there is none, or where a tensor has less than two dimensions."""
    widths = {tensor.shape[-1] if tensor.dim() >= 2 else 0 for tensor in tensors}
    return widths.pop() if len(widths) == 1 else 0


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
