"""``make simai SIMAI=DIR``: plain collectives of ten steps by ``plan``, compared with the simulator SimAI.

DIR is a checkout of github.com/aliyun/SimAI; its ``calbusbw.cc``, the analytical mode, is compiled unchanged. A
collective moves S (n-1)/n bytes at the bus bandwidth, an all-reduce twice as many (nccl-tests). Both models get the
same rates. The second comparison adds SimAI's tables of bandwidths by size and nodes, and their ``--hop`` to ``plan``.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ds_zipccl.__main__ import parse
from ds_zipccl.cli import tables
from ds_zipccl.cli.planning import model, speeds
from ds_zipccl.cli.planning import rows as planned
from ds_zipccl.cli.planning.operations import PLAIN, TOTAL, operations, traffic
from ds_zipccl.cli.planning.schedules import DeviceSchedules
from ds_zipccl.cli.tables import Column
from ds_zipccl.policy.cost_model import NVLINK, RDMA_REACH

HERE = Path(__file__).parent
SOURCES = "astra-sim-alibabacloud"
#: Parameters, ZeRO stage, nodes of 8 GPUs, network cards per node, Gbit/s per card.
STEPS = (
    ("7e9", 3, 2, 8, 400), ("7e9", 3, 4, 8, 200), ("7e9", 3, 16, 8, 100), ("70e9", 3, 16, 8, 400), ("70e9", 3, 64, 8, 200),
    ("70e9", 3, 128, 8, 100), ("7e9", 2, 2, 8, 100), ("7e9", 2, 8, 1, 400), ("7e9", 1, 32, 8, 200), ("70e9", 2, 128, 8, 200),
)  # fmt: skip
EACH = 8
#: Operation -> its name in SimAI, and the bytes on a bus in units of S (n-1)/n.
OPS = {"all_gather": ("allgather", 1), "reduce_scatter": ("reducescatter", 1), "all_reduce": ("allreduce", 2)}
#: Column of SimAI's table of network cards -> nodes.
NODES = {3: 4, 4: 8, 5: 16, 6: 32, 7: 64, 8: 128}
MOST = 1 << 30  # bytes; above, hops hardly count

COLUMNS = (
    Column("params", width=6),
    Column("zero", "d"),
    Column("gpus", ",d"),
    Column("network", width=9),
    Column("calls", ",d"),
    *tables.alike("simai_ms ours_ms", ".1f", 9),
    Column("off", "+.0%"),
    *tables.alike("simai_sizes_ms ours_hop_ms", ".1f"),
    Column("off_hop", "+.0%"),
)


class Message(NamedTuple):
    """``times`` operations of ``nbytes`` each."""

    op: str
    nbytes: int
    times: int


def messages(args: argparse.Namespace) -> list[Message]:
    """Return the plain operations of a step."""
    return [
        Message(line.op, nbytes, line.times * count)
        for line in traffic(args)
        for nbytes, count in operations(args, line)
    ]


def built(checkout: Path, folder: Path) -> list[str]:
    """Compile the driver and return its command."""
    system, program = checkout / SOURCES / "astra-sim" / "system", folder / "bandwidths"
    command = ["g++", "-std=c++17", "-w", "-fpermissive", f"-I{checkout / SOURCES}", f"-I{system}"]
    subprocess.run(
        [*command, str(HERE / "bandwidths.cpp"), str(system / "calbusbw.cc"), "-o", str(program)], check=True
    )
    ratios = checkout / SOURCES / "inputs" / "ratio"
    return [str(program), *(str(ratios / f"{name}_ratio.csv") for name in ("nic", "nvlink", "ata"))]


def hop(checkout: Path) -> float:
    """Return the microseconds per further node that SimAI's table implies: the median over its rows up to :data:`MOST`
    and its :data:`NODES`. For S bytes, m nodes and n GPUs, a share r of the rate B is S (n-1)/n / B (1/r-1) / (m-1)."""
    with (checkout / SOURCES / "inputs" / "ratio" / "nic_ratio.csv").open() as file:
        rows = [row for row in csv.reader(file) if row[0].strip().isdigit()]
    found = [
        int(row[0])
        * (EACH * nodes - 1)
        / (EACH * nodes)
        / NVLINK
        * (float(rows[-1][column]) / float(row[column]) - 1)
        / (nodes - 1)
        for row in rows
        if int(row[0]) <= MOST
        for column, nodes in NODES.items()
    ]
    return 1e6 * statistics.median(found)


def compared(program: list[str], each_hop: float) -> Iterator[dict[str, Any]]:
    """Yield a row per step of :data:`STEPS`."""
    for params, zero, nodes, cards, rate in STEPS:
        network = f"{cards}x{rate}gbit"
        words = f"plan --params {params} --zero {zero} --gpus {nodes * EACH} --network {network}/node --live 0 --ratio 1.4 --hop"
        found = messages(model.fill(parse(shlex.split(f"{words} 0"))))
        speed = rate / 8 * RDMA_REACH
        lines = [f"{nodes} {EACH} {cards} {speed} {NVLINK / 1e9} {OPS[one.op][0]} {one.nbytes}" for one in found]
        answers = subprocess.run(program, input="\n".join(lines), capture_output=True, text=True, check=True).stdout
        speeds = [line.split()[1:] for line in answers.splitlines() if line.startswith("result ")]
        theirs = [0.0, 0.0]
        for one, (busbw, ratio) in zip(found, speeds, strict=True):
            moved = one.times * OPS[one.op][1] * one.nbytes * (nodes * EACH - 1) / (nodes * EACH)
            theirs = [theirs[0] + moved / float(busbw) / 1e6, theirs[1] + moved / float(busbw) / float(ratio) / 1e6]
        ours = [_ours(f"{words} {each}") for each in (0.0, each_hop)]
        yield {
            "params": params, "zero": zero, "gpus": nodes * EACH, "network": network, "calls": sum(one.times for one in found),
            "simai_ms": theirs[0], "ours_ms": ours[0], "off": ours[0] / theirs[0] - 1,
            "simai_sizes_ms": theirs[1], "ours_hop_ms": ours[1], "off_hop": ours[1] / theirs[1] - 1,
        }  # fmt: skip


def _ours(words: str) -> float:
    """Return the milliseconds of plain communication in a step."""
    args = model.fill(parse(shlex.split(words)))
    (network,) = args.network
    rows = planned.step(DeviceSchedules.modelled(args, network, speeds.device_codec("assumed-1.0", args.dtype)))
    return float(next(row["ms"] for row in rows if (row["what"], row["variant"]) == (TOTAL, PLAIN)))


def main() -> int:
    """Print the comparison and write it.

    Returns:
        Exit status: 0.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of SimAI")
    parser.add_argument("--json", metavar="FILE", help="write the rows here too")
    args = parser.parse_args()
    each_hop = hop(args.checkout)
    with tempfile.TemporaryDirectory() as folder:
        rows = tables.show(COLUMNS, compared(built(args.checkout, Path(folder)), each_hop))
    tables.say(f"a further node takes {each_hop:.1f} us per operation by SimAI's table of sizes")
    if args.json:
        files = [
            args.checkout / SOURCES / name for name in ("astra-sim/system/calbusbw.cc", "inputs/ratio/nic_ratio.csv")
        ]
        hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
        tables.write_json(args.json, rows, "make simai SIMAI=DIR", made="Computed", hop_us=each_hop, sha256=hashes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
