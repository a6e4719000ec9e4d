"""The model of collectives whose frames stay on a device, and the rules that follow from it. Pure: numbers in, numbers out.

The plain collectives are NCCL's rings over all n ranks. A shard of a node's second rank passes all other nodes, and then its own node
again up to the first rank: n-1 of n shards cross each edge of the ring. So a gather or a sum of S bytes takes S (n-1)/n at the slowest hop:
all network cards of a node in parallel, or a rank inside its node. This is the bus bandwidth of nccl-tests, and the ring of SimAI. Sums in
two levels send S (m-1)/m between m nodes, which is half of it on two nodes. Coded operations go in pieces: while one piece is on the wire,
the next is encoded and the last is decoded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

#: Kinds of operations that the model knows. A gather or a sum has S bytes in its whole tensor; an all-to-all has S bytes on every rank. An
#: all-reduce is a sum and a gather.
GATHER, SUM, ALL_TO_ALL = "gather", "sum", "all_to_all"
#: Ratio of bf16 parameters, and of bf16 gradients that were summed inside a node (measured on CPUs, by the same format).
RATIO = {GATHER: 1.46, SUM: 1.42, ALL_TO_ALL: 1.46}
#: Part of the nominal speed of a network card that a collective reaches (seed): over RDMA, and over TCP.
RDMA_REACH, TCP_REACH = 0.95, 0.85
#: Bytes a second of a rank inside its node (seed: NVLink of an H100, 370 of 450 GB/s, nccl#1374; a PCIe switch).
NVLINK, PCIE = 370e9, 22e9
#: Bytes a second that a device reads from host memory while the other devices of its node do so too (seed: PCIe 5).
HOST_BUS = 50e9
#: Bytes of words a second of the codec (seed: the goal of the kernels on an H100; measured at the start of a job).
CODEC = 1e12
#: Seconds (seed): launches of an operation's pieces; a size agreement, for which the host waits; messages of an exchange between ranks.
LAUNCH_S, AGREEMENT_S, EXCHANGE_S = 30e-6, 80e-6, 50e-6
#: Pieces of an operation, as :data:`ds_zipccl.policy.wire.DEVICE_FRAGMENTS`.
PIECES = 4
#: Least bytes of a piece where there are several, as :data:`ds_zipccl.policy.wire.DEVICE_FRAGMENT_BYTES`.
PIECE_BYTES = 16 << 20
#: Bytes of the operation by which a job's schedules are chosen (seed: between DeepSpeed's prefetches, 100 MB, and its buckets, 1 GB).
NOMINAL_BYTES = 256e6
#: A schedule must be predicted to be faster than the plain collective by this factor (seed: above the error of the model).
CLEARLY = 1.05
#: Bytes a second of a node's network cards above which moves are plain (seed: between 8 x 200 Gbit/s, where gathers gain, and 8 x 400
#: Gbit/s, where decoding takes as much of the computing as the shorter gathers give).
FAST_NODE = 250e9
#: An exchange must gain this many agreements on sizes (seed: computing waits for the experts, and the host for the agreement).
AGREEMENTS_GAINED = 3.0


@dataclass(frozen=True)
class Topology:
    """The nodes of a group: their number, the most ranks of a node, and whether all nodes have equally many."""

    nodes: int
    each: int
    even: bool = True

    @property
    def ranks(self) -> int:
        """Ranks of the group, where nodes are even."""
        return self.nodes * self.each

    @property
    def levels(self) -> bool:
        """Whether sums go in two levels."""
        return self.nodes > 1 and self.each > 1 and self.even

    @classmethod
    def of(cls, nodes: Sequence[Sequence[int]]) -> Topology:
        """Return the topology of a group with these ranks on each node."""
        sizes = [len(ranks) for ranks in nodes]
        return cls(len(sizes), max(sizes), len(set(sizes)) == 1)


@dataclass(frozen=True)
class DeviceProfile:
    """The speeds of the slowest rank of a group, in bytes a second, and its delays in seconds.

    ``network``: all network cards of a node together, each way. ``inside``: one rank, to the ranks of its node. ``encode``, ``decode``:
    words of one rank. ``launch``, ``agreement``, ``exchange``: see :data:`LAUNCH_S`.

    Raises:
        ValueError: a number is not finite or not above 0.
    """

    network: float
    inside: float = NVLINK
    encode: float = CODEC
    decode: float = CODEC
    launch: float = LAUNCH_S
    agreement: float = AGREEMENT_S
    exchange: float = EXCHANGE_S

    def __post_init__(self) -> None:
        wrong = {one.name: value for one in fields(self) if not 0 < (value := getattr(self, one.name)) < math.inf}
        if wrong:
            raise ValueError(f"a profile has finite numbers above 0, got {wrong}; measure again")


def plain_seconds(kind: str, nbytes: float, topology: Topology, profile: DeviceProfile) -> float:
    """Return the seconds of NCCL's own collective. ``kind``: :data:`GATHER`, :data:`SUM` or :data:`ALL_TO_ALL`; ``nbytes``: as there."""
    if kind == ALL_TO_ALL:
        return _all_to_all_wire(nbytes, topology, profile)
    return _ring_wire(nbytes, topology, profile)


def coded_seconds(
    kind: str,
    nbytes: float,
    topology: Topology,
    profile: DeviceProfile,
    ratio: float | None = None,
    *,
    waits: int = 0,
    two_levels: bool = True,
    pieces: int = PIECES,
) -> float:
    """Return the seconds of our schedule.

    Args:
        kind, nbytes: as for :func:`plain_seconds`.
        ratio: words over frames, that of bf16 if None.
        waits: agreements of a gather: 0 where sizes are agreed ahead, otherwise 1. Sums and exchanges always have one.
        two_levels: sums go inside the nodes first where :attr:`Topology.levels` is true; otherwise by an exchange of all ranks.
        pieces: pieces of the operation.
    """
    ratio = RATIO[kind] if ratio is None else ratio
    two_levels = two_levels and topology.levels
    encode, decode = coding_seconds(kind, nbytes, topology, profile, two_levels=two_levels)
    if kind == GATHER:
        wire = _ring_wire(nbytes, topology, profile) / ratio
        return profile.launch + waits * profile.agreement + _pipeline((encode, wire, decode), pieces)
    fixed = profile.launch + profile.agreement + profile.exchange
    if kind == ALL_TO_ALL:  # in one piece
        return fixed + encode + decode + _all_to_all_wire(nbytes, topology, profile, ratio)
    if two_levels:
        inside = nbytes * (topology.each - 1) / topology.each / profile.inside
        wire = nbytes * (topology.nodes - 1) / topology.nodes / profile.network / ratio
    else:
        inside, wire = 0.0, _all_to_all_wire(nbytes, topology, profile, ratio)
    return fixed + _pipeline((inside, encode, wire, decode), pieces)


def coding_seconds(
    kind: str, nbytes: float, topology: Topology, profile: DeviceProfile, *, two_levels: bool = True
) -> tuple[float, float]:
    """Return the seconds that one rank encodes, and those that it decodes, in an operation of :func:`coded_seconds`, whose arguments these
    are."""
    peers = (topology.ranks - 1) / topology.ranks
    encoded = decoded = nbytes * peers
    if kind == GATHER:
        encoded = nbytes / topology.ranks
    elif kind == SUM and two_levels and topology.levels:
        encoded = decoded = nbytes / topology.each * (topology.nodes - 1) / topology.nodes
    return encoded / profile.encode, decoded / profile.decode


def _ring_wire(nbytes: float, topology: Topology, profile: DeviceProfile) -> float:
    hops = [profile.network] * (topology.nodes > 1) + [profile.inside] * (topology.each > 1)
    return nbytes * (topology.ranks - 1) / topology.ranks / min(hops, default=math.inf)


def _all_to_all_wire(nbytes: float, topology: Topology, profile: DeviceProfile, ratio: float = 1.0) -> float:
    share = nbytes * topology.each / topology.ranks  # of one node, from one rank
    between = (topology.nodes - 1) * share * topology.each / profile.network / ratio
    return max(between, share * (topology.each - 1) / topology.each / profile.inside)


def _pipeline(stages: Sequence[float], pieces: int) -> float:
    """Return the seconds of ``pieces`` pieces that pass all stages, one after the other: the longest stage, and one piece of the others."""
    longest = max(stages)
    return longest + (sum(stages) - longest) / pieces


def gain(kind: str, topology: Topology, profile: DeviceProfile) -> float:
    """Return by how many times an operation of :data:`NOMINAL_BYTES` is predicted to be faster with our schedule."""
    plain = plain_seconds(kind, NOMINAL_BYTES, topology, profile)
    return plain / coded_seconds(kind, NOMINAL_BYTES, topology, profile)


def sums_of(topology: Topology, profile: DeviceProfile) -> str:
    """Return the sums of a job: "fp32" (ours) or "plain" (the backend's own). A group inside a node, and nodes with several ranks that are
    not equally many, have plain ones."""
    ours = topology.nodes > 1 and (topology.levels or topology.each == 1)
    return "fp32" if ours and gain(SUM, topology, profile) > CLEARLY else "plain"


def moves_may_gain(topology: Topology, profile: DeviceProfile) -> bool:
    """Return whether gathers and exchanges are worth a trial. Where they are not, they are plain, and nothing is measured."""
    return topology.nodes > 1 and profile.network <= FAST_NODE and gain(GATHER, topology, profile) > CLEARLY


def host_bases_gain(topology: Topology, profile: DeviceProfile) -> bool:
    """Return whether a gather of unchanged parameters is faster as a copy of a base in host memory than coded over the network."""
    coded = coded_seconds(GATHER, NOMINAL_BYTES, topology, profile)
    return coded > CLEARLY * NOMINAL_BYTES / HOST_BUS


def least_bytes(kind: str, topology: Topology, profile: DeviceProfile, *, waits: int = 1) -> float:
    """Return the bytes from which on our schedule is predicted to gain; infinite where no size gains. ``waits``: as in
    :func:`coded_seconds`."""
    counts = (1,) if kind == ALL_TO_ALL else range(1, PIECES + 1)
    sizes = (_break_even(kind, topology, profile, waits, pieces) for pieces in counts)
    return min(max(size, PIECE_BYTES * pieces * (pieces > 1)) for size, pieces in zip(sizes, counts, strict=True))


def _break_even(kind: str, topology: Topology, profile: DeviceProfile, waits: int, pieces: int) -> float:
    def coded(nbytes: float) -> float:
        return coded_seconds(kind, nbytes, topology, profile, waits=waits, pieces=pieces)

    fixed = coded(0.0)
    a_byte = (plain_seconds(kind, NOMINAL_BYTES, topology, profile) - (coded(NOMINAL_BYTES) - fixed)) / NOMINAL_BYTES
    wanted = (AGREEMENTS_GAINED - 1) * profile.agreement if kind == ALL_TO_ALL else 0.0
    return (fixed + wanted) / a_byte if a_byte > 0 else math.inf
