"""Why a message passes through: text, meaning and remedy of every reason, until ``policy/admission.py`` has this enum itself.

``docs/generate.py`` takes ``PassReason`` from ``ds_zipccl.policy.admission`` where that module has it. This file can go then.
"""

from __future__ import annotations

from enum import Enum


class PassReason(Enum):
    """A reason for which a message goes by the plain collective. ``value`` begins the text in the table of traffic; details follow it."""

    meaning: str
    remedy: str

    def __new__(cls, text: str, meaning: str, remedy: str) -> PassReason:
        member = object.__new__(cls)
        member._value_ = text
        member.meaning, member.remedy = meaning, remedy
        return member

    NOT_ENABLED = (
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
        "dtype",
        "The tensor's dtype, which the table names, is not coded. bfloat16, float16 and float32 are.",
        "None for flags, counts and float64 norms. For gradients see `communication_data_type` of DeepSpeed.",
    )
    REDUCE_OP = (
        "reduce op",
        "The reduction, which the table names, is not a sum or an average (`MAX` of the overflow flag, for example).",
        "None is needed: such messages are small in DeepSpeed.",
    )
    DEVICE = (
        "no coded route on",
        "The tensor lies on a device without kernels, or has a sparse layout; the table names both.",
        "Dense tensors on CPUs and CUDA devices are coded. For sparse gradients set `sparse_gradients` of DeepSpeed to false.",
    )
    BACKEND = (
        "no coded schedule for backend",
        "The group's backend, which the table names, has no coded schedule. NCCL has none in this release.",
        "Coding works on gloo groups only. A job whose CUDA tensors go by NCCL gains nothing yet.",
    )
    POINT_TO_POINT_DEVICE = (
        "device",
        "Sends and receives are coded for CPU tensors only. The table names the device.",
        "None in this release.",
    )
    NO_SCHEDULE = (
        "no coded schedule for",
        "`gather`, `scatter` and `inference_all_reduce` have no coded schedule. The table names the operation.",
        "None in this release. DeepSpeed's training does not send large messages by them.",
    )
    PLAIN_FASTER = (
        "plain is faster",
        "The tuner has measured the plain collective and our schedules for this kind of message, and the plain one won.",
        'None is needed on a fast link. `"mode": "always"` codes the message all the same, to compare.',
    )
    LINK_FASTER = (
        "link faster than coding",
        "A single send would take longer as a compressed frame than uncompressed, by the measured speeds of link and codec.",
        'None is needed on a fast link. `"mode": "always"`, or `"roles": {"pp": "always"}`, codes it all the same.',
    )
    TO_ITSELF = ("to itself", "A rank sends to itself.", "None is needed.")
    TAG = (
        "tag not below",
        "The tag of a send or receive is negative or not below 2^28.",
        "Use tags from 0 to 2^28 - 1. A tag from 2^30 on is refused, because this package uses those itself.",
    )
    TRACED = (
        "traced",
        "A compiler traces the call (`torch.compile`, `torch.fx`), and has no data to code.",
        "Compile without `fullgraph=True`: graphs then break at collectives, which are coded as usual.",
    )
