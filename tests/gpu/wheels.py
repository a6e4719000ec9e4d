"""DeepSpeed, pytest and the driver for a machine with a GPU and without a network: their wheels, made here, installed there.

    python tests/gpu/wheels.py make FOLDER [--python 3.12]    # `make gpu-wheels`; in an environment with torch, pip and a network
    python tests/gpu/wheels.py ready                          # `make gpu` does this, once it has unpacked them

DeepSpeed is built without its operators, which no test needs. Packages that torch brings are left out. Beside the wheels lie the driver
and the spinning kernel, compiled for every GPU of :data:`driver.CARRIED`, where nvcc is here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import figures

ROOT = Path(__file__).resolve().parents[2]

#: All that DeepSpeed imports beside torch and numpy, and what these need in turn; pyroute2 for shaped networks.
NEEDED = (
    "annotated-types", "einops", "hjson", "msgpack", "ninja", "packaging", "psutil", "py-cpuinfo", "pydantic", "pydantic-core", "pyroute2",
    "tqdm", "typing-extensions", "typing-inspection",
)  # fmt: skip
#: What the tests import, and what these need in turn; unpacked only where the machine has no such package, whose plugins fit it.
TESTS = ("hypothesis", "iniconfig", "pluggy", "pygments", "pytest", "pytest-timeout", "sortedcontainers", "xxhash")
#: nvCOMP and its library, beside whose speed ours stands: their newest version.
PEERS = ("nvidia-libnvcomp-cu13", "nvidia-nvcomp-cu13")
#: Platforms of the wheels, newest first: pip takes each literally.
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64",
             "manylinux_2_12_x86_64", "manylinux2010_x86_64", "manylinux_2_5_x86_64", "manylinux1_x86_64")  # fmt: skip
PROBE = """
import sys, deepspeed, ds_zipccl
assert "ds_zipccl.integration.autoload" in sys.modules, "torch did not load this package"
ds_zipccl.install()
print("deepspeed", deepspeed.__version__, deepspeed.__file__)
"""
#: The folder travels with the repository, and both together may be 64 MiB.
MOST_BYTES = 50 << 20
#: Variable with the folder of wheels; folder in the scratch folder into which they go, which is in PYTHONPATH.
WHEELS, SITE = "ZIPCCL_WHEELS", "site"


def make(folder: Path, python: str) -> None:
    """Put the wheels into an empty folder: the versions of this environment, for ``python`` on Linux.

    Raises:
        SystemExit: pip failed, or the wheels are too large to carry.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("*.whl"), *folder.glob("zipccl_*")]:
        old.unlink()
    pip = [sys.executable, "-m", "pip"]
    wanted = [f"{name}=={importlib.metadata.version(name)}" for name in (*NEEDED, *TESTS)]
    wanted += PEERS
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    options = [
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "--implementation",
        "cp",
        "--python-version",
        python,
        *platforms,
    ]
    _run([*pip, "download", *options, "-d", str(folder), *wanted])
    deepspeed = f"deepspeed=={importlib.metadata.version('deepspeed')}"
    _run([*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), deepspeed])
    import driver  # needs torch, which the machine that unpacks may lack

    driver.carry(folder)
    nbytes = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {len(list(folder.glob('*.whl')))} wheels, {nbytes / 1e6:.1f} MB with the programs")
    if nbytes > MOST_BYTES:
        raise SystemExit(f"the folder may have {MOST_BYTES >> 20} MiB, got {nbytes >> 20} MiB")


def unpack(folder: str, target: Path) -> None:
    """Unpack the wheels of a folder, "" for none, into ``target``.

    Raises:
        SystemExit: pip failed.
    """
    target.mkdir(parents=True, exist_ok=True)
    here = {name for name in TESTS if importlib.util.find_spec(name.replace("-", "_"))}
    found = sorted(Path(folder).glob("*.whl")) if folder else []
    if wheels := [str(path) for path in found if path.name.split("-")[0].replace("_", "-") not in here]:
        options = ["-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "--target"]
        _run([sys.executable, "-m", "pip", "install", *options, str(target), *wheels])
    importlib.invalidate_caches()  # the folder was not there when this process began


def ready(target: Path) -> None:
    """Import DeepSpeed, perhaps of the wheels in ``target``; this package must join then.

    Raises:
        SystemExit: the import failed.
    """
    _register(target)
    _run([sys.executable, "-c", PROBE])


def _register(target: Path) -> None:
    """Give torch the entry point by which it loads this package, if the package is not installed."""
    if any(found.name == "ds_zipccl" for found in importlib.metadata.entry_points(group="torch.backends")):
        return
    about = re.search(
        r'^\[project\.entry-points\."torch\.backends"\]\n(.+?)$', (ROOT / "pyproject.toml").read_text(), re.M
    )
    assert about is not None
    folder = target / "ds_zipccl-0.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: ds-zipccl\nVersion: 0\n")
    (folder / "entry_points.txt").write_text(f"[torch.backends]\n{about[1]}\n".replace('"', ""))


def _run(command: list[str]) -> None:
    if status := subprocess.run(command, cwd=ROOT, env={**os.environ, "DS_BUILD_OPS": "0"}).returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {status}; see above")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = parser.add_subparsers(dest="task", required=True)
    making = tasks.add_parser("make", help="fetch and build the wheels")
    making.add_argument("folder", type=Path)
    making.add_argument("--python", default="3.12", metavar="X.Y", help="of the machine with the GPU (3.12)")
    tasks.add_parser("ready", help="import DeepSpeed")
    args = parser.parse_args()
    if args.task == "make":
        make(args.folder.resolve(), args.python)
    else:
        ready(Path(os.environ[figures.SCRATCH]) / SITE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
