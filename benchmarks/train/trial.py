"""One training run of ``bench train``: the example script in new processes, and the results that it writes."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ds_zipccl
from ds_zipccl.benchmarks.links import COUNTED, SLOTS
from ds_zipccl.benchmarks.links.backends import BACKENDS, Backend
from ds_zipccl.tools import ToolError, link, namespaces, step_logs
from ds_zipccl.tools.namespaces import Network
from ds_zipccl.tools.tables import complain

PACKAGE = Path(ds_zipccl.__file__).resolve().parent
#: Folders of the examples in an installed wheel and in a checkout.
EXAMPLES = (PACKAGE / "examples", PACKAGE.parent / "examples")


@dataclass(frozen=True)
class Workload:
    """A training: DeepSpeed config, options of the script, script, required packages, ZeRO stage, and whether it has
    experts or pipeline stages."""

    config: str
    options: tuple[str, ...] = ()
    script: str = "train_gpt.py"
    packages: tuple[str, ...] = ()
    stage: int = 3
    experts: bool = False
    stages: bool = False

    def check(self, name: str) -> None:
        """Raise ToolError if a package is missing."""
        if missing := [package for package in self.packages if importlib.util.find_spec(package) is None]:
            needed = " ".join(self.packages)
            raise ToolError(
                f"--workload {name} needs {' and '.join(missing)}, not installed here: pip install {needed}"
            )


def _experts(options: str, *packages: str) -> Workload:
    return Workload("ds_config_moe.json", tuple(options.split()), "train_moe.py", packages, stage=2, experts=True)


WORKLOADS: dict[str, Workload] = {
    "zero1": Workload("ds_config_zero1.json", stage=1),
    "zero2": Workload("ds_config_zero2.json", stage=2),
    "zero3": Workload("ds_config_zero3.json"),
    "moe": _experts("--experts 8 --top-k 1 --bias --batch 16"),
    "moe-top2": _experts("--experts 8 --top-k 2 --bias"),
    "mixtral": _experts("--model mixtral --experts 8 --top-k 2", "transformers"),
    "qwen": _experts("--model qwen3 --experts 32 --top-k 4", "transformers"),
    "qwen64": _experts("--model qwen3 --experts 64 --top-k 8", "transformers"),
    "finetune": Workload("ds_config_finetune.json"),
    "lora": Workload("ds_config_lora.json", script="train_lora.py", packages=("transformers", "peft")),
    "fsdp2": Workload("ds_config_fsdp.json", script="train_fsdp.py", stage=0),
    "fsdp2-lora": Workload(
        "ds_config_fsdp_lora.json", ("--adapters",), "train_fsdp.py", ("transformers", "peft"), stage=0
    ),
    "tp": Workload("ds_config_tp.json", script="train_tp.py", packages=("transformers",), stage=1),
    "pipeline": Workload("ds_config_pipeline.json", script="train_pipeline.py", stage=0, stages=True),
}

#: Content of the script's --results file; "steps" is the step log of rank 0, None without a log.
Results = dict[str, Any]


@dataclass(frozen=True)
class Training:
    """One configuration to run.

    ``timeout``: seconds per run. ``link``: network between the nodes, None for loopback. ``nodes``: number of nodes on
    a link, which hold consecutive ranks; None: one per rank. ``options``: further options of the script.
    """

    script: Path
    workload: str
    ranks: int
    steps: int
    size: str = "small"
    timeout: float = 1800
    link: link.LinkSpec | None = None
    nodes: int | None = None
    options: tuple[str, ...] = ()
    backend: Backend = BACKENDS["gloo"]

    @property
    def same_sums(self) -> bool:
        """Whether sums must have the bits of the plain sums. NCCL promises no order for three or more ranks."""
        return self.ranks == 2 or not self.backend.streams

    @property
    def place(self) -> dict[str, Any]:
        """Columns that identify the configuration."""
        nodes = (self.nodes or self.ranks) if self.link else self.backend.nodes or 1
        return {"workload": self.workload, "ranks": self.ranks, "nodes": nodes, "link": link.name(self.link)}


def find_script(named: Path | None = None, workload: str = "zero3") -> Path:
    """Return the training script of a workload.

    Raises:
        ToolError: the named file, or the script of the package, does not exist.
    """
    own = WORKLOADS[workload].script
    places = [named] if named else [folder / own for folder in EXAMPLES]
    for place in places:
        if place.is_file():
            return place
    looked = " and ".join(map(str, places))
    raise ToolError(f"no training script at {looked}: name examples/{own} of a checkout with --script")


def config_of(training: Training) -> Path:
    """Return the DeepSpeed config of the workload: next to the script, otherwise in the package."""
    name = WORKLOADS[training.workload].config
    return next(
        (folder / name for folder in (training.script.parent, *EXAMPLES) if (folder / name).is_file()), Path(name)
    )


def run(training: Training, variant: str, section: dict[str, Any] | None, network: Network | None) -> Results:
    """Train once and return the results; blocks until the training ends. The progress bar of the script goes to stderr.

    Args:
        variant: name of the run in the progress bar and in errors.
        section: the ``"zipccl"`` section of the processes; None: without ds_zipccl.
        network: the ranks run in its nodes; None: on loopback.

    Raises:
        ToolError: the run failed or took too long; the message ends with the last lines of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        names = "results.json", "output.txt", "steps.jsonl", "between.json"
        results, output, log, between = (Path(folder) / name for name in names)
        name = f"{training.workload} x{training.ranks} {link.name(training.link)} {variant}"
        written = "0" if section is None else json.dumps({"step_log": str(log)} | section)
        wanted = {"DS_ZIPCCL": written, "OMP_NUM_THREADS": "1"}
        wanted |= {"DS_ACCELERATOR": training.backend.device, COUNTED: str(between)}
        more = ["--results", str(results), "--name", name]
        with output.open("wb") as sink:
            processes = []
            try:
                for rank, (command, environment) in enumerate(_commands(training, network, more)):
                    start = subprocess.Popen if network is None else partial(network.start, rank)
                    environment = {**os.environ, **wanted, **environment}
                    processes.append(start(command, stdout=sink, env=environment, start_new_session=True))
                status = namespaces.first_status(processes, training.timeout)
            finally:
                for process in processes:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGTERM)  # to the process group: torchrun and its ranks
                for process in processes:
                    process.wait()
        said = output.read_text(errors="replace")
        for line in said.splitlines():
            if line.startswith("[ds_zipccl]") and " traffic of rank " not in line:  # the start-up lines
                complain(f"# {line}")
        if status != 0:
            ended = f"timeout after {training.timeout:.0f} s" if status is None else status
            raise ToolError(
                f"{variant} run ended with status {ended}; errors are above, the output ends with:\n{said[-4000:]}"
            )
        found: Results = json.loads(results.read_text())
        found["between"] = json.loads(between.read_text()) if between.exists() else None
        return found | {"steps": step_logs.read(str(log)) if log.exists() else None}


def _commands(
    training: Training, network: Network | None, more: Sequence[str]
) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield command and environment of each process, by rank."""
    backend, options = training.backend, WORKLOADS[training.workload].options
    first = ["-m", "ds_zipccl.benchmarks.links.slots"] if backend.name == SLOTS else []
    command = [sys.executable, *first, str(training.script), "--ds-config", str(config_of(training)), *options]
    command += ["--steps", str(training.steps), "--size", training.size, "--comm-time", *training.options, *more]
    if network is None and not backend.streams:
        yield [*command, "--ranks", str(training.ranks)], {}
        return
    if backend.streams:
        command += ["--backend", backend.name]
    meeting = namespaces.meeting(network)
    per_node = training.ranks if network is None else network.ranks_per_node
    for rank in range(training.ranks):
        environment: dict[str, Any] = meeting | {
            "RANK": rank,
            "LOCAL_RANK": backend.local_rank(rank if backend.streams else rank % per_node),
            "WORLD_SIZE": training.ranks,
            "LOCAL_WORLD_SIZE": per_node,
            "TORCHDYNAMO_DISABLE": 1,  # nothing is compiled, as in ranks that the script starts
            **backend.environment(training.ranks, rank, network is not None),
        }
        yield command, {key: str(value) for key, value in environment.items()}
