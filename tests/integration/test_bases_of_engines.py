"""Every route by which parameters of ZeRO-3 change, or a copy of them could grow stale: the bits of plain DeepSpeed, and the costs.

The routes of tests/support/zero_routes.py run one after the other in one launch: plain, and coded with every ``zero3_base``, over gloo and
over ``slots`` (benchmarks/links/slots.py), the schedules of NCCL groups on CPUs. Over these a write behind DeepSpeed's back to a parameter
with a base, or to words whose frames do not fit, stops all ranks before the next step.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiers
import torch
import torch.distributed as dist
import zero_routes
from engines import SOURCES, bits, digest, rank_program, slot_of
from programs import launch, plain_and_coded, reference
from zero_routes import BASES, HPZ, ROUTES, SIZES, Table, count_proofs, noise, run, weights

from ds_zipccl.benchmarks.links import slots
from ds_zipccl.comm import CommError, topology
from ds_zipccl.comm.bases.state import AGREEMENT, GATHER
from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.comm.host import cached
from ds_zipccl.comm.host import gather as host_gather
from ds_zipccl.integration import hooks
from ds_zipccl.integration.zero import gathers
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.telemetry import counters

SECTION = {"enabled": True, "mode": "always", "min_bytes": 1024, "nccl": "on", "nccl_min_bytes": 4096}
SECTION |= {"reduction": "fp32"}
GLOO, STREAMS = "gloo", slots.NAME


def by_node(lab: Table) -> None:
    """Two nodes of two ranks: DeepSpeed's secondary shards, and our bases, are those of a node."""
    topology.here = lambda: f"node {lab.rank // 2}"
    run(lab, HPZ)
    slot = slot_of(lab.common("hpz").module.layers[0].weight)
    wanted = None if os.environ["DS_ZIPCCL"] == "0" else [[0, 1], [2, 3]][lab.rank // 2]
    assert (None if slot is None else slot.node_ranks) == wanted


CASES = {name: partial(run, route=route) for name, route in (ROUTES | {"hpz": HPZ}).items()}
CASES["hpz by node"] = by_node

# ---- changes that stop all ranks of groups in the order of streams ---------------------------------------------------


def stopped(lab: Table, by: Callable[[Any], None], batches: int = 0, of: str = "mixed") -> None:
    """A change after ``batches`` of a step, by rank 1 or by all ranks: all ranks stop in the batches that are left, before the step. The
    error is the last loss."""
    engine = lab.start(of)
    for _ in range(batches):
        lab.backward(engine)
        engine.step()
    by(engine)
    before = digest(engine.module.parameters())
    with pytest.raises(CommError) as raised:  # the agreement of a coded sum comes first, where there is one
        for _ in range(engine.gradient_accumulation_steps() - batches):
            lab.backward(engine)
            engine.step()
    lab.losses.append(str(raised.value))
    assert digest(engine.module.parameters()) == before


def larger(engine: Any) -> None:
    """Words whose frames do not fit."""
    shard = weights(engine)[1].ds_tensor
    if dist.get_rank() == 1:
        with torch.no_grad():
            shard.copy_(noise(shard, 5))


def halved(engine: Any) -> None:
    """Before the first gather of a version the difference is larger than agreed; between batches of a step no rank gets the
    words. After the step no rank gets those of a frozen shard."""
    if dist.get_rank() == 1:
        with torch.no_grad():
            weights(engine)[1].ds_tensor.mul_(0.5)


LARGER, REFUSED = ("layers.1.weight of group rank", "larger than agreed"), ("layers.1.weight of group rank 1 refused",)
CHANGED = ("layers.1.weight: gathered before, and changed since",)
ALL, TWO = "all trained", "accumulating, all trained"
#: Case -> program, ranks, zero3_base, words of the error. Refused frames stay known, so that each has processes of its own.
STOPS: dict[str, tuple[Callable[[Table], None], int, str, tuple[str, ...]]] = {
    "larger": (partial(stopped, by=larger, of=ALL), 3, "auto", LARGER + REFUSED),
    "between batches": (partial(stopped, by=halved, batches=1, of=TWO), 2, "host", CHANGED),
    "between steps": (partial(stopped, by=halved, of=TWO), 2, "host", REFUSED),
    "frozen shard": (partial(stopped, by=halved), 2, "auto", CHANGED),
}

# ---- planted mistakes ----------------------------------------------------------------------------------------------


def blind_gather(
    ctx: Any, own: torch.Tensor, places: Any, base: Any, original: Any = host_gather.gather_differences
) -> None:
    """Planted: a gather with a base claims that no word has ever changed."""
    buffers = PooledBuffers()
    last = base.begin(ctx, places, buffers)
    if last is None:
        original(ctx, own, places, base)
    else:
        places[ctx.rank].copy_(last)
        counters.record_difference(ctx.role, ctx.op, "")
    buffers.release()


#: Each makes a weight that has changed look unchanged over gloo.
MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "questions": (cached, "same_bits", lambda *tensors: True),
    "gathers": (host_gather, "gather_differences", blind_gather),
}


def prefer_devices() -> None:
    """As where the devices of a node measure faster than its host memory, and the config leaves room for parameters. Ranks without a base
    there fail at the end."""
    usable, allocate, kinds = gathers._usable, gathers.comm.allocate_bases, set()

    def preferred(*call: Any) -> tuple[Any, ...]:
        some, _, reason = usable(*call)
        return some, ("node", "host") if call[-1] else ("host",), reason

    def noted(shards: Any, kind: str, *call: Any) -> Any:
        kinds.add(kind)
        return allocate(shards, kind, *call)

    gathers._usable, gathers.comm.allocate_bases, hooks._has_room = preferred, noted, lambda engine: True
    atexit.register(lambda: kinds == {"node"} or os._exit(1))


# ---- tests ---------------------------------------------------------------------------------------------------------

WITH = (*SOURCES, Path(zero_routes.__file__))
Run = dict[str, list[dict[str, Any]]]
#: Engine, zero3_base, edit.
RUNS = [
    (engine, base, name)
    for engine in (GLOO, STREAMS)
    for base in BASES
    for name in ROUTES
    if engine == GLOO or base in ROUTES[name].streams
]
SHORT = [one for one in RUNS if one[:2] == (GLOO, "host")][::4]
some = pytest.mark.parametrize(("engine", "base", "edit"), tiers.mostly_full(RUNS, SHORT, "more than a minute"))


def coded(engine: str, base: str, **more: Any) -> dict[str, str]:
    """The environment of coded runs; ``more``: keys of the section."""
    order = "match" if engine == GLOO else "fp32"
    return {"DS_ZIPCCL": json.dumps(SECTION | {"zero3_base": base, "reduction": order} | more), "BACKEND": engine}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Run]:
    """Of those routes that were asked for, by engine and base; ("", ""): the plain ones. Each launch has them all: they share engines."""
    asked = {one for one in RUNS if one in tiers.asked(request, "engine", "base", "edit")}
    names = [name for name in ROUTES if any(name == one[2] for one in asked)]
    found = {("", ""): reference(__file__, 2, tmp_path_factory.mktemp("plain"), *names, sources=WITH)}
    for engine, base in dict.fromkeys(one[:2] for one in RUNS if one in asked):
        some = [name for name in names if (engine, base, name) in RUNS]
        found[engine, base] = launch(__file__, 2, tmp_path_factory.mktemp("coded"), *some, **coded(engine, base))
    return found


@some
def test_every_route_has_the_bits_of_plain_deepspeed(
    results: dict[tuple[str, str], Run], engine: str, base: str, edit: str
) -> None:
    assert bits(results[engine, base][edit]) == bits(results["", ""][edit])


@some
def test_every_route_costs_what_the_table_has(
    results: dict[tuple[str, str], Run], engine: str, base: str, edit: str
) -> None:
    expected = ROUTES[edit]
    for rank in results[engine, base][edit]:
        phases = [phase for phase in rank["phases"] if phase["phase"] != "before"]
        rows = [phase["rows"].get(f"zero_param {op}", {}) for op in (GATHER, AGREEMENT) for phase in phases]
        waits = [sum(row.get("host_waits", 0) for row in some) for some in (rows[:2], rows[2:])]
        changed = sum(phase["differences"].get(cached.CHANGED, 0) for phase in phases)
        assert not any(phase["left"] for phase in phases), "memory of bases goes with its engine"
        assert engine == GLOO or waits == [*expected.waits] or (base, edit) == ("off", "quantised"), "no base, no frame"
        assert (engine, base) != (STREAMS, "auto") or sum(phase["proofs"] for phase in phases) == expected.proofs
        if base != "off":
            assert engine == STREAMS or changed == expected.changed
            assert all(phase["messages"] < 1000 for phase in phases)
            assert edit != "biases trained" or not any(phase["sent"] for phase in phases), "all is copied"
            differences = phases[-1]["differences"]
            assert sum(differences.values()) <= 2 * differences.get("", 0), "most are differences"


#: Routes over bases that the devices of a node keep together: those whose writes end versions.
ON_DEVICES = tuple(name for name, route in ROUTES.items() if "host" in route.streams)
FEW = ("optimizer steps", "gathered, rank 0 writes", "rolled back", "two engines", "biases trained", "offload")
#: More launches: ranks, engine, zero3_base, keys of the section, routes.
MORE: dict[str, tuple[int, str, str, dict[str, Any], tuple[str, ...]]] = {
    "by time": (2, GLOO, "host", {"mode": "auto"}, ("optimizer steps", "gathered, rank 0 writes", "shards, in a step")),
    "hpz": (4, GLOO, "auto", {}, ("optimizer steps", "hpz")),
    "hpz by node": (4, GLOO, "host", {}, ("hpz by node",)),
    "hpz in the order of streams": (4, STREAMS, "auto", {"roles": {"zero_grad": "never"}}, ("hpz",)),
    "by the devices of two nodes, frozen parameters": (4, STREAMS, "auto", {"roles": {"zero_grad": "never"}}, FEW),
    "by the devices of two nodes": (4, STREAMS, "node", {"roles": {"zero_grad": "never"}}, ON_DEVICES),
}


@pytest.mark.full(reason="four ranks; schedules by time")
@pytest.mark.parametrize("name", MORE)
def test_more_ranks_and_schedules(tmp_path: Path, name: str) -> None:
    ranks, engine, base, keys, routes = MORE[name]
    devices = name.startswith("by the devices")
    nodes = {"RANKS_OF_NODE": "2"} if devices else {}
    plain, run = plain_and_coded(
        __file__, ranks, tmp_path, *routes, sources=WITH, timeout=480, **coded(engine, base, **keys), **nodes
    )
    assert all(bits(run[route]) == bits(plain[route]) for route in routes)
    for rank in run["hpz"] if "hpz" in run and engine == STREAMS else ():  # backward passes gather inside a pair
        row = rank["phases"][-1]["rows"][f"zero_param {GATHER}"]
        assert row["calls"] and not row["host_waits"] and row["reasons"][PassReason.SECONDARY.value]
    for rank in run["biases trained"] if devices else ():
        assert not rank["phases"][-1]["sent"], "all is copied"


@pytest.mark.full
@pytest.mark.parametrize("case", STOPS)
def test_all_ranks_stop(tmp_path: Path, case: str) -> None:
    _, ranks, base, words = STOPS[case]
    for number, rank in enumerate(launch(__file__, ranks, tmp_path, case, **coded(STREAMS, base))[case]):
        assert all(some in rank["losses"][-1] for some in words), f"rank {number}: {rank['losses'][-1]}"


@pytest.mark.full(reason="more launches")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(tmp_path: Path, mistake: str) -> None:
    routes = "gathered, rank 0 writes", "shards, frozen weight", "shards, in a step"
    (tmp_path / "wrong").mkdir(), (tmp_path / "plain").mkdir()
    plain = reference(__file__, 2, tmp_path / "plain", *routes, sources=WITH)
    wrong = launch(__file__, 2, tmp_path / "wrong", *routes, **coded(GLOO, "auto"), MISTAKE=mistake)
    assert all(bits(wrong[route]) != bits(plain[route]) for route in routes)


if __name__ == "__main__":
    count_proofs()
    if os.environ.get("MISTAKE"):
        setattr(*MISTAKES[os.environ["MISTAKE"]])
    if node := int(os.environ.get("RANKS_OF_NODE", 0)):
        topology.here = lambda: f"node {int(os.environ['RANK']) // node}"
        prefer_devices()
    programs = CASES | {name: program for name, (program, *_) in STOPS.items()}
    rank_program(programs, os.environ.get("BACKEND"), make=Table, sizes=SIZES)
