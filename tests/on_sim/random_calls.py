"""Calls of the package's collectives on the simulated machine, each with the outputs wanted, computed by the host."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import corpus
import torch
import torch.distributed as dist

from ds_zipccl import comm
from ds_zipccl.comm.group_state import group_nodes, resolve_group
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.ops import OPS
from on_sim.cases import documented


@dataclass(frozen=True)
class Task:
    """One operation, as all ranks draw it. ``numel``: elements of a rank's part; ``draw``: the seed of further choices."""

    op: str
    members: tuple[int, ...]
    group: Any
    config: ZipcclConfig
    kind: corpus.Float
    numel: int
    later: bool = False
    average: bool = False
    side: bool = False
    draw: str = ""

    def __str__(self) -> str:
        how = f"{self.numel} {self.kind.dtype} elements, ranks {list(self.members)}, codec {self.config.codec}"
        return f"{self.op}: {how}, async {self.later}, side stream {self.side}, average {self.average}"

    @property
    def reduce_op(self) -> Any:
        return dist.ReduceOp.AVG if self.average else dist.ReduceOp.SUM


class Desk:
    """One rank's side of a task: its tensors, and what they must become."""

    def __init__(self, task: Task, rank: int) -> None:
        self.task, self.rank, self.ranks = task, task.members.index(rank), len(task.members)
        self.device = torch.device("cuda", rank)
        self.shared, self._own = random.Random(task.draw), random.Random(f"{task.draw} {rank}")
        #: Results and the values wanted.
        self.outputs: list[torch.Tensor] = []
        self.wanted: list[torch.Tensor] = []
        self.handle: Any = None
        #: Whether another stream than the one that made the tensors waits. The tensors then live until the end: such are the allocator's
        #: rules for every program. Else the handle alone keeps inputs.
        self.elsewhere = self._own.random() < 0.3
        self._kept: list[torch.Tensor] = []

    def values(self, member: int, numel: int, salt: int = 0) -> torch.Tensor:
        """The contribution of a group rank, on the host."""
        seed = random.Random(f"{self.task.draw} {member} {salt}").randrange(1 << 20)
        if self.task.op in SUMS:
            return corpus.tensor(corpus.bell(numel, self.task.kind, seed), self.task.kind)
        return corpus.tensor(corpus.mixed(numel, self.task.kind, 256, seed), self.task.kind)

    def everybodys(self, numel: int, salt: int = 0) -> list[torch.Tensor]:
        return [self.values(member, numel, salt) for member in range(self.ranks)]

    def room(self, numel: int, dense: bool = False) -> torch.Tensor:
        """Undefined words on the device: mostly dense, else at an odd address or with gaps."""
        layout = "dense" if dense else self._own.choice(("dense", "dense", "dense", "odd", "gaps"))
        first, step = {"dense": (0, 1), "odd": (3, 1), "gaps": (1, 2)}[layout]
        made = torch.empty(first + step * numel, dtype=self.task.kind.dtype, device=self.device)[first::step]
        if self.elsewhere:
            self._kept.append(made)
        return made

    def put(self, values: torch.Tensor, dense: bool = False) -> torch.Tensor:
        """A copy on the device, written by a kernel of the current stream."""
        place = self.room(values.numel(), dense)
        place.copy_(values.to(self.device))
        return place

    def call(self, name: str, *arguments: Any, **more: Any) -> None:
        """Call a collective of the package."""
        if name != "reduce_to_owners":
            more["async_op"] = self.task.later
        self.handle = getattr(comm, name)(*arguments, group=self.task.group, config=self.task.config, **more)

    def total(self, contributions: Sequence[torch.Tensor]) -> torch.Tensor:
        return documented(contributions, group_nodes(resolve_group(self.task.group)), self.task.average)


# ---- operations: each calls one, and states outputs and values wanted


def gather(desk: Desk) -> None:
    parts = desk.everybodys(desk.task.numel)
    whole = desk.room(desk.task.numel * desk.ranks)
    own = desk.put(parts[desk.rank])
    desk.call("all_gather_into_tensor", whole, own)
    desk.outputs, desk.wanted = [whole], [torch.cat(parts)]


def gather_in_place(desk: Desk) -> None:
    parts = desk.everybodys(desk.task.numel)
    whole = desk.put(
        torch.cat([part if at == desk.rank else torch.zeros_like(part) for at, part in enumerate(parts)]), True
    )
    desk.call("all_gather_into_tensor", whole, whole.chunk(desk.ranks)[desk.rank] if desk.task.numel else whole)
    desk.outputs, desk.wanted = [whole], [torch.cat(parts)]


def gather_list(desk: Desk) -> None:
    parts = desk.everybodys(desk.task.numel)
    places = [desk.room(desk.task.numel) for _ in parts]
    desk.call("all_gather", places, desk.put(parts[desk.rank]))
    desk.outputs, desk.wanted = places, parts


def gather_several(desk: Desk) -> None:
    numels = [
        desk.shared.choice((desk.task.numel, desk.task.numel // 3, 1, 0)) for _ in range(desk.shared.randrange(1, 4))
    ]
    parts = [desk.everybodys(numel, salt) for salt, numel in enumerate(numels)]
    wholes = [desk.room(numel * desk.ranks) for numel in numels]
    desk.call("all_gather_coalesced", wholes, [desk.put(some[desk.rank]) for some in parts])
    desk.outputs, desk.wanted = wholes, [torch.cat(some) for some in parts]


def exchange(desk: Desk) -> None:
    """Equal pieces, in rows."""
    rows = [row.view(desk.ranks, -1) for row in desk.everybodys(desk.task.numel * desk.ranks)]
    own = desk.put(rows[desk.rank].reshape(-1), dense=True).view(desk.ranks, -1)
    received = desk.room(own.numel(), dense=True).view(desk.ranks, -1)
    desk.call("all_to_all_single", received, own)
    desk.outputs, desk.wanted = [received], [torch.stack([row[desk.rank] for row in rows])]


def pieces(desk: Desk, sizes: Sequence[int]) -> tuple[list[list[int]], list[list[torch.Tensor]]]:
    """Numbers of elements of random ``sizes`` for each pair of ranks, and the pieces that each rank sends."""
    matrix = [[desk.shared.choice(sizes) for _ in range(desk.ranks)] for _ in range(desk.ranks)]
    return matrix, [list(desk.values(member, sum(row)).split(row)) for member, row in enumerate(matrix)]


def uneven_exchange(desk: Desk) -> None:
    """Pieces of random sizes, some of them empty."""
    sizes, sent = pieces(desk, (0, 1, desk.task.numel // 2, desk.task.numel))
    wanted = torch.cat([some[desk.rank] for some in sent])
    received, own = desk.room(wanted.numel(), dense=True), desk.put(torch.cat(sent[desk.rank]), dense=True)
    desk.call("all_to_all_single", received, own, [row[desk.rank] for row in sizes], sizes[desk.rank])
    desk.outputs, desk.wanted = [received], [wanted]


def exchange_lists(desk: Desk) -> None:
    _, sent = pieces(desk, (0, 3, desk.task.numel))
    desk.wanted = [some[desk.rank] for some in sent]
    desk.outputs = [desk.room(piece.numel()) for piece in desk.wanted]
    desk.call("all_to_all", desk.outputs, [desk.put(piece) for piece in sent[desk.rank]])


def broadcast(desk: Desk) -> None:
    root = desk.shared.randrange(desk.ranks)
    values = desk.everybodys(desk.task.numel)
    place = desk.put(values[desk.rank], dense=True)
    desk.call("broadcast", place, desk.task.members[root])
    desk.outputs, desk.wanted = [place], [values[root]]


def all_reduce(desk: Desk) -> None:
    numel = desk.task.numel * desk.ranks + desk.shared.randrange(desk.ranks)
    values = desk.everybodys(numel)
    place = desk.put(values[desk.rank], dense=True)
    desk.call("all_reduce", place, desk.task.reduce_op)
    desk.outputs, desk.wanted = [place], [desk.total(values)]


def all_reduce_several(desk: Desk) -> None:
    numels = (desk.task.numel, 2 * desk.task.numel + 1)
    values = [desk.everybodys(numel, salt) for salt, numel in enumerate(numels)]
    places = [desk.put(some[desk.rank], dense=True) for some in values]
    desk.call("all_reduce_coalesced", places, desk.task.reduce_op)
    desk.outputs, desk.wanted = places, [desk.total(some) for some in values]


def scatter(desk: Desk) -> None:
    values = desk.everybodys(desk.task.numel * desk.ranks)
    place, own = desk.room(desk.task.numel), desk.put(values[desk.rank])
    desk.call("reduce_scatter_tensor", place, own, desk.task.reduce_op)
    desk.outputs, desk.wanted = [place], [desk.total(values)[desk.task.numel * desk.rank :][: desk.task.numel]]


def scatter_in_place(desk: Desk) -> None:
    values = desk.everybodys(desk.task.numel * desk.ranks)
    whole = desk.put(values[desk.rank], dense=True)
    span = slice(desk.task.numel * desk.rank, desk.task.numel * (desk.rank + 1))
    desk.call("reduce_scatter_tensor", whole[span], whole, desk.task.reduce_op)
    desk.outputs, desk.wanted = [whole[span]], [desk.total(values)[span]]


def scatter_list(desk: Desk) -> None:
    numel = desk.task.numel
    values = desk.everybodys(numel * desk.ranks)
    place, parts = desk.room(numel), values[desk.rank].split([numel] * desk.ranks)
    desk.call("reduce_scatter", place, [desk.put(part) for part in parts], desk.task.reduce_op)
    desk.outputs, desk.wanted = [place], [desk.total(values)[numel * desk.rank :][:numel]]


def reduce(desk: Desk) -> None:
    root = desk.shared.randrange(desk.ranks)
    values = desk.everybodys(desk.task.numel)
    place = desk.put(values[desk.rank], dense=True)
    desk.call("reduce", place, desk.task.members[root], desk.task.reduce_op)
    if desk.rank == root:
        desk.outputs, desk.wanted = [place], [desk.total(values)]


def owners(desk: Desk) -> None:
    """Parts of random sizes, each with one owner, several, or none."""
    numel = desk.task.numel * desk.ranks
    ends = sorted(desk.shared.randrange(numel + 1) for _ in range(desk.shared.randrange(6)))
    owned = [
        (end - begin, desk.shared.sample(range(desk.ranks), desk.shared.choice((1, 1, 1, 0, 2))))
        for begin, end in zip([0, *ends], [*ends, numel], strict=True)
    ]
    values = desk.everybodys(numel)
    place = desk.put(values[desk.rank], dense=True)
    desk.call("reduce_to_owners", place, owned, desk.task.reduce_op)
    sizes = [size for size, _ in owned]
    for got, want, (_, some) in zip(place.split(sizes), desk.total(values).split(sizes), owned, strict=True):
        if desk.rank in some:
            desk.outputs.append(got)
            desk.wanted.append(want)


#: Name -> operation of the package, and how to call it.
MOVES: dict[str, tuple[str, Callable[[Desk], None]]] = {
    "gather": ("all_gather_into_tensor", gather), "gather in place": ("all_gather_into_tensor", gather_in_place),
    "gather list": ("all_gather", gather_list), "gather several": ("all_gather_coalesced", gather_several),
    "exchange": ("all_to_all_single", exchange), "uneven exchange": ("all_to_all_single", uneven_exchange),
    "exchange lists": ("all_to_all", exchange_lists), "broadcast": ("broadcast", broadcast),
}  # fmt: skip
SUMS: dict[str, tuple[str, Callable[[Desk], None]]] = {
    "all_reduce": ("all_reduce", all_reduce), "all_reduce several": ("all_reduce_coalesced", all_reduce_several),
    "scatter": ("reduce_scatter_tensor", scatter), "scatter in place": ("reduce_scatter_tensor", scatter_in_place),
    "scatter list": ("reduce_scatter", scatter_list), "reduce": ("reduce", reduce), "owners": ("reduce_to_owners", owners),
}  # fmt: skip
OPERATIONS = MOVES | SUMS
#: Operations that the simulated NCCL has as plain collectives, for any tensors; others are drawn where the package codes them.
_PLAIN = ("broadcast", "reduce", "all_reduce")
DRAWN = [name for name, (op, _) in OPERATIONS.items() if OPS[op].on_device or op in _PLAIN]
