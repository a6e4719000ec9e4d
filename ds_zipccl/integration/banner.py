"""The line at start: what is coded on this job's groups, and what is not and why."""

from __future__ import annotations

import importlib

import ds_zipccl
from ds_zipccl import kernels
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.config import ROLES, ZipcclConfig
from ds_zipccl.policy import admission
from ds_zipccl.policy.cost_model import LinkProfile


def passed_here() -> str:
    """Why nothing of this job is coded, whatever the section says; empty where something is."""
    state, device = group_state(None), importlib.import_module("deepspeed.accelerator").get_accelerator().device_name()
    assert state is not None  # a backend is configured in the default group
    if state.size == 1:
        return "this job has one rank"
    backend = state.backend(device)
    if backend in admission.CODED_BACKENDS.get(device, ()):
        return ""
    return f"{device} tensors go by {backend or 'no backend'}, for which there are no coded schedules yet"


def banner(config: ZipcclConfig, profile: LinkProfile | None, passed: str = "") -> str:
    """What rank 0 prints at start.

    Args:
        profile: what was measured of the link and the codec, if anything was.
        passed: why nothing will be coded, see :func:`passed_here`.
    """
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
        f"[ds_zipccl {ds_zipccl.__version__}] {f'on, but nothing will be coded: {passed}' if passed else 'on'}, kernels: {used}{skipped}; "
        + ", ".join(f"{key} {value}" for key, value in settings.items() if value != "")
        + link
        + (f"; passed through by config: {', '.join(off)}" if off else "")
    )
