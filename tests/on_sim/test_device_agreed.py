"""Gathers of parameters with agreed sizes, on the simulated GPU: no wait of the host, and never a wrong bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sim import device
from sim.scheduler import Fault

from ds_zipccl import comm
from ds_zipccl.comm.device.bases import agreed as agreements
from ds_zipccl.comm.device.bases.agreed import Agreed
from ds_zipccl.comm.transport.nccl import NcclTransport
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.policy import wire
from ds_zipccl.telemetry import counters
from on_sim import world
from on_sim.cases import noise, weights

CONFIG = ZipcclConfig(enabled=True, mode="always", min_bytes=0, nccl="on", nccl_min_bytes=0)
#: Elements of a rank's shard of each parameter: no element, raw ones, one frame, odd addresses.
SIZES = (0, 3, 3001, 2048, 5003)
#: Parameters that an optimizer trains; the others are frozen.
TRAINED = (1, 2, 4)


class Model:
    """Parameters of one rank, as ZeRO-3 has them, and a copy on the host of the shards of all ranks."""

    def __init__(
        self, rank: int, ranks: int, seed: int, dtype: torch.dtype = torch.bfloat16, gathered: torch.dtype | None = None
    ) -> None:
        self.rank, self.ranks, self.device = rank, ranks, torch.device("cuda", rank)
        self.dtype = gathered or dtype
        self.agreed = [Agreed(f"layers.{number}.weight", size, gathered) for number, size in enumerate(SIZES)]
        self.hosts = [
            [weights(peer, size, seed + number, dtype) for peer in range(ranks)] for number, size in enumerate(SIZES)
        ]
        self.shards = [hosts[rank].to(self.device) for hosts in self.hosts]

    def agree(self) -> int:
        return comm.agree_sizes(zip(self.agreed, self.shards, strict=True), config=CONFIG)

    def start(self, numbers: list[int], later: bool = True) -> tuple[Any, torch.Tensor]:
        """Start a gather as DeepSpeed does it: shards end to end, in place. Handle, None if not ``later``, and output."""
        words = torch.cat([self.shards[number].to(self.dtype) for number in numbers])
        output = torch.empty(self.ranks * words.numel(), dtype=words.dtype, device=self.device)
        own = output[self.rank * words.numel() : (self.rank + 1) * words.numel()]
        own.copy_(words)
        parameters = [self.agreed[number] for number in numbers]
        handle = comm.all_gather_into_tensor(
            output, own, None, later, config=CONFIG, role="zero_param", parameters=parameters
        )
        return handle, output

    def gather(self, numbers: list[int], later: bool = True) -> Callable[[], list[bool]]:
        """Start a gather. The result waits, and tells whether each parameter has the right bits."""
        handle, output = self.start(numbers, later)
        wanted = [[host.to(self.dtype, copy=True) for host in self.hosts[number]] for number in numbers]

        def finish() -> list[bool]:
            if handle is not None:
                handle.wait()
            return [not bad for bad in different(output, wanted)]

        return finish

    def wrong(self, numbers: list[int], handle: Any, output: torch.Tensor) -> list[str]:
        """The names of parameters without the right bits. All their words of some rank are NaN: nothing uses them by mistake."""
        if handle is not None:
            handle.wait()
        found = []
        wanted = [self.hosts[number] for number in numbers]
        for number, bad in zip(numbers, different(output, wanted), strict=True):
            assert all(part.isnan().all() for part in bad)
            found += [self.agreed[number].name] if bad else []
        return found

    def stepped(self, number: int, peer: int, seed: int) -> torch.Tensor:
        """The shard of a parameter after a step of an optimizer."""
        return weights(peer, SIZES[number], 50 * seed + number, self.hosts[number][peer].dtype)

    def step(self, seed: int) -> None:
        """Train as an optimizer does, and agree again."""
        comm.check_frames(self.device, config=CONFIG)
        for number in TRAINED:
            for peer in range(self.ranks):
                self.write(number, peer, self.stepped(number, peer, seed))
            self.agreed[number].forget()
        assert self.agree() == len(TRAINED)

    def write(self, number: int, peer: int, words: torch.Tensor) -> None:
        """Change a shard in place. All ranks call, as each keeps a copy of all shards."""
        self.hosts[number][peer] = words
        if peer == self.rank:
            self.shards[number].copy_(words.to(self.device))


def different(output: torch.Tensor, wanted: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Of each parameter those shards, by any rank, that are not as wanted."""
    parts = output.cpu().view(len(wanted[0]), -1).split([shards[0].numel() for shards in wanted], 1)
    return [
        [got for got, want in zip(part, shards, strict=True) if not same(got, want)]
        for part, shards in zip(parts, wanted, strict=True)
    ]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def train(model: Model, seed: int, gathers: int) -> None:
    """Steps with random gathers between them, several in flight."""
    order = random.Random(seed)
    for step in range(3):
        started = []
        for _ in range(gathers):
            numbers = sorted(order.sample(range(len(SIZES)), order.randint(1, len(SIZES))))
            started.append(model.gather(numbers, order.random() < 0.7))
        for finish in started:
            assert all(finish())
        model.step(step)


def steps(rank: int, ranks: int, seed: int, dtype: torch.dtype, gathered: torch.dtype | None = None) -> None:
    model = Model(rank, ranks, seed, dtype, gathered)
    assert model.agree() == len(SIZES)
    train(model, seed, 3)


def in_pieces(patch: pytest.MonkeyPatch) -> None:
    """Parameters of several frames, in several messages; the memory for conversions is small and used again."""
    patch.setattr(wire, "device_piece_numel", lambda *call: 1024)
    patch.setattr(wire, "DEVICE_FRAGMENT_BYTES", 9000)
    patch.setattr(wire, "RAW_BELOW_BYTES", 512)


@pytest.mark.parametrize(
    ("ranks", "autocast", "pieces"),
    [(2, False, False), (2, False, True), *(pytest.param(*one, marks=pytest.mark.full) for one in ((3, False, False), (2, True, True)))],
)  # fmt: skip
def test_steps(route: CudaBackend, monkeypatch: pytest.MonkeyPatch, ranks: int, autocast: bool, pieces: bool) -> None:
    """``autocast``: shards of 32 bits that are gathered in 16."""
    if pieces:
        in_pieces(monkeypatch)
    for seed, modes in list(enumerate(world.ALL_MODES))[:: 3 if pieces and not autocast else 1]:
        dtype = torch.float32 if autocast else (torch.bfloat16, torch.float32, torch.float16)[seed % 3]
        gathered = torch.bfloat16 if autocast else None
        world.run(steps, ranks, seed, dtype, gathered, seed=seed, modes=modes, route=route)
        rows = {row["op"]: row for row in counters.rows()}
        assert rows["all_gather_into_tensor"]["host_waits"] == 0
        assert rows["all_gather_into_tensor"]["calls"] == 9 * ranks
        assert rows["agreement"]["host_waits"] == 7 * ranks and len(rows) == 2


def late(rank: int, ranks: int, seed: int) -> None:
    """Gathers without an agreement before them."""
    model = Model(rank, ranks, seed)
    for numbers in ([2, 3], [2, 3], [3, 4], [1, 2, 4], [0, 1, 2, 3, 4], [0, 1]):
        assert all(model.gather(numbers)())


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full(reason="slower"))])
def test_the_first_gathers_agree(route: CudaBackend, ranks: int) -> None:
    for seed, modes in enumerate(world.ALL_MODES):
        world.run(late, ranks, seed, seed=seed, modes=modes, route=route)
        (row,) = counters.rows()
        assert row["host_waits"] == 2 * ranks, "the first gather, and that of the last parameter of coded frames"
        assert row["calls"] == 6 * ranks and not row["passed"]


def unasked(rank: int, ranks: int) -> tuple[int, int]:
    """Waits and queries of the host while gathers start, and while the stream is told to wait for them."""
    model, seen = Model(rank, ranks, 3), device.mine().counters
    model.agree()
    assert all(model.gather([2, 3])())  # kernels are loaded
    before = len(seen.waits), seen.queries
    sets = [[2, 3, 4], [0, 1, 2], [4], [2, 3, 4]]
    started = [model.start(numbers) for numbers in sets]
    for handle, _ in started:
        handle.wait()
    found = len(seen.waits) - before[0], seen.queries - before[1]
    assert not any(model.wrong(numbers, *one) for numbers, one in zip(sets, started, strict=True))
    return found


def test_the_host_asks_the_device_nothing(route: CudaBackend) -> None:
    for seed, modes in enumerate(world.ALL_MODES):
        assert world.run(unasked, 3, seed=seed, modes=modes, route=route).values == [(0, 0)] * 3


# ---- changes outside of steps ------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """Events of one rank: the parameters of which it got wrong words, and the error that stopped it, "" where none did."""

    wrong: list[str]
    error: str


def edits(rank: int, ranks: int, seed: int) -> Seen:
    """Gathers, steps, changes that all ranks know of, and direct writes, in an order drawn from ``seed``."""
    model, draw = Model(rank, ranks, seed), random.Random(seed)
    model.agree()
    for turn in range(12):
        number, peer = draw.randrange(1, len(SIZES)), draw.randrange(ranks)
        words = draw.choice((weights, weights, noise))(peer, SIZES[number], 100 * seed + turn)
        what = draw.choice(("gather", "gather", "step", "edit", "write"))
        if what == "gather":
            numbers = sorted(draw.sample(range(len(SIZES)), draw.randint(1, len(SIZES))))
            wrong = model.wrong(numbers, *model.start(numbers, draw.random() < 0.5))
            try:
                comm.check_frames(model.device, config=CONFIG)
            except comm.CommError as error:
                return Seen(wrong, str(error))
            assert not wrong, "wrong words, and no error"
        elif what == "step":
            for trained in (1, 2, 3):
                model.write(trained, peer, weights(peer, SIZES[trained], 70 * seed + turn))
                model.agreed[trained].forget()
            model.agree()
        else:
            model.write(number, peer, words)
            if what == "edit":
                model.agreed[number].forget()
    return Seen([], "")


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full(reason="slower"))])
def test_edits_give_the_right_bits_or_stop_all_ranks(route: CudaBackend, ranks: int) -> None:
    stopped = 0
    seeds = 24 if ranks > 2 else 12
    for seed in range(seeds):
        seen = world.run(edits, ranks, seed, seed=seed, modes=world.ALL_MODES[seed % 7], route=route).values
        wrong = {name for one in seen for name in one.wrong}
        for one in seen:
            assert bool(one.error) == bool(wrong)
            assert all(name in one.error for name in wrong) and ("larger than agreed" in one.error or not wrong)
        stopped += bool(wrong)
    assert 0 < stopped < seeds, "or one of both ends was not tried"


def groups(rank: int, ranks: int) -> str:
    """Pairs of ranks have a parameter of their own, such as experts. One shard is written to; the agreement of all ranks follows."""
    pairs = [dist.new_group([first, first + 1]) for first in range(0, ranks, 2)]
    pair, model = pairs[rank // 2], Model(rank, ranks, 2)
    expert, shard = Agreed("expert.weight", 4000), weights(rank, 4000, 9).to(model.device)
    assert model.agree() == len(SIZES)
    assert comm.agree_sizes([(expert, shard)], pair, config=CONFIG) == 1
    if rank == ranks - 1:
        shard.copy_(noise(0, 4000, 9).to(model.device))
    output = torch.empty(8000, dtype=torch.bfloat16, device=model.device)
    comm.all_gather_into_tensor(output, shard, pair, config=CONFIG, role="zero_param", parameters=[expert])
    assert all(model.gather([1, 2, 3])())
    with pytest.raises(comm.CommError) as raised:
        comm.check_frames(model.device, config=CONFIG)
    return str(raised.value)


def test_all_ranks_learn_of_a_failure_in_a_small_group(route: CudaBackend) -> None:
    for text in world.run(groups, 4, route=route).values:
        assert "expert.weight of group rank 1 refused" in text and "layers" not in text


# ---- mistakes ----------------------------------------------------------------------------------------------------------


def planted(rank: int, ranks: int, who: tuple[int, ...]) -> str:
    """All ranks know of a change; those in ``who`` go on with the old sizes."""
    model = Model(rank, ranks, 1)
    model.agree()
    assert all(model.gather([2, 3, 4])())
    for peer in range(ranks):
        model.write(3, peer, noise(peer, SIZES[3], 5))
    if rank not in who:
        model.agreed[3].forget()
    wrong = model.wrong([2, 3, 4], *model.start([2, 3, 4]))
    try:
        comm.check_frames(model.device, config=CONFIG)
    except comm.CommError as error:
        return str(error)
    assert not wrong
    return ""


def test_a_stale_version_is_noticed(route: CudaBackend) -> None:
    for seed in range(4):
        said = world.run(planted, 2, (0, 1), seed=seed, route=route).values
        assert all("layers.3.weight of group rank 0 refused" in text for text in said), said
        assert all("layers.3.weight of group rank 1 refused" in text for text in said), said
        with pytest.raises(Fault, match="would hang"):
            world.run(planted, 2, (1,), seed=seed, route=route)


def test_a_stale_layout_is_noticed(route: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agreements that get one version all, so that a gather finds the layout of another version."""
    monkeypatch.setattr(agreements, "_versions", itertools.repeat(1))
    monkeypatch.setattr(agreements, "_plans", {})
    said = world.run(planted, 2, (), route=route).values
    assert all("layers.3.weight" in text and "larger than agreed" in text for text in said), said


def unequal(rank: int, ranks: int) -> None:
    """The shard of one rank has far smaller frames than those of the others."""
    model = Model(rank, ranks, 1)
    model.write(4, 1, torch.zeros(SIZES[4], dtype=torch.bfloat16))
    model.agree()
    assert all(model.gather([3, 4])())


def test_sizes_of_one_rank_are_noticed(route: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that do not agree: each takes its own sizes."""
    world.run(unequal, 2, route=route)
    maximum = NcclTransport.max
    monkeypatch.setattr(NcclTransport, "max", lambda self, words: maximum(self, words.clone()))
    with pytest.raises(Fault, match="would hang"):
        world.run(unequal, 2, route=route)
