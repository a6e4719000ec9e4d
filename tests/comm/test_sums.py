"""Sums: gloo's bits or those of the definition; layouts, passes, complaints, grids; tensors that are the same on all ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import corpus
import moves
import pytest
import ranks as runner
import sums
import tiers
import torch
import torch.distributed as dist
from sums import bell, coded

from ds_zipccl import comm
from ds_zipccl.comm import reduction_order, spans
from ds_zipccl.comm.transport import gloo
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels import sums as plain_sums
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.telemetry import counters


@pytest.mark.parametrize("ranks", tiers.mostly_full([2, 3, 4], [2], "five seconds"))
def test_match_has_gloos_bits(ranks: int) -> None:
    runner.run_each(ranks, *((sums.as_gloo, sums.sizes_for(ranks), calls) for calls in sums.SUMS.values()), timeout=360)


#: (operation, mistake): reduce has a grid of its own.
PLANTS = [(op, plant) for op in sums.SUMS for plant in (moves.flip_a_bit, sums.other_order, sums.other_grid)]
PLANTS.remove(("reduce", sums.other_grid))


@pytest.mark.parametrize(("op", "plant"), PLANTS)
def test_a_fault_is_seen(op: str, plant: Callable[[], None]) -> None:
    with pytest.raises(runner.RankFailure, match="words differ"):
        runner.run(sums.as_gloo, 3, [20002, sums.MIB + 1], sums.SUMS[op], plant=plant)


@runner.together(3)
def fp32_by_definition(rank: int, ranks: int) -> None:
    """fp32: x0 + x1 + ... in fp32, divided for AVG, rounded once."""
    for seed, kind in enumerate(corpus.SUMMED.values()):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            contributions = [bell(peer, 5003, kind, seed) for peer in range(ranks)]
            total = contributions[0].float()
            for contribution in contributions[1:]:
                total = total + contribution.float()
            wanted = (total / ranks if op == dist.ReduceOp.AVG else total).to(kind.dtype)
            for codec in ("cascade", "raw"):
                got = contributions[rank].clone()
                coded(reduction="fp32", codec=codec).all_reduce(got, op)
                corpus.assert_same_bits(got, wanted)
                got = contributions[rank].clone()
                coded(reduction="fp32", codec=codec).reduce(got, 1, op)
                corpus.assert_same_bits(got, wanted if rank == 1 else contributions[rank])
            size = 5003 // ranks
            output = torch.empty(size, dtype=kind.dtype)
            coded(reduction="fp32").reduce_scatter_tensor(output, contributions[rank][: size * ranks], op)
            corpus.assert_same_bits(output, wanted[size * rank : size * (rank + 1)])
    plain = bell(rank, 5003, corpus.BF16, 0)
    dist.all_reduce(plain)
    other = bell(rank, 5003, corpus.BF16, 0)
    coded(reduction="fp32").all_reduce(other)
    assert not torch.equal(plain, other)  # or the two kinds of reduction would not have been told apart


@runner.together(2)
def strided(rank: int, ranks: int) -> None:
    """Tensors with gaps, of which gloo sums as many elements of memory as they have; and what it refuses."""
    for size in (1, 300):
        wide = bell(rank, 2 * size, corpus.FP32, 2)
        wanted = wide.clone()
        dist.all_reduce(wanted[::2])
        coded().all_reduce(wide[::2])
        corpus.assert_same_bits(wide, wanted)
    leaf = torch.ones(10, requires_grad=True)
    coded().all_reduce(leaf)
    assert leaf.tolist() == [ranks] * 10 and leaf.requires_grad


@runner.together(2)
def passes(rank: int, ranks: int) -> None:
    tensor = torch.tensor([rank, 1.0])
    coded().all_reduce(tensor, dist.ReduceOp.MAX)
    assert tensor.tolist() == [ranks - 1, 1.0]
    coded().all_reduce(tensor.int(), dist.ReduceOp.BOR)
    work = comm.all_reduce_coalesced([tensor], async_op=True, config=ZipcclConfig())
    work.wait()
    assert tensor.tolist() == [ranks * (ranks - 1), ranks] and work.is_completed()
    assert {reason for row in counters.rows() for reason in row["reasons"]} == {
        "reduce op MAX",
        "dtype int32",
        "not enabled",
    }
    outside = dist.new_group([0])
    if rank:
        assert coded().all_reduce(tensor, group=outside) is None
        assert coded().all_reduce_coalesced([tensor], group=outside) is None


def test_sums_on_a_device_need_no_word_of_the_device() -> None:
    """A meta tensor has no values: the host cannot read one."""
    sums, values = (torch.empty(9, dtype=dtype, device="meta") for dtype in (torch.bfloat16, torch.bfloat16))
    plain_sums.add(values, sums)
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool(sums.sum().isnan())


@pytest.mark.parametrize(
    ("kind", "backend", "op", "ranks", "fp32", "tolerance"),
    [
        ("auto", "gloo", "SUM", 3, False, "nan"),
        ("auto", "nccl", "SUM", 3, True, "rounding"),
        ("match", "nccl", "AVG", 3, False, "nan"),
        ("fp32", "gloo", "SUM", 3, True, "rounding"),
        ("fp32", "gloo", "SUM", 2, True, "nan"),  # one rounding, as with gloo
        ("fp32", "gloo", "AVG", 2, True, "rounding"),
    ],
)
def test_how_near_sums_come(kind: str, backend: str, op: str, ranks: int, fp32: bool, tolerance: str) -> None:
    reduction_, found = reduction_order._exactness(kind, backend, op, ranks)
    assert (reduction_.fp32, found) == (fp32, tolerance)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 64])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_grids_cover_the_message(ranks: int, itemsize: int) -> None:
    draw = random.Random(ranks)
    for numel in [0, 1, ranks - 1, ranks, 2 * ranks + 1, *(draw.randrange(1, 1 << 27) for _ in range(200))]:
        for grid in (gloo.all_reduce_chunk, gloo.reduce_chunk):
            slices = spans.cut(numel, grid(numel, itemsize, ranks), ranks)
            assert slices[0].start == 0 and slices[-1].stop == numel
            assert all(left.stop == right.start for left, right in pairwise(slices))


@runner.together(3)
def plain_sums_pass_on_gloo(rank: int, ranks: int) -> None:
    mine = bell(rank, 3001, corpus.BF16, 1)
    for call in ("all_reduce", "reduce_to_owners"):
        want, got = mine.clone(), mine.clone()
        dist.all_reduce(want)
        more = ([(3001, range(ranks))],) if call == "reduce_to_owners" else ()
        getattr(coded(reduction="plain"), call)(got, *more)
        corpus.assert_same_bits(got, want)
    assert all(set(row["reasons"]) == {PassReason.PLAIN_SUMS.value} for row in counters.rows()) and counters.rows()


test_programs = runner.programs(__name__)
