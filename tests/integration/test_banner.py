"""The line at start says what is so: where tensors go, by which kernels, and what the config leaves alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import ds_zipccl
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.integration import banner as lines
from ds_zipccl.integration.banner import banner, passed_here
from ds_zipccl.policy.cost_model import Profile

#: Routes, best first -> why they are not used.
WHY = {"cuda": "no GPU here", "native": "", "numba": ""}
PROFILE = Profile(
    ((1e3, 1.5e-4), (1e6 + 1e3, 1.5e-4 + 8e-3)), encode=8.7e9, decode=12.1e9, add=1, copy=1, add_raw=1, call=0
)


@pytest.fixture(autouse=True)
def _routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines.kernels, "why", lambda: WHY)


def test_kernels_and_settings() -> None:
    said = banner(ZipcclConfig(enabled=True, codec="wide", min_bytes=77), None)
    assert said.startswith(f"[ds_zipccl {ds_zipccl.__version__}] on, kernels: native; cuda not used: no GPU here; ")
    settings = said.split("no GPU here; ")[1].split(", ")
    assert {"codec wide", "min_bytes 77", "mode auto", "reduction auto"} <= set(settings)
    assert not any(setting.startswith(("enabled", "route", "roles", "step_log")) for setting in settings)
    assert "link" not in said and "passed through" not in said
    assert ", kernels: numba; " in banner(ZipcclConfig(enabled=True, route="numba"), None)
    assert "step_log steps.jsonl" in banner(ZipcclConfig(enabled=True, step_log="steps.jsonl"), None)


def test_what_was_measured() -> None:
    said = banner(ZipcclConfig(enabled=True), PROFILE)
    assert said.endswith("; link 1000 Mbit/s, 150 us, coding 8.7 and 12.1 GB/s")


def test_roles_that_are_left_alone() -> None:
    config = ZipcclConfig(enabled=True, roles={"ep": "never", "pp": "always", "dp": "never"})
    off = banner(config, None).split("; passed through by config: ")[1].split(", ")
    assert sorted(off) == ["dp", "ep"]
    only = ZipcclConfig(enabled=True, mode="never", roles={"zero_grad": "auto"})
    off = banner(only, None).split("; passed through by config: ")[1].split(", ")
    assert "zero_grad" not in off and "zero_param" in off


@pytest.mark.parametrize(
    ("size", "device", "backends", "said"),
    [
        (2, "cpu", {"cpu": "gloo"}, ""),
        (2, "cuda", {"cpu": "gloo", "cuda": "gloo"}, ""),
        (1, "cpu", {"cpu": "gloo"}, "this job has one rank"),
        (2, "cpu", {"cpu": "mpi"}, "cpu tensors go by mpi, for which"),
        (2, "cuda", {"cpu": "gloo", "cuda": "nccl"}, "cuda tensors go by nccl, for which"),
        (2, "cuda", {"cpu": "gloo"}, "cuda tensors go by no backend, for which"),
        (2, "xpu", {"xpu": "gloo"}, "xpu tensors go by gloo, for which"),
    ],
)
def test_where_nothing_is_coded(
    monkeypatch: pytest.MonkeyPatch, size: int, device: str, backends: dict[str, str], said: str
) -> None:
    accelerator = SimpleNamespace(get_accelerator=lambda: SimpleNamespace(device_name=lambda: device))
    monkeypatch.setattr(lines, "importlib", SimpleNamespace(import_module=lambda name: accelerator))
    members = SimpleNamespace(size=size, backend=lambda name: backends.get(name, ""))
    monkeypatch.setattr(lines, "known", lambda group: members)
    reason = passed_here()
    assert reason.startswith(said) and bool(reason) == bool(said)
    line = banner(ZipcclConfig(enabled=True), None, reason)
    assert (f"] on, but nothing will be coded: {reason}, kernels: " if said else "] on, kernels: ") in line
