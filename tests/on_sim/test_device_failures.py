"""Failures of operations on NCCL groups, on the simulated GPU: damaged frames, ranks that do not come, handles that are dropped; memory."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import corpus
import moves
import pytest
import torch
import torch.distributed as dist
from sim import communicator, nccl
from sim.device import mine
from sim.scheduler import Fault

from ds_zipccl.comm.device import exchange, gather
from ds_zipccl.comm.device.reports import Reports
from ds_zipccl.comm.device.streams import Streams, streams_of
from ds_zipccl.comm.shadow_check import Shadow
from ds_zipccl.comm.work import CommError
from ds_zipccl.kernels.cuda.backend import CudaBackend
from on_sim import world
from on_sim.cases import CASES, CODED, HARD, PATIENT, every_case, once, prepared

# --- frames that are refused


def refused(rank: int, ranks: int, case: str, behind: str) -> tuple[int, str]:
    """A call whose frames rank 1 refuses, then one call more. Returns the NaNs of the first output, and the error of the second call."""
    api, (host, wanted) = moves.coded(**CODED), prepared(case, rank, ranks, 3000, 0)
    given = host.to(f"cuda:{rank}")
    output = torch.zeros(len(wanted), dtype=given.dtype, device=given.device)
    CASES[case].call(api, output, given, None, False)
    wrong = int((output.cpu() != wanted).sum())
    assert int(output.isnan().sum().item()) == wrong  # nothing is wrong that does not say so
    try:
        once(behind, rank, ranks, 1000)
    except CommError as error:
        return wrong, str(error)
    return wrong, ""


@pytest.mark.parametrize("behind", [pytest.param("gather", marks=pytest.mark.full(reason="one is enough")), "uneven"])
@every_case
def test_damaged_frame(route: CudaBackend, monkeypatch: pytest.MonkeyPatch, case: str, behind: str) -> None:
    """A byte of the frame of rank 0 changes on its way to the last rank: all ranks raise at the next agreement, and none hangs."""
    original, damaged = communicator._exchange, []

    def flip(gpu: Any, calls: Any) -> None:
        original(gpu, calls)
        arrived = calls[-1].arrived
        if arrived[0].dtype == torch.uint8 and not damaged:
            damaged.append(arrived[0].view(-1)[0].item())
            arrived[0] = arrived[0].clone()  # other ranks receive the same memory
            arrived[0].view(-1)[0] ^= 8

    monkeypatch.setattr(communicator, "_exchange", flip)
    got = world.run(refused, 3, case, behind, modes=HARD, route=route).values
    assert [wrong > 0 for wrong, _ in got] == [False, False, True] and damaged == [ord("Z")]
    assert all("stop the job on all ranks" in error for _, error in got)
    assert all("magic" in error.lower() for _, error in got), got  # every rank tells what the others refused
    # of the first operation, and of the second
    assert "group rank 0" in got[2][1] and got[2][1].count("(group") == 2, got


def checked(rank: int, ranks: int, case: str) -> str:
    """A checked call, and one call more where it raised nothing. Returns the error."""
    api, (host, wanted) = moves.coded(**CODED, check="shadow"), prepared(case, rank, ranks, 3000, 0)
    given = host.to(f"cuda:{rank}")
    try:
        CASES[case].call(api, torch.zeros(len(wanted), dtype=given.dtype, device=given.device), given, None, False)
    except CommError as error:
        return f"{type(error).__name__}: {error}"
    once(case, rank, ranks, 1000)
    return ""


@every_case
def test_a_wrong_bit_that_one_rank_sees(route: CudaBackend, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """All ranks learn of the outcome of a check before any raises, so that none waits in the next call."""
    assert world.run(checked, 3, case, modes=HARD, route=route).values == ["", "", ""]
    compare = Shadow.compare

    def wrong(self: Shadow, outputs: Any, error: Any) -> None:
        if dist.get_rank() == 2:
            outputs[0].view(torch.uint8)[1] = 7
        compare(self, outputs, error)

    monkeypatch.setattr(Shadow, "compare", wrong)
    *others, own = world.run(checked, 3, case, modes=HARD, route=route).values
    assert own.startswith("ShadowMismatch: ") and "1 of " in own
    assert all("CommError: " in said and "the check failed on global rank 2: 1 of " in said for said in others), others


@every_case
def test_overflow_in_a_slot(route: CudaBackend, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Slots too small for what is in them, as if a tensor had changed after the sizes were agreed."""

    def tight(size: int) -> int:
        return size - 1024

    if case == "uneven":
        words = exchange.exchange_words

        def less_words(*arguments: Any) -> Any:
            return tuple([[tight(row[0]), *row[1:]] if row[0] else row for row in rows] for rows in words(*arguments))

        monkeypatch.setattr(exchange, "exchange_words", less_words)
        monkeypatch.setattr(exchange, "_check", lambda *arguments: None)
    else:
        module = gather if case == "gather" else exchange
        agree = module.agree
        monkeypatch.setattr(module, "agree", lambda *arguments: [tight(size) for size in agree(*arguments)])
    got = world.run(refused, 2, case, "gather" if case != "gather" else "exchange", modes=HARD, route=route).values
    assert all(wrong > 0 or (case == "uneven" and rank == 0) for rank, (wrong, _) in enumerate(got))
    assert all("stop the job on all ranks" in error for _, error in got)


# --- ranks that do not come


def absent(rank: int, ranks: int, case: str) -> tuple[str, float]:
    """The last rank ends after one call. Returns the error of the others, and the seconds until then."""
    once(case, rank, ranks)
    if rank == ranks - 1:
        return "", 0.0
    before = time.monotonic()
    with pytest.raises(CommError) as caught:
        once(case, rank, ranks, later=True)
    return str(caught.value), time.monotonic() - before


@every_case
def test_rank_that_never_comes(route: CudaBackend, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(nccl, "TIMEOUT", timedelta(seconds=0.2))
    for error, seconds in world.run(absent, 3, case, modes=PATIENT, route=route).values[:2]:
        assert "did not come within 0:00:00.2" in error and 0.2 <= seconds < 20


def broken(rank: int, ranks: int, case: str) -> str:
    """Rank 1 fails between its agreement and the words. Returns the error of each rank."""
    host, wanted = prepared(case, rank, ranks, 3000, 0)
    given = torch.stack([host, host], 1).to(f"cuda:{rank}")[:, 0]
    output = torch.empty(len(wanted), dtype=host.dtype, device=given.device)
    more = [torch.empty_like(output), given.contiguous()]
    CASES[case].call(moves.coded(**CODED), output, given.contiguous(), None, False)
    try:
        CASES[case].call(moves.coded(**CODED), output, given, None, False)
        CASES[case].call(moves.coded(**CODED), *more, None, False)
    except (CommError, MemoryError) as error:
        return type(error).__name__
    return ""


@every_case
def test_error_in_the_middle(route: CudaBackend, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """The rank has its own error at once, the others raise after the timeout: no host blocks, and no memory is used after its end."""
    monkeypatch.setattr(nccl, "TIMEOUT", timedelta(seconds=0.2))
    name, calls = ("encode_gather" if case == "gather" else "encode_frames"), [0]
    encode = getattr(CudaBackend, name)

    def fails(*arguments: Any, **more: Any) -> None:
        calls[0] += mine().rank == 1
        if mine().rank == 1 and calls[0] > (1 if case == "gather" else 2):
            raise MemoryError("planted")
        encode(*arguments, **more)

    monkeypatch.setattr(CudaBackend, name, fails)
    got = world.run(broken, 3, case, modes=PATIENT, route=route).values
    assert got == ["CommError", "MemoryError", "CommError"]


def abandoned(rank: int, ranks: int, case: str) -> None:
    """All ranks fail at their second fragment. New tensors take the memory of the call's tensors, which the program drops."""
    numel = 100_000 if case == "gather" else 40_000
    host, wanted = prepared(case, rank, ranks, numel, 0)
    given, output = (torch.zeros(len(one), dtype=one.dtype, device=f"cuda:{rank}") for one in (host, wanted))
    with pytest.raises(MemoryError):
        CASES[case].call(moves.coded(**CODED, staging_mib=1), output, given, None, False)
    del given, output
    fresh = [torch.full((len(one),), 7.0, dtype=host.dtype, device=f"cuda:{rank}") for one in (host, wanted)]
    torch.cuda.synchronize()
    assert all((one == 7).all().item() for one in fresh)


@pytest.mark.parametrize("case", ["gather", "exchange"])
def test_failed_operation_keeps_its_tensors(route: CudaBackend, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    name = "encode_gather" if case == "gather" else "encode_frames"
    encode, calls = getattr(CudaBackend, name), [0, 0]

    def fails(*arguments: Any, **more: Any) -> None:
        calls[mine().rank] += 1
        if calls[mine().rank] > (1 if case == "gather" else 2):  # an exchange encodes coded frames, then raw ones
            raise MemoryError("planted")
        encode(*arguments, **more)

    monkeypatch.setattr(CudaBackend, name, fails)
    for seed in range(2):
        calls[:] = 0, 0
        world.run(abandoned, 2, case, seed=seed, route=route)
    monkeypatch.setattr(Streams, "abandon", lambda self, keep: None)
    with pytest.raises(Fault, match="race"):
        for seed in range(6):
            calls[:] = 0, 0
            world.run(abandoned, 2, case, seed=seed, route=route)


def impatient(rank: int, ranks: int) -> str:
    """Uncoded frames need no agreement. Returns what the handle says while the other rank does not come."""
    device = torch.device("cuda", rank)
    given, output = torch.ones(4096, device=device), torch.empty(ranks * 4096, device=device)
    if rank:
        return ""
    handle = moves.coded(**CODED, codec="raw").all_gather_into_tensor(output, given, None, True)
    assert not handle.is_completed()
    with pytest.raises(CommError) as caught:
        handle.wait(timedelta(seconds=0.1))
    return str(caught.value)


def test_wait_with_a_timeout(route: CudaBackend) -> None:
    assert "is not done after 0:00:00.1" in world.run(impatient, 2, modes=PATIENT, route=route).values[0]


# --- memory


def dropped(rank: int, ranks: int, case: str) -> list[int]:
    """Handles that nobody waits for, whose tensors nobody else has, and new tensors in their place. Returns the live bytes."""
    api, device = moves.coded(**CODED), torch.device("cuda", rank)
    host, wanted = prepared(case, rank, ranks, 3000, 0)
    live = []
    for _ in range(6):
        CASES[case].call(api, torch.empty(len(wanted), dtype=host.dtype, device=device), host.to(device), None, True)
        fresh = [torch.full((size,), 7.0, dtype=host.dtype, device=device) for size in (len(host), len(wanted))]
        assert all((one == 7).all().item() for one in fresh)
        del fresh
        torch.cuda.synchronize()
        streams_of(device).sweep()
        live.append(mine().allocator.live)
    return live


@every_case
def test_dropped_handles(route: CudaBackend, case: str) -> None:
    for seed in range(3):
        for live in world.run(dropped, 2, case, seed=seed, route=route).values:
            assert len(set(live[3:])) == 1  # three staging buffers, then nothing more


def waited_elsewhere(rank: int, ranks: int, case: str) -> None:
    """A call on one stream, whose handle waits on another one; then work of the first stream gets the memory of the call's own copies."""
    host, wanted = prepared(case, rank, ranks, 3000, 0)
    given, output = (torch.zeros(2 * len(one), dtype=one.dtype, device=f"cuda:{rank}")[::2] for one in (host, wanted))
    given.copy_(host.to(given.device))
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for stream in (first, second):
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(first):
        handle = CASES[case].call(moves.coded(**CODED), output, given, None, True)
    with torch.cuda.stream(second):
        handle.wait()
        result = torch.cat([output])
    with torch.cuda.stream(first):
        fresh = [torch.full((len(one),), 7.0, dtype=host.dtype, device=given.device) for one in (host, wanted)]
    torch.cuda.synchronize()
    corpus.assert_same_bits(result.cpu(), wanted)
    assert all((one == 7).all().item() for one in fresh)


@every_case
def test_handles_wait_on_any_stream(route: CudaBackend, case: str) -> None:
    for seed in range(3):
        world.run(waited_elsewhere, 2, case, seed=seed, route=route)


def repeated(rank: int, ranks: int, case: str, calls: int, mode: str) -> None:
    host, wanted = prepared(case, rank, ranks, 300_000, 0)
    given = torch.randn(len(host), generator=torch.Generator().manual_seed(rank)).to(f"cuda:{rank}")
    output = torch.empty(len(wanted), dtype=given.dtype, device=given.device)
    for number in range(calls):
        later = number % 2 == 1
        moves.wait(CASES[case].call(moves.coded(**CODED, mode=mode, staging_mib=1), output, given, None, later))


@pytest.mark.full(reason="the largest messages of these tests; test_slabs is short")
@every_case
def test_memory(route: CudaBackend, case: str) -> None:
    """Flat from the first calls on, and no more than the plain collective's, staging_mib and two staging buffers."""

    def peaks(calls: int, mode: str) -> list[int]:
        outcome = world.run(repeated, 2, case, calls, mode, seed=3, route=route)
        return [one.peak_bytes for one in outcome.counters]

    plain, few, many = peaks(1, "never"), peaks(2, "always"), peaks(3, "always")
    # the smallest blocks, 512 bytes each, depend on the moment; other tests count live bytes exactly
    assert all(after <= before + 4096 for before, after in zip(few, many, strict=True)), (few, many)
    staging = (1 << 20) // 3
    most = (1 << 20) + 2 * staging
    assert all(before < after <= before + most for before, after in zip(plain, many, strict=True)), (plain, many)


def staging_buffers(rank: int, ranks: int) -> list[int]:
    """Staging buffers of several sizes, one in the other, larger than the budget. Returns the bytes of all staging buffers after each."""
    streams, grain, found = streams_of(torch.device("cuda", rank)), 1 << 16, []
    for size in (100_000, 100_000, 100_000, 100_000, 300_000, 900_000, 100_000):
        with streams.staging(size, 1 << 20) as outer, streams.staging(100_000, 1 << 20) as inner:
            assert outer.data_ptr() >= inner.data_ptr() + len(inner) or inner.data_ptr() >= outer.data_ptr() + size
            outer.fill_(1), inner.fill_(2)
        found.append(streams.nbytes())
    del outer, inner
    with pytest.raises(ValueError, match="planted"), streams.staging(5 << 20, 1 << 20):
        raise ValueError("planted")
    with streams.staging(5 << 20, 1 << 20):
        found.append(streams.nbytes())
    assert mine().allocator.peak < (5 << 20) + grain  # the others were freed before
    return found


def test_staging_buffers(route: CudaBackend) -> None:
    grain = 1 << 16
    small, middle, large = 2 * grain, 5 * grain, 14 * grain
    (found,) = world.run(staging_buffers, 1, route=route).values
    assert found[:4] == [2 * small, 3 * small, 3 * small, 3 * small]
    assert found[4] == 3 * small + middle and found[5] == small + large <= 1 << 20
    assert found[-1] == 5 << 20  # a single one may be larger than the budget, and replaces all others


def test_reports_are_bounded() -> None:
    """Names of groups come and go; a name costs a word until all words are taken."""
    reports = Reports(torch.device("cpu"))
    words = [reports.word(f"group {number}") for number in range(5000)]
    assert len({word.data_ptr() for word in words}) == 4096 > len(reports._names)
    assert reports.word("group 7").data_ptr() == words[7].data_ptr()
    words[7].fill_(0x0003_0001_0000_0002)
    words[-1].fill_(1)
    assert reports.failed().item() == 1
    first, last = reports.describe().split("; ")
    assert first.startswith("group 7: frame 1 of group rank 3 refused") and last.startswith(
        "one of the later operations"
    )
