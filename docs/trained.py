"""Tables of measured trainings, from the JSON files of ``bench train`` in ``docs/results``; ``measured.py`` has those of other commands."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from measured import VARIANTS, listed, picture, provenance, results, table

#: column of the training table -> key of its rows, and the format of its values
_TRAINED: dict[str, tuple[str, Callable[[Any], str]]] = {
    "workload": ("workload", str),
    "ranks": ("ranks", str),
    "nodes": ("nodes", str),
    "link": ("link", str),
    "variant": ("variant", lambda name: VARIANTS.get(name, f"`{name}`")),
    "step ms": ("step_ms", "{:.0f}".format),
    "communication ms": ("comm_ms", "{:.0f}".format),
    "without waiting for late ranks ms": ("exchange_ms", "{:.0f}".format),
    "of that without loss": ("of_coded", "{:.2f}".format),
    "exchanges of experts ms": ("ep_ms", "{:.0f}".format),
    "logical MB": ("logical_bytes", lambda count: f"{count / 1e6:.1f}"),
    "wire MB": ("wire_bytes", lambda count: f"{count / 1e6:.1f}"),
    "gathers, times fewer bytes": ("gather_ratio", "{:.1f}".format),
    "bytes of a step, M": ("step_m", "{:.4f}".format),
    "last loss": ("loss_last", "{:.5f}".format),
    "parameters (sha256)": ("params_sha256", "{:.12}".format),
    "speed-up": ("speedup", "{:.2f}".format),
    "of communication": ("comm_speedup", "{:.2f}".format),
}


def train(page: Path, names: Sequence[str] = ("train",)) -> str:
    """Picture and table of each results file of trainings; columns that older results do not have are left out."""
    parts = []
    for name in names:
        content = results(name)
        shown = {head: how for head, how in _TRAINED.items() if how[0] in content["rows"][0]}
        rows = (
            ["-" if row[key] is None else text(row[key]) for key, text in shown.values()] for row in content["rows"]
        )
        drawn = picture("Steps, computing and communication apart", f"{name}.png", page)
        parts.append(f"{drawn}{provenance(content)}\n\n" + table(shown, rows))
    return "\n\n".join(parts)


def beyond(page: Path) -> str:
    """Trainings with differences and with sums that go to their owners only."""
    return train(page, ("train_zero2", "train_zero2_4", "train_zero3_base", "train_zero3_base_4"))


def doctor(page: Path) -> str:
    """Predictions of the doctor compared with trainings."""
    content = results("doctor")
    heads = (
        "workload | link | communication | predicted | predicted / measured | step | predicted | predicted / measured"
    )
    line = "{workload} | {link} | {comm:.2f} | {comm_predicted:.2f} | {comm_off:.2f}"
    line += " | {step:.2f} | {step_predicted:.2f} | {step_off:.2f}"
    off = [row[key] for row in content["rows"] for key in ("comm_off", "step_off")]
    said = (
        f"Times faster than plain DeepSpeed, two ranks. The rule is {content['tolerance']:.0%}; predictions are {min(off):.2f} to "
        f"{max(off):.2f} of the measured factors."
    )
    return f"{said}\n\n{provenance(content)}\n\n{listed(content['rows'], heads, line)}"


#: The same of trainings with lossy roles or fused sums.
_LOSSY: dict[str, tuple[str, Callable[[Any], str]]] = {
    **{head: _TRAINED[head] for head in ("workload", "ranks", "link", "variant", "step ms")},
    **{head: _TRAINED[head] for head in ("without waiting for late ranks ms", "of that without loss")},
    "of that of DeepSpeed": ("of_plain", "{:.2f}".format),
    "exchanges of experts ms": ("ep_ms", "{:.0f}".format),
    "last forward to optimizer step ms": ("epilogue_ms", "{:.0f}".format),
    "sums of gradients ms": ("reductions_ms", "{:.0f}".format),
    **{head: _TRAINED[head] for head in ("wire MB", "last loss", "speed-up")},
}


def lossy(page: Path, names: Sequence[str]) -> str:
    """Trainings with lossy roles or fused sums, and how far their losses are from the plain ones."""
    return "\n\n".join(_lossy(results(name)) for name in names)


def _lossy(content: dict[str, Any]) -> str:
    rows = content["rows"]
    shown = {head: how for head, how in _LOSSY.items() if any(row.get(how[0]) is not None for row in rows)}
    lines = (["-" if row.get(key) is None else text(row[key]) for key, text in shown.values()] for row in rows)
    far = [(name, found) for verdict in content["verdicts"] for name, found in verdict["changed"].items()]
    said = [
        f"by up to {found['largest']:.2g} with `{name}`, the last loss by {found['last']:.2g}" for name, found in far
    ]
    return f"{provenance(content)}\n\n{table(shown, lines)}\n\nLosses are off {'; '.join(said)}."


def lora(page: Path) -> str:
    """Trainings of LoRA adapters under ZeRO-3, and how far ZeRO++ is from their bits."""
    names = ("train_lora", "train_lora_4")
    return "\n\n".join([train(page, names), *(deviations(results(name)) for name in names)])


#: Kinds of the exchanges of a layer of experts, in the order of a step.
_KINDS = ("dispatch", "combine", "combine.bwd", "dispatch.bwd")


def experts(page: Path) -> str:
    """Trainings with experts, and the ratios of their exchanges by kind."""
    content = results("train_moe")
    plain = {(row["workload"], row["link"]): row["ep_ms"] for row in content["rows"] if row["variant"] == "plain"}
    ours = {(row["workload"], row["link"], row["variant"]): row["ep_ms"] for row in content["rows"]}
    rows = []
    for verdict in content["verdicts"]:
        place = verdict["workload"], verdict["link"]
        for variant, found in verdict["experts"].items():
            if variant in ("plain", "raw") or not found:
                continue
            ratios = (f"{found['ratios'][part]:.2f}" for part in ("ep", *(f"ep {kind}" for kind in _KINDS)))
            time = f"{ours[(*place, variant)] / plain[place]:.2f}"
            rows.append((*place, VARIANTS[variant], f"{found['share']:.0%}", time, *ratios))
    heads = ("workload", "link", "variant", "part of all bytes", "time / DeepSpeed's", "ratio", *_KINDS)
    return f"{train(page, ('train_moe',))}\n\n{table(heads, rows)}"


def fsdp2(page: Path) -> str:
    """Trainings under FSDP2."""
    said = f"{train(page, ('train_fsdp2_lora',))}\n\n{deviations(results('train_fsdp2_lora'))}"
    return said.replace("DeepSpeed", "plain FSDP2")


def finetune(page: Path) -> str:
    """A training at the learning rate of fine-tuning."""
    return f"{train(page, ('train_finetune',))}\n\n{deviations(results('train_finetune'))}"


def deviations(content: dict[str, Any]) -> str:
    """Whether our bits are the plain ones, and how far the losses of ZeRO++ are from the plain ones, by link."""
    problems = [problem for verdict in content["verdicts"] for problem in verdict["problems"]]
    said = f"Wrong: {'; '.join(problems)}." if problems else "Our losses and parameters have DeepSpeed's bits."
    far = [(verdict["link"], verdict["deviation"]) for verdict in content["verdicts"] if verdict["deviation"]]
    words = (f"by up to {found['largest']:.2g} on {link} (the last loss by {found['last']:.2g})" for link, found in far)
    return f"{said} Losses of ZeRO++ are off {', '.join(words)}." if far else said


#: Part of the peak rate above which a step is one of the peak.
_PEAK = 0.9


def phases(rates: list[float]) -> dict[str, list[int]]:
    """Steps of a training with warm-up and decay, by the words of the table: numbers in ``rates``."""
    peak = [number for number, rate in enumerate(rates) if rate >= _PEAK * max(rates)]
    top = max(range(len(rates)), key=rates.__getitem__)
    middle = (top + len(rates)) // 2
    return {
        f"rate above {_PEAK:.0%} of its peak": peak,
        "first half of the decay": list(range(top, middle)),
        "second half of the decay": list(range(middle, len(rates))),
        "last tenth": list(range(len(rates) - max(1, len(rates) // 10), len(rates))),
    }


def volume(page: Path) -> str:
    """Bytes of a step in units of the model over a training with warm-up and decay: DeepSpeed, ours and ZeRO++."""
    content = results("train_volume")
    (verdict,) = content["verdicts"]
    found = verdict["volume"]
    ours, lossy = found["coded"], found["zeropp"]
    rows = []
    for name, steps in phases(ours["lr"]).items():
        means = [
            statistics.fmean(series[number] for number in steps)
            for series in (ours["plain_m"], ours["gather_m"], ours["grad_m"], ours["sent_m"], lossy["sent_m"])
        ]
        most = max(ours["sent_m"][number] for number in steps)
        rows.append((name, len(steps), *(f"{mean:.3f}" for mean in means[:4]), f"{most:.3f}", f"{means[4]:.3f}"))
    heads = ("steps", "number", "DeepSpeed, M", "gathers, M", "gradients, M", "all, M", "most, M", "ZeRO++ (lossy), M")
    return f"{provenance(content)}\n\n" + table(heads, rows) + f"\n\n{deviations(content)}"


def _variants(name: str, **wanted: Any) -> dict[str, dict[str, Any]]:
    """The rows of one training in a results file, by variant."""
    rows = [row for row in results(name)["rows"] if all(row[key] == value for key, value in wanted.items())]
    return {row["variant"]: row for row in rows}


def _link(rate: str) -> str:
    for suffix in ("mbit", "gbit"):
        if rate.endswith(suffix):
            return f"{rate.removesuffix(suffix)} {suffix[0].upper()}bit/s"
    return rate


_LOOPBACK = "trainings-on-loopback-and-on-a-slow-link"
#: The jobs of the short tables: results file, fields that choose the rows, and the section of benchmarks.md, "" where the front page
#: leaves the job out. The last job gains nothing.
_JOBS: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    ("LoRA, ZeRO-3", "train_lora", {"link": "1gbit"}, "lora-under-zero-3"),
    ("LoRA, FSDP2", "train_fsdp2_lora", {"link": "1gbit"}, ""),
    ("fine-tuning, ZeRO-3, `zero3_base` host", "train_finetune", {}, "fine-tuning-at-2e-5"),
    ("training, ZeRO-2", "train_zero2", {}, "trainings-with-differences"),
    ("MoE, ZeRO-2, 4 of 32 experts", "train_moe", {"workload": "qwen", "link": "100mbit"}, "mixtures-of-experts"),
    ("one node, ZeRO-3, every message coded", "train", {"workload": "zero3", "link": "loopback"}, _LOOPBACK),
)


def _job(name: str, wanted: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """The variants of a job, and its cells: link, milliseconds of a plain and of a coded step, times faster."""
    found = _variants(name, **wanted)
    gain = found["coded"]["speedup"]
    times = (f"{found[variant]['step_ms']:.0f}" for variant in ("plain", "coded"))
    # Two runs of one command may differ by a tenth.
    remark = "" if gain > 1.1 else ": no gain" if gain > 0.9 else ": slower"
    return found, (_link(found["coded"]["link"]), *times, f"**{gain:.2f}{remark}**")


def jobs(more: Sequence[Sequence[str]]) -> str:
    """The README's table of jobs. ``more``: rows of other sources."""
    rows: list[Sequence[Any]] = []
    for text, name, wanted, _ in _JOBS:
        found, cells = _job(name, wanted)
        rows.append((text, *cells, f"{found['zeropp']['speedup']:.2f}" if "zeropp" in found else "-"))
    heads = ("your job", "network", "plain, ms per step", "ds_zipccl, ms", "speed-up", "ZeRO++ instead (lossy)")
    return table(heads, [*rows[:-1], *more, rows[-1]])


def front(page: Path) -> str:
    """The front page of the benchmarks: five jobs, each with a link to the table that its row comes from."""
    rows = ((f"[{text}](#{place})", *_job(name, wanted)[1]) for text, name, wanted, place in _JOBS if place)
    return table(("job", "link", "plain step, ms", "coded step, ms", "times faster"), rows)
