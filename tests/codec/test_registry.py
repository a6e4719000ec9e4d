"""The table of codecs: entries agree with the format and with each other, and a new entry is all that a new codec needs."""

from __future__ import annotations

import dataclasses
from itertools import combinations

import pytest
import torch

from ds_zipccl import codecs, frame
from ds_zipccl.codecs import registry
from ds_zipccl.frame import CodecId
from ds_zipccl.lossy import LOSSY_CODECS

SPECS = list(registry.CODEC_SPECS.values())


def test_entries_have_the_names_and_ids_of_the_format() -> None:
    assert list(registry.CODEC_SPECS) == [spec.name for spec in SPECS] == ["raw", "cascade", "wide", "delta"]
    assert set(frame.CodecId) == set(registry.DECODERS) == set(frame.BLOCK_LOG2)
    assert all(spec.frame_id == key for key, spec in registry.DECODERS.items())
    named = {CodecId.RAW, CodecId.EXPONENT, CodecId.DELTA}
    assert {spec.frame_id for spec in SPECS} == named
    for spec in (registry.DECODERS[key] for key in set(frame.CodecId) - named):
        assert set(spec.dtypes) <= set(frame.DTYPE_IDS) and spec.name not in registry.CODEC_SPECS
    for spec in SPECS:
        blocks = {1 << log2 if log2 else 0 for log2 in frame.BLOCK_LOG2[spec.frame_id]}
        assert {spec.block(block) for block in (blocks if blocks != {0} else {128, 1024})} == blocks
        assert set(spec.dtypes) <= set(frame.DTYPE_IDS)


def test_codecs_of_one_frame_id_decode_alike() -> None:
    """A frame names its payload format, not the codec that wrote it."""
    shared = ("dtypes", "needs_base", "block", "payload_bound", "payload_floor", "decode", "decode_add")
    pairs = [(a, b) for a, b in combinations(SPECS, 2) if a.frame_id == b.frame_id]
    assert {(a.name, b.name) for a, b in pairs} == {("cascade", "wide")}
    for a, b in pairs:
        assert all(getattr(a, name) == getattr(b, name) for name in shared)


def test_derived_lists() -> None:
    assert codecs.CODECS == ("raw", "cascade", "wide") and codecs.BASE_CODECS == ("delta",)
    assert registry.CODEC_SPECS["cascade"].dtypes == codecs.CODED_DTYPES
    assert registry.codec_spec("delta").needs_base
    with pytest.raises(ValueError, match='it was "window"; write "wide"'):
        registry.codec_spec("window")
    with pytest.raises(ValueError, match="no codec 'lz4'; known codecs: raw, cascade, wide, delta"):
        codecs.compress_segments([], [], "lz4")


def test_lossy_codecs_have_an_entry_by_their_value() -> None:
    for kind, (_, encode, project) in registry.LOSSY_SPECS.items():
        codec = kind()
        spec = registry.lossy_spec(codec, torch.bfloat16)
        assert spec.codec == codec and spec is registry.lossy_spec(kind(), torch.float32)
        assert spec.encode.func is encode and spec.project.func is project and spec.project.args == (codec,)
        assert codec.name in LOSSY_CODECS and codec.name not in registry.CODEC_SPECS
        with pytest.raises(ValueError, match=r"got torch.uint8; send it by a lossless codec"):
            registry.lossy_spec(codec, torch.uint8)


def test_an_entry_is_all_that_a_codec_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lossy codec over the exponent payload: every call of the package takes it by its name."""

    def halve_precision(segments, bases, block, outs, route):
        cut = [(words.view(torch.int16) & ~0xF).view(torch.bfloat16) for words in segments]
        return registry.CODEC_SPECS["cascade"].encode(cut, bases, block, outs, route)

    cascade = registry.CODEC_SPECS["cascade"]
    lossy = dataclasses.replace(cascade, name="cut4", dtypes=(torch.bfloat16,), encode=halve_precision, former_names=())
    monkeypatch.setitem(registry.CODEC_SPECS, "cut4", lossy)
    tensor = torch.randn(3000, generator=torch.Generator().manual_seed(1)).bfloat16()
    bound = codecs.compress_bound(3000, torch.bfloat16, "cut4")
    frame_of = codecs.compress(tensor, "cut4")
    [segment] = codecs.compress_segments([tensor], [torch.empty(bound, dtype=torch.uint8)], "cut4")
    wanted = (tensor.view(torch.int16) & ~0xF).view(torch.bfloat16)
    assert torch.equal(codecs.decompress(frame_of), wanted) and torch.equal(codecs.decompress(segment), wanted)
    assert torch.equal(codecs.decompress(codecs.compress(tensor.half(), "cut4")), tensor.half()), "raw: not its dtype"
