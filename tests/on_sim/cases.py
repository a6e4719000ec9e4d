"""Operations on NCCL groups as the tests of bad cases call them, with the results wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import corpus
import levels
import moves
import pytest
import torch
import torch.distributed as dist
from sim import streams
from sim.device import machine, mine

from ds_zipccl.comm import topology
from ds_zipccl.telemetry import counters
from on_sim import world

CODED: dict[str, Any] = {"nccl": "on", "nccl_min_bytes": 0}
#: A machine with every property at once.
HARD = world.ALL_MODES[-1]
PATIENT = world.Modes(patient=True)


class Case(NamedTuple):
    """An operation. ``given``: elements of a rank's input, for ``numel``. ``wanted``: a rank's output, from the inputs of all ranks.
    ``call(api, output, input, group, async_op)``."""

    given: Callable[[int, int, int], int]
    wanted: Callable[[int, Sequence[torch.Tensor]], torch.Tensor]
    call: Callable[..., Any]


def cuts(whole: int, ranks: int) -> list[int]:
    """Elements that a rank sends to each rank: nothing to rank 0, and most to the last one."""
    pairs = ranks * (ranks - 1) // 2
    return [0, *(whole // pairs * peer for peer in range(1, ranks))]


def uneven(api: Any, output: torch.Tensor, input: torch.Tensor, group: Any, later: bool) -> Any:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sent = cuts(len(input), ranks)
    return api.all_to_all_single(output, input, [sent[rank]] * ranks, sent, group, later)


CASES = {
    "gather": Case(
        lambda rank, ranks, numel: numel,
        lambda rank, inputs: torch.cat(list(inputs)),
        lambda api, output, input, group, later: api.all_gather_into_tensor(output, input, group, later),
    ),
    "exchange": Case(
        lambda rank, ranks, numel: ranks * numel,
        lambda rank, inputs: torch.cat([one.chunk(len(inputs))[rank] for one in inputs]),
        lambda api, output, input, group, later: api.all_to_all_single(output, input, None, None, group, later),
    ),
    "uneven": Case(
        lambda rank, ranks, numel: ranks * (ranks - 1) // 2 * numel,
        lambda rank, inputs: torch.cat([one.split(cuts(len(one), len(inputs)))[rank] for one in inputs]),
        uneven,
    ),
}
every_case = pytest.mark.parametrize("case", CASES)


def weights(rank: int, numel: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Words of a trained weight: they shrink."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (0.02 * torch.randn(numel, generator=generator)).to(dtype)


def noise(rank: int, numel: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Words of any bits but those of NaN: they do not shrink."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    words = torch.randint(-(1 << 15), 1 << 15, (numel,), generator=generator).to(torch.int16)
    return torch.where((words & 0x7F80) == 0x7F80, words ^ 0x4000, words).view(dtype)


def documented(contributions: Sequence[torch.Tensor], nodes: levels.Nodes, average: bool) -> torch.Tensor:
    """The sum by the host, in the documented order of the nodes of a group."""
    if topology.levels(nodes) and topology.ascending(nodes):
        return levels.in_two_levels(contributions, nodes, average)
    return levels.in_one_level(contributions, average)


def prepared(
    case: str, rank: int, ranks: int, numel: int = 3000, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The input of a group rank, an output of zeros, and the output wanted, on the host."""
    inputs = [weights(peer, CASES[case].given(peer, ranks, numel), seed) for peer in range(ranks)]
    wanted, device = CASES[case].wanted(rank, inputs), f"cuda:{mine().rank}"
    return inputs[rank].to(device), torch.zeros(len(wanted), dtype=wanted.dtype, device=device), wanted


def once(
    case: str,
    rank: int,
    ranks: int,
    numel: int = 3000,
    seed: int = 0,
    group: Any = None,
    later: bool = False,
    **settings: Any,
) -> torch.Tensor:
    """One call with the right result."""
    given, output, wanted = prepared(case, rank, ranks, numel, seed)
    moves.wait(CASES[case].call(moves.coded(**CODED, **settings), output, given, group, later))
    corpus.assert_same_bits(output.cpu(), wanted)
    return output


def captured(case: str, api: Any, rank: int, ranks: int) -> None:
    """A call inside a graph: the plain collective is in it, and its replay sends what is in the tensors then."""
    values, output, wanted = prepared(case, rank, ranks)
    given, recorded = torch.zeros_like(values), streams.Graph()
    with recorded.capture():
        CASES[case].call(api, output, given, None, False)
    given.copy_(values)
    recorded.replay()
    corpus.assert_same_bits(output.cpu(), wanted)


def reasons() -> dict[str, int]:
    found: dict[str, int] = {}
    for row in counters.rows():
        for reason, calls in row["reasons"].items():
            found[reason] = found.get(reason, 0) + calls
    return found


def bytes_sent(nodes: Sequence[Sequence[int]], between: bool = True) -> float:
    """The bytes that this rank has sent between nodes so far, or to ranks of its own. Agreements on sizes do not count. Collectives of NCCL
    count as rings, which enter each node once, and as this rank's part of them."""
    where = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
    me, total = dist.get_rank(), 0.0
    for communicator in machine().communicators.values():
        if me not in communicator.ranks:
            continue
        count = len(communicator.ranks)
        links = len({where[rank] for rank in communicator.ranks})
        for call in communicator.calls[me]:
            nbytes, itemsize = sum(one.nbytes for one in call.inputs), call.inputs[0].element_size()
            if call.kind == "all_to_all" and call.inputs[0].dtype != torch.int64:
                peers = zip(communicator.ranks, call.sent, strict=True)
                total += sum(sent * itemsize for peer, sent in peers if (where[peer] != where[me]) == between)
            elif call.kind != "all_to_all" and between and links > 1:
                part = (count - 1) / count
                ring = {"all_gather": count - 1, "reduce_scatter": part, "all_reduce": 2 * part, "reduce": 1}
                total += ring[call.kind] * nbytes * (links - (call.kind == "reduce")) / count
    return total
