"""all_to_all, all_to_all_single."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Unpack

from ds_zipccl.comm.execution import pass_small, run
from ds_zipccl.comm.group_state import group_size
from ds_zipccl.comm.request import CallOptions, Options, Request, Segments, is_small


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    row_width: int | None = None,
    kind: str = "",
    **options: Unpack[Options],
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
        CallOptions(**options, kind=kind),
        plain=lambda inputs, outputs, later: dist.all_to_all(list(outputs), list(inputs), group, later),
        numel=None,
        problem=_misfit(leaving, coming, group),
        segments=Segments(leaving, coming, _row_width(input_tensor_list) if row_width is None else row_width),
    )
    return run(request)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    row_width: int | None = None,
    kind: str = "",
    **options: Unpack[Options],
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
    call = CallOptions(**options, kind=kind)
    if even and is_small(input, call.config):
        plain = partial(dist.all_to_all_single, output, input, None, None, group, async_op)
        return pass_small("all_to_all_single", call, input.nbytes, group, plain)
    leaving, coming = _segments(input, input_split_sizes, group), _segments(output, output_split_sizes, group)
    request = Request(
        "all_to_all_single",
        [input],
        [output],
        group,
        async_op,
        call,
        plain=lambda inputs, outputs, later: dist.all_to_all_single(
            outputs[0], inputs[0], output_split_sizes, input_split_sizes, group, later
        ),
        numel=input.numel() if even else None,
        problem=_unsplit(input, leaving) or _unsplit(output, coming) or _misfit(leaving, coming, group),
        segments=Segments(leaving, coming, _row_width([input]) if row_width is None else row_width),
    )
    return run(request)


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
