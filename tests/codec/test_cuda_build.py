"""The CUDA sources compile where there is no GPU, without spills."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import builds
import emulation
import pytest
from places import TESTS

from ds_zipccl.kernels import build
from ds_zipccl.kernels.cuda import cupy_kernels, interface, jobs, launchers


@pytest.fixture(scope="module")
def nvcc() -> tuple[str]:
    return builds.or_skip(build.nvcc)


@pytest.mark.full(reason="CuPy needs a minute")
@pytest.mark.timeout(3000)
def test_no_kernel_spills() -> None:
    """On sm_90, which most users have: arrays stay in registers, and no kernel has a stack frame."""
    builds.or_skip(cupy_kernels.cupy)
    options = (*cupy_kernels.OPTIONS, "--ptxas-options=-v", "-Werror=all-warnings")

    def compile_(target: Path) -> None:
        cupy_kernels.compiled(cupy_kernels.source(), options, "90", target.write_text)

    report = builds.kept("spills", [cupy_kernels.version(), *options, cupy_kernels.source()], compile_).read_text()
    entry = (
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    )
    found = {name: sizes for name, *sizes in re.findall(entry, report, re.DOTALL)}
    assert found == dict.fromkeys(interface.KERNELS, ["0"] * 3), (
        "keep arrays in registers, or lower the blocks in kernels.cuh"
    )


#: Of the kernels, one with the C interface and another, as parts find each other when the library is loaded; nvcc needs seconds for these,
#: and compiles all of them for :func:`test_no_kernel_spills`.
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
