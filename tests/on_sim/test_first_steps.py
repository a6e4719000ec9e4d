"""NCCL auto on the simulated GPU: plain results in the first steps, coded copies beside them, and a switch of all ranks, or none."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import corpus
import levels
import pytest
import torch
import torch.distributed as dist
from pytest import MonkeyPatch
from sim.device import mine

from ds_zipccl import comm
from ds_zipccl.comm import shadow_check
from ds_zipccl.comm.device import choice, first_steps
from ds_zipccl.comm.device import sums as device_sums
from ds_zipccl.comm.device.streams import Stage, Streams
from ds_zipccl.comm.group_state import of_all_groups
from ds_zipccl.comm.work import CommError
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.policy import cost_model, wire
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.telemetry import counters
from on_sim import cases, plants, world
from on_sim.cases import CASES, HARD, weights

NUMEL = 24 << 10
AUTO: dict[str, Any] = {"nccl": "auto", "nccl_min_bytes": 0, "min_bytes": 0, "mode": "always"}
CONFIG = ZipcclConfig(enabled=True, **AUTO)
#: Operation -> its role.
ROLES = {"gather": "zero_param", "in place": "zero_param", "exchange": "ep", "uneven": "ep"}


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    yield
    for one in of_all_groups(choice.GroupChoice):
        one.first = None


def trained(
    rank: int,
    ranks: int,
    names: tuple[str, ...],
    steps: int,
    later: bool,
    config: ZipcclConfig = CONFIG,
    same: Callable[[torch.Tensor, torch.Tensor], None] = corpus.assert_same_bits,
    each: int = 1,
) -> list[set[str]]:
    """Calls of each step, whose words are those of plain collectives; the roles that were coded, by step.
    ``each``: ranks of a node."""
    levels.pretend(levels.nodes_of(ranks // each, each))
    device, engine = torch.device("cuda", rank), object()
    if choice._of_job().first is None:
        choice.settle(config, device)
    found = []
    for step in range(steps):
        before = counted()
        for name in names:
            case = CASES["gather" if name == "in place" else name]
            inputs = [weights(peer, case.given(peer, ranks, NUMEL), step) for peer in range(ranks)]
            for words in inputs:
                words.view(torch.int16)[7::1001] = 0x7FA5  # a NaN with a payload
            wanted = case.wanted(rank, inputs)
            given, out = inputs[rank].to(device), torch.empty_like(wanted).to(device)
            if name == "in place":
                out.view(ranks, -1)[rank] = given
                given = out.view(ranks, -1)[rank]
            handle = case.call(Named(comm, config, ROLES[name]), out, given, None, later)
            if handle is not None:
                handle.wait()
            same(out.cpu(), wanted)
            out.fill_(-1)  # the caller's right
            given.fill_(-1)
        choice.end_step(engine)
        found.append(set(counted() - before))
    return found


class Named:
    """Our collectives with a config and a role."""

    def __init__(self, module: Any, config: ZipcclConfig, role: str) -> None:
        self._module, self._more = module, {"config": config, "role": role}

    def __getattr__(self, name: str) -> Any:
        return lambda *given: getattr(self._module, name)(*given, **self._more)


def counted() -> dict[str, int]:
    """Coded calls by role; ranks of the simulator share the counters."""
    found: Counter[str] = Counter()
    for row in counters.rows():
        found[row["role"]] += row["calls"]
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full(reason="as 2"))])
@pytest.mark.parametrize("later", [False, True], ids=["blocking", "asynchronous"])
@pytest.mark.parametrize("most", [first_steps.MOST_BYTES, 8 << 10], ids=["whole", "first words"])
def test_a_healthy_job_switches(
    route: CudaBackend, ranks: int, later: bool, most: int, monkeypatch: MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(first_steps, "MOST_BYTES", most)
    outcome = world.run(trained, ranks, tuple(ROLES), 6, later, modes=HARD, route=route)
    for steps in outcome.values:
        assert steps[:4] == [set()] * 4 and steps[5] == {"zero_param", "ep"}
    assert "nccl: ep coded from step 5 on, as all words compared were right; zero_param coded" in capfd.readouterr().out


@pytest.mark.parametrize("wrong", [False, True])
def test_both_schedules_of_gathers_are_compared(
    route: CudaBackend, wrong: bool, monkeypatch: MonkeyPatch, capfd: Any
) -> None:
    """Those of the job are too small for two levels; larger ones may come."""
    monkeypatch.setattr(cost_model, "levels_from", lambda topology, profile: 1e12)
    if wrong:
        plants.another_place(monkeypatch)
    steps = world.run(trained, 4, ("gather",), 6, False, CONFIG, corpus.assert_same_bits, 2, route=route).values
    assert all(one[5] == (set() if wrong else {"zero_param"}) for one in steps)
    assert f"zero_param {'stays plain, rank 0' if wrong else 'coded'}" in capfd.readouterr().out


def first_frame_damaged(patch: MonkeyPatch) -> None:
    decode = CudaBackend.decode_frames

    def wrong(self: Any, frames: Any, block: int, outs: Any, status: Any) -> None:
        frames[0][:1] ^= 8
        decode(self, frames, block, outs, status)

    patch.setattr(CudaBackend, "decode_frames", wrong)


@pytest.mark.parametrize("at", [0, 30_000, 2 * NUMEL - 1])
def test_the_line_has_the_first_wrong_word(route: CudaBackend, at: int, monkeypatch: MonkeyPatch, capfd: Any) -> None:
    """Of the rank that has seen it."""
    decode = CudaBackend.decode_gather

    def wrong(self: Any, staging: Any, table: Any, outs: Any, skip: int, *more: Any, **named: Any) -> None:
        decode(self, staging, table, outs, skip, *more, **named)
        if skip != (at >= NUMEL):  # the own part is written behind the decoder
            outs.view(torch.int16)[at : at + 2] ^= 5

    monkeypatch.setattr(CudaBackend, "decode_gather", wrong)
    world.run(trained, 2, ("gather", "exchange"), 5, False, route=route)
    words = torch.cat([weights(rank, NUMEL, 1) for rank in range(2)]).view(torch.int16)  # of step 2
    words.view(2, -1)[:, 7::1001] = 0x7FA5
    right, line = int(words[at]), capfd.readouterr().out
    assert f"rank {int(at < NUMEL)}: all_gather_into_tensor of bfloat16: {min(2, 2 * NUMEL - at)} words wrong" in line
    assert f"first at {at}: got 0x{(right ^ 5) & 0xFFFF:04x}, wanted 0x{right & 0xFFFF:04x}" in line


def test_a_healthy_job_looks_and_goes_on(route: CudaBackend, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(first_steps, "LOOK_STEPS", 5)
    world.run(trained, 2, ("gather", "exchange"), 8, False, route=route)
    rows = [row for row in counters.rows() if row["role"] in ROLES.values()]
    assert [row["calls"] for row in rows] == [2 * 3] * 2, "steps 5, 7 and 8"
    assert [row["reasons"] for row in rows] == [{PassReason.UNPROVEN.value: 2 * 5}] * 2


def test_comparing_costs_the_plain_bytes_and_little_more(route: CudaBackend, monkeypatch: MonkeyPatch) -> None:
    """Beside the coded copy. A proven role costs the coded copy alone, a role that comes too late the plain call alone."""
    monkeypatch.setattr(first_steps, "LAST", 4)
    monkeypatch.setattr(wire, "GOOD_FORECASTS", 99)  # all exchanges agree on sizes first
    ended, seen = choice.end_step, (list[tuple[int, int]](), list[tuple[int, int]]())

    def counting(engine: Any) -> None:
        ended(engine)
        found = mine().counters
        seen[mine().rank].append((found.collective_bytes.total(), found.launches.total()))

    def steps(program: Callable[..., Any], *given: Any) -> list[tuple[int, int]]:
        seen[0].clear()
        world.run(program, 2, *given, route=route)
        return [(b[0] - a[0], b[1] - a[1]) for a, b in zip([(0, 0), *seen[0]], seen[0])]

    monkeypatch.setattr(choice, "end_step", counting)
    never, bytes_of = replace(CONFIG, mode="never"), dict[str, tuple[int, int]]()
    for name in ("gather", "exchange"):
        plain = steps(trained, (name,), 6, False, never)[-1]
        _, second, third, _, fifth, sixth = steps(trained, (name,), 6, False)
        assert second[0] == third[0] and fifth == sixth and fifth[0] < plain[0]
        assert third[0] - fifth[0] <= 1.3 * plain[0] and third[1] - fifth[1] <= plain[1] + 24
        bytes_of = bytes_of | {name: (plain[0], fifth[0])}
    assert steps(comes_later)[-1][0] == bytes_of["gather"][1] + bytes_of["exchange"][0]


@pytest.mark.parametrize("late", [False, True], ids=["in time", "too late"])
def test_a_role_that_comes_later(route: CudaBackend, late: bool, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(first_steps, "LAST", 4 if late else 8)
    world.run(comes_later, 2, route=route)
    calls = {row["role"]: row["calls"] for row in counters.rows()}
    assert (calls["zero_param"], calls["ep"]) == (2 * 6, 0 if late else 2 * 2)


def comes_later(rank: int, ranks: int) -> None:
    trained(rank, ranks, ("gather",), 5, False)
    trained(rank, ranks, ("gather", "exchange"), 4, False)
    trained(rank, ranks, ("gather", "exchange"), 1, False)


def captured(rank: int, ranks: int, name: str) -> None:
    levels.pretend(levels.nodes_of(ranks, 1))
    choice.settle(CONFIG, torch.device("cuda", rank))
    cases.captured(name, Named(comm, CONFIG, ROLES[name]), rank, ranks)


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_compared_inside_a_graph(route: CudaBackend, name: str) -> None:
    """The host cannot wait for sizes there."""
    world.run(captured, 2, name, route=route)


# ---- sums ------------------------------------------------------------------------------------------------------------

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
COUNT = 4096
#: Name -> the call of a sum of ``COUNT`` elements for each rank; it returns the own part and its place in the whole.
SUMMED: dict[str, Callable[..., Any]] = {
    "scatter": lambda api, words, rank, op: scattered(api, words, rank, op),
    "list": lambda api, words, rank, op: listed(api, words, rank, op),
    "all_reduce": lambda api, words, rank, op: (api.all_reduce(words, op), (words, slice(None)))[1],
    "owners": lambda api, words, rank, op: to_owners(api, words, rank, op),
}


def scattered(api: Any, words: torch.Tensor, rank: int, op: Any) -> Any:
    own = slice(rank * COUNT, (rank + 1) * COUNT)
    api.reduce_scatter_tensor(words[own], words, op)  # in place
    return words[own], own


def listed(api: Any, words: torch.Tensor, rank: int, op: Any) -> Any:
    out = words.new_empty(COUNT)
    api.reduce_scatter(out, list(words.clone().split(COUNT)), op)
    return out, slice(rank * COUNT, (rank + 1) * COUNT)


def to_owners(api: Any, words: torch.Tensor, rank: int, op: Any) -> Any:
    """The first rank has a tenth, and the last one the rest; one part of two is everybody's."""
    tenth, ranks = len(words) // 10, dist.get_world_size()
    owned = [(tenth, (0,)), (len(words) - 2 * tenth, (ranks - 1,)), (tenth, range(ranks))]
    api.reduce_to_owners(words, owned, op)
    mine = slice(tenth, None) if rank == ranks - 1 else slice(0 if not rank else len(words) - tenth, None)
    place = slice(0, tenth) if not rank else mine
    return words[place], place


def summed(
    rank: int, ranks: int, nodes: Any, names: tuple[str, ...], steps: int, config: ZipcclConfig = CONFIG, op: Any = SUM
) -> list[int]:
    """Sums of each step, whose bits are those of the documented order in every step; the bytes that were sent, by step."""
    levels.pretend(nodes)
    if choice._of_job().first is None:
        choice.settle(config, torch.device("cuda", rank))
    found, dtypes = [], (torch.bfloat16, torch.float16)
    for step in range(steps):
        before = sum(row["wire_bytes"] for row in counters.rows())
        for number, name in enumerate(names):
            dtype = dtypes[(step + number) % 2]
            given = [(weights(peer, COUNT * ranks, step).float() * (0.3 + peer)).to(dtype) for peer in range(ranks)]
            words = given[rank].to(f"cuda:{rank}")
            got, place = SUMMED[name](Named(comm, config, "zero_grad"), words, rank, op)
            corpus.assert_same_bits(got.cpu(), cases.documented(given, nodes, op is AVG)[place])
            words.fill_(-1)
        choice.before_step()
        choice.end_step(object())
        found.append(sum(row["wire_bytes"] for row in counters.rows()) - before)
    return found


TWO, THREE, FOUR, EIGHT = (levels.nodes_of(*shape) for shape in ((2, 1), (3, 1), (2, 2), (2, 4)))
PROVEN = "sums of zero_grad coded from step 5 on, as all words compared were right"


@pytest.mark.parametrize("op", [SUM, AVG], ids=["sum", "average"])
@pytest.mark.parametrize(
    "nodes",
    [TWO, FOUR, *(pytest.param(one, marks=pytest.mark.full(reason="alike")) for one in (THREE, EIGHT))],
    ids=str,
)
def test_sums_have_their_order_from_the_first_step_on(
    route: CudaBackend, nodes: Any, op: Any, monkeypatch: MonkeyPatch, capfd: Any
) -> None:
    """Without coding until step 4, coded later, and without coding where a step looks again: always the same bits."""
    monkeypatch.setattr(first_steps, "LOOK_STEPS", 6)
    ranks = sum(map(len, nodes))
    names = tuple(SUMMED)[:: 1 if ranks < 8 else 3]  # eight ranks are slow
    world.run(summed, ranks, nodes, names, 8, CONFIG, op, modes=HARD, route=route, timeout=300)
    said = capfd.readouterr().out
    assert PROVEN in said and said.count("sums of") == 1


def test_coded_sums_send_less(route: CudaBackend) -> None:
    outcome = world.run(summed, 2, TWO, ("scatter", "all_reduce"), 6, route=route)
    for sent in outcome.values:
        assert sent[0] == sent[3] > 1.1 * sent[5]


@pytest.mark.parametrize("first", [True, False], ids=["steps", "no steps"])
def test_sums_are_never_the_backends(route: CudaBackend, first: bool, monkeypatch: MonkeyPatch) -> None:
    """Also in a program without optimizer steps, where nothing is proven."""
    if not first:
        monkeypatch.setattr(choice, "end_step", lambda engine: None)
    world.run(summed, 4, FOUR, tuple(SUMMED), 6, route=route)
    assert not any(row["passed"] for row in counters.rows())


def in_coded_sums(change: Callable[[Any, torch.Tensor], None]) -> Callable[[MonkeyPatch], None]:
    """What sums frames is followed by a change of the sums; what sums words without coding is right."""
    add = CudaBackend.decode_sum_frames

    def wrong(self: Any, matrix: Any, block: int, dtype: Any, sums: torch.Tensor, *more: Any) -> None:
        add(self, matrix, block, dtype, sums, *more)
        if matrix.dtype is torch.uint8:
            change(self, sums)

    return lambda patch: patch.setattr(CudaBackend, "decode_sum_frames", wrong)


def flipped(backend: Any, sums: torch.Tensor) -> None:
    shadow_check.bits(sums)[17:18].bitwise_xor_(1)


def on_rank_one(backend: Any, sums: torch.Tensor) -> None:
    if mine().rank == 1:
        flipped(backend, sums)


def rounded(backend: Any, sums: torch.Tensor) -> None:
    shadow_check.bits(sums)[:].bitwise_and_(-2)


def other_frames(patch: MonkeyPatch) -> None:
    """Frames of other words than those of the sum."""
    encode = CudaBackend.encode_frames
    patch.setattr(CudaBackend, "encode_frames", lambda self, words, *more: encode(self, words[::-1], *more))


def damaged(patch: MonkeyPatch) -> None:
    encode = CudaBackend.encode_frames

    def wrong(self: Any, words: Any, codec: str, block: int, places: Any) -> None:
        encode(self, words, codec, block, places)
        places[0][:1].bitwise_xor_(8)

    patch.setattr(CudaBackend, "encode_frames", wrong)


def no_room(patch: MonkeyPatch) -> None:
    """Rank 1 has no memory for the comparison."""
    fill = first_steps.tensors.filled

    def out_of_memory(numel: int, *more: Any) -> torch.Tensor:
        if mine().rank == 1 and numel > 1000:
            raise torch.OutOfMemoryError("no memory")
        return fill(numel, *more)

    patch.setattr(first_steps, "tensors", SimpleNamespace(filled=out_of_memory, empty=first_steps.tensors.empty))


CODED_PLANTS: dict[str, tuple[Callable[[MonkeyPatch], None], Any, str]] = {
    "a bit": (in_coded_sums(flipped), TWO, "words wrong"),
    "a bit of rank 1": (in_coded_sums(on_rank_one), TWO, "rank 1: "),
    "rounding": (in_coded_sums(rounded), FOUR, "words wrong"),
    "the frames of others": (other_frames, THREE, "words wrong"),
    "a damaged frame": (damaged, TWO, "refused"),
    "no memory": (no_room, TWO, "OutOfMemoryError: no memory"),
}


@pytest.mark.parametrize("name", CODED_PLANTS)
def test_wrong_coded_sums_are_never_used(route: CudaBackend, name: str, monkeypatch: MonkeyPatch, capfd: Any) -> None:
    """The results have the right bits in every step, and go without coding for good."""
    plant, nodes, said = CODED_PLANTS[name]
    plant(monkeypatch)
    world.run(summed, sum(map(len, nodes)), nodes, ("scatter", "owners"), 7, route=route)
    out = capfd.readouterr().out
    assert "sums of zero_grad go without coding, rank" in out and said in out and PROVEN not in out


def test_a_lost_wait_beside_a_sum_is_noticed(route: CudaBackend, monkeypatch: MonkeyPatch) -> None:
    order = Streams.order

    def forgetful(self: Streams, *pair: Stage) -> None:
        if sys._getframe(1).f_code.co_name != "beside_sum":
            order(self, *pair)

    monkeypatch.setattr(Streams, "order", forgetful)
    plants.fails(summed, 4, FOUR, tuple(SUMMED), 3, route=route)


def in_words(change: Callable[[Any, torch.Tensor], None]) -> Callable[[MonkeyPatch], None]:
    """What sums is followed by a change, coded or not."""
    add = CudaBackend.decode_sum_frames

    def wrong(self: Any, matrix: Any, block: int, dtype: Any, sums: torch.Tensor, *more: Any) -> None:
        add(self, matrix, block, dtype, sums, *more)
        change(self, sums)

    return lambda patch: patch.setattr(CudaBackend, "decode_sum_frames", wrong)


def lost(backend: Any, sums: torch.Tensor) -> None:
    sums.mul_(0.5)


def lost_on_rank_one(backend: Any, sums: torch.Tensor) -> None:
    if mine().rank == 1:
        lost(backend, sums)


def other_slots(patch: MonkeyPatch) -> None:
    add = device_sums.Summing._add
    patch.setattr(device_sums.Summing, "_add", lambda self, matrix, *more: add(self, matrix.flip(0), *more))


def undivided(patch: MonkeyPatch) -> None:
    patch.setattr(device_sums, "divide", lambda *given: None)


WORD_PLANTS: dict[str, tuple[Callable[[MonkeyPatch], None], Any]] = {
    "a contribution is lost": (in_words(lost), FOUR),
    "of rank 1": (in_words(lost_on_rank_one), TWO),
    "another slot": (other_slots, TWO),
    "no division": (undivided, FOUR),
}


def stops(rank: int, ranks: int, nodes: Any) -> list[int]:
    """Steps until all ranks stop, before an optimizer step, whatever their own sums are."""
    levels.pretend(nodes)
    choice.settle(CONFIG, torch.device("cuda", rank))
    for step in range(1, 6):
        words = weights(rank, COUNT * ranks, step).to(f"cuda:{rank}")
        Named(comm, CONFIG, "zero_grad").all_reduce(words, AVG)
        try:
            choice.before_step()
        except CommError as error:
            assert "further from the backend's own" in str(error) and "all_reduce" in str(error)
            return [step]
        choice.end_step(object())
    return []


@pytest.mark.parametrize("name", WORD_PLANTS)
def test_a_sum_that_rounding_does_not_explain_stops_all_ranks(
    route: CudaBackend, name: str, monkeypatch: MonkeyPatch
) -> None:
    plant, nodes = WORD_PLANTS[name]
    ranks = sum(map(len, nodes))
    assert world.run(stops, ranks, nodes, route=route).values == [[]] * ranks
    for one in of_all_groups(choice.GroupChoice):
        one.first = None
    plant(monkeypatch)
    assert world.run(stops, ranks, nodes, route=route).values == [[2]] * ranks


def near_the_end_of_fp16(rank: int, ranks: int, op: Any) -> None:
    """Averages of values up to 65,504 stay finite; sums that leave fp16 are infinite, as the backend's own, and stop no rank."""
    levels.pretend(FOUR)
    choice.settle(CONFIG, torch.device("cuda", rank))
    for _ in range(6):
        given = [torch.full((COUNT * ranks,), 65_504.0, dtype=torch.float16) for _ in range(ranks)]
        for peer, words in enumerate(given):
            words[::3].mul_(-1 if peer % 2 else 1)
            words[1::3].div_(ranks)
        words = given[rank].to(f"cuda:{rank}")
        Named(comm, CONFIG, "zero_grad").all_reduce(words, op)
        corpus.assert_same_bits(words.cpu(), cases.documented(given, FOUR, op is AVG))
        assert bool(words.isfinite().all()) == (op is AVG)
        choice.before_step()
        choice.end_step(object())


@pytest.mark.parametrize("op", [SUM, AVG], ids=["sum", "average"])
def test_values_near_the_end_of_fp16(route: CudaBackend, op: Any, capfd: Any) -> None:
    world.run(near_the_end_of_fp16, 4, op, route=route)
    assert PROVEN in capfd.readouterr().out
