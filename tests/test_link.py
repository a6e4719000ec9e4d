"""``--link``: a shaped network of namespaces, what is measured on it, and that nothing of it stays."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_zipccl.__main__ import main
from ds_zipccl.tools import ToolError, link

needs_network = pytest.mark.skipif(bool(link.why_not()), reason=f"no shaped network here: {link.why_not()}")


def left_behind() -> str:
    """Namespaces and bridges with our names."""
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    bridges = subprocess.run(["ip", "-o", "link", "show", "type", "bridge"], capture_output=True, text=True).stdout
    return "\n".join(line for line in (spaces + bridges).splitlines() if "zc" in line)


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


@needs_network
def test_training_over_a_link(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    words = ["--mode", "zero2", "--size", "tiny", "--steps", "4", "--skip", "1", "--json", str(path)]
    assert main(["bench", "train", "--link", "500mbit", *words]) == 0
    plain, coded = rows(path)
    assert (plain["link"], coded["link"]) == ("500mbit", "500mbit")
    assert plain["params_sha256"] == coded["params_sha256"]
    assert not left_behind()


@needs_network
def test_nothing_stays_however_it_ends() -> None:
    with pytest.raises(KeyboardInterrupt), link.shaped("1gbit", 2) as network:
        assert all(name in left_behind() for name in network.namespaces)
        raise KeyboardInterrupt
    assert not left_behind()
    # A process that is killed cannot clean up: the next one does.
    killed = "import os; from ds_zipccl.tools import link\nwith link.shaped('1gbit', 3): os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", killed], cwd=Path(__file__).parent).returncode == -9
    assert left_behind()
    with link.shaped("1gbit", 2):
        assert f"zc{os.getpid()}" in left_behind()
    assert not left_behind()
