"""Messages in pieces: the same bits, bounded memory, nobody waits in a circle; what is copied before it is overwritten."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import corpus
import moves
import pytest
import ranks as runner
import sums
import test_bases
import torch
import torch.distributed as dist
from moves import CODED

from ds_zipccl import comm
from ds_zipccl.comm.host import exchange, frames, gather, pipeline
from ds_zipccl.comm.host import sums as host_sums
from ds_zipccl.comm.host.pipeline import detached
from ds_zipccl.policy import wire
from ds_zipccl.telemetry import counters


def test_pieces_fit_the_memory() -> None:
    for numel in (1, 1000, 1 << 20, (1 << 24) + 5, 1 << 28):
        for ranks in (2, 3, 8, 64):
            for staging in (1 << 20, 64 << 20):
                piece = wire.fragment_numel(numel, 2, ranks, staging)
                assert piece % wire.FRAGMENT_UNIT == 0 and 0 < piece * 2 <= wire.FRAGMENT_BYTES[1]
                if piece > wire.FRAGMENT_UNIT:
                    assert (3 * wire.PIPELINE_DEPTH + 2) * (ranks - 1) * piece * 2 <= staging
    assert (1 << 24) / wire.fragment_numel(1 << 24, 2, 2, 64 << 20) == 8


def test_stages_follow_each_other() -> None:
    seen: list[tuple[str, int]] = []
    pipeline.run_pipeline(4, lambda turn: seen.append(("post", turn)), lambda turn: seen.append(("take", turn)))
    for stage in ("post", "take"):
        assert [turn for name, turn in seen if name == stage] == [0, 1, 2, 3]
    for turn in range(4):
        assert seen.index(("take", turn)) > seen.index(("post", min(3, turn + wire.PIPELINE_DEPTH)))


def in_small_pieces(
    rank: int, ranks: int, case: Callable[..., None], arguments: tuple[Any, ...] = (), least: int = 256, wanted: int = 8
) -> int:
    """``case`` with pieces of ``least`` bytes and more; returns the most turns that a message took, at least ``wanted``."""
    turns = 0

    def counted(most: int, *stages: Callable[[int], None]) -> None:
        nonlocal turns
        turns = max(turns, most)
        pipeline.run_pipeline(most, *stages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "FRAGMENT_UNIT", 64)
        patch.setattr(wire, "FRAGMENT_BYTES", (least, 16 * least))
        for module in (exchange, gather, host_sums):
            patch.setattr(module, "run_pipeline", counted)
        case(rank, ranks, *arguments)
    assert turns >= wanted, turns
    return turns


for ranks in (2, 3, 4):
    full = "four ranks on two cores" * (ranks > 3)
    runner.together(ranks, moves.moves, full=full)(in_small_pieces)
    runner.together(ranks, sums.as_gloo, ([1, 7, 1000, 20001],), full=full)(in_small_pieces)
runner.together(3, test_bases.steps, ("in place",), 1 << 15, 2)(in_small_pieces)


def sharing(rank: int, ranks: int) -> None:
    """Inputs that lie where other outputs are written."""
    memory = torch.arange(ranks * 5000, dtype=torch.float32) + 1e6 * rank
    others = [torch.arange(ranks * 5000, dtype=torch.float32) + 1e6 * peer for peer in range(ranks)]
    shift = 700
    own = memory[shift : shift + 5000].clone()
    whole = memory.clone()
    comm.all_gather_into_tensor(whole, whole[shift : shift + 5000].copy_(own), config=CODED)
    corpus.assert_same_bits(whole, torch.cat([other[shift : shift + 5000] for other in others]))

    crossed = memory.clone()  # the output of a reduce-scatter in a peer's shard
    place = crossed[(rank + 1) % ranks * 5000 :][:5000]
    comm.reduce_scatter_tensor(place, crossed, config=CODED)
    plain = torch.empty(5000)
    dist.reduce_scatter_tensor(plain, memory.clone())
    corpus.assert_same_bits(place, plain)

    swapped = memory.clone()  # a shift by less than a segment
    head, tail = swapped[: ranks * 4000], swapped[shift : shift + ranks * 4000]
    kept = head.clone()
    comm.all_to_all_single(tail, head, config=CODED)
    plain = torch.empty_like(kept)
    dist.all_to_all_single(plain, kept)
    corpus.assert_same_bits(tail, plain)


runner.together(3, sharing)(in_small_pieces)


MEMORY = torch.zeros(100)
#: source, its home, all that is written -> whether it is copied; all in elements of MEMORY.
OVERLAPS: dict[str, tuple[tuple[int, int], tuple[int, int], list[tuple[int, int]], bool]] = {
    "beside, before": ((0, 50), (90, 100), [(50, 100)], False),
    "beside, behind": ((50, 100), (0, 10), [(0, 50)], False),
    "between": ((20, 30), (90, 100), [(0, 20), (30, 100)], False),
    "its last element": ((0, 50), (90, 100), [(49, 100)], True),
    "its first element": ((49, 100), (0, 10), [(0, 50)], True),
    "within what is written": ((20, 30), (90, 100), [(0, 100)], True),
    "around what is written": ((0, 100), (90, 100), [(20, 30)], True),
    "in its home": ((20, 30), (20, 30), [(0, 20), (20, 30)], False),
    "in the home of another": ((20, 30), (0, 20), [(0, 20), (20, 30)], True),
    "in a part of its home": ((20, 29), (20, 30), [(20, 30)], True),
    "beyond its home": ((20, 31), (20, 30), [(20, 30)], True),
    "one element into its home": ((19, 30), (20, 30), [(20, 30)], True),
    "in its home, which another overlaps": ((20, 30), (20, 30), [(20, 30), (25, 40)], True),
    "in its home, which another holds": ((20, 30), (20, 30), [(20, 30), (0, 100)], True),
    "empty": ((20, 20), (20, 20), [(0, 100)], False),
    "in what is empty": ((20, 30), (0, 10), [(25, 25)], False),
}


@pytest.mark.parametrize("case", OVERLAPS)
def test_what_is_copied(case: str) -> None:
    source, home, written, copied = OVERLAPS[case]
    flat = MEMORY[slice(*source)]
    (kept,) = detached([flat], [MEMORY[slice(*span)] for span in written], [MEMORY[slice(*home)]])
    assert (kept is not flat) == copied and kept.equal(flat)


@runner.together(3)
def what_is_sent_together(rank: int, ranks: int) -> None:
    """Small segments are encoded in one call; nothing is sent of nothing."""
    together: list[int] = []
    encode = frames.compress_segments

    def counted(flats: Sequence[torch.Tensor], *more: Any, **named: Any) -> list[torch.Tensor]:
        together.append(len(flats))
        return encode(flats, *more, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "compress_segments", counted)
        for nbytes, wanted in ((wire.TOGETHER_BELOW_BYTES, []), (wire.TOGETHER_BELOW_BYTES - 2, [ranks - 1])):
            segments = torch.ones(ranks * nbytes // 2, dtype=torch.bfloat16)
            comm.all_to_all_single(torch.empty_like(segments), segments, config=CODED)
            assert together == wanted
    counters.reset()
    for move in moves.EVERYTHING:
        move(moves.coded(), [torch.empty(0)] * ranks, rank, False)
    for add in sums.EVERYTHING:
        add(sums.coded(), torch.empty(0), dist.ReduceOp.SUM, False)
    assert counters.rows() and counters.totals()["wire_bytes"] == 0


test_programs = runner.programs(__name__, 2)
