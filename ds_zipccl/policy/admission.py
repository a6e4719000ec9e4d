"""Admission: the messages that may be compressed, and the schedules that compete for a message. Pure: a decision depends only on values
that are equal on every rank of the group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from ds_zipccl.config import ROLES, ZipcclConfig
from ds_zipccl.frame import DTYPE_IDS
from ds_zipccl.kernels.cuda.arguments import CODES
from ds_zipccl.lossy import LossyCodec, Round
from ds_zipccl.ops import OPS
from ds_zipccl.role_settings import hint

#: Reductions that our schedules compute (admission: other reductions are not sums of decompressed frames).
CODED_REDUCE_OPS = ("SUM", "AVG")
#: Backends with a schedule of ours, by device type (admission: the order of gloo's sums and its tag matching are known).
CODED_BACKENDS: dict[str, tuple[str, ...]] = {"cpu": ("gloo",), "cuda": ("nccl",)}
#: Backends whose schedules are collectives in the order of a device's streams.
STREAM_BACKENDS: tuple[str, ...] = ("nccl",)
#: dtypes that are compressed on the wire (admission: gloo refuses float8, and the refusal must not depend on a message's size).
CODED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Further dtypes that go as differences of their bytes: storage of quantised weights (admission: all of these go over plain gloo too; it
#: refuses the other dtypes, and the refusal must not depend on a message's size).
DELTA_DTYPES = (torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64, torch.float64)
#: dtypes that sends take, and that no codec without a base makes smaller: of masks and token numbers (admission: a frame names them, and
#: gloo's sends take every dtype).
SIDE_DTYPES = tuple(dtype for dtype in DTYPE_IDS if dtype not in CODED_DTYPES)
#: Smallest shard in bytes that goes as a difference (seed: the hashes cost a message each way).
DELTA_SHARD_BYTES = 16 << 10


@dataclass(frozen=True)
class Message:
    """One operation as every rank of its group sees it.

    ``numel`` counts the elements of the whole message (the output of a gather, the input of a reduce-scatter). It is None where ranks may
    see different sizes (all-to-all). ``device`` is a device type. ``reduce_op`` is the name in ``torch.distributed.ReduceOp``. ``nodes``:
    the number of nodes of a sum in two levels, 0 for all other operations. ``based``: ranks may hold the result of an earlier gather.
    ``plain_sums``: the sum is the plain collective's own. ``lossy``: the codec that may change the values in the message. ``copied``: most
    of a gather comes from bases of unchanged parameters, without a message.
    """

    op: str
    dtype: torch.dtype
    numel: int | None
    ranks: int
    device: str
    backend: str
    role: str
    reduce_op: str | None = None
    nodes: int = 0
    based: bool = False
    plain_sums: bool = False
    lossy: LossyCodec | None = None
    copied: bool = False

    @property
    def nbytes(self) -> int | None:
        """The bytes of the whole message, of a send those of as many elements of bf16; None where ranks may see different sizes."""
        itemsize = 2 if OPS[self.op].point_to_point else self.dtype.itemsize
        return None if self.numel is None else self.numel * itemsize


class PassReason(Enum):
    """A reason why a call passes through uncompressed: a short text for the counters, with ``{}`` for a detail; its meaning; a remedy."""

    meaning: str
    remedy: str

    def __new__(cls, text: str, meaning: str, remedy: str = "None is needed.") -> PassReason:
        member = object.__new__(cls)
        member._value_ = text
        member.meaning, member.remedy = meaning, remedy
        return member

    DISABLED = (
        "not enabled",
        "The configuration that the call was made with has `enabled` false.",
        'Set `"enabled": true` in the section, or start the job with `DS_ZIPCCL=1`.',
    )
    SMALL = (
        "smaller than min_bytes",
        "The message has fewer bytes than `min_bytes`. Coding a small message costs more time than it saves.",
        "None is needed. Larger buckets (`reduce_bucket_size`, `allgather_bucket_size`) make larger messages; a lower `min_bytes` admits "
        "smaller ones.",
    )
    ROLE = (
        "role is never coded",
        'The mode of the message\'s role is `"never"`.',
        "Change `mode`, or the entry of the role in `roles`.",
    )
    ONE_RANK = (
        "group of one rank",
        "The group has one rank, so that nothing is sent.",
        "None is needed: groups of one rank are common in DeepSpeed.",
    )
    DTYPE = (
        "dtype {}",
        "The tensor's dtype, which the table names, is not coded. bfloat16, float16 and float32 are. Integers are coded where they are "
        "parameters of which all ranks hold a base, see `zero3_base`, and in sends. DeepSpeed broadcasts the parameters of a new engine as "
        "bytes.",
        "None for flags, counts and float64 norms. For gradients see `communication_data_type` of DeepSpeed.",
    )
    SHAPES = (
        "tensors of several shapes",
        "The tensors of an `all_gather` have several shapes. NCCL sends each by a broadcast; gloo raises.",
    )
    REDUCE_OP = (
        "reduce op {}",
        "The reduction, which the table names, is not a sum or an average (`MAX` of the overflow flag, for example).",
        "None is needed: such messages are small in DeepSpeed.",
    )
    PLAIN_SUMS = (
        "sums are the backend's",
        "The sums of this group are the backend's own: `reduction` is plain, or auto and decided so at the start, or all ranks of an NCCL "
        "group are on one node, or its nodes have different numbers of ranks; there our sums would send more than NCCL's.",
        'None is needed. `"reduction": "fp32"` with `"mode": "always"` codes the sums of every group.',
    )
    OWNERS = (
        "ranks reduce different parameters",
        "Ranks once filled a gradient bucket with different parameters, or in another order. DeepSpeed adds such buckets place by place, "
        "and so does a plain sum; coded sums go to the ranks that keep each parameter, on which the ranks must agree.",
        "Let all ranks use the same parameters in the same order; DeepSpeed's own sums mix up the gradients of different ones.",
    )
    DEVICE = (
        "no coded route on {} yet",
        "The tensor lies on a device without kernels, or without those of the codec, or has a sparse layout; the table names them.",
        "Dense tensors on CPUs and CUDA devices are coded. For sparse gradients set `sparse_gradients` of DeepSpeed to false.",
    )
    BACKEND = (
        "no coded schedule for backend {}",
        "The group's backend has no coded schedule for tensors on this device; the table names both. Tensors on CPUs are coded over gloo, "
        "those on CUDA devices over NCCL.",
        'Make the groups of CUDA tensors with NCCL: `init_process_group("cpu:gloo,cuda:nccl")` has both.',
    )
    NCCL_OFF = (
        "nccl is off",
        "The group's backend is NCCL, and the key `nccl` is off; or a kernel or the canary was wrong at the start, and a line of rank 0 "
        "says so.",
        'Leave `nccl` out of the section, or set `"nccl": "on"`.',
    )
    UNPROVEN = (
        "not proven yet",
        "With `nccl` auto, plain collectives give the results of the first four optimizer steps, and coded copies are compared with them. "
        "A job without optimizer steps, and a program that calls the collectives itself, stay plain.",
        'None is needed. `"nccl": "on"` codes from the first call on.',
    )
    WRONG_WORDS = (
        "wrong words in the first steps",
        "With `nccl` auto, the first steps have compared coded copies with plain results, and words of this role differed on some rank. A "
        "line of rank 0 has the rank, the operation, the words, and a file with the words around them. Or that rank lacked memory.",
        "Please report the line and the file, with the GPU, its driver and the version of NCCL.",
    )
    NOT_ON_DEVICE = (
        "no schedule on NCCL for {}",
        "The operation, which the table names, has no coded schedule on NCCL groups.",
        "None in this release. DeepSpeed's training does not send large messages by it.",
    )
    CAPTURED = (
        "graph capture",
        "A CUDA graph is being captured. The host cannot look at sizes of frames during a replay.",
        "None in this release.",
    )
    COALESCED = (
        "coalescing manager",
        "The program collects operations of the group in torch's coalescing manager, which sends them together.",
    )
    SECONDARY = (
        "secondary shards",
        "ZeRO-3 gathers a secondary copy of its shards (`zero_hpz_partition_size`) inside a node, where plain communication is fast.",
    )
    INSIDE_NODE = (
        "inside one node",
        "All ranks of the group are on one node, and reach each other without a network: coding would take as long as sending, or longer.",
        'None is needed. `"mode": "always"` codes the message all the same, to compare.',
    )
    NO_MEMORY = (
        "no memory for staging buffers",
        "After the first optimizer step some rank could not reserve the memory for frames on its GPU, which all ranks had agreed on. All "
        "calls on NCCL groups are plain from then on: a rank that ran out of memory inside a coded call would leave the others waiting.",
        "Set `staging_mib` to a smaller number, or free memory of the GPU.",
    )
    ONE_QUEUE = (
        "one hardware queue",
        "`CUDA_DEVICE_MAX_CONNECTIONS` is 1 on some rank: all streams share one queue of the device, so that coded gathers and all-to-alls "
        "on NCCL groups would not overlap with computing.",
        'Unset the variable, or set it to 8, CUDA\'s default. `"mode": "always"` codes the message all the same, to compare.',
    )
    NETWORK_IS_FASTER = (
        "network faster than coding",
        "By the speeds measured at the start, coding gathers on this NCCL group gains nothing: the network between nodes is too fast, or "
        "the codec too slow. Nothing is tried.",
        'None is needed. `"mode": "always"` codes the message all the same, to compare.',
    )
    BREAK_EVEN = (
        "smaller than break-even",
        "By the speeds measured at the start, a message of this size on this NCCL group takes longer coded. The start-up line has the "
        "size.",
        "None is needed. Larger buckets (`allgather_bucket_size`, `stage3_prefetch_bucket_size`) make larger messages.",
    )
    STEPS_ARE_FASTER = (
        "plain is faster by whole steps",
        "Whole optimizer steps took longer with coded calls than with plain ones, or a trial is comparing the two.",
        'None is needed on a fast network. `"mode": "always"` codes the message all the same, to compare.',
    )
    LINK_IS_FASTER = (
        "link faster than coding",
        "A message on a gloo group would take longer as compressed frames, by the speeds of link and codec measured at the start.",
        'None is needed on a fast link. `"mode": "always"`, or `"roles": {"pp": "always"}`, codes it all the same.',
    )
    SMALL_GAIN = (
        "gain below a host wait",
        "An all-to-all on an NCCL group in mode auto: coding it would save less than three times the time for which the host waits for "
        "the sizes of frames. Of uneven ones, and of those whose data do not shrink, every 32nd call is coded, to measure again.",
        'None is needed. `"mode": "always"` codes the message all the same, to compare.',
    )
    TO_ITSELF = ("to itself", "A rank sends to itself.")
    TAG = (
        "tag not below {}",
        "The tag of a send or receive is negative or not below 2^28.",
        "Use tags from 0 to 2^28 - 1. A tag from 2^30 on is refused, because this package uses those itself.",
    )
    P2P_DEVICE = (
        "device {}",
        "Sends and receives are coded for CPU tensors only. The table names the device.",
        "None in this release.",
    )
    NO_SCHEDULE = (
        "no coded schedule for {}",
        "`gather`, `scatter` and `inference_all_reduce` have no coded schedule. The table names the operation.",
        "None in this release. DeepSpeed's training does not send large messages by them.",
    )
    TRACED = (
        "traced",
        "A compiler traces the call (`torch.compile`, `torch.fx`), and has no data to code.",
        "Compile without `fullgraph=True`: graphs then break at collectives, which are coded as usual.",
    )
    NOT_A_MEMBER = ("not a member of the group", "This rank is not in the group; torch.distributed ignores the call.")

    def of(self, detail: object) -> str:
        """Return the text with a detail, such as the dtype."""
        return str(self.value).format(detail)


@dataclass(frozen=True)
class Decision:
    """FRAMES with a codec, or PASS with the text of a :class:`PassReason` (empty for frames).

    ``by_node``: every shard of a gather goes once between nodes, and the ranks of a node forward its frame; the segments of an all-to-all
    for all ranks of a node go as one; a sum goes in two levels, and ``codec`` is the codec between nodes. ``with_base``: shards go as
    differences if all ranks prove to hold the same base; ``codec`` is then the codec of all other frames. ``on_device``: the frames stay
    on the device, and travel by collectives in stream order. ``lossy``: frames carry the values that this codec makes of the tensor's,
    whatever ``codec`` is.
    """

    frames: bool
    codec: str
    reason: str
    by_node: bool = False
    with_base: bool = False
    on_device: bool = False
    lossy: LossyCodec | None = None

    @classmethod
    def passing(cls, reason: PassReason, detail: object = "") -> Decision:
        """Return the decision to pass."""
        return cls(False, "", reason.of(detail))

    def __str__(self) -> str:
        if not self.frames:
            return "plain"
        kind = "delta" if self.with_base else "raw" if self.codec == "raw" else str(self.lossy or self.codec)
        return f"{kind} frames{' by node' if self.by_node else ''}"


def is_small(nbytes: int, config: ZipcclConfig) -> bool:
    """Return whether a message of ``nbytes`` passes because of its size. This rule comes first, because small messages are the ones that
    further checks slow down."""
    return nbytes < config.min_bytes and config.enabled


#: Admission: the conditions of a message, in this order. The first rule that returns a reason makes the message pass.
RULES: tuple[Callable[[Message, ZipcclConfig], str], ...] = (
    lambda message, config: "" if config.enabled else PassReason.DISABLED.value,
    lambda message, config: (
        PassReason.SMALL.value if message.nbytes is not None and is_small(message.nbytes, config) else ""
    ),
    lambda message, config: PassReason.ROLE.value if config.mode_of(message.role) == "never" else "",
    lambda message, config: "" if message.ranks > 1 else PassReason.ONE_RANK.value,
    lambda message, config: (
        ""
        if message.dtype in CODED_DTYPES or _differs(message, config) or _is_side_tensor(message)
        else PassReason.DTYPE.of(str(message.dtype).removeprefix("torch."))
    ),
    lambda message, config: (
        "" if message.reduce_op in (None, *CODED_REDUCE_OPS) else PassReason.REDUCE_OP.of(message.reduce_op)
    ),
    lambda message, config: PassReason.PLAIN_SUMS.value if message.plain_sums else "",
    lambda message, config: "" if message.device in CODED_BACKENDS else PassReason.DEVICE.of(message.device),
    lambda message, config: (
        ""
        if message.backend in CODED_BACKENDS[message.device]
        else PassReason.BACKEND.of(f"{message.backend} on {message.device}")
    ),
    lambda message, config: _on_stream(message, config) if message.backend in STREAM_BACKENDS else "",
)


def _on_stream(message: Message, config: ZipcclConfig) -> str:
    """Return the reason why a message of a group in stream order passes; "" where there is none."""
    if config.nccl == "off":
        return str(PassReason.NCCL_OFF.value)
    if not OPS[message.op].on_device:
        return PassReason.NOT_ON_DEVICE.of(message.op)
    if config.codec not in CODES:
        return PassReason.DEVICE.of(f"{message.device} for codec {config.codec}")
    small = message.nbytes is not None and message.nbytes < config.nccl_min_bytes and not message.copied
    return str(PassReason.SMALL.value) if small else ""


def admit(message: Message, config: ZipcclConfig) -> Decision:
    """Decide on one message: PASS, or FRAMES with the codec of the config. The levels of a sum are no choice: they decide its bits.

    Raises:
        ValueError: the role is not one of :data:`ds_zipccl.config.ROLES`.
    """
    if message.role not in ROLES:
        raise ValueError(
            f"role {message.role!r} of {message.op} is unknown{hint(message.role, ROLES)}; name one of {', '.join(ROLES)}"
        )
    reason = next(filter(None, (rule(message, config) for rule in RULES)), "")
    if reason:
        return Decision(False, "", reason)
    return Decision(
        True,
        config.codec if message.dtype in CODED_DTYPES else "raw",
        "",
        by_node=message.nodes > 0,
        with_base=_differs(message, config),
        on_device=message.backend in STREAM_BACKENDS,
        lossy=message.lossy,
    )


def _is_side_tensor(message: Message) -> bool:
    """Return whether a send is of one of :data:`SIDE_DTYPES`, on a device whose memory the transport takes."""
    return OPS[message.op].point_to_point and message.device == "cpu" and message.dtype in SIDE_DTYPES


def _differs(message: Message, config: ZipcclConfig) -> bool:
    """Return whether shards may go as differences against a base that the ranks hold."""
    wanted = message.based and config.delta == "auto" and config.codec != "raw"
    large = message.nbytes is not None and message.nbytes >= DELTA_SHARD_BYTES * message.ranks
    return wanted and large and message.dtype in difference_dtypes(message.device, message.backend)


def difference_dtypes(device: str, backend: str) -> tuple[torch.dtype, ...]:
    """Return the dtypes of which shards on a type of device go as differences over a backend; none where no shard does."""
    return (*CODED_DTYPES, *DELTA_DTYPES) if backend in CODED_BACKENDS.get(device, ()) else ()


def candidates(message: Message, config: ZipcclConfig, exact: bool, levels: bool = False) -> tuple[Decision, ...]:
    """Return the schedules that compete for a message that :func:`admit` admits; a single schedule where there is no choice.

    ``levels``: the group has several nodes with several ranks each. ``exact``: our schedules give the plain collective's bits. The plain
    collective competes only if ``exact``: the results of a program must not depend on timings.
    """
    coded = admit(message, config)
    exchanged = OPS[message.op].traffic == "all_to_all"
    # by node an all-to-all cuts the segments for the ranks of a node, laid end to end, at other elements than each segment by itself:
    # only a codec that rounds each value by itself takes no notice
    same_bits = message.lossy is None or isinstance(message.lossy, Round) or not exchanged
    goes_by_node = levels and OPS[message.op].by_node and same_bits
    if config.mode_of(message.role) != "auto":
        return (replace(coded, by_node=coded.by_node or goes_by_node),)
    full = replace(coded, with_base=False)
    ours = tuple(dict.fromkeys((replace(full, codec="raw"), full, coded)))
    if goes_by_node:
        ours += (replace(coded, by_node=True),)
    return (Decision.passing(PassReason.LINK_IS_FASTER), *ours) if exact else ours


# ---- pipelines: sends that a low-rank codec takes, and the ranks that share a weight of several stages ---------------


def compresses(stage: int, stages: int, micro_batches: int, index: int) -> bool:
    """Return whether the gradient that a stage sends backward for a micro-batch is one of its epilogue, after the stage's last forward.

    The earlier stage has nothing else to do then but wait for that message. Both ends of a link can compute the rule from the index of
    the micro-batch. A count of own forwards cannot serve the receiver: one more gradient arrives there after its own last forward.
    Published as "epilogue-only compression" (Optimus-CC, ASPLOS 2023).

    Args:
        stage: the sending stage, 1 to ``stages`` - 1.
        stages: number of stages.
        micro_batches: micro-batches of one optimizer step.
        index: of the micro-batch in the order of the sends, from 0.
    """
    return index >= micro_batches - (stages - stage)


def sharing_ranks(coordinates: Sequence[Mapping[str, int]], stages: Sequence[int]) -> list[list[int]]:
    """Return the groups of ranks that hold the same values of a weight that ``stages`` share: all data-parallel ranks of the stages. Ranks
    with different coordinates on another axis, such as tensor parallelism, hold different parts of the weight and are in different groups.

    Args:
        coordinates: of each rank, its place on each axis; "pipe" and "data" are two of them.
        stages: places on the axis "pipe".

    Returns:
        Ranks in ascending order, groups in the order of their first ranks.
    """
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank, place in enumerate(coordinates):
        if place["pipe"] in stages:
            others = tuple(sorted((axis, at) for axis, at in place.items() if axis not in ("pipe", "data")))
            groups.setdefault(others, []).append(rank)
    return list(groups.values())
