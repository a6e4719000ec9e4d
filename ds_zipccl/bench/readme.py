"""Writes the generated sections of README.md: ``python -m ds_zipccl.bench.readme`` from a checkout. A test holds them up to date.

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
        (
            "codec",
            "dtype",
            "data",
            "ratio",
            "bound",
            "encode GB/s",
            "decode GB/s",
            "encode / memcpy",
            "decode / memcpy",
        ),
        (
            (
                row["codec"],
                row["dtype"],
                row["data"],
                f"{row['ratio']:.3f}",
                f"{row['entropy_ratio']:.3f}",
                *(f"{row[key]:.2f}" for key in ("encode_gbps", "decode_gbps", "encode_memcpy", "decode_memcpy")),
            )
            for row in results["rows"]
            if row["codec"] != "raw" and (row["dtype"] == "bfloat16" or row["data"] in ("normal", "bf16_in_fp32"))
        ),
    )


def _cuda() -> str:
    if not (ROOT / "docs" / "results" / "cuda.json").exists():
        return (
            "Not measured yet: the kernels compile for sm_80, sm_90 and sm_100 without spills, and the tests run their source on the CPU, "
            "but no GPU was at hand. `make gpu` tests and measures them on one, and writes this table."
        )
    results = _results("cuda.json")
    return f"{results['device']}, `{results['command']}`\n\n" + _table(
        (
            "route",
            "codec",
            "MiB",
            "ratio",
            "encode GB/s",
            "decode GB/s",
            "copy GB/s",
            "encode / copy",
            "decode / copy",
            "wrong",
        ),
        (
            (
                row["route"],
                row["codec"],
                row["mib"],
                f"{row['ratio']:.3f}",
                *(f"{row[key]:.0f}" for key in ("encode_gbps", "decode_gbps", "copy_gbps")),
                *(f"{row[key]:.2f}" for key in ("encode_moved", "decode_moved")),
                row["wrong"],
            )
            for row in results["rows"]
        ),
    )


def _corpus() -> str:
    """One line a tensor: ratio and speeds of each coder beside each other."""
    results = _results("corpus.json")
    coders = list(dict.fromkeys(row["codec"] for row in results["rows"]))
    tensors: dict[tuple[str, str], dict[str, Any]] = {}
    for row in results["rows"]:
        tensors.setdefault((row["data"], row["dtype"]), {})[row["codec"]] = row
    return f"`{results['command']}`\n\n" + _table(
        ("tensor", "dtype", *(f"{coder}: ratio, encode, decode GB/s" for coder in coders)),
        (
            (
                *key,
                *(f"{row['ratio']:.3f}, {row['encode_gbps']:.1f}, {row['decode_gbps']:.1f}" for row in found.values()),
            )
            for key, found in tensors.items()
        ),
    )


def _comm() -> str:
    """One line an operation: its variants beside each other."""
    results = _results("comm.json")
    places = [key for key in ("ranks", "nodes", "link") if key in results["rows"][0]]
    cases: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in results["rows"]:
        case = (row["op"], *(row[key] for key in places), f"{row['numel']:,}")
        cases.setdefault(case, {})[row["variant"]] = row
    variants = list(dict.fromkeys(row["variant"] for row in results["rows"]))
    times = [f"{variant} ms" for variant in variants]
    return f"`{results['command']}`\n\n" + _table(
        ("op", *places, "elements", *times, "coded against plain", "against raw"),
        (
            (
                *key,
                *(f"{found[variant]['time_us'] / 1e3:.3g}" for variant in variants),
                *(f"{found[other]['time_us'] / found['coded']['time_us']:.2f}" for other in ("plain", "raw")),
            )
            for key, found in cases.items()
        ),
    )


#: column of the training table -> key of its rows, and how its values look
_TRAINED: dict[str, tuple[str, Callable[[Any], str]]] = {
    "workload": ("workload", str),
    "ranks": ("ranks", str),
    "nodes": ("nodes", str),
    "link": ("link", str),
    "variant": ("variant", str),
    "step ms": ("step_ms", "{:.0f}".format),
    "comm ms": ("comm_ms", "{:.0f}".format),
    "raw MB": ("logical_bytes", lambda count: f"{count / 1e6:.1f}"),
    "wire MB": ("wire_bytes", lambda count: f"{count / 1e6:.1f}"),
    "parameters (sha256)": ("params_sha256", "{:.12}".format),
    "speed-up": ("speedup", "{:.2f}".format),
    "of comm": ("comm_speedup", "{:.2f}".format),
}


def _train(*names: str) -> str:
    """Picture and table of each; columns that older results do not have are left out."""
    parts = []
    for name in names or ("train",):
        results = _results(f"{name}.json")
        shown = {head: how for head, how in _TRAINED.items() if how[0] in results["rows"][0]}
        rows = ([text(row[key]) for key, text in shown.values()] for row in results["rows"])
        drawn = _picture("Steps, computing and communication apart", f"{name}.png")
        parts.append(f"{drawn}`{results['command']}`\n\n" + _table(shown, rows))
    return "\n\n".join(parts)


def _picture(what: str, name: str) -> str:
    place = f"docs/results/{name}"
    return f"![{what}]({place})\n\n" if (ROOT / place).exists() else ""


def _beyond() -> str:
    """Trainings with differences and sums to owners."""
    return _train("train_zero2", "train_zero2_4", "train_zero3_base", "train_zero3_base_4")


def _steps() -> str:
    """Ratios over whole trainings."""
    results = _results("steps.json")
    ratios = ("first", "middle", "last", "min", "ratio")
    rows = ([row["file"], row["role"], *(f"{row[key]:.2f}" for key in ratios)] for row in results["rows"])
    drawn = _picture("Ratio and learning rate, step by step", "steps.png")
    heads = ("first tenth", "between", "last tenth", "least", "all")
    return f"{drawn}`{results['command']}`\n\n" + _table(("file", "role", *heads), rows)


SECTIONS: dict[str, Callable[[], str]] = {
    "config": _config,
    "environment": _environment,
    "codec": _codec,
    "corpus": _corpus,
    "cuda": _cuda,
    "comm": _comm,
    "train": _train,
    "beyond": _beyond,
    "steps": _steps,
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
