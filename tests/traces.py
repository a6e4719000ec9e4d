"""Every message and every result of fixed calls and trainings over gloo, as a file; and the differences of two such files.

python tests/traces.py record out/traces.gz                  # all scenarios on 2 and 4 ranks; some minutes
python tests/traces.py record out/traces.gz --only sums      # those with "sums" in their names
python tests/traces.py compare tests/support/traces.gz out/traces.gz

Two records of one commit are equal byte for byte. After a change that shall leave messages as they are, or shall change some on purpose,
``compare`` names every message that is gone, new or of other bits, and every result. Another result is an error, and status 1.

A record has a line for a message: ``> group peer operation+step bytes digest``, by group, peer and tag, and so in program order whatever
threads do; for a collective of the backend: ``= group operation bytes``, without a group on the simulated NCCL; for a result:
``< name digest``. Keys of hashes are fixed, memory that is not written is filled, and nothing is chosen by time. Results of trainings, and
the sizes of their messages, are those of one model of CPU and one version of torch, which the first line names.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import functools
import gzip
import hashlib
import itertools
import json
import os
import platform
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import configurations
import corpus
import forked
import levels
import lossy_calls
import moves
import programs
import sums
import torch
import torch.distributed as dist
from places import TESTS
from test_rows_in_messages import KINDS, rows_like, scaled

from ds_zipccl import comm
from ds_zipccl.comm import topology
from ds_zipccl.comm.context import OpContext
from ds_zipccl.comm.host.gather import SharedBase
from ds_zipccl.comm.transport.protocol import TagRange

RANKS = (2, 4)
#: Seconds of one scenario.
LIMIT_S = 300.0
SIZES = (0, 1, 7, 2049, 20001, 70001)
#: Programs on the simulated NCCL.
SIMULATED = 100
#: Hexadecimal digits of the digest of a message and of a result.
DIGITS = {">": 4, "<": 8}
#: Collectives of torch's process groups.
PLAIN = tuple(
    name
    for name in dir(dist.ProcessGroup)
    if name.lstrip("_").startswith(("all", "reduce", "broadcast", "gather", "scatter"))
)


#: Methods of the transport of NCCL groups.
NCCL = ("all_gather", "all_to_all", "exchange", "max", "reduce_scatter")


def _wrap(owner: Any, name: str, note: Callable[..., None]) -> None:
    """Let ``note`` see the arguments of every call of a function of ``owner``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def noting(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, noting)


class Trace:
    """The messages and results of this rank from now on."""

    def __init__(self) -> None:
        self._groups: dict[Any, int] = {}
        self._labels: dict[tuple[int, int], str] = {}
        self._messages: dict[tuple[int, int, int], list[str]] = defaultdict(list)
        self._plain: dict[int, list[str]] = defaultdict(list)
        self._results: list[str] = []
        self._lock = threading.Lock()
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills memory that is not written
        topology.secret = lambda: bytes(range(16))
        _wrap(dist.ProcessGroup, "send", self._send)
        for name in PLAIN:
            _wrap(dist.ProcessGroup, name, functools.partial(self._collective, name))
        made = OpContext.__init__

        def make(context: OpContext, op: str, group: dist.ProcessGroup, *more: Any, **options: Any) -> None:
            made(context, op, group, *more, **options)
            with self._lock:
                self._labels[self._group(group), context.tag(0)] = f"{op} {context.role}"

        OpContext.__init__ = make

    def _group(self, group: dist.ProcessGroup) -> int:
        return self._groups.setdefault(group, len(self._groups))

    def _send(self, group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> None:
        with self._lock:
            self._messages[self._group(group), peer, tag].append(
                f"{tensors[0].nbytes} {digest(tensors)[: DIGITS['>']]}"
            )

    def _collective(self, name: str, group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> None:
        with self._lock:
            self._plain[self._group(group)].append(f"{name} {_nbytes((args, kwargs))}")

    def result(self, name: str, *tensors: Any) -> None:
        """Note a result."""
        self._results.append(f"{name} {digest(tensors)[: DIGITS['<']]}")

    def lines(self) -> Iterator[str]:
        """Yield the lines of this rank."""
        for (group, peer, tag), noted in sorted(self._messages.items()):
            yield from (f"> {group} {peer} {self._label(group, tag)} {one}" for one in noted)
        for group, called in sorted(self._plain.items()):
            yield from (f"= {group} {one}" for one in called)
        yield from (f"< {one}" for one in self._results)

    def _label(self, group: int, tag: int) -> str:
        for step in range(5):
            if label := self._labels.get((group, tag - step)):
                return f"{label}+{step}"
        kind = max((one for one in TagRange if one <= tag), default=None)
        return f"tag {tag}" if kind is None else f"{kind.name}+{tag - kind}"


def _leaves(values: Any) -> Iterator[Any]:
    """Yield the tensors and texts in any lists and dicts."""
    if isinstance(values, (torch.Tensor, str)):
        yield values
    elif isinstance(values, (list, tuple, dict)):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _leaves(value)


def _nbytes(values: Any) -> int:
    return sum(leaf.nbytes for leaf in _leaves(values) if isinstance(leaf, torch.Tensor))


def digest(values: Any) -> str:
    """Return a hash of the bits of tensors, and of texts, in any lists and dicts."""
    found = hashlib.blake2b()
    for leaf in _leaves(values):
        if isinstance(leaf, str):
            found.update(leaf.encode())
        else:
            flat = leaf.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
            found.update(f"{flat.dtype}{len(flat)}".encode() + flat.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


# ---- calls -----------------------------------------------------------------------------------------------------------


def move(
    trace: Trace, kind: str, sizes: Sequence[int] = SIZES, calls: Sequence[Any] = moves.EVERYTHING, **settings: Any
) -> None:
    for seed, size in enumerate(sizes):
        inputs = [moves.filled(peer, size, corpus.SUMMED[kind], seed) for peer in range(trace.ranks)]
        for call, later in itertools.product(calls, (False, True)):
            outputs, _ = call(moves.coded(**settings), inputs, trace.rank, later)
            trace.result(f"{call.__name__} {size}", outputs)


def add(trace: Trace, kind: str, sizes: Sequence[int] = SIZES[1:], **settings: Any) -> None:
    for seed, (size, fill) in enumerate(itertools.product(sizes, (sums.bell, sums.wild))):
        given = fill(trace.rank, size, corpus.SUMMED[kind], seed)
        for number, call in enumerate(sums.EVERYTHING):
            if size < trace.ranks and "scatter" in call.__name__:
                continue  # gloo refuses empty ones
            op = dist.ReduceOp.AVG if number % 3 == 2 else dist.ReduceOp.SUM
            got = call(moves.coded(**settings), given.clone(), op, bool((seed + number) % 2))
            if got is not None:  # else undefined
                trace.result(f"{call.__name__} {size} {fill.__name__}", got.masked_fill(got.isnan(), torch.nan))


def own(trace: Trace, **settings: Any) -> None:
    """Slices of sums for their owners, of one rank and of several."""
    for seed, kind in enumerate(corpus.SUMMED.values()):
        for size in SIZES[1:]:
            mine = sums.bell(trace.rank, size, kind, seed)
            cuts = [size // 3, size // 4, size - size // 3 - size // 4]
            owners = [(cuts[0], (seed % trace.ranks,)), (cuts[1], (0, 1)), (cuts[2], range(trace.ranks))]
            moves.coded(**settings).reduce_to_owners(mine, owners, dist.ReduceOp.SUM)
            kept = [part for part, (_, who) in zip(mine.split(cuts), owners, strict=True) if trace.rank in who]
            trace.result(f"owners {size}", kept)


def send(trace: Trace, **settings: Any) -> None:
    """Round the ranks, two tags, some tensors twice, in all roles of sends."""
    api, back, on = moves.coded(**settings), (trace.rank - 1) % trace.ranks, (trace.rank + 1) % trace.ranks
    for seed, (kind, size) in enumerate((kind, size) for kind in corpus.SUMMED.values() for size in (*SIZES, 400_000)):
        for turn in range(2):
            more: dict[str, Any] = {"role": "pp", "tag": seed % 2}
            handle = api.isend(moves.filled(trace.rank, size, kind, seed), on, **more)
            got = torch.zeros(size, dtype=kind.dtype)
            if turn:
                api.irecv(got, back, **more).wait()
            else:
                api.recv(got, back, **more)
            handle.wait()
            trace.result(f"send {size}", got)


def based(trace: Trace, **settings: Any) -> None:
    """Gathers of weights that change a little, whose base is the output or memory that the ranks share."""
    api, numel = moves.coded(**settings), 30_000
    stored = SharedBase(comm.allocate_bases([(numel, torch.bfloat16)], "host", dist.group.WORLD))
    whole = torch.zeros(trace.ranks * numel, dtype=torch.bfloat16)
    mine = whole.chunk(trace.ranks)[trace.rank]
    mine.copy_(sums.bell(trace.rank, numel, corpus.BF16, 1))
    for step in range(4):
        mine.view(torch.int16)[step :: 7 + step] += step % 2  # the third step changes nothing
        for base, out in ((comm.IN_PLACE, whole), (stored, torch.empty_like(whole))):
            api.all_gather_into_tensor(out, mine, role="zero_param", base=base)
            trace.result(f"step {step}", out)


def expert_rows(trace: Trace, **settings: Any) -> None:
    """Uneven exchanges of rows of which many are equal, or multiples of each other."""
    api = moves.coded(**settings)
    for turn, width in enumerate((256, 100, 1024, 33)):
        for kind in KINDS:
            counts = [[1 + (37 * turn + 11 * a + 5 * b) % 60 for b in range(trace.ranks)] for a in range(trace.ranks)]
            dtype = (torch.bfloat16, torch.float16, torch.float32)[turn % 3]
            every = [
                [rows_like(n, width, dtype, 99 * turn + 9 * a + b, 1 + n // 3) for b, n in enumerate(line)]
                for a, line in enumerate(counts)
            ]
            given = [scaled(part, turn) for part in every[trace.rank]] if "bwd" in kind else every[trace.rank]
            taken = [line[trace.rank] for line in counts]
            out = torch.zeros(sum(taken), width, dtype=dtype)
            api.all_to_all_single(out, torch.cat(given), taken, counts[trace.rank], role="ep", kind=kind)
            trace.result(f"{kind} of {width}", out)


def lossy(trace: Trace) -> None:
    for call, one in lossy_calls.every_way(trace.rank, trace.ranks, lossy_calls.EVERYTHING, [{}], 3000):
        got, _ = call(one)
        trace.result(f"{call.__name__} {one.codec}", got.masked_fill(got.isnan(), torch.nan))


def by_node(trace: Trace, call: Callable[..., None], **settings: Any) -> None:
    """As if each two ranks had a node."""
    levels.pretend(levels.nodes_of(trace.ranks // 2, 2))
    call(trace, **settings)


# ---- trainings -------------------------------------------------------------------------------------------------------

ZERO3 = {"stage": 3, "stage3_param_persistence_threshold": 100, "stage3_max_reuse_distance": 0}
ALWAYS = {"enabled": True, "mode": "always", "min_bytes": 0}


def train(trace: Trace, folder: Path, model: str, zero: dict[str, Any], section: dict[str, Any], **config: Any) -> None:
    """An engine of DeepSpeed; see :mod:`configurations`."""
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    found: dict[str, Any] = {}
    drawn = {
        "ranks": trace.ranks, "model": model, "width": 192, "init": False, "actions": ["train", "train", "evaluate", "train"],
        "section": ALWAYS | section,
        "config": {"bf16": {"enabled": True}, "zero_optimization": zero, "optimizer": optimizer, **config},
    }  # fmt: skip
    configurations.train(copy.deepcopy(drawn), True, folder, found)
    trace.result("losses and parameters", found)


def pipeline(trace: Trace, **section: Any) -> None:
    """Two stages that send a mask of booleans too."""
    sys.path.append(str(TESTS / "integration"))
    import parallel
    import test_parallel

    os.environ["DS_ZIPCCL"] = json.dumps(ALWAYS | section)
    torch.manual_seed(1)
    lab = parallel.Lab("always", trace.rank, trace.ranks)
    test_parallel.pipeline(lab, zero=1, mask=True)
    found = lab.end()
    trace.result("losses and parameters", found["losses"], found["sha256"])


def fsdp2(trace: Trace, adapters: bool = False, **section: Any) -> None:
    """FSDP2, with all parameters trained or with adapters of frozen ones."""
    import fsdp_lab

    lab = fsdp_lab.Lab(trace.rank, trace.ranks, True, "")
    make = (lambda: fsdp_lab.adapted(fsdp_lab.Model())) if adapters else fsdp_lab.Model
    model = lab.start(make, section)
    lab.train(model, 4)
    lab.end(model)
    for name, found in lab.facts:
        trace.result(name.replace(" ", "."), found)


make = functools.partial
HOST, OWNERS = {"zero3_base": "host"}, {"reduce_bucket_size": 50_000}
#: Name -> scenario.
SCENARIOS: dict[str, Callable[..., None]] = {
    **{f"moves {kind}": make(move, kind=kind) for kind in corpus.SUMMED},
    **{f"sums {kind}": make(add, kind=kind) for kind in corpus.SUMMED},
    "sums fp32 order": make(add, kind="bf16", reduction="fp32"),
    "moves wide": make(move, kind="bf16", sizes=(2049, 20001), codec="wide", block=256),
    "moves raw": make(move, kind="fp32", sizes=(2049, 20001), codec="raw"),
    "moves shadow": make(move, kind="bf16", sizes=(2049,), calls=moves.MOVES["all_gather"], check="shadow"),
    "moves staged": make(move, kind="fp32", sizes=(600_001,), staging_mib=1),
    "sums staged": make(add, kind="bf16", sizes=(600_001,), staging_mib=1),
    "moves by node": make(by_node, call=move, kind="bf16"),
    "sums by node": make(by_node, call=add, kind="bf16", reduction="fp32"),
    "rows by node": make(by_node, call=expert_rows),
    "owners": own, "sends": send, "bases": based, "rows": expert_rows, "rows off": make(expert_rows, rows="off"), "lossy": lossy,
    "train zero1": make(train, model="tied", zero={"stage": 1}, section={}),
    "train zero2": make(train, model="dense", zero={"stage": 2, **OWNERS}, section={}),
    "train zero2 accumulating": make(
        train, model="dense", zero={"stage": 2, "overlap_comm": True}, section={}, gradient_accumulation_steps=2
    ),
    "train zero2 all-reduced": make(train, model="dense", zero={"stage": 2, **OWNERS}, section={"owner_only": "off", "delta": "off"}),
    "train zero3": make(train, model="dense", zero=ZERO3, section={"zero3_base": "off"}),
    "train zero3 base": make(train, model="dense", zero=ZERO3, section=HOST),
    "train zero3 device": make(train, model="tied", zero=ZERO3, section={"zero3_base": "device"}),
    "train zero3 frozen": make(train, model="frozen", zero=ZERO3, section={}),
    "train moe": make(train, model="moe", zero={"stage": 2}, section={}),
    "train pipeline": pipeline,
    "train fsdp2": make(fsdp2, **HOST),
    "train fsdp2 frozen": make(fsdp2, adapters=True),
}  # fmt: skip


def machine() -> str:
    """The parts of this machine that decide the bits of a training."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else platform.processor()
    model = next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), text)
    return f"# torch {torch.__version__}, {model}"


def record(names: Iterable[str], ranks: Sequence[int] = RANKS) -> list[str]:
    """Run scenarios; return the lines of their file. Blocks. Raises AssertionError for one that fails."""
    lines = [machine()]
    for count in ranks:
        if not (named := [name for name in names if count > 2 or "by node" not in name]):
            continue
        with tempfile.TemporaryDirectory() as place:
            words = (json.dumps(named),)
            found = programs.launch(__file__, count, Path(place), *words, timeout=LIMIT_S * len(named))
        for name in named:
            for rank, one in enumerate(forked.of_all_ranks(found, name, count)):
                assert not one["error"], f"{name}, rank {rank} of {count}: {one['error']} {one.get('trace')}"
                lines += [f"# {name}, rank {rank} of {count}", *one["lines"]]
    return lines


def simulated(seeds: Iterable[int]) -> Iterator[str]:
    """Yield the lines of random programs on the simulated NCCL: each rank's collectives of the transport, and its results."""
    from on_sim import random_programs, soak

    from ds_zipccl.comm.transport.nccl import NcclTransport

    noted: dict[int, list[str]] = defaultdict(list)

    def collective(name: str, transport: Any, *args: Any) -> None:
        noted[dist.get_rank()].append(f"= {name} {_nbytes(args)}")

    def result(desk: Any, coded: bool, got: torch.Tensor, want: torch.Tensor) -> None:
        noted[dist.get_rank()].append(f"< {desk.task.op} {digest([got])[: DIGITS['<']]}")

    with mock.patch.multiple(NcclTransport, **{name: getattr(NcclTransport, name) for name in NCCL}):
        for name in NCCL:
            _wrap(NcclTransport, name, functools.partial(collective, name))
        with mock.patch.object(random_programs, "compare", random_programs.compare):
            _wrap(random_programs, "compare", result)
            for seed in seeds:
                noted.clear()
                random_programs.run(seed, soak.route())
                for rank, lines in sorted(noted.items()):
                    yield from (f"# simulated {seed}, rank {rank}", *lines)


def rank_program() -> None:
    place, names = sys.argv[1:]
    folder = Path(place)

    def run(name: str, found: dict[str, Any]) -> None:
        trace, scenario = Trace(), SCENARIOS[name]
        takes_folder = getattr(scenario, "func", None) is train
        scenario(trace, **({"folder": folder / f"{name} saved"} if takes_folder else {}))
        found["lines"] = list(trace.lines())

    forked.each(folder, {name: functools.partial(run, name) for name in json.loads(names)}, LIMIT_S)


# ---- comparison ------------------------------------------------------------------------------------------------------


def differences(old: Sequence[str], new: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the differences of the messages of two records, and those of their results, a line each. One of them may have some scenarios
    alone."""
    told: tuple[list[str], list[str]] = ([], [])
    both = [_sections(lines) for lines in (old, new)]
    told[0].extend(f"{place}: in one record only" for place in sorted(both[0].keys() ^ both[1].keys()))
    for place in filter(both[1].__contains__, both[0]):
        for mark, found in ((">", told[0]), ("=", told[0]), ("<", told[1])):
            before, after = ([line for line in one[place] if line[0] == mark] for one in both)
            for what, a, b, c, d in difflib.SequenceMatcher(None, before, after, False).get_opcodes():
                same = what == "replace" and b - a == d - c
                found += [f"{place}: {line} -> {other}" for line, other in zip(before[a:b], after[c:d]) if same]
                if what != "equal" and not same:
                    found += [f"{place}: gone: {line}" for line in before[a:b]]
                    found += [f"{place}: new: {line}" for line in after[c:d]]
    return told


def _sections(lines: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in lines[1:]:
        if line.startswith("#"):
            found[place := line[2:]] = []
        else:
            found[place].append(line)
    return found


def read(file: Path) -> list[str]:
    """Return the lines of a record."""
    return gzip.decompress(file.read_bytes()).decode().splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record", help="run the scenarios, and write their file")
    one.add_argument("out", type=Path)
    one.add_argument("--only", default="", help="scenarios with this text in their names")
    one = commands.add_parser("compare", help="name every difference of two files; status 1 if a result differs")
    one.add_argument("old", type=Path)
    one.add_argument("new", type=Path)
    args = parser.parse_args()
    if args.command == "record":
        lines = record([name for name in SCENARIOS if args.only in name])
        lines += simulated(range(SIMULATED)) if args.only in "simulated" else ()
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_bytes(gzip.compress("\n".join(lines).encode(), 9, mtime=0))
        counts = [sum(line[0] == mark for line in lines) for mark in ">=<"]
        print("traces: {} messages, {} collectives of the backend, {} results".format(*counts))
        return 0
    old, new = read(args.old), read(args.new)
    if old[0] != new[0]:
        print(f"traces: machines differ, and so may trainings: {old[0][2:]} | {new[0][2:]}")
    messages, results = differences(old, new)
    print("\n".join([*messages, *results, f"traces: {len(messages)} messages and {len(results)} results differ"]))
    return int(bool(results))


if __name__ == "__main__":
    sys.exit(rank_program() if "RANK" in os.environ else main())
