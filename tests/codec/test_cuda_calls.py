"""Gathers over ranks, differences, sizes and hashes: calls of the CUDA route that schedules are made of.

Emulated, and on a GPU if there is one. The frames are those of the CPU.
"""

from __future__ import annotations

import struct

import pytest
import torch
from cuda_frames import GUARD, Kernel, assert_guarded, bits, changed, frame_of, pad, slot, slot_bytes, words

from ds_zipccl import codecs
from ds_zipccl.frame import FrameError, FrameErrorCode, parse
from ds_zipccl.kernels.cpp.slots import SlotBackend
from ds_zipccl.kernels.cuda import backend
from ds_zipccl.kernels.cuda.backend import (
    Failure,
    GatherTable,
    Parameter,
    failure_of,
    frame_bytes,
    new_status,
    raise_failure,
)

BLOCK = 128


class Gather:
    """Shards of ``ranks`` ranks, encoded into one staging buffer by every rank in turn."""

    def __init__(
        self, kernel: Kernel, dtype: torch.dtype, parameters: list[Parameter], ranks: int, bases: bool = False
    ) -> None:
        self.route, self.device = kernel
        self.table = GatherTable(parameters, dtype, BLOCK, ranks)
        self.parameters, self.ranks, self.dtype = parameters, ranks, dtype
        self.shards = [
            [words(dtype, parameter.numel, 100 * rank + number) for number, parameter in enumerate(parameters)]
            for rank in range(ranks)
        ]
        self.bases = [[changed(shard) for shard in shards] for shards in self.shards]
        self.staging = torch.full((self.table.part_bytes * ranks,), GUARD, dtype=torch.uint8, device=self.device)
        for rank in range(ranks):
            self.route.encode_gather(
                [shard.to(self.device) for shard in self.shards[rank]],
                "delta" if bases else "cascade",
                self.table,
                self.part(rank),
                bases=[base.to(self.device) for base in self.bases[rank]] if bases else None,
            )

    def part(self, rank: int) -> torch.Tensor:
        return self.staging[rank * self.table.part_bytes :][: self.table.part_bytes]

    def slot(self, rank: int, number: int) -> torch.Tensor:
        before = sum(parameter.slot_bytes for parameter in self.parameters[:number])
        return self.part(rank)[before : before + self.parameters[number].slot_bytes]

    def span(self, rank: int, number: int) -> slice:
        """Where the shard of a rank is in the output."""
        numel, _, stride, start, _ = self.parameters[number]
        first = start + rank * (numel if stride is None else stride)
        return slice(first, first + numel)


# ------------------------------------------------------------------------------------------------------------ gathers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=["bf16", "fp32", "e4m3"])
def test_a_gather_is_one_launch(kernel: Kernel, dtype: torch.dtype, launches: list[backend.Launch]) -> None:
    """Parameters of any size, some raw, with outputs of their own and gaps between shards; the skipped rank is not touched."""
    numels = (0, 1, 5000, 300, 2048, 77)
    parameters = [
        Parameter(numel, slot_bytes(numel, dtype), stride=numel + 3 * (i % 3), start=i % 2, raw=i % 4 == 2)
        for i, numel in enumerate(numels)
    ]
    gather = Gather(kernel, dtype, parameters, ranks=5)
    for rank in range(5):
        for number, shard in enumerate(gather.shards[rank]):
            wanted = frame_of(shard, "raw" if parameters[number].raw else "cascade", BLOCK)
            assert torch.equal(gather.slot(rank, number)[: wanted.numel()].cpu(), wanted), (rank, number)
    memories = [slot(need * dtype.itemsize, gather.device) for need in gather.table.needs]
    outs, status = [at.view(dtype) for at, _ in memories], new_status(gather.device)
    launches.clear()
    gather.route.decode_gather(gather.staging, gather.table, outs, 3, status)
    raise_failure(status)
    assert [launch.kernel for launch in launches] == [f"zipccl_decode_{backend.DTYPES[dtype]}"]
    assert [id(one) for one in launches[0].reads] == [id(gather.staging)]
    spans = [out[gather.span(rank, number)] for number, out in enumerate(outs) for rank in (0, 1, 2, 4)]
    written = [(one.data_ptr(), one.nbytes) for one in launches[0].writes]
    assert written == [(one.data_ptr(), one.nbytes) for one in (*spans, status)], "and nothing of the rank to skip"
    for number, (_, memory) in enumerate(memories):
        wanted = torch.full(memory.shape, GUARD, dtype=torch.uint8)
        for rank in (0, 1, 2, 4):
            wanted[32:-32].view(dtype)[gather.span(rank, number)] = gather.shards[rank][number]
        assert torch.equal(memory.cpu(), wanted), number


def test_one_output_for_all_parameters(kernel: Kernel, launches: list[backend.Launch]) -> None:
    """As DeepSpeed lays a coalesced gather out: the shards of a rank side by side. More parameters than a launch takes."""
    numels = [50 + number for number in range(60)]
    starts = [sum(numels[:number]) for number in range(60)]
    parameters = [
        Parameter(numel, slot_bytes(numel, torch.bfloat16), stride=sum(numels), start=start)
        for numel, start in zip(numels, starts, strict=True)
    ]
    gather = Gather(kernel, torch.bfloat16, parameters, ranks=3)
    out = torch.empty(3 * sum(numels), dtype=torch.bfloat16, device=gather.device)
    launches.clear()
    gather.route.decode_gather(gather.staging, gather.table, out, None, status := new_status(gather.device))
    raise_failure(status)
    assert len(launches) == 2
    assert torch.equal(bits(out), bits(torch.cat([shard for shards in gather.shards for shard in shards])))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.int64, torch.float8_e5m2], ids=str)
def test_a_gather_of_differences_in_place(kernel: Kernel, dtype: torch.dtype) -> None:
    """Some shards as raw frames, into one output in place of the bases; sizes and strides are elements."""
    numels = (3000, 33, 129)
    room = [pad(codecs.compress_bound(numel, dtype, "delta", block=BLOCK)) for numel in numels]
    parameters = [
        Parameter(numel, size, stride=sum(numels), start=sum(numels[:i]), raw=i == 1)
        for i, (numel, size) in enumerate(zip(numels, room, strict=True))
    ]
    gather = Gather(kernel, dtype, parameters, ranks=3, bases=True)
    for number, code in enumerate(("delta", "raw", "delta")):
        wanted = frame_of(gather.shards[1][number], code, BLOCK, None if code == "raw" else gather.bases[1][number])
        assert torch.equal(gather.slot(1, number)[: wanted.numel()].cpu(), wanted), number
    out = torch.cat([base for bases in gather.bases for base in bases]).to(gather.device)
    gather.route.decode_gather(gather.staging, gather.table, out, 1, status := new_status(gather.device), bases=out)
    raise_failure(status)
    rows = [gather.shards[0], gather.bases[1], gather.shards[2]]
    assert torch.equal(bits(out), bits(torch.cat([one for row in rows for one in row])))


def test_a_refused_frame_of_a_gather(kernel: Kernel) -> None:
    """The status has the lowest rank, then parameter, then chunk; refused words are NaN and all other words are right. On a CPU
    all words of a frame are refused."""
    parameters = [Parameter(numel, slot_bytes(numel, torch.bfloat16)) for numel in (300, 5000)]
    gather = Gather(kernel, torch.bfloat16, parameters, ranks=4)
    gather.slot(3, 0)[0] = 0  # no magic number
    gather.slot(2, 1)[64:80] = 255  # modes in the first chunk's table, after header, index and tops
    small = Gather(kernel, torch.bfloat16, [Parameter(5000, 64)], ranks=1)  # its header says that it did not fit
    outs = [torch.zeros(need, dtype=torch.bfloat16, device=gather.device) for need in gather.table.needs]
    status = new_status(gather.device)
    gather.route.decode_gather(gather.staging, gather.table, outs, None, status)
    assert failure_of(int(status.item())) == Failure(2, 1, 0, FrameErrorCode.BLOCK)
    with pytest.raises(FrameError, match="frame 1 of rank 2 is wrong, in chunk 0") as raised:
        raise_failure(status)
    assert raised.value.code == FrameErrorCode.BLOCK
    for number, out in enumerate(outs):
        for rank in range(4):
            got, wanted = out[gather.span(rank, number)].cpu(), gather.shards[rank][number].clone()
            if (rank, number) == (3, 0):
                wanted[:] = torch.tensor(-1, dtype=torch.int16).view(torch.bfloat16)
            if (rank, number) == (2, 1):
                refused = wanted.numel() if isinstance(gather.route, SlotBackend) else 16 * BLOCK
                wanted[:refused] = torch.tensor(-1, dtype=torch.int16).view(torch.bfloat16)
            assert torch.equal(bits(got), bits(wanted)), (rank, number)
    out, status = torch.zeros(5000, dtype=torch.bfloat16, device=gather.device), new_status(gather.device)
    small.route.decode_gather(small.staging, small.table, [out], None, status)
    assert failure_of(int(status.item())) == Failure(0, 0, 0, FrameErrorCode.OVERFLOWED)
    assert out.isnan().all()


def test_raw_frames_of_a_gather_and_slots_that_are_too_small(kernel: Kernel) -> None:
    route, device = kernel
    shards = [words(torch.bfloat16, 500, 1), words(torch.bfloat16, 400, 2)]
    table = GatherTable([Parameter(500, 1040), Parameter(400, 800)], torch.bfloat16, BLOCK, 1)
    part = torch.full((1840,), GUARD, dtype=torch.uint8, device=device)
    overflows = torch.zeros(1, dtype=torch.int32, device=device)
    route.encode_gather([shard.to(device) for shard in shards], "raw", table, part, overflows)
    assert torch.equal(part[:1032].cpu(), frame_of(shards[0], "raw"))
    assert overflows.item() == 1
    assert frame_bytes(part[1040:].view(1, 800)).tolist() == [832]
    assert (part[1072:] == GUARD).all()


def test_the_number_of_a_refused_frame_counts_over_launches(kernel: Kernel) -> None:
    route, device = kernel
    frames = [frame_of(words(torch.bfloat16, 40, seed), block=BLOCK).to(device) for seed in range(70)]
    frames[61][0] = 0
    outs = [torch.empty(40, dtype=torch.bfloat16, device=device) for _ in frames]
    route.decode_frames(frames, BLOCK, outs, status := new_status(device))
    with pytest.raises(FrameError, match="frame 61 of the call is wrong"):
        raise_failure(status)


# --------------------------------------------------------------------------------------- differences, sizes and hashes


@pytest.mark.parametrize("code", ["cascade", "wide", "raw", "delta"])
def test_sizes_alone(kernel: Kernel, code: str, launches: list[backend.Launch]) -> None:
    """Headers of 32 bytes with the true sizes, the largest of them without the host, and nothing else written."""
    route, device = kernel
    numels = [0, 1, 129, 3000, 5000]
    segments = [words(torch.bfloat16, numel, numel) for numel in numels]
    segments.append(
        torch.randint(-(2**15), 2**15, (2000,), dtype=torch.int16).view(torch.bfloat16)
    )  # blocks that stay raw
    bases = [segment.roll(1) for segment in segments] if code == "delta" else None
    headers, memory = slot(32 * len(segments), device)
    route.frame_sizes(
        [one.to(device) for one in segments],
        code,
        BLOCK,
        headers,
        None if bases is None else [one.to(device) for one in bases],
    )
    sizes = frame_bytes(headers.view(-1, 32))
    frames = [
        frame_of(one, code, BLOCK, None if bases is None else bases[number]) for number, one in enumerate(segments)
    ]
    assert sizes.device == device
    assert sizes.tolist() == [frame.numel() for frame in frames]
    assert sizes.data_ptr() == headers.data_ptr() + 24  # a view
    assert sizes.max().item() == max(frame.numel() for frame in frames)
    for row, frame in zip(headers.view(-1, 32).cpu(), frames, strict=True):
        if frame.numel() > 32:
            with pytest.raises(FrameError, match=f"would have had {frame.numel()} bytes"):
                parse(row)
        else:
            assert torch.equal(row, frame)
    assert_guarded(memory, headers)
    assert len(launches) == 1


def test_hashes_of_regions(kernel: Kernel, launches: list[backend.Launch]) -> None:
    """As on the CPU, for regions of any size, address and dtype; n regions are one launch, up to 48."""
    route, device = kernel
    data = torch.randint(0, 256, (70_000,), dtype=torch.uint8)
    regions = [data[:0], data[:1], data[3:1027], data[8:20_000], data[1:], data[:4096].view(torch.bfloat16)]
    regions += [data[i : 300 + 2 * i] for i in range(60)]
    there = data.to(device)
    placed = [there[one.storage_offset() * one.itemsize :][: one.nbytes].view(one.dtype) for one in regions]
    for number, key in enumerate(((0, 0), (2**64 - 3, 12345))):
        out = torch.full((len(regions), 2), 5, dtype=torch.int64, device=device)
        route.hash_regions(placed, out, key)
        assert len(launches) == 2 * (number + 1)
        raw = struct.pack("<QQ", *key)
        wanted = [codecs.region_hash(one.view(torch.uint8).clone(), key=raw, route="native") for one in regions]
        assert [row.numpy().tobytes() for row in out.cpu()] == wanted


def test_no_work_is_no_launch(kernel: Kernel, launches: list[backend.Launch]) -> None:
    """Lists of no tensors, and the gather of one rank that has its own words already."""
    route, device = kernel
    gather = Gather(kernel, torch.bfloat16, [Parameter(100, 512)], ranks=1)
    launches.clear()
    route.decode_gather(
        gather.staging, gather.table, [torch.zeros_like(gather.shards[0][0], device=device)], 0, new_status(device)
    )
    route.encode_frames([], "cascade", 1024, [])
    route.decode_frames([], 1024, [], new_status(device))
    route.hash_regions([], torch.empty(0, dtype=torch.int64, device=device))
    assert not launches
