"""States arrive as they were packed: every dtype, history, order, shard and tie. A wrong base is refused, and a full message helps."""

from __future__ import annotations

import random

import pytest
import states
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_zipccl import tensors
from ds_zipccl.kernels import RouteUnavailable
from ds_zipccl.sync import Receiver, Sender, SyncError, SyncErrorCode

Code = SyncErrorCode
FULL = pytest.mark.full(reason="the short tier has another size of fragments")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]


def refused(receiver: Receiver, frames: object, *codes: SyncErrorCode) -> SyncError:
    """The error of a message that is refused and that leaves the receiver as it was."""
    version, before = receiver.version, states.copy(receiver.state)
    with pytest.raises(SyncError) as caught:
        receiver.apply(frames)  # type: ignore[arg-type]
    assert caught.value.code in codes, caught.value
    assert receiver.version == version
    states.assert_same(states.copy(receiver.state), before)
    return caught.value


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("fragment", [pytest.param(64, marks=FULL), 1000, pytest.param(1 << 20, marks=FULL)])
@settings(max_examples=12)
@given(seed=st.integers(0, 1 << 20))
def test_a_history_arrives(fragment: int, seed: int) -> None:
    chance = random.Random(seed)
    made, receivers = states.sender(fragment), [Receiver()]
    state = states.random_state(chance, chance.randrange(0, 7))
    wanted: states.State = {}
    for step in range(4):
        if step and chance.random() < 0.2:
            receivers.append(Receiver())
            receivers[-1].apply(made.snapshot())
        if step and chance.random() < 0.2:
            again = Receiver()
            again.apply(receivers[0].snapshot())
            receivers[0] = again
        if step and chance.random() < 0.3 and "tied" not in {**wanted, **state}:
            state = {name: value for name, value in state.items() if chance.random() < 0.5}
            wanted = {**wanted, **state}
            frames = list(made.pack(state, partial=True))
        else:
            wanted = state
            frames = list(made.pack(state, full=chance.random() < 0.15))
        for receiver in receivers:
            states.assert_same(receiver.apply(frames), wanted)
            assert receiver.version == made.version == step + 1
        state = states.edit(state, chance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("base", [None, "cpu"])
def test_every_dtype_as_a_difference_and_whole(device: str, base: str | None, chance: random.Random) -> None:
    made, receiver = Sender(device=base), Receiver(device=device)
    state = {str(dtype): states.some(3000, dtype, chance).to(device) for dtype in states.DTYPES}
    states.assert_same(receiver.apply(made.pack(state)), state)
    memory = {name: tensor.data_ptr() for name, tensor in receiver.state.items()}
    for full in (False, True):
        for tensor in state.values():
            view = tensor.view(torch.uint8)
            view[100] ^= 1
        frames = list(made.pack(state, full=full))
        states.assert_same(receiver.apply(frames), state)
        assert {name: tensor.data_ptr() for name, tensor in receiver.state.items()} == memory
        changed = sum(part.numel() for part in frames)
        assert (changed < sum(tensor.nbytes for tensor in state.values()) / 20) is not full
    assert all(tensor.device.type == device for tensor in receiver.state.values())


def test_kernels_without_differences() -> None:
    """A sender with numba's kernels packs whole tensors; a receiver with them takes these alone, and stays as it was."""
    state, senders = {"a": torch.randn(5000).bfloat16()}, (Sender(route="numba"), Sender())
    receivers = [Receiver(route="numba") for _ in senders]
    for made, receiver in zip(senders, receivers, strict=True):
        receiver.apply(made.pack(state))
    before = states.copy(state)
    state["a"][7] += 1
    states.assert_same(receivers[0].apply(senders[0].pack(state)), state)
    with pytest.raises(RouteUnavailable, match=r"numba: it has no encode_delta; install a C\+\+ compiler"):
        receivers[1].apply(senders[1].pack(state))
    states.assert_same(receivers[1].state, before)
    states.assert_same(receivers[1].apply(senders[1].pack(state, full=True)), state)


def test_small_tensors_cost_bytes_and_not_headers() -> None:
    made, receiver = Sender(), Receiver()
    state = {f"block.{i}.norm": torch.randn(64).bfloat16() for i in range(1000)}
    state |= {f"block.{i}.scale": torch.randn(1) for i in range(1000)}
    receiver.apply(made.pack(state))
    for i in range(0, 1000, 2):
        state[f"block.{i}.norm"].view(torch.int16)[i % 64] += 1
    frames = list(made.pack(dict(reversed(state.items()))))  # any order
    assert len(frames) == 3  # head, float32, bfloat16
    assert sum(part.numel() for part in frames) < 3 * 500
    states.assert_same(receiver.apply(frames), state)
    assert list(receiver.state) == list(state)


def test_a_model_takes_the_state_without_a_copy() -> None:
    torch.manual_seed(1)
    trainer = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50, bias=False))
    trainer[1].weight = trainer[0].weight
    engine = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50, bias=False))
    made, receiver = Sender(), Receiver()
    engine.load_state_dict(receiver.apply(made.pack(trainer.state_dict())), assign=True)
    assert engine[0].weight.data_ptr() == engine[1].weight.data_ptr()
    with torch.no_grad():
        trainer[0].weight[4] += 1
    receiver.apply(made.pack(trainer.state_dict()))
    receiver.apply(made.pack(trainer.state_dict(), full=True))
    tokens = torch.arange(50)
    assert torch.equal(trainer(tokens), engine(tokens))


def test_ties_that_come_and_go(chance: random.Random) -> None:
    made, receiver = Sender(), Receiver()
    a, b = (states.some(500, torch.float32, chance) for _ in range(2))
    for state in (
        {"a": a[99:], "b": b},
        {"a": a, "b": b},
        {"a": a, "b": a},
        {"b": a},
        {"a": a, "b": b},
        {"b": b, "a": b},
        {"a": a, "b": a[:]},
    ):
        states.assert_same(receiver.apply(made.pack(state)), state)
        fresh = Receiver()
        states.assert_same(fresh.apply(receiver.snapshot()), state)
    with pytest.raises(SyncError, match=r"MANIFEST.*'b' is tied to 'a'"):
        made.pack({"a": a[:5]}, partial=True)
    states.assert_same(receiver.apply(made.pack({"b": b}, partial=True)), {"a": a, "b": b})


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_a_wrong_base_is_refused_and_a_full_message_helps(pair: states.Pair) -> None:
    made, receiver, state, lost = pair
    late = list(made.pack(state))
    error = refused(receiver, late, Code.BASE)
    assert "changes version 2 to 3, this receiver has version 1: let the sender pack(state, full=True)" in str(error)
    receiver.apply(lost)
    receiver.apply(late)
    assert "this receiver has version 3" in str(refused(receiver, late, Code.BASE))
    other = states.sender()
    strange = [list(other.pack(state)) for _ in range(4)]
    assert "changes version 2 to 3" in str(refused(receiver, strange[2], Code.BASE))
    assert "version 3 of another history" in str(refused(receiver, strange[3], Code.BASE))
    assert "has no state" in str(refused(Receiver(), late, Code.BASE))
    states.assert_same(receiver.apply(other.pack(state, full=True)), state)
    states.assert_same(receiver.apply(other.pack(state)), state)


@pytest.mark.parametrize("side", ["sender", "receiver"])
@pytest.mark.parametrize("name", ["a", "i"])
def test_an_edited_base_is_found(side: str, name: str, small: None, chance: random.Random) -> None:
    made, receiver = states.sender(), Receiver()
    state = {"a": states.some(5000, torch.bfloat16, chance), "i": states.some(12, torch.int64, chance)}
    receiver.apply(made.pack(state))
    base = receiver.state[name] if side == "receiver" else made._held.tensor(name)
    bits = base.view(torch.uint8)
    bits[len(bits) // 2] ^= 1  # by one unit: a word that changes by more is sent as it is
    state["a"].view(torch.int16)[::9] += 1
    frames = list(made.pack(state))
    assert name in str(refused(receiver, frames, Code.HASH, Code.FRAME)) or side == "receiver"
    states.assert_same(receiver.apply(made.pack(state, full=True)), state)


def test_a_dropped_message_makes_the_next_one_full(pair: states.Pair) -> None:
    made, receiver, state, frames = pair
    receiver.apply(frames)
    never = made.pack(state)  # nothing of it was asked for: the base stays
    states.assert_same(receiver.apply(made.pack(state)), state)
    with pytest.raises(SyncError, match="REPLACED"):
        list(never)
    half = made.pack(state)
    refused(receiver, [next(half), next(half)], Code.TRUNCATED)
    assert made.version == 0
    with pytest.raises(SyncError, match="STATE: there is no state"):
        made.snapshot()
    with pytest.raises(SyncError, match="STATE: a partial message needs a base"):
        made.pack(state, partial=True)
    whole = made.pack(state)
    states.assert_same(receiver.apply(whole), state)
    with pytest.raises(SyncError, match="REPLACED"):
        next(half)
    snapshot = made.snapshot()
    next(snapshot)
    list(made.pack(state))
    with pytest.raises(SyncError, match="REPLACED"):
        list(snapshot)


def test_an_error_while_words_are_written_leaves_no_state(pair: states.Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an interrupt from the keyboard between two tensors."""
    made, receiver, state, frames = pair
    decode, calls = receiver._decode, iter(range(100))

    def interrupted(*given: torch.Tensor) -> None:
        if next(calls) == len(frames) + 1:  # the third record of the second pass
            raise KeyboardInterrupt
        decode(*given)

    monkeypatch.setattr(receiver, "_decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        receiver.apply(frames)
    assert receiver.version == 0 and receiver.state == {}
    monkeypatch.undo()
    refused(receiver, made.pack(state), Code.BASE)
    states.assert_same(receiver.apply(made.pack(state, full=True)), state)


def test_a_state_that_no_message_holds() -> None:
    made = Sender()
    list(made.pack({"w": torch.ones(3)}))
    sparse, meta = torch.eye(3).to_sparse(), torch.empty(3, device="meta")
    for entry, complaint in ((3, "got int under 'x'"), (meta, "on meta"), (sparse, "sparse")):
        with pytest.raises(SyncError, match=complaint) as caught:
            made.pack({"x": entry})  # type: ignore[dict-item]
        assert caught.value.code is Code.STATE and made.version == 1, complaint


def test_arguments_that_are_refused() -> None:
    with pytest.raises(ValueError, match="fragment_mib must be 1 to 128, got 0"):
        Sender(fragment_mib=0)
    with pytest.raises(ValueError, match="device must be one of cpu, cuda, got meta"):
        Receiver(device="meta")
    with pytest.raises(ValueError, match="choose full or partial"):
        Sender().pack({}, full=True, partial=True)
    for part in (b"abc", torch.zeros(3, dtype=torch.uint8)):
        with pytest.raises(TypeError, match="got one buffer"):
            Receiver().apply(part)
    for part in (3, torch.zeros(3), torch.zeros(3, 3, dtype=torch.uint8)):
        with pytest.raises(TypeError, match="a part is a 1-D uint8 tensor or bytes"):
            Receiver().apply([part])


# ---- memory -------------------------------------------------------------------------------------------------------------


def test_memory_beside_the_bases_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fragments and parts, however large the state: no allocation of a difference comes near the size of a tensor."""
    made, receiver = Sender(fragment_mib=1), Receiver()
    state = {
        "large": torch.randn(1 << 22).bfloat16(),
        "matrix": torch.randn(1 << 20).bfloat16(),
        "norm": torch.randn(99),
    }
    frames = list(made.pack(state))
    assert sum(map(len, frames)) < 0.75 * sum(tensor.nbytes for tensor in state.values())
    receiver.apply(frames)
    asked: list[int] = []
    allocate = tensors.empty

    def counted(numel: int, dtype: torch.dtype, *where: torch.device) -> torch.Tensor:
        asked.append(numel * dtype.itemsize)
        return allocate(numel, dtype, *where)

    monkeypatch.setattr(tensors, "empty", counted)
    state["large"].view(torch.int16)[::40] += 1
    receiver.apply(made.pack(state))
    assert max(asked) < 1.1 * (1 << 20) and sum(asked) < 2 << 20
    states.assert_same(receiver.state, state)
