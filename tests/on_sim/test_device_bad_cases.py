"""Bad cases of operations on NCCL groups, on the simulated GPU: captures, odd groups, odd tensors."""

from __future__ import annotations

import gc
import weakref

import corpus
import moves
import pytest
import torch
import torch.distributed as dist
from sim import streams
from sim.device import mine
from torch.distributed import distributed_c10d as c10d

from ds_zipccl.comm import group_state as states
from ds_zipccl.comm.device import gather
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.policy import wire
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.telemetry import counters
from on_sim import world
from on_sim.cases import CASES, CODED, HARD, every_case, once, prepared, reasons

# --- moments of the program


def captured(rank: int, ranks: int, case: str) -> None:
    host, wanted = prepared(case, rank, ranks, 3000, 1)
    given = torch.zeros(len(host), dtype=host.dtype, device=f"cuda:{rank}")
    output = torch.empty(len(wanted), dtype=given.dtype, device=given.device)
    recorded = streams.Graph()
    with recorded.capture():
        CASES[case].call(moves.coded(**CODED), output, given, None, False)
    given.copy_(host)
    recorded.replay()
    corpus.assert_same_bits(output.cpu(), wanted)


@every_case
def test_capture(route: CudaBackend, case: str) -> None:
    """The plain collective is in the graph, and its replay sends what is in the tensors then."""
    counters.reset()
    world.run(captured, 2, case, route=route)
    assert reasons() == {PassReason.CAPTURED.value: 2}


def coalesced(rank: int, ranks: int, case: str) -> None:
    hosts, wanted = zip(*(prepared(case, rank, ranks, 3000, seed) for seed in range(2)), strict=True)
    given = [host.to(f"cuda:{rank}") for host in hosts]
    outputs = [torch.empty(len(one), dtype=one.dtype, device=f"cuda:{rank}") for one in wanted]
    with dist._coalescing_manager(None, None if case == "gather" else given[0].device, async_ops=True) as manager:
        for output, one in zip(outputs, given, strict=True):
            CASES[case].call(moves.coded(**CODED), output, one, None, case != "gather")
    manager.wait()
    for output, one in zip(outputs, wanted, strict=True):
        corpus.assert_same_bits(output.cpu(), one)
    once(case, rank, ranks)  # outside it is coded again


@every_case
def test_coalescing_manager(route: CudaBackend, case: str) -> None:
    counters.reset()
    world.run(coalesced, 2, case, route=route)
    assert reasons() == {PassReason.COALESCED.value: 4}


# --- groups


def alone(rank: int, ranks: int) -> None:
    groups = [dist.new_group([one]) for one in range(ranks)]
    for case in ("gather", "exchange"):
        once(case, 0, 1, group=groups[rank])


def test_groups_of_one(route: CudaBackend) -> None:
    counters.reset()
    world.run(alone, 2, route=route)
    assert reasons() == {PassReason.ONE_RANK.value: 4}


def passing_groups(rank: int, ranks: int, rounds: int) -> tuple[int, int]:
    """Groups that are made, used and destroyed. Returns the groups' states that are left, and the live bytes at the end."""
    found = []
    for number in range(rounds):
        order = [list(range(ranks)), list(range(ranks - 1))][number % 2]
        group = dist.new_group(order)
        if rank in order:
            for case in CASES:
                once(
                    case,
                    rank,
                    len(order),
                    500,
                    number,
                    group,
                    later=bool(number & 2),
                    mode=["always", "auto"][number % 2],
                )
            found.append(weakref.ref(states.group_state(group)))  # type: ignore[type-var]
            dist.destroy_process_group(group)
        del group
    gc.collect()
    once("gather", rank, ranks)
    return sum(one() is not None for one in found), mine().allocator.live


@pytest.mark.full(reason="slow; test_two_groups_at_once has groups in the short tier")
def test_groups_come_and_go(route: CudaBackend) -> None:
    few, many = (world.run(passing_groups, 3, rounds, seed=5, route=route).values for rounds in (4, 8))
    assert [states for states, _ in many] == [0, 0, 0]
    assert [live for _, live in many] == [live for _, live in few]


def mixed(rank: int, ranks: int) -> None:
    """A group of two backends: device memory goes on the device's streams; host memory by gloo's messages, which are not simulated."""
    c10d._world.pg_backend_config[dist.group.WORLD] = "cpu:gloo,cuda:nccl"
    for case in CASES:
        once(case, rank, ranks)
    state = states.group_state(None)
    assert state is not None and state.streams("cuda") and not state.streams("cpu")
    assert (state.backend("cpu"), state.backend("cuda")) == ("gloo", "nccl")


def test_groups_of_two_backends(route: CudaBackend) -> None:
    counters.reset()
    world.run(mixed, 2, route=route)
    assert not reasons()


def two_groups(rank: int, ranks: int) -> None:
    """Operations of two groups in flight at once, whose streams are the same."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[rank // 2]
    api, pending = moves.coded(**CODED), []
    for seed, case in enumerate(CASES):
        for number, (within, at, count) in enumerate(((group, rank % 2, 2), (None, rank, ranks))):
            host, wanted = prepared(case, at, count, 2000, 2 * seed + number)
            given = host.to(f"cuda:{rank}")
            output = torch.empty(len(wanted), dtype=given.dtype, device=given.device)
            pending.append((CASES[case].call(api, output, given, within, True), output, wanted))
            del given
    for handle, output, wanted in reversed(pending):
        handle.wait()
        corpus.assert_same_bits(output.cpu(), wanted)


@pytest.mark.parametrize("modes", [HARD, world.Modes(one_queue=True)])
def test_two_groups_at_once(route: CudaBackend, modes: world.Modes) -> None:
    """With CUDA_DEVICE_MAX_CONNECTIONS=1 too."""
    for seed in range(2):
        world.run(two_groups, 4, seed=seed, modes=modes, route=route)


# --- tensors


def odd_tensors(rank: int, ranks: int, case: str) -> None:
    """Tensors at odd addresses of 2 bytes, with gaps, and without elements."""
    api, device = moves.coded(**CODED), torch.device("cuda", rank)
    for seed, (step, first) in enumerate([(1, 1), (1, 3), (2, 0), (3, 1)]):
        host, wanted = prepared(case, rank, ranks, 2049, seed)
        memory = [torch.zeros(first + step * len(one) + 1, dtype=host.dtype, device=device) for one in (host, wanted)]
        given, output = (
            one[first : first + step * count : step]
            for one, count in zip(memory, (len(host), len(wanted)), strict=True)
        )
        assert len(given) == len(host) and (given.data_ptr() - memory[0].data_ptr()) == 2 * first
        given.copy_(host.to(device))
        for later in (False, True):
            output.zero_()
            moves.wait(CASES[case].call(api, output, given, None, later))
            corpus.assert_same_bits(torch.cat([output.cpu()]), wanted)
            assert not memory[1][:first].cpu().any() and not memory[1][first + step * len(output) :].cpu().any()
    once(case, rank, ranks, 0)


@every_case
def test_odd_tensors(route: CudaBackend, case: str) -> None:
    for seed, modes in enumerate((world.Modes(declared=True), HARD)):
        world.run(odd_tensors, 2 + seed, case, seed=seed, modes=modes, route=route)


def test_gathers_of_more_than_4_gib() -> None:
    """Shards of 3 GiB of elements, cut as for memory of 64 MiB."""
    numels, ranks, budget = [[3 << 30, 7], [1 << 31]], 4, 64 << 20
    pieces = gather.pieces_of(numels, 2, ranks, budget)
    for shard, sizes in enumerate(numels):
        mine_ = [piece for piece in pieces if piece.shard == shard]
        assert [piece.start for piece in mine_[1:]] == [piece.start + piece.numel for piece in mine_[:-1]]
        assert mine_[0].start == 0 and mine_[-1].start + mine_[-1].numel == sum(sizes) >= 1 << 31
    assert max(piece.numel for piece in pieces) * 2 * ranks <= budget // 3
    assert wire.device_fragment_bytes(sum(map(sum, numels)) * 2 * ranks, budget) == budget // 3
    assert gather._slot(5 << 30, 3 << 30) == (3 << 30, False) and gather._slot(5 << 30, 5 << 30)[1]
