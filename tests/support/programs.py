"""Run a file as the program of n ranks, as a launcher would.

Importing DeepSpeed costs more than a short training. A server process imports DeepSpeed once, and forks the ranks of every launch. A server
stays until the tests end; launches with another environment at the time of the import have another server.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib.metadata
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import builds
from places import PYTHONPATH

#: Seconds for all ranks to fail after the first failure.
GRACE = 5.0
#: DeepSpeed's optimizers would load torch's compiler, for six seconds a rank. DeepSpeed reads its timeout, in minutes, at import.
#: Models are those of the tests, so that no hub is asked.
_IMPORTED_WITH = {"TORCHDYNAMO_DISABLE": "1", "DEEPSPEED_TIMEOUT": "2", "PYTHONPATH": PYTHONPATH, "HF_HUB_OFFLINE": "1"}
_FIXED = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore::FutureWarning", **_IMPORTED_WITH}
#: Whether a reference may come from an earlier run. The full tier runs each again.
KEEP_REFERENCES = False
#: In the message of a launch that failed: our code was not in it.
PLAIN = "without ds_zipccl"
#: First port after those that everybody may bind, last port before those that the system gives to connections.
_PORTS = (10_000, 30_000)


@dataclass(frozen=True)
class Ended:
    """How one rank ended: the exit status, negative for a signal, and the text that the rank wrote to stdout and stderr."""

    status: int
    text: str


def _aborted_in_torch(end: Ended) -> bool:
    """Whether a process without our code has ended as torch's threads sometimes do when the interpreter goes: another run tells."""
    return end.status == -signal.SIGABRT and "terminate called without an active exception" in end.text


def launch(
    program: str, ranks: int, folder: Path, *options: str, timeout: float = 240, **environment: str
) -> dict[str, Any]:
    """Run ``python program folder *options`` once per rank. Blocks until all ranks have ended; none is left behind.

    Returns:
        Contents of the JSON files that the ranks left in ``folder``, by stem.

    Raises:
        AssertionError: a rank failed or did not end in ``timeout`` seconds; the message has the end of each rank's output.
    """
    ended = run([program, str(folder), *options], [environment] * ranks, folder, timeout=timeout)
    if environment.get("DS_ZIPCCL") == "0" and any(_aborted_in_torch(end) for end in ended):
        ended = run([program, str(folder), *options], [environment] * ranks, folder, timeout=timeout)
    plain = f"{PLAIN}: " if environment.get("DS_ZIPCCL") == "0" else ""
    said = "\n".join(f"{plain}rank{rank}: status {end.status}, {end.text[-2000:]}" for rank, end in enumerate(ended))
    assert not any(end.status for end in ended), said
    return {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}


def reference(
    program: str,
    ranks: int,
    folder: Path,
    *options: str,
    sources: Sequence[Path] = (),
    timeout: float = 240,
    **environment: str,
) -> dict[str, Any]:
    """As :func:`launch` with ``DS_ZIPCCL=0``. In the short tier the results of an earlier run count, where nothing has changed.

    Args:
        sources: files beside ``program`` that decide the results, and folders of such Python and JSON files. The packages that are
            installed and the CPU count without being named. ds_zipccl does not: a plain run does without.
    """
    environment["DS_ZIPCCL"] = "0"
    if not KEEP_REFERENCES:
        return launch(program, ranks, folder, *options, timeout=timeout, **environment)
    parts = [sys.version, _cpu(), repr((ranks, options, sorted(environment.items())))]
    parts += sorted(f"{package.name} {package.version}" for package in importlib.metadata.distributions())
    for source in (Path(program), *sources):
        files = sorted(source.rglob("*")) if source.is_dir() else [source]
        parts += [f"{file.name}\n{file.read_text()}" for file in files if file.suffix in (".py", ".json")]

    def make(target: Path) -> None:
        target.write_text(json.dumps(launch(program, ranks, folder, *options, timeout=timeout, **environment)))

    return dict(json.loads(builds.kept("reference", parts, make).read_text()))


def plain_and_coded(
    program: str,
    ranks: int,
    folder: Path,
    *options: str,
    sources: Sequence[Path] = (),
    timeout: float = 240,
    **environment: str,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of :func:`reference` and of :func:`launch`, in the folders "plain" and "coded" of ``folder``."""
    plain, coded = (folder / name for name in ("plain", "coded"))
    plain.mkdir(), coded.mkdir()
    found = launch(program, ranks, coded, *options, timeout=timeout, **environment)
    return reference(program, ranks, plain, *options, sources=sources, timeout=timeout), found


def _cpu() -> str:
    """Model and instruction sets of the CPU, which decide the order of sums in torch."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(("model name", "flags", "Features"))))


def run(
    argv: Sequence[str],
    environments: Sequence[dict[str, str]],
    folder: Path,
    timeout: float = 240,
    grace: float = GRACE,
) -> list[Ended]:
    """Run ``python *argv`` in ``folder``, once for each of ``environments``, and wait for all; none is left behind.

    Args:
        environments: a rank each; changes to the environment of this process. Either all or none have ``DS_ZIPCCL=0``.
        timeout: seconds; a rank that is not over by then writes the stacks of its threads, and is killed.
        grace: seconds from the end of the first failed rank until the other ranks are killed.
    """
    port, started = str(free_port()), []
    for rank, own in enumerate(environments):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(environments))}
        started.append({**os.environ, **_FIXED, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **own})
    untouched = {env.get("DS_ZIPCCL", "").strip() == "0" for env in started}
    assert len(untouched) == 1, "ranks with and without DS_ZIPCCL=0 cannot come from one server: start interpreters"
    request = {"argv": list(argv), "environments": started, "folder": str(folder), "timeout": timeout, "grace": grace}
    texts = [folder / f"rank{rank}.txt" for rank in range(len(started))]
    return [
        Ended(status, text.read_text(errors="replace"))
        for status, text in zip(_ask(untouched.pop(), request), texts, strict=True)
    ]


def free_port() -> int:
    """A port that nobody listens on. No connection gets the port meanwhile: systems give connections higher ports."""
    for _ in range(100):
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.bind(("127.0.0.1", port := random.SystemRandom().randrange(*_PORTS)))
            return port
    raise RuntimeError(f"no free port among 100 of {_PORTS[0]} to {_PORTS[1]}; end the programs that listen there")


# ---- the server, seen from the tests


class _Server:
    """A process that has imported DeepSpeed, and starts the ranks of one launch at a time."""

    def __init__(self, untouched: bool) -> None:
        environment = {key: value for key, value in os.environ.items() if key != "DS_ZIPCCL"} | _FIXED
        environment |= {"DS_ZIPCCL": "0"} if untouched else {}
        command, pipe = [sys.executable, __file__], subprocess.PIPE
        self.process = subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, text=True, start_new_session=True
        )

    def ask(self, request: dict[str, Any]) -> list[int]:
        """Exit statuses of the ranks. Blocks until all ranks have ended; the server keeps the time."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the server of DeepSpeed programs died; the captured output of this test has the reason"
        return list(json.loads(line))

    def end(self) -> None:
        """Kill the server and its ranks."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


#: With DS_ZIPCCL=0 at the import or not -> the server.
_servers: dict[bool, _Server] = {}


@atexit.register
def _end_servers() -> None:
    while _servers:
        _servers.popitem()[1].end()


def _ask(untouched: bool, request: dict[str, Any]) -> list[int]:
    """Ask the server for ``untouched``. A server whose answer did not come is not asked again."""
    server = _servers.pop(untouched, None) or _Server(untouched)
    try:
        statuses = server.ask(request)
    except BaseException:
        server.end()
        raise
    _servers[untouched] = server
    return statuses


# ---- the server itself


def _serve() -> None:
    """Start the ranks of each request on stdin, and answer with their statuses. Returns in a rank only."""
    import deepspeed  # noqa: F401
    import pytest  # noqa: F401
    import torch._dynamo  # noqa: F401  (else the first optimizer of every rank imports it, disabled or not)
    from torch.utils import cpp_extension  # noqa: F401  (else the builders of DeepSpeed import the same compilers)

    _rest_before_the_end()
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "transformers" in Path(request["argv"][0]).read_text():  # else every rank imports these for seconds
            with contextlib.suppress(ImportError):
                import peft  # noqa: F401
                import transformers.models.llama.modeling_llama
                import transformers.trainer  # noqa: F401
        ranks: dict[int, int] = {}
        for rank, environment in enumerate(request["environments"]):
            process = os.fork()
            if not process:
                return _become(rank, environment, request["argv"], request["folder"])
            ranks[process] = rank
        print(json.dumps(_statuses(ranks, request["timeout"], request["grace"])), flush=True)
    sys.exit()


def _rest_before_the_end() -> None:
    """Let gloo's threads end their work before ranks destroy a group.

    Before 2.8 torch waits for these threads with the interpreter's lock in its hand, which they may need (pull request 154976 of PyTorch).
    """
    import torch
    import torch.distributed as dist

    destroy = dist.destroy_process_group

    def rested(group: dist.ProcessGroup | None = None) -> None:
        time.sleep(0.3)
        destroy(group)

    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8):
        dist.destroy_process_group = rested


def _become(rank: int, environment: dict[str, str], argv: list[str], folder: str) -> None:
    """Make this process look like an interpreter that was started for the program."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    faulthandler.register(signal.SIGQUIT)
    sys.argv, sys.path[0] = argv, str(Path(argv[0]).parent)


def _statuses(ranks: dict[int, int], timeout: float, grace: float) -> list[int]:
    """Wait for the processes of ``ranks``, kill those that are late, and return the exit statuses by rank."""
    found: dict[int, int] = {}
    deadline = time.monotonic() + timeout
    while len(found) < len(ranks):
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            found[ranks[process]] = os.waitstatus_to_exitcode(status)
            if found[ranks[process]]:
                deadline = min(deadline, time.monotonic() + grace)
        elif time.monotonic() < deadline:
            time.sleep(0.01)
        else:
            late = [process for process, rank in ranks.items() if rank not in found]
            for number, seconds in ((signal.SIGQUIT, 1.0), (signal.SIGKILL, 0.0)):  # first the stacks of their threads
                for process in late:
                    os.kill(process, number)
                time.sleep(seconds)
            deadline = float("inf")
    return [found[rank] for rank in range(len(ranks))]


if __name__ == "__main__":
    _serve()
    runpy.run_path(sys.argv[0], run_name="__main__")
