"""The cost model: seconds of a collective, plain and compressed, by an alpha-beta model of measured speeds. Pure: numbers in, numbers
out."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ds_zipccl.config import DEFAULT
from ds_zipccl.ops import OPS, TRAFFIC, Traffic
from ds_zipccl.policy import lossy_sizes

if TYPE_CHECKING:
    from ds_zipccl.policy.admission import Decision, Message

#: Ratio of near-Gaussian tensors by dtype (measured), for data that is not known yet.
TYPICAL_RATIO = {"bfloat16": 1.50, "float16": 1.17, "float32": 1.20}
#: Ratio of parameters against those of the last step (measured: 4 to 6 in the peak-rate phase of a training, more later).
DELTA_RATIO = 4.0
#: Frames of one kind are not tried if frames of another kind take less than this share of their predicted time (seed: the model is
#: right within 20%).
CLEARLY = 0.8
_ITEMSIZE = 2  # bytes of a bf16 element
#: plain: bandwidth-optimal rings; gloo: torch.distributed's own schedules on gloo; raw and coded: our schedules, without and with
#: compression.
VARIANTS = ("plain", "gloo", "raw", "coded")


@dataclass(frozen=True)
class LinkProfile:
    """The speeds of the slowest rank of a group.

    ``transfer``: points (bytes, seconds), both rising, of an exchange in which every rank sends ``bytes`` to the next rank and receives
    ``bytes`` from the previous rank at the same time. Speeds are logical bytes of bf16 a second on one thread: ``encode``, compress;
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
        """Bytes a second of large messages: the slope between the last two points."""
        (bytes0, seconds0), (bytes1, seconds1) = ((0.0, 0.0), *self.transfer)[-2:]
        return (bytes1 - bytes0) / (seconds1 - seconds0)

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

    def slowed(self, factor: float) -> LinkProfile:
        """Return the profile of a link whose messages take ``factor`` times as long."""
        return replace(self, transfer=tuple((nbytes, factor * seconds) for nbytes, seconds in self.transfer))

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


def _finite(number: Any) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number)


#: The exchanges of our schedules that have several, in order.
_ROUNDS = {"all_reduce": ("reduce_scatter", "all_gather")}


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
        profile, ratio = _copying(profile), 1.0
    rounds = _ROUNDS.get(op, (op,))
    return profile.call + sum(
        _exchange(TRAFFIC[name], nbytes, ranks, profile, ratio, piece, again=index > 0)
        for index, name in enumerate(rounds)
    )


def against_base(profile: LinkProfile, encode: float, decode: float, copies: int) -> LinkProfile:
    """Return the profile of gathers of differences. The speeds ``encode`` and ``decode`` include the hashes that prove equal bases.

    ``copies``: additional copies of every arriving byte. Kept parameters, for example, are copied out of the base and back.
    """
    return replace(profile, encode=encode, decode=1 / (1 / decode + copies / profile.copy))


def _copying(profile: LinkProfile) -> LinkProfile:
    """Return the profile of a codec that copies."""
    return replace(profile, encode=profile.copy, decode=profile.copy, add=profile.add_raw)


def _exchange(
    traffic: Traffic, nbytes: float, ranks: int, profile: LinkProfile, ratio: float, fragment: float | None, again: bool
) -> float:
    """Return the seconds of one of our exchanges without its call. ``again``: another exchange has just used up the link's burst."""
    frame = traffic.frame(ranks) * nbytes
    encode, decode = traffic.encoded(ranks) * nbytes / profile.encode, frame / profile.decode
    if not traffic.once:
        decode += (ranks - 2) * frame / (profile.add if traffic.sums else profile.decode)
    if fragment is None:
        from ds_zipccl.policy import wire  # imports torch, which `plan --help` does not need

        fragment = _ITEMSIZE * wire.fragment_numel(int(frame) // _ITEMSIZE, _ITEMSIZE, ranks, DEFAULT.staging_mib << 20)
    shown = min(1.0, fragment / frame) if frame else 1.0  # the part of a frame that nothing hides
    first, last = shown * frame / profile.encode, shown * decode
    # the source of a broadcast only compresses, and the other ranks only decompress
    work = max(encode - first, decode - last) if traffic.once else encode - first + decode - last
    sent = traffic.sent(ranks) * nbytes / ratio
    on_wire = max(profile.seconds(sent), profile.alpha + sent / profile.bandwidth if again else 0.0)
    own = 0.0 if traffic.once else frame / profile.copy * (3 if traffic.sums else 1)
    return first + max((ranks - 2) * profile.alpha + on_wire, work) + last + own


def prune_candidates(
    candidates: Sequence[Decision], message: Message, profile: LinkProfile | None
) -> tuple[Decision, ...]:
    """Return the schedules worth a trial: the plain collective, and the frames that no other frames clearly beat. Without a measured
    profile, all schedules are worth a trial. Schedules of a sum in two levels differ only between nodes, so only this level counts: the
    ranks with one local rank, one of each node, sum their part of the message."""
    traffic = OPS[message.op].traffic
    if profile is None or not traffic or message.nbytes is None:
        return tuple(candidates)
    ranks = message.nodes or message.ranks
    nbytes = message.nbytes * ranks / message.ranks
    seconds = {}
    for decision in candidates:
        if decision.frames:
            variant, ratio = ("raw", 1.0) if decision.codec == "raw" else ("coded", _coded_ratio(message))
            if decision.with_base:
                ratio = DELTA_RATIO
            kind = decision.codec, decision.with_base
            seconds[kind] = predict(traffic, variant, nbytes, ranks, profile, ratio)
    best = min(seconds.values(), default=0.0)
    return tuple(one for one in candidates if not one.frames or best >= CLEARLY * seconds[one.codec, one.with_base])


def _coded_ratio(message: Message) -> float:
    """Return the ratio of coded frames of a message, lossless ones or those of its lossy codec."""
    words = _words_of(message)
    ratio = typical_ratio(words)
    if message.lossy is None:
        return ratio
    bits = 8 * words.itemsize
    name = str(words).removeprefix("torch.")
    return float(bits / lossy_sizes.expected(message.lossy, name, bits / ratio).bits)


def _words_of(message: Message) -> Any:
    """Return the dtype of which the words of a message probably are: bytes are admitted where they are mostly parameters in bfloat16."""
    return "bfloat16" if str(message.dtype) == "torch.uint8" else message.dtype


def typical_ratio(dtype: Any) -> float:
    """Return the ratio of near-Gaussian tensors of a dtype; 1 for a dtype that is not coded."""
    return TYPICAL_RATIO.get(str(dtype).removeprefix("torch."), 1.0)
