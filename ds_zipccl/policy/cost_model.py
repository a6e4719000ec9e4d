"""The cost model: seconds of a collective, plain and compressed, by measured speeds, and the rules that follow. Pure: numbers in, numbers
out.

Frames of host memory travel as messages: an alpha-beta model, :func:`predict`. Frames that stay on a device travel by NCCL's collectives.
These are rings over all n ranks. A shard of a node's second rank passes all other nodes, and then its own node again up to the first rank:
n-1 of n shards cross each edge of the ring. So a gather or a sum of S bytes takes S (n-1)/n at the slowest hop: all network cards of a node
in parallel, or a rank inside its node. This is the bus bandwidth of nccl-tests, and the ring of SimAI. Gathers and sums in two levels send
S (m-1)/m between m nodes, which is half of it on two nodes. Coded operations go in pieces: while one piece is on the wire, the next is
encoded and the last is decoded.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ds_zipccl.config import DEFAULT
from ds_zipccl.lossy import Int, LossyCodec, Round, TacoFp8, Zfp
from ds_zipccl.ops import OPS, TRAFFIC, Traffic

if TYPE_CHECKING:
    from ds_zipccl.policy.admission import Decision, Message

#: Ratio of near-Gaussian tensors by dtype (measured), for data that is not known yet.
TYPICAL_RATIO = {"bfloat16": 1.50, "float16": 1.17, "float32": 1.20}
#: Ratio of parameters against those of the last step (measured: 4 to 6 in the peak-rate phase of a training, more later).
DELTA_RATIO = 4.0
#: Frames are used if their predicted time is below this share of the plain message's (seed: the model is right within 20%, and frames cost
#: memory too).
WORTH_BELOW = 0.85
#: Bytes of an uneven all-to-all, whose size each rank knows only of itself (seed).
UNEVEN_BYTES = 1 << 20
_ITEMSIZE = 2  # bytes of a bf16 element
#: plain: bandwidth-optimal rings; gloo: torch.distributed's own schedules on gloo; raw and coded: our schedules, without and with
#: compression.
VARIANTS = ("plain", "gloo", "raw", "coded")


@dataclass(frozen=True)
class LinkProfile:
    """The speeds of the slowest rank of a group.

    ``transfer``: points (bytes, seconds), both rising, of an exchange in which every rank sends ``bytes`` to the next rank and receives
    ``bytes`` from the previous rank at the same time. Speeds are logical bytes of bf16 per second on one thread: ``encode``, compress;
    ``decode``, decompress; ``add``, decompress a frame and add its values; ``copy``, put a tensor into a raw frame or take it out;
    ``add_raw``, add a raw frame. ``call``: seconds of one of our operations, in addition, for any size. ``one_way``: seconds of a message
    in one direction, as a part of those of an exchange; on a link inside a machine both directions share the memory.

    Raises:
        ValueError: a number is not finite or not above 0 (``call`` may be 0), or the points do not rise.
    """

    transfer: tuple[tuple[float, float], ...]
    encode: float
    decode: float
    add: float
    copy: float
    add_raw: float
    call: float
    one_way: float = 1.0

    def __post_init__(self) -> None:
        speeds = (self.encode, self.decode, self.add, self.copy, self.add_raw, self.one_way)
        numbers = [*speeds, *(number for point in self.transfer for number in point)]
        if not all(_finite(number) and number > 0 for number in numbers) or not _finite(self.call) or self.call < 0:
            raise ValueError(f"a profile has finite numbers above 0 (call may be 0), got {self}; measure again")
        risen = all(low < high for before, after in pairwise(self.transfer) for low, high in zip(before, after))
        if not self.transfer or not risen:
            raise ValueError(
                f"transfer wants points (bytes, seconds) that both rise, at least one, got {self.transfer}; measure again"
            )

    @property
    def alpha(self) -> float:
        """Seconds that the smallest message takes."""
        return self.transfer[0][1]

    @property
    def bandwidth(self) -> float:
        """Bytes per second of large messages."""
        return slope(self.transfer)

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of an exchange of ``nbytes``: linear between points, constant below the first point, and extrapolated above
        the last point."""
        after = bisect_left(self.transfer, (nbytes,))
        if after == 0:
            return self.alpha
        bytes0, seconds0 = self.transfer[after - 1]
        if after == len(self.transfer):
            return seconds0 + (nbytes - bytes0) / self.bandwidth
        bytes1, seconds1 = self.transfer[after]
        return seconds0 + (nbytes - bytes0) / (bytes1 - bytes0) * (seconds1 - seconds0)

    def send_seconds(self, nbytes: float) -> float:
        """Return the seconds of a message of ``nbytes`` in one direction."""
        return self.alpha + self.one_way * (self.seconds(nbytes) - self.alpha)

    def to_json(self) -> dict[str, Any]:
        """Return the profile as an object for :mod:`json`."""
        return asdict(self) | {"transfer": [list(point) for point in self.transfer]}

    @classmethod
    def from_json(cls, content: Any) -> LinkProfile:
        """Return the profile of an object from :meth:`to_json`.

        Raises:
            ValueError: a key is missing or unknown, or a value is not allowed.
        """
        wanted = {field.name for field in fields(cls)}
        if not isinstance(content, Mapping) or set(content) != wanted:
            got = sorted(content) if isinstance(content, Mapping) else type(content).__name__
            raise ValueError(f"a profile is an object with the keys {', '.join(sorted(wanted))}, got {got}")
        points = content["transfer"]
        if not isinstance(points, list) or not all(isinstance(point, list) and len(point) == 2 for point in points):
            raise ValueError(f"transfer must be a list of pairs [bytes, seconds], got {points!r}")
        return cls(**{**content, "transfer": tuple((size, seconds) for size, seconds in points)})


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return bytes per second of large messages, from points (bytes, seconds): the slope between the last two, or that of the last
    point with its delay."""
    (bytes0, seconds0), (bytes1, seconds1) = ((0.0, 0.0), *points)[-2:]
    return (bytes1 - bytes0) / (seconds1 - seconds0) if seconds1 > seconds0 else bytes1 / seconds1


def _finite(number: Any) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number)


def predict(
    op: str,
    variant: str,
    nbytes: float,
    ranks: int,
    profile: LinkProfile,
    ratio: float = 1.0,
    piece: float | None = None,
) -> float:
    """Return the seconds of one operation on the slowest rank.

    n is the number of ranks, S = ``nbytes`` the size of the tensor, and alpha the time of the smallest message. Every rank sends (n-1)/n S.
    A ring takes n-1 steps, each of which costs an alpha; our schedules send n-1 messages. All-reduce is a reduce-scatter and an all-gather.
    In our broadcast the source sends n-1 frames of S; in the plain broadcast S goes down a tree in log2 n steps. So

    * plain, gloo: (steps - 1) alpha + transfer(bytes). Adding hides behind the wire.
    * raw, coded: call + first + max(wire, work) + last + own for each exchange. wire = (n-2) alpha + transfer(bytes / ratio). first is the
      time to compress the first fragment, and last the time to decompress the last fragment of every peer; nothing hides these two. work
      is the rest of compressing and decompressing, on one thread. own is one copy of the own shard. In sums the frames of all peers but
      one are decompressed and added in one pass, and own is three passes: adding the own shard, writing the sum, looking for NaN. Raw
      frames are copied, and their ratio is 1. The first exchange uses up the link's burst, so that a second exchange has no burst.

    Args:
        op: one of :data:`ds_zipccl.ops.TRAFFIC`.
        variant: one of :data:`VARIANTS`.
        nbytes: bytes of the whole tensor: the output of a gather, the input of a scatter.
        ranks: size of the group, at least 2.
        profile: the profile of the slowest rank.
        ratio: logical bytes over wire bytes.
        piece: logical bytes of a fragment, ``math.inf`` for messages in one fragment; the policy's size if None.

    Raises:
        ValueError: an argument is not allowed.
    """
    if op not in TRAFFIC or variant not in VARIANTS:
        raise ValueError(
            f"op is one of {', '.join(TRAFFIC)}, variant one of {', '.join(VARIANTS)}; got {op}, {variant}"
        )
    if ranks < 2 or nbytes < 0 or not ratio > 0 or (piece is not None and not piece > 0):
        raise ValueError(f"wanted ranks >= 2, bytes >= 0, ratio and piece > 0; got {ranks}, {nbytes}, {ratio}, {piece}")
    if variant in ("plain", "gloo"):
        traffic = TRAFFIC[op]
        share = traffic.plain if variant == "plain" else traffic.gloo
        return (traffic.steps(ranks) - 1) * profile.alpha + profile.seconds(share(ranks) * nbytes)
    if variant == "raw":
        ratio = 1.0
        profile = replace(profile, encode=profile.copy, decode=profile.copy, add=profile.add_raw)
    rounds = ("reduce_scatter", "all_gather") if op == "all_reduce" else (op,)
    return profile.call + sum(
        _exchange(TRAFFIC[name], nbytes, ranks, profile, ratio, piece, again=index > 0)
        for index, name in enumerate(rounds)
    )


def against_base(profile: LinkProfile, encode: float, decode: float, copies: int) -> LinkProfile:
    """Return the profile of gathers of differences. The speeds ``encode`` and ``decode`` include the hashes that prove equal bases.

    ``copies``: additional copies of every arriving byte. Kept parameters, for example, are copied out of the base and back.
    """
    return replace(profile, encode=encode, decode=1 / (1 / decode + copies / profile.copy))


def _exchange(
    traffic: Traffic, nbytes: float, ranks: int, profile: LinkProfile, ratio: float, fragment: float | None, again: bool
) -> float:
    """Return the seconds of one of our exchanges without its call. ``again``: another exchange has just used up the link's burst."""
    frame = traffic.frame(ranks) * nbytes
    encode, decode = traffic.encoded(ranks) * nbytes / profile.encode, frame / profile.decode
    if not traffic.once:
        decode += (ranks - 2) * frame / (profile.add if traffic.sums else profile.decode)
    if fragment is None:
        fragment = _fragment_bytes(int(frame), _ITEMSIZE, ranks, DEFAULT.staging)
    shown = min(1.0, fragment / frame) if frame else 1.0  # the part of a frame that nothing hides
    first, last = shown * frame / profile.encode, shown * decode
    # the source of a broadcast only compresses, and the other ranks only decompress
    work = max(encode - first, decode - last) if traffic.once else encode - first + decode - last
    sent = traffic.sent(ranks) * nbytes / ratio
    on_wire = max(profile.seconds(sent), profile.alpha + sent / profile.bandwidth if again else 0.0)
    own = 0.0 if traffic.once else frame / profile.copy * (3 if traffic.sums else 1)
    return first + max((ranks - 2) * profile.alpha + on_wire, work) + last + own


def _fragment_bytes(nbytes: int, itemsize: int, ranks: int, staging: int) -> int:
    from ds_zipccl.policy import wire  # imports torch, which `plan --help` does not need

    return itemsize * wire.fragment_numel(nbytes // itemsize, itemsize, ranks, staging)


def fastest(candidates: Sequence[Decision], message: Message, profile: LinkProfile | None) -> Decision:
    """Return the schedule that is predicted to take the shortest time; of frames of one kind the last one, which goes by node. Without a
    measured profile, or an expected size of lossy frames, that is the last candidate.

    A message whose size each rank knows only of itself counts as :data:`UNEVEN_BYTES`, and a reduce as the broadcast that sends as much the
    other way. Schedules of a sum in two levels differ only between nodes, so only this level counts: the ranks with one local rank, one of
    each node, sum their part of the message."""
    traffic = OPS[message.op].traffic or "broadcast"
    if len(candidates) == 1 or profile is None or (coded := _coded_ratio(message)) is None:
        return candidates[-1]
    ranks = message.nodes or message.ranks
    nbytes = (UNEVEN_BYTES if message.nbytes is None else message.nbytes) * ranks / message.ranks

    def seconds(decision: Decision) -> float:
        if not decision.frames:
            return WORTH_BELOW * predict(traffic, "gloo", nbytes, ranks, profile)
        variant, ratio = ("raw", 1.0) if decision.codec == "raw" else ("coded", coded)
        return predict(traffic, variant, nbytes, ranks, profile, DELTA_RATIO if decision.with_base else ratio)

    return min(reversed(candidates), key=seconds)


def _coded_ratio(message: Message) -> float | None:
    """Return the ratio of coded frames of a message, lossless ones or those of its lossy codec; None: not known. Bytes are admitted where
    they are mostly parameters in bfloat16."""
    words: Any = "bfloat16" if str(message.dtype) == "torch.uint8" else message.dtype
    ratio = typical_ratio(words)
    if message.lossy is None:
        return ratio
    bits = 8 * words.itemsize
    size = lossy_size(message.lossy, str(words).removeprefix("torch."), bits / ratio)
    return None if size is None else float(bits / size.bits)


def typical_ratio(dtype: Any) -> float:
    """Return the ratio of near-Gaussian tensors of a dtype; 1 for a dtype that is not coded."""
    return TYPICAL_RATIO.get(str(dtype).removeprefix("torch."), 1.0)


# ---- lossy codecs ----------------------------------------------------------------------------------------------------

#: Mantissa bits by dtype, torch's names.
_MANTISSA = {"bfloat16": 7, "float16": 10, "float32": 23}
#: Relative L2 error of ``round`` with k bits is this times 2^-k (derived: rounding errors uniform, mantissas log-uniform).
_ROUND_ERROR = 0.212
#: Bits of a float8 code after a Hadamard transform and a lossless stage (measured: the transform makes all tensors alike).
_TRANSFORMED_BITS = 6.70
_TACO_MANTISSA = 3
_TACO_ERROR = 0.0265
_INT_ERRORS = {8: 0.0065, 6: 0.0266, 4: 0.118}
#: Error of ``zfp`` at 8 bits per value; every further bit halves the error (measured on normal values).
_ZFP_ERROR_AT_8 = 0.055


class LossySize(NamedTuple):
    """Bits per value of the frames, and relative L2 error of one rounding."""

    bits: float
    error: float


def lossy_size(codec: LossyCodec, dtype: str, lossless_bits: float) -> LossySize | None:
    """Return the expected size of a dense tensor, such as gradients and activations of a transformer, by a codec that codes no matrices;
    None for a codec without a rule.

    The rules reproduce measurements on tensors of a GPT of 11M parameters within 2%. ``analyze --lossy`` measures your tensors.

    Args:
        dtype: torch's name of a dtype of :data:`_MANTISSA`.
        lossless_bits: bits per value of the lossless codec on the same tensor.
    """
    if isinstance(codec, Round):
        # The lossless coding sends the mantissa whole: every bit that rounding clears is a bit less. No more is cleared than there is.
        cleared = max(0, _MANTISSA[dtype] - codec.mantissa)
        return LossySize(lossless_bits - cleared, _ROUND_ERROR * 2.0**-codec.mantissa if cleared else 0.0)
    if isinstance(codec, TacoFp8):
        left = lossless_bits - max(0, _MANTISSA[dtype] - _TACO_MANTISSA)
        bits = _TRANSFORMED_BITS if codec.hadamard else min(8.0, left)
        return LossySize(bits + 8 / codec.group, _TACO_ERROR)
    if isinstance(codec, Int):
        return LossySize(codec.bits + 16 / codec.group, _INT_ERRORS[codec.bits])
    if isinstance(codec, Zfp):
        return LossySize(float(codec.rate), _ZFP_ERROR_AT_8 * 2.0 ** (8 - codec.rate))
    return None


# ---- sends -----------------------------------------------------------------------------------------------------------


def send_may_gain(numel: int, profile: LinkProfile, staging: int) -> bool:
    """Return whether a send of ``numel`` elements is coded. ``staging``: bytes of memory for frames.

    Equal on both sides, whose dtypes may differ: the elements count as bf16.
    """
    nbytes = _ITEMSIZE * numel
    return send_seconds(nbytes, profile, staging) < WORTH_BELOW * profile.send_seconds(nbytes)


def send_seconds(nbytes: int, profile: LinkProfile, staging: int) -> float:
    """Return the predicted seconds of a send of bf16 in coded frames.

    Nothing hides compressing the first fragment and decompressing the last one. The announcement of several fragments takes as long as the
    smallest message.
    """
    piece = min(nbytes, _fragment_bytes(nbytes, _ITEMSIZE, 2, staging))
    announced = profile.send_seconds(0) if piece < nbytes else 0.0
    on_wire = profile.send_seconds(nbytes / TYPICAL_RATIO["bfloat16"])
    rest = max(on_wire, (nbytes - piece) / min(profile.encode, profile.decode))
    return announced + piece / profile.encode + rest + piece / profile.decode


# ---- devices ---------------------------------------------------------------------------------------------------------

#: Kinds of operations that the model knows. A gather or a sum has S bytes in its whole tensor; an all-to-all has S bytes on every rank. An
#: all-reduce is a sum and a gather.
GATHER, SUM, ALL_TO_ALL = "gather", "sum", "all_to_all"
#: Ratio of bf16 parameters, and of bf16 gradients that were summed inside a node (measured on CPUs, by the same format).
RATIO = {GATHER: 1.46, SUM: 1.42, ALL_TO_ALL: 1.46}
#: Part of the nominal speed of a network card that a collective reaches (seed): over RDMA, and over TCP.
RDMA_REACH, TCP_REACH = 0.95, 0.85
#: Bytes per second of a rank inside its node (seed: NVLink of an H100, 370 of 450 GB/s, nccl#1374; a PCIe switch).
NVLINK, PCIE = 370e9, 22e9
#: Bytes per second that a device reads from host memory while all devices of its node do so (seed: PCIe 5; measured at the start).
HOST_BUS = 50e9
#: Bytes of words per second of the codec (seed: the goal of the kernels on an H100; measured at the start of a job).
CODEC = 1e12
#: Seconds (seed): the host for each collective of a schedule, with its kernels; an agreement on sizes, for which the host waits; an
#: exchange of up to EXCHANGED ranks, for its messages.
LAUNCH_S, AGREEMENT_S, EXCHANGE_S, EXCHANGED = 120e-6, 80e-6, 50e-6, 64
#: Seconds of a step of a ring to the next node, and to the next rank inside a node (seed: those of NCCL's src/graph/tuning.cc for rings
#: with protocol Simple. With 8 ranks a node they are 38 us for each further node; SimAI's tables imply 41).
HOP_S, STEP_S = 14e-6, 3.4e-6
#: A fragment of a sum takes as many times as long as its latency, at least (seed: fewer fragments hide less of the codec).
LATENCIES = 4
#: Most fragments of a gather of which one fills no staging buffer (seed: more hide little more of the codec).
FRAGMENTS = 4
#: Bytes of the staging buffers that the model assumes: those that a GPU with 70 GB and more has by default.
STAGING = 1 << 30
#: Bytes of the operation by which a job's schedules are chosen (seed: between DeepSpeed's prefetches, 100 MB, and its buckets, 1 GB).
NOMINAL_BYTES = 256e6
#: Moves must be predicted to be faster than the plain collective by this factor (seed: above the error of the model).
GAINING = 1.05
#: By how many times delays and the network may be off, and the codec slower (seed: of measurements on idle streams). With any of these
#: speeds a schedule that is chosen must not be slower than the plain collective.
DOUBTS, CODEC_DOUBT = ((0.5, 0.7), (0.5, 1.4), (2.0, 0.7), (2.0, 1.4)), 0.7
#: Bytes per second of a node's network cards above which moves are plain (seed: between 8 x 200 Gbit/s, where gathers gain, and 8 x 400
#: Gbit/s, where decoding takes as much of the computing as the shorter gathers give).
FAST_NODE = 250e9
#: An exchange must gain this many agreements on sizes (seed: computing waits for the experts, and the host for the agreement).
AGREEMENTS_GAINED = 3.0
#: Without a measured link: a coded exchange must send this many bytes less between nodes (seed: some agreements at 10 GB/s a rank).
LEAST_SAVED_BYTES = 5 << 20


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
    """The speeds of the slowest rank of a group, in bytes per second, and its delays in seconds.

    ``network``: all network cards of a node together, each way. ``inside``: one rank, to the ranks of its node. ``encode``, ``decode``:
    words of one rank. ``bus``: see :data:`HOST_BUS`. ``launch``, ``agreement``, ``exchange``: see :data:`LAUNCH_S`. ``hop``, ``step``: see
    :data:`HOP_S`.

    Raises:
        ValueError: a number is not finite or not above 0 (``hop`` and ``step`` may be 0).
    """

    network: float
    inside: float = NVLINK
    encode: float = CODEC
    decode: float = CODEC
    launch: float = LAUNCH_S
    agreement: float = AGREEMENT_S
    exchange: float = EXCHANGE_S
    hop: float = HOP_S
    step: float = STEP_S
    bus: float = HOST_BUS

    def __post_init__(self) -> None:
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        wrong = {
            name: one
            for name, one in found.items()
            if not 0 <= one < math.inf or (not one and name not in ("hop", "step"))
        }
        if wrong:
            raise ValueError(f"a profile has finite numbers above 0, got {wrong}; measure again")

    def doubted(self, delays: float, network: float, codec: float = CODEC_DOUBT) -> DeviceProfile:
        """Return the profile with delays and speeds so many times as large."""
        found = asdict(self)
        for name in ("launch", "agreement", "exchange", "hop", "step"):
            found[name] *= delays
        return DeviceProfile(**{**found, "network": network * self.network, **{
            name: codec * found[name] for name in ("encode", "decode")
        }})  # fmt: skip


#: Stands for a profile where nothing was measured: fragments are cut by it (seed: 400 Gbit/s per node).
UNMEASURED = DeviceProfile(50e9)


def ring_latency(topology: Topology, profile: DeviceProfile) -> float:
    """Return the seconds of a ring of all ranks without its bytes."""
    return (topology.nodes - 1) * profile.hop + (topology.ranks - topology.nodes) * profile.step


def hop_of(points: Sequence[tuple[float, float]], topology: Topology) -> float:
    """Return the seconds of a step of a ring to the next node, from points (bytes, seconds) of gathers: what they take without their bytes
    and the steps inside nodes. That of :data:`HOP_S` where there is one point alone."""
    if len(points) < 2:
        return HOP_S
    nbytes, seconds = points[-1]
    left = seconds - nbytes / slope(points) - (topology.ranks - topology.nodes) * STEP_S
    return max(0.0, left) / (topology.nodes - 1)


def exchange_latency(topology: Topology, profile: DeviceProfile) -> float:
    """Return the seconds of an exchange of all ranks without its bytes: a message for every rank, which may be empty."""
    return profile.exchange * max(1.0, topology.ranks / EXCHANGED)


def least_of_sum(topology: Topology, profile: DeviceProfile) -> int:
    """Return the bytes of words, of all ranks, below which the latency of a fragment of a sum counts."""
    return int(LATENCIES * exchange_latency(topology, profile) * profile.network / topology.each * RATIO[SUM])


def plain_seconds(kind: str, nbytes: float, topology: Topology, profile: DeviceProfile) -> float:
    """Return the seconds of NCCL's own collective. ``kind``: :data:`GATHER`, :data:`SUM` or :data:`ALL_TO_ALL`; ``nbytes``: as there."""
    if kind == ALL_TO_ALL:
        return exchange_latency(topology, profile) + _all_to_all_wire(nbytes, topology, profile)
    latency, per_byte = gather_way(topology, profile, in_levels=False)
    if topology.each == 1:  # NCCL has a tree there, since 2.23
        latency = math.ceil(math.log2(topology.ranks)) * profile.hop
    return latency + nbytes * per_byte


def gather_way(topology: Topology, profile: DeviceProfile, *, in_levels: bool) -> tuple[float, float]:
    """Return the seconds of a gather without its bytes, and those of each byte: by the backend's ring, or in two levels. There the first
    exchange brings a part to its node and to its local rank on other nodes; an exchange for each other node brings what has come from
    there to the own node."""
    nodes, each, ranks = topology.nodes, topology.each, topology.ranks
    if in_levels:
        per_byte = (1 - 1 / nodes) / profile.network + (1 - 1 / each) / profile.inside
        return nodes * exchange_latency(topology, profile), per_byte
    slowest = min([profile.network] * (nodes > 1) + [profile.inside] * (each > 1), default=math.inf)
    return ring_latency(topology, profile), (1 - 1 / ranks) / slowest


@lru_cache(maxsize=256)  # every prediction of a gather asks
def levels_from(topology: Topology, profile: DeviceProfile) -> float:
    """Return the bytes of a collective, frames or words of all ranks, from which on a gather goes in two levels: there they are predicted
    to be faster than the ring by GAINING, and no slower where the profile is off by the doubts. Infinite where they never are."""
    if not topology.levels:
        return math.inf
    found = 0.0
    for wanted, one in ((GAINING, profile), *((1.0, profile.doubted(*doubt)) for doubt in DOUBTS)):
        ring, levels = (gather_way(topology, one, in_levels=in_levels) for in_levels in (False, True))
        saved = ring[1] - wanted * levels[1]
        found = max(found, (wanted * levels[0] - ring[0]) / saved if saved > 0 else math.inf)
    return found


def gather_fragments(
    words: float, frames: float, topology: Topology, profile: DeviceProfile, least: float, budget: int, frame: float = 0
) -> tuple[int, bool]:
    """Return the number of fragments of a gather, and whether all of them go in two levels. The schedules cut this number, and the model
    assumes it. Each takes its latency, and the host. One may fill the ``budget``: then there are as few as possible, and nothing hides the
    codec. Where two fit, one is coded while the other is on the wire, so that 1/n of the codec shows.

    Args:
        words, frames, frame, budget: bytes of words and frames of all ranks, their largest piece, staging buffers. least: levels_from().
    """
    codec, rooms = sum(coding_seconds(GATHER, words, topology, profile)), (budget, budget // 2)
    alone, paired = (1 if frames <= room else math.ceil(frames / max(frame, room - frame)) for room in rooms)

    def count(collectives: int, in_levels: bool, fewest: float) -> int:
        delay = collectives * profile.launch + gather_way(topology, profile, in_levels=in_levels)[0]
        best = max(paired, _hiding(codec, delay))
        return best if best * fewest <= frames and best * delay + codec / best < alone * delay + codec else alone

    in_levels = count(topology.nodes, True, least)
    return (in_levels, True) if in_levels * least <= frames else (count(1, False, 0.0), False)


def _hiding(codec: float, delay: float) -> int:
    """Return the pieces n of an operation: n delay + codec / n is least where one more hides less of the codec than its delay."""
    return min(FRAGMENTS, math.ceil(math.sqrt(codec / max(delay, 1e-9) + 0.25) - 0.5))


def exchange_steps(nbytes: float, topology: Topology, profile: DeviceProfile) -> int:
    """Return the steps of an exchange of equal segments, of ``nbytes`` bytes of words in all, where memory leaves a choice."""
    codec = sum(coding_seconds(ALL_TO_ALL, nbytes, topology, profile))
    return _hiding(codec, profile.launch + exchange_latency(topology, profile))


def gather_wire(
    nbytes: float, topology: Topology, profile: DeviceProfile, cut_by: DeviceProfile | None = None
) -> float:
    """Return the seconds of a collective of a gather that brings ``nbytes`` to every rank: the backend's ring, or our two levels.
    ``cut_by``: as for :func:`coded_seconds`."""
    delay, per_byte = gather_way(topology, profile, in_levels=nbytes >= levels_from(topology, cut_by or profile))
    return delay + per_byte * nbytes


def sum_fragments(nbytes: float, topology: Topology, profile: DeviceProfile) -> tuple[int, int]:
    """Return the agreements of a sum of bf16, and the fragments between two of them, that the schedules cut with staging buffers of STAGING
    bytes. ``profile``: the one by which they cut."""
    from ds_zipccl.policy import wire  # imports torch, which `plan --help` does not need

    least, numel = least_of_sum(topology, profile), max(1, int(nbytes / _ITEMSIZE / topology.ranks))
    nodes, local_ranks = (topology.nodes, topology.each) if topology.levels else (topology.ranks, 1)
    step, rows = numel, 0
    if local_ranks > 1:
        step, rows = wire.sum_step(numel, _ITEMSIZE, nodes, local_ranks, STAGING, adjacent=True)
    left = STAGING - rows * step * _ITEMSIZE
    return -(-numel // step), -(-step // wire.device_sum_fragment(step, _ITEMSIZE, nodes, left, least))


def coded_seconds(
    kind: str,
    nbytes: float,
    topology: Topology,
    profile: DeviceProfile,
    ratio: float | None = None,
    *,
    waits: int = 0,
    cut_by: DeviceProfile | None = None,
) -> float:
    """Return the seconds of our schedule. Sums go inside the nodes first where :attr:`Topology.levels` is true.

    Args:
        kind, nbytes: as for :func:`plain_seconds`.
        ratio: words over frames, that of bf16 if None.
        waits: agreements of a gather: 0 where sizes are agreed ahead, otherwise 1. Sums and exchanges always have some.
        cut_by: the profile by which the job cuts its fragments, ``profile`` if None.
    """
    ratio = RATIO[kind] if ratio is None else ratio
    encode, decode = coding_seconds(kind, nbytes, topology, profile)
    if kind != GATHER or waits:
        encode *= 2  # the sizes of frames come from the encoder, which runs again for the frames
    apart = exchange_latency(topology, profile)
    if (
        kind == ALL_TO_ALL
    ):  # in one piece: the exchange_steps of a large one hide a part of the codec, which is not promised
        fixed = profile.launch + profile.agreement + apart
        return fixed + encode + decode + _all_to_all_wire(nbytes, topology, profile, ratio)
    if kind == GATHER:
        cut, frames = cut_by or profile, nbytes / ratio
        pieces, levels = gather_fragments(nbytes, frames, topology, cut, levels_from(topology, cut), STAGING)
        wire = pieces * gather_wire(frames / pieces, topology, profile, cut)
        host = pieces * profile.launch
        stages = host, encode, max(wire, host * topology.nodes if levels else host), decode
        return waits * profile.agreement + _pipeline(stages, pieces if 2 * frames <= pieces * STAGING else 1)
    steps, pieces = sum_fragments(nbytes, topology, cut_by or profile)
    if topology.levels:  # every exchange inside is done before the agreement
        inside = steps * topology.nodes * apart + nbytes * (topology.each - 1) / topology.each / profile.inside
        inside = max(inside, steps * topology.nodes * profile.launch)
        wire = nbytes * (topology.nodes - 1) / topology.nodes / profile.network / ratio
    else:
        inside, wire = 0.0, _all_to_all_wire(nbytes, topology, profile, ratio)
    count = steps * pieces
    one = _pipeline((count * profile.launch, encode, wire + count * apart, decode), pieces)
    return inside + steps * profile.agreement + one


def coding_seconds(kind: str, nbytes: float, topology: Topology, profile: DeviceProfile) -> tuple[float, float]:
    """Return the seconds that one rank encodes, and those that it decodes, in an operation of :func:`coded_seconds`."""
    peers = (topology.ranks - 1) / topology.ranks
    encoded = decoded = nbytes * peers
    if kind == GATHER:
        encoded = nbytes / topology.ranks
    elif kind == SUM and topology.levels:
        encoded = decoded = nbytes / topology.each * (topology.nodes - 1) / topology.nodes
    return encoded / profile.encode, decoded / profile.decode


def _all_to_all_wire(nbytes: float, topology: Topology, profile: DeviceProfile, ratio: float = 1.0) -> float:
    share = nbytes * topology.each / topology.ranks  # of one node, from one rank
    between = (topology.nodes - 1) * share * topology.each / profile.network / ratio
    return max(between, share * (topology.each - 1) / topology.each / profile.inside)


def _pipeline(stages: Sequence[float], pieces: int) -> float:
    """Return the seconds of ``pieces`` pieces that pass all stages, one after the other: the longest stage, and one piece of the others."""
    longest = max(stages)
    return longest + (sum(stages) - longest) / pieces


def pays(
    kind: str,
    topology: Topology,
    profile: DeviceProfile,
    nbytes: float,
    wanted: float = GAINING,
    *,
    waits: int = 0,
    ratio: float | None = None,
) -> bool:
    """Return whether our schedule is predicted to be faster by the factor ``wanted``, and no slower where the profile is off by the
    doubts. ``waits``, ``ratio``: as in :func:`coded_seconds`."""

    raw = kind == GATHER and gathers_raw(topology, profile)
    schedule = gather_wire if raw else partial(coded_seconds, kind, ratio=ratio, waits=waits)

    def gain(found: DeviceProfile) -> float:
        return plain_seconds(kind, nbytes, topology, found) / schedule(nbytes, topology, found, cut_by=profile)

    return gain(profile) > wanted and all(gain(profile.doubted(*doubt)) >= 1.0 for doubt in DOUBTS)


def gathers_raw(topology: Topology, profile: DeviceProfile) -> bool:
    """Return whether gathers go in two levels without coding: that is predicted to be the faster schedule. It needs no kernel."""
    if levels_from(topology, profile) > NOMINAL_BYTES:
        return False
    return gather_wire(NOMINAL_BYTES, topology, profile) < coded_seconds(GATHER, NOMINAL_BYTES, topology, profile)


def moves_may_gain(topology: Topology, profile: DeviceProfile) -> bool:
    """Return whether gathers and exchanges are worth a trial. Where they are not, they are plain, and nothing is measured."""
    return topology.nodes > 1 and profile.network <= FAST_NODE and least_bytes(topology, profile, waits=0) < math.inf


#: Sizes among which the least one that gains is found: from the first one on, in steps of an eighth of a power of two.
_LEAST_SIZES = tuple(int(65_536 * 2 ** (step / 8)) for step in range(8 * 14 + 1))


def least_bytes(
    topology: Topology, profile: DeviceProfile, *, waits: int = 0, kind: str = GATHER, ratio: float | None = None
) -> float:
    """Return the bytes from which on our schedule is predicted to gain, up to 1 GiB; infinite where 1 GiB does not gain. ``waits``,
    ``ratio``: as in :func:`coded_seconds`."""
    found = math.inf
    for nbytes in reversed(_LEAST_SIZES):
        if not pays(kind, topology, profile, nbytes, waits=waits, ratio=ratio):
            return found
        found = nbytes
    return 0.0


def exchange_gains(nbytes: float, coded: float, each: int, profile: DeviceProfile | None) -> bool:
    """Return whether coding an exchange saves more than AGREEMENTS_GAINED agreements, one of which it waits for.

    Args:
        nbytes: most bytes of words that a rank sends to ranks of other nodes.
        coded: most bytes of frames that it sends in their place.
        each: ranks of a node, which share its network cards.
        profile: speeds of the slowest rank; None: not measured.
    """
    if profile is None:
        return nbytes - coded >= LEAST_SAVED_BYTES
    coding = profile.launch + 2 * nbytes / profile.encode + nbytes / profile.decode
    return (nbytes - coded) * each / profile.network - coding > AGREEMENTS_GAINED * profile.agreement
