"""all_gather, all_gather_into_tensor, all_gather_coalesced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.comm.bases import agreed as agreements
from ds_zipccl.comm.bases import negotiation
from ds_zipccl.comm.bases.agreed import Agreed
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.decision import decide
from ds_zipccl.comm.device import gather as on_device
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.gather import Shard
from ds_zipccl.comm.device.streams import Stage
from ds_zipccl.comm.execution import execute, is_small, pass_small, sent_to_peers
from ds_zipccl.comm.group_state import group_size
from ds_zipccl.comm.host.gather import gather
from ds_zipccl.comm.host.repeats.exchange import gathered_shards
from ds_zipccl.comm.host.repeats.memory import is_again
from ds_zipccl.comm.request import Request, lossy_here
from ds_zipccl.comm.work import JoinedWork
from ds_zipccl.config import DEFAULT, ZipcclConfig
from ds_zipccl.lossy import LossyCodec


@dataclass(frozen=True, slots=True)
class _GatherLists:
    """A gather of one tensor; output r is the place of rank r."""

    def run(self, ctx: OpContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        gather(ctx, 0, inputs, [[place] for place in outputs])

    def enqueue(self, ctx: DeviceContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        (own,) = inputs
        with ctx.streams.on(Stage.DECODE):  # NCCL's gather of a list has a temporary too
            whole = tensors.empty(own.numel() * ctx.size, own.dtype, own.device)
            ctx.streams.order(Stage.DECODE, Stage.ENCODE)
        on_device.gather(ctx, [Shard(own, whole, [own.numel()])])
        for place, part in zip(outputs, equal_shards(whole, ctx.size), strict=True):
            ctx.copy(part, place)


@dataclass(frozen=True, slots=True)
class GatherShards:
    """A gather in which each output consists of the shards of all ranks. With ``base`` the output is a single one, and its shards go as
    differences if all ranks hold the same base. With ``agreed`` the shard of the single output consists of these parameters."""

    base: negotiation.Base | None
    agreed: Sequence[Agreed] = ()

    def run(self, ctx: OpContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        places = list(zip(*(equal_shards(whole, ctx.size) for whole in outputs), strict=True))
        if self.base is not None and ctx.with_base:
            negotiation.gather(ctx, inputs[0], [place for (place,) in places], self.base)
        else:
            gather(ctx, 0, inputs, places)

    def enqueue(self, ctx: DeviceContext, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        shards = [Shard(own, whole, [own.numel()]) for own, whole in zip(inputs, outputs, strict=True)]
        if self.agreed:
            agreements.gather_parameters(ctx, inputs[0], outputs[0], self.agreed)
        elif self.base is not None and ctx.with_base:
            self.base.enqueue(ctx, shards[0])
        else:
            on_device.gather(ctx, shards)


def equal_shards(flat: torch.Tensor, ranks: int) -> Sequence[torch.Tensor]:
    """Return equal shards of a flat tensor, one for each rank."""
    shards: Sequence[torch.Tensor] = flat.split([flat.numel() // ranks] * ranks)
    return shards


def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
    uncompressed_call: Callable[[], Any] | None = None,
    lossy: LossyCodec | None = None,
) -> Any:
    """``torch.distributed.all_gather``: ``tensor_list[r]`` becomes the ``tensor`` of rank r. All tensors have one shape."""
    ranks = group_size(group)
    wrong = len(tensor_list) != ranks or any(place.shape != tensor.shape for place in tensor_list)
    shapes = [tuple(place.shape) for place in tensor_list]
    request = Request(
        "all_gather",
        [tensor],
        tensor_list,
        group,
        async_op,
        config,
        role,
        plain=lambda inputs, outputs, later: dist.all_gather(list(outputs), inputs[0], group, later),
        numel=tensor.numel() * ranks,
        sent=tensor.numel() * (ranks - 1),
        uncompressed_call=uncompressed_call,
        problem=f"tensor_list must have {ranks} tensors of shape {tuple(tensor.shape)}, got {shapes}" if wrong else "",
        again=is_again(config, role),
        places=lambda ctx: [gathered_shards(ctx, [tensor.numel()] * ctx.size, tensor.element_size())],
        lossy=lossy_here(lossy, (tensor.dtype, tensor.device), group, "all_gather", role),
    )
    return execute(decide(request), request, _GatherLists())


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
    base: negotiation.Base | None = None,
    agreed: Sequence[Agreed] = (),
    uncompressed_call: Callable[[], Any] | None = None,
    lossy: LossyCodec | None = None,
) -> Any:
    """``torch.distributed.all_gather_into_tensor``: shard r of the output is the input of rank r.

    The input may be the own shard of the output. ``base`` is the memory of an earlier gather, such as :data:`ds_zipccl.comm.IN_PLACE`.
    Either all ranks give a base or none does. Shards go as differences if all ranks prove to hold the same base.

    ``agreed``: the parameters whose shards lie end to end in the input, on all ranks or on none. On groups in the order of streams their
    frames have agreed sizes, see :mod:`.agreement`; the host waits only where a parameter has none.
    """
    if is_small(output_tensor, config):
        call = uncompressed_call or (lambda: dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op))
        return pass_small("all_gather_into_tensor", role, sent_to_peers(output_tensor.nbytes, group), call)
    request = request_shards(
        "all_gather_into_tensor", [output_tensor], [input_tensor], group, async_op, config, role, uncompressed_call
    )
    request.lossy = lossy_here(lossy, (input_tensor.dtype, input_tensor.device), group, request.op, role)
    if request.lossy is not None and (base is not None or agreed):
        raise ValueError(
            f"all_gather_into_tensor: got lossy={request.lossy} beside a base or agreed sizes, which are for parameters and exact; "
            "leave one of them out"
        )
    if base is not None:
        request.based, request.token = True, base.token()
    else:
        request.again = is_again(config, role)
        request.places = lambda ctx: [
            gathered_shards(ctx, [input_tensor.numel()] * ctx.size, input_tensor.element_size())
        ]
    if agreed and sum(one.numel for one in agreed) != input_tensor.numel():
        raise ValueError(
            f"agreed: the parameters have {[one.numel for one in agreed]} elements, the input has {input_tensor.numel()}; "
            "name all parameters of the input, in their order"
        )
    return execute(decide(request), request, GatherShards(base, agreed))


def all_gather_coalesced(
    output_tensors: list[torch.Tensor],
    input_tensors: list[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
    uncompressed_call: Callable[[], Any] | None = None,
) -> Any:
    """:func:`all_gather_into_tensor` of several tensors of one dtype in one call, with the arguments of DeepSpeed's backend."""
    request = request_shards(
        "all_gather_coalesced", output_tensors, input_tensors, group, async_op, config, role, uncompressed_call
    )
    return execute(decide(request), request, GatherShards(None))


def request_shards(
    op: str,
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    async_op: bool,
    config: ZipcclConfig,
    role: str,
    uncompressed_call: Callable[[], Any] | None,
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
        config,
        role,
        plain=plain,
        numel=sum(own) * ranks,
        sent=sum(own) * (ranks - 1),
        uncompressed_call=uncompressed_call,
        problem=f"outputs must have {ranks} times the elements of the inputs {own}, got {whole}" if wrong else "",
        flat=True,
    )
