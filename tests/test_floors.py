"""The house of the package: a file imports only from lower floors, few files know DeepSpeed, imports cost nothing, files stay short."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

import ds_zipccl

PACKAGE = Path(ds_zipccl.__file__).parent
ROOT = PACKAGE.parent

#: From the ground up. A name is a module or subpackage of ds_zipccl; within a subpackage everything may import everything.
FLOORS = (
    {"frame", "config", "op_builder", "autoload", "tensors"},
    {"kernels"},
    {"codecs"},
    {"policy", "stats"},
    {"costs", "step_log"},
    {"agreement", "calibrate"},
    {"comm"},
    {"zero", "roles", "banner"},
    {"backend"},
    {"tools"},
    {"__main__"},
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
#: The hook that runs when DeepSpeed is imported; nothing else looks upwards.
UPWARDS = {("autoload", "backend")}
KNOW_DEEPSPEED = {"op_builder/zipccl.py", "config.py", "backend.py", "roles.py", "banner.py", "autoload.py"}
MAX_LINES = 400


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Every module that a file names in an import, absolute, at whatever depth; names taken from a module come as ``module.name``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            yield from (
                arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            )
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ds_zipccl":
            yield f"ds_zipccl.{node.attr}"  # `import ds_zipccl`, then a public name, which loads its module


def violations(place: PurePosixPath, text: str) -> list[str]:
    """What breaks the rules in the file at ``place`` in the package."""
    own = place.parts[0].removesuffix(".py")
    if own == "__init__":
        return []  # its names load lazily: test_importing_costs_nothing
    if own not in FLOOR_OF:
        return [f"{place}: {own} has no floor"]
    found = []
    for name in _imports(ast.parse(text), ".".join(["ds_zipccl", *place.parts[:-1]])):
        top, _, rest = name.partition(".")
        if top == "deepspeed" and place.as_posix() not in KNOW_DEEPSPEED:
            # report and bench say which version they ran with
            if not (own == "tools" and name == "deepspeed.__version__"):
                found.append(f"{place} imports {name}")
        elif top == "op_builder":
            found.append(f"{place} imports {name}: its name is ds_zipccl.op_builder")
        elif top == "ds_zipccl":
            target = rest.split(".")[0]
            target = ds_zipccl._EXPORTS.get(target, f"ds_zipccl.{target}").split(".")[1]
            lower = FLOOR_OF.get(target, -1) < FLOOR_OF[own] or target == own or (own, target) in UPWARDS
            if target in FLOOR_OF and not lower:
                found.append(f"{place} imports {name}, which is not below it")
    return found


def test_files_import_only_from_lower_floors() -> None:
    # op_builder may be a link, which rglob does not follow
    files = {*PACKAGE.rglob("*.py"), *(PACKAGE / "op_builder").glob("*.py")}
    places = {PurePosixPath(path.relative_to(PACKAGE)): path.read_text() for path in files}
    assert {place.parts[0] for place in places} > {"codecs", "kernels", "comm", "op_builder", "frame.py", "__main__.py"}
    assert [line for place, text in sorted(places.items()) for line in violations(place, text)] == []


#: torch's functions that make a tensor from no tensor: a program may have replaced each of them.
CONSTRUCTORS = {
    "arange", "asarray", "as_tensor", "empty", "empty_strided", "eye", "from_numpy", "frombuffer", "full", "linspace", "ones",
    "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros", "Tensor",
}  # fmt: skip


def constructions(place: PurePosixPath, text: str) -> list[str]:
    """Tensors that the file at ``place`` makes by torch's own constructors."""
    return [
        f"{place}:{node.lineno} calls torch.{node.func.attr}"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CONSTRUCTORS
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
    ]


def test_tensors_are_made_in_one_place() -> None:
    """The commands of tools are programs of their own."""
    files = {PurePosixPath(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    files = {place: text for place, text in files.items() if place.parts[0] not in ("tools", "examples")}
    assert len(files) > 30
    assert [line for place, text in sorted(files.items()) for line in constructions(place, text)] == []
    assert constructions(PurePosixPath("a.py"), "x = torch.empty(3).cuda()\ny = x.new_empty(3)") == [
        "a.py:1 calls torch.empty"
    ]


def test_sources_include_only_each_other() -> None:
    """csrc is the ground floor: what it includes in quotes lies beside it."""
    for path in (PACKAGE / "csrc").iterdir():
        for name in re.findall(r'#include "(.+?)"', path.read_text()):
            assert (path.parent / name).is_file(), f"{path.name} includes {name}"


@pytest.mark.parametrize(
    "file, line, complaint",
    [
        ("frame.py", "from ds_zipccl import codecs", "frame.py imports ds_zipccl.codecs, which is not below it"),
        ("frame.py", "from ds_zipccl import compress", "frame.py imports ds_zipccl.compress"),
        ("codecs/raw.py", "def f():\n    from .. import policy", "raw.py imports ds_zipccl.policy"),
        ("kernels/native.py", "import ds_zipccl.comm.work", "native.py imports ds_zipccl.comm.work"),
        ("policy.py", "import ds_zipccl\nds_zipccl.install()", "policy.py imports ds_zipccl.install"),
        ("comm/work.py", "import deepspeed.comm", "work.py imports deepspeed.comm"),
        ("comm/work.py", "import importlib\nimportlib.import_module('deepspeed')", "work.py imports deepspeed"),
        ("tools/report.py", "from deepspeed.comm import comm", "report.py imports deepspeed.comm.comm"),
        ("backend.py", "import op_builder", "backend.py imports op_builder"),
    ],
)
def test_the_check_sees_a_planted_import(file: str, line: str, complaint: str) -> None:
    text = (PACKAGE / file).read_text() if (PACKAGE / file).exists() else ""
    before, after = (violations(PurePosixPath(file), text + more) for more in ("", f"\n{line}\n"))
    assert len(new := [found for found in after if found not in before]) == 1
    assert complaint in new[0]


def test_a_file_needs_a_floor() -> None:
    assert violations(PurePosixPath("shelf.py"), "") == ["shelf.py: shelf has no floor"]


def test_files_are_short() -> None:
    files = [
        path
        for folder in (PACKAGE, ROOT / "op_builder", ROOT / "tests", ROOT / "examples")
        for path in folder.rglob("*")
    ]
    sources = [
        path for path in files if path.suffix in (".py", ".cpp", ".cu", ".h", ".cuh") and "build" not in path.parts
    ]
    assert len(sources) > 30
    long = {
        str(path.relative_to(ROOT)): lines for path in sources if (lines := path.read_text().count("\n")) > MAX_LINES
    }
    assert long == {}


#: Runs in a fresh interpreter. comm and the codecs are for plain torch.distributed, so DeepSpeed is made to look absent.
LIGHT = """
import os, sys
sys.modules["deepspeed"] = None
before = set(sys.modules)
import ds_zipccl
new = {name.partition(".")[0] for name in set(sys.modules) - before}
assert not new & {"torch", "numpy", "numba", "pydantic"}, new
import ds_zipccl.comm, ds_zipccl.codecs, ds_zipccl.policy, ds_zipccl.stats
assert "numba" not in sys.modules
import torch
assert not torch.distributed.is_initialized()
assert not torch.cuda.is_initialized()
assert not os.path.exists(os.environ.pop("DS_ZIPCCL_CACHE")), "something was built"
x = torch.randn(999).bfloat16()
assert torch.equal(ds_zipccl.decompress(ds_zipccl.compress(x, route="numba")), x)
"""


def test_importing_costs_nothing_and_needs_no_deepspeed(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "DS_ZIPCCL_CACHE": str(tmp_path / "cache")}
    result = subprocess.run([sys.executable, "-c", LIGHT], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
