"""The canary: before a job codes its groups in stream order, a clone of the default group carries words that each rank can compute alone.

A clone, so that a hang leaves the job's own communicators as they are. Ranks tell each other the outcome through the store of the
rendezvous, and not by the group that is on trial. Nothing of the job depends on the words.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from ds_zipccl import comm, devices, tensors
from ds_zipccl.comm import engine, topology
from ds_zipccl.comm.group_state import group_nodes, nodes_of_job, resolve_group, state_of
from ds_zipccl.comm.reduction_order import on_host
from ds_zipccl.comm.shadow_check import WORDS, bits, hexadecimal
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy import wire
from ds_zipccl.telemetry import counters

#: A rank that does not come within this time has failed (admission: kernels and communicators are loaded within seconds).
PATIENCE = timedelta(seconds=60)
#: Bytes of a rank's message, and of the messages of all ranks (admission: several fragments, and milliseconds).
_NBYTES, _WHOLE = 1 << 20, 64 << 20
#: Everything is coded.
_CODED: dict[str, Any] = {
    "mode": "always",
    "nccl": "on",
    "nccl_min_bytes": 0,
    "min_bytes": 0,
    "check": "off",
    "lossy": False,
    "roles": {},
}
#: The calls that add.
_SUMS = ("all_reduce", "reduce_scatter_tensor")
#: Those of this process, in their order.
OUTCOMES: list[Outcome] = []


class Outcome(dict[int, str]):
    """Global rank -> why the clone has not carried the words of that rank; a rank that got all right is not in it. ``sums``: the same of
    sums, where all else was right. ``seconds``: of this rank."""

    seconds = 0.0

    def __init__(self, said: Mapping[int, Sequence[str]] = MappingProxyType({})) -> None:
        super().__init__({rank: texts[0] for rank, texts in said.items() if texts[0]})
        self.sums = {rank: texts[1] for rank, texts in said.items() if texts[1] and not self}


def try_out(config: ZipcclConfig, device: torch.device, groups: Sequence[dist.ProcessGroup] | None = None) -> Outcome:
    """Gather, exchange and sum on a clone of the default group, all coded, and compare every word. A collective of all ranks, which get one
    outcome; the host waits, for :data:`PATIENCE` at most in each call. torch's kernels of our streams are loaded then: a kernel that is
    loaded later may wait for all other work of its device.

    Args:
        device: whose tensors go in stream order in the default group.
        groups: sum alone, on clones of these groups of this rank; None: all calls on one of the default group.
    """
    nodes_of_job()
    begin, counted, said = time.monotonic(), counters.rows(), ["", ""]
    if groups is None:
        clones = [dist.new_group()]
    else:
        members = map(dist.get_process_group_ranks, groups)
        clones = [dist.new_group(ranks, use_local_synchronization=True) for ranks in members]
    for clone in clones:
        state_of(clone).patience = PATIENCE
    runtime = devices.runtime(device)
    # the job's own stream must not wait for work that hangs
    beside = contextlib.nullcontext() if runtime is None else runtime.stream(runtime.Stream(device))
    try:
        with beside:
            calls = _calls if groups is None else _sums
            for name, got, wanted in (one for clone in clones for one in calls(config, device, clone)):
                if not engine.finish(device, PATIENCE.total_seconds()):
                    raise RuntimeError(f"{name}: the device did not end its work within {PATIENCE}")
                at = name in _SUMS
                said[at] = said[at] or _wrong(name, got, wanted)  # and go on, as the other ranks do
    except Exception as error:  # any: this rank must tell the other ranks
        said[0] = said[0] or str(error) or repr(error)
    told = topology.tell(resolve_group(None), json.dumps(said))
    outcome = Outcome({rank: json.loads(text) for rank, text in told.items()})
    outcome.seconds = time.monotonic() - begin
    OUTCOMES.append(outcome)
    if not counted:  # the tables are those of the job
        counters.reset()
    for clone in clones:
        if outcome:
            with contextlib.suppress(AttributeError, RuntimeError):  # ends the work that hangs
                clone._get_backend(device).abort()
        else:
            dist.destroy_process_group(clone)
    return outcome


def _calls(
    config: ZipcclConfig, device: torch.device, group: dist.ProcessGroup
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Make each call, and yield its name, the words that it has written, and the right ones in host memory."""
    rank, ranks, every = _given(group)
    coded, part = replace(config, **_CODED), len(every[0]) // ranks
    own = every[rank].to(device, copy=True)
    whole = tensors.empty(own.numel() * ranks, own.dtype, device)
    comm.all_gather_into_tensor(whole, own, group, config=coded, role="zero_param")
    yield "all_gather_into_tensor", whole, torch.cat(every)

    for name, sizes in {
        "even all_to_all_single": [[part] * ranks] * ranks,
        "uneven all_to_all_single": [[part * ((a + b) % 3) // 2 for b in range(ranks)] for a in range(ranks)],
    }.items():
        leaving, coming = sizes[rank], [row[rank] for row in sizes]
        got = tensors.empty(sum(coming), own.dtype, device)
        given = [words[: sum(row)].split(row)[rank] for words, row in zip(every, sizes, strict=True)]
        coming_sizes, leaving_sizes = (None, None) if name.startswith("even") else (coming, leaving)
        for _ in range(2 + wire.GOOD_FORECASTS if name.startswith("even") else 1):  # the last one sends frames ahead
            comm.all_to_all_single(
                got, own[: sum(leaving)], coming_sizes, leaving_sizes, group, config=coded, role="ep"
            )
        yield name, got, torch.cat(given)

    yield from _sums(config, device, group)


def _sums(
    config: ZipcclConfig, device: torch.device, group: dist.ProcessGroup
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Make the calls that add, as :func:`_calls`."""
    rank, ranks, every = _given(group)
    part = len(every[0]) // ranks
    if config.reduction in ("auto", "fp32"):
        summed = replace(config, **_CODED, reduction="fp32")
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            # all bits of fp32: the sum of a few values of 16 bits is exact in any order
            given = [_summed((words.float() / (3 + seed)).to(dtype), seed) for seed, words in enumerate(every)]
            own = given[rank].to(device, copy=True)
            if dtype is torch.float32:
                comm.all_reduce(own, group=group, config=summed, role="zero_grad")
                yield "all_reduce", own, on_host(given, group_nodes(group))
                continue
            shard = tensors.empty(part, dtype, device)
            comm.reduce_scatter_tensor(shard, own, dist.ReduceOp.AVG, group, config=summed, role="zero_grad")
            parts = [words.split(part)[rank] for words in given]
            yield "reduce_scatter_tensor", shard, on_host(parts, group_nodes(group), ranks)


def _given(group: dist.ProcessGroup) -> tuple[int, int, list[torch.Tensor]]:
    """Return this rank, the number of ranks, and the words of each rank, some for every rank."""
    ranks = dist.get_world_size(group)
    part = min(_NBYTES, _WHOLE // ranks) // 2 // ranks
    return dist.get_rank(group), ranks, [_words(seed, part * ranks) for seed in range(ranks)]


def _words(seed: int, numel: int) -> torch.Tensor:
    """Return words that are equal on all ranks: of weights, with changing scales, zeros and some that are not finite."""
    generator = torch.Generator().manual_seed(seed)
    words = tensors.empty(numel, torch.float32).normal_(0, 0.02, generator=generator).bfloat16()
    words[numel // 2 : numel // 2 + 4096] = 0
    words[::50_021] = float("inf")
    words[numel // 3 :] *= 2.0 ** (seed % 7)
    return words


def _summed(words: torch.Tensor, seed: int) -> torch.Tensor:
    """Return words to be added: with denormals and zeros of both signs, and infinities of both signs, which never meet, as their sum has no
    payload of its own."""
    words[1::50_021] = -float("inf")
    least = words[len(words) // 4 :][:1024].view(WORDS[words.itemsize])
    least.copy_(tensors.of_numbers([number // 2 for number in range(len(least))], least.dtype))
    least[seed % 3 :: 3].bitwise_or_(torch.iinfo(least.dtype).min)
    return words


def _wrong(name: str, got: torch.Tensor, wanted: torch.Tensor) -> str:
    """Return the first word that is wrong; "" where all are right."""
    here = got.cpu()
    wrong = (bits(here) != bits(wanted)).nonzero()
    if not len(wrong):
        return ""
    at = int(wrong[0])
    return (
        f"{name}: word {at} is {hexadecimal(here[at])}, wanted {hexadecimal(wanted[at])}; {len(wrong)} words are wrong"
    )
