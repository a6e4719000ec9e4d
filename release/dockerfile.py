"""Execute the instructions of the Dockerfile without Docker, in an empty folder and environment. Takes minutes.

Packages of the distribution are not installed: their commands must exist. Build arguments are empty: pip finds torch.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def ignored(folder: str, names: list[str]) -> list[str]:
    """Return the names in a folder that ``COPY . .`` leaves out."""
    lines = (ROOT / ".dockerignore").read_text().split()
    patterns = [one.removeprefix("**/") for one in lines if one.startswith("**/") or Path(folder) == ROOT]
    return [name for name in names if any(fnmatch.fnmatch(name, one) for one in patterns)]


def execute(place: Path) -> None:
    """Execute the Dockerfile with ``place`` as root of the file system. Blocks for minutes.

    Raises:
        ValueError: an instruction is unknown, or the command of a package is missing.
        CalledProcessError: an instruction failed.
    """
    path = os.pathsep.join((str(Path(sys.base_prefix, "bin")), os.defpath))
    bare = {"HOME": str(place), "PATH": path, "LANG": "C.UTF-8"}
    bare |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
    folder, lines = place, (ROOT / "Dockerfile").read_text().splitlines()
    for word, rest in (line.split(" ", 1) for line in lines if line and not line.startswith("#")):
        print(f"{word} {rest}", flush=True)
        if rest.endswith("\\"):
            raise ValueError(f"{word} continues on the next line; write one instruction per line")
        if word == "RUN" and rest.startswith("apt-get"):
            packages = re.findall(r"(?<= )[a-z+]+(?= |$)", rest.partition("--no-install-recommends")[2].split("&&")[0])
            if missing := [one for one in packages if not shutil.which(one, path=path)]:
                raise ValueError(f"commands of these packages are missing: {', '.join(missing)}; install them")
        elif word == "WORKDIR":
            folder = place / rest.strip("/")
        elif word == "COPY" and rest == ". .":
            shutil.copytree(ROOT, folder, ignore=ignored)
        elif word == "ARG":
            bare[rest.partition("=")[0]] = ""
        elif word in ("RUN", "CMD"):
            subprocess.run(["sh", "-c", rest] if word == "RUN" else json.loads(rest), cwd=folder, env=bare, check=True)
        elif word != "FROM":
            raise ValueError(f"unknown instruction {word}; known are FROM, RUN, WORKDIR, COPY . ., ARG and CMD")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        execute(Path(place))
