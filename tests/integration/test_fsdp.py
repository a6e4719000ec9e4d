"""FSDP2 with coded communication: the bits of plain FSDP2, fewer bytes, and lines about what stays plain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsdp_lab
import pytest
import ranks as runner
import tiers
from fsdp_lab import Lab, Model, adapted

HOST = {"zero3_base": "host"}


def full(lab: Lab) -> Any:
    """Full fine-tuning: gathers after a step go as differences, gathers in the backward pass as copies."""
    model = lab.start(section=HOST)
    lab.train(model, 6)
    return model


def lora(lab: Lab) -> Any:
    """Adapters on a frozen model, whose parameters are sent once."""
    model = lab.start(lambda: adapted(Model()))
    lab.train(model, 6)
    return model


@dataclass(frozen=True)
class Case:
    """A training, and the least ratio of plain to sent bytes, of all messages and of gathers; ``said``: what rank 0 prints."""

    train: Callable[[Lab], Any]
    ratio: float = 1.0
    gathers: float = 1.0
    said: str = "FSDP2"


CASES = {"full": Case(full, 3.0, 6.0), "lora": Case(lora, 4.0, 5.0)}


def check(rank: int, ranks: int, name: str, folder: str) -> None:
    case = CASES[name]
    text, whole, gathers = fsdp_lab.bits(rank, ranks, case.train, folder)
    for (plain, coded), least in ((whole, case.ratio), (gathers, case.gathers)):
        assert plain >= least * coded, f"{name}: {plain} bytes became {coded}, wanted {least} times fewer"
    assert rank or case.said in text, text


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", tiers.mostly_full(CASES, ["full", "lora"], "a launch each"))
def test_bits_are_those_of_plain_fsdp2(name: str, ranks: int, tmp_path: Path) -> None:
    runner.run(check, ranks, name, str(tmp_path))
