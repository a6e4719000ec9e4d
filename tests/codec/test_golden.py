"""Frames of earlier versions: every route still writes exactly these bytes and reads them.

tests/golden/<name>.bin is the frame of CASES[name]; <name>_crc32.bin is the same frame with the checksum that encoders no longer write, for
decoders alone; former_version_1.bin is a frame that ds_zipccl 0.1 wrote, which is refused; rows_*, rounded_*, scaled_*, lowrank_* and zfp_*
are those of test_golden_rows_and_lossy.py, zfp_reference.bin is that of zfp_reference.py. After a deliberate change of the format, written
down in FORMAT.md: ``pytest tests/codec/test_golden.py tests/codec/test_golden_rows_and_lossy.py --update-golden``.
"""

from __future__ import annotations

from pathlib import Path

import corpus
import from_format
import pytest
import test_golden_rows_and_lossy
import torch
from corpus import assert_same_bits
from places import TESTS
from test_gap_list import forms

import ds_zipccl
from ds_zipccl import codecs
from ds_zipccl import frame as framing

FOLDER = TESTS / "golden"
#: Block mode -> seed, and textures whose blocks take that mode.
MODES = {
    "fill": (4, ("zeros", "negative_zeros", "constant")),
    "raw": (3, ("random",)),
    "cascade": (7, ("bell", "outliers", "trimmed")),
    "wide": (6, ("bell", "spread", "trimmed")),
    "sparse": (6, ("sparse", "sparse_signed", "mixed_zeros", "trimmed_sparse")),
    "mixed": (5, tuple(corpus.TEXTURES)),
}


def _coded(name: str, mode: str, numel: int, block: int) -> tuple[torch.Tensor, dict[str, object]]:
    kind = corpus.FLOATS[name]
    words = corpus.mixed(numel, kind, block, *MODES[mode])
    arguments = {"block": block, "shaped": False, "checksum": False}
    return corpus.tensor(words, kind), arguments | ({"codec": "wide"} if mode == "wide" else {})


def _delta(name: str, numel: int, block: int) -> tuple[torch.Tensor, dict[str, object]]:
    kind = corpus.FLOATS[name]
    words = corpus.mixed(numel, kind, block, seed=7, names=("bell", "sparse", "specials", "spread"))
    base = corpus.tensor(corpus.before(words, kind, block, 7), kind)
    return corpus.tensor(words, kind), {
        "codec": "delta",
        "base": base,
        "block": block,
        "shaped": False,
        "checksum": False,
    }


def _few_changes(name: str, numel: int, share: int, block: int, run: int = 3) -> tuple[torch.Tensor, dict[str, object]]:
    """One word of ``share`` changes: by little, by its sign, or to anything. The bytes of a dtype that is no float are those of E5M2."""
    kind = corpus.SUMMED.get(name, corpus.E5M2)
    words = corpus.mixed(numel, kind, block, seed=8, names=("bell", "sparse", "specials"))
    places = corpus.some_places(numel, numel // share, 8, run)
    base = corpus.moved(words, kind, places, corpus.changes(len(places), 8, 12))
    base[places[::9]] ^= kind.word(1 << (8 * kind.word(0).nbytes - 1))
    tensor, before = corpus.tensor(words, kind), corpus.tensor(base, kind)
    if name in OTHER_DTYPES:
        tensor, before = tensor.view(OTHER_DTYPES[name]), before.view(OTHER_DTYPES[name])
    return tensor, {"codec": "delta", "base": before, "block": block, "shaped": False, "checksum": False}


def _unchanged(name: str) -> tuple[torch.Tensor, dict[str, object]]:
    """Three chunks, of which the one in the middle changes in one word."""
    tensor, arguments = _few_changes(name, 4096 + 200, 5000, 128)
    base = tensor.clone()
    base.view(torch.uint8)[tensor.nbytes // 2] ^= 1
    return tensor, {**arguments, "base": base, "shaped": True, "checksum": True}


#: dtypes whose differences are those of their bytes.
OTHER_DTYPES = {"int8": torch.int8, "int64": torch.int64}
DELTAS = (*corpus.SUMMED, *OTHER_DTYPES)
CASES = (
    {
        f"{name}_{mode}_{block}": _coded(name, mode, numel, block)
        for name in corpus.FLOATS
        for mode, numel, block in (
            ("fill", 700, 128),
            ("raw", 300, 128),
            ("cascade", 600, 256),
            ("wide", 600, 256),
            ("sparse", 1100, 512),
            ("mixed", 2500, 1024),
            ("mixed", 2048 + 130, 128),
        )
    }
    | {
        f"{name}_delta_{block}": _delta(name, numel, block)
        for name in corpus.SUMMED
        for numel, block in ((1500, 128), (2500, 512))
    }
    | {f"{name}_list_128": _few_changes(name, 2048 + 600, 20, 128) for name in DELTAS}
    | {f"{name}_list_1024": _few_changes(name, 2400, 9, 1024, run=1) for name in DELTAS}
    | {f"{name}_bytes_256": _few_changes(name, 1600, 3, 256) for name in OTHER_DTYPES}
    | {f"{name}_same_128": _unchanged(name) for name in DELTAS}
    | {
        "bf16_shaped": (_coded("bf16", "mixed", 1200, 512)[0].view(30, 1, 40), {}),
        "fp32_scalar": (torch.tensor(1.5), {}),
        "fp16_empty": (torch.empty(3, 0, dtype=torch.float16), {}),
        "int64_raw": (torch.arange(-9, 9).view(3, 6), {}),
        "bool_raw": (torch.arange(40) % 3 == 0, {"checksum": False}),
        "bf16_raw_codec": (_coded("bf16", "mixed", 50, 128)[0], {"codec": "raw"}),
    }
)
#: Cases without a base whose frame has a checksum.
CRC32_CASES = [
    name for name, (_, arguments) in CASES.items() if arguments.get("checksum", True) and "base" not in arguments
]
FORMER = "former_version_1"
KEPT, BOOLS = torch.arange(-40, 60, dtype=torch.int64), torch.arange(77) % 5 < 2
KEPT_AND_BITS = ("known_int64", "bits_bool")


def _path(name: str) -> Path:
    return FOLDER / f"{name}.bin"


@pytest.fixture(scope="module")
def update(request: pytest.FixtureRequest) -> set[str] | None:
    """Names already rewritten, so that the next routes are compared with the first; None unless rewriting is asked for."""
    return set() if request.config.getoption("--update-golden") else None


@pytest.mark.parametrize("name", CASES)
def test_golden_frame(name: str, route: str, update: set[str] | None) -> None:
    tensor, arguments = CASES[name]
    frame = ds_zipccl.compress(tensor, route=route, **arguments)
    if update is not None and name not in update:
        _path(name).write_bytes(frame.numpy().tobytes())
        if name in CRC32_CASES:
            oldest = from_format.with_checksum(frame.numpy().tobytes(), int(framing.ChecksumId.CRC32))
            _path(f"{name}_crc32").write_bytes(oldest)
        update.add(name)
    golden = torch.frombuffer(bytearray(_path(name).read_bytes()), dtype=torch.uint8)
    assert_same_bits(ds_zipccl.decompress(golden, base=arguments.get("base"), route=route), tensor)
    assert torch.equal(frame, golden), f"{name}: {frame.numel()} bytes now, {golden.numel()} in tests/golden"


@pytest.mark.parametrize("name", CRC32_CASES)
def test_golden_frame_with_the_old_checksum(name: str, route: str) -> None:
    """Decoders read it, and it differs from the new frame in the checksum alone."""
    tensor, _ = CASES[name]
    old, new = (_path(each).read_bytes() for each in (f"{name}_crc32", name))
    golden = torch.frombuffer(bytearray(old), dtype=torch.uint8)
    assert framing.parse(golden).checksum is framing.ChecksumId.CRC32
    assert_same_bits(ds_zipccl.decompress(golden, route=route), tensor)
    assert from_format.with_checksum(old, int(framing.CHECKSUM)) == new


def test_a_frame_of_version_1_is_refused(route: str) -> None:
    """A delta frame of ds_zipccl 0.1, as its encoder wrote it; its header would mean the same today."""
    old = torch.frombuffer(bytearray(_path(FORMER).read_bytes()), dtype=torch.uint8)
    tensor, arguments = CASES["bf16_delta_128"]
    with pytest.raises(ds_zipccl.FrameError, match=r"VERSION: format version 1, which ds_zipccl 0\.1 wrote"):
        ds_zipccl.decompress(old, base=arguments["base"], route=route)
    old[4] = framing.VERSION
    assert (framing.parse(old).dtype, framing.parse(old).numel) == (tensor.dtype, tensor.numel())


def test_golden_known_and_bits_frames(route: str, update: set[str] | None) -> None:
    known = codecs.known_frame(
        KEPT.dtype, 100, ds_zipccl.region_hash(KEPT, route=route), torch.zeros(48, dtype=torch.uint8)
    )
    bits = codecs.bits_frame(BOOLS, torch.zeros(99, dtype=torch.uint8))
    for name, frame, wanted in zip(KEPT_AND_BITS, (known, bits), (KEPT, BOOLS), strict=True):
        assert frame is not None
        if update is not None and name not in update:
            _path(name).write_bytes(frame.numpy().tobytes())
            update.add(name)
        golden = torch.frombuffer(bytearray(_path(name).read_bytes()), dtype=torch.uint8)
        assert torch.equal(frame, golden) and torch.equal(codecs.decompress(golden, base=KEPT, route=route), wanted)


def test_the_folder_holds_these_and_no_more() -> None:
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    names = {
        *CASES,
        *(f"{name}_crc32" for name in CRC32_CASES),
        FORMER,
        *test_golden_rows_and_lossy.CASES,
        *KEPT_AND_BITS,
        "zfp_reference",
    }
    assert set(files) == {_path(name).name for name in names}
    assert sum(files.values()) < 180_000


@pytest.mark.parametrize("name", CASES)
def test_golden_frames_follow_the_document(name: str) -> None:
    tensor, arguments = CASES[name]
    frame = _path(name).read_bytes()
    if frame[5] != framing.CodecId.RAW:
        base = arguments.get("base")
        word = f"u{tensor.dtype.itemsize if tensor.dtype in codecs.CODED_DTYPES else 1}"
        before = base if base is None else base.view(torch.uint8).numpy().view(word).tolist()
        dtype, shape, words = from_format.decode(frame, before)
        assert framing.DTYPES[dtype] == tensor.dtype
        assert shape in (None, tuple(tensor.shape))
        assert words == tensor.reshape(-1).view(torch.uint8).numpy().view(word).tolist()
    else:
        assert frame.endswith(tensor.view(-1).view(torch.uint8).numpy().tobytes())


def test_golden_frames_show_every_mode() -> None:
    for name in corpus.FLOATS:
        modes = set()
        for case in CASES:
            frame = torch.frombuffer(bytearray(_path(case).read_bytes()), dtype=torch.uint8)
            header = framing.parse(frame)
            blocks = min(corpus.CHUNK_BLOCKS, -(-header.numel // header.block)) if header.block else 0
            if not case.startswith(name) or not blocks or "_list_" in case or "_same_" in case:
                continue
            chunks = -(-header.numel // (corpus.CHUNK_BLOCKS * header.block))
            table = header.payload_at + framing.pad16(4 * chunks)
            modes |= {int(high) >> 5 for high in frame[table + blocks + 1 : table + 3 * blocks : 2]}
        assert modes == {0, 1, 2, 3, 4} | ({5} if name in corpus.SUMMED else set()), name


def test_golden_frames_show_every_form() -> None:
    shown = {}
    for case, (_, arguments) in CASES.items():
        if "base" in arguments:
            frame = torch.frombuffer(bytearray(_path(case).read_bytes()), dtype=torch.uint8)
            kind, what = case.split("_")[:2]
            shown.setdefault(kind, set()).update(forms(frame))
            assert set(forms(frame)) == {"list": {"LIST"}, "same": {"SAME", "LIST"}}.get(what, {"TABLE"}), case
    assert shown == {name: {"SAME", "TABLE", "LIST"} for name in DELTAS}
