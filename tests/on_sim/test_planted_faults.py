"""Faults of every kind, planted in a job with NCCL auto on the simulated GPU, from its kernels to its later steps: the words are those of
plain collectives, ranks switch or stop alike, and the line of rank 0, or the error of all ranks, names the fault."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import corpus
import emulation
import pytest
import torch
from pytest import MonkeyPatch
from sim import nccl
from sim.device import mine
from test_self_test import MISTAKES, ON_DEVICES, PROGRAMS, Planted

from ds_zipccl import kernels
from ds_zipccl.comm import shadow_check
from ds_zipccl.comm.device import choice, first_steps, gather
from ds_zipccl.comm.device.streams import Stage
from ds_zipccl.integration import canary, start_up
from ds_zipccl.kernels import build, self_test
from ds_zipccl.kernels.cuda.backend import CudaBackend
from on_sim import plants, world
from on_sim import test_canary as at_start
from on_sim import test_first_steps as in_steps
from on_sim.cases import PATIENT
from on_sim.test_first_steps import CONFIG, forgotten  # noqa: F401

Plant = Callable[[MonkeyPatch], None]
BOTH, GATHERS, EXCHANGES = {"zero_param", "ep"}, {"zero_param"}, {"ep"}


@dataclass(frozen=True)
class Fault:
    """``said``: what the line says, or the error where the job ends. ``coded``: roles in step 5. ``steps``: of the job; the sixth looks."""

    plant: Plant
    said: str
    coded: frozenset[str] | set[str] = frozenset()
    ends: bool = False
    steps: int = 5
    modes: world.Modes = PATIENT


# --- when and where


def only(when: Callable[[], bool], plant: Plant) -> Plant:
    """What a plant replaces is as before while ``when`` says no."""

    class Patch:
        def __init__(self, patch: MonkeyPatch) -> None:
            self.patch = patch

        def setattr(self, owner: Any, name: str, wrong: Any) -> None:
            good = getattr(owner, name)
            self.patch.setattr(owner, name, lambda *given, **named: (wrong if when() else good)(*given, **named))

    return lambda patch: plant(Patch(patch))  # type: ignore[arg-type]


emulated = functools.cache(emulation.load)


def one_rank() -> bool:
    return mine().rank == 1


def behind_the_canary() -> bool:
    return choice._of_job().first is not None


def behind_the_canary_of_one_rank() -> bool:
    return one_rank() and behind_the_canary()


def behind_step(number: int) -> Callable[[], bool]:
    return lambda: behind_the_canary() and choice._of_job().first._ended >= number  # type: ignore[union-attr]


# --- what


def no_kernels(fails: Callable[[MonkeyPatch], object], everywhere: bool = False) -> Plant:
    """Rank 1, or all ranks, have no kernels for their GPUs, for the reason that ``fails`` raises."""

    def plant(patch: MonkeyPatch) -> None:
        emulated()  # from the folder of builds; stamps go to another one
        patch.setattr(build, "cache_root", shadow_check.build.cache_root)
        with pytest.raises(Exception) as caught:
            fails(patch)
        route, reason = kernels.route, f"{type(caught.value).__name__}: {caught.value}"

        def refuse(name: str = "auto", device: str = "cpu") -> Any:
            if device == "cuda" and (everywhere or one_rank()):
                raise kernels.RouteUnavailable(f"no kernels for cuda tensors here. native: {reason}")
            return route(name, device)

        patch.setattr(kernels, "route", refuse)

    return plant


def self_tested(call: str, wrong: Callable[..., Any]) -> Callable[[MonkeyPatch], object]:
    return lambda patch: self_test.prove(Planted(emulated(), call, wrong))


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


def no_compiler(patch: MonkeyPatch) -> object:
    raise RuntimeError("no compiler")


def after(name: str, change: Callable[[torch.Tensor], Any]) -> Plant:
    """Change the words that a decoder has written."""

    def plant(patch: MonkeyPatch) -> None:
        decode = getattr(CudaBackend, name)

        def wrong(self: Any, frames: Any, given: Any, outs: Any, *more: Any, **named: Any) -> None:
            decode(self, frames, given, outs, *more, **named)
            change(outs if isinstance(outs, torch.Tensor) else outs[-1])

        patch.setattr(CudaBackend, name, wrong)

    return plant


def last_bit(words: torch.Tensor) -> None:
    words.view(torch.int16)[-1:] ^= 1


def other_nans(words: torch.Tensor) -> None:
    words.masked_fill_(words.isnan(), torch.nan)


def small_slots(patch: MonkeyPatch) -> None:
    agree = gather.agree
    patch.setattr(gather, "agree", lambda *given: [size - 1024 for size in agree(*given)])


def no_memory(name: str) -> Plant:
    def fails(*given: Any) -> Any:
        raise torch.OutOfMemoryError("planted")

    return lambda patch: patch.setattr(first_steps, name, fails)


NO_KERNELS = r"nccl is off: ranks \[{}\] have no kernels; rank {}: no kernels for cuda tensors here. native: {}"
CANARY = r"nccl is off: ranks \[{}\] did not get the words of the canary right; rank .: {}"
GATHER_PLAIN, EXCHANGE_PLAIN = (f"{role} stays plain, rank {{}}: .*{{}}" for role in ("zero_param", "ep"))
NO_MEMORY = (
    "ep stays plain, rank 1: OutOfMemoryError: planted; zero_param stays plain, rank 1: OutOfMemoryError: planted"
)
ONE = behind_the_canary_of_one_rank

FAULTS = {
    "none": Fault(lambda patch: None, "ep coded from step 5 on.*; zero_param coded from step 5 on", BOTH),
    # kernels
    **{
        f"self-test: {name}": Fault(no_kernels(self_tested(call, wrong)), NO_KERNELS.format(1, 1, f"SelfTestError: {said}"))
        for name, (call, wrong, said) in (MISTAKES | ON_DEVICES).items()
    },
    "self-test: a wrong byte on all ranks": Fault(
        no_kernels(self_tested(*MISTAKES["a wrong byte"][:2]), True), NO_KERNELS.format("0, 1", 0, "SelfTestError: encode_bf16")
    ),
    **{
        f"self-test apart: it {name}": Fault(no_kernels(apart(program)), NO_KERNELS.format(1, 1, f"SelfTestError: {said}".rstrip("$")))
        for name, (program, said) in PROGRAMS.items() if isinstance(said, str)
    },
    "a stamp, and another driver": Fault(
        no_kernels(with_a_stamp({"driver": "another"}, b"one")), NO_KERNELS.format(1, 1, "SelfTestError: encode_bf16")
    ),
    "a stamp, and another binary": Fault(no_kernels(with_a_stamp({}, b"two")), NO_KERNELS.format(1, 1, "SelfTestError: encode_bf16")),
    "a rank without a compiler": Fault(no_kernels(no_compiler), NO_KERNELS.format(1, 1, "RuntimeError: no compiler")),
    # the canary
    "canary: the part of another rank": Fault(at_start.other_rank_skipped, CANARY.format("0, 1", "all_gather_into_tensor: word")),
    "canary: the same on one rank": Fault(only(one_rank, at_start.other_rank_skipped), CANARY.format(1, "all_gather_into_tensor: word")),
    "canary: a wrong sum": Fault(at_start.own_summand_left_out, CANARY.format("0, 1", "all_reduce: word")),
    "canary: a wrong exchange": Fault(only(one_rank, after("decode_frames", last_bit)), CANARY.format(1, "even all_to_all_single: word")),
    "canary: a byte changes on the way": Fault(at_start.changed_on_the_way, CANARY.format("0, 1", ".*refused: MAGIC")),
    "canary: no memory for frames": Fault(at_start.encoder_of_one_rank, CANARY.format("0, 1", "even all_to_all_single: the device did")),
    "canary: it hangs": Fault(at_start.frames_never_sent, CANARY.format("0, 1", "all_gather_into_tensor: the device did not end its work")),
    "canary: a rank does not agree": Fault(at_start.agreement_of_one_rank, CANARY.format("0, 1", ".*did not come within")),
    # the first steps
    "steps: the part of another rank": Fault(
        only(behind_the_canary, at_start.other_rank_skipped), GATHER_PLAIN.format(0, "words wrong, first at"), EXCHANGES
    ),
    "steps: the same on one rank": Fault(
        only(ONE, at_start.other_rank_skipped), GATHER_PLAIN.format(1, "words wrong, first at 0"), EXCHANGES
    ),
    "steps: the last bit of a gather": Fault(
        only(behind_the_canary, after("decode_gather", last_bit)), GATHER_PLAIN.format(0, "1 words wrong, first at 49151: "), EXCHANGES
    ),
    "steps: the last bit of an exchange, on one rank": Fault(
        only(ONE, after("decode_frames", last_bit)), EXCHANGE_PLAIN.format(1, "1 words wrong, first at 24575: got 0x"), GATHERS
    ),
    "steps: other NaNs": Fault(
        only(behind_the_canary, after("decode_frames", other_nans)), EXCHANGE_PLAIN.format(0, "got 0x7fc0, wanted 0x7fa5"), GATHERS
    ),
    "steps: a refused frame": Fault(
        only(behind_the_canary, in_steps.first_frame_damaged), EXCHANGE_PLAIN.format(0, "refused: MAGIC.*saved in"), GATHERS
    ),
    "steps: a refused frame of one rank": Fault(
        only(ONE, in_steps.first_frame_damaged), EXCHANGE_PLAIN.format(0, "refused: MAGIC"), GATHERS
    ),
    "steps: slots too small": Fault(only(behind_the_canary, small_slots), GATHER_PLAIN.format(0, "refused: OVERFLOWED"), EXCHANGES),
    "steps: no memory for a copy": Fault(only(ONE, no_memory("_parts")), NO_MEMORY),
    "steps: no memory to compare": Fault(only(ONE, no_memory("_difference")), NO_MEMORY),
    "steps: without the wait for the wire": Fault(
        only(behind_the_canary, plants.without_order(Stage.WIRE, Stage.DECODE)), "refused|words wrong", modes=replace(PATIENT, races=False)
    ),
    # later
    "later: no memory to look": Fault(only(behind_step(5), no_memory("_parts")), "zero_param coded from step 5 on", BOTH, steps=6),
    "later: the last bit of a gather": Fault(
        only(behind_step(5), after("decode_gather", last_bit)), "zero_param have wrong words after 6 steps, rank 0.* saved in", BOTH, True, 6
    ),
    "later: a refused frame": Fault(
        only(behind_step(4), in_steps.first_frame_damaged), "refused: MAGIC.*stop the job on all ranks", BOTH, True, 6
    ),
}  # fmt: skip


def job(rank: int, ranks: int, steps: int, ends: bool) -> tuple[list[set[str]], str]:
    """Start as with a section, then train. Returns the coded roles of each step, and the error that ends the job."""

    def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
        corpus.assert_same_bits(got.where(~got.isnan(), wanted) if ends else got, wanted)

    config = start_up.with_all_kernels(CONFIG, torch.device("cuda", rank))
    try:
        return in_steps.trained(rank, ranks, ("gather", "exchange"), steps, False, config, same), ""
    except RuntimeError as error:  # CommError is one
        assert ends, error
        return [], str(error)


SHORT = ("none", "self-test: a wrong byte", "canary: it hangs", "steps: no memory for a copy", "later: a refused frame")


@pytest.mark.parametrize(
    "name",
    [name if name in SHORT else pytest.param(name, marks=pytest.mark.full(reason="as others")) for name in FAULTS],
)
def test_a_fault(
    route: CudaBackend, name: str, tmp_path: Path, monkeypatch: MonkeyPatch, capfd: Any, record_property: Any
) -> None:
    fault = FAULTS[name]
    monkeypatch.setattr(canary, "PATIENCE", timedelta(seconds=0.5))
    monkeypatch.setattr(canary, "_NBYTES", 96 << 10)
    monkeypatch.setattr(nccl, "TIMEOUT", timedelta(seconds=1))
    monkeypatch.setattr(first_steps, "LOOK_STEPS", 5)
    fault.plant(monkeypatch)
    values = world.run(job, 2, fault.steps, fault.ends, modes=fault.modes, route=route).values
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("[ds_zipccl]")]
    text = values[0][1] or "\n".join(lines)
    record_property("outcome", text)
    assert re.search(fault.said, text), text
    for coded, error in values:
        assert bool(error) == fault.ends and (error or coded[:5] == [set()] * 4 + [set(fault.coded)])
