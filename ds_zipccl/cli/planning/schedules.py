"""The schedules that an operation of a step may take on NCCL groups, and their milliseconds. A table lists the plain schedule first, and
names the one that a job chooses "coded"."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ds_zipccl.cli.planning import operations as step
from ds_zipccl.cli.planning import speeds
from ds_zipccl.cli.planning.operations import CHANGED, CODED, COPIED, EXPONENTS, PLAIN, StepTraffic
from ds_zipccl.cli.planning.speeds import DeviceCodec, Network
from ds_zipccl.config import ROLES
from ds_zipccl.policy import base_copies, cost_model
from ds_zipccl.policy.base_copies import COPY
from ds_zipccl.policy.cost_model import ALL_TO_ALL, GATHER, SUM, DeviceProfile, Topology

if TYPE_CHECKING:
    from ds_zipccl.policy.settled import Sums

Row = dict[str, Any]


#: Bytes per second that the hashes of a base read (seed: each word once, at the speed of an H100's memory).
HASH = 4e12
#: Speed of the codec with a base, in parts of its speed without (seed: by the bytes of memory that it moves, 4.3 and 3.4 a bf16 word).
BASE_SPEED = 0.79
#: Kinds of the model that an operation consists of.
_KINDS = {"all_gather": (GATHER,), "reduce_scatter": (SUM,), "all_reduce": (SUM, GATHER), "all_to_all": (ALL_TO_ALL,)}


@dataclass(frozen=True)
class DeviceSchedules:
    """Schedules on NCCL groups with the speeds of ``profile``. ``network``: its name. ``settled``: the sums of a job; "": those that its
    section and the speeds choose."""

    args: argparse.Namespace
    profile: DeviceProfile
    network: str = ""
    settled: Sums | None = None

    @classmethod
    def modelled(cls, args: argparse.Namespace, network: Network, codec: DeviceCodec) -> DeviceSchedules:
        """Return the schedules on a network."""
        speed = network.reach * network.of_node(args.gpus_per_node)
        delays = {} if args.hop is None else {"hop": args.hop / 1e6, "step": 0.0}
        return cls(args, DeviceProfile(speed, encode=codec.encode, decode=codec.decode, **delays), network.text)

    @cached_property
    def topology(self) -> Topology:
        return Topology(self.args.gpus // self.args.gpus_per_node, self.args.gpus_per_node)

    @cached_property
    def sums(self) -> Sums:
        """The sums that a job chooses."""
        from ds_zipccl.policy.settled import sums_of  # imports torch, which `plan --help` does not need

        return self.settled or sums_of(self.args.section, self.topology, self.profile)

    @cached_property
    def cut_by(self) -> DeviceProfile:
        """The speeds by which a job cuts operations: it measures some only where a role has mode auto."""
        section = self.args.section
        return self.profile if any(section.mode_of(role) == "auto" for role in ROLES) else cost_model.UNMEASURED

    @cached_property
    def moves(self) -> bool:
        """Whether a job tries coded gathers."""
        return cost_model.moves_may_gain(self.topology, self.profile)

    @cached_property
    def kind_of_base(self) -> str:
        """Where the words of copies lie: "host", "node" or "device"; "" where a job makes none."""
        if self.args.zero3_base != "auto":
            return str(self.args.zero3_base)
        if self.args.section.mode_of("zero_param") == "always":
            return "host"
        return next(iter(base_copies.gaining(self.topology, self.profile)), "")

    def lines(self) -> list[StepTraffic]:
        found = step.traffic(self.args)
        if not self.kind_of_base:
            return [replace(line, coding=EXPONENTS) if line.coding == COPIED else line for line in found]
        return found

    def chosen(self, line: StepTraffic) -> dict[str, Row]:
        """As plain, and as a job chooses its schedules."""
        rows = {}
        for variant in (PLAIN, CODED):
            seconds = coding = between = 0.0
            for nbytes, count in step.operations(self.args, line):
                op, one, busy, sent = line.op, self._plain(line.op, nbytes), 0.0, self._ring(line.op, nbytes)
                if variant == CODED:
                    op, one, busy, sent = self._job(line, nbytes)
                seconds += line.times * count * one
                coding += line.times * count * busy
                between += line.times * count * sent
            how = step.HOW[line.coding] if coding else PLAIN
            rows[variant] = {
                "op": op,
                "how": how,
                "ms": 1e3 * seconds,
                "codec_ms": 1e3 * coding,
                "between_gb": between / 1e9,
            }
        never = self.args.section.nccl == "off" or step.mode_of(self.args, line) == "never"
        return rows | {CODED: dict(rows[PLAIN])} if never else rows

    def _ratio(self, kind: str, coding: str) -> float:
        if coding == CHANGED:
            return float(self.args.delta_ratio or speeds.delta_ratio(self.args.dtype))
        known = cost_model.RATIO[kind] if self.args.dtype == "bfloat16" else 0.0
        return float(self.args.ratio or known or speeds.normal_ratio(self.args.dtype))

    def _plain(self, op: str, nbytes: float) -> float:
        return sum(cost_model.plain_seconds(kind, nbytes, self.topology, self.profile) for kind in _KINDS[op])

    def _ring(self, op: str, nbytes: float) -> float:
        """Bytes that a node sends to other nodes in plain collectives: rings, and exchanges."""
        return sum(self._between(kind, nbytes, in_levels=False) for kind in _KINDS[op])

    def _between(self, kind: str, nbytes: float, *, in_levels: bool, ratio: float = 1.0) -> float:
        """Bytes of one kind of the model that a node sends to other nodes; rings and exchanges of all ranks, or two levels."""
        nodes, each, ranks = self.topology.nodes, self.topology.each, self.topology.ranks
        if kind == ALL_TO_ALL:
            return nbytes * each * (1 - 1 / nodes) / ratio
        return nbytes * (1 - 1 / (nodes if in_levels else ranks)) / ratio

    def _trained(self) -> float:
        return float(self.args.params * step.trained(self.args))

    def _straight(self, nbytes: float) -> bool:
        """Whether our sums go to the owners of a bucket alone; otherwise few nodes own it, and it is all-reduced."""
        from ds_zipccl.policy import wire  # imports torch, which `plan --help` does not need

        nodes, left = self.topology.nodes, nbytes / step.ITEMSIZE[self.args.dtype]
        most = left / nodes if self.args.round_robin else self._trained() / nodes
        owned = [int(min(most, max(0.0, left - node * most))) for node in range(nodes)]
        return wire.straight_to_owners(owned, sum(owned))

    def _coded(self, line: StepTraffic, kind: str, nbytes: float) -> float:
        """Seconds of one operation by our schedule. The gathers of ZeRO-3 need no agreement on sizes; a base is proven by its hash."""
        if line.coding == COPIED:  # nothing is sent: the words come from the base
            return self._copied(nbytes)
        ratio = self._ratio(kind, line.coding)
        waits = 0 if self.args.zero == 3 else 1
        profile, proof = self.profile, 0.0
        if line.coding != EXPONENTS:
            profile = replace(profile, encode=BASE_SPEED * profile.encode, decode=BASE_SPEED * profile.decode)
            proof = nbytes / HASH + self._copies(nbytes)
        coded = cost_model.coded_seconds
        return proof + coded(kind, nbytes, self.topology, profile, ratio, waits=waits, cut_by=self.cut_by)

    def _copied(self, nbytes: float) -> float:
        """Seconds in which unchanged words come from their base."""
        if self.kind_of_base == "device":
            return self.profile.launch + nbytes / COPY
        return base_copies.seconds(self.kind_of_base, nbytes, self.topology, self.profile)

    def _copies(self, nbytes: float) -> float:
        """Seconds of the copies out of the base of ZeRO-3 and back. ZeRO-1 and ZeRO-2 gather onto the base itself."""
        if self.kind_of_base == "host" and self.args.zero == 3:
            # read by every rank, read for the proof and written by the ranks of a node together
            return nbytes / self.profile.bus * (1 + 2 / self.topology.each)
        if self.kind_of_base == "node" and self.args.zero == 3:
            return (
                self._copied(nbytes) + (2 + 2 / self.topology.each) * nbytes / COPY
            )  # through a staging buffer, and the own part back
        return 2 * nbytes / COPY if self.args.zero == 3 else 0.0

    def _job(self, line: StepTraffic, nbytes: float) -> tuple[str, float, float, float]:
        """One operation as a job chooses its schedules: its name, its seconds, those that its kernels take of a GPU, 0 where nothing is
        coded, and the bytes that a node sends to others."""
        sums = self.sums.ours(step.role_of(line), self.args.dtype, int(nbytes))
        op = line.coded_op or line.op if sums else line.op
        kinds = _KINDS["all_reduce" if op == line.coded_op and not self._straight(nbytes) else op]
        seconds = kernels = between = 0.0
        for kind in kinds:
            plain = cost_model.plain_seconds(kind, nbytes, self.topology, self.profile)
            ours = self._coded(line, kind, nbytes)
            moves = step.mode_of(self.args, line) == "always" or (self.moves and ours < plain)
            # The gather of an all-reduce of ours is a part of its sum, and is no move that may be plain.
            takes = sums if kind == SUM or len(kinds) > 1 else moves
            seconds += ours if takes else plain
            kernels += self._kernels(line, kind, nbytes) if takes else 0.0
            between += self._sent(line, kind, nbytes) if takes else self._between(kind, nbytes, in_levels=False)
        return op, seconds, kernels, between

    def _sent(self, line: StepTraffic, kind: str, nbytes: float) -> float:
        """Bytes that a node sends to other nodes in our schedule."""
        if line.coding == COPIED:
            return 0.0
        ratio, in_levels = self._ratio(kind, line.coding), self.topology.levels
        if kind == GATHER:
            least, frames = cost_model.levels_from(self.topology, self.cut_by), nbytes / ratio
            _, in_levels = cost_model.gather_fragments(
                nbytes, frames, self.topology, self.cut_by, least, cost_model.STAGING
            )
        return self._between(kind, nbytes, in_levels=in_levels, ratio=ratio)

    def _kernels(self, line: StepTraffic, kind: str, nbytes: float) -> float:
        """Seconds of the codec's kernels in one coded operation. Unchanged parameters are copied from the base instead."""
        if line.coding == COPIED:
            return self._copied(nbytes)
        both = sum(cost_model.coding_seconds(kind, nbytes, self.topology, self.profile))
        return both if line.coding == EXPONENTS else both / BASE_SPEED + nbytes / HASH + self._copies(nbytes)


# ---- mixtures of experts -----------------------------------------------------------------------------


def groups(found: DeviceSchedules) -> Iterator[tuple[str, DeviceSchedules, list[StepTraffic]]]:
    """Yield the lines of a step with their schedules, and the word for their parameters. ``found``: those among all ranks.

    ``args.expert_parallel`` ranks, one after the other as DeepSpeed orders them, share the experts of ``args.moe`` out and exchange tokens.
    The ranks that hold the same experts, one of each such group, move the parameters of these; all ranks move the others.
    """
    args, moe, shared = found.args, found.args.moe, found.args.expert_parallel
    if moe is None:
        yield "", found, found.lines()
        return
    each, own = args.gpus_per_node, moe.routed // shared
    others = args.params - moe.routed
    trained = args.trainable and min(args.trainable, others)  # LoRA adapts no experts

    def among(params: int, trainable: float | None, gpus: int, per_node: int, **more: Any) -> DeviceSchedules:
        live = round(args.live * params / (others + own))  # DeepSpeed counts all parameters that are gathered
        more |= {"params": params, "trainable": trainable, "live": live, "gpus": gpus, "gpus_per_node": per_node}
        options = argparse.Namespace(**vars(args) | more)
        speed = found.profile.network * per_node / each  # the other ranks of a node do the same in other groups
        return replace(found, args=options, profile=replace(found.profile, network=speed))

    dense = among(others, trained, args.gpus, each)
    yield "", dense, dense.lines()
    if shared < args.gpus:
        left = trained and (args.trainable - trained) / shared
        same = among(own, left, args.gpus // shared, max(1, each // shared))
        yield "experts, ", same, same.lines()
    if args.tokens:  # to the experts and back, and their gradients
        tokens = args.tokens * moe.experts[1] * moe.hidden
        layers = among(4 * len(moe.sparse) * tokens, None, shared, min(shared, each), bucket=None)
        yield "", layers, [StepTraffic(step.EXCHANGES, "all_to_all", tokens, args.accumulation)]
