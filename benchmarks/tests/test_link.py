"""``--link``: its syntax, the rate, delay and loss measured on a shaped network, and the removal of the network."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from commands import assert_refused
from places import EXAMPLES

from ds_zipccl.tools import ToolError, link, namespaces

EXAMPLE = EXAMPLES / "train_gpt.py"


def needs_network(test: Callable[..., None]) -> Any:
    """Mark a test that shapes the network."""
    why = f"no shaped network here: {namespaces.why_not()}"
    return pytest.mark.network(pytest.mark.skipif(bool(namespaces.why_not()), reason=why)(test))


def has_netem() -> bool:
    """Return whether this machine can make a network with a delay."""
    spec = link.parse("1gbit,1ms")
    assert spec is not None
    try:
        with namespaces.shaped(spec, 2):
            return True
    except ToolError:
        return False


needs_netem = pytest.mark.skipif(bool(namespaces.why_not()) or not has_netem(), reason="netem needs root and sch_netem")


def left_behind(pid: int | None = None) -> list[str]:
    """Return the namespaces and interfaces of a process, by default of this one, not of concurrent ones."""
    names = [*os.listdir("/run/netns"), *(name for _, name in socket.if_nameindex())]
    return [name for name in names if re.fullmatch(rf"zc{pid or os.getpid()}[bnv]\d*", name)]


def shaped(text: str, ranks: int, nodes: int | None = None) -> contextlib.AbstractContextManager[namespaces.Network]:
    spec = link.parse(text)
    assert spec is not None
    return namespaces.shaped(spec, ranks, nodes)


def inside(network: namespaces.Network, rank: int, call: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Return the result of a call in the node of ``rank``; its sockets stay in that node."""
    return namespaces.inside(network.namespace(rank), partial(call, *args, **more))


@contextlib.contextmanager
def connected(network: namespaces.Network) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Give connected TCP sockets of rank 0 and rank 1."""
    with inside(network, 1, socket.create_server, (network.addresses[1], 0)) as server:
        client = inside(network, 0, socket.create_connection, server.getsockname(), timeout=30)
        with client, server.accept()[0] as peer:
            for end in (client, peer):
                end.settimeout(60)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield client, peer


def round_trips(network: namespaces.Network, count: int) -> list[float]:
    """Return the seconds of each of ``count`` round trips of one byte between rank 0 and rank 1."""
    seconds = []
    with connected(network) as (client, peer):
        for _ in range(count):
            start = time.perf_counter()
            client.sendall(b"x")
            peer.sendall(peer.recv(1))
            client.recv(1)
            seconds.append(time.perf_counter() - start)
    return seconds


def transfer_seconds(network: namespaces.Network, nbytes: int) -> float:
    """Return the seconds from the first byte that rank 0 sends to the last that rank 1 receives."""
    with connected(network) as (client, peer), ThreadPoolExecutor(1) as thread:
        start = time.perf_counter()
        sending = thread.submit(client.sendall, bytes(nbytes))
        left = nbytes
        while left:
            left -= len(peer.recv(min(left, 1 << 20)))
        sending.result()
        return time.perf_counter() - start


@needs_network
def test_a_rate_that_no_token_bucket_limits() -> None:
    with pytest.raises(ToolError, match=r"below 34\.4gbit"), shaped("35gbit", 2):
        pass
    with shaped("34.3gbit", 2):
        pass
    assert not left_behind()


@needs_network
def test_ranks_are_placed_in_blocks() -> None:
    with shaped("1gbit", 6, 3) as network:
        assert (network.nodes, network.ranks_per_node, len(set(network.namespaces))) == (3, 2, 3)
        places = [network.namespaces.index(network.namespace(rank)) for rank in range(6)]
        assert places == [0, 0, 1, 1, 2, 2]
        for namespace, address in zip(network.namespaces, network.addresses, strict=True):
            rank = 2 * network.namespaces.index(namespace)
            inside(network, rank, socket.create_server, (address, 0)).close()  # fails for an address of another node
            with pytest.raises(OSError, match="assign requested address"):
                inside(network, (rank + 2) % 6, socket.create_server, (address, 0))
    with shaped("1gbit", 2) as network:
        assert network.namespace(0) != network.namespace(1)


@pytest.mark.alone
@needs_network
def test_nothing_stays_however_it_ends() -> None:
    with pytest.raises(KeyboardInterrupt), shaped("1gbit", 2) as network:
        assert set(network.namespaces) < set(left_behind())
        raise KeyboardInterrupt
    assert not left_behind()
    with shaped("1gbit", 2) as network, pytest.raises(FileNotFoundError):
        network.start(0, ["/nonexistent/program"])
    assert not left_behind()


KILLED = """
import os
from ds_zipccl.tools import link, namespaces
with namespaces.shaped(link.parse('1gbit'), 3):
    os.kill(os.getpid(), {})
"""


@needs_network
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_removes_the_network(number: signal.Signals) -> None:
    # A shell that starts these tests in the background lets them ignore some signals.
    heard = f"import signal; signal.signal({int(number)}, signal.default_int_handler if {number == signal.SIGINT} else signal.SIG_DFL)\n"
    process = subprocess.Popen([sys.executable, "-c", heard + KILLED.format(int(number))], stderr=subprocess.DEVNULL)
    assert process.wait() in (128 + number, -signal.SIGINT)
    assert not left_behind(process.pid)


@needs_network
def test_the_next_call_removes_the_network_of_a_killed_process() -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED.format(9)])
    assert process.wait() == -9
    assert left_behind(process.pid)
    with shaped("1gbit", 2):
        assert left_behind() and not left_behind(process.pid)
    assert not left_behind()


# ---- rate, delay, jitter and loss that programs see -----------------------------------------------------


@needs_network
def test_the_rate_is_seen() -> None:
    """2 MB take 160 ms at 100 Mbit/s; initial tokens let the first quarter of a megabyte pass at once."""
    with shaped("100mbit", 2) as network:
        assert 0.9 * 8 * 1.75e6 / 100e6 < transfer_seconds(network, 2_000_000) < 1.5 * 8 * 2e6 / 100e6
        assert min(round_trips(network, 20)) < 0.005


@needs_netem
def test_the_delay_is_seen() -> None:
    with shaped("100mbit,30ms", 3) as network:
        seconds = sorted(round_trips(network, 11))
        assert seconds[0] > 0.059 and seconds[5] < 0.075
        assert transfer_seconds(network, 2_000_000) > 8 * 1.75e6 / 100e6
    assert not left_behind()


@needs_netem
@pytest.mark.parametrize("loss", [0, 10])
def test_the_loss_is_seen(loss: int) -> None:
    """10% of 2000 packets are 200, within five standard deviations of 13."""
    with shaped(f"100mbit,{loss}%" if loss else "100mbit", 2) as network:
        receiver = inside(network, 1, socket.socket, socket.AF_INET, socket.SOCK_DGRAM)
        sender = inside(network, 0, socket.socket, socket.AF_INET, socket.SOCK_DGRAM)
        with receiver, sender:
            receiver.bind((network.addresses[1], 0))
            arrived = 0
            for burst in range(1, 21):
                for _ in range(100):  # fewer than the receiver's buffer holds
                    sender.sendto(b"x", receiver.getsockname())
                receiver.settimeout(0.02 if burst < 20 else 1)
                with contextlib.suppress(TimeoutError):
                    while True:
                        receiver.recv(1)
                        arrived += 1
        assert abs(2000 - arrived - 20 * loss) <= 65 * (loss > 0)


@needs_netem
def test_packets_get_lost_one_by_one() -> None:
    """Segments of 64 KiB lost as a whole would make 2% loss look like 0.05%."""
    with shaped("1gbit,2%", 2) as network:
        seconds = transfer_seconds(network, 2_000_000)
        sent = inside(network, 0, Path("/proc/thread-self/net/dev").read_text)
        packets = int(re.search(rf"{namespaces.INTERFACE}:(.*)", sent)[1].split()[9])
        assert seconds > 0.016 and packets > 2_000_000 / 1500


@needs_network
def test_a_kernel_without_netem_is_named() -> None:
    """Without netem, the message names it, and no part of the network remains."""
    if has_netem():
        pytest.skip("this kernel has netem")
    with pytest.raises(ToolError, match="modprobe sch_netem"), shaped("1gbit,20ms", 2):
        pass
    assert not left_behind()


# ---- without a network -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("2.5gbit", (2.5e9, 0, 0, 0)),
        ("200mbit", (2e8, 0, 0, 0)),
        ("1gbit,20ms", (1e9, 20_000, 0, 0)),
        ("1gbit,0.1%", (1e9, 0, 0, 0.1)),
        ("100kbit,1.5ms~250us", (1e5, 1500, 250, 0)),
        ("1gbit,2s~1s,20%", (1e9, 2_000_000, 1_000_000, 20)),
    ],
)
def test_links(text: str, wanted: tuple[float, ...]) -> None:
    spec = link.parse(text)
    assert spec is not None
    assert (spec.rate, spec.delay_us, spec.jitter_us, spec.loss) == wanted
    assert str(spec) == link.name(spec) == text
    assert spec.rate_only == (len(text.split(",")) == 1)


@pytest.mark.parametrize(
    ("statuses", "found"), [((0, 0), 0), ((0, 3), 3), ((2, 3), 2), ((None, 3), 3), ((None, 0), None)]
)
def test_the_first_status_of_ranks(statuses: tuple[int | None, ...], found: int | None) -> None:
    """None is the status of a running process. The wait ends after a failure of another process, or the timeout."""
    ranks: Any = [SimpleNamespace(poll=lambda one=one: one, returncode=one) for one in statuses]
    begun = time.monotonic()
    assert namespaces.first_status(ranks, 0.5 if found is None else 60) == found
    assert time.monotonic() - begun < 30


def test_loopback_is_no_network() -> None:
    assert link.parse("loopback") is None and link.name(None) == "loopback"
    with namespaces.joined(None, 2) as network:
        assert network is None


def test_missing_things_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "comm", "--link", "1gbit", "--op", "broadcast", "--numel", "8K"]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyroute2", None)
        assert_refused(words, "pip install 'ds-zipccl[bench]'", capsys)
    monkeypatch.setitem(sys.modules, "pyroute2", ModuleType("pyroute2"))
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    assert_refused(words, "need root", capsys)
    monkeypatch.setattr(namespaces.sys, "platform", "darwin")
    assert_refused(words, "measure without --link", capsys)


def test_what_netem_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """netem gets delay and jitter in microseconds, loss in percent, and room for all packets in flight."""
    pytest.importorskip("pyroute2")
    told: list[Any] = []
    host = type("Host", (), {"tc": lambda self, *args, **more: told.append((args, more))})()
    spec = link.parse("1gbit,20ms~4ms,0.5%")
    assert spec is not None
    namespaces._add_netem(host, 7, namespaces.Network(spec, 3, ("a", "b", "c"), (), ""))
    ((args, more),) = told
    assert args == ("add", "netem", 7)
    assert (more["delay"], more["jitter"], more["loss"], more["handle"]) == (20_000, 4_000, 0.5, 0x10000)
    assert more["limit"] == 1000 + 2 * int(125e6 * 24e-3 / 1500)
