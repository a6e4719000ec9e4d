"""Lossy codecs of ``bench codec``: names with settings, and rows with sizes, errors and speeds."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ds_zipccl.benchmarks.codec import trial as codec_trial
from ds_zipccl.benchmarks.codec.trial import NO_ROUTE, Source
from ds_zipccl.lossy import LOSSY_CODECS, LossyCodec
from ds_zipccl.tools import tables
from ds_zipccl.tools.tables import Column

if TYPE_CHECKING:
    import torch

#: Name -> class of the codecs that take tensors of any shape.
CODECS = {name: kind for name, kind in LOSSY_CODECS.items() if not kind.matrices}
#: Values below this part of a tensor's root mean square are small.
SMALL = 0.1


def codec(text: str, known: Mapping[str, type[LossyCodec]] = CODECS) -> LossyCodec:
    """Return the lossy codec of ``NAME[:SETTING]...``; a SETTING is a value in the codec's order, or ``name=value``.

    Args:
        known: name -> class of the allowed codecs.

    Raises:
        ValueError: no codec has the name, or a setting is not allowed.
    """
    name, *settings = text.split(":")
    if name not in known:
        raise ValueError(f"no codec {name!r}; the lossy codecs are {', '.join(known)}")
    kind = known[name]
    names = [one.name for one in fields(kind)]
    given: dict[str, Any] = {}
    for at, setting in enumerate(settings):
        key, _, value = setting.rpartition("=")
        key = key or (names[at] if at < len(names) else "")
        if key not in names or key in given:
            raise ValueError(f"{text!r}: the settings of {name} are {', '.join(names)}, each once")
        words: dict[str, Any] = {str(one).lower(): one for one in kind.wanted[key]}
        given[key] = words.get(value, value)
    return kind(**given)


def about() -> str:
    """The lossy codecs with their settings, for ``--help``."""
    return "\n".join(
        f"  {name}: {', '.join(f'{key} {kind.wanted[key][0]} to {kind.wanted[key][-1]}' for key in kind.wanted)}"
        for name, kind in CODECS.items()
    )


@dataclass(frozen=True)
class LossyCoder:
    """A codec on a route: a lossy codec, or the name of a lossless one for comparison."""

    route: str
    codec: LossyCodec | str

    def begin(self, tensor: torch.Tensor, block: int) -> codec_trial.Trial:
        """Return the trial of a tensor."""
        return codec_trial.FrameTrial(tensor, self.codec, self.route, block)

    def wanted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that a receiver gets."""
        from ds_zipccl import codecs

        return tensor if isinstance(self.codec, str) else codecs.project(tensor, self.codec, route=self.route)


def coders(args: argparse.Namespace) -> list[LossyCoder]:
    """The codecs of ``--codec`` on the routes of ``--route``.

    Raises:
        ToolError: a route does not work here.
    """
    pairs = [
        (NO_ROUTE if name == "raw" else route, name)
        for name in args.codec
        for route in codec_trial.usable_routes(args.route)
    ]
    return [LossyCoder(route, name) for route, name in dict.fromkeys(pairs)]


def sources(args: argparse.Namespace) -> list[Source]:
    """The tensors of lossy dtypes. A line on stderr names each tensor that is left out."""
    found = []
    for source in (*codec_trial.stored(args), *codec_trial.synthetic(args)):
        if source.dtype in ("bfloat16", "float16", "float32"):
            found.append(source)
        else:
            tables.complain(f"{source.name} left out: lossy codecs do not take {source.dtype}")
    return found


def rows(cases: list[Source], able: list[LossyCoder], block: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each tensor and codec. A line on stderr names each codec without kernels on the route."""
    from ds_zipccl.kernels import RouteUnavailable

    for source in cases:
        tensor = source.load()
        for coder in able:
            row: dict[str, Any] = {"route": coder.route, "codec": str(coder.codec), "dtype": source.dtype}
            row |= {"data": source.name, "numel": source.numel}
            try:
                wanted = coder.wanted(tensor)
                trial = coder.begin(tensor, block)
                speeds, wrong = codec_trial.run(tensor, trial, repeats, wanted)
            except RouteUnavailable as error:
                tables.complain(f"{coder.route} {coder.codec} left out: {error}")
                continue
            row |= {"bits": 8 * trial.coded_bytes / tensor.numel(), "ratio": tensor.nbytes / trial.coded_bytes}
            row |= errors(tensor, wanted)
            yield row | codec_trial.figures(speeds) | {"wrong": wrong}


def errors(tensor: torch.Tensor, wanted: torch.Tensor) -> dict[str, float | None]:
    """Relative L2 error of the finite values, and mean relative error of the small nonzero ones; None without any."""
    import torch

    values, found = tensor.double().flatten(), wanted.double().flatten()
    finite = values.isfinite()
    values, error = values[finite], (found[finite] - values[finite]).abs()
    energy = float(values.square().sum())
    size = values.abs()
    small = (size > 0) & (size < SMALL * (energy / max(values.numel(), 1)) ** 0.5)
    shares = error[small] / size[small]
    return {
        "error": (float(error.square().sum()) / energy) ** 0.5 if energy else None,
        "small_error": float(torch.mean(shares)) if shares.numel() else None,
    }


def columns(found: list[Source]) -> tuple[Column, ...]:
    """Return the columns of the table."""
    return (
        Column("route", width=6),
        Column("codec", width=31),
        Column("dtype", width=max(8, *(len(source.dtype) for source in found))),
        Column("data", width=max(16, *(len(source.name) for source in found))),
        Column("numel", ",d", 10),
        Column("bits", ".2f"),
        Column("ratio", ".3f", 7),
        Column("error", ".4f", 7),
        Column("small_error", ".3f"),
        *(Column(f"{name}_gbps", ".2f") for name in ("encode", "decode", "memcpy")),
        *(Column(f"{name}_memcpy", ".3f") for name in ("encode", "decode")),
        Column("wrong", "d"),
    )


def named(others: Sequence[str], text: str) -> str | LossyCodec:
    """Parse a value of ``--codec``: a name in ``others``, or a lossy codec with settings (argparse type)."""
    if text in others:
        return text
    try:
        return codec(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
