"""The network of ``--link``: a network namespace per node, joined by a bridge.

Token buckets at both ends of a node's cable (veth) limit the rates at which the node sends and receives. netem adds
delay, jitter and loss once per packet between nodes. Ranks of one node share its cable, and communicate with each other
over loopback. The network needs Linux, root and pyroute2; delay and loss also need the kernel module sch_netem.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ds_zipccl.tools import ToolError
from ds_zipccl.tools.link import LinkSpec, check

T = TypeVar("T")

#: Name of a node's interface inside its namespace.
INTERFACE = "zip0"
MAX_NODES = 200
#: Rate in bits per second at which tc's 32-bit field of bytes per second overflows.
MAX_SHAPED_RATE = 8.0 * (1 << 32)
_PREFIX = "zc"
_BURST_S = 0.002  # seconds of the rate that may pass in a burst
_LEAST_BURST = 256 << 10  # bytes; the kernel joins segments to up to 64 KiB
_QUEUE_US = 20_000  # longest wait of a packet for tokens; the queue drops packets beyond it
_PACKET_BYTES = 1500  # MTU of a virtual cable
_NETEM_PACKETS = 1000  # default limit of netem's queue


@dataclass(frozen=True)
class Network:
    """A running network. ``namespaces``, ``addresses``: one per node. ``host``: address of the process that made it."""

    spec: LinkSpec
    ranks: int
    namespaces: tuple[str, ...]
    addresses: tuple[str, ...]
    host: str

    @property
    def nodes(self) -> int:
        return len(self.namespaces)

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks in every node."""
        return self.ranks // self.nodes

    def namespace(self, rank: int) -> str:
        """Return the namespace of a rank; each node holds consecutive ranks."""
        return self.namespaces[rank // self.ranks_per_node]

    def start(self, rank: int, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a process in the node of ``rank``; ``options`` are those of subprocess.Popen."""

        # A process starts in the namespace of the thread that starts it.
        started: subprocess.Popen[bytes] = inside(self.namespace(rank), lambda: subprocess.Popen(command, **options))
        return started

    def __str__(self) -> str:
        return self.spec.text


def meeting(network: Network | None) -> dict[str, str]:
    """Rendezvous variables: in the first node of a network; without a network, on loopback at a free port."""
    if network is not None:
        return {"MASTER_ADDR": network.addresses[0], "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": INTERFACE}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}


def first_status(processes: Sequence[subprocess.Popen[bytes]], timeout: float, goodbye: float = 0.0) -> int | None:
    """Wait for processes to end. Return the first status other than 0, else 0; None after ``timeout`` seconds.

    ``goodbye``: seconds that the remaining processes have to end after one has failed.
    """
    failed, deadline = 0, time.monotonic() + timeout
    while any(process.poll() is None for process in processes):
        status = next((process.returncode for process in processes if process.returncode), 0)
        if status and not failed:
            failed, deadline = status, min(deadline, time.monotonic() + goodbye)
        if time.monotonic() > deadline:
            return failed or None
        time.sleep(0.05)
    return failed or next((process.returncode for process in processes if process.returncode), 0)


def joined(
    spec: LinkSpec | None, ranks: int, nodes: int | None = None
) -> contextlib.AbstractContextManager[Network | None]:
    """Give the network of :func:`shaped` during the context, or None for loopback."""
    return contextlib.nullcontext() if spec is None else shaped(spec, ranks, nodes)


@contextlib.contextmanager
def shaped(spec: LinkSpec, ranks: int, nodes: int | None = None) -> Iterator[Network]:
    """Give a network during the context; blocks for about 0.05 s per node.

    The network is removed at the end, also after an exception, SIGTERM or SIGHUP; after SIGKILL, by the next call.

    Args:
        nodes: number of nodes, which hold consecutive ranks; None: one node per rank.

    Raises:
        ToolError: no Linux, root or pyroute2; nodes do not divide ranks; too many nodes; a rate too high for a token
            bucket; or the kernel refuses. The message says what to do.
    """
    reason = why_not()
    if reason:
        raise ToolError(f"--link {spec}: {reason}")
    check([spec], [ranks], nodes)
    nodes = nodes or ranks
    if nodes > MAX_NODES:
        raise ToolError(f"--link joins at most {MAX_NODES} nodes, got {nodes}: put more ranks into a node with --nodes")
    if spec.rate >= MAX_SHAPED_RATE:
        most = f"{MAX_SHAPED_RATE / 1e9:.1f}gbit"
        raise ToolError(f"--link {spec}: a token bucket limits rates below {most}; write a lower rate, or loopback")
    _sweep()
    base = f"{_PREFIX}{os.getpid()}"
    subnet = f"10.93.{os.getpid() % 256}"  # concurrent benchmarks have different subnets
    network = Network(
        spec,
        ranks,
        tuple(f"{base}n{node}" for node in range(nodes)),
        tuple(f"{subnet}.{node + 1}" for node in range(nodes)),
        f"{subnet}.254",
    )
    with _signals_raise():
        try:
            _build(base, network)
            yield network
        finally:
            _remove(base)


def enter(namespace: str) -> None:
    """Move the calling thread, and all threads and processes that it will start, into a network namespace."""
    from pyroute2 import netns

    netns.setns(namespace, flags=0)


def inside(namespace: str, call: Callable[[], T]) -> T:
    """Run ``call`` on a thread in ``namespace`` and return its result; blocks. Its sockets and processes stay there."""

    def on_thread() -> T:
        enter(namespace)
        return call()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(on_thread).result()


def why_not() -> str:
    """Return why this machine cannot make a shaped network; "" if it can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces need Linux, this is {sys.platform}; measure without --link"
    try:
        import pyroute2  # noqa: F401
    except ImportError as error:
        return f"pyroute2 is missing ({error}): pip install 'ds-zipccl[bench]'"
    if os.geteuid():
        return "network namespaces need root; run it with sudo -E, or measure without --link"
    return ""


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Block signals in this thread and in processes that it forks, whose handlers would clean up a second time."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit in the main thread, so that the network is removed."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    caught = {}
    if threading.current_thread() is threading.main_thread():
        wanted = (signal.SIGTERM, signal.SIGHUP)
        caught = {
            number: signal.signal(number, leave) for number in wanted if signal.getsignal(number) is signal.SIG_DFL
        }
    try:
        yield
    finally:
        for number, before in caught.items():
            signal.signal(number, before)


def _build(base: str, network: Network) -> None:
    """Make the bridge and the nodes of ``network``.

    Raises:
        ToolError: the kernel refuses.
    """
    from pyroute2 import IPRoute, NetlinkError

    try:
        with IPRoute() as host:
            host.link("add", ifname=f"{base}b", kind="bridge")
            (bridge,) = host.link_lookup(ifname=f"{base}b")
            host.addr("add", index=bridge, address=network.host, prefixlen=24)
            host.link("set", index=bridge, state="up")
            for node in range(network.nodes):
                _plug_in(host, bridge, f"{base}v{node}", network, node)
    except (NetlinkError, OSError) as error:
        raise ToolError(f"--link {network}: the kernel refuses to make the network: {error}") from error


def _plug_in(host: Any, bridge: int, port: str, network: Network, node: int) -> None:
    """Make a node: its namespace, and its cable to ``bridge`` with a token bucket at both ends. ``host``: an
    IPRoute."""
    from pyroute2 import netns

    spec, namespace = network.spec, network.namespaces[node]
    with _signals_wait():
        netns.create(namespace)
    host.link("add", ifname=port, kind="veth", peer={"ifname": INTERFACE, "net_ns_fd": namespace})
    (outside,) = host.link_lookup(ifname=port)
    host.link("set", index=outside, master=bridge, state="up")
    rate = spec.rate / 8
    bucket = {"rate": rate, "burst": max(_LEAST_BURST, int(rate * _BURST_S)), "latency": _QUEUE_US}
    # Sent bytes pass the bucket first, which slows the sender as a network card does, then the bridge's delay.
    if spec.rate_only:
        host.tc("add", "tbf", outside, **bucket)
    else:
        _add_netem(host, outside, network)
        host.tc("add", "tbf", outside, parent=0x10001, handle=0x20000, **bucket)
    inside(namespace, partial(_set_up_inside, network.addresses[node], bucket, alone=spec.loss > 0))


def _set_up_inside(address: str, bucket: Mapping[str, Any], alone: bool) -> None:
    """Set up the interfaces in the namespace of the calling thread.

    Args:
        bucket: parameters of the token bucket.
        alone: send packets one by one, as on a wire: segments joined to 64 KiB would be lost as one packet.
    """
    from pyroute2 import IPRoute

    with IPRoute() as node:
        (lo,), (cable,) = node.link_lookup(ifname="lo"), node.link_lookup(ifname=INTERFACE)
        node.addr("add", index=cable, address=address, prefixlen=24)
        node.link("set", index=cable, state="up", **({"gso_max_segs": 1} if alone else {}))
        node.link("set", index=lo, state="up")
        node.tc("add", "tbf", cable, **bucket)


def _add_netem(host: Any, port: int, network: Network) -> None:
    """Delay and lose packets that leave the bridge through ``port``.

    Raises:
        ToolError: the kernel has no netem.
    """
    from pyroute2 import NetlinkError

    spec = network.spec
    late = spec.rate / 8 * (spec.delay_us + spec.jitter_us) / 1e6  # bytes in flight from one sender
    limit = _NETEM_PACKETS + int((network.nodes - 1) * late / _PACKET_BYTES)
    times = {"delay": spec.delay_us, "jitter": spec.jitter_us}
    try:
        host.tc("add", "netem", port, handle=0x10000, loss=spec.loss, limit=limit, **times)
    except NetlinkError as error:
        if error.code != errno.ENOENT:
            raise
        raise ToolError(
            f"--link {spec}: this kernel has no netem for delay and loss; run modprobe sch_netem, or give only a rate"
        ) from error


def _sweep() -> None:
    """Remove the networks of processes that have ended."""
    for pid in {int(found[1]) for text in _existing() if (found := re.match(rf"{_PREFIX}(\d+)[bnv]", text))}:
        if not os.path.exists(f"/proc/{pid}"):
            _remove(f"{_PREFIX}{pid}")


def _remove(base: str) -> None:
    """Remove the interfaces and namespaces of ``base``; missing ones are ignored."""
    from pyroute2 import IPRoute, NetlinkError, netns

    mine = re.compile(rf"{base}[bnv]\d*")
    with IPRoute() as host:
        # Cables first: the kernel removes the cables of a deleted namespace only later.
        for link in host.get_links():
            if mine.fullmatch(link.get_attr("IFLA_IFNAME")):
                with contextlib.suppress(NetlinkError):
                    host.link("del", index=link["index"])
    for namespace in filter(mine.fullmatch, netns.listnetns()):
        with contextlib.suppress(OSError):
            netns.remove(namespace)


def _existing() -> list[str]:
    """Return the names of all interfaces and network namespaces."""
    from pyroute2 import IPRoute, netns

    with IPRoute() as host:
        return [*(link.get_attr("IFLA_IFNAME") for link in host.get_links()), *netns.listnetns()]
