"""send, recv, isend and irecv: bits, order, tags, sources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import corpus
import pytest
import ranks as runner
import torch
import torch.distributed as dist

from ds_zipccl import comm
from ds_zipccl.comm import decision
from ds_zipccl.comm.host.p2p import message as p2p_message
from ds_zipccl.comm.ops import p2p
from ds_zipccl.comm.transport.protocol import TAGS_PER_RANGE, TagRange
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy import admission
from ds_zipccl.policy.cost_model import LinkProfile
from ds_zipccl.telemetry import counters

CODED = ZipcclConfig(enabled=True, mode="always", min_bytes=0)
SIZES = (0, 1, 7, 2049, 20001)
send, recv, isend, irecv = (
    partial(getattr(comm, name), config=CODED, role="pp") for name in ("send", "recv", "isend", "irecv")
)


def filled(rank: int, size: int, seed: int) -> torch.Tensor:
    kind = list(corpus.SUMMED.values())[seed % 3]
    return corpus.tensor(corpus.mixed(size, kind, 128, 101 * seed + rank), kind)


def back_and_forth(rank: int, ranks: int) -> None:
    for seed, size in enumerate(SIZES * 3):
        tensor = filled(0, size, seed)
        if rank == 0:
            send(tensor, 1)
            answer = torch.empty_like(tensor)
            assert recv(answer, 1, None, 3) == 1
            corpus.assert_same_bits(answer, filled(1, size, seed))
        else:
            got = torch.empty_like(tensor)
            assert recv(got, 0) == 0
            corpus.assert_same_bits(got, tensor)
            work = isend(filled(1, size, seed), 0, None, 3)
            assert work.wait() and work.wait() and work.is_completed() and work.is_success()
    sent = sum(filled(0, size, seed).nbytes for seed, size in enumerate(SIZES * 3))
    rows = {row["op"]: row for row in counters.rows()}
    assert rows["send"]["role"] == "pp" and rows["send"]["logical_bytes"] == sent and rows["send"]["wire_bytes"] > 0
    assert rows["recv"]["calls"] == len(SIZES) * 3 and rows["recv"]["wire_bytes"] == 0


def test_back_and_forth() -> None:
    runner.run(back_and_forth, 2)


def order(rank: int, ranks: int) -> None:
    """In order per tag; across tags in any order; beside collectives; what was sent may be overwritten."""
    tensors = [filled(5, 3000, 3 * number) for number in range(4)]
    if rank == 0:
        works = []
        for number, tensor in enumerate(tensors):
            scratch = tensor.clone()
            works.append(isend(scratch, 1, None, number % 2))
            scratch.zero_()
        for work in works:
            work.wait()
    else:
        places = [torch.zeros_like(tensor) for tensor in tensors]
        works = {number: irecv(places[number], 0, None, number % 2) for number in (1, 3, 0, 2)}
        for number in (2, 3, 1, 0):
            works[number].wait()
            assert works[number].is_completed()
            corpus.assert_same_bits(places[number], tensors[number])
    total = torch.ones(3000)
    if rank == 0:
        work = isend(tensors[0], 1)
        comm.all_reduce(total, config=CODED)
        dist.all_reduce(total)
        work.wait()
    else:
        comm.all_reduce(total, config=CODED)
        dist.all_reduce(total)
        got = torch.zeros(40, 75, dtype=torch.bfloat16).t()
        recv(got, 0)
        corpus.assert_same_bits(got.contiguous().view(-1), tensors[0])
    assert total.tolist() == [4.0] * 3000


def test_order() -> None:
    runner.run(order, 2)


def sources(rank: int, ranks: int) -> None:
    """From anybody, by rank in a group, in a group whose ranks are turned round."""
    group = dist.new_group([2, 0, 1])
    members = dist.get_process_group_ranks(group)
    if rank == 0:
        seen = set()
        for _ in range(ranks - 1):
            got = torch.zeros(3000)
            source = recv(got)
            corpus.assert_same_bits(got, filled(source, 3000, 2))
            seen.add(source)
        assert seen == {1, 2}
        dist.barrier()
        got = torch.zeros(3000)
        work = irecv(got, group=group)
        work.wait()
        assert members[work.source_rank()] == 1
        corpus.assert_same_bits(got, filled(9, 3000, 2))
        dist.barrier()
        assert recv(got, group=group, group_src=members.index(2)) == 2
        corpus.assert_same_bits(got, filled(8, 3000, 2))
        return
    send(filled(rank, 3000, 2), 0)
    dist.barrier()
    if rank == 1:
        send(filled(9, 3000, 2), 0, group)
    dist.barrier()
    if rank == 2:
        send(filled(8, 3000, 2), group=group, group_dst=members.index(0))


def test_sources() -> None:
    runner.run(sources, 3)


def passes(rank: int, ranks: int) -> None:
    tensor = torch.full((5,), float(rank))
    if rank == 0:
        send(tensor, 1, None, TAGS_PER_RANGE)
    else:
        assert recv(tensor, 0, None, TAGS_PER_RANGE) == 0
        assert tensor.tolist() == [0] * 5
    rows = {row["op"]: row["reasons"] for row in counters.rows()}
    assert rows == {"send" if rank == 0 else "recv": {f"tag not below {TAGS_PER_RANGE}": 1}}, rows
    with pytest.raises(ValueError, match="this rank itself"):
        send(tensor, rank)
    outside = dist.new_group([0])
    if rank == 1:
        assert irecv(tensor, 0, outside) is None and recv(tensor, 0, outside) == -1


def test_passes() -> None:
    runner.run(passes, 2)


AUTO = replace(CODED, mode="auto")
SLOW, FAST = (LinkProfile(((4096.0, 1e-4), (32e6, end)), *(8e9,) * 5, call=0) for end in (0.26, 0.003))
#: peer, tag, config, what was measured -> why the message passes; empty where it is coded.
PLANS: dict[str, tuple[int | None, int, ZipcclConfig, LinkProfile | None, str]] = {
    "coded": (0, 0, CODED, None, ""),
    "highest tag": (0, TAGS_PER_RANGE - 1, CODED, None, ""),
    "higher tag": (0, TAGS_PER_RANGE, CODED, None, f"tag not below {TAGS_PER_RANGE}"),
    "highest tag of programs": (0, TagRange.COLLECTIVE - 1, CODED, None, f"tag not below {TAGS_PER_RANGE}"),
    "negative tag": (0, -1, CODED, None, f"tag not below {TAGS_PER_RANGE}"),
    "from anybody": (None, 0, CODED, None, ""),
    "to itself": (1, 0, CODED, None, "to itself"),
    "slow link": (0, 0, AUTO, SLOW, ""),
    "fast link": (0, 0, AUTO, FAST, "link faster than coding"),
    "fast link, always": (0, 0, CODED, FAST, ""),
    "fast link, this role always": (0, 0, replace(AUTO, roles={"pp": "always"}), FAST, ""),
    "nothing measured": (0, 0, AUTO, None, ""),
    "never": (1, TAGS_PER_RANGE, replace(CODED, roles={"pp": "never"}), FAST, "role is never coded"),
}


@pytest.fixture
def plan_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., admission.Decision]:
    """The plan for a message of rank 1 of 2."""

    def decided(
        peer: int | None, tag: int, config: ZipcclConfig, profile: LinkProfile | None = None
    ) -> admission.Decision:
        monkeypatch.setattr(decision, "link_profile", lambda state, device: profile)
        return p2p._decide("send", torch.ones(1 << 20), None, tag, peer, config, "pp")  # type: ignore[arg-type]

    members = SimpleNamespace(size=2, rank=1, backend=lambda device: "gloo")
    monkeypatch.setattr(p2p, "group_state", lambda group: members)
    return decided


@pytest.mark.parametrize("case", PLANS)
def test_which_messages_are_coded(plan_of: Callable[..., admission.Decision], case: str) -> None:
    *message, reason = PLANS[case]
    assert plan_of(*message) == admission.Decision(not reason, "" if reason else "cascade", reason)


def test_tags_of_our_own_are_refused(plan_of: Callable[..., admission.Decision]) -> None:
    with pytest.raises(ValueError, match=f"tag must be below {TagRange.COLLECTIVE}, got {TagRange.COLLECTIVE}"):
        plan_of(0, TagRange.COLLECTIVE, CODED)
    for config in (ZipcclConfig(), replace(CODED, roles={"pp": "never"})):
        assert not plan_of(0, TagRange.COLLECTIVE, config).frames, "where nothing is coded the tag is the program's"


def test_a_timeout_is_the_transports() -> None:
    """Without one the group's own counts, which gloo takes where none is given."""
    given: list[tuple[timedelta, ...]] = []
    handle: Any = SimpleNamespace(wait=lambda *timeout: given.append(timeout))
    p2p_message.wait(handle, None)
    p2p_message.wait(handle, timedelta(seconds=3))
    assert given == [(), (timedelta(seconds=3),)]
