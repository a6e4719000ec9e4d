"""all_gather, all_gather_into_tensor, all_gather_coalesced."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Unpack

from ds_zipccl import tensors
from ds_zipccl.comm import engine
from ds_zipccl.comm.bases.in_place import Base
from ds_zipccl.comm.bases.state import GatheredParameter
from ds_zipccl.comm.execution import pass_small, run
from ds_zipccl.comm.group_state import group_size, group_state, is_member
from ds_zipccl.comm.request import CallOptions, ExactOptions, Options, Request, is_small
from ds_zipccl.comm.work import JoinedWork
from ds_zipccl.policy.admission import PassReason


def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    **options: Unpack[Options],
) -> Any:
    """``torch.distributed.all_gather``: ``tensor_list[r]`` becomes the ``tensor`` of rank r. Lists of several shapes pass: gloo refuses
    them, NCCL takes them."""
    ranks, call = group_size(group), CallOptions(**options)
    numel = ranks * tensor.numel()

    def plain(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], later: bool) -> Any:
        return dist.all_gather(list(outputs), inputs[0], group, later)

    if is_member(group) and [place.shape for place in tensor_list] != [tensor.shape] * ranks:
        uncompressed = partial(plain, [tensor], tensor_list, async_op)
        return pass_small("all_gather", call, numel * tensor.element_size(), group, uncompressed, PassReason.SHAPES)
    return run(Request("all_gather", [tensor], tensor_list, group, async_op, call, plain=plain, numel=numel))


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    base: Base | None = None,
    parameters: Sequence[GatheredParameter] = (),
    **options: Unpack[Options],
) -> Any:
    """``torch.distributed.all_gather_into_tensor``: shard r of the output is the input of rank r.

    The input may be the own shard of the output. ``base`` is the memory of an earlier gather, such as :data:`ds_zipccl.comm.IN_PLACE`.
    Either all ranks give a base or none does. Shards go as differences if all ranks prove to hold the same base.

    ``parameters``: those whose shards lie end to end in the input (:func:`ds_zipccl.comm.parameter`), on all ranks or on none. On groups in
    the order of streams their frames have agreed sizes, and the host waits only where a parameter has none. Elsewhere the
    operation begins with a small message of all ranks where one has a filled base, and what has not changed is copied.

    Raises:
        ValueError: the parameters are not those of the input.
        CommError: a base is damaged, or see :func:`.execution.execute`.
    """
    call, name = CallOptions(**options), "all_gather_into_tensor"
    state = group_state(group) if parameters else None
    if parameters and sum(one.numel for one in parameters) != input_tensor.numel():
        raise ValueError(
            f"the parameters have {[one.numel for one in parameters]} elements, the input has {input_tensor.numel()}; "
            "name all parameters of the input, in their order"
        )
    request = None
    if state is not None and not tensors.is_traced(type(output_tensor)):
        request = request_shards(name, [output_tensor], [input_tensor], group, async_op, call)
        request.parameters, chosen = parameters, engine.engine_of(state, output_tensor.device.type)
        if chosen.has_bases(request):
            return chosen.gather_parameters(request)
    if is_small(output_tensor, call.config):
        plain = partial(dist.all_gather_into_tensor, output_tensor, input_tensor, group, async_op)
        return pass_small(name, call, output_tensor.nbytes, group, plain)
    if request is None:
        request = request_shards(name, [output_tensor], [input_tensor], group, async_op, call)
    request.base, request.parameters = base, parameters
    return run(request)


def all_gather_coalesced(
    output_tensors: list[torch.Tensor],
    input_tensors: list[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    **options: Unpack[ExactOptions],
) -> Any:
    """:func:`all_gather_into_tensor` of several tensors of one dtype in one call, with the arguments of DeepSpeed's backend."""
    call = CallOptions(**options)
    return run(request_shards("all_gather_coalesced", output_tensors, input_tensors, group, async_op, call))


def request_shards(
    op: str,
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    async_op: bool,
    call: CallOptions,
) -> Request:
    ranks = group_size(group)

    def plain(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], later: bool) -> Any:
        handles = [
            dist.all_gather_into_tensor(whole, own, group, later) for own, whole in zip(inputs, outputs, strict=True)
        ]
        return JoinedWork(op, handles, outputs) if later and len(handles) != 1 else handles[0]

    own, whole = [tensor.numel() for tensor in input_tensors], [tensor.numel() for tensor in output_tensors]
    wrong = [numel * ranks for numel in own] != whole
    return Request(
        op,
        input_tensors,
        output_tensors,
        group,
        async_op,
        call,
        plain=plain,
        numel=sum(own) * ranks,
        problem=f"outputs must have {ranks} times the elements of the inputs {own}, got {whole}" if wrong else "",
    )
