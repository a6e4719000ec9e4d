"""State dicts for the tests of weight sync: random ones, edits of them, and their comparison bit for bit."""

from __future__ import annotations

import random

import torch

from ds_zipccl.sync import Receiver, Sender, message

DTYPES = tuple(message.DTYPES.values())
State = dict[str, torch.Tensor]
#: What the fixture ``pair`` of conftest.py gives.
Pair = tuple[Sender, Receiver, State, list[torch.Tensor]]


def sender(fragment: int = 4096) -> Sender:
    """A sender whose records have at most ``fragment`` bytes of a state."""
    made = Sender(block=128)
    made._packer.fragment = fragment
    return made


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().resolve_conj().resolve_neg().view(-1).view(torch.uint8)


def assert_same(got: State, wanted: State) -> None:
    """Names, dtypes, shapes, bits, and which tensors share their memory."""
    assert set(got) == set(wanted)
    places: dict[int, set[str]] = {}
    for name, tensor in wanted.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(got[name]), bits(tensor)), name
        places.setdefault(tensor.data_ptr(), set()).add(name)
    for names in places.values():
        first, *others = (got[name].data_ptr() for name in names)
        assert all(other == first for other in others) or not all(wanted[name].numel() for name in names), names


def copy(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


def some(numel: int, dtype: torch.dtype, chance: random.Random) -> torch.Tensor:
    """Random words; bools are 0 or 1."""
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    if dtype is torch.bool:
        return torch.rand(numel, generator=generator) < 0.5
    if dtype in (torch.bfloat16, torch.float16, torch.float32) and chance.random() < 0.7:
        return torch.randn(numel, generator=generator).mul(0.02).to(dtype)
    return torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def tensor(chance: random.Random) -> torch.Tensor:
    """A tensor of a random dtype and shape, now and then empty, a scalar or not contiguous."""
    dtype = chance.choice(DTYPES)
    shape = chance.choice([(), (0, 3), (1,), (7,), (33, 5), (64, 64), (130, 40), (3, 1, 50), (5000,)])
    made = some(torch.Size(shape).numel(), dtype, chance).view(shape)
    return made.transpose(0, 1) if len(shape) == 2 and chance.random() < 0.3 else made


def random_state(chance: random.Random, names: int) -> State:
    state = {f"layer.{i}.w{'é' * (i % 3)}": tensor(chance) for i in range(names)}
    if state and chance.random() < 0.5:
        state["tied"] = chance.choice(list(state.values()))
    return state


def edit(state: State, chance: random.Random) -> State:
    """The next state: a few words changed in some tensors, and now and then names, shapes, ties or the order."""
    state = dict(state)
    for name, old in list(state.items()):
        draw = chance.random()
        if name == "tied" and "tied" in state and draw < 0.3:
            state["tied"] = old.clone()
        if draw < 0.05 and len(state) > 1:
            del state[name]
        elif draw < 0.1:
            state[name] = tensor(chance)
        elif draw < 0.7 and old.numel():
            new = old.contiguous().clone()
            words = bits(new).view(torch.uint8)
            for place in chance.sample(range(len(words)), max(1, int(len(words) * chance.choice([0, 0.01, 0.2])))):
                words[place] = int(words[place]) ^ 1 if old.dtype is torch.bool else chance.randrange(256)
            for other, shared in state.items():  # a tied tensor stays tied
                if shared is old:
                    state[other] = new
    if chance.random() < 0.2:
        state[f"new.{chance.randrange(1000)}"] = tensor(chance)
    if chance.random() < 0.2:
        names = list(state)
        chance.shuffle(names)
        state = {name: state[name] for name in names}
    return state
