"""The emulated CUDA kernels under AddressSanitizer and UBSan, and proof that the sanitizers look.

x86 forgives a misaligned vector and most wild addresses; a GPU ends the context. The memory of tensors, shared memory and the arrays in it
have bounds here.
"""

from __future__ import annotations

import os
import subprocess
import sys

import builds
import emulation
import pytest
import torch
from cuda_frames import CPU, frame_of, pad, words
from places import PYTHONPATH, ROOT

from ds_zipccl.kernels.cuda.backend import CudaBackend, GatherTable, Own, Parameter, new_status, raise_failure

SECONDS = 1500


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Skips, with the compiler's words, where sanitizers are not installed."""
    return {**builds.or_skip(emulation.sanitized_environment), "PYTHONPATH": PYTHONPATH}


@pytest.mark.full(reason="a build of a minute, and minutes of slow kernels")
@pytest.mark.timeout(SECONDS)
def test_the_emulated_tests_are_clean(environment: dict[str, str]) -> None:
    options = ("-q", "-s", "-p", "no:cacheprovider", "-k", "emulated")
    files = [f"tests/codec/test_cuda_{name}.py" for name in ("calls", "sums", "kernels", "rows", "lossy")]
    command = [sys.executable, "-m", "pytest", *options, *files]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-5000:]
    assert " passed" in result.stdout


def trial() -> None:
    """Every kind of kernel once, on tensors without room around them."""
    route = CudaBackend(emulation.launcher(*_planted()), "cpu")
    tensor = words(torch.bfloat16, 3001)
    memory = torch.empty(3002, dtype=torch.bfloat16)
    memory[1:] = tensor
    route.hash_regions([memory[1:], tensor], torch.empty(4, dtype=torch.int64))
    frame = frame_of(tensor, block=128)
    staging = torch.zeros((50, pad(frame.numel())), dtype=torch.uint8)
    staging[:, : frame.numel()] = frame
    sums, status = tensor.clone(), new_status(CPU)
    route.decode_sum_frames(staging, 128, torch.bfloat16, sums, status, Own(sums, 3))
    table = GatherTable([Parameter(3001, pad(frame.numel()))], torch.bfloat16, 128, 3)
    part = torch.empty(table.part_bytes, dtype=torch.uint8)
    route.encode_gather([tensor], "cascade", table, part)
    route.decode_gather(part.repeat(3), table, out := torch.empty(9003, dtype=torch.bfloat16), None, status)
    raise_failure(status)
    assert torch.equal(out, tensor.repeat(3))


def _planted() -> tuple[dict[str, tuple[tuple[str, str], ...]], int]:
    if not (mistake := os.environ.get("PLANTED")):
        return {}, emulation.EVERY_PART  # the library of the tests above
    file, good, bad, _ = MISTAKES[mistake]
    return {file: ((good, bad),)}, emulation.BF16 | emulation.HASH


#: A file, its text, the mistake, and words of the report that the mistake must cause.
MISTAKES: dict[str, tuple[str, str, str, str]] = {
    "a misaligned read": ("cuda/hash.cuh", "reinterpret_cast<uintptr_t>(job.data) % 8 == 0", "true", "misaligned address"),
    "a read past a tensor": ("cuda/hash.cuh", "at + 8 <= job.bytes", "at < job.bytes", "heap-buffer-overflow"),
    "a write past a tensor": (
        "cuda/decode.cuh", "rank * job.stride + first;", "rank * job.stride + first + 1;", "heap-buffer-overflow",
    ),
    "a write past an array of shared memory": (
        "cuda/sum.cuh", "least(job.count - group, kMaxFrames)", "least(job.count - group, kMaxFrames + 1)", "out of bounds",
    ),
    "a write past shared memory": (
        "cuda/sum.cuh", "if (threadIdx.x == 0) shared.failed = 0;",
        "if (threadIdx.x == 0) shared.failed = (&shared.failed)[4] = 0;", "use-after-poison",
    ),
}  # fmt: skip


@pytest.mark.by_turns
@pytest.mark.full(reason="each has an emulation of its own to compile")
@pytest.mark.parametrize("mistake", [*MISTAKES, ""])
def test_a_mistake_is_seen(mistake: str, environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", "import test_cuda_sanitizers as tests; tests.trial(); print('nothing seen')"]
    result = subprocess.run(
        command, env={**environment, "PLANTED": mistake}, capture_output=True, text=True, timeout=SECONDS
    )
    if mistake:
        assert MISTAKES[mistake][3] in result.stderr, result.stdout + result.stderr[-3000:]
        assert result.returncode != 0
    else:
        assert "nothing seen" in result.stdout, result.stderr[-3000:]
