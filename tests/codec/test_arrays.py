"""Arrays of numpy and of other libraries in place of tensors: the same frames, and no copy."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ds_zipccl import compress, compress_bound, decompress, decompress_add, region_hash, sync
from ds_zipccl.codecs import arrays
from ds_zipccl.frame import FrameError

ml_dtypes = pytest.importorskip("ml_dtypes")


class Other:
    """An array of a library that is neither torch nor numpy, as CuPy's are, and lacks bfloat16; its memory is a tensor's."""

    def __init__(self, tensor: torch.Tensor, writable: bool = True) -> None:
        self.tensor, self.writable = tensor, writable

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.tensor.__dlpack__(**keywords)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"data": (self.tensor.data_ptr(), not self.writable)}

    @property
    def data(self) -> SimpleNamespace:
        return SimpleNamespace(ptr=self.tensor.data_ptr())

    def __array_namespace__(self) -> type:
        return OtherLibrary


class OtherLibrary:
    @staticmethod
    def from_dlpack(tensor: torch.Tensor) -> Other:
        if tensor.dtype is torch.bfloat16:
            raise BufferError("no such dtype")
        return Other(torch.from_dlpack(tensor))


def cupy_of(tensor: torch.Tensor) -> Any:
    import cupy

    return cupy.from_dlpack(tensor.cuda())


LIBRARIES = {"numpy": torch.Tensor.numpy, "other": Other} | ({"cuda": cupy_of} if torch.cuda.is_available() else {})
of_libraries = pytest.mark.parametrize("library", LIBRARIES)


def values(numel: int = 4000) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(0))


def pointer(array: Any) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def tensor_of(array: Any) -> torch.Tensor:
    return torch.from_dlpack(array).cpu()


@of_libraries
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64])
def test_frames_are_those_of_tensors(library: str, dtype: torch.dtype) -> None:
    make, given = LIBRARIES[library], values().mul(3).to(dtype).view(40, 100)
    array, wanted = make(given), compress(given)
    assert arrays.as_tensor(array).data_ptr() == pointer(array)
    frame = compress(array)
    assert type(frame) is type(array) and torch.equal(tensor_of(frame), wanted)
    found = decompress(frame)
    assert type(found) is type(array) and torch.equal(tensor_of(found), given)
    assert region_hash(array) == region_hash(given)


@of_libraries
def test_results_are_written_in_place(library: str) -> None:
    make, given = LIBRARIES[library], values()
    out = make(torch.zeros(compress_bound(given.numel(), given.dtype, ndim=1), dtype=torch.uint8))
    frame = compress(make(given), out=out)
    assert pointer(frame) == pointer(out) and torch.equal(tensor_of(frame), compress(given))
    for args, keywords in (((), {"out": make(torch.zeros(given.numel()))}), ((make(torch.zeros(given.numel())),), {})):
        room = decompress(frame, *args, **keywords)
        assert room is (args or (keywords["out"],))[0] and torch.equal(tensor_of(room), given)
    sums = make(torch.ones(given.numel()))
    assert decompress_add(frame, sums) is sums and torch.equal(tensor_of(sums), given + 1)
    base = make(given.clone())
    changed = make(given.index_fill(0, torch.tensor(5), 1.0))
    difference = compress(changed, "delta", base=base)
    assert torch.equal(tensor_of(decompress(difference, base=base)), tensor_of(changed))


@of_libraries
def test_bfloat16_is_said_by_dtype(library: str) -> None:
    """Its words are unsigned integers in a library that lacks it."""
    make, given = LIBRARIES[library], values().bfloat16()
    words = make(given.view(torch.uint16))
    frame = compress(words, dtype=torch.bfloat16)
    assert torch.equal(tensor_of(frame), compress(given)), "coded as bfloat16, not as raw integers"
    found = decompress(frame)
    assert tensor_of(found).dtype is torch.uint16 or library == "cuda", "CuPy has bfloat16 from version 14 on"
    assert torch.equal(tensor_of(found).view(torch.bfloat16), given)
    room = make(torch.zeros(given.numel(), dtype=torch.uint16))
    assert decompress(frame, room) is room and torch.equal(tensor_of(room).view(torch.bfloat16), given)
    sums = make(torch.zeros(given.numel(), dtype=torch.uint16))
    assert decompress_add(frame, sums) is sums and torch.equal(tensor_of(sums).view(torch.bfloat16), given)
    difference = compress(words, "delta", base=words, dtype=torch.bfloat16)
    assert torch.equal(tensor_of(difference), compress(given, "delta", base=given))
    with pytest.raises(ValueError, match=r"^dtype=torch.float32 has 4 bytes, the elements of torch.uint16 have 2"):
        compress(words, dtype=torch.float32)
    assert torch.equal(tensor_of(decompress(compress(words))), given.view(torch.uint16)), "integers without dtype"


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_ml_dtypes_of_numpy_are_known_by_name(dtype: Any) -> None:
    array = values().numpy().astype(dtype)
    given = torch.from_numpy(array.view(f"u{array.itemsize}")).view(getattr(torch, np.dtype(dtype).name))
    frame = compress(array)
    assert np.array_equal(frame, compress(given).numpy())
    room = np.zeros_like(array)
    assert decompress(frame, room) is room and room.tobytes() == array.tobytes()


@pytest.mark.parametrize("library", ["numpy", "other"])
def test_what_cannot_be_written_is_refused(library: str) -> None:
    make, given = LIBRARIES[library], values()
    frame, room = compress(make(given)), make(given.clone())
    if library == "numpy":
        room.flags.writeable = False
        frame = np.frombuffer(frame.tobytes(), np.uint8)
        assert np.array_equal(decompress(frame), given.numpy()), "bytes that came over a network are read"
    else:
        room.writable = False
    for call in (lambda: decompress(frame, room), lambda: decompress_add(frame, room)):
        with pytest.raises(
            ValueError, match=r"^(out|sums) is a \w+ that cannot be written; pass an array of numpy or CuPy"
        ):
            call()
    assert torch.equal(tensor_of(make(given)), given)


@of_libraries
def test_errors_are_those_of_tensors(library: str) -> None:
    make, given = LIBRARIES[library], values()
    damaged = compress(given)
    damaged[40] ^= 1
    for wrong in (damaged, damaged[:20]):
        with pytest.raises(FrameError):
            decompress(make(wrong))
    with pytest.raises(TypeError, match="uint8"):
        decompress(make(given))
    for none in (b"bytes", [1.0, 2.0], memoryview(b"some")):
        with pytest.raises(TypeError, match="must be a tensor, got"):
            compress(none)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="base must be a tensor, got"):
            compress(given.bfloat16(), "delta", base=none, dtype=torch.bfloat16)  # type: ignore[arg-type]


@of_libraries
def test_weights_of_a_sender(library: str) -> None:
    make, given = LIBRARIES[library], values()
    sender, receiver = sync.Sender(), sync.Receiver()
    for step in range(2):
        given[step] += 1
        parts = [make(part) for part in sender.pack({"weight": make(given)})]
        assert torch.equal(receiver.apply(parts)["weight"], given)
    file = io.BytesIO()
    sync.save(sender.pack({"weight": given}), file)
    file.seek(0)
    assert torch.equal(receiver.apply(sync.load(file))["weight"], given)
