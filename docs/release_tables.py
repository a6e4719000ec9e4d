"""The table of versions that the core set of tests has run with, from ``docs/results/matrix.json``, which ``make matrix`` writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from measured import ROOT, provenance, results, table

#: Columns of versions, as the rows of the results name them.
PACKAGES = ("python", "torch", "deepspeed", "numpy")


def cell(group: Mapping[str, Any] | None) -> str:
    """Tests of a group that passed, and in bold those that failed; a group without a passed test has not passed."""
    if group is None or not group["passed"] + group["failed"]:
        return "**not run**"
    if group["failed"]:
        return f"**{group['failed']} of {group['passed'] + group['failed']} failed**"
    return f"{group['passed']} passed"


def matrix(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each environment, and below them the reasons of those that are not green and the traffic that stays plain."""
    groups = list(dict.fromkeys(name for row in rows for name in row["groups"]))
    lines = []
    for row in rows:
        versions = row.get("versions", row["asked"])
        shown = [str(versions[package]).partition("+")[0] for package in PACKAGES]
        outcome = row["outcome"] if row["outcome"] == "green" else f"**{row['outcome']}**"
        cells = ["-"] * len(groups) if row["outcome"] == "not installed" else map(cell, map(row["groups"].get, groups))
        lines.append((*shown, outcome, *cells))
    heads = ("Python", "torch", "DeepSpeed", "numpy", "outcome", *groups)
    return "\n\n".join((table(heads, lines), *_below(rows)))


def _below(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    hooks: dict[str, list[str]] = {}
    for row in rows:
        versions = row.get("versions", row["asked"])
        if row["outcome"] != "green":
            name = "Python {python}, torch {torch}, DeepSpeed {deepspeed}, numpy {numpy}".format(**versions)
            reasons.setdefault(f"{row['outcome']}: `{row['reason'].replace('`', '')}`", []).append(name)
        for where, problem in row["hooks"].items():
            text = f"`{where}` is absent" if problem == "absent" else f"`{where}` {problem}"
            hooks.setdefault(text, []).append(versions["deepspeed"])
    if reasons:
        yield "Rows that are not green:\n\n" + "\n".join(f"- {'; '.join(who)}: {why}" for why, who in reasons.items())
    if hooks:
        told = (f"- DeepSpeed {', '.join(sorted(set(who)))}: {text}" for text, who in hooks.items())
        yield "Names that are not there, and the traffic that stays plain:\n\n" + "\n".join(told)


def versions(page: Path) -> str:
    """The whole section; a sentence where nothing was run yet."""
    if not (ROOT / "docs" / "results" / "matrix.json").exists():
        return "Not run yet: `make matrix` writes the results that this table shows."
    content = results("matrix")
    return f"{provenance(content)}\n\n{matrix(content['rows'])}"
