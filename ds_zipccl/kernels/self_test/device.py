"""Cases of the calls that only the CUDA backend has: frames in slots, sums of several frames, gathers."""

from __future__ import annotations

import numpy as np
import torch

from ds_zipccl import frame, tensors
from ds_zipccl.frame import HEADER_BYTES, CodecId, Header, pad16
from ds_zipccl.kernels.cuda.backend import NO_FAILURE, CudaBackend, GatherTable, Own, Parameter, new_status
from ds_zipccl.kernels.self_test.cases import Cases
from ds_zipccl.kernels.self_test.inputs import BLOCK, GUARD, NAMES, SUMMED, Bytes, Input, Outputs, bound, raw


def run(cases: Cases, backend: CudaBackend) -> None:
    """Run the cases.

    Raises:
        SelfTestError: a case is wrong.
    """
    for dtype in SUMMED:
        _slots(cases, backend, dtype)
        _sums(cases, backend, dtype)
        _gather(cases, backend, dtype)


def _slots(cases: Cases, backend: CudaBackend, dtype: torch.dtype) -> None:
    """Frames in slots that they fill, and in slots one byte too small; refused frames leave NaN."""
    given, device, name = [one for one in cases.given(dtype) if one.words.numel()], cases.device, NAMES[dtype]
    words = [one.words for one in given]
    room = Outputs([bound(one.numel(), dtype.itemsize, BLOCK) for one in words], device)
    payloads = [
        view[:size]
        for view, size in zip(room.views(), backend.encode(words, "cascade", BLOCK, room.views()), strict=True)
    ]
    frames = [_frame(one, payload) for one, payload in zip(words, payloads, strict=True)]
    slots, overflows = Outputs([len(one) for one in frames], device), tensors.filled(1, 0, torch.int32, device)
    backend.encode_frames(words, "cascade", BLOCK, slots.views(), overflows)
    cases.compare(f"encode_{name}_cascade into slots", given, slots, frames)
    out, status = (
        Outputs([one.nbytes for one in words], device, [one.offset * dtype.itemsize for one in given]),
        new_status(device),
    )
    backend.decode_frames(slots.views(), BLOCK, out.views(dtype), status)
    cases.compare(f"decode_{name} from slots", given, out, [raw(one) for one in words])
    _numbers(cases, given, f"overflows and refusals of {name}", (int(overflows), int(status)), (0, NO_FAILURE))

    short = Outputs([len(one) - 1 for one in frames], device)
    backend.encode_frames(words, "cascade", BLOCK, short.views(), overflows)
    found = cases.guarded(f"encode_{name}_cascade into slots one byte too small", given, short)
    sizes = [int.from_bytes(one[24:32].tobytes(), "little") for one in found]
    _numbers(cases, given, f"overflows of {name}", (int(overflows), *sizes), (len(given), *map(len, frames)))

    for damage, at in {"a wrong magic": 0, "a wrong number of elements": 16, "a wrong index": HEADER_BYTES}.items():
        slot, status, refused = slots.views()[0].clone(), new_status(device), Outputs([words[0].nbytes], device)
        slot[at] += 1
        backend.decode_frames([slot], BLOCK, refused.views(dtype), status)
        _numbers(cases, given, f"decode_{name} of {damage}", (int(status) != NO_FAILURE,), (True,))
        nans = np.full(
            words[0].nbytes if at < HEADER_BYTES else dtype.itemsize, 0xFF, np.uint8
        )  # with an index: the first chunk
        cases.compare(
            f"decode_{name} of {damage}", given[:1], [cases.guarded(damage, given, refused)[0][: len(nans)]], [nans]
        )


def _sums(cases: Cases, backend: CudaBackend, dtype: torch.dtype) -> None:
    """The sum of two frames and of own words between them, in fp32 in their order, which decides its bits."""
    given, device = cases.given(dtype)[:1], cases.device
    words = [given[0].words, given[0].base.flip(0), given[0].words.flip(0)]
    parts = [part.nan_to_num(1.0, 2.0, -2.0).contiguous() for part in words]
    size = pad16(HEADER_BYTES + bound(parts[0].numel(), dtype.itemsize, BLOCK))
    slots = [tensors.empty(size, torch.uint8, device) for _ in range(2)]
    backend.encode_frames(parts[::2], "cascade", BLOCK, slots)
    first, second, third = (part.cpu().float() for part in parts)
    for into in {dtype: 0, torch.float32: 1}:
        out, status = Outputs([len(first) * into.itemsize], device), new_status(device)
        backend.decode_sum_frames(slots, BLOCK, dtype, out.views(into)[0], status, Own(parts[1], 1))
        cases.compare(
            f"decode_sum_{NAMES[dtype]} into {NAMES[into]}", given, out, [raw(((first + second) + third).to(into))]
        )


def _gather(cases: Cases, backend: CudaBackend, dtype: torch.dtype) -> None:
    """A gather of three ranks, of which the second one is skipped; the frame of the last parameter is raw."""
    given, device, ranks = cases.given(dtype)[::4], cases.device, 3
    words = [one.words for one in given]
    parameters = [
        Parameter(one.numel(), pad16(HEADER_BYTES + bound(one.numel(), dtype.itemsize, BLOCK)), raw=one is words[-1])
        for one in words
    ]
    table = GatherTable(parameters, dtype, BLOCK, ranks)
    staging = Outputs([table.part_bytes * ranks], device)
    for part in staging.views()[0].split(table.part_bytes):
        backend.encode_gather(words, "cascade", table, part)
    out, status = Outputs([ranks * one.nbytes for one in words], device), new_status(device)
    backend.decode_gather(staging.views()[0], table, out.views(dtype), 1, status)
    wanted = [np.concatenate([raw(one), np.full(one.nbytes, GUARD, np.uint8), raw(one)]) for one in words]
    cases.guarded(f"encode_{NAMES[dtype]}_cascade of a gather", given[:1], staging)
    cases.compare(f"decode_{NAMES[dtype]} of a gather", given, out, wanted)


def _frame(words: torch.Tensor, payload: torch.Tensor) -> Bytes:
    """The frame of a payload, by the module that knows headers."""
    buffer = tensors.filled(HEADER_BYTES + payload.numel(), 0, torch.uint8)
    buffer[HEADER_BYTES:] = payload.cpu()
    frame.pack(Header(CodecId.EXPONENT, words.dtype, words.numel(), buffer.numel(), BLOCK), buffer)
    return raw(buffer)


def _numbers(cases: Cases, given: list[Input], what: str, got: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    cases.compare(what, given[:1], *([raw(tensors.of_numbers(numbers, torch.int64))] for numbers in (got, wanted)))
