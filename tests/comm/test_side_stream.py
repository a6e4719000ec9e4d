"""The order of a device's work around an operation, on a device that runs nothing before a host wait, and on the simulated GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import corpus
import lazy_device
import pytest
import ranks as runner
import torch
import torch.distributed as dist
from lazy_device import LazyRuntime
from on_sim import launcher, world
from sim import streams
from sim.device import mine

import ds_zipccl
from ds_zipccl import comm, tensors
from ds_zipccl.codecs import region_hash
from ds_zipccl.comm import execution
from ds_zipccl.comm.buffer_pool import POOL, PooledBuffers
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.comm.host import engine
from ds_zipccl.comm.request import CallOptions, Request
from ds_zipccl.comm.transport import staging as host_staging
from ds_zipccl.comm.transport.protocol import TAGS_PER_COLLECTIVE
from ds_zipccl.comm.transport.staging import HostStaging, SideStream
from ds_zipccl.comm.work import CommError
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.frame import FrameError
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.policy.admission import Decision

#: Two chunks of 16 blocks and a part of one; small blocks, because the emulation is slow.
NUMEL, BLOCK = 5000, 128
CODED = ZipcclConfig(enabled=True, mode="always", min_bytes=0, block=BLOCK)
AUTO = ZipcclConfig(enabled=True, min_bytes=0, block=BLOCK)
CPU = torch.device("cpu")


def words(seed: int, numel: int = NUMEL) -> torch.Tensor:
    return corpus.tensor(corpus.bell(numel, corpus.BF16, seed), corpus.BF16)


def frame_of(tensor: torch.Tensor, codec: str = "cascade") -> torch.Tensor:
    """By the readable kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ds_zipccl.kernels, "ROUTES", {"cpu": {"numba": ds_zipccl.kernels.numba_backend.load}})
        patch.setattr(ds_zipccl.kernels, "_loaded", {})
        return ds_zipccl.compress(tensor, codec, block=BLOCK, shaped=False, checksum=False)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[LazyRuntime]:
    yield lazy_device.install(monkeypatch)
    host_staging._frame_kernels.cache_clear()
    host_staging._idle.clear()


def refused(error: FrameError) -> CommError:
    return CommError(f"refused: {error}")


def damaged(tensor: torch.Tensor) -> torch.Tensor:
    """A frame whose header is right and whose payload is not."""
    frame = frame_of(tensor)
    frame[32:48] = 0xFF
    return frame


def test_a_refused_frame_raises_at_the_end(runtime: LazyRuntime) -> None:
    """With the error of its own peer."""
    staging, outs = HostStaging(CPU, "auto"), [words(2), words(2)]
    with pytest.raises(CommError, match="refused"), staging.working():
        staging.decompress(frame_of(words(1)), outs[0], lambda error: AssertionError("of the good frame"))
        staging.decompress(damaged(words(1)), outs[1], refused)


@pytest.mark.parametrize("codec", ["cascade", "raw"])
def test_sums_of_a_refused_frame_are_not_sent(runtime: LazyRuntime, codec: str) -> None:
    staging = HostStaging(CPU, "auto")
    with staging.working():
        staging.decompress_add(damaged(words(1)), torch.bfloat16, sums := words(2), refused)
        with pytest.raises(CommError, match="refused"):
            staging.compress([sums], codec, BLOCK, PooledBuffers())


@pytest.mark.parametrize(
    "frame, wanted",
    [
        (lambda: frame_of(words(1))[:40], "TRUNCATED"),
        (lambda: frame_of(words(1, 999)), "MISMATCH"),
        (lambda: frame_of(words(1).half()), "MISMATCH"),
        (lambda: frame_of(words(1).float(), "raw"), "MISMATCH"),
    ],
)
def test_a_wrong_header_raises_at_once(runtime: LazyRuntime, frame: Any, wanted: str) -> None:
    staging = HostStaging(CPU, "auto")
    with staging.working():
        with pytest.raises(FrameError, match=wanted):
            staging.decompress(frame(), words(2), refused)
        assert not any(stream.queued() > 1 for stream in runtime.streams), "something was queued"


def test_the_end_waits_after_an_error_too(runtime: LazyRuntime) -> None:
    """The caller may free its tensors then."""
    done: list[int] = []
    with pytest.raises(KeyError), SideStream(CPU).current():
        runtime.current_stream().put(lambda: done.append(1))
        raise KeyError
    assert done == [1]


def test_streams_are_used_again_but_not_by_two(runtime: LazyRuntime) -> None:
    with SideStream(CPU).current():
        first = runtime.current_stream()
        with SideStream(CPU).current():
            second = runtime.current_stream()
    assert len({first, second, runtime.default}) == 3
    with SideStream(CPU).current():
        third = runtime.current_stream()
        with SideStream(CPU).current():
            assert {third, runtime.current_stream()} == {first, second}
    assert runtime.current_stream() is runtime.default and len(runtime.streams) == 3


def the_callers_stream(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LazyRuntime, "Stream", lambda self, device: self.default)
    patch.setattr(lazy_device.Stream, "wait_event", lambda self, event: None)


@runner.together(3)
def collectives(rank: int, ranks: int, plant: Callable[[pytest.MonkeyPatch], None] | None = None) -> None:
    """Gathers and a broadcast in flight, of tensors that the caller's stream is still to write."""
    with pytest.MonkeyPatch.context() as patch:
        inputs = [words(peer) for peer in range(ranks)]
        runtime = lazy_device.install(patch)
        if plant is not None:
            plant(patch)
        waits = []
        for later in (True, False):
            own, output = torch.full_like(inputs[rank], -1), torch.full((ranks * NUMEL,), -1, dtype=torch.bfloat16)
            runtime.default.put(functools.partial(own.copy_, inputs[rank]))
            before, queued = runtime.host_waits, runtime.default.queued()
            handle = comm.all_gather_into_tensor(output, own, None, later, config=CODED)
            if later:
                runtime.default.put(lambda: None)  # of the caller, after the call
                handle.wait()
            places = [place for peer, place in enumerate(output.chunk(ranks)) if peer != rank]
            corpus.assert_same_bits(torch.cat(places), torch.cat([*inputs[:rank], *inputs[rank + 1 :]]))
            assert runtime.default.ran == queued, "waited for work that was queued after the call"
            waits.append(runtime.host_waits - before)
            runtime.default.run()
        sent = inputs[0].clone() if rank == 0 else torch.full_like(inputs[0], -1)
        comm.broadcast(sent, 0, config=CODED)
        corpus.assert_same_bits(sent, inputs[0])
        after, received = (rank + 1) % ranks, torch.full_like(inputs[0], -1)
        handle = comm.isend(inputs[rank], after, config=CODED)
        comm.recv(received, (rank - 1) % ranks, config=CODED)
        handle.wait()
        corpus.assert_same_bits(received, inputs[rank - 1])
        assert len(runtime.streams) == 2, "every operation made a stream"
    assert waits == [3, 3], "two for the frame that is sent, one for all frames that arrive"


def test_work_on_the_callers_stream_is_noticed() -> None:
    with pytest.raises(runner.RankFailure, match="waited for work that was queued after the call"):
        runner.run(collectives, 3, the_callers_stream, timeout=30)


@runner.together(2)
def a_call_during_a_capture_is_refused(rank: int, ranks: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        runtime = lazy_device.install(patch)
        group = dist.group.WORLD
        assert group is not None
        tensor, output = words(rank), torch.empty(ranks * NUMEL, dtype=torch.bfloat16)
        issued = group_state(group).next_tag()
        runtime.capturing = True
        for call in (
            lambda: comm.all_gather_into_tensor(output, tensor, config=CODED),
            lambda: comm.all_reduce(tensor, async_op=True, config=CODED),
            lambda: comm.all_gather_into_tensor(output, tensor, config=AUTO),
            lambda: comm.isend(tensor, (rank + 1) % ranks, config=CODED),
            lambda: comm.irecv(tensor, (rank + 1) % ranks, config=CODED),
        ):
            with pytest.raises(CommError, match="while a graph of cpu is captured, wanted a call outside"):
                call()
        assert [stream.queued() for stream in runtime.streams] == [0], "a refused call has queued work"
        small = ZipcclConfig(
            enabled=True, mode="always"
        )  # not coded, so the backend says whether a graph can hold the call
        comm.all_reduce(torch.ones(2, dtype=torch.bfloat16), config=small)
        runtime.capturing = False
        assert group_state(group).next_tag() == issued + TAGS_PER_COLLECTIVE, "a refused call has taken tags"
        comm.all_gather_into_tensor(output, tensor, config=CODED)


@runner.together(2)
def copies_of_the_plain_collective(rank: int, ranks: int) -> None:
    """The plain collective on copies, as where schedules compete: the copies back are on a stream of ours, and waited for."""
    with pytest.MonkeyPatch.context() as patch:
        runtime = lazy_device.install(patch)
        copy_back, used = execution.copy_back, []

        def lazily(*arguments: Any) -> None:
            used.append(runtime.current_stream())
            used[0].put(lambda: copy_back(*arguments))

        patch.setattr(execution, "copy_back", lazily)
        outputs = torch.full((ranks, 50), -1.0).repeat_interleave(2, 1)[:, ::2].unbind()
        request = Request(
            "all_gather", [torch.full((50,), float(rank))], outputs, None, True, CallOptions(CODED),
            plain=lambda inputs, outputs, later: dist.all_gather(list(outputs), inputs[0], None, later),
            numel=50 * ranks,
        )  # fmt: skip
        execution._plain_in_order(request).wait()
        assert all((output == peer).all() for peer, output in enumerate(outputs))
        assert used != [runtime.default]


def test_the_copies_of_a_shadow_come_first(runtime: LazyRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our schedule writes over tensors of which the shadow takes copies on the caller's stream."""
    done: list[str] = []

    class Shadow:
        def __init__(self, *arguments: Any) -> None:
            runtime.current_stream().put(lambda: done.append("copies"))

        def compare(self, *arguments: Any) -> None:
            assert done == ["copies", "ours"]

    class Context:
        config, role = CODED, "dp"
        size, logical_bytes, wire_bytes = 2, 0, 0
        error = CommError

        def __init__(self, *arguments: Any) -> None:
            self.working = HostStaging(CPU, "auto").working

    def ours(ctx: Any, request: Any, inputs: Any, outputs: Any) -> None:
        runtime.current_stream().put(lambda: done.append("ours"))

    monkeypatch.setattr(engine, "shadow_of", Shadow)
    monkeypatch.setattr(engine, "compare_on_all_ranks", lambda ctx, shadow, *outputs: shadow.compare(*outputs))
    monkeypatch.setattr(engine, "open_context", Context)
    monkeypatch.setitem(engine.COLLECTIVES, "all_reduce", ours)
    config = ZipcclConfig(enabled=True, mode="always", check="shadow")
    flat = words(0)
    request = Request(
        "all_reduce", (), (flat,), None, False, CallOptions(config, "gradients"),
        plain=lambda *arguments: None, numel=flat.numel(),
    )  # fmt: skip
    engine.start(request, Decision(True, "raw", ""))
    assert done == ["copies", "ours"]


def test_pinned_memory_is_counted() -> None:
    before, buffers = POOL._used_bytes, PooledBuffers()
    assert buffers.take_pinned(1000).numel() == 1000 and POOL._used_bytes == before + 1000
    buffers.release()
    assert POOL._used_bytes == before
    buffers.take_pinned(1000)
    del buffers
    assert POOL._used_bytes == before
    assert not tensors.pinned(10).is_pinned() or torch.cuda.is_available()


MODES, KEY = (world.Modes(), *world.ALL_MODES), bytes(range(16))


@pytest.fixture
def route() -> Iterator[CudaBackend]:
    host_staging._frame_kernels.cache_clear()
    yield launcher.route()
    host_staging._frame_kernels.cache_clear()
    host_staging._idle.clear()


def round_trips(rank: int, ranks: int) -> list[tuple[int, int]]:
    """Frames of tensors that the caller's stream writes, back into tensors that it reads; the memory is used again at once. Returns the
    waits of the host for the frames of each codec, and for all of its work."""
    host_staging._idle.clear()  # of the last run's GPU
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
                if codec == "cascade":  # the hash of words whose decompression is queued
                    assert staging.hash(outs[0], KEY) == region_hash(wanted[0], key=KEY)
                buffers.release()
            counted.append((compressing, len(waits) - before))
            for flat in flats:
                flat.zero_()
            for out, one in zip(outs, wanted, strict=False):
                corpus.assert_same_bits(out.neg().neg().cpu(), one)
            assert torch.equal(sums.cpu(), wanted[0].float() + 1)
    return counted


@pytest.mark.parametrize("seeds", [10, pytest.param(60, marks=pytest.mark.full(reason="more seeds"))])
def test_no_seed_finds_a_race(route: CudaBackend, seeds: int) -> None:
    for seed in range(seeds):
        got = world.run(round_trips, 1, seed=seed, modes=MODES[seed % len(MODES)], route=route)
        assert got.values == [[(2, 4), (2, 3), (1, 2)]]


def no_wait_on_the_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(streams.Stream, "wait_event", lambda self, event: None)


def waits_without(number: int) -> Any:
    def plant(patch: pytest.MonkeyPatch) -> None:
        calls, wait = iter(range(100)), SideStream.wait
        patch.setattr(SideStream, "wait", lambda self: None if next(calls) == number else wait(self))

    return plant


@pytest.mark.parametrize(
    "plant, places",
    [
        (no_wait_on_the_gpu, ("zipccl_encode", "neg_")),
        (waits_without(0), ("numpy", "copy")),
        (waits_without(1), ("numpy", "api.py")),
        (waits_without(2), ("status.py", "copy")),
        (waits_without(7), ("copy", "torch neg")),
    ],
    ids=["caller", "headers", "payloads", "agreements", "end"],
)
def test_a_dropped_wait_is_noticed(
    route: CudaBackend, monkeypatch: pytest.MonkeyPatch, plant: Any, places: tuple[str, ...]
) -> None:
    plant(monkeypatch)
    with pytest.raises(world.Fault) as fault:
        world.run(round_trips, 1, route=route)
    assert fault.value.kind == "race" and all(place in str(fault.value) for place in places), fault.value


test_programs = runner.programs(__name__)
