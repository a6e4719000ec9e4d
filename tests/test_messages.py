"""Every place where the package starts a collective, a message, a store call or a hash of its own has a row in docs/architecture.md, which
says what decides that it runs, and why that is equal on all ranks. A function whose row says "the caller" hands the question on: its calls
are places too."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from places import ROOT

import ds_zipccl

PACKAGE = Path(ds_zipccl.__file__).parent
#: File of the package, and a function or "Class.method" of it.
Place = tuple[str, str]
#: Functions of torch.distributed that ask this rank alone.
LOCAL = {
    "get_backend", "get_backend_config", "get_debug_level", "get_global_rank", "get_group_rank", "get_process_group_ranks", "get_rank",
    "get_world_size", "is_available", "is_initialized", "is_nccl_available",
}  # fmt: skip
OF_STORE = {name for name in dir(dist.Store) if not name.startswith("_")}
OF_GROUP = {name for name in dir(dist.ProcessGroup) if not name.startswith("_")} - {"name", "rank", "size"}
OF_TRANSPORT_LOCAL = {"ring_chunk", "timeout"}
HASHES = {"hash_regions", "hashed", "region_hash"}
#: Folders whose hashes other ranks compare; codecs, kernels and sync know no process group.
HASHING = ("comm/", "integration/")
CALLER = "the caller"
#: The class whose methods engines override, and the callers of which know no engine.
ENGINE: Place = ("comm/engine.py", "Engine")


class Module(NamedTuple):
    """``imported``: name -> where it comes from in the package, with slashes. ``calls``: function or method -> the names that it calls,
    with dots; ``bases``: class -> those of its bases."""

    defined: set[str]
    imported: dict[str, str]
    calls: dict[str, set[str]]
    bases: dict[str, list[str]]


def dotted(node: ast.AST) -> str:
    """The name that an expression calls, such as ``self._group.send``; "()" and "[]" for calls and subscripts in it."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, (ast.Call, ast.Subscript)):
        return dotted(node.func) + "()" if isinstance(node, ast.Call) else dotted(node.value) + "[]"
    return node.id if isinstance(node, ast.Name) else "?"


def _name(node: ast.stmt) -> str:
    """The name that a statement defines; "" for others."""
    target = node.targets[0] if isinstance(node, ast.Assign) else node
    return str(getattr(target, "name", "") or getattr(target, "id", ""))


def parsed(text: str) -> Module:
    tree = ast.parse(text)
    calls: defaultdict[str, set[str]] = defaultdict(set)
    for top in tree.body:
        inside = top.body if isinstance(top, ast.ClassDef) else [top]
        for node in inside:
            names = [_name(one) for one in dict.fromkeys((top, node))]
            for call in (one for one in ast.walk(node) if isinstance(one, ast.Call)):
                named = dotted(call.func).endswith(("partial", "staticmethod"))
                called = [call.func, *(call.args[:1] if named else ())]
                calls[".".join(filter(None, names))] |= set(map(dotted, called))
    imported = {
        alias.asname or alias.name: f"{one.module}.{alias.name}".replace(".", "/")
        for one in ast.walk(tree)
        if isinstance(one, ast.ImportFrom) and (one.module or "").startswith("ds_zipccl")
        for alias in one.names
    }
    bases = {one.name: list(map(dotted, one.bases)) for one in tree.body if isinstance(one, ast.ClassDef)}
    return Module(set(map(_name, tree.body)) - {""}, imported, calls, bases)


def starts(name: str, file: str) -> bool:
    """Whether a call by this name reaches another rank, or makes a hash for one."""
    owner, _, last = name.rpartition(".")
    of = owner.rpartition(".")[2]
    if owner in ("dist", "c10d", "torch.distributed"):
        return last not in LOCAL and last.islower()
    if of == "transport":
        return last not in OF_TRANSPORT_LOCAL
    if last in HASHES:
        return file.startswith(HASHING)
    of_store, of_group = "store" in of and last in OF_STORE, of.endswith(("group", "clone")) and last in OF_GROUP
    return last in ("post_send", "post_recv", "abort") or of_store or of_group


def origin(modules: dict[str, Module], file: str, name: str) -> Place | None:
    """Where a name of a file is defined, through imports; None outside of the package, and for attributes of objects."""
    root, _, rest = name.partition(".")
    if root in modules[file].defined:
        return (file, root) if not rest else None
    if root not in modules[file].imported:
        return None
    parts = [*modules[file].imported[root].split("/")[1:], *filter(None, rest.split("."))]
    for count in range(len(parts) - 1, -1, -1):
        for other in ("/".join([*parts[:count], "__init__.py"]), "/".join(parts[:count]) + ".py"):
            if other in modules and other != file:
                return origin(modules, other, ".".join(parts[count:]))
    return None


def found(modules: dict[str, Module], callers: set[Place]) -> set[Place]:
    """The places, those among them that call a function of ``callers``, or make an object of a class with a method of ``callers``."""
    engines = {
        (file, name)
        for file, one in modules.items()
        for name, bases in one.bases.items()
        if ENGINE in [origin(modules, file, base) for base in bases]
    }
    overridden = {name.split(".")[1] for file, name in callers if (file, name.split(".")[0]) in engines}
    heads = {(file, name.split(".")[0]) for file, name in callers} - engines
    heads |= {
        (file, name)
        for file, one in modules.items()
        for name, bases in one.bases.items()
        if {origin(modules, file, base) for base in bases} & heads
    }

    methods: defaultdict[Place, set[Place]] = defaultdict(set)
    for file, name in callers:
        if "." in name:
            methods[file.rpartition("/")[0], name.split(".")[1]].add((file, name))

    def hands_on(file: str, place: str, called: str) -> bool:
        root, _, rest = called.partition(".")
        if origin(modules, file, called) in heads:
            return True
        last = called.rpartition(".")[2]
        if root != "self" and rest and root not in modules[file].defined and last in overridden:
            into = modules[file].imported.get(root, "")
            if (
                file.startswith("comm/")
                and not file.startswith(("comm/host", "comm/device"))
                and into in ("", "ds_zipccl/comm/engine")
            ):
                return True  # of the engine of a group, whichever it is
        one_of = {(file, f"{place.split('.')[0]}.{rest}")} if root == "self" and "." not in rest else set[Place]()
        if not one_of and rest and root not in modules[file].imported and not hasattr(torch.Tensor, last):
            one_of = methods[file.rpartition("/")[0], last]  # of an object, by the classes of the folder
        return bool(one_of & callers)

    return {
        (file, place)
        for file, one in modules.items()
        for place, called in one.calls.items()
        if any(starts(name, file) or hands_on(file, place, name) for name in called)
    }


def listed(page: str) -> dict[Place, str]:
    """Place -> what decides, of the rows of a page; a class stands for its methods."""
    part = page.partition("\n## What decides that a message leaves\n")[2]
    rows = re.findall(r"^\| `([\w/]+\.py)`: (.+?) \| .+? \| (.+?) \| .*\|$", part, flags=re.M)
    assert rows, "docs/architecture.md has no table of messages"
    return {(file, name): decides for file, names, decides in rows for name in re.findall(r"`([\w.]+)`", names)}


def missing(modules: dict[str, Module], rows: dict[Place, str]) -> list[str]:
    """What the table lacks, and what it has too much."""
    methods = [(file, name) for file, one in modules.items() for name in one.calls]
    callers = {place for place in methods if row(rows, place).startswith(CALLER)}
    places = found(modules, callers)
    lacking = [f"{file}: {name} has no row" for file, name in sorted(places) if not row(rows, (file, name))]
    used = {key for place in places for key in keys(place)}
    return lacking + [f"{file}: {name} starts nothing" for file, name in sorted(rows) if (file, name) not in used]


def keys(place: Place) -> tuple[Place, Place]:
    return place, (place[0], place[1].split(".")[0])


def row(rows: dict[Place, str], place: Place) -> str:
    return next((rows[key] for key in keys(place) if key in rows), "")


MODULES = {
    path.relative_to(PACKAGE).as_posix(): parsed(path.read_text())
    for top in ("cli", "tools", "codecs", "comm", "integration", "kernels", "policy", "sync", "telemetry", "")
    for path in PACKAGE.glob(f"{top}/**/*.py" if top else "*.py")
}


def test_every_place_has_a_row_and_every_row_a_place() -> None:
    lacking = missing(MODULES, listed((ROOT / "docs" / "architecture.md").read_text()))
    assert not lacking, "\n".join(lacking)


@pytest.mark.parametrize(
    "body",
    [
        "dist.all_reduce(tensor)", "group.allgather(tensor)", "_get_default_store().set('key', text)", "ctx.transport.max(words)",
        "transport.post_send(frame, 0, 1)", "region_hash(words)", "topology.tell(group, text)", "functools.partial(topology.tell, group)",
        "SmallGather(ctx, words, 'numbers', 0)", "open_exchange(ctx, 0)",
    ],
)  # fmt: skip
def test_a_new_place_without_a_row_is_found(body: str) -> None:
    """Planted in a function of its own, in a file that imports what it calls."""
    homes = {"SmallGather": "context", "open_exchange": "host.pipeline", "region_hash": "group_state"}
    imports = [f"from ds_zipccl.comm.{home} import {name}" for name, home in homes.items()]
    text = "\n".join(("from ds_zipccl.comm import topology", *imports, "def planted(*args):", f"    {body}"))
    rows = listed((ROOT / "docs" / "architecture.md").read_text())
    assert missing({**MODULES, "comm/planted.py": parsed(text)}, rows) == ["comm/planted.py: planted has no row"]


def test_a_row_without_a_place_is_found() -> None:
    rows = {**listed((ROOT / "docs" / "architecture.md").read_text()), ("comm/spans.py", "cut"): "the config"}
    assert missing(MODULES, rows) == ["comm/spans.py: cut starts nothing"]
