"""The CUDA sources compile where there is no GPU, without spills. ``make cuda-static`` has three more architectures."""

from __future__ import annotations

import ctypes
import re
import subprocess

import builds
import cuda_static
import emulation
import pytest
from places import TESTS

from ds_zipccl.cli.tables import read_json
from ds_zipccl.kernels import build
from ds_zipccl.kernels.cuda import cupy_kernels, interface, jobs, launchers


@pytest.fixture(scope="module")
def nvcc() -> tuple[str]:
    return builds.or_skip(build.nvcc)


#: The architecture of the suite: of those with slots the one that most users have.
HOPPER = 90


@pytest.mark.full(reason="CuPy needs a minute")
@pytest.mark.timeout(3000)
def test_resources() -> None:
    """No spill, no stack frame, and no kernel is 10 % worse than docs/results/cuda_static.json."""
    builds.or_skip(cupy_kernels.cupy)
    assert cuda_static.RESULTS.exists(), f"no {cuda_static.RESULTS}; run `make cuda-static`"
    before, now = read_json(str(cuda_static.RESULTS))["rows"], cuda_static.rows((HOPPER,))
    names = {
        (name.removeprefix("zipccl_"), f"sm_{each}") for name in interface.KERNELS for each in cuda_static.ARCHITECTURES
    }
    assert {(row["kernel"], row["architecture"]) for row in before} == names, "run `make cuda-static`"
    of_hopper = {name for name in names if name[1] == f"sm_{HOPPER}"}
    assert {(row["kernel"], row["architecture"]) for row in now} == of_hopper
    worse = list(cuda_static.worse(now, [row for row in before if row["architecture"] == f"sm_{HOPPER}"]))
    assert not worse, "\n".join(worse)


def test_a_regression_is_noticed() -> None:
    resources = {"registers": 60, "stack_bytes": 0, "spill_bytes": 0, "blocks": 4, "slots": 24.5}
    before = [{"kernel": f"kernel{i % 4}", "architecture": f"sm_{80 + 10 * (i // 4)}", **resources} for i in range(8)]
    assert not list(cuda_static.worse(before, before))
    for key, change, words in (
        ("spill_bytes", lambda old: 8, "spill_bytes is 8, wanted is 0"),
        ("stack_bytes", lambda old: 24, "stack_bytes is 24, wanted is 0"),
        ("registers", lambda old: 1.2 * old, "registers was"),
        ("slots", lambda old: 1.2 * old, "slots was"),
        ("blocks", lambda old: old - 1, "blocks was"),
    ):
        changed = [dict(row) for row in before]
        changed[7][key] = change(changed[7][key])
        (line,) = cuda_static.worse(changed, before)
        assert words in line and f"{before[7]['kernel']} {before[7]['architecture']}" in line
        assert "make cuda-static" in line or "wanted is 0" in line
    assert "is not in" in next(cuda_static.worse(before, before[1:]))
    assert "no longer in the sources" in next(cuda_static.worse(before[1:], before))


#: Of the kernels, one with the C interface and another, as parts find each other when the library is loaded; nvcc needs seconds for these,
#: and compiles all of them for :func:`test_resources`.
PARTS = (emulation.BF16, emulation.ZFP)


@pytest.mark.full(reason="compiles each part of the kernels")
def test_each_part_compiles_by_itself() -> None:
    """With the words of the emulation: nvcc and CuPy see the same sources. Each kernel is in one of them."""
    folder, found = TESTS / "emulation", []
    command = [*build.compiler(), "-std=c++17", f"-I{build.CSRC}", str(folder / "emulated.cpp")]
    for part in build.CUDA_PARTS:
        subprocess.run([*command, "-fsyntax-only", f"-DZIPCCL_PARTS={part}"], check=True, timeout=builds.SECONDS)
        text = subprocess.run(
            [*command, "-E", f"-DZIPCCL_PARTS={part}"], check=True, capture_output=True, text=True
        ).stdout
        found += sorted(set(re.findall(r"\bzipccl_\w+", text)) & interface.KERNELS.keys())
    assert sorted(found) == sorted(interface.KERNELS)


@pytest.mark.full(reason="nvcc needs half a minute")
def test_the_builders_library_explains_itself(nvcc: tuple[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Built as a user without a GPU would for another machine; starting a kernel here is an error that says why."""
    from ds_zipccl.op_builder.zipccl import ZipcclCUDABuilder

    if launchers.torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    builder = ZipcclCUDABuilder()
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert not builder.is_compatible()
    with pytest.raises(build.BuildError, match="set TORCH_CUDA_ARCH_LIST"):
        builder.load()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert builder.is_compatible()
    monkeypatch.setattr(build, "CUDA_PARTS", PARTS)
    library = builder.load()
    with pytest.raises(RuntimeError, match="the library of the CUDA kernels lacks zipccl_encode_fp16_cascade, "):
        launchers.LibraryLauncher(library)
    library.zipccl_cuda_kernel.restype = ctypes.c_void_p
    there = {name: kernel for name, kernel in interface.KERNELS.items() if library.zipccl_cuda_kernel(name.encode())}
    assert {"zipccl_decode_bf16", "zipccl_zfp_decode_bf16"} < there.keys() < interface.KERNELS.keys()
    monkeypatch.setattr(launchers, "KERNELS", there)
    launcher = launchers.LibraryLauncher(library)
    with pytest.raises(RuntimeError, match=r"(there is no current device|was not loaded on device 0): .*driver"):
        launcher.launch("zipccl_decode_bf16", (1, 1), 0, jobs.DecodeJobs(), 0)
