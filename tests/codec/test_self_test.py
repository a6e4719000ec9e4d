"""The self-test of kernels: every backend passes it, it tries every kernel, and it catches planted mistakes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiers
import torch
import variants

from ds_zipccl import kernels
from ds_zipccl.frame import FrameError
from ds_zipccl.kernels import build, self_test
from ds_zipccl.kernels.build import trust
from ds_zipccl.kernels.cpp.backend import CppBackend
from ds_zipccl.kernels.cpp.interface import SIGNATURES
from ds_zipccl.kernels.cuda.backend import failure_of
from ds_zipccl.kernels.cuda.interface import KERNELS
from ds_zipccl.kernels.self_test.cases import Cases

CPU = torch.device("cpu")
#: Functions of the C++ backend that the self-test leaves out: not kernels, or other forms, in one call, of those that it tries.
LEFT_OUT = {
    "level", "force_level", "row_frame", "unpack_repeats", "scaled_encode_staged", "scaled_decode_staged",
    "squared_error",
}  # fmt: skip


@pytest.mark.full("emulated", reason="six seconds; other tests compare its bytes with the native route's")
def test_digests(route: str, request: pytest.FixtureRequest) -> None:
    """All backends give the same bytes; those of ``golden.json`` are of the first one."""
    found = Cases(kernels.route(route), CPU, False, None)
    found.run()
    if request.config.getoption(
        "--update-golden"
    ):  # those of the C++ backend, which does not load while they are wrong
        compiled = Cases(CppBackend(ctypes.CDLL(str(build.build()))), CPU, False, None)
        compiled.run()
        self_test.GOLDEN.write_text(json.dumps(compiled.digests, separators=(",", ":")).replace("],", "],\n") + "\n")
        self_test._digests.cache_clear()
    wanted = self_test._digests()
    assert found.digests == {kernel: wanted[kernel] for kernel in found.digests}
    assert self_test.prove(kernels.route(route), short=True) < found.count / 3


def test_every_function_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    native: Any = kernels.route("native")
    called = set()

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (called.add(name), function(*given))[1]

    functions = {name: noting(name, function) for name, function in native._functions.items()}
    monkeypatch.setattr(native, "_functions", functions)
    self_test.prove(native, short=True)
    assert set(SIGNATURES) - called == {f"zipccl_{name}" for name in LEFT_OUT}


def test_every_kernel_is_tried(kernel: Any, launches: list[Any]) -> None:
    self_test.prove(*kernel, short=True)
    assert {launch.kernel for launch in launches} == set(KERNELS)


# --- planted mistakes


def _flip(tensor: torch.Tensor, at: int) -> None:
    tensor.view(torch.uint8)[at] ^= 1


def _large(words: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> bool:
    return words.dtype == dtype and words.numel() == 16385


def wrong_byte(good: Any, segments: Any, code: str, block: int, outs: Any) -> list[int]:
    sizes: list[int] = good.encode(segments, code, block, outs)
    for words, out in zip(segments, outs, strict=True):
        if _large(words):
            _flip(out, 37)
    return sizes


def beside_the_slot(good: Any, segments: Any, code: str, block: int, outs: Any) -> list[int]:
    sizes: list[int] = good.encode(segments, code, block, outs)
    if _large(segments[0], torch.float16):
        out = outs[0]
        torch.empty(0, dtype=torch.uint8).set_(out.untyped_storage(), out.storage_offset() + out.numel(), (1,)).zero_()
    return sizes


def accepts(good: Any, payload: torch.Tensor, *more: Any) -> None:
    with contextlib.suppress(FrameError):
        good.decode(payload, *more)


def without_payload_of_nans(good: Any, payload: torch.Tensor, block: int, words: torch.Tensor, *adds: Any) -> None:
    good.decode(payload, block, words, *adds)
    if words.dtype == torch.float32 and not adds:
        words.masked_fill_(words.isnan(), torch.nan)


def in_bfloat16(good: Any, words: torch.Tensor, sums: torch.Tensor) -> None:
    """Rounds float32 sums after each addition."""
    good.add(words, sums)
    if sums.dtype != words.dtype == torch.bfloat16:
        sums.copy_(sums.bfloat16())


def refuses(good: Any, payload: torch.Tensor, *more: Any) -> None:
    raise FrameError(11, "planted")


#: Mistake -> the call of a backend, what stands for it, and the words that name it.
MISTAKES: dict[str, tuple[str, Callable[..., Any], str]] = {
    "a wrong constant": ("encode", lambda good, words, code, *more: good.encode(words, "wide", *more),
                         r"encode_bf16_cascade, 16,385 words \(mixed\) at offset 1: (got \d+ bytes|byte \d+ is).*, wanted \w+"),
    "a wrong byte": ("encode", wrong_byte, r"encode_bf16_cascade, 16,385 words \(mixed\) at offset 1"),
    "a write beside the slot": ("encode", beside_the_slot, r"encode_fp16_cascade, 16,385 words \(mixed\) .* outside of the output"),
    "a damaged payload is accepted": ("decode", accepts, "decode_bf16, 16,385 words: a payload with no byte was not refused"),
    "a right payload is refused": ("decode", refuses, "decode_bf16, 16,385 words .*: a right payload was refused: INDEX: planted"),
    "NaNs lose their payload": ("decode", without_payload_of_nans, r"decode_fp32, 16,385 words .*: byte \d+ is 0x\w\w, wanted 0x\w\w"),
    "sums are rounded too often": ("add", in_bfloat16, r"add_bf16 into fp32, 16,385 words .*: byte \d+ is 0x00, wanted 0x\w\w"),
    "a difference of words": ("decode_delta", lambda good, payload, base, block, words: words.copy_(base), "decode_bf16_delta"),
    "a hash without its key": ("region_hash", lambda good, data, key: good.region_hash(data), "hash, 16,385 words"),
}  # fmt: skip


def beyond_capacity(
    good: Any, words: Any, code: str, block: int, slots: Any, overflows: Any = None, *more: Any
) -> None:
    """Takes every slot for one byte larger."""
    good.encode_frames(words, code, block, slots, overflows, *more)
    out = slots[0]
    torch.empty(0, dtype=torch.uint8).set_(out.untyped_storage(), out.storage_offset() + out.numel(), (1,)).zero_()


def without_nans(good: Any, slots: Any, block: int, outs: Any, status: torch.Tensor, *more: Any) -> None:
    """Leaves the words of a refused frame as they were."""
    before = [out.clone() for out in outs]
    good.decode_frames(slots, block, outs, status, *more)
    if failure_of(int(status)):
        for out, old in zip(outs, before, strict=True):
            out.copy_(old)


def in_another_order(good: Any, slots: Any, block: int, dtype: Any, sums: Any, status: Any, own: Any) -> None:
    good.decode_sum_frames(slots[::-1], block, dtype, sums, status, own._replace(at=0))


def every_rank(good: Any, staging: Any, table: Any, outs: Any, skip: Any, status: Any) -> None:
    good.decode_gather(staging, table, outs, None, status)


#: Mistakes in the calls of the CUDA backend alone.
ON_DEVICES: dict[str, tuple[str, Callable[..., Any], str]] = {
    "a slot too large": ("encode_frames", beyond_capacity, "encode_bf16_cascade into slots, 16,385 words .* outside of the output"),
    "no NaN for a refused frame": ("decode_frames", without_nans, "decode_bf16 of a wrong magic, .*: byte 0 is 0x5c, wanted 0xff"),
    "another order of sums": ("decode_sum_frames", in_another_order, r"decode_sum_bf16 into fp32, 16,385 words .*: byte \d+ is"),
    "a rank that is not skipped": ("decode_gather", every_rank, r"decode_bf16 of a gather, 16,385 words .*: byte \d+ is .*, wanted 0x5c"),
}  # fmt: skip


class Planted:
    """A backend with another call in place of one."""

    def __init__(self, good: Any, name: str, call: Callable[..., Any]) -> None:
        self.good = good
        setattr(self, name, lambda *given: call(good, *given))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.good, name)


CAUGHT = [(name, one) for name in ("native", "numba", "emulated") for one in MISTAKES]
CAUGHT.remove(("numba", "a difference of words"))
CAUGHT += [("emulated", one) for one in ON_DEVICES]
BRIEFLY = [
    *CAUGHT[: len(MISTAKES)],
    ("numba", "a wrong byte"),
    ("emulated", "a wrong byte"),
    ("emulated", "a slot too large"),
]


@pytest.mark.parametrize(
    ("name", "mistake"), tiers.mostly_full(CAUGHT, BRIEFLY, "the others are slow, and caught alike")
)
def test_a_mistake_is_caught_and_named(name: str, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next backend takes over, and the reason is that of the one that failed."""
    if reason := variants.Variant(name).why_not():
        pytest.skip(f"{name} is not usable here: {reason}")
    call, wrong, said = (MISTAKES | ON_DEVICES)[mistake]
    good = kernels.route(name)
    planted: Any = Planted(good, call, wrong)
    monkeypatch.setattr(self_test, "_once", lambda facts, make: make(None))
    loaders = {name: lambda: self_test.proven(lambda: planted, name, b""), "next": lambda: good}
    monkeypatch.setattr(kernels, "ROUTES", {"cpu": loaders})
    monkeypatch.setattr(kernels, "_loaded", {})
    assert kernels.route() is good
    assert re.match(f"SelfTestError: {said}", kernels.why()[name]), kernels.why()[name]


@pytest.fixture
def stamps(own_cache: None) -> Iterator[Callable[[], list[Path]]]:
    yield lambda: sorted(build.cache_root().glob("zipccl_proven_*.json"))


def test_a_stamp_makes_the_next_test_short(stamps: Callable[[], list[Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A stamp is of one device, driver, library and torch."""
    good = kernels.route("native")

    def proof(binary: bytes = b"library") -> self_test.Proof:
        self_test.proven(lambda: good, "native", binary)
        return self_test.PROOFS["cpu", "native"]

    proof(b"forgotten")
    assert stamps()
    self_test.forget_stamps()
    assert not stamps()

    first, second = proof(), proof()
    assert not first.stamped and second.stamped and second.cases < first.cases / 3
    assert len(stamps()) == 1 and json.loads(stamps()[0].read_text())["torch"] == torch.__version__
    assert not proof(b"another library").stamped
    with monkeypatch.context() as patch:
        patch.setattr(self_test, "_facts", lambda device: {"device": "one", "driver": "another"})
        assert not proof().stamped
    assert proof().stamped and len(stamps()) == 3


def test_no_stamp_of_a_failed_test(stamps: Callable[[], list[Path]]) -> None:
    planted: Any = Planted(kernels.route("native"), "encode", wrong_byte)
    for _ in range(2):
        with pytest.raises(self_test.SelfTestError, match="encode_bf16_cascade"):
            self_test.proven(lambda: planted, "native", b"")
    assert stamps() == []


def test_without_a_folder_every_start_tests_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise build.BuildError("no folder")

    monkeypatch.setattr(build, "cache_root", refuse)
    for _ in range(2):
        self_test.proven(lambda: kernels.route("native"), "native", b"")
        assert not self_test.PROOFS["cpu", "native"].stamped


# --- a process of its own, for the kernels of a device

#: What the process does -> the cases it reports, or the reason why there are no kernels.
PROGRAMS: dict[str, tuple[str, int | str]] = {
    "passes": ("print(5)", 5),
    "cannot use the device": (f"raise SystemExit({self_test.UNREACHED})", 0),
    "finds a wrong byte": (
        f"print('hash: byte 3 is 0x01, wanted 0x02'); raise SystemExit({self_test.WRONG})", "hash: byte 3 is 0x01, wanted 0x02$"
    ),
    "hangs": ("import time; time.sleep(60)", "in a process of its own it did not end within 1 s"),
    "crashes": ("import os; os.abort()", "in a process of its own it failed: status -6"),
    "raises": ("raise RuntimeError('planted')", "in a process of its own it failed: RuntimeError: planted"),
}  # fmt: skip


@pytest.mark.parametrize("what", PROGRAMS)
def test_in_a_process_of_its_own(what: str, stamps: Callable[[], list[Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend is not loaded here before that process has passed; where a second process cannot have the device, it is tested here."""
    program, wanted = PROGRAMS[what]
    monkeypatch.setattr(self_test, "PATIENCE", 1.0 if what == "hangs" else 60.0)
    monkeypatch.setattr(self_test, "command", lambda name, device: [sys.executable, "-c", program])
    loaded: list[bool] = []
    tested: list[bool] = []

    def prove(backend: Any, device: Any, short: bool = False) -> int:
        tested.append(short)
        return 7

    monkeypatch.setattr(self_test, "prove", prove)

    def start() -> None:
        self_test.proven(lambda: loaded.append(True), "emulated", b"", apart=True)

    if isinstance(wanted, str):
        with pytest.raises(self_test.SelfTestError, match=wanted):
            start()
        assert not loaded and not stamps()
        return
    start()
    assert tested == ([True] if wanted else [False, True]) and len(stamps()) == 1
    monkeypatch.setattr(self_test, "command", None)
    start()
    assert self_test.PROOFS["cpu", "emulated"].stamped


def test_ranks_that_waited_fail_with_the_reason(
    stamps: Callable[[], list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not wait for the hang again; the next start does."""
    calls: list[int] = []

    def fails(stamp: Path | None) -> None:
        calls.append(1)
        time.sleep(0.5)
        raise self_test.SelfTestError("planted")

    def one_rank() -> str:
        with pytest.raises(self_test.SelfTestError) as raised:
            self_test._once({"device": "one"}, fails)
        return str(raised.value)

    with ThreadPoolExecutor() as pool:
        assert [rank.result() for rank in [pool.submit(one_rank) for _ in range(3)]] == ["planted"] * 3
    assert len(calls) == 1
    assert one_rank() == "planted" and len(calls) == 2
    assert trust.claim(build.cache_root()) == ""


@pytest.mark.full(reason="five seconds")
def test_the_program_says_that_there_is_no_device() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    program = self_test.command("native", torch.device("cuda", 0))
    assert subprocess.run(program, capture_output=True, timeout=120).returncode == self_test.UNREACHED
