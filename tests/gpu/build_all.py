"""Builds at a time everything that the steps of ``make gpu`` need; later processes find it in the cache. Status 1 if anything failed.

A build that wants a part that is missing here is left out, and no failure.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import figures
import parts
import where

HERE = Path(__file__).parent
_CPU = "from ds_zipccl import kernels; kernels.route('native', 'cpu')"
_CUDA = "import sys, where; where.HERE.route(sys.argv[1])"
#: Read meanwhile by one process, so that those of later steps find on a new machine what they import in memory.
_IMPORTS = (
    "import contextlib\nwith contextlib.suppress(ImportError): import peft, transformers.models.llama.modeling_llama"
)


#: Build -> part of :data:`parts.PARTS` that it wants.
WANTS = {
    "cpu native": "C++ compiler",
    "cuda cupy": "CuPy",
    "driver": "driver",
    "cuda native": "nvcc",
    "deepspeed": "deepspeed",
    "imports": "deepspeed",
    "spinning kernel": "driver",
}


def builds() -> dict[str, list[str]]:
    """Name -> command. Names of CUDA routes are ``cuda ROUTE``."""
    found = {"cpu native": [sys.executable, "-c", _CPU]}
    found |= {f"cuda {route}": [sys.executable, "-c", _CUDA, route] for route in ("native", "cupy")}
    found["deepspeed"] = [sys.executable, str(HERE / "wheels.py"), "ready"]
    found["imports"] = [sys.executable, "-c", _IMPORTS]
    found["driver"] = [sys.executable, str(HERE / "driver.py"), "build"]
    if not where.DRY:
        found["spinning kernel"] = [sys.executable, str(HERE / "spin.py"), "build"]
    return found


def build(commands: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """Run all commands at a time; name -> seconds and, where it failed, the end of its output. Tells the figures after each."""
    done: dict[str, dict[str, Any]] = {}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for name, command in commands.items():
            output = Path(folder) / name
            with output.open("w") as to:
                running[name] = subprocess.Popen(command, stdout=to, stderr=subprocess.STDOUT), output
        while running:
            for name in [name for name, (process, _) in running.items() if process.poll() is not None]:
                process, output = running.pop(name)
                done[name] = {"seconds": round(time.monotonic() - start, 1), "status": process.returncode}
                if process.returncode:
                    done[name]["output"] = output.read_text(errors="replace")[-3000:]
                print(f"{name}: {done[name]}", flush=True)
                figures.put(builds=done, usable=usable(done))
                figures.tell("usable", usable(done))
            figures.alive()  # a compiler says nothing for a minute
            time.sleep(0.1)
    return done


def usable(done: dict[str, dict[str, Any]]) -> list[str]:
    """The CUDA routes that work."""
    return [route for route in ("native", "cupy") if not done.get(f"cuda {route}", {"status": 1})["status"]]


def report_command(every: bool = True) -> list[str]:
    """The command that fails unless the native route works, for CUDA tensors too with ``every``. numba, for CPUs alone, would be compiled
    and tried for a minute; the builds have loaded CuPy's route."""
    require = ["--require", "cpu" if where.DRY else "cuda"] if every else []
    return [sys.executable, "-m", "ds_zipccl", "report", "--route", "native", *require]


def main() -> int:
    left_out = {name: f"missing: {wanted}" for name, wanted in WANTS.items() if parts.absent(wanted)}
    for name, reason in left_out.items():
        print(f"{name}: {reason}", flush=True)
    done = build({name: command for name, command in builds().items() if name not in left_out})
    # The proof, in a process that finds the builds of the others.
    start = time.monotonic()
    status = subprocess.run(report_command(every=not left_out)).returncode
    figures.put(report={"status": status, "seconds": round(time.monotonic() - start, 1)}, left_out=left_out)
    needed = [
        one["status"] for name, one in done.items() if name not in ("deepspeed", "imports")
    ]  # for trainings alone
    return 1 if status or any(needed) else 0


if __name__ == "__main__":
    sys.exit(main())
