"""The file of ``doctor --report``: a cluster in numbers, and windows of plain and coded layers.

Its texts are words of :func:`_words`, versions and names of GPUs; any other text becomes "other", whatever its source. The file is written
before the windows, which may fail where no such cluster has run the schedules, and again after them.
"""

from __future__ import annotations

import json
import math
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from datetime import datetime, timezone
from enum import Enum
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl import comm, tensors
from ds_zipccl.cli import doctor_ranks
from ds_zipccl.cli.doctor_ranks import Ranks
from ds_zipccl.comm import topology
from ds_zipccl.comm.group_state import resolve_group
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.integration import autoload, canary, hook_points
from ds_zipccl.kernels import self_test
from ds_zipccl.policy import admission
from ds_zipccl.policy.settled import DTYPES, Sums
from ds_zipccl.telemetry import counters
from ds_zipccl.tools import data, tables

#: Of the file; another meaning of a key takes the next number.
FORMAT = 1
SAID = (
    "report: {1}\n        {0} has numbers, versions, names of GPUs and of DeepSpeed's modules, but no host, user, path, address or job. "
    'Nothing was\n        sent. Look into it, and attach it to a new issue of ds_zipccl with the template "Report of a cluster".'
)
#: Layers of a window; elements of a layer's parameters on GPUs (67 MB) and on CPUs, whose links and codec are slower.
_LAYERS, _ON_GPU, _ON_CPU = 2, 1 << 25, 1 << 21
#: Most windows of a kind, and the share of --timeout that they may take (default, not tuned).
_WINDOWS, _SHARE = 6, 0.25
#: Keys that the proof may switch off, and values with which every call is coded.
_SWITCHED = ("enabled", "nccl", "reduction", "delta", "rows")
_CODED: dict[str, Any] = dict(mode="always", nccl="on", min_bytes=0, nccl_min_bytes=0, lossy=False, roles={})
_OUTCOMES = _UNFINISHED, _NOT_PROVEN, _NO_MEMORY = "unfinished", "not proven", "no memory"
_VERSION = re.compile(r"\d+\.\d+(\.\d+)?((a|b|rc|\.dev|\.post)\d+)?(\+(cpu|cu\d+|rocm\d\.\d))?(?=$|\+)|not installed$")
_GPU = re.compile(r"(NVIDIA|AMD|Tesla|GeForce|Quadro) [A-Z0-9][A-Za-z0-9 -]{0,40}$|$")


@doctor_ranks.failing("--report")
def make(path: str, timeout: float, found: Ranks, configs: Sequence[ZipcclConfig], facts: Mapping[str, Any]) -> str:
    """Write the file on rank 0, and return lines about it. A collective of all ranks that have met; blocks. ``timeout``: of the doctor, in
    seconds. ``configs``: before and after :func:`.doctor_ranks.settle`. ``facts``: numbers, words and dataclasses of the doctor.

    Raises:
        AgreedError: a coded gather had wrong bits.
        ToolError: the file cannot be written, or a call has failed.
    """
    warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)
    cuda, nodes = found.place.type == "cuda", dict[str, dict[str, Any]]()
    here = [torch.cuda.get_device_name(found.place), torch.cuda.device_count()] if cuda else ["", 0]
    for report, (gpu, gpus) in zip(found.reports, _told(here), strict=True):
        node = nodes.setdefault(report.host, {"ranks": 0, "gpu": _matching(_GPU, gpu), "gpus": int(gpus)})
        node["ranks"] += 1
    versions = tables.versions()
    if cuda:
        versions |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    content: dict[str, Any] = {
        "format": FORMAT,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "versions": {name: _matching(_VERSION, one) for name, one in versions.items()},
        "nodes": list(nodes.values()),
    }
    hooks = {(name, why) for one in found.reports for name, why in one.hooks.items()}
    canaries = [{"seconds": one.seconds, "wrong": list(one), "wrong_sums": list(one.sums)} for one in canary.OUTCOMES]
    content |= anonymous({
        "backend": found.groups[1] if found.streams else "gloo",
        **facts,
        "kernels": {" ".join(key): proof._asdict() for key, proof in self_test.PROOFS.items()},
        "canary": canaries,
        "switched_off": [key for key in _SWITCHED if len({getattr(config, key) for config in configs}) > 1],
        "missing": sorted({name for name, why in hooks if why not in ("", "absent")}),
        "windows": _UNFINISHED,
    })  # fmt: skip
    _write(path, content, found)
    proven = configs[1].enabled and not (found.streams and configs[1].nccl == "off")
    content["windows"] = measured = windows(configs[1], found, timeout) if proven else _NOT_PROVEN
    _write(path, content, found)
    if isinstance(measured, str):
        return SAID.format(path, f"no layers timed: {measured}")
    if measured["wrong"]:
        raise doctor_ranks.AgreedError(f"{measured['wrong']} coded gathers had wrong bits: attach {path} to an issue")
    gains = ", ".join(f"{name} {found[0]:.2f}" for name, found in measured["gain"].items())
    return SAID.format(path, f"plain / coded time of {measured['layers']} layers: {gains}")


def _write(path: str, content: Mapping[str, Any], found: Ranks) -> None:
    if not found.rank:
        Path(path).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def anonymous(value: Any) -> Any:
    """Return a value for the file: numbers, None for infinite ones; names of members of enums; "other" for unknown texts. Keys stay: they
    are written in this package."""
    if isinstance(value, Sums):  # its sentence has the gains that were timed
        timed = re.findall(r"(\d+\.\d+) times as fast in (\w+)", value.why)
        gains = {dtype: float(gain) for gain, dtype in timed if dtype in DTYPES}
        value = {"dtypes": value.dtypes, "least": value.least, "timed": gains}
    if is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, Mapping):
        return {key: anonymous(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [anonymous(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    value = value.name if isinstance(value, Enum) else value
    return value if value is None or isinstance(value, int) or value in _words() else "other"


def _words() -> set[str]:
    backends = {name for names in admission.CODED_BACKENDS.values() for name in names} | set(admission.CODED_BACKENDS)
    points = {f"{one.owner}.{name}" for name, one in hook_points.POINTS.items()}
    modules = {doctor_ranks.DEEPSPEED, *autoload.ADJUSTED, *autoload.OPTIONAL, *points}
    return {*backends, *modules, *DTYPES, *_SWITCHED, *_OUTCOMES, *(one.name for one in admission.PassReason)}


def _matching(pattern: re.Pattern[str], text: Any) -> str:
    found = pattern.match(str(text))
    return found[0] if found else "other"


def _told(mine: Any) -> list[Any]:
    """Return the values of all ranks, by rank. A collective; blocks."""
    return [json.loads(text) for _, text in sorted(topology.tell(resolve_group(None), json.dumps(mine)).items())]


def windows(config: ZipcclConfig, found: Ranks, timeout: float) -> Any:
    """Time the communication of ZeRO-3 layers, plain and coded in turn: a gather per layer, then backward a gather and a sum per layer.
    Return a word where a rank has no memory. A collective of all ranks; as many windows as rank 0 tells; blocks.

    ``ms``: of the slowest rank. "gathers" has coded gathers and the backend's own sums, "coded" coded sums too. ``gain``: plain / coded of
    each pair, as median, least and most. ``wrong``: gathers with other bits than plain ones, of all ranks. ``sent``: of rank 0, by
    operation, calls that were coded, calls that were not, and the ratio of bytes.
    """
    device, ranks = found.place, len(found.reports)
    part = (_ON_GPU if device.type == "cuda" else _ON_CPU) // ranks

    def values(sigma: float, numel: int, seed: int) -> torch.Tensor:
        return data.Spec("normal", sigma).make(numel, "bfloat16", seed * ranks + found.rank).to(device)

    lacking = False
    try:
        shards, gradients = [values(0.02, part, layer) for layer in range(_LAYERS)], values(1e-3, part * ranks, _LAYERS)
        whole, other, own = (tensors.empty(part * size, torch.bfloat16, device) for size in (ranks, ranks, 1))
    except RuntimeError:
        lacking = True
    if any(_told(lacking)):
        return _NO_MEMORY
    coded = replace(config, **_CODED)
    kinds = {"plain": _calls(None), "gathers": _calls(replace(coded, reduction="plain"))}
    if config.reduction != "plain":
        kinds["coded"] = _calls(replace(coded, reduction="fp32" if found.streams else "match"))
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else bool

    def window(gather: Any, add: Any) -> float:
        dist.barrier()
        wait()
        begin = time.perf_counter()
        for shard in shards:
            gather(whole, shard)
        for shard in reversed(shards):
            gather(whole, shard)
            add(own, gradients)
        wait()
        return 1e3 * (time.perf_counter() - begin)

    wrong = 0
    for shard in shards:
        kinds["plain"][0](whole, shard)
        kinds["gathers"][0](other, shard)
        wrong += not torch.equal(whole.view(torch.int16), other.view(torch.int16))
    for calls in kinds.values():  # makes buffers and connections
        window(*calls)
    counters.reset()
    times = [[window(*calls) for calls in kinds.values()]]
    fitting = int(_told(_SHARE * 1e3 * timeout / sum(times[0]))[0])
    times += [[window(*calls) for calls in kinds.values()] for _ in range(min(_WINDOWS, fitting) - 1)]
    told = _told([wrong, times])
    slowest = [[max(same) for same in zip(*rounds)] for rounds in zip(*(one[1] for one in told))]
    ms = {name: [round(row[at], 3) for row in slowest] for at, name in enumerate(kinds)}
    gains = {name: [plain / mine for plain, mine in zip(ms["plain"], ms[name])] for name in list(kinds)[1:]}
    spread = {name: [round(of(each), 3) for of in (median, min, max)] for name, each in gains.items()}
    sent = {row["op"]: [row["calls"], row["passed"], round(row["ratio"], 3)] for row in counters.rows()}
    wrong = sum(one[0] for one in told)
    return {"layers": _LAYERS, "bytes": whole.nbytes, "ms": ms, "gain": spread, "wrong": wrong, "sent": sent}


def _calls(config: ZipcclConfig | None) -> tuple[Any, Any]:
    """Return a gather and a sum by a config; torch's own without one."""
    if config is None:
        return dist.all_gather_into_tensor, dist.reduce_scatter_tensor
    gather = partial(comm.all_gather_into_tensor, config=config, role="zero_param")
    return gather, partial(comm.reduce_scatter_tensor, config=config, role="zero_grad")
