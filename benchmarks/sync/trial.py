"""Ways to send weights that changed a little, for ``bench sync``: ours, and the two that are in use."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

State = dict[str, "torch.Tensor"]


class Way(Protocol):
    """A way to send a state to a receiver that has the one before. ``begin``: both sides have the state."""

    def begin(self, state: State) -> None: ...
    def pack(self, state: State) -> Any: ...
    def size(self, message: Any) -> int: ...
    def apply(self, message: Any) -> None: ...
    @property
    def received(self) -> State: ...


class OurWay:
    """``ds_zipccl.sync``: with the hash of every word, and a receiver that changes after all of it is proven."""

    def begin(self, state: State) -> None:
        from ds_zipccl.sync import Receiver, Sender

        self._sender, self._receiver = Sender(), Receiver()
        self._receiver.apply(self._sender.pack(state))

    def pack(self, state: State) -> Any:
        return list(self._sender.pack(state))

    def size(self, message: Any) -> int:
        return sum(part.numel() for part in message)

    def apply(self, message: Any) -> None:
        self._receiver.apply(message)

    @property
    def received(self) -> State:
        return self._receiver.state


class _Copies:
    """Both sides of a way without proof: a copy of the weights each, changed in place."""

    def begin(self, state: State) -> None:
        self._base = {name: tensor.clone() for name, tensor in state.items()}
        self.received = {name: tensor.clone() for name, tensor in state.items()}


class Pairs(_Copies):
    """A u32 index and a u16 value for every word that changed."""

    def pack(self, state: State) -> Any:
        import torch

        message = []
        for name, tensor in state.items():
            words, base = (each.view(torch.int16).view(-1) for each in (tensor, self._base[name]))
            places = torch.nonzero(words != base).view(-1)
            values = words[places]
            base[places] = values
            message.append((name, places.to(torch.int32), values))
        return message

    def size(self, message: Any) -> int:
        return sum(places.nbytes + values.nbytes for _, places, values in message)

    def apply(self, message: Any) -> None:
        import torch

        for name, places, values in message:
            self.received[name].view(torch.int16).view(-1)[places.long()] = values


class XorZstd(_Copies):
    """XOR with the base, and zstd at level 1."""

    def __init__(self, threads: int) -> None:
        import zstandard

        # threads=1 would start a second thread; 0 starts none.
        self._packer = zstandard.ZstdCompressor(level=1, threads=threads if threads > 1 else 0)
        self._opener = zstandard.ZstdDecompressor()

    def pack(self, state: State) -> Any:
        import torch

        message = []
        for name, tensor in state.items():
            words, base = (each.view(torch.int16).view(-1) for each in (tensor, self._base[name]))
            changed = torch.bitwise_xor(words, base)
            base.copy_(words)
            message.append((name, self._packer.compress(changed.view(torch.uint8).numpy().data)))
        return message

    def size(self, message: Any) -> int:
        return sum(len(data) for _, data in message)

    def apply(self, message: Any) -> None:
        import torch

        for name, data in message:
            changed = torch.frombuffer(bytearray(self._opener.decompress(data)), dtype=torch.int16)
            self.received[name].view(torch.int16).view(-1).bitwise_xor_(changed)


@dataclass(frozen=True)
class Times:
    """Seconds of each pack and apply, bytes of the last message, and words that arrived wrong."""

    pack: list[float]
    apply: list[float]
    size: int
    wrong: int


def weights(mib: int) -> State:
    """Weights of layers in bfloat16, ``mib`` MiB of matrices, with two norms beside each matrix."""
    import torch

    torch.manual_seed(0)
    state = {}
    for layer in range(4):
        state[f"layer.{layer}.weight"] = torch.randn(mib << 17).mul_(0.02).bfloat16().view(-1, 1 << 10)
        for norm in ("input", "output"):
            state[f"layer.{layer}.{norm}_norm"] = torch.randn(1 << 10).bfloat16()
    return state


def stepped(state: State, changed: float) -> State:
    """The state with this part of all words one unit up or down, each word by itself."""
    import torch

    found = {}
    for name, tensor in state.items():
        draws = torch.rand(tensor.shape)
        step = (draws < changed / 2).to(torch.int16) - ((draws >= changed / 2) & (draws < changed)).to(torch.int16)
        found[name] = (tensor.view(torch.int16) + step).view(torch.bfloat16)
    return found


def measure(ways: Sequence[Way], mib: int, changed: float, repeats: int) -> list[Times]:
    """The times of each way over the same states; the ways take turns, step by step."""
    import torch

    state = weights(mib)
    for way in ways:
        way.begin(state)
    found = [Times([], [], 0, 0) for _ in ways]
    for _ in range(repeats + 1):  # the first one also fills caches and memory
        state = stepped(state, changed)
        for index, way in enumerate(ways):
            message, packed = timed(way.pack, state)
            _, applied = timed(way.apply, message)
            wrong = sum(
                int((way.received[name].view(torch.int16) != state[name].view(torch.int16)).sum()) for name in state
            )
            old = found[index]
            found[index] = Times([*old.pack, packed], [*old.apply, applied], way.size(message), old.wrong + wrong)
    return [Times(each.pack[1:], each.apply[1:], each.size, each.wrong) for each in found]


def copied(state: State, repeats: int) -> float:
    """Seconds in which ``Tensor.copy_`` copies the weights, the median."""
    copies = {name: tensor.clone() for name, tensor in state.items()}

    def copy() -> None:
        for name, tensor in state.items():
            copies[name].copy_(tensor)

    return statistics.median(timed(copy)[1] for _ in range(repeats))


def timed(call: Callable[..., Any], *given: Any) -> tuple[Any, float]:
    """A call's result and its seconds."""
    began = time.perf_counter()
    result = call(*given)
    return result, time.perf_counter() - began
