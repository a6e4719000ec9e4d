"""Build the sdist and the wheels of a release: `make wheels`.

A wheel contains the C++ library. Its interface is plain C, so that one wheel serves all versions of Python. The
compiler is zig's clang. It has the headers and symbols of glibc 2.28 for both architectures and links libc++
statically, so that one machine builds all wheels.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ds_zipccl.kernels import build

ROOT = Path(__file__).resolve().parent.parent
#: The oldest glibc that the libraries support: that of RHEL 8; Debian 10 and Ubuntu 18.10 have it too.
GLIBC = (2, 28)
#: Architectures by the names of platform.machine() and of wheel tags.
MACHINES = ("x86_64", "aarch64")


def recipe(machine: str) -> build.Recipe:
    """Return the recipe that compiles the C++ library for a machine with zig."""
    target = f"{machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    return build.cpu(machine, lambda: (sys.executable, "-m", "ziglang", "c++", "-target", target, "-s"))


def with_library(plain: Path, machine: str, library: build.Recipe, out: Path) -> Path:
    """Write a copy of the wheel ``plain`` with the library for ``machine`` to ``out`` and return it; takes a minute."""
    with tempfile.TemporaryDirectory() as folder:
        _run("wheel", "unpack", str(plain), "--dest", folder)
        (tree,) = Path(folder).iterdir()
        place = tree / "ds_zipccl" / build.SHIPPED.name / build.file_name(library)
        place.parent.mkdir()
        with tempfile.TemporaryDirectory() as objects:
            made = Path(objects) / place.name
            build.compile_library(library, made)
            shutil.copy(made, place)
        (notes,) = tree.glob("*.dist-info/WHEEL")
        text = notes.read_text()
        tag = f"py3-none-manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"
        notes.write_text(text.replace("py3-none-any", tag).replace("Root-Is-Purelib: true", "Root-Is-Purelib: false"))
        _run("wheel", "pack", str(tree), "--dest-dir", str(out))
    (packed,) = out.glob(f"*_{machine}.whl")
    return packed


def check(wheel: Path) -> None:
    """Raise SystemExit if the libraries of a wheel need a newer glibc or another CPU than its tag says."""
    said = " ".join(_run("auditwheel", "show", str(wheel)).split())
    found = re.search(r'consistent with the following platform tag: "manylinux_(\d+)_(\d+)_(\w+)"', said)
    if found is None or (int(found[1]), int(found[2])) > GLIBC or not wheel.stem.endswith(found[3]):
        raise SystemExit(f"the libraries of {wheel.name} need more than its tag says; auditwheel says:\n{said}")


def _run(*arguments: str) -> str:
    result = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{result.stdout}{result.stderr}")
    return result.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the files (default: dist)")
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=MACHINES, help="CPUs (default: all)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for old in options.out.glob("ds_zipccl-*"):
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        print("building the sdist and the wheel without a library ...", flush=True)
        _run("build", "--outdir", folder, str(ROOT))
        (plain,) = Path(folder).glob("*.whl")
        for machine in options.machines:
            print(f"building the wheel for {machine}: a minute ...", flush=True)
            wheel = with_library(plain, machine, recipe(machine), options.out)
            check(wheel)
        for sdist in Path(folder).glob("*.tar.gz"):
            shutil.copy(sdist, options.out)
    files = sorted(options.out.glob("ds_zipccl-*"))
    print(_run("twine", "check", "--strict", *map(str, files)), end="")
    for path in files:
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path}")


if __name__ == "__main__":
    main()
