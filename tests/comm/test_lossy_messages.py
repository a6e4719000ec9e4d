"""Lossy calls: the bits of their definition, the bytes that they send, their counts, sends and nodes, and planted mistakes."""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import corpus
import levels
import lossy_calls
import pytest
import ranks as runner
import torch
import torch.distributed as dist
from lossy_calls import CODECS, EVERYTHING, Call, api, normal, same, with_specials
from moves import AUTO, CODED, turn, wait

from ds_zipccl import comm
from ds_zipccl.benchmarks.links import slots
from ds_zipccl.codecs import project
from ds_zipccl.comm import request
from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.comm.host import exchange, gather
from ds_zipccl.comm.lossy.frames import LossyFrames
from ds_zipccl.comm.lossy.squared_error import squared_error
from ds_zipccl.comm.transport.gloo import GlooTransport
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.integration.lossy.pipeline import _Link
from ds_zipccl.integration.lossy.state import State
from ds_zipccl.lossy import Int, LossyCodec, LowRank, Round, TacoFp8, Zfp
from ds_zipccl.policy.cost_model import LinkProfile
from ds_zipccl.role_settings import RoleSettings
from ds_zipccl.telemetry import counters, table

SIZE = 40009
#: Ways to do the same: small fragments and one for all, coded and raw frames, the shadow.
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"codec": "raw"},
    {"staging_mib": 1, "codec": "wide"},
    {"staging_mib": 64},
    {"check": "shadow"},
)


@runner.together(2)
@runner.together(3, full="the schedules are those of 2 ranks")
def by_definition(rank: int, ranks: int) -> None:
    for call, args in lossy_calls.every_way(rank, ranks, EVERYTHING, WAYS, SIZE):
        same(*call(args))
        if args.codec == CODECS[0]:
            exact, rounded = (
                call(replace(args, api=api(one), later=False))[0].nan_to_num() for one in (None, args.codec)
            )
            unchanged = not exact.numel() or (call is lossy_calls.reduce and rank != args.own.numel() % ranks)
            assert torch.equal(exact, rounded) == unchanged, call.__name__
    assert not any(row["passed"] for row in counters.rows())


#: `reduce` has no schedule in stream order.
ON_STREAMS = tuple(call for call in EVERYTHING if call is not lossy_calls.reduce)


def by_definition_on_streams(rank: int, ranks: int, nodes: levels.Nodes) -> None:
    """Groups in stream order on CPUs (benchmarks/links/slots.py), in one level and in two."""
    levels.pretend(nodes)
    ways = [
        {"nccl": "on", "nccl_min_bytes": 0} | way
        for way in ({}, {"codec": "raw"}, {"staging_mib": 1}, {"check": "shadow"})
    ]
    for call, args in lossy_calls.every_way(
        rank, ranks, ON_STREAMS, ways, 5_003, nodes=nodes if len(nodes[0]) > 1 else ()
    ):
        try:
            same(*call(args))
        except AssertionError as error:
            raise AssertionError(f"{call.__name__} by {args.api}: {error}") from error
    assert not any(row["passed"] for row in counters.rows()), counters.rows()
    assert {found["exact"].get("not finite") for found in counters.lossy()} != {None}


@pytest.mark.parametrize(
    ("nodes", "each"),
    [(2, 1), *(pytest.param(*some, marks=pytest.mark.full(reason="slow")) for some in ((4, 1), (2, 2)))],
)
def test_calls_in_stream_order_have_the_bits_of_their_definition(nodes: int, each: int) -> None:
    runner.run(by_definition_on_streams, nodes * each, levels.nodes_of(nodes, each), backend=slots.NAME, timeout=500)


@runner.together(2)
def in_mode_auto(rank: int, ranks: int) -> None:
    """The results of mode always, also in a step whose other calls are plain."""
    everyone = [normal(peer, SIZE, torch.bfloat16) for peer in range(ranks)]
    turn(plain=True)
    for call in (lossy_calls.all_reduce, lossy_calls.reduce_scatter_tensor, lossy_calls.exchange, lossy_calls.gather):
        same(*call(Call(api(CODECS[0], AUTO), everyone, rank, CODECS[0])))
    assert not any(row["passed"] for row in counters.rows())


#: No call sends more than this many times the lossless bytes.
MOST = 1.03


@runner.together(2, 1, 0.85, full="large messages")
@runner.together(2, 8, MOST, full="large messages")
def repeated_rows_travel_once(rank: int, ranks: int, copies: int, most: float) -> None:
    """Each row goes to a rank ``copies`` times. Rows that every value of a codec repeats are left out: lossy frames of them are large."""
    width, rows = 64, 1200
    everyone = []
    for peer in range(ranks):
        of_peer = normal(peer, ranks * rows * width, torch.bfloat16).view(ranks, rows, width)
        everyone.append(of_peer[:, torch.arange(rows) // copies].reshape(-1, width))

    def exchanged(codec: LossyCodec | None) -> int:
        counters.reset()
        output = torch.empty_like(everyone[rank])
        api(codec).all_to_all_single(output, everyone[rank], role="ep", kind="dispatch")
        parts = [whole.chunk(ranks)[rank].contiguous().view(-1) for whole in everyone]
        wanted = [part if peer == rank or codec is None else project(part, codec) for peer, part in enumerate(parts)]
        corpus.assert_same_bits(output.view(-1), torch.cat(wanted))
        return sum(row["wire_bytes"] for row in counters.rows())

    lossless = exchanged(None)
    shares = [exchanged(codec) / lossless for codec in CODECS if not isinstance(codec, Zfp)]
    assert max(shares) <= most, f"{copies} copies: {shares} of the lossless bytes"


def of_a_step(rank: int, ranks: int, codec: LossyCodec | None) -> list[str]:
    """Hashes of all frames that lossless calls send, in order, beside calls with ``codec`` of the same operation and role, or alone."""
    posted: list[str] = []
    post_send = GlooTransport.post_send
    lossless = False

    def noted(self: Any, buffer: torch.Tensor, *more: Any) -> Any:
        if lossless:
            posted.append(hashlib.sha256(buffer.numpy().tobytes()).hexdigest())
        return post_send(self, buffer, *more)

    GlooTransport.post_send = noted  # type: ignore[method-assign]
    for step in range(3):
        for size in (900, 40_009):
            mine = normal(rank, size, torch.bfloat16, step)
            # words that no codec makes smaller switch coding off for a while
            noise = torch.from_numpy(corpus.hashes(size, step).astype("int32")).view(torch.float32)
            for values in (mine, noise):
                lossless = False
                if codec is not None:
                    api(codec).all_reduce(values.clone(), role="zero_grad")
                lossless = True
                api(None).all_reduce(values.clone(), role="zero_grad")
                whole = values.new_empty(size * ranks)
                comm.all_gather_into_tensor(whole, values, config=CODED, role="zero_param")
                corpus.assert_same_bits(whole.chunk(ranks)[rank], values)
    return posted


def test_frames_of_lossless_calls_do_not_change(plant: Callable[[], None] | None = None) -> None:
    with_codec, without = (runner.run(of_a_step, 2, codec, plant=plant) for codec in (Round(1), None))
    assert with_codec[0] and with_codec == without, "frames of lossless calls differ"


@pytest.fixture(autouse=True)
def no_counts() -> Iterator[None]:
    counters.reset()
    yield
    counters.reset()


GROUPED = (TacoFp8(), Int(bits=8, hadamard=True))
WHY = {"not finite": float("nan"), "not finite either": float("-inf"), "overflow": 1e38, "": 1.0}


@pytest.mark.parametrize(
    ("codec", "why"), [*itertools.product(GROUPED, WHY), (Int(bits=8, group=512), "smaller")], ids=str
)
def test_a_frame_names_why_it_is_exact(codec: LossyCodec, why: str) -> None:
    """A group of few values is smaller without its scale."""
    words = torch.arange(1.0, 4097.0).to(torch.bfloat16)
    words[128:256] = WHY.get(why, 1.0)
    words[200] *= 3
    state = SimpleNamespace(of=lambda kind: defaultdict(lambda: count(1)))
    context: Any = SimpleNamespace(role="tp", op="all_reduce", state=state, config=CODED)
    LossyFrames(context, codec).compress(words[:4] if why == "smaller" else words, "cascade", 512, PooledBuffers().take)
    (found,) = counters.lossy()
    assert (found["frames"], found["exact"]) == (1, {why.removesuffix(" either"): 1} if why else {})


@pytest.mark.parametrize(
    ("lossy", "text"),
    [
        (TacoFp8(), str(TacoFp8())),
        (_Link(RoleSettings(LowRank(8)), (0, "backward", 0), width=4, ranks=2, state=State()), "lowrank rank 8"),
    ],
    ids=["codec", "link"],
)
def test_a_message_that_stays_exact_counts_among_those_of_its_line(
    lossy: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "group_state", lambda group: SimpleNamespace())
    assert not request.may_change(lossy, torch.ones(3, dtype=torch.int32), None, "all_reduce", "tp")
    (found,) = counters.lossy()
    assert (found["codec"], found["frames"], sum(found["exact"].values())) == (text, 1, 1)
    assert "0 of 1 frames exact (not finite)" in table.render()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("route", ["native", "numba"])
def test_squares_are_those_of_the_finite_words(dtype: torch.dtype, route: str) -> None:
    words = (torch.arange(1 << 20 | 37).sin() * 3).to(dtype)
    values = words + (torch.arange(len(words)).cos() / 8).to(dtype)
    words[5], words[70000], words[-1] = float("inf"), float("nan"), float("-inf")
    kept = words.double().isfinite()
    error = (values.double() - words.double())[kept]
    wanted = float(error.square().sum()), float(words.double()[kept].square().sum())
    assert squared_error(words, values, route) == pytest.approx(wanted, rel=1e-6)
    assert squared_error(words[:0], values[:0], route) == (0.0, 0.0)


@runner.together(2)
def unnamed_calls_are_exact(rank: int, ranks: int) -> None:
    """A user's own sum is exact beside a lossy one of the same role and size."""
    mine = torch.randn(1 << 18, generator=torch.Generator().manual_seed(rank))
    total = mine.clone()
    dist.all_reduce(total)
    for lossy in (Round(1), None, Round(1), None):
        found = mine.clone()
        comm.all_reduce(found, config=CODED, role="tp", lossy=lossy)
        assert torch.equal(found, total) == (lossy is None), f"lossy={lossy}"


#: A link that no codec can beat.
FAST = LinkProfile(((1.0, 1e-9), (1e12, 1e-3)), 1e6, 1e6, 1e6, 1e6, 1e6, 1.0)


def passed_on(config: ZipcclConfig, mine: torch.Tensor, rank: int, later: bool, codec: LossyCodec | None) -> Any:
    """Rank 0 sends to rank 1, which names no codec; the tensor that rank 1 gets."""
    if rank == 0:
        call = comm.isend if later else comm.send
        wait(call(mine, 1, config=config, role="pp", lossy=codec))
        return None
    got = torch.empty(mine.shape, dtype=mine.dtype)
    comm.recv(got, 0, config=config, role="pp")
    return got


@runner.together(2)
def sends(rank: int, ranks: int) -> None:
    ways: list[dict[str, Any]] = [{}, {"codec": "raw"}, {"staging_mib": 1}, {"check": "shadow"}, {"mode": "auto"}]
    sizes = (1500, 60_000, 900_000)
    for seed, (codec, way) in enumerate(itertools.product(CODECS, ways)):
        dtype = (torch.bfloat16, torch.float16, torch.float32)[seed % 3]
        mine = with_specials(0, sizes[seed % 3], dtype, seed)
        mine = mine.view(-1, 4).t() if seed % 4 == 3 else mine.view(-1, 4)
        got = passed_on(replace(CODED, **way), mine, rank, bool(seed % 2), codec)
        if rank:
            same(got, project(mine.contiguous(), codec))
    mine = normal(0, 60_000, torch.bfloat16)
    for config in (replace(CODED, min_bytes=1 << 20), replace(CODED, enabled=False)):
        got = passed_on(config, mine, rank, False, Round(1))
        if rank:
            corpus.assert_same_bits(got, mine)
    # every way of a send in mode auto: coded, in bytes, and as a plain send where the link is faster
    for _ in range(40):
        got = passed_on(AUTO, mine, rank, True, Round(2))
        if rank:
            corpus.assert_same_bits(got, project(mine, Round(2)))
    state = group_state(None)
    assert state is not None
    state.profile = FAST
    got = passed_on(AUTO, mine.view(300, 200).t(), rank, False, Round(2))
    if rank:
        corpus.assert_same_bits(got, project(mine.view(300, 200).t().contiguous(), Round(2)))
    assert any("link faster than coding" in row["reasons"] for row in counters.rows())


@runner.together(4, full="four ranks")
def several_nodes(rank: int, ranks: int) -> list[str]:
    """Two nodes of two ranks. Gathers go by node; exchanges do where each value is rounded by itself; sums stay in one level."""
    used: list[str] = []

    def noting(place: Any, name: str) -> None:
        good: Callable[..., Any] = getattr(place, name)

        def noted(*arguments: Any, **more: Any) -> Any:
            used.append(name)
            return good(*arguments, **more)

        setattr(place, name, noted)

    noting(exchange._NodeExchange, "run")
    noting(gather.Gathering, "_forward")
    levels.pretend([[0, 2], [1, 3]])
    for codec in CODECS:
        everyone = [with_specials(peer, 40_000, torch.bfloat16) for peer in range(ranks)]
        for call in (
            lossy_calls.gather_in_place,
            lossy_calls.exchange,
            lossy_calls.all_reduce,
            lossy_calls.to_several_owners,
        ):
            used.clear()
            same(*call(Call(api(codec, reduction="fp32"), everyone, rank, codec)))
            by_value = isinstance(codec, Round)
            assert bool(used) == (call is lossy_calls.gather_in_place or (call is lossy_calls.exchange and by_value)), (
                f"{call.__name__} by {codec}: {used}"
            )
    return used


@runner.together(2)
def a_base_is_exact(rank: int, ranks: int) -> None:
    whole, own = torch.empty(4000), torch.ones(4000 // ranks)
    with pytest.raises(ValueError, match=r"got lossy=round mantissa 3 with a base or parameters"):
        api(Round()).all_gather_into_tensor(whole, own, base=comm.IN_PLACE)


test_programs = runner.programs(__name__)
