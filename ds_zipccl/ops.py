"""The table of operations: all properties of a collective except its schedule, which is in :mod:`ds_zipccl.comm.ops`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _one(ranks: int) -> float:
    return 1.0


def _shard(ranks: int) -> float:
    return 1 / ranks


def _rest(ranks: int) -> float:
    return (ranks - 1) / ranks


def _gloo_gather(ranks: int) -> float:
    """Measured on shaped links: with two ranks gloo's two half-shards do not overlap as they should."""
    return _rest(ranks) * (1.5 if ranks == 2 else 1.1)


def _gloo_all_to_all(ranks: int) -> float:
    """Measured on shaped links: half duplex with two ranks, and hardly better with more ranks."""
    return _rest(ranks) * (2.0 if ranks == 2 else 1.55)


def _gloo_broadcast(ranks: int) -> float:
    """A binomial tree: a rank sends to all of its children at once, and these sends share the rank's link."""

    def depth(width: int) -> int:  # transfer times of the tensor until a subtree of so many ranks has it
        children = [1 << bit for bit in range(width.bit_length()) if 1 << bit < width]
        return max((len(children) + depth(min(child, width - child)) for child in children), default=0)

    return float(depth(ranks))


@dataclass(frozen=True)
class Traffic:
    """The traffic of a kind of operation: functions of the number of ranks, in parts of the whole tensor.

    The plain schedule: ``steps``, messages one after another; ``plain``, the part that a rank sends; ``gloo``, the part that would take as
    long as gloo's own schedule. Our schedule: ``sent``, the part that a rank sends; ``encoded``, the part that a rank compresses;
    ``frame``, the part in one frame. A rank receives a frame from every peer, or with ``once`` a single one. ``sums``: frames that arrive
    are added.
    ``call(module, output, input, **more)`` runs the operation, with torch.distributed or ds_zipccl.comm as the module. ``inputs`` and
    ``outputs`` are the sizes of a rank's buffers; ``outputs`` is None for operations in place.
    """

    steps: Callable[[int], int]
    plain: Callable[[int], float]
    gloo: Callable[[int], float]
    call: Callable[..., Any]
    inputs: Callable[[int], float] = _one
    outputs: Callable[[int], float] | None = _one
    sent: Callable[[int], float] = _rest
    encoded: Callable[[int], float] = _rest
    frame: Callable[[int], float] = _shard
    once: bool = False
    sums: bool = False


#: Kinds of operations, with the names of nccl-tests.
TRAFFIC: dict[str, Traffic] = {
    "all_gather": Traffic(
        steps=lambda n: n - 1,
        plain=_rest,
        gloo=_gloo_gather,
        call=lambda module, output, input, **more: module.all_gather_into_tensor(output, input, **more),
        inputs=_shard,
        encoded=_shard,
    ),
    "reduce_scatter": Traffic(
        steps=lambda n: n - 1,
        plain=_rest,
        gloo=lambda n: 2 * _rest(n),
        call=lambda module, output, input, **more: module.reduce_scatter_tensor(output, input, **more),
        outputs=_shard,
        sums=True,
    ),
    "all_reduce": Traffic(
        steps=lambda n: 2 * (n - 1),
        plain=lambda n: 2 * _rest(n),
        gloo=lambda n: 2 * _rest(n),
        call=lambda module, output, input, **more: module.all_reduce(output, **more),
        outputs=None,
        sums=True,
    ),
    "all_to_all": Traffic(
        steps=lambda n: n - 1,
        plain=_rest,
        gloo=_gloo_all_to_all,
        call=lambda module, output, input, **more: module.all_to_all_single(output, input, **more),
    ),
    "broadcast": Traffic(
        steps=lambda n: (n - 1).bit_length(),
        plain=_one,
        gloo=_gloo_broadcast,
        call=lambda module, output, input, **more: module.broadcast(output, 0, **more),
        outputs=None,
        sent=lambda n: n - 1,
        encoded=_one,
        frame=_one,
        once=True,
    ),
}


@dataclass(frozen=True)
class Op:
    """One operation of torch.distributed.

    ``parameters``: names in the order of torch.distributed, spelled as in DeepSpeed's TorchBackend. ``traffic``: the kind in
    :data:`TRAFFIC`; "" for operations without a predicted cost. ``one_sided``: some ranks need no data of other ranks, and must not wait
    for them. ``by_node``: a schedule by node exists that has the same bits. ``coded``: a schedule with frames exists.
    ``point_to_point``: one sender and one receiver. ``on_device``: a schedule in the order of a device's streams exists.

    ``memory_order``: elements count in memory order, as in gloo's sums and broadcasts. ``flat``: only the number of elements of a tensor
    matters, not its shape. ``plain_fits``: the plain collective takes all arguments that ours takes. ``plain``: the kind of the plain
    collective where ours sends less than it, even before compression: then the plain collective's bytes count as logical bytes.
    """

    parameters: tuple[str, ...]
    traffic: str = ""
    one_sided: bool = False
    by_node: bool = False
    coded: bool = True
    point_to_point: bool = False
    on_device: bool = False
    memory_order: bool = False
    flat: bool = False
    plain_fits: bool = True
    plain: str = ""

    def sent_bytes(self, nbytes: int, ranks: int) -> int:
        """Return the bytes of a message of ``nbytes`` that each of ``ranks`` ranks sends in the plain collective; of the sending rank where
        some ranks only receive; 0 on a rank outside of the group, to which it has -1 ranks."""
        times, ranks = 2 if (self.plain or self.traffic) == "all_reduce" else 1, max(1, ranks)
        return nbytes if self.one_sided else times * nbytes * (ranks - 1) // ranks


_REDUCE = ("op", "group", "async_op")

OPS: dict[str, Op] = {
    "all_gather": Op(("tensor_list", "tensor", "group", "async_op"), "all_gather", by_node=True, on_device=True),
    "all_gather_into_tensor": Op(
        ("output_tensor", "input_tensor", "group", "async_op"), "all_gather", by_node=True, on_device=True, flat=True
    ),
    "all_gather_coalesced": Op(
        ("output_tensors", "input_tensors", "group", "async_op"), "all_gather", by_node=True, on_device=True, flat=True
    ),
    "reduce_scatter": Op(("output", "input_list", *_REDUCE), "reduce_scatter", on_device=True),
    "reduce_scatter_tensor": Op(
        ("output_tensor", "input_tensor", *_REDUCE), "reduce_scatter", on_device=True, flat=True
    ),
    "reduce": Op(("tensor", "dst", *_REDUCE), one_sided=True, memory_order=True),
    "all_reduce": Op(("tensor", *_REDUCE), "all_reduce", on_device=True, memory_order=True),
    # not in memory order: the plain all-reduce of several tensors lays copies end to end
    "all_reduce_coalesced": Op(("tensors", *_REDUCE), "all_reduce", on_device=True),
    "all_to_all": Op(
        ("output_tensor_list", "input_tensor_list", "group", "async_op"),
        "all_to_all",
        on_device=True,
        plain_fits=False,  # gloo refuses sizes that differ
    ),
    "all_to_all_single": Op(
        ("output", "input", "output_split_sizes", "input_split_sizes", "group", "async_op"),
        "all_to_all",
        by_node=True,
        on_device=True,
    ),
    "broadcast": Op(("tensor", "src", "group", "async_op"), "broadcast", one_sided=True, memory_order=True),
    "send": Op(("tensor", "dst", "group", "tag"), point_to_point=True),
    "recv": Op(("tensor", "src", "group", "tag"), point_to_point=True),
    "isend": Op(("tensor", "dst", "group", "tag"), point_to_point=True),
    "irecv": Op(("tensor", "src", "group", "tag"), point_to_point=True),
    "gather": Op(("tensor", "gather_list", "dst", "group", "async_op"), coded=False),
    "scatter": Op(("tensor", "scatter_list", "src", "group", "async_op"), coded=False),
    "inference_all_reduce": Op(("tensor", "op", "group"), coded=False),
    # this package's own operation: an all-reduce of a gradient bucket that sends each slice of the sum to its owners
    "reduce_to_owners": Op(
        ("tensor", "owners", "op", "group"), "reduce_scatter", on_device=True, memory_order=True, plain="all_reduce"
    ),
}
