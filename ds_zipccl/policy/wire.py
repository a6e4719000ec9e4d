"""The sizes of a message's fragments, and the codec of each frame: rows too. Pure: numbers in, numbers out.

The sender decides alone what a frame names: its codec, its block, its rows. Both ends decide the rest alike, without asking.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence

from ds_zipccl.config import ZipcclConfig
from ds_zipccl.frame import CHUNK_BLOCKS
from ds_zipccl.ops import OPS

#: A segment smaller than this many bytes goes into a raw frame (seed: below, compressing costs more time than it saves), and is not kept
#: for recomputations: a hash would save little.
RAW_BELOW_BYTES = 4096
#: Segments smaller than this many bytes are compressed in one call (seed: with larger segments, sending the first while the next is
#: compressed saves more).
TOGETHER_BELOW_BYTES = 1 << 20
#: Wanted fragments of a message (seed: the wire does not hide compressing the first fragment and decompressing the last one).
TARGET_FRAGMENTS = 8
#: Least and most bytes of a fragment (seed: a fragment of any size costs some 50 us; larger fragments leave the cache).
FRAGMENT_BYTES = (1 << 20, 4 << 20)
#: Fragments end at multiples of this many elements (admission: whole chunks of blocks of every size, see FORMAT.md 1.2).
FRAGMENT_UNIT = CHUNK_BLOCKS * 1024
#: Raw frames after a frame whose ratio is below LEAST_RATIO (seed: one useless compression in so many frames costs little).
RAW_FRAMES, LEAST_RATIO = 15, 1.03
#: Steps between posting a fragment and taking it (seed: one on the wire, one waiting).
PIPELINE_DEPTH = 2


class Backoff:
    """The backoff of attempts of one kind: after ``patience`` vain ones, one after the other, the next ``skipped`` ones are left out."""

    def __init__(self, skipped: int, patience: int = 1) -> None:
        self._skipped, self._patience, self._misses, self._left = skipped, patience, 0, 0

    @property
    def skipping(self) -> bool:
        """Whether the next attempt is left out."""
        return self._left > 1

    def skips(self) -> bool:
        """Return whether the next attempt is left out, and count it."""
        self._left -= self._left > 0
        return self._left > 0

    def note(self, found: bool) -> None:
        """Record whether an attempt was of use."""
        self._misses = 0 if found else self._misses + 1
        if self._misses >= self._patience:
            self._left = self._skipped + 1


def straight_to_owners(owned: Sequence[int], numel: int) -> bool:
    """Return whether contributions to a sum of ``numel`` elements go straight to the owners. ``owned[r]``: elements that rank r owns.

    Otherwise every rank sums a shard of one size and sends the sums to the owners: where a few ranks own most elements, straight
    contributions would all enter these ranks at once. The elements through the busiest link decide. Straight, rank r sends the elements
    that its peers own, and receives ``owned[r]`` elements from each peer. By shards, rank r receives its shard from each peer, and then
    the sums of its own elements in the peers' shards.
    """
    peers, total = len(owned) - 1, sum(owned)
    straight = max(max(total - own, peers * own) for own in owned)
    by_shards = peers * (numel + max(owned))
    return straight * len(owned) <= by_shards


def frame_codec(codec: str, nbytes: int) -> str:
    """Return the codec of one frame of ``nbytes`` logical bytes. The sender decides alone, because the frame names its codec."""
    return "raw" if nbytes < RAW_BELOW_BYTES else codec


def incompressible(logical_bytes: int, wire_bytes: int) -> bool:
    """Return whether the next RAW_FRAMES frames after a frame of these sizes should be raw. The sender decides alone."""
    return logical_bytes >= RAW_BELOW_BYTES and logical_bytes < LEAST_RATIO * wire_bytes


def compare_rows(nbytes: int, lossy: bool, rounded: int) -> bool:
    """Return whether a row frame is to be compared with the ordinary frame of its words, which may be smaller: with a lossy codec whose
    literal rows are lossless frames (``rounded`` is 0), and where raw literals are a large part of a small message."""
    return lossy and (not rounded or nbytes < 16 * RAW_BELOW_BYTES)


def encode_together(nbytes: Sequence[int]) -> bool:
    """Return whether segments of ``nbytes`` bytes are compressed in one call: all small, and none so small that its frame is raw."""
    return len(nbytes) > 1 and min(nbytes) >= RAW_BELOW_BYTES and max(nbytes) < TOGETHER_BELOW_BYTES


def fragment_numel(numel: int, itemsize: int, ranks: int, staging: int) -> int:
    """Return the elements of each fragment of ``numel`` elements for one peer, equal on both sides. ``staging``: bytes of memory for the
    frames of all peers.

    For each peer a rank holds PIPELINE_DEPTH expected frames and twice as many sent frames, and for a moment one more of each.
    """
    least, most = FRAGMENT_BYTES
    wanted = min(
        max(-(-numel * itemsize // TARGET_FRAGMENTS), least),
        most,
        staging // ((3 * PIPELINE_DEPTH + 2) * max(1, ranks - 1)),
    )
    return max(1, wanted // itemsize // FRAGMENT_UNIT) * FRAGMENT_UNIT


#: Fragments of an operation on a device, and least bytes of a fragment's words (seed: while one is on the wire, the next is encoded and the
#: last decoded; 16 MiB of bf16 fill an H100).
DEVICE_FRAGMENTS, DEVICE_FRAGMENT_BYTES = 4, 16 << 20
#: Slots are multiples of this many bytes (seed: of NCCL's and the memory's units).
SLOT_UNIT = 512
#: Bytes of the staging buffers of a device by default: the least of a number, a part of its memory, and a part of what is free after the
#: first optimizer step (seed: two agreements a bucket of 1 GB); never fewer than the last.
DEVICE_STAGING, OF_MEMORY, OF_FREE, LEAST_STAGING = 1 << 30, 0.015, 0.1, 16 << 20


def device_staging(memory: int, free: int) -> int:
    """Return the bytes of the staging buffers of a device with ``memory`` bytes, of which ``free`` are free after the first step."""
    return max(LEAST_STAGING, min(DEVICE_STAGING, int(OF_MEMORY * memory), int(OF_FREE * free)) >> 20 << 20)


def device_cut(numel: int, each: int, budget: int, least: int = 0, count: int = DEVICE_FRAGMENTS) -> int:
    """Return the elements of the fragments of segments of ``numel`` elements that move together. They are not so small that their latency
    counts, nor so large that three do not fit the ``budget``: one is encoded, one on the wire, one decoded.

    Args:
        each: bytes of one element of all segments.
        least: bytes below which the latency of a fragment counts, see :func:`.cost_model.least_of_sum`.
        count: fragments of segments that leave a choice.
    """
    nbytes, unit = numel * each, FRAGMENT_UNIT * each
    wanted = min(count, nbytes // max(DEVICE_FRAGMENT_BYTES, least, unit))
    count = max(1, min(max(wanted, -(-nbytes // max(1, budget // 4))), nbytes // unit))
    most = max(1, budget // 3 // each // FRAGMENT_UNIT)
    return min(most, max(1, -(-numel // (count * FRAGMENT_UNIT)))) * FRAGMENT_UNIT


def frame_numel(nbytes: int, itemsize: int, ranks: int) -> int:
    """Return the most elements of a frame, so that one of every rank fits ``nbytes``."""
    return max(1, nbytes // ranks // itemsize // FRAGMENT_UNIT) * FRAGMENT_UNIT


def device_piece_numel(numel: int, itemsize: int, ranks: int, budget: int) -> int:
    """Return the elements of the frames of a parameter of ``numel`` elements in gathers, all but the last: frames are nearly equal, so that
    fragments are. Those of all ranks are no larger than a fragment where there are several."""
    count = -(-numel // frame_numel(min(DEVICE_FRAGMENT_BYTES, budget // 12), itemsize, ranks))
    return max(1, -(-numel // (max(1, count) * FRAGMENT_UNIT))) * FRAGMENT_UNIT


def device_fragment_of(begin: int, nbytes: int, whole: int, count: int) -> int:
    """Return the number of the fragment, of ``count`` ones, of a frame of ``nbytes`` bytes that begins at byte ``begin`` of ``whole``: that
    in which its middle lies. No fragment is empty if no frame has more than ``whole / count`` bytes."""
    return (2 * begin + nbytes) * count // (2 * whole)


def shrinks(nbytes: int, frame: int) -> bool:
    """Return whether a frame of ``frame`` bytes is worth decoding, in place of ``nbytes`` bytes of words."""
    return nbytes >= RAW_BELOW_BYTES and nbytes >= LEAST_RATIO * frame


def slot_bytes(frame: int) -> int:
    """Return the bytes of a slot for frames of up to ``frame`` bytes."""
    return -(-frame // SLOT_UNIT) * SLOT_UNIT


#: Plain exchanges after a coded one that did not pay (seed: one useless agreement in so many calls costs little).
PLAIN_EXCHANGES = 31
#: Sizes of steps of uneven exchanges among which the ranks choose: 1, 2, 4, ... frames of a pair of ranks (seed: up to a segment of some
#: GiB).
STEP_SIZES = 16


def between_nodes(nodes: Sequence[Sequence[int]], ranks: int) -> float:
    """Return the part of its tensor that a rank of the smallest node sends to other nodes. Each rank is a node where ``nodes`` is empty."""
    least = min(map(len, nodes), default=1)
    return (ranks - least) / ranks


def even_piece(numel: int, itemsize: int, ranks: int, budget: int, steps: int = DEVICE_FRAGMENTS) -> int:
    """Return the elements of a frame of exchanges whose segments all have ``numel`` elements. A step has one frame for each peer.
    ``steps``: those that :func:`.cost_model.exchange_steps` wants."""
    return device_cut(numel, 2 * ranks * itemsize, budget, count=steps)  # sent and received


#: What a slot has more than the forecast, and good forecasts in a row before one is used (seed: DeepSpeed-MoE, see docs/benchmarks.md).
FORECAST_MARGIN, GOOD_FORECASTS = 1 / 32, 3


class Forecast:
    """Forecasts the sizes of an exchange's frames from those of earlier exchanges. Equal on all ranks, as these sizes are.

    A frame takes the part of its words that it took in the last exchange of its site; or that of the dispatch of its layer of experts,
    whose empty rows it has too, times a factor of the site. The last layer has its gradients first."""

    def __init__(self) -> None:
        #: The part of each way to forecast, and good forecasts in a row.
        self._known = defaultdict[Hashable, tuple[float, int]](lambda: (0.0, 0))
        self._dispatches = deque([1.0], maxlen=4096)  # those of layers without gradients stay

    def slot(self, site: Hashable, nbytes: int) -> int:
        """Return the bytes of slots for frames of ``nbytes`` bytes of words; 0: the last forecasts were not good."""
        for way, scale in enumerate((self._dispatches[-1], 1.0)):
            if self._known[site, way][1] >= GOOD_FORECASTS:
                return int(self._known[site, way][0] * scale * nbytes * (1 + FORECAST_MARGIN))
        return 0

    def note(self, site: Hashable, kind: str, nbytes: int, frame: int) -> None:
        """Note the bytes of the largest frame of ``nbytes`` bytes of words. ``kind``: of the exchange, in a layer of experts."""
        for way, scale in enumerate((self._dispatches[-1], 1.0)):
            part, good = self._known[site, way]
            slot = part * scale * nbytes * (1 + FORECAST_MARGIN)
            fits = frame <= slot <= (1 + 2 * FORECAST_MARGIN) * frame
            self._known[site, way] = frame / (scale * nbytes), fits * (good + 1)
        if kind == "dispatch.bwd" and len(self._dispatches) > 1:
            self._dispatches.pop()
        self._dispatches += [frame / nbytes] * (kind == "dispatch")


def uneven_piece(itemsize: int, ranks: int, budget: int) -> int:
    """Return the elements of a frame of exchanges whose segments differ: a step of one frame for each peer, both ways, fits the budget."""
    return frame_numel(budget // 3, itemsize, 2 * ranks)


def step_bytes(numels: Sequence[int], itemsize: int, piece: int) -> list[int]:
    """Return the bytes of words that a rank moves in a step, for each of the STEP_SIZES. ``numels``: elements of the segments of all
    peers, sent and received. The first step is the largest."""
    return [itemsize * sum(min(numel, piece << size) for numel in numels) for size in range(STEP_SIZES)]


def pieces_of_step(nbytes: Sequence[int], budget: int) -> int:
    """Return how many frames of a pair of ranks go in one step. ``nbytes``: the most bytes of any rank, as :func:`step_bytes` gives."""
    most = min(max(-(-nbytes[-1] // DEVICE_FRAGMENTS), DEVICE_FRAGMENT_BYTES), budget // 3)
    return 1 << max((size for size, moved in enumerate(nbytes) if moved <= most), default=0)


def device_sum_numel(numel: int, itemsize: int, rows: int, budget: int) -> int:
    """Return the elements of a part that are summed with one agreement. ``rows``: parts of ``numel`` elements that a rank holds meanwhile.

    The rows fit three quarters of the ``budget``.
    """
    most = 3 * budget // 4 // rows // itemsize
    return numel if numel <= most else max(1, most // FRAGMENT_UNIT) * FRAGMENT_UNIT


def sum_step(
    numel: int, itemsize: int, nodes: int, local_ranks: int, budget: int, *, adjacent: bool, more: int = 0
) -> tuple[int, int]:
    """Return the elements of a part that are summed with one agreement, and the rows of so many elements that a rank holds meanwhile: its
    node's sum for every node, and what it sends and receives inside its node. ``adjacent``: the parts of a node lie in one tensor, and
    are sent from there where whole parts go at once. ``more``: further rows."""
    inside = local_ranks if local_ranks > 1 else 0
    if adjacent and device_sum_numel(numel, itemsize, nodes + inside + more, budget) == numel:
        return numel, nodes + inside + more
    rows = nodes + 2 * inside + more
    return device_sum_numel(numel, itemsize, rows, budget), rows


def device_sum_fragment(numel: int, itemsize: int, nodes: int, budget: int, least: int = 0) -> int:
    """Return the elements of each fragment of a part of ``numel`` elements. A fragment has slots sent and received for every node."""
    return device_cut(numel, itemsize * nodes, budget // 2, least)


# ---- expert traffic in rows ------------------------------------------------------------------------------------------

#: Rows of fewer bytes are not searched (seed: a search costs as much as coding 64 bytes, and a distance takes some of them).
LEAST_ROW_BYTES = 64
#: Most bytes that a search takes for each row of a segment.
SEARCH_BYTES = 20
#: Messages that are not searched after a search without a find (seed: one useless search in so many messages costs little).
UNSEARCHED = 15
#: Searches without a find in a row before that, for messages of a known kind, and for messages that may be of all kinds of a layer in turn.
SEARCH_MISSES, MISSES_OF_UNKNOWN = 1, 4

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

_ROW_BLOCKS = (128, 256, 512)
#: Least block that a sender of expert traffic may choose.
LEAST_BLOCK = _ROW_BLOCKS[0]


def may_have_rows(config: ZipcclConfig, op: str, role: str, codec: str) -> bool:
    """Return whether row frames may carry an operation's tensors, where all ranks have their kernels; equal on all ranks."""
    return role == "ep" and OPS[op].traffic == "all_to_all" and config.rows != "off" and codec != "raw"


def row_block(configured: int, width: int, kind: str) -> int:
    """Return the block size of a message in rows of ``width`` elements.

    A block of one row follows the scales of gradients, which differ from row to row. Rows of the forward pass have much the same scale:
    there the larger block has less overhead.
    """
    backward = not kind or kind.endswith(".bwd")
    return min(configured, width) if width in _ROW_BLOCKS and backward else configured


def search_fits(rows: Sequence[int], staging: int) -> bool:
    """Return whether the searches of segments of ``rows`` rows fit the memory for frames, ``staging`` bytes."""
    return SEARCH_BYTES * sum(rows) <= staging
