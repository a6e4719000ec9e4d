"""Execute the lines of the Dockerfile in their order, in an empty folder with an empty environment: no Docker is needed. Minutes.

Packages of the distribution are not installed: their commands must be there. Arguments are empty: pip knows where torch comes from.
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
    """Execute the Dockerfile with ``place`` as the root of the file system. Blocks for minutes.

    Raises:
        ValueError: an instruction that this program does not know, or a program that is missing.
        CalledProcessError: a line failed.
    """
    path = os.pathsep.join((str(Path(sys.base_prefix, "bin")), os.defpath))
    bare = {"HOME": str(place), "PATH": path, "LANG": "C.UTF-8"}
    bare |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
    folder, lines = place, (ROOT / "Dockerfile").read_text().splitlines()
    for word, rest in (line.split(" ", 1) for line in lines if line and not line.startswith("#")):
        print(f"{word} {rest}", flush=True)
        if rest.endswith("\\"):
            raise ValueError(f"{word} goes on in the next line; this program takes an instruction per line")
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
            raise ValueError(
                f"unknown instruction {word}; this program knows FROM, RUN, WORKDIR, COPY . ., ARG and CMD"
            )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        execute(Path(place))
