"""The encoder of FORMAT.md 2.9, written from the document alone and slow on purpose; its decoder is that of from_format.py."""

from __future__ import annotations

import from_format


def round_word(w: int, k: int, e_bits: int, m_bits: int) -> int:
    """``w`` rounded to k mantissa bits."""
    field = ((1 << e_bits) - 1) << m_bits
    if w & field == field:
        return w
    c = m_bits - k
    t = (w + 2 ** (c - 1) - 1 + ((w >> c) & 1)) >> c << c
    return t - 2**c if t & field == field else t


def encode(words: list[int], dtype: int, k: int, block: int, shape: tuple[int, ...] | None, checksum: bool) -> bytes:
    """The frame of these words, rounded to k bits: of the payloads of codecs 0, 1 and 3 the smallest, of equals the first."""
    rounded = [round_word(w, k, *from_format.FIELDS[dtype]) for w in words]
    size = sum(from_format.FIELDS[dtype]) // 8 + 1
    payloads = {
        (0, 1): b"".join(w.to_bytes(size, "little") for w in rounded),
        (1, block): from_format.encode_payload(rounded, dtype, block, "cascade"),
    }
    if dtype != 3:
        payloads[3, block] = from_format.encode_payload(rounded, dtype, block, "cascade", rounded=True)
    counted = {kind: len(payload) for kind, payload in payloads.items()}
    if dtype != 3:
        counted[1, block] = len(from_format.encode_payload(rounded, dtype, block, "cascade", raw_as_rounded=True))
    codec, unit = min(payloads, key=lambda kind: (counted[kind], kind[0]))
    return from_format.framed(payloads[codec, unit], codec, dtype, unit, shape, checksum, len(words))
