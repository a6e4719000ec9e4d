"""``bench codec --codec delta``: the delta codec and other compressors of differences to a base, and their bound."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ds_zipccl.benchmarks.codec import peers, sets
from ds_zipccl.benchmarks.codec.trial import PEER_ROUTE, accepted, figures, run, spoil, usable_routes
from ds_zipccl.tools import ToolError, tables
from ds_zipccl.tools.tables import Column

if TYPE_CHECKING:
    import torch

CODEC = "delta"
COLUMNS = (
    Column("route", width=6),
    Column("codec", width=9),
    Column("dtype", width=8),
    Column("data", width=14),
    Column("numel", ",d", 10),
    Column("changed", ".4f"),
    *tables.alike("ratio bound", ".3f", 8),
    *tables.alike("encode_gbps decode_gbps in_place_gbps memcpy_gbps", ".2f"),
    *tables.alike("encode_memcpy decode_memcpy in_place_memcpy", ".3f"),
    Column("wrong", "d"),
)
_TIMED = ("encode", "decode", "in_place")


class _Pair:
    """Words, their base, and the outputs of the two decoders of a trial: apart from the base, and in place of it."""

    repeatable = True

    def __init__(self, words: torch.Tensor, base: torch.Tensor) -> None:
        import torch

        self._words, self._base = words, base
        self._back, self._own = torch.empty_like(words), torch.empty_like(words)
        self._result = self._back
        self.more: Mapping[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "in_place": (self._restore, self._decode_in_place)
        }

    def prepare(self) -> None:
        spoil(self._back, self._words)
        self._result = self._back

    def result(self) -> torch.Tensor:
        return self._result

    def decode(self) -> None:
        self._decode(self._base, self._back)

    def _restore(self) -> None:
        self._own.copy_(self._base)
        self._result = self._own

    def _decode_in_place(self) -> None:
        self._decode(self._own, self._own)

    def _decode(self, base: torch.Tensor, out: torch.Tensor) -> None:
        raise NotImplementedError


class DeltaTrial(_Pair):
    """The delta codec on a route."""

    def __init__(self, words: torch.Tensor, base: torch.Tensor, route: str, block: int) -> None:
        import torch

        from ds_zipccl import codecs

        super().__init__(words, base)
        self._route, self._block = route, block
        bound = codecs.compress_bound(words.numel(), words.dtype, CODEC, block=block)
        self._frame = self._out = torch.empty(bound, dtype=torch.uint8)

    def encode(self) -> None:
        from ds_zipccl import codecs

        compress = partial(codecs.compress, shaped=False, checksum=False, block=self._block, route=self._route)
        self._frame = compress(self._words, CODEC, base=self._base, out=self._out)

    def _decode(self, base: torch.Tensor, out: torch.Tensor) -> None:
        from ds_zipccl import codecs

        codecs.decompress(self._frame, out, base=base, route=self._route)

    @property
    def coded_bytes(self) -> int:
        return self._frame.numel()


class DifferencePeerTrial(_Pair):
    """A peer of the delta codec."""

    def __init__(self, words: torch.Tensor, base: torch.Tensor, peer: peers.Difference) -> None:
        super().__init__(words, base)
        self._peer = peer
        self._coded = b""

    def encode(self) -> None:
        self._coded = self._peer.compress(_array(self._words), _array(self._base))

    def _decode(self, base: torch.Tensor, out: torch.Tensor) -> None:
        before = _array(base)
        self._peer.decompress(self._coded, before, before if out is base else _array(out))

    @property
    def coded_bytes(self) -> int:
        return len(self._coded)


def _array(tensor: torch.Tensor) -> Any:
    """The words as a numpy array of unsigned integers, over the same memory."""
    import numpy as np

    from ds_zipccl.tools.exponents import words

    signed = words(tensor).numpy()
    return signed.view(np.dtype(f"u{signed.itemsize}"))


def bound(words: torch.Tensor, base: torch.Tensor) -> float | None:
    """Ratio of a code that knows only how often each difference D (FORMAT.md 2.3) occurs; None if all D are equal.

    Its bits per element are the entropy of D.
    """
    import numpy as np

    def order(tensor: torch.Tensor) -> Any:
        array = _array(tensor)
        sign = array.dtype.type(1 << 8 * array.itemsize - 1)
        return np.where(array & sign, ~array, array | sign)

    difference = order(words) - order(base)
    counts = np.bincount(difference) if words.itemsize < 4 else np.unique(difference, return_counts=True)[1]
    shares = counts[counts > 0] / words.numel()
    entropy = float(-(shares * np.log2(shares)).sum())
    return 8 * words.itemsize / entropy if entropy > 0 else None


#: Route, codec, and constructor of a trial from words and their base.
Coder = tuple[str, str, Callable[["torch.Tensor", "torch.Tensor"], Any]]


def coders(args: argparse.Namespace) -> list[Coder]:
    """The delta codec on the routes of ``--route``, and the installed ``--peers``.

    Raises:
        ToolError: a route does not work here, or a peer does not code differences.
    """
    from ds_zipccl import kernels

    found: list[Coder] = []
    for route in usable_routes(args.route, kernels.delta_route):
        found.append((route, CODEC, partial(DeltaTrial, route=route, block=args.block)))
    for name in list(peers.DIFFERENCES) if args.peers == [] else dict.fromkeys(args.peers or []):
        if name not in peers.DIFFERENCES:
            raise ToolError(f"peer {name} does not code differences; take one of {', '.join(peers.DIFFERENCES)}")
        try:
            peer = peers.DIFFERENCES[name](args.threads)
        except ImportError as error:
            tables.complain(f"peer {name} left out: {error}; pip install {peers.DIFFERENCE_PACKAGES[name]}")
            continue
        found.append((PEER_ROUTE, name, partial(DifferencePeerTrial, peer=peer)))
    return found


def pairs(args: argparse.Namespace) -> list[tuple[sets.Pair, str, int]]:
    """The pairs to measure: data set, dtype, number of elements.

    Raises:
        ToolError: a data set has no base, or exists in none of the dtypes.
    """
    named = args.data or sets.usual_pairs()
    for spec in named:
        if not isinstance(spec, sets.Pair):
            raise ToolError(f"{spec.name!r} has no base, which --codec delta needs; known: {', '.join(sets.PAIRS)}")
    found = [(pair, dtype, numel) for numel in args.numel for dtype in args.dtype for pair in named if pair.has(dtype)]
    if not found:
        raise ToolError("none of these data sets exists in any of these dtypes: they are for bf16, fp16 and fp32")
    return found


def rows(cases: list[tuple[sets.Pair, str, int]], able: list[Coder], repeats: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each case and coder; words and base are made once per case."""
    from ds_zipccl.tools.exponents import differing

    for pair, dtype, numel in cases:
        words, base = pair.make(numel, dtype)
        shared = {"dtype": dtype, "data": str(pair), "numel": numel, "changed": differing(words, base) / numel}
        shared |= {"ratio": None, "bound": bound(words, base)}
        for route, codec, begin in able:
            row: dict[str, Any] = {"route": route, "codec": codec} | shared
            trial = begin(words, base)
            speeds, wrong = accepted(f"{route} {codec} {dtype} {pair}", numel, partial(run, words, trial, repeats))
            if speeds:
                row["ratio"] = words.nbytes / max(trial.coded_bytes, 1)
            yield row | figures(speeds, _TIMED) | {"wrong": wrong}
