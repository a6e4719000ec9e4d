"""``report``: versions, routes, op builders, activation, NCCL and environment: which of them work here, and why the rest does not.

A section that fails shows the reason in its place, and the rest is printed. The exit status is 1 and the last line says so if no CPU
route works, if there is a CUDA device and no CUDA route works, if a route for a device named by ``--require`` does not work, or if that
named by ``--route`` does not. Every route is tried, and named on stderr: the first report may build the native ones. Rows in ``--json``:
``device``, ``route``, ``usable``, ``reason``; in addition one key per section.

``--bundle`` writes one zip file to attach to a bug report: the report with the self-tests of the kernels, and the files of ``--attach``.
Look into the file before you send it: configs name places.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import shlex
import subprocess
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_zipccl.tools import ToolError, tables

if TYPE_CHECKING:
    from ds_zipccl.config import ZipcclConfig

ENTRY_GROUP = "torch.backends"
AUTOLOAD_SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # torch's own; 0 turns every autoload off
USABLE = "usable"
#: Of a route that was compiled for the compute capabilities COMPILED, where no device is.
COMPILES = "compiles for sm_"
COMPILED = ((8, 0), (9, 0), (10, 0), (12, 0))
#: Variables of CUDA, NCCL and torch that matter to coded NCCL groups: name -> effect.
NCCL_VARIABLES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1: all streams share one queue of the device; coded calls then do not overlap with computing, and in "
    "mode auto gathers and all-to-alls stay plain: unset it",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1, from NCCL 2.26 on: NCCL orders the collectives of several groups; coded ones share a stream and "
    "do not need it",
    "TORCH_NCCL_BLOCKING_WAIT": "1: the host waits for every collective, also for those inside a coded call; coding then costs more",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``report``."""
    option = parser.add_argument
    option("--json", metavar="FILE", help="write everything here too")
    tried = "try the routes of this name alone; cupy is compiled where no GPU is, too"
    option("--route", choices=("native", "numba", "cupy"), help=tried)
    wanted = "exit with 1 unless every route for this type of device, cpu or cuda, works; repeatable"
    option("--require", action="append", choices=("cpu", "cuda"), default=[], metavar="DEVICE", help=wanted)
    option("--bundle", metavar="FILE", help="write one zip file for a bug report")
    attached = "with --bundle: files for it, such as the output of the job, its ds_config.json and its step_log"
    option("--attach", nargs="+", default=[], metavar="FILE", help=attached)


def main(args: argparse.Namespace) -> int:
    """Run ``report``; 1 if tensors of a device that is here cannot be coded."""
    if absent := [name for name in args.attach if not Path(name).is_file()]:
        raise ToolError(f"--attach {absent[0]}: no such file")
    if args.attach and not args.bundle:
        raise ToolError("--attach is for --bundle: name the zip file to write")
    sections = SECTIONS | {"routes": functools.partial(routes, args.route)}
    found = {name: attempt(section) for name, section in sections.items()}
    for name, lines in {"versions": tables.versions(), **found}.items():
        tables.say(name)
        width = max(map(len, lines), default=0)
        for key, text in lines.items():
            tables.say(f"  {key:{width}}  {text}")
    if args.json:
        rows = [
            {"device": device, "route": route, "usable": reason == USABLE, "reason": "" if reason == USABLE else reason}
            for device, route, reason in ((*key.partition(" ")[::2], reason) for key, reason in found["routes"].items())
        ]
        tables.write_json(args.json, rows, args.command, **found)
    if args.bundle:
        tables.say(f"bundle: {args.bundle}, with {', '.join(_write_bundle(args.bundle, args.attach, found))}")
    useless = [device for device in _devices() if USABLE not in _of(device, found["routes"])]
    incomplete = [device for device in args.require if set(_of(device, found["routes"])) != {USABLE}]
    if args.route:
        works = any(reason == USABLE or reason.startswith(COMPILES) for reason in found["routes"].values())
        useless = [] if works else [args.route]
    no_route = "no route {} works here" if args.route else "no route for {} tensors works here, so they cannot be coded"
    not_every = "not every route for {} tensors works here, as --require wants"
    for names, said in ((incomplete, not_every), (useless, no_route)):
        if names:
            listed = " and ".join(dict.fromkeys(name if name == args.route else name.upper() for name in names))
            tables.say(f"{said.format(listed)}; the reasons are under routes")
    return 1 if useless or incomplete else 0


def _write_bundle(path: str, attached: Sequence[str], found: Mapping[str, Any]) -> list[str]:
    """Write the zip file of ``--bundle``, and return the names in it."""
    content = {"versions": tables.versions(), **found, "kernels": attempt(proofs)}
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
            bundle.writestr("report.json", json.dumps(content, indent=1))
            for number, file in enumerate(map(Path, attached)):
                bundle.write(file, f"{number}-{file.name}")
            return bundle.namelist()
    except OSError as error:
        raise ToolError(f"--bundle {path}: {error}") from None


def proofs() -> Mapping[str, str]:
    """Type of device and backend -> how it was proven in this process, or why it is not used; of the backends that were tried."""
    from ds_zipccl import kernels
    from ds_zipccl.kernels import self_test

    tried = {(device, name): why for device in kernels.ROUTES for name, why in kernels.tried(device).items()}
    return {" ".join(key): why or str(self_test.PROOFS.get(key, "not tried")) for key, why in tried.items()}


def _devices() -> list[str]:
    """Types of device that exist here."""
    try:
        import torch

        return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    except Exception:  # as in attempt(): without torch the section of the routes has the reason
        return ["cpu"]


def _of(device: str, routes: Mapping[str, str]) -> list[str]:
    """For each route of a type of device, USABLE or the reason why it does not work."""
    return [reason for key, reason in routes.items() if key.partition(" ")[0] == device]


def attempt(section: Callable[[], Mapping[str, str]]) -> dict[str, str]:
    """Lines of ``section``, or the reason why it failed."""
    try:
        return dict(section())
    except Exception as error:  # a report is for broken installations
        return {"unknown": f"{type(error).__name__}: {error}"}


def _told(fact: Callable[[], str]) -> str:
    """A fact, or the reason why it is unknown."""
    return attempt(lambda: {"unknown": fact()})["unknown"]


def machine() -> Mapping[str, str]:
    facts = tables.machine()
    return {
        "system": facts["system"],
        "processor": f"{facts['processor']}, {facts['processors']} usable",
        "memory": f"{facts['memory_bytes'] / 2**30:.1f} GiB" if facts["memory_bytes"] else "unknown",
        "C++ compiler": _told(_compiler),
        "CUDA": _told(_cuda),
        "CuPy": _told(_cupy),
    }


def _compiler() -> str:
    from ds_zipccl.kernels import build

    command = build.compiler()
    answer = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    return f"{shlex.join(command)}: {answer.splitlines()[0]}"


def _cuda() -> str:
    import torch

    if not torch.cuda.is_available():
        return "no device" if torch.version.cuda else "this torch is built without it"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{torch.version.cuda}: {', '.join(names)}"


def _cupy() -> str:
    from ds_zipccl.kernels.cuda import cupy_kernels

    return cupy_kernels.version().removeprefix("CuPy ")


def routes(only: str | None = None) -> Mapping[str, str]:
    """Whether each route works here; ``only``: the routes of that name."""
    from ds_zipccl import kernels

    found: dict[str, str] = {}
    wanted = [(device, name) for device, names in kernels.ROUTES.items() for name in names if only in (None, name)]
    for number, (device, name) in enumerate(wanted, 1):
        tables.complain(f"# trying {device} {name}, {number} of {len(wanted)}; the first time takes minutes")
        found[f"{device} {name}"] = kernels.why(device, name)[name] or USABLE
    if only == "cupy" and "cuda" not in _devices():
        found["cuda cupy"] = _told(_compiled)
    return found


def _compiled() -> str:
    """Compile the kernels for the devices of users, because there is no device that could run them."""
    from ds_zipccl.kernels.cuda import cupy_kernels

    for number, capability in enumerate(COMPILED, 1):
        name = cupy_kernels.architecture(capability)
        tables.complain(f"# compiling for sm_{name}, {number} of {len(COMPILED)}; half a minute where it is not kept")
        cupy_kernels.cubins(capability)
    return f"{COMPILES}{', '.join(f'{major}{minor}' for major, minor in COMPILED)}; no device here"


def builders() -> Mapping[str, str]:
    from ds_zipccl.op_builder.zipccl import BUILDERS

    return {name: f"{'' if one().is_compatible(verbose=False) else 'not '}compatible" for name, one in BUILDERS.items()}


def activation() -> Mapping[str, str]:
    """Whether ``import torch`` in a fresh process loads the hook that lets a ``ds_config`` switch us on."""
    entries = [entry for entry in importlib.metadata.entry_points(group=ENTRY_GROUP) if entry.name == "ds_zipccl"]
    if not entries:
        state = "not installed: pip install the package, or call ds_zipccl.install() before deepspeed.initialize()"
    elif os.environ.get(AUTOLOAD_SWITCH) == "0":
        state = f"installed, but {AUTOLOAD_SWITCH}=0 turns it off"
    else:
        state = f"installed: {entries[0].value}"
    here = {"DS_ZIPCCL means": _told(_section), "on groups that DeepSpeed makes here": _told(_coverage)}
    return {f"entry point in {ENTRY_GROUP}": state, **here}


def _coverage() -> str:
    from ds_zipccl.integration.start_line import coverage_here

    return coverage_here(_of_environment()[1])


def _of_environment() -> tuple[dict[str, Any] | None, ZipcclConfig]:
    """The section that DS_ZIPCCL stands for, and its config, or None and the default one."""
    from ds_zipccl.config import DEFAULT, environment_section, parse_section

    section = environment_section()
    return section, DEFAULT if section is None else parse_section(section)


def _section() -> str:
    section, _ = _of_environment()
    return "nothing, the config file decides" if section is None else str(section)


def nccl() -> Mapping[str, str]:
    """NCCL's version, the key that codes NCCL groups, and the variables of :data:`NCCL_VARIABLES`."""
    return {"version": _told(_nccl_version), 'key "nccl"': _told(_nccl_key), **_variables(NCCL_VARIABLES)}


def _variables(about: Mapping[str, str]) -> dict[str, str]:
    """Values of environment variables, each with its meaning or effect."""
    return {name: f"{os.environ.get(name) or '(unset)':12}  {text}" for name, text in about.items()}


def _nccl_version() -> str:
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        return "this torch is built without it"
    return ".".join(map(str, torch.cuda.nccl.version()))


def _nccl_key() -> str:
    section, config = _of_environment()
    value = config.nccl
    whence = "the default; DS_ZIPCCL is unset, and the config file decides" if section is None else "in DS_ZIPCCL"
    when = {"on": "are coded", "auto": "are coded when the first steps of a job have compared them"}
    return f"{value}, {whence}: NCCL groups {when.get(value, 'pass through')}"


def environment() -> Mapping[str, str]:
    from ds_zipccl.config import ENVIRONMENT

    return _variables({name: meaning for name, meaning in ENVIRONMENT.items() if name not in NCCL_VARIABLES})


def cache() -> Mapping[str, str]:
    from ds_zipccl.kernels.build import cache_root, distrust

    root, reason = cache_root(), distrust()
    files = [path for path in root.rglob("*") if path.is_file()]
    return {
        "folder": f"{root}, in place of the usual one: {reason}" if reason else str(root),
        "holds": f"{len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB",
        "writable": "yes" if os.access(root, os.W_OK) else "no: set DS_ZIPCCL_CACHE to a folder you can write",
    }


#: The sections in their order; their names are those of the output and of ``--json``.
SECTIONS: dict[str, Callable[[], Mapping[str, str]]] = {
    "machine": machine, "routes": routes, "builders": builders, "activation": activation, "nccl": nccl,
    "environment": environment, "cache": cache,
}  # fmt: skip
