"""Pipelines with a weight that stages share, such as an embedding: its gradient in one sum, over the stages and all data-parallel ranks.

DeepSpeed sums such a gradient over the stages, then over the data-parallel ranks of each stage. With S stages and D data-parallel ranks a
ring sends 2 (S-1)/S + 2 (D-1)/D times the weight's bytes from each rank for the two sums, and 2 (SD-1)/(SD) times for the one. Nothing is
lost, but values are added in another order. Published as fused embedding synchronization (Optimus-CC, ASPLOS 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl.config import SECTION, ConfigError, ZipcclConfig
from ds_zipccl.integration import hook_points
from ds_zipccl.integration.job import Job
from ds_zipccl.lossy import PowerSgd
from ds_zipccl.policy.admission import sharing_ranks

KEY = f'"{SECTION}.fused_embedding"'
#: Role of the sum: that of DeepSpeed's own sum over the stages.
ROLE = "pp"
#: Attribute of an engine.
_ATTRIBUTE = "ds_zipccl_fused"


@dataclass(eq=False)
class Fused:
    """The weights of one engine that are summed at once: weight and group of the sum. ``summed``: their gradients of this step."""

    weights: Sequence[tuple[Any, Any]]
    summed: list[torch.Tensor] = field(default_factory=list)


# ---- at the start of an engine


def begin(engine: Any, job: Job) -> None:
    """Make the groups of a pipeline engine's sums, if the section asks for them. A collective of all ranks, also of those without a shared
    weight; blocks. Rank 0 says which sums are made at once, or why none is.

    Raises:
        ConfigError: the engine's optimizer does not allow such sums; or copies of a shared weight would drift apart without them.
    """
    if job.config is None:
        return
    module, grid = engine.module, engine.grid
    stages = _stages_by_key(module)
    lacking = hook_points.lacking("fused")
    if lacking or not job.config.fused_embedding:
        if lacking and job.config.fused_embedding:
            _say(f"has no effect: {lacking}")
        if grid.data_parallel_size > 1:
            _refuse_drift(job.config, "zero_grad" if any(job.zero_stages) else "dp", stages)
        return
    reasons = {
        "the pipeline has one stage": grid.pipe_parallel_size == 1,
        "no two stages share a tied layer": not stages,
        "there is one data-parallel rank, and so one sum already": grid.data_parallel_size == 1,
    }
    if why_not := next((reason for reason, holds in reasons.items() if holds), ""):
        _say(f"has no effect: {why_not}")
        return
    _refuse(engine)
    topology = grid.topology()
    coordinates = [topology.get_coord(rank)._asdict() for rank in range(topology.world_size())]
    weights = []
    for key, sharing in stages.items():
        for ranks in sharing_ranks(coordinates, sharing):
            group = dist.new_group(ranks)  # by every rank, in one order
            if grid.get_global_rank() in ranks:
                job.groups[group] = ROLE
                held = module.tied_modules[key]
                names = module.tied_weight_attrs[key]
                weights += [(module._recursive_getattr(held, name), group) for name in names]
        _say(
            f"{key!r} of stages {', '.join(map(str, sharing))}: one sum over {len(sharing) * grid.data_parallel_size} ranks"
        )
    setattr(engine, _ATTRIBUTE, Fused(weights))


def begin_engine(engine: Any, config: ZipcclConfig) -> None:
    """Say on rank 0 that the key has no effect where an engine has no pipeline; :func:`begin` speaks for pipelines."""
    if config.fused_embedding and not engine.pipeline_parallelism:
        _say("has no effect: the engine has no pipeline")


def _stages_by_key(module: Any) -> dict[str, list[int]]:
    """Return the stages of each key of tied layers that more than one stage has; every rank gets the same answer."""
    found: dict[str, set[int]] = {}
    for index, layer in enumerate(module._layer_specs):
        if hasattr(layer, "tied_weight_attr"):
            found.setdefault(layer.key, set()).add(module.stage_owner(index))
    return {key: sorted(stages) for key, stages in sorted(found.items()) if len(stages) > 1}


def _refuse(engine: Any) -> None:
    """Raise ConfigError for an engine that sums gradients in parts."""
    if engine.zero_optimization_stage() > 0 and hasattr(engine.optimizer, "reduce_gradients"):
        raise ConfigError(
            f"{KEY}: true is impossible with ZeRO-1: {type(engine.optimizer).__name__} sums gradients in parts, whose borders differ "
            'between stages; take ZeRO stage 0, or bf16 with "data_types": {"grad_accum_dtype": "fp32"}, or leave the key out'
        )


def _refuse_drift(config: ZipcclConfig, role: str, stages: Mapping[str, Sequence[int]]) -> None:
    """Raise ConfigError where each stage would sum its copy of a shared gradient lossily by itself: errors depend on places in buckets."""
    settings = config.lossy_roles.get(role)
    if stages and settings is not None and not isinstance(settings.codec, PowerSgd):
        key, sharing = next(iter(stages.items()))
        raise ConfigError(
            f'"{SECTION}.roles.{role}.codec": "{settings.codec.name}" would let the copies of tied layer {key!r} on stages '
            f"{', '.join(map(str, sharing))} drift apart, as each stage sums its copy by itself; "
            'add "fused_embedding": true to the section, or take "powersgd", which sums tied weights exactly'
        )


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"[ds_zipccl] fused_embedding: {text}", flush=True)


# ---- in each step


def leave_out(original: Callable[..., Any], engine: Any, grads: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """Leave gradients out of a reduction that are summed."""
    fused = getattr(engine, _ATTRIBUTE, None)
    if fused is not None and fused.summed:
        grads = [part for gradient in grads for part in _without(gradient, fused.summed)]
    return original(engine, grads, *args, **kwargs)


def reduce_tied(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Sum the gradients of shared weights, in the place of the sum over stages. Their scale, and the dtype of the sum, are those of
    DeepSpeed's sums over data-parallel ranks."""
    fused = getattr(engine, _ATTRIBUTE, None)
    # without the flag, another program sums over data-parallel ranks
    if fused is None or not engine.pipeline_enable_backward_allreduce:
        return original(engine, *args, **kwargs)
    for weight, group in fused.weights:
        gradient = weight._hp_grad if engine.using_bf16_optimizer else weight.grad
        if gradient is not None:
            engine.allreduce_and_copy([gradient], group, engine.grid.data_parallel_size)
            fused.summed.append(gradient)
    return None


def reduce_others(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Sum the other gradients over data-parallel ranks, also where that fails."""
    try:
        return original(engine, *args, **kwargs)
    finally:
        if (fused := getattr(engine, _ATTRIBUTE, None)) is not None:
            fused.summed.clear()


def _without(gradient: Any, summed: Sequence[torch.Tensor]) -> Iterator[Any]:
    """Yield the parts of ``gradient`` that hold none of ``summed``: a gradient, or a buffer of many with those of ``summed`` within."""
    if not isinstance(gradient, torch.Tensor):
        yield gradient
        return
    first, size, end = gradient.data_ptr(), gradient.element_size(), gradient.numel()
    inside = sorted(
        ((one.data_ptr() - first) // size, one.numel())
        for one in summed
        if first <= one.data_ptr() < first + end * size
    )
    if not inside:
        yield gradient
        return
    flat, start = gradient.view(-1), 0
    for place, numel in inside:
        yield from (flat[start:place],) if place > start else ()
        start = place + numel
    yield from (flat[start:],) if end > start else ()
