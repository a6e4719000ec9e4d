"""The store of a simulated job: a rank that waits for a key lets others move."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from sim.device import mine


class Store(dist.Store):
    """A store in this process; see torch.distributed.Store."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        mine().scheduler.turn(mine().rank)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self._values.get(key, b"").decode() == expected:
            self.set(key, desired)
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        gpu = mine()
        gpu.scheduler.turn(gpu.rank, lambda: self.check(keys), f"keys {', '.join(keys)} of the store")

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing: the scheduler knows when nobody will set a key."""
