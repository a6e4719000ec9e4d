"""The ranks of the doctor: processes of the user's launcher or of this machine, their checks, and the measurement between them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ds_zipccl.tools import ToolError, gpus
from ds_zipccl.tools.namespaces import Network, first_status, meeting

if TYPE_CHECKING:
    import torch

    from ds_zipccl.config import ZipcclConfig
    from ds_zipccl.policy.cost_model import LinkProfile
    from ds_zipccl.policy.settled import Settled

#: Variables by which a launcher tells a process its place.
PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Measurements of a link, of which the median counts (seed: three fit into the time of the doctor).
CALIBRATIONS = 3
_LARGE_BYTES = 8 << 20  # of the message by which measurements are compared
#: Variables whose 0 keeps the package from DeepSpeed.
SWITCHES = ("DS_ZIPCCL", "TORCH_DEVICE_BACKEND_AUTOLOAD")
#: The key of a rank's hooks where DeepSpeed itself is missing.
DEEPSPEED = "deepspeed"
#: Bytes of the report of a rank at most, and characters of a reason that are shown: both come from another machine.
_REPORT_BYTES, _SHOWN = 1 << 16, 2000
_GOODBYE_S = 5.0  # from the first failed local process until the others are ended


def launched() -> bool:
    """Return whether a launcher has started this process as a rank of several.

    Raises:
        ToolError: some variables of a launcher are set, and others are missing.
    """
    given = [name for name in PLACE if os.environ.get(name)]
    if not {"RANK", "WORLD_SIZE"} & set(given):
        return False
    if missing := [name for name in PLACE if name not in given]:
        wanted = "start the doctor by the launcher of the job, such as torchrun or deepspeed, or unset them all"
        raise ToolError(f"{' and '.join(given)} are set, {' and '.join(missing)} not: {wanted}")
    return True


class AgreedError(ToolError):
    """An error that all ranks know, so that rank 0 alone need tell it."""


@contextlib.contextmanager
def failing(what: str) -> Iterator[None]:
    """Raise ToolError with the name of ``what`` and the rank, where calls of torch, of the package or of the system fail in the block."""
    try:
        yield
    except ToolError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        raise ToolError(f"rank {os.environ['RANK']}: {what} failed: {error}") from error


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """End this process with status 2 if the block takes longer than ``seconds``: also out of a call that waits for a dead rank."""

    def leave() -> None:
        remedy = "run report first, which builds the kernels; look whether all ranks have started and reach each other"
        late = f"the doctor took longer than {seconds:g} s and ends: {remedy}; or raise --timeout"
        print(late, file=sys.stderr, flush=True)
        os._exit(2)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def hooks_found() -> dict[str, str]:
    """DeepSpeed module -> "" where our hook has adjusted it, "absent" for a module that this DeepSpeed lacks and a job need not have, else
    the reason; and names of adjusted modules that do not fit, each with its problem. Imports DeepSpeed, which takes seconds."""
    from ds_zipccl.integration import autoload, hook_points

    if importlib.util.find_spec(DEEPSPEED) is None:
        return {DEEPSPEED: "not installed"}
    zero = (f"{name}=0 turns the package off" for name in SWITCHES if os.environ.get(name, "").strip() == "0")
    off = next(zero, "torch did not load the package before DeepSpeed")
    found = {}
    for name in (*autoload.ADJUSTED, *autoload.OPTIONAL):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if name not in autoload.OPTIONAL:
                found[name] = f"not importable: {error}"
                continue
        except Exception as error:
            found[name] = f"not importable: {type(error).__name__}: {error}"
            continue
        found[name] = autoload.OUTCOMES.get(name, f"not adjusted: {off}") if name in sys.modules else "absent"
    return found | hook_points.problems()


@dataclass(frozen=True)
class RankReport:
    """What a rank tells the others before the measurement. ``error``: "" where all is well. ``config``: hash of the config of the job.
    ``groups``: type of device and backend of the groups that DeepSpeed makes here."""

    host: str
    error: str
    config: str
    groups: str
    hooks: Mapping[str, str]

    def to_bytes(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @classmethod
    def from_bytes(cls, rank: int, data: bytes) -> RankReport:
        """Return the report in the bytes that a rank sent.

        Raises:
            ToolError: the bytes of ``rank`` are no report.
        """
        content = None
        with contextlib.suppress(ValueError, RecursionError):
            content = json.loads(data) if len(data) <= _REPORT_BYTES else None
        keys = {"host", "error", "config", "groups"}
        hooks = content.get("hooks") if isinstance(content, dict) else None
        if not isinstance(content, dict) or set(content) != keys | {"hooks"} or not isinstance(hooks, dict):
            raise ToolError(f"rank {rank} sent no report of this version: install the same ds_zipccl on all nodes")
        texts = {key: _printable(content[key]) for key in keys}
        return cls(hooks={_printable(name): _printable(text) for name, text in hooks.items()}, **texts)


def _printable(value: Any) -> str:
    """Text of another machine without control characters, at most :data:`_SHOWN` characters."""
    return "".join(sign if sign.isprintable() or sign == "\n" else "?" for sign in str(value)[:_SHOWN])


@dataclass(frozen=True)
class Ranks:
    """The ranks that have met. ``reports``: by rank."""

    rank: int
    reports: tuple[RankReport, ...]

    @property
    def nodes(self) -> int:
        return len({report.host for report in self.reports})

    @property
    def groups(self) -> tuple[str, str]:
        """Type of device and backend of the job's groups."""
        device, _, backend = self.reports[0].groups.partition(" ")
        return device, backend

    @property
    def streams(self) -> bool:
        """Whether the job's groups work in the order of a device's streams."""
        from ds_zipccl.policy.admission import STREAM_BACKENDS

        return self.groups[1] in STREAM_BACKENDS

    @property
    def place(self) -> torch.device:
        """The device of this rank's tensors."""
        import torch

        cuda = self.streams and self.groups[0] == "cuda"
        return torch.device(*(("cuda", torch.cuda.current_device()) if cuda else ("cpu",)))


def meet(check: Callable[[], str], patience: float) -> Ranks:
    """Exchange reports, and join a group of all ranks: of the job's backend where it works in stream order, otherwise of gloo. Blocks until
    all ranks are there, ``patience`` seconds at most.

    Args:
        check: checks of this rank; returns the text of the job's config, and raises where something is wrong.

    Raises:
        AgreedError: a rank has an error, or configs or backends differ.
        ToolError: a rank is missing.
    """
    import torch.distributed as dist

    from ds_zipccl.integration import start_line

    try:
        text, error = check(), ""
    except Exception as problem:  # of any kind: the other ranks wait for this report
        text, error = "", f"{'' if isinstance(problem, ToolError) else type(problem).__name__ + ': '}{problem}"
    wait = timedelta(seconds=patience)
    try:
        meeting = dist.rendezvous("env://", timeout=wait)  # type: ignore[attr-defined]
        store, rank, ranks = next(meeting)
        store.set_timeout(wait)
        hooks = hooks_found()
        groups = " ".join(start_line.device_here()) if importlib.util.find_spec(DEEPSPEED) else "cpu gloo"
        digest = hashlib.sha256(text.encode()).hexdigest()
        mine = RankReport(socket.gethostname(), _printable(error), digest, groups, hooks)
        keys = [f"ds_zipccl/doctor/{peer}" for peer in range(ranks)]
        store.set(keys[rank], mine.to_bytes())
        reports = tuple(RankReport.from_bytes(peer, store.get(key)) for peer, key in enumerate(keys))
        store.set(f"{keys[rank]}/read", b"")
        if not rank:  # the store may be in this process, which may end at once
            store.wait([f"{key}/read" for key in keys])
    except ToolError:
        raise
    except (RuntimeError, ValueError, OSError) as problem:
        raise ToolError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} does not meet all others at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} within {patience:g} s: {problem}; look whether all nodes run the doctor and reach this address"
        ) from problem
    if failed := [f"rank {at} on {one.host}: {one.error}" for at, one in enumerate(reports) if one.error]:
        raise AgreedError("\n".join(failed))
    for at, one in enumerate(reports):
        here, first = f"rank {at} on {one.host}", reports[0]
        if one.config != first.config:
            wanted = "give all nodes the same ds_config and the same DS_ZIPCCL, and --report or not"
            raise AgreedError(f"the config of {here} differs from that of rank 0 on {first.host}: {wanted}")
        if one.groups != first.groups:
            wanted = "give every rank a GPU that torch sees, or none and DS_ACCELERATOR=cpu"
            raise AgreedError(f"{here} has {one.groups} groups, rank 0 has {first.groups} groups: {wanted}")
    met = Ranks(rank, reports)
    if met.streams:
        start_line.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    backend = met.groups[1] if met.streams else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=wait)
    return met


@failing("proving the groups")
def settle(config: ZipcclConfig, found: Ranks, every: bool) -> tuple[Settled | None, ZipcclConfig]:
    """Prove kernels and groups in stream order and measure them, as a job does at its start; rank 0 prints the outcome. A collective of all
    ranks that have met; blocks for some seconds. Returns what was settled, None where that is nothing, and the config without what a rank
    could not prove. ``every``: prove groups that a job would not code too.

    Raises:
        ToolError: a rank failed meanwhile.
    """
    from ds_zipccl.comm import engine
    from ds_zipccl.integration import start_up

    if not (found.streams or every):
        return None, config
    proven = start_up.with_all_kernels(replace(config, nccl="on") if every else config, found.place)
    config = proven if proven.nccl == "off" else replace(proven, nccl=config.nccl)
    return engine.settle(config, found.place) if found.streams else None, config


@failing("measuring the link")
def measure() -> LinkProfile:
    """Measure link and codec between the ranks that have met, :data:`CALIBRATIONS` times. A collective; less than two seconds each on links
    of 100 Mbit/s and faster.

    Raises:
        ToolError: a rank failed meanwhile.
    """
    from ds_zipccl.comm.transport import calibration

    return median([calibration.measure() for _ in range(CALIBRATIONS)])


def median(profiles: Sequence[LinkProfile]) -> LinkProfile:
    """Return the profile of the median link. Equal on ranks with equal profiles."""
    return sorted(profiles, key=lambda profile: profile.seconds(_LARGE_BYTES))[len(profiles) // 2]


def leave() -> None:
    """Leave the group together with all ranks."""
    import torch.distributed as dist

    dist.barrier()  # gloo aborts now and then where one process leaves early
    dist.destroy_process_group()


def local(words: Sequence[str], ranks: int, network: Network | None, timeout: float) -> int:
    """Run the doctor with ``words`` as ``ranks`` processes of this machine; return the first status other than 0, else 0.

    ``network``: in whose nodes the processes run, None for loopback. ``timeout``: seconds until all are killed.
    """
    command = [sys.executable, "-m", "ds_zipccl", *words]
    environment = {**os.environ, **meeting(network), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            start = subprocess.Popen if network is None else functools.partial(network.start, rank)
            place = {"RANK": str(rank), "LOCAL_RANK": str(gpus.local_rank(rank))}
            shared = gpus.environment(ranks, rank, network is not None)
            processes.append(start(command, env={**environment, **place, **shared}))
        status = first_status(processes, timeout, _GOODBYE_S)
        return 2 if status is None else status
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
