"""``plan``: networks, and the step of GPUs on NCCL groups by the model of :mod:`ds_zipccl.policy.device_rules`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ds_zipccl.cli import tables
from ds_zipccl.cli.planning import speeds, whole_step
from ds_zipccl.cli.planning.step import (
    CHANGED,
    CODED,
    COPIED,
    EXPONENTS,
    HOW,
    ITEMSIZE,
    PLAIN,
    TOTAL,
    StepTraffic,
    answer,
    base_memory,
    host_base,
    sizes,
    traffic,
    trained,
)
from ds_zipccl.cli.planning.step_time import Computing, behind
from ds_zipccl.cli.tables import Column
from ds_zipccl.policy.device_rules import (
    CODEC,
    GATHER,
    HOST_BUS,
    RATIO,
    RDMA_REACH,
    SUM,
    TCP_REACH,
    DeviceProfile,
    Topology,
    coded_seconds,
    coding_seconds,
    host_bases_gain,
    moves_may_gain,
    plain_seconds,
    sums_of,
)

#: The networks of a node that ``--network`` without values stands for.
NETWORKS = (
    "8x400gbit/node", "8x200gbit/node", "8x100gbit/node", "400gbit/node", "200gbit/node", "100gbit/node", "25gbit-tcp/node",
    "10gbit-tcp/node",
)  # fmt: skip
#: Unit of a rate -> bytes a second.
_BYTES = {"mbit": 1e6 / 8, "gbit": 1e9 / 8}
#: Names of ``--gpu-profile`` -> bytes of words a second that are assumed for encoding and for decoding.
ASSUMED = {"assumed-0.5": 0.5e12, "assumed-1.0": CODEC, "assumed-1.5": 1.5e12}
#: Measured figures of a checkout; they take the place of assumed ones.
MEASURED = Path(__file__).parents[3] / "docs" / "results" / "cuda.json"
#: Bytes a second that the hashes of a base read (seed: each word once, at the speed of an H100's memory).
HASH = 4e12
#: Bytes a second of a copy on a GPU (seed: both ways of an H100's memory).
COPY = HASH / 2
#: Speed of the codec with a base, in parts of its speed without (seed: by the bytes of memory that it moves, 4.3 and 3.4 a bf16 word).
BASE_SPEED = 0.79
#: Kinds of the model that an operation consists of.
_KINDS = {"all_gather": (GATHER,), "reduce_scatter": (SUM,), "all_reduce": (SUM, GATHER)}
OWNERS = "owners"
#: Part of the ranks from which on a bucket counts as owned by all: their parts are padded to equal ones.
_EVEN = 0.9

COLUMNS = (
    Column("network", width=17),
    Column("what", width=20),
    Column("op", width=14),
    Column("calls", ",d", 7),
    Column("variant", width=7),
    Column("how", width=11),
    Column("ms", ".1f", 10),
    Column("speedup", ".2f"),
)


class Network(NamedTuple):
    """A network as the user typed it: ``rate``, bytes a second each way of ``whose``, a "node" with all of its network cards or a "gpu";
    ``reach``: part of it that NCCL's collectives reach."""

    text: str
    rate: float
    whose: str
    reach: float

    def of_node(self, gpus_per_node: int) -> float:
        """Bytes a second each way of a node."""
        return self.rate * (gpus_per_node if self.whose == "gpu" else 1)

    def of_gpu(self, gpus_per_node: int) -> float:
        """Bytes a second each way of one GPU, which shares its node's network cards with the others."""
        return self.of_node(gpus_per_node) / gpus_per_node


class Codec(NamedTuple):
    """Bytes of words a second of one GPU, and their source for the user."""

    encode: float
    decode: float
    about: str


def network(text: str) -> Network:
    """``[CARDSx]RATE[-tcp]/node`` or ``.../gpu`` (argparse type).

    Raises:
        ArgumentTypeError: the text is not a network, or does not say whose rate it is; says how to write it.
    """
    match = re.fullmatch(r"(?:([1-9]\d*)x)?(\d+(?:\.\d+)?)([mg]bit)(-tcp)?(?:/(node|gpu))?", text)
    if match is None or not float(match[2]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a network; write [CARDSx]RATE[-tcp]/node or RATE[-tcp]/gpu: {', '.join(NETWORKS)} or 1gbit/gpu"
        )
    if match[5] is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} does not say whose rate it is: write {text}/node for all cards of a node, or {text}/gpu for the part of one GPU"
        )
    rate = int(match[1] or 1) * float(match[2]) * _BYTES[match[3]]
    return Network(text, rate, match[5], TCP_REACH if match[4] else RDMA_REACH)


def codec(name: str | None, dtype: str) -> Codec:
    """The codec of ``--gpu-profile``: a name of :data:`ASSUMED`, or a file of ``bench codec --device cuda --json``.

    Raises:
        ToolError: the file cannot be read, or has no row for the dtype.
    """
    name = name or (str(MEASURED) if MEASURED.exists() else "assumed-1.0")
    if name in ASSUMED:
        about = f"{ASSUMED[name] / 1e12:.1f} TB/s, assumed: no GPU has measured it"
        return Codec(ASSUMED[name], ASSUMED[name], about)
    found = speeds.read(name, dtype).profile
    about = f"encode {found.encode / 1e12:.2f}, decode {found.decode / 1e12:.2f} TB/s, measured in {name}"
    return Codec(found.encode, found.decode, about)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``plan`` for NCCL groups."""
    parser.add_argument(
        "--gpu-profile", metavar="NAME",
        help=f"with --backend nccl: {' '.join(ASSUMED)}, or a file of bench codec --device cuda --json "
        "(docs/results/cuda.json where it exists, else assumed-1.0)",
    )  # fmt: skip
    whole_step.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Run ``plan --backend nccl``; 0."""
    work = whole_step.computing(args)
    if args.plot:
        from ds_zipccl.benchmarks.plots import plan  # before the model: matplotlib may be missing
    networks = args.network or [network(text) for text in NETWORKS]
    found = codec(args.gpu_profile, args.dtype)
    tables.say("model of NCCL groups: no GPU has run these schedules yet")
    tables.say(f"codec: {found.about}")
    for line in base_memory(args):
        tables.say(line)
    rows = [row for each in networks for row in step(args, each, found)]
    table = tables.Table(COLUMNS)
    for row in rows:
        if (len(networks) == 1 or row["what"] == TOTAL) and row["variant"] != OWNERS:
            table.add(row)
    if any(line.coded_op for line in traffic(args)) and not args.round_robin:
        tables.say(
            "few ranks own a bucket that is smaller than the model: round_robin_gradients is faster, see --round-robin"
        )
    more: dict[str, Any] = {"made": "Computed"}  # the word of the documentation for figures of a model
    if work is None:
        tables.say(
            "these are times of communication alone; --tflops and --tokens add computing, and a step is sped up less"
        )
    else:
        more["steps"] = list(whole_step.rows(args, rows, work))
        tables.say()
        table = tables.Table(whole_step.COLUMNS)
        for row in more["steps"]:
            table.add(row)
    more["answers"] = list(_answers(args, networks, found, rows))
    for line in more["answers"]:
        tables.say(line)
    if work is not None and args.plot:
        more["scaling"] = [
            row for gpus in whole_step.counts(args) for row in _steps_of(args, gpus, networks, found, work)
        ]
        plan.save(args.plot, more["scaling"])
    if args.json:
        tables.write_json(args.json, rows, args.command, codec=found._asdict(), **more)
    return 0


def _answers(
    args: argparse.Namespace, networks: Sequence[Network], found: Codec, rows: list[dict[str, Any]]
) -> Iterator[str]:
    """A sentence for every network: the seconds of the job by default, and with the keys that code it."""
    ms = {(row["network"], row["variant"]): row["ms"] for row in rows if row["what"] == TOTAL}
    for each in networks:
        plain = ms[each.text, PLAIN]
        others = [(args, ms[each.text, CODED])]
        if based := host_base(args):
            *_, total = step(based, each, found)
            others.append((based, total["ms"]))
        yield answer(each.text, plain, plain, others, nccl=True)


def _steps_of(
    args: argparse.Namespace, gpus: int, networks: Sequence[Network], found: Codec, work: Computing
) -> Iterator[dict[str, Any]]:
    fewer = argparse.Namespace(**vars(args) | {"gpus": gpus})
    for each in networks:
        yield from whole_step.rows(fewer, list(step(fewer, each, found)), work)


class _Place:
    """The GPUs, how fast they are, and the options of ``plan``."""

    def __init__(self, topology: Topology, profile: DeviceProfile, args: argparse.Namespace) -> None:
        self.topology, self.profile, self.args = topology, profile, args
        self._sums, self._moves = sums_of(topology, profile), moves_may_gain(topology, profile)

    def ratio(self, kind: str, coding: str) -> float:
        if coding == CHANGED:
            return float(self.args.delta_ratio or speeds.delta_ratio(self.args.dtype))
        return float(
            self.args.ratio or (RATIO[kind] if self.args.dtype == "bfloat16" else speeds.normal_ratio(self.args.dtype))
        )

    def plain(self, op: str, nbytes: float) -> float:
        return sum(plain_seconds(kind, nbytes, self.topology, self.profile) for kind in _KINDS[op])

    def to_owners(self, nbytes: float) -> float:
        """Seconds of a sum for its owners by NCCL: a reduce-scatter where all ranks own equally much, otherwise a reduce for each owner,
        whose words pass every node."""
        ring = self.plain("reduce_scatter", nbytes)
        nodes = self.topology.nodes
        return ring if self._owned(nbytes) >= _EVEN else ring * nodes / (nodes - 1)

    def _owned(self, nbytes: float) -> float:
        """The part of the ranks that own something of a bucket: all of them with round-robin, otherwise those whose parameters it has."""
        return 1.0 if self.args.round_robin else min(1.0, nbytes / ITEMSIZE[self.args.dtype] / self._trained())

    def _trained(self) -> float:
        return float(self.args.params * trained(self.args))

    def _straight(self, nbytes: float) -> bool:
        """Whether sums of ours go to the owners of a bucket alone; otherwise few nodes own it, and it is all-reduced."""
        from ds_zipccl.policy import wire  # imports torch, which `plan --help` does not need

        nodes, left = self.topology.nodes, nbytes / ITEMSIZE[self.args.dtype]
        most = left / nodes if self.args.round_robin else self._trained() / nodes
        owned = [int(min(most, max(0.0, left - node * most))) for node in range(nodes)]
        return wire.straight_to_owners(owned, sum(owned))

    def coded(self, line: StepTraffic, kind: str, nbytes: float) -> float:
        """Seconds of one operation by our schedule. The gathers of ZeRO-3 need no verdict; a base is proven by its hash."""
        if line.coding == COPIED:  # nothing is sent: the words come from the base
            return self.profile.launch + self._copied(nbytes)
        ratio = self.ratio(kind, line.coding)
        waits = 0 if self.args.zero == 3 else 1
        profile, proof = self.profile, 0.0
        if line.coding != EXPONENTS:
            profile = replace(profile, encode=BASE_SPEED * profile.encode, decode=BASE_SPEED * profile.decode)
            proof = nbytes / HASH + self._copies(nbytes)
        return proof + coded_seconds(kind, nbytes, self.topology, profile, ratio, waits=waits)

    def _copied(self, nbytes: float) -> float:
        """Seconds in which unchanged words come from their base."""
        return nbytes / (COPY if self.args.zero3_base == "device" else HOST_BUS)

    def _copies(self, nbytes: float) -> float:
        """Seconds of the copies out of the base of ZeRO-3 and back. ZeRO-1 and ZeRO-2 gather onto the base itself."""
        if (
            self.args.zero3_base == "host"
        ):  # read by every rank, read for the proof and written by the ranks of a node together
            return nbytes / HOST_BUS * (1 + 2 / self.topology.each)
        return 2 * nbytes / COPY if self.args.zero == 3 else 0.0

    def chosen(self, line: StepTraffic, op: str, nbytes: float) -> tuple[float, float]:
        """Seconds of one operation as a job chooses its schedules, and those that its kernels take of a GPU; 0 where nothing is coded."""
        owners = op == line.coded_op
        if owners and self._sums == "plain":
            return self.to_owners(nbytes), 0.0
        kinds = _KINDS["all_reduce" if owners and not self._straight(nbytes) else op]
        seconds = kernels = 0.0
        for kind in kinds:
            plain = plain_seconds(kind, nbytes, self.topology, self.profile)
            ours = self.coded(line, kind, nbytes)
            # The gather of an all-reduce of ours is a part of its sum, and is no move that may be plain.
            takes = self._sums == "fp32" if kind == SUM or len(kinds) > 1 else self._moves and ours < plain
            seconds += ours if takes else plain
            kernels += self._kernels(line, kind, nbytes) if takes else 0.0
        return seconds, kernels

    def _kernels(self, line: StepTraffic, kind: str, nbytes: float) -> float:
        """Seconds of the codec's kernels in one coded operation. Unchanged parameters are copied from the base instead."""
        if line.coding == COPIED:
            return self._copied(nbytes)
        both = sum(coding_seconds(kind, nbytes, self.topology, self.profile))
        return both if line.coding == EXPONENTS else both / BASE_SPEED + nbytes / HASH + self._copies(nbytes)


def step(args: argparse.Namespace, each: Network, found: Codec) -> Iterator[dict[str, Any]]:
    """Rows of a step on one network, columns as in ``plan --help``, and their totals."""
    topology = Topology(args.gpus // args.gpus_per_node, args.gpus_per_node)
    speed = behind(each.reach * each.of_node(args.gpus_per_node), 1e9 * args.path)
    hops = (topology.nodes - 1) * args.hop / 1e6
    profile = DeviceProfile(speed, encode=found.encode, decode=found.decode)
    place = _Place(topology, profile, args)
    traffics = traffic(args)
    if args.zero3_base == "auto" and not host_bases_gain(topology, profile):
        traffics = [replace(line, coding=EXPONENTS) if line.coding == COPIED else line for line in traffics]
    owners = any(line.coded_op for line in traffics)
    variants = (PLAIN, *((OWNERS,) if owners else ()), CODED)  # the last total is that of the job
    totals, kernels = dict.fromkeys(variants, 0.0), dict.fromkeys(variants, 0.0)
    calls = dict.fromkeys(variants, 0)
    for line in traffics:
        bucket = line.bucket * ITEMSIZE[args.dtype] if args.bucket is None else args.bucket
        operations = sizes(round(line.part * args.params) * ITEMSIZE[args.dtype], bucket)
        plain = line.times * sum(count * (hops + place.plain(line.op, nbytes)) for nbytes, count in operations)
        for variant in variants:
            op = line.op if variant == PLAIN else line.coded_op or line.op
            seconds = coding = 0.0
            for nbytes, count in operations:
                busy = 0.0
                if variant == CODED:
                    one, busy = place.chosen(line, op, nbytes)
                elif op == line.coded_op:
                    one = place.to_owners(nbytes)
                else:
                    one = place.plain(op, nbytes)
                seconds += line.times * count * (hops + one)
                coding += line.times * count * busy
            how = HOW[line.coding] if coding else PLAIN
            number = line.times * sum(count for _, count in operations)
            totals[variant] += seconds
            kernels[variant] += coding
            calls[variant] += number
            names = {"network": each.text, "what": line.what, "op": op, "calls": number, "variant": variant, "how": how}
            yield names | _times(seconds, coding, plain)
    for variant in variants:
        names = {"network": each.text, "what": TOTAL, "op": "", "calls": calls[variant], "variant": variant, "how": ""}
        yield names | _times(totals[variant], kernels[variant], totals[PLAIN])


def _times(seconds: float, coding: float, plain: float) -> dict[str, float]:
    return {"ms": 1e3 * seconds, "codec_ms": 1e3 * coding, "speedup": plain / seconds}
