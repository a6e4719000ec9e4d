"""``--link`` and ``--nodes``: options that describe a slow network between the nodes of a benchmark.

:mod:`ds_zipccl.tools.namespaces` makes the network.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ds_zipccl.tools import ToolError

LOOPBACK = "loopback"
MIN_RATE = 1e5  # bits per second
MAX_DELAY_US = 2_000_000
MAX_LOSS = 20.0  # percent
_RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIME_UNITS = {"us": 1, "ms": 1_000, "s": 1_000_000}
_NUMBER, _TIME = r"\d+(?:\.\d+)?", r"\d+(?:\.\d+)?(?:us|ms|s)"
_SYNTAX = re.compile(rf"({_NUMBER}[kmg]bit)(?:,({_TIME})(?:~({_TIME}))?)?(?:,({_NUMBER})%)?")
_EXAMPLES = "write RATE[,DELAY[~JITTER]][,LOSS]: 200mbit, 2.5gbit, 1gbit,20ms, 1gbit,20ms~2ms,0.1%; or loopback"


@dataclass(frozen=True)
class LinkSpec:
    """A value of ``--link``. ``str()`` returns the text of the user.

    ``rate``: bits per second. ``delay_us``: one-way microseconds between nodes. ``jitter_us``: greatest deviation of a
    packet's delay from ``delay_us``. ``loss``: percentage of lost packets.
    """

    text: str
    rate: float
    delay_us: int = 0
    jitter_us: int = 0
    loss: float = 0.0

    def __str__(self) -> str:
        return self.text

    @property
    def rate_only(self) -> bool:
        """Whether the link has neither delay nor loss."""
        return not (self.delay_us or self.loss)


def parse(text: str) -> LinkSpec | None:
    """Parse ``RATE[,DELAY[~JITTER]][,LOSS]``; ``loopback`` gives None (argparse type).

    Raises:
        ArgumentTypeError: the text is not a link, or a number is out of its range.
    """
    if text == LOOPBACK:
        return None
    match = _SYNTAX.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a link; {_EXAMPLES}")
    rate, delay, jitter, loss = match.groups()
    spec = LinkSpec(
        text, float(rate[:-4]) * _RATE_UNITS[rate[-4:]], _microseconds(delay), _microseconds(jitter), float(loss or 0)
    )
    wrong = {
        f"the rate must be at least {MIN_RATE / 1e3:g}kbit": spec.rate < MIN_RATE,
        f"the delay must be from 1us to {MAX_DELAY_US / 1e6:g}s; leave it out for none": delay is not None
        and not 1 <= spec.delay_us <= MAX_DELAY_US,
        "the jitter must be from 1us to the delay; leave it out for none": jitter is not None
        and not 1 <= spec.jitter_us <= spec.delay_us,
        f"the loss must be above 0% and at most {MAX_LOSS:g}%; leave it out for none": loss is not None
        and not 0 < spec.loss <= MAX_LOSS,
    }
    for rule, broken in wrong.items():
        if broken:
            raise argparse.ArgumentTypeError(f"{text!r}: {rule}")
    return spec


def _microseconds(text: str | None) -> int:
    if text is None:
        return 0
    unit = text.lstrip("0123456789.")
    return round(float(text.removesuffix(unit)) * _TIME_UNITS[unit])


def name(spec: LinkSpec | None) -> str:
    """Return the ``link`` column: the text of the user, or "loopback"."""
    return LOOPBACK if spec is None else spec.text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``--link`` and ``--nodes``."""
    joins = (
        "network between the nodes: loopback, or RATE[,DELAY[~JITTER]][,LOSS] such as 1gbit or 1gbit,20ms~2ms,0.1%%; "
        "DELAY is one way, LOSS a share of the packets (loopback)"
    )
    parser.add_argument("--link", nargs="+", type=parse, default=[None], metavar="LINK", help=joins)
    shares = (
        "with --link, or --backend slots: number of nodes, which hold consecutive ranks (with a link: one per rank)"
    )
    parser.add_argument("--nodes", type=int, metavar="M", help=shares)


def check(links: Sequence[LinkSpec | None], ranks: Sequence[int], nodes: int | None, on_loopback: bool = False) -> None:
    """Check that ``--link``, ``--ranks`` and ``--nodes`` agree. ``on_loopback``: nodes need no link between them.

    Raises:
        ToolError: the options disagree; the message has the numbers and the rule.
    """
    if nodes is None:
        return
    if not any(links) and not on_loopback:
        raise ToolError("--nodes needs a --link between the nodes, such as --link 1gbit; on loopback there is one node")
    uneven = [count for count in ranks if nodes < 1 or count % nodes]
    if uneven:
        raise ToolError(f"--nodes must divide --ranks evenly, got {nodes} nodes for {uneven[0]} ranks")
