"""Whether a message may be coded, and which schedules compete for it. Pure: a decision depends on nothing but values that are equal on
every rank of the group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ds_zipccl.config import ROLES, ZipcclConfig
from ds_zipccl.ops import OPS

#: Sums that a schedule of ours computes (admission: the others are not sums of decoded frames).
CODED_REDUCE_OPS = ("SUM", "AVG")
#: Backends with a schedule of ours, by device type (admission: the order of gloo's sums and its tag matching are known).
CODED_BACKENDS = {"cpu": ("gloo",), "cuda": ("gloo",)}
#: dtypes that are coded on the wire (admission: gloo has no float8, and what it refuses must not depend on a message's size).
CODED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Differences are made of tensors on these devices (admission: others are staged, and their base is not where the frames are).
DELTA_DEVICES = ("cpu",)
#: A shard smaller than this many bytes is not sent as a difference (seed: the hashes cost a message each way).
DELTA_SHARD_BYTES = 16 << 10


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
class Decision:
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


def is_small(nbytes: int, config: ZipcclConfig) -> bool:
    """Whether a message of so many bytes passes whatever it is: looked at first, because small messages feel every question."""
    return nbytes < config.min_bytes and config.enabled


#: Admission: what a message must satisfy, in this order. The first reason that is not empty makes it pass.
RULES: tuple[Callable[[Message, ZipcclConfig], str], ...] = (
    lambda message, config: "" if config.enabled else "not enabled",
    lambda message, config: SMALL if message.nbytes is not None and is_small(message.nbytes, config) else "",
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


def admit(message: Message, config: ZipcclConfig) -> Decision:
    """Decide on one message.

    Raises:
        ValueError: the role is none of :data:`ds_zipccl.config.ROLES`.
    """
    if message.role not in ROLES:
        raise ValueError(f"role {message.role!r} of {message.op} is unknown; roles are {', '.join(ROLES)}")
    reason = next(filter(None, (rule(message, config) for rule in RULES)), "")
    if reason:
        return Decision(False, "", reason)
    return Decision(True, "delta" if _differs(message, config) else config.codec, "")


def _differs(message: Message, config: ZipcclConfig) -> bool:
    """Whether shards may go as differences against what the ranks hold."""
    wanted = message.based and config.delta == "auto" and config.codec != "raw" and message.device in DELTA_DEVICES
    return wanted and message.nbytes is not None and message.nbytes >= DELTA_SHARD_BYTES * message.ranks


def candidates(message: Message, config: ZipcclConfig, exact: bool, levels: bool = False) -> tuple[Decision, ...]:
    """What competes for a message that :func:`admit` admits; one where nothing is to be found out.

    ``levels``: the group has several nodes with several ranks each. ``exact``: our schedules give the plain collective's bits.
    Where they do not, the plain one stays out: what a program computes must not depend on timings.
    """
    coded = admit(message, config)
    if config.mode_of(message.role) != "auto":
        return (coded,)
    ours = tuple(replace(coded, codec=codec) for codec in dict.fromkeys(("raw", config.codec, coded.codec)))
    if levels and OPS[message.op].by_node:
        ours += (replace(coded, by_node=True),)
    return (Decision(False, "", "plain is faster"), *ours) if exact else ours
