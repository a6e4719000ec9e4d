"""Every reason for which a message passes through uncompressed -> its meaning, and a remedy; the table of the troubleshooting page."""

from __future__ import annotations

from ds_zipccl.policy.admission import PassReason

MEANINGS: dict[PassReason, tuple[str, str]] = {
    PassReason.DISABLED: (
        "The configuration that the call was made with has `enabled` false.",
        'Set `"enabled": true` in the section, or start the job with `DS_ZIPCCL=1`.',
    ),
    PassReason.SMALL: (
        "The message has fewer bytes than `min_bytes`. Coding a small message costs more time than it saves.",
        "None is needed. Larger buckets (`reduce_bucket_size`, `allgather_bucket_size`) make larger messages; a lower `min_bytes` admits "
        "smaller ones.",
    ),
    PassReason.ROLE: (
        'The mode of the message\'s role is `"never"`.',
        "Change `mode`, or the entry of the role in `roles`.",
    ),
    PassReason.ONE_RANK: (
        "The group has one rank, so that nothing is sent.",
        "None is needed: groups of one rank are common in DeepSpeed.",
    ),
    PassReason.DTYPE: (
        "The tensor's dtype, which the table names, is not coded. bfloat16, float16 and float32 are. Integers are coded where they are "
        "parameters of which all ranks hold a base, see `zero3_base`, and in sends; bytes in broadcasts, as the words that they are.",
        "None for flags, counts and float64 norms. For gradients see `communication_data_type` of DeepSpeed.",
    ),
    PassReason.REDUCE_OP: (
        "The reduction, which the table names, is not a sum or an average (`MAX` of the overflow flag, for example).",
        "None is needed: such messages are small in DeepSpeed.",
    ),
    PassReason.PLAIN_SUMS: (
        "The sums of this group are the backend's own: `reduction` is plain, or auto and decided so at the start, or all ranks of an NCCL "
        "group are on one node, or its nodes have different numbers of ranks; there our sums would send more than NCCL's.",
        'None is needed. `"reduction": "fp32"` with `"mode": "always"` codes the sums of every group.',
    ),
    PassReason.DEVICE: (
        "The tensor lies on a device without kernels, or has a sparse layout; the table names both.",
        "Dense tensors on CPUs and CUDA devices are coded. For sparse gradients set `sparse_gradients` of DeepSpeed to false.",
    ),
    PassReason.BACKEND: (
        "The group's backend, which the table names, has no coded schedule.",
        "Groups of gloo are coded, and groups of NCCL with `nccl`.",
    ),
    PassReason.NCCL_OFF: (
        "The group's backend is NCCL, and the key `nccl` is off: the schedules on NCCL groups have not run on GPUs yet, only on a "
        "simulated one.",
        'Set `"nccl": "on"` in the section to code NCCL groups all the same.',
    ),
    PassReason.NOT_ON_DEVICE: (
        "The operation, which the table names, has no coded schedule on NCCL groups.",
        "None in this release. DeepSpeed's training does not send large messages by it.",
    ),
    PassReason.CAPTURED: (
        "A CUDA graph is being captured. The host cannot look at sizes of frames during a replay.",
        "None in this release.",
    ),
    PassReason.COALESCED: (
        "The program collects operations of the group in torch's coalescing manager, which sends them together.",
        "None is needed.",
    ),
    PassReason.SECONDARY: (
        "ZeRO-3 gathers a secondary copy of its shards (`zero_hpz_partition_size`) inside a node, where plain communication is fast.",
        "None is needed.",
    ),
    PassReason.PLAIN_IS_FASTER: (
        "The tuner has measured the plain collective and our schedules for this kind of message, and the plain one won.",
        'None is needed on a fast link. `"mode": "always"` codes the message all the same, to compare.',
    ),
    PassReason.TRIAL: (
        "The tuner is timing the plain collective and our schedules for this kind of message, and it was the turn of the plain one, or the "
        "times of other ranks were on their way. Nothing is decided yet.",
        "None is needed: a trial takes seven calls of each schedule, and later trials fewer.",
    ),
    PassReason.INSIDE_NODE: (
        "All ranks of the NCCL group are on one node, and reach each other without a network: coding would take longer than sending.",
        'None is needed. `"mode": "always"` codes the message all the same, to compare.',
    ),
    PassReason.ONE_QUEUE: (
        "`CUDA_DEVICE_MAX_CONNECTIONS` is 1 on some rank: all streams share one queue of the device, so that coded gathers and all-to-alls "
        "on NCCL groups would not overlap with computing.",
        'Unset the variable, or set it to 8, CUDA\'s default. `"mode": "always"` codes the message all the same, to compare.',
    ),
    PassReason.NETWORK_IS_FASTER: (
        "By the speeds measured at the start, coding gathers on this NCCL group gains nothing: the network between nodes is too fast, or "
        "the codec too slow. Nothing is tried.",
        'None is needed. `"mode": "always"` codes the message all the same, to compare.',
    ),
    PassReason.BREAK_EVEN: (
        "By the speeds measured at the start, a message of this size on this NCCL group takes longer coded. The start-up line has the "
        "size.",
        "None is needed. Larger buckets (`allgather_bucket_size`, `stage3_prefetch_bucket_size`) make larger messages.",
    ),
    PassReason.STEPS_ARE_FASTER: (
        "Whole optimizer steps took longer with coded gathers and exchanges on NCCL groups than with plain ones, or a trial is comparing "
        "the two.",
        'None is needed on a fast network. `"mode": "always"` codes the message all the same, to compare.',
    ),
    PassReason.LINK_IS_FASTER: (
        "A single send would take longer as a compressed frame than uncompressed, by the measured speeds of link and codec.",
        'None is needed on a fast link. `"mode": "always"`, or `"roles": {"pp": "always"}`, codes it all the same.',
    ),
    PassReason.SMALL_GAIN: (
        "An all-to-all on an NCCL group in mode auto: coding it would save less than three times the time for which the host waits for "
        "the sizes of frames. Of uneven ones, and of those whose data do not shrink, one call in 32 is coded, to look again.",
        'None is needed. `"mode": "always"` codes the message all the same, to compare.',
    ),
    PassReason.TO_ITSELF: (
        "A rank sends to itself.",
        "None is needed.",
    ),
    PassReason.TAG: (
        "The tag of a send or receive is negative or not below 2^28.",
        "Use tags from 0 to 2^28 - 1. A tag from 2^30 on is refused, because this package uses those itself.",
    ),
    PassReason.P2P_DEVICE: (
        "Sends and receives are coded for CPU tensors only. The table names the device.",
        "None in this release.",
    ),
    PassReason.NO_SCHEDULE: (
        "`gather`, `scatter` and `inference_all_reduce` have no coded schedule. The table names the operation.",
        "None in this release. DeepSpeed's training does not send large messages by them.",
    ),
    PassReason.TRACED: (
        "A compiler traces the call (`torch.compile`, `torch.fx`), and has no data to code.",
        "Compile without `fullgraph=True`: graphs then break at collectives, which are coded as usual.",
    ),
    PassReason.NOT_A_MEMBER: (
        "This rank is not in the group; torch.distributed ignores the call.",
        "None is needed.",
    ),
}
