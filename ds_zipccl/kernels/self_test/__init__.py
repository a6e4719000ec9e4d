"""Proof before use: a kernel backend runs every kernel on edge inputs when it is loaded, and is not used where a byte is wrong.

The inputs and the truth are those of :mod:`.cases`. A stamp in the cache folder says that these kernels have passed on this device, with
this driver and this torch; later starts then try one input of each kernel.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from ds_zipccl import tensors
from ds_zipccl.kernels import build
from ds_zipccl.kernels import sums as plain_sums
from ds_zipccl.kernels.self_test import device as on_device
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
        how = ", one input of each kernel, as all passed before" if self.stamped else ""
        return f"proven by {self.cases} cases in {1e3 * self.seconds:.0f} ms{how}"


#: Seconds that a test in a process of its own may take: most of them are the imports.
PATIENCE = 60.0
#: Statuses of a test in a process of its own: a byte is wrong, and it could not use the device.
WRONG, UNREACHED = 10, 11
_STAMP = "zipccl_proven_{}.json"
_SAID_BY_CPUS = ("model name", "flags", "Features")
#: The CPU backend that was proven last: asked for the right bytes where those of another backend are wrong.
_witnesses: list[Any] = []
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
    witness = next((other for other in _witnesses if other is not backend), None)
    found = Cases(backend, device, short, _digests(), witness)
    try:
        with plain_sums.flushing(False):
            found.run()
            if hasattr(backend, "decode_sum_frames"):
                on_device.run(found, backend)
    finally:
        inputs.forget()
    return found.count


def proven(
    load: Callable[[], Backend], name: str, binary: bytes, device: torch.device = tensors.CPU, apart: bool = False
) -> Backend:
    """Return the backend that ``load`` gives, once it has passed the self-test; :data:`PROOFS` then has its proof. Blocks.

    Args:
        name: of the backend among those of the type of ``device``.
        binary: the machine code of its kernels, or that which decides it.
        apart: without a stamp, the backend is first loaded and tested in a process of its own, so that a hang there stops nothing.

    Raises:
        SelfTestError: a byte is wrong, or the process of its own did not pass within :data:`PATIENCE` seconds.
    """
    begin, load, cases = time.perf_counter(), cache(load), list[int]()
    facts = {**_facts(device), "binary": hashlib.sha256(binary).hexdigest(), "torch": torch.__version__}

    def make(stamp: Path | None) -> None:
        cases.append(_apart(name, device) if apart else 0)
        if not cases[0]:
            cases[0] = prove(load(), device)
        if stamp is not None:
            stamp.write_text(json.dumps(facts))

    _once(facts, make)
    backend, stamped = load(), not cases
    if stamped or apart:
        cases.append(prove(backend, device, short=True))
    if not apart:
        _witnesses[:] = [backend]
    PROOFS[device.type, name] = Proof(sum(cases), time.perf_counter() - begin, stamped)
    return backend


def forget_stamps() -> None:
    """Let the next start of a job try all cases again."""
    with contextlib.suppress(OSError, build.BuildError):
        for stamp in build.cache_root().glob(_STAMP.format("*")):
            stamp.unlink(missing_ok=True)


def _once(facts: Mapping[str, str], make: Callable[[Path | None], None]) -> None:
    """Call ``make`` with the path of a stamp unless there is a stamp of ``facts``; with None where none can be kept.

    Processes of a machine call it in turn. Those that waited while the test failed in another one fail with its reason.
    """
    digest = hashlib.sha256(json.dumps(facts).encode() + GOLDEN.read_bytes()).hexdigest()[:20]
    began = time.time()

    def guarded(stamp: Path) -> None:
        if failed.exists() and failed.stat().st_mtime > began:
            raise SelfTestError(failed.read_text())
        try:
            make(stamp)
        except SelfTestError as error:
            failed.touch(mode=0o600)  # or a folder with it could not be trusted
            failed.write_text(str(error))
            raise

    try:
        path = build.cache_root() / _STAMP.format(digest)
        failed = path.with_suffix(".failed")
        build.publish(path, guarded, "self-test tries")
    except build.BuildError:
        make(None)


def _apart(name: str, device: torch.device) -> int:
    """Test the backend of that name in a process of its own; return the number of cases, 0 where a second process cannot use the device.

    Raises:
        SelfTestError: a byte is wrong, or the process did not pass in time.
    """
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": path}
    process = subprocess.Popen(
        command(name, device),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said, complaint = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may not let go of the process
            process.communicate(timeout=5)
        raise SelfTestError(f"in a process of its own it did not end within {PATIENCE:g} s") from None
    if process.returncode == UNREACHED:
        return 0
    if process.returncode:
        last = said if process.returncode == WRONG else complaint
        reason = last.strip().rpartition("\n")[2] or f"status {process.returncode}"
        raise SelfTestError(reason if process.returncode == WRONG else f"in a process of its own it failed: {reason}")
    return int(said.split()[-1])


def command(name: str, device: torch.device) -> list[str]:
    """Return the command that tests a CUDA backend of that name: :mod:`.__main__`."""
    return [sys.executable, "-m", __name__, name, str(device.index)]


def _facts(device: torch.device) -> dict[str, str]:
    """What must be the same for a proof to hold, not only kernels and torch: the device and its driver; of a CPU, its instruction sets."""
    if device.type == "cpu":
        return {"device": _processor(), "driver": ""}
    try:
        driver = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        driver = str(getattr(torch._C, "_cuda_getDriverVersion", int)())
    return {"device": torch.cuda.get_device_name(device), "driver": driver}


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return "\n".join([platform.machine(), *dict.fromkeys(line for line in lines if line.startswith(_SAID_BY_CPUS))])
