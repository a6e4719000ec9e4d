"""Errors of lossy sums: their size, what check = "shadow" makes of them, equal replicas, calls that stay exact, and sums by PowerSGD."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import corpus
import pytest
import ranks as runner
import test_lossy_messages
import torch
import torch.distributed as dist
from lossy_calls import CODECS, api, normal
from moves import CODED
from tiers import mostly_full

from ds_zipccl import comm
from ds_zipccl.codecs import lowrank, project
from ds_zipccl.comm import reduction_order
from ds_zipccl.comm.group_state import GroupState
from ds_zipccl.comm.host import frames as host_frames
from ds_zipccl.comm.lossy import frames, low_rank_sum
from ds_zipccl.comm.lossy.low_rank_sum import Matrix
from ds_zipccl.comm.request import Request
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.lossy import LossyCodec, Round
from ds_zipccl.telemetry import counters

#: Of the gates on errors of sums.
GATE = 0.08
SIZE = 240_000


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The relative L2 error."""
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def errors_of(rank: int, ranks: int, codec: LossyCodec) -> dict[str, float]:
    """The errors of one rounding and of sums of like contributions in fp32, where nothing else rounds."""
    everyone = [normal(peer, SIZE, torch.float32, 7) for peer in range(ranks)]
    exact, mine = torch.stack([values.double() for values in everyone]).sum(0), everyone[rank]
    calls = api(codec)
    found = {"once": relative(project(mine, codec), mine)}
    whole = mine.clone()
    calls.all_reduce(whole)
    found["all_reduce"] = relative(whole, exact)
    shard = torch.empty(SIZE // ranks)
    calls.reduce_scatter_tensor(shard, mine)
    found["reduce_scatter_tensor"] = relative(shard, exact.chunk(ranks)[rank])
    owned = mine.clone()
    calls.reduce_to_owners(owned, [(SIZE // ranks, (peer,)) for peer in range(ranks)])
    found["reduce_to_owners"] = relative(owned.chunk(ranks)[rank], exact.chunk(ranks)[rank])
    averaged = mine.clone()
    calls.all_reduce(averaged, dist.ReduceOp.AVG)
    found["average"] = relative(averaged, exact / ranks)
    return found


OTHERS = [(3, codec) for codec in CODECS if codec not in (Round(3), Round(1))]


@pytest.mark.parametrize(
    ("ranks", "codec"),
    mostly_full([*((ranks, Round(3)) for ranks in (2, 3, 4)), *OTHERS], [(2, Round(3))], "more of the same formula"),
    ids=str,
)
def test_errors_of_sums(ranks: int, codec: LossyCodec, plant: Callable[[], None] | None = None) -> None:
    """One rounding of each contribution but the own one; an all-reduce rounds the sum as well. A third rounding, one less, and one of the
    own part are beyond the gates."""
    contributions = math.sqrt((ranks - 1) / ranks)
    both = math.sqrt((ranks - 1) / ranks + 1)
    for found in runner.run(errors_of, ranks, codec, plant=plant):
        once = found.pop("once")
        for name, error in found.items():
            wanted = once * (both if name in ("all_reduce", "average") else contributions)
            assert abs(error / wanted - 1) <= GATE, f"{name} of {ranks}: error {error:.5f}, wanted {wanted:.5f} +-8 %"


@runner.together(2)
def calls_that_stay_exact(rank: int, ranks: int) -> None:
    """Small messages, other dtypes and reductions, one rank, a role that is never coded, and a config that is not enabled."""
    codec = Round(1)
    default = ZipcclConfig(enabled=True, mode="always")
    everyone = [normal(peer, 40_000, torch.float32) for peer in range(ranks)]
    mine, alone = everyone[rank], [dist.new_group([peer]) for peer in range(ranks)]
    total = mine.clone()
    dist.all_reduce(total)

    def summed(config: ZipcclConfig, values: torch.Tensor, **more: Any) -> torch.Tensor:
        found = values.clone()
        comm.all_reduce(found, config=config, lossy=codec, **more)
        return found

    small = mine[: default.min_bytes // 4 - 1]
    corpus.assert_same_bits(summed(default, small), total[: len(small)])
    assert not torch.equal(summed(default, mine), total)
    corpus.assert_same_bits(summed(replace(default, enabled=False), mine), total)
    corpus.assert_same_bits(summed(replace(default, mode="never"), mine), total)
    corpus.assert_same_bits(summed(default, mine, group=alone[rank]), mine)
    whole = torch.arange(40_000)
    assert torch.equal(summed(default, whole), whole * ranks)
    assert torch.equal(summed(default, mine.double()), torch.stack([one.double() for one in everyone]).sum(0))
    assert torch.equal(summed(default, mine, op=dist.ReduceOp.MAX), torch.stack(everyone).amax(0))
    segments = [torch.full((900,), 1 / 3) for _ in range(ranks)]
    outputs = [torch.empty(900) for _ in range(ranks)]
    comm.all_to_all(
        outputs, segments, config=default, lossy=codec
    )  # its size is each rank's own, so that it never passes
    corpus.assert_same_bits(torch.cat(outputs), torch.cat(segments))
    assert {reason for row in counters.rows() for reason in row["reasons"]} == {
        "smaller than min_bytes",
        "not enabled",
        "role is never coded",
        "group of one rank",
        "dtype int64",
        "dtype float64",
        "reduce op MAX",
    }


@runner.together(2)
def errors_are_counted(rank: int, ranks: int) -> None:
    """The sampled error of the sender is the error of one rounding; frames count."""
    mine = normal(rank, SIZE, torch.bfloat16)
    for _ in range(3):
        api(Round(3)).all_reduce(mine.clone(), role="tp")
    mine[7] = math.inf
    api(Round(3)).all_gather_into_tensor(torch.empty(SIZE * ranks).bfloat16(), mine, role="tp")
    first, second = counters.lossy()
    assert (first["role"], first["op"], first["codec"]) == ("tp", "all_gather_into_tensor", "round mantissa 3")
    for row in (first, second):
        assert row["error"] == pytest.approx(0.0265, rel=0.05)
        assert row["frames"] >= 1 and not row["exact"]
    looks: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        look = frames.squared_error
        patch.setattr(frames, "squared_error", lambda *given: looks.append(given) or look(*given))
        for _ in range(2 * frames.SAMPLED):
            api(Round(3)).all_gather_into_tensor(torch.empty(SIZE * ranks).bfloat16(), mine, role="tp")
    assert len(looks) == 2, "frames are numbered over calls"
    api(Round(3)).all_reduce(torch.ones(40_000, dtype=torch.int32), role="tp")
    assert counters.lossy()[1]["exact"] == {"dtype int32 is never lossy": 1}


def exact_owner() -> None:
    """The owner keeps its exact sum."""
    compress = host_frames.FrameCoder.compress

    def without_place(self: Any, flat: torch.Tensor, buffers: Any, base: Any = None, own_place: Any = None) -> Any:
        return compress(self, flat, buffers, base)

    host_frames.FrameCoder.compress = without_place  # type: ignore[method-assign]


def own_part_too() -> None:
    """The owner rounds its own part too."""
    make = reduction_order.Received.__init__

    def rounded(self: Any, rank: int, exchange: Any, own: torch.Tensor) -> None:
        make(self, rank, exchange, project(own, Round(3)))

    reduction_order.Received.__init__ = rounded  # type: ignore[method-assign]


def requantised_ring() -> None:
    """The sum is rounded again at each hop of a ring."""

    def ring(contributions: Any, ranks: Any, total: torch.Tensor, buffer: torch.Tensor, flushes: Any) -> None:
        own = contributions.rank
        total.zero_()
        for rank in [*(rank for rank in ranks if rank != own), own]:
            contributions.add(rank, total)
            if rank != own:
                project(total, Round(3), out=total)

    reduction_order._add_in_order = ring


def nan_to_zero() -> None:
    """Values that are not finite become zero."""

    def finite(good: Callable[..., Any]) -> Callable[..., Any]:
        def without(flat: torch.Tensor, *more: Any, **settings: Any) -> Any:
            return good(flat.nan_to_num(0.0, 0.0, 0.0), *more, **settings)

        return without

    frames.compress, frames.project = finite(frames.compress), finite(frames.project)


def exact_raw_frames() -> None:
    """Raw frames carry the values as they are."""
    frames.project = lambda flat, codec, *, out, route: out.copy_(flat)


def one_backoff() -> None:
    """Lossless frames depend on how well lossy ones shrink."""
    backoff = GroupState.backoff
    GroupState.backoff = lambda self, *kind, **more: backoff(self, *kind[:2], **more)  # type: ignore[method-assign]


def unhinted_call() -> None:
    """A call that names no codec is lossy."""
    prepare = Request.prepare

    def lossily(self: Request) -> None:
        if self.op == "all_reduce" and self.options.lossy is None:
            self.options = self.options._replace(lossy=Round(1))
        prepare(self)

    Request.prepare = lossily  # type: ignore[method-assign]


def by_definition(plant: Callable[[], None]) -> None:
    runner.run(test_lossy_messages.by_definition, 2, plant=plant)


#: A mistake, the check that must notice, and the words of its complaint. The checks are tests by themselves, without a mistake.
PLANTS: dict[str, tuple[Callable[[], None], Callable[[Any], Any], str]] = {
    "the owner keeps its exact sum": (exact_owner, by_definition, "words differ"),
    "the owner rounds its own part too": (own_part_too, partial(test_errors_of_sums, 2, Round(3)), "error 0.0"),
    "a ring that rounds at every hop": (requantised_ring, partial(test_errors_of_sums, 3, Round(3)), "error 0.0"),
    "NaN becomes zero": (nan_to_zero, by_definition, "words differ"),
    "raw frames with exact values": (exact_raw_frames, by_definition, "words differ"),
    "one backoff for all frames": (
        one_backoff,
        test_lossy_messages.test_frames_of_lossless_calls_do_not_change,
        "frames of lossless calls differ",
    ),
    "a call without a hint": (
        unhinted_call,
        lambda plant: runner.run(test_lossy_messages.unnamed_calls_are_exact, 2, plant=plant),
        "AssertionError: lossy=None",
    ),
}


@pytest.mark.full(reason="the tests themselves are in the short tier")
@pytest.mark.parametrize("name", PLANTS)
def test_a_mistake_is_seen(name: str) -> None:
    plant, check, complaint = PLANTS[name]
    with pytest.raises(AssertionError, match=complaint):
        check(plant)


SMALL = 30_000


def coarser() -> None:
    """Frames carry values with one bit less than was asked for."""
    compress = frames.compress
    frames.compress = lambda flat, codec, **settings: compress(flat, Round(codec.mantissa - 1), **settings)


@runner.together(2, coarser)
@runner.together(2, nan_to_zero)
def the_shadow_notices(rank: int, ranks: int, plant: Callable[[], None]) -> None:
    """Moves are compared bit by bit with the codec's values. Without a mistake calls pass: test_lossy_messages.py."""
    plant()
    mine = normal(rank, SMALL, torch.float32)
    mine[rank] = mine[rank + SMALL // 2] = float("inf")
    with pytest.raises(comm.CommError, match=r"wanted|check failed"):
        api(Round(3), check="shadow").all_gather_into_tensor(torch.empty(SMALL * ranks), mine)


RANKS, STEPS, RANK = 3, 12, 4
#: Rows and columns of the matrices, each behind a gap of so many other elements.
SHAPES, GAP = [(24, 40), (33, 17)], 5
NUMEL = sum(rows * columns + GAP for rows, columns in SHAPES)
FIRST = slice(GAP, GAP + SHAPES[0][0] * SHAPES[0][1])
Given = Callable[[int, int], torch.Tensor]


def gradients(step: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


class Meeting:
    """Ranks that are threads, and their exact sums."""

    def __init__(self) -> None:
        self.parts: list[Any] = [None] * RANKS
        self.barrier = threading.Barrier(RANKS, timeout=30)
        self.sent = 0

    def exact_sum(self, rank: int) -> Callable[[torch.Tensor], None]:
        def run(flat: torch.Tensor) -> None:
            self.parts[rank] = flat
            self.barrier.wait()
            total = torch.stack(self.parts).float().sum(0)
            self.sent += flat.nbytes * (rank == 0)
            self.barrier.wait()
            flat.copy_(total)

        return run


def matrices() -> list[Matrix]:
    at, found = 0, []
    for number, (rows, columns) in enumerate(SHAPES):
        at += GAP
        found.append(Matrix(at, rows, columns, lowrank.first_factor(columns, RANK, number)))
        at += rows * columns
    return found


def run(given: Given, steps: int = STEPS, between: Callable[[list[list[Matrix]]], None] = lambda state: None) -> Any:
    """Return the state and all results of each rank, the bytes that a rank has summed, and the greatest deviation of an error from the
    part of its own rank's matrix that did not arrive."""
    meeting, state = Meeting(), [matrices() for _ in range(RANKS)]
    results: list[list[torch.Tensor]] = [[] for _ in range(RANKS)]
    deviations = [0.0]
    failed: list[BaseException] = []

    def program(rank: int, step: int) -> None:
        try:
            flat, own = given(step, rank), state[rank]
            before = flat.clone().float()
            old = [one.error.clone() if one.error is not None else torch.zeros(one.rows, one.columns) for one in own]
            low_rank_sum.low_rank_sum(flat, own, RANKS, meeting.exact_sum(rank), "auto")
            results[rank].append(flat)
            for one, error in zip(own, old, strict=True):
                if one.arrived:
                    place = slice(one.start, one.end)
                    missing = (before[place] - flat[place].float() / RANKS).view(one.rows, one.columns) + error
                    assert one.error is not None
                    deviations.append(float((one.error - missing).abs().max()))
        except BaseException as error:
            failed.append(error)
            meeting.barrier.abort()

    for step in range(steps):
        runner.at_once(*(partial(program, rank, step) for rank in range(RANKS)))
        if failed:
            raise failed[0]
        between(state)
    return state, results, meeting.sent, max(deviations)


def missing(given: Given, state: list[list[Matrix]], results: list[list[torch.Tensor]]) -> float:
    """Return the greatest part of all matrices that has neither arrived nor is kept as an error, of the sum of their magnitudes."""
    worst = 0.0
    for number, matrix in enumerate(matrices()):
        place = slice(matrix.start, matrix.end)
        all_given = [given(step, rank)[place].double() for step in range(len(results[0])) for rank in range(RANKS)]
        kept = [own[number].error for own in state]
        arrived = sum(one[place].double() for one in results[0])
        held = sum(one.flatten().double() for one in kept if one is not None)
        left = sum(all_given) - arrived - held
        worst = max(worst, float(left.abs().sum() / sum(one.abs().sum() for one in all_given)))
    return worst


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_did_not_arrive_is_in_the_errors_of_all_ranks(dtype: torch.dtype) -> None:
    given = partial(gradients, dtype=dtype)
    state, results, sent, deviation = run(given)
    assert missing(given, state, results) < 1e-5
    assert deviation < 1e-5 * STEPS
    for step in range(STEPS):
        assert all(torch.equal(results[0][step], results[rank][step]) for rank in range(RANKS)), "replicas"
        exact = torch.stack([given(step, rank) for rank in range(RANKS)]).float().sum(0).to(dtype)
        assert torch.equal(results[0][step][:GAP], exact[:GAP]), "elements beside matrices are exact"
        assert not torch.equal(results[0][step][GAP:], exact[GAP:])
    assert sent < STEPS * NUMEL * 4 / 2
    for own in zip(*state, strict=True):
        assert all(torch.equal(own[0].factor, one.factor) for one in own), "factors"


def test_matrices_of_low_rank_arrive_whole() -> None:
    def given(step: int, rank: int) -> torch.Tensor:
        source, flat = torch.Generator().manual_seed(100 * step + rank), torch.zeros(NUMEL)
        for number, one in enumerate(matrices()):
            same = torch.Generator().manual_seed(number)
            left, right = (torch.randn(size, RANK, generator=same) for size in (one.rows, one.columns))
            weights = 1 + torch.rand(RANK, generator=source)
            flat[one.start : one.end] = (left * weights @ right.t()).flatten()
        return flat

    state, results, *_ = run(given, steps=50)
    exact = [torch.stack([given(step, rank) for rank in range(RANKS)]).sum(0) for step in range(50)]
    for result, right in list(zip(results[0], exact, strict=True))[2:]:  # the first factors are random
        assert float((result - right).norm()) < 1e-4 * float(right.norm())
    total = sum(exact)
    assert float((sum(results[0]) - total).norm()) < 1e-4 * float(total.norm())
    # The ranks' own errors stay, but are nothing together.
    for own in zip(*state, strict=True):
        assert float(sum(one.error for one in own).norm()) < 1e-2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_matrix_that_is_not_finite_on_one_rank_goes_exactly_on_all(value: float) -> None:
    def given(step: int, rank: int) -> torch.Tensor:
        flat = gradients(step, rank)
        if (step, rank) == (2, 1):
            flat[GAP + 3] = value
        return flat

    state, results, *_ = run(given, steps=3)
    assert all(own[0].error is None and not own[0].arrived and own[1].arrived for own in state)
    exact = torch.stack([given(2, rank) for rank in range(RANKS)]).sum(0)[FIRST]
    assert torch.equal(results[0][2][FIRST].isfinite(), exact.isfinite())
    assert all(bool(one.factor.isfinite().all()) for own in state for one in own)
    state, results, *_ = run(given, steps=5)
    assert all(bool(one.isfinite().all()) for one in results[0][3:]), "what is not finite is not kept"
    assert all(bool(matrix.error.isfinite().all()) for own in state for matrix in own if matrix.error is not None)


def test_an_overflow_of_float16_arrives_as_infinity() -> None:
    """The check of the loss scaler looks for it; large sums without an infinity stay factors."""

    def given(step: int, rank: int) -> torch.Tensor:
        flat = gradients(step, rank, torch.float16)
        flat[FIRST] = 20000.0 if step == 1 else 25000.0 if step == 2 else 1.0
        return flat

    state, results, *_ = run(given, steps=2)
    assert all(own[0].arrived for own in state) and bool(results[0][1].isfinite().all())
    state, results, *_ = run(given, steps=3)
    assert all(bool(one[2][FIRST].isinf().all()) for one in results)
    assert all(not own[0].arrived and own[0].error is None and own[1].arrived for own in state)


def _change(state: list[list[Matrix]], change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    for one in itertools.chain(*state):
        if one.error is not None:
            one.error = change(one.error)


#: What happens to the errors between two sums.
BETWEEN: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {"sign": torch.neg, "forgotten": lambda error: None}


@pytest.mark.parametrize("mistake", [*BETWEEN, "wrong rank", "not divided"])
def test_mistakes_in_errors_are_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake in BETWEEN:
        state, results, *_ = run(gradients, between=partial(_change, change=BETWEEN[mistake]))
        assert missing(gradients, state, results) > 1e-2
        return
    right = low_rank_sum._deliver

    def deliver(flat: Any, matrix: Matrix, words: Any, factors: Any, ranks: int, route: str) -> None:
        divided = mistake != "not divided"
        right(flat, matrix, words.flip(0) if divided else words, factors, ranks if divided else 1, route)

    monkeypatch.setattr(low_rank_sum, "_deliver", deliver)
    state, results, _, deviation = run(gradients, steps=4)
    assert deviation > 1e-2 and (mistake == "wrong rank" or missing(gradients, state, results) > 1e-2)


@runner.together(2, full="sends are compared bit by bit, as without a codec")
def sends_are_compared_too(rank: int, ranks: int) -> None:
    """The receiver of a send has the very values of the codec."""
    mine = normal(0, SMALL, torch.bfloat16)
    config = replace(CODED, check="shadow")
    if rank == 0:
        comm.send(mine, 1, config=config, lossy=Round(3))
        frames.project = lambda flat, codec, **more: project(flat, Round(2), **more)
        coarser()
        comm.send(mine, 1, config=config, lossy=Round(3))
        return
    got = torch.empty_like(mine)
    comm.recv(got, 0, config=config)
    with pytest.raises(comm.ShadowMismatch):
        comm.recv(got, 0, config=config)


test_programs = runner.programs(__name__)
