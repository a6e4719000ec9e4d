"""Messages that were sent before go as hashes: of a forward pass in its backward pass, masks and token numbers; and bytes in broadcasts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import ranks as runner
import torch
import torch.distributed as dist
from moves import CODED, colliding, wait
from operations import arguments
from test_bases import storage
from test_host_staging import _stage
from test_rows_in_messages import in_fragments, posted, rows_like

from ds_zipccl import codecs, comm
from ds_zipccl.codecs import compress
from ds_zipccl.codecs.known import FRAME_BYTES
from ds_zipccl.comm.buffer_pool import Latest
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.comm.host import engine, repeats
from ds_zipccl.comm.host.frames import SAMPLE_BYTES, ByteCoder, FrameCoder
from ds_zipccl.comm.host.p2p import known, message
from ds_zipccl.comm.host.repeats import Places, RepeatedSegments, RepeatMemory, Words
from ds_zipccl.comm.transport.protocol import TagRange
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.frame import CodecId, parse
from ds_zipccl.policy import wire
from ds_zipccl.policy.admission import SIDE_DTYPES, Message, candidates
from ds_zipccl.telemetry import counters

KEPT = replace(CODED, staging_mib=1, recompute_base="host")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OPS = ("all_to_all_single", "all_to_all", "in place", "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
ROLE = {"all_to_all_single": "ep", "all_to_all": "ep", "in place": "sp"}


class _Within(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.call()
        return grad, None


def in_backward(call: Callable[[], None]) -> None:
    """Call a function as autograd does in a backward pass."""
    _Within.apply(torch.ones(1, requires_grad=True), call).backward()


@dataclass(frozen=True)
class Call:
    """One call of a program, whose tensors all ranks know. ``sizes[a][b]``: rows from rank a to rank b. ``changed``: the ranks whose inputs
    differ in one bit from those of the forward pass."""

    op: str
    sizes: tuple[tuple[int, ...], ...]
    width: int
    dtype: torch.dtype
    seed: int
    later: bool = False
    changed: frozenset[int] = frozenset()
    group: Any = None

    def segments(self, rank: int) -> list[torch.Tensor]:
        """Return the inputs of a rank."""
        found = [
            rows_like(count, self.width, self.dtype, 99 * self.seed + 9 * rank + peer, 1 + count // 2)
            for peer, count in enumerate(self.sizes[rank])
        ]
        if rank in self.changed:
            for part in found:
                if part.numel():
                    part.view(torch.uint8).view(-1)[part.nbytes * 2 // 3] ^= 1
        return found

    def run(self, rank: int, config: ZipcclConfig) -> Callable[[], None]:
        """Make the call; the result waits for it, and compares every bit."""
        more: dict[str, Any] = {"config": config, "role": ROLE.get(self.op, "tp"), "group": self.group}
        more["async_op"] = self.later
        ranks = len(self.sizes)
        every = [self.segments(one) for one in range(ranks)]
        own = torch.cat(every[rank])
        if self.op in ("all_to_all_single", "all_to_all", "in place"):
            wanted = torch.cat([parts[rank] for parts in every])
            coming = [len(parts[rank]) for parts in every]
            if self.op == "all_to_all":
                got = [torch.full_like(parts[rank], 3) for parts in every]
                handle = comm.all_to_all(got, list(own.split([len(part) for part in every[rank]])), **more)
            else:
                out = own if self.op == "in place" else torch.full_like(wanted, 3)
                handle = comm.all_to_all_single(out, own, coming, [len(part) for part in every[rank]], **more)
                got = [out]
        else:
            flat = own.view(-1)
            given, plain = (
                # shards of two sizes
                (flat[1:].clone(),) if self.op == "all_reduce" else arguments(flat.clone(), ranks)[self.op]
                for _ in range(2)
            )
            getattr(dist, self.op)(*plain, group=self.group)
            got, wanted = [given[0]], plain[0]
            handle = getattr(comm, self.op)(*given, **more)

        def compare() -> None:
            wait(handle)
            there = torch.cat([part.reshape(-1) for part in got])
            assert torch.equal(there.view(torch.uint8), wanted.reshape(-1).view(torch.uint8)), f"{self}: words differ"

        return compare


def drawn(dice: np.random.Generator, ranks: int, most: int, seed: int) -> Call:
    op = OPS[dice.integers(len(OPS))]
    width = int(dice.choice([64, 100, 256]))
    sizes = dice.integers(0, most // width, (ranks, ranks))
    if op == "in place":
        sizes = np.maximum(sizes, sizes.T)
    if op not in ("all_to_all_single", "all_to_all", "in place"):
        sizes[:] = sizes[0, 0] + 1
    dtype = DTYPES[dice.integers(3)]
    return Call(op, tuple(map(tuple, sizes.tolist())), width, dtype, seed, bool(dice.random() < 0.3))


def programs(
    rank: int, ranks: int, seed: int, turns: int, limit_kib: int, plant: Callable[[pytest.MonkeyPatch, int], None] | None = None
) -> int:  # fmt: skip
    """A random program on two groups: forward and backward calls, asynchronous ones among them. Returns the hashes that this rank sent."""
    dice, config = np.random.default_rng(seed), KEPT
    groups = [dist.group.WORLD, dist.new_group(list(range(ranks)))]
    past: list[Call] = []
    flying: list[Callable[[], None]] = []
    with pytest.MonkeyPatch.context() as patch, posted() as frames:
        in_fragments(patch)
        patch.setattr(wire, "kept_bytes", lambda config, ranks: limit_kib << 10)
        if plant is not None:
            plant(patch, rank)
        for turn in range(turns):
            draw = dice.random()
            if draw < 0.45 or not past:
                call = replace(drawn(dice, ranks, 40_000, turn), group=groups[dice.integers(2)])
                past.append(call)
                flying.append(call.run(rank, config))
            elif draw < 0.95:
                call = past[int(len(past) * dice.random() ** 0.3)]
                call = replace(call, later=bool(dice.random() < 0.3))
                if dice.random() < 0.2:
                    call = replace(call, changed=frozenset([int(dice.integers(ranks))]))
                in_backward(lambda call=call: flying.append(call.run(rank, config)))  # type: ignore[misc]
            elif draw < 0.98:
                while flying:
                    flying.pop()()
            else:
                repeats.forget()
            assert group_state(None).of(RepeatMemory).nbytes <= 2 * ranks * limit_kib << 10  # type: ignore[union-attr]
        while flying:
            flying.pop()()
        return sum(parse(frame).codec == CodecId.KNOWN for frame in frames)


@runner.together(2, 1, 40, 1 << 16)
@runner.together(3, 2, 40, 300)
@runner.together(2, 3, 120, 300, full="more of the same")
@runner.together(3, 4, 120, 900, full="more of the same")
def random_programs(rank: int, ranks: int, seed: int, turns: int, limit: int) -> None:
    assert programs(rank, ranks, seed, turns, limit) > turns // 4


def hash_of_the_first_half(patch: pytest.MonkeyPatch, rank: int) -> None:
    """A segment passes for the kept one although bits behind its middle have changed."""
    whole = FrameCoder.hash
    patch.setattr(FrameCoder, "hash", lambda self, words: whole(self, words[: (words.numel() + 1) // 2]))


def earlier_eviction_on_one_rank(patch: pytest.MonkeyPatch, rank: int) -> None:
    limit = wire.kept_bytes
    patch.setattr(wire, "kept_bytes", lambda *given: limit(*given) // (2 if rank == 0 else 1))


def fragments_in_reverse(patch: pytest.MonkeyPatch, rank: int) -> None:
    """The receiver takes the frame of another fragment."""
    kept = repeats.Repeats.kept

    def wrong(self: Any, peer: int, nbytes: int, digests: Sequence[bytes]) -> Any:
        found = kept(self, peer, nbytes, digests)
        segments = [
            one for one in self.coming.seen.get(peer, ()) if one.frames and found is one.frames[len(digests) - 1]
        ]
        return segments[0].frames[-len(digests)] if segments else found

    patch.setattr(repeats.Repeats, "kept", wrong)


def drops_of_one_end(patch: pytest.MonkeyPatch, rank: int) -> None:
    """The receiver forgets a segment that has repeated, the sender does not."""
    drop = repeats.RepeatMemory.drop
    patch.setattr(repeats.RepeatMemory, "drop", lambda self, sent, received: drop(self, (), received))


def sizes_of_the_sum_in_the_gather(patch: pytest.MonkeyPatch, rank: int) -> None:
    whole = engine.places_of_shards
    patch.setattr(engine, "places_of_shards", lambda *given, gathered=False, **more: whole(*given, **more))


@pytest.mark.full(reason="each planted mistake starts ranks of its own")
@pytest.mark.parametrize(
    ("plant", "limit", "said"),
    [
        (hash_of_the_first_half, 1 << 16, "words differ"),
        (earlier_eviction_on_one_rank, 300, "that this rank does not keep"),
        (fragments_in_reverse, 1 << 16, "refused: MISMATCH"),
        (drops_of_one_end, 1 << 16, "that this rank does not keep"),
        (sizes_of_the_sum_in_the_gather, 1 << 16, "were reserved"),
    ],
)
def test_mistakes_are_seen(plant: Callable[[pytest.MonkeyPatch, int], None], limit: int, said: str) -> None:
    with pytest.raises(runner.RankFailure, match=said):
        runner.run(programs, 2, 6, 60, limit, plant)


def hashes_among(frames: Sequence[torch.Tensor]) -> int:
    """Return the number of hashes, where all of a message's frames are hashes or none is."""
    found = sum(parse(frame).codec == CodecId.KNOWN for frame in frames)
    assert found in (0, len(frames)) and all(frame.numel() == FRAME_BYTES for frame in frames[:found])
    return found


def sends(rank: int, call: Call, config: ZipcclConfig, again: bool) -> list[torch.Tensor]:
    """Make a call and wait; return its frames."""
    with posted() as frames:
        if again:
            in_backward(lambda: call.run(rank, config)())
        else:
            with torch.no_grad():  # as the first forward of reentrant checkpointing
                call.run(rank, config)()
    return frames


def even(op: str, ranks: int, rows: int, seed: int = 1, **more: Any) -> Call:
    return Call(op, ((rows,) * ranks,) * ranks, 256, torch.bfloat16, seed, **more)


@runner.together(2)
def frames_and_memory(rank: int, ranks: int) -> None:
    """A repeat sends a hash for each fragment, and frees the frames; a second one goes in full."""
    memory = group_state(None).of(RepeatMemory)  # type: ignore[union-attr]
    for rows in ("auto", "off"):
        for op in OPS:
            config, call = replace(KEPT, rows=rows), even(op, ranks, 1500)
            counters.reset()
            sent = sends(rank, call, config, again=False)
            assert not hashes_among(sent) and len(sent) > ranks - 1, "wanted several fragments"
            assert (op in ("all_to_all_single", "all_to_all") and rows == "auto") == any(
                parse(f).codec == CodecId.ROWS for f in sent[:2]
            )
            assert 0 < memory.nbytes <= 2 * 1500 * 256 * 2 * ranks
            assert hashes_among(again := sends(rank, call, config, again=True)) == len(sent) == len(again)
            assert memory.nbytes == 0
            (row,) = counters.rows()
            assert row["repeats"] and row["wire_bytes"] == sum(frame.numel() for frame in (*sent, *again))
            assert not hashes_among(sends(rank, call, config, again=True))
            assert counters.memory()["messages kept for recomputations, at most"] > 1500 * 128


@runner.together(2, "cpu", full="the short tier has the kernels, and the messages")
@runner.together(2, "cpu without kernels", full="the short tier has the kernels, and the messages")
def staged(rank: int, ranks: int, where: str) -> None:
    """Tensors of a device whose frames go through the host, with kernels and without. The emulated kernels are slow."""
    _stage(where)
    with pytest.MonkeyPatch.context() as patch:
        in_fragments(patch)
        for op in ("all_to_all_single", "all_reduce", "all_gather_into_tensor"):
            call = even(op, ranks, 44)
            assert not hashes_among(sent := sends(rank, call, KEPT, again=False)) and len(sent) > 2
            assert hashes_among(sends(rank, call, KEPT, again=True)) == len(sent)
            sends(rank, call, KEPT, again=False)
            sends(rank, replace(call, changed=frozenset(range(ranks))), KEPT, again=True)


@runner.together(3)
def the_oldest_go(rank: int, ranks: int) -> None:
    """Layers of 300 KiB to each peer, recomputed in reverse: with room for 1 MiB the last three repeat."""
    config = replace(KEPT, recompute_base_mib=ranks - 1)
    layers = [even("all_to_all_single", ranks, 600, seed) for seed in range(5)]
    for call in layers:
        sends(rank, call, config, again=False)
    repeated = [bool(hashes_among(sends(rank, call, config, again=True))) for call in reversed(layers)]
    assert repeated == [True, True, True, False, False]


@runner.together(2)
def kept_or_not(rank: int, ranks: int) -> None:
    """Whether the repeat of a call goes as hashes."""
    other = dist.new_group(list(range(ranks)))
    call, found = even("all_to_all_single", ranks, 600), {}

    def tried(name: str, first: Call = call, second: Call = call, again: bool = True, **more: Any) -> None:
        config = replace(KEPT, **more)
        sends(rank, first, config, again=False)
        if name == "step":
            repeats.forget()
        found[name] = bool(hashes_among(sends(rank, second, config, again)))
        repeats.forget()

    tried("repeated")
    tried("as lists", even("all_to_all", ranks, 600))
    tried("step")
    tried("other group", second=replace(call, group=other))
    tried("forward", again=False)
    tried("off", recompute_base="off")
    large, small = (even("all_to_all_single", ranks, rows) for rows in (4000, 7))
    tried("too large", large, large, recompute_base_mib=1)
    tried("small", small, small)
    tried("raw", codec="raw")
    tried("checked", check="shadow")
    sends(rank, call, KEPT, again=False)
    later = replace(call, later=True)  # asynchronous repeats keep their segment
    found["later"] = all([bool(hashes_among(sends(rank, later, KEPT, again=True))) for _ in range(2)])
    yes = ("repeated", "as lists", "raw", "checked", "later")
    assert found == {name: name in yes for name in found} and len(found) == 11


@runner.together(2)
def hashed(rank: int, ranks: int) -> None:
    """Gradients repeat nothing: whether there are hashes for a while, for messages of a known kind, and after a repeat."""
    hashes: list[torch.Tensor] = []
    whole = FrameCoder.hash
    config, forward = replace(KEPT, rows="off"), even("all_reduce", ranks, 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FrameCoder, "hash", lambda self, words: hashes.append(words) or whole(self, words))
        sends(rank, forward, config, again=False)
        counts = []
        for turns in (wire.REPEAT_MISSES, wire.UNHASHED, 1):
            hashes.clear()
            for turn in range(turns):
                sends(rank, even("all_reduce", ranks, 40, 100 + turn), config, again=True)
            counts.append(bool(hashes))
        x = torch.zeros(1000, 256)
        more: dict[str, Any] = {"config": config, "role": "ep"}
        comm.all_to_all_single(torch.empty_like(x), x, **more, kind="dispatch")
        hashes.clear()
        in_backward(lambda: comm.all_to_all_single(torch.empty_like(x), x, **more, kind="combine.bwd"))
        assert [*counts, bool(hashes)] == [True, False, True, False]


@runner.together(2, True, f"hash {bytes(range(16)).hex()} of a message of the forward pass")
@runner.together(2, False, "a known frame needs")
def forged(rank: int, ranks: int, again: bool, said: str) -> None:
    """Rank 1 sends the hash of a message that no rank keeps."""
    call = even("all_to_all_single", ranks, 600)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(RepeatedSegments, "next_hash", lambda self, peer: bytes(range(16)))
            sends(rank, replace(call, op="all_to_all"), KEPT, again)
            return
        with pytest.raises(comm.CommError) as refusal:
            sends(rank, call, KEPT, again)
        first = str(refusal.value)
        assert "frame from global rank 1 refused: " in first and said in first and "all_to_all_single (group" in first


def test_all_to_alls_go_flat() -> None:
    """The sizes between nodes are not known when an operation is opened."""
    for mode, count in (("always", 1), ("auto", 3)):
        for base, by_node in (("off", True), ("host", False)):
            config = ZipcclConfig(enabled=True, mode=mode, recompute_base=base)  # type: ignore[arg-type]
            message = Message("all_to_all_single", torch.bfloat16, None, 4, "cpu", "gloo", "ep")
            found = candidates(message, config, exact=True, levels=True)
            assert any(one.by_node for one in found) == by_node and len(found) == count + (mode == "auto" and by_node)


FORWARD = Words(torch.float32, "cpu")
NBYTES = 1 << 16
#: The hash of zeros: one for all dtypes.
DIGEST = b"zeros" + bytes(11)


def kept() -> RepeatMemory:
    """A memory with one segment of zeros, sent and received."""
    memory = RepeatMemory()
    places = Places({1: [NBYTES // 4]}, {1: [NBYTES // 4]})
    found = memory.open([places], FORWARD, 1 << 20, False, "all_reduce", 1.0)
    for side in (found.leaving, found.coming):
        segment = found.begin(side, 0, 1).kept
        assert segment is not None
        segment.add(DIGEST, NBYTES, torch.zeros(48, dtype=torch.uint8) if side is found.coming else None)
    found.end(drop=False)
    return memory


@pytest.mark.parametrize(
    "words", [FORWARD, Words(torch.bfloat16, "cpu"), Words(torch.int32, "cpu"), Words(torch.float32, "cuda")], ids=str
)
def test_equal_bytes_of_other_words_are_no_repeat(words: Words) -> None:
    memory = kept()
    places = Places(*({1: [NBYTES // words.dtype.itemsize]} for _ in range(2)))
    again = memory.open([places], words, 1 << 20, True, "all_reduce", 1.0)
    same = words == FORWARD
    assert again.like(1, NBYTES) is same
    assert again.repeats(again.leaving, 1, NBYTES, [DIGEST]) is same
    assert (again.kept(1, NBYTES, [DIGEST]) is not None) is same
    again.end(drop=True)
    assert again.kept(1, NBYTES, [DIGEST]) is None, "an operation that has ended holds no frames"
    assert memory.nbytes == 48


#: Fragments of 128 KiB; a channel remembers 256 KiB.
PIECES = replace(CODED, staging_mib=1)
HEADER, KNOWN = 32, 48


def exchange(rank: int, tensor: torch.Tensor, config: ZipcclConfig = CODED, **more: int) -> int:
    """Send ``tensor`` from rank 0 to rank 1, compare, and return the bytes that rank 0 has sent."""
    before = counters.totals()["wire_bytes"]
    if rank == 0:
        comm.send(tensor, 1, config=config, role="pp", **more)
    else:
        got = torch.zeros_like(tensor)
        comm.recv(got, 0, config=config, role="pp", **more)
        assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8))
        got.view(torch.uint8).fill_(1)  # the receiver must have a copy of its own
    return counters.totals()["wire_bytes"] - before


@runner.together(2)
def bytes_on_the_wire(rank: int, ranks: int) -> None:
    """Bytes on the wire of every dtype: in full, again, changed, back again; other groups, tags and sizes have their own."""
    sent = partial(exchange, rank)
    for dtype in SIDE_DTYPES:
        numel = 40000 // dtype.itemsize
        full = HEADER + (numel // 8 if dtype == torch.bool else 40000)
        first, second = storage(numel, dtype, 1), storage(numel, dtype, 2)
        found = [sent(tensor) for tensor in (first, first, second, second, first)]
        assert found == ([full, KNOWN, full, KNOWN, full] if rank == 0 else [0] * 5), (dtype, found)
    if rank == 0:
        mask = torch.zeros(40000, dtype=torch.uint8)
        mask[7] = 3  # a bool of another byte than 0 and 1
        odd = mask.view(torch.bool)
        assert [sent(odd), sent(odd)] == [HEADER + 40000, KNOWN]
    else:
        odd = torch.zeros(40000, dtype=torch.bool)
        for _ in range(2):
            comm.recv(odd, 0, config=CODED)
            assert odd.view(torch.uint8)[7] == 3 and int(odd.view(torch.uint8).sum()) == 3
    mask, group = storage(40000, torch.bool, 1), dist.new_group([0, 1])
    full = HEADER + 5000
    found = [sent(mask), sent(mask, tag=1), sent(mask, group=group), sent(mask), sent(mask, tag=1), sent(mask, tag=7)]
    found += [sent(mask, tag=7), sent(mask[:32000]), sent(mask[:2000]), sent(mask[:2000])]
    wanted = [full, full, full, KNOWN, KNOWN, full, full, HEADER + 4000, HEADER + 250, HEADER + 250]
    assert found == (wanted if rank == 0 else [0] * len(wanted)), found
    kept = counters.memory().get("copies of side tensors received", 0)
    assert kept == (40000 * (len(SIDE_DTYPES) + 2) + 32000 if rank else 0), kept
    large = storage(30000, torch.int64, 5), storage(200_000, torch.bool, 5), storage(60000, torch.int64, 5)
    found = [sent(tensor, PIECES) for tensor in large for _ in range(2)]
    rest = 32 + 60000 * 8
    fragments = -(-200_000 // (1 << 17))
    assert found == (
        [32 + 240_000, KNOWN, 32 + 25000 + fragments * HEADER, KNOWN, rest, rest] if rank == 0 else [0] * 6
    ), found


@runner.together(2, 0)
@runner.together(2, 1, full="more programs")
@runner.together(2, 2, full="more programs")
def in_step(rank: int, ranks: int, seed: int) -> None:
    """Random messages of three channels, more than they remember, received in any order of wait(), from any rank too."""
    choose = random.Random(seed)
    kinds = [
        (torch.bool, 90_000),
        (torch.int64, 9000),
        (torch.uint8, 70_000),
        (torch.int32, 40_000),
        (torch.float32, 5000),
    ]
    for _ in range(12):
        plan = [(choose.choice(kinds), choose.randrange(2), choose.randrange(3)) for _ in range(choose.randrange(1, 9))]
        anywhere, order = choose.random() < 0.3, choose.sample(range(len(plan)), len(plan))
        tensors = [storage(numel, dtype, content) for (dtype, numel), _, content in plan]
        if rank == 0:
            works = [comm.isend(t, 1, None, tag, config=PIECES) for t, (_, tag, _) in zip(tensors, plan, strict=True)]
            for work in works:
                work.wait()
        else:
            got = [torch.zeros_like(tensor) for tensor in tensors]
            source = None if anywhere else 0
            handles = [
                comm.irecv(g, source, None, tag, config=PIECES) for g, (_, tag, _) in zip(got, plan, strict=True)
            ]
            for at in order:
                handles[at].wait()
                assert torch.equal(got[at].view(torch.uint8), tensors[at].view(torch.uint8)), (plan, order, at)
        dist.barrier()


@runner.together(2)
def two_threads_on_one_channel(rank: int, ranks: int) -> None:
    """Two threads send tensors of one kind on one channel; the receiver takes them in the order of arrival. Posting is slow, so that a
    thread without a lock would look at what it remembers while the other one posts."""
    post = message.Outgoing._post_first

    def slow(self: message.Outgoing) -> object:
        announcement = post(self)
        time.sleep(1e-3)
        return announcement

    message.Outgoing._post_first = slow  # type: ignore[method-assign,assignment]
    first, second = storage(9000, torch.int64, 1), storage(9000, torch.int64, 2)
    if rank == 0:
        runner.at_once(
            *(lambda t=tensor: [comm.send(t, 1, config=CODED) for _ in range(40)] for tensor in (first, second))
        )
        return
    seen = []
    for _ in range(80):
        got = torch.zeros_like(first)
        comm.recv(got, config=CODED)
        seen.append(torch.equal(got, first))
        assert seen[-1] or torch.equal(got, second)
    assert sum(seen) == 40


def test_the_oldest_kind_is_dropped() -> None:
    latest: Latest[known.Kind, int] = Latest()
    kinds = [(torch.uint8, 10), (torch.int64, 1), (torch.bool, 7)]
    for number, kind in enumerate(kinds):
        latest.put(kind, number, 8 * kind[1] if kind[0] == torch.int64 else kind[1], 18)
    assert [latest.get(kind) for kind in kinds] == [None, 1, 2] and latest.nbytes == 15
    latest.put(kinds[1], 5, 8, 18)
    latest.put((torch.uint8, 4), 6, 4, 18)
    assert [latest.get(kind) for kind in kinds] == [None, 5, None], "a tensor sent again is the latest"


@runner.together(2)
def known_frames_are_refused(rank: int, ranks: int) -> None:
    """The receiver holds another copy, or has lost it: the hash tells. Nobody may send a known frame of floats, or one for a tag that
    remembers nothing."""
    mask, floats, numbers = storage(40000, torch.bool, 1), torch.zeros(3000), storage(9000, torch.int64, 1)
    exchange(rank, mask)
    if rank == 0:
        comm.send(mask, 1, config=CODED)
        comm.send(mask, 1, config=CODED)
        for tag, tensor in ((0, floats), (5, numbers)):
            out = torch.empty(48, dtype=torch.uint8)
            frame = codecs.known_frame(tensor.dtype, tensor.numel(), codecs.region_hash(tensor), out)
            dist.group.WORLD.send([frame], 1, TagRange.POINT_TO_POINT + tag).wait()
        return
    copies, kind = known.inbox(group_state(None), 0).copies(0), (torch.bool, 40000)
    copies.put(kind, ~mask, mask.nbytes, 1 << 20)
    for tag, tensor, said in ((0, mask, "MISMATCH"), (0, mask, ""), (0, floats, ""), (5, numbers, "")):
        with pytest.raises(comm.CommError, match=f"frame from global rank 0 refused.*{said}"):
            comm.recv(torch.zeros_like(tensor), 0, None, tag, config=CODED)
        copies._found.pop(kind, None)


@runner.together(2)
def tokens_that_were_made_to_collide(rank: int, ranks: int) -> None:
    """Two batches of tokens whose hashes without a key are equal: the second one arrives, and not the first one again."""
    for tokens in colliding(40_000):
        if rank:
            got = torch.zeros_like(tokens)
            comm.recv(got, 0, config=CODED)
            assert torch.equal(got, tokens)
        else:
            comm.send(tokens, 1, config=CODED)


#: Content of the bytes -> least ratio.
CONTENTS = {"bfloat16": 1.4, "float16": 1.1, "float32": 1.15, "random": 0.99, "zeros": 50.0, "numbers": 0.99}


def content(kind: str, nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(nbytes)
    numel = nbytes // 2 + 8
    if kind == "random":
        return torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)
    if kind == "zeros":
        return torch.zeros(nbytes, dtype=torch.uint8)
    if kind == "numbers":
        return torch.randint(0, 1 << 62, (numel,), generator=generator).view(torch.uint8)[:nbytes]
    values = (torch.randn(numel, generator=generator) * 0.02).to(getattr(torch, kind))
    return values.view(torch.uint8)[:nbytes].clone()


@runner.together(2)
@runner.together(3, full="as with two ranks")
def broadcasts(rank: int, ranks: int) -> None:
    for kind, least in CONTENTS.items():
        for nbytes in (0, 1, 5000, 300_002, 600_004, 300_001):
            for offset in (0, 2, 1) if nbytes == 600_004 else (0,):
                want = content(kind, nbytes)
                here = offset if rank == 0 else 3 * offset % 4  # every rank has its own address
                tensor = torch.zeros(nbytes + 8, dtype=torch.uint8)[here : here + nbytes]
                if rank == 0:
                    tensor.copy_(want)
                counters.reset()
                comm.broadcast(tensor, 0, config=PIECES)
                assert torch.equal(tensor, want), (kind, nbytes, offset)
                if rank == 0 and nbytes in (5000, 600_004):
                    (row,) = counters.rows()
                    assert row["ratio"] >= least, (kind, nbytes, row["ratio"])
    counters.reset()
    tensor = content("bfloat16", 300_000)
    comm.broadcast(tensor, 0, config=replace(PIECES, codec="raw"))
    (row,) = counters.rows()
    assert rank != 0 or row["ratio"] < 1
    for _ in range(15):
        tensor = content("bfloat16", 300_000) if rank == 0 else torch.zeros(300_000, dtype=torch.uint8)
        wait(comm.broadcast(tensor, 0, async_op=True, config=replace(PIECES, mode="auto")))
        assert torch.equal(tensor, content("bfloat16", 300_000))


@runner.together(2, "size", full="damage stays")
@runner.together(2, "damage")
@runner.together(2, "odd", full="damage stays")
def wrong_frames_are_refused(rank: int, ranks: int, what: str) -> None:
    """The root sends a frame of words that does not fit: of too few bytes, or damaged."""
    tensor = content("bfloat16", 300_001 if what == "odd" else 300_000)

    def wrong(self: ByteCoder, flat: torch.Tensor, *more: object) -> torch.Tensor:
        words = flat[:300_000].view(torch.bfloat16)
        frame = compress(words[:-1] if what == "size" else words, shaped=False, checksum=False)
        if what == "damage":
            frame[40:60] = 255
        return frame

    if rank == 0:
        ByteCoder.compress = wrong  # type: ignore[method-assign]
        comm.broadcast(tensor, 0, config=replace(PIECES, staging_mib=64))
        return
    with pytest.raises(comm.CommError, match="frame from global rank 0 refused"):
        comm.broadcast(tensor, 0, config=replace(PIECES, staging_mib=64))


@runner.together(2)
def no_frame_is_larger_than_that_of_the_bytes(rank: int, ranks: int) -> None:
    """A sample that shrinks a little, in the middle of bytes that do not: the frame of words is larger than the receiver's buffer."""
    nbytes = 1 << 20
    tensor = content("random", nbytes)
    middle = (nbytes - SAMPLE_BYTES) // 2
    tensor[middle + 4096 : middle + 8192] = content("bfloat16", 4096)
    words = compress(tensor.view(torch.bfloat16), shaped=False, checksum=False)
    assert words.numel() > nbytes + 32, "the data of this test"
    want = tensor.clone()
    if rank != 0:
        tensor.zero_()
    comm.broadcast(tensor, 0, config=replace(PIECES, staging_mib=64))
    assert torch.equal(tensor, want)
    assert rank != 0 or counters.rows()[0]["wire_bytes"] == nbytes + 32


test_programs = runner.programs(__name__)
