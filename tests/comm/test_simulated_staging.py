"""Host staging on the simulated GPU, with the package's own kernels: no race by any seed, and each dropped wait is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import corpus
import pytest
import torch
from on_sim import launcher, world
from sim import streams
from sim.device import mine

from ds_zipccl.codecs import region_hash
from ds_zipccl.comm.host import side_stream
from ds_zipccl.comm.host import staging as host_staging
from ds_zipccl.comm.host.buffer_pool import PooledBuffers
from ds_zipccl.comm.host.side_stream import SideStream
from ds_zipccl.comm.host.staging import HostStaging
from ds_zipccl.comm.work import CommError
from ds_zipccl.frame import FrameError
from ds_zipccl.kernels.cuda.backend import CudaRoute

BLOCK, NUMEL = 128, 5000
MODES = (world.Modes(), *world.ALL_MODES)


@pytest.fixture
def route() -> Iterator[CudaRoute]:
    host_staging._frame_kernels.cache_clear()
    yield launcher.route()
    host_staging._frame_kernels.cache_clear()
    side_stream._idle.clear()


def words(seed: int) -> torch.Tensor:
    return corpus.tensor(corpus.bell(NUMEL, corpus.BF16, seed), corpus.BF16)


def refused(error: FrameError) -> CommError:
    return CommError(str(error))


def round_trips(rank: int, ranks: int) -> list[tuple[int, int]]:
    """Frames of tensors that the caller's stream writes, back into tensors that it reads; the memory is used again at once. Returns the
    waits of the host for the frames of each codec, and for all of its work."""
    side_stream._idle.clear()  # of the last run's GPU
    there, counted = torch.device("cuda", rank), []
    wanted = [words(seed) for seed in range(3)]
    with torch.inference_mode():
        for codec, count in (("cascade", 3), ("wide", 1), ("raw", 2)):
            flats = [one.to(there).neg() for one in wanted[:count]]
            for flat in flats:
                flat.neg_()
            outs, sums = [torch.zeros_like(flat) for flat in flats], torch.ones_like(flats[0], dtype=torch.float32)
            staging, waits = HostStaging(there, "auto"), mine().counters.waits
            before, buffers = len(waits), PooledBuffers()
            with staging.working():
                frames = staging.compress(flats, codec, BLOCK, buffers)
                compressing = len(waits) - before
                for frame, out in zip(frames, outs, strict=True):
                    staging.decompress(frame, out, refused)
                staging.decompress_add(frames[0], torch.bfloat16, sums, refused)
                buffers.release()
            counted.append((compressing, len(waits) - before))
            for flat in flats:
                flat.zero_()
            for out, one in zip(outs, wanted, strict=False):
                corpus.assert_same_bits(out.neg().neg().cpu(), one)
            assert torch.equal(sums.cpu(), wanted[0].float() + 1)
    return counted


@pytest.mark.parametrize("seeds", [10, pytest.param(60, marks=pytest.mark.full(reason="more seeds"))])
def test_no_seed_finds_a_race(route: CudaRoute, seeds: int) -> None:
    for seed in range(seeds):
        got = world.run(round_trips, 1, seed=seed, modes=MODES[seed % len(MODES)], route=route)
        assert got.values == [[(2, 3), (2, 3), (1, 2)]]


KEY = bytes(range(16))


def hashes(rank: int, ranks: int) -> int:
    """The hash of words whose decompression is queued; returns the waits of the host."""
    side_stream._idle.clear()
    there, wanted = torch.device("cuda", rank), words(1)
    with torch.inference_mode():
        flat = wanted.to(there)
        out, staging, buffers = torch.zeros_like(flat), HostStaging(there, "auto"), PooledBuffers()
        with staging.working():
            (frame,) = staging.compress([flat], "cascade", BLOCK, buffers)
            before = len(mine().counters.waits)
            staging.decompress(frame, out, refused)
            buffers.release()
            assert staging.hash(out, KEY) == staging.hash(flat, KEY) == region_hash(wanted, key=KEY)
            return len(mine().counters.waits) - before


@pytest.mark.parametrize("seeds", [2, pytest.param(10, marks=pytest.mark.full(reason="more seeds"))])
def test_hashes(route: CudaRoute, seeds: int) -> None:
    for seed in range(seeds):
        assert world.run(hashes, 1, seed=seed, modes=MODES[seed % len(MODES)], route=route).values == [2]


def no_wait_for_the_caller(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(streams.Stream, "wait_event", lambda self, event: None)


def waits_without(number: int) -> Any:
    def plant(patch: pytest.MonkeyPatch) -> None:
        calls, wait = iter(range(100)), SideStream.wait
        patch.setattr(SideStream, "wait", lambda self: None if next(calls) == number else wait(self))

    return plant


@pytest.mark.parametrize(
    "plant, places",
    [
        (no_wait_for_the_caller, ("zipccl_encode", "neg_")),
        (waits_without(0), ("numpy", "copy")),
        (waits_without(2), ("status.py", "copy")),
        (waits_without(7), ("copy", "torch neg")),
    ],
    ids=["caller", "headers", "agreements", "end"],
)
def test_a_dropped_wait_is_noticed(
    route: CudaRoute, monkeypatch: pytest.MonkeyPatch, plant: Any, places: tuple[str, ...]
) -> None:
    plant(monkeypatch)
    with pytest.raises(world.Fault) as fault:
        world.run(round_trips, 1, route=route)
    assert fault.value.kind == "race" and all(place in str(fault.value) for place in places), fault.value
