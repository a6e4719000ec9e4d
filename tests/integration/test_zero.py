"""What is known of a collective of ZeRO, by tables: whose a bucket is, which parameters a gather is of, and when nothing is known."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_zipccl.comm.delta.shared_base import BaseSlot
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.integration import zero
from ds_zipccl.integration.zero import _Bucket

DATA, OTHER = object(), object()  # groups
OWNED = [(600, frozenset({0})), (400, frozenset({1, 2}))]
BUCKET = _Bucket(DATA, OWNED)  # type: ignore[arg-type]
UNKNOWN = (None, "the owners of the bucket are not known")
ON = ZipcclConfig(enabled=True, zero3_base="device")


@pytest.fixture(autouse=True)
def _nothing_is_known() -> Iterator[None]:
    for variable in (zero._bucket, zero._wanted):
        variable.set(None)
    yield
    for variable in (zero._bucket, zero._wanted):
        variable.set(None)


# ---- buckets of gradients ----------------------------------------------------------------------------------------------

#: elements, reduce op, group, whether asynchronous.
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
    """It gets the sums whole, and what was known is of no later call either."""
    numel, *more = CALLS[call]
    assert not BUCKET.fits(torch.empty(numel), *more)
    zero._bucket.set(BUCKET)
    assert zero.owned(torch.empty(numel), *more) == UNKNOWN
    assert zero.owned(*RIGHT) == UNKNOWN


def test_a_bucket_is_for_one_call() -> None:
    assert zero.owned(*RIGHT) == UNKNOWN
    zero._bucket.set(BUCKET)
    assert zero.owned(*RIGHT) == (OWNED, "")
    assert zero._bucket.get() is None
    assert zero.owned(*RIGHT) == UNKNOWN, "of the same size, but another's"


class Optimizer:
    """Says what is known while a bucket is reduced."""

    dp_process_group = DATA

    def allreduce_and_copy_with_multiple_ranks(
        self, small_bucket: list[torch.Tensor], communication_data_type: Any = None, process_group: Any = None,
        bucket_ranks: Any = None, fail: bool = False,
    ) -> Any:  # fmt: skip
        """The one of DeepSpeed."""
        if fail:
            raise RuntimeError("as planted")
        return zero._bucket.get()


NAME = "allreduce_and_copy_with_multiple_ranks"
SMALL_BUCKET = [torch.empty(20, 30), torch.empty(400)]


@pytest.fixture
def optimizer() -> Any:
    watched = type("Watched", (Optimizer,), {NAME: getattr(Optimizer, NAME)})
    zero.watch_buckets(watched)
    return watched()


def test_what_is_known_of_a_bucket(optimizer: Any) -> None:
    reduce = getattr(optimizer, NAME)
    assert reduce(SMALL_BUCKET, bucket_ranks=[0, frozenset({1, 2})]) == BUCKET
    assert reduce(SMALL_BUCKET, None, OTHER, [0, frozenset({1, 2})]) == _Bucket(OTHER, OWNED)  # type: ignore[arg-type]
    assert reduce(SMALL_BUCKET) is None, "no owners"
    assert zero._bucket.get() is None, "afterwards nothing is known"
    with pytest.raises(ValueError, match="zip"):
        reduce(SMALL_BUCKET, bucket_ranks=[0])
    with pytest.raises(RuntimeError, match="as planted"):
        reduce(SMALL_BUCKET, bucket_ranks=[0, 1], fail=True)
    assert zero._bucket.get() is None


def test_zenflow_keeps_its_sums_whole(optimizer: Any) -> None:
    for on, wanted in ((True, None), (False, BUCKET)):
        optimizer.zenflow = on
        assert getattr(optimizer, NAME)(SMALL_BUCKET, bucket_ranks=[0, frozenset({1, 2})]) == wanted


def test_watching_twice_is_watching_once() -> None:
    watched = type("Watched", (Optimizer,), {NAME: getattr(Optimizer, NAME)})
    zero.watch_buckets(watched)
    once = getattr(watched, NAME)
    assert once is not getattr(Optimizer, NAME) and once.__doc__ == "The one of DeepSpeed."
    zero.watch_buckets(watched)
    assert getattr(watched, NAME) is once
    bare = type("Bare", (), {})
    zero.watch_buckets(bare)
    assert not hasattr(bare, NAME)


# ---- memory for gathers ------------------------------------------------------------------------------------------------


def parameter(number: int, group: Any = DATA, *, persist: bool = False, numel: int = 100, **more: Any) -> Any:
    shard = SimpleNamespace(ds_numel=numel, dtype=torch.bfloat16)
    return SimpleNamespace(ds_id=number, ds_persist=persist, ds_process_group=group, ds_tensor=shard, **more)


class Memory:
    """comm.allocate_bases on groups of two ranks on gloo."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int = 2, backend: str = "gloo", mates: int = 1) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self._size, self._mates = size, mates
        members = SimpleNamespace(size=size, backend=lambda device: backend)
        monkeypatch.setattr(zero, "group_state", lambda group: None if group is None else members)
        monkeypatch.setattr(zero.comm, "allocate_bases", self.keep)

    def keep(self, shards: Any, kind: str, group: Any, device: Any) -> list[BaseSlot]:
        self.asked.append((shards, kind, group, device.type))
        return [
            BaseSlot(torch.zeros(self._size, numel, dtype=dtype), range(self._mates), serial)
            for serial, (numel, dtype) in enumerate(shards)
        ]


CPU = torch.device("cpu")
SHARD = (100, torch.bfloat16)


def test_memory_is_for_what_is_freed_after_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for parameters that stay, nor for those that ZeRO-3 does not partition; by groups."""
    memory = Memory(monkeypatch)
    first, second, third = parameter(0), parameter(2), parameter(4, OTHER)
    stays, whole = parameter(1, persist=True), torch.nn.Parameter(torch.zeros(3))
    kept, said = zero.keep([first, stays, second, whole, third], ON, CPU)
    assert memory.asked == [([SHARD, SHARD], "device", DATA, "cpu"), ([SHARD], "device", OTHER, "cpu")]
    assert [zero._kept(one) for one in (first, second, third)] == kept
    assert zero._kept(stays) is None and zero._kept(whole) is None
    assert said == f"{3 * 400 / 1e6:.1f} MB, on every rank"
    del kept
    assert zero._kept(first) is None, "it goes with whoever holds the list"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "delta": ({"delta": "off"}, "not used, as nothing would be a difference: see delta"),
    "codec": ({"codec": "raw"}, "not used, as nothing would be a difference: see codec"),
    "mode": ({"mode": "never", "delta": "off"}, "not used, as nothing would be a difference: see delta, mode"),
    "role": ({"roles": {"zero_param": "never"}}, "not used, as nothing would be a difference: see mode"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_no_memory_for_what_would_be_no_difference(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    change, said = REFUSED[why]
    memory = Memory(monkeypatch)
    assert zero.keep([parameter(0)], ON.model_copy(update=change), CPU) == ([], said) and not memory.asked


def test_no_memory_where_nothing_is_sent_as_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    for more, device, skipped in (
        ({"size": 1}, "cpu", ""),
        ({"backend": "mpi"}, "cpu", "; no differences on cpu over mpi yet"),
        ({}, "cuda", "; no differences on cuda over gloo yet"),
    ):
        memory = Memory(monkeypatch, **more)  # type: ignore[arg-type]
        assert zero.keep([parameter(0)], ON, torch.device(device)) == ([], f"0.0 MB, on every rank{skipped}")
        assert not memory.asked
    memory = Memory(monkeypatch)
    assert zero.keep([parameter(0, None)], ON, CPU)[0] == [] and not memory.asked, "a group that others are in"


def test_what_a_node_shares_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    Memory(monkeypatch, size=4, mates=3)
    kept, said = zero.keep([parameter(0, numel=1_000_000)], ON, CPU)
    assert said == "8.0 MB, shared by the 3 ranks of a node" and len(kept) == 1


# ---- gathers of parameters ---------------------------------------------------------------------------------------------


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Three parameters of two ranks that are being asked for, of 100, 100 and 300 elements a rank."""
    Memory(monkeypatch)
    params = [parameter(number, numel=numel) for number, numel in enumerate((100, 100, 300))]
    kept, _ = zero.keep(params, ON, CPU)
    zero._wanted.set(list(params))
    yield kept
    del kept


def of(numel: int, group: Any = DATA, dtype: torch.dtype = torch.bfloat16) -> list[BaseSlot] | None:
    base = zero.base_of(torch.empty(2 * numel, dtype=dtype), group)
    return None if base is None else list(base._kept)


def test_parameters_are_gathered_together_or_one_after_the_other(wanted: list[BaseSlot]) -> None:
    assert of(500) == wanted
    assert of(500) is None, "they are asked for once"


def test_parameters_one_after_the_other(wanted: list[BaseSlot]) -> None:
    assert [of(numel) for numel in (100, 100, 300, 100)] == [*([kept] for kept in wanted), None]


def test_gathers_of_something_else(wanted: list[BaseSlot]) -> None:
    """Of another size, dtype or group: nothing is known, and the parameters are still awaited."""
    assert of(499) is of(300) is of(200) is of(600) is None
    assert of(500, OTHER) is of(500, None) is of(500, dtype=torch.float32) is None
    assert of(500) == wanted


def test_nobody_has_asked() -> None:
    assert of(500) is None


def test_parameters_without_memory_are_left_out(wanted: list[BaseSlot]) -> None:
    asked = zero._wanted.get()
    assert asked is not None
    asked.insert(1, parameter(9, numel=100))
    assert of(500) == wanted
    assert [param.ds_id for param in asked] == [9]


def test_who_asks_is_watched() -> None:
    """In DeepSpeed's order, the one of numbers, and until the call is over."""
    seen: list[list[int] | None] = []

    class Init:
        def _convert_to_deepspeed_param(self, param: Any) -> None:
            def all_gather_coalesced(params: Any, fail: bool = False) -> str:
                asked = zero._wanted.get()
                seen.append(None if asked is None else [one.ds_id for one in asked])
                assert [one.ds_id for one in params] == [3, 1, 2]
                if fail:
                    raise RuntimeError("as planted")
                return "handle"

            param.all_gather_coalesced = all_gather_coalesced

    module = SimpleNamespace(Init=Init)
    before = zero._gathered_dtype
    zero.watch_gathers(module)  # type: ignore[arg-type]
    once = Init._convert_to_deepspeed_param
    zero.watch_gathers(module)  # type: ignore[arg-type]
    assert Init._convert_to_deepspeed_param is once and zero._gathered_dtype is before
    params = [parameter(number) for number in (3, 1, 2)]
    Init()._convert_to_deepspeed_param(params[0])
    assert params[0].all_gather_coalesced(iter(params)) == "handle"
    assert zero._wanted.get() is None
    with pytest.raises(RuntimeError, match="as planted"):
        params[0].all_gather_coalesced(params, fail=True)
    assert zero._wanted.get() is None and seen == [[1, 2, 3]] * 2


# ---- the backend -------------------------------------------------------------------------------------------------------


def test_only_a_step_of_zero_1_and_2_gathers_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of steps, as when a checkpoint is saved, and in those of ZeRO-3 only what was asked for is known."""
    import deepspeed  # noqa: F401

    from ds_zipccl import comm
    from ds_zipccl.integration import backend

    given: list[tuple[Any, Any]] = []
    monkeypatch.setattr(backend.zero, "base_of", lambda output, group: given.append((output, group)) or "known")
    output, bases = torch.empty(4), {}
    for stage in (0, 1, 2, 3):
        this = SimpleNamespace(stepping=stage)
        bases[stage] = backend.ZipcclBackend._base(this, output, DATA)  # type: ignore[arg-type]
    assert bases == {0: "known", 1: comm.IN_PLACE, 2: comm.IN_PLACE, 3: "known"}
    assert len(given) == 2 and all(one == (output, DATA) for one in given)


#: (owner_only, role, stages of engines, elements, what is known) -> what is taken, and whether the table is told.
SUMS: dict[str, tuple[tuple[str, str, set[int], int, Any], Any, bool]] = {
    "known": (("auto", "zero_grad", {2}, 1000, (OWNED, "")), OWNED, False),
    "switched off": (("off", "zero_grad", {2}, 1000, (OWNED, "")), None, False),
    "switched off, unknown": (("off", "zero_grad", {2}, 1000, UNKNOWN), None, False),
    "unknown, ZeRO-2": (("auto", "zero_grad", {0, 2}, 1000, UNKNOWN), None, True),
    "unknown, ZeRO-1": (("auto", "zero_grad", {1}, 1000, UNKNOWN), None, True),
    "unknown, ZeRO-3": (("auto", "zero_grad", {3}, 1000, UNKNOWN), None, False),
    "unknown, no engine": (("auto", "zero_grad", set(), 1000, UNKNOWN), None, False),
    "unknown, another role": (("auto", "tp", {2}, 1000, UNKNOWN), None, False),
    "unknown, small": (("auto", "zero_grad", {2}, 999, UNKNOWN), None, False),
}


@pytest.mark.parametrize("case", SUMS)
def test_which_sums_go_whole_and_are_counted(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    import deepspeed  # noqa: F401

    from ds_zipccl.integration import backend

    (owner_only, role, stages, numel, known), taken, told = SUMS[case]
    counted: list[Any] = []
    monkeypatch.setattr(backend.zero, "owned", lambda tensor, op, group, later: known)
    monkeypatch.setattr(backend.counters, "record_whole", lambda *args: counted.append(args))
    config = ZipcclConfig(enabled=True, min_bytes=4000, owner_only=owner_only)  # type: ignore[arg-type]
    this = SimpleNamespace(zipccl=config, zero_stages=frozenset(stages))
    args = torch.empty(numel), dist.ReduceOp.SUM, DATA, False
    assert backend.ZipcclBackend._owned(this, *args, role=role) is taken  # type: ignore[arg-type]
    assert counted == ([("zero_grad", "all_reduce", UNKNOWN[1])] if told else [])
