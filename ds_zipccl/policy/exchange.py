"""All-to-alls on a device: whether coding pays, the elements of a frame, and the steps of uneven ones. Pure: numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Sequence

from ds_zipccl.policy import wire
from ds_zipccl.policy.device_rules import AGREEMENTS_GAINED, DeviceProfile

#: Without a measured link: a coded call must send this many bytes less between nodes (seed: some agreements at 10 GB/s a rank).
LEAST_SAVED_BYTES = 5 << 20
#: Plain calls after a coded one that did not pay (seed: one useless agreement in so many calls costs little).
PLAIN_CALLS = 31
#: Sizes of steps among which the ranks choose: 1, 2, 4, ... frames of a pair of ranks (seed: up to a segment of some GiB).
STEP_SIZES = 16


def pays(nbytes: float, coded: float, each: int, profile: DeviceProfile | None) -> bool:
    """Return whether coding an exchange saves more than AGREEMENTS_GAINED agreements, one of which it waits for.

    Args:
        nbytes: most bytes of words that a rank sends to ranks of other nodes.
        coded: most bytes of frames that it sends in their place.
        each: ranks of a node, which share its network cards.
        profile: speeds of the slowest rank; None: not measured.
    """
    if profile is None:
        return nbytes - coded >= LEAST_SAVED_BYTES
    coding = profile.launch + nbytes / profile.encode + nbytes / profile.decode
    return (nbytes - coded) * each / profile.network - coding > AGREEMENTS_GAINED * profile.agreement


def between_nodes(nodes: Sequence[Sequence[int]], ranks: int) -> float:
    """Return the part of its tensor that a rank of the smallest node sends to other nodes. Each rank is a node where ``nodes`` is empty."""
    least = min(map(len, nodes), default=1)
    return (ranks - least) / ranks


def even_piece(numel: int, itemsize: int, ranks: int, budget: int) -> int:
    """Return the elements of a frame of exchanges whose segments all have ``numel`` elements. A step has one frame for each peer."""
    moved = 2 * ranks * itemsize  # sent and received
    most = wire.device_fragment_bytes(numel * moved, budget)
    return max(1, most // moved // wire.FRAGMENT_UNIT) * wire.FRAGMENT_UNIT


def uneven_piece(itemsize: int, ranks: int, budget: int) -> int:
    """Return the elements of a frame of exchanges whose segments differ: a step of one frame for each peer, both ways, fits the budget."""
    return wire.device_piece_numel(itemsize, 2 * ranks, budget)


def step_bytes(numels: Sequence[int], itemsize: int, piece: int) -> list[int]:
    """Return the bytes of words that a rank moves in a step, for each of the STEP_SIZES. ``numels``: elements of the segments of all
    peers, sent and received. The first step is the largest."""
    return [itemsize * sum(min(numel, piece << size) for numel in numels) for size in range(STEP_SIZES)]


def pieces_of_step(nbytes: Sequence[int], budget: int) -> int:
    """Return how many frames of a pair of ranks go in one step. ``nbytes``: the most bytes of any rank, as :func:`step_bytes` gives."""
    most = wire.device_fragment_bytes(nbytes[-1], budget)
    return 1 << max((size for size, moved in enumerate(nbytes) if moved <= most), default=0)
