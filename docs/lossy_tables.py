"""Tables of lossy codecs: their keys and roles, and measured sizes and errors."""

from __future__ import annotations

import json
from pathlib import Path

from measured import provenance, results, table

from ds_zipccl import role_settings
from ds_zipccl.lossy import LOSSY_CODECS

#: Tensors of the table of sizes in docs/results/lossy.json, and their names there.
_DATA = {
    "grad.blocks": "gradients",
    "act.forward": "activations forward",
    "act.backward": "activations backward",
    "moe.dispatch": "dispatch of experts, 45% empty",
}
_LOSSLESS = "cascade"


def codecs(page: Path) -> str:
    """Every lossy codec: its keys, its roles and its meaning."""
    rows = []
    for name, codec in LOSSY_CODECS.items():
        uses = role_settings.USES.get(name, {})
        known = [(key, values, getattr(codec(), key)) for key, values in codec.wanted.items()]
        known += [(key, use.values, use.default) for key, use in uses.items()]
        keys = "; ".join(
            f"`{key}` {role_settings.said(values).replace(' | ', ', ')} ({'all' if default is None else json.dumps(default)})"
            for key, values, default in known
        )
        roles = " ".join(f"`{role}`" for role in role_settings.CODEC_ROLES[name])
        rows.append((f"`{name}`", keys, roles, str(codec.__doc__).replace("``", "")))
    return table(("codec", "keys (default)", "roles", "meaning"), rows)


def sizes(page: Path) -> str:
    """Measured bits and errors of lossy codecs on bfloat16 tensors of a GPT."""
    content = results("lossy")
    rows = {(row["codec"], row["data"]): row for row in content["rows"] if row["dtype"] == "bfloat16"}
    lines = []
    for codec in dict.fromkeys(codec for codec, _ in rows):
        bits = [rows[codec, data]["bits"] for data in _DATA]
        error = max(rows[codec, data]["error"] for data in _DATA)
        name = "lossless" if codec == _LOSSLESS else f"`{codec}`"
        lines.append((name, *(f"{one:.1f}" for one in bits), f"{16 / bits[0]:.2f}", f"{error:.2g}"))
    bits = (f"bits per value, {said}" for said in _DATA.values())
    heads = ("codec", *bits, "ratio on gradients", "relative L2 error, at most")
    return f"{provenance(content)}\n\n{table(heads, lines)}"
