"""How many blocks of threads work on a message, and how full a device is then.

A chunk of a payload has 16 blocks; the 8 warps of a block of threads code two of them each, one after the other. A message with fewer
chunks than the device can hold blocks of threads is cut finer: two parts a chunk, so that a warp codes one block, or four, so that each
of the four schedulers of a multiprocessor gets a warp of its own. More parts would not make a warp faster. Larger messages are not cut:
each part looks up its chunk and reads the chunk's table, which costs more than the cut gains when all schedulers are busy anyway.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ds_zipccl import devices
from ds_zipccl.frame import CHUNK_BLOCKS

#: Warps of a block of threads: kWarps of the kernels.
WARPS = 8
#: kernel -> itemsize -> blocks of threads that a multiprocessor holds at a time: the bounds in csrc/cuda/kernels.cuh.
RESIDENT = {
    "encode": {1: 4, 2: 4, 4: 2},
    "decode": {1: 4, 2: 4, 4: 3},
    "decode_sum": {2: 2, 4: 2},
}
#: Most times that a chunk is halved. Four parts of four blocks: one warp for each scheduler of a multiprocessor.
MAX_SPLIT = 2


def split(chunks: int, resident: int, multiprocessors: int) -> int:
    """Return how often the chunks of a launch are halved: as often as the device holds all parts at a time."""
    return next((cut for cut in range(MAX_SPLIT, 0, -1) if chunks << cut <= resident * multiprocessors), 0)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device, 1 for a device that has none."""
    runtime = devices.runtime(device)
    return 1 if runtime is None else int(runtime.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True)
class Fill:
    """A launch on an otherwise idle device."""

    #: Blocks of threads.
    grid: int
    #: Multiprocessors that get one of them.
    busy: int
    #: Warps with blocks to code on the fullest multiprocessor, at a time.
    warps: int
    #: ``grid`` by the number that the device holds at a time.
    waves: float
    #: Blocks that a warp codes one after the other, over all waves.
    depth: int


def fill(chunks: int, cut: int, resident: int, multiprocessors: int) -> Fill:
    """Count what a launch of ``chunks`` chunks, each halved ``cut`` times, does with a device."""
    grid, slots = chunks << cut, resident * multiprocessors
    blocks = CHUNK_BLOCKS >> cut
    working = min(WARPS, blocks)
    here = min(resident, -(-grid // multiprocessors))
    return Fill(
        grid=grid,
        busy=min(grid, multiprocessors),
        warps=here * working,
        waves=grid / slots,
        depth=-(-grid // slots) * (blocks // working),
    )
