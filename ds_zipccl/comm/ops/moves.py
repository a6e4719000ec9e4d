"""Collectives that move bits unchanged: gathers, broadcast, all-to-all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl.comm.delta import negotiation
from ds_zipccl.comm.execution import Call, Operation, group_rank, is_member, is_small, others, pass_small, run
from ds_zipccl.comm.frames import Link
from ds_zipccl.comm.group_state import resolved, size_of
from ds_zipccl.comm.schedules.gather import detached, gather
from ds_zipccl.comm.schedules.pipeline import Pieces, posting, pump
from ds_zipccl.comm.work import JoinedWork
from ds_zipccl.config import DEFAULT, ZipcclConfig


def split(flat: torch.Tensor, ranks: int) -> Sequence[torch.Tensor]:
    """Equal shards, one per rank."""
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
) -> Any:
    """``torch.distributed.all_gather``: ``tensor_list[r]`` becomes the ``tensor`` of rank r, which all have one shape."""
    ranks = size_of(group)
    wrong = len(tensor_list) != ranks or any(place.shape != tensor.shape for place in tensor_list)
    shapes = [tuple(place.shape) for place in tensor_list]
    operation = Operation(
        name="all_gather",
        inputs=[tensor],
        outputs=tensor_list,
        plain=lambda inputs, outputs, later: dist.all_gather(list(outputs), inputs[0], group, later),
        coded=lambda link, inputs, outputs: gather(link, 0, inputs, [[place] for place in outputs]),
        numel=tensor.numel() * ranks,
        sent=tensor.numel() * (ranks - 1),
        problem=f"tensor_list must have {ranks} tensors of shape {tuple(tensor.shape)}, got {shapes}" if wrong else "",
    )
    return run(operation, Call(group, async_op, config, role))


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
    base: negotiation.Base | None = None,
) -> Any:
    """``torch.distributed.all_gather_into_tensor``: shard r of the output is the input of rank r.

    The input may be the own shard of the output. ``base``, which all ranks give or none, names what they may hold of an earlier gather,
    such as :data:`ds_zipccl.comm.IN_PLACE`: shards then go as differences where all ranks prove to hold it.
    """
    name, call = "all_gather_into_tensor", Call(group, async_op, config, role)
    if is_small(output_tensor, config):
        sent = others(output_tensor.nbytes, group)
        return pass_small(
            name, call, sent, lambda: dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        )
    return _gather_tensors(name, [output_tensor], [input_tensor], call, base)


def all_gather_coalesced(
    output_tensors: list[torch.Tensor],
    input_tensors: list[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
) -> Any:
    """:func:`all_gather_into_tensor` of several tensors of one dtype at once: the form DeepSpeed's backend declares."""
    return _gather_tensors("all_gather_coalesced", output_tensors, input_tensors, Call(group, async_op, config, role))


def _gather_tensors(
    name: str,
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    call: Call,
    base: negotiation.Base | None = None,
) -> Any:
    ranks = size_of(call.group)

    def plain(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], later: bool) -> Any:
        handles = [
            dist.all_gather_into_tensor(whole, own, call.group, later)
            for own, whole in zip(inputs, outputs, strict=True)
        ]
        return JoinedWork(name, handles, outputs) if later and len(handles) != 1 else handles[0]

    def coded(link: Link, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        if base is not None and link.differs:
            return negotiation.gather(link, inputs[0], split(outputs[0], link.size), base)
        gather(link, 0, inputs, list(zip(*(split(whole, link.size) for whole in outputs), strict=True)))

    own, whole = [tensor.numel() for tensor in input_tensors], [tensor.numel() for tensor in output_tensors]
    wrong = [numel * ranks for numel in own] != whole
    operation = Operation(
        name=name,
        inputs=input_tensors,
        outputs=output_tensors,
        plain=plain,
        coded=coded,
        numel=sum(own) * ranks,
        sent=sum(own) * (ranks - 1),
        flat=True,
        based=base is not None,
        token=base.token() if base is not None else None,
        problem=f"outputs must have {ranks} times the elements of the inputs {own}, got {whole}" if wrong else "",
    )
    return run(operation, call)


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
) -> Any:
    """``torch.distributed.broadcast``: every rank's ``tensor`` becomes that of global rank ``src`` (or group rank)."""
    if not is_member(group):
        return dist.broadcast(tensor, src, group, async_op)
    call = Call(group, async_op, config, role)
    if src is not None and is_small(tensor, config):
        sent = tensor.nbytes if src == dist.get_rank() else 0
        return pass_small("broadcast", call, sent, lambda: dist.broadcast(tensor, src, group, async_op))
    root = group_rank(group, src, group_src)
    root_globally = dist.get_global_rank(resolved(group), root)
    sends = dist.get_rank(group) == root

    def coded(link: Link, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        pieces = Pieces(link, [*inputs, *outputs])
        with posting(link) as exchange:

            def post(turn: int) -> None:
                exchange.turn()
                for piece in pieces.at(turn):
                    exchange.send(piece, *link.peers) if sends else exchange.expect(root, piece)

            def take(turn: int) -> None:
                for piece in pieces.at(turn):
                    sends or exchange.receive(root, piece)

            pump(pieces.turns, post, take)

    operation = Operation(
        name="broadcast",
        inputs=[tensor] if sends else [],
        outputs=[] if sends else [tensor],
        plain=lambda inputs, outputs, later: dist.broadcast([*inputs, *outputs][0], root_globally, group, later),
        coded=coded,
        numel=tensor.numel(),
        sent=tensor.numel() * sends,
        memory_order=True,
    )
    return run(operation, call)


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "dp",
) -> Any:
    """``torch.distributed.all_to_all``: ``input_tensor_list[r]`` goes to rank r; sizes may differ, also where gloo refuses."""
    leaving, coming = [[tensor.numel() for tensor in tensors] for tensors in (input_tensor_list, output_tensor_list)]
    operation = Operation(
        name="all_to_all",
        plain_fits=False,  # gloo refuses sizes that differ
        inputs=input_tensor_list,
        outputs=output_tensor_list,
        plain=lambda inputs, outputs, later: dist.all_to_all(list(outputs), list(inputs), group, later),
        coded=_exchange_segments,
        numel=None,
        sent=_others(leaving, group),
        problem=_misfit(leaving, coming, group),
    )
    return run(operation, Call(group, async_op, config, role))


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
) -> Any:
    """``torch.distributed.all_to_all_single``: rows of dimension 0 change ranks, in equal parts or by the split sizes.

    Either all ranks give split sizes or none does.
    """
    call = Call(group, async_op, config, role)
    even = not input_split_sizes and not output_split_sizes
    if even and is_small(input, config):
        return pass_small(
            "all_to_all_single",
            call,
            others(input.nbytes, group),
            lambda: dist.all_to_all_single(output, input, None, None, group, async_op),
        )
    leaving, coming = _segments(input, input_split_sizes, group), _segments(output, output_split_sizes, group)

    def coded(link: Link, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        _exchange_segments(link, inputs[0].split(leaving), outputs[0].split(coming))

    operation = Operation(
        name="all_to_all_single",
        inputs=[input],
        outputs=[output],
        plain=lambda inputs, outputs, later: dist.all_to_all_single(
            outputs[0], inputs[0], output_split_sizes, input_split_sizes, group, later
        ),
        coded=coded,
        numel=input.numel() if even else None,
        sent=_others(leaving, group),
        problem=_unsplit(input, leaving) or _unsplit(output, coming) or _misfit(leaving, coming, group),
    )
    return run(operation, call)


def _segments(tensor: torch.Tensor, rows: Sequence[int] | None, group: dist.ProcessGroup | None) -> list[int]:
    """Elements of each rank's segment."""
    if not rows:
        ranks = size_of(group)
        return [tensor.numel() // ranks] * ranks
    return [count * math.prod(tensor.shape[1:]) for count in rows]


def _unsplit(tensor: torch.Tensor, sizes: Sequence[int]) -> str:
    if sum(sizes) == tensor.numel():
        return ""
    return f"a tensor of shape {tuple(tensor.shape)} does not split into segments of {list(sizes)} elements"


def _misfit(inputs: Sequence[int], outputs: Sequence[int], group: dist.ProcessGroup | None) -> str:
    """Why segments of these numbers of elements cannot change ranks."""
    ranks, rank = size_of(group), dist.get_rank(group)
    if len(inputs) != ranks or len(outputs) != ranks:
        return f"one segment for each of {ranks} ranks is wanted, got {len(inputs)} inputs and {len(outputs)} outputs"
    if inputs[rank] != outputs[rank]:
        return f"this rank's own segment has {inputs[rank]} elements as input and {outputs[rank]} as output"
    return ""


def _others(sizes: Sequence[int], group: dist.ProcessGroup | None) -> int:
    """Elements that go to other ranks."""
    rank = dist.get_rank(group)
    return sum(size for peer, size in enumerate(sizes) if peer != rank)


def _exchange_segments(link: Link, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    sources = detached(inputs, outputs, outputs)
    leaving, coming = Pieces(link, sources), Pieces(link, [outputs[peer] for peer in link.peers])
    outputs[link.rank].copy_(sources[link.rank])
    with posting(link) as exchange:

        def post(turn: int) -> None:
            exchange.turn()
            for peer, place in zip(link.peers, coming.at(turn), strict=True):
                exchange.expect(peer, place)
            exchange.scatter(leaving.at(turn), link.peers[::-1])

        def take(turn: int) -> None:
            for peer, place in zip(link.peers, coming.at(turn), strict=True):
                exchange.receive(peer, place)

        pump(max(leaving.turns, coming.turns), post, take)
