"""Makes this process rank 0 of a modelled fabric: the schedules of NCCL groups, on :class:`.group.Group`.

What needs other ranks has the answer that equal ranks would give: texts, nodes, the canary, the sizes of their frames
in sums. Speeds are those of the model, as if a job had measured them.
"""

from __future__ import annotations

import ctypes
from typing import Any, cast

import torch
import torch.distributed as dist

from ds_zipccl import devices, kernels
from ds_zipccl.benchmarks.fabric.clock import PROCESSORS, Clock, CudaClock
from ds_zipccl.benchmarks.fabric.group import NAME, READ_BYTES, Group
from ds_zipccl.cli.planning.schedules import BASE_SPEED, HASH
from ds_zipccl.comm import topology
from ds_zipccl.comm.device import calibration, reports, sizes, sums
from ds_zipccl.comm.device.bases import proof
from ds_zipccl.comm.group_state import find_nodes
from ds_zipccl.comm.transport import COLLECTIVE_TRANSPORTS
from ds_zipccl.comm.transport.nccl import NcclTransport
from ds_zipccl.integration import canary
from ds_zipccl.kernels.cuda import jobs
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.policy import admission
from ds_zipccl.policy.base_copies import COPY
from ds_zipccl.policy.cost_model import DELTA_RATIO, GATHER, RATIO, DeviceProfile

_ITEMSIZES = {"bf16": 2, "fp16": 2, "fp32": 4, "e4m3": 1, "e5m2": 1, "u8": 1}
#: Byte of a frame's header at which the size of the frame stands.
_FRAME_BYTES = 24


class Launcher:
    """Takes the seconds of the model for each launch, and writes the sizes of frames and zeros for sums. ``ratio``:
    words by bytes of the frames without a base."""

    def __init__(self, clock: Clock, profile: DeviceProfile) -> None:
        self._clock, self._profile, self.ratio = clock, profile, RATIO[GATHER]

    def launch(
        self, kernel: str, grid: tuple[int, int], shared_bytes: int, params: ctypes.Structure, stream: int
    ) -> None:
        with self._clock.beside():
            self._clock.busy(self._seconds(kernel.split("_"), grid[1], params))

    def _seconds(self, names: list[str], ranks: int, params: ctypes.Structure) -> float:
        itemsize, delta = next((_ITEMSIZES[name] for name in names if name in _ITEMSIZES), 1), "delta" in names
        encode, decode = (
            speed * (BASE_SPEED if delta else 1.0) for speed in (self._profile.encode, self._profile.decode)
        )
        if isinstance(params, jobs.EncodeJobs):
            seconds = 0.0
            for job in params.job[: params.count]:
                ratio = 1.0 if job.raw else DELTA_RATIO if delta else self.ratio
                seconds += job.numel * itemsize / (COPY if job.raw else encode)
                if job.header:
                    ctypes.c_uint64.from_address(job.header + _FRAME_BYTES).value = int(job.numel * itemsize / ratio)
            return seconds
        if isinstance(params, jobs.DecodeJobs):
            return float(ranks * itemsize * sum(job.numel for job in params.job[: params.count]) / decode)
        if isinstance(params, jobs.SumJob):
            ctypes.memset(params.sums, 0, params.numel * (4 if params.fp32_sums else itemsize))
            return float(params.numel * params.count * itemsize / (COPY if params.plain else decode))
        assert isinstance(params, jobs.HashJobs), names  # lossless calls have no other launch
        ctypes.memset(params.result, 0, 16 * params.count)
        return float(sum(job.bytes for job in params.job[: params.count]) / HASH)


def install(nodes: int, each: int, profile: DeviceProfile, device: str) -> Launcher | None:
    """Make this process rank 0 of ``nodes`` nodes of ``each`` ranks, for good. Returns the launcher of CPUs."""
    clock = Group.clock = CudaClock() if device == "cuda" else Clock()
    Group.profile, launcher = profile, None
    dist.Backend.register_backend(NAME, lambda store, rank, ranks, timeout: Group(rank, ranks), devices=[device])
    COLLECTIVE_TRANSPORTS[NAME] = NcclTransport
    admission.CODED_BACKENDS[device] = (NAME,)
    admission.STREAM_BACKENDS += (NAME,)
    if device == "cpu":
        launcher = Launcher(clock, profile)
        kernels.ROUTES["cpu"] = {"modelled": lambda: CudaBackend(launcher, "cpu", PROCESSORS)}
        devices.RUNTIMES["cpu"] = cast(Any, clock.runtime)
        _on_clock(clock, profile)
    else:  # frames of sums may not fit the place of a peer's
        reports.Reports.failed = lambda self: torch.zeros(1, dtype=torch.int64, device=device)  # type: ignore[method-assign]
    _alone(each, profile)
    store: Any = vars(dist)["HashStore"]()
    dist.init_process_group(NAME, store=store, rank=0, world_size=nodes * each)
    find_nodes()
    return launcher


def _alone(each: int, profile: DeviceProfile) -> None:
    """Give the answers of the other ranks."""

    def collect(group: Any, text: str, *more: Any) -> tuple[dict[int, str], list[int]]:
        return dict.fromkeys(dist.get_process_group_ranks(group), text), []

    def agree(ctx: Any, words: Any) -> list[int]:
        found = sizes.agree(ctx, words)
        return [size or max(found) for size in found]

    here: Any = {
        topology: {"collect": collect, "find": lambda group, place="": {
            rank: rank // each for rank in dist.get_process_group_ranks(group)
        }},
        canary: {"try_out": lambda *more: canary.Outcome()},
        calibration: {"measure": lambda *more: profile},
        sums: {"agree": agree},
    }  # fmt: skip
    for module, functions in here.items():
        vars(module).update(functions)


def _on_clock(clock: Clock, profile: DeviceProfile) -> None:
    """Let waits, and torch's own work in our schedules, take time of the clock. Large tensors stay as they are."""
    written = torch.Tensor.copy_

    def copy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if clock.current is clock.default:
            return written(self, source, non_blocking)
        clock.busy(self.nbytes / (profile.bus if non_blocking else COPY))  # host memory is copied so
        return self if self.nbytes > READ_BYTES else written(self, source, non_blocking)

    def passes(words: torch.Tensor, divisor: int = 1) -> None:
        clock.busy(2 * words.nbytes / COPY)

    torch.Tensor.copy_ = cast(Any, copy)  # type: ignore[method-assign]
    vars(sizes).update(ended=lambda event, seconds: clock.wait(event))
    vars(sums).update(divide=passes, settle_nans=passes)
    vars(proof).update(is_away=lambda base, ctx: base.levels is None)  # in host memory, which is the device's here
