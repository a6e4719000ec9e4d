"""The CUDA sources compile where there is no GPU: nvcc for three generations, without spills."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import builds
import pytest

from ds_zipccl.kernels import build, cuda, cuda_launchers, jobs

ARCHITECTURES = ("8.0", "9.0", "10.0")
CODECS = {f"zipccl_{what}" for kind in cuda.DTYPES.values() for what in
          (f"encode_{kind}_cascade", f"encode_{kind}_wide", f"decode_{kind}")}  # fmt: skip
OTHERS = {f"zipccl_{what}" for kind in ("bf16", "fp16", "fp32") for what in
          (f"decode_sum_{kind}", f"encode_{kind}_delta", f"decode_{kind}_delta")}  # fmt: skip
KERNELS = CODECS | OTHERS | {"zipccl_hash"}
#: Registers of 64 Ki that let as many blocks of 256 threads run at a time as the kernels' bounds say.
REGISTERS = {f"encode_{kind}_{code}": 64 for kind in ("bf16", "fp16") for code in ("cascade", "wide")}
REGISTERS |= {"decode_sum": 128, "hash": 64}


@pytest.fixture(scope="module")
def nvcc() -> tuple[str]:
    try:
        return build.nvcc()
    except build.BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def report(nvcc: tuple[str]) -> str:
    """The assembler's words on every kernel on every architecture."""
    recipe = build.cuda(ARCHITECTURES)
    flags = [*recipe.flags, "-Werror=all-warnings", "-Xptxas=-v"]

    def compile_(target: Path) -> None:
        source, output = build.CSRC / "cuda/launch.cu", target.with_suffix(".o")
        command = [*nvcc, *flags, f"-I{build.CSRC}", "-c", str(source), "-o", str(output)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=500)
        assert result.returncode == 0, result.stderr
        target.write_text(result.stderr)

    parts = [build._identity(nvcc), *flags, *builds.contents({"csrc": build.CSRC})]
    return builds.kept("cuda_resources", parts, compile_).read_text()


@pytest.mark.full(reason="nvcc needs minutes for three architectures; test_nvrtc_compiles_every_kernel stays")
def test_resources(report: str) -> None:
    found = re.findall(
        r"Compiling entry function '(\w+)' for 'sm_(\d+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        report,
        re.DOTALL,
    )
    wanted = {(name, architecture.replace(".", "")) for name in KERNELS for architecture in ARCHITECTURES}
    assert {(name, architecture) for name, architecture, *_ in found} == wanted
    spills = {
        f"{name} sm_{architecture}": (stores, loads)
        for name, architecture, stores, loads, _ in found
        if stores + loads != "00"
    }
    assert not spills
    for name, architecture, *_, registers in found:
        for part, bound in REGISTERS.items():
            assert part not in name or int(registers) <= bound, (name, architecture, registers)


@pytest.mark.full(reason="nvcc needs a minute")
def test_the_builders_library_explains_itself(
    nvcc: tuple[str], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Built as a user without a GPU would for another machine; starting a kernel here is an error that says why."""
    from ds_zipccl.op_builder.zipccl import ZipcclCUDABuilder

    if cuda_launchers.torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    builder = ZipcclCUDABuilder()
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert not builder.is_compatible()
    with pytest.raises(build.BuildError, match="set TORCH_CUDA_ARCH_LIST"):
        builder.load()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert builder.is_compatible()
    launcher = cuda_launchers.LibraryLauncher(builder.load())
    with pytest.raises(RuntimeError, match=r"(there is no current device|was not loaded on device 0): .*driver"):
        launcher.launch("zipccl_decode_bf16", (1, 1), 0, jobs.DecodeJobs(), 0)
