"""The start-up line: what is coded on this job's groups, and what is not and why."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import ranks as runner
import torch.distributed as dist

import ds_zipccl
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.integration import start_line as lines
from ds_zipccl.integration import start_up
from ds_zipccl.integration.start_line import Group, describe, groups_here, start_line
from ds_zipccl.ops import OPS
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.policy.cost_model import DeviceProfile, LinkProfile, Topology
from ds_zipccl.policy.settled import Settled, Sums

#: Routes, best first -> why they are not used.
WHY = {"cuda": "no GPU here", "native": "", "numba": ""}
PROFILE = LinkProfile(
    ((1e3, 1.5e-4), (1e6 + 1e3, 1.5e-4 + 8e-3)), encode=8.7e9, decode=12.1e9, add=1, copy=1, add_raw=1, call=0
)
GLOO = {"cpu": "gloo"}
NCCL = {"cuda": "nccl"}
BOTH = {"cpu": "gloo", "cuda": "nccl"}
NO_SCHEDULE = "for which there are no coded schedules"
OFF = 'as "nccl" is "off"'
DEFAULT, ON = ZipcclConfig(enabled=True, nccl="off"), ZipcclConfig(enabled=True)


@pytest.fixture(autouse=True)
def _routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines.kernels, "tried", lambda device: WHY if device == "cpu" else {})


def test_kernels_and_settings() -> None:
    said = start_line(ZipcclConfig(enabled=True, codec="raw", min_bytes=77), None, "codes all")
    assert said.startswith(
        f"[ds_zipccl {ds_zipccl.__version__}] on, codes all; kernels: native; cuda not used: no GPU here; "
    )
    settings = said.split("no GPU here; ")[1].split(", ")
    assert {"codec raw", "min_bytes 77", "mode auto", "reduction auto"} <= set(settings)
    assert len(settings) == 4, "keys that have their defaults are not repeated"
    assert "link" not in said and "passed through" not in said
    assert "; kernels: numba; " in start_line(ZipcclConfig(enabled=True, route="numba"), None, "")
    measured = start_line(ZipcclConfig(enabled=True, step_log="steps.jsonl"), PROFILE, "")
    assert "step_log steps.jsonl" in measured
    assert measured.endswith("; link 1000 Mbit/s, 150 us, coding 8.7 and 12.1 GB/s")


@pytest.mark.parametrize(
    ("tried", "route", "said"),
    [
        ({}, "auto", ""),
        ({"native": ""}, "auto", "native"),
        ({"native": "no nvcc", "cupy": ""}, "numba", "cupy; native not used: no nvcc"),
        ({"cupy": ""}, "cupy", "cupy"),
        ({"native": "no nvcc", "cupy": "old"}, "auto", "none; native not used: no nvcc; cupy not used: old"),
        ({"cupy": "old"}, "cupy", "none; cupy not used: old"),
    ],
)
def test_cuda_kernels_are_named_where_they_were_wanted(
    tried: dict[str, str], route: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines.kernels, "tried", lambda device: WHY if device == "cpu" else tried)
    line = start_line(ZipcclConfig(enabled=True, route=route), None, "codes all")  # type: ignore[arg-type]
    assert "; kernels: numba; " in line if route == "numba" else "; kernels: native; " in line
    assert f"; CUDA kernels: {said}; " in line if tried else "CUDA" not in line


def test_levels_of_sums() -> None:
    """Only sums of fp32 on several nodes with equally many ranks, more than one."""
    fp32, nodes = ZipcclConfig(enabled=True, reduction="fp32"), [[0, 1, 2], [3, 4, 5]]
    assert start_line(fp32, None, "", nodes).endswith("; sums of all ranks in two levels: 2 nodes of 3 ranks")
    for config, ranks in ((fp32, [[0, 1], [2]]), (fp32, [[0], [1]]), (fp32, []), (ZipcclConfig(enabled=True), nodes)):
        assert "levels" not in start_line(config, None, "", ranks)


def test_roles_that_are_left_alone() -> None:
    config = ZipcclConfig(enabled=True, roles={"ep": "never", "pp": "always", "dp": "never"})
    off = start_line(config, None, "").split("; passed through by config: ")[1].split(", ")
    assert sorted(off) == ["dp", "ep"]
    only = ZipcclConfig(enabled=True, mode="never", roles={"zero_grad": "auto"})
    off = start_line(only, None, "").split("; passed through by config: ")[1].split(", ")
    assert "zero_grad" not in off and "zero_param" in off
    never = start_line(ZipcclConfig(enabled=True, mode="never"), None, "codes cpu tensors over gloo")
    assert "] on, nothing will be coded: the mode of every role is never; kernels: " in never
    assert "passed through" not in never


#: (config, device of the model, groups) -> the clause.
CLAUSES: dict[str, tuple[ZipcclConfig, str, list[Group], str]] = {
    "gloo": (DEFAULT, "cpu", [Group(2, GLOO)], "codes cpu tensors over gloo"),
    "groups of one rank": (DEFAULT, "cpu", [Group(4, GLOO), Group(1, GLOO), Group(2, GLOO)], "codes cpu tensors over gloo (2 groups)"),
    "one rank": (DEFAULT, "cpu", [Group(1, GLOO), Group(1, GLOO)], "nothing will be coded: this job has one rank"),
    "gloo for cuda": (DEFAULT, "cuda", [Group(2, {"cuda": "gloo"})],
             f"nothing will be coded: cuda tensors go over gloo, {NO_SCHEDULE}"),
    "NCCL": (DEFAULT, "cuda", [Group(2, NCCL), Group(4, NCCL), Group(1, NCCL)],
             f"nothing will be coded: cuda tensors go over nccl (2 groups), {OFF}"),
    "NCCL beside gloo for the CPU": (DEFAULT, "cuda", [Group(2, BOTH), Group(2, NCCL)],
             f"no cuda tensor will be coded: cuda tensors go over nccl (2 groups), {OFF}; codes cpu tensors over gloo"),
    "groups of NCCL and of gloo": (ON, "cuda", [Group(2, NCCL, nodes=2), Group(2, {"cuda": "gloo"})],
             f"codes cuda tensors over nccl; not coded: cuda tensors go over gloo, {NO_SCHEDULE}"),
    "MPI": (DEFAULT, "cpu", [Group(2, {"cpu": "mpi"})], f"nothing will be coded: cpu tensors go over mpi, {NO_SCHEDULE}"),
    "no backend": (DEFAULT, "cuda", [Group(2, {})], f"nothing will be coded: cuda tensors go over no backend, {NO_SCHEDULE}"),
    "gloo for xpu": (DEFAULT, "xpu", [Group(2, {"xpu": "gloo"})], f"nothing will be coded: xpu tensors go over gloo, {NO_SCHEDULE}"),
    "nccl on, several nodes": (ON, "cuda", [Group(2, NCCL), Group(4, BOTH, nodes=2), Group(1, NCCL)],
             "codes cuda tensors over nccl (2 groups)"),
    "nccl on, one node": (ON, "cuda", [Group(16, NCCL, nodes=2), Group(8, NCCL, nodes=1), Group(8, NCCL, nodes=1)],
             "codes cuda tensors over nccl; not coded: cuda tensors go over nccl (2 groups) inside one node, without a network"),
    "nccl on, MPI": (ON, "cuda", [Group(2, {"cuda": "mpi"})], f"nothing will be coded: cuda tensors go over mpi, {NO_SCHEDULE}"),
    "nccl on, one node, and gloo": (ON, "cuda", [Group(8, BOTH, nodes=1)],
             "no cuda tensor will be coded: cuda tensors go over nccl inside one node, without a network; codes cpu tensors over gloo"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "device", "groups", "said"), CLAUSES.values(), ids=CLAUSES)
def test_clauses(config: ZipcclConfig, device: str, groups: list[Group], said: str) -> None:
    assert describe(groups, device, config) == said


FAST = PassReason.NETWORK_IS_FASTER


def settled(dtypes: tuple[str, ...] = ("bfloat16",), reason: PassReason | None = None) -> Settled:
    return Settled("cuda", Topology(2, 4), DeviceProfile(42e9), reason, Sums(dtypes, why="why"), 27e6)


def test_what_was_settled_on_fast_networks() -> None:
    """Where neither moves nor sums are coded, nothing is. A mode of always codes all the same."""
    groups = [Group(8, NCCL, nodes=2)]
    said = f"nothing will be coded: cuda tensors go over nccl, {FAST.value}"
    assert describe(groups, "cuda", ON, settled((), FAST)) == said
    for found in (settled(reason=FAST), settled(())):
        assert describe(groups, "cuda", ON, found) == "codes cuda tensors over nccl"
    always = replace(ON, roles={"ep": "always"})
    for nodes in (1, 2):
        found = describe([Group(8, NCCL, nodes=nodes)], "cuda", always, settled((), FAST))
        assert found == "codes cuda tensors over nccl"


def test_schedules_in_stream_order() -> None:
    """Gathers and all-to-alls are named where some may be coded; the order of sums is told in any case."""
    assert OPS["all_gather_into_tensor"].on_device and OPS["all_to_all_single"].on_device
    nodes = [[0, 1, 2, 3], [4, 5, 6, 7]]
    moves = "gathers in slots by the backend's own all-gather, all-to-alls in slots by the backend's own"
    auto, fast = settled(), settled((), FAST)
    found = lines.schedules(ON, auto, nodes)
    assert found == f"on nccl groups: {moves}, in two levels gradient sums of bfloat16 in fp32 (why); {auto}"
    assert "42 GB/s" in found and "coded from 27 MB on" in found
    assert "in one level gradient sums of" in lines.schedules(ON, auto, [[0], [1]])
    found = lines.schedules(ON, fast, nodes)
    assert found == f"on nccl groups: sums by the backend itself (why); {fast}"
    assert FAST.value in found
    assert moves in lines.schedules(replace(ON, mode="always"), fast, nodes)
    assert start_line(ON, None, "codes all", nodes, settled()).endswith(f"; {lines.schedules(ON, settled(), nodes)}")


ROLES = {"zero_grad": {"codec": "round"}, "tp": {"codec": "taco_fp8", "hadamard": False}, "dp": "always"}
LOSSY = ZipcclConfig(enabled=True, lossy=True, roles=ROLES)
BY_CONFIG = (
    "[ds_zipccl] LOSSY by config: zero_grad round mantissa 3; tp taco_fp8 group 128 forward and backward; "
    "all other roles bit-exact"
)


UNHOOKED = {"tp": "this DeepSpeed has no A.forward", "pp": "not in the config"}
NO_HINT = "some calls of tp, as this DeepSpeed has no A.forward"
#: (changes to the config, device, groups, roles whose calls cannot have a hint) -> what is exact all the same.
EXACT: dict[str, tuple[dict[str, str], str, list[Group], dict[str, str], str]] = {
    "gloo": ({}, "cpu", [Group(2, GLOO), Group(1, GLOO), Group(4, GLOO)], {}, ""),
    "one rank": ({}, "cpu", [Group(1, GLOO)], {}, "all of them, as this job has one rank"),
    "NCCL": ({"nccl": "off"}, "cuda", [Group(2, NCCL), Group(4, BOTH), Group(1, NCCL)], {},
             'cuda tensors over nccl (2 groups), as "nccl" is "off"'),
    "NCCL and gloo": ({"nccl": "off"}, "cuda", [Group(2, NCCL), Group(2, {"cuda": "gloo"})], {},
                      'cuda tensors over nccl, as "nccl" is "off"; cuda tensors over gloo, as there are no coded schedules for it'),
    "MPI": ({}, "cpu", [Group(2, {"cpu": "mpi"})], {}, "cpu tensors over mpi, as there are no coded schedules for it"),
    "no backend": ({}, "xpu", [Group(2, {})], {}, "xpu tensors over no backend, as there are no coded schedules for it"),
    "nccl on": ({"nccl": "on"}, "cuda", [Group(2, NCCL)], {}, ""),
    "nccl auto": ({}, "cuda", [Group(2, NCCL, nodes=2), Group(2, NCCL, nodes=1)], {},
                  "cuda tensors over nccl, as they stay inside one node"),
    "no hint": ({}, "cpu", [Group(2, GLOO)], UNHOOKED, NO_HINT),
    "no hint, one rank": ({}, "cpu", [Group(1, GLOO)], UNHOOKED, f"{NO_HINT}; all of them, as this job has one rank"),
}  # fmt: skip


@pytest.mark.parametrize("case", EXACT)
def test_lossy_roles(case: str) -> None:
    changes, device, groups, unhooked, exact = EXACT[case]
    said = lines.lossy_line(groups, device, replace(LOSSY, **changes), unhooked)  # type: ignore[arg-type]
    assert said == BY_CONFIG + (f"; bit-exact all the same: {exact}" if exact else "")


def test_what_no_gpu_has_a_lossy_schedule_for_is_told() -> None:
    roles = {"pp": {"codec": "round"}, "zero_grad": {"codec": "powersgd"}, "tp": {"codec": "round"}}
    config, groups = replace(LOSSY, roles=roles, nccl="on"), [Group(2, BOTH)]
    why = "as sends and PowerSGD are lossy on CPUs alone"
    exact = f"; bit-exact all the same: cuda tensors of zero_grad, {why}; cuda tensors of pp, {why}"
    assert lines.lossy_line(groups, "cuda", config).endswith(exact)
    assert "exact all" not in lines.lossy_line(groups, "cpu", config)


def test_the_master_switch_alone_is_told() -> None:
    groups = [Group(2, GLOO)]
    told = '[ds_zipccl] "lossy" is true and no role names a lossy codec: nothing is changed'
    assert lines.lossy_line(groups, "cpu", replace(LOSSY, roles={"tp": "always"})) == told
    assert lines.lossy_line(groups, "cpu", DEFAULT) == ""


def test_the_order_of_fused_embeddings_is_told() -> None:
    said = lines.fused_line(replace(DEFAULT, fused_embedding=True))
    assert said.startswith("[ds_zipccl] fused_embedding: ") and "is not DeepSpeed's" in said
    assert "is summed" not in said, "no engine is known yet"
    assert lines.fused_line(DEFAULT) == ""


def accelerator(device: str, backend: str = "") -> SimpleNamespace:
    """Stands for importlib: DeepSpeed's accelerator is ``device``."""
    found = SimpleNamespace(device_name=lambda: device, communication_backend_name=lambda: backend)
    return SimpleNamespace(import_module=lambda name: SimpleNamespace(get_accelerator=lambda: found))


def test_a_job_on_machines_like_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "importlib", accelerator("cuda", "nccl"))
    assert lines.coverage_here(DEFAULT) == f"nothing will be coded: cuda tensors go over nccl, {OFF}"
    assert lines.coverage_here(ON) == "codes cuda tensors over nccl"
    monkeypatch.setattr(lines, "importlib", accelerator("cpu", "gloo"))
    assert lines.coverage_here(DEFAULT) == "codes cpu tensors over gloo"


def real_groups(rank: int, ranks: int) -> list[str]:
    """Clauses on real groups: the first, after more groups are made, and after one is gone; and whether links are measured."""
    found = [describe(groups_here(), "cpu", DEFAULT)]
    if ranks == 1:
        return [*found, str(start_up._measurable())]
    dist.new_group([0])
    pair = dist.new_group([0, 1])
    dist.new_group([1, 2])
    found.append(describe(groups_here(), "cpu", DEFAULT))
    dist.barrier()  # a rank may still be connecting a group that another one has
    if rank < 2:
        dist.destroy_process_group(pair)
    return [*found, describe(groups_here(), "cpu", DEFAULT), str(start_up._measurable())]


def test_groups_that_the_job_has_made() -> None:
    one, two, three = (f"codes cpu tensors over gloo{count}" for count in ("", " (2 groups)", " (3 groups)"))
    links = "True"  # are measured
    assert runner.run(real_groups, 3) == [[one, two, one, links], [one, three, two, links], [one, two, two, links]]
    assert runner.run(real_groups, 1) == [["nothing will be coded: this job has one rank", "False"]]
