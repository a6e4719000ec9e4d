"""Wrong tensors are refused before a launch, with words that say what was got, what was wanted and what to do. Calls with right ones, which
schedules are made of, bring no word to the host, and take little of its time.

A launch with a wrong address would end the CUDA context. Here nothing is launched: the launcher counts.
"""

from __future__ import annotations

import ast
import inspect
import timeit
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_frames import CPU, NoLauncher
from torch.utils._python_dispatch import TorchDispatchMode

from ds_zipccl.kernels.cuda import backend, jobs, launches
from ds_zipccl.kernels.cuda.backend import CudaBackend, GatherTable, Own, Parameter, frame_bytes, new_status

BF16, BYTES = torch.bfloat16, torch.uint8


def good() -> dict[str, Any]:
    """Arguments of every call, all of them right."""
    staging = torch.zeros(2 * 8192, dtype=BYTES)
    return {
        "words": [torch.zeros(300, dtype=BF16)],
        "base": [torch.ones(300, dtype=BF16)],
        "slots": [torch.zeros(1024, dtype=BYTES)],
        "code": "cascade",
        "block": 1024,
        "status": new_status(CPU),
        "overflows": torch.zeros(1, dtype=torch.int32),
        "staging": staging,
        "part": staging[:8192],
        "outs": [torch.zeros(600, dtype=BF16)],
        "table": GatherTable([Parameter(300, 8192)], BF16, 1024, 2),
        "skip": 0,
        "rows": staging.view(2, 8192),
        "own": Own(torch.zeros(300, dtype=BF16), 0),
        "sums": torch.zeros(300, dtype=BF16),
        "dtype": BF16,
        "headers": torch.zeros(32, dtype=BYTES),
        "hashes": torch.zeros(2, dtype=torch.int64),
    }


#: call -> how it is called with the arguments above.
CALLS: dict[str, Callable[[CudaBackend, dict[str, Any]], None]] = {
    "encode_frames": lambda r, a: r.encode_frames(a["words"], a["code"], a["block"], a["slots"], a["overflows"]),
    "decode_frames": lambda r, a: r.decode_frames(a["slots"], a["block"], a["words"], a["status"]),
    "encode_delta_frames": lambda r, a: r.encode_frames(
        a["words"], "delta", a["block"], a["slots"], a["overflows"], a["base"]
    ),
    "decode_delta_frames": lambda r, a: r.decode_frames(a["slots"], a["block"], a["words"], a["status"], a["base"]),
    "encode_gather": lambda r, a: r.encode_gather(a["words"], a["code"], a["table"], a["part"], a["overflows"]),
    "decode_gather": lambda r, a: r.decode_gather(a["staging"], a["table"], a["outs"], a["skip"], a["status"]),
    "decode_sum_frames": lambda r, a: r.decode_sum_frames(
        a["slots"], a["block"], a["dtype"], a["sums"], a["status"], a["own"]
    ),
    "decode_sum_rows": lambda r, a: r.decode_sum_frames(
        a["rows"], a["block"], a["dtype"], a["sums"], a["status"], a["own"]
    ),
    "frame_sizes": lambda r, a: r.frame_sizes(a["words"], a["code"], a["block"], a["headers"]),
    "hash_regions": lambda r, a: r.hash_regions(a["words"], a["hashes"]),
}


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def gaps(tensor: torch.Tensor) -> torch.Tensor:
    """As many elements, and not contiguous."""
    return tensor.new_zeros(2 * tensor.numel())[::2]


NO_WORDS = ("decode_gather", "decode_sum_frames", "decode_sum_rows")
SLOTS = [call for call in CALLS if call.endswith("_frames")]
#: Calls, the argument that is wrong, the wrong value, words of the message.
WRONG: list[tuple[str, str, Any, str]] = [
    *((call, "words", [elsewhere(torch.zeros(300, dtype=BF16))], "meta") for call in CALLS if call not in NO_WORDS),
    *((call, "words", [gaps(torch.zeros(300, dtype=BF16))], r"strides \(2,\).*contiguous") for call in CALLS if call not in NO_WORDS),
    ("encode_frames", "words", [torch.zeros(300, dtype=torch.float64)], "no kernel for dtype torch.float64; choose one of"),
    ("encode_frames", "words", [], "got 1 slots for 0 segments"),
    ("encode_frames", "code", "zip", "no kernel for code zip; choose one of cascade, wide, raw"),
    ("encode_frames", "code", "delta", "got no bases for code delta; bases belong to the code delta"),
    ("encode_frames", "block", 64, "no kernel for block 64; choose one of 128, 256, 512, 1024"),
    ("decode_frames", "block", 2048, "no kernel for block 2048"),
    *((call, "slots", [torch.zeros(1025, dtype=BYTES)[1:]], "slot 0: frames start at multiples of 16 bytes") for call in SLOTS),
    *((call, "slots", [torch.zeros(1024, dtype=torch.int8)], "slot 0: got torch.int8") for call in SLOTS),
    ("encode_frames", "slots", [torch.zeros(31, dtype=BYTES)], "a slot holds at least the 32 bytes of a header, got 31"),
    ("encode_frames", "overflows", torch.zeros(1, dtype=torch.int64), "overflows: got torch.int64"),
    ("encode_frames", "overflows", torch.zeros(2, dtype=torch.int32), r"overflows: got .*shape \(2,\)"),
    *((call, "status", torch.zeros(1, dtype=torch.int32), "status: got torch.int32.*use new_status") for call in CALLS if "decode" in call),
    ("decode_frames", "status", elsewhere(new_status(CPU)), "status: got torch.int64 on meta"),
    ("decode_frames", "words", [torch.zeros(300, dtype=BF16)] * 2, "got 2 outputs for 1 slots"),
    ("decode_frames", "words", [torch.zeros(300).to(torch.float8_e4m3fnuz)], "no kernel for dtype torch.float8_e4m3fnuz"),
    ("encode_delta_frames", "base", [torch.zeros(299, dtype=BF16)], "got 299 words of base 0 for 300 words of its segment"),
    ("decode_delta_frames", "base", [torch.zeros(299, dtype=BF16)], "got 299 words of base 0 for 300 words of its output"),
    ("encode_delta_frames", "base", [torch.zeros(300)], "base 0: got torch.float32"),
    ("encode_delta_frames", "base", [], "got 0 bases for 1 segments"),
    ("encode_delta_frames", "words", [torch.zeros(300, dtype=torch.float8_e5m2)], "base 0: got torch.bfloat16 on cpu"),
    ("encode_gather", "words", [torch.zeros(299, dtype=BF16)], "segment 0: got 299 words, the table has 300"),
    ("encode_gather", "words", [torch.zeros(300, dtype=torch.float16)], "segment 0: got torch.float16"),
    ("encode_gather", "words", [torch.zeros(300, dtype=BF16)] * 2, "got 2 segments for 1 parameters"),
    ("encode_gather", "code", "delta", "got no bases for code delta"),
    ("encode_gather", "part", torch.zeros(8176, dtype=BYTES), "part 0: .* 8192 bytes.*got 8176"),
    ("encode_gather", "part", torch.zeros(8193, dtype=BYTES)[1:], "part 0: frames start at multiples of 16"),
    ("decode_gather", "staging", torch.zeros(8192, dtype=BYTES), "staging 0: .* 16384 bytes.*got 8192"),
    ("decode_gather", "staging", elsewhere(torch.zeros(16384, dtype=BYTES)), "these kernels work on cpu tensors"),
    ("decode_gather", "outs", [torch.zeros(599, dtype=BF16)], "output 0: got 599 words, the shards of 2 ranks end at word 600"),
    ("decode_gather", "outs", torch.zeros(599, dtype=BF16), "output 0: got 599 words"),
    ("decode_gather", "outs", [torch.zeros(600, dtype=torch.float16)], "output 0: got torch.float16"),
    ("decode_gather", "outs", [], "got 0 outputs for 1 parameters"),
    ("decode_gather", "skip", 2, "got rank 2 to skip, the table has 2 ranks"),
    ("decode_sum_frames", "slots", [torch.zeros(1024, dtype=BYTES)] * 48, "got 49 summands in a list, at most 48; put the slots"),
    ("decode_sum_frames", "own", Own(torch.zeros(300, dtype=BF16), 2), "got 2 as the place of the own words, there are 2 summands"),
    ("decode_sum_frames", "own", Own(torch.zeros(301, dtype=BF16), 0), "got 301 own words for 300 sums"),
    ("decode_sum_frames", "own", Own(torch.zeros(300), 0), "own words 0: got torch.float32"),
    ("decode_sum_frames", "sums", torch.zeros(300, dtype=torch.float16), "no kernel for sums in torch.float16; choose one of"),
    ("decode_sum_frames", "dtype", torch.float8_e5m2, "no kernel for sums of torch.float8_e5m2"),
    ("decode_sum_rows", "rows", torch.zeros(2, 8200, dtype=BYTES), r"summands: got torch.uint8 .*\(2, 8200\).*multiples of 16 bytes"),
    ("decode_sum_rows", "rows", torch.zeros(8192, dtype=BYTES), "wanted a matrix"),
    ("decode_sum_rows", "rows", torch.zeros(0, 8192, dtype=BYTES), "wanted a matrix"),
    ("decode_sum_rows", "rows", torch.zeros(8192, dtype=BYTES).expand(2, 8192), "rows do not overlap"),
    ("decode_sum_rows", "rows", torch.zeros(2, 299, dtype=BF16), "got 299 words in a row for 300 sums"),
    ("decode_sum_rows", "rows", torch.zeros(2, 300), "wanted a matrix on cpu of uint8 .* or of torch.bfloat16"),
    ("frame_sizes", "headers", torch.zeros(64, dtype=BYTES), "got 64 bytes of headers for 1 segments; give 32 for each"),
    ("hash_regions", "hashes", torch.zeros(3, dtype=torch.int64), "got 3 elements of hashes for 1 regions; give 2 for each"),
    ("hash_regions", "hashes", torch.zeros(2), "hashes 0: got torch.float32"),
]  # fmt: skip


def test_good_arguments_are_launched() -> None:
    for call in CALLS:
        launcher = NoLauncher()
        CALLS[call](CudaBackend(launcher, "cpu"), good())
        assert len(launcher.names) == 1, call


@pytest.mark.parametrize(
    ("call", "name", "value", "message"), WRONG, ids=[f"{call}-{name}-{i}" for i, (call, name, *_) in enumerate(WRONG)]
)
def test_a_wrong_argument(call: str, name: str, value: Any, message: str) -> None:
    launcher = NoLauncher()
    with pytest.raises(ValueError, match=message):
        CALLS[call](CudaBackend(launcher, "cpu"), {**good(), name: value})
    assert not launcher.names


@pytest.mark.parametrize("call", CALLS)
def test_tensors_of_the_host_are_not_for_cuda(call: str) -> None:
    launcher = NoLauncher()
    with pytest.raises(ValueError, match=r"these kernels work on cuda tensors; copy it there with \.to\(\)"):
        CALLS[call](CudaBackend(launcher), good())
    assert not launcher.names


FIRST = Parameter(10, 64)
#: What is wrong in a table of two parameters of bf16 in blocks of 1024, gathered by two ranks, and words of the message.
TABLES: list[tuple[dict[str, Any], str]] = [
    ({"parameters": [FIRST, Parameter(300, 1000)]}, "slot of parameter 1: got 1000 bytes, wanted a multiple of 16"),
    ({"parameters": [FIRST, Parameter(300, 16)]}, "slot of parameter 1: got 16 bytes, wanted .* at least 32"),
    ({"parameters": [FIRST, Parameter(300, 1024, 299)]}, "parameter 1: got 300 words .* 299 from rank to rank; shards must not overlap"),
    ({"parameters": [FIRST, Parameter(-1, 1024)]}, "parameter 1: got -1 words"),
    ({"parameters": [FIRST, Parameter(300, 1024, start=-1)]}, "from word -1 on"),
    ({"parameters": [FIRST, Parameter(1 << 36, 1024)]}, "bytes of words for a frame, at most"),
    ({"parameters": []}, "a gather has parameters"),
    ({"block": 64}, "no kernel for"),
    ({"ranks": 0}, "a gather has parameters"),
    ({"ranks": 1 << 16}, "a gather has parameters"),
    ({"dtype": torch.float8_e4m3fnuz}, "no kernel for"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "message"), TABLES)
def test_a_wrong_table(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GatherTable(**{"parameters": [FIRST, FIRST], "dtype": BF16, "block": 1024, "ranks": 2, **wrong})


# --- right arguments: no word comes to the host, and the calls take little of its time


class HostWords(TorchDispatchMode):
    """Notices operations that bring a word to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal, torch.ops.aten.nonzero):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_no_call_brings_a_word_to_the_host() -> None:
    launcher = NoLauncher()
    route, given = CudaBackend(launcher, "cpu"), good()
    with HostWords() as seen:
        for call in CALLS.values():
            call(route, given)
        route.encode_gather(given["words"], "delta", given["table"], given["part"], given["overflows"], given["base"])
        route.decode_gather(given["staging"], given["table"], given["outs"][0], 0, given["status"], given["outs"][0])
        frame_bytes(given["headers"].view(1, 32)).max()
    assert len(launcher.names) == len(CALLS) + 2
    assert seen.found == []
    with HostWords() as seen:
        assert bool(torch.ones(1)) and int(torch.ones(1)) == 1
    assert len(seen.found) == 2


def test_no_source_of_a_call_asks_a_tensor() -> None:
    """Also on paths that the calls above do not take. ``region_hash`` and the payload calls, which wait, are in the same classes."""
    wait = {"encode_payloads", "decode_payload", "region_hash"}
    wait |= {"find_rows", "encode_rounded", "encode_scaled", "decode_scaled", "encode_zfp"}
    asked = []
    for source in (
        jobs.GatherTable,
        jobs.regular_summands,
        jobs.listed_summands,
        backend.CudaBackend,
        launches.Launches,
    ):
        for node in ast.walk(ast.parse(inspect.getsource(source))):
            if isinstance(node, ast.FunctionDef) and node.name not in wait:
                called = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
                names = {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in called}
                asked += [
                    f"{node.name}: {name}"
                    for name in names & {"item", "tolist", "bool", "numpy", "cpu", "synchronize", "nonzero"}
                ]
    assert asked == []


@pytest.mark.flaky(reruns=2)
def test_python_time_of_a_gather() -> None:
    """20 parameters over 64 ranks: at most 200 microseconds of Python (the best of some, on a slow machine; a launch that does nothing)."""
    route, ranks = CudaBackend(NoLauncher(), "cpu"), 64
    parameters = [Parameter(1000 + number, 4096) for number in range(20)]
    table = GatherTable(parameters, torch.bfloat16, 1024, ranks)
    outs = [torch.zeros(parameter.numel * ranks, dtype=torch.bfloat16) for parameter in parameters]
    shards = [out[: parameter.numel] for out, parameter in zip(outs, parameters, strict=True)]
    staging, status = torch.zeros(table.part_bytes * ranks, dtype=torch.uint8), new_status(CPU)
    part = staging[: table.part_bytes]

    def gather() -> None:
        route.encode_gather(shards, "cascade", table, part)
        route.decode_gather(staging, table, outs, 0, status)

    assert min(timeit.repeat(gather, number=10, repeat=50)) / 10 < 200e-6
