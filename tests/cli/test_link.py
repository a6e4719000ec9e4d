"""``--link``: a shaped network of namespaces, what is measured on it, and that nothing of it stays."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from places import EXAMPLES

from ds_zipccl.__main__ import main
from ds_zipccl.bench import ToolError, link

EXAMPLE = EXAMPLES / "train_gpt.py"
needs_network = pytest.mark.skipif(bool(link.why_not()), reason=f"no shaped network here: {link.why_not()}")


def left_behind(pid: int | None = None) -> str:
    """Namespaces and bridges of a process, of this one if None; others may be measuring at the same time."""
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    bridges = subprocess.run(["ip", "-o", "link", "show", "type", "bridge"], capture_output=True, text=True).stdout
    return "\n".join(
        line for line in (spaces + bridges).splitlines() if re.search(rf"zc{pid or os.getpid()}[bn]", line)
    )


def rows(path: Path) -> list[dict[str, object]]:
    return list(json.loads(path.read_text())["rows"])


def test_rates() -> None:
    assert link.rate("2.5gbit") == "2.5gbit" and link.bits_per_second("2.5gbit") == 2.5e9
    assert link.bits_per_second(link.rate("200mbit")) == 2e8
    assert link.rate("loopback") == ""
    for text in ("", "1", "1 gbit", "1Gbit", "-1gbit", "1e9bit", "gbit", "5kbit", "1gbit; reboot"):
        with pytest.raises(argparse.ArgumentTypeError, match="not a rate"):
            link.rate(text)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(link.shutil, "which", lambda name: None)
    assert main(["bench", "comm", "--link", "1gbit", "--op", "broadcast", "--numel", "8K"]) == 2
    assert "install iproute2" in capsys.readouterr().err
    monkeypatch.setattr(link.shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(link.os, "geteuid", lambda: 1000)
    with pytest.raises(ToolError, match="need root"), link.shaped("1gbit", 2):
        pass


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--link 1gbit --ranks 4 6 --nodes 4", "got 4 nodes for 6 ranks"),
        ("--link 1gbit --ranks 2 --nodes 4", "got 4 nodes for 2 ranks"),
        ("--link 1gbit --ranks 2 --nodes 0", "got 0 nodes for 2 ranks"),
        ("--link loopback --ranks 2 --nodes 2", "--nodes needs a --link"),
    ],
)
@pytest.mark.parametrize("bench", ["comm", "train"])
def test_nodes_share_out_ranks_evenly(bench: str, words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", bench, *words.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.network
@needs_network
def test_ranks_are_placed_in_blocks() -> None:
    with link.shaped("1gbit", 6, 3) as network:
        assert (network.nodes, network.ranks_per_node, len(set(network.namespaces))) == (3, 2, 3)
        places = [network.namespaces.index(network.namespace(rank)) for rank in range(6)]
        assert places == [0, 0, 1, 1, 2, 2]
        for namespace, address in zip(network.namespaces, network.addresses, strict=True):
            shown = subprocess.run(["ip", "-n", namespace, "address"], capture_output=True, text=True).stdout
            assert f"{address}/24" in shown
    with link.shaped("1gbit", 2) as network:
        assert network.namespace(0) != network.namespace(1)


@pytest.mark.full(reason="ten seconds with nobody beside; test_collectives_take_as_long_as_the_link_needs stays")
@pytest.mark.alone
@needs_network
def test_ranks_of_one_node_do_not_use_the_link(tmp_path: Path) -> None:
    """4 MB between two ranks need 168 ms on the link; inside a node they take a few."""
    times = {}
    for nodes in (1, 2):
        path = tmp_path / f"{nodes}.json"
        words = f"--op all_to_all --numel 4M --repeats 3 --ranks 2 --nodes {nodes} --json {path}"
        assert main(["bench", "comm", "--link", "200mbit", *words.split()]) == 0
        times[nodes] = {row["variant"]: row["time_us"] / 1e6 for row in rows(path)}
        assert {row["nodes"] for row in rows(path)} == {nodes}
    for variant, wire_bytes in {"plain": 4 << 20, "raw": 4 << 20, "coded": 4 << 20 >> 1}.items():
        assert times[2][variant] > 0.8 * 8 * wire_bytes / 200e6
        assert times[1][variant] < times[2][variant] / 3


@pytest.mark.alone
@needs_network
def test_collectives_take_as_long_as_the_link_needs(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    words = ["--op", "all_gather", "--numel", "2M", "--repeats", "3", "--ranks", "2", "3", "--json", str(path)]
    assert main(["bench", "comm", "--link", "200mbit", *words]) == 0
    found = rows(path)
    assert [(row["ranks"], row["link"]) for row in found] == [(2, "200mbit")] * 3 + [(3, "200mbit")] * 3
    for row in found:
        least = 8 * row["wire_bytes"] / 200e6
        assert 0.8 * least < row["time_us"] / 1e6 < 4 * least, row
        assert row["wrong"] == 0
    for _, raw, coded in (found[:3], found[3:]):
        assert raw["time_us"] > 1.2 * coded["time_us"]  # 1.5 times fewer bytes
    assert not left_behind()


@pytest.mark.full(reason="test_bench_train trains, test_collectives_take_as_long_as_the_link_needs has the link")
@pytest.mark.network
@needs_network
def test_training_over_a_link(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    words = ["--mode", "zero2", "--size", "tiny", "--steps", "4", "--skip", "1", "--json", str(path)]
    assert main(["bench", "train", "--link", "500mbit", *words]) == 0
    plain, coded = rows(path)
    assert (plain["link"], coded["link"], plain["nodes"]) == ("500mbit", "500mbit", 2)
    assert plain["params_sha256"] == coded["params_sha256"]
    # A step sends about a fifth of the run's bytes, initialisation the rest; nothing of it hides behind computing.
    assert plain["comm_ms"] > 0.7 * 1000 * 8 * plain["logical_bytes"] / 5 / 500e6
    assert not left_behind()


@pytest.mark.network
@pytest.mark.full(reason="half a minute; test_ranks_are_placed_in_blocks and test_training_over_a_link stay")
@needs_network
def test_training_on_nodes(tmp_path: Path) -> None:
    """Two nodes of two ranks each: every process is told where it is, and the bits are those of any other placement."""
    places, path = tmp_path / "places", tmp_path / "rows.json"
    places.mkdir()
    script = tmp_path / "train_gpt.py"
    script.write_text(
        f"""
import json, os, pathlib, subprocess, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
place = [int(os.environ[name]) for name in names]
where = subprocess.run(["ip", "netns", "identify"], capture_output=True, text=True).stdout.strip()
pathlib.Path({str(places)!r}, str(place[0])).write_text(json.dumps([place, where]))
sys.path.insert(0, {str(EXAMPLE.parent)!r})
import train_gpt
sys.exit(train_gpt.main())
"""
    )
    for config in EXAMPLE.parent.glob("*.json"):
        (tmp_path / config.name).write_text(config.read_text())
    words = "--mode zero3 --size tiny --ranks 4 --nodes 2 --link 1gbit --steps 2 --skip 1"
    assert main(["bench", "train", *words.split(), "--script", str(script), "--json", str(path)]) == 0
    assert [(row["ranks"], row["nodes"]) for row in rows(path)] == [(4, 2)] * 2
    found = [json.loads((places / str(rank)).read_text()) for rank in range(4)]
    assert [place for place, _ in found] == [[0, 0, 4, 2], [1, 1, 4, 2], [2, 0, 4, 2], [3, 1, 4, 2]]
    first, second, third, fourth = (where for _, where in found)
    assert first == second != third == fourth


@pytest.mark.alone
@needs_network
def test_nothing_stays_however_it_ends() -> None:
    with pytest.raises(KeyboardInterrupt), link.shaped("1gbit", 2) as network:
        assert all(name in left_behind() for name in network.namespaces)
        raise KeyboardInterrupt
    assert not left_behind()
    # A process that is killed cannot clean up: the next one does.
    killed = "import os; from ds_zipccl.bench import link\nwith link.shaped('1gbit', 3): os.kill(os.getpid(), 9)"
    process = subprocess.Popen([sys.executable, "-c", killed], cwd=Path(__file__).parent)
    assert process.wait() == -9
    assert left_behind(process.pid)
    with link.shaped("1gbit", 2):
        assert left_behind() and not left_behind(process.pid)
    assert not left_behind()
