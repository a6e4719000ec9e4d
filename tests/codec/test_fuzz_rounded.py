"""Damaged rounded frames: each route refuses them with the same code or gives the same words, and writes nothing outside them."""

from __future__ import annotations

import random
from collections import Counter

import corpus
import mutations
import test_fuzz
import torch
import variants

from ds_zipccl import codecs
from ds_zipccl.frame import CodecId, FrameErrorCode
from ds_zipccl.lossy import Round

COUNT = 4_000


def _bases() -> list[mutations.Base]:
    """Rounded frames without a checksum, of every block size and mode."""
    found = []
    for seed, (name, block) in enumerate([(name, block) for name in ("bf16", "fp16") for block in corpus.BLOCKS] * 3):
        kind, numel = corpus.FLOATS[name], (5 + block, 700, 17 * 128 + 3)[seed % 3]
        tensor = corpus.tensor(corpus.mixed(numel, kind, block, seed), kind)
        frame = codecs.compress(tensor, Round(1 + seed % 6), lossy=True, block=block, shaped=False, checksum=False)
        if frame[5] == CodecId.ROUNDED:
            found.append(mutations.Base(frame.numpy().tobytes(), tensor, True, 32, block))
    assert len(found) > 15
    return found


def test_damaged_rounded_frames() -> None:
    rng, bases = random.Random(4), _bases()
    outs = [test_fuzz.Guarded(base) for base in bases]
    kinds, codes = Counter(), Counter()
    usable = variants.usable(variants.COMPILED)
    assert len(usable) > 1
    for turn in range(COUNT):
        at = rng.randrange(len(bases))
        kind, frame = mutations.damaged(rng, bases[at])
        tensor, out = test_fuzz.as_tensor(frame), outs[at].out if rng.random() < 0.5 else None
        answers = []
        for variant in (
            usable if turn % test_fuzz.RARELY == 0 else [each for each in usable if each.route != "emulated"]
        ):
            with variant.in_use() as route:
                code, result = test_fuzz.outcome(tensor, out, route, bases[at].against)
            if code is None:
                assert kind.may_pass, f"{kind.name} was accepted by {variant}: {frame.hex()}"
                answers.append((None, result.dtype, result.shape, result.view(-1).view(torch.uint8).numpy().tobytes()))
            else:
                wanted = kind.codes if out is None else kind.codes | {FrameErrorCode.MISMATCH}
                assert code in wanted, f"{code!r} for {kind.name} by {variant}: {frame.hex()}"
                answers.append((code,))
            assert out is None or outs[at].intact(), f"{variant} wrote outside, {kind.name}: {frame.hex()}"
        assert answers.count(answers[0]) == len(answers), f"{kind.name}: {frame.hex()}"
        kinds[kind.name] += 1
        codes[code] += 1
    lists = {kind.name for kind in mutations.KINDS if kind.name.endswith("a_list")}
    assert {"trim", "top", "unknown_mode", "chunk_offset", "codec"} <= set(kinds) <= {k.name for k in mutations.KINDS}
    assert not lists & set(kinds) and {None, FrameErrorCode.INDEX, FrameErrorCode.BLOCK} <= set(codes), (kinds, codes)
