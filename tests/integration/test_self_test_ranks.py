"""Jobs in which kernels of one rank fail the self-test, or are numba's: they train with the bits of plain communication, and say why."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from engines import DIFFERENCE, FIRST, SOURCES, ZERO3, Lab, bits, rank_program
from programs import launch, reference
from test_bases_of_engines import SECTION as OF_STREAMS
from test_bases_of_engines import SIZES

from ds_zipccl import kernels
from ds_zipccl.benchmarks.links import slots
from ds_zipccl.kernels import self_test

SECTION = {**OF_STREAMS, "reduction": "match"}


def trained(lab: Lab, stage: int) -> None:
    lab.train_phase(lab.engine(zero=ZERO3 if stage == 3 else {"stage": stage}), 3, "trained", {})


CASES = {f"zero{stage}": functools.partial(trained, stage=stage) for stage in (2, 3)}


class Wrong:
    """A backend that gets one bit of its payloads wrong."""

    def __init__(self, good: Any) -> None:
        self.good = good

    def __getattr__(self, name: str) -> Any:
        return getattr(self.good, name)

    def encode(self, segments: Any, code: str, block: int, outs: Any) -> list[int]:
        sizes: list[int] = self.good.encode(segments, code, block, outs)
        for size, out in zip(sizes, outs, strict=True):
            if size:
                out[size // 2] ^= 1
        return sizes


def plant(names: list[str]) -> None:
    """From now on these backends of this process are wrong."""
    for name in names:
        load = kernels.ROUTES["cpu"][name]

        def wrong(name: str = name, load: Any = load) -> Any:
            planted: Any = Wrong(load())
            return self_test.proven(lambda: planted, name, f"planted {os.getpid()}".encode())

        kernels.ROUTES["cpu"][name] = wrong


OFF = (
    "[ds_zipccl] coding is off: ranks [1] have no kernels for CPU tensors, and every call stays plain on all ranks; rank 1: no "
    "kernels for cpu tensors here."
)
DELTA_OFF = (
    "[ds_zipccl] delta is off: ranks [1] have no kernels of differences; rank 1: no kernels for cpu tensors here. numba: it has no "
    "encode_delta; install a C++ compiler or a wheel of ds_zipccl with its library"
)
#: What is planted in rank 1, the backend of its group, and the start of the lines that rank 0 prints; None: coded on all ranks.
JOBS: dict[str, tuple[list[str], str, str | None]] = {
    "another backend takes over": (["native"], "", None),
    "no backend of CPUs": (
        ["native", "numba"], "",
        f"{OFF} native: SelfTestError: encode_bf16_cascade, 16,385 words (mixed) at offset 1: ",
    ),
    "no kernels of a device": (
        ["native"], slots.NAME,
        f"{OFF} native: SelfTestError: encode_bf16_cascade, 16,385 words (mixed) at offset 1: ",
    ),
}  # fmt: skip


@pytest.mark.full(reason="eight seconds")
@pytest.mark.parametrize("job", JOBS)
def test_wrong_kernels_of_one_rank(job: str, tmp_path: Path) -> None:
    names, backend, said = JOBS[job]
    folders = tmp_path / "plain", tmp_path / "coded"
    for folder in folders:
        folder.mkdir()
    plain = reference(__file__, 2, folders[0], *CASES, sources=SOURCES)
    environment = {"DS_ZIPCCL": json.dumps(SECTION), "PLANT": " ".join(names), "BACKEND": backend}
    coded = launch(__file__, 2, folders[1], *CASES, **environment)
    output = (folders[1] / "rank0.txt").read_text()
    for case in CASES:
        assert bits(coded[case]) == bits(plain[case]), case
        calls = [
            sum(row["calls"] for phase in rank["phases"] for row in phase["rows"].values()) for rank in coded[case]
        ]
        assert all(calls) if said is None else not any(calls), calls
    lines = [line for line in output.splitlines() if line.startswith("[ds_zipccl")]
    assert lines[0].startswith(said or "[ds_zipccl] rows is off: ranks [1] have no kernels of row frames"), output


#: Kernels of rank 1 -> outcomes of gathers with a base after the first, and the first line of rank 0.
RANK_1: dict[str, tuple[set[str], str]] = {
    "": ({DIFFERENCE}, "[ds_zipccl"),
    "numba": (set(), "[ds_zipccl] rows is off: ranks [1] have no kernels of row frames; rank 1: no kernels for cpu tensors here."),
}  # fmt: skip


@pytest.mark.full(reason="five seconds")
def test_numba_alone_on_one_rank(tmp_path: Path) -> None:
    """No rank sends differences, as rank 1 cannot read any; where it can, all later gathers are differences."""
    plain = reference(__file__, 2, tmp_path, *CASES, sources=SOURCES)
    for alone, (outcomes, said) in RANK_1.items():
        folder = tmp_path / f"alone {alone}"
        folder.mkdir()
        environment = {"DS_ZIPCCL": json.dumps({**SECTION, "zero3_base": "host"}), "ALONE": alone}
        coded = launch(__file__, 2, folder, *CASES, **environment)
        for case in CASES:
            assert bits(coded[case]) == bits(plain[case]), case
            found = {outcome for rank in coded[case] for phase in rank["phases"] for outcome in phase["differences"]}
            assert found - {FIRST} == outcomes, (case, alone)
        lines = [line for line in (folder / "rank0.txt").read_text().splitlines() if line.startswith("[ds_zipccl")]
        assert lines[0].startswith(said), lines
        assert [line for line in lines if "delta is off" in line] == ([DELTA_OFF] if alone else [])


if __name__ == "__main__":
    if os.environ.get("ALONE") and os.environ["RANK"] == "1":
        kernels.ROUTES["cpu"] = {name: kernels.ROUTES["cpu"][name] for name in os.environ["ALONE"].split()}
    if os.environ.get("BACKEND"):
        slots.install()
    if os.environ.get("PLANT") and os.environ["RANK"] == "1":
        plant(os.environ["PLANT"].split())
    rank_program(CASES, os.environ.get("BACKEND") or None, sizes=SIZES)
