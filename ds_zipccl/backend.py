"""The DeepSpeed communication backend: every ``deepspeed.comm`` collective goes through here and is coded or passed through."""

from __future__ import annotations

import atexit
import functools
import importlib
import inspect
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from deepspeed.comm.torch import TorchBackend
from torch.distributed import ReduceOp

import ds_zipccl
from ds_zipccl import agreement, autoload, comm, kernels, policy, stats
from ds_zipccl.comm.members import known, size_of
from ds_zipccl.comm.operation import PLAIN
from ds_zipccl.comm.owners import Owned
from ds_zipccl.config import ROLES, SECTION, ConfigError, ZipcclConfig, environment_section, near_misses, parse_section
from ds_zipccl.costs import Profile

#: DeepSpeed's collectives: name -> parameters as TorchBackend declares them, in the order of ds_zipccl.comm's.
_REDUCE = ("op", "group", "async_op")
COLLECTIVES: dict[str, tuple[str, ...]] = {
    "all_gather": ("tensor_list", "tensor", "group", "async_op"),
    "all_gather_into_tensor": ("output_tensor", "input_tensor", "group", "async_op"),
    "all_gather_coalesced": ("output_tensors", "input_tensors", "group", "async_op"),
    "reduce_scatter": ("output", "input_list", *_REDUCE),
    "reduce_scatter_tensor": ("output_tensor", "input_tensor", *_REDUCE),
    "reduce": ("tensor", "dst", *_REDUCE),
    "all_reduce": ("tensor", *_REDUCE),
    "all_reduce_coalesced": ("tensors", *_REDUCE),
    "all_to_all": ("output_tensor_list", "input_tensor_list", "group", "async_op"),
    "all_to_all_single": ("output", "input", "output_split_sizes", "input_split_sizes", "group", "async_op"),
    "broadcast": ("tensor", "src", "group", "async_op"),
    "send": ("tensor", "dst", "group", "tag"),
    "recv": ("tensor", "src", "group", "tag"),
    "isend": ("tensor", "dst", "group", "tag"),
    "irecv": ("tensor", "src", "group", "tag"),
}
_DEFAULTS = {
    "op": ReduceOp.SUM,
    "group": None,
    "async_op": False,
    "tag": 0,
    "src": None,
    "output_split_sizes": None,
    "input_split_sizes": None,
}
_P2P = ("send", "recv", "isend", "irecv")


@dataclass(frozen=True)
class _Bucket:
    """What DeepSpeed is about to all-reduce, and whose its parts are."""

    group: Any
    owned: Owned

    def fits(self, tensor: torch.Tensor, op: Any, group: Any, later: bool) -> bool:
        """Whether an all-reduce with these arguments is the one."""
        same = group is self.group and sum(numel for numel, _ in self.owned) == tensor.numel()
        return same and op == ReduceOp.SUM and not later

    def shares(self) -> list[int]:
        """Elements that each rank of the group owns."""
        shares: Counter[int] = Counter()
        for numel, owners in self.owned:
            shares.update(dict.fromkeys(owners, numel))
        return [shares[rank] for rank in range(size_of(self.group))]


#: For the next all-reduce only.
_BUCKET: ContextVar[_Bucket | None] = ContextVar("ds_zipccl_bucket", default=None)

_installed: dict[str, Any] | None = None  # the section given to install()


def _role(name: str, group: Any, zero_stage: int) -> str:
    """What a call is for, from its operation and its group (the words of ds_zipccl.config.ROLES)."""
    groups = importlib.import_module("deepspeed.utils.groups")
    if name in _P2P:
        return "pp"
    if group is not None and group is groups._TENSOR_MODEL_PARALLEL_GROUP:
        return "tp"
    if name.startswith("all_to_all"):
        return "ep" if group is None or group in groups._EXPERT_PARALLEL_GROUP.values() else "sp"
    if name.startswith("all_gather"):
        return "zero_param"
    return "zero_grad" if zero_stage and name != "broadcast" else "dp"


def _coded(name: str) -> Callable[..., Any]:
    """The backend's method for one collective."""
    plain, run, parameters = getattr(TorchBackend, name), getattr(comm, name), COLLECTIVES[name]

    @functools.wraps(plain)
    def method(self: ZipcclBackend, *args: Any, **kwargs: Any) -> Any:
        if self.zipccl is None:
            return plain(self, *args, **kwargs)
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        values = [given[key] if key in given else _DEFAULTS[key] for key in parameters]
        if "op" in parameters:
            values[parameters.index("op")] = self._reduce_op(values[parameters.index("op")])
        role = _role(name, given.get("group"), self.zero_stage)
        if name in _P2P and values[0].device.type != "cpu":
            stats.record_pass(role, name, values[0].nbytes, f"device {values[0].device.type}")
            return plain(self, *values)
        token = PLAIN.set(functools.partial(plain, self, *values))
        try:
            if name == "all_reduce" and (owned := self._owned(*values, role=role)):
                return comm.reduce_to_owners(values[0], owned, *values[1:3], config=self._settings(role), role=role)
            return run(*values, config=self._settings(role), role=role)
        finally:
            PLAIN.reset(token)

    return method


class ZipcclBackend(TorchBackend):  # type: ignore[misc]
    """DeepSpeed's TorchBackend with coded collectives; a pass-through until a configuration switches it on."""

    zipccl: ZipcclConfig | None = None
    _without_delta: ZipcclConfig | None = None
    zero_stage = 0
    _section: str | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if _override() is not None:
            self.configure(None)

    def _settings(self, role: str) -> ZipcclConfig | None:
        """The configuration for a role: ZeRO-3 gathers parameters into new memory, where no last step's are."""
        return self.zipccl if role != "zero_param" or self.zero_stage in (1, 2) else self._without_delta

    def _owned(self, tensor: torch.Tensor, op: Any, group: Any, later: bool, *, role: str) -> Owned | None:
        """Whose the parts of what is all-reduced are, where only they need the sum and it pays; None where all ranks are to get it."""
        bucket, config = _BUCKET.get(), self.zipccl
        _BUCKET.set(None)
        if config is None or config.owner_only == "off":
            return None
        reason = "the owners of the bucket are not known"
        if bucket is not None and bucket.fits(tensor, op, group, later):
            if policy.owners_pay(bucket.shares(), tensor.numel()):
                return bucket.owned
            reason = "a few ranks own most of the bucket"
        if role == "zero_grad" and self.zero_stage in (1, 2) and not policy.small(tensor.nbytes, config):
            stats.record_whole(role, "all_reduce", reason)
        return None

    def configure(self, section: dict[str, Any] | None) -> None:
        """Agree on the configuration with all ranks and switch coding on or off. A collective: every rank calls it.

        Args:
            section: the ``"zipccl"`` section of the DeepSpeed config, None where it has none. ``DS_ZIPCCL`` and then the section
                given to :func:`install` come first.

        Raises:
            ConfigError: invalid, different between ranks, or different from what another engine of this process uses.
        """
        override = _override()
        text = agreement.canonical(override if override is not None else section)
        if torch.distributed.get_world_size() > 1:
            agreement.agree(text, torch.distributed.distributed_c10d.default_pg_timeout)
        if text in (agreement.ABSENT, self._section):
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
        self.zipccl, self._without_delta = config, config.model_copy(update={"delta": "off"})
        profile = comm.calibrate() if _measurable(config) else None
        if torch.distributed.get_rank() == 0:
            print(_banner(config, profile), flush=True)
            atexit.register(_print_table, "at the end")


for _name in COLLECTIVES:
    setattr(ZipcclBackend, _name, _coded(_name))


def _override() -> dict[str, Any] | None:
    """The section that wins over the DeepSpeed config, if any."""
    from_environment = environment_section()
    return from_environment if from_environment is not None else _installed


def _measurable(config: ZipcclConfig) -> bool:
    """Whether some role's schedules compete, over a link that can be measured."""
    competing = any(config.mode_of(role) == "auto" for role in ROLES)
    members = known(None)
    return competing and members is not None and members.size > 1 and members.backend("cpu") == "gloo"


def _banner(config: ZipcclConfig, profile: Profile | None) -> str:
    routes = kernels.why()
    used = next(name for name in routes if not routes[name] and config.route in ("auto", name))
    skipped = "".join(f"; {name} not used: {reason}" for name, reason in routes.items() if reason)
    off = [role for role in ROLES if config.mode_of(role) == "never"]
    settings = config.model_dump(exclude={"enabled", "route", "roles"})
    link = ""
    if profile is not None:
        link = f"; link {8e-6 * profile.bandwidth:.0f} Mbit/s, {1e6 * profile.alpha:.0f} us"
        link += f", coding {profile.encode / 1e9:.1f} and {profile.decode / 1e9:.1f} GB/s"
    return (
        f"[ds_zipccl {ds_zipccl.__version__}] on, kernels: {used}{skipped}; "
        + ", ".join(f"{key} {value}" for key, value in settings.items())
        + link
        + (f"; passed through by config: {', '.join(off)}" if off else "")
    )


def _print_table(when: str) -> None:
    if stats.rows():
        print(f"[ds_zipccl] traffic of rank 0 {when}\n{stats.table()}", flush=True)


def adopt_comm(module: ModuleType) -> None:
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
            module.cdb.zero_stage = (param_dict.get("zero_optimization") or {}).get("stage", 0)
            module.cdb.configure(param_dict.get(SECTION))

    configure.ds_zipccl = True  # type: ignore[attr-defined]
    module.configure = configure
    package = importlib.import_module("deepspeed.comm")
    if getattr(package, "configure", None) is original:  # its star import came before us
        package.configure = configure  # type: ignore[attr-defined]


def adopt_engine(module: ModuleType) -> None:
    """Count optimizer steps of the engine (and of the pipeline engine, its subclass) for the table and the monitor."""
    engine = module.DeepSpeedEngine
    original = engine._take_model_step
    if hasattr(original, "ds_zipccl"):
        return

    @functools.wraps(original)
    def _take_model_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        _after_step(self)
        return result

    _take_model_step.ds_zipccl = True  # type: ignore[attr-defined]
    engine._take_model_step = _take_model_step


def adopt_zero12(module: ModuleType) -> None:
    """Tell :meth:`ZipcclBackend.all_reduce` whose the parts of a bucket of gradients are, when ZeRO-1 or ZeRO-2 reduces one.

    ``allreduce_and_copy_with_multiple_ranks`` all-reduces its tensors laid end to end, a copy of them (cast to the communication dtype
    if need be), and then reads of the sums those whose ``bucket_ranks`` have this rank: it adds them to this rank's partition and copies
    them back. A bucket of a single tensor is no copy but the gradient itself: there ranks that do not own it keep their own gradient
    instead of the sum, as they do in every bucket of several tensors, so that nothing in DeepSpeed may count on it. Everything but the
    all-reduce is DeepSpeed's own code.

    Left alone, so that all ranks get the sums, and counted by :func:`ds_zipccl.stats.record_whole`: ``reduce_scatter`` false,
    ``contiguous_gradients`` false and the BF16 optimizer, which reduce by other methods and copy all of it back (the norm of the BF16
    optimizer's gradients is over all of them); and ZenFlow, which looks at gradients in ways of its own. Not concerned:
    ``use_multi_rank_bucket_allreduce`` false, which reduces to owners already.
    """
    name = "allreduce_and_copy_with_multiple_ranks"
    optimizer = module.DeepSpeedZeroOptimizer
    original = getattr(optimizer, name, None)
    if original is None or hasattr(original, "ds_zipccl"):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        group, owners = given.get("process_group"), given.get("bucket_ranks")
        bucket = None
        if owners is not None and not getattr(self, "zenflow", False):
            sizes = [tensor.numel() for tensor in given["small_bucket"]]
            sets = [ranks if isinstance(ranks, frozenset) else frozenset((ranks,)) for ranks in owners]
            bucket = _Bucket(self.dp_process_group if group is None else group, list(zip(sizes, sets, strict=True)))
        token = _BUCKET.set(bucket)
        try:
            return original(self, *args, **kwargs)
        finally:
            _BUCKET.reset(token)

    method.ds_zipccl = True  # type: ignore[attr-defined]
    setattr(optimizer, name, method)


def _after_step(engine: Any) -> None:
    cdb = importlib.import_module("deepspeed.comm.comm").cdb
    config = getattr(cdb, "zipccl", None)
    if config is None or not config.log_interval or engine.global_steps % config.log_interval:
        return
    if torch.distributed.get_rank() == 0:
        _print_table(f"after {engine.global_steps} steps")
    if engine.monitor.enabled:
        engine.monitor.write_events(stats.events(engine.global_samples))


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
