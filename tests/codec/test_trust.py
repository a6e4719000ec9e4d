"""Code is loaded only from folders that no other user can write to; other folders are left alone, with a reason."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from places import ROOT

from ds_zipccl.cli import report
from ds_zipccl.kernels import build
from ds_zipccl.kernels.build import trust

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can plant files of another user")

#: Says where code comes from, and runs some of both kinds. One function is enough for numba, which compiles each on its own.
PROGRAM = """
import torch, ds_zipccl
from ds_zipccl.kernels.numba import layout
from ds_zipccl.kernels import build
x = torch.randn(5000).bfloat16()
assert torch.equal(ds_zipccl.decompress(ds_zipccl.compress(x, route="native")), x)
assert layout.pad16(3) == 16
print(build.library_path(), layout._KERNEL_FOLDER)
"""
EVIL = """
#include <cstdio>
__attribute__((constructor)) static void planted() { std::puts("PLANTED CODE RUNS"); }
"""


@pytest.fixture(autouse=True)
def _homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A home and a folder for temporary files of the test's own; what an earlier test found is forgotten."""
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    build._placed.cache_clear()
    yield
    build._placed.cache_clear()


def opened(path: Path, mode: int = 0o777) -> Path:
    """A folder with permissions that umask does not take away."""
    path.mkdir(parents=True)
    path.chmod(mode)
    return path


def link(path: Path, target: Path) -> Path:
    path.symlink_to(target)
    return path


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A sticky folder that everybody can write to, as /tmp and many a /scratch are."""
    return opened(tmp_path / "shared", 0o1777)


def placed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    monkeypatch.setenv("DS_ZIPCCL_CACHE", str(folder))
    return build.cache_root()


def given_away(path: Path) -> None:
    for part in (path, *path.rglob("*")):
        os.chown(part, NOBODY, NOBODY, follow_symlinks=False)


def run(folder: Path, tmp: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "DS_ZIPCCL_CACHE": str(folder),
        "TMPDIR": str(tmp),
        **variables,
    }
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result


def code_of(result: subprocess.CompletedProcess[str]) -> list[Path]:
    """The library and numba's folder that PROGRAM used."""
    return [Path(word) for word in result.stdout.splitlines()[-1].split()]


# --- folders


def test_a_folder_of_ones_own_is_made_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0o002)
    try:
        root = placed(monkeypatch, tmp_path / "new" / "cache")
    finally:
        os.umask(before)
    assert root == tmp_path / "new" / "cache" / "ds_zipccl" and not build.distrust()
    modes = [part.stat().st_mode & 0o777 for part in (root, root.parent, root.parent.parent)]
    assert modes == [0o700, 0o755, 0o755], "others may have folders of their own beside it"


def test_below_a_sticky_folder(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert placed(monkeypatch, shared) == shared / "ds_zipccl"
    assert (shared / "ds_zipccl").stat().st_mode & 0o777 == 0o700
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        assert trust.claim(Path(folder).resolve()) == ""


#: Makes a folder, which is given its path -> why nothing is loaded from it.
LEFT_ALONE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "of a group": (lambda path: opened(path / "ds_zipccl", 0o775).parent, r"group \d+ can write to .*cache/ds_zipccl"),
    "of everybody": (lambda path: opened(path / "ds_zipccl", 0o757).parent, "everybody can write to .*cache/ds_zipccl"),
    "sticky": (lambda path: opened(path / "ds_zipccl", 0o1777).parent, "everybody can write to .*cache/ds_zipccl"),
    "in one of everybody": (opened, "everybody can write to .*cache"),
    # as torch makes its folder under umask 002: a private folder in it could be renamed and replaced
    "private in one of a group": (
        lambda path: opened(opened(path, 0o775) / "ds_zipccl", 0o700).parent, r"group \d+ can write to .*cache",
    ),
    "a link to one": (lambda path: link(path, opened(path.with_name("open"))), "everybody can write to .*open"),
    "no folder": (lambda path: path.touch() or path, ".*cache is not a folder"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_folders_that_are_left_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make, reason = LEFT_ALONE[name]
    folder, private = make(tmp_path / "cache"), tmp_path / "home" / ".cache" / "ds_zipccl"
    before = {*tmp_path.rglob("*")}
    assert placed(monkeypatch, folder) == private and private.stat().st_mode & 0o777 == 0o700
    assert {*tmp_path.rglob("*")} - before == {private, private.parent}, "nothing is made where others can write"
    (line,) = capfd.readouterr().err.splitlines()
    assert re.fullmatch(reason, build.distrust()) and build.distrust() in line and "set DS_ZIPCCL_CACHE" in line
    assert build.distrust() in report.cache()["folder"]


def test_a_link_counts_as_the_folder_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = opened(tmp_path / "own", 0o755)
    assert placed(monkeypatch, link(tmp_path / "link", own)) == own / "ds_zipccl", "resolved: links may change"


@as_root
def test_a_home_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root has it in many a container, and after ``sudo -E``: a folder that the processes of this user share."""
    os.chown(tmp_path / "home", NOBODY, NOBODY)
    monkeypatch.delenv("DS_ZIPCCL_CACHE", raising=False)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    assert build.cache_root() == tmp_path / "tmp" / "ds_zipccl-0"
    assert not list((tmp_path / "home").iterdir())
    assert f"{tmp_path / 'home'} belongs to uid {NOBODY}" in build.distrust()


@as_root
def test_the_last_folder_ends_with_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(tmp_path / "home", NOBODY, NOBODY)
    (tmp_path / "tmp").chmod(0o1777)
    (tmp_path / "tmp" / "ds_zipccl-0").mkdir()
    given_away(tmp_path / "tmp" / "ds_zipccl-0")
    at_exit = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    root = placed(monkeypatch, tmp_path / "home")
    assert root.parent == tmp_path / "tmp" and root.stat().st_mode & 0o777 == 0o700 and not list(root.iterdir())
    (root / "library.so").touch()
    (end,) = at_exit
    end()
    assert not root.exists()


def test_no_folder_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("home", "tmp"):
        (tmp_path / name).chmod(0o777)
    with pytest.raises(build.BuildError, match=r"everybody can write to .*set DS_ZIPCCL_CACHE to a folder"):
        placed(monkeypatch, tmp_path / "home")


# --- entries


@as_root
def test_owners_of_entries(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root's files pass for every user, and a third user's pass for nobody."""
    folder = shared / "cache"
    (folder / "numba").mkdir(parents=True)
    (folder / "library.so").touch()
    assert trust.claim(folder) == ""
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    assert trust.claim(folder) == ""
    os.chown(folder, 4321, 4321)
    assert trust.claim(folder) == ""
    (folder / "numba" / "kernel.nbc").touch()
    os.chown(folder / "numba" / "kernel.nbc", NOBODY, NOBODY)
    wrong = f"{folder}/numba/kernel.nbc belongs to uid {NOBODY}, and only uid"
    assert trust.claim(folder) == f"{wrong} 4321 and root are trusted"
    monkeypatch.undo()
    os.chown(folder, 0, 0)
    assert trust.claim(folder) == f"{wrong} 0 is trusted"


def test_entries_that_others_can_write_to(tmp_path: Path) -> None:
    folder = opened(tmp_path / "cache", 0o755)
    (folder / "library.so").touch()
    (folder / "library.so").chmod(0o775)
    assert f"can write to {folder}/library.so" in trust.claim(folder)
    folder.chmod(0o700)
    assert trust.claim(folder) == "", "nobody else can open it"
    (folder / "library.so").unlink()
    link(folder / "library.lock", tmp_path / "victim")
    assert trust.claim(folder) == f"{folder}/library.lock is a link, and this package makes none"


def test_a_lock_neither_follows_links_nor_empties_files(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    with pytest.raises(OSError, match="symbolic link"), build._locked(link(tmp_path / "library.lock", victim)):
        pass
    with build._locked(victim):
        assert victim.read_text() == "precious"
    with build._locked(tmp_path / "new"):
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600


# --- whole programs


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that has this machine's library, and that PROGRAM has filled under a umask that lets the group write to files."""
    folder, library = tmp_path_factory.mktemp("built"), build.build()
    root = opened(folder / "cache" / "ds_zipccl", 0o700)
    shutil.copy(library, root)
    (root / f"{library.stem}.lock").touch(mode=0o600)
    before = os.umask(0o002)
    try:
        # Numba's own variable does not count: nobody has checked that folder.
        result = run(folder / "cache", folder, NUMBA_CACHE_DIR=str(folder / "numba"))
    finally:
        os.umask(before)
    assert "ds_zipccl: compiled kernels are kept" not in result.stderr
    assert [path.name for path in folder.iterdir()] == ["cache"], "something was written elsewhere"
    return folder / "cache"


@pytest.mark.full(reason="a cache to fill, with the functions that numba compiles")
def test_a_cache_is_used_again(built: Path, tmp_path: Path) -> None:
    files = {path: path.stat().st_mtime_ns for path in built.rglob("*")}
    result = run(built, tmp_path / "tmp")
    library, kernels = code_of(result)
    assert "ds_zipccl: compiled kernels are kept" not in result.stderr and {library, kernels} <= set(files)
    assert library.stat().st_mode & 0o022 == 0 and list(kernels.rglob("*.nbc"))
    assert {path: path.stat().st_mtime_ns for path in built.rglob("*")} == files, "built once"


@pytest.mark.full(reason="a cache to fill, with the functions that numba compiles")
@as_root
def test_planted_libraries_do_not_run(built: Path, shared: Path, tmp_path: Path) -> None:
    """Another user was first in a shared folder, and has put code there under the names that are expected."""
    private = tmp_path / "home" / ".cache" / "ds_zipccl"
    for copy in (shared / "ds_zipccl", private):
        shutil.copytree(built / "ds_zipccl", copy)
    (library,) = (shared / "ds_zipccl").glob("*.so")
    (lock,) = (shared / "ds_zipccl").glob(f"*{library.stem}*.lock")
    (tmp_path / "evil.cpp").write_text(EVIL)
    build._run([*build.compiler(), "-shared", "-fPIC", str(tmp_path / "evil.cpp"), "-o", str(library)], str(tmp_path))
    load = f"import ctypes; ctypes.CDLL({str(library)!r})"
    assert subprocess.check_output([sys.executable, "-c", load]) == b"PLANTED CODE RUNS\n"
    for path in (shared / "ds_zipccl").rglob("*.nb?"):
        path.write_bytes(b"not to be read")
    (tmp_path / "victim").write_text("precious")
    lock.unlink()
    lock.symlink_to(tmp_path / "victim")
    given_away(shared / "ds_zipccl")

    result = run(shared, tmp_path / "tmp")
    assert "PLANTED" not in result.stdout
    assert all(path.is_relative_to(private) for path in code_of(result))
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("ds_zipccl: compiled kernels are kept")]
    assert f"{shared / 'ds_zipccl'} belongs to uid {NOBODY}" in line
    assert (tmp_path / "victim").read_text() == "precious"


def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = placed(monkeypatch, tmp_path)
    target = build.library_path()
    left, other = root / f"{target.stem}-abc", root / "zipccl_other-abc"
    for folder in (left, other):
        folder.mkdir(mode=0o700)
        (folder / "half.o").write_bytes(b"half")
    monkeypatch.setattr(build, "_run", lambda command, folder: Path(command[-1]).write_bytes(b""))
    before = os.umask(0o002)
    try:
        assert build.build() == target and target.stat().st_mode & 0o022 == 0
    finally:
        os.umask(before)
    assert not left.exists() and other.exists(), "another library may be under way"
