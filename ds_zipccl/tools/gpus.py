"""GPUs that ranks share, and the variables of NCCL for these ranks."""

from __future__ import annotations

from ds_zipccl.tools.namespaces import INTERFACE

#: Variables of NCCL for ranks that share a GPU or a shaped network. NCCL refuses two ranks of a node on one GPU; a
#: ``NCCL_HOSTID`` per rank makes each rank a node. Transports inside a node are off. CTAs are few: ranks share the GPU.
SOCKETS = "NCCL_SOCKET_IFNAME"
SHARED_GPU = {
    "NCCL_NET": "Socket", SOCKETS: "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2",
}  # fmt: skip
HOST_ID = "NCCL_HOSTID"


def devices() -> int:
    """Return the number of GPUs for the ranks of this machine."""
    import torch

    return torch.cuda.device_count()


def local_rank(rank: int) -> int:
    """Return the device index of a rank; without a GPU, the rank."""
    return rank % devices() if devices() else rank


def environment(ranks: int, rank: int, linked: bool) -> dict[str, str]:
    """Return the variables of a rank that shares its GPU, or whose GPU uses a shaped network (``linked``)."""
    if not devices() or (ranks <= devices() and not linked):
        return {}
    return {**SHARED_GPU, HOST_ID: f"rank{rank}"} | ({SOCKETS: INTERFACE} if linked else {})
