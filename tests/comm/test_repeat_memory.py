"""What a group keeps of the forward pass, without ranks: segments are told apart by their words, not by bytes alone."""

from __future__ import annotations

import pytest
import torch

from ds_zipccl.comm.host.repeats.memory import Places, RepeatMemory, Words

FORWARD = Words(torch.float32, "cpu")
NBYTES = 1 << 16
#: The hash of zeros: one for all dtypes.
DIGEST = b"zeros" + bytes(11)


def kept() -> RepeatMemory:
    """A memory with one segment of zeros, sent and received."""
    memory = RepeatMemory()
    places = Places({1: [NBYTES // 4]}, {1: [NBYTES // 4]})
    found = memory.open([places], FORWARD, 1 << 20, False, "all_reduce", 1.0)
    for slots in (found.leaving, found.coming):
        segment = found.begin(slots, 0, 1).kept
        assert segment is not None
        segment.add(DIGEST, NBYTES, torch.zeros(48, dtype=torch.uint8) if slots is found.coming else None)
    found.end(drop=False)
    return memory


@pytest.mark.parametrize(
    "words", [FORWARD, Words(torch.bfloat16, "cpu"), Words(torch.int32, "cpu"), Words(torch.float32, "cuda")], ids=str
)
def test_equal_bytes_of_other_words_are_no_repeat(words: Words) -> None:
    memory = kept()
    places = Places(*({1: [NBYTES // words.dtype.itemsize]} for _ in range(2)))
    again = memory.open([places], words, 1 << 20, True, "all_reduce", 1.0)
    same = words == FORWARD
    assert again.like(1, NBYTES) is same
    assert again.repeats(1, NBYTES, [DIGEST]) is same
    assert (again.kept(1, NBYTES, [DIGEST]) is not None) is same
    again.end(drop=True)
    assert again.kept(1, NBYTES, [DIGEST]) is None, "an operation that has ended holds no frames"
    assert memory.tally.nbytes == 48
