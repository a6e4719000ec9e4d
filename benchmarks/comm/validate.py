"""``plan --validate``: predictions of the cost model, compared with measurements of ``bench comm``.

Columns (also the keys of the rows in ``--json``, which has the measured ``profiles`` of link and codec too):

* ``op``, ``numel``, ``ranks``, ``link``, ``variant``: as in ``bench comm``. ``measured_ms``: the median of its times.
* ``predicted_ms``: from :func:`ds_zipccl.policy.cost_model.predict`; plain rows use the known part of gloo's schedules.
  The ratio of coded rows is that of the bytes that raw and coded sent.
* ``off``: predicted / measured. ``ideal_ms``: in plain rows, the prediction for a bandwidth-optimal schedule.

The exit status is 1 if a raw or coded row is off by more than 20%, or a bit is wrong. Plain rows are only counted.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

from ds_zipccl.benchmarks import data
from ds_zipccl.benchmarks.comm import cases as comm_cases
from ds_zipccl.benchmarks.comm import launch
from ds_zipccl.benchmarks.comm.cases import Calibration, Case
from ds_zipccl.benchmarks.links import link, namespaces
from ds_zipccl.cli import tables
from ds_zipccl.cli.tables import Column
from ds_zipccl.ops import TRAFFIC
from ds_zipccl.policy.cost_model import LinkProfile, predict

TOLERANCE = 0.2
_VARIANTS = ("plain", "raw", "coded")
_DATA, _DTYPE, _ITEMSIZE = data.Spec("normal"), "bfloat16", 2
COLUMNS = (
    Column("op", width=14),
    Column("numel", ",d", 11),
    Column("ranks", "d"),
    Column("link", width=8),
    Column("variant"),
    *tables.alike("measured_ms predicted_ms", ".1f"),
    Column("off", ".2f", 5),
    Column("ideal_ms", ".1f"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``plan --validate``."""
    group = parser.add_argument_group("with --validate")
    group.add_argument(
        "--validate",
        action="store_true",
        help="compare the model with measurements between ranks of this machine, joined by --link",
    )
    group.add_argument("--ranks", nargs="+", type=int, default=[2], metavar="N", help="processes (2)")
    group.add_argument("--op", nargs="+", choices=TRAFFIC, default=list(TRAFFIC), metavar="O", help="operations (all)")
    group.add_argument(
        "--numel", nargs="+", type=data.numel, default=[4 << 20, 32 << 20], metavar="N", help="elements (4M 32M)"
    )
    group.add_argument("--repeats", type=int, default=5, metavar="K", help="timings whose median is shown (5)")
    group.add_argument(
        "--timeout", type=float, default=300, metavar="S", help="seconds per case before all ranks are killed (300)"
    )


def main(args: argparse.Namespace) -> int:
    """Measure, predict, compare; 1 if a raw or coded row is off by more than :data:`TOLERANCE` or a bit is wrong."""
    args.link, args.nodes, args.dtype, args.data = args.link or [None], None, [_DTYPE], _DATA
    comm_cases.check(args)
    table, rows, profiles = tables.Table(COLUMNS), [], []
    for ranks, spec in itertools.product(args.ranks, args.link):
        cases: list[Case | Calibration] = [
            Case(op, _DTYPE, numel - numel % ranks, _DATA, args.repeats, args.timeout, _VARIANTS)
            for op in args.op
            for numel in args.numel
        ]
        cases.insert(0, Calibration(args.timeout))
        with namespaces.joined(spec, ranks) as network:
            name = f"plan --validate, {ranks} ranks, {link.name(spec)}"
            first, *found = tables.progress(launch.launch(ranks, cases, network), name, launch.rows_of(cases))
        profiles.append({"ranks": ranks, "link": link.name(spec), "profile": first})
        profile = LinkProfile.from_json(first)
        tables.say(_about(profiles[-1], profile))
        for begin in range(0, len(found), len(_VARIANTS)):
            for row in _compared(found[begin : begin + len(_VARIANTS)], profile):
                rows.append(row)
                table.add(row)
    if args.json:
        tables.write_json(args.json, rows, args.command, profiles=profiles, repeats=args.repeats)
    return _judge(rows)


def _about(entry: dict[str, Any], profile: LinkProfile) -> str:
    coding = ", ".join(
        f"{name} {getattr(profile, name) / 1e9:.1f}" for name in ("encode", "decode", "add", "copy", "add_raw")
    )
    link_ = f"{8 * profile.bandwidth / 1e6:.0f} Mbit/s, alpha {profile.alpha * 1e6:.0f} us, call {profile.call * 1e6:.0f} us"
    return f"{entry['ranks']} ranks, {entry['link']}: {link_}; {coding} GB/s"


def _compared(found: list[dict[str, Any]], profile: LinkProfile) -> list[dict[str, Any]]:
    """Return the rows of one case, one for each variant."""
    wire = {row["variant"]: row["wire_bytes"] for row in found}
    ratio = wire["raw"] / wire["coded"]

    def predicted(row: dict[str, Any], variant: str) -> float:
        return 1e3 * predict(row["op"], variant, row["numel"] * _ITEMSIZE, row["ranks"], profile, ratio)

    rows = []
    for row in found:
        plain, measured = row["variant"] == "plain", row["time_us"] / 1e3
        time = predicted(row, "gloo" if plain else row["variant"])
        new = {"measured_ms": measured, "predicted_ms": time, "off": time / measured, "wrong": row["wrong"]}
        kept = {key: row[key] for key in ("op", "numel", "ranks", "link", "variant")}
        rows.append(kept | new | {"ideal_ms": predicted(row, "plain") if plain else None})
    return rows


def _judge(rows: list[dict[str, Any]]) -> int:
    bad = [row for row in rows if not 1 - TOLERANCE <= row["off"] <= 1 + TOLERANCE]
    gloos = [row for row in bad if row["variant"] == "plain"]
    plain = sum(row["variant"] == "plain" for row in rows)
    tables.say(f"within {TOLERANCE:.0%}: raw and coded {len(rows) - plain - len(bad) + len(gloos)} of {len(rows) - plain}, "
               f"plain {plain - len(gloos)} of {plain} (gloo's own schedules)")  # fmt: skip
    wrong = sum(row["wrong"] for row in rows)
    if wrong:
        tables.complain(f"{wrong} elements differ from the results of the plain collectives")
    if len(bad) > len(gloos):
        tables.complain(f"the model is off by more than {TOLERANCE:.0%} for {len(bad) - len(gloos)} rows of raw and coded; "
                        "other programs on these cores disturb it: raise --repeats")  # fmt: skip
    return int(bool(wrong) or len(bad) > len(gloos))
