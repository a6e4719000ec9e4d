"""Sends and receives: bits, order, tags, sources, fragments, bad announcements, lost peers, and the rule of mode auto."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import corpus
import pytest
import ranks as runner
import torch
import torch.distributed as dist
from moves import AUTO, CODED, filled

from ds_zipccl import comm
from ds_zipccl.comm import decision
from ds_zipccl.comm.buffer_pool import POOL
from ds_zipccl.comm.host import messages
from ds_zipccl.comm.host.messages import Announcement, parse_announcement
from ds_zipccl.comm.ops import p2p
from ds_zipccl.comm.transport.protocol import BODY_TAGS, TAGS_PER_RANGE, TagRange
from ds_zipccl.comm.work import CommError
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.frame import HEADER_BYTES
from ds_zipccl.policy import admission
from ds_zipccl.policy.cost_model import LinkProfile
from ds_zipccl.telemetry import counters

send, recv, isend, irecv = (
    partial(getattr(comm, name), config=CODED, role="pp") for name in ("send", "recv", "isend", "irecv")
)


@runner.together(2)
def order(rank: int, ranks: int) -> None:
    """In order per tag; across tags in any order; beside collectives; what was sent may be overwritten."""
    tensors = [filled(5, 3000, corpus.BF16, number) for number in range(4)]
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
    if rank == 0:
        work.wait()
    else:
        got = torch.zeros(40, 75, dtype=torch.bfloat16).t()
        recv(got, 0)
        corpus.assert_same_bits(got.contiguous().view(-1), tensors[0])
    assert total.tolist() == [4.0] * 3000


@runner.together(3)
def sources(rank: int, ranks: int) -> None:
    """From anybody, by rank in a group, in a group whose ranks are turned round."""
    group = dist.new_group([2, 0, 1])
    members = dist.get_process_group_ranks(group)
    if rank == 0:
        got = torch.zeros(3000)
        work = irecv(got, group=group)
        work.wait()
        assert members[work.source_rank()] == 1
        corpus.assert_same_bits(got, filled(9, 3000, corpus.FP32, 2))
        dist.barrier()
        assert recv(got, group=group, group_src=members.index(2)) == 2
        corpus.assert_same_bits(got, filled(8, 3000, corpus.FP32, 2))
        return
    if rank == 1:
        send(filled(9, 3000, corpus.FP32, 2), 0, group)
    dist.barrier()
    if rank == 2:
        send(filled(8, 3000, corpus.FP32, 2), group=group, group_dst=members.index(0))


@runner.together(2)
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
        monkeypatch.setattr(decision, "link_profile", lambda state: profile)
        op = "recv" if peer is None else "send"
        return p2p._post(op, torch.ones(1 << 20), None, tag, (None, peer), config=config, role="pp").decision  # type: ignore[union-attr]

    members = SimpleNamespace(size=2, rank=1, backend=lambda device: "gloo")
    monkeypatch.setattr(p2p, "group_state", lambda group: members)
    monkeypatch.setattr(p2p, "resolve_group", lambda group: group)
    monkeypatch.setattr(p2p, "group_rank", lambda group, dst, group_dst: group_dst)
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


#: Fragments of 128 KiB.
PIECES = replace(CODED, staging_mib=1)
RAW = replace(PIECES, codec="raw")
PIECE = 1 << 16
SIZES = (0, 1, 7, 2049, 20001, PIECE, PIECE + 1, 3 * PIECE - 7, 11 * PIECE)


def textured(seed: int, size: int, kind: corpus.Float = corpus.BF16) -> torch.Tensor:
    """Words of all textures, other ones for each seed."""
    pattern = corpus.tensor(corpus.mixed(20001, kind, 128, seed), kind)
    return pattern.repeat(-(-size // pattern.numel()))[:size].clone()


@runner.together(2)
def bits(rank: int, ranks: int) -> None:
    """All sizes, dtypes and kinds of bodies, blocking and not, overwritten after isend; a tensor with gaps; counters."""
    logical = 0
    for seed, size in enumerate(SIZES * 3):
        for config in (PIECES, RAW):
            want = textured(seed, size, list(corpus.SUMMED.values())[seed % 3])
            if rank == 0:
                comm.send(want, 1, config=config, role="pp")
                scratch = want.clone()
                work = comm.isend(scratch, 1, config=config, role="pp")
                scratch.zero_()
                assert work.wait()
                comm.send(want.repeat_interleave(2)[::2], 1, config=config, role="pp")
                logical += 3 * want.nbytes
            else:
                for kind in range(3):
                    got = torch.zeros(size * 2, dtype=want.dtype)[::2] if kind == 2 else torch.zeros_like(want)
                    comm.irecv(got, 0, config=config, role="pp").wait() if kind == 1 else comm.recv(
                        got, 0, config=config, role="pp"
                    )
                    corpus.assert_same_bits(torch.empty_like(want).copy_(got), want)
    (row,) = counters.rows()
    assert row["calls"] == 6 * len(SIZES * 3) and (row["op"], row["role"]) == (("send", "recv")[rank], "pp"), row
    assert row["wire_bytes"] == 0 if rank else row["logical_bytes"] == logical > row["wire_bytes"] / 0.99, row


@runner.together(3)
def matching(rank: int, ranks: int) -> None:
    """Messages of one fragment and of several on one tag, waited for in any order, from any rank, from two threads at a time."""
    sizes = [3 * PIECE, 100, 5 * PIECE, 200, 2 * PIECE, 2 * PIECE]
    send, irecv = partial(comm.isend, config=PIECES), partial(comm.irecv, config=PIECES)
    if rank != 0:
        works = [send(textured(10 * rank + number, size), 0) for number, size in enumerate(sizes)]
        for work in works:
            work.wait()
        dist.barrier()
        assert [send(textured(90 + rank, 3 * PIECE), 0).wait() for _ in range(3)] == [True] * 3
        dist.barrier()
        _slowly()
        runner.at_once(*(partial(_send_many, rank, thread) for thread in range(2)))
        return
    places = {(peer, number): torch.zeros(size).bfloat16() for peer in (1, 2) for number, size in enumerate(sizes)}
    handles = {key: irecv(place, key[0]) for key, place in places.items()}
    for key in sorted(handles, key=lambda key: (key[1] * 5 % 6, -key[0])):
        assert handles[key].wait() and handles[key].source_rank() == key[0]
        corpus.assert_same_bits(places[key], textured(10 * key[0] + key[1], sizes[key[1]]))
    dist.barrier()
    seen = []
    anywhere = [torch.zeros(3 * PIECE).bfloat16() for _ in range(6)]
    for place, work in [(place, irecv(place)) for place in anywhere]:
        work.wait()
        seen.append(work.source_rank())
        corpus.assert_same_bits(place, textured(90 + seen[-1], 3 * PIECE))
    assert sorted(seen) == [1, 1, 1, 2, 2, 2]
    dist.barrier()
    for number in range(20):
        got = torch.zeros(3 * PIECE).bfloat16()
        source = comm.recv(got, config=PIECES)
        assert any(got.eq(10.0 * source + thread).all() for thread in range(2)), number


def _slowly() -> None:
    """Let other threads run between two fragments of a send."""
    post = messages.Outgoing._send

    def slow(self: messages.Outgoing, flat: torch.Tensor, tag: int) -> None:
        time.sleep(1e-3)
        post(self, flat, tag)

    messages.Outgoing._send = slow  # type: ignore[method-assign]


def _send_many(rank: int, thread: int) -> None:
    for _ in range(5):
        comm.send(torch.full((3 * PIECE,), 10.0 * rank + thread).bfloat16(), 0, config=PIECES)


@runner.together(2)
def progress_without_the_receivers_wait(rank: int, ranks: int) -> None:
    """A blocking send ends although the receiver waits for it only after a send of its own."""
    large, small = textured(1, 9 * PIECE), textured(2, 40000)
    got = torch.zeros_like(large if rank else small)
    if rank == 0:
        comm.send(large, 1, config=PIECES)
        comm.recv(got, 1, config=PIECES)
    else:
        work = comm.irecv(got, 0, config=PIECES)
        comm.send(small, 0, config=PIECES)
        work.wait()
    corpus.assert_same_bits(got, large if rank else small)


@runner.together(2)
def memory_is_bounded(rank: int, ranks: int) -> None:
    for config in (PIECES, RAW):
        tensor = torch.zeros(1 << 22, dtype=torch.bfloat16).random_()
        comm.send(tensor, 1, config=config) if rank == 0 else comm.recv(tensor, 0, config=config)
    assert 0 < POOL.peak <= PIECES.staging_mib << 20, POOL.peak


#: Bytes of an announcement of 200000 bfloat16 -> bytes that are refused, and words of the refusal.
BAD: dict[str, tuple[Callable[[bytearray], None], str]] = {
    "version": (lambda content: content.__setitem__(4, 1), "version 1"),
    "body": (lambda content: content.__setitem__(5, 7), "no announcement has them"),
    "dtype": (lambda content: content.__setitem__(6, 99), "no announcement has them"),
    "reserved": (lambda content: content.__setitem__(7, 1), "no announcement has them"),
    "number": (lambda content: content.__setitem__(11, 255), "no announcement has them"),
    "padding": (lambda content: content.__setitem__(31, 1), "no announcement has them"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_announcements_are_refused(case: str) -> None:
    announcement = Announcement(torch.bfloat16, 200000, BODY_TAGS - 1)
    content = bytearray(announcement.packed())
    assert len(content) == HEADER_BYTES, "any receive buffer holds it"
    part = torch.frombuffer(content + bytes(8), dtype=torch.uint8)
    assert parse_announcement(part) == announcement
    assert announcement.tag < 1 << 31 and announcement.tag >= TagRange.BODY > TagRange.CALIBRATION
    change, words = BAD[case]
    change(content)
    with pytest.raises(ValueError, match=words):
        parse_announcement(torch.frombuffer(content, dtype=torch.uint8))


#: dtype and elements of what is sent, and of what receives it; 1: a byte beside the address of a word.
OTHER_KINDS = [
    ((sent, numel), (received, more))
    for numel in (100, 40_000, 1_500_000)
    for sent, received, more in (
        (torch.bfloat16, torch.int64, numel),
        (torch.float32, torch.float64, numel + 1),
        (torch.bool, torch.float16, numel),
        (torch.int64, torch.bfloat16, 4 * numel + 5),
        (torch.bfloat16, torch.uint8, 2 * numel + 3),
        (torch.float16, torch.float16, numel + 7),
    )
]


#: One side has one fragment and the other one two.
FRAGMENTS_DIFFER = [((torch.complex128, 10_000), (torch.bfloat16, 80_000))]
FRAGMENTS_DIFFER += [one[::-1] for one in FRAGMENTS_DIFFER]


@runner.together(2)
def receives_of_another_dtype_or_size(rank: int, ranks: int) -> None:
    """As over gloo: the message is the first bytes, and the others stay."""
    cases = [*itertools.product((CODED, MEASURED, ZipcclConfig(enabled=True)), OTHER_KINDS)]
    for config, ((sent, numel), (received, more)) in [*cases, *itertools.product([PIECES], FRAGMENTS_DIFFER)]:
        if rank == 0:
            tensor = (torch.arange(numel) % 3).to(sent)
            dist.send(tensor, 1)
            comm.send(tensor, 1, config=config)
            continue
        want, got = (torch.full((more + 1,), 7).to(received)[1:] for _ in range(2))
        dist.recv(want, 0)
        comm.recv(got, 0, config=config)
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), (config, sent, numel, received, more)


@runner.together(2)
def shorter_receives(rank: int, ranks: int) -> None:
    """Refused; gloo ends the process."""
    if rank:
        with pytest.raises(CommError, match=r"frame .* refused: 1000 elements of torch.int64 have 8000 bytes"):
            recv(torch.zeros(999, dtype=torch.int64), 0)
    else:
        send(torch.arange(1000), 1)


def _damage(what: str) -> None:
    """Damage what this rank sends: the announcement, or the third frame of the body."""
    calls, packed, compress = [0], Announcement.packed, messages.FrameCoder.compress

    def damaged_packed(self: Announcement) -> bytes:
        return packed(self._replace(numel=self.numel + 1))

    def damaged_frame(self: messages.FrameCoder, flat: torch.Tensor, *more: object) -> torch.Tensor:
        frame = compress(self, flat, *more)  # type: ignore[arg-type]
        calls[0] += 1
        if calls[0] == 3:
            frame[20] += 1
        return frame

    if what == "announcement":
        Announcement.packed = damaged_packed  # type: ignore[method-assign]
    else:
        messages.FrameCoder.compress = damaged_frame  # type: ignore[method-assign]


@runner.together(2, "announcement")
@runner.together(2, "frame")
def damage_is_refused(rank: int, ranks: int, what: str) -> None:
    """The receiver's error, where the sender may be left with frames that nobody takes: it does not wait for them."""
    tensor = textured(3, 5 * PIECE)
    if rank == 0:
        _damage(what)
        handle = comm.isend(tensor, 1, config=PIECES)
        dist.barrier()
        del handle
        return
    with pytest.raises(comm.CommError, match=f"{what} from global rank 0 refused"):
        comm.recv(tensor, 0, config=PIECES)
    dist.barrier()


def lost(rank: int, ranks: int, role: str) -> None:
    """The sender or the receiver leaves in the middle of a body; the other rank gets an error that names it."""
    tensor, leaves = textured(4, 64 * PIECE), ("sender", "receiver").index(role)
    if rank == leaves:
        _leave_after(3)
    with pytest.raises(comm.CommError, match=f"global rank {leaves}"):
        for _ in range(50):  # the transport of the other rank may have taken all frames already
            comm.send(tensor, 1, config=PIECES) if rank == 0 else comm.irecv(tensor, 0, config=PIECES).wait()
    raise AssertionError("the peer left and was named")


def _leave_after(frames: int) -> None:
    """Let this rank exit at its frame number ``frames``, sent or received."""
    name = ("compress", "decompress")[dist.get_rank()]
    left, original = [frames], getattr(messages.FrameCoder, name)

    def exits(*arguments: object, **more: object) -> object:
        left[0] -= 1
        return original(*arguments, **more) if left[0] else os._exit(3)

    setattr(messages.FrameCoder, name, exits)


@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_a_lost_peer_is_named(monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    monkeypatch.setattr(runner, "GRACE", 20.0)
    with pytest.raises(runner.RankFailure, match="the peer left and was named"):
        runner.run(lost, 2, role, timeout=30)


MEASURED = ZipcclConfig(enabled=True, staging_mib=1)


@runner.together(2, full="it sleeps beyond a timeout")
def the_timeout_of_a_receive_begins_with_its_wait(rank: int, ranks: int) -> None:
    """Rank 0 posts a receive long before the message, and later waits for one that never comes."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    out = torch.zeros(1 << 20, dtype=torch.bfloat16)
    if rank:
        time.sleep(3)
        comm.send(torch.ones_like(out), 0, group, config=MEASURED)
        comm.recv(out, 0, group, config=MEASURED)
        assert bool((out == 1).all())
    else:
        handle = comm.irecv(out, 1, group, config=MEASURED)
        time.sleep(3.5)
        handle.wait()
        comm.send(out, 1, group, config=MEASURED)
        started = time.monotonic()
        with pytest.raises(CommError, match="not done after 0:00:02"):
            comm.irecv(out, 1, group, config=MEASURED).wait()
        assert time.monotonic() - started < 10
    dist.barrier()


test_programs = runner.programs(__name__)
