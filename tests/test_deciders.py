"""Every place that turns a call away, with its reasons, has a row in docs/architecture.md, and every row has a place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import ROOT

import ds_zipccl
from ds_zipccl.policy.admission import PassReason

PACKAGE = Path(ds_zipccl.__file__).parent
ROWS = re.compile(r"^\| `([\w/]+\.py)`: ([`\w., ]+?) \| ([`\w, ]+) \| ", re.M)


def named(node: ast.AST) -> Iterator[str]:
    """The reasons that code names, but for those with which it compares one."""
    if isinstance(node, ast.Compare):
        return
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "PassReason":
        yield node.attr
    for child in ast.iter_child_nodes(node):
        yield from named(child)


def deciders(file: str, text: str) -> dict[tuple[str, str], set[str]]:
    """File and function, method or table -> the reasons that it names. What starts with an underscore and is no function only keeps one."""
    found: dict[tuple[str, str], set[str]] = {}
    for top in ast.parse(text).body:
        for node in top.body if isinstance(top, ast.ClassDef) else [top]:
            target = getattr(node, "target", None)
            own = str(getattr(node, "name", "") or getattr(target, "id", ""))
            name = f"{top.name}.{own}" if isinstance(top, ast.ClassDef) else own
            if own and (reasons := set(named(node))):
                found[file, name] = reasons
    return found


def listed(page: str) -> dict[tuple[str, str], set[str]]:
    part = page.partition("### Who turns a call away")[2].partition("\n## ")[0]
    rows = ROWS.findall(part)
    assert rows, "docs/architecture.md has no such table"
    return {
        (file, name): set(re.findall(r"`(\w+)`", reasons))
        for file, names, reasons in rows
        for name in re.findall(r"`([\w.]+)`", names)
    }


def compared(sources: dict[str, str]) -> list[str]:
    """What the table lacks, and what it has too much. A row of several places has the reasons of all of them."""
    places: dict[tuple[str, str], set[str]] = {}
    for file, text in sources.items():
        places |= deciders(file, text)
    rows = listed((ROOT / "docs" / "architecture.md").read_text())
    found = [f"{file}: {name} names {sorted(places[file, name])}" for file, name in sorted(places.keys() - rows.keys())]
    found += [f"{file}: {name} names nothing" for file, name in sorted(rows.keys() - places.keys())]
    for place in places.keys() & rows.keys():
        together = set().union(*(places[one] for one in rows if rows[one] == rows[place] and one in places))
        if not places[place] <= rows[place] or together | KEPT.get(place, set()) != rows[place]:
            found.append(f"{place[0]}: {place[1]} names {sorted(places[place])}, the row {sorted(rows[place])}")
    return found


#: Reasons that a place keeps under another name.
KEPT = {("comm/ops/reduce_to_owners.py", "reduce_to_owners"): {"OWNERS"}}
SOURCES = {
    path.relative_to(PACKAGE).as_posix(): path.read_text()
    for top in ("comm", "integration", "policy")
    for path in PACKAGE.glob(f"{top}/**/*.py")
}


def test_every_decider_has_a_row() -> None:
    assert compared(SOURCES) == []
    rows = listed((ROOT / "docs" / "architecture.md").read_text())
    assert set().union(*rows.values()) == {one.name for one in PassReason}, "every reason is somebody's"


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("comm/new.py", "def f(): return PassReason.SMALL", "comm/new.py: f names ['SMALL']"),
        ("comm/new.py", "class A:\n    def f(self): return PassReason.SMALL.of(3)", "comm/new.py: A.f names ['SMALL']"),
        ("comm/execution.py", "", "comm/execution.py: pass_small names nothing"),
    ],
)
def test_a_planted_decider_is_found(file: str, text: str, said: str) -> None:
    assert compared({**SOURCES, file: text}) == [said]
    assert compared({**SOURCES, "comm/new.py": "def f(x): return x == PassReason.SMALL.value"}) == []
