"""Random sequences of operations on four ranks, each beside the plain collective, bit for bit; memory must stay flat.

python tests/soak.py 1800            # seconds; a new seed every time, which it prints
python tests/soak.py 60 --seed 7
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import os
import random
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import ranks as runner
import torch
import torch.distributed as dist
from moves import turn
from test_environments import ENVIRONMENTS

from ds_zipccl import comm
from ds_zipccl.comm.buffer_pool import KEEP_BYTES
from ds_zipccl.comm.host.gather import SharedBase
from ds_zipccl.comm.shadow_check import bits
from ds_zipccl.config import ZipcclConfig

RANKS = 4
#: Ranks of the groups beside that of all ranks.
GROUPS = ([0, 1], [2, 3], [0, 2], [3, 1], [2, 1, 0])
#: Operations between two looks at the clock.
BLOCK = 100
IN_FLIGHT = 6
#: MiB by which a rank's memory may grow after the first third: the allocator's own coming and going.
GROWTH_MIB = 48
#: Seconds of a run that GROWTH_MIB judges. A shorter run still fills the pool of buffers, up to the bytes that the pool keeps.
JUDGED_S = 1200
_ALWAYS = ZipcclConfig(enabled=True, mode="always", min_bytes=0)
CONFIGS = {
    "auto": ZipcclConfig(enabled=True, min_bytes=2000),
    "always": _ALWAYS,
    "little memory": replace(_ALWAYS, staging_mib=1),
    "wide": replace(_ALWAYS, codec="wide", block=256),
    "raw": replace(_ALWAYS, codec="raw"),
}
DTYPES = (torch.bfloat16, torch.bfloat16, torch.float32, torch.float16)
#: Places from which operations are called: half of the time no special one. zero.Init needs DeepSpeed, and is left out.
PLACES = sorted(name for name in ENVIRONMENTS if "zero" not in name and name != "nothing")
#: Largest message, in elements; most are far smaller.
LARGEST = 1 << 21


class Placed:
    """Our collectives, called in one of the environments."""

    def __init__(self, place: str) -> None:
        self._environment = ENVIRONMENTS[place]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._environment():
                return getattr(comm, name)(*args, **kwargs)

        return call


class Task:
    """One operation as every rank draws it, with its inputs, and the plain result to compare with."""

    def __init__(self, draw: random.Random, groups: list[tuple[list[int], Any]], number: int) -> None:
        self.members, self.group = draw.choice(groups)
        self.op = draw.choice(sorted(OPERATIONS))
        self.config = draw.choice(sorted(CONFIGS))
        self.dtype = draw.choice(DTYPES)
        size = int(2 ** draw.uniform(0, LARGEST.bit_length() - 1))
        self.numel = size - size % len(self.members) + len(self.members)
        self.later = draw.random() < 0.5
        self.root = draw.choice(self.members)
        self.average = draw.random() < 0.2
        self.kind = draw.choice(["bell", "bell", "sparse", "words"])
        self.place = draw.choice([draw.choice(PLACES), "nothing"])
        self.number = number

    def __str__(self) -> str:
        how = f"{self.numel} {self.dtype} {self.kind}, group {self.members}, root {self.root}"
        return f"operation {self.number}: {self.op}, {how}, config {self.config}, async {self.later}, {self.place}"

    def data(self, rank: int) -> torch.Tensor:
        source = torch.Generator().manual_seed(self.number * RANKS + rank)
        if self.kind == "words" and self.op in MOVES:
            words = {2: torch.int16, 4: torch.int32}[self.dtype.itemsize]
            limits = torch.iinfo(words)
            return torch.randint(limits.min, limits.max, (self.numel,), dtype=words, generator=source).view(self.dtype)
        values = torch.randn(self.numel, generator=source) * 10 ** (self.number % 7 - 3)
        if self.kind == "sparse":
            values[torch.rand(self.numel, generator=source) < 0.7] = 0
        return values.to(self.dtype)


def _gather(module: Any, task: Task, x: torch.Tensor, more: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    out = x.new_zeros(len(task.members) * x.numel())
    return out, module.all_gather_into_tensor(out, x, task.group, **more)


def _gather_in_place(module: Any, task: Task, x: torch.Tensor, more: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    out = x.clone()
    own = out.chunk(len(task.members))[dist.get_rank(task.group)]
    return out, module.all_gather_into_tensor(out, own, task.group, **more)


def _scatter(module: Any, task: Task, x: torch.Tensor, more: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    out = x.new_zeros(x.numel() // len(task.members))
    return out, module.reduce_scatter_tensor(out, x, _op(task), task.group, **more)


def _all_reduce(module: Any, task: Task, x: torch.Tensor, more: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    out = x.clone()
    return out, module.all_reduce(out, _op(task), task.group, **more)


def _all_to_all(module: Any, task: Task, x: torch.Tensor, more: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    out = torch.zeros_like(x)
    return out, module.all_to_all_single(out, x, None, None, task.group, **more)


def _uneven(module: Any, task: Task, x: torch.Tensor, more: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    """Rank a sends rank b the part (a + b) mod n of its tensor, in units that grow."""
    ranks, rank = len(task.members), dist.get_rank(task.group)
    unit = -(-x.numel() // (ranks * ranks))
    sizes = [unit * ((rank + peer) % ranks) for peer in range(ranks)]  # symmetric
    out = x.new_zeros(sum(sizes))
    return out, module.all_to_all_single(out, x.repeat(8)[: sum(sizes)], sizes, sizes, task.group, **more)


def _broadcast(module: Any, task: Task, x: torch.Tensor, more: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    out = x.clone()
    return out, module.broadcast(out, task.root, task.group, **more)


def _reduce(module: Any, task: Task, x: torch.Tensor, more: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    out = x.clone()
    handle = module.reduce(out, task.root, _op(task), task.group, **more)
    return (out if dist.get_rank() == task.root else x), handle  # the others' contents are gloo's business


def _to_owners(module: Any, task: Task, x: torch.Tensor, more: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    """Seven parts of random sizes; rank r's own ones are compared."""
    draw, ranks, out = random.Random(task.number), len(task.members), x.clone()
    ends = [*sorted(draw.randrange(x.numel() + 1) for _ in range(6)), x.numel()]
    owned = [(end - begin, draw.sample(range(ranks), draw.randrange(3) % ranks)) for begin, end in pairwise([0, *ends])]
    if module is not dist:
        module.reduce_to_owners(out, owned, _op(task), task.group, config=more["config"])
    else:
        module.all_reduce(out, _op(task), task.group)
    parts = out.split([numel for numel, _ in owned])
    rank = dist.get_rank(task.group)
    return torch.cat([part for part, (_, owners) in zip(parts, owned, strict=True) if rank in owners] + [out[:0]]), None


def _op(task: Task) -> Any:
    return dist.ReduceOp.AVG if task.average else dist.ReduceOp.SUM


MOVES: dict[str, Callable[..., tuple[torch.Tensor, Any]]] = {
    "all_gather": _gather, "all_gather in place": _gather_in_place, "all_to_all": _all_to_all, "uneven all_to_all": _uneven,
    "broadcast": _broadcast,
}  # fmt: skip
OPERATIONS = MOVES | {"reduce_scatter": _scatter, "all_reduce": _all_reduce, "reduce": _reduce, "to_owners": _to_owners}


class Weights:
    """Parameters of a group that change a little and are gathered as differences again and again, in place and into new memory."""

    SHARD = 60_000

    def __init__(self, members: list[int], group: Any) -> None:
        self.group, self.members = group, members
        self.ours = torch.zeros(len(members) * self.SHARD, dtype=torch.bfloat16)
        mine = dist.get_rank() in members
        self.stored = SharedBase(comm.allocate_bases([(self.SHARD, torch.bfloat16)], "host", group) if mine else ())

    def step(self, number: int) -> None:
        rank = dist.get_rank(self.group)
        own = self.ours.chunk(len(self.members))[rank]
        own += 0.01 * torch.randn(self.SHARD, generator=torch.Generator().manual_seed(number * RANKS + rank))
        wanted = torch.zeros_like(self.ours)
        dist.all_gather_into_tensor(wanted, own.clone(), self.group)
        comm.all_gather_into_tensor(self.ours, own, self.group, config=_ALWAYS, base=comm.IN_PLACE)
        new = torch.empty_like(self.ours)
        comm.all_gather_into_tensor(new, own, self.group, config=_ALWAYS, base=self.stored)
        for what in (self.ours, new):
            assert torch.equal(bits(what), bits(wanted)), f"step {number} of {self.members}: weights are wrong"


def settle(pending: list[tuple[Task, torch.Tensor, Any, torch.Tensor]], draw: random.Random) -> None:
    """Wait for operations in flight, in any order, and compare."""
    draw.shuffle(pending)
    while pending:
        task, got, handle, wanted = pending.pop()
        if handle is not None:
            handle.wait()
        wrong = int((bits(got) != bits(wanted)).sum())
        assert not wrong, f"{wrong} of {got.numel()} elements are wrong after {task}"


def memory_mib() -> float:
    """Memory of this process in MiB, without mapped files and without memory that the allocator keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def soak(rank: int, ranks: int, seconds: float, seed: int, plant: Callable[[], None] | None = None) -> dict[str, float]:
    """Run random operations for ``seconds``, at least two blocks of them.

    Args:
        seed: decides the operations, equal on all ranks.
        plant: makes a mistake on rank 1.

    Returns:
        operations: their number; growth: MiB by which memory grew after the first third of the time; mib: memory at the end.
    """
    if plant is not None and rank == 1:
        plant()
    draw, numbers = random.Random(seed), itertools.count()
    groups = [(members, dist.new_group(members)) for members in GROUPS] + [(list(range(ranks)), dist.group.WORLD)]
    weights = [Weights(*pair) for pair in groups]
    waits = random.Random(rank)  # each rank waits in an order of its own
    warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", "Anomaly Detection", UserWarning)
    begun, looked, memory = time.monotonic(), time.monotonic(), []
    for count in itertools.count(1):
        pending: list[tuple[Task, torch.Tensor, Any, torch.Tensor]] = []
        for _ in range(BLOCK):
            task = Task(draw, groups, next(numbers))
            turn(plain=draw.random() < 0.5)
            if rank not in task.members:
                continue
            run, x = OPERATIONS[task.op], task.data(rank)
            wanted, _ = run(dist, task, x.clone(), {})
            more = {"config": CONFIGS[task.config], "async_op": task.later}
            pending.append((task, *run(Placed(task.place), task, x.clone(), more), wanted))
            if len(pending) >= IN_FLIGHT:
                settle(pending, waits)
        settle(pending, waits)
        for one in weights:
            if rank in one.members:
                one.step(count)
        memory.append(memory_mib())
        spent = torch.tensor(time.monotonic() - begun)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        if rank == 0 and time.monotonic() - looked > 10:
            looked = time.monotonic()
            print(f"soak: {spent:.0f} of {seconds:.0f} s, {count * BLOCK} operations, {memory[-1]:.0f} MiB", flush=True)
        if spent > seconds and count > 1:
            third = memory[len(memory) // 3 :]
            return {"operations": count * BLOCK, "growth": third[-1] - third[0], "mib": memory[-1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float, nargs="?", default=1800)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    print(f"soak: seed {args.seed}", flush=True)
    found = runner.run(soak, RANKS, args.seconds, args.seed, timeout=args.seconds + 300)
    growth = max(one["growth"] for one in found)
    print(
        f"soak: {found[0]['operations']} operations, all bits equal; memory grew by {growth:.1f} MiB after the first third"
    )
    return int(growth > (GROWTH_MIB if args.seconds >= JUDGED_S else KEEP_BYTES >> 20))


if __name__ == "__main__":
    sys.exit(main())
