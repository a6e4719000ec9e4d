"""Counts of lossy messages: the reason of each frame that goes exact, and messages that no schedule of ours carries."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_zipccl.comm import request
from ds_zipccl.comm.host.buffer_pool import PooledBuffers
from ds_zipccl.comm.lossy.frames import LossyFrames
from ds_zipccl.comm.lossy.squared_error import squared_error
from ds_zipccl.integration.lossy.pipeline import _Link
from ds_zipccl.lossy import Int, LossyCodec, LowRank, TacoFp8
from ds_zipccl.role_settings import RoleSettings
from ds_zipccl.telemetry import counters, table


@pytest.fixture(autouse=True)
def no_counts() -> Iterator[None]:
    counters.reset()
    yield
    counters.reset()


@pytest.mark.parametrize("codec", [TacoFp8(), Int(bits=8, hadamard=True)], ids=str)
@pytest.mark.parametrize(
    ("value", "why"), [(float("nan"), "not finite"), (float("-inf"), "not finite"), (1e38, "overflow"), (1.0, "")]
)
def test_a_frame_names_why_it_is_exact(codec: LossyCodec, value: float, why: str) -> None:
    words = torch.arange(1.0, 4097.0).to(torch.bfloat16)
    words[128:256] = value
    words[200] *= 3
    context: Any = SimpleNamespace(
        role="tp", op="all_reduce", state=SimpleNamespace(lossy_numbers=lambda *key: count(1))
    )
    LossyFrames(context, codec, 512, "auto").compress(words, True, PooledBuffers())
    (found,) = counters.lossy()
    assert (found["frames"], found["exact"]) == (1, {why: 1} if why else {})


def test_few_values_are_smaller_without_a_scale() -> None:
    context: Any = SimpleNamespace(role="ep", op="send", state=SimpleNamespace(lossy_numbers=lambda *key: count(1)))
    LossyFrames(context, Int(bits=8, group=512), 512, "auto").compress(
        torch.ones(4, dtype=torch.bfloat16), True, PooledBuffers()
    )
    (found,) = counters.lossy()
    assert (found["frames"], found["exact"]) == (1, {"smaller": 1})


@pytest.mark.parametrize(
    ("lossy", "text"),
    [
        (TacoFp8(), str(TacoFp8())),
        (_Link(RoleSettings(LowRank(8)), (0, "backward", 0), width=4, ranks=2, owner=0), "lowrank rank 8"),
    ],
    ids=["codec", "link"],
)
def test_a_message_that_stays_exact_counts_among_those_of_its_line(
    lossy: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = SimpleNamespace(backend=lambda device: "nccl")
    monkeypatch.setattr(request, "group_state", lambda group: state)
    words = (torch.bfloat16, torch.device("cuda"))
    assert request.lossy_here(lossy, words, None, "all_reduce", "tp") is None
    (found,) = counters.lossy()
    assert (found["codec"], found["frames"], sum(found["exact"].values())) == (text, 1, 1)
    assert "0 of 1 frames exact (not finite)" in table.render()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("route", ["native", "numba"])
def test_squares_are_those_of_the_finite_words(dtype: torch.dtype, route: str) -> None:
    words = (torch.arange(1 << 20 | 37).sin() * 3).to(dtype)
    values = words + (torch.arange(len(words)).cos() / 8).to(dtype)
    words[5], words[70000], words[-1] = float("inf"), float("nan"), float("-inf")
    kept = words.double().isfinite()
    error = (values.double() - words.double())[kept]
    wanted = float(error.square().sum()), float(words.double()[kept].square().sum())
    assert squared_error(words, values, route) == pytest.approx(wanted, rel=1e-6)
    assert squared_error(words[:0], values[:0], route) == (0.0, 0.0)
