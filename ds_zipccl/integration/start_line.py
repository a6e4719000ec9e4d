"""The start-up lines: the traffic of this job's groups that is coded, and the traffic that is not and why; the lossy roles."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from torch.distributed import distributed_c10d

import ds_zipccl
from ds_zipccl import kernels
from ds_zipccl.comm import topology
from ds_zipccl.comm.group_state import group_nodes, group_state
from ds_zipccl.config import DEFAULT, ROLES, ZipcclConfig
from ds_zipccl.lossy import PowerSgd
from ds_zipccl.policy import admission
from ds_zipccl.policy.cost_model import LinkProfile
from ds_zipccl.policy.settled import Settled

#: The schedules of moves in stream order.
_MOVES = ("gathers in slots by the backend's own all-gather", "all-to-alls in slots by the backend's own")
#: Keys whose values the line has in any case; of the others, those that are not the default.
_ALWAYS_SAID = ("mode", "reduction")
_SAID_ELSEWHERE = ("enabled", "route", "roles")


@dataclass(frozen=True)
class Group:
    """Size of a process group, the backend that serves each type of device in it, and its number of nodes, 0 where it is not known."""

    ranks: int
    backends: Mapping[str, str]
    nodes: int = 0


def coverage_here(config: ZipcclConfig) -> str:
    """Describe the traffic of a job of several ranks on machines like this one, by the backend that DeepSpeed chooses here."""
    device, backend = device_here()
    return describe([Group(2, {device: backend})], device, config)


def device_here() -> tuple[str, str]:
    """Return the type of device that DeepSpeed chooses here, and the backend of its groups."""
    return _accelerator().device_name(), _accelerator().communication_backend_name()


def set_device(number: int) -> None:
    """Let this process use the device of that number, as DeepSpeed does with a local rank."""
    _accelerator().set_device(number)


def _accelerator() -> Any:
    return importlib.import_module("deepspeed.accelerator").get_accelerator()


def groups_here() -> list[Group]:
    """Return the groups that this job has made so far, as far as this rank is in them."""
    members = [(group, group_state(group)) for group in distributed_c10d._world.pg_map]
    return [Group(one.size, one.backends, len(group_nodes(group))) for group, one in members if one is not None]


def describe(groups: Iterable[Group], device: str, config: ZipcclConfig, settled: Settled | None = None) -> str:
    """Return a clause about groups of several ranks: "codes ...", or "nothing will be coded: ...", with the reason.

    Args:
        device: the type of device of the model's tensors. CPU tensors are mentioned too if they alone are coded.
        settled: for groups in stream order; None where nothing was settled.
    """
    groups = list(groups)
    found = _backends(groups, device, partial(_passes, device, config, settled))
    if not found:
        return "nothing will be coded: this job has one rank"
    coded = ", ".join(name for name, reason in found if not reason)
    why = "; ".join(f"{device} tensors go over {name}{reason}" for name, reason in found if reason)
    if coded:
        return f"codes {device} tensors over {coded}{f'; not coded: {why}' if why else ''}"
    on_host = _backends(groups, "cpu", partial(_passes, "cpu", config, settled)) if device != "cpu" else []
    if coded := ", ".join(name for name, reason in on_host if not reason):
        return f"no {device} tensor will be coded: {why}; codes cpu tensors over {coded}"
    return f"nothing will be coded: {why}"


def _backends(groups: Iterable[Group], device: str, reason_of: Callable[[str, Group], str]) -> list[tuple[str, str]]:
    """Return the backends that serve a type of device in groups of several ranks, each with the number of its groups if that is not one,
    and the reason that ``reason_of`` gives for these groups."""
    served = [(group.backends.get(device, ""), group) for group in groups if group.ranks > 1]
    counts = Counter((backend, reason_of(backend, group)) for backend, group in served)
    return [
        (f"{backend or 'no backend'}{'' if number == 1 else f' ({number} groups)'}", reason)
        for (backend, reason), number in counts.items()
    ]


def _passes(device: str, config: ZipcclConfig, settled: Settled | None, backend: str, group: Group) -> str:
    """Return the reason why all tensors of a type of device pass through in a group, to follow the backend's name; "" if they do not."""
    if backend not in admission.CODED_BACKENDS.get(device, ()):
        return ", for which there are no coded schedules"
    if backend not in admission.STREAM_BACKENDS:
        return ""
    if config.nccl == "off":
        return ', as "nccl" is "off"'
    if config.always_codes:
        return ""
    if group.nodes == 1:
        return " inside one node, without a network"
    if settled is not None and settled.reason is not None and not settled.sums.dtypes:
        return f", {settled.reason.value}"
    return ""


def lossy_line(
    groups: Iterable[Group], device: str, config: ZipcclConfig, unhooked: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return the line about the lossy roles of a config; "" where the section does not allow them.

    Args:
        device: the type of device of the model's tensors.
        unhooked: role -> why some of DeepSpeed's calls of the role cannot have a hint.
    """
    if not config.lossy:
        return ""
    if not config.lossy_roles:
        return '[ds_zipccl] "lossy" is true and no role names a lossy codec: nothing is changed'
    named = [role for role in ROLES if role in config.lossy_roles]
    roles = "; ".join(config.lossy_roles[role].describe(role) for role in named)
    exact = [f"some calls of {role}, as {unhooked[role]}" for role in named if role in unhooked]
    hosts = [role for role in named if role == "pp" or isinstance(config.lossy_roles[role].codec, PowerSgd)]
    if device != "cpu":
        exact += [f"{device} tensors of {role}, as sends and PowerSGD are lossy on CPUs alone" for role in hosts]
    found = _backends(groups, device, partial(_exact, device, config))
    exact += [f"{device} tensors over {name}, as {why}" for name, why in found if why]
    exact += [] if found else ["all of them, as this job has one rank"]
    but = f"; bit-exact all the same: {'; '.join(exact)}" if exact else ""
    return f"[ds_zipccl] LOSSY by config: {roles}; all other roles bit-exact{but}"


def fused_line(config: ZipcclConfig) -> str:
    """Return the line about the gradients of tied embeddings; "" where the section leaves their sums as they are."""
    if not config.fused_embedding:
        return ""
    return (
        "[ds_zipccl] fused_embedding: allowed by config; each engine says at its start which sums are fused; "
        "nothing is lost, but the order of a fused sum, and so its rounding, is not DeepSpeed's"
    )


def _exact(device: str, config: ZipcclConfig, backend: str, group: Group) -> str:
    """Return the reason why no tensor of a type of device is lossy in a group; "" where tensors may be."""
    if backend not in admission.CODED_BACKENDS.get(device, ()):
        return "there are no coded schedules for it"
    if backend in admission.STREAM_BACKENDS and config.nccl == "off":
        return '"nccl" is "off"'
    inside = backend in admission.STREAM_BACKENDS and group.nodes == 1
    auto = all(config.mode_of(role) == "auto" for role in config.lossy_roles)
    return "they stay inside one node" if inside and auto else ""


def schedules(config: ZipcclConfig, settled: Settled, nodes: Sequence[Sequence[int]]) -> str:
    """Return a clause about the schedules of groups in stream order, such as those of NCCL: the order of sums, the measured link.

    Args:
        nodes: the ranks of each node.
    """
    # where moves pass, the text of ``settled`` has the reason
    said = list(_MOVES) if settled.reason is None or config.always_codes else []
    how = ("in two levels " if topology.levels(nodes) else "in one level ") if settled.sums.dtypes else ""
    said.append(f"{how}{settled.sums}")
    return f"on {' and '.join(admission.STREAM_BACKENDS)} groups: {', '.join(said)}; {settled}"


def start_line(
    config: ZipcclConfig,
    profile: LinkProfile | None,
    covered: str,
    nodes: Sequence[Sequence[int]] = (),
    settled: Settled | None = None,
) -> str:
    """Return the line that rank 0 prints when coding is switched on.

    Args:
        config: the line has its mode and reduction, and the keys that are not the default.
        profile: the measured link and codec, None if nothing was measured.
        covered: the clause of :func:`describe` about this job's groups; it is replaced if the config codes no role.
        nodes: the ranks of each node.
        settled: for groups in stream order; None where the job has none that is coded.
    """
    # kernels.why() would compile or import the routes that this job does not use
    cpu, cuda = kernels.tried("cpu"), kernels.tried("cuda")
    off = [role for role in ROLES if config.mode_of(role) == "never"]
    if len(off) == len(ROLES):
        covered = "nothing will be coded: the mode of every role is never"
    values, usual = asdict(config), asdict(DEFAULT)
    settings = {
        key: value
        for key, value in values.items()
        if key in _ALWAYS_SAID or (value != usual[key] and key not in _SAID_ELSEWHERE)
    }
    parts = [
        _kernels("kernels", config.route, "cpu", cpu),
        *([_kernels("CUDA kernels", config.route, "cuda", cuda)] if cuda else []),
        ", ".join(f"{key} {value}" for key, value in settings.items()),
    ]
    if profile is not None:
        parts.append(
            f"link {8e-6 * profile.bandwidth:.0f} Mbit/s, {1e6 * profile.alpha:.0f} us, "
            f"coding {profile.encode / 1e9:.1f} and {profile.decode / 1e9:.1f} GB/s"
        )
        if len(nodes) == 1:
            parts.append('all ranks on one node, where mode auto stays plain ("mode": "always" codes)')
    if settled is not None:
        parts.append(schedules(config, settled, nodes))
    elif config.reduction == "fp32" and topology.levels(nodes):
        parts.append(f"sums of all ranks in two levels: {len(nodes)} nodes of {len(nodes[0])} ranks")
    if 0 < len(off) < len(ROLES):
        parts.append(f"passed through by config: {', '.join(off)}")
    return f"[ds_zipccl {ds_zipccl.__version__}] on, {covered}; {'; '.join(parts)}"


def _kernels(what: str, name: str, device: str, routes: Mapping[str, str]) -> str:
    """Return a clause about the routes of a device: the one that a config with route ``name`` uses, and why others are not used."""
    wanted = kernels.preferred(name, device)
    used = next((route for route, reason in routes.items() if not reason and wanted in ("auto", route)), "none")
    return f"{what}: {used}" + "".join(f"; {route} not used: {reason}" for route, reason in routes.items() if reason)
