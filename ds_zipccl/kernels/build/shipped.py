"""The C++ library that a wheel brings, for machines without a compiler."""

from __future__ import annotations

from pathlib import Path

from ds_zipccl.kernels import build

#: Folder of libraries in the package. A checkout has none; `make wheels` fills it in wheels.
FOLDER = Path(__file__).resolve().parents[2] / "lib"


def library() -> Path | None:
    """Return the library of the C++ backend for this CPU that lies in the package, None where there is none.

    Its name has the content of sources and flags. So a library of other sources, or one with flags that differ, is not taken.
    """
    found = FOLDER / build.file_name(build.CPU)
    return found if found.is_file() else None
