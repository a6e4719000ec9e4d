"""How many blocks of threads work on a message, and how full a device is then.

A chunk of a payload has 16 blocks; the 8 warps of a block of threads code two of them each, one after the other. A message with fewer
chunks than the device can hold blocks of threads is cut finer: two parts a chunk, so that a warp codes one block, or four, so that each
of the four schedulers of a multiprocessor gets a warp of its own. More parts would not make a warp faster. Larger messages are not cut:
each part looks up its chunk and reads the chunk's table, which costs more than the cut gains when all schedulers are busy anyway.
"""

from __future__ import annotations

import functools

import torch

from ds_zipccl import devices

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
