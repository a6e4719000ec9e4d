"""Hooks into DeepSpeed's modules: each function adjusts one module right after its execution. Repeating a hook does nothing."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from deepspeed.comm.torch import TorchBackend

from ds_zipccl.comm.device import choice
from ds_zipccl.comm.device.sizes import finish
from ds_zipccl.comm.device.streams import streams_of
from ds_zipccl.comm.host.repeats import memory as repeats
from ds_zipccl.config import SECTION, ConfigError, ZipcclConfig, near_misses, parse_section
from ds_zipccl.integration import bypassed, hook_points, moe_calls, roles
from ds_zipccl.integration.backend import ZipcclBackend
from ds_zipccl.integration.bypassed import Facts
from ds_zipccl.integration.job import Job, overriding_section
from ds_zipccl.integration.lossy import calls as lossy_calls
from ds_zipccl.integration.lossy import checkpoints, fused_embedding, pipeline, powersgd
from ds_zipccl.integration.lossy import state as lossy_state
from ds_zipccl.integration.zero import buckets, gathers, versions
from ds_zipccl.telemetry import comms_log, monitor, table

#: DeepSpeed's class, by name, that stands for the optimizer of ZeRO-3 where nothing is trained.
_WITHOUT_STEPS = "DeepSpeedZeRoOffload"


def adopt_comm(module: Any) -> None:
    """Let ``deepspeed.comm.comm`` build and use our backend, and show the backend every DeepSpeed config."""
    if not all([hook_points.fits(name, module) for name in ("TorchBackend", "cdb", "configure")]):
        for line in hook_points.lines():
            warnings.warn(line, RuntimeWarning, stacklevel=2)
        return
    module.TorchBackend = ZipcclBackend
    watch_comms_logger(module)
    if type(module.cdb) is TorchBackend:
        ZipcclBackend.adopt(module.cdb)
    if hasattr(module.configure, "ds_zipccl"):
        return
    original = module.configure

    @functools.wraps(original)
    def configure(deepspeed_config: Any = None, *args: Any, **kwargs: Any) -> None:
        original(deepspeed_config, *args, **kwargs)
        param_dict = getattr(deepspeed_config, "_param_dict", None)
        # Before there are process groups (init_distributed(config=...)) nothing happens: the call of the engine follows.
        if param_dict is not None and isinstance(module.cdb, ZipcclBackend):
            misspelled = near_misses(param_dict) if SECTION not in param_dict else []
            if misspelled:
                raise ConfigError(f'unknown key "{misspelled[0]}" in the DeepSpeed config: did you mean "{SECTION}"?')
            module.cdb.configure(param_dict.get(SECTION), bypassed.zero_section(param_dict).get("stage", 0))
            module.cdb.job.tell(bypassed.lines(Facts(param_dict)))
        elif param_dict is not None and torch.distributed.is_initialized():
            _say_not_adopted(module.cdb, param_dict)

    configure.ds_zipccl = True  # type: ignore[attr-defined]
    module.configure = configure
    package: Any = importlib.import_module("deepspeed.comm")
    if getattr(package, "configure", None) is original:  # the package has copied the name already
        package.configure = configure


def _say_not_adopted(backend: Any, param_dict: Mapping[str, Any]) -> None:
    """Print, on rank 0 of a job that asks for coding, that a backend of DeepSpeed is not ours. ``CCLBackend`` stays as it is: its sums and
    broadcasts are calls of oneCCL, which ours would replace by calls of torch, and no schedule of ours runs on a ccl group."""
    section = overriding_section()
    section = param_dict.get(SECTION) if section is None else section
    if section is not None and parse_section(section).enabled and torch.distributed.get_rank() == 0:
        for line in bypassed.lines(Facts(backend=getattr(backend, "name", ""))):
            print(f"[ds_zipccl] {line}", flush=True)


def watch_comms_logger(module: ModuleType) -> None:
    """Let ``log_summary()`` and ``reset_log()`` of ``deepspeed.comm`` serve :mod:`ds_zipccl.telemetry.comms_log` too: the summary has
    logical and wire bytes of coded calls. Repeating does nothing.

    Args:
        module: ``deepspeed.comm.comm``.
    """
    logger = getattr(module, "comms_logger", None)
    log_all = hook_points.fitting("comms_logger.log_all", logger)
    reset_data = hook_points.fitting("comms_logger.reset_data", logger)
    if logger is None or log_all is None or reset_data is None or hasattr(log_all, "ds_zipccl"):
        return
    signature = inspect.signature(log_all)

    @functools.wraps(log_all)
    def summarize(*args: Any, **kwargs: Any) -> Any:
        found = log_all(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        text = comms_log.render() if given.arguments["print_log"] else ""
        if text:
            print(text, flush=True)
        coded = comms_log.summary()
        if coded and isinstance(found, dict):
            found[comms_log.KEY] = coded
        return found

    @functools.wraps(reset_data)
    def reset(*args: Any, **kwargs: Any) -> Any:
        comms_log.reset()
        return reset_data(*args, **kwargs)

    summarize.ds_zipccl = True  # type: ignore[attr-defined]
    logger.log_all, logger.reset_data = summarize, reset


def adopt_engine(module: ModuleType) -> None:
    """Surround the methods of ``DeepSpeedEngine``, and of its subclass the pipeline engine, that :data:`_AROUND` names."""
    _surround(module, "DeepSpeedEngine", _AROUND)
    lossy_calls.watch(module)
    fused_embedding.watch_reductions(module)


def adopt_zero3(module: ModuleType) -> None:
    """Learn the parameters of ZeRO-3's gathers, and their changes, from ``deepspeed.runtime.zero.partition_parameters``."""
    gathers.watch_gathers(module)
    versions.watch_partitions(getattr(module, "Init", None), getattr(module, "GatheredParameters", None))


def adopt_stage3(module: ModuleType) -> None:
    """Learn of changes of ZeRO-3's parameters, of its gradients and of its passes, from ``deepspeed.runtime.zero.stage3``."""
    optimizer = getattr(module, "DeepSpeedZeroOptimizer_Stage3", None)
    versions.watch_optimizer(optimizer)
    versions.watch_passes(getattr(module, "DeepSpeedZeRoOffload", None))
    roles.watch_muon(optimizer, "DeepSpeedZeroOptimizer_Stage3._apply_muon_to_accumulated_grads")
    lossy_calls.watch(module)


def adopt_zero12(module: ModuleType) -> None:
    """Learn the gradient buckets of ZeRO-1 and ZeRO-2, and their owners, from ``deepspeed.runtime.zero.stage_1_and_2``."""
    optimizer = getattr(module, "DeepSpeedZeroOptimizer", None)
    buckets.watch_buckets(optimizer)
    roles.watch_muon(optimizer, "DeepSpeedZeroOptimizer._apply_muon_updates_cpu_offload")
    lossy_calls.watch(module)


def adopt_auto_tp(module: ModuleType) -> None:
    """Learn the sums of AutoTP's layers from ``deepspeed.module_inject.layers``."""
    lossy_calls.watch(module)


def adopt_pipeline(module: ModuleType) -> None:
    """Learn the sends between the stages of a pipeline, and its batches, from ``deepspeed.runtime.pipe.engine``."""
    _surround(module, "PipelineEngine", _AROUND_PIPELINE)
    lossy_calls.watch(module)
    fused_embedding.watch(module)


def adopt_moe(module: ModuleType) -> None:
    """Learn the kinds of all-to-alls of DeepSpeed's MoE layer from ``deepspeed.moe.sharded_moe``."""
    moe_calls.watch_layer(module, "MOELayer", "_AllToAll")


def adopt_auto_ep(module: ModuleType) -> None:
    """Learn the kinds of all-to-alls of AutoEP's MoE layer from ``deepspeed.module_inject.auto_ep_layer``."""
    moe_calls.watch_layer(module, "AutoEPMoELayer", "_AllToAllV")


def adopt_folded_rows(module: ModuleType) -> None:
    """Learn the sums of equal tensors in ``deepspeed.moe.ep_tp_dispatch``."""
    moe_calls.watch_rows(module)


def adopt_folding(module: ModuleType) -> None:
    """Learn the sums of equal tensors in ``deepspeed.module_inject.auto_ep_folding``."""
    moe_calls.watch_gradients(module)


def say_late() -> None:
    """Print, on rank 0 of a job that has begun, lines about names of a module that DeepSpeed has loaded since."""
    backend = getattr(sys.modules.get("deepspeed.comm.comm"), "cdb", None)
    begun = isinstance(backend, ZipcclBackend) and backend.job.config is not None
    if begun and torch.distributed.get_rank() == 0:
        for line in hook_points.lines():
            print(line, flush=True)


def _surround(module: ModuleType, owner: str, table: Mapping[str, Callable[[Any, Callable[[], Any]], Any]]) -> None:
    engine = getattr(module, owner, None)
    for name, around in table.items():
        original = hook_points.fitting(f"{owner}.{name}", engine)
        if original is not None and not hasattr(original, "ds_zipccl"):
            setattr(engine, name, _surrounded(original, around))


def _surrounded(original: Callable[..., Any], around: Callable[[Any, Callable[[], Any]], Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(self, functools.partial(original, self, *args, **kwargs))

    method.ds_zipccl = True  # type: ignore[attr-defined]
    return method


def _job() -> Job | None:
    """Return the job of this process, None while DeepSpeed has no backend of ours."""
    backend = getattr(importlib.import_module("deepspeed.comm.comm"), "cdb", None)
    return backend.job if isinstance(backend, ZipcclBackend) else None


def _learn_groups(engine: Any, original: Callable[[], Any]) -> Any:
    """Note the groups that the layers hold once the model is in place, and refuse settings that the engine cannot keep."""
    result = original()
    job = _job()
    if job is not None:
        job.learn_groups(engine.module)
        if job.config is not None:
            job.tell(bypassed.lines(Facts(classes=bypassed.classes_of(engine.module))))
            powersgd.refuse(engine, job.config)
            fused_embedding.begin_engine(engine, job.config)
    return result


def _configure_zero(engine: Any, original: Callable[[], Any]) -> Any:
    """Allocate the bases of ZeRO-3's differences after its optimizer is made, if the section asks for bases, and agree on the sizes of
    the frames of its parameters. A collective."""
    optimizer = original()
    job = _job()
    config = None if job is None else job.config
    if config is not None and engine.zero_optimization_stage() < 3:
        powersgd.adopt(engine, optimizer)
    if config is None or engine.zero_optimization_stage() != 3:
        return optimizer
    versions.begin(optimizer, engine.module.named_parameters(), config, engine.device)
    if config.zero3_base != "off" and not hook_points.lacking("bases"):
        engine.ds_zipccl_bases, said = gathers.allocate_bases(
            engine.module.parameters(),
            config,
            engine.device,
            versions.agreed_of,
            trains=type(optimizer).__name__ != _WITHOUT_STEPS,
        )
        if said and torch.distributed.get_rank() == 0:
            print(f"[ds_zipccl] zero3_base {config.zero3_base}: {said}", flush=True)
    return optimizer


def _take_step(engine: Any, original: Callable[[], Any]) -> Any:
    """Surround an optimizer step; write the step log, the table and the monitor's events after it."""
    job = _job()
    if job is None or job.config is None:
        return original()
    # Read before the step: at its end the scheduler sets the rates of the next step.
    rates = [float(rate) for rate in engine.get_lr()] if job.step_log is not None else []
    try:
        with job.step(engine.zero_optimization_stage()), lossy_state.stepping(engine, job.config.lossy_roles):
            result = original()
    finally:  # also where the step fails on this rank alone: the other ranks forget too
        repeats.forget()
    choice.end_step(engine)
    if job.step_log is not None:
        job.step_log.write(engine.global_steps, rates)
    interval = job.config.log_interval
    if interval and not engine.global_steps % interval:
        if torch.distributed.get_rank() == 0:
            table.show(f"after {engine.global_steps} steps")
        if engine.monitor.enabled:
            engine.monitor.write_events(monitor.events(engine.global_samples))
    return result


def _save_checkpoint(engine: Any, original: Callable[[], Any]) -> Any:
    """Save the state of lossy codecs with a checkpoint."""
    if config := _lossy_config():
        checkpoints.save(engine, config, checkpoints.arguments(original))
    return original()


def _load_checkpoint(engine: Any, original: Callable[[], Any]) -> Any:
    """Surround the load of a checkpoint, which changes all parameters."""
    with versions.changing(engine.optimizer):
        found = original()
    if config := _lossy_config():
        checkpoints.load(engine, config, checkpoints.arguments(original), found[0] is not None)
    return found


def _save_weights(engine: Any, original: Callable[[], Any]) -> Any:
    """Surround a save of ZeRO-3's weights in one file, which gathers them module by module."""
    with versions.saving(engine.optimizer):
        return original()


def _lossy_config() -> ZipcclConfig | None:
    """Return the config of this process, None where no role is lossy."""
    job = _job()
    return job.config if job is not None and job.config is not None and job.config.lossy_roles else None


def _train_batch(engine: Any, original: Callable[[], Any]) -> Any:
    """Count the micro-batches of a pipeline from 0, also where the batch before has failed; in jobs with lossy roles."""
    if _lossy_config():
        pipeline.begin_batch(engine)
    return original()


def _start_pipeline(engine: Any, original: Callable[[], Any]) -> Any:
    """Make the groups of weights that stages share once the engine is complete. A collective."""
    original()
    job = _job()
    if job is not None:
        job.tell(bypassed.lines(Facts(device=engine.device.type, pipelined=engine.num_stages > 1)))
        fused_embedding.begin(engine, job)


def _reset_shapes(engine: Any, original: Callable[[], Any]) -> Any:
    """Forget the state of a pipeline's links: tensors of other shapes follow."""
    if _lossy_config():
        pipeline.forget_shapes(engine)
    return original()


def _destroy(engine: Any, original: Callable[[], Any]) -> Any:
    """Free the bases and the kept messages with the engine: DeepSpeed keeps references to the engine itself. Copies may still be queued on
    a device."""
    repeats.forget()
    versions.end(getattr(engine, "optimizer", None))  # an engine whose start has failed has none
    if getattr(engine, "ds_zipccl_bases", None):
        finish(streams_of(engine.device))
    engine.ds_zipccl_bases = None
    lossy_state.forget(engine)
    return original()


#: Method of DeepSpeedEngine -> function called in its place, with the engine and the original.
_AROUND: dict[str, Callable[[Any, Callable[[], Any]], Any]] = {
    "_configure_distributed_model": _learn_groups,
    "_configure_zero_optimizer": _configure_zero,
    "_take_model_step": _take_step,
    "save_checkpoint": _save_checkpoint,
    "load_checkpoint": _load_checkpoint,
    "_zero3_consolidated_16bit_state_dict": _save_weights,
    "destroy": _destroy,
}
#: The same of PipelineEngine.
_AROUND_PIPELINE: dict[str, Callable[[Any, Callable[[], Any]], Any]] = {
    "__init__": _start_pipeline,
    "train_batch": _train_batch,
    "reset_activation_shape": _reset_shapes,
}
