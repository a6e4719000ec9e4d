"""How long a collective takes, plain and coded, by an alpha-beta model of what was measured. Pure: numbers in, numbers out."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ds_zipccl.config import DEFAULT
from ds_zipccl.ops import OPS, TRAFFIC, Traffic

if TYPE_CHECKING:
    from ds_zipccl.policy.admission import Decision, Message

#: Ratio of near-Gaussian tensors by dtype (measured), where nothing is known of the data yet.
TYPICAL_RATIO = {"bfloat16": 1.50, "float16": 1.17, "float32": 1.20}
#: Ratio of parameters against the last step's (measured: 4 to 6 in the peak-rate phase of a training, more later).
DELTA_RATIO = 4.0
#: Ratio of parameters that have not changed: a few bits a block (measured: 630 for bf16 in large messages; 950 for fp32).
UNCHANGED_RATIO = 500.0
#: Coded frames that take less than this share of the uncoded ones' predicted time are not tried against them (seed: the model is
#: right within 20%).
CLEARLY = 0.8
_ITEMSIZE = 2  # of bf16
#: plain: bandwidth-optimal rings; gloo: torch.distributed's own schedules on gloo; raw and coded: ours, without and with coding.
VARIANTS = ("plain", "gloo", "raw", "coded")


@dataclass(frozen=True)
class LinkProfile:
    """What the slowest rank of a group can do.

    ``transfer``: (bytes, seconds), both rising, of an exchange in which every rank sends so many bytes to the next rank and receives
    as many from the one before, at once. Bytes of bf16 tensor a second on one thread: ``encode``, ``decode``; ``add``, decode a
    frame and add it; ``copy``, put a tensor into a raw frame or take it out; ``add_raw``, add a raw frame. ``call``: seconds that an
    operation of ours costs whatever its size.

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

    def __post_init__(self) -> None:
        speeds = (self.encode, self.decode, self.add, self.copy, self.add_raw)
        numbers = [*speeds, *(number for point in self.transfer for number in point)]
        if not all(_finite(number) and number > 0 for number in numbers) or not _finite(self.call) or self.call < 0:
            raise ValueError(f"a profile has finite numbers above 0 (call may be 0), got {self}")
        risen = all(low < high for before, after in pairwise(self.transfer) for low, high in zip(before, after))
        if not self.transfer or not risen:
            raise ValueError(
                f"transfer wants points (bytes, seconds) that both rise, at least one, got {self.transfer}"
            )

    @property
    def alpha(self) -> float:
        """Seconds that the smallest message takes."""
        return self.transfer[0][1]

    @property
    def bandwidth(self) -> float:
        """Bytes a second that a large message gains by: the slope between the last two points."""
        (bytes0, seconds0), (bytes1, seconds1) = ((0.0, 0.0), *self.transfer)[-2:]
        return (bytes1 - bytes0) / (seconds1 - seconds0)

    def seconds(self, nbytes: float) -> float:
        """Time of an exchange of ``nbytes``: on the lines between the points, constant below the first, straight on above the last."""
        after = bisect_left(self.transfer, (nbytes,))
        if after == 0:
            return self.alpha
        bytes0, seconds0 = self.transfer[after - 1]
        if after == len(self.transfer):
            return seconds0 + (nbytes - bytes0) / self.bandwidth
        bytes1, seconds1 = self.transfer[after]
        return seconds0 + (nbytes - bytes0) / (bytes1 - bytes0) * (seconds1 - seconds0)

    def to_json(self) -> dict[str, Any]:
        """The profile as :mod:`json` takes it."""
        return asdict(self) | {"transfer": [list(point) for point in self.transfer]}

    @classmethod
    def from_json(cls, content: Any) -> LinkProfile:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: a key is missing or unknown, or a value makes no sense.
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


#: Exchanges of ours, one after the other.
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
    """Seconds of one operation on the slowest rank.

    With n ranks, a tensor of ``nbytes`` = S and alpha the time of the smallest message, every rank sends (n-1)/n S: in n-1 steps, each
    of which costs an alpha, by a ring, and in n-1 messages in ours. All-reduce is a reduce-scatter and an all-gather. The source of a
    broadcast sends n-1 frames of S in ours; plain, S goes down a tree in log2 n steps. So

    * plain, gloo: (steps - 1) alpha + transfer(bytes). Adding hides behind the wire.
    * raw, coded: call + first + max(wire, work) + last + own for each exchange, where wire = (n-2) alpha + transfer(bytes / ratio); first
      is the encoding of the first piece and last the decoding of the last piece of every peer, which nothing hides; work is the rest of
      encoding and decoding, on one thread; own is one copy of the own shard. In sums all but one peer's frames are added as they are
      decoded, and own is three passes: adding the own shard, writing the sum, looking for NaN. Raw frames are copied instead of coded,
      and their ratio is 1. A second exchange finds nothing left of the burst that the link lets through at once.

    Args:
        op: one  of :data:`ds_zipccl.ops.TRAFFIC`.
        variant: one of :data:`VARIANTS`.
        nbytes: of the whole tensor: output of a gather, input of a scatter.
        ranks: of the group, at least 2.
        profile: of the slowest rank.
        ratio: bytes of tensor over bytes of its frames.
        piece: bytes of tensor into which messages are cut, ``math.inf`` where they are not; as the policy does if None.

    Raises:
        ValueError: an argument that makes no sense.
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
    """The profile of gathers of differences, whose speeds ``encode`` and ``decode`` hold the proof that all have the same base.

    ``copies``: how often every byte that arrives is copied besides: where gathered parameters are kept, out of the base and back.
    """
    return replace(profile, encode=encode, decode=1 / (1 / decode + copies / profile.copy))


def _copying(profile: LinkProfile) -> LinkProfile:
    """The profile of a codec that copies."""
    return replace(profile, encode=profile.copy, decode=profile.copy, add=profile.add_raw)


def _exchange(
    traffic: Traffic, nbytes: float, ranks: int, profile: LinkProfile, ratio: float, piece: float | None, again: bool
) -> float:
    """Seconds of one exchange of ours without its call; ``again`` if another one has just emptied the link's burst."""
    frame = traffic.frame(ranks) * nbytes
    encode, decode = traffic.encoded(ranks) * nbytes / profile.encode, frame / profile.decode
    if not traffic.once:
        decode += (ranks - 2) * frame / (profile.add if traffic.sums else profile.decode)
    if piece is None:
        from ds_zipccl.policy import wire  # brings torch, which `plan --help` can do without

        piece = _ITEMSIZE * wire.fragment_numel(int(frame) // _ITEMSIZE, _ITEMSIZE, ranks, DEFAULT.staging_mib << 20)
    shown = min(1.0, piece / frame) if frame else 1.0  # the part of a frame that nothing hides
    first, last = shown * frame / profile.encode, shown * decode
    # of a broadcast the source only encodes and the others only decode
    work = max(encode - first, decode - last) if traffic.once else encode - first + decode - last
    sent = traffic.sent(ranks) * nbytes / ratio
    on_wire = max(profile.seconds(sent), profile.alpha + sent / profile.bandwidth if again else 0.0)
    own = 0.0 if traffic.once else frame / profile.copy * (3 if traffic.sums else 1)
    return first + max((ranks - 2) * profile.alpha + on_wire, work) + last + own


def prune_candidates(
    candidates: Sequence[Decision], message: Message, profile: LinkProfile | None
) -> tuple[Decision, ...]:
    """Return the schedules worth a trial: without frames that other frames will clearly beat. All where nothing was measured."""
    traffic = OPS[message.op].traffic
    if profile is None or not traffic or message.nbytes is None:
        return tuple(candidates)
    seconds = {}
    for decision in candidates:
        if decision.frames:
            variant, ratio = ("raw", 1.0) if decision.codec == "raw" else ("coded", _typical(message.dtype))
            if decision.with_base:
                ratio = DELTA_RATIO
            kind = decision.codec, decision.with_base
            seconds[kind] = predict(traffic, variant, message.nbytes, message.ranks, profile, ratio)
    best = min(seconds.values(), default=0.0)
    return tuple(one for one in candidates if not one.frames or best >= CLEARLY * seconds[one.codec, one.with_base])


def pays(nbytes: float, dtype: Any, profile: LinkProfile) -> bool:
    """Whether a single message is faster as one coded frame, which is encoded, sent and decoded one after the other."""
    coding = nbytes / profile.encode + nbytes / profile.decode
    return coding + profile.seconds(nbytes / _typical(dtype)) < profile.seconds(nbytes)


def _typical(dtype: Any) -> float:
    return TYPICAL_RATIO.get(str(dtype).removeprefix("torch."), 1.0)
