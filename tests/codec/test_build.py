"""Building: the architectures of CUDA kernels, the words of a build that is long, hangs or fails, and the compiler that CXX names."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import builds
import pytest
import torch

from ds_zipccl.cli import report
from ds_zipccl.kernels import build
from ds_zipccl.kernels.build import capabilities, trust


class Devices:
    """torch's words on devices of these compute capabilities."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device])


@pytest.mark.parametrize(
    ("devices", "listed", "found"),
    [
        ([(9, 0)], None, ["9.0"]),
        ([(9, 0)], "7.5;8.0", ["9.0"]),
        ([(10, 0), (9, 0), (9, 0), (7, 5)], "", ["9.0", "10.0"]),
        ([], "9.0a;8.6+PTX 12.0", ["8.6+PTX", "9.0a", "12.0"]),
        ([], "Hopper", ["9.0+PTX"]),
        ([], "5.2 6.0 7.0 7.5 8.0 8.6 9.0+PTX", ["8.0", "8.6", "9.0+PTX"]),
        ([], "Volta;Ampere;Blackwell", ["8.0", "8.6+PTX", "10.0", "10.3", "12.0", "12.1+PTX"]),
    ],
)
def test_architectures(
    devices: list[tuple[int, int]], listed: str | None, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Devices(monkeypatch, *devices)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    if listed is not None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    assert capabilities.architectures() == found


@pytest.mark.parametrize(
    ("devices", "listed", "words"),
    [
        ([(7, 5)], "9.0", r"^the CUDA kernels need compute capability 8\.0 or later, got 7\.5$"),
        ([], "Turing;7.0", r"need compute capability 8\.0 or later, got 7\.5\+PTX, 7\.0$"),
        ([], "", "^torch sees no CUDA device; to build for one elsewhere set TORCH_CUDA_ARCH_LIST$"),
        ([], "native", "^torch sees no CUDA device"),
        ([], "9.0;hopper", "^TORCH_CUDA_ARCH_LIST has compute capabilities such as 9.0, .*; got 'hopper'$"),
        ([], "90", "; got '90'$"),
    ],
)
def test_refused_architectures(
    devices: list[tuple[int, int]], listed: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Devices(monkeypatch, *devices)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    with pytest.raises(build.BuildError, match=words):
        capabilities.architectures()


def test_flags_of_architectures() -> None:
    targets = [flag for flag in build.cuda(["8.0", "9.0a", "12.0+PTX"]).flags if "gencode" in flag]
    assert targets == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_120,code=[sm_120,compute_120]",
    ]


def slow_compiler(tmp_path: Path, seconds: float) -> build.Recipe:
    """A compiler that takes its time and writes nothing of use."""
    program = tmp_path / "compiler"
    sleep = f"case $* in *--version*) ;; *) sleep {seconds};; esac"
    program.write_text(
        f'#!/bin/sh\n{sleep}\nwhile [ "$1" != -o ] && [ $# -gt 0 ]; do shift; done\n[ $# = 0 ] || : > "$2"\n'
    )
    program.chmod(0o755)
    source = tmp_path / "none.cpp"
    source.touch()
    return build.Recipe("slow", lambda: (str(program),), ((str(source), ()),), ())


@pytest.mark.usefixtures("own_cache")
def test_a_long_build_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "PATIENCE", 0.1)
    recipe = slow_compiler(tmp_path, 0.4)
    target = build.build(recipe)
    begun, ended = capfd.readouterr().err.splitlines()
    assert begun.startswith(
        f"ds_zipccl: {tmp_path}/compiler compiles kernels, once for this machine, for {target}; this may"
    )
    assert re.fullmatch(rf"ds_zipccl: {tmp_path}/compiler ended after \d+ s", ended)
    build.build(recipe)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(build, "PATIENCE", 60)
    target.unlink()
    build.build(recipe)
    assert capfd.readouterr().err == "", "a short build says nothing"
    assert all(thread.finished.is_set() for thread in threading.enumerate() if isinstance(thread, threading.Timer)), (
        "nor later"
    )


@pytest.mark.usefixtures("own_cache")
def test_a_compiler_that_does_not_end_or_cannot_be_run_is_a_build_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "COMPILER_SECONDS", 0.2)
    with pytest.raises(build.BuildError, match=rf"^{tmp_path}/compiler .* did not end within 0\.2 s; try again"):
        build.build(slow_compiler(tmp_path, 30))
    with pytest.raises(build.BuildError, match=f"^{tmp_path}/nothing cannot be run: "):
        build.build(build.Recipe("none", lambda: (str(tmp_path / "nothing"),), (), ()))


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("mask", [0o000, 0o002, 0o077])
def test_no_other_user_can_write_to_what_is_made(mask: int) -> None:
    """A file that another user can write to makes its whole folder distrusted, where others can open the folder."""
    root = build.cache_root()
    root.chmod(0o755)
    before = os.umask(mask)
    try:
        made = build.publish(root / "kernels.zip", lambda target: target.touch(), "CuPy compiles")
    finally:
        os.umask(before)
    assert made.stat().st_mode & 0o777 == 0o666 & ~mask & ~0o022
    assert trust.claim(root) == ""


# --- the compiler that CXX names, with and without arguments


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """What is found for a test's CXX is not kept for other tests."""
    yield
    build.compiler.cache_clear()


@pytest.fixture(scope="module")
def plain() -> str:
    return builds.or_skip(build.compiler)[0]


def library_name(monkeypatch: pytest.MonkeyPatch, value: str) -> str:
    monkeypatch.setenv("CXX", value)
    build.compiler.cache_clear()
    return build.library_path().name


def test_arguments_are_used_and_named(plain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a wrapper, as with ``ccache g++``, and with flags: they compile, and they are in the library's name."""
    wrapper, log = tmp_path / "wrapper", tmp_path / "log"
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> {shlex.quote(str(log))}\nexec "$@"\n')
    wrapper.chmod(0o755)
    names = {
        value: library_name(monkeypatch, value) for value in (plain, f"{plain} -pipe", f"{wrapper} {plain} -DSEVEN=7")
    }
    assert len(set(names.values())) == 3
    assert build.compiler() == (str(wrapper), plain, "-DSEVEN=7")
    source = tmp_path / "seven.cpp"
    source.write_text('extern "C" int seven() { return SEVEN; }')
    recipe = build.Recipe("seven", build.compiler, ((str(source), ()),), ("-fPIC",))
    monkeypatch.setenv("DS_ZIPCCL_CACHE", str(tmp_path / "cache"))
    assert ctypes.CDLL(str(build.build(recipe))).seven() == 7
    assert log.read_text().count(f"{plain} -DSEVEN=7 -fPIC") == 2, "compiled and linked"
    compiler = report.machine()["C++ compiler"]
    assert compiler.startswith(f"{wrapper} {plain} -DSEVEN=7: ") and "rror" not in compiler


def test_a_path_with_spaces(plain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone it needs no quotes; with arguments it does."""
    link = tmp_path / "my tools" / "g++"
    link.parent.mkdir()
    link.symlink_to(shutil.which(plain) or plain)
    for value, command in ((str(link), (str(link),)), (f"'{link}' -pipe", (str(link), "-pipe"))):
        library_name(monkeypatch, value)
        assert build.compiler() == command


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("/no/such/g++ -pipe", r"no C\+\+ compiler \(/no/such/g\+\+ not on PATH\)"),
        ("g++ '-pipe", "No closing quotation; correct"),
    ],
)
def test_what_is_refused(value: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(build.BuildError, match=words):
        library_name(monkeypatch, value)


def test_no_value_is_the_default(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    build.compiler.cache_clear()
    default = build.compiler()
    for value in ("", " "):
        library_name(monkeypatch, value)
        assert build.compiler() == default
