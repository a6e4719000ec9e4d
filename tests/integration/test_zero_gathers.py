"""Bases of ZeRO-3's gathers: the parameters that get memory, the gathers that find it, and the gathers of something else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_zipccl.comm import Agreed
from ds_zipccl.comm.delta.shared_base import BaseSlot
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.integration import zero_gathers
from ds_zipccl.policy.admission import STREAM_BACKENDS

DATA, OTHER = object(), object()  # groups
ON = ZipcclConfig(enabled=True, zero3_base="device")


@pytest.fixture(autouse=True)
def _nothing_is_known() -> Iterator[None]:
    zero_gathers._wanted.set(None)
    yield
    zero_gathers._wanted.set(None)


def parameter(number: int, group: Any = DATA, *, persist: bool = False, numel: int = 100, **more: Any) -> Any:
    shard = SimpleNamespace(ds_numel=numel, dtype=torch.bfloat16)
    return SimpleNamespace(ds_id=number, ds_persist=persist, ds_process_group=group, ds_tensor=shard, **more)


class Memory:
    """Stands for comm.allocate_bases on groups of two ranks over gloo."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int = 2, backend: str = "gloo", mates: int = 1) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self._size, self._mates = size, mates
        members = SimpleNamespace(
            size=size, backend=lambda device: backend, streams=lambda device: backend in STREAM_BACKENDS
        )
        monkeypatch.setattr(zero_gathers, "group_state", lambda group: None if group is None else members)
        monkeypatch.setattr(zero_gathers.comm, "allocate_bases", self.keep)

    def keep(self, shards: Any, kind: str, group: Any, device: Any) -> list[BaseSlot]:
        self.asked.append((shards, kind, group, device.type))
        return [
            BaseSlot(torch.zeros(self._size, numel, dtype=dtype), range(self._mates), serial)
            for serial, (numel, dtype) in enumerate(shards)
        ]


CPU = torch.device("cpu")
SHARD = (100, torch.bfloat16)


def test_memory_is_for_what_is_freed_after_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that stay, and parameters that ZeRO-3 does not partition, get no memory. Each group allocates at once."""
    memory = Memory(monkeypatch)
    first, second, third = parameter(0), parameter(2), parameter(4, OTHER)
    stays, whole = parameter(1, persist=True), torch.nn.Parameter(torch.zeros(3))
    kept, said = zero_gathers.allocate_bases([first, stays, second, whole, third], ON, CPU)
    assert memory.asked == [([SHARD, SHARD], "device", DATA, "cpu"), ([SHARD], "device", OTHER, "cpu")]
    assert [zero_gathers._base(one) for one in (first, second, third)] == kept
    assert zero_gathers._base(stays) is None and zero_gathers._base(whole) is None
    assert said == f"{3 * 400 / 1e6:.1f} MB, on every rank"
    del kept
    assert zero_gathers._base(first) is None, "it goes with whoever holds the list"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "delta": ({"delta": "off"}, "not used, as no gather would send differences: see delta"),
    "codec": ({"codec": "raw"}, "not used, as no gather would send differences: see codec"),
    "mode": ({"mode": "never", "delta": "off"}, "not used, as no gather would send differences: see delta, mode"),
    "role": ({"roles": {"zero_param": "never"}}, "not used, as no gather would send differences: see mode"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_no_memory_for_what_would_be_no_difference(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    change, said = REFUSED[why]
    memory = Memory(monkeypatch)
    assert zero_gathers.allocate_bases([parameter(0)], replace(ON, **change), CPU) == ([], said) and not memory.asked


def test_no_memory_where_nothing_is_sent_as_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    for more, device, skipped in (
        ({"size": 1}, "cpu", ""),
        ({"backend": "mpi"}, "cpu", "; no differences on cpu over mpi yet"),
        ({}, "cuda", "; no differences on cuda over gloo yet"),
        ({"backend": "nccl"}, "cuda", "; no differences on cuda over nccl: nccl is off"),
    ):
        memory = Memory(monkeypatch, **more)  # type: ignore[arg-type]
        assert zero_gathers.allocate_bases([parameter(0)], ON, torch.device(device)) == (
            [],
            f"0.0 MB, on every rank{skipped}",
        )
        assert not memory.asked
    memory = Memory(monkeypatch)
    assert zero_gathers.allocate_bases([parameter(0, None)], ON, CPU)[0] == [] and not memory.asked, (
        "a group that others are in"
    )


def test_bases_in_the_order_of_streams_are_held_with_agreed_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, on = Memory(monkeypatch, backend="nccl"), replace(ON, nccl="on")
    cuda, params = torch.device("cuda"), [parameter(0), parameter(1)]
    agreed = [Agreed("first", 100), Agreed("second", 100)]
    kept, said = zero_gathers.allocate_bases(params, on, cuda, lambda params: agreed)
    assert [one._base and one._base() for one in agreed] == kept and len(kept) == 2 and "no differences" not in said
    kept, said = zero_gathers.allocate_bases(params, on, cuda, lambda params: ())
    assert not kept and said.endswith("no differences on cuda over nccl: no sizes are agreed on with this optimizer")
    assert len(memory.asked) == 1


def test_what_a_node_shares_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    Memory(monkeypatch, size=4, mates=3)
    kept, said = zero_gathers.allocate_bases([parameter(0, numel=1_000_000)], ON, CPU)
    assert said == "8.0 MB, shared by the 3 ranks of a node" and len(kept) == 1


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """DeepSpeed asks two ranks for three parameters, of 100, 100 and 300 elements per rank."""
    Memory(monkeypatch)
    params = [parameter(number, numel=numel) for number, numel in enumerate((100, 100, 300))]
    kept, _ = zero_gathers.allocate_bases(params, ON, CPU)
    zero_gathers._wanted.set(list(params))
    yield kept
    del kept


def of(numel: int, group: Any = DATA, dtype: torch.dtype = torch.bfloat16) -> list[BaseSlot] | None:
    params = zero_gathers.take_parameters(torch.empty(2 * numel, dtype=dtype), group)
    base = zero_gathers.base_of(params, dtype)
    return None if base is None else list(base._slots)


def test_parameters_are_gathered_together_or_one_after_the_other(wanted: list[BaseSlot]) -> None:
    assert of(500) == wanted
    assert of(500) is None, "they are asked for once"


def test_parameters_one_after_the_other(wanted: list[BaseSlot]) -> None:
    assert [of(numel) for numel in (100, 100, 300, 100)] == [*([kept] for kept in wanted), None]


def test_gathers_of_something_else(wanted: list[BaseSlot]) -> None:
    """A gather of another size, dtype or group has no base, and the parameters are still awaited."""
    assert of(499) is of(300) is of(200) is of(600) is None
    assert of(500, OTHER) is of(500, None) is of(500, dtype=torch.float32) is None
    assert of(500) == wanted


def test_nobody_has_asked() -> None:
    assert of(500) is None


def test_a_gather_of_parameters_without_memory_has_no_base(wanted: list[BaseSlot]) -> None:
    asked = zero_gathers._wanted.get()
    assert asked is not None
    asked.insert(1, parameter(9, numel=50))
    params = zero_gathers.take_parameters(torch.empty(2 * 550, dtype=torch.bfloat16), DATA)
    assert [param.ds_id for param in params] == [0, 9, 1, 2] and not asked
    assert zero_gathers.base_of(params, torch.bfloat16) is None


def test_who_asks_is_watched() -> None:
    """Parameters are noted in DeepSpeed's order, by number, until the end of the call."""
    seen: list[list[int] | None] = []

    class Init:
        def _convert_to_deepspeed_param(self, param: Any) -> None:
            def all_gather_coalesced(params: Any, fail: bool = False) -> str:
                asked = zero_gathers._wanted.get()
                seen.append(None if asked is None else [one.ds_id for one in asked])
                assert [one.ds_id for one in params] == [3, 1, 2]
                if fail:
                    raise RuntimeError("as planted")
                return "handle"

            param.all_gather_coalesced = all_gather_coalesced

        def _all_gather(self, param_list: Any, async_op: bool = False) -> str:
            asked = zero_gathers._wanted.get()
            seen.append(None if asked is None else [one.ds_id for one in asked])
            assert [one.ds_id for one in param_list] == [3, 1, 2]
            return "one by one"

    module = SimpleNamespace(Init=Init)
    before = zero_gathers._gathered_dtype
    zero_gathers.watch_gathers(module)  # type: ignore[arg-type]
    once = Init._convert_to_deepspeed_param
    zero_gathers.watch_gathers(module)  # type: ignore[arg-type]
    assert Init._convert_to_deepspeed_param is once and zero_gathers._gathered_dtype is before
    params = [parameter(number) for number in (3, 1, 2)]
    Init()._convert_to_deepspeed_param(params[0])
    assert params[0].all_gather_coalesced(iter(params)) == "handle"
    assert zero_gathers._wanted.get() is None
    with pytest.raises(RuntimeError, match="as planted"):
        params[0].all_gather_coalesced(params, fail=True)
    assert zero_gathers._wanted.get() is None and seen == [[1, 2, 3]] * 2
    for param, status in zip(params, ("NOT_AVAILABLE", "AVAILABLE", "NOT_AVAILABLE"), strict=True):
        param.ds_status = SimpleNamespace(name=status)
    assert Init()._all_gather(iter(params)) == "one by one"
    assert zero_gathers._wanted.get() is None and seen[2:] == [[3, 2]], (
        "in the order of the call, those not gathered yet"
    )
