"""Network namespaces joined by a bridge: the network that ``--link`` asks for, one namespace per node.

A token bucket limits the rate at both ends of every node's cable: of the bytes that the node sends, and of those that it receives.
netem adds delay, jitter and loss once on the way from one node to another. Ranks of one node share its cable and reach each other
inside the node at the speed of loopback. Linux, root and pyroute2 are required, and the kernel module sch_netem for delay and loss.
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

from ds_zipccl.benchmarks.links.link import LinkSpec, check
from ds_zipccl.cli import ToolError

T = TypeVar("T")

#: Name of a node's interface inside its namespace.
INTERFACE = "zip0"
MAX_NODES = 200
#: Bits per second from which on tc's 32-bit field of bytes per second overflows.
MAX_SHAPED_RATE = 8.0 * (1 << 32)
_PREFIX = "zc"
_BURST_S = 0.002  # seconds of the rate that may pass at once; a token bucket needs some
_LEAST_BURST = 256 << 10  # bytes; segments are joined to up to 64 KiB on their way
_QUEUE_US = 20_000  # longest time that a packet waits for its tokens; a fuller queue drops it
_PACKET_BYTES = 1500  # MTU of a virtual cable
_NETEM_PACKETS = 1000  # netem's own default for the packets that it holds


@dataclass(frozen=True)
class Network:
    """A network that is up. ``namespaces``, ``addresses``: one per node. ``host``: address of the process that made the network."""

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
        """The same number in every node."""
        return self.ranks // self.nodes

    def namespace(self, rank: int) -> str:
        """Namespace of a rank: the first ranks live in the first node, and so on."""
        return self.namespaces[rank // self.ranks_per_node]

    def start(self, rank: int, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a process in the node of ``rank``; ``options`` as for subprocess.Popen."""

        # A process starts in the namespace of the thread that starts it.
        started: subprocess.Popen[bytes] = inside(self.namespace(rank), lambda: subprocess.Popen(command, **options))
        return started

    def __str__(self) -> str:
        return self.spec.text


def meeting(network: Network | None) -> dict[str, str]:
    """The variables by which ranks meet: in the first node of a network, without one on loopback at a free port."""
    if network is not None:
        return {"MASTER_ADDR": network.addresses[0], "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": INTERFACE}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}


def first_status(processes: Sequence[subprocess.Popen[bytes]], timeout: float, goodbye: float = 0.0) -> int | None:
    """Wait for processes to end; return their first status other than 0, else 0; None after ``timeout`` seconds.

    ``goodbye``: seconds that the others have to end, once one of them has failed.
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
    """Network between the ranks for as long as the context lasts, None for loopback; see :func:`shaped`."""
    return contextlib.nullcontext() if spec is None else shaped(spec, ranks, nodes)


@contextlib.contextmanager
def shaped(spec: LinkSpec, ranks: int, nodes: int | None = None) -> Iterator[Network]:
    """Network for as long as the context lasts; takes about 0.05 s per node.

    The network is removed when the context ends, also by an exception, SIGTERM or SIGHUP. After SIGKILL the next call removes it.

    Args:
        nodes: number of nodes that share out the ranks in blocks; one per rank if None.

    Raises:
        ToolError: not Linux, not root, no pyroute2, ranks that cannot be shared out, too many nodes, a rate too high for a token
            bucket, or the kernel refuses; the message says what to do.
    """
    reason = why_not()
    if reason:
        raise ToolError(f"--link {spec}: {reason}")
    check([spec], [ranks], nodes)
    nodes = nodes or ranks
    if nodes > MAX_NODES:
        raise ToolError(f"--link joins at most {MAX_NODES} nodes, got {nodes}: put more ranks in each with --nodes")
    if spec.rate >= MAX_SHAPED_RATE:
        most = f"{MAX_SHAPED_RATE / 1e9:.1f}gbit"
        raise ToolError(f"--link {spec}: a token bucket limits rates below {most}; write a lower rate, or loopback")
    _sweep()
    base = f"{_PREFIX}{os.getpid()}"
    subnet = f"10.93.{os.getpid() % 256}"  # another one for another benchmark at the same time
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
    """Move the calling thread, and threads and processes that it starts from now on, into a network namespace."""
    from pyroute2 import netns

    netns.setns(namespace, flags=0)


def inside(namespace: str, call: Callable[[], T]) -> T:
    """Result of ``call`` on a thread in ``namespace``, and nowhere else; blocks. Sockets and processes that it makes stay there."""

    def on_thread() -> T:
        enter(namespace)
        return call()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(on_thread).result()


def why_not() -> str:
    """Why no shaped network can be made here; "" if one can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's, this is {sys.platform}; measure without --link"
    try:
        import pyroute2  # noqa: F401
    except ImportError as error:
        return f"pyroute2 is missing ({error}): pip install 'ds-zipccl[bench]'"
    if os.geteuid():
        return "network namespaces need root; run it with sudo -E, or measure without --link"
    return ""


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """No signal interrupts this thread, nor a process that it forks: the fork would run our handlers and clean up twice."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP end the program by an exception, so that the network is removed; only in the main thread."""

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
    """Make the bridge and every node of ``network``.

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
    """Make a node: its namespace, and its cable to the ``bridge`` with a token bucket at both ends. ``host``: an open IPRoute."""
    from pyroute2 import netns

    spec, namespace = network.spec, network.namespaces[node]
    with _signals_wait():
        netns.create(namespace)
    host.link("add", ifname=port, kind="veth", peer={"ifname": INTERFACE, "net_ns_fd": namespace})
    (outside,) = host.link_lookup(ifname=port)
    host.link("set", index=outside, master=bridge, state="up")
    rate = spec.rate / 8
    bucket = {"rate": rate, "burst": max(_LEAST_BURST, int(rate * _BURST_S)), "latency": _QUEUE_US}
    # Sent bytes meet the bucket first, which slows the sender down as a network card does, and the delay on their way from the bridge.
    if spec.rate_only:
        host.tc("add", "tbf", outside, **bucket)
    else:
        _add_netem(host, outside, network)
        host.tc("add", "tbf", outside, parent=0x10001, handle=0x20000, **bucket)
    inside(namespace, partial(_set_up_inside, network.addresses[node], bucket, alone=spec.loss > 0))


def _set_up_inside(address: str, bucket: Mapping[str, Any], alone: bool) -> None:
    """Set up the interfaces of the namespace of the calling thread.

    Args:
        bucket: parameters of the token bucket.
        alone: send every packet alone, as on a wire: segments joined to 64 KiB would get lost as one packet.
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
    late = spec.rate / 8 * (spec.delay_us + spec.jitter_us) / 1e6  # bytes on their way from one sender
    limit = _NETEM_PACKETS + int((network.nodes - 1) * late / _PACKET_BYTES)
    times = {"delay": spec.delay_us, "jitter": spec.jitter_us}
    try:
        host.tc("add", "netem", port, handle=0x10000, loss=spec.loss, limit=limit, **times)
    except NetlinkError as error:
        if error.code != errno.ENOENT:
            raise
        raise ToolError(
            f"--link {spec}: this kernel has no netem for delay and loss; load it with modprobe sch_netem, or write the rate alone"
        ) from error


def _sweep() -> None:
    """Remove networks of processes that no longer run."""
    for pid in {int(found[1]) for text in _existing() if (found := re.match(rf"{_PREFIX}(\d+)[bnv]", text))}:
        if not os.path.exists(f"/proc/{pid}"):
            _remove(f"{_PREFIX}{pid}")


def _remove(base: str) -> None:
    """Remove everything whose name begins with ``base``; things that are gone already are no error."""
    from pyroute2 import IPRoute, NetlinkError, netns

    mine = re.compile(rf"{base}[bnv]\d*")
    with IPRoute() as host:
        # Cables first: with their namespace they would go too, but some time later.
        for link in host.get_links():
            if mine.fullmatch(link.get_attr("IFLA_IFNAME")):
                with contextlib.suppress(NetlinkError):
                    host.link("del", index=link["index"])
    for namespace in filter(mine.fullmatch, netns.listnetns()):
        with contextlib.suppress(OSError):
            netns.remove(namespace)


def _existing() -> list[str]:
    """Names of the interfaces and network namespaces here."""
    from pyroute2 import IPRoute, netns

    with IPRoute() as host:
        return [*(link.get_attr("IFLA_IFNAME") for link in host.get_links()), *netns.listnetns()]
