"""The house of the package: a file imports only from lower floors, few files know DeepSpeed, imports cost nothing, files stay short."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import pytest
import size
from commands import python

import ds_zipccl
from ds_zipccl.config import KEYS

PACKAGE = Path(ds_zipccl.__file__).parent
ROOT = PACKAGE.parent

ARCHITECTURE = ROOT / "docs" / "architecture.md"
_ROWS = re.findall(
    r"^\| (\d+) \|(.+?)\|", ARCHITECTURE.read_text().partition("## Floors")[2].partition("\n## ")[0], flags=re.M
)
#: Module or folder of ds_zipccl, with slashes -> floor, from the table in docs/architecture.md.
FLOOR_OF = {name: int(floor) for floor, names in _ROWS for name in re.findall(r"`(.+?)`", names)}
#: autoload runs when torch is imported and loads the rest of its folder when DeepSpeed is; kernels build through DeepSpeed's op builder.
#: The fabric trains with it.
KNOW_DEEPSPEED = {"op_builder/zipccl.py", "config.py", "benchmarks/fabric/job.py"}
#: The rooms of the engines, which comm/__init__.py alone knows: it registers them.
ENGINES = ("comm/host", "comm/device")
#: Gives an engine the answers of ranks and devices that do not exist.
STANDS_IN = "benchmarks/fabric"
MAX_LINES = 700


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


def _place(module: str) -> str:
    """The longest name in the table that ``module``, with slashes, stands under; "" where there is none."""
    parts = module.split("/")
    names = ("/".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in names if name in FLOOR_OF), "")


def violations(place: PurePosixPath, text: str) -> list[str]:
    """What breaks the rules in the file at ``place`` in the package."""
    module = place.as_posix().removesuffix(".py").removesuffix("/__init__")
    if module == "__init__":
        return []  # its names load lazily: test_importing_costs_nothing
    own = _place(module)
    if not own:
        return [f"{place}: {module} has no floor"]
    found = []
    for name in _imports(ast.parse(text), ".".join(["ds_zipccl", *place.parts[:-1]])):
        top, _, rest = name.partition(".")
        if top == "deepspeed" and own != "integration" and place.as_posix() not in KNOW_DEEPSPEED:
            # report and bench say which version they ran with
            if not (own in ("cli", "benchmarks") and name == "deepspeed.__version__"):
                found.append(f"{place} imports {name}")
        elif top == "op_builder":
            found.append(f"{place} imports {name}: its name is ds_zipccl.op_builder")
        elif top == "ds_zipccl":
            inside = any(_under(place, room) for room in (*ENGINES, STANDS_IN)) or module == "comm"
            if "/".join(rest.split(".")[:2]) in ENGINES and not inside:
                found.append(f"{place} imports {name}: nobody knows an engine; ask comm.engine for one")
            target = ds_zipccl._EXPORTS.get(rest.split(".")[0], name).partition(".")[2].replace(".", "/")
            other = _place(target)
            if other and not (FLOOR_OF[other] < FLOOR_OF[own] or other == own):
                found.append(f"{place} imports {name}, which is not below it")
    return found


def _under(place: PurePosixPath, name: str) -> bool:
    return f"{place.as_posix().removesuffix('.py')}/".startswith(f"{name}/")


def sources() -> list[Path]:
    """The Python files of the package. ``op_builder`` and ``benchmarks`` may be links, which rglob does not follow."""
    linked = [path for name in ("op_builder", "benchmarks") for path in (PACKAGE / name).rglob("*.py")]
    return sorted(
        {path for path in (*PACKAGE.rglob("*.py"), *linked) if "tests" not in path.relative_to(PACKAGE).parts}
    )


def test_files_import_only_from_lower_floors() -> None:
    places = {PurePosixPath(path.relative_to(PACKAGE)): path.read_text() for path in sources()}
    assert {place.parts[0] for place in places} > {"codecs", "kernels", "comm", "op_builder", "frame.py", "__main__.py"}
    unused = [name for name in FLOOR_OF if not any(_under(place, name) for place in places)]
    assert unused == [], "the table names what does not exist"
    assert [line for place, text in sorted(places.items()) for line in violations(place, text)] == []


def import_graph() -> dict[str, set[str]]:
    """Module -> modules of the package that it imports, at whatever depth; without the lazy names of the package itself."""
    modules = {}
    for path in sources():
        parts = ["ds_zipccl", *path.relative_to(PACKAGE).with_suffix("").parts]
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {}
    for module, path in modules.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        found = set()
        for name in _imports(ast.parse(path.read_text()), package):
            while name and name not in modules:
                name = name.rpartition(".")[0]
            found.add(name)
        graph[module] = found - {"", module, "ds_zipccl"}
    del graph["ds_zipccl"]
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other, directly or through others: those left when modules without open imports are taken away."""
    left = {module: set(names) for module, names in graph.items()}
    while free := [module for module, names in left.items() if not names & left.keys()]:
        for module in free:
            del left[module]
    return sorted(left)


def test_no_import_goes_in_a_circle() -> None:
    graph = import_graph()
    assert len(graph) > 80 and circles(graph) == []
    planted = {**graph, "ds_zipccl.frame": graph["ds_zipccl.frame"] | {"ds_zipccl.codecs.api"}}
    assert {"ds_zipccl.frame", "ds_zipccl.codecs.api"} <= set(circles(planted))


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
    """The commands are programs of their own."""
    files = {PurePosixPath(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    files = {place: text for place, text in files.items() if place.parts[0] not in ("cli", "tools", "examples")}
    assert len(files) > 30
    assert [line for place, text in sorted(files.items()) for line in constructions(place, text)] == []
    assert constructions(PurePosixPath("a.py"), "x = torch.empty(3).cuda()\ny = x.new_empty(3)") == [
        "a.py:1 calls torch.empty"
    ]


def test_sources_include_only_each_other() -> None:
    """csrc is the ground floor: what it includes in quotes lies in it, and cpu/ and cuda/ know nothing of each other."""
    for path in filter(Path.is_file, (PACKAGE / "csrc").rglob("*")):
        for name in re.findall(r'#include "(.+?)"', path.read_text()):
            assert (PACKAGE / "csrc" / name).is_file(), f"{path.name} includes {name}"
            assert name.split("/")[0] in ("common", path.relative_to(PACKAGE / "csrc").parts[0]), (
                f"{path.name} includes {name}"
            )


@pytest.mark.parametrize(
    "file, line, complaint",
    [
        ("frame.py", "from ds_zipccl import codecs", "frame.py imports ds_zipccl.codecs, which is not below it"),
        ("frame.py", "from ds_zipccl import compress", "frame.py imports ds_zipccl.compress"),
        ("codecs/rows.py", "def f():\n    from .. import policy", "rows.py imports ds_zipccl.policy"),
        ("kernels/cpp/backend.py", "import ds_zipccl.comm.work", "backend.py imports ds_zipccl.comm.work"),
        ("policy/wire.py", "import ds_zipccl\nds_zipccl.install()", "wire.py imports ds_zipccl.install"),
        ("comm/work.py", "import deepspeed.comm", "work.py imports deepspeed.comm"),
        ("comm/work.py", "import importlib\nimportlib.import_module('deepspeed')", "work.py imports deepspeed"),
        ("cli/report.py", "from deepspeed.comm import comm", "report.py imports deepspeed.comm.comm"),
        ("integration/backend.py", "import op_builder", "backend.py imports op_builder"),
        ("integration/job.py", "from ds_zipccl.comm.device import choice", "nobody knows an engine"),
        ("comm/ops/reduce.py", "from ds_zipccl.comm.host import gather", "nobody knows an engine"),
        ("cli/report.py", "from ds_zipccl.comm import host", "nobody knows an engine"),
        (
            "cli/plan.py",
            "from ds_zipccl.benchmarks.comm import cases",
            "plan.py imports ds_zipccl.benchmarks.comm.cases, which is not",
        ),
        (
            "tools/link.py",
            "from ds_zipccl.cli import plan",
            "link.py imports ds_zipccl.cli.plan, which is not below it",
        ),
    ],
)
def test_the_check_sees_a_planted_import(file: str, line: str, complaint: str) -> None:
    text = (PACKAGE / file).read_text() if (PACKAGE / file).exists() else ""
    before, after = (violations(PurePosixPath(file), text + more) for more in ("", f"\n{line}\n"))
    assert len(new := [found for found in after if found not in before]) == 1
    assert complaint in new[0]


def test_a_file_needs_a_floor() -> None:
    assert violations(PurePosixPath("shelf.py"), "") == ["shelf.py: shelf has no floor"]


def test_the_simulator_does_not_know_the_package() -> None:
    """tests/sim simulates a GPU and NCCL for any library; what runs ds_zipccl on it is in tests/on_sim."""
    texts = [path.read_text() for path in (ROOT / "tests" / "sim").iterdir() if path.is_file()]
    assert len(texts) > 10 and not any("ds_zipccl" in text or "on_sim import" in text for text in texts)
    code = "import sys; sys.modules['ds_zipccl'] = None; from sim import mistakes, world"
    ran = python("-c", code, PYTHONPATH=str(ROOT / "tests"), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert ran.returncode == 0, ran.stderr


def test_files_are_short() -> None:
    files = [
        path
        for folder in (PACKAGE, *(ROOT / name for name in ("op_builder", "benchmarks", "tests", "examples")))
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


def test_the_section_gets_no_further_key() -> None:
    """A key that two existing ones can express is none."""
    assert len(KEYS) <= 24


def test_folders_stay_within_their_budgets() -> None:
    """And a limit follows a cut."""
    now = size.lines()
    for name, (limit, _) in size.BUDGETS.items():
        assert now[name] <= limit, (
            f"{name}: {now[name]} lines, at most {limit}; cut, or move the limit in tests/size.py and say why"
        )
        assert now[name] >= limit - 400, f"{name}: {now[name]} lines; lower the limit of {limit} in tests/size.py"
    assert now["ds_zipccl/csrc"] > 5000 and now["ds_zipccl"] > 500, "files of every kind are counted"


def test_folders_are_not_crowded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert size.crowded() == {}
    for number in range(size.MAX_FILES + 1):
        (tmp_path / f"{number}.py").touch()
    monkeypatch.setattr(size, "ROOT", tmp_path)
    assert size.crowded([tmp_path]) == {".": size.MAX_FILES + 1}


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("ds_zipccl/comm/ops/all_gather.py", "ds_zipccl/comm"),
        ("ds_zipccl/frame.py", "ds_zipccl"),
        ("ds_zipccl/new/room.py", "ds_zipccl"),
        ("ds_zipccl/csrc/cuda/hash.cuh", "ds_zipccl/csrc"),
        ("tests/size.py", "tests"),
        ("benchmarks/comm/trial.py", "benchmarks"),
        ("benchmarks/tests/test_link.py", "tests"),
        ("ds_zipccl/FORMAT.md", ""),
        ("docs/generate.py", size.SHARED),
        ("examples/recipes/fsdp2.py", size.SHARED),
        ("docs/index.md", ""),
    ],
)
def test_every_line_of_source_has_a_budget(path: str, folder: str) -> None:
    assert size.folder_of(path) == folder


#: Runs in a fresh interpreter. comm and the codecs are for plain torch.distributed, so DeepSpeed is made to look absent.
LIGHT = """
import os, sys
sys.modules["deepspeed"] = None
before = set(sys.modules)
import ds_zipccl
new = {name.partition(".")[0] for name in set(sys.modules) - before}
assert not new & {"torch", "numpy", "numba", "pydantic"}, new
import ds_zipccl.comm, ds_zipccl.codecs, ds_zipccl.policy.admission, ds_zipccl.telemetry.counters
assert "numba" not in sys.modules
import torch
assert not torch.distributed.is_initialized()
assert not torch.cuda.is_initialized()
assert not os.path.exists(os.environ.pop("DS_ZIPCCL_CACHE")), "something was built"
x = torch.randn(999).bfloat16()
assert torch.equal(ds_zipccl.decompress(ds_zipccl.compress(x, route="numba")), x)
"""


def test_importing_costs_nothing_and_needs_no_deepspeed(tmp_path: Path) -> None:
    result = python("-c", LIGHT, DS_ZIPCCL_CACHE=str(tmp_path / "cache"))
    assert result.returncode == 0, result.stderr


def test_no_text_names_a_module_behind_the_wall() -> None:
    """Docstrings too: a reference is a thing to keep in step."""
    names = re.compile(r"comm\.(host|device)")
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if names.search(path.read_text())}
    assert {name for name in found if not name.startswith(ENGINES)} == {"comm/__init__.py"}
