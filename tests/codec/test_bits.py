"""Bits frames hold bools."""

from __future__ import annotations

import corpus
import from_format
import numpy as np
import pytest
import torch
from test_frame import code

import ds_zipccl
from ds_zipccl import codecs
from ds_zipccl.frame import FrameErrorCode


def test_bools_travel_as_bits() -> None:
    for numel in (0, 1, 7, 8, 9, 1000, 4096):
        words = torch.from_numpy(corpus.hashes(numel, 4) % np.uint64(3) == 0)
        buffer = torch.full((codecs.known.bits_frame_bytes(numel) + 8,), 0xA5, dtype=torch.uint8)
        frame = codecs.bits_frame(words, buffer)
        assert frame is not None and frame.numel() == 32 + -(-numel // 8) == codecs.known.bits_frame_bytes(numel)
        assert (buffer[frame.numel() :] == 0xA5).all()
        assert frame.numpy().tobytes()[32:] == from_format._plane(words.int().tolist())
        assert torch.equal(codecs.decompress(frame), words)
        out = torch.ones(numel, dtype=torch.bool)
        assert torch.equal(codecs.decompress(frame, out), words)
        for change in (-1, 1):
            changed = torch.cat([frame, torch.zeros(1, dtype=torch.uint8)])[: frame.numel() + change]
            changed[24:26] = torch.tensor([len(changed) % 256, len(changed) // 256], dtype=torch.uint8)
            assert code(changed) in (FrameErrorCode.SIZE, FrameErrorCode.TRUNCATED)


def test_a_bool_of_another_byte_is_no_bit() -> None:
    words = torch.tensor([0, 1, 2, 1], dtype=torch.uint8).view(torch.bool)
    buffer = torch.zeros(40, dtype=torch.uint8)
    assert codecs.bits_frame(words, buffer) is None and not buffer.any()
    frame = codecs.bits_frame(torch.ones(4, dtype=torch.bool), buffer)
    assert frame is not None
    frame[6] = 6
    with pytest.raises(ds_zipccl.FrameError, match=r"codec BITS does not hold torch\.uint8"):
        codecs.decompress(frame)
