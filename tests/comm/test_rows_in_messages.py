"""Rows of expert traffic that travel once or as multiples: every bit arrives, and nothing changes where no row repeats."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import moves
import numpy as np
import pytest
import ranks as runner
import torch
import torch.distributed as dist
from moves import CODED
from test_work import survive
from tiers import mostly_full

from ds_zipccl import comm, kernels
from ds_zipccl.codecs import row_segment
from ds_zipccl.comm.host import pipeline
from ds_zipccl.comm.host.frames import FrameCoder
from ds_zipccl.comm.host.rows import MapKey, RowCoder, RowMemory, RowPairs
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.frame import CodecId, parse
from ds_zipccl.policy import wire

KINDS = ("dispatch", "combine", "combine.bwd", "dispatch.bwd", "")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@contextmanager
def posted() -> Iterator[list[torch.Tensor]]:
    """Collect copies of the frames that this rank sends."""
    frames: list[torch.Tensor] = []
    post = pipeline.Exchange.post

    def collecting(self: Any, frame: torch.Tensor, *more: Any) -> None:
        frames.append(frame.clone())
        post(self, frame, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline.Exchange, "post", collecting)
        yield frames


def row_frames(frames: list[torch.Tensor]) -> int:
    return sum(parse(frame).codec == CodecId.ROWS for frame in frames)


def rows_like(count: int, width: int, dtype: torch.dtype, seed: int, distinct: int = 0) -> torch.Tensor:
    """``count`` rows, ``distinct`` of them drawn anew (0: all), the others copies of these; a few rows of zeros among them."""
    dice = torch.Generator().manual_seed(seed)
    fresh = torch.randn(distinct or max(1, count), width, generator=dice)
    fresh[::7] *= 1e-3
    if distinct:
        fresh = fresh[torch.randint(distinct, (count,), generator=dice)]
        fresh[torch.rand(count, generator=dice) < 0.05] = 0
    return fresh[:count].to(dtype)


def scaled(rows: torch.Tensor, seed: int) -> torch.Tensor:
    """Gradients of rows: those of equal rows are multiples of each other, rounded."""
    dice = torch.Generator().manual_seed(seed)
    _, token = torch.unique(rows.float(), dim=0, return_inverse=True)
    gradients = torch.randn(int(token.max()) + 1, rows.shape[1], generator=dice)[token]
    return (gradients * torch.rand(len(rows), 1, generator=dice)).to(rows.dtype)


def exchange(rank: int, sent: list[list[torch.Tensor]], kind: str, config: ZipcclConfig, way: int = 0) -> None:
    """Exchange rows in one of three ways, as lists and in place too, and compare every bit."""
    coming, source = [line[rank] for line in sent], torch.cat(sent[rank])
    more: dict[str, Any] = {"config": config, "role": "ep", "kind": kind}
    sizes = [len(part) for part in sent[rank]]
    if way == 0 or (way == 1 and sizes != [len(part) for part in coming]):
        moves.exchanged(rank, sent, True, **more)
        return
    if way == 1:
        comm.all_to_all_single(source, source, sizes, sizes, **more)
    else:
        comm.all_to_all(got := [torch.full_like(part, 3) for part in coming], list(source.split(sizes)), **more)
        source = torch.cat(got)
    assert torch.equal(source.view(torch.uint8), torch.cat(coming).view(torch.uint8)), f"{kind}: words differ"


def in_fragments(patch: pytest.MonkeyPatch, least: int = 1 << 13) -> None:
    patch.setattr(wire, "FRAGMENT_UNIT", 64)
    patch.setattr(wire, "FRAGMENT_BYTES", (least, 4 * least))


def at_random(rank: int, ranks: int, rounds: int, plant: Callable[[pytest.MonkeyPatch], None] | None = None) -> int:
    """Random uneven exchanges in fragments; returns the row frames that this rank sent."""
    dice = np.random.default_rng(5)
    with pytest.MonkeyPatch.context() as patch, posted() as frames:
        in_fragments(patch)
        if plant is not None:
            plant(patch)
        for turn in range(rounds):
            width, dtype = (256, 100, 5120, 1, 33)[turn % 5], DTYPES[turn % 3]
            most = max(2, 60_000 // width)
            counts = dice.integers(0, most, (ranks, ranks))
            counts[dice.random((ranks, ranks)) < 0.2] = 0  # empty segments
            if turn % 7 == 3:
                counts[dice.integers(ranks), :] = 0  # a rank that sends nothing
            if turn % 7 == 5:
                counts[:] = 1
            if turn % 4 == 1:
                counts = np.maximum(counts, counts.T)  # a rank sends as much as it gets: in place
            sent = [
                [rows_like(n, width, dtype, 99 * turn + 9 * a + b, 1 + int(n) // 3) for b, n in enumerate(line)]
                for a, line in enumerate(counts.tolist())
            ]
            config = (
                replace(CODED, check="shadow") if turn % 12 == 4 else CODED
            )  # not with lists, where gloo refuses sizes
            exchange(rank, sent, KINDS[turn % 5], config, turn % 3)
            if turn % 2:
                back = [[scaled(part, turn) if len(part) else part for part in line] for line in sent]
                exchange(rank, back, "combine.bwd", CODED)
        return row_frames(frames)


@runner.together(3, 12)
@runner.together(4, 24, full="more of the same")
def every_bit_arrives(rank: int, ranks: int, rounds: int) -> None:
    assert at_random(rank, ranks, rounds) > 2 * rounds


def _finding(patch: pytest.MonkeyPatch, wrong: Callable[[torch.Tensor, int, torch.Tensor], None]) -> None:
    """Change the sources that the sender has found, by ``wrong(data, row_bytes, sources)``."""
    route = type(kernels.route(kernels.preferred("auto", "cpu"), "cpu"))
    find = route.find_rows

    def found(self: Any, data: Any, row_bytes: int, first: int, sources: Any, table: Any) -> int:
        assert first == 0, "plant the mistake elsewhere"
        find(self, data, row_bytes, first, sources, table)
        wrong(data, row_bytes, sources)
        return int((sources != torch.arange(len(sources))).sum())

    patch.setattr(route, "find_rows", found)


def distances_off_by_one(patch: pytest.MonkeyPatch) -> None:
    def wrong(data: torch.Tensor, row_bytes: int, sources: torch.Tensor) -> None:
        repeated = (sources != torch.arange(len(sources))) & (sources > 0)
        sources[repeated] -= 1

    _finding(patch, wrong)


def history_off_by_a_row(patch: pytest.MonkeyPatch) -> None:
    """The receiver finds the rows in front of a frame one row too early."""
    take = FrameCoder.decompress

    def wrong(self: Any, frame: Any, peer: int, out: Any, base: Any = None, earlier: Any = None) -> Any:
        words = take(self, frame, peer, out, base, earlier)
        width = int.from_bytes(bytes(frame[32:36].tolist()), "little") if parse(frame).codec == CodecId.ROWS else 0
        if width and earlier is not None and earlier.numel() >= 2 * width:
            kept = earlier.clone()
            earlier[width:].copy_(kept[:-width])
            take(self, frame, peer, out, base, earlier)
            earlier.copy_(kept)
        return words

    patch.setattr(FrameCoder, "decompress", wrong)


def equal_samples_are_equal_rows(patch: pytest.MonkeyPatch) -> None:
    """The sender believes its samples, and compares no words."""

    def wrong(data: torch.Tensor, row_bytes: int, sources: torch.Tensor) -> None:
        samples = data[: len(sources) * row_bytes].view(len(sources), row_bytes)[:, :: max(1, row_bytes // 8)]
        firsts: dict[bytes, int] = {}
        for row, sample in enumerate(samples):
            sources[row] = firsts.setdefault(sample.numpy().tobytes(), row)

    _finding(patch, wrong)


@runner.together(2)
def collisions(rank: int, ranks: int, plant: Callable[[pytest.MonkeyPatch], None] | None = None) -> None:
    """Rows that differ in one word each: whatever words a hash looks at, most rows look alike."""
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        for width in (256, 100):
            rows = torch.ones(3 * width, width, dtype=torch.bfloat16) * torch.arange(width)
            rows[torch.arange(width), torch.arange(width)] += 1000
            rows[2 * width :] = rows[:width]
            exchange(rank, [[rows] * ranks] * ranks, "dispatch", CODED)


@pytest.mark.full(reason="each planted mistake starts ranks of its own")
@pytest.mark.parametrize(
    "case, arguments, plant",
    [
        (at_random, (6,), distances_off_by_one),
        (at_random, (6,), history_off_by_a_row),
        (collisions, (), equal_samples_are_equal_rows),
    ],
    ids=["distance", "history", "hash"],
)
def test_mistakes_are_seen(case: Callable[..., Any], arguments: tuple[Any, ...], plant: Callable[..., None]) -> None:
    with pytest.raises(runner.RankFailure, match=r"words differ|refused: ROWS"):
        runner.run(case, 2, *arguments, plant)


@runner.together(2, "")
@runner.together(2, "with trials")
@runner.together(2, "without a trial")
def layers(rank: int, ranks: int, plant: str) -> None:
    """Dispatches of three layers, then their gradients in reverse. Bits arrive by a wrong map too; only the size tells."""
    with pytest.MonkeyPatch.context() as patch, posted() as frames:
        if plant:
            patch.setattr(RowMemory, "newest", lambda self, key: [(-1, RowPairs(*wrong))])
        if plant == "without a trial":
            patch.setattr(RowCoder, "_good", lambda self, words, pairs: torch.ones(len(pairs.rows), dtype=torch.bool))
        sent = [
            [[rows_like(400, 256, torch.bfloat16, 50 * layer + a, 200)] * ranks for a in range(ranks)]
            for layer in range(3)
        ]
        wrong = torch.arange(1, 300, dtype=torch.int32), torch.arange(299, dtype=torch.int32)
        for segments in sent:
            exchange(rank, segments, "dispatch", CODED)
            exchange(
                rank, [[rows_like(400, 256, torch.bfloat16, 7 + a)] * ranks for a in range(ranks)], "combine", CODED
            )
        frames.clear()
        for turn, segments in enumerate(reversed(sent)):
            back = [[scaled(part, turn + a) for part in line] for a, line in enumerate(segments)]
            exchange(rank, back, "combine.bwd", CODED)
        ratio = len(frames) * 400 * 256 * 2 / sum(frame.numel() for frame in frames)
        assert ratio < 1.7 if plant else ratio > 2.2, ratio


@runner.together(3)
def rows_that_do_not_repeat(rank: int, ranks: int) -> None:
    """No row repeats: frames as without rows, and no search in the 15 next messages of the kind."""
    searches: list[str] = []

    def finding(self: Any, end: Any = None) -> int:
        searches.append(kind)
        return find(self, end)

    find = row_segment.RowSegment.find
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_segment.RowSegment, "find", finding)
        in_fragments(patch, 1 << 14)
        plain = [[rows_like(900, 256, torch.bfloat16, 3 * a + b) for b in range(ranks)] for a in range(ranks)]
        kind = "dispatch"
        seen = []
        for rows in ("auto", "off"):
            with posted() as frames:
                exchange(rank, plain, kind, replace(CODED, rows=rows))
            seen.append(frames)
        assert [frame.tolist() for frame in seen[0]] == [frame.tolist() for frame in seen[1]]
        assert len(searches) == ranks - 1
        for _ in range(15):
            exchange(rank, plain, kind, CODED)
        assert len(searches) == ranks - 1
        exchange(rank, plain, kind, CODED)
        assert len(searches) == 2 * (ranks - 1)
        kind = "combine"  # another kind has its own backoff, and one peer with repeats keeps the search on for all
        mixed = [
            [rows_like(900, 256, torch.bfloat16, 3 * a + b, 100 * (b == (a + 1) % ranks)) for b in range(ranks)]
            for a in range(ranks)
        ]
        searches.clear()
        for _ in range(4):
            with posted() as frames:
                exchange(rank, mixed, kind, CODED)
            assert row_frames(frames)
        assert len(searches) == 4 * (ranks - 1)


@runner.together(2)
def rows_off(rank: int, ranks: int) -> None:
    """Other roles and ``rows: off`` send the frames of other roles; tensors without rows, and raw frames, have no row frames."""
    rows = [[rows_like(800, 256, torch.bfloat16, a, 100) for _ in range(ranks)] for a in range(ranks)]
    source = torch.cat(rows[rank])
    seen = {}
    for name, role, more, width in (
        ("sp", "sp", {}, None),
        ("off", "ep", {"rows": "off"}, None),
        ("raw", "ep", {"codec": "raw"}, None),
        ("no width", "ep", {}, 0),
        ("flat", "ep", {}, None),
        ("rows", "ep", {}, None),
    ):
        given = source.view(-1) if name == "flat" else source
        with posted() as frames:
            config = replace(CODED, **more)
            comm.all_to_all_single(
                torch.empty_like(given), given, config=config, role=role, kind="dispatch", row_width=width
            )
        assert bool(row_frames(frames)) == (name == "rows"), name
        seen[name] = [frame.tolist() for frame in frames]
    assert seen["sp"] == seen["off"] == seen["flat"] == seen["no width"]


def mixed_kernels(rank: int, ranks: int, without: int) -> int:
    """Rank ``without`` has no C++ kernels. The first operations of the group, some of them asynchronous; returns its row frames."""
    if rank == without:
        kernels.ROUTES["cpu"].pop("native")
    rows = [[rows_like(300, 256, torch.bfloat16, a, 100)] * ranks for a in range(ranks)]
    source, wanted = torch.cat(rows[rank]), torch.cat([line[rank] for line in rows])
    with posted() as frames:
        outputs = [torch.zeros_like(wanted) for _ in range(2)]
        handles = [comm.all_to_all_single(out, source, async_op=True, config=CODED, role="ep") for out in outputs]
        for handle, output in zip(handles, outputs, strict=True):
            handle.wait()
            assert torch.equal(output.view(torch.uint8), wanted.view(torch.uint8))
        for kind, way in (("dispatch", 0), ("combine.bwd", 2)):
            exchange(rank, rows, kind, CODED, way)
        assert CodecId.EXPONENT in {parse(frame).codec for frame in frames} or without < 0
        return row_frames(frames)


@pytest.mark.parametrize("without", [-1, 1])
def test_a_rank_without_a_compiler_gets_no_row_frame(without: int) -> None:
    """Ranks agree by themselves, without DeepSpeed; with kernels on all ranks, row frames travel."""
    sent = runner.run(mixed_kernels, 3, without)
    assert not any(sent) if without >= 0 else all(sent)


@runner.together(2)
def blocks_of_a_row(rank: int, ranks: int) -> None:
    """Gradients go in blocks of one row; words that do not shrink fit the receiver's memory too."""
    for width, kind, block in (
        (256, "combine.bwd", 256),
        (128, "", 128),
        (256, "dispatch", 1024),
        (1024, "", 1024),
        (200, "", 1024),
    ):
        rows = [[rows_like(40_000 // width, width, torch.bfloat16, a)] * ranks for a in range(ranks)]
        with posted() as frames:
            exchange(rank, rows, kind, CODED)
        assert {parse(frame).block for frame in frames} == {block}, (width, kind)
    dice = torch.Generator().manual_seed(3)
    noise = torch.randint(-(2**15), 2**15, (3000, 128), dtype=torch.int16, generator=dice).view(torch.bfloat16)
    exchange(rank, [[noise] * ranks] * ranks, "combine.bwd", CODED)


def damaged(rank: int, ranks: int, group: dist.ProcessGroup, at: int, byte: int) -> None:
    """Rank 1 sends row frames in which one byte differs."""
    post = pipeline.Exchange.post

    def sending(self: Any, frame: torch.Tensor, *more: Any) -> None:
        assert parse(frame).codec == CodecId.ROWS, "plant the mistake elsewhere"
        frame[at] = byte
        post(self, frame, *more)

    if rank == 1:
        pipeline.Exchange.post = sending  # type: ignore[method-assign]
    rows = rows_like(2000 * ranks, 256, torch.bfloat16, rank, 300)
    more: dict[str, Any] = {"group": group, "config": CODED, "role": "ep", "kind": "dispatch"}
    comm.all_to_all_single(torch.empty_like(rows), rows, **more)


#: Offset in a frame and the byte there -> the refusal. The fields begin behind the header: width, head, repeats, scaled, bits.
DAMAGED = {
    "no width": (33, 0, "ROWS"),
    "more repeats than rows": (43, 255, "ROWS"),
    "distances beyond the history": (48, 32, "ROWS|SIZE"),
}


@pytest.mark.parametrize(
    "name", mostly_full(DAMAGED, ["distances beyond the history"], "each waits for a timeout of the group")
)
def test_damaged_row_frames(tmp_path: Path, name: str) -> None:
    at, byte, code = DAMAGED[name]
    said = survive(tmp_path, damaged, 2, at, byte)
    assert re.search(rf"frame from global rank 1 refused: ({code})", said[0]), said


def test_backoff() -> None:
    patient = wire.Backoff(wire.UNSEARCHED, patience=2)
    patient.note(False)
    assert not patient.skips()
    patient.note(True)
    patient.note(False)
    assert not patient.skips()
    patient.note(False)
    assert [patient.skips() for _ in range(16)] == [True] * 15 + [False]


def test_memory_of_maps() -> None:
    memory, key, other = RowMemory(), MapKey(1, 1000, 10), MapKey(2, 1000, 10)
    maps = [RowPairs(torch.tensor([n], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)) for n in range(30)]
    for pairs in maps:
        memory.remember(key, pairs)
    memory.remember(other, maps[0])
    newest = memory.newest(key)
    assert [int(pairs.rows) for _, pairs in newest] == list(range(29, 29 - wire.MAP_TRIALS, -1))
    memory.forget(newest[0][0])
    memory.forget(newest[0][0])
    assert int(memory.newest(key)[0][1].rows) == 28 and len(memory.newest(other)) == 1
    assert memory.newest(MapKey(1, 1000, 20)) == []


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAP_BYTES", 80)
    memory, key = RowMemory(), MapKey(0, 100, 10)
    pairs = RowPairs(torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32))
    numbers = []
    for _ in range(10):
        memory.remember(key, pairs)
        numbers.append(memory.newest(key)[0][0])
    assert [number for number, _ in memory.newest(key)] == numbers[:-4:-1]  # 24 bytes each
    memory.remember(key, RowPairs(*(torch.zeros(20, dtype=torch.int32),) * 2))  # more than all
    assert memory.newest(key) == []


test_programs = runner.programs(__name__)
