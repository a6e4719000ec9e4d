"""The schedule of gathers: every rank sends its shard to every other, in pieces."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_zipccl.comm.exchange import Link
from ds_zipccl.comm.rounds import Pieces, posting, pump


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
    sources = detached(own, [place for there in places for place in there])
    leaving, coming = Pieces(link, sources), {peer: Pieces(link, places[peer]) for peer in link.peers}
    bases = None if base is None else Pieces(link, [base])
    with posting(link, index) as exchange:

        def post(turn: int) -> None:
            exchange.turn()
            for peer, pieces in coming.items():
                for place in pieces.at(turn):
                    exchange.expect(peer, place)
            for piece in leaving.at(turn):
                exchange.send(piece, *link.peers, base=None if bases is None else bases.at(turn)[0])

        def take(turn: int) -> None:
            for peer, pieces in coming.items():
                for place in pieces.at(turn):
                    exchange.receive(peer, place, base=place)

        pump(leaving.turns, post, take)
    for source, place in zip(sources, places[link.rank], strict=True):
        place.copy_(source)


def detached(sources: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """``sources``, copied where they share memory with what is written while they are still being sent.

    A source in the very place of something written is safe: its pieces leave before the same pieces are written.
    """
    spans = {_span(flat) for flat in written if flat.numel()}

    def shared(flat: torch.Tensor) -> bool:
        begin, end = _span(flat)
        return any(begin < last and first < end for first, last in spans - {(begin, end)})

    return [flat.clone() if flat.numel() and shared(flat) else flat for flat in sources]


def _span(flat: torch.Tensor) -> tuple[int, int]:
    return flat.data_ptr(), flat.data_ptr() + flat.nbytes
