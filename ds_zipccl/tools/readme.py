"""Writes the generated sections of README.md: ``python -m ds_zipccl.tools.readme`` from a checkout. A test holds them up to date.

A section stands between ``<!-- begin NAME -->`` and ``<!-- end -->``. Measured tables come from the JSON in ``docs/results``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ds_zipccl.config import ENVIRONMENT, ZipcclConfig

ROOT = Path(__file__).resolve().parents[2]


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    lines = [list(head), *(list(map(str, row)) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _results(name: str) -> dict[str, Any]:
    return dict(json.loads((ROOT / "docs" / "results" / name).read_text()))


def _config() -> str:
    fields = ZipcclConfig.model_fields.items()
    return _table(
        ("key", "default", "meaning"),
        (
            (f"`{key}`", f"`{json.dumps(field.get_default(call_default_factory=True))}`", field.description)
            for key, field in fields
        ),
    )


def _environment() -> str:
    return _table(("variable", "meaning"), ((f"`{name}`", meaning) for name, meaning in ENVIRONMENT.items()))


def _codec() -> str:
    results = _results("codec.json")
    return f"`{results['command']}`\n\n" + _table(
        ("route", "dtype", "data", "ratio", "bound", "encode GB/s", "decode GB/s", "memcpy GB/s"),
        (
            (
                row["route"],
                row["dtype"],
                row["data"],
                f"{row['ratio']:.3f}",
                f"{row['entropy_ratio']:.3f}",
                *(f"{row[key]:.2f}" for key in ("encode_gbps", "decode_gbps", "memcpy_gbps")),
            )
            for row in results["rows"]
            if row["codec"] in ("cascade", "window")
        ),
    )


def _train() -> str:
    results = _results("train.json")
    return f"`{results['command']}`\n\n" + _table(
        ("mode", "ranks", "link", "variant", "step ms", "raw MB", "wire MB", "parameters (sha256)", "speed-up"),
        (
            (
                row["mode"],
                row["ranks"],
                row["link"],
                row["variant"],
                f"{row['step_ms']:.0f}",
                f"{row['raw_bytes'] / 1e6:.1f}",
                f"{row['wire_bytes'] / 1e6:.1f}",
                row["params_sha256"][:12],
                f"{row['speedup']:.2f}",
            )
            for row in results["rows"]
        ),
    )


SECTIONS: dict[str, Callable[[], str]] = {
    "config": _config,
    "environment": _environment,
    "codec": _codec,
    "train": _train,
}


def generate(text: str) -> str:
    """``text`` with every marked section written anew.

    Raises:
        KeyError: a marker names no section.
    """
    pattern = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{SECTIONS[match[2]]()}\n{match[3]}", text)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(generate(readme.read_text()))
