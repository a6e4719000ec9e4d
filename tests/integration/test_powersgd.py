"""PowerSGD on real engines: the sums of all layouts of gradients, their state, and what is refused.

The program of a rank surrounds every sum by PowerSGD: it sums a copy exactly, and adds up by the names of parameters what was to arrive
and what arrived. The difference must be in the errors of the ranks.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel import Lab, rank_program
from programs import launch
from test_parallel import Layered

RANK, STEPS = 4, 4
FP16 = {"bf16": {"enabled": False}, "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
FP32 = {"bf16": {"enabled": False}}
BF16_OPTIMIZER = {"data_types": {"grad_accum_dtype": "fp32"}}


def section(**more: Any) -> str:
    codec = {"codec": "powersgd", "rank": RANK, "start_step": 1, **more}
    given = {"enabled": True, "mode": "always", "min_bytes": 1024, "lossy": True, "log_interval": 1}
    return json.dumps(given | {"roles": {"zero_grad": codec, "dp": codec}})


class Sums:
    """What was to arrive and what has arrived, by parameter; hashes of all sums."""

    def __init__(self) -> None:
        self.missing: dict[str, Any] = defaultdict(float)
        self.given: dict[str, float] = defaultdict(float)
        self.changed, self.hashes = 0, hashlib.sha256()

    def watch(self) -> Any:
        from ds_zipccl.integration.powersgd import PowerSum

        original = PowerSum.run

        def run(power: Any, tensor: torch.Tensor, op: Any, group: Any, *args: Any) -> None:
            exact = tensor.double().view(-1)
            dist.all_reduce(exact, group=group)
            original(power, tensor, op, group, *args)
            arrived = tensor.double().view(-1)
            self.changed += not torch.equal(exact, arrived)
            self.hashes.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            for place in power.places:
                part = slice(place.start, place.start + place.rows * place.columns)
                if bool(exact[part].isfinite().all()):
                    self.missing[place.name] = self.missing[place.name] + exact[part] - arrived[part]
                    self.given[place.name] += float(exact[part].abs().sum())

        PowerSum.run = run  # type: ignore[method-assign]
        return original


def trained(lab: Lab, zero: Any, overflow: int = -1, **more: Any) -> None:
    """Train; in step ``overflow`` one rank has a gradient that is not finite."""
    from deepspeed.accelerator import get_accelerator

    from ds_zipccl.integration import lossy_state
    from ds_zipccl.integration.powersgd import PowerSum
    from ds_zipccl.telemetry import counters

    get_accelerator().is_fp16_supported = lambda: True  # torch computes fp16 on CPUs all the same
    sums, step = Sums(), 0
    original = sums.watch()
    model = Layered([torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)])

    def hook(grad: torch.Tensor) -> torch.Tensor:
        if step == overflow and lab.rank == 1:
            grad = grad.clone()
            grad.view(-1)[5] = float("nan")
        return grad

    model.words.weight.register_hook(hook)
    engine = lab.start(model, zero, gradient_clipping=0.0, **more)
    owner = lossy_state.owner_of(engine)
    entries: list[int] = []
    batches = engine.gradient_accumulation_steps()
    for step in range(STEPS):  # the hook reads the step
        for batch in range(batches):
            loss = engine(lab.tokens(batches * step + batch))
            lab.losses.append(loss.item().hex())
            engine.backward(loss)
            engine.step()
        held = lossy_state.entries_of(owner)
        entries.append(sum(entry.error is not None for _, _, entry in held))
        if step == overflow:
            sums.missing.clear()
            sums.given.clear()
    PowerSum.run = original  # type: ignore[method-assign]
    left = {}
    for _, key, entry in lossy_state.entries_of(owner):
        error = entry.error.double().flatten()
        dist.all_reduce(error)
        scale = lab.more.get("unit", 1.0)
        left[key[0]] = float((sums.missing[key[0]] - scale * error).abs().sum()) / sums.given[key[0]]
    rows = [row for row in counters.rows() if row["op"] == "all_reduce" and row["role"] in ("zero_grad", "dp")]
    lab.more |= {
        "optimizer": type(engine.optimizer).__name__,
        "left": left,
        "changed": sums.changed,
        "hash": sums.hashes.hexdigest(),
        "entries": entries,
        "skipped": engine.skipped_steps,
        "rows": [str(row) for row in rows],
    }


make = functools.partial
CASES = {
    "stage 0": make(trained, zero=0, **FP32),  # first: the role is dp only where no engine of the process has had ZeRO
    "bf16 optimizer": make(trained, zero=1, **BF16_OPTIMIZER),
    "zero1": make(trained, zero=1),
    "zero2": make(trained, zero=2),
    "zero2 all": make(trained, zero={"stage": 2, "reduce_scatter": False}),
    "zero2 overlap": make(trained, zero={"stage": 2, "overlap_comm": True, "reduce_bucket_size": 9000}),
    "zero2 owners": make(trained, zero={"stage": 2, "use_multi_rank_bucket_allreduce": False}),
    "zero1 own": make(trained, zero={"stage": 1, "contiguous_gradients": False, "round_robin_gradients": True}),
    "accumulated": make(trained, zero=2, gradient_accumulation_steps=2),
    "predivided": make(
        trained, zero={"stage": 2, "reduce_scatter": False}, prescale_gradients=False, gradient_predivide_factor=4.0
    ),
    "overflow": make(trained, zero=1, overflow=2, **FP16),
}
SHORT = ["stage 0", "zero2", "overflow"]


def check(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        values = [float.fromhex(loss) for loss in rank["losses"]]
        assert len(set(values)) == len(values) and values[-1] < values[0], (name, values)
        assert rank["sha256"] == ranks[0]["sha256"] and rank["hash"] == ranks[0]["hash"], f"{name}: replicas"
        if name == "zero2 owners":  # sums for one rank stay exact
            assert not rank["changed"] and not rank["left"]
            continue
        assert rank["changed"] >= (STEPS - 1), (name, rank["changed"])
        assert len(rank["left"]) == 4, (name, rank["left"])  # words, head, two layers
        assert max(rank["left"].values()) < 1e-5, (name, rank["left"])
        assert rank["entries"] == ([0, 4, 0, 4] if name == "overflow" else [0, 4, 4, 4]), (name, rank["entries"])
        assert rank["skipped"] == (name == "overflow")


@pytest.mark.parametrize(
    "names",
    [SHORT, pytest.param([name for name in CASES if name not in SHORT], marks=pytest.mark.full(reason="a launch"))],
    ids=["kinds", "layouts"],
)
def test_what_did_not_arrive_is_kept_in_all_layouts(names: list[str], tmp_path: Path) -> None:
    found = launch(__file__, 2, tmp_path, "lossy", *names, DS_ZIPCCL=section())
    for name in names:
        check(name, found[name])


if __name__ == "__main__":
    rank_program(CASES)
