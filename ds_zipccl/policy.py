"""Which messages are coded. Pure: a plan depends on nothing but values that are equal on every rank of the group."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ds_zipccl.config import ROLES, ZipcclConfig
from ds_zipccl.frame import CHUNK_BLOCKS

#: Sums that a schedule of ours computes (admission: the others are not sums of decoded frames).
CODED_REDUCE_OPS = ("SUM", "AVG")
#: Backends with a schedule of ours, by device type (admission: the order of gloo's sums and its tag matching are known).
CODED_BACKENDS = {"cpu": ("gloo",), "cuda": ("gloo",)}
#: dtypes that are coded on the wire (admission: gloo has no float8, and what it refuses must not depend on a message's size).
CODED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Operations in which some ranks need nothing of others (admission: these must not be made to wait).
ONE_SIDED = ("broadcast", "reduce")
#: Operations with a schedule by node (admission: handing on needs no arithmetic; sums by node would round otherwise).
GATHERS = ("all_gather", "all_gather_into_tensor", "all_gather_coalesced")
#: Differences are made of tensors on these devices (admission: others are staged, and their base is not where the frames are).
DELTA_DEVICES = ("cpu",)
#: A shard smaller than this many bytes is not sent as a difference (seed: the hashes cost a message each way).
DELTA_SHARD_BYTES = 16 << 10
#: A segment smaller than this many bytes goes into a raw frame (seed: a coder call costs more than it saves there).
RAW_BELOW_BYTES = 4096
#: Segments smaller than this many bytes are encoded together (seed: for larger ones it pays more that the first is under way
#: while the next is encoded).
TOGETHER_BELOW_BYTES = 1 << 20
#: A message goes in about so many pieces (seed: the first encode and the last decode are not hidden behind the wire) ...
PIECES = 8
#: ... of at least and at most so many bytes (seed: a piece costs some 50 us whatever its size; larger ones leave the cache).
PIECE_BYTES = (1 << 20, 4 << 20)
#: Pieces end at multiples of this many elements (admission: whole chunks of blocks of every size, see FORMAT.md 1.2).
PIECE_UNIT = CHUNK_BLOCKS * 1024
#: Frames that stay uncoded after one that shrank by less than LEAST_RATIO (seed: an encode in so many is not felt).
RAW_FRAMES, LEAST_RATIO = 15, 1.03
#: Calls of each candidate in its first trial and in a later one; the first of them warms up and does not count (seed).
TRIAL_CALLS, PROBE_CALLS = 7, 3
#: Calls that differences take before they are timed: of one tensor, so that all others of a step have had theirs; of all, where tensors are
#: not told apart; of all in any case (seed).
SETTLE_CALLS = (2, 6, 4096)
#: Calls between sending measurements and using them: where ranks have met at every timed call, so that all have come as far, and
#: where they have not (admission: a program that lets a rank run farther ahead than this could wait for itself).
DELAY_CALLS = (4, 64)
#: Messages that have no size in common count as if they were of this power of two of bytes (seed).
ANY_SIZE = 20
#: Calls between checks of a choice whose calls take more than CHECK_SECONDS, and of the others (seed: a check costs about 0.2 ms).
CHECK_CALLS, CHECK_SECONDS = (32, 256), 2e-3
#: Calls of the current choice that a check looks at, the last ones (seed).
CHECKED_CALLS = 3
#: Checks until the other candidates are tried again; doubles each time up to the second number (seed).
REVIEW_CHECKS = (2, 32)
#: Another candidate must take less than this share of the current one's time (seed: above the noise of medians of three).
HYSTERESIS = 0.95
#: A time this many times longer or shorter than the estimate starts a new trial at once (seed).
DRIFT = 1.3
#: Weight of a new measurement in an estimate (seed).
FOLLOW = 0.5
#: Turns between posting a piece and taking it (seed: one on the wire, one waiting).
WINDOW = 2


@dataclass(frozen=True)
class Message:
    """One operation as every rank of its group sees it.

    ``numel`` counts the whole message (the output of a gather, the input of a reduce-scatter) in elements; None where ranks
    may see different sizes (all-to-all). ``device`` is a device type, ``reduce_op`` the name in ``torch.distributed.ReduceOp``.
    ``based``: of a gather, that the ranks may hold already what was gathered before.
    """

    op: str
    dtype: torch.dtype
    numel: int | None
    ranks: int
    device: str
    backend: str
    role: str
    reduce_op: str | None = None
    based: bool = False

    @property
    def nbytes(self) -> int | None:
        """Size of the whole message; None where ranks may see different ones."""
        return None if self.numel is None else self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """FRAMES with a codec, or PASS with the reason (empty for frames; one of few texts, fit to be counted).

    ``by_node``: between nodes every shard goes once, and ranks of one node hand on what they got.
    """

    frames: bool
    codec: str
    reason: str
    by_node: bool = False

    def __str__(self) -> str:
        kind = "uncoded" if self.codec == "raw" else self.codec
        return f"{kind} frames{' by node' if self.by_node else ''}" if self.frames else "plain"


#: Why small messages pass.
SMALL = "smaller than min_bytes"


def small(nbytes: int, config: ZipcclConfig) -> bool:
    """Whether a message of so many bytes passes whatever it is: looked at first, because small messages feel every question."""
    return nbytes < config.min_bytes and config.enabled


#: Admission: what a message must satisfy, in this order. The first reason that is not empty makes it pass.
RULES: tuple[Callable[[Message, ZipcclConfig], str], ...] = (
    lambda message, config: "" if config.enabled else "not enabled",
    lambda message, config: SMALL if message.nbytes is not None and small(message.nbytes, config) else "",
    lambda message, config: "role is never coded" if config.mode_of(message.role) == "never" else "",
    lambda message, config: "" if message.ranks > 1 else "group of one rank",
    lambda message, config: (
        "" if message.dtype in CODED_DTYPES else f"dtype {str(message.dtype).removeprefix('torch.')}"
    ),
    lambda message, config: "" if message.reduce_op in (None, *CODED_REDUCE_OPS) else f"reduce op {message.reduce_op}",
    lambda message, config: "" if message.device in CODED_BACKENDS else f"no coded route on {message.device} yet",
    lambda message, config: (
        ""
        if message.backend in CODED_BACKENDS[message.device]
        else f"no coded schedule for backend {message.backend} yet"
    ),
)


def plan(message: Message, config: ZipcclConfig) -> Plan:
    """Decide on one message.

    Raises:
        ValueError: the role is none of :data:`ds_zipccl.config.ROLES`.
    """
    if message.role not in ROLES:
        raise ValueError(f"role {message.role!r} of {message.op} is unknown; roles are {', '.join(ROLES)}")
    reason = next(filter(None, (rule(message, config) for rule in RULES)), "")
    if reason:
        return Plan(False, "", reason)
    return Plan(True, "delta" if _differs(message, config) else config.codec, "")


def _differs(message: Message, config: ZipcclConfig) -> bool:
    """Whether shards may go as differences against what the ranks hold."""
    wanted = message.based and config.delta == "auto" and config.codec != "raw" and message.device in DELTA_DEVICES
    return wanted and message.nbytes is not None and message.nbytes >= DELTA_SHARD_BYTES * message.ranks


def candidates(message: Message, config: ZipcclConfig, exact: bool, levels: bool = False) -> tuple[Plan, ...]:
    """What competes for a message that :func:`plan` admits; one where nothing is to be found out.

    ``levels``: the group has several nodes with several ranks each. ``exact``: our schedules give the plain collective's bits.
    Where they do not, the plain one stays out: what a program computes must not depend on timings.
    """
    coded = plan(message, config)
    if config.mode_of(message.role) != "auto":
        return (coded,)
    ours = tuple(replace(coded, codec=codec) for codec in dict.fromkeys(("raw", config.codec, coded.codec)))
    if levels and message.op in GATHERS:
        ours += (replace(coded, by_node=True),)
    return (Plan(False, "", "plain is faster"), *ours) if exact else ours


def size_class(message: Message) -> int:
    """Messages of one class share a choice: a power of two of bytes; 0 where ranks may see different sizes."""
    return 0 if message.nbytes is None else message.nbytes.bit_length()


def size_text(size: int) -> str:
    """A size class in words."""
    return f"up to {(1 << size) / (1 << 20):.3g} MiB" if size else "any size"


def choose(current: int, estimates: Sequence[float]) -> int:
    """The candidate with the shortest time in seconds (inf where unknown); ``current`` unless another is clearly shorter, or where its own
    time could not be told."""
    if math.isinf(estimates[current]):
        return current
    best = min(range(len(estimates)), key=estimates.__getitem__)
    return best if estimates[best] < HYSTERESIS * estimates[current] else current


def follow(estimate: float, seconds: float) -> float:
    """The estimate after another measurement; inf stands for none."""
    if math.isinf(seconds) or math.isinf(estimate):
        return min(estimate, seconds)
    return estimate + FOLLOW * (seconds - estimate)


def drifted(estimate: float, seconds: float) -> bool:
    """Whether a measurement is so far from the estimate that the other candidates deserve another trial."""
    return math.isfinite(seconds) and not estimate / DRIFT < seconds < estimate * DRIFT


def check_calls(seconds: float) -> int:
    """Calls between two checks of a choice that takes so many seconds a call: what ranks tell each other must cost next to nothing."""
    return CHECK_CALLS[0] if seconds > CHECK_SECONDS else CHECK_CALLS[1]


def probed(current: int, estimates: Sequence[float], review: int) -> list[int]:
    """The candidates that review number ``review`` tries again: one twice as slow every second time, and so on."""
    others = [index for index in range(len(estimates)) if index != current]
    behind = {
        index: estimates[index] / estimates[current] if math.isfinite(estimates[current]) else 1.0 for index in others
    }
    rarity = {index: int(min(8.0, max(1.0, behind[index]))).bit_length() - 1 for index in others}
    return [index for index in others if review % (1 << rarity[index]) == 0]


def straight_to_owners(owned: Sequence[int], numel: int) -> bool:
    """Whether contributions to a sum of ``numel`` elements, ``owned[r]`` of which rank r owns, go straight to the owners; or the sums do,
    which ranks made of shards of one size: where a few own most of it, all others would send these everything at once.

    By the busiest link: straight, rank r sends what others own and receives ``owned[r]`` from each of them; by shards it receives its
    shard from each of them, and then what it owns of the others' shards.
    """
    others, total = len(owned) - 1, sum(owned)
    straight = max(max(total - own, others * own) for own in owned)
    by_shards = others * (numel + max(owned))
    return straight * len(owned) <= by_shards


def frame_codec(codec: str, nbytes: int) -> str:
    """Codec of one frame of ``nbytes`` bytes of tensor. The sender's own choice: the frame names it."""
    return "raw" if nbytes < RAW_BELOW_BYTES else codec


def incompressible(raw_bytes: int, wire_bytes: int) -> bool:
    """Whether frames like this one are better not coded for a while (RAW_FRAMES of them). The sender's own choice."""
    return raw_bytes >= RAW_BELOW_BYTES and raw_bytes < LEAST_RATIO * wire_bytes


def encode_together(nbytes: Sequence[int]) -> bool:
    """Whether segments of these sizes are encoded in one call: all small, and none so small that its frame is raw."""
    return len(nbytes) > 1 and min(nbytes) >= RAW_BELOW_BYTES and max(nbytes) < TOGETHER_BELOW_BYTES


def piece_numel(numel: int, itemsize: int, ranks: int, staging: int) -> int:
    """Elements of the pieces that ``numel`` elements to one peer go in, for ``staging`` bytes of memory in all. Equal on both sides.

    With each of its peers a rank holds WINDOW frames that it expects and twice as many that it has sent, and for a moment one more of each.
    """
    least, most = PIECE_BYTES
    wanted = min(max(-(-numel * itemsize // PIECES), least), most, staging // ((3 * WINDOW + 2) * max(1, ranks - 1)))
    return max(1, wanted // itemsize // PIECE_UNIT) * PIECE_UNIT
