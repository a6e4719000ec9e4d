"""A slow network on one machine: a network namespace a node, joined by a bridge and shaped by token buckets (``--link``, ``--nodes``).

Needs root and iproute2 (``ip``, ``tc``) on Linux. Every end of every node's cable is shaped: what it sends and what it receives.
Ranks of one node share its cable, and reach each other inside it at the speed of loopback.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ds_zipccl.bench import ToolError

LOOPBACK = "loopback"
#: The interface of a node inside its namespace.
INTERFACE = "zip0"
MAX_NODES = 200
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_PREFIX = "zc"
_BURST_S = 0.002  # seconds of the rate that may pass at once; a token bucket needs some
_LEAST_BURST = 256 << 10  # bytes; segments are joined to up to 64 KiB on their way
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Link:
    """A network that is up. ``namespaces``, ``addresses``: of each node; ``host``: address of the process that made it."""

    rate: str
    ranks: int
    namespaces: tuple[str, ...]
    addresses: tuple[str, ...]
    host: str

    @property
    def nodes(self) -> int:
        """How many namespaces share out the ranks."""
        return len(self.namespaces)

    @property
    def ranks_per_node(self) -> int:
        """The same in every node."""
        return self.ranks // self.nodes

    def namespace(self, rank: int) -> str:
        """Where a rank lives: the first ranks in the first node, and so on."""
        return self.namespaces[rank // self.ranks_per_node]

    def __str__(self) -> str:
        return self.rate


def rate(text: str) -> str:
    """``200mbit``, ``2.5gbit``: bits a second; "" for ``loopback``, which needs no network (argparse type)."""
    if text == LOOPBACK:
        return ""
    if not re.fullmatch(r"\d+(\.\d+)?[kmg]bit", text) or bits_per_second(text) < 1e5:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate; write 200mbit, 1gbit, 2.5gbit or loopback")
    return text


def bits_per_second(text: str) -> float:
    """The number that a rate stands for."""
    return float(text[:-4]) * _UNITS[text[-4:]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``--link`` and ``--nodes``; their values are for :func:`check` and :func:`joined`."""
    what = "what joins the ranks: loopback, 200mbit, 1gbit, ... (loopback)"
    parser.add_argument("--link", nargs="+", type=rate, default=[""], metavar="RATE", help=what)
    where = "with --link: nodes that share out the ranks, in blocks; inside one there is loopback (one for each rank)"
    parser.add_argument("--nodes", type=int, metavar="M", help=where)


def check(rates: Sequence[str], ranks: Sequence[int], nodes: int | None) -> None:
    """Whether ``--link``, ``--ranks`` and ``--nodes`` fit together, before anything is measured.

    Raises:
        ToolError: they do not; says what was given and what would do.
    """
    if nodes is None:
        return
    if not any(rates):
        raise ToolError("--nodes needs a --link between the nodes, such as --link 1gbit; on loopback there is one node")
    uneven = [count for count in ranks if nodes < 1 or count % nodes]
    if uneven:
        raise ToolError(f"--nodes must share out --ranks evenly, got {nodes} nodes for {uneven[0]} ranks")


def joined(text: str, ranks: int, nodes: int | None = None) -> contextlib.AbstractContextManager[Link | None]:
    """What joins the ranks while the context lasts: a network of this rate, or None for loopback; see :func:`shaped`."""
    return shaped(text, ranks, nodes) if text else contextlib.nullcontext()


@contextlib.contextmanager
def shaped(text: str, ranks: int, nodes: int | None = None) -> Iterator[Link]:
    """A network of this rate for as long as the context lasts; however it ends, nothing is left behind.

    What a killed process has left is taken away by the next one.

    Args:
        nodes: how many share out the ranks, in blocks; one for each rank if None.

    Raises:
        ToolError: not Linux, not root, no iproute2, ranks that cannot be shared out, too many nodes, or the system refuses; the
            message says what to do.
    """
    reason = why_not()
    if reason:
        raise ToolError(f"--link {text}: {reason}")
    check([text], [ranks], nodes)
    nodes = nodes or ranks
    if nodes > MAX_NODES:
        raise ToolError(f"--link joins at most {MAX_NODES} nodes, got {nodes}: put more ranks in each with --nodes")
    _sweep()
    base = f"{_PREFIX}{os.getpid()}"
    namespaces = tuple(f"{base}n{node}" for node in range(nodes))
    subnet = f"10.93.{os.getpid() % 256}"  # another one for another benchmark at the same time
    addresses = tuple(f"{subnet}.{node + 1}" for node in range(nodes))
    host = f"{subnet}.254"
    try:
        _run("ip", "link", "add", f"{base}b", "type", "bridge")
        _run("ip", "address", "add", f"{host}/24", "dev", f"{base}b")
        _run("ip", "link", "set", f"{base}b", "up")
        for node, namespace in enumerate(namespaces):
            _plug_in(f"{base}b", f"{base}v{node}", namespace, f"{addresses[node]}/24", text)
        yield Link(text, ranks, namespaces, addresses, host)
    finally:
        _remove(base)


def enter(namespace: str) -> None:
    """Move the calling thread, and threads that it starts from now on, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")


def why_not() -> str:
    """Why there can be no shaped network here; "" if there can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's, this is {sys.platform}; measure without --link"
    missing = [name for name in ("ip", "tc") if not shutil.which(name)]
    if missing:
        return f"{' and '.join(missing)} not found; install iproute2"
    if os.geteuid():
        return "network namespaces need root; run it with sudo -E, or measure without --link"
    return ""


def _plug_in(bridge: str, port: str, namespace: str, address: str, text: str) -> None:
    inside = ("ip", "-n", namespace)
    _run("ip", "netns", "add", namespace)
    _run("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", namespace)
    _run("ip", "link", "set", port, "master", bridge, "up")
    _run(*inside, "address", "add", address, "dev", INTERFACE)
    _run(*inside, "link", "set", INTERFACE, "up")
    _run(*inside, "link", "set", "lo", "up")
    burst = max(_LEAST_BURST, int(bits_per_second(text) / 8 * _BURST_S))
    shape = ("root", "tbf", "rate", text, "burst", str(burst), "latency", "20ms")
    _run("tc", "qdisc", "add", "dev", port, *shape)
    _run("tc", "-n", namespace, "qdisc", "add", "dev", INTERFACE, *shape)


def _sweep() -> None:
    """Remove what processes that no longer run have left."""
    listed = subprocess.run(["ip", "-o", "link", "show", "type", "bridge"], capture_output=True, text=True).stdout
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    found = {int(pid) for pid in re.findall(rf"\b{_PREFIX}(\d+)[bn]", listed + spaces)}
    for pid in found:
        if not os.path.exists(f"/proc/{pid}"):
            _remove(f"{_PREFIX}{pid}")


def _remove(base: str) -> None:
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
    # Cables first: with their namespace they would go too, but some time later.
    for name in re.findall(rf"\b({base}(?:v\d+|b))\b", links):
        subprocess.run(["ip", "link", "delete", name], capture_output=True)
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for namespace in re.findall(rf"^({base}n\d+)\b", spaces, re.MULTILINE):
        subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise ToolError(f"{' '.join(command)} failed: {result.stderr.strip()}")
