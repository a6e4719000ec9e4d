"""Mistakes in the kernels that the tests of gathers, sums and status words must notice."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import pytest
import test_cuda_sanitizers
import test_cuda_waves
import tiers
from places import PYTHONPATH, ROOT

from ds_zipccl.kernels import build

#: A file of csrc, its text, the mistake, and the tests that must notice it.
MISTAKES: dict[str, tuple[str, str, str, str]] = {
    "the skipped rank is decoded": (
        "cuda/decode.cuh",
        "blockIdx.y >= jobs.skip",
        "blockIdx.y > jobs.skip",
        "calls.py -k one_launch",
    ),
    "every rank gets the payload of the first": (
        "cuda/decode.cuh",
        "job.payload + rank * jobs.rank_bytes",
        "job.payload",
        "calls.py -k one_launch",
    ),
    "a base without its stride": (
        "cuda/decode.cuh",
        "(kDelta ? rank * job.stride + first : 0)",
        "(kDelta ? first : 0)",
        "calls.py -k differences",
    ),
    "a wrong job for the last item": (
        "cuda/frame.cuh",
        "first_item <= item",
        "first_item < item",
        "calls.py -k one_output",
    ),
    "frames counted from each launch": (
        "cuda/decode.cuh",
        "jobs.first_frame + number",
        "number",
        "calls.py -k counts_over_launches",
    ),
    "ranks and frames swapped": (
        "cuda/frame.cuh",
        "uint64_t(least(rank, 0xffff)) << 48 | uint64_t(least(frame, 0xffff)) << 32",
        "uint64_t(least(frame, 0xffff)) << 48 | uint64_t(least(rank, 0xffff)) << 32",
        "calls.py -k refused_frame",
    ),
    "refused words stay": ("cuda/frame.cuh", "words[at] = Word(~Word(0))", "(void)words", "calls.py -k refused_frame"),
    "a raw frame that claims blocks": (
        "cuda/encode.cuh",
        "jobs.dtype, 1, job.numel",
        "jobs.dtype, jobs.block, job.numel",
        "calls.py -k sizes",
    ),
    "own words one place late": ("cuda/sum.cuh", "k == job.own_at", "k == job.own_at + 1", "sums.py -k listed"),
    "own words of the first chunk for all": (
        "cuda/sum.cuh",
        "reinterpret_cast<const Word*>(from) + at",
        "reinterpret_cast<const Word*>(from)",
        "sums.py -k rows",
    ),
    "only the first group of summands": (
        "cuda/sum.cuh",
        "group < job.count; group +=",
        "group < 1; group +=",
        "sums.py -k rows",
    ),
    "each group begins anew": ("cuda/sum.cuh", "start = group + member == 0", "start = member == 0", "sums.py -k rows"),
    "the second turn of warps has the tables of the last group": (
        "cuda/sum.cuh",
        "b0 == begin || job.count > kMaxFrames",
        "b0 == begin",
        "sums.py -k refused",
    ),
    "a summand counted in its group": (
        "cuda/sum.cuh",
        "place_of(kNone, group + member, chunk), status)",
        "place_of(kNone, member, chunk), status)",
        "sums.py -k refused",
    ),
    "a hash without its region": ("cuda/hash.cuh", "jobs.work + 3 * number", "jobs.work", "calls.py -k hashes"),
}
PROGRAM = """
import sys
import emulation, pytest
made = emulation.launcher
emulation.launcher = lambda: made({{{file!r}: ({change!r},)}})
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", "emulated and " + {tests!r}, {path!r}]))
"""


@pytest.mark.parametrize(
    "module", [sys.modules[__name__], test_cuda_sanitizers, test_cuda_waves], ids=lambda it: it.__name__
)
def test_every_mistake_can_be_planted(module: ModuleType) -> None:
    """The mistakes themselves are planted in the long tier only."""
    places = {name: (build.CSRC / file).read_text().count(good) for name, (file, good, *_) in module.MISTAKES.items()}
    assert set(places.values()) == {1}, places


@pytest.mark.parametrize("mistake", tiers.mostly_full(MISTAKES, (), "each has an emulation of its own to compile"))
def test_a_mistake_is_noticed(mistake: str) -> None:
    file, good, bad, where = MISTAKES[mistake]
    name, _, tests = where.partition(" -k ")
    program = PROGRAM.format(file=file, change=(good, bad), tests=tests, path=f"tests/codec/test_cuda_{name}")
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert result.returncode, result.stdout
    killed = result.returncode < 0  # by a wild address
    assert killed or " failed" in result.stdout, result.stdout + result.stderr
