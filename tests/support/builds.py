"""Builds that tests share, kept by content: same sources, flags and compiler give the same file, in every checkout and every run.

The folder is that of the package's own libraries (``DS_ZIPCCL_CACHE``), so two test processes share a build, and the second one waits.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ds_zipccl.kernels import build

#: Seconds that one compiler may take, on a machine that does other things too.
SECONDS = 1500
#: Time without use after which a file is removed.
KEEP_SECONDS = 30 * 24 * 3600
#: Text in a source file, and the text that replaces it.
Change = tuple[str, str]
Found = TypeVar("Found")


def or_skip(make: Callable[[], Found]) -> Found:
    """What ``make`` returns; the test is skipped, with the reason, where that cannot be built."""
    import pytest

    try:
        return make()
    except build.BuildError as error:
        pytest.skip(str(error))


def kept(name: str, parts: Iterable[str | bytes], make: Callable[[Path], None]) -> Path:
    """The file that ``make`` writes, kept under ``name`` and the hash of ``parts``; blocks while another process makes the same file.

    Args:
        parts: everything that decides the content of the file.
        make: writes the file to the path given. An exception leaves nothing behind, and the next call tries again.
    """
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    target = build.cache_root() / f"test_{name}_{digest.hexdigest()[:20]}"
    if not target.exists():
        with build._locked(target.with_suffix(".lock")):
            if not target.exists():
                _forget(target.parent, name)
                with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}-") as folder:
                    made = Path(folder) / target.name
                    make(made)
                    os.replace(made, target)
    os.utime(target)
    return target


def _forget(folder: Path, name: str) -> None:
    """Remove files of ``name`` that no run has used for ``KEEP_SECONDS``. Locks stay, as another process may hold one."""
    for path in folder.glob(f"test_{name}_*"):
        if path.is_file() and path.suffix != ".lock" and path.stat().st_mtime < time.time() - KEEP_SECONDS:
            path.unlink(missing_ok=True)


def contents(folders: Mapping[str, Path]) -> Iterable[str | bytes]:
    """Name and content of every C++ or CUDA file of ``folders``, in order; names begin with the folder's key, not with its place."""
    for key, folder in sorted(folders.items()):
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".cpp", ".cu", ".cuh", ".h"):
                yield f"{key}/{path.relative_to(folder).as_posix()}"
                yield path.read_bytes()


@dataclass(frozen=True)
class Binary:
    """A program or library for a test: C++ sources of several folders, some of them with a mistake planted."""

    name: str
    #: Key -> folder. Sources include each other by their paths in the folder ``csrc`` and in their own.
    folders: Mapping[str, Path]
    #: ``key/path`` of a source -> flags that only this source is compiled with.
    sources: Mapping[str, tuple[str, ...]]
    flags: tuple[str, ...]
    link_flags: tuple[str, ...] = ()
    #: ``key/path`` of a file -> changes to its text.
    changes: Mapping[str, tuple[Change, ...]] = field(default_factory=dict)
    #: As :attr:`build.Recipe.compiler`.
    compiler: Callable[[], tuple[str, ...]] = build.compiler

    def path(self) -> Path:
        """The binary, compiled unless it is there already.

        Raises:
            AssertionError: a text to be changed is not in its file.
            BuildError: no compiler, or the compiler failed.
        """
        for file, changes in self.changes.items():
            key, _, rest = file.partition("/")
            text = (self.folders[key] / rest).read_text()
            for good, _ in changes:
                assert good in text, f"{good!r} is no longer in {file}: plant the mistake elsewhere"
        compiler = self.compiler()
        parts = [*compiler[1:], *self.flags, "--", *self.link_flags, repr(self.sources), repr(self.changes)]
        return kept(self.name, (build._identity(compiler), *parts, *contents(self.folders)), self._make)

    def _make(self, target: Path) -> None:
        stage = target.with_name("stage")
        for key, folder in self.folders.items():
            shutil.copytree(folder, stage / key, ignore=shutil.ignore_patterns("__pycache__"))
        for file, changes in self.changes.items():
            text = (stage / file).read_text()
            for good, bad in changes:
                text = text.replace(good, bad)
            (stage / file).write_text(text)
        command = [*self.compiler(), *self.flags, f"-I{stage / 'csrc'}"]

        def compiled(source: str) -> str:
            """An object is kept too: a mistake in one file leaves most others as they are."""
            own = [*command, *self.sources[source], "-c", str(stage / source), "-o"]
            parts = [build._identity(self.compiler()), *self.flags, *self.sources[source], *_included(stage, source)]
            found = stage / f"{source}.o"  # the name by which every linker knows it
            found.hardlink_to(kept("object", parts, lambda to: _run([*own, str(to)])))
            return str(found)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, self.sources))
        _run([*command, *self.link_flags, *objects, "-o", str(target)])


def _included(stage: Path, source: str) -> Iterable[str | bytes]:
    """Name and content of ``source`` and of every file of ``stage`` that it includes."""
    found = [stage / source]
    for path in found:  # which grows
        yield path.relative_to(stage).as_posix()
        yield path.read_bytes()
        for name in re.findall(r'#include "(.+)"', path.read_text()):
            beside = [folder / name for folder in (path.parent, *stage.iterdir()) if (folder / name).exists()]
            found += [one for one in beside[:1] if one not in found]


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if result.returncode:
        raise build.BuildError(f"{' '.join(command)} failed:\n{result.stderr.strip()}")
