"""The training job of this process: its settings, and what DeepSpeed's engines have told about themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from ds_zipccl import __version__
from ds_zipccl.comm import engine as comm_engine
from ds_zipccl.comm.group_state import group_size, resolve_group
from ds_zipccl.comm.transport.protocol import timeout_of
from ds_zipccl.config import SECTION, ConfigError, ZipcclConfig, environment_section, parse_section
from ds_zipccl.integration import config_agreement, hints, roles
from ds_zipccl.ops import OPS
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.policy.settled import Settled
from ds_zipccl.telemetry import counters
from ds_zipccl.telemetry.step_log import StepLog

_installed: Mapping[str, Any] | None = None  # the section given to install(), which may run before there is a job


def install_section(section: Mapping[str, Any]) -> None:
    """Use ``section`` instead of the sections of all DeepSpeed configs of this process.

    Raises:
        ConfigError: the section is invalid.
    """
    global _installed
    parse_section(section)
    _installed = dict(section)


def overriding_section() -> Mapping[str, Any] | None:
    """Return the section that precedes those of DeepSpeed configs: from ``DS_ZIPCCL``, else from install(); None if there is none.

    Raises:
        ConfigError: ``DS_ZIPCCL`` is invalid.
    """
    section = environment_section()
    return section if section is not None else _installed


#: Operations -> bytes that a rank sends, in parts of its output, by the number of ranks.
BYPASSED = {
    "all_gather_into_tensor": lambda ranks: (ranks - 1) / ranks,
    "all_to_all_single": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter_tensor": lambda ranks: ranks - 1.0,
}


@dataclass(slots=True)
class _Tally:
    """Calls of one operation and group that passed for ``reason``, and the bytes of their outputs, not counted yet; no reason: calls go the
    usual way. ``share``: bytes sent over bytes of the output."""

    role: str
    share: float
    reason: PassReason | None
    calls: int = 0
    nbytes: int = 0


class Bypass:
    """The calls of a job that always go plain: those on tensors of one device type, on groups in stream order on which nothing gains.

    A call is told apart and counted in about a microsecond. The way of a call to its decision takes some 20 us: where nothing is ever
    coded, a step of 200 calls must not pay that. Calls of two threads at once may lose counts.

    ``role_of(name, group)``: the role of an operation.
    """

    def __init__(self, role_of: Callable[[str, dist.ProcessGroup | None], str], device: str) -> None:
        self._role_of, self._device = role_of, device
        self._tallies: dict[tuple[str, dist.ProcessGroup | None, str], _Tally] = {}
        self._places = {name: (OPS[name].parameters[0], OPS[name].parameters.index("group")) for name in BYPASSED}
        counters.count_later(self.count)

    def takes(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call of an operation in :data:`BYPASSED` passes for good; such a call is tallied."""
        first, place = self._places[name]
        output = args[0] if args else kwargs.get(first)
        if not isinstance(output, torch.Tensor) or output.device.type != self._device:
            return False
        group = args[place] if len(args) > place else kwargs.get("group")
        key = (name, group, hints.current().kind)
        tally = self._tallies.get(key)
        if tally is None:
            tally = self._tallies[key] = self._begin(name, group)
        if tally.reason is None:
            return False
        tally.calls += 1
        tally.nbytes += output.numel() * output.itemsize
        return True

    def count(self) -> None:
        """Count the calls tallied so far, and forget their groups."""
        tallies, self._tallies = self._tallies, {}
        for (name, _, kind), tally in tallies.items():
            if tally.reason is not None:
                sent = int(tally.nbytes * tally.share)
                counters.record_pass(tally.role, name, sent, tally.reason.value, kind=kind, calls=tally.calls)

    def _begin(self, name: str, group: dist.ProcessGroup | None) -> _Tally:
        reason = comm_engine.never_coded(name, group, self._device)
        return _Tally(self._role_of(name, group), BYPASSED[name](max(1, group_size(group))), reason)


@dataclass(eq=False)
class Job:
    """State that all engines, models and communication of a process share.

    Life: :func:`of_process` creates the Job of a default group. ``ZipcclBackend.configure`` or ``fsdp.apply`` accepts a section and
    switches coding on, once. From then on the section stays, as communication is shared: every later engine or model must bring the same
    section or none. The hooks add the facts about engines. A process that enters another default group, as the survivors of a failure do,
    has another Job: it must do what a process does that is new there. A DeepSpeed backend has an idle Job until it is configured.
    """

    #: The accepted config; None until a section switches coding on.
    config: ZipcclConfig | None = None
    #: Canonical text of the section on which all ranks agreed, enabled or not; None before there was one.
    section: str | None = None
    #: ZeRO stages of the engines of all ranks.
    zero_stages: frozenset[int] = frozenset()
    #: Groups that were learned from layers of the engines' models, and from calls of torch.distributed -> their roles.
    groups: WeakKeyDictionary[dist.ProcessGroup, str] = field(default_factory=WeakKeyDictionary)
    #: What was settled for groups in stream order; None where nothing was.
    settled: Settled | None = None
    #: The step log of rank 0, if the section names a file.
    step_log: StepLog | None = None
    #: The calls that always pass; None where some may be coded.
    bypass: Bypass | None = None
    #: Lines about features of engines that rank 0 has printed; see :mod:`.bypassed`.
    told: set[str] = field(default_factory=set)
    #: Collective -> the coded method as torch.compile calls it, outside of graphs.
    untraced: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    def accept(self, section: Mapping[str, Any] | None, zero_stage: int | None = None) -> ZipcclConfig | None:
        """Agree with all ranks on a section. A collective of all ranks; blocks until each of them has brought its section.

        Args:
            section: the ``"zipccl"`` section of a DeepSpeed config, None if the config has none. :func:`overriding_section` precedes it.
            zero_stage: of the engine that has the section, None if there is none. Ranks may differ.

        Returns:
            The config, if this section switches coding on; None if it changes nothing.

        Raises:
            ConfigError: the section is invalid, or differs between ranks, or from the section that this process uses.
        """
        override = overriding_section()
        chosen = section if override is None else override
        text = config_agreement.canonical(chosen)
        if dist.get_world_size() > 1:
            group = resolve_group(None)
            device, _ = dist.get_backend_config(group).split(",")[0].split(":")
            self.zero_stages |= config_agreement.agree(text, timeout_of(group, torch.device(device)), zero_stage)
        elif zero_stage is not None:
            self.zero_stages |= {zero_stage}
        if text in (config_agreement.ABSENT, self.section):
            return None
        config = parse_section(chosen)
        if self.section is not None:
            raise ConfigError(
                f'this process already runs with "{SECTION}": {self.section}, another engine or model asks for {text}; '
                "all of a process share its communication: give them the same section"
            )
        self.section = text
        if not config.enabled and "enabled" not in (chosen or {}) and dist.get_rank() == 0:
            print(f'[ds_zipccl {__version__}] off: "{SECTION}" has no key "enabled"; add "enabled": true', flush=True)
        return config if config.enabled else None

    def tell(self, lines: Iterable[str]) -> None:
        """Print lines on rank 0, each once, if the job codes messages."""
        if self.config is not None and dist.get_rank() == 0:
            for line in lines:
                if line not in self.told:
                    print(f"[ds_zipccl] {line}", flush=True)
                self.told.add(line)

    def learn_groups(self, model: torch.nn.Module) -> None:
        """Note the groups that the model's layers hold."""
        self.groups.update(roles.groups_of(model))

    def role_of(self, name: str, group: dist.ProcessGroup | None) -> str:
        """Return the role of the collective ``name`` over ``group``, one of :data:`ds_zipccl.config.ROLES`."""
        return roles.role_of(name, group, any(self.zero_stages), self.groups)

    def model_parallel_role(self, group: Any) -> str:
        """Return the role of a tensor- or sequence-parallel group, and remember it; an empty string for any other group."""
        role = roles.model_parallel_role(group, self.groups)
        if role and group is not dist.group.WORLD:
            self.groups[group] = role
        return role


_of_process: tuple[Callable[[], dist.ProcessGroup | None], Job] | None = None


def of_process() -> Job:
    """Return the Job of the default group of this process."""
    global _of_process
    world = resolve_group(None)
    if _of_process is None or _of_process[0]() is not world:
        _of_process = ref(world), Job()
    return _of_process[1]
