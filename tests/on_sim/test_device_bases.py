"""Bases of ZeRO-3's parameters on the simulated GPU: right bits, no wait of the host in a gather, nothing sent twice in a version."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import levels
import pytest
import torch
import torch.distributed as dist
from sim.device import mine
from sim.scheduler import Fault

from ds_zipccl import comm
from ds_zipccl.comm import topology
from ds_zipccl.comm.bases.state import Source
from ds_zipccl.comm.device import gather
from ds_zipccl.comm.device.bases import agreed, proof
from ds_zipccl.comm.device.streams import Streams
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.telemetry import counters
from on_sim import world
from on_sim.cases import bytes_sent, noise, weights
from on_sim.test_device_agreed import CONFIG, SIZES, Model, in_pieces, train

FULL, OTHER = "nothing was gathered there", "a rank holds something else"


class Based(Model):
    """Parameters with a base each, stepped as an optimizer steps them."""

    def __init__(
        self, rank: int, ranks: int, seed: int, dtype: torch.dtype = torch.bfloat16, kind: str = "device"
    ) -> None:
        super().__init__(rank, ranks, seed, dtype)
        shards = [(size, dtype) for size in SIZES]
        if kind == "node":
            nodes = [list(range(node, ranks, 2)) for node in range(2)]
            levels.pretend(nodes if seed % 2 else levels.nodes_of(2, ranks // 2))
        self.slots = comm.allocate_bases(shards, kind, dist.group.WORLD, self.device)
        for one, slot in zip(self.agreed, self.slots, strict=True):
            one.hold(slot)
        self.agree()

    def stepped(self, number: int, peer: int, seed: int) -> torch.Tensor:
        """The old words, changed a little."""
        old = self.hosts[number][peer]
        return (old.float() + 1e-4 * weights(peer, SIZES[number], seed).float()).to(old.dtype)


def gathers() -> dict[str, Any]:
    """Return the counts of the gathers of all ranks of the simulation."""
    return next(dict(row) for row in counters.rows() if row["op"] == "all_gather_into_tensor")


def steps(rank: int, ranks: int, seed: int, dtype: torch.dtype, kind: str) -> None:
    train(Based(rank, ranks, seed, dtype, kind), seed, 4)


ranks_and_pieces = pytest.mark.parametrize(
    ("ranks", "pieces"),
    [(2, False), *(pytest.param(*one, marks=pytest.mark.full) for one in ((2, True), (3, False), (4, False)))],
)


@pytest.mark.full(reason="twelve seconds; engines on streams stay")
@pytest.mark.parametrize("ranks", [4, 6])
@pytest.mark.parametrize("pieces", [False, True])
def test_a_node_keeps_a_copy_on_its_devices(
    route: CudaBackend, monkeypatch: pytest.MonkeyPatch, ranks: int, pieces: bool
) -> None:
    """Right bits; nothing but agreements between nodes in a gather that copies."""
    test_steps(route, monkeypatch, ranks, pieces, "node")


def test_ranks_of_nodes_as_a_grid() -> None:
    for nodes in ([[0, 1, 2], [3, 4, 5]], [[0, 2, 4], [1, 3, 5]]):
        assert topology.is_grid(nodes) and topology.grid(torch.arange(6), nodes).squeeze(2).tolist() == nodes
    assert not topology.is_grid([[0, 1, 4], [2, 3, 5]])


@pytest.mark.parametrize("kind", ["device", "host"])
@ranks_and_pieces
def test_steps(route: CudaBackend, monkeypatch: pytest.MonkeyPatch, ranks: int, pieces: bool, kind: str) -> None:
    if pieces:
        in_pieces(monkeypatch)
    modes = list(enumerate(world.ALL_MODES))
    for seed, mode in {2: modes[-1:], 3: modes[:4], 4: modes[4:], 6: modes[:2]}[ranks]:
        dtype = (torch.bfloat16, torch.float32, torch.float16)[seed % 3]
        world.run(steps, ranks, seed, dtype, kind, seed=seed, modes=mode, route=route)
        row = gathers()
        assert row["host_waits"] == 0 and row["calls"] == 12 * ranks
        assert row["differences"][FULL] <= (len(SIZES) - 1) * ranks < row["differences"][""], "in full once a parameter"


@pytest.mark.parametrize(
    "nodes", [[[0, 1], [2]], pytest.param([[0], [1]], marks=pytest.mark.full(reason="alone"))], ids=str
)
def test_host_memory_of_nodes(route: CudaBackend, monkeypatch: pytest.MonkeyPatch, nodes: list[list[int]]) -> None:
    """A rank that is alone on its node shares no memory, and takes part in the collectives of ranks that do."""
    monkeypatch.setattr(topology, "by_node", lambda *call: nodes)
    for seed in range(3):
        world.run(steps, sum(map(len, nodes)), seed, torch.bfloat16, "host", seed=seed, route=route)


def twice(rank: int, ranks: int, seed: int, kind: str = "host") -> None:
    """The same parameters twice in a version, from two streams that nothing orders."""
    model = Based(rank, ranks, seed, torch.bfloat16, kind)
    before = len(mine().counters.waits)
    first, second = (model.gather([1, 2, 3, 4], True) for _ in range(2))
    assert len(mine().counters.waits) == before, "copies from host memory are not waited for"
    assert all(second()) and all(first())


def test_a_base_is_written_before_it_is_read(route: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        world.run(twice, 4, seed, "node", seed=seed, route=route)
    monkeypatch.setattr(topology, "by_node", lambda *call: [[0], [1]])
    for seed in range(3):
        world.run(twice, 2, seed, seed=seed, route=route)


def copies_of(model: Based, numbers: list[int]) -> int:
    """The copies that a gather launches on this rank, strided ones too."""
    count = mine().counters
    before = count.copies + count.launches["copy_"]
    assert all(model.gather(numbers)())
    return count.copies + count.launches["copy_"] - before


def between_nodes(rank: int, ranks: int) -> None:
    """A gather that copies sends hashes between nodes, once a size class; no more copies are launched where nodes have more ranks."""
    model, nodes = Based(rank, ranks, 2, kind="node"), levels.nodes_of(2, ranks // 2)
    for numbers in ([1, 2, 3, 4], [2], [2, 3], [4]):
        if numbers == [1, 2, 3, 4]:
            for number in numbers:
                assert all(model.gather([number])())
        for turn in range(2):
            before = bytes_sent(nodes)
            assert copies_of(model, numbers) <= 2 * len(numbers) + 2
            assert turn == 0 or bytes_sent(nodes) == before
    model.step(1)  # a trained parameter is a difference, the frozen one of the same gather a copy
    assert copies_of(model, [2, 3, 4]) <= 5 * 3 + 1


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.full(reason="nodes of four"))])
def test_a_copy_of_a_node_sends_nothing_to_other_nodes(route: CudaBackend, ranks: int) -> None:
    for seed in range(12 // ranks):
        world.run(between_nodes, ranks, seed=seed, route=route)


def never_stepping(rank: int, ranks: int) -> str:
    model = Based(rank, ranks, 1)
    assert all(model.gather([1, 2, 3, 4])())
    model.write(2, rank, weights(rank, SIZES[2], 50))
    with pytest.raises(comm.CommError) as raised:
        for _ in range(5):
            model.gather([1, 2, 3, 4])()
    return str(raised.value)


def test_a_program_without_steps_looks_too(route: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreed, "COPIES_UNCHECKED", 3)
    for said in world.run(never_stepping, 2, route=route).values:
        assert "gathered before, and changed since" in said


def broken(rank: int, ranks: int, edit: Callable[[Based], None], kind: str = "device") -> None:
    """A base that changes between two steps on one rank alone."""
    model = Based(rank, ranks, 3, kind=kind)
    for turn in range(3):
        assert all(model.gather([1, 2, 3, 4])())
        if turn == 0 and rank == 1:
            edit(model)
        model.step(turn)
    assert all(model.gather([1, 2, 3, 4])())


def _bit(model: Based) -> None:
    model.slots[2].memory[0, 5:6].view(torch.int16).bitwise_xor_(1)


def _forgotten(model: Based) -> None:
    model.slots[2].filled = False


def _another_version(model: Based) -> None:
    model.slots[2].version += 1


@pytest.mark.parametrize(("ranks", "kind"), [(2, "device"), (4, "node")])
@pytest.mark.parametrize("edit", [_bit, _forgotten, _another_version], ids=lambda one: one.__name__)
def test_a_base_that_differs(route: CudaBackend, edit: Callable[[Based], None], ranks: int, kind: str) -> None:
    """One bit, or what one rank alone knows of its base: that parameter goes in full on all ranks, once."""
    world.run(broken, ranks, edit, kind, route=route)
    said = dict(gathers()["differences"])
    if edit is _forgotten:  # on one rank it is the first gather into the base
        said[OTHER], said[FULL] = said[OTHER] + 1, said[FULL] - 1
    assert said == {FULL: ranks * 4, OTHER: ranks, "": ranks * (4 * 4 - 5)}


def changed(rank: int, ranks: int, later: bool) -> None:
    """A write to a shard behind our back, within a version."""
    model = Based(rank, ranks, 3)
    assert all(model.gather([1, 2, 3])())
    if rank == 0:
        model.shards[2][7:8] += 1
    model.gather([1, 2, 3])()
    with pytest.raises(comm.CommError, match=r"layers\.2\.weight: gathered before, and changed since"):
        model.step(1) if later else comm.check_frames(model.device, config=CONFIG)


def refused(rank: int, ranks: int) -> None:
    """Words that do not fit the slot of their difference. A later gather of the same parameters finds the shard as it was, and must not
    hide that."""
    model = Based(rank, ranks, 3)
    assert all(model.gather([1, 2])())
    model.step(1)
    model.shards[2].copy_(noise(rank, SIZES[2], 3).to(model.device))
    for _ in range(2):
        model.gather([1, 2])()
    with pytest.raises(comm.CommError, match=r"layers\.2\.weight of group rank . refused: .*larger than agreed"):
        comm.check_frames(model.device, config=CONFIG)


def gone(rank: int, ranks: int) -> None:
    """Bases go with their engine; its parameters may be gathered still."""
    model = Based(rank, ranks, 3)
    assert all(model.gather([1, 2, 3, 4])())
    for slot in model.slots:
        slot.free()
    assert all(model.gather([1, 2, 3, 4])())
    model.step(1)
    assert all(model.gather([1, 2, 3, 4])())


@pytest.mark.parametrize(("program", "arguments"), [(changed, (False,)), (changed, (True,)), (refused, ()), (gone, ())])
def test_changes(route: CudaBackend, program: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Those within a version stop the job; others cost bytes alone."""
    world.run(program, 2, *arguments, route=route)


# ---- planted mistakes --------------------------------------------------------------------------------------------------


def _no_proof(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(proof, "holds", lambda words: True)


def _nothing_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(proof, "keep", lambda based, ctx: None)


def _stale_version(patch: pytest.MonkeyPatch) -> None:
    """The base counts as the words of every version."""
    begin = agreed.Agreed._agreed

    def stale(self: agreed.Agreed, *sizes: Any) -> None:
        begin(self, *sizes)
        slot = self.slot()
        self.source = Source.COPY if slot is not None and slot.filled else Source.FULL

    patch.setattr(agreed.Agreed, "_agreed", stale)


def _nobody_looks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(proof, "watch", lambda *args: None)


def _early_read(patch: pytest.MonkeyPatch) -> None:
    """Nothing orders the stream that reads a base after the stream that has written it. Ranks are threads, each of which leaves out its
    own."""
    keep, order, rank = proof.keep, Streams.order, threading.local()

    def unordered(*call: Any) -> None:
        rank.keeps = True
        keep(*call)
        rank.keeps = False

    patch.setattr(proof, "keep", unordered)
    patch.setattr(Streams, "order", lambda *streams: None if getattr(rank, "keeps", False) else order(*streams))


@pytest.mark.full
@pytest.mark.parametrize(
    "mistake", [_no_proof, _nothing_kept, _stale_version, _nobody_looks, _early_read], ids=lambda one: one.__name__
)
def test_a_mistake_is_noticed(route: CudaBackend, monkeypatch: pytest.MonkeyPatch, mistake: Callable[..., Any]) -> None:
    mistake(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception, comm.CommError)):
        test_a_base_that_differs(route, _bit, 2, "device")
        test_changes(route, changed, (False,))
        test_a_base_is_written_before_it_is_read(route, monkeypatch)
        test_steps(route, monkeypatch, 2, False, "device")


def _unordered_writes(patch: pytest.MonkeyPatch) -> None:
    """Nothing tells a rank that the peers on its node have written."""
    keep = proof.keep

    def hasty(based: Any, ctx: Any) -> None:
        transport, ctx.transport = ctx.transport, SimpleNamespace(max=lambda words: None)
        keep(based, ctx)
        ctx.transport = transport

    patch.setattr(proof, "keep", hasty)


def _late_read(patch: pytest.MonkeyPatch) -> None:
    """Shared memory is read by a stream that the gather's collective does not follow."""
    patch.setattr(proof, "stage_of", lambda base, ctx: proof.Stage.DECODE)


@pytest.mark.full
@pytest.mark.parametrize("mistake", [_unordered_writes, _late_read], ids=lambda one: one.__name__)
def test_a_mistake_with_shared_memory_is_noticed(
    route: CudaBackend, monkeypatch: pytest.MonkeyPatch, mistake: Callable[..., Any]
) -> None:
    """No detector sees memory of two ranks: some order of their work gives wrong words."""
    mistake(monkeypatch)
    with pytest.raises((AssertionError, comm.CommError)):
        for seed in range(20):
            world.run(steps, 2, seed, torch.bfloat16, "host", seed=seed, route=route)


def _another_row(patch: pytest.MonkeyPatch) -> None:
    """A rank gets the row of another one."""
    forward = gather.forward

    def crossed(ctx: Any, rows: torch.Tensor, *of: Any) -> None:
        forward(ctx, rows, *of)
        if ctx.rank == 0:
            rows[1].copy_(rows[3])

    patch.setattr(gather, "forward", crossed)


def _hasty_exchange(patch: pytest.MonkeyPatch) -> None:
    """An exchange does not wait for the copy into the base, or out of it."""
    patch.setattr(Streams, "wire", lambda streams: streams.on(proof.Stage.WIRE))


def _hasty_call(patch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the caller, who has put its shard into the output."""
    patch.setattr(Streams, "begin", lambda streams: None)


@pytest.mark.full
@pytest.mark.parametrize(
    "mistake", [_no_proof, _early_read, _another_row, _hasty_exchange, _hasty_call], ids=lambda one: one.__name__
)
def test_a_mistake_with_a_node_is_noticed(
    route: CudaBackend, monkeypatch: pytest.MonkeyPatch, mistake: Callable[..., Any]
) -> None:
    """Before the optimizer step, by the simulator, wrong words or the comparison of the first copies."""
    mistake(monkeypatch)
    with pytest.raises((AssertionError, Fault, pytest.fail.Exception, comm.CommError)):
        world.run(between_nodes, 4, route=route)
        test_a_base_that_differs(route, _bit, 4, "node")
        for seed in range(3):
            world.run(twice, 4, seed, "node", seed=seed, route=route)


def looked_at(rank: int, ranks: int) -> str:
    """Copies whose words nobody compares with the right ones: a collective says so before the step."""
    model = Based(rank, ranks, 1, kind="node")
    for _ in range(2):
        model.start([1, 2, 3, 4], later=False)
    with pytest.raises(comm.CommError) as raised:
        comm.check_frames(model.device, config=CONFIG)
    return str(raised.value)


def test_the_first_copies_are_compared(route: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    _another_row(monkeypatch)
    for said in world.run(looked_at, 4, route=route).values:
        assert "layers.2.weight: its copy on the devices of a node is wrong" in said
