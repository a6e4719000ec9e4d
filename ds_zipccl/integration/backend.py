"""The DeepSpeed communication backend: every ``deepspeed.comm`` collective goes through here and is coded or passed through."""

from __future__ import annotations

import atexit
import functools
import importlib
import inspect
import weakref
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
from deepspeed.comm.torch import TorchBackend
from torch.distributed import ReduceOp

from ds_zipccl import comm, kernels
from ds_zipccl.comm.execution import PLAIN
from ds_zipccl.comm.group_state import known, resolved
from ds_zipccl.comm.ops.reduce_to_owners import Owned
from ds_zipccl.config import ROLES, SECTION, ConfigError, ZipcclConfig, environment_section, near_misses, parse_section
from ds_zipccl.integration import autoload, banner, config_agreement, roles, zero
from ds_zipccl.ops import OPS
from ds_zipccl.policy import admission
from ds_zipccl.telemetry import counters, monitor, table
from ds_zipccl.telemetry.step_log import StepLog

#: DeepSpeed's collectives that may be coded, and those that always pass: name -> parameters, in the order of ds_zipccl.comm's.
COLLECTIVES = {name: op.parameters for name, op in OPS.items() if op.coded and hasattr(TorchBackend, name)}
_UNCODED = {name: op.parameters for name, op in OPS.items() if not op.coded}
_DEFAULTS = {
    "op": ReduceOp.SUM,
    "group": None,
    "async_op": False,
    "tag": 0,
    "src": None,
    "output_split_sizes": None,
    "input_split_sizes": None,
}
#: The calls that gather parameters.
_PARAMETERS = ("all_gather_into_tensor", "zero_param")
_NO_GRAPH = (
    "ds_zipccl codes collectives outside of compiled graphs: compile without fullgraph=True, or run with DS_ZIPCCL=0"
)

_installed: dict[str, Any] | None = None  # the section given to install()


def _collective(name: str) -> Callable[..., Any]:
    """The backend's method for one collective: the plain one, or ours once a configuration has switched coding on."""
    plain, coded = getattr(TorchBackend, name), _coded(name)

    @functools.wraps(plain)
    def method(self: ZipcclBackend, *args: Any, **kwargs: Any) -> Any:
        if self.zipccl is None:
            return plain(self, *args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return self.untraced[name](self, *args, **kwargs)
        return coded(self, *args, **kwargs)

    method.coded = coded  # type: ignore[attr-defined]
    return method


def _coded(name: str) -> Callable[..., Any]:
    """Ours for one collective."""
    plain, run, parameters = getattr(TorchBackend, name), getattr(comm, name), COLLECTIVES[name]

    @functools.wraps(plain)
    def coded(self: ZipcclBackend, *args: Any, **kwargs: Any) -> Any:
        assert self.zipccl is not None  # the method has looked
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        values: list[Any] = [given[key] if key in given else _DEFAULTS[key] for key in parameters]
        if "op" in parameters:
            values[parameters.index("op")] = self._reduce_op(values[parameters.index("op")])
        role = roles.role_of(name, given.get("group"), any(self.zero_stages), self.tensor_groups)
        if OPS[name].point_to_point and values[0].device.type != "cpu":
            counters.record_pass(role, name, _nbytes(values[0]), f"device {values[0].device.type}")
            return plain(self, *values)
        token = PLAIN.set(functools.partial(plain, self, *values))
        try:
            more = {"base": self._base(values[0], values[2])} if (name, role) == _PARAMETERS else {}
            if name == "all_reduce" and (owned := self._owned(*values, role=role)):
                return comm.reduce_to_owners(values[0], owned, *values[1:3], config=self.zipccl, role=role)
            return run(*values, config=self.zipccl, role=role, **more)
        finally:
            PLAIN.reset(token)

    return coded


def _counted(name: str) -> Callable[..., Any]:
    """The backend's method for a collective without a coded schedule."""
    plain, parameters = getattr(TorchBackend, name), _UNCODED[name]

    @functools.wraps(plain)
    def method(self: ZipcclBackend, *args: Any, **kwargs: Any) -> Any:
        if self.zipccl is not None and not torch.compiler.is_dynamo_compiling():
            given = {**dict(zip(parameters, args, strict=False)), **kwargs}
            role = roles.role_of(name, given.get("group"), any(self.zero_stages), self.tensor_groups)
            counters.record_pass(role, name, _nbytes(given["tensor"]), f"no coded schedule for {name}")
        return plain(self, *args, **kwargs)

    return method


def _nbytes(tensor: Any) -> int:
    """Bytes of a tensor of any layout."""
    return int(tensor.numel() * tensor.element_size())


class ZipcclBackend(TorchBackend):  # type: ignore[misc]
    """DeepSpeed's TorchBackend with coded collectives; a pass-through until a configuration switches it on."""

    zipccl: ZipcclConfig | None = None
    step_log: StepLog | None = None  # rank 0's, where the section names a file
    zero_stages: frozenset[int] = frozenset()  # of the engines of this process
    tensor_groups: Collection[Any] = ()  # of the layers of their models
    untraced: Mapping[str, Callable[..., Any]] = {}  # the coded collectives, as torch.compile calls them
    stepping: int = 0  # the stage of the engine that is taking a step
    _section: str | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if _override() is not None:
            self.configure(None)

    def batch_isend_irecv(self, p2p_op_list: list[Any]) -> list[Any]:
        """DeepSpeed's: each send and receive as by :meth:`isend` and :meth:`irecv`, which the other end may use as well."""
        if self.zipccl is None:
            return super().batch_isend_irecv(p2p_op_list)  # type: ignore[no-any-return]
        ours = [
            op for op in p2p_op_list if op.tensor.device.type == "cpu"
        ]  # each by itself, as the other end decides by it alone
        others = [op for op in p2p_op_list if op.tensor.device.type != "cpu"]
        handles = super().batch_isend_irecv(others) if others else []
        handles += [getattr(self, op.op)(op.tensor, op.peer, op.group, op.tag) for op in ours]
        return [handle for handle in handles if handle is not None]

    def _base(self, output: torch.Tensor, group: Any) -> comm.Base | None:
        """What ranks may hold of the parameters that a gather into ``output`` brings: ZeRO-1 and 2 gather in place, in their steps,
        ZeRO-3 into new memory."""
        return comm.IN_PLACE if self.stepping in (1, 2) else zero.base_of(output, group)

    def _owned(self, tensor: torch.Tensor, op: Any, group: Any, later: bool, *, role: str) -> Owned | None:
        """Whose the parts of what is all-reduced are, where only they need the sum; None where all ranks do, or nobody knows."""
        owned, reason = zero.owned(tensor, op, group, later)
        assert self.zipccl is not None  # asked for by a coded collective
        if self.zipccl.owner_only == "off":
            return None
        if (
            reason
            and role == "zero_grad"
            and self.zero_stages & {1, 2}
            and not admission.is_small(_nbytes(tensor), self.zipccl)
        ):
            counters.record_whole(role, "all_reduce", reason)
        return owned

    def configure(self, section: dict[str, Any] | None) -> None:
        """Agree on the configuration with all ranks and switch coding on or off. A collective: every rank calls it.

        Args:
            section: the ``"zipccl"`` section of the DeepSpeed config, None where it has none. ``DS_ZIPCCL`` and then the section
                given to :func:`install` come first.

        Raises:
            ConfigError: invalid, different between ranks, or different from what another engine of this process uses.
        """
        override = _override()
        text = config_agreement.canonical(override if override is not None else section)
        if torch.distributed.get_world_size() > 1:
            config_agreement.agree(text, _timeout())
        if text in (config_agreement.ABSENT, self._section):
            return
        config = parse_section(override if override is not None else section)
        if self._section is not None:
            raise ConfigError(
                f'this process already runs with "{SECTION}": {self._section}, another engine asks for {text}; '
                "communication is shared by all engines of a process: give them the same section"
            )
        self._section = text
        if not config.enabled:
            return
        kernels.route(config.route)  # build now, not in the middle of the first step
        self.untraced = {name: _untraced(getattr(type(self), name).coded) for name in COLLECTIVES}
        self.zipccl = config
        profile = comm.calibrate() if _measurable(config) else None
        if torch.distributed.get_rank() == 0:
            print(banner.banner(config, profile, banner.passed_here()), flush=True)
            atexit.register(_print_table, "at the end")
            self.step_log = StepLog(config.step_log) if config.step_log else None


for _name in COLLECTIVES:
    setattr(ZipcclBackend, _name, _collective(_name))
for _name in _UNCODED:
    setattr(ZipcclBackend, _name, _counted(_name))


def _untraced(coded: Callable[..., Any]) -> Callable[..., Any]:
    """A collective that torch.compile calls as it is: a graph breaks there."""
    disable = torch.compiler.disable
    why = {"reason": _NO_GRAPH} if "reason" in inspect.signature(disable).parameters else {}  # torch 2.7 and later
    return disable(coded, **why)  # type: ignore[no-any-return, no-untyped-call]


def _timeout() -> timedelta:
    """How long the job's collectives wait for a rank."""
    group = resolved(None)
    devices = dict(pair.split(":") for pair in torch.distributed.get_backend_config(group).split(","))
    default = torch.distributed.distributed_c10d.default_pg_timeout
    try:
        return getattr(group._get_backend(torch.device(next(iter(devices)))).options, "_timeout", default)
    except (AttributeError, RuntimeError):  # a backend without options
        return default


def _override() -> dict[str, Any] | None:
    """The section that wins over the DeepSpeed config, if any."""
    from_environment = environment_section()
    return from_environment if from_environment is not None else _installed


def _measurable(config: ZipcclConfig) -> bool:
    """Whether some role's schedules compete, over a link that can be measured."""
    competing = any(config.mode_of(role) == "auto" for role in ROLES)
    members = known(None)
    return competing and members is not None and members.size > 1 and members.backend("cpu") == "gloo"


def _print_table(when: str) -> None:
    if counters.rows():
        print(f"[ds_zipccl] traffic of rank 0 {when}\n{table.render()}", flush=True)


def adopt_comm(module: Any) -> None:
    """Make ``deepspeed.comm.comm`` build and use our backend, and show us every configuration."""
    module.TorchBackend = ZipcclBackend
    if type(module.cdb) is TorchBackend:
        module.cdb.__class__ = ZipcclBackend
    if hasattr(module.configure, "ds_zipccl"):
        return
    original = module.configure

    @functools.wraps(original)
    def configure(deepspeed_config: Any = None, *args: Any, **kwargs: Any) -> None:
        original(deepspeed_config, *args, **kwargs)
        param_dict = getattr(deepspeed_config, "_param_dict", None)
        # Without process groups yet (init_distributed(config=...)) the engine's own call follows.
        if param_dict is not None and isinstance(module.cdb, ZipcclBackend):
            misspelt = near_misses(param_dict) if SECTION not in param_dict else []
            if misspelt:
                raise ConfigError(f'unknown key "{misspelt[0]}" in the DeepSpeed config: did you mean "{SECTION}"?')
            module.cdb.zero_stages |= {(param_dict.get("zero_optimization") or {}).get("stage", 0)}
            module.cdb.configure(param_dict.get(SECTION))

    configure.ds_zipccl = True  # type: ignore[attr-defined]
    module.configure = configure
    package = importlib.import_module("deepspeed.comm")
    if getattr(package, "configure", None) is original:  # its star import came before us
        package.configure = configure  # type: ignore[attr-defined]


def adopt_engine(module: ModuleType) -> None:
    """See what engines (and the pipeline engine, their subclass) do that matters here."""
    engine = module.DeepSpeedEngine
    for name, around in _AROUND.items():
        original = getattr(engine, name)
        if not hasattr(original, "ds_zipccl"):
            setattr(engine, name, _surrounded(original, around))


def _surrounded(original: Callable[..., Any], around: Callable[[Any, Callable[[], Any]], Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(self, functools.partial(original, self, *args, **kwargs))

    method.ds_zipccl = True  # type: ignore[attr-defined]
    return method


def adopt_zero3(module: ModuleType) -> None:
    """Know which parameters a gather of ZeRO-3 is of."""
    zero.watch_gathers(module)


def adopt_zero12(module: ModuleType) -> None:
    """Know whose the parts of a bucket of gradients are that ZeRO-1 or ZeRO-2 all-reduces."""
    zero.watch_buckets(module.DeepSpeedZeroOptimizer)


def _configure_zero(engine: Any, original: Callable[[], Any]) -> Any:
    """After ZeRO-3's optimizer: memory for the base of its differences, where the config wants it. A collective."""
    optimizer = original()
    config = getattr(_cdb(), "zipccl", None)
    if config is not None and config.zero3_base != "off" and engine.zero_optimization_stage() == 3:
        engine.ds_zipccl_kept, said = zero.keep(engine.module.parameters(), config, engine.device)
        if torch.distributed.get_rank() == 0:
            print(f"[ds_zipccl] zero3_base {config.zero3_base}: {said}", flush=True)
    return optimizer


def _learn_groups(engine: Any, original: Callable[[], Any]) -> Any:
    """After the model is in place: the groups of its tensor parallel layers."""
    result = original()
    cdb = _cdb()
    if isinstance(cdb, ZipcclBackend):
        cdb.tensor_groups = weakref.WeakSet([*cdb.tensor_groups, *roles.tensor_groups(engine.module)])
    return result


def _take_step(engine: Any, original: Callable[[], Any]) -> Any:
    """Around optimizer steps: the step log, the table and the monitor."""
    cdb = _cdb()
    log, config = getattr(cdb, "step_log", None), getattr(cdb, "zipccl", None)
    if config is None:
        return original()
    # The rates of this step: at its end the scheduler sets the next ones.
    rates = [float(rate) for rate in engine.get_lr()] if log is not None else []
    cdb.stepping = engine.zero_optimization_stage()
    try:
        result = original()
    finally:
        cdb.stepping = 0
    if log is not None:
        log.write(engine.global_steps, rates)
    if config.log_interval and not engine.global_steps % config.log_interval:
        if torch.distributed.get_rank() == 0:
            _print_table(f"after {engine.global_steps} steps")
        if engine.monitor.enabled:
            engine.monitor.write_events(monitor.events(engine.global_samples))
    return result


def _destroy(engine: Any, original: Callable[[], Any]) -> Any:
    """With the engine goes the memory for its differences: DeepSpeed does not let go of the engine itself."""
    engine.ds_zipccl_kept = None
    return original()


def _cdb() -> Any:
    return importlib.import_module("deepspeed.comm.comm").cdb


#: DeepSpeedEngine's methods -> what is called instead, with the engine and the original.
_AROUND = {
    "_configure_distributed_model": _learn_groups,
    "_configure_zero_optimizer": _configure_zero,
    "_take_model_step": _take_step,
    "destroy": _destroy,
}


def install(section: dict[str, Any] | None = None) -> None:
    """Put the backend into DeepSpeed by a line of code, where the ``torch.backends`` entry point is not wanted or not installed.

    Call it any time before ``deepspeed.initialize``; repeating it does no harm. ``DS_ZIPCCL=0`` turns it into nothing.

    Args:
        section: used instead of the ``"zipccl"`` section of every DeepSpeed config in this process, for example ``{"enabled": True}``.

    Raises:
        ConfigError: the section is invalid.
    """
    global _installed
    from_environment = environment_section()
    if from_environment is not None and not from_environment.get("enabled", True):
        return
    if section is not None:
        parse_section(section)
        _installed = dict(section)
    for name, hook in autoload.HOOKS.items():
        globals()[hook](importlib.import_module(name))
    autoload.watch()


autoload.adjust_waiting()
