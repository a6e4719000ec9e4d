"""Tables of measured figures, from the JSON files in ``docs/results``: every figure of the documentation comes from here.

A function returns the Markdown of one section. Each table stands below a line with its machine, its versions and its date, and the command
that measured it.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

#: Variant of a benchmark -> the words of the documentation.
VARIANTS = {
    "plain": "DeepSpeed",
    "raw": "our schedule, uncompressed",
    "coded": "our schedule, compressed",
    "auto": "auto",
    "zeropp": "DeepSpeed's ZeRO++ (lossy)",
}


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table."""
    lines = [list(head), *(list(map(str, row)) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


class _Missing:
    """Stands for None in the cells of a table."""

    def __format__(self, spec: str) -> str:
        return "-"


def listed(rows: Iterable[Mapping[str, Any]], heads: str, line: str) -> str:
    """A Markdown table of rows of results. ``line``: the cells of a row as text of ``str.format``; None is a dash."""
    known = ({key: _Missing() if value is None else value for key, value in row.items()} for row in rows)
    return table(heads.split(" | "), (line.format(**row).split(" | ") for row in known))


def results(name: str) -> dict[str, Any]:
    """Content of ``docs/results/name.json``."""
    return dict(json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text()))


def provenance(content: dict[str, Any]) -> str:
    """Date, machine, versions and command of a results file."""
    machine = content["machine"]
    gigabytes = f", {machine['memory_bytes'] / 1e9:.0f} GB of memory" if machine["memory_bytes"] else ""
    gpu = content.get("device")
    device = f"{gpu['name'] if isinstance(gpu, dict) else gpu}; " if gpu else ""
    count = f"{machine['processors']} processor{'s' if machine['processors'] > 1 else ''}"
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    where = f"{device}{machine['processor']}, {count}{gigabytes}, {machine['system']}"
    made = f"{content.get('made', 'Measured')} on {content['date']}"
    older = " Older than the newest sources: the file does not name its commit."
    commit = f" Commit: {content['commit']}." if "commit" in content else older  # written by `make results`
    return f"{made}. Machine: {where}. Versions: {versions}.{commit}\n\n```sh\n{content['command']}\n```"


def picture(alternative: str, name: str, page: Path) -> str:
    """Markdown of ``docs/results/name`` as ``page`` links to it, and an empty line; empty where there is no such file."""
    place = ROOT / "docs" / "results" / name
    return f"![{alternative}]({os.path.relpath(place, page.parent)})\n\n" if place.exists() else ""


def codec(page: Path) -> str:
    """Ratio and speed of the codecs on synthetic data; every data set in bf16, the main ones in the other dtypes."""
    content = results("codec")
    rows = (
        row
        for row in content["rows"]
        if row["codec"] != "raw" and (row["dtype"] == "bfloat16" or row["data"] in ("normal", "bf16_in_fp32"))
    )
    heads = "codec | dtype | data | ratio | bound | encode GB/s | decode GB/s | encode / memcpy | decode / memcpy"
    line = "{codec} | {dtype} | {data} | {ratio:.3f} | {entropy_ratio:.3f} | {encode_gbps:.2f} | {decode_gbps:.2f}"
    line += " | {encode_memcpy:.2f} | {decode_memcpy:.2f}"
    return f"{provenance(content)}\n\n{listed(rows, heads, line)}"


def delta(page: Path) -> str:
    """Ratio and speed of differences, in place of the whole tensor, by the share of changed words."""
    content = results("delta")
    rows = (row | {"changed": 100 * row["changed"]} for row in content["rows"])
    heads = "data | changed % | ratio | bound | encode / memcpy | decode / memcpy | in place / memcpy"
    line = "{data} | {changed:.1f} | {ratio:.1f} | {bound:.1f}"
    line += " | {encode_memcpy:.2f} | {decode_memcpy:.2f} | {in_place_memcpy:.2f}"
    return f"{provenance(content)}\n\n{listed(rows, heads, line)}"


#: Tensors of the corpus that stand for the roles with lossy codecs.
LOSSY_TENSORS = ("act.forward", "act.backward", "grad.blocks", "moe.dispatch")


def lossy(page: Path) -> str:
    """A line for every tensor and lossy codec: bits, errors, and speeds compared with memcpy."""
    content = results("lossy")
    heads = "tensor | dtype | codec | bits per value | relative L2 error | error of small values | encode / memcpy | decode / memcpy"
    line = "{data} | {dtype} | {codec} | {bits:.2f} | {error:.3g} | {small_error:.3g} | {encode_memcpy:.2f} | {decode_memcpy:.2f}"
    return f"{provenance(content)}\n\n{listed((row for row in content['rows'] if row['data'] in LOSSY_TENSORS), heads, line)}"


def rows(page: Path) -> str:
    """Ratio and speed of row frames compared with ordinary frames, by width, share of rows that follow from others, and size."""
    content = results("rows")
    found = (row | {"numel": row["numel"] >> 20} for row in content["rows"])
    heads = "data | width | elements | frames | ratio | ordinary ratio | encode / ordinary | decode / ordinary"
    line = "{data} | {width} | {numel}M | {fragments} | {ratio:.2f} | {plain_ratio:.2f} | {encode_plain:.2f} | {decode_plain:.2f}"
    return f"{provenance(content)}\n\n{listed(found, heads, line)}"


def sync(page: Path) -> str:
    """Bytes and speed of weight sync compared with the two other ways."""
    content = results("sync")
    heads = "changed % | way | ratio | bytes / sync's | pack / memcpy | apply / memcpy | pack GB/s | apply GB/s"
    line = "{changed:g} | {way} | {ratio:.1f} | {times:.2f}"
    line += " | {pack_memcpy:.3f} | {apply_memcpy:.3f} | {pack_gbps:.2f} | {apply_gbps:.2f}"
    return f"{provenance(content)}\n\n{listed(content['rows'], heads, line)}"


def cuda(page: Path) -> str:
    """Speed of the CUDA kernels, or the statement that it is not measured."""
    if not (ROOT / "docs" / "results" / "cuda.json").exists():
        return (
            "Not measured yet. The kernels compile for four architectures without spills, and the tests run their source on the CPU. "
            "`make gpu` tests and measures the kernels on a GPU, and writes the results that this table shows."
        )
    content = results("cuda")
    heads = "route | codec | MiB | block | offset | ratio | encode GB/s | decode GB/s | copy GB/s | encode / copy | decode / copy"
    heads += " | sum of eight / copy | encode and decode, us | wrong"
    line = "{route} | {codec} | {mib} | {block} | {offset} | {ratio:.3f} | {encode_gbps:.0f} | {decode_gbps:.0f} | {copy_gbps:.0f}"
    line += " | {encode_moved:.2f} | {decode_moved:.2f} | {sum_moved:.2f} | {pair_us:.0f} | {wrong}"
    parts = [provenance(content), listed(content["rows"], heads, line)]
    if content.get("floors"):
        answers = {True: "met", False: "**missed**", None: "not compared"}
        notes = (": ".join(filter(None, (answers[one["met"]], one.get("note", "")))) for one in content["floors"])
        shown = (one | {"outcome": note} for one, note in zip(content["floors"], notes, strict=True))
        line = "{floor} | {wanted} | {got:.4g} | {outcome}"
        parts.append(f"Floors:\n\n{listed(shown, 'floor | wanted | measured | outcome', line)}")
    for route, known in content.get("python_us", {}).items():
        times = ", ".join(f"{name} {microseconds:.0f} us" for name, microseconds in known.items())
        parts.append(f"Time of the host for a call with 1 and with 20 tensors: {route}: {times}.")
    if left := content.get("left_out"):
        reasons = "; ".join(f"{name} ({reason.splitlines()[0]})" for name, reason in left.items())
        parts.append(f"Not measured: {reasons}.")
    return "\n\n".join(parts)


def gpu(page: Path) -> str:
    """The last run of ``make gpu``: a line for every step."""
    if not (ROOT / "docs" / "results" / "gpu.json").exists():
        return "Not run yet."
    content = results("gpu")
    rows = (
        (row["step"], row["outcome"], f"{row['seconds']:.0f}", row.get("commit", "")[:7], row.get("reason", ""))
        for row in content["rows"]
    )
    parts = [
        f"{provenance(content)}\n\nOutcome: {content['outcome']}. Each step is of the newest run that had it.",
        table(("step", "outcome", "seconds", "commit", "reason"), rows),
    ]
    told = {row["step"]: row.get("figures", {}) for row in content["rows"]}
    runs = ("comm_nccl", "train_nccl", "train_nccl_auto")
    own = [name for name in runs if (ROOT / "docs" / "results" / f"{name}.json").exists()]
    parts += _on_nccl(told.get("comm", {}), told.get("train", {}))
    parts += [_over_ethernet(results(name)) for name in own if name == "train_nccl_auto"]
    return "\n\n".join(
        [*parts, *(f"All of `docs/results/{name}.json`:\n\n{provenance(results(name))}" for name in own)]
    )


def _on_nccl(comm: dict[str, Any], train: dict[str, Any]) -> Iterator[str]:
    """Collectives and trainings over NCCL of ``make gpu``, as far as there are any."""
    if comm.get("rows"):
        shared = (
            "; the ranks share a GPU, over sockets, so the times say nothing about a network"
            if comm.get("environment")
            else ""
        )
        heads = "op | ranks | numel | variant | us | ratio | host waits | wrong"
        line = "{op} | {ranks} | {numel} | {variant} | {time_us:.0f} | {ratio:.3f} | {host_waits:g} | {wrong}"
        yield f"Collectives over NCCL{shared}:\n\n{listed(comm['rows'], heads, line)}"
    if train.get("rows"):
        heads = "workload | ranks | variant | step ms | logical bytes | wire bytes | host waits per step | parameters"
        line = "{workload} | {ranks} | {variant} | {step_ms:.1f} | {logical_bytes} | {wire_bytes} | {host_waits:g} | {params_sha256:.16}"
        problems = [problem for verdict in train["verdicts"] for problem in verdict["problems"]]
        yield f"Trainings over NCCL; bits: {'; '.join(problems) or 'equal'}.\n\n{listed(train['rows'], heads, line)}"


def _coded_steps(verdict: dict[str, Any]) -> list[int]:
    """Numbers, from the second step on, of the steps of mode auto in which something was coded."""
    sent, plain = (verdict["volume"]["auto"][key] for key in ("sent_m", "plain_m"))
    return [number for number, words in enumerate(plain) if sent[number] < 0.999 * words]


def _both_ms(verdict: dict[str, Any]) -> tuple[float, float] | None:
    """Medians of the plain run and of the coded steps of mode auto; None where the times of steps were not kept."""
    times = verdict["step_ms"]
    if len(times) < 2:
        return None
    coded = (times["auto"][1 + at] for at in _coded_steps(verdict))
    return statistics.median(times["plain"][4:]), statistics.median(coded)


def job_on_nccl() -> Sequence[str]:
    """A row of the README's table of jobs."""
    verdicts = results("train_nccl_auto")["verdicts"]
    verdict = next(one for one in verdicts if one["workload"] == "lora")
    times = _both_ms(verdict)
    assert times is not None
    link, gain = f"{verdict['link'].removesuffix('gbit')} Gbit/s", f"**{times[0] / times[1]:.2f}**"
    return ("LoRA, ZeRO-3, NCCL, one H200 as two nodes", link, *(f"{ms:.0f}" for ms in times), gain, "-")


def _over_ethernet(content: dict[str, Any]) -> str:
    """Trainings with the defaults over a shaped link between two nodes."""
    rows = []
    for verdict in content["verdicts"]:
        volume, both = verdict["volume"]["auto"], _both_ms(verdict)
        fewer = statistics.median(volume["plain_m"][at] / volume["sent_m"][at] for at in _coded_steps(verdict))
        times = ("not kept", "not kept") if both is None else [f"{ms:.0f}" for ms in both]
        place = verdict["workload"], f"{verdict['parameters'] / 1e6:.0f}M", verdict["link"]
        rows.append((*place, *times, f"{fewer:.2f}", "; ".join(verdict["problems"]) or "equal"))
    heads = ("workload", "parameters", "link", "plain step ms", "coded step ms", "fewer bytes in a coded step", "bits")
    kept = " Times were read from the progress bars of the runs." if "step_ms_from" in content["verdicts"][0] else ""
    return (
        'Trainings with the defaults on NCCL (`"nccl": "auto"`) on two nodes: network namespaces with a shaped link between them. '
        "Their ranks share the GPU, and NCCL talks over sockets. After four plain steps gathers are coded, or plain in turns of the trial "
        f"by whole steps: the second time is the median of the coded steps.{kept}\n\n" + table(heads, rows)
    )


def instructions(page: Path) -> str:
    """Instructions an element of the C++ kernels: a line for every kernel and kind of data, a column for every level."""
    content = results("instructions")
    kernels: dict[tuple[str, str], dict[str, str]] = {}
    for row in content["rows"]:
        level = f"{row['machine']} {row['level']}"
        kernels.setdefault((row["kernel"], row["data"]), {})[level] = f"{row['instructions']:.2f}"
    levels = list(next(iter(kernels.values())))
    rows = ((*key, *(found[level] for level in levels)) for key, found in kernels.items())
    compilers = "; ".join(f"{machine}: {name}" for machine, name in content["compilers"].items())
    return f"{provenance(content)}\n\nCompilers: {compilers}.\n\n" + table(("kernel", "data", *levels), rows)


def corpus(page: Path) -> str:
    """A line for every tensor of a real training step: ratio and speeds of all coders side by side."""
    content = results("corpus")
    coders = list(dict.fromkeys(row["codec"] for row in content["rows"]))
    tensors: dict[tuple[str, str], dict[str, Any]] = {}
    for row in content["rows"]:
        tensors.setdefault((row["data"], row["dtype"]), {})[row["codec"]] = row
    rows = (
        (*key, *(f"{row['ratio']:.3f}, {row['encode_gbps']:.1f}, {row['decode_gbps']:.1f}" for row in found.values()))
        for key, found in tensors.items()
    )
    heads = ("tensor", "dtype", *(f"{coder}: ratio, encode, decode GB/s" for coder in coders))
    return f"{provenance(content)}\n\n" + table(heads, rows)


def comm(page: Path) -> str:
    """A line for every operation: the times of its variants side by side; bus bandwidths where the results have them."""
    content = results("comm")
    places = [key for key in ("ranks", "nodes", "link") if key in content["rows"][0]]
    cases: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in content["rows"]:
        case = (row["op"], *(row[key] for key in places), f"{row['numel']:,}")
        cases.setdefault(case, {})[row["variant"]] = row
    variants = list(dict.fromkeys(row["variant"] for row in content["rows"]))
    names = VARIANTS | {"plain": "torch.distributed"}
    widths = [key for key in content["rows"][0] if key.startswith(("algbw", "busbw"))]
    rows = (
        (
            *key,
            *(f"{found[variant]['time_us'] / 1e3:.3g}" for variant in variants),
            *(f"{found[base]['time_us'] / found['coded']['time_us']:.2f}" for base in ("plain", "raw")),
            *(f"{found['coded'][width]:.3f}" for width in widths),
        )
        for key, found in cases.items()
    )
    heads = ["op", *places, "elements", *(f"{names[variant]}, ms" for variant in variants)]
    heads += ["compressed against torch.distributed", "against uncompressed"]
    heads += [f"{width.removesuffix('_gbps')} compressed, GB/s" for width in widths]
    return f"{provenance(content)}\n\n" + table(heads, rows)


def steps(page: Path) -> str:
    """Ratios over whole trainings."""
    content = results("steps")
    heads = "file | role | first tenth | between | last tenth | least | all"
    line = "{file} | {role} | {first:.2f} | {middle:.2f} | {last:.2f} | {min:.2f} | {ratio:.2f}"
    drawn = picture("Ratio and learning rate, step by step", "steps.png", page)
    return f"{drawn}{provenance(content)}\n\n{listed(content['rows'], heads, line)}"
