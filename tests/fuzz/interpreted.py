"""Runs the numba route as plain Python (NUMBA_DISABLE_JIT=1), where numpy checks every index: encodes short words of every texture,
then decodes damaged frames. Prints how many were refused and how many were other valid frames.

``NUMBA_DISABLE_JIT=1 python tests/fuzz/interpreted.py MUTATIONS``, with tests and the repository on PYTHONPATH.
"""

from __future__ import annotations

import random
import sys

import corpus
import mutations
import numba
import torch

from ds_zipccl.codecs import compress, decompress
from ds_zipccl.frame import CodecId, FrameError
from ds_zipccl.kernels import RouteUnavailable, self_test

# numpy's integers do not behave as compiled ones everywhere; and no stamp may say that compiled kernels have passed
self_test._once = lambda facts, make: make(None)
self_test.prove = lambda *given, **named: 0


def encode_all_lengths() -> None:
    """Short blocks of every texture and, for fp32, every number of low bits that are zero."""
    for kind in corpus.FLOATS.values():
        cases = [texture(n, kind, n) for texture in corpus.TEXTURES.values() for n in (1, 2, 4, 5, 9, 24)]
        for trim in range(kind.mantissa):
            shift = kind.word(trim)
            cases += [corpus.bell(n, kind, 3) >> shift << shift | kind.word(1 << trim) for n in range(1, 20)]
        for words in cases:
            tensor = corpus.tensor(words, kind)
            frame = compress(tensor, shaped=False, checksum=False, route="numba")
            corpus.assert_same_bits(decompress(frame, route="numba"), tensor)


def decode_damaged(count: int) -> tuple[int, int]:
    rng = random.Random(4)
    bases = [base for base in mutations.bases(checksum=False, largest=130) if base.base is None]
    refused = accepted = 0
    while refused + accepted < count:
        base = rng.choice(bases)
        _, frame = mutations.damaged(rng, base)
        try:
            decompress(
                torch.frombuffer(frame, dtype=torch.uint8) if frame else torch.empty(0, dtype=torch.uint8),
                base=base.against,
                route="numba",
            )
            accepted += 1
        except FrameError:
            refused += 1
        except RouteUnavailable:
            assert frame[5] == CodecId.DELTA
    return refused, accepted


if __name__ == "__main__":
    assert numba.config.DISABLE_JIT, "compiled code checks no index: set NUMBA_DISABLE_JIT=1"
    torch.set_num_threads(1)
    encode_all_lengths()
    print(*decode_damaged(int(sys.argv[1])))
