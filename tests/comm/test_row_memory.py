"""The rows of earlier messages: backoff of searches, maps by key, bounded memory."""

from __future__ import annotations

import pytest
import torch

from ds_zipccl.comm.host.rows.memory import MapKey, RowMemory, RowPairs
from ds_zipccl.policy import row_rules
from ds_zipccl.policy.wire import Backoff


def test_backoff() -> None:
    patient = Backoff(row_rules.UNSEARCHED, patience=2)
    patient.note(False)
    assert not patient.skips()
    patient.note(True)
    patient.note(False)
    assert not patient.skips()
    patient.note(False)
    assert [patient.skips() for _ in range(16)] == [True] * 15 + [False]


def test_memory_of_maps() -> None:
    memory, key, other = RowMemory(), MapKey(1, 1000, 10), MapKey(2, 1000, 10)
    maps = [RowPairs(torch.tensor([n], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)) for n in range(30)]
    for pairs in maps:
        memory.remember(key, pairs)
    memory.remember(other, maps[0])
    newest = memory.newest(key)
    assert [int(pairs.rows) for _, pairs in newest] == list(range(29, 29 - row_rules.MAP_TRIALS, -1))
    memory.forget(newest[0][0])
    memory.forget(newest[0][0])
    assert int(memory.newest(key)[0][1].rows) == 28 and len(memory.newest(other)) == 1
    assert memory.newest(MapKey(1, 1000, 20)) == []


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_rules, "MAP_BYTES", 80)
    memory, key = RowMemory(), MapKey(0, 100, 10)
    pairs = RowPairs(torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32))
    numbers = []
    for _ in range(10):
        memory.remember(key, pairs)
        numbers.append(memory.newest(key)[0][0])
    assert [number for number, _ in memory.newest(key)] == numbers[:-4:-1]  # 24 bytes each
    memory.remember(key, RowPairs(*(torch.zeros(20, dtype=torch.int32),) * 2))  # more than all
    assert memory.newest(key) == []
