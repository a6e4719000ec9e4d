"""Launches every kernel of a route for the first time while a kernel spins on all multiprocessors but one.

python tests/gpu/first_launch.py ROUTE
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import where

from ds_zipccl.codecs import compress, compress_bound
from ds_zipccl.kernels.cuda.backend import new_status, raise_failure

#: Kernels that are started at least: encoders and decoders of five dtypes and of differences, sums, the hash.
LEAST = 25


class Recorder:
    """A launcher that remembers the names of the kernels that it starts."""

    def __init__(self, launcher: Any) -> None:
        self._launcher = launcher
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launcher, name)

    def launch(self, kernel: str, *arguments: Any) -> None:
        self.names.add(kernel)
        self._launcher.launch(kernel, *arguments)


def main(name: str) -> int:
    device = where.HERE.device
    generator, on_cpu = torch.Generator().manual_seed(1), {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2):
        tensor = torch.randn(where.HERE.size(300_001), generator=generator).to(dtype)
        on_cpu[dtype] = tensor, (tensor.float() * 1.001).to(dtype)
    frames = {dtype: compress(tensor, shaped=False, checksum=False) for dtype, (tensor, _) in on_cpu.items()}
    tensors = {dtype: (new.to(device), old.to(device)) for dtype, (new, old) in on_cpu.items()}
    there = {dtype: frame.to(device) for dtype, frame in frames.items()}
    slots = {
        dtype: torch.zeros(compress_bound(new.numel(), dtype), dtype=torch.uint8, device=device)
        for dtype, (new, _) in on_cpu.items()
    }
    outs = {dtype: torch.zeros_like(new) for dtype, (new, _) in tensors.items()}
    # torch's own kernels are loaded at their first launch too: these are the ones that a route uses.
    for dtype in (torch.int64, torch.int32):
        torch.full((3,), 0, dtype=dtype, device=device).tolist()
        torch.full((3,), -1, dtype=dtype, device=device).tolist()
    new_status(device).item()
    route = where.HERE.route(name)  # which loads its kernels
    route._launches._launcher = recorder = Recorder(route._launches._launcher)
    (stream,) = where.HERE.streams(1)
    halves = []
    with where.HERE.spinning() as held, where.HERE.on(stream):
        status = new_status(device)
        for dtype, (new, old) in tensors.items():
            for code in ("wide", "cascade"):
                route.encode_frames([new], code, 1024, [slots[dtype]])
            route.decode_frames([there[dtype]], 1024, [outs[dtype]], status)
            if dtype.itemsize > 1:
                size = route.encode_delta(new, old, 1024, slots[dtype])
                route.decode_delta(slots[dtype][:size], old, 1024, old)
                route.decode_sum_frames([there[dtype]] * 2, 1024, dtype, slots[dtype][: new.nbytes].view(dtype), status)
        halves.append(route.region_hash(tensors[torch.bfloat16][0].view(torch.uint8)))
        where.HERE.finish(8)
    raise_failure(status)
    for dtype, (new, _) in on_cpu.items():
        assert torch.equal(outs[dtype].cpu().view(torch.uint8), new.view(torch.uint8)), f"decoded {dtype}"
        if dtype.itemsize > 1:
            assert torch.equal(tensors[dtype][1].cpu().view(torch.uint8), new.view(torch.uint8)), (
                f"differences of {dtype}"
            )
    assert len(recorder.names) >= LEAST, f"{len(recorder.names)} kernels were started: {sorted(recorder.names)}"
    print(f"{len(recorder.names)} kernels started beside {held} held multiprocessors; hash {halves[0][0]:x}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
