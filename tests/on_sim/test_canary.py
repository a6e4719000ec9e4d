"""The canary of NCCL groups on the simulated GPU: a fault is found on a clone of the default group, and named alike on all ranks."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import corpus
import levels
import pytest
import torch
import torch.distributed as dist
from pytest import MonkeyPatch
from sim import communicator
from sim.device import Gpu, mine

from ds_zipccl.comm.device import sums as device_sums
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.comm.shadow_check import bits
from ds_zipccl.comm.transport.nccl import NcclTransport
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.integration import canary
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.telemetry import counters
from on_sim import world
from on_sim.cases import HARD, once
from on_sim.random_calls import OPERATIONS, SUMS, Desk, Task
from on_sim.random_programs import CONFIGS, limits

CONFIG = ZipcclConfig(enabled=True, nccl="on", staging_mib=1)


@pytest.fixture(autouse=True)
def small(monkeypatch: MonkeyPatch) -> None:
    """Small messages: the emulated kernels are slow."""
    monkeypatch.setattr(canary, "_NBYTES", 96 << 10)


def tried(rank: int, ranks: int, nodes: Any, config: ZipcclConfig = CONFIG) -> tuple[Any, Any, list[Any]]:
    """Return the outcome on this rank, and the counters behind it. The job goes on with plain collectives."""
    if nodes:
        levels.pretend(nodes)
    group, device = dist.group.WORLD, torch.device("cuda", rank)
    outcome = canary.try_out(config, device)
    words = torch.full((64,), rank, device=device)
    dist.all_reduce(words)
    assert words.tolist() == [sum(range(ranks))] * 64 and outcome.seconds > 0
    state = group_state(group)
    assert state is not None and state.patience is None
    gc.collect()
    return dict(outcome), outcome.sums, counters.rows()


@pytest.mark.parametrize(
    ("ranks", "nodes"),
    [
        (2, ()),
        *(
            pytest.param(*one, marks=pytest.mark.full(reason="as 2"))
            for one in ((4, ((0, 1), (2, 3))), (3, ()), (4, ()))
        ),
    ],
)
def test_a_healthy_group(route: CudaBackend, ranks: int, nodes: Any) -> None:
    assert world.run(tried, ranks, nodes, modes=HARD, route=route).values == [({}, {}, [])] * ranks


def test_another_order_of_sums_is_noticed(route: CudaBackend, monkeypatch: MonkeyPatch) -> None:
    right = canary.on_host
    monkeypatch.setattr(canary, "on_host", lambda given, *more: right(given[::-1], *more))
    _sums_alone_are_wrong(world.run(tried, 3, (), modes=HARD, route=route).values, "all_reduce: word")


def _sums_alone_are_wrong(outcomes: Any, said: str) -> None:
    for others, sums, _ in outcomes:
        assert not others and set(sums) == set(range(len(outcomes)))
        assert all(text.startswith(said) for text in sums.values())


def cut(sums: torch.Tensor) -> None:
    """Another rounding of 16 bits."""
    if sums.dtype is torch.bfloat16:
        bits(sums)[:].bitwise_and_(-2)


def flushed(sums: torch.Tensor) -> None:
    """No denormals."""
    sums.masked_fill_(sums.abs() < torch.finfo(sums.dtype).smallest_normal, 0)


@pytest.mark.parametrize(
    ("change", "said"), [(cut, "reduce_scatter_tensor: word"), (flushed, "all_reduce: word")], ids=["cut", "flushed"]
)
@pytest.mark.parametrize("nodes", [(), ((0, 1), (2, 3))], ids=["one level", "two levels"])
def test_another_rounding_of_sums_is_noticed(
    route: CudaBackend, change: Any, said: str, nodes: Any, monkeypatch: MonkeyPatch
) -> None:
    add = device_sums.Summing._sum_rows

    def wrong(self: Any, matrix: Any, sums: torch.Tensor, *more: Any) -> None:
        add(self, matrix, sums, *more)
        change(sums)

    monkeypatch.setattr(device_sums.Summing, "_sum_rows", wrong)
    _sums_alone_are_wrong(world.run(tried, 4, nodes, modes=HARD, route=route).values, said)


def on_other_groups(rank: int, ranks: int) -> Any:
    levels.pretend(levels.nodes_of(2, 2))
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    outcome = canary.try_out(CONFIG, torch.device("cuda", rank), [pairs[rank % 2]])
    return dict(outcome), outcome.sums


@pytest.mark.parametrize("wrong", [False, True])
def test_other_groups_sum_on_clones_of_their_own(route: CudaBackend, wrong: bool, monkeypatch: MonkeyPatch) -> None:
    """A mistake on one of them is told to all ranks."""
    add = device_sums.Summing._sum_rows

    def changed(self: Any, matrix: Any, sums: torch.Tensor, *more: Any) -> None:
        add(self, matrix, sums, *more)
        if self._ctx.state.ranks == [1, 3]:
            cut(sums)

    if wrong:
        monkeypatch.setattr(device_sums.Summing, "_sum_rows", changed)
    outcomes = world.run(on_other_groups, 4, modes=HARD, route=route).values
    assert all(not others and set(sums) == ({1, 3} if wrong else set()) for others, sums in outcomes)


def behind_another_call(rank: int, ranks: int) -> None:
    once("gather", rank, ranks)
    assert not canary.try_out(CONFIG, torch.device("cuda", rank))


def test_every_call_is_coded(route: CudaBackend) -> None:
    """Where the job has counted before, its counts stay, and have those of the canary on top. Ranks of the simulator share them."""
    world.run(behind_another_call, 2, route=route)
    assert {(row["role"], row["op"]): (row["calls"], row["passed"]) for row in counters.rows()} == {
        ("dp", "all_gather_into_tensor"): (2, 0), ("zero_param", "all_gather_into_tensor"): (2, 0),
        ("ep", "all_to_all_single"): (2 * 6, 0), ("zero_grad", "all_reduce"): (2, 0), ("zero_grad", "reduce_scatter_tensor"): (4, 0),
    }  # fmt: skip


#: Calls that launch kernels of torch.
USED = ("gather", "gather several", "exchange", "uneven exchange", "all_reduce", "scatter", "owners")


def in_use(rank: int, ranks: int, each: int, begun: dict[int, set[Any]]) -> set[Any]:
    """Return the kernels of torch that calls launch, and that the canary has not launched."""
    levels.pretend(levels.nodes_of(ranks // each, each))
    canary.try_out(CONFIG, torch.device("cuda", rank))
    loaded, late = set(begun[rank]), set()
    for name, kind in itertools.product(USED, corpus.SUMMED.values()):
        average = name in SUMS
        task = Task(name, tuple(range(ranks)), dist.group.WORLD, CONFIGS[0], kind, 5000, average=average, draw=name)
        desk = Desk(task, rank)
        desk.room = lambda numel, dense=True: torch.empty(numel, dtype=kind.dtype, device=desk.device)  # type: ignore[method-assign] # noqa: B023
        OPERATIONS[name][1](counting := Counting(desk, begun[rank]))
        late |= counting.launched - loaded
    return late


class Counting:
    """A desk that notes the kernels of its call."""

    def __init__(self, desk: Desk, begun: set[Any]) -> None:
        self._desk, self._begun, self.launched = desk, begun, set[Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._desk, name)

    def call(self, *given: Any, **named: Any) -> None:
        self._begun.clear()
        self._desk.call(*given, **named)
        self.launched = set(self._begun)


@pytest.mark.parametrize("each", [1, pytest.param(2, marks=pytest.mark.full(reason="as one rank a node"))])
def test_torchs_kernels_are_loaded(route: CudaBackend, monkeypatch: MonkeyPatch, each: int) -> None:
    """By operation and dtypes: those of calls on dense tensors are those of the canary."""
    begun: dict[int, set[Any]] = {rank: set() for rank in range(2 * each)}
    launch = Gpu.launch

    def noted(self: Gpu, kind: str, label: str, body: Any, reads: Any, writes: Any, *more: Any) -> None:
        if kind == "kernel" and label.startswith(("torch", "copy_")):
            begun[self.rank].add((label, *(str(one.dtype) for one in (*reads, *writes))))
        launch(self, kind, label, body, reads, writes, *more)

    monkeypatch.setattr(Gpu, "launch", noted)
    with limits(1 << 16):
        found = world.run(in_use, 2 * each, each, begun, modes=world.Modes(races=False), route=route)
    assert found.values == [set()] * 2 * each


def other_rank_skipped(patch: MonkeyPatch) -> None:
    decode = CudaBackend.decode_gather

    def wrong(self: Any, staging: Any, table: Any, outs: Any, skip: int, *more: Any, **named: Any) -> None:
        decode(self, staging, table, outs, (skip + 1) % table.ranks, *more, **named)

    patch.setattr(CudaBackend, "decode_gather", wrong)


def own_summand_left_out(patch: MonkeyPatch) -> None:
    add = CudaBackend.decode_sum_frames

    def wrong(self: Any, slots: Any, block: int, dtype: Any, sums: Any, status: Any, own: Any = None) -> None:
        add(self, slots, block, dtype, sums, status, own)
        sums.view(-1)[7:8].add_(1)

    patch.setattr(CudaBackend, "decode_sum_frames", wrong)


def changed_on_the_way(patch: MonkeyPatch) -> None:
    exchange = communicator._exchange

    def flip(gpu: Any, calls: Any) -> None:
        exchange(gpu, calls)
        arrived = calls[-1].arrived
        if arrived[0].dtype == torch.uint8:
            arrived[0] = arrived[0].clone()  # other ranks receive the same memory
            arrived[0].view(-1)[0] ^= 8

    patch.setattr(communicator, "_exchange", flip)


def encoder_of_one_rank(patch: MonkeyPatch) -> None:
    encode = CudaBackend.encode_frames

    def fails(self: Any, *given: Any, **named: Any) -> None:
        if mine().rank == 1:
            raise MemoryError("planted")
        encode(self, *given, **named)

    patch.setattr(CudaBackend, "encode_frames", fails)


def frames_never_sent(patch: MonkeyPatch) -> None:
    gather = NcclTransport.all_gather

    def fails(self: Any, whole: torch.Tensor, part: torch.Tensor) -> None:
        if mine().rank == 1:
            raise RuntimeError("planted")
        gather(self, whole, part)

    patch.setattr(NcclTransport, "all_gather", fails)


def agreement_of_one_rank(patch: MonkeyPatch) -> None:
    agree = NcclTransport.max

    def fails(self: Any, words: torch.Tensor) -> None:
        if mine().rank == 1:
            raise RuntimeError("planted")
        agree(self, words)

    patch.setattr(NcclTransport, "max", fails)
