"""How CUDA kernels are loaded and launched, on a machine without a GPU: the launchers over a driver that only notes calls, and NVRTC."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import builds
import pytest
import torch

from ds_zipccl.kernels import build, cuda_launchers, jobs, nvrtc
from ds_zipccl.kernels.cuda import KERNELS, SHARED_BYTES, THREADS
from ds_zipccl.kernels.driver import Driver

FAKE = Path(__file__).parent.parent / "support" / "fake_cuda.cpp"


class Fake:
    """The fake driver and library of fake_cuda.cpp, loaded anew, with nothing noted yet."""

    def __init__(self, folder: Path) -> None:
        try:
            compiler = build.compiler()
        except build.BuildError as error:
            pytest.skip(str(error))
        flags = ("-O0", "-std=c++17", "-fPIC", "-shared")

        def make(target: Path) -> None:
            build._run([*compiler, *flags, str(FAKE), "-o", str(target)], target.parent)

        made = builds.kept("fake_cuda", [build._identity(compiler), *flags, FAKE.read_text()], make)
        # A copy, because the loader gives a path only once.
        self.path = folder / "fake.so"
        self.path.write_bytes(made.read_bytes())
        self.library = ctypes.CDLL(str(self.path))
        self.library.fake_said.restype = ctypes.c_char_p
        for name, kernel in KERNELS.items():
            self.library.fake_size(name.encode(), ctypes.sizeof(kernel.params))
        self._read = 0

    def said(self) -> list[str]:
        """The calls since this was asked last."""
        lines = self.library.fake_said().decode().splitlines()
        new, self._read = lines[self._read :], len(lines)
        return new


#: The kernels of two cubins.
PARTS = (list(KERNELS)[:11], list(KERNELS)[11:])


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


def _nvrtc(fake: Fake) -> cuda_launchers.NvrtcLauncher:
    asked: list[tuple[int, int]] = []

    def compiled(capability: tuple[int, int]) -> list[bytes]:
        asked.append(capability)
        return [" ".join(names).encode() for names in PARTS]

    launcher = cuda_launchers.NvrtcLauncher(Driver(str(fake.path)), compiled, lambda: fake_device(fake))
    launcher.asked = asked  # type: ignore[attr-defined]
    return launcher


def fake_device(fake: Fake) -> int:
    device = ctypes.c_int32()
    fake.library.zipccl_cuda_device(ctypes.byref(device))
    return device.value


LAUNCHERS: dict[str, Callable[[Fake], cuda_launchers._Loading]] = {
    "native": lambda fake: cuda_launchers.LibraryLauncher(fake.library),
    "nvrtc": _nvrtc,
}


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest, fake: Fake) -> cuda_launchers._Loading:
    return LAUNCHERS[request.param](fake)


def empty_launches(device: int, stream: int) -> list[str]:
    return [
        f"launch {name} device {device} grid 1 1 threads {kernel.threads} shared {kernel.shared_bytes} stream {stream} sum 0"
        for name, kernel in KERNELS.items()
    ]


def test_every_kernel_is_loaded_and_launched_before_it_is_needed(fake: Fake, launcher: cuda_launchers._Loading) -> None:
    launcher.load(7)
    said = fake.said()
    allowed = [line for line in said if line.startswith("allow")]
    assert allowed == [f"allow {name} {kernel.shared_bytes}" for name, kernel in KERNELS.items()]
    assert [line for line in said if line.startswith("launch")] == empty_launches(0, 7)
    assert said.index(allowed[-1]) < said.index(empty_launches(0, 7)[0]), "all are loaded before the first is launched"
    launcher.load(7)
    assert fake.said() == [], "once a device"


def test_launches_pass_their_parameters_by_value(fake: Fake, launcher: cuda_launchers._Loading) -> None:
    launcher.load(0)
    fake.said()
    for name, kernel in KERNELS.items():
        params = kernel.params()
        size = ctypes.sizeof(params)
        ctypes.memset(ctypes.addressof(params), 1, size)
        launcher.launch(name, (12345, 67), kernel.shared_bytes, params, 99)
        wanted = f"grid 12345 67 threads {kernel.threads} shared {kernel.shared_bytes} stream 99 sum {size}"
        assert fake.said() == [f"launch {name} device 0 {wanted}"], "one call a launch: nothing is set again"


def test_another_device_is_loaded_before_its_first_launch(fake: Fake, launcher: cuda_launchers._Loading) -> None:
    launcher.load(0)
    fake.said()
    fake.library.fake_device(1)
    for number in range(2):
        launcher.launch("zipccl_hash", (4, 1), 0, jobs.HashJobs(), 5)
        launched = [line for line in fake.said() if line.startswith("launch")]
        last = "launch zipccl_hash device 1 grid 4 1 threads 256 shared 0 stream 5 sum 0"
        assert launched == ([*empty_launches(1, 5), last] if number == 0 else [last])
    fake.library.fake_device(0)
    launcher.launch("zipccl_hash", (4, 1), 0, jobs.HashJobs(), 5)
    assert fake.said() == [last.replace("device 1", "device 0")]
    assert getattr(launcher, "asked", [(9, 0), (12, 0)]) == [(9, 0), (12, 0)], "code for each device's capability"


def test_threads_without_a_context_can_launch(fake: Fake, launcher: cuda_launchers._Loading) -> None:
    launcher.load(0)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            launcher.launch("zipccl_hash", (1, 1), 0, jobs.HashJobs(), 0)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not errors


def test_refusals_name_the_kernel(fake: Fake, launcher: cuda_launchers._Loading) -> None:
    launcher.load(0)
    with pytest.raises(RuntimeError, match=r"^zipccl_hash was not started: .*invalid argument$"):
        launcher.launch("zipccl_hash", (1, 1), 1 << 20, jobs.HashJobs(), 0)
    with pytest.raises(
        RuntimeError, match=r"^zipccl_no was not started: no kernel of that name; known: zipccl_encode_bf16_"
    ):
        launcher.launch("zipccl_no", (1, 1), 0, jobs.HashJobs(), 0)


def test_a_failed_load_is_tried_again(fake: Fake, launcher: cuda_launchers._Loading) -> None:
    fake.library.fake_fail(1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="zipccl_encode_bf16_cascade was not started"):
            launcher.launch("zipccl_hash", (1, 1), 0, jobs.HashJobs(), 0)
    fake.library.fake_fail(0)
    launcher.launch("zipccl_hash", (1, 1), 0, jobs.HashJobs(), 0)


def test_a_library_without_a_kernel_is_refused(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS, "zipccl_new", KERNELS["zipccl_hash"])
    with pytest.raises(RuntimeError, match=r"lacks zipccl_new$"):
        cuda_launchers.LibraryLauncher(fake.library)
    with pytest.raises(RuntimeError, match=r"^zipccl_new was not loaded: error 500 of the driver$"):
        _nvrtc(fake).load(0)


def test_no_driver(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^no CUDA driver: .*nothing\.so"):
        Driver(str(tmp_path / "nothing.so"))


# ---------------------------------------------------------------------------------------------------------------- kernels


def test_the_table_of_kernels_has_shared_memory_and_threads_of_each() -> None:
    assert {name: KERNELS[f"zipccl_{name}"].shared_bytes for name in ("encode_fp32_delta", "decode_e5m2", "decode_sum_bf16")} == {
        "encode_fp32_delta": SHARED_BYTES["encode"][4],
        "decode_e5m2": SHARED_BYTES["decode"][1],
        "decode_sum_bf16": SHARED_BYTES["decode_sum"][2],
    }  # fmt: skip
    text = nvrtc.source()
    (warps,) = re.findall(r"kWarps = (\d+),", text)
    assert set(THREADS.values()) == {32 * int(warps)}


#: Launches each kernel on no work, in a process of its own, which a kernel that works on null pointers ends.
EMPTY = """
import sys
sys.path[:0] = {path!r}
import emulation
from ds_zipccl.kernels.cuda import KERNELS
launcher = emulation.launcher({changes!r})
for name, kernel in KERNELS.items():
    print(name, flush=True)
    launcher.launch(name, (1, 1), kernel.shared_bytes, kernel.params(), 0)
print("all", flush=True)
"""


def run_empty(changes: dict[str, tuple[builds.Change, ...]]) -> str:
    """The last word of EMPTY, with ``changes`` to files of csrc."""
    program = EMPTY.format(path=sys.path, changes=changes)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900)
    assert (result.returncode == 0) == result.stdout.endswith("all\n"), result.stderr
    return result.stdout.split()[-1]


def test_launches_without_work_do_nothing() -> None:
    assert run_empty({}) == "all"


@pytest.mark.full(reason="compiles the emulation anew")
def test_a_kernel_that_works_on_nothing_is_noticed() -> None:
    change = ("if (jobs.block) zipccl::decode<zipccl::F, true>(jobs)", "zipccl::decode<zipccl::F, true>(jobs)")
    assert run_empty({"cuda/kernels.cuh": (change,)}) == "zipccl_decode_bf16_delta"


# ------------------------------------------------------------------------------------------------------------------ NVRTC


class FakeNvrtc:
    """A compiler whose cubins are its arguments."""

    version, path = "12.9", "nowhere"

    def __init__(self) -> None:
        self.compiled = 0

    def architecture(self, capability: tuple[int, int]) -> str:
        return "sm_{}{}".format(*capability)

    def compile(self, text: str, options: tuple[str, ...]) -> bytes:
        self.compiled += 1
        return f"{' '.join(options)} of {len(text)}".encode()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvrtc]:
    found = FakeNvrtc()
    monkeypatch.setattr(nvrtc, "nvrtc", lambda: found)
    monkeypatch.setenv("DS_ZIPCCL_CACHE", str(tmp_path))
    build._placed.cache_clear()
    before = os.umask(0o002)  # as many systems have it: the group can write to new files
    yield found
    os.umask(before)
    build._placed.cache_clear()


def test_cubins_are_kept_by_content(compiler: FakeNvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = nvrtc.cubins((9, 0))
    assert len(first) == compiler.compiled == len(build.CUDA_PARTS)
    for part, cubin in zip(build.CUDA_PARTS, first, strict=True):
        assert f"--gpu-architecture=sm_90 -DZIPCCL_PARTS={part} of " in cubin.decode()
    assert nvrtc.cubins((9, 0)) == first and compiler.compiled == len(build.CUDA_PARTS)
    assert nvrtc.cubins((8, 0)) != first and compiler.compiled == 2 * len(build.CUDA_PARTS)
    for name, value in (("OPTIONS", (*nvrtc.OPTIONS, "-DX")), ("source", lambda: "other text")):
        with monkeypatch.context() as changed:
            changed.setattr(nvrtc, name, value)
            assert nvrtc.cubins((9, 0)) != first
    compiler.version = "13.0"
    nvrtc.cubins((9, 0))
    assert compiler.compiled == 5 * len(build.CUDA_PARTS)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert len(files) == 5 and all(path.name.startswith("zipccl_nvrtc_sm_") for path in files)
    assert {mode for path in files if (mode := path.stat().st_mode & 0o022)} == set(), "nobody else can write to them"


def test_old_devices_are_refused_with_a_sentence(compiler: FakeNvrtc) -> None:
    with pytest.raises(build.BuildError, match=r"^the CUDA kernels need compute capability 8\.0 or later, got 7\.5$"):
        nvrtc.cubins((7, 5))
    assert compiler.compiled == 0


def test_where_nvrtc_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of torch's CUDA comes first, wherever it is; then any."""
    for name in ("nvidia/cu13/lib/libnvrtc.so.13", "nvidia/cu13/lib/libnvrtc-builtins.so.13.0",
                 "nvidia/cuda_nvrtc/lib/libnvrtc.so.12", "toolkit/lib64/libnvrtc.so.12.8.61"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (spec := type("Spec", (), {})()).submodule_search_locations = [str(tmp_path / "nvidia")]
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    found = [place.removeprefix(f"{tmp_path}/") for place in nvrtc.candidates() if "/usr/local" not in place]
    assert found[:3] == ["nvidia/cuda_nvrtc/lib/libnvrtc.so.12", "libnvrtc.so.12", "toolkit/lib64/libnvrtc.so.12.8.61"]
    assert (
        "nvidia/cu13/lib/libnvrtc.so.13" in found[3:]
        and "libnvrtc.so" in found
        and not any("builtins" in place for place in found)
    )
    monkeypatch.setattr(nvrtc, "candidates", lambda: iter([str(tmp_path / found[0]), str(FAKE)]))
    with pytest.raises(build.BuildError, match=r"^no NVRTC .* pip install nvidia-cuda-nvrtc$"):
        nvrtc.nvrtc.__wrapped__()


def _real() -> nvrtc.Nvrtc:
    try:
        return nvrtc.nvrtc()
    except build.BuildError as error:
        pytest.skip(str(error))


def test_a_failure_has_the_log_of_the_compiler() -> None:
    words = r"(?s)^NVRTC \d+\.\d --std=c\+\+17 failed: NVRTC_ERROR_COMPILATION\n.*nonsense.*is undefined"
    with pytest.raises(build.BuildError, match=words):
        _real().compile("__device__ int x = nonsense;", ["--std=c++17"])


def test_architectures_of_nvrtc() -> None:
    """Code for an architecture runs on later devices of its major number, and on no others."""
    real = _real()
    assert [real.architecture(capability) for capability in ((8, 0), (9, 0), (9, 9))] == ["sm_80", "sm_90", "sm_90"]
    with pytest.raises(build.BuildError, match=r"compiles for compute capabilities .*9\.0.*, not for 99\.0$"):
        real.architecture((99, 0))


@pytest.mark.full(reason="NVRTC needs a minute; the emulation compiles every kernel in the short tier")
def test_nvrtc_compiles_every_kernel() -> None:
    """Of the same text as nvcc, without files, in parts; each kernel is in one of them."""
    _real()
    text = nvrtc.source()
    assert not set(re.findall(r"#include .*", text)) - {"#include <stdint.h>", "#include <string.h>"}
    found = [set(re.findall(rb"\.text\.(zipccl_\w+)", cubin)) for cubin in nvrtc.cubins((9, 0))]
    assert set().union(*found) == {name.encode() for name in KERNELS}
    assert sum(map(len, found)) == len(KERNELS)
