"""Calls of the collectives that move bits: gathers, broadcast and all-to-all, each with the outputs wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import corpus
import torch
from operations import Coded

from ds_zipccl import comm
from ds_zipccl.comm.host import frames
from ds_zipccl.comm.host.engine import _of_job
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.telemetry import counters

CODED = ZipcclConfig(enabled=True, mode="always", min_bytes=0)
AUTO = replace(CODED, mode="auto")
SIZES = (0, 1, 2, 7, 2049, 20001)
NAMES = ("all_gather", "all_gather_into_tensor", "all_gather_coalesced", "broadcast", "all_to_all", "all_to_all_single")


def coded(**settings: Any) -> Coded:
    return Coded(replace(CODED, **settings))


def filled(rank: int, size: int, kind: corpus.Float, seed: int) -> torch.Tensor:
    """What ``rank`` contributes: blocks of all textures, the specials (NaN payloads, -0, denormals) among them."""
    return corpus.tensor(corpus.mixed(size, kind, 128, 101 * seed + rank), kind)


def turn(plain: bool) -> None:
    """Let the calls of mode auto pass from now on, or be coded, as a trial of whole steps does; all ranks call."""
    _of_job().steps = SimpleNamespace(reason=lambda role, op: PassReason.STEPS_ARE_FASTER if plain else None)  # type: ignore[assignment]


def wait(handle: Any) -> None:
    if handle is not None:
        handle.wait()


def exchanged(rank: int, sent: Sequence[Sequence[torch.Tensor]], later: bool = False, **more: Any) -> torch.Tensor:
    """Exchange rows, ``sent[a][b]`` from rank a to rank b, and compare every bit; return what came."""
    source, coming = torch.cat(list(sent[rank])), [line[rank] for line in sent]
    wanted = torch.cat(coming)
    output = torch.full_like(wanted, 3)
    wait(comm.all_to_all_single(output, source, [*map(len, coming)], [*map(len, sent[rank])], None, later, **more))
    corpus.assert_same_bits(output, wanted)
    return output


# Each returns (outputs, outputs wanted) of one call through ``api``.


def all_gather(api: Any, inputs: list[torch.Tensor], rank: int, later: bool) -> Any:
    outputs = [torch.empty_like(tensor) for tensor in inputs]
    wait(api.all_gather(outputs, inputs[rank], None, later))
    return outputs, inputs


def all_gather_into_tensor(api: Any, inputs: list[torch.Tensor], rank: int, later: bool) -> Any:
    output = torch.cat([torch.empty_like(tensor) for tensor in inputs])
    wait(api.all_gather_into_tensor(output, inputs[rank], None, later))
    return [output], [torch.cat(inputs)]


def all_gather_in_place(api: Any, inputs: list[torch.Tensor], rank: int, later: bool) -> Any:
    output = torch.cat([tensor if peer == rank else torch.empty_like(tensor) for peer, tensor in enumerate(inputs)])
    wait(api.all_gather_into_tensor(output, output.chunk(len(inputs))[rank], None, later))
    return [output], [torch.cat(inputs)]


def all_gather_coalesced(api: Any, inputs: list[torch.Tensor], rank: int, later: bool) -> Any:
    halves = [[tensor[: len(tensor) // 3] for tensor in inputs], [tensor[len(tensor) // 3 :] for tensor in inputs]]
    outputs = [torch.cat([torch.empty_like(tensor) for tensor in half]) for half in halves]
    wait(api.all_gather_coalesced(outputs, [half[rank] for half in halves], None, later))
    return outputs, [torch.cat(half) for half in halves]


def broadcast(api: Any, inputs: list[torch.Tensor], rank: int, later: bool) -> Any:
    outputs = [inputs[rank].clone() for _ in inputs]
    handles = [api.broadcast(output, src, None, later) for src, output in enumerate(outputs)]
    for handle in handles:
        wait(handle)
    return outputs, inputs


def all_to_all(api: Any, inputs: list[torch.Tensor], rank: int, later: bool) -> Any:
    """Peer p gets the first p/n of every tensor, so that rank 0 gets nothing."""
    ranks = len(inputs)
    outputs = [torch.empty_like(tensor[: len(tensor) * rank // ranks]) for tensor in inputs]
    segments = [inputs[rank][: len(inputs[rank]) * peer // ranks].clone() for peer in range(ranks)]
    wait(api.all_to_all(outputs, segments, None, later))
    return outputs, [tensor[: len(tensor) * rank // ranks] for tensor in inputs]


def all_to_all_single(api: Any, inputs: list[torch.Tensor], rank: int, later: bool) -> Any:
    """Rows of 3, all to the last rank but one row to each of the others: uneven, some empty."""
    ranks, rows = len(inputs), [tensor[: len(tensor) // 3 * 3].view(-1, 3) for tensor in inputs]
    cuts = [[min(1, max(0, len(row) - peer)) for peer in range(ranks - 1)] for row in rows]
    cuts = [[*cut, len(row) - sum(cut)] for cut, row in zip(cuts, rows)]
    wanted = torch.cat([row.split(cut)[rank] for row, cut in zip(rows, cuts)])
    output = torch.empty_like(wanted)
    wait(api.all_to_all_single(output, rows[rank], [cut[rank] for cut in cuts], cuts[rank], None, later))
    return [output], [wanted]


def all_to_all_single_even(api: Any, inputs: list[torch.Tensor], rank: int, later: bool) -> Any:
    ranks = len(inputs)
    rows = [tensor[: len(tensor) // ranks * ranks].view(ranks, -1) for tensor in inputs]
    output = torch.empty_like(rows[rank])
    wait(api.all_to_all_single(output, rows[rank], None, None, None, later))
    return [output], [torch.stack([row[rank] for row in rows])]


def all_to_all_in_place(api: Any, inputs: list[torch.Tensor], rank: int, later: bool) -> Any:
    ranks = len(inputs)
    rows = [tensor[: len(tensor) // ranks * ranks].view(ranks, -1) for tensor in inputs]
    both = rows[rank].clone()
    wait(api.all_to_all_single(both, both, None, None, None, later))
    return [both], [torch.stack([row[rank] for row in rows])]


#: File of ds_zipccl.comm.ops -> ways to call its operations.
MOVES: dict[str, tuple[Callable[..., Any], ...]] = {
    "all_gather": (all_gather, all_gather_into_tensor, all_gather_in_place, all_gather_coalesced),
    "broadcast": (broadcast,),
    "all_to_all": (all_to_all, all_to_all_single, all_to_all_single_even, all_to_all_in_place),
}
EVERYTHING = tuple(move for calls in MOVES.values() for move in calls)


def moves(
    rank: int,
    ranks: int,
    calls: Sequence[Callable[..., Any]] = EVERYTHING,
    plant: Callable[[], None] | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Every bit arrives, in every dtype and size, blocking and not, through frames only. ``settings`` are those of the config."""
    if plant is not None and rank == 1:
        plant()
    api = coded(**settings)
    counters.reset()
    for seed, (move, size) in enumerate((move, size) for size in SIZES for move in calls):
        kind = list(corpus.SUMMED.values())[seed % 3]
        inputs = [filled(peer, size, kind, seed) for peer in range(ranks)]
        for later in (False, True):
            outputs, wanted = move(api, inputs, rank, later)
            for got, want in zip(outputs, wanted, strict=True):
                corpus.assert_same_bits(got, want)
    assert all(row["calls"] and not row["passed"] for row in counters.rows()) and counters.rows()


def flip_a_bit() -> None:
    """From now on the last element of every decoded tensor has a wrong bit."""
    decompress = frames.decompress

    def wrong(frame: torch.Tensor, out: torch.Tensor, **settings: Any) -> torch.Tensor:
        decompress(frame, out, **settings)
        out.view(torch.uint8)[-1] ^= 1
        return out

    frames.decompress = wrong


def colliding(numel: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Two different tensors of int64 whose hashes without a key (FORMAT.md section 5) are equal.

    The low halves of two words make half 0 blind for their high halves. The high halves then change so that the products of half 1 do not.
    """
    keys, low = corpus.hashes(130, 0).tolist(), (1 << 32) - 1
    lows = [-keys[i] & low for i in (0, 1)]
    factors = [lows[i] + keys[128 + i] & low for i in (0, 1)]
    made = []
    for highs in ((0, factors[0]), (factors[1], 0)):
        words = [lows[i] | ((highs[i] - (keys[128 + i] >> 32)) & low) << 32 for i in (0, 1)]
        signed = [word - (word >> 63 << 64) for word in words]
        made.append(torch.tensor(signed + list(range(2, numel))))
    return made[0], made[1]
