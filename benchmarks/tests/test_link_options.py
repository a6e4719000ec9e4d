"""``--link`` and ``--nodes``: their syntax, nonsense that they refuse, and the parameters that netem gets."""

from __future__ import annotations

import argparse
import re
import sys
from types import ModuleType
from typing import Any

import pytest
from commands import assert_refused

from ds_zipccl.__main__ import main
from ds_zipccl.benchmarks.links import link, namespaces


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


def test_loopback_is_no_network() -> None:
    assert link.parse("loopback") is None and link.name(None) == "loopback"
    with namespaces.joined(None, 2) as network:
        assert network is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (text, "is not a link; write RATE")
            for text in ("", "1", "1 gbit", "1Gbit", "-1gbit", "1e9bit", "gbit", "1gbit; x")
        ),
        *(
            (text, "is not a link; write RATE")
            for text in ("1gbit,", "1gbit,20", "1gbit,0.1", "1gbit,~2ms", "20ms", "0.1%")
        ),
        *(
            (text, "is not a link; write RATE")
            for text in ("1gbit,0.1%,20ms", "1gbit,20ms,20ms", "1gbit,-1ms", "1gbit,-1%")
        ),
        ("loopback,20ms", "is not a link; write RATE"),
        ("5kbit", "rate must be at least 100kbit"),
        ("1gbit,0ms", "delay must be from 1us to 2s"),
        ("1gbit,2.1s", "delay must be from 1us to 2s"),
        ("1gbit,20ms~0us", "jitter must be from 1us to the delay"),
        ("1gbit,20ms~21ms", "jitter must be from 1us to the delay"),
        ("1gbit,0%", "loss must be above 0% and at most 20%"),
        ("1gbit,100%", "loss must be above 0% and at most 20%"),
    ],
)
def test_nonsense_is_refused(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(message)):
        link.parse(text)
    assert_refused(["bench", "comm", f"--link={text}"], message, capsys)


def test_missing_things_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "comm", "--link", "1gbit", "--op", "broadcast", "--numel", "8K"]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyroute2", None)
        assert main(words) == 2
        assert "pip install 'ds-zipccl[bench]'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "pyroute2", ModuleType("pyroute2"))
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    assert main(words) == 2
    assert "need root" in capsys.readouterr().err
    monkeypatch.setattr(namespaces.sys, "platform", "darwin")
    assert main(words) == 2
    assert "measure without --link" in capsys.readouterr().err


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
    assert_refused(["bench", bench, *words.split()], message, capsys)


def test_what_netem_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay and jitter in microseconds, loss in percent, and room for all packets on their way."""
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


def test_plan_takes_a_rate_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("plan --params 1e9 --gpus 2 --gpus-per-node 1 --link 1gbit,20ms".split()) == 2
    assert (
        "--network 1gbit/gpu, or 1gbit/node for all GPUs of a node together; a delay goes into --latency"
        in capsys.readouterr().err
    )
