"""Features of DeepSpeed and torch whose traffic goes round this package, or passes, or costs more: one table, for the start-up lines, the
doctor and the documentation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

#: Classes of torch that communicate over torch's own process groups, with their parts of a model.
_OF_TORCH = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DTensor"}
#: Texts that pydantic, and so DeepSpeed, reads as true.
_TRUE = {"1", "true", "t", "yes", "y", "on"}


@dataclass(frozen=True)
class Facts:
    """The parts of a job that its caller knows.

    ``config``: the DeepSpeed config, as a file has it or as DeepSpeed has read it. ``device``: type of device of the model's tensors.
    ``backend``: DeepSpeed's name of its backend. ``pipelined``: the model runs in several stages. ``classes``: see :func:`classes_of`.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    backend: str = ""
    pipelined: bool = False
    classes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Feature:
    """A line of the table. The texts are clauses.

    ``sign``: the way to recognize the feature, for the documentation. ``found``: whether facts have it; None: no line is ever printed.
    ``of_zero``: it changes the traffic of ZeRO, so that a prediction of this traffic would be wrong.
    """

    name: str
    sign: str
    cost: str
    remedy: str
    found: Callable[[Facts], bool] | None = None
    of_zero: bool = False


def zero_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section ``zero_optimization`` of a DeepSpeed config, whose old form is true or false."""
    found = config.get("zero_optimization")
    return {"stage": 1} if found is True else _section(config, "zero_optimization")


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = config.get(key)
    return found if isinstance(found, Mapping) else {}


def _on(section: Mapping[str, Any], *keys: str) -> bool:
    """Whether one of the keys is true. "auto" is DeepSpeed's default, which is false for all keys here."""
    return any(str(section.get(key)).lower() in _TRUE for key in keys)


def _zero3(*keys: str) -> Callable[[Facts], bool]:
    """Return whether ZeRO-3 is on with one of the keys."""

    def found(facts: Facts) -> bool:
        zero = zero_section(facts.config)
        return zero.get("stage") == 3 and _on(zero, *keys)

    return found


def _deepcompile(facts: Facts) -> bool:
    compiled = _section(facts.config, "compile")
    passes = compiled.get("passes") or ()  # with these two DeepSpeed leaves its passes of ZeRO out
    zero = zero_section(facts.config).get("stage") in (1, 2, 3)
    return zero and _on(compiled, "deepcompile") and not {"autosp", "autotp"} & {*passes}


def _deepep(facts: Facts) -> bool:
    experts = _section(facts.config, "expert_parallel")
    several = experts.get("autoep_size", 1) not in (0, 1)
    return several and _on(experts, "enabled") and experts.get("comm_backend") == "deepep"


FEATURES = (
    Feature(
        "DeepCompile",
        "`compile.deepcompile` with ZeRO-1, ZeRO-2 or ZeRO-3, without the passes `autosp` and `autotp`",
        "after engine.compile() gradients, and with ZeRO-3 gathers, go by its own NCCL calls, plain",
        "set compile.deepcompile to false; engine.compile() without it is coded",
        _deepcompile,
        of_zero=True,
    ),
    Feature(
        "DeepEP",
        '`expert_parallel.comm_backend` is `"deepep"`, with `autoep_size` above 1',
        "the rows of experts go by its own kernels, plain",
        'set expert_parallel.comm_backend to "comm"',
        _deepep,
    ),
    Feature(
        "CCLBackend",
        "the name of DeepSpeed's backend",
        "sums and broadcasts go by its own oneCCL calls, the rest by ccl groups of torch: nothing is coded",
        "none on XPU; on CPUs remove oneccl_bindings_for_pytorch: DeepSpeed then takes gloo, which is coded",
        lambda facts: facts.backend == "ccl",
    ),
    Feature(
        "stage3_use_all_reduce_for_fetch_params",
        "the key, with ZeRO-3",
        "ZeRO-3 fetches parameters by sums: twice the bytes of gathers, and no differences",
        "set it to false",
        lambda facts: (
            _zero3("stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params")(facts)
            and not _zero3("zero_quantized_weights")(facts)
        ),
        of_zero=True,
    ),
    Feature(
        "qwZ of ZeRO++",
        "`zero_quantized_weights` or `zero_quantized_nontrainable_weights`, with ZeRO-3",
        "gathers of quantized weights pass as they are, in 8 bits",
        "leave zero_quantized_weights and zero_quantized_nontrainable_weights false to have gathers coded",
        _zero3("zero_quantized_weights", "zero_quantized_nontrainable_weights"),
        of_zero=True,
    ),
    Feature(
        "qgZ of ZeRO++",
        "`zero_quantized_gradients`, with ZeRO-3",
        "between nodes quantized gradients pass as they are, in 4 bits",
        "leave zero_quantized_gradients false to have gradients coded",
        _zero3("zero_quantized_gradients"),
        of_zero=True,
    ),
    Feature(
        "pipeline sends",
        "a pipeline of several stages on a device that is not the CPU; `doctor`: the section `pipeline`",
        "sends and receives of tensors of this device pass",
        "none in this release",
        lambda facts: facts.pipelined and facts.device != "cpu",
    ),
    Feature(
        "DDP, FSDP or DTensor in the model",
        "classes of the engine's model and of its parameters, once the engine is made",
        "their traffic goes over torch's process groups, plain",
        "give DeepSpeed the plain model",
        lambda facts: bool(_OF_TORCH & facts.classes),
    ),
    Feature(
        "DDP, FSDP or DTensor outside of the engine, `torch.distributed.nn`",
        "not recognized",
        "their traffic goes over torch's process groups, plain",
        "[`torch_distributed`](configuration.md#direct-calls-of-torchdistributed) codes direct calls of tensor and sequence parallelism",
    ),
    Feature(
        "`torch.compile` with `fullgraph=True`",
        "not recognized ahead: the compiler stops with an error that says so",
        "graphs break at collectives",
        "compile without `fullgraph=True`: collectives are then coded as usual",
    ),
    Feature(
        "frozen parameters of ZeRO-3 in checkpointed layers, DeepSpeed 0.19.3 and later",
        "not recognized, as checkpointing is in the model",
        "the backward pass gathers them once, not twice, and keeps them until it has passed their layer; with `use_reentrant=True` "
        "to its end, so that all of them take memory at once",
        "checkpoint with `use_reentrant=False`",
    ),
)


def found(facts: Facts) -> list[Feature]:
    """Return the features that a job has, as far as the facts tell."""
    return [one for one in FEATURES if one.found is not None and one.found(facts)]


def lines(facts: Facts) -> list[str]:
    """Return a line for each feature that a job has, as far as the facts tell; none for most jobs."""
    return [f"bypassed: {one.name}: {one.cost}; to do: {one.remedy}" for one in found(facts)]


def classes_of(model: torch.nn.Module) -> frozenset[str]:
    """Return the names of the classes, and of their bases, of a model's layers and parameters."""
    kinds = {type(one) for one in chain(model.modules(), model.parameters())}
    return frozenset(base.__name__ for kind in kinds for base in kind.__mro__)
