"""Calls of the CUDA route that schedules are made of bring no word to the host, and take little of its time."""

from __future__ import annotations

import ast
import inspect
import timeit
from typing import Any

import torch
from cuda_frames import CPU, NoLauncher, words
from torch.utils._python_dispatch import TorchDispatchMode

from ds_zipccl.kernels.cuda import backend, jobs, launches
from ds_zipccl.kernels.cuda.backend import CudaBackend, GatherTable, Own, Parameter, frame_bytes, new_status


class HostWords(TorchDispatchMode):
    """Notices operations that bring a word to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal, torch.ops.aten.nonzero):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def every_call(route: CudaBackend) -> None:
    """All calls that must not wait."""
    segments, base = [words(torch.bfloat16, 3000)], [words(torch.bfloat16, 3000, 1)]
    slots = [torch.zeros(8192, dtype=torch.uint8)]
    status, count = new_status(CPU), torch.zeros(1, dtype=torch.int32)
    table = GatherTable([Parameter(3000, 8192)], torch.bfloat16, 1024, 2)
    staging, out = torch.zeros(2 * 8192, dtype=torch.uint8), torch.zeros(6000, dtype=torch.bfloat16)
    route.encode_frames(segments, "cascade", 1024, slots, count)
    route.decode_frames(slots, 1024, segments, status)
    route.encode_delta_frames(segments, base, 1024, slots, count)
    route.decode_delta_frames(slots, base, 1024, segments, status)
    route.encode_gather(segments, "cascade", table, staging[:8192], count)
    route.encode_gather(segments, "delta", table, staging[8192:], count, base)
    route.decode_gather(staging, table, [out], 0, status)
    route.decode_gather(staging, table, out, 0, status, out)
    route.decode_sum_frames(slots, 1024, torch.bfloat16, segments[0], status, Own(base[0], 0))
    route.decode_sum_frames(staging.view(2, 8192), 1024, torch.bfloat16, segments[0], status)
    route.frame_sizes(segments, "wide", 1024, headers := torch.zeros(32, dtype=torch.uint8))
    frame_bytes(headers.view(1, 32)).max()
    route.hash_regions(segments, torch.zeros(2, dtype=torch.int64))


def test_no_call_brings_a_word_to_the_host() -> None:
    launcher = NoLauncher()
    with HostWords() as seen:
        every_call(CudaBackend(launcher, "cpu"))
    assert len(launcher.names) == 12
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
