"""Proof before use: a kernel backend runs every kernel on edge inputs when it is loaded, and is not used where a byte is wrong.

The inputs and the truth are those of :mod:`.cases`. A stamp in the cache folder says that these kernels have passed on this device, with
this driver and this torch; later starts then try one input of each kernel.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from ds_zipccl import tensors
from ds_zipccl.kernels import build
from ds_zipccl.kernels.self_test import inputs
from ds_zipccl.kernels.self_test.cases import Cases, Digests, SelfTestError

__all__ = ["GOLDEN", "PROOFS", "Proof", "SelfTestError", "prove", "proven"]
#: The digests; ``pytest tests/codec/test_self_test.py --update-golden`` writes them.
GOLDEN = Path(__file__).with_name("golden.json")
Backend = TypeVar("Backend", bound=Any)


class Proof(NamedTuple):
    """What the self-test of a backend has tried in this process."""

    cases: int
    seconds: float
    #: A stamp says that these kernels have passed before, and one input of each was tried.
    stamped: bool

    def __str__(self) -> str:
        return f"proven by {self.cases} cases in {1e3 * self.seconds:.0f} ms{', one a kernel as a stamp has the rest' * self.stamped}"


#: Device type, name of a backend -> the self-test that it has passed in this process.
PROOFS: dict[tuple[str, str], Proof] = {}


@cache
def _digests() -> Digests:
    found: Digests = json.loads(GOLDEN.read_text())
    return found


def prove(backend: Any, device: torch.device = tensors.CPU, short: bool = False) -> int:
    """Run the self-test of a backend, and return the number of its cases.

    Raises:
        SelfTestError: a byte is wrong.
    """
    found = Cases(backend, device, short, _digests())
    try:
        found.run()
    finally:
        inputs.forget()
    return found.count


def proven(backend: Backend, name: str, binary: bytes, device: torch.device = tensors.CPU) -> Backend:
    """Return ``backend`` once it has passed the self-test; :data:`PROOFS` then has its proof.

    Args:
        name: of the backend among those of the type of ``device``.
        binary: the machine code of its kernels, or that which decides it.

    Raises:
        SelfTestError: a byte is wrong.
    """
    begin, cases = time.perf_counter(), []

    def make(stamp: Path | None) -> None:
        cases.append(prove(backend, device))
        if stamp is not None:
            stamp.write_text(json.dumps(facts))

    facts = {**_facts(backend, device), "binary": hashlib.sha256(binary).hexdigest(), "torch": torch.__version__}
    _once(facts, make)
    stamped = not cases
    if stamped:
        cases.append(prove(backend, device, short=True))
    PROOFS[device.type, name] = Proof(cases[0], time.perf_counter() - begin, stamped)
    return backend


def _once(facts: dict[str, str], make: Callable[[Path | None], None]) -> None:
    """Call ``make`` with the path of a stamp unless there is a stamp of ``facts``; with None where none can be kept."""
    digest = hashlib.sha256(json.dumps(facts).encode() + GOLDEN.read_bytes()).hexdigest()[:20]
    try:
        build.publish(build.cache_root() / f"zipccl_proven_{digest}.json", make, "self-test tries")
    except build.BuildError:
        make(None)


def _facts(backend: Any, device: torch.device) -> dict[str, str]:
    """What must be the same for a proof to hold: of a CPU its name, and the instruction set in use."""
    return {"device": _processor(), "driver": str(getattr(backend, "level", ""))}


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{platform.machine()} {name}"
