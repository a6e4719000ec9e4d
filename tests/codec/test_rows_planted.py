"""Proof that the tests of row frames can fail: kernels and proofs with one small mistake make them fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import test_row_kernels
import test_rows
import test_rows_refused
import torch

from ds_zipccl import kernels
from ds_zipccl.codecs import rows as row_map
from ds_zipccl.frame import FrameError


class Wrong:
    """The numba route with other calls in place of some."""

    def __init__(self, **calls: Callable[..., Any]) -> None:
        self.good = kernels.route("numba")
        for name, call in calls.items():
            setattr(self, name, lambda *given, call=call: call(self.good, *given))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.good, name)


def by_hash(
    good: kernels.KernelBackend,
    data: torch.Tensor,
    row_bytes: int,
    first: int,
    sources: torch.Tensor,
    table: torch.Tensor,
) -> int:
    """Takes rows with equal first bytes for equal rows."""
    rows = data[: len(data) // row_bytes * row_bytes].view(-1, row_bytes).clone()
    rows[:, 4:] = 0
    return good.find_rows(rows.view(-1), row_bytes, first, sources, table)


def nearest(
    good: kernels.KernelBackend,
    words: torch.Tensor,
    width: int,
    sources: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Predicts by torch's multiplication, which rounds twice and keeps denormals."""
    rows = words[: len(words) // width * width].view(-1, width)[sources.long()]
    out.copy_((rows.float() * factors[:, None]).to(words.dtype).view(-1))


def last_row(
    good: kernels.KernelBackend, words: torch.Tensor, width: int, rows: torch.Tensor, sources: torch.Tensor
) -> None:
    """Forgets the last copy."""
    good.copy_rows(words, width, rows[:-1], sources[:-1])


def no_head(
    good: kernels.KernelBackend,
    payload: torch.Tensor,
    block: int,
    words: torch.Tensor,
    width: int,
    head: int,
    rows: torch.Tensor,
) -> None:
    """Loses a bit of the head."""
    good.decode_rows(payload, block, words, width, head, rows)
    words.view(torch.uint8)[:head] ^= 1


def next_block(
    good: kernels.KernelBackend,
    payload: torch.Tensor,
    block: int,
    words: torch.Tensor,
    width: int,
    head: int,
    rows: torch.Tensor,
) -> None:
    """Takes the trim of the block behind for that of each block: the trims are the last bytes of a table of four bytes a block."""
    payload = payload.clone()
    trims = payload[16 + 3 * 2 : 16 + 4 * 2]
    trims.copy_(trims.flip(0))
    try:
        good.decode_rounded_rows(payload, block, words, width, head, rows)  # type: ignore[attr-defined]
    except FrameError as error:
        raise AssertionError("refused") from error


def lanes_of_16(
    good: kernels.KernelBackend, words: torch.Tensor, width: int, rows: torch.Tensor, sources: torch.Tensor
) -> torch.Tensor:
    """Adds in float32."""
    values = words[: len(words) // width * width].view(-1, width).float()
    a, b = values[sources.long()], values[rows.long()]
    return (a * b).sum(1) / (a * a).sum(1)


PLANTS: dict[str, tuple[dict[str, Callable[..., Any]], Callable[[], None]]] = {
    "a hash is believed": ({"find_rows": by_hash}, lambda: test_rows.test_rows_travel_once("numba", "bf16")),
    "a row is not copied": ({"copy_rows": last_row}, lambda: test_rows.test_rows_travel_once("numba", "int8")),
    "a head is damaged": ({"decode_rows": no_head}, lambda: test_rows.test_rows_travel_once("numba", "fp16")),
    "a trim of another block": (
        {"decode_rounded_rows": next_block},
        lambda: test_rows.test_rounded_literals_of_two_trims("numba"),
    ),
    "predictions by floating point": (
        {"predict_rows": nearest},
        lambda: test_row_kernels.test_predictions_from_every_word_of_16_bits("numba", "bf16"),
    ),
    "factors in float32": (
        {"row_factors": lanes_of_16},
        lambda: test_row_kernels.test_factors_are_those_of_32_lanes("numba", "fp32", 257),
    ),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_wrong_kernel_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, check = PLANTS[name]
    check()
    wrong = Wrong(**calls)
    monkeypatch.setattr(kernels, "route", lambda name="auto", device="cpu": wrong)
    monkeypatch.setattr(kernels, "lossy_route", lambda name, device, function: wrong)
    with pytest.raises(AssertionError):
        check()


def _no_sources(fields: row_map.Fields, data: np.ndarray, reach: int) -> row_map.RowMap:
    """As if the receiver held any number of rows."""
    return _read_map(fields, data, row_map.MOST_ROWS)


_read_map = row_map.read_map
#: A proof of the decoder -> the cases by hand that rest on it alone.
PROOFS = {
    "sources": ("read_map", _no_sources, "a source in front of the history"),
    "repeats": ("read_map", lambda *given: _unmarked(*given), "a repeat of a repeat"),
}


def _unmarked(fields: row_map.Fields, data: np.ndarray, reach: int) -> row_map.RowMap:
    """The map of a frame without the proof that sources are not repeated: as read if every row were in front."""
    bits = np.unpackbits(data, bitorder="little")
    repeated = np.flatnonzero(bits[: fields.rows])
    if len(repeated) != fields.repeats or fields.scaled != 1:
        return _read_map(fields, data, reach)
    others = np.flatnonzero(bits[: fields.rows] == 0)
    scaled = others[bits[fields.rows : fields.rows + len(others)] == 1]
    at = fields.rows + len(others)
    distances = [int(bits[at + 3 * i : at + 3 * i + 3] @ (1, 2, 4)) + 1 for i in range(len(repeated))]
    literals = np.setdiff1d(others, scaled)
    return row_map.RowMap(
        literals, repeated, repeated - distances, scaled, scaled - 1 - int(bits[at + 3 * len(repeated)])
    )


@pytest.mark.parametrize("name", PROOFS)
def test_a_missing_proof_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, planted, case = PROOFS[name]
    test_rows_refused.test_refused_with_its_code(case, "numba")
    monkeypatch.setattr(row_map, function, planted)
    with pytest.raises((AssertionError, pytest.fail.Exception, RuntimeError)):
        test_rows_refused.test_refused_with_its_code(case, "numba")
