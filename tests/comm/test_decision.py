"""Who decides on a message, and who checks it: plans and choices, check = "shadow", damaged frames, and what the errors say."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import corpus
import pytest
import ranks as runner
import torch
import torch.distributed as dist
from moves import AUTO, filled, wait
from operations import Coded, arguments

from ds_zipccl import FrameError, comm, compress
from ds_zipccl.comm import decision, engine
from ds_zipccl.comm import group_state as states
from ds_zipccl.comm.buffer_pool import POOL
from ds_zipccl.comm.decision import DecisionMemory, decide, lasting
from ds_zipccl.comm.execution import execute
from ds_zipccl.comm.group_state import GroupState, group_rank, group_state
from ds_zipccl.comm.host import frames
from ds_zipccl.comm.reduction_order import NO_SUM, Reduction, Sum
from ds_zipccl.comm.request import CallOptions, Request, Segments, unfit
from ds_zipccl.comm.shadow_check import Shadow
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.frame import FrameErrorCode
from ds_zipccl.ops import OPS
from ds_zipccl.policy.admission import Decision, PassReason
from ds_zipccl.policy.cost_model import LinkProfile
from ds_zipccl.telemetry import counters

ALWAYS = replace(AUTO, mode="always")
SHADOWED = replace(ALWAYS, check="shadow")


def shadowed(**settings: Any) -> Coded:
    return Coded(replace(SHADOWED, **settings))


def calls(api: Any, rank: int, ranks: int, seed: int) -> dict[str, Callable[[bool], Any]]:
    """Every collective once; those that gloo can do, too."""
    kind = list(corpus.SUMMED.values())[seed % 3]
    every = arguments(filled(rank, 1200 * ranks, kind, seed), ranks)
    del every["reduce_to_owners"]
    return {
        name: lambda later, call=name, given=given: getattr(api, call)(*given, async_op=later)
        for name, given in every.items()
    }


@runner.together(2)
@runner.together(3)
def agrees(rank: int, ranks: int) -> None:
    for seed, reduction in enumerate(("match", "fp32", "auto")):
        api = shadowed(reduction=reduction)
        for call in calls(api, rank, ranks, seed).values():
            call(False)
        handles = [call(True) for call in calls(api, rank, ranks, seed).values()]
        for handle in reversed(handles):
            handle.wait()
    api, tensor = shadowed(), filled(5, 3000, corpus.BF16, 1)
    if rank == 0:
        works = [api.isend(tensor, 1, None, 4), api.isend(tensor, 1, None, 4)]
        for work in works:
            work.wait()
    elif rank == 1:
        places = [torch.zeros(60, 50, dtype=torch.bfloat16).t(), torch.zeros(3000, dtype=torch.bfloat16)]
        assert api.recv(places[0], None, None, 4) == 0 and api.recv(places[1], 0, None, 4) == 0
        corpus.assert_same_bits(places[0].contiguous().view(-1), tensor)
    assert all(row["calls"] == 6 and not row["passed"] for row in counters.rows() if row["op"] not in ("send", "recv"))
    assert {row["op"] for row in counters.rows()} >= set(calls(api, rank, ranks, 0))


def flip_a_bit() -> None:
    """From now on the first element of every decoded tensor has a wrong bit, a heavy one."""
    decompress = frames.decompress

    def wrong(frame: torch.Tensor, out: torch.Tensor, **settings: Any) -> torch.Tensor:
        decompress(frame, out, **settings)
        out.view(torch.uint8)[out.element_size() - 1] ^= 0x40
        return out

    add = frames.decompress_add

    def wrong_sum(frame: torch.Tensor, sums: torch.Tensor, **settings: Any) -> torch.Tensor:
        add(frame, sums, **settings)
        sums.view(torch.uint8)[sums.element_size() - 1] ^= 0x40
        return sums

    frames.decompress, frames.decompress_add = wrong, wrong_sum


def disagrees(rank: int, ranks: int) -> list[str]:
    """The last rank decodes wrongly: all ranks must say so, and those with right results must name that rank."""
    if rank == ranks - 1:
        flip_a_bit()
    said = []
    for later in (False, True):
        api = shadowed(reduction="fp32" if later else "match")
        for name, call in calls(api, rank, ranks, 0).items():
            if name == "broadcast":
                call(False)  # rank 1 is the source, which decodes nothing
                continue
            with pytest.raises(comm.CommError) as caught:
                wait(call(later))
            said.append(str(caught.value))
            assert said[-1].startswith(f"{name} (group '0' of {ranks} ranks, role dp, global rank {rank}): "), said[-1]
            assert "wrong in output" in said[-1], said[-1]
            if rank == ranks - 1:
                assert isinstance(caught.value, comm.ShadowMismatch)
            elif not isinstance(caught.value, comm.ShadowMismatch):
                assert "the check failed on global rank " in said[-1], said[-1]
    tensor = torch.ones(3000)
    if rank == 0:
        shadowed().send(tensor, 1)
    elif rank == 1 == ranks - 1:
        with pytest.raises(comm.ShadowMismatch) as caught:
            shadowed().recv(torch.empty(3000), 0)
        said.append(str(caught.value))
    return said


def test_shadow_disagrees() -> None:
    right, said = runner.run(disagrees, 2)
    assert (len(right), len(said)) == (20, 21)
    assert said[-1] == (
        "recv (group '0' of 2 ranks, role dp, global rank 1): "
        "1 of 3000 wrong in output 0, first at 0: got inf (0x7f800000), wanted 1 (0x3f800000)"
    )
    _, problem = said[0].split("): ")
    assert right[0] == (
        f"all_gather (group '0' of 2 ranks, role dp, global rank 0): the check failed on global rank 1: {problem}"
    )


def _raise(error: Exception) -> Callable[..., Any]:
    def call(*arguments: Any, **settings: Any) -> Any:
        raise error

    return call


@runner.together(3)
def a_rank_that_fails_tells(rank: int, ranks: int) -> None:
    """A rank that fails in its schedule or in its comparison tells the others, which wait for its outcome, and goes on: the next call is
    as good as ever."""
    compare, decompress = Shadow.compare, frames.decompress
    mine, whole = filled(rank, 900, corpus.BF16, 1), torch.empty(900 * ranks, dtype=torch.bfloat16)
    for case in itertools.product(("comparison", "schedule"), (False, True)):
        kind, later = case
        if rank == 1 and kind == "comparison":
            Shadow.compare = _raise(MemoryError("as planted"))  # type: ignore[method-assign]
        elif rank == 1:
            frames.decompress = _raise(FrameError(FrameErrorCode.CHECKSUM, "as planted"))
        with pytest.raises((comm.CommError, MemoryError)) as caught:
            wait(shadowed().all_gather_into_tensor(whole, mine, None, later))
        Shadow.compare, frames.decompress = compare, decompress  # type: ignore[method-assign]
        said = str(caught.value)
        assert "as planted" in said and (rank == 1 or "the check failed on global rank 1: " in said), (case, said)
        shadowed().all_gather_into_tensor(whole, mine)
        corpus.assert_same_bits(whole, torch.cat([filled(peer, 900, corpus.BF16, 1) for peer in range(ranks)]))


def differ(tolerance: Any, got: list[float], want: list[float], terms: list[float] | None = None) -> bool:
    """Whether the check objects to results of three ranks; ``terms`` are the sums of magnitudes, which make them bf16."""
    dtype = torch.float32 if terms is None else torch.bfloat16
    results = iter([want, terms])

    def plain(inputs: Any, outputs: Any, later: bool) -> Any:
        outputs[0].copy_(torch.tensor(next(results), dtype=dtype))
        return SimpleNamespace(wait=lambda: None)

    shadow = Shadow(plain, [], [torch.zeros(len(got), dtype=dtype)], tolerance, 3)
    try:
        shadow.compare([torch.tensor(got, dtype=dtype)], comm.CommError)
    except comm.ShadowMismatch:
        return True
    return False


NAN, INF = float("nan"), float("inf")


def test_moves_must_agree_in_every_bit_and_sums_but_for_those_of_nan() -> None:
    assert not differ("bits", [1.0, NAN, -0.0], [1.0, NAN, -0.0])
    assert differ("bits", [0.0], [-0.0])
    assert differ("bits", [NAN], [-NAN])
    assert not differ("nan", [1.0, NAN, INF], [1.0, -NAN, INF])
    assert differ("nan", [0.0], [-0.0])
    assert differ("nan", [NAN], [1.0])
    assert differ("nan", [1.0], [NAN])


def test_rounding_bound() -> None:
    """|got - want| <= 3 eps sum(|x|), and bf16 has eps = 1 / 128."""
    assert not differ("rounding", [1.0, 0.0], [1.0, -0.0], [1.0, 0.0])
    assert not differ("rounding", [1.015625], [1.0], [1.0])
    assert differ("rounding", [1.03125], [1.0], [1.0])
    assert not differ("rounding", [1.03125], [1.0], [2.0])
    assert differ("rounding", [NAN], [1.0], [1.0])
    assert not differ("rounding", [NAN, 3.0], [INF, NAN], [INF, NAN])
    assert differ("rounding", [1e-6], [0.0], [0.0])


@runner.together(2)
def mismatched_sizes(rank: int, ranks: int) -> None:
    """Ranks that disagree on a size learn it from the frame instead of reading beyond it."""
    api = shadowed(check="off")
    with pytest.raises(
        comm.CommError, match=r"MISMATCH: frame holds .* wanted .*; the two ranks are at diff"
    ) as caught:
        api.all_gather_into_tensor(torch.empty(2 * (100 + rank)), torch.ones(100 + rank))
    assert isinstance(caught.value.__cause__, FrameError) and caught.value.__cause__.code == FrameErrorCode.MISMATCH
    segments = [torch.ones(5 if peer == rank else 7) for peer in range(2)]
    with pytest.raises(comm.CommError, match=f"frame from global rank {1 - rank} refused"):
        api.all_to_all([torch.ones(5), torch.ones(5)], segments)


@runner.together(3)
def a_failed_rank_still_sends(rank: int, ranks: int) -> None:
    """A rank that fails owes its peers nothing: what it has posted still goes out, also to a peer that comes later."""
    if rank == 0:
        frames.decompress = _raise(FrameError(FrameErrorCode.CHECKSUM, "as planted"))
    if rank == 1:
        time.sleep(1.0)
    output = torch.zeros(90000 * ranks, dtype=torch.bfloat16)
    call = partial(shadowed(check="off").all_gather_into_tensor, output)
    if rank == 0:
        with pytest.raises(comm.CommError, match="CHECKSUM: as planted") as caught:
            call(filled(rank, 90000, corpus.BF16, 1))
        del caught
        gc.collect()
        for _ in range(4):
            POOL.take(180_000).fill_(255)
    else:
        call(filled(rank, 90000, corpus.BF16, 1))
        corpus.assert_same_bits(output, torch.cat([filled(peer, 90000, corpus.BF16, 1) for peer in range(ranks)]))


NUMEL = 5000
CODED = Decision(True, "cascade", "")


def summed(name: str) -> Sum:
    return Sum(getattr(dist.ReduceOp, name), reduction=Reduction("match", name, 2), tolerance="nan")


SUM = summed("SUM")


# ---- without ranks -----------------------------------------------------------------------------------------------------


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A group of two ranks on gloo of which nothing is known."""
    monkeypatch.setattr(decision, "group_nodes", lambda group: [])
    monkeypatch.setattr(decision, "link_profile", lambda state: None)
    known = dict(rank=0, size=2, backend=lambda self, device: "gloo", of=GroupState.of, _objects={})
    return type("State", (), known)()


def request_of(
    config: ZipcclConfig = AUTO, role: str = "dp", later: bool = False, kind: str = "", **more: Any
) -> Request:
    group: Any = SimpleNamespace(group_name="7")
    usual = dict(op="all_reduce", inputs=[], outputs=[torch.empty(0)], group=group, async_op=later, plain=None)
    usual |= dict(options=CallOptions(config, role, kind=kind), sum=SUM, numel=NUMEL)
    return Request(**{**usual, **more})  # type: ignore[arg-type]


def decided(members: Any, config: ZipcclConfig, role: str = "dp", **more: Any) -> Decision:
    return lasting(request_of(config, role, **more), members)


#: What makes another message of the usual one, which is a sum of the role dp that is coded: its plan.
OTHERS: dict[str, tuple[dict[str, Any], Decision]] = {
    "role": ({"role": "ep"}, Decision(False, "", "role is never coded")),
    "dtype": ({"outputs": [torch.empty(0, dtype=torch.float64)]}, Decision(False, "", "dtype float64")),
    "reduce op": ({"sum": summed("MAX")}, Decision(False, "", "reduce op MAX")),
    "size": ({"numel": 10}, Decision(False, "", PassReason.SMALL.value)),
    "config": ({"config": ZipcclConfig()}, Decision(False, "", "not enabled")),
}
NEVER_EP = replace(ALWAYS, roles={"ep": "never"}, min_bytes=1000)


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("first", ["usual", "other"])
def test_plans_are_remembered_by_all_that_they_depend_on(members: Any, other: str, first: str) -> None:
    change, plan = OTHERS[other]
    usual: dict[str, Any] = {"config": NEVER_EP}
    for what in ("usual", "other", "usual") if first == "usual" else ("other", "usual", "other"):
        assert decided(members, **{**usual, **(change if what == "other" else {})}) == (
            CODED if what == "usual" else plan
        )
    assert len(members.of(DecisionMemory)) == 2


def test_a_base_and_a_shape_have_plans_of_their_own(members: Any) -> None:
    gather = {"op": "all_gather_into_tensor", "sum": NO_SUM, "numel": 1 << 20}
    for _ in range(2):
        assert decided(members, ALWAYS, **gather) == CODED
        assert decided(members, ALWAYS, **gather, base=comm.IN_PLACE) == replace(CODED, with_base=True)
    sparse = torch.eye(100).to_sparse()
    assert decided(members, ALWAYS) == CODED
    assert decided(members, ALWAYS, outputs=[sparse]).reason == "no coded route on cpu (torch.sparse_coo) yet"


#: A link that is faster than the codec.
FAST = LinkProfile(((1.0, 1e-9), (1e9, 1e-3)), *(1e9,) * 3, *(1e11,) * 2, call=0)


def test_only_sums_with_the_bits_of_the_plain_one_may_be_plain(members: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a link that is faster than the codec; sums that round otherwise, and what gloo refuses, never are."""
    monkeypatch.setattr(decision, "link_profile", lambda state: FAST)
    for tolerance, kind in {"nan": "plain", "rounding": "raw frames", "bits": "plain"}.items():
        assert str(decided(members, AUTO, sum=SUM._replace(tolerance=tolerance))) == kind
    assert str(decided(members, AUTO, op="all_to_all", sum=NO_SUM)) == "raw frames"


def test_inside_a_node_mode_auto_is_plain(members: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the nodes are known, and the plain collective has the same bits; mode always codes."""
    rounding = SUM._replace(tolerance="rounding")
    for nodes, config, more, plain in (
        ([[0, 1]], AUTO, {}, True), ([[0], [1]], AUTO, {}, False), ([], AUTO, {}, False),
        ([[0, 1]], ALWAYS, {}, False), ([[0, 1]], AUTO, {"sum": rounding}, False),
    ):  # fmt: skip
        monkeypatch.setattr(decision, "group_nodes", lambda group, nodes=nodes: nodes)
        members.of(DecisionMemory).clear()
        assert (decided(members, config, **more).reason == PassReason.INSIDE_NODE.value) == plain


def test_the_memory_of_plans_is_bounded(members: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision, "REMEMBERED", 5)
    for numel in range(1, 40):
        assert decided(members, ALWAYS, numel=1000 + numel) == CODED
        assert len(members.of(DecisionMemory)) <= 5


def test_a_config_that_is_gone_lends_its_address_to_no_other(members: Any) -> None:
    """Plans are remembered by the config's identity, which only lasts as long as the config."""
    for number in range(50):
        config = replace(ALWAYS, roles={"dp": "never"} if number % 2 else {})
        assert decided(members, config).frames == (number % 2 == 0)
        del config


PASS = Decision(False, "", "plain is faster")


def carried_out(monkeypatch: pytest.MonkeyPatch, plan: Decision, plain: Callable[..., Any], **more: Any) -> Any:
    """The result of a call with 5000 floats that is decided on so; coded calls say so."""
    monkeypatch.setattr(decision, "group_state", lambda group: SimpleNamespace())
    monkeypatch.setattr(decision, "resolve_group", lambda group: "the group")
    monkeypatch.setattr("ds_zipccl.comm.request.group_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(decision, "lasting", lambda request, state: plan)
    chosen = SimpleNamespace(passes_now=lambda request: None, start=lambda request, decision: str(decision))
    monkeypatch.setattr(engine, "engine_of", lambda state, device: chosen)
    monkeypatch.setattr(engine, "engine_for", lambda request: chosen)
    request = request_of(**{"outputs": [torch.ones(NUMEL)], "plain": plain, "numel": 2 * NUMEL, **more})
    return execute(decide(request), request)


def test_a_plain_call_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes counted are those that this rank sends."""
    uneven = {"op": "all_to_all_single", "numel": None, "segments": Segments([7, NUMEL], [7, 9])}
    for more, nbytes in (({}, 8 * NUMEL), (uneven, 4 * NUMEL)):
        counters.reset()
        assert carried_out(monkeypatch, PASS, lambda *args: "handle", **more) == "handle"
        (row,) = counters.rows()
        assert (row["passed"], row["passed_bytes"], row["reasons"]) == (1, nbytes, {PASS.reason: 1})
    counters.reset()
    assert carried_out(monkeypatch, CODED, lambda *args: "handle") == "cascade frames"
    assert not counters.rows()


def test_a_failure_on_the_way_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fail(*args: Any) -> Any:
        calls.append(args)
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="closed"):
        carried_out(monkeypatch, PASS, fail)
    assert len(calls) == 1


def test_the_part_of_others() -> None:
    for ranks, part in ((1, 0), (2, 500), (3, 666), (-1, 0)):
        assert OPS["all_gather"].sent_bytes(1000, ranks) == part


def test_ranks_are_given_in_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states.dist, "get_group_rank", lambda group, rank: rank + 10)
    monkeypatch.setattr(states, "group_size", lambda group: 14)
    group: Any = object()
    assert group_rank(group, 3, None) == 13 and group_rank(group, None, 3) == 3
    assert group_rank(group, 0, None) == 10 and group_rank(group, None, 0) == 0
    for both in ((None, None), (0, 0), (1, 2)):
        with pytest.raises(ValueError, match="either a global rank or a group rank"):
            group_rank(group, *both)
    for unknown in ((4, None), (-11, None), (None, 14), (None, -1)):
        with pytest.raises(ValueError, match="wanted a rank of the group, 0 to 13, got"):
            group_rank(group, *unknown)


def mixture(*some: torch.Tensor) -> str:
    return unfit("all_gather_into_tensor", some[1:], some[:1])


def test_mixtures_are_named() -> None:
    one, half, meta = torch.empty(1), torch.empty(1).half(), torch.empty(1, device="meta")
    assert mixture(one) == mixture(one, one, one) == mixture(half, half) == ""
    for some in ([one, half], [half, one], [one, one, half], [one, half, one]):
        assert mixture(*some).endswith("got torch.float16 on cpu, torch.float32 on cpu")
    assert mixture(one, meta).endswith("got torch.float32 on cpu, torch.float32 on meta")


# ---- with ranks --------------------------------------------------------------------------------------------------------


@runner.together(2)
def mixed_dtypes_are_refused_before_anything_is_sent(rank: int, ranks: int) -> None:
    """One rank has a tensor of another dtype among those of a list: it says so, has sent nothing, and the next call finds all in step."""
    for config in (ALWAYS, AUTO):
        good, odd = torch.full((NUMEL,), float(rank)), torch.empty(NUMEL, dtype=torch.int32)
        places = [torch.empty(NUMEL) for _ in range(ranks)]
        wrong: tuple[Callable[[], Any], ...] = (
            lambda: comm.all_gather([places[0], odd], good, config=config),  # noqa: B023
            lambda: comm.all_gather(places, odd, config=config),  # noqa: B023
            lambda: comm.all_to_all(places, [good, odd], config=config),  # noqa: B023
            lambda: comm.all_to_all([places[0], odd], [good, good], config=config),  # noqa: B023
            lambda: comm.all_reduce_coalesced([good, odd], config=config),  # noqa: B023
        )
        if rank == 0:
            for call in wrong:
                counters.reset()
                with pytest.raises(ValueError, match="one dtype"):
                    call()
                assert not counters.rows()
        comm.all_gather(places, good, config=config)
        comm.all_to_all([torch.empty(NUMEL) for _ in range(ranks)], [good, good], config=config)
        assert [float(place[-1]) for place in places] == [0.0, 1.0]


@runner.together(2)
def a_callers_list_may_change_after_the_call(rank: int, ranks: int) -> None:
    """A caller empties its list of outputs after an asynchronous call, by frames."""
    for config in (AUTO, ALWAYS):
        places = [torch.zeros(2, NUMEL).t() for _ in range(ranks)]
        outputs = list(places)
        handle = comm.all_gather(places, torch.full((NUMEL, 2), float(rank + 1)), async_op=True, config=config)
        places.clear()
        handle.wait()
        assert [float(one.mean()) for one in outputs] == [1.0, 2.0]


@runner.together(2)
def ranks_outside_the_group(rank: int, ranks: int) -> None:
    """A rank outside the group runs torch's own collective, not the call of DeepSpeed's backend, which some ranks cannot make."""
    group = dist.new_group([0])
    output, called = torch.zeros(NUMEL), []
    comm.all_gather_coalesced(
        [output], [torch.ones(NUMEL)], group, config=AUTO, uncompressed_call=lambda: called.append(1)
    )
    assert len(called) == (rank == 0)


@runner.together(2)
def compared(rank: int, ranks: int) -> None:
    """Under torch's comparison of ranks, which takes messages of other numbers for a wrong program, everything passes."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    assert GroupState(dist.group.WORLD).backends == group_state(None).backends  # made before, without the comparison
    made_now = GroupState(dist.new_group([0, 1]))
    group_state(None).backends = made_now.backends  # as a program finds it that sets the variable
    counters.reset()
    for call in calls(shadowed(check="off"), rank, ranks, 0).values():
        call(False)
    tensor = torch.ones(NUMEL)
    comm.send(tensor, 1, config=ALWAYS) if rank == 0 else comm.recv(tensor, 0, config=ALWAYS)
    comm.reduce_to_owners(tensor, [(NUMEL, (0,))], group=dist.new_group([0, 1]), config=ALWAYS)
    found = {row["op"]: row["reasons"] for row in counters.rows() if not row["calls"]}
    reason = "no coded schedule for backend gloo under TORCH_DISTRIBUTED_DEBUG=DETAIL on cpu"
    assert all(reasons == {reason: 1} for reasons in found.values()), found
    assert len(found) == 13 and {"all_reduce", "all_gather", "reduce_to_owners", "recv" if rank else "send"} <= {*found}


DAMAGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "MAGIC": lambda frame: frame[0].add_(1),
    "VERSION": lambda frame: frame[4].fill_(99),
    "CODEC": lambda frame: frame[5].fill_(99),
    "DTYPE": lambda frame: frame[6].fill_(99),
    "MISMATCH": lambda frame: frame.copy_(compress(torch.ones(300).half(), "raw", shaped=False, checksum=False)),
}


@runner.together(3)
def damaged_frames(rank: int, ranks: int) -> None:
    """A rank that sends nonsense: its peers name it, and every operation after that is as good as before."""
    for code, damage in DAMAGES.items():

        def spoil(*arguments: Any, damage: Callable[[torch.Tensor], Any] = damage, **settings: Any) -> torch.Tensor:
            frame = compress(*arguments, **settings)
            damage(frame)
            return frame

        frames.compress = spoil if rank == 1 else compress
        for later in (False, True):
            output = torch.zeros(900, dtype=torch.bfloat16)
            call = partial(
                shadowed(check="off").all_gather_into_tensor, output, filled(rank, 300, corpus.BF16, 1), None, later
            )
            if rank == 1:
                wait(call())
                continue
            with pytest.raises(comm.CommError) as caught:
                call().wait()
            where = f"all_gather_into_tensor (group '0' of 3 ranks, role dp, global rank {rank})"
            assert str(caught.value).startswith(f"{where}: frame from global rank 1 refused: {code}: ")
            cause = caught.value.__cause__
            assert isinstance(cause, FrameError) and cause.code == FrameErrorCode[code]
        dist.barrier()
    frames.compress = compress
    output = torch.zeros(900, dtype=torch.bfloat16)
    comm.all_gather_into_tensor(output, filled(rank, 300, corpus.BF16, 1), config=SHADOWED)


test_programs = runner.programs(__name__)
