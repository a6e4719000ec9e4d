"""Data movement of NCCL groups on the simulated GPU: the package's own calls, unchanged; mostly all-to-alls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import corpus
import levels
import moves
import pytest
import torch
import torch.distributed as dist
from sim import communicator
from sim.device import mine
from tiers import mostly_full

from ds_zipccl.comm import execution
from ds_zipccl.comm.device import exchange as on_device
from ds_zipccl.comm.device import sizes as agreement
from ds_zipccl.comm.device.streams import Stage
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.comm.transport.nccl import NcclTransport
from ds_zipccl.comm.work import CommError
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.policy import wire
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.policy.cost_model import DeviceProfile, exchange_gains
from ds_zipccl.telemetry import counters
from on_sim import plants, world
from on_sim.cases import CODED, bytes_sent, noise, once, weights

PAIRS = ((0, 1), (2, 3))


def in_steps(rank: int, ranks: int) -> tuple[int, int]:
    """A skewed exchange and an even one that need several steps. Returns the numbers of their all-to-alls."""
    device = torch.device("cuda", rank)
    api = moves.coded(**CODED, staging_mib=1)
    cuts = [[5, 150_000, 3], [0, 70_000, 40_000], [90_000, 0, 0]][rank]
    incoming = [[5, 0, 90_000], [150_000, 70_000, 0], [3, 40_000, 0]][rank]
    words = [torch.randn(150_000, generator=torch.Generator().manual_seed(one)).bfloat16() for one in range(9)]
    source = torch.cat([words[3 * rank + peer][:cut] for peer, cut in enumerate(cuts)]).to(device)
    target = torch.empty(sum(incoming), dtype=source.dtype, device=device)
    api.all_to_all_single(target, source, incoming, cuts)
    wanted = torch.cat([words[3 * peer + rank][:cut] for peer, cut in enumerate(incoming)])
    corpus.assert_same_bits(target.cpu(), wanted)
    before = mine().counters.collectives["all_to_all"]
    source = torch.cat([words[3 * rank + peer][:60_000] for peer in range(3)]).to(device)
    api.all_to_all_single(source, source)
    corpus.assert_same_bits(source.cpu(), torch.cat([words[3 * peer + rank][:60_000] for peer in range(3)]))
    return before, mine().counters.collectives["all_to_all"] - before


def test_steps(route: CudaBackend) -> None:
    """The even one has a frame of each pair in a step. The skewed one has few busy pairs: four frames of a pair go together."""
    even = -(-60_000 // wire.even_piece(60_000, 2, 3, 1 << 20))
    assert even == 4 and -(-150_000 // wire.uneven_piece(2, 3, 1 << 20)) == 10
    assert world.run(in_steps, 3, seed=1, route=route).values == [(1 + 3, even)] * 3


def counted(rank: int, ranks: int, nodes: Any, uneven: bool) -> tuple[int, float, float]:
    """Returns the bytes of words for other nodes, and the bytes sent to other nodes and to other ranks of this one."""
    levels.pretend(nodes)
    cuts = [8192 * (1 + uneven * peer) for peer in range(ranks)]
    source = weights(rank, sum(cuts)).to(f"cuda:{rank}")
    target = torch.empty(ranks * cuts[rank], dtype=source.dtype, device=source.device)
    splits = ([cuts[rank]] * ranks, cuts) if uneven else ()
    moves.coded(**CODED).all_to_all_single(target, source, *splits)
    wanted = torch.cat([weights(peer, sum(cuts)).split(cuts)[rank] for peer in range(ranks)])
    corpus.assert_same_bits(target.cpu(), wanted)
    own = next(node for node in nodes if rank in node)
    words = 2 * sum(cut for peer, cut in enumerate(cuts) if peer not in own)
    return words, bytes_sent(nodes), bytes_sent(nodes, between=False)


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("nodes", [PAIRS, ((0,), (1,), (2,), (3,))])
def test_bytes_between_nodes(route: CudaBackend, nodes: Any, uneven: bool) -> None:
    ran = world.run(counted, 4, nodes, uneven, route=route).values
    words, between, inside = (sum(numbers) for numbers in zip(*ran, strict=True))
    assert words / 2 < between < words / 1.4
    raw = sum(wire.slot_bytes(16384 * (1 + uneven * peer) + 32) for peer in range(4))
    assert inside == (raw if nodes == PAIRS else 0)


def lone(
    rank: int, ranks: int, calls: Sequence[tuple[int, bool]], draw: Callable[[int, int], torch.Tensor], slow: bool
) -> list[bool]:
    """Exchanges of so many drawn elements, evenly or not, in mode auto. Returns which were coded."""
    if slow:
        state = group_state(None)
        assert state is not None
        state.device_profiles["cuda", "nccl"] = DeviceProfile(1e6)
    device = torch.device("cuda", rank)
    coded = []
    for number, (numel, even) in enumerate(calls):
        source = draw(rank + number, ranks * numel).to(device)
        target = torch.empty_like(source)
        before = mine().counters.launches.total()
        splits = None if even else [numel] * ranks
        moves.coded(**CODED, mode="auto").all_to_all_single(target, source, splits, splits)
        coded.append(mine().counters.launches.total() > before)
        corpus.assert_same_bits(target.view(ranks, -1)[rank].cpu(), source.view(ranks, -1)[rank].cpu())
    return coded


@pytest.mark.parametrize("asked", [1, 2])
def test_auto(route: CudaBackend, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Coded where three agreements are saved; otherwise one call in 32 of those of which ranks know nothing ahead. Rank 0 may ask twice."""
    decide = execution.decide

    def often(request: Any) -> Any:
        if asked == 2 and not dist.get_rank():
            decide(request)
        return decide(request)

    monkeypatch.setattr(execution, "decide", often)
    even, uneven = [(2048, True)] * 2, [(2048, False)] * 34
    plain = world.run(lone, 2, [*even, *uneven], weights, False, route=route)
    assert plain.values == [[False] * 2 + [True] + [False] * 31 + [True, False]] * 2
    (row,) = counters.rows()
    assert row["reasons"] == {PassReason.SMALL_GAIN.value: 2 * (2 + 32)}
    slow = world.run(lone, 2, [*even, *uneven[:2]], weights, True, route=route)
    assert slow.values == [[True] * 4] * 2
    raw = world.run(lone, 2, [*even, *uneven[:3]], noise, True, route=route)
    assert raw.values == [[True, False, True, False, False]] * 2


def test_rules() -> None:
    link = DeviceProfile(6e9)
    paying = [size for size in range(12, 34) if exchange_gains(1 << size, (1 << size) / 1.5, 1, link)]
    assert paying == [*range(23, 34)]  # from 8 MiB on: a third saved at 6 GB/s, 0.47 ms
    assert not exchange_gains(1 << 33, 1 << 33, 1, link) and not exchange_gains(1 << 33, 1 << 33, 1, None)
    assert exchange_gains(4 << 20, (8 << 20) / 3, 8, link) and not exchange_gains(
        4 << 20, (8 << 20) / 3, 1, link
    )  # shared cards
    assert exchange_gains(16 << 20, 10 << 20, 1, None) and not exchange_gains(8 << 20, 5 << 20, 1, None)
    assert [wire.between_nodes(nodes, 4) for nodes in ((), PAIRS, ((0, 1, 2, 3),), ((0,), (1, 2, 3)))] == [
        0.75, 0.5, 0.0, 0.75,
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_steps_fit_the_budget(ranks: int) -> None:
    """For segments of more than 4 GiB too."""
    budget = 64 << 20
    for numel in (1, 20_000, 10**7, 3 << 30):
        for itemsize in (2, 4):
            piece = wire.even_piece(numel, itemsize, ranks, budget)
            assert min(piece, numel) * 2 * ranks * itemsize <= budget // 3 and not piece % wire.FRAGMENT_UNIT
            piece = wire.uneven_piece(itemsize, ranks, budget)
            numels = [numel * peer // ranks for peer in range(2 * (ranks - 1))]
            sizes = wire.step_bytes(numels, itemsize, piece)
            together = wire.pieces_of_step(sizes, budget)
            moved = [
                itemsize * sum(min(max(0, one - first * piece), together * piece) for one in numels)
                for first in range(0, 3 * together, together)
            ]
            assert max(moved) == moved[0] <= budget // 3


def test_slots_of_a_segment_of_more_than_4_gib() -> None:
    words = torch.empty((2 << 30) + 5, dtype=torch.bfloat16, device="meta")
    piece = wire.uneven_piece(2, 2, 64 << 20)
    segment = on_device._Segment(words, piece, 3_500_000)
    pieces = -(-words.numel() // piece)
    slots = segment.slots(0, pieces)
    assert len(slots) == pieces and sum(slot.words.numel() for slot in slots) == words.numel()
    assert slots[-1].words.storage_offset() == (pieces - 1) * piece > 1 << 30
    assert [slot.raw for slot in slots] == [False] * (pieces - 1) + [words.numel() % piece * 2 < 3_600_000]
    (alone,) = segment.slots(7, 8)
    assert alone.words.storage_offset() == 7 * piece and not segment.slots(pieces, pieces + 3)


# --- numbers that arrive wrong


def damaged(rank: int, ranks: int) -> str:
    """Returns the error of this rank."""
    sizes = [3000, 5000]
    source = weights(rank, 2 * sizes[rank]).to(f"cuda:{rank}")
    target = torch.empty(sum(sizes), dtype=source.dtype, device=source.device)
    before = mine().allocator.live
    try:
        moves.coded(**CODED).all_to_all_single(target, source, sizes, [sizes[rank]] * 2)
    except CommError as error:
        assert mine().allocator.live - before < 1 << 16  # no staging buffer was made
        return str(error)
    return ""


#: Column of the words that rank 0 gets of rank 1, and what is there in place of the right number.
WRONG = {
    "elements": (3, 5001), "frame too small": (1, 31), "frame too large": (1, 1 << 40), "frame negative": (1, -1),
    "sum": (2, -1), "piece": (4, 99), "pieces": (5, 1 << 40), "pieces negative": (5, -1), "bytes": (6, -1),
    "bytes of a step": (7, -5),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_numbers_are_refused(route: CudaBackend, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    column, value = WRONG[name]
    original = communicator._exchange

    def wrong(gpu: Any, calls: Any) -> None:
        original(gpu, calls)
        if calls[0].kind == "all_to_all" and calls[0].inputs[0].dtype == torch.int64:
            calls[0].arrived[1].view(-1)[column] = value

    monkeypatch.setattr(communicator, "_exchange", wrong)
    first, second = world.run(damaged, 2, modes=world.Modes(patient=True), route=route).values
    assert "global rank 1" in first and str(value) in first if column in (1, 3, 4, 5) else first
    assert not second  # goes on, and meets nobody: its streams wait, its host does not


# --- frames that travel while the host waits


#: Part of rank 1's words that does not shrink, by call. The sixth call finds slots that are too small, the last one too.
PARTS = (0, 0, 0, 0, 0, 0.2, 0, 0, 0, 0, 1)
SENT_AHEAD = (4, 5, 10)


def forecast(rank: int, ranks: int, numel: int, nodes: Any = ()) -> list[tuple[int, ...]]:
    """Calls of a site, whose inputs are made late and whose outputs are used at once; every other one behind a gather that overtakes it.
    Returns the exchanges of each, and those that it had issued at each wait of the host."""
    if nodes:
        levels.pretend(nodes)
    api = moves.coded(**CODED, staging_mib=1)
    issued, found = mine().counters.collectives, []
    for call, part in enumerate(PARTS):
        inputs = []
        for peer in range(ranks):
            words = weights(peer + 5 * call, ranks * numel).view(ranks, numel)
            end = int(numel * part) if peer == 1 else 0
            words[:, :end] = noise(call, ranks * end).view(ranks, end)
            inputs.append(words)
        ISSUED[rank].clear()
        before = issued["all_to_all"]
        source = inputs[rank].view(-1).to(f"cuda:{rank}") * 1
        target = torch.empty_like(source)
        handle = api.all_to_all_single(target, source, None, None, None, call % 2 == 1)
        found.append((issued["all_to_all"] - before, *(number - before for number in ISSUED[rank])))
        if handle is not None:
            once("gather", rank, ranks)
            handle.wait()
        corpus.assert_same_bits(target.cpu(), torch.cat([words[rank] for words in inputs]))
    return found


#: Rank -> the exchanges that it has issued at each wait for an agreement.
ISSUED: dict[int, list[int]] = {}


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    ISSUED.update({rank: [] for rank in range(8)})
    ended = agreement.ended

    def wait(event: Any, seconds: float) -> bool:
        ISSUED[mine().rank].append(mine().counters.collectives["all_to_all"])
        return ended(event, seconds)

    monkeypatch.setattr(agreement, "ended", wait)


#: Ranks, elements of a segment, and nodes -> the exchanges of a call: one for each step.
FORECAST = {"one step": (2, 9001, (), 1), "steps": (3, 60_000, (), 4), "nodes": (4, 9001, ((0,), (1, 2, 3)), 1)}


@pytest.mark.parametrize("name", mostly_full(FORECAST, ["one step", "nodes"], "seven seconds"))
def test_frames_travel_while_the_host_waits(route: CudaBackend, name: str) -> None:
    """From the fifth call on. All ranks send again what is too large for the slots of one; the host waits once in each call."""
    ranks, numel, nodes, steps = FORECAST[name]
    for seed in range(2):
        ran = world.run(forecast, ranks, numel, nodes, seed=seed, modes=world.ALL_MODES[-seed], route=route).values
        for call, part in enumerate(PARTS):
            again = 0 if not part else steps if part < 1 else 1  # words that do not shrink go plain
            wanted = (steps + again, steps) if call in SENT_AHEAD else (steps, 0)
            assert [found[call] for found in ran] == [wanted] * ranks, call


def refused(rank: int, ranks: int) -> list[str]:
    """Calls of a site, of which the fifth is sent ahead. Returns the errors."""
    source, errors = weights(rank, 2 * 9001).to(f"cuda:{rank}"), []
    for _ in range(6):
        try:
            moves.coded(**CODED).all_to_all_single(torch.empty_like(source), source)
        except CommError as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize("call", [3, 4])
def test_a_damaged_frame_is_refused(route: CudaBackend, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """By all ranks in the next call, whose words are on their way: a byte for rank 1 changes in the call before it, or in it."""
    original, carried = communicator._exchange, []

    def flip(gpu: Any, calls: Any) -> None:
        original(gpu, calls)
        if calls[0].kind == "all_to_all":
            carried.append(call)
            if len(carried) == call + 1:
                arrived = calls[1].arrived
                arrived[0] = arrived[0].clone()
                arrived[0].view(-1)[0] ^= 8

    monkeypatch.setattr(communicator, "_exchange", flip)
    found = world.run(refused, 2, route=route).values
    assert [len(errors) for errors in found] == [6 - call - 1] * 2 and len(carried) == 6
    assert all("stop the job on all ranks" in error and "MAGIC" in error for errors in found for error in errors), found


def test_too_large_for_the_budget(route: CudaBackend) -> None:
    """All steps of a call are in the staging buffers at a time, or none is sent ahead."""
    ran = world.run(forecast, 2, 140_000, route=route).values
    assert {issued for found in ran for _, issued in found} == {0}


def test_forecast() -> None:
    """Two layers whose empty rows change from step to step. All but the dispatch have them; the experts' biases fill those of a combine."""
    for biased in (False, True):
        forecasts, hits = wire.Forecast(), {kind: 0 for kind in ("dispatch", "combine", "combine.bwd", "dispatch.bwd")}
        for step in range(20):
            empty = [0.1 + 0.37 * (7 * step % 5) / 5, 0.3 + 0.5 * (3 * step % 7) / 7]
            forward = [(kind, part) for part in empty for kind in ("dispatch", "combine")]
            backward = [(kind, part) for part in reversed(empty) for kind in ("combine.bwd", "dispatch.bwd")]
            for kind, part in forward + backward:
                frame = int(
                    650_000 * (1 if biased and kind == "combine" else 1 - part) * (1 + 0.01 * kind.endswith("bwd"))
                )
                slot = forecasts.slot(kind, 1_000_000)
                assert not slot or frame <= slot < 1.04 * frame
                hits[kind] += slot > 0
                forecasts.note(kind, kind, 1_000_000, frame)
        assert hits["dispatch"] == 0 and min(hits[kind] for kind in hits if kind != "dispatch") >= 36


# --- planted mistakes


def early(patch: pytest.MonkeyPatch) -> None:
    """Decoders do not wait for the wire."""
    send = on_device._Step.send

    def forgetful(self: Any) -> None:
        send(self)
        self._arrived = None

    patch.setattr(on_device._Step, "send", forgetful)


def own_sizes(patch: pytest.MonkeyPatch) -> None:
    """A rank reads the sizes of its own frames, not those of all ranks."""
    most = NcclTransport.max

    def apart(self: Any, words: torch.Tensor) -> None:
        kept = words.clone()
        most(self, words)
        words.copy_(kept)

    patch.setattr(NcclTransport, "max", apart)


def never_again(patch: pytest.MonkeyPatch) -> None:
    """Frames that are too large for their slots are decoded."""

    def fits(*given: Any) -> Callable[[], list[int]]:
        end = agreement.agreement(*given)
        return lambda: [min(9, one) for one in end()]

    patch.setattr(on_device, "agreement", fits)


def of_one_rank(patch: pytest.MonkeyPatch) -> None:
    """Rank 0 forecasts nothing."""
    slot = wire.Forecast.slot
    patch.setattr(wire.Forecast, "slot", lambda *given: slot(*given) if mine().rank else 0)


#: Mistakes that ``forecast`` notices.
AHEAD: dict[str, tuple[plants.Plant, str]] = {
    "encode -> wire": (plants.without_order(Stage.ENCODE, Stage.WIRE), "one step"),
    "wire -> decode": (early, "one step"),
    "wire -> encode": (plants.without_order(Stage.WIRE, Stage.ENCODE), "steps"),
    "agreement": (plants.unread_agreement, "one step"),
    "sizes": (own_sizes, "one step"),
    "never again": (never_again, "one step"),
    "slots": (of_one_rank, "one step"),
}
#: The program that notices is ``thrice`` on two ranks, for a staging buffer ``in_steps`` on three.
MISTAKES: dict[str, plants.Plant] = {
    "staging": plants.staging_early,
    "encode -> wire": plants.without_order(Stage.ENCODE, Stage.WIRE),
    "wire -> decode": early,
    "decode -> encode": plants.without_order(Stage.DECODE, Stage.ENCODE),
    "caller": plants.no_begin,
    "agreement": plants.unread_agreement,
    "in place": lambda patch: patch.setattr(on_device, "apart", lambda ctx, sources, targets: sources),
    "plain on one rank": lambda patch: patch.setattr(wire, "shrinks", lambda *sizes: mine().rank == 0),
}


def thrice(rank: int, ranks: int) -> None:
    """Exchanges whose inputs are made on a slow caller's stream, in place, uneven; outputs are used at once."""
    device = torch.device("cuda", rank)
    api = moves.coded(**CODED)
    for number in range(3):
        source = weights(rank + number, 40_000 if number == 2 else 6000).to(device) * 2
        if number == 1:
            sizes = [[1000, 5000], [5000, 1000]][rank]
            buffer = torch.cat([source, source])
            source, target = buffer[:6000], buffer[500:6500]
            api.all_to_all_single(target, source, sizes, sizes)
            wanted = [weights(peer + 1, 6000).mul(2).split([[1000, 5000], [5000, 1000]][peer])[rank] for peer in (0, 1)]
        else:
            target = source
            api.all_to_all_single(source, source)
            wanted = [weights(peer + number, len(source)).mul(2).chunk(2)[rank] for peer in (0, 1)]
        corpus.assert_same_bits(target.cpu(), torch.cat(wanted))


@pytest.mark.parametrize("name", MISTAKES)
def test_planted_mistakes(route: CudaBackend, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    MISTAKES[name](monkeypatch)
    plants.fails(*((in_steps, 3) if name == "staging" else (thrice, 2)), route=route)


@pytest.mark.parametrize("name", AHEAD)
def test_planted_mistakes_ahead(route: CudaBackend, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Planted in what is sent ahead alone."""
    plant, case = AHEAD[name]
    ahead, now = on_device._send_ahead, set()

    def noted(*given: Any) -> list[int]:
        now.add(mine().rank)
        try:
            return ahead(*given)
        finally:
            now.discard(mine().rank)

    monkeypatch.setattr(on_device, "_send_ahead", noted)
    plants.only(lambda: plant is of_one_rank or mine().rank in now, plant)(monkeypatch)
    with contextlib.suppress(CommError):  # refused frames are noticed too
        plants.fails(forecast, *FORECAST[case][:3], route=route)


def test_without_mistakes(route: CudaBackend) -> None:
    """Also on a machine that watches what kernels write. test_moves.py has every way to call, test_device_suite.py every operation."""
    for seed, modes in enumerate((world.Modes(), world.ALL_MODES[-1], world.Modes(declared=True))):
        world.run(thrice, 2, seed=seed, modes=modes, route=route)
        assert all(row["calls"] and not row["passed"] for row in counters.rows())
