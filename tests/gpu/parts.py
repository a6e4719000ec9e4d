"""What ``make gpu`` needs of a machine, and what is lost without each part. Imports nothing that may be missing."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import figures
import mps


@dataclass(frozen=True)
class Part:
    """``find`` raises, or returns None, where the part is missing; ``loss``: what is lost then."""

    name: str
    find: Callable[[], object]
    loss: str

    def why(self) -> str:
        """Why the part is missing, "" where it is here."""
        try:
            return "" if self.find() is not None else "not installed"
        except Exception as error:
            return str(error).splitlines()[0] if str(error) else type(error).__name__


def _module(name: str) -> Callable[[], object]:
    return functools.partial(importlib.util.find_spec, name)


def _call(module: str, name: str) -> Callable[[], object]:
    """Call a function that raises where the part is missing; its module is imported then."""
    return lambda: getattr(importlib.import_module(module), name)()


_nvcc, _compiler = (_call("ds_zipccl.kernels.build", name) for name in ("nvcc", "compiler"))


def _driver() -> Any:
    import driver

    try:
        return driver.carried("driver")
    except Exception:
        if Part("", _nvcc, "").why():
            raise
        return True


def _network() -> bool:
    """Make a shaped network of two nodes, and take it away."""
    from ds_zipccl.tools import link, namespaces

    spec = link.parse("1gbit")
    assert spec is not None
    with namespaces.shaped(spec, 2):
        return True


#: Without these nothing runs, and nothing else can be looked for.
VITAL = (
    Part("torch", _module("torch"), "nothing runs"),
    Part("numpy", _module("numpy"), "nothing runs, as the package does not import"),
)
PARTS = (
    Part("pytest", _module("pytest"), "no tests, and no NCCL: tests, nccl_probe, nccl, nccl_one, comm, train and stress are not run"),
    Part("pytest-timeout", _module("pytest_timeout"), "a test that hangs takes its whole step with it"),
    Part("hypothesis", _module("hypothesis"), "the files of tests that draw examples are left out"),
    Part("xxhash", _module("xxhash"), "tests against the executed format fail"),
    Part("C++ compiler", _compiler, "no C++ kernels: the reference is numba's, of exponents alone, and builds are slower"),
    Part("numba", _module("numba"), "no second reference on the CPU; none at all without a C++ compiler"),
    Part("nvcc", _nvcc, "no native route: kernels are compiled at run time; driver and spinning kernel come from the wheels folder"),
    Part("CuPy", _call("ds_zipccl.kernels.cuda.cupy_kernels", "cupy"), "no route cupy: no kernels without nvcc"),
    Part("driver", _driver, "driver and sanitizers are not run: make gpu-wheels puts the program beside the wheels"),
    Part("compute-sanitizer", _call("driver", "sanitizer_path"), "sanitizers are not run"),
    Part("deepspeed", _module("deepspeed"), "train is not run: make gpu-wheels fetches the wheels"),
    Part(mps.CONTROL, mps.control, "ranks take turns on the GPU, so that nccl, comm and train have fewer sizes and may be late"),
    Part("namespaces", _network, "auto is not run: it wants root, pyroute2, and a kernel that shapes networks between namespaces"),
    Part("nvidia-nvcomp", lambda: _module("nvidia")() and _module("nvidia.nvcomp")(), "no rows of nvCOMP beside ours"),
)  # fmt: skip


def missing() -> dict[str, str]:
    """Name -> a line with the reason and the loss, of each part that is missing."""
    found: dict[str, str] = {}
    for parts in (VITAL, PARTS):
        found |= {part.name: f"{why}; {part.loss}" for part in parts if (why := part.why())}
        if found and parts is VITAL:
            break
    return found


def absent(*names: str) -> list[str]:
    """Those of the parts that the step ``machine`` missed."""
    return [name for name in names if name in (figures.told("missing") or {})]
