"""How the elements of a message are cut into fragments, and which codec a frame gets. Pure: numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Sequence

from ds_zipccl.frame import CHUNK_BLOCKS

#: A segment smaller than this many bytes goes into a raw frame (seed: a coder call costs more than it saves there).
RAW_BELOW_BYTES = 4096
#: Segments smaller than this many bytes are encoded together (seed: for larger ones it pays more that the first is under way
#: while the next is encoded).
TOGETHER_BELOW_BYTES = 1 << 20
#: A message goes in about so many pieces (seed: the first encode and the last decode are not hidden behind the wire) ...
TARGET_FRAGMENTS = 8
#: ... of at least and at most so many bytes (seed: a piece costs some 50 us whatever its size; larger ones leave the cache).
FRAGMENT_BYTES = (1 << 20, 4 << 20)
#: Pieces end at multiples of this many elements (admission: whole chunks of blocks of every size, see FORMAT.md 1.2).
FRAGMENT_UNIT = CHUNK_BLOCKS * 1024
#: Frames that stay uncoded after one that shrank by less than LEAST_RATIO (seed: an encode in so many is not felt).
RAW_FRAMES, LEAST_RATIO = 15, 1.03
#: Turns between posting a piece and taking it (seed: one on the wire, one waiting).
PIPELINE_DEPTH = 2


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


def incompressible(logical_bytes: int, wire_bytes: int) -> bool:
    """Whether frames like this one are better not coded for a while (RAW_FRAMES of them). The sender's own choice."""
    return logical_bytes >= RAW_BELOW_BYTES and logical_bytes < LEAST_RATIO * wire_bytes


def encode_together(nbytes: Sequence[int]) -> bool:
    """Whether segments of these sizes are encoded in one call: all small, and none so small that its frame is raw."""
    return len(nbytes) > 1 and min(nbytes) >= RAW_BELOW_BYTES and max(nbytes) < TOGETHER_BELOW_BYTES


def fragment_numel(numel: int, itemsize: int, ranks: int, staging: int) -> int:
    """Elements of the pieces that ``numel`` elements to one peer go in, for ``staging`` bytes of memory in all. Equal on both sides.

    With each of its peers a rank holds PIPELINE_DEPTH frames that it expects and twice as many that it has sent, and for a moment one
    more of each.
    """
    least, most = FRAGMENT_BYTES
    wanted = min(
        max(-(-numel * itemsize // TARGET_FRAGMENTS), least),
        most,
        staging // ((3 * PIPELINE_DEPTH + 2) * max(1, ranks - 1)),
    )
    return max(1, wanted // itemsize // FRAGMENT_UNIT) * FRAGMENT_UNIT
