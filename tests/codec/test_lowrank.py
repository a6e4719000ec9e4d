"""Low-rank frames and the factors in them: the document, the routes, the identities of a power iteration, and refusals."""

from __future__ import annotations

import itertools

import corpus
import from_format_lowrank
import pytest
import torch
import variants
from corpus import assert_same_bits, words_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_zipccl import codecs
from ds_zipccl.codecs import decompress, decompress_add, lowrank, project
from ds_zipccl.codecs.registry import lossy_spec
from ds_zipccl.frame import DTYPE_IDS, CodecId
from ds_zipccl.kernels.sums import flushing
from ds_zipccl.lossy import LowRank, PowerSgd, Round

route = variants.each(variants.CPP)
DTYPES = codecs.LOSSY_DTYPES
NAMES = {kind.dtype: name for name, kind in corpus.SUMMED.items()}
#: Rows, columns and rank: tiles of every length, and one row or column more than the rank.
SHAPES = ((5, 7, 1), (33, 70, 9), (64, 32, 8), (9, 300, 4), (130, 41, 16))


def factors(rows: int, columns: int, rank: int, seed: int = 0, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounded factors: bells, with zeros, subnormal numbers and one large column."""
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(count, rank, generator=generator) for count in (rows, columns))
    p[torch.rand(p.shape, generator=generator) < 0.1] = 0
    q[torch.rand(q.shape, generator=generator) < 0.05] = -0.0
    q[torch.rand(q.shape, generator=generator) < 0.05] *= 2.0**-140
    q[:, 0] *= 100
    return lowrank.round_factors(p, q * scale)


def frame_of(p: torch.Tensor, q: torch.Tensor, dtype: torch.dtype, route: str = "auto", **more: object) -> torch.Tensor:
    return lowrank.compress_factors(p, q, dtype, checksum=False, block=128, route=route, **more)


#: Matrices like the gradients of activations: so many directions with these strengths, the same ones in every micro-batch, turned a little.
STRENGTHS = torch.arange(1, 201).double() ** -0.55


def gradients(rows: int = 512, columns: int = 320, count: int = 6, seed: int = 0) -> list[torch.Tensor]:
    """Matrices of consecutive micro-batches."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(columns, len(STRENGTHS), generator=generator, dtype=torch.float64)
    found = []
    for _ in range(count):
        directions = directions + 0.3 * torch.randn(directions.shape, generator=generator, dtype=torch.float64)
        samples = torch.randn(rows, len(STRENGTHS), generator=generator, dtype=torch.float64) * STRENGTHS
        found.append((1e-3 * samples @ directions.t()).float())
    return found


# --- the document, the routes


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_a_decoder_written_from_the_document_agrees(route: str, dtype: torch.dtype) -> None:
    for seed, (rows, columns, rank) in enumerate(SHAPES):
        p, q = factors(rows, columns, rank, seed, 500.0)  # beyond the range of float16 here and there
        frame = frame_of(p, q, dtype, route, shape=(rows, columns))
        wanted = from_format_lowrank.product(p.numpy(), q.numpy(), DTYPE_IDS[dtype])
        made = lowrank.product(p, q, torch.empty(rows, columns, dtype=dtype), route=route)
        assert words_of(made) == wanted and made.isfinite().all()
        if frame[5] == CodecId.LOWRANK:
            assert from_format_lowrank.decode(frame.numpy().tobytes()) == (DTYPE_IDS[dtype], (rows, columns), wanted)
        decoded = decompress(frame, route=route)
        assert decoded.shape == (rows, columns)
        assert_same_bits(decoded, made)


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_sums_are_those_of_the_words(route: str, dtype: torch.dtype, fp32: bool) -> None:
    for seed, (rows, columns, rank) in enumerate((*SHAPES, (6, 1100, 3))):
        p, q = factors(rows, columns, rank, seed)
        frame = frame_of(p, q, dtype)
        before = torch.randn(rows * columns, generator=torch.Generator().manual_seed(9))
        before = before if fp32 else before.to(dtype)
        sums = decompress_add(frame, before.clone(), dtype=dtype, route=route)
        assert_same_bits(sums, before + decompress(frame).to(before.dtype))


def test_columns_become_orthonormal_bit_for_bit() -> None:
    """At every instruction set the bits of the slow reference: lengths that are no multiple of the lanes, columns that others span,
    subnormal and huge numbers."""
    for rows, rank in ((1, 1), (15, 4), (16, 16), (35, 5), (1000, 7)):
        columns = torch.randn(rows, rank, generator=torch.Generator().manual_seed(rows))
        columns[:, -1] *= 2.0**-130
        columns[:, 0] *= 2.0**100
        if rank > 3:
            columns[:, 2] = 0
            columns[:, 3] = columns[:, 1]
        if rank > 5:
            columns[:, 5] = columns[:, 1] + columns[:, 4]  # its rounding is left: the last bits of float64 decide
        found = []
        for variant in variants.usable(variants.CPP):
            for flush in (False, True):
                with variant.in_use() as route, flushing(flush):
                    one = columns.clone()
                    lowrank.orthonormalize(one, route=route)
                found.append(one)
        assert found
        for one in found:
            assert_same_bits(one, torch.from_numpy(from_format_lowrank.orthonormal(columns.numpy())))
        wanted = torch.eye(rank)
        if rank > 3:
            wanted[2, 2] = wanted[3, 3] = 0
        assert torch.allclose(found[0].t() @ found[0], wanted, atol=1e-6)


def test_threads_and_flushed_denormals_change_no_product() -> None:
    p, q = factors(700, 1500, 5)
    q[:60] *= 2.0**-136
    wanted = lowrank.product(p, q, torch.empty(700, 1500))
    assert bool((wanted.abs() < torch.finfo(torch.float32).tiny).logical_and(wanted != 0).any()), "subnormal values"
    for threads, flush in itertools.product((1, 3), (False, True)):
        for variant in variants.usable(variants.CPP):
            with corpus.threads(threads), variant.in_use() as route, flushing(flush):
                found = lowrank.product(p, q, torch.empty(700, 1500), route=route)
                decoded = decompress(frame_of(p, q, torch.float32), route=route)
            assert_same_bits(found, wanted)
            assert_same_bits(decoded.view(700, 1500), wanted)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 90), st.integers(2, 90), st.integers(1, 12), st.sampled_from(DTYPES), st.integers(0, 99))
def test_any_frame_decodes_to_the_product(rows: int, columns: int, rank: int, dtype: torch.dtype, seed: int) -> None:
    p, q = factors(rows, columns, min(rank, rows, columns), seed)
    if p.shape[1] * (rows + columns) > rows * columns:
        with pytest.raises(ValueError, match="send the matrix itself"):
            frame_of(p, q, dtype)
        return
    frame = frame_of(p, q, dtype)
    values = lowrank.product(p, q, torch.empty(rows * columns, dtype=dtype))
    assert_same_bits(decompress(frame), values)
    assert frame.numel() <= codecs.compress(values, "raw", shaped=False).numel()
    bound = lowrank.compress_factors_bound(rows, columns, p.shape[1], dtype, block=128)
    assert bound >= codecs.compress_bound(rows * columns, dtype, block=128)
    room = torch.full((bound + 8,), 0x5C, dtype=torch.uint8)
    assert torch.equal(frame_of(p, q, dtype, out=room[:bound]), frame) and (room[bound:] == 0x5C).all()


# --- the power iteration


@pytest.mark.parametrize("rank", [1, 4, 16])
def test_a_matrix_of_the_rank_arrives(rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    matrix = torch.randn(200, rank, generator=generator) @ torch.randn(rank, 90, generator=generator)
    for wider in (rank, rank + 3):
        p, q = lowrank.power_step(matrix, lowrank.first_factor(90, wider, 1))
        assert (matrix - p @ q.t()).norm() <= 1e-5 * matrix.norm()
        made = lowrank.product(p, q, torch.empty_like(matrix))
        assert (matrix - made).norm() <= 1e-5 * matrix.norm()


def test_the_error_is_orthogonal_to_the_factor() -> None:
    for matrix in gradients(count=2):
        p, q = lowrank.power_step(matrix, lowrank.first_factor(320, 16, 2))
        error = matrix - p @ (p.t() @ matrix)
        assert (p.t() @ error).norm() <= 1e-5 * matrix.norm()
        assert (p.t() @ p - torch.eye(16)).abs().max() <= 1e-6
        assert torch.allclose(q, matrix.t() @ p)


@pytest.mark.parametrize("seed", [0, 1])
def test_errors_lie_near_the_tail_of_the_singular_values(seed: int) -> None:
    """At most 1.6 times the best error from a random start, 1.25 times from the last micro-batch; the factors' rounding adds nothing."""
    q, ratios = lowrank.first_factor(320, 16, seed), []
    for matrix in gradients(seed=seed):
        p, q = lowrank.power_step(matrix, q)
        tail = float(torch.linalg.svdvals(matrix)[16:].norm())
        exact, rounded = (
            float((matrix - lowrank.product(*pair, torch.empty_like(matrix))).norm())
            for pair in ((p, q), lowrank.round_factors(p, q))
        )
        assert rounded == pytest.approx(exact, rel=1e-3)
        ratios.append(exact / tail)
        assert 0.5 < tail / float(matrix.norm()) < 0.65, "as measured on gradients of activations"
    assert min(ratios) >= 1 - 1e-5
    assert 1.2 < ratios[0] <= 1.6 and max(ratios[2:]) <= 1.25, ratios


def test_scales_change_nothing() -> None:
    """No absolute number in the iteration: gradients of any scale keep their directions."""
    matrix, start = gradients(count=1)[0], lowrank.first_factor(320, 8, 3)
    p, q = lowrank.power_step(matrix, start)
    for exponent in (-60, 40):
        again = lowrank.power_step(matrix * 2.0**exponent, start)
        assert torch.equal(again[0], p) and torch.equal(again[1], q * 2.0**exponent)


def test_directions_come_back_after_a_matrix_of_zeros() -> None:
    matrix, start = gradients(count=1)[0], lowrank.first_factor(320, 8, 3)
    p, q = lowrank.power_step(torch.zeros_like(matrix), start)
    assert not p.any() and not q.any()
    p, q = lowrank.power_step(matrix, q)
    assert (matrix - p @ q.t()).norm() < 0.95 * matrix.norm() and (p.norm(dim=0) > 0.9).all()
    assert torch.equal(lowrank.basis(q), lowrank.basis(q.clone()))


def test_ranks_that_pay() -> None:
    assert lowrank.factor_rank(1024, 3072, 16) == 16
    assert [lowrank.factor_rank(40, 40, rank) for rank in (9, 10)] == [9, 0], "half of the values or more"
    assert [lowrank.factor_rank(*shape, 16) for shape in ((3, 1000), (1, 9), (0, 5))] == [0, 0, 0]
    assert lowrank.factor_rank(6, 1000, 2) == 2
    with pytest.raises(ValueError, match="lowrank rank 16 codes matrices"):
        lossy_spec(LowRank(), torch.bfloat16)
    with pytest.raises(ValueError, match="powersgd rank 32 codes matrices"):
        codecs.compress(torch.ones(8), PowerSgd(), lossy=True)


def test_factors_have_five_bits() -> None:
    p, q = torch.randn(50, 4), torch.randn(60, 4)
    for before, after in zip((p, q), lowrank.round_factors(p, q), strict=True):
        assert_same_bits(after, project(before, Round(5)))


def test_a_frame_is_never_larger_than_its_words() -> None:
    """Factors that no codec shortens, just fewer than the matrix has values: the product goes without loss."""
    p, q = torch.randn(32, 16), torch.randn(32, 16)
    for dtype in DTYPES:
        frame = frame_of(p, q, dtype, shape=(2, 16, 32))
        assert frame[5] in (CodecId.RAW, CodecId.EXPONENT) or dtype == torch.float32
        assert_same_bits(decompress(frame), lowrank.product(p, q, torch.empty(2, 16, 32, dtype=dtype)))
