"""Tables of lossy codecs: their keys and roles, and the sizes and errors to expect."""

from __future__ import annotations

import json
from pathlib import Path

from measured import table

from ds_zipccl import role_settings
from ds_zipccl.lossy import LOSSY_CODECS, Int, Round, TacoFp8, Zfp
from ds_zipccl.policy import lossy_sizes

#: Codecs of the table of sizes.
SIZED = (
    Round(5),
    Round(3),
    Round(2),
    Round(1),
    TacoFp8(),
    TacoFp8(hadamard=False),
    Int(8),
    Int(6),
    Int(4),
    Zfp(8),
)
#: Lossless bits of gradients in bfloat16 that the expectations of :mod:`lossy_sizes` were derived with.
_LOSSLESS_BITS = 11.04


def codecs(page: Path) -> str:
    """Every lossy codec: its keys, its roles and its meaning."""
    rows = []
    for name, codec in LOSSY_CODECS.items():
        uses = role_settings.USES.get(name, {})
        known = [(key, codec.wanted[key], getattr(codec(), key), "") for key in role_settings.codec_keys(name)]
        known += [
            (key, use.values, use.default, _only(use.roles, role_settings.CODEC_ROLES[name]))
            for key, use in uses.items()
        ]
        keys = "; ".join(
            f"`{key}` {role_settings.said(values).replace(' | ', ', ')} ({'all' if default is None else json.dumps(default)}{only})"
            for key, values, default, only in known
        )
        roles = " ".join(f"`{role}`" for role in role_settings.CODEC_ROLES[name])
        rows.append((f"`{name}`", keys, roles, str(codec.__doc__).replace("``", "")))
    return table(("codec", "keys (default)", "roles", "meaning"), rows)


def _only(roles: tuple[str, ...], of_codec: tuple[str, ...]) -> str:
    return "" if set(roles) == set(of_codec) else f"; {' and '.join(f'`{role}`' for role in roles)} only"


def sizes(page: Path) -> str:
    """Expected bits and error of lossy codecs, for a dense tensor of bfloat16 that takes as many bits losslessly as gradients do."""
    rows = [("lossless", f"{_LOSSLESS_BITS:.1f}", f"{16 / _LOSSLESS_BITS:.2f}", "0")]
    for codec in SIZED:
        found = lossy_sizes.expected(codec, "bfloat16", _LOSSLESS_BITS)
        rows.append((f"`{codec}`", f"{found.bits:.1f}", f"{16 / found.bits:.2f}", f"{found.error:.3g}"))
    origin = "Expected of gradients in bfloat16 by a rule, which a test compares with measurements on a GPT of 11M parameters."
    return f"{origin}\n\n{table(('codec', 'bits a value', 'ratio', 'relative L2 error'), rows)}"
