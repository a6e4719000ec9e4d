"""One training run of ``bench train``: the example script in processes of its own, and what it left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_zipccl.bench import ToolError, link

PACKAGE = Path(__file__).resolve().parents[1]
#: where examples/ lies in an installed wheel, and in a checkout
EXAMPLES = (PACKAGE / "examples", PACKAGE.parent / "examples")
#: mode -> (DeepSpeed config next to the script, further options of the script)
MODES: dict[str, tuple[str, list[str]]] = {
    "zero1": ("ds_config_zero1.json", []),
    "zero2": ("ds_config_zero2.json", []),
    "zero3": ("ds_config_zero3.json", []),
    "moe": ("ds_config_moe.json", ["--experts", "4"]),
}

Results = dict[str, Any]  # what examples/train_gpt.py --results writes


@dataclass(frozen=True)
class Training:
    """One configuration to run; ``timeout`` in seconds for one run."""

    script: Path
    mode: str
    ranks: int
    steps: int
    size: str = "small"
    timeout: float = 1800
    link: str = ""  # rate of the network between the nodes; loopback if empty
    nodes: int | None = None  # that share out the ranks; with a link one for each rank if None
    options: tuple[str, ...] = ()  # more of the script's

    @property
    def place(self) -> dict[str, Any]:
        """The columns that say what ran where."""
        nodes = (self.nodes or self.ranks) if self.link else 1
        return {"mode": self.mode, "ranks": self.ranks, "nodes": nodes, "link": self.link or link.LOOPBACK}


def find_script(named: Path | None = None) -> Path:
    """The training script.

    Raises:
        ToolError: neither the named file nor the package's own exists; says where it was looked for.
    """
    places = [named] if named else [folder / "train_gpt.py" for folder in EXAMPLES]
    for place in places:
        if place.is_file():
            return place
    looked = " and ".join(map(str, places))
    raise ToolError(f"no training script at {looked}: name examples/train_gpt.py of a checkout with --script")


def run(training: Training, variant: str, section: dict[str, Any] | None, network: link.Link | None) -> Results:
    """Train once and return the script's results; blocks. The script's progress bar goes to stderr.

    Args:
        variant: what the progress bar and errors call this run.
        section: the ``"zipccl"`` section of its processes; None: coding is off.
        network: where the ranks live; None: the script starts them itself, on loopback.

    Raises:
        ToolError: the run failed or took too long; the message ends with the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        results, output = Path(folder) / "results.json", Path(folder) / "output.txt"
        name = f"{training.mode} x{training.ranks} {network or link.LOOPBACK} {variant}"
        wanted = {"DS_ZIPCCL": "0" if section is None else json.dumps(section), "OMP_NUM_THREADS": "1"}
        with output.open("wb") as sink:
            processes = [
                subprocess.Popen(
                    command, stdout=sink, env={**os.environ, **wanted, **environment}, start_new_session=True
                )
                for command, environment in _commands(training, network, ["--results", str(results), "--name", name])
            ]
            try:
                status = _outcome(processes, training.timeout)
            finally:
                for process in processes:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGTERM)  # torchrun is in this group, and ends its ranks in turn
                for process in processes:
                    process.wait()
        if status:
            tail = output.read_text(errors="replace")[-4000:]
            raise ToolError(
                f"{variant} run ended with status {status}; errors are above, its output ends with:\n{tail}"
            )
        found: dict[str, Any] = json.loads(results.read_text())
        return found


def _commands(
    training: Training, network: link.Link | None, more: Sequence[str]
) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Each process to start: its command, and what it needs in its environment."""
    config, options = MODES[training.mode]
    command = [sys.executable, str(training.script), "--ds-config", str(training.script.parent / config), *options]
    command += ["--steps", str(training.steps), "--size", training.size, "--comm-time", *training.options, *more]
    if network is None:
        yield [*command, "--ranks", str(training.ranks)], {}
        return
    for rank in range(training.ranks):
        environment = {
            "RANK": rank,
            "LOCAL_RANK": rank % network.ranks_per_node,
            "WORLD_SIZE": training.ranks,
            "LOCAL_WORLD_SIZE": network.ranks_per_node,
            "MASTER_ADDR": network.addresses[0],
            "MASTER_PORT": 29500,
            "GLOO_SOCKET_IFNAME": link.INTERFACE,
            "TORCHDYNAMO_DISABLE": 1,  # as the script itself does for ranks that it starts: nothing here is compiled
        }
        inside = ["ip", "netns", "exec", network.namespace(rank)]
        yield [*inside, *command], {key: str(value) for key, value in environment.items()}


def _outcome(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> int | str:
    """0 when all have ended well; else the first status that is not, or that it took too long."""
    deadline = time.monotonic() + timeout
    while any(process.poll() is None for process in processes):
        if failed := [process.returncode for process in processes if process.returncode]:
            return failed[0]
        if time.monotonic() > deadline:
            return f"timeout after {timeout:.0f} s"
        time.sleep(0.05)
    return next((process.returncode for process in processes if process.returncode), 0)
