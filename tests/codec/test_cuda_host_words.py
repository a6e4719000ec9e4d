"""Calls of the CUDA route that schedules are made of bring no word to the host, and take little of its time."""

from __future__ import annotations

import ast
import inspect
import timeit
from typing import Any

import torch
from cuda_frames import CPU, NoLauncher
from test_cuda_arguments import CALLS, good
from torch.utils._python_dispatch import TorchDispatchMode

from ds_zipccl.kernels.cuda import backend, jobs, launches
from ds_zipccl.kernels.cuda.backend import CudaBackend, GatherTable, Parameter, frame_bytes, new_status


class HostWords(TorchDispatchMode):
    """Notices operations that bring a word to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal, torch.ops.aten.nonzero):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_no_call_brings_a_word_to_the_host() -> None:
    launcher = NoLauncher()
    route, given = CudaBackend(launcher, "cpu"), good()
    with HostWords() as seen:
        for call in CALLS.values():
            call(route, given)
        route.encode_gather(given["words"], "delta", given["table"], given["part"], given["overflows"], given["base"])
        route.decode_gather(given["staging"], given["table"], given["outs"][0], 0, given["status"], given["outs"][0])
        frame_bytes(given["headers"].view(1, 32)).max()
    assert len(launcher.names) == len(CALLS) + 2
    assert seen.found == []
    with HostWords() as seen:
        assert bool(torch.ones(1)) and int(torch.ones(1)) == 1
    assert len(seen.found) == 2


def test_no_source_of_a_call_asks_a_tensor() -> None:
    """Also on paths that the calls above do not take. ``region_hash`` and the payload calls, which wait, are in the same classes."""
    wait = {"encode_payloads", "decode_payload", "region_hash"}
    wait |= {"find_rows", "encode_rounded", "encode_scaled", "decode_scaled", "encode_zfp"}
    asked = []
    for source in (
        jobs.GatherTable,
        jobs.regular_summands,
        jobs.listed_summands,
        backend.CudaBackend,
        launches.Launches,
    ):
        for node in ast.walk(ast.parse(inspect.getsource(source))):
            if isinstance(node, ast.FunctionDef) and node.name not in wait:
                called = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
                names = {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in called}
                asked += [
                    f"{node.name}: {name}"
                    for name in names & {"item", "tolist", "bool", "numpy", "cpu", "synchronize", "nonzero"}
                ]
    assert asked == []


def test_python_time_of_a_gather() -> None:
    """20 parameters over 64 ranks: at most 150 microseconds of Python (the best of some; a launch that does nothing)."""
    route, ranks = CudaBackend(NoLauncher(), "cpu"), 64
    parameters = [Parameter(1000 + number, 4096) for number in range(20)]
    table = GatherTable(parameters, torch.bfloat16, 1024, ranks)
    outs = [torch.zeros(parameter.numel * ranks, dtype=torch.bfloat16) for parameter in parameters]
    shards = [out[: parameter.numel] for out, parameter in zip(outs, parameters, strict=True)]
    staging, status = torch.zeros(table.part_bytes * ranks, dtype=torch.uint8), new_status(CPU)
    part = staging[: table.part_bytes]

    def gather() -> None:
        route.encode_gather(shards, "cascade", table, part)
        route.decode_gather(staging, table, outs, 0, status)

    assert min(timeit.repeat(gather, number=10, repeat=50)) / 10 < 150e-6
