"""Messages as input from another machine: damage, loss, order, hostile sizes, files and sockets. A refusal changes no word."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import random
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import states
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sync import refused

from ds_zipccl import sync
from ds_zipccl.sync import Receiver, Sender, SyncError, SyncErrorCode, message

Code = SyncErrorCode
Pair = states.Pair


def _bytes(parts: list[torch.Tensor]) -> list[bytes]:
    return [part.numpy().tobytes() for part in parts]


def _signed_head(start: bytes, manifest: bytes) -> bytes:
    """A head of these 72 bytes with the right length and checksum, as a hostile sender writes it."""
    start = start[:56] + struct.pack("<Q", len(manifest)) + start[64:72]
    return start + struct.pack("<Q", xxhash.xxh3_64_intdigest(start + manifest)) + manifest


def _signed_record(start: bytes, frame: bytes) -> bytes:
    start = start[:8] + struct.pack("<Q", len(frame)) + start[16:40]
    return start + struct.pack("<Q", xxhash.xxh3_64_intdigest(start + frame)) + frame


# ---- the layout ---------------------------------------------------------------------------------------------------------


def test_the_layout_is_that_of_the_document() -> None:
    """A message taken apart by the tables of the module's docstring alone."""
    made = Sender()
    tensor = torch.tensor([[1, 2, 3]], dtype=torch.int16)
    first = _bytes(list(made.pack({"é": tensor, "two": tensor})))
    head, (record,) = first[0], first[1:]
    assert (head[:4], head[4:8]) == (b"ZSYN", bytes([1, 1, 1, 0]))
    version, base = struct.unpack("<QQ", head[8:24])
    manifest_bytes, records, zero, checksum = struct.unpack("<QIIQ", head[56:80])
    assert (version, base, records, zero) == (1, 0, 1, 0) and len(head) == 80 + manifest_bytes
    assert checksum == xxhash.xxh3_64_intdigest(head[:72] + head[80:])
    manifest = struct.pack("<IH", 2, 2) + "é".encode() + struct.pack("<BBQQ", 7, 2, 1, 3)
    assert head[80:] == manifest + struct.pack("<H", 3) + b"two" + struct.pack("<BI", 0, 0)
    assert record[:4] == b"ZSYR" and struct.unpack("<IQ", record[4:16]) == (0, len(record) - 48)
    frame = torch.frombuffer(bytearray(record[48:]), dtype=torch.uint8)
    assert sync.held.codecs.decompress(frame).tolist() == [1, 2, 3]
    assert record[16:32] == sync.held.codecs.region_hash(tensor)
    assert record[32:40] == head[24:32]
    assert struct.unpack("<Q", record[40:48])[0] == xxhash.xxh3_64_intdigest(record[:40] + record[48:])
    second = _bytes(list(made.pack({"é": tensor, "two": tensor})))[0]
    assert second[4:8] == bytes([1, 2, 0, 0]) and struct.unpack("<QQ", second[8:24]) == (2, 1) and len(second) == 80
    assert second[40:56] == head[24:40]
    partial = _bytes(list(made.pack({"two": tensor}, partial=True)))[0]
    assert partial[4:8] == bytes([1, 2, 3, 0])


# ---- planted --------------------------------------------------------------------------------------------------------------


def apply_all(receiver: Receiver, state: states.State, frames: list[torch.Tensor]) -> None:
    states.assert_same(receiver.apply(frames), state)


def test_a_lost_part_is_refused(pair: Pair) -> None:
    _, receiver, state, frames = pair
    for lost in range(len(frames)):
        codes = (Code.FORMAT, Code.TRUNCATED) if lost == 0 else (Code.ORDER, Code.TRUNCATED)
        refused(receiver, frames[:lost] + frames[lost + 1 :], *codes)
    refused(receiver, [], Code.TRUNCATED)
    apply_all(receiver, state, frames)  # the control: nothing lost


def test_parts_in_another_order_or_twice_are_refused(pair: Pair) -> None:
    made, receiver, state, frames = pair
    for at in range(1, len(frames) - 1):
        swapped = [*frames[:at], frames[at + 1], frames[at], *frames[at + 2 :]]
        assert f"wanted {at - 1}" in str(refused(receiver, swapped, Code.ORDER))
    for at in range(len(frames)):
        refused(receiver, [*frames[: at + 1], *frames[at:]], Code.ORDER, Code.TRUNCATED, Code.FORMAT)
    other = list(made.pack(state))
    assert "another message" in str(refused(receiver, [frames[0], *other[1:]], Code.ORDER))
    refused(receiver, [*frames, *other], Code.ORDER)
    apply_all(receiver, state, frames)


@pytest.mark.parametrize("kind", ["delta", "full"])
def test_one_flipped_bit_anywhere_is_refused(kind: str, small: None) -> None:
    chance = random.Random(3)
    made, receiver = states.sender(256), Receiver()
    state = {"a": states.some(200, torch.bfloat16, chance), "f": states.some(20, torch.float32, chance)}
    receiver.apply(made.pack(state))
    state["a"].view(torch.int16)[::7] += 1
    frames = _bytes(list(made.pack(state, full=kind == "full")))
    assert len(frames) > 3
    for at, part in enumerate(frames):
        for place in range(len(part)):
            damaged = bytearray(part)
            damaged[place] ^= 1 << chance.randrange(8)
            with pytest.raises(SyncError):
                receiver.apply([*frames[:at], bytes(damaged), *frames[at + 1 :]])
            assert receiver.version == 1
    apply_all(receiver, state, frames)  # type: ignore[arg-type]


def test_every_shortened_file_is_refused(pair: Pair, tmp_path: Path) -> None:
    _, receiver, state, frames = pair
    path = tmp_path / "weights.zsync"
    whole = b"".join(_bytes(frames))
    assert sync.save(frames, path) == len(whole) and path.read_bytes() == whole
    for size in [*range(0, 200), *range(200, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:size])
        refused(receiver, sync.load(path), Code.TRUNCATED)
    path.write_bytes(whole + b"x")
    refused(receiver, sync.load(path), Code.FORMAT)
    path.write_bytes(whole)
    apply_all(receiver, state, sync.load(path))  # type: ignore[arg-type]


def test_a_file_is_whole_or_not_there(pair: Pair, tmp_path: Path) -> None:
    _, _, _, frames = pair
    path = tmp_path / "weights.zsync"
    path.write_bytes(b"old")

    def dying() -> Iterator[torch.Tensor]:
        yield from frames[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sync.save(dying(), path)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["weights.zsync"]


def test_a_receiver_that_died_starts_again_from_its_file(pair: Pair, tmp_path: Path) -> None:
    """What was saved before the message in whose middle it died is whole, and nothing else is needed."""
    made, receiver, state, frames = pair
    sync.save(receiver.snapshot(), tmp_path / "kept")
    (tmp_path / "another").touch()
    assert (tmp_path / "kept").stat().st_mode == (tmp_path / "another").stat().st_mode, "the umask decides"
    refused(receiver, frames[:2], Code.TRUNCATED)
    again = Receiver()
    again.apply(sync.load(tmp_path / "kept"))
    apply_all(again, state, frames)
    state["a"][5] += 1
    apply_all(again, state, made.pack(state))  # type: ignore[arg-type]


# ---- hostile ----------------------------------------------------------------------------------------------------------------


def _manifest(*tensors: bytes) -> bytes:
    return struct.pack("<I", len(tensors)) + b"".join(tensors)


def _tensor(name: bytes, dtype: int, *sizes: int, ndim: int | None = None) -> bytes:
    given = len(sizes) if ndim is None else ndim
    return struct.pack("<H", len(name)) + name + struct.pack(f"<BB{len(sizes)}Q", dtype, given, *sizes)


def _tied(name: bytes, index: int) -> bytes:
    return struct.pack("<H", len(name)) + name + struct.pack("<BI", 0, index)


MANIFESTS = {
    "empty": (b"", Code.MANIFEST),
    "too many tensors": (struct.pack("<I", 0xFFFFFFFF), Code.LIMIT),
    "tensors that do not follow": (struct.pack("<I", message.MAX_TENSORS), Code.MANIFEST),
    "bytes behind": (_manifest(_tensor(b"a", 1, 4)) + b"x", Code.MANIFEST),
    "a name twice": (_manifest(_tensor(b"a", 1, 4), _tensor(b"a", 1, 4)), Code.MANIFEST),
    "no such dtype": (_manifest(_tensor(b"a", 99, 4)), Code.MANIFEST),
    "a name that is no text": (_manifest(_tensor(b"\xff", 1, 4)), Code.MANIFEST),
    "a name cut short": (_manifest(struct.pack("<H", 999) + b"a"), Code.MANIFEST),
    "65 dimensions": (_manifest(_tensor(b"a", 1, *[1] * 65)), Code.MANIFEST),
    "sizes that do not follow": (_manifest(_tensor(b"a", 1, 4, ndim=9)), Code.MANIFEST),
    "a negative size": (_manifest(_tensor(b"a", 1, 1 << 63)), Code.MANIFEST),
    "sizes that overflow": (_manifest(_tensor(b"a", 1, 1 << 40, 1 << 40, 0)), Code.MANIFEST),
    "tied to itself": (_manifest(_tied(b"a", 0)), Code.MANIFEST),
    "tied in a circle": (_manifest(_tied(b"a", 1), _tied(b"b", 0)), Code.MANIFEST),
    "tied to nothing": (_manifest(_tensor(b"a", 1, 4), _tied(b"b", 7)), Code.MANIFEST),
    "a large tensor": (_manifest(_tensor(b"a", 4, 1 << 40)), Code.LIMIT),
    "a large state": (_manifest(_tensor(b"a", 4, 1 << 20), _tensor(b"b", 4, 1 << 20)), Code.LIMIT),
    "sound, and no record": (_manifest(_tensor(b"a", 4, 1 << 20)), Code.TRUNCATED),  # the control
}


@pytest.mark.parametrize(("manifest", "code"), MANIFESTS.values(), ids=MANIFESTS)
def test_a_hostile_manifest_is_refused(manifest: bytes, code: SyncErrorCode) -> None:
    start = struct.pack("<4s4BQQ16s16sQII", b"ZSYN", 1, 1, 1, 0, 1, 0, bytes(range(16)), bytes(16), 0, 3, 0)
    receiver = Receiver(max_bytes=12 << 20)
    assert refused(receiver, [_signed_head(start, manifest)], code)


@pytest.mark.parametrize(
    "place, value, code",
    [
        (0, b"ZCCL", Code.FORMAT),
        (4, b"\2", Code.FORMAT),
        (5, b"\3", Code.FORMAT),
        (6, b"\4", Code.FORMAT),
        (6, b"\2", Code.FORMAT),
        (7, b"\1", Code.FORMAT),
        (8, bytes(8), Code.FORMAT),
        (16, bytes(8), Code.FORMAT),
        (40, b"\0", Code.BASE),
        (64, b"\xff\xff\xff\xff", Code.LIMIT),
        (64, b"\1\0\0\0", Code.TRUNCATED),
        (68, b"\1", Code.FORMAT),
    ],
)
def test_a_hostile_head_is_refused(place: int, value: bytes, code: SyncErrorCode, pair: Pair) -> None:
    _, receiver, state, frames = pair
    head = bytearray(frames[0].numpy().tobytes())
    manifest = bytes(head[80:])
    if head[place : place + len(value)] == value:
        value = b"\1"
    head[place : place + len(value)] = value
    refused(receiver, [_signed_head(bytes(head), manifest), *frames[1:]], code)
    apply_all(receiver, state, frames)


@settings(max_examples=60)
@given(data=st.data())
def test_damage_with_a_right_checksum_gives_a_state_or_a_sync_error(data: st.DataObject) -> None:
    """Manifests and frames of a hostile sender: no other error, no wrong words for the frame's hash, and no change where it is refused."""
    made, receiver = Sender(block=128), Receiver(max_bytes=1 << 20)
    torch.manual_seed(1)
    state = {"a": torch.randn(600).bfloat16(), "b": torch.randn(40), "n": torch.arange(9), "t": torch.zeros(2, 3)}
    receiver.apply(made.pack(state))
    state = {**states.copy(state), "c": torch.ones(50)}
    state["a"].view(torch.int16)[::9] += 1
    del state["t"]
    frames = _bytes(list(made.pack(state, full=data.draw(st.booleans()))))
    at = data.draw(st.integers(0, len(frames) - 1))
    fixed = 72 if at == 0 else 40
    start, rest = bytearray(frames[at][:fixed]), bytearray(frames[at][fixed + 8 :])
    for _ in range(data.draw(st.integers(1, 3))):
        target = rest if data.draw(st.booleans()) and rest else start
        place = data.draw(st.integers(0, len(target) - 1))
        if data.draw(st.booleans()):
            target[place] = data.draw(st.integers(0, 255))
        elif target is rest:
            del target[place : place + data.draw(st.integers(1, 40))]
    frames[at] = (_signed_head if at == 0 else _signed_record)(bytes(start), bytes(rest))
    before = states.copy(receiver.state)
    try:
        receiver.apply(frames)
    except SyncError:
        assert receiver.version == 1
        states.assert_same(states.copy(receiver.state), before)
    else:
        assert at == 0 or all(
            torch.equal(states.bits(receiver.state[name]), states.bits(state[name])) for name in state
        )


def test_claims_of_a_stream_are_refused_before_memory_is_taken() -> None:
    head = struct.pack("<4s4BQQ16s16sQIIQ", b"ZSYN", 1, 1, 1, 0, 1, 0, bytes(16), bytes(16), 1 << 50, 0, 0, 0)
    with pytest.raises(SyncError, match=f"LIMIT: a manifest of {1 << 50} bytes"):
        next(sync.load(io.BytesIO(head)))
    good = b"".join(_bytes(list(Sender().pack({"a": torch.ones(5)}))))
    record = good.index(b"ZSYR")
    hostile = good[: record + 8] + struct.pack("<Q", 1 << 60) + good[record + 16 :]
    with pytest.raises(SyncError, match=f"LIMIT: a frame of {1 << 60} bytes"):
        list(sync.load(io.BytesIO(hostile)))


def test_a_frame_may_not_claim_more_words_than_a_record_has(small: None) -> None:
    """A fill of zeros costs 3 bytes a block: 256 MiB of words in one record."""
    numel = (message.MAX_FRAGMENT >> 2) + 1
    made, receiver = Sender(), Receiver()
    frames = _bytes(list(made.pack({"z": torch.zeros(numel)})))
    assert len(frames) > 2
    whole = sync.held.codecs.compress(torch.zeros(numel), shaped=False, checksum=False).numpy().tobytes()
    head = frames[0][:64] + struct.pack("<I", 1) + frames[0][68:72]
    hostile = [_signed_head(head, frames[0][80:]), _signed_record(frames[1][:40], whole)]
    refused(receiver, hostile, Code.LIMIT)


# ---- transports that reuse memory ----------------------------------------------------------------------------------------------


def reused(frames: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """A transport that receives every part into the same memory."""
    buffer = torch.empty(max(map(len, frames)), dtype=torch.uint8)
    for part in frames:
        buffer[: len(part)] = part
        yield buffer[: len(part)]


def test_records_of_one_length_in_one_memory_are_refused() -> None:
    """The later record is whole and right, but it is not the one whose words were proven."""
    made, receiver = Sender(fragment_mib=1), Receiver()
    state = {"x": torch.zeros(1 << 20, dtype=torch.bfloat16)}
    receiver.apply(made.pack(state))
    state["x"] = state["x"].clone()
    state["x"][3] = state["x"][(1 << 19) + 5] = 1
    frames = list(made.pack(state))
    assert len(frames) == 3 and len(frames[1]) == len(frames[2])
    refused(receiver, reused(frames), Code.DAMAGED)
    apply_all(receiver, state, frames)


# ---- streams --------------------------------------------------------------------------------------------------------------------


def test_messages_follow_each_other_over_a_socket(small: None, chance: random.Random) -> None:
    """The refused message in the middle is read to its end, so that the next one can be read."""
    here, there = socket.socketpair()
    made = states.sender(256)
    history = [{"a": states.some(3000, torch.bfloat16, chance)}]
    for _ in range(3):
        history.append(states.copy(history[-1]))
        history[-1]["a"].view(torch.int16)[::50] += 1

    def send() -> None:
        with here, here.makefile("wb") as stream:
            for index, state in enumerate(history):
                if index == 1:
                    list(made.pack(state))  # lost, so that the receiver refuses the next one
                sync.save(made.pack(state, full=index == 2), stream)

    thread = threading.Thread(target=send)
    thread.start()
    receiver = Receiver()
    with there, there.makefile("rb") as stream:
        states.assert_same(receiver.apply(sync.load(stream)), history[0])
        refused(receiver, sync.load(stream), Code.BASE)
        states.assert_same(receiver.apply(sync.load(stream)), history[2])
        states.assert_same(receiver.apply(sync.load(stream)), history[3])
        with pytest.raises(EOFError):
            receiver.apply(sync.load(stream))
    thread.join()
    states.assert_same(receiver.state, history[3])


def test_a_stream_that_takes_a_part_of_each_write_gets_all(pair: Pair) -> None:
    class Slow(io.RawIOBase):
        got = b""

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            self.got += bytes(data[:100])
            return min(len(data), 100)

    sync.save(pair[3], slow := Slow())
    assert slow.got == b"".join(_bytes(pair[3]))


def test_parts_may_be_bytes(pair: Pair) -> None:
    _, receiver, state, frames = pair
    kinds = itertools.cycle([bytes, bytearray, memoryview])
    apply_all(receiver, state, [kind(part) for kind, part in zip(kinds, _bytes(frames))])  # type: ignore[misc]


def test_errors_survive_a_process() -> None:
    error = pickle.loads(pickle.dumps(SyncError(Code.BASE, "text")))
    assert (error.code, str(error)) == (Code.BASE, "BASE: text")
