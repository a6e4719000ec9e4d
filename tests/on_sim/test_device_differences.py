"""Gathers of NCCL groups as differences on the simulated GPU: the right bits whatever ranks hold, one host wait, fewer bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import corpus
import moves
import pytest
import torch

from ds_zipccl import comm
from ds_zipccl.comm.bases.in_place import InPlaceBase, Sent
from ds_zipccl.comm.device import gather
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.telemetry import counters
from on_sim import world
from on_sim.cases import CODED
from on_sim.test_device_agreed import in_pieces
from on_sim.test_device_bases import FULL, OTHER, ranks_and_pieces

#: 16 KiB of bf16 and a little more, odd: the shards of all ranks but one are 2-byte aligned.
SHARD = 8463


class Trainer:
    """A ZeRO-1/2 rank: it keeps the whole, steps its own shard, gathers in place or from a tensor apart."""

    def __init__(self, rank: int, ranks: int, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> None:
        self.rank, self.ranks, self.api = rank, ranks, moves.coded(**CODED, **settings)
        self.masters = torch.randn(ranks * SHARD, generator=torch.Generator().manual_seed(1))
        self.whole = self.masters.to(dtype).to(f"cuda:{rank}")
        self.turn = 0

    def step(self) -> None:
        """A step of an optimizer on every shard, the same on all ranks."""
        self.turn += 1
        self.masters += 1e-4 * torch.randn(self.masters.numel(), generator=torch.Generator().manual_seed(self.turn))

    def gather(self, *, apart: bool = False, later: bool = False) -> None:
        wanted = self.masters.to(self.whole.dtype)
        own = self.whole.chunk(self.ranks)[self.rank]
        fresh = wanted.chunk(self.ranks)[self.rank].to(self.whole.device)
        if not apart:
            own.copy_(fresh)
        call = self.api.all_gather_into_tensor
        handle = call(self.whole, fresh if apart else own, None, later, base=comm.IN_PLACE, role="zero_param")
        if later:
            handle.wait()
        corpus.assert_same_bits(self.whole.cpu(), wanted)


def counted(
    ranks: int, seed: int, mode: world.Modes, route: CudaBackend, program: Callable[..., Any], again: int = 0
) -> dict[str, Any]:
    """Run a program, and return the counts of its gathers. ``again``: gathers that ask for the sizes of full frames in another agreement,
    because the gather before was a difference."""
    world.run(program, ranks, seed=seed, modes=mode, route=route)
    (row,) = counters.rows()
    assert not row["passed"] and row["host_waits"] == row["calls"] + again * ranks, "one wait of the host a gather"
    return dict(row)


def steps(rank: int, ranks: int) -> None:
    trainer = Trainer(rank, ranks, list(corpus.SUMMED.values())[ranks % 3].dtype)
    for turn in range(4):
        trainer.step()
        trainer.gather(apart=turn == 2, later=turn % 2 == 1)


MODES = list(enumerate(world.ALL_MODES))


@ranks_and_pieces
def test_steps(route: CudaBackend, monkeypatch: pytest.MonkeyPatch, ranks: int, pieces: bool) -> None:
    """``pieces``: an encoder reads the own shard while a decoder writes the others."""
    if pieces:
        in_pieces(monkeypatch)
    for seed, mode in [MODES[ranks], MODES[-1]] if ranks == 2 else MODES:
        row = counted(ranks, seed, mode, route, steps)
        assert row["differences"] == {FULL: ranks, "": 3 * ranks}


def test_bytes(route: CudaBackend) -> None:
    """A difference is 2.5 times smaller than a frame without a base, and next to nothing where nothing has changed."""

    def sent(calls: str) -> float:
        def program(rank: int, ranks: int) -> None:
            trainer = Trainer(rank, ranks)
            for call in calls.split():
                getattr(trainer, call)()

        return float(counted(2, 0, world.Modes(), route, program)["wire_bytes"])

    full = sent("gather")
    assert full < 2 * 2 * SHARD / 1.25, "exponents are coded"
    assert sent("gather step gather") - full < full / 2.5
    assert sent("gather gather") - full <= 2 * 1024


def edited(rank: int, ranks: int) -> None:
    """One bit of one rank's copy of another's shard, and of the own shard: the first goes in full, the second is thrown away."""
    trainer = Trainer(rank, ranks)
    trainer.gather()
    for place in (3, SHARD - 1):
        if rank == 1:
            trainer.whole[place : place + 1].view(torch.int16).bitwise_xor_(1)  # in the shard of rank 0
        trainer.step()
        trainer.gather()
    if rank == 0:
        trainer.whole[:SHARD].zero_()
    trainer.gather()


def renewed(rank: int, ranks: int) -> None:
    """New memory on one rank, old memory used again on the others; then memory of another size at the same place."""
    trainer = Trainer(rank, ranks)
    trainer.gather()
    if rank == 0:
        trainer.whole = trainer.whole.clone()
    trainer.step()
    trainer.gather()
    trainer.step()
    trainer.gather()
    part = trainer.whole[: ranks * (SHARD - 9)]
    wanted = torch.full((SHARD - 9,), float(rank)).bfloat16().to(f"cuda:{rank}")
    trainer.api.all_gather_into_tensor(part, wanted, None, False, base=comm.IN_PLACE, role="zero_param")
    spans = [one.span for one in group_state(None).of(Sent).values()]
    assert sum(trainer.whole.data_ptr() in span for span in spans) == 1, "one copy for a place"
    trainer.gather()


@pytest.mark.parametrize(
    ("program", "reasons", "again"),
    [(edited, {FULL: 1, OTHER: 2, "": 1}, 0), (renewed, {FULL: 4, "": 1}, 1)],
    ids=["edited", "renewed"],
)
def test_what_ranks_hold(route: CudaBackend, program: Callable[..., Any], reasons: dict[str, int], again: int) -> None:
    row = counted(2, 5, world.Modes(), route, program, again)
    assert row["differences"] == {reason: 2 * count for reason, count in reasons.items()}


def test_copies_go_with_the_output(route: CudaBackend) -> None:
    def kept(address: int) -> bool:
        comm.IN_PLACE._nbytes()  # drops copies whose output is gone
        return any(address in one.span for one in group_state(None).of(Sent).values())

    def program(rank: int, ranks: int) -> None:
        Trainer(rank, ranks).gather()  # torch keeps the arguments of the first call that makes an operation known
        trainer = Trainer(rank, ranks)
        trainer.gather()
        address = trainer.whole.data_ptr()
        assert kept(address) and counters.memory()["copies of the shards sent"] >= 2 * SHARD
        del trainer
        assert not kept(address)

    counted(2, 0, world.Modes(), route, program)


# ---- planted mistakes --------------------------------------------------------------------------------------------------


def _no_proof(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gather, "holds", lambda words: True)


def _equal_hashes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaBackend, "hash_regions", lambda self, regions, out, key: out.zero_())


def _own_region(patch: pytest.MonkeyPatch) -> None:
    """The base is the own shard in the output, which has its new words already."""
    begin = InPlaceBase.begin
    patch.setattr(
        InPlaceBase,
        "begin",
        lambda self, ctx, places, *more: None if begin(self, ctx, places, *more) is None else places[ctx.rank],
    )


@pytest.mark.full
@pytest.mark.parametrize("mistake", [_no_proof, _equal_hashes, _own_region], ids=lambda one: one.__name__)
def test_a_mistake_is_noticed(route: CudaBackend, monkeypatch: pytest.MonkeyPatch, mistake: Callable[..., Any]) -> None:
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        test_what_ranks_hold(route, edited, {FULL: 1, OTHER: 2, "": 1}, 0)
        test_steps(route, monkeypatch, 2, False)
