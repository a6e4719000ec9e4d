"""``bench sync``: bytes and speed of weight sync, compared with pairs of index and value and with XOR and zstd.

Every row sends bfloat16 weights. Since the previous message, ``changed`` percent of the words, chosen independently,
have changed by one unit in the last place. Columns (also the keys of the rows in ``--json``):

* ``changed``: percent of the words. ``way``: "sync" is ``ds_zipccl.sync``; "pairs" sends a u32 index and a u16 value
  per changed word; "xor_zstd1" is XOR with the base and zstd at level 1.
* ``ratio``: bytes of the weights / bytes of the message. ``times``: bytes of the message / bytes of sync's message.
* ``pack_gbps``, ``apply_gbps``: 1e9 bytes of weights per second, medians, on ``--threads`` threads, with the copy of
  the base. The schedules are timed in turn. Only sync verifies: it hashes all words on both sides and decodes twice, so
  that a message is applied whole or not at all.
* ``pack_memcpy``, ``apply_memcpy``: the speeds / the speed of ``Tensor.copy_`` of the same weights.
* ``wrong``: words that arrived with other bits.

The exit status is 1 if any word is wrong.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ds_zipccl.tools import ToolError, tables
from ds_zipccl.tools.tables import Column

if TYPE_CHECKING:
    import torch

State = dict[str, "torch.Tensor"]

COLUMNS = (
    Column("changed", "g"),
    Column("way", width=9),
    Column("ratio", ".1f", 7),
    Column("times", ".2f", 6),
    *tables.alike("pack_gbps apply_gbps", ".2f"),
    *tables.alike("pack_memcpy apply_memcpy", ".3f"),
    Column("wrong", "d"),
)


def _percent(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 100:
        raise argparse.ArgumentTypeError(f"wanted 0 to 100 percent of the words, got {text!r}")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench sync``."""
    option = parser.add_argument
    option(
        "--changed", nargs="+", type=_percent, default=[0.1, 1, 2, 3, 5, 20], metavar="P", help="percent (0.1 to 20)"
    )
    option("--mib", type=int, default=64, metavar="M", help="MiB of weights (64)")
    option("--threads", type=int, default=1, metavar="N", help="threads to measure with (1)")
    option("--repeats", type=int, default=5, metavar="K", help="timings whose median is shown (5)")
    option("--json", metavar="FILE", help="write the rows here too")


def main(args: argparse.Namespace) -> int:
    """Run ``bench sync``; 1 if any word came back wrong, else 0."""
    import torch

    for option in ("mib", "threads", "repeats"):
        if getattr(args, option) < 1:
            raise ToolError(f"--{option} must be at least 1, got {getattr(args, option)}")
    schedules: dict[str, Schedule] = {"sync": Ours(), "pairs": Pairs()}
    try:
        schedules["xor_zstd1"] = XorZstd(args.threads)
    except ImportError as error:
        tables.complain(f"xor_zstd1 left out: {error}; pip install zstandard")
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    table, rows = tables.Table(COLUMNS), []
    try:
        for changed in tables.progress(args.changed, "bench sync"):
            found = measure(list(schedules.values()), args.mib, changed / 100, args.repeats)
            state = weights(args.mib)
            total = sum(tensor.nbytes for tensor in state.values())
            copy = copied(state, args.repeats)
            for schedule, times in zip(schedules, found, strict=True):
                pack, apply = statistics.median(times.pack), statistics.median(times.apply)
                row = {
                    "changed": changed, "way": schedule, "ratio": total / times.size if times.size else None,
                    "times": times.size / found[0].size, "pack_gbps": total / pack / 1e9,
                    "apply_gbps": total / apply / 1e9, "pack_memcpy": copy / pack, "apply_memcpy": copy / apply,
                    "memcpy_gbps": total / copy / 1e9, "wrong": times.wrong,
                }  # fmt: skip
                rows.append(row)
                table.add(row)
    finally:
        torch.set_num_threads(threads)
    if args.json:
        settings = {"threads": args.threads, "mib": args.mib, "repeats": args.repeats}
        tables.write_json(args.json, rows, args.command, **settings, zstandard=tables.version("zstandard"))
    wrong = sum(row["wrong"] for row in rows)
    if wrong:
        tables.complain(f"{wrong} words came back with other bits than they had")
    return 1 if wrong else 0


class Schedule(Protocol):
    """A schedule to send a state to a receiver of the previous state. ``begin`` gives both sides a state."""

    def begin(self, state: State) -> None: ...
    def pack(self, state: State) -> Any: ...
    def size(self, message: Any) -> int: ...
    def apply(self, message: Any) -> None: ...
    @property
    def received(self) -> State: ...


class Ours:
    """``ds_zipccl.sync``, whose receiver changes its state only after it has verified the hash of the message."""

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
    """Both sides of a schedule without verification; each changes its copy of the weights in place."""

    def begin(self, state: State) -> None:
        self._base = {name: tensor.clone() for name, tensor in state.items()}
        self.received = {name: tensor.clone() for name, tensor in state.items()}


class Pairs(_Copies):
    """A u32 index and a u16 value per changed word."""

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
    """XOR with the base, compressed with zstd at level 1."""

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
    """Return bfloat16 weights of layers: ``mib`` MiB of matrices, and two norms per matrix."""
    import torch

    torch.manual_seed(0)
    state = {}
    for layer in range(4):
        state[f"layer.{layer}.weight"] = torch.randn(mib << 17).mul_(0.02).bfloat16().view(-1, 1 << 10)
        for norm in ("input", "output"):
            state[f"layer.{layer}.{norm}_norm"] = torch.randn(1 << 10).bfloat16()
    return state


def stepped(state: State, changed: float) -> State:
    """Return the state with a random share ``changed`` of its words one unit up or down."""
    import torch

    found = {}
    for name, tensor in state.items():
        draws = torch.rand(tensor.shape)
        step = (draws < changed / 2).to(torch.int16) - ((draws >= changed / 2) & (draws < changed)).to(torch.int16)
        found[name] = (tensor.view(torch.int16) + step).view(torch.bfloat16)
    return found


def measure(schedules: Sequence[Schedule], mib: int, changed: float, repeats: int) -> list[Times]:
    """Return the times of each schedule for the same states; the schedules are timed in turn, step by step."""
    import torch

    state = weights(mib)
    for schedule in schedules:
        schedule.begin(state)
    found = [Times([], [], 0, 0) for _ in schedules]
    for _ in range(repeats + 1):  # the first step fills caches and touches pages
        state = stepped(state, changed)
        for index, schedule in enumerate(schedules):
            message, packed = timed(schedule.pack, state)
            _, applied = timed(schedule.apply, message)
            wrong = sum(
                int((schedule.received[name].view(torch.int16) != state[name].view(torch.int16)).sum())
                for name in state
            )
            old = found[index]
            found[index] = Times([*old.pack, packed], [*old.apply, applied], schedule.size(message), old.wrong + wrong)
    return [Times(each.pack[1:], each.apply[1:], each.size, each.wrong) for each in found]


def copied(state: State, repeats: int) -> float:
    """Return the median seconds of ``Tensor.copy_`` of the weights."""
    copies = {name: tensor.clone() for name, tensor in state.items()}

    def copy() -> None:
        for name, tensor in state.items():
            copies[name].copy_(tensor)

    return statistics.median(timed(copy)[1] for _ in range(repeats))


def timed(call: Callable[..., Any], *given: Any) -> tuple[Any, float]:
    """Return the result of a call and its seconds."""
    began = time.perf_counter()
    result = call(*given)
    return result, time.perf_counter() - began
