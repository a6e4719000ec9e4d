"""Failures of operations on NCCL groups, on the simulated GPU: damaged frames, ranks that do not come, handles that are dropped; memory;
captures, odd groups, large tensors."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import corpus
import moves
import pytest
import torch
import torch.distributed as dist
from sim import communicator, nccl
from sim.device import mine
from sim.mistakes import filled
from sim.scheduler import Fault
from torch.distributed import distributed_c10d as c10d

from ds_zipccl.comm import group_state as states
from ds_zipccl.comm.device import exchange, gather
from ds_zipccl.comm.device.reports import Reports
from ds_zipccl.comm.device.streams import Streams, streams_of
from ds_zipccl.comm.shadow_check import Shadow
from ds_zipccl.comm.work import CommError
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.telemetry import counters
from on_sim import cases, random_programs, world
from on_sim.cases import CASES, CODED, HARD, PATIENT, every_case, once, prepared, reasons

# --- frames that are refused


def refused(rank: int, ranks: int, case: str, behind: str) -> tuple[int, str]:
    """A call whose frames rank 1 refuses, then one call more. Returns the NaNs of the first output, and the error of the second call."""
    given, output, wanted = prepared(case, rank, ranks)
    CASES[case].call(moves.coded(**CODED), output, given, None, False)
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
    given, output, _ = prepared(case, rank, ranks)
    try:
        CASES[case].call(moves.coded(**CODED, check="shadow"), output, given, None, False)
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

    if case == "uneven":
        words = exchange.exchange_words

        def less_words(*arguments: Any) -> Any:
            return tuple([[row[0] and row[0] - 1024, *row[1:]] for row in rows] for rows in words(*arguments))

        monkeypatch.setattr(exchange, "exchange_words", less_words)
        monkeypatch.setattr(exchange, "_check", lambda *arguments: None)
    else:
        module = gather if case == "gather" else exchange
        agree = module.agree
        monkeypatch.setattr(module, "agree", lambda *arguments: [size - 1024 for size in agree(*arguments)])
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
    given, output, _ = prepared(case, rank, ranks)
    more = torch.empty_like(output), given.clone()
    CASES[case].call(moves.coded(**CODED), output, given, None, False)
    try:
        CASES[case].call(moves.coded(**CODED), output, torch.stack([given, given], 1)[:, 0], None, False)
        CASES[case].call(moves.coded(**CODED), *more, None, False)
    except (CommError, MemoryError) as error:
        return type(error).__name__
    return ""


def failing_encoder(monkeypatch: pytest.MonkeyPatch, case: str, ranks: Sequence[int]) -> Counter[int]:
    """Plant an error in the second encoding of some ranks; an exchange encodes coded frames, then raw ones. Returns the calls by rank."""
    name, good = ("encode_gather", 1) if case == "gather" else ("encode_frames", 2)
    encode, calls = getattr(CudaBackend, name), Counter[int]()

    def fails(*arguments: Any, **more: Any) -> None:
        rank = mine().rank
        calls[rank] += 1
        if rank in ranks and calls[rank] > good:
            raise MemoryError("planted")
        encode(*arguments, **more)

    monkeypatch.setattr(CudaBackend, name, fails)
    return calls


@every_case
def test_error_in_the_middle(route: CudaBackend, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """The rank has its own error at once, the others raise after the timeout: no host blocks, and no memory is used after its end."""
    monkeypatch.setattr(nccl, "TIMEOUT", timedelta(seconds=0.2))
    failing_encoder(monkeypatch, case, [1])
    got = world.run(broken, 3, case, modes=PATIENT, route=route).values
    assert got == ["CommError", "MemoryError", "CommError"]


def abandoned(rank: int, ranks: int, case: str) -> None:
    """All ranks fail at their second fragment. New tensors take the memory of the call's tensors, which the program drops."""
    given, output, _ = prepared(case, rank, ranks, 40_000)
    sizes = len(given), len(output)
    with pytest.raises(MemoryError):
        CASES[case].call(moves.coded(**CODED), output, given, None, False)
    del given, output
    fresh = [filled(rank, size, 7, torch.bfloat16) for size in sizes]
    torch.cuda.synchronize()
    assert all((one == 7).all().item() for one in fresh)


@pytest.mark.parametrize("case", ["gather", "exchange"])
def test_failed_operation_keeps_its_tensors(route: CudaBackend, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    calls = failing_encoder(monkeypatch, case, [0, 1])

    def run(seeds: int) -> None:
        for seed in range(seeds):
            calls.clear()
            with random_programs.limits(1 << 16):  # frames that fit make one fragment
                world.run(abandoned, 2, case, seed=seed, route=route)

    run(2)
    monkeypatch.setattr(Streams, "abandon", lambda self, keep: None)
    with pytest.raises(Fault, match="race"):
        run(6)


def impatient(rank: int, ranks: int) -> str:
    """Raw frames need no agreement. Returns what the handle says while the other rank does not come."""
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
    live = []
    for _ in range(6):
        given, output, _ = prepared(case, rank, ranks)
        sizes = len(given), len(output)
        CASES[case].call(moves.coded(**CODED), output, given, None, True)
        del given, output
        fresh = [filled(rank, size, 7, torch.bfloat16) for size in sizes]
        assert all((one == 7).all().item() for one in fresh)
        del fresh
        torch.cuda.synchronize()
        streams_of(torch.device("cuda", rank)).sweep()
        live.append(mine().allocator.live)
    return live


@every_case
def test_dropped_handles(route: CudaBackend, case: str) -> None:
    for seed in range(3):
        for live in world.run(dropped, 2, case, seed=seed, route=route).values:
            assert len(set(live[3:])) == 1  # three staging buffers, then nothing more


def waited_elsewhere(rank: int, ranks: int, case: str) -> None:
    """A call on one stream, whose handle waits on another one; then work of the first stream gets the memory of the call's own copies."""
    *dense, wanted = prepared(case, rank, ranks)
    given, output = (torch.stack([one, one], 1)[:, 0] for one in dense)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for stream in (first, second):
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(first):
        handle = CASES[case].call(moves.coded(**CODED), output, given, None, True)
    with torch.cuda.stream(second):
        handle.wait()
        result = torch.cat([output])
    with torch.cuda.stream(first):
        fresh = [filled(rank, len(one), 7, torch.bfloat16) for one in dense]
    torch.cuda.synchronize()
    corpus.assert_same_bits(result.cpu(), wanted)
    assert all((one == 7).all().item() for one in fresh)


@every_case
def test_handles_wait_on_any_stream(route: CudaBackend, case: str) -> None:
    for seed in range(3):
        world.run(waited_elsewhere, 2, case, seed=seed, route=route)


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


def test_changed_shards_are_named() -> None:
    """A gather of many shards names those that were changed, and a change stays; kinds beyond the words share the last one."""
    reports, same = Reports(torch.device("cpu")), torch.arange(8)
    names = [f"p{number}" for number in range(4)]
    for number in (2, 5):
        reports.note_changes("gather", names, same, same + (torch.arange(8) == number))
    assert reports.failed().item() == 1
    reports.note_changes("gather", names, same, same)
    assert [said.split(": ")[1] for said in reports.describe().split("; ") if ": p" in said] == ["p1", "p2"]
    reports = Reports(torch.device("cpu"))
    for number in range(400):
        reports.note_changes(f"gather {number}", names, same, same)
    assert not reports.failed().item()
    reports.note_changes("gather 399", names, same, -same)
    assert reports.describe().startswith("one of the later gathers: a shard was gathered before")
    reports.note_changes("gather 8", names, same, -same)
    assert reports.describe().count("gather 8: p") == 4


# --- moments of the program


def captured(rank: int, ranks: int, case: str) -> None:
    cases.captured(case, moves.coded(**CODED), rank, ranks)


def coalesced(rank: int, ranks: int, case: str) -> None:
    given, outputs, wanted = zip(*(prepared(case, rank, ranks, 3000, seed) for seed in range(2)), strict=True)
    with dist._coalescing_manager(None, None if case == "gather" else given[0].device, async_ops=True) as manager:
        for output, one in zip(outputs, given, strict=True):
            CASES[case].call(moves.coded(**CODED), output, one, None, case != "gather")
    manager.wait()
    for output, one in zip(outputs, wanted, strict=True):
        corpus.assert_same_bits(output.cpu(), one)
    once(case, rank, ranks)  # outside it is coded again


@every_case
@pytest.mark.parametrize("program", [captured, coalesced], ids=lambda program: program.__name__)
def test_moments_without_coding(route: CudaBackend, program: Callable[..., None], case: str) -> None:
    world.run(program, 2, case, route=route)
    assert reasons() == ({PassReason.CAPTURED.value: 2} if program is captured else {PassReason.COALESCED.value: 4})


# --- groups


def alone(rank: int, ranks: int) -> None:
    groups = [dist.new_group([one]) for one in range(ranks)]
    for case in ("gather", "exchange"):
        once(case, 0, 1, group=groups[rank])


def test_groups_of_one(route: CudaBackend) -> None:
    world.run(alone, 2, route=route)
    assert reasons() == {PassReason.ONE_RANK.value: 4}


def mixed(rank: int, ranks: int) -> None:
    """A group of two backends: device memory goes on the device's streams; host memory by gloo's messages, which are not simulated."""
    c10d._world.pg_backend_config[dist.group.WORLD] = "cpu:gloo,cuda:nccl"
    for case in CASES:
        once(case, rank, ranks)
    state = states.group_state(None)
    assert state is not None and state.streams("cuda") and not state.streams("cpu")
    assert (state.backend("cpu"), state.backend("cuda")) == ("gloo", "nccl")


def test_groups_of_two_backends(route: CudaBackend) -> None:
    world.run(mixed, 2, route=route)
    assert not reasons()


def by_gloo(rank: int, ranks: int) -> None:
    """Tensors on the device in a group that has gloo for them."""
    state = states.group_state(None)
    assert state is not None
    state.backends = {"cpu": "gloo", "cuda": "gloo"}  # as a program finds it whose group is gloo's alone
    for case in CASES:
        once(case, rank, ranks)


def test_a_device_without_a_backend_for_it_passes(route: CudaBackend) -> None:
    world.run(by_gloo, 2, route=route)
    assert {*reasons()} == {PassReason.BACKEND.of("gloo on cuda")}
    assert not any(row["calls"] for row in counters.rows())


# --- tensors


def test_gathers_of_more_than_4_gib() -> None:
    """Shards of 3 GiB of elements, cut as for memory of 64 MiB."""
    numels, ranks, budget = [[3 << 30, 7], [1 << 31]], 4, 64 << 20
    pieces = gather.pieces_of(numels, 2, ranks, budget)
    for shard, sizes in enumerate(numels):
        mine_ = [piece for piece in pieces if piece.shard == shard]
        assert [piece.start for piece in mine_[1:]] == [piece.start + piece.numel for piece in mine_[:-1]]
        assert mine_[0].start == 0 and mine_[-1].start + mine_[-1].numel == sum(sizes) >= 1 << 31
    assert max(piece.numel for piece in pieces) * 2 * ranks <= budget // 3
    assert gather.slot_of(5 << 30, 3 << 30) == (3 << 30, False) and gather.slot_of(5 << 30, 5 << 30)[1]
