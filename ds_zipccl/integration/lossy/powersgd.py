"""PowerSGD on sums of data-parallel gradients: the matrices of a bucket that DeepSpeed is about to sum, and their state.

The tensor of such a sum is a copy of gradients laid end to end, or a gradient itself. Parameters are found by the addresses of their
gradients. So every layout serves: buckets of ZeRO-1 and ZeRO-2, single gradients, and flat buffers with padding (BF16 optimizer).
Elements without a whole matrix of two or more dimensions are summed exactly, in one call. So are weights that pipeline stages share.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from ds_zipccl import comm, kernels, tensors
from ds_zipccl.codecs import lowrank
from ds_zipccl.comm.group_state import group_size, region_hash
from ds_zipccl.comm.lossy.low_rank_sum import Matrix, low_rank_sum
from ds_zipccl.config import SECTION, ConfigError, ZipcclConfig
from ds_zipccl.integration.lossy import state
from ds_zipccl.integration.lossy.state import Entry, Ready, State
from ds_zipccl.lossy import PowerSgd
from ds_zipccl.role_settings import RoleSettings
from ds_zipccl.telemetry import counters

#: A parameter and its gradient.
Gradient = tuple[torch.nn.Parameter, torch.Tensor]
_OP = "all_reduce"
#: Optimizer of ZeRO-1 or ZeRO-2 -> its engine.
_engines: WeakKeyDictionary[Any, ref[Any]] = WeakKeyDictionary()


def refuse(engine: Any, config: ZipcclConfig) -> None:
    """Accept the settings of an engine that starts.

    Raises:
        ConfigError: a role has PowerSGD and the engine has ZeRO-3, or settings ask for pipeline stages and the engine has none.
    """
    for role, settings in config.lossy_roles.items():
        place = f'"{SECTION}.roles.{role}'
        if not isinstance(settings.codec, PowerSgd):
            continue
        if engine.zero_optimization_stage() == 3:
            raise ConfigError(
                f'{place}.codec": "powersgd" is for ZeRO-1, ZeRO-2 and jobs without ZeRO, got an engine with ZeRO-3, whose gradients are '
                'summed in parts; take ZeRO-2 or another codec, such as "round"'
            )
        if settings.stages is not None and not engine.pipeline_parallelism:
            raise ConfigError(
                f'{place}.stages": {settings.stages} counts pipeline stages, got an engine without a pipeline; leave the key out'
            )


def adopt(engine: Any, optimizer: Any) -> None:
    """Note the engine of an optimizer of ZeRO-1 or ZeRO-2."""
    _engines[optimizer] = ref(engine)


# ---- the places that give a hint of their sums: see ds_zipccl.integration.lossy.calls.SITES


def of_zero_bucket(optimizer: Any, bucket: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> tuple[int, Ready]:
    """Return the function for the sum of ``bucket`` by ``DeepSpeedZeroOptimizer.allreduce_bucket``. A sum for one rank stays exact."""
    one_owner = (args[1] if len(args) > 1 else kwargs.get("rank")) is not None
    why = "a sum for one rank" if one_owner else ""
    return _ready(_engine_of(optimizer), bucket, lambda: _of_zero(optimizer), why)


def of_zero_tensor(optimizer: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[int, Ready]:
    """Return the function for the sum of ``tensor`` by ``DeepSpeedZeroOptimizer.gradient_reduction_w_predivide``."""
    return _ready(_engine_of(optimizer), [tensor], lambda: _of_zero(optimizer))


def of_engine_bucket(engine: Any, bucket: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> tuple[int, Ready]:
    """Return the function for the sum of ``bucket`` by ``DeepSpeedEngine.allreduce_bucket``."""
    return _ready(engine, bucket, lambda: _of_engine(engine))


def _engine_of(optimizer: Any) -> Any:
    found = _engines.get(optimizer)
    return None if found is None else found()


def _of_zero(optimizer: Any) -> Iterator[Gradient]:
    """Yield the gradients of the buckets that ZeRO-1 or ZeRO-2 is summing. Gradients of former buckets may have the same memory."""
    for bucket in optimizer.ipg_buckets.values():
        for group, index, *_ in bucket.params:
            parameter = optimizer.bit16_groups[group][index]
            gradient = optimizer.get_gradient_for_reduction(parameter)
            if gradient is not None:
                yield parameter, gradient


def _of_engine(engine: Any) -> Iterator[Gradient]:
    """Yield the gradients of an engine without ZeRO: the parameters' own, or those that the BF16 optimizer keeps in fp32."""
    kept = getattr(engine.optimizer, "fp32_groups_gradients", None)
    if kept is not None:
        for parameters, gradients in zip(engine.optimizer.bf16_groups, kept, strict=True):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                yield parameter, gradient.view(parameter.shape)
        return
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            yield parameter, parameter.grad


def _named(engine: Any, gradients: Iterator[Gradient]) -> list[tuple[str, torch.Tensor]]:
    """Return the gradients by the names of their parameters, without those of weights that pipeline stages share: each stage sums such a
    gradient over its own ranks, and all stages must get the same bits."""
    pairs = engine.module.get_tied_weights_and_groups() if engine.pipeline_parallelism else []
    tied = {id(weight) for weight, _ in pairs}
    return [(engine.param_names[parameter], gradient) for parameter, gradient in gradients if id(parameter) not in tied]


def _ready(
    engine: Any, parts: Sequence[torch.Tensor], gradients: Callable[[], Iterator[Gradient]], why: str = ""
) -> tuple[int, Ready]:
    """Return the number of the sums of ``parts`` laid end to end, one, and the function for it. ``why``: the reason why the sum stays
    exact, "" for none."""

    def ready(flat: torch.Tensor, settings: RoleSettings) -> bool | str | PowerSum:
        if not isinstance(settings.codec, PowerSgd):
            return True
        first = settings.stages is None or getattr(engine, "stage_id", 0) < settings.stages
        if engine is None or not first or engine.global_steps < settings.start_step:
            return False
        if why or flat.device.type != "cpu":
            return why or f"no lossy kernels on {flat.device.type}"
        whole = sum(part.numel() for part in parts) == flat.numel()
        places = list(_places(parts, _named(engine, gradients()), settings.codec.rank)) if whole else []
        own = state.of(engine)
        return PowerSum(settings, settings.codec, places, engine.global_steps, own) if places else "no matrix"

    return 1, ready


@dataclass(frozen=True)
class _Place:
    """A matrix in the flat tensor: the parameter's name, the index of the first element, and the matrix's shape."""

    name: str
    start: int
    rows: int
    columns: int
    rank: int


def _places(
    parts: Sequence[torch.Tensor], gradients: Sequence[tuple[str, torch.Tensor]], rank: int
) -> Iterator[_Place]:
    """Yield the matrices that lie whole in ``parts``, in the order of their places. Tensors that are neighbors in memory, as the slices
    of a gradient that ZeRO cuts for its owners, count as one."""
    known = sorted(((gradient.data_ptr(), name, gradient) for name, gradient in gradients), key=lambda one: one[0])
    addresses = [address for address, _, _ in known]
    for start, tensor, numel in _joined(parts):
        first, size = tensor.data_ptr(), tensor.element_size()
        for address, name, gradient in known[bisect_left(addresses, first) :]:
            if address >= first + numel * size:
                break
            at = (address - first) // size
            whole = gradient.is_contiguous() and gradient.dtype == tensor.dtype and at + gradient.numel() <= numel
            rows, columns = (len(gradient), gradient[0].numel()) if whole and gradient.dim() > 1 else (0, 0)
            if fits := lowrank.factor_rank(rows, columns, rank):
                yield _Place(name, start + at, rows, columns, fits)


def _joined(parts: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor, int]]:
    """Yield, of each run of tensors that are neighbors in memory: its index in the flat tensor, its first tensor, its elements."""
    at = 0
    run: tuple[int, torch.Tensor, int] | None = None
    for tensor in parts:
        if run is not None and run[1].data_ptr() + run[2] * run[1].element_size() == tensor.data_ptr():
            run = (run[0], run[1], run[2] + tensor.numel())
        else:
            if run is not None:
                yield run
            run = (at, tensor, tensor.numel())
        at += tensor.numel()
    if run is not None:
        yield run


@dataclass(frozen=True)
class PowerSum:
    """A sum of gradients by PowerSGD, in the place of an all-reduce. ``step``: optimizer steps that the engine has taken; ``state``: of
    the engine."""

    settings: RoleSettings
    codec: PowerSgd
    places: Sequence[_Place]
    step: int
    state: State

    def run(
        self, tensor: torch.Tensor, op: Any, group: dist.ProcessGroup | None, config: ZipcclConfig, role: str
    ) -> None:
        """Sum ``tensor`` over ``group``, in place, with the same bits on all ranks. A collective; blocks.

        Raises:
            RuntimeError: ranks got different bits.
        """
        ranks, flat = group_size(group), tensor.view(-1)
        if ranks == 1 or tensor.nbytes < config.min_bytes:
            comm.all_reduce(tensor, op, group, False, config=config, role=role)
            return
        route = kernels.preferred(config.route, "cpu")
        entries = [
            self.state.entry(role, (place.name,), (place.rows, place.columns), tensor.dtype, ranks)
            for place in self.places
        ]
        matrices = [self._matrix(place, entry) for place, entry in zip(self.places, entries, strict=True)]
        sent = 0

        def exact_sum(part: torch.Tensor) -> None:
            nonlocal sent
            sent += part.nbytes
            comm.all_reduce(part, ReduceOp.SUM, group, False, config=config, role=role)

        low_rank_sum(flat, matrices, ranks, exact_sum, route)
        if op == ReduceOp.AVG:
            flat.div_(ranks)
        for entry, matrix in zip(entries, matrices, strict=True):
            entry.error, entry.factor = matrix.error, matrix.factor
        self._count(role, matrices, flat, sent, ranks)
        if config.log_interval and not self.step % config.log_interval:
            _compare(flat, group, self.places)

    def _matrix(self, place: _Place, entry: Entry) -> Matrix:
        factor = entry.factor
        if factor is None or factor.shape != (place.columns, place.rank):
            seed = int.from_bytes(hashlib.blake2b(place.name.encode(), digest_size=4).digest(), "little")
            factor = lowrank.first_factor(place.columns, place.rank, seed)
        keeps = self.settings.error == "feedback"
        return Matrix(place.start, place.rows, place.columns, factor, entry.error if keeps else None, keeps)

    def _count(self, role: str, matrices: Sequence[Matrix], flat: torch.Tensor, sent: int, ranks: int) -> None:
        """Count the sum: the bytes that the exact sums inside, which count themselves, have saved, and the errors. Nothing is saved where
        the matrices went exactly after their factors."""
        counters.record(role, _OP, max(0, int(2 * (flat.nbytes - sent) * (ranks - 1) / ranks)), 0)
        counters.record_lossy(role, _OP, str(self.codec), len(matrices))
        for matrix in matrices:
            if not matrix.arrived:
                counters.record_exact(role, _OP, "not finite", 1)
                continue
            missed, own, kept, given = matrix.squared_error
            counters.record_error(role, _OP, str(self.codec), missed, own)
            if matrix.keeps:
                counters.record_kept(role, _OP, kept, given)


def _compare(flat: torch.Tensor, group: dist.ProcessGroup | None, places: Sequence[_Place]) -> None:
    """Compare the bits of a sum between the ranks of ``group``. A collective; blocks.

    Raises:
        RuntimeError: they differ; the message names the parameters.
    """
    own = tensors.of_buffer(bytearray(region_hash(flat))).view(torch.int64)
    least = torch.cat([own, ~own])  # the least of the complements is the complement of the greatest
    dist.all_reduce(least, ReduceOp.MIN, group)
    if not torch.equal(least[:2], ~least[2:]):
        names = ", ".join(place.name for place in places)
        raise RuntimeError(
            f"[ds_zipccl] the ranks have different sums of gradients after PowerSGD, of {names}: their weights would drift apart; "
            "compare the CPUs and the versions of torch and ds_zipccl on all nodes, or take another codec"
        )
