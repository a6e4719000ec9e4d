"""The hooks into DeepSpeed: the functions that are called in place of those of its engine, and the table of all of them."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from deepspeed.comm.torch import TorchBackend

from ds_zipccl.comm import engine as comm_engine
from ds_zipccl.comm.group_state import group_size
from ds_zipccl.config import SECTION, ConfigError, ZipcclConfig, near_misses, parse_section
from ds_zipccl.integration import bypassed, hints, hook_points, start_up
from ds_zipccl.integration.backend import ZipcclBackend
from ds_zipccl.integration.bypassed import Facts
from ds_zipccl.integration.hook_points import HookPoint
from ds_zipccl.integration.job import Job, overriding_section
from ds_zipccl.integration.lossy import checkpoints, fused_embedding, pipeline, powersgd
from ds_zipccl.integration.lossy import state as lossy_state
from ds_zipccl.integration.lossy.calls import Calls
from ds_zipccl.integration.zero import buckets, gathers, versions
from ds_zipccl.telemetry import comms_log, monitor, table

_COMM = "deepspeed.comm.comm"
_PARTITION = "deepspeed.runtime.zero.partition_parameters"
_REPORT = "deepspeed.env_report"
#: DeepSpeed's class, by name, that stands for the optimizer of ZeRO-3 where nothing is trained.
_WITHOUT_STEPS = "DeepSpeedZeRoOffload"
#: Kinds of the exchanges in the forward of a MoE layer, in the order of DeepSpeed's calls.
_EXCHANGES = ("dispatch", "combine")
#: Key of the order of sums among the user's own values in a checkpoint.
_RECORD = "ds_zipccl_sums"
#: Attribute of an exchange's node of the autograd graph: the kind of its forward.
_KIND = "ds_zipccl_kind"


def adopt(module: Any) -> None:
    """Adjust one of DeepSpeed's modules right after its execution. Repeating does nothing."""
    hook_points.adopt(module)
    if module.__name__ == _PARTITION:
        gathers.learn_dtype(module)
    if module.__name__ == _COMM:
        if all([hook_points.fits(name, module) for name in ("TorchBackend", "cdb", "configure")]):
            module.TorchBackend = ZipcclBackend
            if type(module.cdb) is TorchBackend:
                ZipcclBackend.adopt(module.cdb)
            return
        for line in hook_points.lines():
            warnings.warn(line, RuntimeWarning, stacklevel=2)


def _configure(original: Callable[..., Any], deepspeed_config: Any = None, *args: Any, **kwargs: Any) -> None:
    """Show our backend a DeepSpeed config."""
    original(deepspeed_config, *args, **kwargs)
    backend, param_dict = _backend(), getattr(deepspeed_config, "_param_dict", None)
    # Before there are process groups (init_distributed(config=...)) nothing happens: the call of the engine follows.
    if param_dict is not None and isinstance(backend, ZipcclBackend):
        misspelled = near_misses(param_dict) if SECTION not in param_dict else []
        if misspelled:
            raise ConfigError(f'unknown key "{misspelled[0]}" in the DeepSpeed config: did you mean "{SECTION}"?')
        backend.configure(param_dict.get(SECTION), bypassed.zero_section(param_dict).get("stage", 0))
        backend.job.tell(bypassed.lines(Facts(param_dict)))
    elif param_dict is not None and torch.distributed.is_initialized():
        _say_not_adopted(backend, param_dict)


def _say_not_adopted(backend: Any, param_dict: Mapping[str, Any]) -> None:
    """Print, on rank 0 of a job that asks for coding, that a backend of DeepSpeed is not ours. ``CCLBackend`` stays as it is: its sums and
    broadcasts are calls of oneCCL, which ours would replace by calls of torch, and no coded schedule runs on a ccl group."""
    section = overriding_section()
    section = param_dict.get(SECTION) if section is None else section
    if section is not None and parse_section(section).enabled and torch.distributed.get_rank() == 0:
        for line in bypassed.lines(Facts(backend=getattr(backend, "name", ""))):
            print(f"[ds_zipccl] {line}", flush=True)


def _summarize(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Add logical and wire bytes of coded calls to ``deepspeed.comm.log_summary()``."""
    found = original(*args, **kwargs)
    text = comms_log.render() if hook_points.arguments(original, *args, **kwargs)["print_log"] else ""
    if text:
        print(text, flush=True)
    coded = comms_log.summary()
    if coded and isinstance(found, dict):
        found[comms_log.KEY] = coded
    return found


def _reset_log(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    comms_log.reset()
    return original(*args, **kwargs)


def say_late() -> None:
    """Print, on rank 0 of a job that has begun, lines about names of a module that DeepSpeed has loaded since."""
    job = _job()
    if job is not None and job.config is not None and torch.distributed.get_rank() == 0:
        for line in hook_points.lines():
            print(line, flush=True)


def _backend() -> Any:
    """Return the backend that DeepSpeed uses now, ours or another; None without one."""
    return getattr(sys.modules.get(_COMM), "cdb", None)


def _job() -> Job | None:
    """Return the job of this process, None while DeepSpeed lacks ZipcclBackend."""
    backend = _backend()
    return backend.job if isinstance(backend, ZipcclBackend) else None


def _learn_groups(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Note the groups that the layers hold once the model is in place, and refuse settings that the engine cannot keep."""
    result = original(engine, *args, **kwargs)
    job = _job()
    if job is not None:
        job.learn_groups(engine.module)
        if job.config is not None:
            job.tell(bypassed.lines(Facts(classes=bypassed.classes_of(engine.module))))
            powersgd.refuse(engine, job.config)
            fused_embedding.begin_engine(engine, job.config)
            groups = [engine.seq_data_parallel_group, *engine.expert_data_parallel_group.values()]
            # equal on all ranks; an mpu need not know its sizes
            if group_size(groups[0]) < torch.distributed.get_world_size() or engine.has_moe_layers:
                start_up.try_groups(job, engine.device, groups)
    return result


def _configure_zero(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Allocate the bases of ZeRO-3's differences after its optimizer is made, if the section asks for bases, and agree on the sizes of
    the frames of its parameters. A collective."""
    optimizer = original(engine, *args, **kwargs)
    job = _job()
    config = None if job is None else job.config
    if config is not None and engine.zero_optimization_stage() < 3:
        powersgd.adopt(engine, optimizer)
    if config is None or engine.zero_optimization_stage() != 3:
        return optimizer
    versions.begin(optimizer, engine.module.named_parameters(), config, engine.device)
    if config.zero3_base != "off" and not hook_points.lacking("bases"):
        engine.ds_zipccl_waiting = gathers.Waiting() if _has_room(engine) else None
        trains = type(optimizer).__name__ != _WITHOUT_STEPS
        engine.ds_zipccl_bases, said = gathers.allocate_bases(
            engine.module.parameters(), config, engine.device, trains=trains, waiting=engine.ds_zipccl_waiting
        )
        _say_bases(config, said)
    return optimizer


def _has_room(engine: Any) -> bool:
    """Return whether the config of an engine leaves it to ZeRO-3 how much memory of the device parameters take."""
    zero = engine._config.zero_config
    least = type(zero).model_fields["max_live_parameters"].default
    return zero.offload_param is None and zero.max_live_parameters >= least


def _say_bases(config: ZipcclConfig, said: str) -> None:
    if said and torch.distributed.get_rank() == 0:
        print(f"[ds_zipccl] zero3_base {config.zero3_base}: {said}", flush=True)


def _take_step(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Surround an optimizer step; write the step log, the table and the monitor's events after it."""
    job = _job()
    if job is None or job.config is None:
        return original(engine, *args, **kwargs)
    # Read before the step: at its end the scheduler sets the rates of the next step.
    rates = [float(rate) for rate in engine.get_lr()] if job.step_log is not None else []
    stage = engine.zero_optimization_stage()
    comm_engine.before_step()
    with hints.hinting(stepping=stage), lossy_state.stepping(engine, job.config.lossy_roles):
        result = original(engine, *args, **kwargs)
    comm_engine.end_step(engine)
    if waiting := getattr(engine, "ds_zipccl_waiting", None):
        found, said = waiting.end_step(job.config, engine.device)
        engine.ds_zipccl_bases += found
        _say_bases(job.config, said)
    if job.step_log is not None:
        job.step_log.write(engine.global_steps, rates)
    interval = job.config.log_interval
    if interval and not engine.global_steps % interval:
        if torch.distributed.get_rank() == 0:
            table.show(f"after {engine.global_steps} steps")
        if engine.monitor.enabled:
            engine.monitor.write_events(monitor.events(engine.global_samples))
    return result


def _report_ops(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Let ds_report list our op builders too. DeepSpeed takes none from others: its table is replaced for this call."""
    from ds_zipccl.op_builder.zipccl import BUILDERS

    report: Any = sys.modules[_REPORT]
    usual = report.ALL_OPS
    report.ALL_OPS = {**usual, **{name: builder() for name, builder in BUILDERS.items()}}
    try:
        original(*args, **kwargs)
    finally:
        report.ALL_OPS = usual


def _save_checkpoint(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Save the state of lossy codecs with a checkpoint, and the order of gradient sums as one of the user's own values."""
    given = hook_points.arguments(original, engine, *args, **kwargs)
    if config := _lossy_config():
        checkpoints.save(engine, config, given)
    job = _job()
    if job is not None and (found := start_up.record(job)):
        given["client_state"] = {**(given["client_state"] or {}), _RECORD: found}
    return original(**given)


def _load_checkpoint(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Surround the load of a checkpoint, which changes all parameters."""
    with versions.changing(engine.optimizer):
        found = original(engine, *args, **kwargs)
    if config := _lossy_config():
        checkpoints.load(engine, config, hook_points.arguments(original, engine, *args, **kwargs), found[0] is not None)
    job, (path, values) = _job(), found
    if job is not None:
        start_up.resume(job, (values or {}).pop(_RECORD, None), loaded=path is not None)
    return found


def _lossy_config() -> ZipcclConfig | None:
    """Return the config of this process, None where no role is lossy."""
    job = _job()
    return job.config if job is not None and job.config is not None and job.config.lossy_roles else None


def _train_batch(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Count the micro-batches of a pipeline from 0, also where the batch before has failed; in jobs with lossy roles."""
    if _lossy_config():
        pipeline.begin_batch(engine)
    return original(engine, *args, **kwargs)


def _start_pipeline(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Make the groups of weights that stages share once the engine is complete. A collective."""
    original(engine, *args, **kwargs)
    job = _job()
    if job is not None:
        job.tell(bypassed.lines(Facts(device=engine.device.type, pipelined=engine.num_stages > 1)))
        fused_embedding.begin(engine, job)


def _reset_shapes(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Forget the state of a pipeline's links: tensors of other shapes follow."""
    if _lossy_config():
        pipeline.forget_shapes(engine)
    return original(engine, *args, **kwargs)


def _destroy(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Free the bases with the engine: DeepSpeed keeps references to the engine itself. Copies may still be queued on a device. Where
    garbage collection destroys the engine, on one rank, the other ranks still gather from bases: those go with the parameters."""
    if hints.current().collected:
        return original(engine, *args, **kwargs)
    versions.end(getattr(engine, "optimizer", None))  # an engine whose start has failed has none
    if bases := getattr(engine, "ds_zipccl_bases", None):
        comm_engine.finish(engine.device)
    for base in bases or ():
        base.free()
    engine.ds_zipccl_bases = engine.ds_zipccl_waiting = None
    lossy_state.forget(engine)
    return original(engine, *args, **kwargs)


def _forward_layer(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Surround the forward of a MoE layer, which has two exchanges, first dispatch, then combine."""
    with hints.hinting(kind="", coming=iter(_EXCHANGES)):
        return original(layer, *args, **kwargs)


def _forward_exchange(original: Callable[..., Any], ctx: Any, *args: Any, **kwargs: Any) -> Any:
    """Tell the kind of an exchange. The node that autograd makes of it keeps the kind for the backward. A forward that activation
    checkpointing runs again in the backward thus has the kinds of a forward."""
    coming = hints.current().coming
    if coming is None:
        return original(ctx, *args, **kwargs)  # the native backward is a forward too, and its kind is set
    found = next(coming, "")
    setattr(ctx, _KIND, found)
    with _exchange(found, "forward"):
        return original(ctx, *args, **kwargs)


def _backward_exchange(original: Callable[..., Any], ctx: Any, *args: Any) -> Any:
    """Tell the kind of the backward of an exchange."""
    found = getattr(ctx, _KIND, "")
    with _exchange(found and f"{found}.bwd", "backward"):
        return original(ctx, *args)


def _exchange(kind: str, direction: str) -> AbstractContextManager[None]:
    """Tell the kind of an exchange; if it is known, lossy codecs may change the rows."""
    lossy = {"lossy": Calls(("ep",), ("all_to_all_single",), direction)} if kind else {}
    return hints.hinting(kind=kind, coming=None, **lossy)


_ENGINE = "deepspeed.runtime.engine"
_ZERO12 = "deepspeed.runtime.zero.stage_1_and_2"
_STAGE3 = "deepspeed.runtime.zero.stage3"
_PIPELINE = "deepspeed.runtime.pipe.engine"
_MOE = "deepspeed.moe.sharded_moe"
_AUTO_EP = "deepspeed.module_inject.auto_ep_layer"

_NOTHING = "nothing is coded"
_NO_LOG = "its summary has no bytes of coded calls"
_NO_GROUPS = "groups of the model's layers have the role of data parallelism, and all roles stay exact"
_NO_STEPS = "gathers of ZeRO-1 and ZeRO-2 are coded without differences, there are no step log and no events, and all roles stay exact"
_NO_STATE = "checkpoints have no state of lossy codecs"
_NO_RECORD = "gradient sums stay NCCL's by default"
_NO_BASES = "gathers of ZeRO-3 are coded without bases and agreed sizes"
_NOT_SINGLE = "gathers of single parameters of ZeRO-3 are coded without bases and agreed sizes"
_NO_SIZES = "gathers of ZeRO-3 are coded without agreed sizes and without differences by versions"
_NO_OWNERS = "sums of gradients of ZeRO-1 and ZeRO-2 go to all ranks, not to their owners only"
_NO_FUSING = "no gradients of tied layers are fused"
_EXACT = "all roles stay exact"
_NO_KINDS = "exchanges of experts are coded without their kinds"
_NO_MUON = "Muon's gathers of gradients and momenta have the roles of other gathers"

_of_comm = functools.partial(HookPoint, _COMM, without=_NOTHING, together="backend")
_of_log = functools.partial(HookPoint, _COMM, without=_NO_LOG, together="logger")
_of_engine = functools.partial(HookPoint, _ENGINE)
_of_params = functools.partial(HookPoint, _PARTITION)
_of_versions = functools.partial(HookPoint, without=_NO_SIZES, guards=("versions",))
_of_pipeline = functools.partial(HookPoint, _PIPELINE, without=_EXACT, guards=("lossy",))
_of_fusing = functools.partial(HookPoint, without=_NO_FUSING, guards=("fused",))
#: Muon's update gathers gradients and momenta, never parameters.
_of_muon = functools.partial(
    HookPoint, around=hints.during(role="zero_grad"), without=_NO_MUON, optional=True, untraced=True
)
_of_layer = functools.partial(HookPoint, without=_NO_KINDS, untraced=True)

#: The points of DeepSpeed's modules, with the functions that are called in place of DeepSpeed's.
hook_points.declare(
    _of_comm("TorchBackend", first=()),
    _of_comm("cdb", first=()),
    _of_comm("configure", _configure, ("deepspeed_config",), copies=("deepspeed.comm",)),
    _of_log("comms_logger.log_all", _summarize, (), ("print_log", "return_dict")),
    _of_log("comms_logger.reset_data", _reset_log, ()),
    _of_engine("DeepSpeedEngine._configure_distributed_model", _learn_groups, without=_NO_GROUPS, guards=("lossy",)),
    _of_engine("DeepSpeedEngine._configure_zero_optimizer", _configure_zero, without=_NO_BASES),
    _of_engine("DeepSpeedEngine._take_model_step", _take_step, without=_NO_STEPS, guards=("lossy",)),
    _of_engine(
        "DeepSpeedEngine.save_checkpoint",
        _save_checkpoint,
        ("self", "save_dir", "tag", "client_state"),
        without=f"{_NO_STATE}, {_NO_RECORD}",
        guards=("sums",),
    ),
    _of_engine(
        "DeepSpeedEngine.load_checkpoint",
        _load_checkpoint,
        ("self", "load_dir", "tag"),
        without=f"{_NO_SIZES}, {_NO_RECORD}, and {_EXACT}",
        guards=("versions", "lossy", "sums"),
    ),
    _of_engine("DeepSpeedEngine.destroy", _destroy, without="bases are freed with the process"),
    _of_engine("DeepSpeedEngine.__del__", hints.during(collected=True), guards=("bases",), optional=True),
    _of_fusing(_ENGINE, "DeepSpeedEngine._reduce_non_expert_gradients", fused_embedding.leave_out, ("self", "grads")),
    _of_params(
        "get_allgather_dtype",
        first=("param", "param_ds_tensor"),
        without=_NO_SIZES,
        guards=("versions", "bases"),
        optional=True,
    ),
    _of_params(
        "Init._convert_to_deepspeed_param",
        versions.convert,
        ("self", "param"),
        without=_NO_BASES,
        guards=("versions", "bases"),
    ),
    _of_params("Init._all_gather", gathers.gather_single, ("self", "param_list"), without=_NOT_SINGLE),
    _of_versions(_PARTITION, "Init._partition", gathers.partition, ("self", "param_list", "force", "has_been_updated")),
    _of_versions(_PARTITION, "GatheredParameters.__enter__", versions.enter_gathered),
    _of_versions(_STAGE3, "DeepSpeedZeroOptimizer_Stage3.step", versions.step),
    _of_versions(_STAGE3, "DeepSpeedZeroOptimizer_Stage3.load_state_dict", versions.load),
    # set_local_hp_param is no call of all ranks: it counts as a write to the shard.
    _of_versions(
        _STAGE3,
        "DeepSpeedZeroOptimizer_Stage3.set_full_hp_param",
        versions.set_param,
        ("self", "value", "param", "optim_state_key"),
        optional=True,
    ),
    HookPoint(
        _ZERO12,
        "DeepSpeedZeroOptimizer.allreduce_and_copy_with_multiple_ranks",
        buckets.reduce,
        ("self", "small_bucket"),
        ("process_group", "bucket_ranks"),
        _NO_OWNERS,
    ),
    _of_muon(_STAGE3, "DeepSpeedZeroOptimizer_Stage3._apply_muon_to_accumulated_grads"),
    _of_muon(_ZERO12, "DeepSpeedZeroOptimizer._apply_muon_updates_cpu_offload"),
    _of_pipeline(
        "PipelineEngine.__init__", _start_pipeline, without=f"{_NO_FUSING}, and {_EXACT}", guards=("fused", "lossy")
    ),
    _of_pipeline("PipelineEngine.train_batch", _train_batch),
    _of_pipeline("PipelineEngine.reset_activation_shape", _reset_shapes),
    _of_fusing(_PIPELINE, "PipelineEngine._INSTRUCTION_MAP.ReduceTiedGrads", fused_embedding.reduce_tied),
    _of_fusing(_PIPELINE, "PipelineEngine._INSTRUCTION_MAP.ReduceGrads", fused_embedding.reduce_others),
    *(
        point
        for owner, layer, exchange in ((_MOE, "MOELayer", "_AllToAll"), (_AUTO_EP, "AutoEPMoELayer", "_AllToAllV"))
        for point in (
            _of_layer(owner, f"{layer}.forward", _forward_layer, together=owner),
            _of_layer(owner, f"{exchange}.forward", _forward_exchange, ("ctx",), together=owner, roles=("ep",)),
            _of_layer(owner, f"{exchange}.backward", _backward_exchange, ("ctx",), together=owner),
        )
    ),
    HookPoint(_REPORT, "op_report", _report_ops, (), without="ds_report does not list our op builders", optional=True),
)
