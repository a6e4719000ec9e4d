"""The schedules of gathers: every rank sends its shard to every other, in pieces; or only to one of each other node, which hands it on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_zipccl.comm.frames import Link
from ds_zipccl.comm.schedules.pipeline import Pieces, Round, posting, pump


def gather(
    link: Link,
    index: int,
    own: Sequence[torch.Tensor],
    places: Sequence[Sequence[torch.Tensor]],
    base: torch.Tensor | None = None,
) -> None:
    """Round ``index``: give every rank what is in ``own``, and write what rank r has there to ``places[r]``.

    All tensors are flat. Own ones may lie in any place. With ``base`` the own tensor, a single one, goes as a difference against it; the
    base of what comes is what stands in its place.
    """
    sources = detached(own, [place for there in places for place in there], places[link.rank])
    schedule, rounds = (_by_node, 2) if link.nodes else (_directly, 1)
    leaving, bases = (Pieces(link, flats, rounds) for flats in (sources, [] if base is None else [base]))
    schedule(link, index, leaving, [Pieces(link, there, rounds) for there in places], bases)
    for source, place in zip(sources, places[link.rank], strict=True):
        place.copy_(source)


def _directly(link: Link, index: int, leaving: Pieces, coming: Sequence[Pieces], bases: Pieces) -> None:
    with posting(link, index) as exchange:

        def post(turn: int) -> None:
            exchange.turn()
            for peer in link.peers:
                for place in coming[peer].at(turn):
                    exchange.expect(peer, place)
            _send(exchange, leaving, bases, turn, link.peers)

        def take(turn: int) -> None:
            for peer in link.peers:
                for place in coming[peer].at(turn):
                    exchange.receive(peer, place, base=place)

        pump(leaving.turns, post, take)


def _by_node(link: Link, index: int, leaving: Pieces, coming: Sequence[Pieces], bases: Pieces) -> None:
    """Rank i of a node sends to rank i of every other node and to its neighbours in the node, and hands on to these what it got from
    the other nodes, as it came: every shard enters a node once. Rounds ``index`` and the next."""
    mine = next(ranks for ranks in link.nodes if link.rank in ranks)
    neighbours = [rank for rank in mine if rank != link.rank]
    # the ranks of other nodes whose shards come into this one through a rank of it
    through = {rank: [ranks[seat] for ranks in link.nodes if ranks is not mine] for seat, rank in enumerate(mine)}
    with posting(link, index) as across, posting(link, index + 1) as within:

        def post(turn: int) -> None:
            across.turn()
            for peer in (*through[link.rank], *neighbours):
                for place in coming[peer].at(turn):
                    across.expect(peer, place)
            _send(across, leaving, bases, turn, [*through[link.rank], *neighbours])

        def hand_on(turn: int) -> None:
            within.turn()
            for neighbour in neighbours:
                for peer in through[neighbour]:
                    for place in coming[peer].at(turn):
                        within.expect(neighbour, place)
            for peer in through[link.rank]:
                for place in coming[peer].at(turn):
                    across.hand_on(peer, place, within, neighbours)

        def take(turn: int) -> None:
            for neighbour in neighbours:
                for place in coming[neighbour].at(turn):
                    across.receive(neighbour, place, base=place)
                for peer in through[neighbour]:
                    for place in coming[peer].at(turn):
                        within.receive(neighbour, place, base=place)

        pump(leaving.turns, post, hand_on, take)


def _send(exchange: Round, leaving: Pieces, bases: Pieces, turn: int, peers: Sequence[int]) -> None:
    """Send the own pieces, as differences if there is a base, which only a single tensor may have."""
    base = next(iter(bases.at(turn)), None)
    for piece in leaving.at(turn):
        exchange.send(piece, *peers, base=base)


def detached(
    sources: Sequence[torch.Tensor], written: Sequence[torch.Tensor], homes: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """``sources``, copied where they share memory with what is written while they are still being sent.

    Source i may lie in ``homes[i]``, exactly: nothing is written there before the same piece of it has left.
    """
    spans = {_span(flat) for flat in written if flat.numel()}

    def shared(flat: torch.Tensor, home: torch.Tensor) -> bool:
        begin, end = _span(flat)
        return any(begin < last and first < end for first, last in spans - ({_span(home)} & {(begin, end)}))

    return [
        flat.clone() if flat.numel() and shared(flat, home) else flat for flat, home in zip(sources, homes, strict=True)
    ]


def _span(flat: torch.Tensor) -> tuple[int, int]:
    return flat.data_ptr(), flat.data_ptr() + flat.nbytes
