"""The wheel: what is in it, what is not, and that it works where the repository is out of sight."""

from __future__ import annotations

import configparser
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import environments
import pytest
from places import ROOT

from ds_zipccl.kernels import build

#: What building needs. A copy: setuptools leaves build folders beside setup.py.
SOURCES = ("ds_zipccl", "op_builder", "examples", "tests", "setup.py", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree, target = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source, tree / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(source, tree / name)
    _run(
        "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-cache-dir", "-w", str(target), str(tree)
    )
    (found,) = target.iterdir()
    return found


def _run(*command: str, cwd: Path | None = None, fails: bool = False, **environment: str) -> str:
    """What a command of Python said: its output, or its errors where it is to fail."""
    python = environment.pop("python", sys.executable)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    result = subprocess.run([python, *command], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert (result.returncode != 0) == fails, result.stdout + result.stderr
    return result.stderr if fails else result.stdout


def test_contents(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")]
    assert len(names) == len(set(names))
    info = f"{wheel.name.rsplit('-', 3)[0]}.dist-info"
    assert {name.split("/")[0] for name in names} == {"ds_zipccl", info}

    package = ROOT / "ds_zipccl"
    wanted = {f"ds_zipccl/{path.relative_to(package).as_posix()}" for path in package.rglob("*.py")}
    wanted |= {f"ds_zipccl/op_builder/{path.name}" for path in (ROOT / "op_builder").glob("*.py")}
    wanted |= {
        f"ds_zipccl/{path.relative_to(package).as_posix()}" for path in (package / "csrc").rglob("*") if path.is_file()
    }
    wanted |= {f"ds_zipccl/examples/{path.name}" for path in (ROOT / "examples").iterdir() if path.is_file()}
    wanted |= {f"ds_zipccl/{name}" for name in ("FORMAT.md", "py.typed", "kernels/self_test/golden.json")}
    assert {name for name in names if not name.startswith(info)} == wanted


def test_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = f"{wheel.name.rsplit('-', 3)[0]}.dist-info"
    points = configparser.ConfigParser()
    points.read_string(archive.read(f"{info}/entry_points.txt").decode())
    assert dict(points["torch.backends"]) == {"ds_zipccl": "ds_zipccl.integration.autoload:autoload"}
    assert dict(points["console_scripts"]) == {"ds_zipccl": "ds_zipccl.__main__:main"}
    metadata = archive.read(f"{info}/METADATA").decode()
    for requirement in ("torch", "numpy", "numba"):
        assert f"Requires-Dist: {requirement}" in metadata
    assert re.findall(r"Requires-Dist: deepspeed.*", metadata) == [
        f'Requires-Dist: deepspeed>=0.18; extra == "{extra}"' for extra in ("deepspeed", "test")
    ], "a machine without DeepSpeed and network must install the wheel"
    assert "pydantic" not in metadata, "the package is for machines without it"
    assert (
        "License-Expression: Apache-2.0" in metadata
        and "Apache License" in archive.read(f"{info}/licenses/LICENSE").decode()
    )
    assert archive.read(f"{info}/top_level.txt").decode().split() == ["ds_zipccl"]


@pytest.mark.full(reason="builds an environment and installs")
def test_wheel_with_its_library_needs_no_compiler(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `make wheels` makes it, with this machine's library. Planted: another flag in the recipe, and the library is not taken."""
    library = build.build(build.CPU)
    monkeypatch.setattr(build, "compile_library", lambda _, target: shutil.copy(library, target))
    pack = runpy.run_path(str(ROOT / "release" / "wheels.py"))["with_library"]
    packed = pack(wheel, platform.machine(), build.CPU, tmp_path)
    assert packed.name.endswith(f"-py3-none-manylinux_2_28_{platform.machine()}.whl")
    bare = environments.without(tmp_path / "bare", "deepspeed", "pydantic")
    # finds all that it requires
    _run("-m", "pip", "install", "-q", "--no-index", "--no-compile", str(packed), python=bare)
    nothing = {"CXX": "/no/compiler", "DS_ZIPCCL_CACHE": str(tmp_path / "cache")}
    for _ in range(2):  # the first one may compile byte code
        where, seconds = _run("-c", SHIPPED, cwd=tmp_path, python=bare, **nothing).split()[-2:]
    assert Path(where).is_relative_to(tmp_path / "bare") and Path(where).parent.name == "lib" and float(seconds) < 1
    planted = SHIPPED.replace("x = torch", "build.CPU = replace(build.CPU, flags=('-O0',))\nx = torch")
    assert "no C++ compiler" in _run("-c", planted, cwd=tmp_path, python=bare, fails=True, **nothing)


@pytest.mark.full(reason="builds an environment and installs")
def test_the_recipe_of_fsdp2_runs_with_the_wheel_and_torch(wheel: Path, tmp_path: Path) -> None:
    """As docs/fsdp.md says, on a machine with a compiler; pip finds all that the wheel requires."""
    bare = environments.without(tmp_path / "bare", "deepspeed", "pydantic", "transformers", "accelerate", "peft")
    _run("-m", "pip", "install", "-q", "--no-index", "--no-compile", str(wheel), python=bare)
    recipe = shutil.copy(ROOT / "examples" / "recipes" / "fsdp2.py", tmp_path)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", recipe, "--lora", "--steps", "3"]
    said = _run(*words, cwd=tmp_path, python=bare, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    assert "on, codes cpu tensors over gloo" in said and said.count("loss ") == 3 and "went as differences" in said


#: What a machine without compiler, DeepSpeed and numba runs.
SHIPPED = """
import sys, time
sys.modules["numba"] = None
try:
    import deepspeed
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("this machine has DeepSpeed")
from dataclasses import replace
import torch, ds_zipccl
from ds_zipccl.kernels import build
from ds_zipccl import kernels
x = torch.randn(5000).bfloat16()
start = time.process_time()
frame = ds_zipccl.compress(x)
seconds = time.process_time() - start
assert torch.equal(ds_zipccl.decompress(frame), x)
assert build.shipped() is not None and kernels.tried("cpu") == {"native": ""}, kernels.tried("cpu")
print(build.shipped(), seconds)
"""
