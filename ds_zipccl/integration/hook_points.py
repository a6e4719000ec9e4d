"""The names of DeepSpeed and torch that this package replaces or wraps, and the parameters that it relies on.

A name that is missing, or that takes other parameters, is left as it is. The traffic that the name stands for then stays as DeepSpeed sends
it, and rank 0 says so in a line at the start. The places that a lossy codec needs are in :data:`.lossy.calls.SITES`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ds_zipccl.ops import OPS

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])

#: The own collective of this package, which no backend of DeepSpeed has.
_OWN = "reduce_to_owners"
_ABSENT = object()
_NO_GRAPH = (
    "ds_zipccl codes collectives outside of compiled graphs: compile without fullgraph=True, or run with DS_ZIPCCL=0"
)
_functions: list[Callable[..., Any]] = []
_skipping = False


@dataclass(frozen=True)
class HookPoint:
    """A name that this package replaces or wraps.

    ``owner``: the module of the name. ``name``: a function, "Class.method", or "Class.TABLE.Key" for an entry of a dict whose keys are
    classes. ``without``: the traffic that stays plain without the name, a clause. ``first``: names of the leading parameters; ``named``:
    names of further parameters. ``guards``: features that are off without the name, see :func:`lacking`. ``optional``: some versions do
    without the name, and without the change that the name stands for.
    """

    owner: str
    name: str
    without: str
    first: tuple[str, ...] = ("self",)
    named: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()
    optional: bool = False


_COMM = "deepspeed.comm.comm"
_ENGINE = "deepspeed.runtime.engine"
_PARTITION = "deepspeed.runtime.zero.partition_parameters"
_ZERO12 = "deepspeed.runtime.zero.stage_1_and_2"
_STAGE3 = "deepspeed.runtime.zero.stage3"
_PIPELINE = "deepspeed.runtime.pipe.engine"
_MOE = "deepspeed.moe.sharded_moe"
_AUTO_EP = "deepspeed.module_inject.auto_ep_layer"

_NOTHING = "nothing is coded"
_NO_SIZES = "gathers of ZeRO-3 are coded without agreed sizes and without differences by versions"
_NO_FUSING = "no gradients of tied layers are fused"
_EXACT = "all roles stay exact"
_NO_KINDS = "exchanges of experts are coded without their kinds"
_WHOLE = "its sums are coded as sums of different tensors"
_NO_MUON = "Muon's gathers of gradients and momenta have the roles of other gathers"

#: Features that a name may guard. "versions": agreements on ZeRO-3's parameters, which need to learn of all changes. "bases": bases of
#: ZeRO-3's gathers. "fused": sums of tied gradients at once. "lossy": lossy codecs.
GUARDS = ("versions", "bases", "fused", "lossy")

_TABLE = (
    HookPoint(_COMM, "TorchBackend", _NOTHING, ()),
    HookPoint(_COMM, "cdb", _NOTHING, ()),
    HookPoint(_COMM, "configure", _NOTHING, ("deepspeed_config",)),
    HookPoint(
        _COMM, "comms_logger.log_all", "its summary has no bytes of coded calls", (), ("print_log", "return_dict")
    ),
    HookPoint(_COMM, "comms_logger.reset_data", "its summary has no bytes of coded calls", ()),
    *(
        HookPoint("deepspeed.comm.torch", f"TorchBackend.{name}", f"{name} stays plain", ("self", *op.parameters))
        for name, op in OPS.items()
        if name != _OWN
    ),
    HookPoint(
        "deepspeed.comm.torch",
        "TorchBackend.batch_isend_irecv",
        "batches of sends stay plain",
        ("self", "p2p_op_list"),
    ),
    HookPoint(
        _ENGINE,
        "DeepSpeedEngine._configure_distributed_model",
        "groups of the model's layers have the role of data parallelism, and all roles stay exact",
        guards=("lossy",),
    ),
    HookPoint(
        _ENGINE,
        "DeepSpeedEngine._configure_zero_optimizer",
        "gathers of ZeRO-3 are coded without bases and agreed sizes",
    ),
    HookPoint(
        _ENGINE,
        "DeepSpeedEngine._take_model_step",
        "gathers of ZeRO-1 and ZeRO-2 are coded without differences, there are no step log and no events, and all roles stay exact",
        guards=("lossy",),
    ),
    HookPoint(
        _ENGINE,
        "DeepSpeedEngine.save_checkpoint",
        "checkpoints have no state of lossy codecs",
        ("self", "save_dir", "tag"),
    ),
    HookPoint(
        _ENGINE,
        "DeepSpeedEngine.load_checkpoint",
        f"{_NO_SIZES}, and {_EXACT}",
        ("self", "load_dir", "tag"),
        guards=("versions", "lossy"),
    ),
    HookPoint(
        _ENGINE,
        "DeepSpeedEngine._zero3_consolidated_16bit_state_dict",
        "a save of weights in one file agrees on bases module by module",
    ),
    HookPoint(_ENGINE, "DeepSpeedEngine.destroy", "bases are freed with the process"),
    HookPoint(
        _ENGINE,
        "DeepSpeedEngine._reduce_non_expert_gradients",
        _NO_FUSING,
        ("self", "grads"),
        guards=("fused",),
    ),
    HookPoint(
        _PARTITION,
        "get_allgather_dtype",
        _NO_SIZES,
        ("param", "param_ds_tensor"),
        guards=("versions", "bases"),
        optional=True,
    ),
    HookPoint(
        _PARTITION,
        "Init._convert_to_deepspeed_param",
        "gathers of ZeRO-3 are coded without bases and agreed sizes",
        ("self", "param"),
        guards=("versions", "bases"),
    ),
    HookPoint(
        _PARTITION,
        "Init._all_gather",
        "gathers of single parameters of ZeRO-3 are coded without bases and agreed sizes",
        ("self", "param_list"),
    ),
    HookPoint(
        _PARTITION,
        "Init._partition",
        _NO_SIZES,
        ("self", "param_list", "force", "has_been_updated"),
        guards=("versions",),
    ),
    HookPoint(_PARTITION, "GatheredParameters.__enter__", _NO_SIZES, guards=("versions",)),
    HookPoint(
        _STAGE3,
        "DeepSpeedZeRoOffload.pre_sub_module_forward_function",
        _NO_SIZES,
        ("self", "sub_module"),
        guards=("versions",),
    ),
    HookPoint(_STAGE3, "DeepSpeedZeroOptimizer_Stage3.step", _NO_SIZES, guards=("versions",)),
    HookPoint(_STAGE3, "DeepSpeedZeroOptimizer_Stage3.load_state_dict", _NO_SIZES, guards=("versions",)),
    HookPoint(
        _STAGE3,
        "DeepSpeedZeroOptimizer_Stage3.set_full_hp_param",
        _NO_SIZES,
        ("self", "value", "param", "optim_state_key"),
        guards=("versions",),
        optional=True,
    ),
    HookPoint(
        _ZERO12,
        "DeepSpeedZeroOptimizer.allreduce_and_copy_with_multiple_ranks",
        "sums of gradients of ZeRO-1 and ZeRO-2 go to all ranks, not to their owners only",
        ("self", "small_bucket"),
        ("process_group", "bucket_ranks"),
    ),
    HookPoint(_STAGE3, "DeepSpeedZeroOptimizer_Stage3._apply_muon_to_accumulated_grads", _NO_MUON, optional=True),
    HookPoint(_ZERO12, "DeepSpeedZeroOptimizer._apply_muon_updates_cpu_offload", _NO_MUON, optional=True),
    HookPoint(_PIPELINE, "PipelineEngine.__init__", f"{_NO_FUSING}, and {_EXACT}", guards=("fused", "lossy")),
    HookPoint(_PIPELINE, "PipelineEngine.train_batch", _EXACT, guards=("lossy",)),
    HookPoint(_PIPELINE, "PipelineEngine.reset_activation_shape", _EXACT, guards=("lossy",)),
    HookPoint(_PIPELINE, "PipelineEngine._INSTRUCTION_MAP.ReduceTiedGrads", _NO_FUSING, guards=("fused",)),
    HookPoint(_PIPELINE, "PipelineEngine._INSTRUCTION_MAP.ReduceGrads", _NO_FUSING, guards=("fused",)),
    HookPoint(_MOE, "MOELayer.forward", _NO_KINDS),
    HookPoint(_MOE, "_AllToAll.forward", _NO_KINDS, ("ctx",)),
    HookPoint(_MOE, "_AllToAll.backward", _NO_KINDS, ("ctx",)),
    HookPoint(_AUTO_EP, "AutoEPMoELayer.forward", _NO_KINDS),
    HookPoint(_AUTO_EP, "_AllToAllV.forward", _NO_KINDS, ("ctx",)),
    HookPoint(_AUTO_EP, "_AllToAllV.backward", _NO_KINDS, ("ctx",)),
    HookPoint("deepspeed.moe.ep_tp_dispatch", "_AllGatherVariableRows.backward", _WHOLE, ("ctx",)),
    HookPoint("deepspeed.module_inject.auto_ep_folding", "reduce_autoep_folding_gradient", _WHOLE, ()),
)
#: Name -> point.
POINTS: dict[str, HookPoint] = {point.name: point for point in _TABLE}

_unfit: dict[str, str] = {}  # name of a point -> its problem, such as "has no A.b"
_said: set[str] = set()


def fitting(name: str, owner: Any) -> Any:
    """Return the object that the point ``name`` stands for; None, with a note for :func:`lines`, where it is missing or takes other
    parameters.

    Args:
        name: a key of :data:`POINTS`.
        owner: the object with the last part of the name: a module, a class, or a dict whose keys are classes; None where it is missing.
    """
    point = POINTS[name]
    found = _member(owner, name.rpartition(".")[2])
    problem = _problem(point, found)
    if problem:
        _unfit[name] = problem
    else:
        _unfit.pop(name, None)
    return None if problem or found is _ABSENT else found


def fits(name: str, owner: Any) -> bool:
    """As :func:`fitting`, for a name whose value may be None; return whether the name is there and fits."""
    fitting(name, owner)
    return name not in _unfit


def lacking(guard: str) -> str:
    """Return why a feature of :data:`GUARDS` is off, a clause such as "this DeepSpeed has no A.b"; "" where nothing keeps it off."""
    if not _unfit:
        return ""
    found = [problem for name, problem in _unfit.items() if guard in POINTS[name].guards]
    return f"this DeepSpeed {'; '.join(found)}" if found else ""


def problems() -> dict[str, str]:
    """Return the points that do not fit, by module and name, each with its problem and the traffic that stays plain."""
    return {f"{POINTS[name].owner}.{name}": f"{problem}: {POINTS[name].without}" for name, problem in _unfit.items()}


def lines() -> list[str]:
    """Return a line for each point that does not fit; every line once."""
    new = [name for name in _unfit if name not in _said]
    _said.update(new)
    return [
        f"[ds_zipccl] {_release(POINTS[name].owner)} {_unfit[name]} in {POINTS[name].owner}: {POINTS[name].without}; training goes on"
        for name in new
    ]


def running(original: Callable[..., Any], variable: ContextVar[_T], value: _T) -> Callable[..., Any]:
    """Return the function ``original``, during whose calls ``variable`` has ``value``. The mark ``ds_zipccl`` is on it."""

    @functools.wraps(original)
    def noted(*args: Any, **kwargs: Any) -> Any:
        token = variable.set(value)
        try:
            return original(*args, **kwargs)
        finally:
            variable.reset(token)

    noted.ds_zipccl = True  # type: ignore[attr-defined]
    return untraced_frame(noted)


def declare(points: Iterable[HookPoint]) -> None:
    """Add points to :data:`POINTS`: those of a table that another file has."""
    POINTS.update({point.name: point for point in points})


def misfit(function: Callable[..., Any], first: tuple[str, ...], named: tuple[str, ...] = ()) -> str:
    """Return the parameters of a function, as a text, where its leading ones are not ``first`` or one of ``named`` is missing; "" where
    they are. Some decorators hide parameters behind ``*args`` and ``**kwargs``: then the parameters in front of these count."""
    if not first and not named:
        return ""
    try:
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function without a readable signature
        return ""
    one = inspect.Parameter
    kinds = {parameter.kind for parameter in parameters.values()}
    if {one.VAR_POSITIONAL, one.VAR_KEYWORD} <= kinds:
        by_place = (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        leading = [name for name, parameter in parameters.items() if parameter.kind in by_place]
        same = all(got == wanted for got, wanted in zip(leading, first, strict=False))
    else:
        same = tuple(parameters)[: len(first)] == first and all(name in parameters for name in named)
    return "" if same else f"({', '.join(parameters)})"


def _problem(point: HookPoint, found: Any) -> str:
    if found is _ABSENT:
        return "" if point.optional else f"has no {point.name}"
    got = misfit(found, point.first, point.named) if point.first or point.named else ""
    wanted = ", ".join((*point.first, *point.named))
    return f"has another {point.name}, got the parameters {got}, wanted ({wanted})" if got else ""


def _member(owner: Any, name: str) -> Any:
    if isinstance(owner, dict):
        return next((value for key, value in owner.items() if getattr(key, "__name__", "") == name), _ABSENT)
    return _ABSENT if owner is None else getattr(owner, name, _ABSENT)  # None has an __init__ too


def _release(owner: str) -> str:
    """Return the name and the version of the package of a module, such as "DeepSpeed 0.19.8"."""
    package = owner.partition(".")[0]
    name = {"deepspeed": "DeepSpeed"}.get(package, package)
    try:
        return f"{name} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"this {name}"


# ---- functions that torch.compile does not trace
#
# Ranks compile a frame again at different times, because their tensors have different sizes, and one rank may give up before the others do.
# A function that decides which messages travel must therefore run alike in compiled programs and in others.


def untraced_frame(function: _F) -> _F:
    """Return ``function``, which :func:`skip_frames` covers. Functions that it calls may be compiled."""
    _functions.append(function)
    if _skipping:
        _skip(function)
    return function


def skip_frames() -> None:
    """Keep torch.compile out of all functions of :func:`untraced_frame` from now on. Imports torch's compiler, which takes seconds: only
    jobs that code messages call."""
    global _skipping
    _skipping = True
    for function in _functions:
        _skip(function)


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` for a traced program: the graph breaks there, and the call runs as in other programs."""
    disable = torch.compiler.disable
    why = {"reason": _NO_GRAPH} if "reason" in inspect.signature(disable).parameters else {}  # torch 2.7 and later
    return disable(function, **why)  # type: ignore[no-any-return, no-untyped-call]


def _skip(function: Callable[..., Any]) -> None:
    torch.compiler.disable(function, recursive=False)  # marks the code of the function, and returns the function itself
