"""Writes the generated sections of README.md and of the pages in ``docs``: ``python docs/generate.py`` from a checkout.

A section stands between ``<!-- begin NAME -->`` and ``<!-- end -->``. :data:`SECTIONS` has a function for each name; ``measured.py`` and
``trained.py`` have the tables of measured figures, ``modelled.py`` those of a model, ``lossy_tables.py`` those of lossy codecs, and
``release_tables.py`` that of versions. A test compares every page with the text that this file generates.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package of the checkout, not an installed one

import lossy_tables
import measured
import modelled
import release_tables
import torch
import trained
from measured import ROOT, table

from ds_zipccl.__main__ import COMMANDS, PROGRAM
from ds_zipccl.comm.device import first_steps
from ds_zipccl.config import DEFAULT, ENVIRONMENT, KEYS, ZipcclConfig
from ds_zipccl.frame import CHUNK_BLOCKS
from ds_zipccl.integration import bypassed, start_line
from ds_zipccl.kernels.cuda import waves
from ds_zipccl.kernels.cuda.interface import THREADS
from ds_zipccl.ops import OPS
from ds_zipccl.policy import admission, cost_model, trial
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.policy.settled import TIMED_GAIN, Settled, sums_of

# ---- configuration ---------------------------------------------------------------------------------------------------


def _values(key: str) -> str:
    """The values that a key of the section allows."""
    wanted = KEYS[key].type
    if get_origin(wanted) is Literal:
        return " ".join(f"`{json.dumps(value)}`" for value in get_args(wanted))
    bounds = KEYS[key].bounds
    if bounds is not None:
        return f"integer, {bounds.least} to {bounds.most}"
    return {bool: "`true` `false`", str: "string"}.get(
        wanted, "object: role to mode, or to an object with a lossy codec"
    )


def _default(key: str) -> str:
    return f"`{json.dumps(KEYS[key].default)}`"


def config(page: Path) -> str:
    """Every key of the section."""
    rows = ((f"`{name}`", _default(name), _values(name), _escaped(key.meaning)) for name, key in KEYS.items())
    return table(("key", "default", "values", "meaning"), rows)


def environment(page: Path) -> str:
    """Every environment variable that the package reads."""
    return table(("variable", "meaning"), ((f"`{name}`", _escaped(meaning)) for name, meaning in ENVIRONMENT.items()))


# ---- support matrix --------------------------------------------------------------------------------------------------

#: Backends that DeepSpeed jobs use, by device type; those with a coded schedule come from the policy.
USED_BACKENDS = {"cpu": ("gloo",), "cuda": ("gloo", "nccl")}
#: Devices whose sends and receives are coded (ds_zipccl.integration passes the sends of other devices through).
POINT_TO_POINT_DEVICES = ("cpu",)
#: Column of the matrix -> its operations, each with its role, and what its differences need; None where it has none.
TRAFFIC: dict[str, tuple[tuple[tuple[str, str], ...], str | None]] = {
    "ZeRO-1, ZeRO-2": ((("reduce_to_owners", "zero_grad"), ("all_gather_into_tensor", "zero_param")), "+ differences"),
    "ZeRO-3": (
        (("reduce_scatter_tensor", "zero_grad"), ("all_gather_into_tensor", "zero_param")),
        "+ differences of frozen parameters, of all with `zero3_base`",
    ),
    "FSDP2": (
        (("reduce_scatter_tensor", "zero_grad"), ("all_gather_into_tensor", "zero_param")),
        "+ differences of frozen parameters, of all with `zero3_base`",
    ),
    "MoE, tensor and sequence parallel": ((("all_to_all_single", "ep"), ("all_reduce", "tp")), None),
    "pipeline": ((("send", "pp"), ("recv", "pp")), None),
}
PASSES = "passes through"
#: What the matrix says of sums of NCCL groups.
SUMS = "sums with `nccl` on"
#: Settings that code NCCL groups whole.
ON = replace(DEFAULT, nccl="on")


def admitted(op: str, role: str, device: str, backend: str, config: ZipcclConfig = ON) -> admission.Decision:
    """The policy's decision on a large bf16 message of one operation, of which ranks may hold a base where it is a gather."""
    sums = "SUM" if "reduce" in op else None
    message = admission.Message(op, torch.bfloat16, 1 << 24, 4, device, backend, role, sums, based="gather" in op)
    return admission.admit(message, config)


def cell(column: str, device: str, backend: str) -> str:
    """What happens to the traffic of a column: the words of the matrix."""
    operations, differences = TRAFFIC[column]
    decisions = [admitted(op, role, device, backend) for op, role in operations]
    if any(OPS[op].point_to_point for op, _ in operations) and device not in POINT_TO_POINT_DEVICES:
        return PASSES
    if not all(decision.frames for decision in decisions):
        return PASSES
    sums = backend in admission.STREAM_BACKENDS and any("reduce" in op for op, _ in operations)
    based = differences is not None and any(decision.with_base for decision in decisions)
    based &= column != "FSDP2" or backend not in admission.STREAM_BACKENDS  # its parameters have no agreed sizes
    return f"coded{f' {differences}' if based else ''}{f'; {SUMS}' if sums else ''}"


def places() -> Iterator[tuple[str, str]]:
    """Device types and backends of the matrix: those of the policy and those that jobs use."""
    for device in {**USED_BACKENDS, **admission.CODED_BACKENDS}:
        yield from ((device, name) for name in _backends(device))


def _backends(device: str) -> list[str]:
    coded = admission.CODED_BACKENDS.get(device, ())
    return list(dict.fromkeys((*coded, *USED_BACKENDS.get(device, ()))))


def matrix(page: Path) -> str:
    """Device and backend against kind of traffic. Backends without coded schedules are in bold."""
    rows = []
    for device, backend in places():
        cells = [cell(column, device, backend) for column in TRAFFIC]
        name = {"cpu": "CPU", "cuda": "CUDA"}.get(device, device)
        shown = f"{name}, {backend if backend == 'gloo' else backend.upper()}"
        rows.append((f"**{shown}**" if set(cells) == {PASSES} else shown, *cells))
    rows.append(("**any other**", *[PASSES] * len(TRAFFIC)))
    return f"{nccl()}\n\n" + table(("tensors, process group", *TRAFFIC), rows)


def nccl() -> str:
    """The sentence on NCCL groups: first of all a user's loss."""
    cells = [cell(column, "cuda", "nccl") for column in TRAFFIC]
    if set(cells) == {PASSES}:
        return "**NCCL groups, the default on GPUs, gain nothing yet: their traffic passes through.**"
    return (
        "**No network of GPUs has run the schedules of NCCL groups yet.** On one H200, which 2 and 4 ranks shared, also as two nodes with "
        "1 or 10 Gbit/s between them, and on a simulated GPU every bit was right. Each job proves them first: until four optimizer steps "
        "have compared coded copies with the plain results, the plain results count."
    )


# ---- tools -----------------------------------------------------------------------------------------------------------


def _escaped(text: str) -> str:
    """Plain text as Markdown in a cell: brackets are no links, and a bar ends no cell."""
    return re.sub(r"([\[\]<>*|])", r"\\\1", text)


def _options(module: Any) -> tuple[str, str]:
    """The table of a command's arguments, and the text below them."""
    parser = argparse.ArgumentParser(PROGRAM, add_help=False)
    module.add_arguments(parser)
    rows = []
    for action in parser._actions:
        values = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else "")
        names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        taken = "" if action.nargs == 0 or not action.option_strings else f" {values or action.dest.upper()}"
        several = " ..." if action.nargs in ("+", "*") else ""
        meaning = (action.help or "") % {**vars(action), "prog": PROGRAM}
        rows.append((f"`{names}{taken}{several}`", _escaped(meaning)))
    return table(("argument", "meaning"), rows), parser.epilog or ""


def tools(page: Path) -> str:
    """Every command: its help text, its arguments and what stands below them."""
    parts = []
    for words, (name, text) in COMMANDS.items():
        module = importlib.import_module(f"ds_zipccl.{name}")
        arguments, epilog = _options(module)
        about = (module.__doc__ or text).replace("``", "").strip()
        parts.append(f"## {' '.join(words)}\n\n{text[0].upper()}{text[1:]}.\n\n```text\n{about}\n```\n\n{arguments}")
        if epilog:
            parts.append(f"```text\n{epilog.strip()}\n```")
    return "\n\n".join(parts)


def commands(page: Path) -> str:
    """A line for every command."""
    return "\n".join(f"- `{PROGRAM} {' '.join(words)}`: {text}" for words, (_, text) in COMMANDS.items())


# ---- state -----------------------------------------------------------------------------------------------------------


def group_state(page: Path) -> str:
    """A row for every class of which a group keeps an object: what :meth:`GroupState.of` makes, by the class's first sentence."""
    folder = ROOT / "ds_zipccl"
    texts = {path.relative_to(folder): path.read_text() for path in sorted((folder / "comm").rglob("*.py"))}
    asked = {name for text in texts.values() for name in re.findall(r"\b(?:state|world)\.of\((\w+)\)", text)}
    rows = []
    for path, text in texts.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name in asked | {"GroupState"}:
                said = " ".join((ast.get_docstring(node) or "").split()).replace("``", "`")
                rows.append((re.split(r"(?<=\.) ", said)[0].rstrip("."), f"`{path}`: `{node.name}`"))
    return table(("state of a group", "owner"), rows)


# ---- decisions -------------------------------------------------------------------------------------------------------


def reasons(page: Path) -> str:
    """Every reason for which a message passes through: its text, its meaning and its remedy."""
    rows = ((f"`{one.of('...')}`", one.meaning, one.remedy) for one in PassReason)
    return table(("reason in the table", "meaning", "remedy"), rows)


def bypassed_features(page: Path) -> str:
    """Every feature whose traffic bypasses the package, or costs more under it."""
    rows = ((one.name, one.sign, one.cost, one.remedy) for one in bypassed.FEATURES)
    return table(("feature", "recognized by", "cost", "to do"), rows)


def step_states(page: Path) -> str:
    """The life of a choice by whole steps, with the constants of the policy."""
    window = f"{trial.SETTLE_STEPS} and {trial.WINDOW_STEPS} steps"
    return f"""```mermaid
stateDiagram-v2
    [*] --> Follow: coded
    Follow: Follow the choice<br>{trial.WARMUP_STEPS} steps at first, then as many<br>as keep the cost of probes at {trial.PROBE_SHARE:.0%}
    Probe: Probe<br>{trial.PROBE_WINDOWS} windows of {window} for each schedule
    Trial: Trial<br>{trial.TRIAL_WINDOWS} windows for each schedule
    Follow --> Probe
    Probe --> Follow: the choice is ahead,<br>or one is {trial.CLEARLY_SLOWER} times as fast
    Probe --> Trial: the other is ahead
    Trial --> Follow: all ranks switch at one step
```"""


def step_constants(page: Path) -> str:
    """The constants by which whole steps are compared."""
    rows = (
        ("steps before the first trial", trial.WARMUP_STEPS),
        (
            "windows of a trial and of a probe, for plain and for coded steps",
            f"{trial.TRIAL_WINDOWS} and {trial.PROBE_WINDOWS}",
        ),
        ("steps of a window that do not count, and that do", f"{trial.SETTLE_STEPS} and {trial.WINDOW_STEPS}"),
        ("steps between a trial and the agreement on its times", trial.DELAY_STEPS),
        ("part of all steps that probes may cost", trial.PROBE_SHARE),
        ("share of the current time that the other steps must stay below", trial.STEP_HYSTERESIS),
        (
            "standard deviations by which they must be ahead, in a probe and in a trial",
            f"{trial.AHEAD_IN_PROBE} and {trial.AHEAD_IN_TRIAL}",
        ),
        ("bytes of the smallest shard that goes as a difference", admission.DELTA_SHARD_BYTES),
        ("GB/s of a node's network cards from which on nothing is tried", f"{cost_model.FAST_NODE / 1e9:g}"),
    )
    return table(("constant", "value"), rows)


# ---- work of a GPU ---------------------------------------------------------------------------------------------------

#: Multiprocessors of an H100 or H200, for the table of waves.
MULTIPROCESSORS = 132


def _filled(chunks: int, cut: int, resident: int) -> tuple[str, int, int, int]:
    """Return the last columns of :func:`device_fill` for a launch of ``chunks`` chunks, each halved ``cut`` times."""
    grid, blocks, places = chunks << cut, CHUNK_BLOCKS >> cut, resident * MULTIPROCESSORS
    working = min(THREADS // 32, blocks)  # warps of a block of threads
    fullest = min(resident, -(-grid // MULTIPROCESSORS)) * working
    return f"{grid / places:.2f}", min(grid, MULTIPROCESSORS), fullest, -(-grid // places) * (blocks // working)


def device_fill(page: Path) -> str:
    """How full a device is for messages of bfloat16: with whole chunks, and with chunks cut as the launches cut them. Counted."""
    resident = waves.RESIDENT["encode"][2]
    rows = []
    for mib in (0.25, 1, 4, 8, 16, 64, 256):
        chunks = int(mib * 2**20) // (2 * CHUNK_BLOCKS * 1024)
        cut = waves.split(chunks, resident, MULTIPROCESSORS)
        pairs = zip(_filled(chunks, 0, resident), _filled(chunks, cut, resident))
        rows.append((f"{mib:g} MiB", chunks, 1 << cut, *(f"{whole}, {parts}" for whole, parts in pairs)))
    head = (
        "message", "chunks", "parts a chunk", "waves", "multiprocessors at work", "coding warps on the fullest one",
        "blocks that a warp codes in turn",
    )  # fmt: skip
    return table(head, rows)


def start_of_nccl(page: Path) -> str:
    """The start-up line of a job whose groups are NCCL's. The speeds are seeds of the model."""
    profile = cost_model.DeviceProfile(network=100e9 / 8 * cost_model.RDMA_REACH)
    shape, config = cost_model.Topology(2, 8), replace(ON, nccl="auto")
    sums = sums_of(config, shape, profile)
    sums = sums._replace(why=f"ours timed 2.2 times as fast in bfloat16, wanted {TIMED_GAIN}; {sums.why}")
    settled = Settled("cuda", shape, profile, None, sums, 8e6, compared=1 + first_steps.STEPS)
    covered = start_line.describe([start_line.Group(16, {"cuda": "nccl"}, nodes=2)], "cuda", config, settled)
    tried, start_line.kernels.tried = start_line.kernels.tried, lambda device: {"native": ""}
    try:
        line = start_line.start_line(config, None, covered, [list(range(8)), list(range(8, 16))], settled)
    finally:
        start_line.kernels.tried = tried
    return "```text\n" + textwrap.fill(line, WIDTH) + "\n```"


def jobs(page: Path) -> str:
    """The README's table of jobs: those that were trained, and nodes with GPUs by the model."""
    return trained.jobs([measured.job_on_nccl(), *modelled.jobs()])


Section = Callable[[Path], str]
SECTIONS: dict[str, Section] = {
    "bypassed": bypassed_features,
    "start_of_nccl": start_of_nccl,
    "commands": commands,
    "config": config,
    "device_fill": device_fill,
    "environment": environment,
    "lossy_codecs": lossy_tables.codecs,
    "lossy_sizes": lossy_tables.sizes,
    "matrix": matrix,
    "reasons": reasons,
    "tools": tools,
    "step_states": step_states,
    "beyond": trained.beyond,
    "codec": measured.codec,
    "comm": measured.comm,
    "corpus": measured.corpus,
    "cuda": measured.cuda,
    "doctor": trained.doctor,
    "front": trained.front,
    "jobs": jobs,
    "fabric": modelled.fabric,
    "forecast_nccl": modelled.forecast,
    "gpu": measured.gpu,
    "instructions": measured.instructions,
    "nccl_counts": modelled.counts,
    "host_time": modelled.host_time,
    "nccl_exchanges": modelled.exchanges,
    "nccl_forecasts": modelled.forecasts,
    "nccl_gains": modelled.gains,
    "nccl_gathers": modelled.gathers,
    "nccl_operations": modelled.operations,
    "nccl_steps": modelled.steps,
    "plan_steps": modelled.whole_steps,
    "step_constants": step_constants,
    "steps": measured.steps,
    "delta": measured.delta,
    "lossy": measured.lossy,
    "rows": measured.rows,
    "sync": measured.sync,
    "train": trained.train,
    "lora": trained.lora,
    "experts": trained.experts,
    "lossy_trained": partial(trained.lossy, names=("train_lossy", "train_lossy_moe")),
    "lossy_tensor_parallel": partial(trained.lossy, names=("train_lossy_tp",)),
    "lossy_pipeline": partial(
        trained.lossy, names=("train_lossy_pipeline", "train_lossy_pipeline_slow", "train_lossy_fused")
    ),
    "finetune": trained.finetune,
    "fsdp2": trained.fsdp2,
    "group_state": group_state,
    "versions": release_tables.versions,
    "volume": trained.volume,
}


def pages() -> list[Path]:
    """Every page that may have generated sections."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def generate(text: str, page: Path) -> str:
    """``text`` of ``page`` with every marked section written anew.

    Raises:
        KeyError: a marker names no section.
    """
    pattern = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{folded(SECTIONS[match[2]](page))}\n{match[3]}", text)


#: Columns of a page, but for tables and drawings.
WIDTH = 120
#: A paragraph, or an item of a list, in consecutive lines.
PARAGRAPH = re.compile(r"^(?:[*-] .+(?:\n  \S.*)*|(?![|<#`\[\s]|[*-] ).+(?:\n(?![|<#`\[\s]|[*-] ).+)*)$", re.MULTILINE)


def folded(section: str) -> str:
    """``section`` with its long paragraphs and commands in lines of :data:`WIDTH` columns."""
    parts = re.split(r"(^```\w*\n.*?^```$)", section, flags=re.DOTALL | re.MULTILINE)
    for at, part in enumerate(parts):
        if part.startswith("```sh"):
            parts[at] = "\n".join(map(_command, part.splitlines()))
        elif not part.startswith("```mermaid"):
            parts[at] = PARAGRAPH.sub(_paragraph, part)
    return "".join(parts)


def _paragraph(found: re.Match[str]) -> str:
    text = found[0]
    if all(len(line) <= WIDTH for line in text.splitlines()):
        return text
    further = "  " * text.startswith(("* ", "- "))
    text = " ".join(text.split())
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False, subsequent_indent=further)


def _command(line: str) -> str:
    """Return the lines of a command; a word in quotes stays whole."""
    if len(line) <= WIDTH or line.startswith("#"):
        return line
    lines = [""]
    for word in re.findall(r"(?:'[^']*'|\"[^\"]*\"|\S)+", line):
        if len(lines[-1]) + len(word) + 3 > WIDTH:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)


def main() -> int:
    """Write all pages.

    Returns:
        Exit status: 0.
    """
    for page in pages():
        before = page.read_text()
        after = generate(before, page)
        if after != before:
            page.write_text(after)
            print(f"{page.relative_to(ROOT)} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
