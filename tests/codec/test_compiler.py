"""The compiler that CXX names, with and without arguments."""

from __future__ import annotations

import ctypes
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_zipccl.cli import report
from ds_zipccl.kernels import build


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """What is found for a test's CXX is not kept for other tests."""
    yield
    build.compiler.cache_clear()


@pytest.fixture(scope="module")
def plain() -> str:
    try:
        return build.compiler()[0]
    except build.BuildError as error:
        pytest.skip(str(error))


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
