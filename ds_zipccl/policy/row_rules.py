"""The sender's choices for expert traffic in rows: searches, remembered maps, and blocks. Pure: numbers in, numbers out.

The sender decides alone, because frames name their rows and blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_zipccl.config import ZipcclConfig
from ds_zipccl.ops import OPS

#: Rows of fewer bytes are not searched (seed: a search costs as much as coding 64 bytes, and a distance takes some of them).
LEAST_ROW_BYTES = 64
#: Most bytes that a search takes for each row of a segment.
SEARCH_BYTES = 20
#: Messages that are not searched after a search without a find (seed: one useless search in so many messages costs little).
UNSEARCHED = 15
#: Searches without a find in a row before that, for messages of a known kind, and for messages that may be of all kinds of a layer in turn.
MISSES, MISSES_OF_UNKNOWN = 1, 4

#: Bytes and maps that a rank remembers of a group (seed: some 60 layers of 20000 repeated rows, 8 bytes each).
MAP_BYTES, MAPS = 32 << 20, 4096
#: Newest maps that are tried on a segment (seed: the MoE layers and micro-batches in flight of a pipeline's stage).
MAP_TRIALS = 16
#: Rows of a map that a trial compares, and words that it compares of each row (seed: a map of other rows fits no row).
TRIAL_ROWS, TRIAL_WORDS = 24, 32
#: Share of compared words that a good prediction misses by at most 1, and share of compared rows with a good prediction (seed: gradients of
#: one token reach 0.99 of the words; other rows reach 0.01).
GOOD_WORDS, GOOD_ROWS = 0.5, 0.5
#: Copies of a row beyond which the row marks empty places, not a token that goes to several experts (seed: routers choose up to 8).
COPIES = 16
#: One row in so many must repeat for the map to be remembered (seed: a smaller map saves less than its trials cost).
WORTH_REMEMBERING = 32

_BLOCKS = (128, 256, 512)
#: Least block that a sender of expert traffic may choose.
LEAST_BLOCK = _BLOCKS[0]


def may_have_rows(config: ZipcclConfig, op: str, role: str, codec: str) -> bool:
    """Return whether row frames may carry an operation's tensors, where all ranks have their kernels; equal on all ranks."""
    return role == "ep" and OPS[op].traffic == "all_to_all" and config.rows != "off" and codec != "raw"


def block(configured: int, width: int, kind: str) -> int:
    """Return the block size of a message in rows of ``width`` elements.

    A block of one row follows the scales of gradients, which differ from row to row. Rows of the forward pass have much the same scale:
    there the larger block has less overhead.
    """
    backward = not kind or kind.endswith(".bwd")
    return min(configured, width) if width in _BLOCKS and backward else configured


def search_fits(rows: Sequence[int], staging_mib: int) -> bool:
    """Return whether the searches of segments of ``rows`` rows fit the memory for frames, ``staging_mib`` MiB."""
    return SEARCH_BYTES * sum(rows) <= staging_mib << 20
