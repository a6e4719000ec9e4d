"""The rules for messages of a forward pass that a recomputation repeats. Pure: both ends of a message decide the same, without asking."""

from __future__ import annotations

from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy import wire

#: Roles whose messages a recomputation repeats: those of collectives inside of layers.
ROLES = ("ep", "sp", "tp")
#: Their operations.
OPS = frozenset(("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "all_gather_into_tensor")) | {
    "reduce_scatter_tensor", "all_to_all_single", "all_reduce_coalesced",
}  # fmt: skip
#: Segments of fewer bytes are not kept (seed: their frames are raw, and a hash would save little).
LEAST_BYTES = wire.RAW_BELOW_BYTES
#: Messages of one kind in a backward pass, one after the other, that repeat nothing, before the next ones are not hashed; and the number of
#: those (seed: layers mix a few repeats with more gradients; a hash costs a third of coding).
MISSES, UNHASHED = 32, 15


def keeps(config: ZipcclConfig, role: str, kind: str = "") -> bool:
    """Return whether messages of a role and kind are kept, or may repeat kept ones. Gradients of rows of experts never do, nor do the sums
    that are the same on all ranks."""
    return config.recompute_base != "off" and role in ROLES and not kind.endswith(".bwd") and kind != "replicated"


def most(config: ZipcclConfig, ranks: int) -> int:
    """Return the most bytes of segments that are kept of one direction between two ranks of a group of ``ranks``."""
    return (config.recompute_base_mib << 20) // max(1, ranks - 1)
