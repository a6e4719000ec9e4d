"""How CUDA kernels are loaded and launched, on a machine without a GPU: the launchers over a driver that only notes calls, and CuPy."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import builds
import emulation
import pytest
import torch
from places import ROOT

from ds_zipccl.kernels import build
from ds_zipccl.kernels.cuda import cupy_kernels, jobs, launchers
from ds_zipccl.kernels.cuda.interface import KERNELS, SHARED_BYTES, THREADS

FAKE = Path(__file__).parent.parent / "support" / "fake_cuda.cpp"


#: The variable with the path of the fake driver, in the process whose CuPy finds it as libcuda.so.1.
FAKE_DRIVER = "ZIPCCL_FAKE_DRIVER"


def made_fake() -> Path:
    compiler = builds.or_skip(build.compiler)
    flags = ("-O0", "-std=c++17", "-fPIC", "-shared")

    def make(target: Path) -> None:
        build._run([*compiler, *flags, str(FAKE), "-o", str(target)], target.parent)

    return builds.kept("fake_cuda", [build._identity(compiler), *flags, FAKE.read_text()], make)


class Fake:
    """The fake driver and library of fake_cuda.cpp, with nothing noted yet."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(os.environ.get(FAKE_DRIVER) or str(made_fake()))
        self.library.fake_said.restype = ctypes.c_char_p
        self.library.fake_reset()
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
def fake() -> Fake:
    return Fake()


def _cupy(fake: Fake) -> launchers.CupyLauncher:
    """CuPy's own binding of the driver, over the fake one."""
    asked: list[tuple[int, int]] = []

    def compiled(capability: tuple[int, int]) -> list[bytes]:
        asked.append(capability)
        return [" ".join(names).encode() for names in PARTS]

    launcher = launchers.CupyLauncher(
        fake.library.fake_use, compiled, lambda: fake_device(fake), lambda device: ((9, 0), (12, 0))[device]
    )
    launcher.asked = asked  # type: ignore[attr-defined]
    return launcher


def fake_device(fake: Fake) -> int:
    device = ctypes.c_int32()
    fake.library.zipccl_cuda_device(ctypes.byref(device))
    return device.value


LAUNCHERS: dict[str, Callable[[Fake], launchers.Loading]] = {
    "native": lambda fake: launchers.LibraryLauncher(fake.library),
    **({"cupy": _cupy} if FAKE_DRIVER in os.environ else {}),
}


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest, fake: Fake) -> launchers.Loading:
    return LAUNCHERS[request.param](fake)


@pytest.mark.skipif(FAKE_DRIVER in os.environ, reason="this is its process")
def test_all_of_this_over_cupy(tmp_path: Path) -> None:
    """In a process of its own, because CuPy looks for the driver once."""
    (tmp_path / "libcuda.so.1").symlink_to(made_fake())
    paths = f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", "cupy] or of_cupy", __file__, "-p", "no:cacheprovider"],
        env={**os.environ, FAKE_DRIVER: str(tmp_path / "libcuda.so.1"), "LD_LIBRARY_PATH": paths},
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0 and re.search(r"^8 passed", run.stdout, re.MULTILINE), run.stdout + run.stderr


def empty_launches(device: int, stream: int) -> list[str]:
    return [
        f"launch {name} device {device} grid 1 1 threads {kernel.threads} shared {kernel.shared_bytes} stream {stream} sum 0"
        for name, kernel in KERNELS.items()
    ]


def test_every_kernel_is_loaded_and_launched_before_it_is_needed(fake: Fake, launcher: launchers.Loading) -> None:
    launcher.load(7)
    said = fake.said()
    allowed = [line for line in said if line.startswith("allow")]
    assert allowed == [f"allow {name} {kernel.shared_bytes}" for name, kernel in KERNELS.items()]
    assert [line for line in said if line.startswith("launch")] == empty_launches(0, 7)
    assert said.index(allowed[-1]) < said.index(empty_launches(0, 7)[0]), "all are loaded before the first is launched"
    launcher.load(7)
    assert fake.said() == [], "once a device"


def test_launches_pass_their_parameters_by_value(fake: Fake, launcher: launchers.Loading) -> None:
    launcher.load(0)
    fake.said()
    for name, kernel in KERNELS.items():
        params = kernel.params()
        size = ctypes.sizeof(params)
        ctypes.memset(ctypes.addressof(params), 1, size)
        launcher.launch(name, (12345, 67), kernel.shared_bytes, params, 99)
        wanted = f"grid 12345 67 threads {kernel.threads} shared {kernel.shared_bytes} stream 99 sum {size}"
        assert fake.said() == [f"launch {name} device 0 {wanted}"], "one call a launch: nothing is set again"


def test_another_device_is_loaded_before_its_first_launch(fake: Fake, launcher: launchers.Loading) -> None:
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


def test_threads_without_a_context_can_launch(fake: Fake, launcher: launchers.Loading) -> None:
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


def test_refusals_name_the_kernel(fake: Fake, launcher: launchers.Loading) -> None:
    launcher.load(0)
    with pytest.raises(RuntimeError, match=r"^zipccl_hash was not started: .*invalid argument$"):
        launcher.launch("zipccl_hash", (1, 1), 1 << 20, jobs.HashJobs(), 0)
    with pytest.raises(
        RuntimeError, match=r"^zipccl_no was not started: no kernel of that name; known: zipccl_encode_bf16_"
    ):
        launcher.launch("zipccl_no", (1, 1), 0, jobs.HashJobs(), 0)


def test_a_failed_load_is_tried_again(fake: Fake, launcher: launchers.Loading) -> None:
    fake.library.fake_fail(1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="zipccl_encode_bf16_cascade was not started"):
            launcher.launch("zipccl_hash", (1, 1), 0, jobs.HashJobs(), 0)
    fake.library.fake_fail(0)
    launcher.launch("zipccl_hash", (1, 1), 0, jobs.HashJobs(), 0)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_library_without_a_kernel_is_refused(fake: Fake, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS, "zipccl_new", KERNELS["zipccl_hash"])
    with pytest.raises(RuntimeError, match=r"lacks zipccl_new$|^zipccl_new was not loaded: CUDA_ERROR_NOT_FOUND: "):
        LAUNCHERS[name](fake).load(0)


@pytest.mark.skipif(FAKE_DRIVER not in os.environ, reason="runs in the process of test_all_of_this_over_cupy")
def test_large_kernels_of_cupy_get_all_shared_memory(fake: Fake) -> None:
    """As csrc/cuda/launch.cu asks for it."""
    _cupy(fake).load(0)
    large = [f"carve {name} 100" for name, kernel in KERNELS.items() if kernel.shared_bytes > 32 << 10]
    assert large == [line for line in fake.said() if line.startswith("carve")] != []


# ---------------------------------------------------------------------------------------------------------------- kernels


def test_the_table_of_kernels_has_shared_memory_and_threads_of_each() -> None:
    assert {name: KERNELS[f"zipccl_{name}"].shared_bytes for name in ("encode_fp32_delta", "decode_e5m2", "decode_sum_bf16")} == {
        "encode_fp32_delta": SHARED_BYTES["encode"][4],
        "decode_e5m2": SHARED_BYTES["decode"][1],
        "decode_sum_bf16": SHARED_BYTES["decode_sum"][2],
    }  # fmt: skip
    text = cupy_kernels.source()
    (warps,) = re.findall(r"kWarps = (\d+),", text)
    assert 32 * int(warps) == THREADS


#: Launches each kernel on no work, in a process of its own, which a kernel that works on null pointers ends.
EMPTY = """
import sys
sys.path[:0] = {path!r}
import emulation
from ds_zipccl.kernels.cuda.interface import KERNELS
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
    change = ("DecodeJobs, block, decode<F, true>", "DecodeJobs, block + 1, decode<F, true>")
    assert run_empty({"cuda/kernels.cuh": (change,)}) == "zipccl_decode_bf16_delta"


# ------------------------------------------------------------------------------------------------------------------- CuPy


def fake_cupy() -> SimpleNamespace:
    """CuPy with an NVRTC whose cubins are its arguments."""
    programs: list[tuple[str, list[str]]] = []

    def compile_(program: int, options: tuple[str, ...]) -> None:
        programs[program][1].extend(options)

    nvrtc = SimpleNamespace(
        getVersion=lambda: (12, 9),
        getSupportedArchs=lambda: (80, 90),
        createProgram=lambda text, name, headers, names: programs.append((text, [])) or len(programs) - 1,
        compileProgram=compile_,
        getCUBIN=lambda program: f"{' '.join(programs[program][1])} of {len(programs[program][0])}".encode(),
        destroyProgram=lambda program: None,
        NVRTCError=RuntimeError,
        programs=programs,
    )
    driver = SimpleNamespace(get_build_version=lambda: 12090)
    return SimpleNamespace(__version__="14.0", cuda=SimpleNamespace(nvrtc=nvrtc, driver=driver))


@pytest.fixture
def cupy(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    found = fake_cupy()
    monkeypatch.setattr(cupy_kernels, "cupy", lambda: found)
    before = os.umask(0o002)  # as many systems have it: the group can write to new files
    yield found
    os.umask(before)


def test_cubins_are_kept_by_content(cupy: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = cupy.cuda.nvrtc.programs
    first = cupy_kernels.cubins((9, 0))
    assert len(first) == len(programs) == len(build.CUDA_PARTS)
    for part, cubin in zip(build.CUDA_PARTS, first, strict=True):
        assert f"-DZIPCCL_PARTS={part} -arch=sm_90 of " in cubin.decode()
    assert cupy_kernels.cubins((9, 0)) == first and len(programs) == len(build.CUDA_PARTS)
    assert cupy_kernels.cubins((8, 0)) != first and len(programs) == 2 * len(build.CUDA_PARTS)
    for name, value in (("OPTIONS", (*cupy_kernels.OPTIONS, "-DX")), ("source", lambda: "other text")):
        with monkeypatch.context() as changed:
            changed.setattr(cupy_kernels, name, value)
            assert cupy_kernels.cubins((9, 0)) != first
    cupy.cuda.nvrtc.getVersion = lambda: (13, 0)
    cupy_kernels.cubins((9, 0))
    assert len(programs) == 5 * len(build.CUDA_PARTS)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert len(files) == 5 and all(path.name.startswith("zipccl_cupy_sm_") for path in files)
    assert {mode for path in files if (mode := path.stat().st_mode & 0o022)} == set(), "nobody else can write to them"


def test_old_devices_are_refused_with_a_sentence(cupy: SimpleNamespace) -> None:
    with pytest.raises(build.BuildError, match=r"^the CUDA kernels need compute capability 8\.0 or later, got 7\.5$"):
        cupy_kernels.cubins((7, 5))
    assert not cupy.cuda.nvrtc.programs


@pytest.mark.parametrize(
    ("torch_cuda", "found", "said"),
    [
        ("12.8", None, r"^no CuPy \(.*\); pip install cupy-cuda12x$"),
        (None, None, r"^no CuPy \(.*\); pip install cupy-cuda13x$"),
        (
            "13.0", fake_cupy(),
            r"^CuPy 14\.0 is built for CUDA 12, torch for CUDA 13\.0; pip uninstall -y cupy-cuda12x && pip install cupy-cuda13x$",
        ),
        ("12.8", fake_cupy(), ""),
        (None, fake_cupy(), ""),
    ],
)  # fmt: skip
def test_a_cupy_that_does_not_fit_is_refused(
    torch_cuda: str | None, found: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", found)
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    if said:
        with pytest.raises(build.BuildError, match=said):
            cupy_kernels.cupy()
    else:
        assert cupy_kernels.cupy() is found


def test_a_missing_nvrtc_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", found := fake_cupy())
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    found.cuda.nvrtc.getVersion = partial(ctypes.CDLL, "libnvrtc.so.none")
    with pytest.raises(build.BuildError, match=r"finds no NVRTC \(libnvrtc.*\); pip install nvidia-cuda-nvrtc-cu12$"):
        cupy_kernels.cupy()


def test_a_mistake_is_told_with_its_file_and_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Planted in a header: the text that CuPy compiles has the includes in their places."""
    builds.or_skip(cupy_kernels.cupy)
    shutil.copytree(build.CSRC, tmp_path / "csrc")
    header = tmp_path / "csrc" / "cuda" / "hash.cuh"
    lines = header.read_text().splitlines()
    at = next(number for number, line in enumerate(lines, 1) if line.startswith("namespace"))
    header.write_text("\n".join([*lines[:at], "__device__ int planted = nonsense;", *lines[at:]]) + "\n")
    monkeypatch.setattr(build, "CSRC", tmp_path / "csrc")
    text = cupy_kernels.source.__wrapped__()
    words = rf"(?s)^CuPy \S+, NVRTC .* for sm_90 failed: NVRTC_ERROR_COMPILATION.*cuda/hash\.cuh\({at + 1}\): error: .*nonsense"
    with pytest.raises(build.BuildError, match=words):
        cupy_kernels.compiled(text, (*cupy_kernels.OPTIONS, "-DZIPCCL_PARTS=1"), "90")


def test_architectures_of_nvrtc() -> None:
    """Code for an architecture runs on later devices of its major number, and on no others."""
    builds.or_skip(cupy_kernels.cupy)
    found = [cupy_kernels.architecture(capability) for capability in ((8, 0), (9, 0), (9, 9))]
    assert found == ["80", "90", "90"]
    with pytest.raises(build.BuildError, match=r"compiles for compute capabilities .*9\.0.*, not for 99\.0$"):
        cupy_kernels.architecture((99, 0))


@pytest.mark.full(reason="CuPy needs half a minute; the emulation compiles every kernel in the short tier")
def test_cupy_compiles_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same text as nvcc, without files. Two parts; test_cuda_build.py compiles all kernels as one, and has the parts of each."""
    builds.or_skip(cupy_kernels.cupy)
    text = cupy_kernels.source()
    assert not set(re.findall(r"#include .*", text)) - {"#include <stdint.h>", "#include <string.h>"}
    monkeypatch.setattr(build, "CUDA_PARTS", (emulation.HASH, emulation.ZFP))
    cubins = cupy_kernels.cubins((9, 0))
    for cubin in cubins:
        (at,), (size, count) = struct.unpack_from("<Q", cubin, 0x20), struct.unpack_from("<HH", cubin, 0x36)
        assert cubin[:4] == b"\x7fELF" and 0 <= len(cubin) - (at + size * count) <= 1, "CuPy leaves the last byte out"
    hashes, zfp = (set(re.findall(r"\.text\.zipccl_(\w+)", cubin.decode("latin"))) for cubin in cubins)
    assert {"hash", "find_rows"} < hashes and zfp and all(name.startswith("zfp_") for name in zfp)
    assert {f"zipccl_{name}" for name in hashes | zfp} < KERNELS.keys()
