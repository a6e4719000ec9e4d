"""FSDP2's own streams on the simulated GPU: torch's groups of parameters gather and reduce by the coded collectives of ``fsdp.apply``.

The groups, their streams and their events are torch's. Stand-ins are the parameters, whose memory torch resizes, and autograd, which the
simulator does not have.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import levels
import pytest
import sim.tensor
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as torchs
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup
from torch.distributed.tensor import Shard

from ds_zipccl.comm.device.streams import StreamWork
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.integration.fsdp.collectives import AllGather, ReduceScatter
from ds_zipccl.integration.fsdp.parameters import Parameters, Unit
from ds_zipccl.integration.job import Job
from ds_zipccl.kernels.cuda.backend import CudaBackend
from ds_zipccl.telemetry import counters
from on_sim import plants, world
from on_sim.cases import weights

CONFIG = ZipcclConfig(enabled=True, mode="always", min_bytes=0, nccl="on", nccl_min_bytes=0)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
#: Elements of a rank's shard of each parameter, group by group.
GROUPS = ((1500, 301), (2048,), (700, 3, 900))
FORWARD, BACKWARD = TrainingState.FORWARD, TrainingState.PRE_BACKWARD


class Param:
    """In place of torch's FSDPParam: a shard in fp32, gathered in bf16 to new memory. ``hosts``: the shards of all ranks, on the host."""

    offload_to_cpu, grad_offload_event, unsharded_accumulated_grad, param_dtype = False, None, None, torch.bfloat16
    fsdp_placement, sharded_state, contiguous_sharded_stride = Shard(0), ShardedState.SHARDED, (1,)

    def __init__(self, rank: int, ranks: int, numel: int, seed: int) -> None:
        self.hosts = [weights(peer, numel, seed, torch.float32) for peer in range(ranks)]
        self.device = torch.device("cuda", rank)
        self._sharded_param_data = self._sharded_local_tensor = self.hosts[rank].to(self.device)
        self.sharded_size = torch.Size([numel])
        self.sharded_param = SimpleNamespace(grad=None, requires_grad=True, dtype=torch.float32)
        self.unsharded_param = self._unsharded_param = SimpleNamespace(grad=None)
        self._module_info = SimpleNamespace(param_name="weight")
        self.all_gather_outputs: list[torch.Tensor] = []

    def init_all_gather_outputs(self, numels: list[int], dtypes: list[torch.dtype], ranks: int, device: Any) -> None:
        self.all_gather_outputs = [
            torch.empty(numel * ranks, dtype=dtype, device=device) for numel, dtype in zip(numels, dtypes, strict=True)
        ]

    def to_sharded(self) -> None:
        self.all_gather_outputs = []

    def to_sharded_dtensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    @property
    def unsharded_grad_data(self) -> torch.Tensor:
        return self.unsharded_param.grad

    def _nothing(self) -> None: ...

    alloc_all_gather_outputs = init_unsharded_param = to_unsharded = accumulate_unsharded_grad_if_needed = _nothing


class Model:
    """Groups of parameters as ``fully_shard`` makes them, with coded collectives, and what a program has seen of them."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.device = rank, ranks, torch.device("cuda", rank)
        mesh = SimpleNamespace(size=lambda dim: ranks, get_group=lambda dim: dist.group.WORLD)
        info: Any = FSDPMeshInfo(mesh, shard_mesh_dim=0)  # type: ignore[arg-type]
        self.context = FSDPCommContext()
        self.context.lazy_init(self.device)
        self.groups: list[Any] = []
        for number, numels in enumerate(GROUPS):
            group: Any = FSDPParamGroup([], (), info, info, self.device, None, BF16, OffloadPolicy())
            group.fsdp_params = [Param(rank, ranks, numel, 10 * number + place) for place, numel in enumerate(numels)]
            group.comm_ctx, group._orig_dtype, group._reduce_dtype = self.context, torch.float32, torch.bfloat16
            self.groups.append(group)
        units = [Unit(f"blocks.{number}", group, dist.group.WORLD) for number, group in enumerate(self.groups)]
        parameters, job = Parameters(units, torch.nn.Module(), CONFIG, self.device), Job(config=CONFIG)
        for unit in units:
            plain = unit.param_group
            plain._all_gather_comm = AllGather(unit, job, plain._all_gather_comm, parameters)
            plain._reduce_scatter_comm = ReduceScatter(unit, job, plain._reduce_scatter_comm, lambda unit: None)
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []  # on the device, and wanted

    def forward(self, ahead: bool) -> None:
        """``ahead``: gathers are asynchronous, and all begin before the first is waited for."""
        for stream in (self.context.all_gather_copy_in_stream, self.context.all_gather_stream):
            stream.wait_stream(torch.cuda.current_stream())  # FSDPState._root_pre_forward
        for group in self.groups:
            group._training_state = FORWARD
            if ahead:
                group.unshard(True)
        for group in self.groups:
            group.unshard(ahead)
            group.wait_for_unshard()
            for param in group.fsdp_params:
                self.seen.append((param.all_gather_outputs[0].clone(), torch.cat(param.hosts).bfloat16()))
            group.reshard()
        if self.context.all_gather_state is not None:  # FSDPState._post_forward of the root
            group._wait_all_gather_streams_on_event(self.context.all_gather_state.event)
            self.context.all_gather_state = None

    def backward(self) -> None:
        """The next gather begins while a gradient is computed."""
        for number in reversed(range(len(self.groups))):
            group = self.groups[number]
            group._training_state = BACKWARD
            group.unshard()
            group.wait_for_unshard()
            if number:
                group._prefetch_unshard(self.groups[number - 1], "backward")
            for param in group.fsdp_params:
                param.unsharded_param.grad = param.all_gather_outputs[0] * (self.rank + 1)
            group.post_backward()
        for group in self.groups:
            group.finalize_backward()
        for state in self.context.reduce_scatter_states:  # FSDPState._root_post_backward_final_callback
            torch.cuda.current_stream().wait_event(state.event)
        self.context.reduce_scatter_states.clear()

    def step(self) -> None:
        """The memory of gradients is the reduce-scatter stream's, which waits before its next use; here it waits before they are freed."""
        for param in (param for group in self.groups for param in group.fsdp_params):
            whole = torch.cat(param.hosts).bfloat16()
            mean = levels.in_one_level([whole * (peer + 1) for peer in range(self.ranks)], average=True).float()
            self.seen.append((param.sharded_param.grad.clone(), mean.chunk(self.ranks)[self.rank]))
            param._sharded_param_data.sub_(param.sharded_param.grad, alpha=0.25)
            param.hosts = [host - 0.25 * part for host, part in zip(param.hosts, mean.chunk(self.ranks), strict=True)]
            self.context.reduce_scatter_stream.wait_stream(torch.cuda.current_stream())
            param.sharded_param.grad = None


def train(rank: int, ranks: int, ahead: bool = False) -> None:
    levels.pretend([list(range(ranks))])
    model = Model(rank, ranks)
    for _ in range(2):
        model.forward(ahead)
        model.backward()
        model.step()
    wrong = [number for number, (got, wanted) in enumerate(model.seen) if not torch.equal(got.cpu(), wanted)]
    assert not wrong, f"tensors {wrong} of {len(model.seen)} are wrong"
    rows = {
        row["role"]: row for row in counters.rows() if row["op"] in ("all_gather_into_tensor", "reduce_scatter_tensor")
    }
    for role in ("zero_param", "zero_grad"):
        assert not rows[role]["passed"] and 0 < rows[role]["wire_bytes"] < rows[role]["logical_bytes"], rows


@pytest.fixture(autouse=True)
def torchs_operations(monkeypatch: pytest.MonkeyPatch, small_frames: None) -> None:
    """FSDP2's operations are Python functions of others."""
    for name in ("all_gather_copy_in_cuda", "split_with_sizes_copy", "chunk_cat"):
        run, operation = getattr(torchs, name), getattr(torch.ops.fsdp, name.removesuffix("_cuda")).default
        monkeypatch.setitem(sim.tensor._SPECIAL, operation, lambda func, *args, run=run, **named: run(*args, **named))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full(reason="slower"))])
def test_bits_of_gathers_and_gradients(route: CudaBackend, ranks: int, ahead: bool) -> None:
    for seed, modes in enumerate(world.ALL_MODES[:: 6 if ranks == 2 else 1]):
        world.run(train, ranks, ahead, seed=seed, modes=modes, route=route)


def unawaited(patch: pytest.MonkeyPatch) -> None:
    """FSDP2 waits for the handle of a gather, and that does nothing."""
    patch.setattr(StreamWork, "wait", lambda self, timeout=None: True)


@pytest.mark.parametrize(
    ("plant", "ahead"), [(plants.no_begin, False), (plants.no_join, False), (plants.no_join, True), (unawaited, True)]
)
def test_a_lost_wait_is_noticed(
    route: CudaBackend, plant: plants.Plant, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert world.noticed(train, 2, ahead, route=route).kind == "race"
