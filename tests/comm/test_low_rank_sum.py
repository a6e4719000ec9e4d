"""Sums by PowerSGD over threads in the place of ranks: nothing of a gradient is lost for good, and mistakes in errors are seen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_zipccl.codecs import lowrank
from ds_zipccl.comm.lossy import low_rank_sum
from ds_zipccl.comm.lossy.low_rank_sum import Matrix

RANKS, STEPS, RANK = 3, 12, 4
#: Rows and columns of the matrices, each behind a gap of so many other elements.
SHAPES, GAP = [(24, 40), (33, 17)], 5
NUMEL = sum(rows * columns + GAP for rows, columns in SHAPES)
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
        threads = [threading.Thread(target=program, args=(rank, step)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
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
    def given(step: int, rank: int) -> torch.Tensor:
        return gradients(step, rank, dtype)

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
    first = slice(GAP, GAP + SHAPES[0][0] * SHAPES[0][1])
    exact = torch.stack([given(2, rank) for rank in range(RANKS)]).sum(0)[first]
    assert torch.equal(results[0][2][first].isfinite(), exact.isfinite())
    assert all(bool(one.factor.isfinite().all()) for own in state for one in own)
    state, results, *_ = run(given, steps=5)
    assert all(bool(one.isfinite().all()) for one in results[0][3:]), "what is not finite is not kept"
    assert all(bool(matrix.error.isfinite().all()) for own in state for matrix in own if matrix.error is not None)


def test_an_overflow_of_float16_arrives_as_infinity() -> None:
    """The check of the loss scaler looks for it; large sums without an infinity stay factors."""

    def given(step: int, rank: int) -> torch.Tensor:
        rows, columns = SHAPES[0]
        flat = gradients(step, rank, torch.float16)
        place = slice(GAP, GAP + rows * columns)
        flat[place] = 20000.0 if step == 1 else 25000.0 if step == 2 else 1.0
        return flat

    state, results, *_ = run(given, steps=2)
    assert all(own[0].arrived for own in state) and bool(results[0][1].isfinite().all())
    state, results, *_ = run(given, steps=3)
    first = slice(GAP, GAP + SHAPES[0][0] * SHAPES[0][1])
    assert all(bool(one[2][first].isinf().all()) for one in results)
    assert all(not own[0].arrived and own[0].error is None and own[1].arrived for own in state)


def _forget(state: list[list[Matrix]]) -> None:
    for own in state:
        for one in own:
            one.error = None


def _negate(state: list[list[Matrix]]) -> None:
    for own in state:
        for one in own:
            if one.error is not None:
                one.error = -one.error


@pytest.mark.parametrize("mistake", ["sign", "old error forgotten", "wrong rank", "not divided"])
def test_mistakes_in_errors_are_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake == "sign":
        state, results, _, _ = run(gradients, between=_negate)
        assert missing(gradients, state, results) > 1e-2
    elif mistake == "old error forgotten":
        state, results, _, _ = run(gradients, between=_forget, steps=STEPS)
        assert missing(gradients, state, results) > 1e-2
    else:
        ordinary_sub = low_rank_sum._deliver

        def deliver(flat: Any, matrix: Matrix, words: Any, factors: Any, ranks: int, route: str) -> None:
            if mistake == "not divided":
                ordinary_sub(flat, matrix, words, factors, 1, route)
            else:
                ordinary_sub(flat, matrix, words.flip(0), factors, ranks, route)

        monkeypatch.setattr(low_rank_sum, "_deliver", deliver)
        state, results, _, deviation = run(gradients, steps=4)
        assert deviation > 1e-2
        if mistake == "not divided":
            assert missing(gradients, state, results) > 1e-2
