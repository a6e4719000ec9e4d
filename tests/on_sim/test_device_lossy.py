"""Lossy calls of NCCL groups on the simulated GPU: bits, the order of streams, planted mistakes, waits of the host."""

from __future__ import annotations

from typing import Any

import levels
import lossy_calls
import pytest
import torch
from levels import Nodes
from lossy_calls import Call, api, same, with_specials

from ds_zipccl import comm
from ds_zipccl.codecs import project
from ds_zipccl.comm.device import lossy
from ds_zipccl.comm.device.streams import Stage
from ds_zipccl.comm.work import CommError
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.lossy import Int, LossyCodec, Round
from ds_zipccl.policy import wire
from ds_zipccl.telemetry import counters
from on_sim import plants, world
from on_sim.cases import CODED

CODECS: tuple[LossyCodec, ...] = (Round(2), Int(6, 32))
CALLS = (lossy_calls.all_reduce, lossy_calls.reduce_scatter_tensor, lossy_calls.to_owners, lossy_calls.exchange_uneven)
NODES: dict[str, Nodes] = {"2x1": levels.nodes_of(2, 1), "2x2": levels.nodes_of(2, 2)}


def by_definition(rank: int, ranks: int, nodes: Nodes) -> None:
    levels.pretend(nodes)
    two_levels = nodes if len(nodes[0]) > 1 else ()
    for seed, (codec, call) in enumerate((codec, call) for codec in CODECS for call in CALLS):
        dtype = (torch.float32, torch.bfloat16)[seed // 2 % 2]
        everyone = [with_specials(peer, 3001, dtype, seed) for peer in range(ranks)]
        coded: Any = api(codec, nccl="on", nccl_min_bytes=0)
        made = Call(coded, everyone, rank, codec, later=bool(seed % 2), nodes=two_levels, device=f"cuda:{rank}")
        same(*(one.cpu() for one in call(made)))


@pytest.mark.parametrize("name", NODES)
def test_bits_are_those_of_the_definition(route: CudaBackend, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one fragment a call, and in several."""
    nodes = NODES[name]
    if len(nodes[0]) > 1:
        monkeypatch.setattr(wire, "device_sum_fragment", lambda *more: 512)
        monkeypatch.setattr(wire, "uneven_piece", lambda *more: 512)
    world.run(by_definition, sum(map(len, nodes)), nodes, modes=world.ALL_MODES[-1], route=route)
    assert all(row["calls"] and not row["passed"] and row["host_waits"] for row in counters.rows())


def kept_sum(patch: pytest.MonkeyPatch) -> None:
    """The rank that has made a sum keeps it as it is."""
    recv = lossy._Frames.recv

    def wrong(self: Any, peer: int, out: torch.Tensor) -> torch.Tensor:
        return out if peer == self._ctx.rank else recv(self, peer, out)

    patch.setattr(lossy._Frames, "recv", wrong)


def own_part(patch: pytest.MonkeyPatch) -> None:
    """The own contribution is rounded as the others are."""
    fold = lossy.add_in_fp32

    def wrong(arrived: Any, *more: Any) -> None:
        arrived.own = project(arrived.own, Round(2))
        fold(arrived, *more)

    patch.setattr(lossy, "add_in_fp32", wrong)


def backwards(patch: pytest.MonkeyPatch) -> None:
    """Contributions are added from the last one on."""
    fold = lossy.add_in_fp32
    patch.setattr(lossy, "add_in_fp32", lambda arrived, ranks, *more: fold(arrived, ranks[::-1], *more))


def no_nans(patch: pytest.MonkeyPatch) -> None:
    """Frames lose what is not finite."""
    encode = lossy._Frames.encode
    patch.setattr(
        lossy._Frames, "encode", lambda self, words, slot: encode(self, words.nan_to_num(0.0, 0.0, 0.0), slot)
    )


MISTAKES: dict[str, plants.Plant] = {
    "encoded -> sent": plants.without_order(Stage.ENCODE, Stage.WIRE),
    "received -> added": plants.without_order(Stage.WIRE, Stage.DECODE),
    "node sums -> encoded": plants.without_order(Stage.WIRE, Stage.ENCODE),
    "sums -> gathered": plants.without_order(Stage.DECODE, Stage.ENCODE),
    "the caller's words": plants.no_begin,
    "sums of their owners": kept_sum,
    "own parts": own_part,
    "another order": backwards,
    "not finite": no_nans,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_noticed(route: CudaBackend, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MISTAKES[mistake](monkeypatch)
    nodes = levels.nodes_of(3, 1) if mistake == "another order" else NODES["2x2"]
    plants.fails(by_definition, sum(map(len, nodes)), nodes, route=route, seeds=2)


def unequal(rank: int, ranks: int) -> None:
    """Rank 0 sends 5000 elements, of which rank 1 expects 100."""
    source, target = (torch.arange(numel).sin().to(f"cuda:{rank}") for numel in ((5000, 0), (0, 100))[rank])
    splits = ([0, 0], [0, 5000]) if rank == 0 else ([100, 0], [0, 0])
    config = ZipcclConfig(**CODED, enabled=True, min_bytes=0, mode="always", lossy=True)
    if rank == 0:
        comm.all_to_all_single(target, source, *splits, config=config, role="ep", lossy=Round(2))
        return
    with pytest.raises(
        CommError, match=r"global rank 0 announces .* bytes for 100 elements.*give equal sizes on both ranks"
    ):
        comm.all_to_all_single(target, source, *splits, config=config, role="ep", lossy=Round(2))


def test_a_size_that_no_frame_has_is_refused_after_the_exchange(route: CudaBackend) -> None:
    world.run(unequal, 2, route=route)
