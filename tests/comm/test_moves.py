"""Gathers, broadcast and all-to-all together: layouts, groups, passes, counters, complaints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import corpus
import moves
import pytest
import ranks as runner
import torch
import torch.distributed as dist
from moves import CODED, coded, filled, wait

from ds_zipccl import comm
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.telemetry import counters


def as_plain(rank: int, ranks: int) -> None:
    """The same as torch.distributed, with what it can do on gloo."""
    for seed, move in enumerate(
        (
            moves.all_gather,
            moves.all_gather_into_tensor,
            moves.broadcast,
            moves.all_to_all_single,
            moves.all_to_all_single_even,
        )
    ):
        inputs = [filled(peer, 5000, corpus.BF16, seed) for peer in range(ranks)]
        for got, want in zip(move(coded(), inputs, rank, False)[0], move(dist, inputs, rank, False)[0], strict=True):
            corpus.assert_same_bits(got, want)


def test_as_plain() -> None:
    runner.run(as_plain, 3)


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


def test_layouts() -> None:
    runner.run(layouts, 2)


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


def test_groups() -> None:
    runner.run(groups, 4)


def passes(rank: int, ranks: int) -> None:
    """What the policy does not code goes to torch.distributed, and is counted with the reason."""
    alone = [dist.new_group([peer]) for peer in range(ranks)][rank]
    cases: dict[str, Callable[[], Any]] = {
        "not enabled": lambda: comm.broadcast(torch.ones(4), 0, config=ZipcclConfig()),
        "dtype int32": lambda: comm.broadcast(torch.ones(4, dtype=torch.int32), 0, config=CODED),
        "smaller than min_bytes": lambda: comm.broadcast(torch.ones(4), 0, config=ZipcclConfig(enabled=True)),
        "role is never coded": lambda: comm.broadcast(
            torch.ones(4),
            0,
            config=ZipcclConfig(enabled=True, mode="always", min_bytes=0, roles={"ep": "never"}),
            role="ep",
        ),
        "group of one rank": lambda: comm.broadcast(torch.ones(4), rank, alone, config=CODED),
    }
    for reason, call in cases.items():
        counters.reset()
        call()
        assert [row["reasons"] for row in counters.rows()] == [{reason: 1}]
        sends = rank == 0 or reason == "group of one rank"
        assert counters.rows()[0]["passed_bytes"] == 16 * sends, "the root's bytes are sent"
        assert counters.totals()["logical_bytes"] == 0
    counters.reset()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    comm.broadcast(torch.ones(4), 0, dist.new_group(list(range(ranks))), config=CODED)
    dist.set_debug_level(dist.DebugLevel.OFF)
    assert list(counters.rows()[0]["reasons"]) == [
        "no coded schedule for backend gloo under TORCH_DISTRIBUTED_DEBUG=DETAIL yet"
    ]
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


def test_passes() -> None:
    runner.run(passes, 2)


def incompressible(rank: int, ranks: int) -> float:
    """Frames larger than what they hold."""
    for kind in corpus.SUMMED.values():
        inputs = [corpus.tensor(corpus.random_words(20001, kind, peer), kind) for peer in range(ranks)]
        outputs, wanted = moves.all_gather_into_tensor(coded(), inputs, rank, False)
        corpus.assert_same_bits(outputs[0], wanted[0])
    return counters.totals()["ratio"]


def test_incompressible() -> None:
    assert all(0.98 < ratio < 1 for ratio in runner.run(incompressible, 2))


def counts(rank: int, ranks: int) -> list[dict[str, Any]]:
    api = coded()
    tensor = filled(rank, 30000, corpus.BF16, 1)
    api.all_gather_into_tensor(torch.empty(30000 * ranks, dtype=torch.bfloat16), tensor)
    api.broadcast(tensor, 1)
    return counters.rows()


def test_counts() -> None:
    """Raw bytes are what the rank would have sent; the wire has what it sent, headers included."""
    for rank, rows in enumerate(runner.run(counts, 3)):
        raw = {row["op"]: row["logical_bytes"] for row in rows}
        assert raw == {"all_gather_into_tensor": 120000, "broadcast": 120000 * (rank == 1)}
        for row in rows:
            assert row["calls"] == 1 and (row["wire_bytes"] > 0) == (row["logical_bytes"] > 0)
            assert row["ratio"] == (row["logical_bytes"] / row["wire_bytes"] if row["wire_bytes"] else 1.0)


def raw_codec(rank: int, ranks: int) -> int:
    tensor = filled(rank, 30000, corpus.BF16, 1)
    output = torch.empty(30000 * ranks, dtype=torch.bfloat16)
    coded(codec="raw").all_gather_into_tensor(output, tensor)
    corpus.assert_same_bits(output, torch.cat([filled(peer, 30000, corpus.BF16, 1) for peer in range(ranks)]))
    return counters.rows()[0]["wire_bytes"] - counters.rows()[0]["logical_bytes"]


def test_raw_frames() -> None:
    """codec = "raw" sends the same schedule uncoded: the tensor and a header."""
    assert all(0 < header <= 64 for header in runner.run(raw_codec, 2))


def complaints(rank: int, ranks: int) -> None:
    api, four = coded(), torch.ones(4)
    calls: dict[str, Callable[[], Any]] = {
        "tensor_list must have 2 tensors": lambda: api.all_gather([torch.ones(4)], four),
        "outputs must have 2 times": lambda: api.all_gather_into_tensor(torch.ones(9), four),
        "one dtype on one device": lambda: api.all_gather_into_tensor(torch.ones(8, dtype=torch.bfloat16), four),
        "no tensors": lambda: api.all_gather_coalesced([], []),
        "does not split": lambda: api.all_to_all_single(torch.ones(5), torch.ones(5)),
        "got 1 inputs and 2 outputs": lambda: api.all_to_all([four, four], [four]),
        "own segment has 4 elements as input and 3": lambda: api.all_to_all([torch.ones(3)] * 2, [four] * 2),
        "role 'zero' .* is unknown": lambda: api.broadcast(four, 0, role="zero"),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()
    api.broadcast(four, 0)  # and nobody waits for a message that was never sent


def test_complaints() -> None:
    runner.run(complaints, 2)
