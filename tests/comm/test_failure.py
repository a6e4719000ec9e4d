"""A rank that dies or sends garbage: one clear exception on every other rank within the group's timeout, and nothing hangs."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import corpus
import pytest
import ranks as runner
import tiers
import torch
import torch.distributed as dist

from ds_zipccl import comm
from ds_zipccl.comm.host import frames
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy import admission, tuner_rules

NUMEL = 200_000
ALWAYS = ZipcclConfig(enabled=True, mode="always", min_bytes=0, staging_mib=1)
AUTO = ZipcclConfig(enabled=True, min_bytes=0)
MESSAGE = admission.Message("all_reduce", torch.bfloat16, NUMEL, 3, "cpu", "gloo", "dp")
TIMEOUT = 3.0  # seconds, of the group

OPERATIONS: dict[str, Callable[..., Any]] = {
    "all_gather_into_tensor": lambda x, **more: comm.all_gather_into_tensor(x.repeat(dist.get_world_size()), x, **more),
    "reduce_scatter_tensor": lambda x, **more: comm.reduce_scatter_tensor(
        x[: len(x) // dist.get_world_size()].clone(),
        x[: len(x) // dist.get_world_size() * dist.get_world_size()],
        **more,
    ),
    "all_reduce": lambda x, **more: comm.all_reduce(x, **more),
    "all_to_all_single": lambda x, **more: comm.all_to_all_single(
        torch.empty_like(x[: len(x) // 12 * 12]), x[: len(x) // 12 * 12], **more
    ),
}


def survivor(rank: int, ranks: int, folder: str, case: Callable[..., Any], *arguments: Any) -> None:
    """Run ``case`` on a group with a short timeout; leave what it raised and after how many seconds, and go without a goodbye."""
    torch.set_num_threads(1)
    group = dist.new_group(list(range(ranks)), timeout=timedelta(seconds=TIMEOUT))
    dist.barrier(group)
    begun, said = time.monotonic(), ""
    try:
        case(rank, ranks, group, *arguments)
    except comm.CommError as error:
        said = str(error)
    Path(folder, f"{rank}.json").write_text(json.dumps([said, time.monotonic() - begun]))
    if case is garbage:
        time.sleep(2 * TIMEOUT)  # a rank that leaves ends the waiting of the others: they must not need that
    os._exit(0)


def survive(folder: Path, case: Callable[..., Any], ranks: int, *arguments: Any) -> dict[int, str]:
    """What the ranks that lived on have raised."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "GRACE", 4 * TIMEOUT)
        with pytest.raises(runner.RankFailure):
            runner.run(survivor, ranks, str(folder), case, *arguments, timeout=90)
    found = {int(file.stem): json.loads(file.read_text()) for file in folder.glob("*.json")}
    assert all(seconds < TIMEOUT + 4 for _, seconds in found.values()), found
    return {rank: said for rank, (said, _) in found.items()}


def dying(rank: int, ranks: int, group: dist.ProcessGroup, op: str, config: ZipcclConfig) -> None:
    """The last rank is killed while operations go on."""
    tensor = corpus.tensor(corpus.bell(NUMEL, corpus.BF16, rank), corpus.BF16)
    for step in range(1000):
        if rank == ranks - 1 and step == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        OPERATIONS[op](tensor, group=group, config=config)


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_rank_that_dies(tmp_path: Path, op: str) -> None:
    said = survive(tmp_path, dying, 3, op, ALWAYS)
    assert sorted(said) == [0, 1]
    for rank, text in said.items():
        assert text.startswith(f"{op} (group ") and f"of 3 ranks, role dp, global rank {rank}): " in text
        assert "ing " in text and "global rank " in text.split("): ")[1]


def telling(rank: int, ranks: int, group: dist.ProcessGroup) -> None:
    """A rank is gone when the others tell each other what they have measured."""
    tensor = corpus.tensor(corpus.bell(NUMEL, corpus.BF16, rank), corpus.BF16)
    trial = len(admission.candidates(MESSAGE, AUTO, True)) * tuner_rules.TRIAL_CALLS
    for step in range(1000):
        if rank == ranks - 1 and step == trial:
            os.kill(os.getpid(), signal.SIGKILL)
        handle = comm.all_reduce(tensor, group=group, config=AUTO, async_op=True)
        if step < trial:
            handle.wait()


def test_a_rank_that_dies_while_schedules_are_chosen(tmp_path: Path) -> None:
    said = survive(tmp_path, telling, 3)
    assert sorted(said) == [0, 1]
    for text in said.values():
        assert text.startswith("all_reduce (group ") and "measured" in text


def garbage(rank: int, ranks: int, group: dist.ProcessGroup, op: str) -> None:
    """The frames of rank 1 are damaged on their way."""
    send = frames.compress

    def damaged(*arguments: Any, **settings: Any) -> torch.Tensor:
        frame = send(*arguments, **settings)
        frame[4:12] ^= 255
        return frame

    if rank == 1:
        frames.compress = damaged
        frames.compress_segments = lambda flats, buffers, *more, **settings: [
            damaged(flat, ALWAYS.codec, out=buffer, shaped=False, checksum=False)
            for flat, buffer in zip(flats, buffers, strict=True)
        ]
    tensor = corpus.tensor(corpus.bell(NUMEL, corpus.BF16, rank), corpus.BF16)
    OPERATIONS[op](tensor, group=group, config=ALWAYS)


@pytest.mark.parametrize("op", tiers.mostly_full(OPERATIONS, ["all_reduce"], "six to nine seconds each"))
def test_frames_that_are_garbage(tmp_path: Path, op: str) -> None:
    """Those who read it name it; the others name whom they have waited for in vain, or are done."""
    said = survive(tmp_path, garbage, 3, op)
    assert sorted(said) == [0, 1, 2]
    for rank in (0, 2):
        assert "frame from global rank 1" in said[rank], said
        assert (
            "refused: VERSION: format version 253; this package reads version 2: use the same ds_zipccl on all ranks"
            in said[rank]
        )
    assert not said[1] or "from global rank " in said[1]


LEAVING = """
import sys, torch, torch.distributed as dist
from ds_zipccl import comm, policy
from ds_zipccl.config import ZipcclConfig
rank, store, later = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "later"
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
config = ZipcclConfig(enabled=True, min_bytes=1 << 14)
for size in [2000, 50_000] * 20:
    tensor = torch.ones(size)
    work = comm.all_reduce(tensor, config=config, async_op=later)
    work.wait() if later else None
    assert tensor[-1] == 2
print("done", flush=True)
"""


@pytest.mark.parametrize(
    "later", ["now", pytest.param("later", marks=pytest.mark.full(reason="ten seconds; now stays"))]
)
def test_leaving_without_goodbye(tmp_path: Path, later: str) -> None:
    """The interpreter ends well without destroy_process_group(); with torch alone it aborts now and then."""
    programs = [
        ["-W", "ignore", "-c", LEAVING, str(rank), str(tmp_path / f"store{run}"), later]
        for run in range(3)
        for rank in range(2)
    ]
    for left in runner.whole_programs(*programs):
        assert left == (0, "done\n", "")
