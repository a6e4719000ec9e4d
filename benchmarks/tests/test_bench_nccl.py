"""``bench comm`` and ``bench train`` with ``--backend nccl``, on CPUs in stream order and on the simulated GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import assert_refused, content, python
from on_sim import launcher, world
from test_bench_train import results

from ds_zipccl import kernels
from ds_zipccl.benchmarks.comm import cases, trial
from ds_zipccl.benchmarks.links import backends
from ds_zipccl.benchmarks.links.backends import BACKENDS, Backend
from ds_zipccl.benchmarks.train import bench
from ds_zipccl.benchmarks.train.results import problems, rows
from ds_zipccl.benchmarks.train.trial import Training, _commands, find_script
from ds_zipccl.ops import TRAFFIC
from ds_zipccl.tools import data, link
from ds_zipccl.tools.namespaces import INTERFACE, Network

SCRIPT = find_script()
NCCL = BACKENDS["nccl"]
KINDS = [kind for kind in TRAFFIC if NCCL.codes(kind)]


# ---- bench comm -----------------------------------------------------------------------------------------------------


@pytest.mark.full(reason="four processes import torch, twice")
def test_the_schedules_of_a_cluster_on_this_machine(tmp_path: Path) -> None:
    """Two nodes of two ranks: sums in two levels, in the documented order; each shard enters a node once."""
    path = tmp_path / "slots.json"
    words = f"bench comm --backend slots --ranks 4 --nodes 2 --numel 3M --repeats 1 --iterations 2 --json {path}"
    assert python("-m", "ds_zipccl", *words.split()).returncode == 0
    found = {(row["op"], row["variant"]): row for row in content(path)["rows"]}
    assert {row["nodes"] for row in found.values()} == {2} and not any(row["wrong"] for row in found.values())
    numel = found["all_gather", "raw"]["numel"]
    assert found["all_gather", "plain"]["between_bytes"] is None
    for op in KINDS:
        assert found[op, "coded"]["between_bytes"] < found[op, "raw"]["between_bytes"]
    shards = numel  # bytes of the two shards of a node
    assert shards <= found["all_gather", "raw"]["between_bytes"] < 2 * shards


def measured(rank: int, ranks: int, kind: str) -> list[dict[str, Any]]:
    """Return the rows of a rank on the simulated GPU."""
    case = cases.Case(kind, "bfloat16", 3000 * ranks, data.Spec("normal"), 1, 60.0, ("plain", "coded"), 2)
    return trial.measure(case, rank, ranks, None, NCCL, torch.device("cuda", rank))


@pytest.mark.parametrize("kind", KINDS)
def test_comm_on_the_simulated_gpu(kind: str) -> None:
    """Times come from events of the device, and the host reads no result too early."""
    kernels.route()
    for seed in range(2):
        outcome = world.run(measured, 2, kind, seed=seed, route=launcher.route())
        for row in outcome.values[0]:
            assert row["wrong"] == 0 and row["time_us"] > 0


def test_comm_counts_wrong_elements_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong bit per rank counts when results are compared. The first call of each rank stays right."""
    right, calls = trial.differing, []

    def differing(got: torch.Tensor, wanted: torch.Tensor, **more: Any) -> int:
        calls.append(more)
        if len(calls) > 2:
            got.view(torch.int16)[7:8].bitwise_xor_(1)
        return right(got, wanted, **more)

    kernels.route()
    monkeypatch.setattr(trial, "differing", differing)
    outcome = world.run(measured, 2, "all_gather", seed=1, route=launcher.route())
    assert [row["wrong"] for row in outcome.values[0]] == [2, 2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("comm", "--backend nccl needs a GPU, torch sees none here"),
        ("train", "--backend nccl needs a GPU, torch sees none here"),
        ("comm --link 1gbit", "--backend nccl needs a GPU, torch sees none here"),
    ],
)
def test_what_cannot_be_measured(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert_refused(["bench", *words.split(), "--backend", "nccl"], said, capsys)


def test_options_that_do_not_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(backends.BACKENDS, "nccl", Backend("slots", streams=True))
    for words, said in (
        ("--op broadcast", "--op broadcast passes plain on nccl groups"),
        ("--variants auto", "take bench train --backend nccl"),
        ("--iterations 0", "--iterations must be at least 1, got 0"),
    ):
        if words != "--op broadcast" or "broadcast" not in KINDS:
            assert_refused(["bench", "comm", "--backend", "nccl", *words.split()], said, capsys)


def test_ranks_that_share_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert NCCL.environment(2, 1) == {}
    shared = [NCCL.environment(4, rank) for rank in range(4)]
    assert len({one["NCCL_HOSTID"] for one in shared}) == 4
    assert {one["NCCL_NET"] for one in shared} == {"Socket"}
    assert [NCCL.local_rank(rank) for rank in range(4)] == [0, 1, 0, 1]
    NCCL.check()


def test_ranks_of_a_shaped_network_are_nodes_with_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    names = tuple(f"node{node}" for node in range(2))
    spec = link.parse("1gbit")
    assert spec is not None
    network = Network(spec, 2, names, ("10.93.0.1", "10.93.0.2"), "10.93.0.254")
    training = Training(SCRIPT, "zero2", ranks=2, steps=3, link=spec, backend=NCCL)
    environments = [environment for _, environment in _commands(training, network, [])]
    assert [one["NCCL_HOSTID"] for one in environments] == ["rank0", "rank1"]
    assert (
        {one["NCCL_SOCKET_IFNAME"] for one in environments}
        == {INTERFACE}
        == {one["GLOO_SOCKET_IFNAME"] for one in environments}
    )
    assert [one["LOCAL_RANK"] for one in environments] == ["0", "1"], "GPUs are those of the machine"
    assert {one["LOCAL_WORLD_SIZE"] for one in environments} == {"1"}


# ---- bench train ----------------------------------------------------------------------------------------------------


def test_ranks_of_a_training_share_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    training = Training(SCRIPT, "zero2", ranks=2, steps=3, backend=NCCL)
    commands = list(_commands(training, None, ["--results", "file"]))
    assert [environment["RANK"] for _, environment in commands] == ["0", "1"]
    assert {environment["LOCAL_RANK"] for _, environment in commands} == {"0"}
    assert [environment["NCCL_HOSTID"] for _, environment in commands] == ["rank0", "rank1"]
    assert len({environment["MASTER_PORT"] for _, environment in commands}) == 1
    for command, _ in commands:
        assert command[command.index("--backend") + 1] == "nccl" and "--ranks" not in command
        assert Path(command[command.index("--ds-config") + 1]).name == "ds_config_zero2.json"


def test_sections_of_trainings_on_nccl() -> None:
    section = bench._section("coded", ["nccl_min_bytes=0"], NCCL)
    assert section is not None and (section["nccl"], section["nccl_min_bytes"]) == ("on", 0)
    assert section["reduction"] == "match"
    more = bench._section("coded", [], NCCL, same_sums=False)
    assert more is not None and (more["reduction"], more["nccl_min_bytes"]) == ("fp32", 65536)


def test_verdict_where_sums_have_another_order() -> None:
    """Coded runs are compared with each other; waits are counted per step."""

    def run(loss: float, digest: str, coded: int) -> dict[str, Any]:
        sent = results()["sent"] | {"coded_calls": coded, "host_waits": 6.0}
        times = {"losses": [loss.hex()] * 2, "step_ms": [3.0, 2.0], "comm_ms": [1.0, 1.0]}
        return results(params_sha256=digest, sent=sent, **times)

    runs = {"plain": [run(1.0, "a", 0)], "raw": [run(2.0, "b", 3)], "coded": [run(2.0, "b", 3)]}
    assert not problems(runs, same_sums=False)
    assert problems(runs)
    runs["coded"].append(run(2.0, "c", 3))
    assert problems(runs, same_sums=False) == ["coded run: parameters differ from the first raw run's"]
    training = Training(SCRIPT, "zero3", ranks=4, steps=2, backend=NCCL)
    assert not training.same_sums
    assert [row["host_waits"] for row in rows(training, runs, skip=0)] == [3.0, 3.0, 3.0]
