"""Real engines with optimizers of DeepSpeed that gather, or that step, in ways of their own: Muon, SuperOffload and ZenFlow.

SuperOffload and ZenFlow step by DeepSpeed's own Adam for CPUs in a process of its own. Both ask for CUDA: their cases replace the few names
by which they do.
"""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import builds
import pytest
import torch
import torch.multiprocessing
from engines import DIFFERENCE, FIRST, OTHER, SOURCES, ZERO3, Lab, Model, bits, rank_program
from programs import launch, plain_and_coded
from torch.utils import cpp_extension

from ds_zipccl.benchmarks.links import slots
from ds_zipccl.kernels import build

HOST = '{"enabled": true, "mode": "always", "min_bytes": 1024, "reduction": "match", "zero3_base": "host"}'
ON_STREAMS = '{"enabled": true, "mode": "always", "min_bytes": 1024, "nccl": "on", "nccl_min_bytes": 4096}'
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
WHOLE = {"reduce_scatter": False}  # Muon asks ZeRO-3 for it

# ---- cases ---------------------------------------------------------------------------------------------------------


def train(lab: Lab, **config: Any) -> Any:
    """Train for two phases. With the second one, parameters have bases."""
    engine = lab.engine(**config)
    lab.train_phase(engine, 1, "first", [])
    lab.train_phase(engine, 3, "later", [])
    return engine


class Matrices(Model):
    """The model. Muon trains the weights of its layers, and Adam its other parameters."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.use_muon = parameter.ndim == 2 and name.startswith("layers")  # type: ignore[attr-defined]


def muon(lab: Lab, **zero: Any) -> None:
    optimizer = {"type": "Muon", "params": {"lr": 1e-3, "torch_adam": True}}
    train(lab, make=Matrices, optimizer=optimizer, zero=zero, zero_force_ds_cpu_optimizer=False)


def own_adam() -> None:
    """Load DeepSpeed's own Adam for CPUs, without the optimizations for which DeepSpeed would compile it for minutes.

    The build of an earlier run counts, in whatever folder the environment is.
    """
    from deepspeed.ops.op_builder import CPUAdamBuilder

    builder = CPUAdamBuilder()
    sources = [builder.deepspeed_src_path(source) for source in builder.sources()]
    headers = [builder.deepspeed_src_path(folder) for folder in builder.include_paths()]
    places = [*headers, *cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    options = ["-std=c++20", "-O0", "-fPIC", "-shared", "-fopenmp", "-DTORCH_EXTENSION_NAME=cpu_adam"]

    def make(target: Path) -> None:
        of_torch = [f"-L{cpp_extension.TORCH_LIB_PATH}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
        command = [*build.compiler(), *options, *(f"-I{at}" for at in places), *sources, *of_torch, "-o", str(target)]
        subprocess.run(command, check=True)

    parts = [*build.compiler(), *options, sys.version, torch.__version__, *(Path(one).read_text() for one in sources)]
    path = str(builds.kept("cpu_adam", [*parts, *builds.contents({"": Path(headers[0])})], make))
    spec = importlib.util.spec_from_file_location("cpu_adam", path, loader=ExtensionFileLoader("cpu_adam", path))
    assert spec and spec.loader
    type(builder)._loaded_ops["cpu_adam"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


#: DeepSpeed's own Adam.
ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}}


#: A process that is spawned imports torch and DeepSpeed, for many times as long as it steps.
FORK = torch.multiprocessing.get_context("fork")


def super_offload(lab: Lab, **config: Any) -> None:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.superoffload import superoffload_stage3 as module
    from deepspeed.runtime.superoffload import superoffload_utils as utils

    module._validate_superoffload_accelerator = lambda: None
    utils.mp = SimpleNamespace(get_context=lambda method: FORK)
    utils.SuperOffloadCPUOptimizer._set_cpu_affinity = lambda self, share: None  # two ranks would share one core
    get_accelerator().current_stream = lambda: SimpleNamespace(synchronize=lambda: None)
    offload = {"device": "cpu", "super_offload": True, "cpuadam_cores_perc": 0.5, "pin_memory": False}
    engine = train(
        lab, optimizer=ADAM, zero={**ZERO3, "offload_optimizer": offload, "sub_group_size": 100_000}, **config
    )
    assert type(engine.optimizer).__name__ == "SuperOffloadOptimizer_Stage3"
    engine.optimizer.superoffload_cpu_optimizer.close()


class OnCpu:
    """torch, whose new tensors are on the CPU where ZenFlow asks for CUDA."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return functools.partial(self.make, found) if name in ("zeros", "tensor") else found

    def make(self, function: Callable[..., torch.Tensor], *args: Any, **more: Any) -> torch.Tensor:
        return function(*args, **{**more, "device": "cpu"})


def zenflow(lab: Lab, zero: dict[str, Any], **flow: Any) -> None:
    """Batches: every second one ends a step, and every one changes the most important columns. Plain DeepSpeed 0.19.8 fails on ZeRO-3 when
    it selects columns a second time."""
    from deepspeed.runtime.zenflow import engine_stage3

    engine_stage3.torch = OnCpu()
    multiprocessing.get_context = lambda method: FORK
    flow = {"topk_ratio": 0.2, "select_strategy": "step", "select_interval": 1000, "update_interval": 2, **flow}
    engine = lab.engine(optimizer=ADAM, zero={**zero, **OFFLOAD, "zenflow": flow}, gradient_clipping=0.0)
    for _ in range(8):
        lab.backward(engine)
        engine.step()
    lab.ends("trained", [])


CASES: dict[str, Callable[[Lab], None]] = {
    "muon zero2": functools.partial(muon, stage=2),
    "muon zero2 whole": functools.partial(muon, stage=2, **WHOLE),
    "muon zero2 offload": functools.partial(muon, stage=2, **OFFLOAD),
    "muon zero3": functools.partial(muon, **ZERO3, **WHOLE),
    "muon zero3 offload": functools.partial(muon, **ZERO3, **WHOLE, **OFFLOAD),
    "super": functools.partial(super_offload, gradient_clipping=0.0),
    "super clipped": super_offload,
    "zenflow zero2": functools.partial(zenflow, zero={"stage": 2}),
    "zenflow zero2 overlap": functools.partial(zenflow, zero={"stage": 2}, overlap_step=True),
    "zenflow zero3": functools.partial(zenflow, zero=ZERO3),
    "zenflow zero3 overlap": functools.partial(zenflow, zero=ZERO3, overlap_step=True),
}

# ---- tests ---------------------------------------------------------------------------------------------------------

#: Case -> the coded gradient calls of a step of Muon: sums, and gathers of gradients and momenta.
MUON_CALLS: dict[str, dict[str, int]] = {
    "muon zero2": {"reduce_to_owners": 1},
    "muon zero3": {"all_reduce": 1, "all_gather_into_tensor": 2, "all_gather": 4},
    "muon zero2 whole": {"all_reduce": 1},
    "muon zero2 offload": {"reduce_to_owners": 1, "all_gather_into_tensor": 1},
    "muon zero3 offload": {"all_reduce": 1, "all_gather_into_tensor": 1},
}
MUON = list(MUON_CALLS)


def train_all(folder: Path, *cases: str, on_streams: bool = False) -> list[tuple[str, dict[str, list[dict[str, Any]]]]]:
    """Return the results of coded runs, whose bits are those of plain runs: over gloo, and with ``on_streams`` also in stream order."""
    wanted, coded = plain_and_coded(__file__, 2, folder, *cases, sources=SOURCES, timeout=600, DS_ZIPCCL=HOST)
    found = [("", coded)]
    if on_streams:
        (folder / "streams").mkdir()
        environment = {"DS_ZIPCCL": ON_STREAMS, "BACKEND": slots.NAME}
        found.append((slots.NAME, launch(__file__, 2, folder / "streams", *cases, timeout=600, **environment)))
    for backend, coded in found:
        for case in cases:
            assert bits(coded[case]) == bits(wanted[case]), (backend, case)
            assert len(set(coded[case][0]["losses"])) > 2, "or nothing was trained"
    return found


def calls(phase: dict[str, Any], role: str) -> dict[str, int]:
    """Return the number of coded calls of a role in a phase, by operation."""
    rows = {tuple(name.split()): row["calls"] for name, row in phase["rows"].items()}
    return {op: number for (of, op), number in rows.items() if of == role and number}


@pytest.mark.full(reason="six seconds")
@pytest.mark.parametrize("cases", [MUON[:2], MUON[2:]])
def test_muon(tmp_path: Path, cases: list[str]) -> None:
    ((_, runs),) = train_all(tmp_path, *cases)
    for case, run in runs.items():
        for phase, steps in (
            (phase, steps) for rank in run for phase, steps in zip(rank["phases"], (1, 3), strict=True)
        ):
            assert calls(phase, "zero_grad") == {op: steps * count for op, count in MUON_CALLS[case].items()}, case
            assert "all_gather" not in calls(phase, "dp"), case
            assert set(phase["differences"]) <= {FIRST, DIFFERENCE}, "gradients have no base"
        assert all(set(rank["phases"][1]["differences"]) == {DIFFERENCE} for rank in run), case


@pytest.mark.full(reason="two cases over two backends")
def test_super_offload(tmp_path: Path) -> None:
    """Its shards change in its steps alone: gathers have versions, with agreements or with agreed sizes."""
    for backend, runs in train_all(tmp_path, "super", "super clipped", on_streams=True):
        for case, later in ((case, rank["phases"][1]) for case, run in runs.items() for rank in run):
            gathers = later["rows"]["zero_param all_gather_into_tensor"]
            assert gathers["calls"] and not gathers["host_waits"], (backend, case)
            if not backend:
                assert calls(later, "zero_param")["agreement"] and set(later["differences"]) == {DIFFERENCE}, case


@pytest.mark.full(reason="four cases")
def test_zenflow(tmp_path: Path) -> None:
    """It changes parameters in backward passes: each gather asks, or proves its bases."""
    ((_, runs),) = train_all(tmp_path, *(name for name in CASES if name.startswith("zenflow")))
    for case, run in runs.items():
        for (phase,) in (rank["phases"] for rank in run):
            asks = {"agreement"} if "zero3" in case else set()
            assert set(calls(phase, "zero_param")) == {"all_gather_into_tensor", *asks}, case
            assert calls(phase, "zero_grad"), case
            assert (DIFFERENCE if "zero3" in case else OTHER) in phase["differences"], case


if __name__ == "__main__":
    if not all(name.startswith("muon") for name in sys.argv[2:]):
        own_adam()
    rank_program(CASES, os.environ.get("BACKEND") or None)
