"""``bench train``: whole training runs, plain and coded, from one seed. No timing without checking the bits.

Every run is ``examples/train_gpt.py`` in processes of its own; plain and coded runs alternate, plain first. Columns:

* ``mode``, ``ranks``, ``link``: what trained, on how many ranks, joined by what: loopback, or with ``--link RATE`` a network of that
  rate, shaped by token buckets (:mod:`ds_zipccl.tools.link`; needs root and iproute2).
* ``variant``: ``plain`` (``DS_ZIPCCL=0``) or ``coded`` (``reduction: match`` and ``--delta``, which promise the plain run's bits).
* ``step_ms``: median of rank 0's steps, the first few left out.
* ``raw_bytes``: what a bandwidth-optimal uncoded schedule sends, per rank (mean) and run. ALL traffic of DeepSpeed counts,
  from initialisation to the gather of the final parameters: coded calls and calls that passed uncoded.
* ``wire_bytes``: the same with coded calls at what they really sent, headers included. The plain row carries ``raw_bytes``
  here: what the plain backend's own schedules move cannot be seen from outside.
* ``loss_last``: mean over ranks, nothing where it is not finite.
* ``params_sha256``: over all final parameters of all ranks (the table shows 16 digits).
* ``speedup``: plain ``step_ms`` / this row's ``step_ms``.

Below each pair: the ratio over coded bytes alone, and ``bits: equal`` or everything that is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_zipccl.tools import ToolError, link
from ds_zipccl.tools.tables import Column, Table, complain, say, write_json

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
#: variant -> the section of its processes; None: coding is off
VARIANTS: dict[str, dict[str, Any] | None] = {"plain": None, "coded": {"enabled": True, "reduction": "match"}}
COLUMNS = (
    Column("mode", width=5),
    Column("ranks", "d"),
    Column("link", width=8),
    Column("variant"),
    Column("step_ms", ".1f", 8),
    Column("raw_bytes", ",d", 15),
    Column("wire_bytes", ",d", 15),
    Column("loss_last", ".6f"),
    Column("params_sha256", width=16),
    Column("speedup", ".3f"),
)

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
    link: str = ""  # rate of the network between the ranks; loopback if empty
    delta: str = "off"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench train``."""
    option = parser.add_argument
    option("--mode", nargs="+", choices=MODES, default=["zero3"], help="what to train (default: zero3)")
    option("--ranks", nargs="+", type=int, default=[2], metavar="N", help="local ranks (default: 2)")
    link.add_argument(parser)
    option("--steps", type=int, default=20, metavar="K", help="optimizer steps per run (default: 20)")
    option("--skip", type=int, default=3, help="first steps left out of step_ms (default: 3)")
    option("--repeat", type=int, default=1, help="runs of each variant, alternating (default: 1)")
    option(
        "--size", choices=("tiny", "small", "medium"), default="small", help="model (default: small, 11M parameters)"
    )
    option(
        "--delta", choices=("off", "auto"), default="off", help="the key of the section, for coded runs (default: off)"
    )
    option("--script", type=Path, metavar="FILE", help="training script (default: the package's examples/train_gpt.py)")
    option("--timeout", type=float, default=1800, metavar="S", help="seconds for one run (default: 1800)")
    option("--json", metavar="FILE", help="write rows and verdicts here")


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


def run(training: Training, variant: str, network: link.Link | None = None) -> Results:
    """Train once and return the script's results; blocks. The script's progress bar goes to stderr.

    ``network``: one rank in each of its namespaces; without one the script starts the ranks itself.

    Raises:
        ToolError: the run failed or took too long; the message ends with the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        results, output = Path(folder) / "results.json", Path(folder) / "output.txt"
        with output.open("wb") as sink:
            processes = [
                subprocess.Popen(command, stdout=sink, env={**os.environ, **environment}, start_new_session=True)
                for command, environment in _commands(training, variant, network, results)
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
        return json.loads(results.read_text())


def _commands(
    training: Training, variant: str, network: link.Link | None, results: Path
) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Each process to start: its command, and what it needs in its environment."""
    config, options = MODES[training.mode]
    command = [sys.executable, str(training.script), "--ds-config", str(training.script.parent / config), *options]
    command += ["--steps", str(training.steps), "--size", training.size, "--results", str(results)]
    command += ["--name", f"{training.mode} x{training.ranks} {network or link.LOOPBACK} {variant}"]
    section = VARIANTS[variant]
    wanted = "0" if section is None else json.dumps({**section, "delta": training.delta})
    environment = {"DS_ZIPCCL": wanted, "OMP_NUM_THREADS": "1"}
    if network is None:
        yield [*command, "--ranks", str(training.ranks)], environment
        return
    for rank, namespace in enumerate(network.namespaces):
        place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": training.ranks, "LOCAL_WORLD_SIZE": 1}
        meeting = {"MASTER_ADDR": network.addresses[0], "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": link.INTERFACE}
        # As the script itself does for ranks that it starts: nothing here is compiled.
        own = {**{key: str(value) for key, value in place.items()}, **meeting, "TORCHDYNAMO_DISABLE": "1"}
        yield ["ip", "netns", "exec", namespace, *command], environment | own


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


def problems(runs: Mapping[str, list[Results]]) -> list[str]:
    """Everything wrong with one configuration's runs (variant -> results); empty where nothing is."""
    found = []
    first = runs["plain"][0]
    for variant, result in ((variant, result) for variant, results in runs.items() for result in results):
        differing = [step for step, pair in enumerate(zip(result["losses"], first["losses"]), 1) if len(set(pair)) > 1]
        calls = result["sent"]["coded_calls"] if result["sent"] else 0
        checks = {
            f"losses differ from the first plain run's at steps {differing}": differing,
            "parameters differ from the first plain run's": result["params_sha256"] != first["params_sha256"],
            "ranks ended with different parameters": not result["replicas_equal"],
            "a loss is not finite": not all(math.isfinite(float.fromhex(loss)) for loss in result["losses"]),
            "nothing was coded: is ds_zipccl installed with its entry point?": variant == "coded" and not calls,
            f"{calls:.0f} calls were coded": variant == "plain" and calls,
        }
        found += [f"{variant} run: {problem}" for problem, wrong in checks.items() if wrong]
    return found


def rows(training: Training, runs: Mapping[str, list[Results]], skip: int) -> list[dict[str, Any]]:
    """One row per variant, columns as in the module's docstring; ``skip`` first steps are left out of ``step_ms``."""
    step_ms = {
        variant: statistics.median(ms for result in results for ms in result["step_ms"][skip:])
        for variant, results in runs.items()
    }
    sent = runs["coded"][0]["sent"] or {"raw_bytes": 0, "wire_bytes": 0, "passed_bytes": 0}
    raw = round(sent["raw_bytes"] + sent["passed_bytes"])
    wire = {"plain": raw, "coded": round(sent["wire_bytes"] + sent["passed_bytes"])}
    return [
        {
            "mode": training.mode,
            "ranks": training.ranks,
            "link": training.link or link.LOOPBACK,
            "variant": variant,
            "step_ms": step_ms[variant],
            "raw_bytes": raw,
            "wire_bytes": wire[variant],
            "loss_last": loss if math.isfinite(loss := float.fromhex(results[0]["losses"][-1])) else None,
            "params_sha256": results[0]["params_sha256"],
            "speedup": step_ms["plain"] / step_ms[variant],
        }
        for variant, results in runs.items()
    ]


def _pair(training: Training, repeat: int, skip: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and verdict of one configuration; a failed run is a problem in the verdict and gives no rows."""
    verdict: dict[str, Any] = {"mode": training.mode, "ranks": training.ranks, "link": training.link or link.LOOPBACK}
    verdict["ratio_coded"] = None
    runs: dict[str, list[Results]] = {variant: [] for variant in VARIANTS}
    try:
        with link.joined(training.link, training.ranks) as network:
            for variant in list(VARIANTS) * repeat:
                runs[variant].append(run(training, variant, network))
    except ToolError as error:
        return [], verdict | {"problems": [str(error)]}
    sent = runs["coded"][0]["sent"]
    if sent and sent["coded_calls"]:
        verdict["ratio_coded"] = sent["raw_bytes"] / sent["wire_bytes"]
    verdict |= {"parameters": runs["coded"][0]["parameters"], "sent": sent, "problems": problems(runs)}
    return rows(training, runs, skip), verdict


def main(args: argparse.Namespace) -> int:
    """Run ``bench train``; returns the exit status: 0 where every run worked and every bit is equal, else 1.

    Raises:
        ToolError: the options do not fit together, or there is no training script.
    """
    if args.repeat < 1 or not 0 <= args.skip < args.steps:
        raise ToolError(
            f"need --repeat >= 1 and --steps > --skip >= 0, got {args.repeat}, {args.steps} and {args.skip}"
        )
    script = find_script(args.script)
    table, written, verdicts = Table(COLUMNS), [], []
    for mode, ranks, rate in itertools.product(args.mode, args.ranks, args.link):
        training = Training(script, mode, ranks, args.steps, args.size, args.timeout, rate, args.delta)
        found, verdict = _pair(training, args.repeat, args.skip)
        for row in found:
            table.add(row | {"params_sha256": row["params_sha256"][:16]})
        ratio = f"ratio over coded bytes {verdict['ratio_coded']:.3f}; " if verdict["ratio_coded"] else ""
        say(
            f"# {mode}, {ranks} ranks, {rate or link.LOOPBACK}: {ratio}bits: {'NOT proven equal' if verdict['problems'] else 'equal'}"
        )
        for problem in verdict["problems"]:
            complain(f"{mode}, {ranks} ranks: {problem}")
        written += found
        verdicts.append(verdict)
    if args.json:
        more = {"verdicts": verdicts, "steps": args.steps, "skip": args.skip, "size": args.size, "repeat": args.repeat}
        write_json(args.json, written, args.command, **more)
    return int(any(verdict["problems"] for verdict in verdicts))
