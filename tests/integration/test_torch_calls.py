"""Direct calls of torch.distributed, as Megatron-DeepSpeed and GPT-NeoX make them.

:mod:`megatron` makes the calls of their tensor parallelism in the same ways; none of their text is in this repository.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
import megatron
import pytest
import torch
import torch.distributed as dist
from engines import ADAM, Lab, digest, rank_program
from programs import launch, reference

from ds_zipccl.integration import torch_calls
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.telemetry import counters

WIDTH, ROWS, BATCH = 256, 64, 4


def training(lab: Lab, by_rows: bool, pipeline: bool = False) -> None:
    """Train blocks with two ranks to a tensor group; note the calls, and the bits."""
    import deepspeed

    grid = megatron.Grid(2)
    megatron.begin(grid)
    torch.manual_seed(1 + grid.get_tensor_model_parallel_rank())
    model = megatron.Blocks(WIDTH, 2, by_rows)
    settings = {"train_micro_batch_size_per_gpu": BATCH, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    settings["optimizer"] = {"type": "AdamW", "params": ADAM}
    # Beside a pipeline, DeepSpeed's mpu is a grid with groups of its own.
    mpu = megatron.Grid(2) if pipeline else grid
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), mpu=mpu, config=settings)[0]
    lab.engines.append(engine)
    counters.reset()
    data = torch.Generator().manual_seed(grid.get_data_parallel_rank())
    for _ in range(3):
        loss = engine(torch.randn(ROWS, BATCH, WIDTH, generator=data).bfloat16())
        lab.losses.append(loss.item().hex())
        engine.backward(loss)
        engine.step()
    rows = {
        f"{row['role']} {row['op']}": {key: row[key] for key in ("calls", "ratio", "reasons")}
        for row in counters.rows()
    }
    lab.phases.append({"sha256": digest(engine.module.parameters()), "rows": rows})


def calls(lab: Lab) -> None:
    """Call each function in all ways, over groups that count and groups that do not."""
    import deepspeed

    grid = megatron.Grid(2)
    deepspeed.utils.groups.mpu = grid
    own, twin, alone = grid.get_tensor_model_parallel_group(), dist.new_group([0, 1]), dist.new_group([lab.rank])
    ways(own, 1)
    ways(twin, 1)
    for group in (None, dist.group.WORLD):
        ways(group, 0)
    # the same calls by way of others: one call each, and none by way of torch's own functions
    made = torch.ones(4096).bfloat16()
    through: dict[str, Callable[[], Any]] = {
        "deepspeed": lambda: deepspeed.comm.all_reduce(made, group=own),
        "deepspeed, small": lambda: deepspeed.comm.all_reduce(torch.ones(3), group=own),
        "small": lambda: dist.all_reduce(torch.ones(3), group=own),
        "integers": lambda: dist.all_reduce(torch.ones(4096, dtype=torch.int64), group=own),
    }
    for name, call in through.items():
        assert counted(call) == {"tp all_reduce": 1}, name
    plain = counted(lambda: deepspeed.comm.inference_all_reduce(made, dist.ReduceOp.SUM, own))
    assert plain == {"tp inference_all_reduce": 1}, plain
    assert not counted(lambda: torch.distributed.nn.functional.all_reduce(made, group=own))
    assert not counted(lambda: dist.all_reduce(made, group=alone))
    traced = torch.distributed.all_reduce

    def tracing(*args: Any, **kwargs: Any) -> Any:
        return traced(*args, **kwargs)

    torch.distributed.all_reduce = tracing  # type: ignore[assignment]
    try:
        for name, call in through.items():
            assert counted(call) == {"tp all_reduce": 1}, name
    finally:
        torch.distributed.all_reduce = traced
    for arguments in ((), (made, dist.ReduceOp.SUM, own, False, "more")):
        try:
            dist.all_reduce(*arguments, **({} if arguments else {"group": own}))
            raise SystemExit(f"a call with {len(arguments)} arguments went through")
        except TypeError as error:  # torch's own
            assert "all_reduce()" in str(error), error
    assert counted(through["small"]) == {"tp all_reduce": 1}
    deepspeed.utils.groups.mpu = None


def counted(call: Callable[[], Any]) -> dict[str, int]:
    """Return the number of calls of each role and operation that ``call`` made, coded or passed."""
    counters.reset()
    call()
    return {f"{row['role']} {row['op']}": row["calls"] + row["passed"] for row in counters.rows()}


def ways(group: Any, each: int) -> None:
    """Call each function by position and by name, waiting and not waiting."""
    for name, by_name, later in itertools.product(torch_calls.CALLS, (False, True), (False, True)):
        one_way(name, group, by_name, later, each)


def one_way(name: str, group: Any, by_name: bool, later: bool, each: int) -> None:
    """Compare a call with one of the function that it stands for. ``each``: the number of calls of role tp that count."""
    op, parameters = torch_calls.CALLS[name]
    function: Any = getattr(dist, name)
    wanted, found = arguments(op), arguments(op)
    function.__wrapped__(*wanted, group=group)
    values = {"op": dist.ReduceOp.SUM, **dict(zip(parameters, found, strict=False)), "group": group, "async_op": later}
    given = {key: values[key] for key in parameters}
    handles = []
    rows = counted(lambda: handles.append(function(**given) if by_name else function(*given.values())))
    (handle,) = handles
    if later:
        future = handle.get_future() if each else None  # handles of gloo itself have none
        handle.wait()
        assert future is None or (handle.is_completed() and handle.exception() is None and future.wait())
        rows = {f"{row['role']} {row['op']}": row["calls"] for row in counters.rows()}
    assert (handle is not None) == later, name
    assert rows == ({f"tp {op}": 1} if each else {}), (name, by_name, later, rows)
    flat = [torch.cat(one) if isinstance(one, list) else one for one in (wanted[0], found[0])]
    assert torch.equal(*(one.view(torch.int16) for one in flat)), (name, by_name, later)


def arguments(op: str) -> list[Any]:
    """Return new tensors of this rank for an operation."""
    ranks, numel = dist.get_world_size(), 4096
    data = torch.randn(ranks * numel, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
    if op == "all_reduce":
        return [data]
    if op == "all_gather":
        return [[torch.empty_like(data) for _ in range(ranks)], data]
    if op == "all_gather_into_tensor":
        return [data.new_empty(ranks * data.numel()), data]
    return [data.new_empty(numel), [*data.chunk(ranks)] if op == "reduce_scatter" else data]


TRAININGS: dict[str, Callable[[Any], None]] = {
    "tensors": lambda lab: training(lab, False),
    "sequences": lambda lab: training(lab, True),
    "pipeline": lambda lab: training(lab, False, pipeline=True),
}
CASES = TRAININGS | {"calls": calls}


def section(**more: Any) -> str:
    return json.dumps({"enabled": True, "mode": "always", "min_bytes": 1024, "torch_distributed": True, **more})


def bits(run: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: [(rank["losses"], rank["phases"][0]["sha256"]) for rank in run[name]] for name in TRAININGS}


def tensor_rows(run: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the rows of rank 0 with the role tp."""
    rows = run[name][0]["phases"][0]["rows"]
    return {key.removeprefix("tp "): row for key, row in rows.items() if key.startswith("tp ")}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sources = [Path(engines.__file__), Path(megatron.__file__)]
    return reference(__file__, 2, tmp_path_factory.mktemp("plain"), *TRAININGS, sources=sources)


def test_tensor_parallelism_of_megatron(plain: dict[str, Any], tmp_path: Path) -> None:
    coded = launch(__file__, 2, tmp_path, *CASES, DS_ZIPCCL=section())
    assert bits(coded) == bits(plain)
    for name in ("tensors", "pipeline"):
        rows = tensor_rows(coded, name)
        assert rows["all_reduce"]["calls"] == 15 and rows["all_reduce"]["ratio"] >= 1.49, (name, rows)
        assert rows["all_gather"]["calls"] == 3, (name, rows)
    rows = tensor_rows(coded, "sequences")
    assert {op: row["calls"] for op, row in rows.items() if row["calls"]} == {
        "all_gather_into_tensor": 24, "reduce_scatter_tensor": 15, "all_gather": 3,
    }  # fmt: skip
    assert all(row["ratio"] >= 1.49 for row in rows.values() if row["calls"])
    assert not tensor_rows(plain, "tensors")


@pytest.mark.full(reason="two more launches of real engines")
def test_the_role_never_coded_and_the_key_left_out(plain: dict[str, Any], tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("never", "out")]
    for folder in folders:
        folder.mkdir()
    never = launch(__file__, 2, folders[0], *TRAININGS, DS_ZIPCCL=section(roles={"tp": "never"}))
    assert bits(never) == bits(plain)
    for name in TRAININGS:
        rows = tensor_rows(never, name)
        assert not any(row["calls"] for row in rows.values())
        assert rows["all_gather"]["reasons"] == {PassReason.ROLE.value: 3}, rows
    out = launch(__file__, 2, folders[1], *TRAININGS, DS_ZIPCCL=section(torch_distributed=False))
    assert bits(out) == bits(plain)
    assert all(set(tensor_rows(out, name)) <= {"all_reduce"} for name in TRAININGS)
    assert not any(row["calls"] for name in TRAININGS for row in tensor_rows(out, name).values())


if __name__ == "__main__":
    rank_program(CASES)
