"""An output that shares memory with what is read is refused before anything is written; memory that only touches is fine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from corpus import assert_same_bits

import ds_zipccl

NUMEL = 5000
SIZE = 2 * NUMEL
BOUND = ds_zipccl.compress_bound(NUMEL, torch.bfloat16)
#: First bytes of 2 * SIZE + 2 * BOUND bytes at which a tensor lies.
AT = SIZE + BOUND


def values() -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)).bfloat16()


def arena(at: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory, and a tensor of NUMEL words ``at`` bytes from its start, which holds values()."""
    memory = torch.zeros(2 * SIZE + 2 * BOUND, dtype=torch.uint8)
    tensor = memory[at : at + SIZE].view(torch.bfloat16)
    return memory, tensor.copy_(values())


def refused(call: Callable[[], object], memory: torch.Tensor) -> None:
    before = memory.clone()
    with pytest.raises(ValueError, match=r"bytes of an output are also in an input .* pass another out") as caught:
        call()
    assert not isinstance(caught.value, ds_zipccl.FrameError)
    assert torch.equal(memory, before), "something was written"


@pytest.mark.parametrize("start", [AT - BOUND + 1, AT - 2, AT, AT + 2, AT + SIZE - 1])
def test_compress_over_its_tensor(start: int) -> None:
    memory, tensor = arena(AT)
    refused(lambda: ds_zipccl.compress(tensor, out=memory[start : start + BOUND], shaped=False), memory)


@pytest.mark.parametrize("start", [AT - BOUND, AT + SIZE])
def test_compress_beside_its_tensor(start: int) -> None:
    """Bytes of the buffer after the largest frame are not written, so they may be the tensor's."""
    memory, tensor = arena(AT)
    frame = ds_zipccl.compress(tensor, out=memory[start:], shaped=False)
    assert_same_bits(ds_zipccl.decompress(frame), values())
    assert_same_bits(tensor, values())


def test_compress_over_its_base() -> None:
    memory, base = arena(AT)
    bound = ds_zipccl.compress_bound(NUMEL, torch.bfloat16, "delta")
    refused(lambda: ds_zipccl.compress(values(), "delta", base=base, out=memory[AT : AT + bound], shaped=False), memory)


def test_a_copied_tensor_does_not_count() -> None:
    """Elements that do not lie one after the other are copied first."""
    memory, tensor = arena(AT)
    wanted = tensor[::2].clone()
    assert_same_bits(ds_zipccl.decompress(ds_zipccl.compress(tensor[::2], out=memory[AT - 8 :])), wanted)


def test_segments() -> None:
    memory, tensor = arena(0)
    parts = tensor.split(NUMEL // 5)
    bound = ds_zipccl.compress_bound(NUMEL // 5, torch.bfloat16)
    outs = [torch.empty(bound, dtype=torch.uint8) for _ in parts]
    wanted = [frame.clone() for frame in ds_zipccl.compress_segments(parts, outs)]
    beside = [memory[SIZE + i * bound :] for i in range(5)]
    for frame, expected in zip(ds_zipccl.compress_segments(parts, beside), wanted, strict=True):
        assert torch.equal(frame, expected)
    for wrong in (memory[SIZE - 1 :], memory[: bound + 1], outs[0]):
        own = [*outs[:3], wrong, outs[4]]
        refused(lambda own=own: ds_zipccl.compress_segments(parts, own), memory)
    swapped = [*outs[:4], memory[SIZE // 5 :]]  # apart from its own segment, over another one
    refused(lambda: ds_zipccl.compress_segments([parts[4], *parts[:4]], swapped), memory)
    repeated = [parts[0], parts[0], parts[0].new_empty(0)]
    assert len(ds_zipccl.compress_segments(repeated, outs[:3])) == 3, "inputs may share memory, and be empty"


@pytest.mark.parametrize("codec", ["cascade", "raw"])
def test_decompress_over_its_frame(codec: str) -> None:
    frame = ds_zipccl.compress(values(), codec, shaped=False)
    memory = torch.zeros(2 * AT, dtype=torch.uint8)
    memory[AT : AT + frame.numel()] = frame
    frame = memory[AT : AT + frame.numel()]
    for start in (AT - SIZE + 2, AT, AT + 64, AT + frame.numel() // 2 * 2 - 2):
        out = memory[start : start + SIZE].view(torch.bfloat16)
        refused(lambda out=out: ds_zipccl.decompress(frame, out), memory)
        refused(lambda out=out: ds_zipccl.decompress_add(frame, out), memory)
    for start in (AT - SIZE, AT + frame.numel() // 2 * 2 + 2):
        out = memory[start : start + SIZE].view(torch.bfloat16)
        assert_same_bits(ds_zipccl.decompress(memory[AT:], out), values())
        assert_same_bits(ds_zipccl.decompress_add(memory[AT:], out), values() + values())


def test_nothing_overlaps_nothing() -> None:
    frame = ds_zipccl.compress(torch.empty(0))
    out = frame[8:8].view(torch.float32)
    assert ds_zipccl.decompress(frame, out) is out
