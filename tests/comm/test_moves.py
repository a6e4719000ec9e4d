"""Gathers, broadcast and all-to-all: every bit arrives, of every layout and dtype; groups, passes, counters, complaints."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import corpus
import moves
import pytest
import ranks as runner
import sums
import tiers
import torch
import torch.distributed as dist
from moves import CODED, coded, filled, wait
from operations import Coded
from torch.testing._internal.two_tensor import TwoTensor

from ds_zipccl import comm
from ds_zipccl.benchmarks.links import slots
from ds_zipccl.comm.device import sizes
from ds_zipccl.comm.device.reports import Reports
from ds_zipccl.comm.device.streams import Streams
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.ops import OPS
from ds_zipccl.telemetry import counters


@pytest.mark.parametrize("ranks", tiers.mostly_full([2, 3, 4], [2, 3], "four ranks on two cores"))
def test_every_bit_arrives(ranks: int) -> None:
    runner.run_each(ranks, *((moves.moves, calls) for calls in moves.MOVES.values()))


@pytest.mark.parametrize("calls", moves.MOVES.values(), ids=moves.MOVES)
def test_a_wrong_bit_is_seen(calls: Sequence[Any]) -> None:
    with pytest.raises(runner.RankFailure, match=r"rank 1: (.|\n)*words differ"):
        runner.run(moves.moves, 2, calls, moves.flip_a_bit)


@runner.together(2)
def layouts(rank: int, ranks: int) -> None:
    """Strided inputs and outputs, 2-D tensors, leaves that require grad, inference tensors."""
    api = coded()
    inputs = [filled(peer, 60 * 40, corpus.BF16, 3).view(60, 40) for peer in range(ranks)]
    wanted = torch.cat(inputs)

    output = torch.zeros(40, 60 * ranks, dtype=torch.bfloat16).t()
    api.all_gather_into_tensor(output, inputs[rank].t().contiguous().t())
    corpus.assert_same_bits(output.contiguous(), wanted)

    output = torch.zeros(60 * ranks, 80, dtype=torch.bfloat16)
    api.all_gather_into_tensor(output[:, ::2], inputs[rank])
    corpus.assert_same_bits(output[:, ::2].contiguous(), wanted)
    assert not output[:, 1::2].any()

    places = [torch.zeros(40, 60, dtype=torch.bfloat16).t() for _ in range(ranks)]
    api.all_gather(places, inputs[rank])
    corpus.assert_same_bits(torch.cat(places), wanted)

    segments = [inputs[rank][:, peer::ranks] for peer in range(ranks)]
    places = [torch.zeros(segments[rank].shape[::-1], dtype=torch.bfloat16).t() for _ in range(ranks)]
    api.all_to_all(places, segments)
    corpus.assert_same_bits(torch.cat(places), torch.cat([tensor[:, rank::ranks] for tensor in inputs]))

    leaf = torch.zeros(60 * ranks, 40, dtype=torch.bfloat16, requires_grad=True)
    api.all_gather_into_tensor(leaf, inputs[rank])
    corpus.assert_same_bits(leaf, wanted)
    assert leaf.is_leaf and leaf.requires_grad

    for later in (False, True):
        with torch.inference_mode():
            output = torch.zeros(60 * ranks, 40, dtype=torch.bfloat16)
        wait(api.all_gather_into_tensor(output, inputs[rank], None, later))
        corpus.assert_same_bits(output, wanted)
        with torch.inference_mode():
            normal = torch.zeros_like(wanted)
            wait(api.all_gather_into_tensor(normal, inputs[rank], None, later))
        corpus.assert_same_bits(normal, wanted)


@runner.together(4)
def groups(rank: int, ranks: int) -> None:
    """Disjoint and overlapping groups; ranks outside; sources by global rank and by rank in the group."""
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    overlap = dist.new_group([3, 1, 2])
    api = coded()
    mine = halves[rank % 2]
    members = dist.get_process_group_ranks(mine)
    inputs = [filled(peer, 3000, corpus.FP32, 5) for peer in range(ranks)]
    output = torch.zeros(6000)
    works = [api.all_gather_into_tensor(output, inputs[rank], mine, True)]
    members_of_overlap = dist.get_process_group_ranks(overlap) if rank else []
    output_of_overlap = torch.zeros(9000)
    works.append(api.all_gather_into_tensor(output_of_overlap, inputs[rank], overlap, True))
    assert (works[1] is None) == (rank == 0)
    for work in filter(None, reversed(works)):
        work.wait()
    corpus.assert_same_bits(output, torch.cat([inputs[peer] for peer in members]))
    if rank:
        corpus.assert_same_bits(output_of_overlap, torch.cat([inputs[peer] for peer in members_of_overlap]))
        source = members_of_overlap[1]
        for how in ({"src": source}, {"group_src": 1}):
            tensor = inputs[rank].clone()
            api.broadcast(tensor, group=overlap, **how)
            corpus.assert_same_bits(tensor, inputs[source])
        with pytest.raises(ValueError, match="give either a global rank or a group rank"):
            api.broadcast(tensor, 1, overlap, group_src=1)
        with pytest.raises(ValueError):
            api.broadcast(tensor, 0, overlap)


@runner.together(2)
def passes(rank: int, ranks: int) -> None:
    """What the policy does not code goes to torch.distributed, and is counted with the reason: the bytes that this rank sends."""
    comm.broadcast(torch.ones(4), 0, config=ZipcclConfig())
    (row,) = counters.rows()
    assert (row["reasons"], row["passed_bytes"], row["logical_bytes"]) == ({"not enabled": 1}, 16 * (rank == 0), 0)
    counters.reset()
    counts = torch.full((ranks,), rank)
    output = torch.zeros_like(counts)
    handle = comm.all_to_all_single(output, counts, async_op=True, config=CODED)
    handle.wait()
    assert output.tolist() == list(range(ranks)) and handle.is_completed()
    outputs = [torch.zeros(ranks, dtype=torch.int64), torch.zeros(2 * ranks, dtype=torch.int64)]
    handle = comm.all_gather_coalesced(
        outputs, [torch.tensor([rank]), torch.tensor([rank, -rank])], None, True, config=CODED
    )
    handle.wait()
    assert outputs[0].tolist() == list(range(ranks)) and handle.is_completed()
    assert all(row["calls"] == 0 and row["reasons"] == {"dtype int64": 1} for row in counters.rows())


@runner.together(3)
def counts(rank: int, ranks: int) -> None:
    """Raw bytes are what the rank would have sent; the wire has what it sent, headers included."""
    api = coded()
    tensor = filled(rank, 30000, corpus.BF16, 1)
    api.all_gather_into_tensor(torch.empty(30000 * ranks, dtype=torch.bfloat16), tensor)
    api.broadcast(tensor, 1)
    raw = {row["op"]: row["logical_bytes"] for row in counters.rows()}
    assert raw == {"all_gather_into_tensor": 120000, "broadcast": 120000 * (rank == 1)}
    for row in counters.rows():
        assert row["calls"] == 1 and (row["wire_bytes"] > 0) == (row["logical_bytes"] > 0)
        assert row["ratio"] == (row["logical_bytes"] / row["wire_bytes"] if row["wire_bytes"] else 1.0)


def freed(like: torch.Tensor) -> torch.Tensor:
    """As FSDP leaves a parameter that it does not need."""
    found = like.clone()
    found.untyped_storage().resize_(0)
    return found


negative: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view  # type: ignore[attr-defined]


@runner.together(2)
def negative_views(rank: int, ranks: int) -> None:
    """Of rank 0 alone: inputs arrive with the values of the view. torch's collectives lose results in views, but for those of a list."""
    for name in (*OPERATIONS, "results"):
        said = []
        for api in (dist, coded()):
            mine = torch.arange(NUMEL) + 10.0 * rank
            view = negative if rank == 0 else torch.clone
            if name == "results":
                out = [view(torch.zeros(NUMEL)) for _ in range(ranks)]
                api.all_gather(out, mine)
                said.append(torch.stack(out))
            elif name not in IN_PLACE:
                out, *given = OPERATIONS[name](mine)
                given = [[view(one) for one in one] if isinstance(one, list) else view(one) for one in given[:1]]
                if name == "exchange":
                    for handle in [api.isend(*given, 1 - rank), api.irecv(out, 1 - rank)]:
                        handle.wait()
                else:
                    getattr(api, name)(out, *given)
                said.append(torch.stack(out) if isinstance(out, list) else out)
        assert name in IN_PLACE or torch.equal(*said), name


@runner.together(2)
def complaints(rank: int, ranks: int) -> None:
    api, four = coded(), torch.ones(4)
    calls: dict[str, Callable[[], Any]] = {
        "outputs must have 2 times": lambda: api.all_gather_into_tensor(torch.ones(9), four),
        "one dtype on one device": lambda: api.all_gather_into_tensor(torch.ones(8, dtype=torch.bfloat16), four),
        "no tensors": lambda: api.all_gather_coalesced([], []),
        "does not split": lambda: api.all_to_all_single(torch.ones(5), torch.ones(5)),
        "got 1 inputs and 2 outputs": lambda: api.all_to_all([four, four], [four]),
        "own segment has 4 elements as input and 3": lambda: api.all_to_all([torch.ones(3)] * 2, [four] * 2),
        "role 'zero' .* is unknown": lambda: api.broadcast(four, 0, role="zero"),
        "input must have 2 times 3 elements": lambda: sums.coded().reduce_scatter_tensor(torch.ones(3), torch.ones(5)),
        "input_list must have 2 tensors": lambda: sums.coded().reduce_scatter(torch.ones(3), [torch.ones(3)]),
        "no tensor": lambda: sums.coded().all_reduce_coalesced([]),
        "one dtype": lambda: sums.coded().all_reduce_coalesced([torch.ones(2), torch.ones(2).half()]),
        "got one that is freed": lambda: api.all_gather([torch.ones(4), torch.ones(4)], freed(four)),
        "freed, cut": lambda: api.send(freed(four), 1 - rank),
        "a negative view": lambda: api.all_to_all_single(negative(four), four),
        "negative view, in": lambda: api.recv(negative(four), 1 - rank),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()
    for places in ([torch.ones(4)], [four, torch.ones(3)], [torch.ones(4, 1), torch.ones(4, 1)]):
        said = []
        for call in (dist.all_gather, api.all_gather):
            with pytest.raises(RuntimeError) as error:
                call(places, four)
            said.append(str(error.value))
        assert said[0] == said[1], "gloo's own"
    api.broadcast(four, 0)  # and nobody waits for a message that was never sent
    whole = torch.zeros(8)
    api.all_gather_into_tensor(whole, TwoTensor(four, four))  # passes: such a subclass sends in its own way
    assert whole.tolist() == [1.0] * 8


CONFIGS = {mode: replace(CODED, mode=mode) for mode in ("always", "auto", "never")}
NUMEL = 6000


def _numbers(dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(NUMEL) % 3).to(dtype)


#: name -> a tensor of it; the same on all ranks, so that sums are the same whatever the layout.
KINDS: dict[str, Callable[[], torch.Tensor]] = {
    **{
        str(dtype).removeprefix("torch."): partial(_numbers, dtype)
        for dtype in (
            torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
            torch.int64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
            torch.uint16, torch.uint32, torch.uint64,
        )
    },
    "complex32": lambda: torch.view_as_complex(_numbers(torch.float16).view(-1, 2)),
    "sparse_coo": lambda: torch.eye(80).to_sparse(),
    "sparse_csr": lambda: torch.eye(80).to_sparse_csr(),
    "mkldnn": lambda: torch.ones(80, 80).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(NUMEL), 0.5, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(5, 8)], layout=torch.jagged),
    "meta": lambda: torch.empty(NUMEL, device="meta"),
    "of no dimension": lambda: torch.tensor(1.5),
    "empty": lambda: torch.empty(0),
    "empty bfloat16": lambda: torch.empty(0, 3).bfloat16(),
    "strided": lambda: torch.arange(12000.0).view(100, 120)[:, ::2],
    "transposed": lambda: torch.arange(6000.0).view(60, 100).t(),
    "channels last": lambda: torch.arange(2400.0).view(2, 3, 20, 20).to(memory_format=torch.channels_last),
    "conjugate": lambda: torch.ones(NUMEL, dtype=torch.complex64).conj(),
    "parameter": lambda: torch.nn.Parameter(torch.ones(NUMEL)),
}  # fmt: skip


#: Those whose input is the result too.
IN_PLACE = ("all_reduce", "all_reduce later", "all_reduce_coalesced", "reduce", "broadcast")


def _twice(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor]) if tensor.dim() else torch.stack([tensor, tensor])


#: Name of an operation -> arguments of a call of two ranks, the tensors that hold the result first.
OPERATIONS: dict[str, Callable[[torch.Tensor], tuple[Any, ...]]] = {
    "all_reduce": lambda tensor: (tensor,),
    "all_reduce later": lambda tensor: (tensor,),
    "all_reduce_coalesced": lambda tensor: ([tensor],),
    "reduce": lambda tensor: (tensor, 0),
    "broadcast": lambda tensor: (tensor, 0),
    "all_gather": lambda tensor: ([torch.clone(tensor), torch.clone(tensor)], tensor),
    "all_gather_into_tensor": lambda tensor: (_twice(tensor), tensor),
    "all_to_all_single": lambda tensor: (torch.clone(tensor), tensor),
    "all_to_all": lambda tensor: ([torch.clone(tensor), torch.clone(tensor)], [tensor, tensor]),
    "reduce_scatter_tensor": lambda tensor: (tensor, _twice(tensor)),
    "reduce_scatter": lambda tensor: (tensor, [torch.clone(tensor), torch.clone(tensor)]),
    "exchange": lambda tensor: (torch.clone(tensor), tensor),
}


def called(operation: str, api: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold the result of a call."""
    given = OPERATIONS[operation](tensor)
    if operation == "exchange":
        for handle in [api.isend(tensor, 1 - dist.get_rank()), api.irecv(given[0], 1 - dist.get_rank())]:
            handle.wait()
    else:
        name, _, later = operation.partition(" ")
        wait(getattr(api, name)(*given, **({"async_op": True} if later else {})))
    outputs = given[0] if isinstance(given[0], list) else [given[0]]
    return outputs if operation != "reduce" or dist.get_rank() == 0 else []


#: What torch's own gives an arbitrary result for, or ends the process.
CRASHES = {
    ("all_to_all_single", "of no dimension"),
    ("reduce_scatter_tensor", "of no dimension"),
    ("reduce_scatter", "strided"),
}


def outcome(operation: str, api: Any, make: Callable[[], torch.Tensor]) -> tuple[str, Any]:
    """("done", what the tensors hold as text) or ("error", its type)."""
    try:
        with torch.no_grad():
            tensor = make()
    except Exception as error:
        return "unmade", type(error).__name__
    try:
        with torch.no_grad():
            outputs = called(operation, api, tensor)
    except Exception as error:
        return "error", type(error).__name__
    if outputs and outputs[0].device.type == "meta":
        return "done", ""
    return "done", [str((out.to_dense() if out.layout != torch.strided else out).tolist()) for out in outputs]


def _meet(number: int) -> None:
    """A barrier that does not care about collectives that failed before it, as gloo's does."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"met/{number}/{dist.get_rank()}", "")
    store.wait([f"met/{number}/{rank}" for rank in range(dist.get_world_size())])


def every_kind(rank: int, ranks: int, names: list[str]) -> list[str]:
    """Where ours does otherwise than the plain collective."""
    wrong, meetings = [], itertools.count()
    for operation, name in itertools.product(OPERATIONS, names):
        if (operation, name) not in CRASHES:
            wanted = outcome(operation, dist, KINDS[name])
            _meet(next(meetings))
            for mode, config in CONFIGS.items():
                got = outcome(operation, Coded(config), KINDS[name])
                # ours may take what gloo refuses, as long as the result is right: those are other tests' affair
                if got != wanted and not (wanted[0] == "error" and got[0] == "done"):
                    wrong.append(
                        f"{operation}, {name}, {mode}: wanted {wanted[0]} {str(wanted[1])[:60]}, got {str(got)[:90]}"
                    )
                _meet(next(meetings))
    return wrong


@pytest.mark.full(reason="eight seconds each")
@pytest.mark.parametrize("part", range(3))
def test_every_layout_and_dtype(part: int) -> None:
    names = [name for name in KINDS if hasattr(torch, "complex32") or name != "complex32"][part::3]
    assert runner.run(every_kind, 2, names, timeout=60) == [[], []]


ON_STREAMS: dict[str, Any] = {"nccl": "on", "nccl_min_bytes": 0}
#: Ways to call operations that have a schedule on a device.
CALLS = tuple(
    move
    for calls in moves.MOVES.values()
    for move in calls
    if OPS[
        next(name for name in sorted(moves.NAMES, key=len, reverse=True) if move.__name__.startswith(name))
    ].on_device
)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)])
def test_every_bit_arrives_in_stream_order(ranks: int) -> None:
    runner.run(moves.moves, ranks, CALLS, None, ON_STREAMS, backend=slots.NAME)


def test_memory_that_is_kept_is_written_in_any_mode() -> None:
    """Agreements are in inference mode and outside; a tensor of inference mode could be written only there."""
    streams = Streams(torch.device("cpu"))
    with torch.inference_mode():
        kept = [sizes._host(streams, 5000), Reports(streams.device).words, streams._new(64).memory]
    assert not any(one.is_inference() for one in kept)


test_programs = runner.programs(__name__)
