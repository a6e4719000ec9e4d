"""Faults of every kind, planted in a job with NCCL auto on the simulated GPU, from its kernels to its later steps: the words are those of
plain collectives, ranks switch or stop alike, and the line of rank 0, or the error of all ranks, names the fault."""

from __future__ import annotations

import ctypes
import functools
import re
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import corpus
import emulation
import pytest
import tiers
import torch
from pytest import MonkeyPatch
from sim import nccl
from sim.device import mine
from test_self_test import MISTAKES, ON_DEVICES, PROGRAMS, Planted

from ds_zipccl import kernels
from ds_zipccl.comm.device import choice, first_steps, gather
from ds_zipccl.comm.device.streams import Stage
from ds_zipccl.integration import canary, start_up
from ds_zipccl.kernels import build, self_test
from ds_zipccl.kernels.cuda.backend import CudaBackend
from on_sim import plants, world
from on_sim import test_canary as at_start
from on_sim import test_first_steps as in_steps
from on_sim.test_first_steps import CONFIG, forgotten  # noqa: F401

Plant = Callable[[MonkeyPatch], None]
BOTH = {"zero_param", "ep"}


emulated = functools.cache(emulation.load)


def one_rank() -> bool:
    return mine().rank == 1


def behind(step: int = 0, ranks: tuple[int, ...] = (0, 1)) -> Callable[[], bool]:
    """Whether a step has ended, or the canary."""
    return lambda: mine().rank in ranks and (first := choice._of_job().first) is not None and first._ended >= step


def no_kernels(fails: Callable[[MonkeyPatch], object], everywhere: bool = False) -> Plant:
    """Rank 1, or all ranks, have no kernels for their GPUs, for the reason that ``fails`` raises."""

    def plant(patch: MonkeyPatch) -> None:
        emulated()  # from the folder of builds; stamps go to another one
        folder = Path(tempfile.mkdtemp())
        patch.setattr(build, "cache_root", lambda: folder)
        with pytest.raises(Exception) as caught:
            fails(patch)
        route, reason = kernels.route, f"{type(caught.value).__name__}: {caught.value}"

        def refuse(name: str = "auto", device: str = "cpu") -> Any:
            if device == "cuda" and (everywhere or one_rank()):
                raise kernels.RouteUnavailable(f"no kernels for cuda tensors here. native: {reason}")
            return route(name, device)

        patch.setattr(kernels, "route", refuse)

    return plant


def with_a_stamp(facts: dict[str, str], binary: bytes) -> Callable[[MonkeyPatch], object]:
    """Right kernels have left a stamp; the kernels of this rank are wrong, and run with another driver or are another binary."""

    def fails(patch: MonkeyPatch) -> object:
        with MonkeyPatch.context() as short:
            short.setattr(self_test, "prove", lambda *given, **named: 7)
            self_test.proven(emulated, "native", b"one")
        patch.setattr(self_test, "_facts", lambda device, was=self_test._facts: was(device) | facts)
        call, wrong, _ = MISTAKES["a wrong byte"]
        return self_test.proven(lambda: Planted(emulated(), call, wrong), "native", binary)

    return fails


def apart(program: str) -> Callable[[MonkeyPatch], object]:
    """The self-test in a process of its own."""

    def fails(patch: MonkeyPatch) -> object:
        patch.setattr(self_test, "PATIENCE", 1.0 if "sleep" in program else 60.0)
        patch.setattr(self_test, "command", lambda name, device: [sys.executable, "-c", program])
        return self_test.proven(emulated, "native", b"", apart=True)

    return fails


def after(name: str, change: Callable[[torch.Tensor], Any]) -> Plant:
    """Change the words that a decoder has written."""

    def plant(patch: MonkeyPatch) -> None:
        decode = getattr(CudaBackend, name)

        def wrong(self: Any, frames: Any, given: Any, outs: Any, *more: Any, **named: Any) -> None:
            decode(self, frames, given, outs, *more, **named)
            change(outs if isinstance(outs, torch.Tensor) else outs[-1])

        patch.setattr(CudaBackend, name, wrong)

    return plant


def flip(at: int) -> Callable[[torch.Tensor], object]:
    return lambda words: words.view(torch.int16)[at:][:1].bitwise_xor_(1)


def canonical(words: torch.Tensor) -> None:
    words.masked_fill_(words.isnan(), torch.nan)


def small_slots(patch: MonkeyPatch) -> None:
    agree = gather.agree
    patch.setattr(gather, "agree", lambda *given: [size - 1024 for size in agree(*given)])


def no_memory(name: str) -> Plant:
    return lambda patch: patch.setattr(first_steps, name, Mock(side_effect=torch.OutOfMemoryError("planted")))


#: Fault -> what is planted, words of the line or of the error, and what differs between the faults of a phase.
KERNELS: dict[str, tuple[Callable[[MonkeyPatch], object], str]] = {
    **{name: (lambda patch, call=call, wrong=wrong: self_test.prove(Planted(emulated(), call, wrong)), f"SelfTestError: {said}")
       for name, (call, wrong, said) in (MISTAKES | ON_DEVICES).items()},
    **{f"apart, it {name}": (apart(program), f"SelfTestError: {said}".rstrip("$"))
       for name, (program, said) in PROGRAMS.items() if isinstance(said, str)},
    "a stamp of another driver": (with_a_stamp({"driver": "another"}, b"one"), "SelfTestError: encode_bf16"),
    "a stamp of another binary": (with_a_stamp({}, b"two"), "SelfTestError: encode_bf16"),
    "no library": (lambda patch: ctypes.CDLL("missing.so"), "OSError: missing.so: cannot open shared object file"),
}  # fmt: skip
CANARY: dict[str, tuple[Plant, str, str]] = {
    "the part of another rank": (at_start.other_rank_skipped, "0, 1", "all_gather_into_tensor: word"),
    "the same on one rank": (plants.only(one_rank, at_start.other_rank_skipped), "1", "all_gather_into_tensor: word"),
    "a wrong exchange": (plants.only(one_rank, after("decode_frames", flip(-1))), "1", "even all_to_all_single: word"),
    "a byte changes on the way": (at_start.changed_on_the_way, "0, 1", ".*refused: MAGIC"),
    "no memory for frames": (at_start.encoder_of_one_rank, "0, 1", "all_to_all_single .*did not come within"),
    "it hangs": (at_start.frames_never_sent, "0, 1", "all_gather_into_tensor: the device did not end its work"),
    "a rank does not agree": (at_start.agreement_of_one_rank, "0, 1", ".*did not come within"),
}
LACKS = "ep stays plain, rank 1: OutOfMemoryError: planted; zero_param stays plain, rank 1: OutOfMemoryError: planted"
begun, on_one = behind(), behind(ranks=(1,))
STEPS: dict[str, tuple[Callable[[], bool], Plant, str, set[str]]] = {
    "the part of another rank": (begun, at_start.other_rank_skipped, "zero_param stays plain, rank 0: .*words wrong, first at", {"ep"}),
    "the same on one rank": (on_one, at_start.other_rank_skipped, "zero_param stays plain, rank 1: .* wrong, first at 0: got 0x", {"ep"}),
    "the last bit of a gather": (begun, after("decode_gather", flip(-1)), "zero_param stays plain, .*1 words wrong, .* 49151: ", {"ep"}),
    "that of an exchange": (on_one, after("decode_frames", flip(-1)), "ep stays plain, rank 1: .*1 words wrong, .* 24575", {"zero_param"}),
    "other NaNs": (begun, after("decode_frames", canonical), "ep stays plain, rank 0: .*got 0x7fc0, wanted 0x7fa5", {"zero_param"}),
    "a refused frame": (begun, in_steps.first_frame_damaged, "ep stays plain, rank 0: .*refused: MAGIC", {"zero_param"}),
    "a refused frame of one rank": (on_one, in_steps.first_frame_damaged, "ep stays plain, .*refused: MAGIC", {"zero_param"}),
    "slots too small": (begun, small_slots, "zero_param stays plain, .*refused: OVERFLOWED", {"ep"}),
    "no memory for a copy": (on_one, no_memory("_parts"), LACKS, set()),
    "no memory to compare": (on_one, no_memory("_difference"), LACKS, set()),
    "no memory to join words": (on_one, no_memory("_joined"), LACKS, set()),
    "no wait for the wire": (begun, plants.without_order(Stage.WIRE, Stage.DECODE), "zero_param stays plain, .*(refused|wrong)", {"ep"}),
}  # fmt: skip
WRONG = "role zero_param have wrong words after 6 steps, rank {}: .*1 words wrong.* since step 1: look at the hardware"
#: After step 5, or 4. The last word: whether the job ends.
LATER: dict[str, tuple[int, Plant, str, bool]] = {
    "no memory to look": (5, no_memory("_parts"), "zero_param coded from step 5 on", False),
    "the last bit of a gather": (5, after("decode_gather", flip(-1)), WRONG.format(0), True),
    "the same on one rank": (5, plants.only(one_rank, after("decode_gather", flip(0))), WRONG.format(1), True),
    "a refused frame": (4, in_steps.first_frame_damaged, "refused: MAGIC.*stop the job on all ranks", True),
}  # fmt: skip
OFF = r"nccl is off: ranks \[{}\] "
NO_KERNELS = OFF + r"have no kernels; rank {}: no kernels for cuda tensors here. native: {}"
#: What is planted, what is said, the roles that are coded in step 5, and whether the job ends.
FAULTS: dict[str, tuple[Plant, str, set[str], bool]] = {
    "none": (lambda patch: None, "ep coded from step 5 on.*; zero_param coded from step 5 on", BOTH, False),
    "kernels: a wrong byte on all ranks": (
        no_kernels(KERNELS["a wrong byte"][0], True), NO_KERNELS.format("0, 1", 0, KERNELS["a wrong byte"][1]), set(), False),
    **{f"kernels: {name}": (no_kernels(fails), NO_KERNELS.format(1, 1, said), set(), False) for name, (fails, said) in KERNELS.items()},
    **{f"canary: {name}": (plant, f"{OFF.format(ranks)}did not get the words of the canary right; rank .: {said}", set(), False)
       for name, (plant, ranks, said) in CANARY.items()},
    "canary: a wrong sum": (
        at_start.own_summand_left_out, r"sums are the backend's own: ranks \[0, 1\] did not get .* rank 0: all_reduce: word", BOTH, False),
    **{f"steps: {name}": (plants.only(when, plant), said, coded, False) for name, (when, plant, said, coded) in STEPS.items()},
    **{f"later: {name}": (plants.only(behind(step), plant), said, BOTH, ends) for name, (step, plant, said, ends) in LATER.items()},
}  # fmt: skip
SHORT = ("none", "kernels: a wrong byte", "canary: it hangs", "steps: no memory for a copy", "later: a refused frame")


def job(rank: int, ranks: int, ends: bool) -> tuple[list[set[str]], str]:
    """Start as with a section, then train. Returns the coded roles of each step, and the error that ends the job."""

    def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
        corpus.assert_same_bits(got.where(~got.isnan(), wanted) if ends else got, wanted)

    config = start_up.with_all_kernels(CONFIG, torch.device("cuda", rank))
    try:
        return in_steps.trained(rank, ranks, ("gather", "exchange"), 6, False, config, same), ""
    except RuntimeError as error:  # CommError is one
        assert ends, error
        return [], str(error)


@pytest.mark.parametrize("name", tiers.mostly_full(FAULTS, SHORT, "as others"))
def test_a_fault(route: CudaBackend, name: str, monkeypatch: MonkeyPatch, capfd: Any, record_property: Any) -> None:
    plant, said, roles, ends = FAULTS[name]
    monkeypatch.setattr(canary, "PATIENCE", timedelta(seconds=0.5))
    monkeypatch.setattr(canary, "_NBYTES", 96 << 10)
    monkeypatch.setattr(nccl, "TIMEOUT", timedelta(seconds=1))
    monkeypatch.setattr(first_steps, "LOOK_STEPS", 5)
    monkeypatch.setattr(self_test, "forget_stamps", forget := Mock())
    plant(monkeypatch)
    values = world.run(job, 2, ends, modes=world.Modes(patient=True, races=False), route=route).values
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("[ds_zipccl]")]
    text = values[0][1] or "\n".join(lines)
    record_property("outcome", text)
    assert re.search(said, text), text
    assert forget.call_count == ("look at the hardware" in text) * 2
    for coded, error in values:
        assert bool(error) == ends and (error or coded[:5] == [set()] * 4 + [roles])
        assert error == values[0][1] or "refused" in error  # each rank names its call
