"""Bases of ZeRO-3's gathers: the parameters that get memory, the gathers that find it, and the gathers of something else. Owners of a
gradient bucket: the all-reduce that takes them, and the calls that do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_zipccl.comm import CommError, GatheredParameter
from ds_zipccl.comm.bases.shared import BaseSlot
from ds_zipccl.comm.device.bases.agreed import Agreed
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.integration import hints, hook_points, hooks
from ds_zipccl.integration.zero import buckets, gathers
from ds_zipccl.integration.zero.buckets import Bucket
from ds_zipccl.policy.admission import STREAM_BACKENDS, PassReason
from ds_zipccl.telemetry import counters

DATA, OTHER = object(), object()  # groups
ON = ZipcclConfig(enabled=True, zero3_base="device")


@pytest.fixture(autouse=True)
def _nothing_is_known() -> Iterator[None]:
    with hints.hinting(parameters={}, bucket=[]):
        yield


def parameter(number: int, group: Any = DATA, *, persist: bool = False, numel: int = 100, **more: Any) -> Any:
    shard = SimpleNamespace(ds_numel=numel, dtype=torch.bfloat16)
    more.setdefault("requires_grad", True)
    more.setdefault("ds_zipccl_state", GatheredParameter(f"p{number}", numel, torch.bfloat16))
    return SimpleNamespace(ds_id=number, ds_persist=persist, ds_process_group=group, ds_tensor=shard, **more)


def slot_of(param: Any) -> BaseSlot | None:
    state = getattr(param, "ds_zipccl_state", None)
    return None if state is None else state.slot()


class Memory:
    """Stands for comm.allocate_bases on groups of two ranks over gloo."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, size: int = 2, backend: str = "gloo", node_ranks: int = 1
    ) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self._size, self._node_ranks = size, node_ranks
        members = SimpleNamespace(
            size=size, backend=lambda device: backend, streams=lambda device: backend in STREAM_BACKENDS
        )
        for name in ("group_state", "state_of"):
            monkeypatch.setattr(gathers, name, lambda group: None if group is None else members)
        monkeypatch.setattr(gathers, "group_size", lambda group: -1 if group is None else size)
        monkeypatch.setattr(gathers.comm, "allocate_bases", self.keep)

    def keep(self, shards: Any, kind: str, group: Any, device: Any) -> list[BaseSlot]:
        self.asked.append((shards, kind, group, device.type))
        return [
            BaseSlot(torch.zeros(self._size, numel, dtype=dtype), range(self._node_ranks), serial)
            for serial, (numel, dtype) in enumerate(shards)
        ]


CPU = torch.device("cpu")
SHARD = (100, torch.bfloat16)


def test_memory_is_for_what_is_freed_after_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that stay, and parameters that ZeRO-3 does not partition, get no memory. Each group allocates at once."""
    memory = Memory(monkeypatch)
    first, second, third = parameter(0), parameter(2), parameter(4, OTHER)
    stays, whole = parameter(1, persist=True), torch.nn.Parameter(torch.zeros(3))
    kept, said = gathers.allocate_bases([first, stays, second, whole, third], ON, CPU)
    assert memory.asked == [([SHARD, SHARD], "device", DATA, "cpu"), ([SHARD], "device", OTHER, "cpu")]
    assert [slot_of(one) for one in (first, second, third)] == kept
    assert slot_of(stays) is None and slot_of(whole) is None
    assert said == f"{3 * 400 / 1e6:.1f} MB, on every rank"
    kept[0].free()
    assert slot_of(first) is None and slot_of(second) is kept[1], "no list of one rank decides"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "delta": ({"delta": "off"}, "not used, as no gather would send differences: see delta"),
    "codec": ({"codec": "raw"}, "not used, as no gather would send differences: see codec"),
    "mode": ({"mode": "never", "delta": "off"}, "not used, as no gather would send differences: see delta, mode"),
    "role": ({"roles": {"zero_param": "never"}}, "not used, as no gather would send differences: see mode"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_no_memory_for_what_would_be_no_difference(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """Whether the user asks for bases, or frozen parameters would have them by themselves."""
    change, said = REFUSED[why]
    memory = Memory(monkeypatch)
    assert gathers.allocate_bases([parameter(0)], replace(ON, **change), CPU) == ([], said) and not memory.asked
    expected = f"nothing for 1 frozen parameters of 0.0 MB: {said.removeprefix('not used, as ')}"
    assert automatic(monkeypatch, [frozen(0)], replace(AUTO, **change)) == ([], [], expected)


def test_no_memory_where_nothing_is_sent_as_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    for more, device, skipped in (
        ({"size": 1}, "cpu", ""),
        ({"backend": "mpi"}, "cpu", "; no differences on cpu over mpi"),
        ({}, "cuda", "; no differences on cuda over gloo"),
        ({"backend": "nccl"}, "cuda", "; no differences on cuda over nccl: no sizes are agreed on with this optimizer"),
    ):
        memory = Memory(monkeypatch, **more)  # type: ignore[arg-type]
        unsized = {"ds_zipccl_state": None} if "backend" in more else {}
        assert gathers.allocate_bases([parameter(0, **unsized)], ON, torch.device(device)) == (
            [],
            f"0.0 MB, on every rank{skipped}",
        )
        assert not memory.asked
    memory = Memory(monkeypatch)
    assert gathers.allocate_bases([parameter(0, None)], ON, CPU)[0] == [] and not memory.asked, (
        "a group that others are in"
    )


def test_bases_in_the_order_of_streams_are_held_with_agreed_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, on = Memory(monkeypatch, backend="nccl"), replace(ON, nccl="on")
    cuda, params = torch.device("cuda"), [parameter(0), parameter(1)]
    agreed = [Agreed("first", 100), Agreed("second", 100)]
    for param, one in zip(params, agreed, strict=True):
        param.ds_zipccl_state = one
    kept, said = gathers.allocate_bases(params, on, cuda)
    assert [one.slot() for one in agreed] == kept and len(kept) == 2 and "no differences" not in said
    del params[0].ds_zipccl_state
    kept, said = gathers.allocate_bases(params, on, cuda)
    assert not kept and said.endswith("no differences on cuda over nccl: no sizes are agreed on with this optimizer")
    assert len(memory.asked) == 1


def test_what_a_node_shares_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    Memory(monkeypatch, size=4, node_ranks=3)
    kept, said = gathers.allocate_bases([parameter(0, numel=1_000_000)], ON, CPU)
    assert said == "8.0 MB, shared by the 3 ranks of a node" and len(kept) == 1


AUTO = ZipcclConfig(enabled=True)


def automatic(
    monkeypatch: pytest.MonkeyPatch,
    params: list[Any],
    config: ZipcclConfig = AUTO,
    limit: int = 1 << 30,
    trains: bool = True,
    device: torch.device = CPU,
    fitting: Any = None,
    other: str = "",
    waiting: gathers.Waiting | None = None,
    **memory: Any,
) -> tuple[list[tuple[Any, ...]], list[Any], str]:
    """Allocations that were asked for, the parameters that have a base, and the sentence; ``limit`` bytes fit. ``other``: what rank 1 says
    of the parameters that it trains, "": the same."""
    made = Memory(monkeypatch, **memory)

    def first_that_fit(shards: Any, share: int, group: Any, device: Any, kind: str) -> tuple[list[int], int]:
        left, chosen = limit, []
        for number, (numel, dtype) in enumerate(shards):
            if 2 * numel * dtype.itemsize <= left:
                left -= 2 * numel * dtype.itemsize
                chosen.append(number)
        return chosen, limit

    monkeypatch.setattr(gathers, "choose_fitting", fitting or first_that_fit)
    monkeypatch.setattr(gathers, "group_nodes", lambda group: [[0, 1]])
    monkeypatch.setattr(gathers, "resolve_group", lambda group: DATA)
    monkeypatch.setattr(gathers.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(gathers.topology, "tell", lambda group, text: {0: text, 1: other or text})
    kept, said = gathers.allocate_bases(params, config, device, trains=trains, waiting=waiting)
    return made.asked, [param for param in params if slot_of(param) in kept], said


def frozen(number: int, **more: Any) -> Any:
    return parameter(number, **more, requires_grad=False)


def test_by_itself_only_frozen_parameters_have_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    """In host memory. Not for those that stay gathered. A model without any says so: it may be frozen too late."""
    params = [frozen(0), parameter(1), frozen(2), frozen(3, persist=True), torch.nn.Parameter(torch.zeros(3), False)]
    asked, have, said = automatic(monkeypatch, params, node_ranks=2)
    assert asked == [([SHARD, SHARD], "host", DATA, "cpu")] and have == [params[0], params[2]]
    assert said.startswith('0.0 MB, shared by the 2 ranks of a node, for 2 frozen parameters; "host" keeps')
    said = automatic(monkeypatch, [parameter(0), frozen(1, persist=True)])[2]
    further = """host" keeps trained ones too in 0.0 MB of each node's memory: backward passes and further micro-batches gather without"""
    assert said == f'none: no gathered parameter is frozen now; "{further} a message'
    assert said.partition("; ")[2] in [row["choices"].get("zero3_base", ("",))[0] for row in counters.rows()]
    assert automatic(monkeypatch, [frozen(0)], size=1) == ([], [], "")
    assert automatic(monkeypatch, params, other="ftt")[1] == [params[0]]  # which gathers send is no matter of one rank


def test_all_parameters_are_frozen_without_an_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk = frozen(2)
    on_disk.ds_tensor.final_location = "nvme"
    _, have, said = automatic(monkeypatch, [*(params := [parameter(0), frozen(1)]), on_disk], trains=False)
    assert have == params and said.endswith("for 2 frozen parameters")


def test_as_many_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    big, small = frozen(0, numel=1_000_000), frozen(1, numel=100_000)
    _, have, said = automatic(monkeypatch, [big, small], limit=1_000_000)
    limited = "1.0 MB are allowed on a node, see zero3_base_mib"
    assert have == [small] and said == f"0.4 MB, on every rank, for 1 of 2 frozen parameters: {limited}"
    _, have, said = automatic(monkeypatch, [big], limit=1_000_000)
    assert not have and said == f"nothing for 1 frozen parameters of 4.0 MB: {limited}"


def test_an_allocation_that_fails_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(*arguments: Any) -> list[BaseSlot]:
        raise CommError("0.0 MB of memory cannot be had: as planted")

    monkeypatch.setattr(Memory, "keep", keep)
    _, have, said = automatic(monkeypatch, [frozen(0)])
    assert not have and said.endswith("for 1 frozen parameters of 0.0 MB: 0.0 MB of memory cannot be had: as planted")
    with pytest.raises(CommError, match="as planted"):
        gathers.allocate_bases([frozen(0)], replace(AUTO, zero3_base="host"), CPU)


def test_nothing_by_itself_where_gathers_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """On NCCL groups whose gathers pass as long as the job runs, unless the mode is always."""
    param, reasons = frozen(0, ds_zipccl_state=Agreed("first", 100)), [PassReason.INSIDE_NODE, None]
    more: dict[str, Any] = {"device": torch.device("cuda"), "backend": "nccl"}
    monkeypatch.setattr(gathers.comm_engine, "never_coded", lambda op, group, device: reasons.pop(0))
    kinds = [(), ("host",), ()]
    engine = SimpleNamespace(kinds_of_bases=lambda group, device: kinds.pop(0))
    monkeypatch.setattr(gathers.comm_engine, "engine_of", lambda state, device: engine)
    on = replace(AUTO, nccl="on")
    asked, _, said = automatic(monkeypatch, [param], on, **more)
    assert not asked and said.endswith("0.0 MB: gathers on cuda over nccl pass: inside one node")
    asked, _, said = automatic(monkeypatch, [param], on, **more)
    assert asked == [([SHARD], "host", DATA, "cuda")] and param.ds_zipccl_state.slot() is not None
    asked, _, said = automatic(monkeypatch, [param], replace(on, mode="always"), **more)
    assert asked and not reasons
    reasons += [None]
    asked, _, said = automatic(monkeypatch, [param], on, **more)
    assert not asked and said.endswith("0.0 MB: the network is faster than the memory of bases on cuda over nccl")
    asked, _, said = automatic(monkeypatch, [frozen(0, ds_zipccl_state=None)], replace(AUTO, nccl="off"), **more)
    assert not asked and said.endswith("no differences on cuda over nccl: nccl is off")


def test_devices_of_a_node_keep_frozen_parameters_after_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are faster than host memory; a quarter of what is free then, or the limit of the user. Otherwise the host keeps them."""
    refused, fails = [""], [False]
    kinds = SimpleNamespace(kinds_of_bases=lambda group, device: ("node", "host"))
    monkeypatch.setattr(gathers.comm_engine, "never_coded", lambda op, group, device: None)
    monkeypatch.setattr(gathers.comm_engine, "engine_of", lambda state, device: kinds)
    monkeypatch.setattr(gathers, "node_refused", lambda group: refused[0])
    monkeypatch.setattr(gathers.devices, "free_memory", lambda device: 1 << 30)
    keep, shares = Memory.keep, []

    def fitting(shards: Any, share: int, group: Any, device: Any, kind: str) -> tuple[list[int], int]:
        shares.append((kind, share >> 20))
        return list(range(len(shards))), share

    def failing(memory: Memory, shards: Any, kind: str, *more: Any) -> list[BaseSlot]:
        if kind == "node" and fails[0]:
            raise CommError("no memory, as planted")
        return keep(memory, shards, kind, *more)

    monkeypatch.setattr(Memory, "keep", failing)
    cuda, on = torch.device("cuda"), replace(AUTO, nccl="on")
    more: dict[str, Any] = {"device": cuda, "backend": "nccl", "fitting": fitting}
    for mib, allowed, fails[0], found in (
        (0, 256, False, ["node"]),
        (64, 32, False, ["node"]),
        (0, 256, True, ["host"]),
    ):
        config, shares[:] = replace(on, zero3_base_mib=mib), []
        params, waiting = [frozen(0, ds_zipccl_state=Agreed("first", 100))], gathers.Waiting()
        asked, have, said = automatic(monkeypatch, params, config, waiting=waiting, **more)
        assert (
            not asked
            and not have
            and said.startswith("after 2 steps, in the memory that the devices of a node have left")
        )
        assert waiting.end_step(config, cuda) == ([], "") and not shares
        bases, said = waiting.end_step(config, cuda)
        assert len(bases) == 1 and said.endswith("for 1 frozen parameters" + ": no memory, as planted" * fails[0])
        assert shares[0] == ("node", allowed) and [kind for kind, _ in shares[-1:]] == found
        assert waiting.end_step(config, cuda) == ([], "")
    params = [frozen(0, ds_zipccl_state=Agreed("first", 100))]
    asked, *_ = automatic(monkeypatch, params, on, **more)  # an engine that leaves no room for them
    refused[0] = "as planted"
    asked += automatic(monkeypatch, params, on, waiting=gathers.Waiting(), **more)[0]
    assert asked == [([SHARD], "host", DATA, "cuda")] * 2
    asked, _, said = automatic(monkeypatch, params, replace(on, zero3_base="node"), **more)
    assert (
        not asked
        and said
        == '0.0 MB, on every rank; no group on cuda over nccl keeps parameters by node, as as planted: set "host"'
    )


@pytest.mark.parametrize(("mib", "shares"), [(0, [50, 40]), (64, [12, 2])])
def test_groups_share_the_limit(monkeypatch: pytest.MonkeyPatch, mib: int, shares: list[int]) -> None:
    """A limit of the user counts the bases of earlier engines, here 20 MiB a rank; these have left less memory available anyhow."""
    monkeypatch.setattr(gathers.host_memory, "available", lambda: 400 << 20)
    held, asked = [20 << 20], []

    def fitting(shards: Any, share: int, group: Any, device: Any, kind: str) -> tuple[list[int], int]:
        asked.append(share / (1 << 20))
        held[0] += 10 << 20
        return [0], share

    monkeypatch.setattr(gathers, "held_share", lambda: held[0])
    params = [frozen(0), frozen(1, group=OTHER)]
    automatic(monkeypatch, params, replace(AUTO, zero3_base_mib=mib), fitting=fitting)
    assert asked == shares


def test_the_limit_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has its part of a quarter of the available memory, or of the limit of the user, if the node has that and some more."""
    monkeypatch.setattr(gathers.host_memory, "available", lambda: 800 << 20)
    monkeypatch.setattr(gathers, "resolve_group", lambda group: DATA)
    monkeypatch.setattr(gathers, "group_size", lambda group: 8)
    monkeypatch.setattr(gathers.dist, "get_rank", lambda: 5)
    for nodes, ranks in (([[0, 1, 2, 3], [4, 5]], 2), ([], 8)):
        monkeypatch.setattr(gathers, "group_nodes", lambda group, nodes=nodes: nodes)
        for mib, allowed in ((0, 200), (8, 8), (640, 640), (10_000, 700)):
            assert gathers._share(replace(AUTO, zero3_base_mib=mib)) * ranks >> 20 == allowed


def test_garbage_collection_of_an_engine_ends_nothing() -> None:
    """``DeepSpeedEngine.__del__`` destroys it at a moment of one rank; the others still gather from bases."""
    engine: Any = torch.nn.Module()
    engine.device, engine.ds_zipccl_bases = CPU, [BaseSlot(torch.zeros(2, 8), [0], 0)]
    with hints.hinting(collected=True):
        hooks._destroy(lambda engine: None, engine)
    (slot,) = engine.ds_zipccl_bases
    assert not slot.freed
    hooks._destroy(lambda engine: None, engine)
    assert slot.freed and engine.ds_zipccl_bases is None


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """DeepSpeed asks two ranks for three parameters, of 100, 100 and 300 elements per rank."""
    Memory(monkeypatch)
    params = [parameter(number, numel=numel) for number, numel in enumerate((100, 100, 300))]
    kept, _ = gathers.allocate_bases(params, ON, CPU)
    with hints.hinting(parameters={one.ds_id: one for one in params}):
        yield kept
    del kept


def of(numel: int, group: Any = DATA, dtype: torch.dtype = torch.bfloat16) -> list[BaseSlot] | None:
    params = gathers.take_parameters(torch.empty(2 * numel, dtype=dtype), group)
    return [slot for one in gathers.parameters_of(params) if (slot := one.fitting(2, dtype)) is not None] or None


def test_parameters_are_gathered_together_or_one_after_the_other(wanted: list[BaseSlot]) -> None:
    asked = dict(hints.current().parameters)
    assert of(500) == wanted
    assert of(500) is None, "they are asked for once"
    hints.current().parameters.update(asked)
    assert [of(numel) for numel in (100, 100, 300, 100)] == [*([kept] for kept in wanted), None]


def test_gathers_of_something_else(wanted: list[BaseSlot]) -> None:
    """A gather of another size, dtype or group has no base, and the parameters are still awaited."""
    assert of(499) is of(300) is of(200) is of(600) is None
    assert of(500, OTHER) is of(500, None) is of(500, dtype=torch.float32) is None
    assert of(500) == wanted


def test_a_gather_of_parameters_one_of_which_has_no_state(wanted: list[BaseSlot]) -> None:
    asked = hints.current().parameters
    asked[9] = parameter(9, numel=50, ds_zipccl_state=None)
    params = gathers.take_parameters(torch.empty(2 * 550, dtype=torch.bfloat16), DATA)
    assert [param.ds_id for param in params] == [0, 1, 2, 9] and not asked
    assert gathers.parameters_of(params) == ()


def test_who_asks_is_watched() -> None:
    """Parameters are noted in DeepSpeed's order, by number, until the end of the call."""
    seen: list[list[int]] = []

    def note(params: Any) -> None:
        seen.append([*hints.current().parameters])
        assert [one.ds_id for one in params] == [3, 1, 2]

    class Init:
        def _convert_to_deepspeed_param(self, param: Any) -> None:
            def all_gather_coalesced(params: Any, fail: bool = False) -> str:
                note(params)
                if fail:
                    raise RuntimeError("as planted")
                return "handle"

            param.all_gather_coalesced = all_gather_coalesced

        def _all_gather(self, param_list: Any, async_op: bool = False) -> str:
            note(param_list)
            return "one by one"

    hook_points.adopt(SimpleNamespace(Init=Init), "deepspeed.runtime.zero.partition_parameters")
    params = [parameter(number) for number in (3, 1, 2)]
    Init()._convert_to_deepspeed_param(params[0])
    assert params[0].all_gather_coalesced(iter(params)) == "handle"
    assert hints.current().parameters == {}
    with pytest.raises(RuntimeError, match="as planted"):
        params[0].all_gather_coalesced(params, fail=True)
    assert hints.current().parameters == {} and seen == [[1, 2, 3]] * 2
    for param, status in zip(params, ("NOT_AVAILABLE", "AVAILABLE", "NOT_AVAILABLE"), strict=True):
        param.ds_status = SimpleNamespace(name=status)
    assert Init()._all_gather(iter(params)) == "one by one"
    assert hints.current().parameters == {} and seen[2:] == [[3, 2]], "in the order of the call, those not gathered yet"


# ---- owners of a gradient bucket

OWNED = [(600, frozenset({0})), (400, frozenset({1, 2}))]
BUCKET = Bucket(DATA, OWNED)  # type: ignore[arg-type]
#: Elements, reduce op, group and async_op of calls that do not fit the bucket.
CALLS: dict[str, tuple[int, Any, Any, bool]] = {
    "smaller": (999, dist.ReduceOp.SUM, DATA, False),
    "larger": (1001, dist.ReduceOp.SUM, DATA, False),
    "nothing": (0, dist.ReduceOp.SUM, DATA, False),
    "another op": (1000, dist.ReduceOp.MAX, DATA, False),
    "averages": (1000, dist.ReduceOp.AVG, DATA, False),
    "another group": (1000, dist.ReduceOp.SUM, OTHER, False),
    "the default group": (1000, dist.ReduceOp.SUM, None, False),
    "later": (1000, dist.ReduceOp.SUM, DATA, True),
}
RIGHT = (torch.empty(10, 100), dist.ReduceOp.SUM, DATA, False)


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_is_not_of_the_bucket(call: str) -> None:
    """The call gets the full sums, and the owners are forgotten for later calls too."""
    numel, *more = CALLS[call]
    assert not BUCKET.fits(torch.empty(numel), *more)
    hints.current().bucket.append(BUCKET)
    assert buckets.take_owners(torch.empty(numel), *more) is None
    assert buckets.take_owners(*RIGHT) is None


def test_a_bucket_is_for_one_call() -> None:
    assert buckets.take_owners(*RIGHT) is None
    hints.current().bucket.append(BUCKET)
    with hints.hinting(kind="dispatch"):  # another hint keeps the bucket, and does not bring it back
        assert buckets.take_owners(*RIGHT) == OWNED
    assert hints.current().bucket == []
    assert buckets.take_owners(*RIGHT) is None, "of the same size, but another's"


class Optimizer:
    """An optimizer whose reduction returns the bucket that is noted at that time."""

    dp_process_group = DATA

    def allreduce_and_copy_with_multiple_ranks(
        self, small_bucket: list[torch.Tensor], communication_data_type: Any = None, process_group: Any = None,
        bucket_ranks: Any = None, fail: bool = False,
    ) -> Any:  # fmt: skip
        if fail:
            raise RuntimeError("as planted")
        return next(iter(hints.current().bucket), None)


NAME = "allreduce_and_copy_with_multiple_ranks"
SMALL_BUCKET = [torch.empty(20, 30), torch.empty(400)]


@pytest.fixture
def optimizer() -> Any:
    """An optimizer of a class of its own, which is watched."""
    watched = type("Watched", (Optimizer,), {NAME: getattr(Optimizer, NAME)})
    hook_points.surround(f"DeepSpeedZeroOptimizer.{NAME}", watched)
    return watched()


def test_what_is_known_of_a_bucket(optimizer: Any) -> None:
    reduce = getattr(optimizer, NAME)
    assert reduce(SMALL_BUCKET, bucket_ranks=[0, frozenset({1, 2})]) == BUCKET
    assert reduce(SMALL_BUCKET, None, OTHER, [0, frozenset({1, 2})]) == Bucket(OTHER, OWNED)  # type: ignore[arg-type]
    assert reduce(SMALL_BUCKET) is None, "no owners"
    assert hints.current().bucket == [], "afterwards nothing is known"
    with pytest.raises(ValueError, match="zip"):
        reduce(SMALL_BUCKET, bucket_ranks=[0])
    with pytest.raises(RuntimeError, match="as planted"):
        reduce(SMALL_BUCKET, bucket_ranks=[0, 1], fail=True)
    assert hints.current().bucket == []


def test_zenflow_keeps_its_sums_whole(optimizer: Any) -> None:
    for on, wanted in ((True, None), (False, BUCKET)):
        optimizer.zenflow = on
        assert getattr(optimizer, NAME)(SMALL_BUCKET, bucket_ranks=[0, frozenset({1, 2})]) == wanted
