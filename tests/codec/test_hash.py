"""The hash of a region: the document's values on every route, and a change for every change of the bytes."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import corpus
import numpy as np
import pytest
import torch
import variants
from moves import colliding

import ds_zipccl
from ds_zipccl.codecs import region_hash

FORMAT = (Path(ds_zipccl.__file__).parent / "FORMAT.md").read_text()
MASK = (1 << 64) - 1


def by_the_document(data: bytes, key: tuple[int, int] = (0, 0)) -> bytes:
    """FORMAT.md section 5 in plain Python."""

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        return z ^ z >> 31

    def half(which: int) -> int:
        total = len(data) + mix((128 * which + 1) * step + key[which] & MASK)
        words = np.frombuffer(data + bytes(-len(data) % 1024), "<u8").tolist()
        for b in range(len(words) // 128):
            here = (b + 1) * step
            for i, x in enumerate(words[128 * b : 128 * b + 128]):
                k = mix((128 * which + i + 1) * step + key[which] & MASK)
                here += ((x + k) % (1 << 32)) * (((x >> 32) + (k >> 32)) % (1 << 32))
            total += mix(here & MASK)
        return mix(total & MASK)

    step = 0x9E3779B97F4A7C15
    return b"".join(half(which).to_bytes(8, "little") for which in range(2))


def of(data: np.ndarray, route: str = "auto", key: bytes = bytes(16)) -> bytes:
    return region_hash(torch.from_numpy(data), key=key, route=route)


def test_values_of_the_document(route: str) -> None:
    wanted = re.findall(r"`([0-9a-f]{32})`", FORMAT)
    assert [of(np.arange(n, dtype=np.uint8), route).hex() for n in (0, 100)] == wanted


def test_routes_agree_with_the_definition() -> None:
    noise = corpus.hashes(38_000, 3).view(np.uint8)
    for size in (*range(70), 127, 1023, 1024, 1025, 65_536, 65_543, 300_001):
        for start in (0, 1, 5) if size < 2000 else (1,):
            data = noise[start : start + size]
            for key in ((0, 0), (3, 1 << 63))[: 1 + (size < 2000)]:
                wanted = by_the_document(data.tobytes(), key)
                for variant in variants.usable():
                    with variant.in_use() as route:
                        assert of(data, route, struct.pack("<QQ", *key)) == wanted, f"{variant}, {size} bytes, {key}"


def test_threads_change_nothing() -> None:
    data = corpus.hashes(700_001, 8).view(np.uint8)[:-3]
    one = of(data)
    with corpus.threads(3):
        assert of(data) == one


@pytest.mark.parametrize("texture", ["bell", "zeros", "constant"])
def test_any_change_changes_both_halves(texture: str) -> None:
    words = corpus.TEXTURES[texture](1500, corpus.BF16, 4)
    data = words.view(np.uint8)
    hashes = [of(data)]
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        hashes.append(of(data))
        data[bit // 8] ^= 1 << bit % 8
    hashes += [of(data[:-size]) for size in range(1, 30)]
    hashes += [of(np.concatenate((data, np.zeros(size, np.uint8)))) for size in range(1, 30)]
    if texture == "bell":
        for at in range(1, 1500, 7):
            for other in (at - 1, (at * 31) % 1500):
                if words[at] != words[other]:
                    words[[at, other]] = words[[other, at]]
                    hashes.append(of(data))
                    words[[at, other]] = words[[other, at]]
    for half in (slice(8), slice(8, 16)):
        assert len({value[half] for value in hashes}) == len(hashes)


def test_what_is_hashed() -> None:
    tensor = torch.arange(12, dtype=torch.int16).view(3, 4)
    assert region_hash(tensor) == region_hash(tensor.view(-1)) == region_hash(tensor.view(torch.bfloat16))
    with pytest.raises(TypeError, match="contiguous tensor, got strides"):
        region_hash(tensor.t())


def test_made_collisions_end_with_a_key(route: str) -> None:
    """Who knows the key writes two regions of one hash, without any search. Who does not know the key has a chance of 2^-64."""
    first, second = colliding()
    assert first.tolist() != second.tolist() and region_hash(first, route=route) == region_hash(second, route=route)
    for _ in range(50):
        key = os.urandom(16)
        halves = [region_hash(one, key=key, route=route) for one in (first, second)]
        assert halves[0][:8] != halves[1][:8] and halves[0][8:] != halves[1][8:]


def test_keys_are_of_sixteen_bytes() -> None:
    with pytest.raises(ValueError, match="a key has 16 bytes, got 4"):
        region_hash(torch.zeros(3), key=b"four")
