"""Tables of figures that come from the model of NCCL groups, not from measurements: see :mod:`ds_zipccl.policy.cost_model`. Those of
whole steps come from ``docs/results``; a test computes the runs of others again."""

from __future__ import annotations

import io
import json
import re
import shlex
import tempfile
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from measured import listed, picture, provenance, results, table

from ds_zipccl.__main__ import PROGRAM, parse
from ds_zipccl.cli.planning.speeds import ASSUMED, NETWORKS, network
from ds_zipccl.policy import cost_model, wire
from ds_zipccl.policy.cost_model import (
    GATHER,
    NOMINAL_BYTES,
    PCIE,
    SUM,
    DeviceProfile,
    Topology,
    coded_seconds,
    plain_seconds,
)
from ds_zipccl.policy.settled import gaining_sums

#: Above every table: how far it can be trusted.
MODEL = "**A model, not a measurement: no network of GPUs has run these schedules yet.**"
#: Nodes and GPUs of a node, network, and speed inside a node where it is not NVLink: the rows of single operations.
_PLACES = (
    *((8, name, None) for name in NETWORKS if name != NETWORKS[-1]),
    *((1, name, None) for name in ("400gbit/node", "100gbit/node")),
    (4, "100gbit/node", PCIE),
)


def _speed(name: str) -> float:
    """Bytes per second each way that NCCL's collectives reach on a network of a node."""
    found = network(name)
    return found.rate * found.reach


def operations(page: Path) -> str:
    """By how many times one gather and one sum are faster than NCCL's, at three speeds of the codec."""
    rows = []
    for each, name, inside in _PLACES:
        topology, base = Topology(4, each), DeviceProfile(_speed(name))
        base = base if inside is None else replace(base, inside=inside)
        profiles = [replace(base, encode=speed, decode=speed) for speed in ASSUMED.values()]
        plain = plain_seconds(GATHER, NOMINAL_BYTES, topology, base)
        gains = [
            [plain / coded_seconds(kind, NOMINAL_BYTES, one, profile) for profile in profiles]
            for kind, one in ((GATHER, topology), (SUM, replace(topology, even=False)), (SUM, topology))
        ]
        texts = (" / ".join(f"{gain:.2f}" for gain in three) for three in gains)
        gpus = f"{each} {'PCIe ' if inside else ''}GPU{'s' if each > 1 else ''}"
        rows.append((gpus, name, f"{1e3 * plain:.3g}", *texts))
    speeds = " / ".join(f"{speed / 1e12:.1f}" for speed in ASSUMED.values())
    about = (
        f"{MODEL} An operation of {NOMINAL_BYTES / 1e6:.0f} MB of bf16, 4 nodes; speed-up against NCCL's best, at {speeds} TB/s of the "
        f"codec, which are assumed. The model has no loss of the computing to the codec."
    )
    head = ("a node", "network", "plain, ms", "gather", "sum in one level", "sum in two levels")
    return f"{about}\n\n{table(head, rows)}"


#: Nodes and GPUs of a node: the columns of the table of gains.
_GROUPS = ((2, 8), (4, 8), (16, 8), (128, 8), (2, 1), (16, 1))


def gains(page: Path) -> str:
    """What mode auto codes on each network, and by how many times it is faster."""
    rows = []
    for name in NETWORKS:
        cells = []
        for nodes, each in _GROUPS:
            topology, profile = Topology(nodes, each), DeviceProfile(_speed(name))
            moves = cost_model.moves_may_gain(topology, profile)
            least = cost_model.least_bytes(topology, profile, waits=0) if moves else 0.0
            sums = bool(gaining_sums(topology, profile)[0])
            found = [
                plain_seconds(kind, 1e9, topology, profile) / coded_seconds(kind, 1e9, topology, profile)
                for kind in (GATHER, SUM)
            ]
            parts = [f"gathers from {least / 1e6:.3g} MB on, {found[0]:.2f}"] * moves + [f"sums {found[1]:.2f}"] * sums
            cells.append("; ".join(parts) or "nothing")
        rows.append((name, *cells))
    about = (
        f"{MODEL} What mode auto codes on nodes x GPUs, and by how many times an operation of 1 GB is faster than NCCL's, with a codec of "
        f"{cost_model.CODEC / 1e12:g} TB/s (assumed). A test judges these choices with latencies x 0.5 and x 2, networks and codecs x "
        "0.7 and x 1.4: none is below 0.98 of the plain collective."
    )
    return f"{about}\n\n{table(('network', *(f'{nodes} x {each}' for nodes, each in _GROUPS)), rows)}"


#: What is counted -> its key in the rows of :mod:`ds_zipccl.benchmarks.comm.counted`, and its format.
_COUNTED = {
    "host waits per step": ("waits_step", "d"),
    "host waits per bucket": ("waits_bucket", "d"),
    "fragments a layer": ("fragments_layer", "d"),
    "collectives a layer": ("collectives_layer", "d"),
    "exchanges a bucket": ("collectives_bucket", "d"),
    "calls of kernels per layer": ("launches_layer", "d"),
    "calls of kernels per bucket": ("launches_bucket", "d"),
    "GB that a node sends to others": ("sent_gb", ".1f"),
    "the same by NCCL's rings": ("plain_gb", ".1f"),
    "staging buffers, MiB": ("staging_mib", ".0f"),
}


def counts(page: Path) -> str:
    """What a step of ZeRO-3 asks of NCCL groups."""
    content = results("nccl_counts")
    places = (f"{row['nodes']} x {row['each']}" for row in content["rows"])
    rows = ((name, *(f"{row[key]:{form}}" for row in content["rows"])) for name, (key, form) in _COUNTED.items())
    return f"{provenance(content)}\n\n{table(('a step of 7B', *places), rows)}"


def gathers(page: Path) -> str:
    """What each gather that DeepSpeed sends asks of NCCL groups, and the bytes that a node sends to others."""
    rows = results("nccl_counts")["rows"]
    heads = [
        f"{row['nodes']} x {row['each']}, {what}"
        for row in rows
        for what in ("fragments", "collectives", "MB", "by NCCL")
    ]
    keys = ("fragments", "d"), ("collectives", "d"), ("sent_mb", ".1f"), ("plain_mb", ".1f")
    sizes = [key.removeprefix("fragments_") for key in rows[0] if key.startswith("fragments_") and key[-1].isdigit()]
    lines = ((f"{mb} MB", *(f"{row[f'{key}_{mb}']:{form}}" for row in rows for key, form in keys)) for mb in sizes)
    return table(("a gather of", *heads), lines)


def host_time(page: Path) -> str:
    """What a call of an NCCL group takes of the host, and asks of the device."""
    content = results("host_time")
    heads = "call | us | plain gathers | events | waits for them | streams made current | kernels | collectives | host waits"
    line = (
        "{call} | {us:.0f} | {plain:.1f} | {records} | {waits} | {contexts} | {launches} | {collectives} | {host_waits}"
    )
    return f"{provenance(content)}\n\n{listed(content['rows'], heads, line)}"


def fabric(page: Path) -> str:
    """Steps of a real engine over modelled networks, compared with ``plan``."""
    content = results("fabric")
    heads = (
        "job | network | variant | step, ms | by `plan`, ms | step / plan | GB between nodes | collectives | speed-up"
    )
    line = (
        "{workload} | {fabric} | {variant} | {step_ms:.1f} | {plan_ms:.1f} | {of_plan:.2f} | {between_gb:.2f} | {collectives} | "
        "{speedup:.2f}"
    )
    return f"{provenance(content)}\n\n{listed(content['rows'], heads, line)}"


#: What is counted of the exchanges of a layer of experts, as in :data:`_COUNTED`; the keys of the first step end with "_first".
_EXCHANGES = {
    "host waits": ("exchange_waits", "d"),
    "of these with an idle network": ("idle_waits", "d"),
    "calls of kernels": ("exchange_launches", "d"),
    "GB of words that encoders read": ("read_gb", ".2f"),
}


def exchanges(page: Path) -> str:
    """What the exchanges of a layer of experts ask of a GPU, where sizes come first and where they are forecast."""
    rows = results("nccl_counts")["rows"]
    heads = [f"{row['nodes']} x {row['each']}, {when}" for row in rows for when in ("sizes first", "sent ahead")]
    lines = (
        (name, *(f"{row.get(key + when, row[key]):{form}}" for row in rows for when in ("_first", "")))
        for name, (key, form) in _EXCHANGES.items()
    )
    return table(("a layer of experts", *heads), lines)


def forecasts(page: Path) -> str:
    """What :class:`ds_zipccl.policy.wire.Forecast` makes of recorded exchanges: of each, its kind, the bytes of words for a rank, and those
    of the largest frame."""
    content, lines = results("exchange_sizes"), []
    for row in content["rows"]:
        forecast, calls = wire.Forecast(), [call.split(",") for call in row["exchanges"].split()]
        ahead, again, sent, words, frames = Counter[str](), 0, 0, 0, 0
        for kind, nbytes, frame in ((kind, int(nbytes), int(frame)) for kind, nbytes, frame in calls):
            slot = wire.slot_bytes(forecast.slot(kind, nbytes))
            forecast.note(kind, kind, nbytes, frame)
            ahead[kind] += slot > 0
            again += 0 < slot < frame
            sent += slot + (frame if frame > slot else 0)
            words, frames = words + nbytes, frames + frame
        each = len(calls) / len(ahead)
        shares = (f"{ahead[kind] / each:.0%}" for kind in ("dispatch", "combine", "combine.bwd", "dispatch.bwd"))
        again_share = f"{again / len(calls):.1%}"
        lines.append(
            (f"`{row['training']}`", len(calls), *shares, again_share, f"{words / frames:.2f}", f"{words / sent:.2f}")
        )
    head = ("training", "exchanges", "dispatch", "combine", "its gradients", "gradients of the dispatch", "sent again")
    return f"{provenance(content)}\n\n{table((*head, 'ratio, sizes first', 'ratio, sent ahead'), lines)}"


_STEP = "plan --params 7e9 --gpus 32 --gpus-per-node 8 --zero {stage} --network --gpu-profile assumed-1.0{more}"
#: Ratio of differences in the tables of steps: between those of the peak rate and of its decay.
_RATIO = 8
#: Further options of ZeRO-2.
_MORE = f" --round-robin --delta-ratio {_RATIO}"


def _plan(command: str) -> dict[str, Any]:
    """What a ``plan`` command writes to its file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        args = parse([*shlex.split(command), "--json", str(path)])
        with redirect_stdout(io.StringIO()):
            args.main(args)
        found: dict[str, Any] = json.loads(path.read_text())
    return found


def _planned(stage: int, more: str = "") -> dict[tuple[str, str], float]:
    """Seconds of a step by network and variant, as the ``plan`` command predicts them."""
    rows = _plan(_STEP.format(stage=stage, more=more))["rows"]
    return {(row["network"], row["variant"]): row["ms"] / 1e3 for row in rows if row["what"] == "total"}


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 4 else f"{value:.1f}"


def steps(page: Path) -> str:
    """Communication of a step of ZeRO-3 and of ZeRO-2 by network."""
    three, two = _planned(3), _planned(2, _MORE)
    rows = []
    for name in NETWORKS:
        times = [three[name, "plain"], three[name, "coded"]]
        times += [two[name, variant] for variant in ("plain", "coded")]
        gains = (times[0] / times[1], times[2] / times[3])
        shown = list(map(_seconds, times))
        rows.append((name, *shown[:2], f"{gains[0]:.2f}", *shown[2:], f"{gains[1]:.2f}"))
    about = (
        f"{MODEL} Seconds of communication a step, 7B parameters in bf16, 4 nodes of 8 GPUs, a codec of 1 TB/s (assumed). ZeRO-2 "
        f"with `round_robin_gradients`; coded: gradients to their owners only, and differences at ratio {_RATIO}."
    )
    head = (
        "network", "ZeRO-3 plain", "ZeRO-3 coded", "speed-up", "ZeRO-2 plain", "ZeRO-2 coded", "speed-up"
    )  # fmt: skip
    return f"{about}\n\n{table(head, rows)}\n\n{_commands()}"


def _commands() -> str:
    found = (f"{PROGRAM} {_STEP.format(stage=stage, more=words)}\n" for stage, words in ((3, ""), (2, _MORE)))
    return f"```sh\n{''.join(found)}```"


def whole_steps(page: Path) -> str:
    """Whole steps of the largest number of GPUs by network, and the picture of all numbers."""
    content = results("plan_steps")
    steps = {(row["network"], row["variant"]): row for row in content["steps"]}
    rows = []
    for name in dict.fromkeys(key[0] for key in steps):
        plain, coded = steps[name, "plain"], steps[name, "coded"]
        times = (f"{row[key] / 1e3:.2f}" for key in ("ms", "step_ms") for row in (plain, coded))
        shares = (f"{row['exposed']:.0%}" for row in (plain, coded))
        gains = (f"{plain[key] / coded[key]:.2f}" for key in ("ms", "step_ms"))
        rows.append((name, *times, *shares, *gains))
    head = (
        "network", "communication plain, s", "coded", "step plain, s", "coded", "exposed plain", "coded",
        "speed-up of communication", "speed-up of the step",
    )  # fmt: skip
    gpus = content["steps"][0]["gpus"]
    drawn = picture("Predicted seconds of a step by network and number of GPUs", "plan_steps.png", page)
    about = f"{MODEL} {gpus:,} GPUs; codec: {content['codec']['about']}."
    return f"{drawn}{provenance(content)}\n\n{about}\n\n{table(head, rows)}"


#: Networks of the README's forecast of NCCL groups.
_SHOWN = {
    "8x400gbit/node": "8 x 400 Gbit/s",
    "8x100gbit/node": "8 x 100 Gbit/s",
    "100gbit/node": "100 Gbit/s",
    "25gbit-tcp/node": "25 Gbit/s, TCP",
}


def forecast(page: Path) -> str:
    """The README's lines of NCCL groups."""
    three, two = _planned(3), _planned(2, _MORE)
    rows = []
    for name, shown in _SHOWN.items():
        columns = (three, "coded"), (three, "node"), (two, "coded")
        rows.append((shown, *(f"{found[name, 'plain'] / found[name, variant]:.2f}" for found, variant in columns)))
    head = ("network of a node (model)", "ZeRO-3", "ZeRO-3, `zero3_base` node", "ZeRO-2, `round_robin_gradients`")
    return f"{table(head, rows)}\n\n{_commands()}"


def jobs() -> list[tuple[str, ...]]:
    """Rows of the README's table of jobs: 7B parameters, of which LoRA trains 0.3 %."""
    rows = []
    for what, named, rate, trained in (
        ("LoRA", "25gbit-tcp/node", "25 Gbit/s", " --trainable 2e7"),
        ("training", "100gbit/node", "100 Gbit/s", ""),
    ):
        words = f"plan --params 7e9 --gpus 16 --gpus-per-node 8 --zero 3 --gpu-profile assumed-1.0 --network {named}{trained}"
        (answer,) = _plan(words)["answers"]
        found = re.search(r"with the default config [^(]*\(([\d.]+) times less\)", answer)
        assert found, answer
        gain = f"{found[1]} of communication (predicted by a model)"
        rows.append((f"{what}, ZeRO-3, NCCL, 2 nodes of 8 GPUs", f"{rate} a node", "-", "-", gain, "-"))
    return rows
