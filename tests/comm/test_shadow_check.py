"""check = "shadow", damaged frames, and what the errors say."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import corpus
import pytest
import ranks as runner
import torch
import torch.distributed as dist

from ds_zipccl import FrameError, comm, compress
from ds_zipccl.comm.host import frames
from ds_zipccl.comm.host.buffer_pool import POOL
from ds_zipccl.comm.shadow_check import Shadow
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.frame import FrameErrorCode
from ds_zipccl.telemetry import counters

SHADOWED = ZipcclConfig(enabled=True, mode="always", min_bytes=0, check="shadow")


def shadowed(**settings: Any) -> SimpleNamespace:
    config = replace(SHADOWED, **settings)
    return SimpleNamespace(
        **{name: partial(getattr(comm, name), config=config) for name in comm.__all__ if name.islower()}
    )


def filled(rank: int, size: int, seed: int, kind: corpus.Float = corpus.BF16) -> torch.Tensor:
    return corpus.tensor(corpus.mixed(size, kind, 128, 101 * seed + rank), kind)


def calls(api: Any, rank: int, ranks: int, seed: int) -> dict[str, Callable[[bool], Any]]:
    """Every collective once; those that gloo can do, too."""
    kind = list(corpus.SUMMED.values())[seed % 3]
    mine, size = filled(rank, 1200 * ranks, seed, kind), 1200 * ranks
    many = torch.empty(size * ranks, dtype=kind.dtype)
    return {
        "all_gather": lambda later: api.all_gather(list(many.chunk(ranks)), mine, None, later),
        "all_gather_into_tensor": lambda later: api.all_gather_into_tensor(many, mine, None, later),
        "all_gather_coalesced": lambda later: api.all_gather_coalesced(
            [many, torch.empty(4 * ranks, dtype=kind.dtype)], [mine, mine[:4]], None, later
        ),
        "broadcast": lambda later: api.broadcast(mine.clone(), 1, None, later),
        "all_to_all": lambda later: api.all_to_all(
            list(torch.empty_like(mine).chunk(ranks)), list(mine.chunk(ranks)), None, later
        ),
        "all_to_all_single": lambda later: api.all_to_all_single(torch.empty_like(mine), mine, None, None, None, later),
        "all_reduce": lambda later: api.all_reduce(mine.clone(), async_op=later),
        "all_reduce_coalesced": lambda later: api.all_reduce_coalesced(
            [mine.clone(), mine[:7].clone()], async_op=later
        ),
        "reduce": lambda later: api.reduce(mine.clone(), 1, async_op=later),
        "reduce_scatter_tensor": lambda later: api.reduce_scatter_tensor(mine[:1200].clone(), mine, async_op=later),
        "reduce_scatter": lambda later: api.reduce_scatter(
            mine[:1200].clone(), list(mine.chunk(ranks)), async_op=later
        ),
    }


@runner.together(2)
@runner.together(3)
def agrees(rank: int, ranks: int) -> None:
    for seed, reduction in enumerate(("match", "fp32", "auto")):
        api = shadowed(reduction=reduction)
        for call in calls(api, rank, ranks, seed).values():
            call(False)
        handles = [call(True) for call in calls(api, rank, ranks, seed).values()]
        for handle in reversed(handles):
            handle.wait()
    api, tensor = shadowed(), filled(5, 3000, 1)
    if rank == 0:
        works = [api.isend(tensor, 1, None, 4), api.isend(tensor, 1, None, 4)]
        for work in works:
            work.wait()
    elif rank == 1:
        places = [torch.zeros(60, 50, dtype=torch.bfloat16).t(), torch.zeros(3000, dtype=torch.bfloat16)]
        assert api.recv(places[0], None, None, 4) == 0 and api.recv(places[1], 0, None, 4) == 0
        corpus.assert_same_bits(places[0].contiguous().view(-1), tensor)
    assert all(row["calls"] == 6 and not row["passed"] for row in counters.rows() if row["op"] not in ("send", "recv"))
    assert {row["op"] for row in counters.rows()} >= set(calls(api, rank, ranks, 0))


def flip_a_bit() -> None:
    """From now on the first element of every decoded tensor has a wrong bit, a heavy one."""
    decompress = frames.decompress

    def wrong(frame: torch.Tensor, out: torch.Tensor, **settings: Any) -> torch.Tensor:
        decompress(frame, out, **settings)
        out.view(torch.uint8)[out.element_size() - 1] ^= 0x40
        return out

    add = frames.decompress_add

    def wrong_sum(frame: torch.Tensor, sums: torch.Tensor, **settings: Any) -> torch.Tensor:
        add(frame, sums, **settings)
        sums.view(torch.uint8)[sums.element_size() - 1] ^= 0x40
        return sums

    frames.decompress, frames.decompress_add = wrong, wrong_sum


def disagrees(rank: int, ranks: int) -> list[str]:
    """The last rank decodes wrongly: all ranks must say so, and those with right results must name that rank."""
    if rank == ranks - 1:
        flip_a_bit()
    said = []
    for later in (False, True):
        api = shadowed(reduction="fp32" if later else "match")
        for name, call in calls(api, rank, ranks, 0).items():
            if name == "broadcast":
                call(False)  # rank 1 is the source, which decodes nothing
                continue
            with pytest.raises(comm.CommError) as caught:
                handle = call(later)
                handle.wait()
            said.append(str(caught.value))
            assert said[-1].startswith(f"{name} (group '0' of {ranks} ranks, role dp, global rank {rank}): "), said[-1]
            assert "wrong in output" in said[-1], said[-1]
            if rank == ranks - 1:
                assert isinstance(caught.value, comm.ShadowMismatch)
            elif not isinstance(caught.value, comm.ShadowMismatch):
                assert "the check failed on global rank " in said[-1], said[-1]
    tensor = torch.ones(3000)
    if rank == 0:
        shadowed().send(tensor, 1)
    elif rank == 1 == ranks - 1:
        with pytest.raises(comm.ShadowMismatch) as caught:
            shadowed().recv(torch.empty(3000), 0)
        said.append(str(caught.value))
    return said


def test_shadow_disagrees() -> None:
    right, said = runner.run(disagrees, 2)
    assert (len(right), len(said)) == (20, 21)
    assert said[-1] == (
        "recv (group '0' of 2 ranks, role dp, global rank 1): "
        "1 of 3000 wrong in output 0, first at 0: got inf (0x7f800000), wanted 1 (0x3f800000)"
    )
    _, problem = said[0].split("): ")
    assert right[0] == (
        f"all_gather (group '0' of 2 ranks, role dp, global rank 0): the check failed on global rank 1: {problem}"
    )


def fails(rank: int, ranks: int, kind: str, later: bool) -> str:
    """A rank that fails in its schedule or in its comparison tells the others, which wait for its outcome, and goes on: the next call is
    as good as ever."""
    compare, decompress = Shadow.compare, frames.decompress
    if rank == 1 and kind == "comparison":
        Shadow.compare = _raise(MemoryError("as planted"))  # type: ignore[method-assign]
    elif rank == 1:
        frames.decompress = _raise(FrameError(FrameErrorCode.CHECKSUM, "as planted"))
    mine, whole = filled(rank, 900, 1), torch.empty(900 * ranks, dtype=torch.bfloat16)
    with pytest.raises((comm.CommError, MemoryError)) as caught:
        handle = shadowed().all_gather_into_tensor(whole, mine, None, later)
        handle.wait()
    Shadow.compare, frames.decompress = compare, decompress  # type: ignore[method-assign]
    shadowed().all_gather_into_tensor(whole, mine)
    corpus.assert_same_bits(whole, torch.cat([filled(peer, 900, 1) for peer in range(ranks)]))
    return str(caught.value)


def _raise(error: Exception) -> Callable[..., Any]:
    def call(*arguments: Any, **settings: Any) -> Any:
        raise error

    return call


@pytest.mark.parametrize("kind", ["comparison", "schedule"])
@pytest.mark.parametrize("later", [False, True])
def test_a_rank_that_fails_tells(kind: str, later: bool) -> None:
    first, own, last = runner.run(fails, 3, kind, later, timeout=40)
    assert "as planted" in own
    assert all("the check failed on global rank 1: " in said and "as planted" in said for said in (first, last))


def differ(tolerance: Any, got: list[float], want: list[float], terms: list[float] | None = None) -> bool:
    """Whether the check objects to results of three ranks; ``terms`` are the sums of magnitudes, which make them bf16."""
    dtype = torch.float32 if terms is None else torch.bfloat16

    class Done:
        def wait(self) -> None:
            pass

    results = iter([want, terms])

    def plain(inputs: Any, outputs: Any, later: bool) -> Any:
        outputs[0].copy_(torch.tensor(next(results), dtype=dtype))
        return Done()

    shadow = Shadow(plain, [], [torch.zeros(len(got), dtype=dtype)], tolerance, 3)
    try:
        shadow.compare([torch.tensor(got, dtype=dtype)], comm.CommError)
    except comm.ShadowMismatch:
        return True
    return False


NAN, INF = float("nan"), float("inf")


def test_moves_must_agree_in_every_bit() -> None:
    assert not differ("bits", [1.0, NAN, -0.0], [1.0, NAN, -0.0])
    assert differ("bits", [0.0], [-0.0])
    assert differ("bits", [NAN], [-NAN])


def test_sums_must_agree_in_every_bit_but_those_of_nan() -> None:
    assert not differ("nan", [1.0, NAN, INF], [1.0, -NAN, INF])
    assert differ("nan", [0.0], [-0.0])
    assert differ("nan", [NAN], [1.0])
    assert differ("nan", [1.0], [NAN])


def test_rounding_bound() -> None:
    """|got - want| <= 3 eps sum(|x|), and bf16 has eps = 1 / 128."""
    assert not differ("rounding", [1.0, 0.0], [1.0, -0.0], [1.0, 0.0])
    assert not differ("rounding", [1.015625], [1.0], [1.0])
    assert differ("rounding", [1.03125], [1.0], [1.0])
    assert not differ("rounding", [1.03125], [1.0], [2.0])
    assert differ("rounding", [NAN], [1.0], [1.0])
    assert not differ("rounding", [NAN, 3.0], [INF, NAN], [INF, NAN])
    assert differ("rounding", [1e-6], [0.0], [0.0])


DAMAGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "MAGIC": lambda frame: frame[0].add_(1),
    "VERSION": lambda frame: frame[4].fill_(99),
    "CODEC": lambda frame: frame[5].fill_(99),
    "DTYPE": lambda frame: frame[6].fill_(99),
    "MISMATCH": lambda frame: frame.copy_(compress(torch.ones(300).half(), "raw", shaped=False, checksum=False)),
}


@runner.together(3)
def damaged_frames(rank: int, ranks: int) -> None:
    """A rank that sends nonsense: its peers name it, and every operation after that is as good as before."""
    for code, damage in DAMAGES.items():

        def spoil(*arguments: Any, damage: Callable[[torch.Tensor], Any] = damage, **settings: Any) -> torch.Tensor:
            frame = compress(*arguments, **settings)
            damage(frame)
            return frame

        frames.compress = spoil if rank == 1 else compress
        for later in (False, True):
            output = torch.zeros(900, dtype=torch.bfloat16)
            call = partial(shadowed(check="off").all_gather_into_tensor, output, filled(rank, 300, 1), None, later)
            if rank == 1:
                if (handle := call()) is not None:
                    handle.wait()
                continue
            with pytest.raises(comm.CommError) as caught:
                call().wait()
            where = f"all_gather_into_tensor (group '0' of 3 ranks, role dp, global rank {rank})"
            assert str(caught.value).startswith(f"{where}: frame from global rank 1 refused: {code}: ")
            cause = caught.value.__cause__
            assert isinstance(cause, FrameError) and cause.code == FrameErrorCode[code]
        dist.barrier()
    frames.compress = compress
    output = torch.zeros(900, dtype=torch.bfloat16)
    comm.all_gather_into_tensor(output, filled(rank, 300, 1), config=SHADOWED)


@runner.together(2)
def mismatched_sizes(rank: int, ranks: int) -> None:
    """Ranks that disagree on a size learn it from the frame instead of reading beyond it."""
    api = shadowed(check="off")
    with pytest.raises(comm.CommError, match=r"MISMATCH: frame holds .* wanted"):
        api.all_gather_into_tensor(torch.empty(2 * (100 + rank)), torch.ones(100 + rank))
    segments = [torch.ones(5 if peer == rank else 7) for peer in range(2)]
    with pytest.raises(comm.CommError, match=f"frame from global rank {1 - rank} refused"):
        api.all_to_all([torch.ones(5), torch.ones(5)], segments)


@runner.together(3)
def a_failed_rank_still_sends(rank: int, ranks: int) -> None:
    """A rank that fails owes its peers nothing: what it has posted still goes out, also to a peer that comes later."""
    if rank == 0:

        def refuse(*arguments: Any, **settings: Any) -> None:
            raise FrameError(FrameErrorCode.CHECKSUM, "as planted")

        frames.decompress = refuse
    if rank == 1:
        time.sleep(1.0)
    output = torch.zeros(90000 * ranks, dtype=torch.bfloat16)
    call = partial(shadowed(check="off").all_gather_into_tensor, output)
    if rank == 0:
        with pytest.raises(comm.CommError, match="CHECKSUM: as planted") as caught:
            call(filled(rank, 90000, 1))
        del caught
        gc.collect()
        for _ in range(4):
            POOL.take(180_000).fill_(255)
    else:
        call(filled(rank, 90000, 1))
        corpus.assert_same_bits(output, torch.cat([filled(peer, 90000, 1) for peer in range(ranks)]))


test_programs = runner.programs(__name__)
