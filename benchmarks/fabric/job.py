"""A training on the fabric: ``python -m ds_zipccl.benchmarks.fabric.job JOB``, with a :class:`Job` as json; its steps as
json are the last line that it prints.

The model has the parameters of layers of Llama 7B, and no arithmetic: a layer hands its input on, and its gradients are
zeros, on a GPU parts of the weights. With ``tflops`` its passes take the time of their products.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from ds_zipccl.benchmarks.fabric import world
from ds_zipccl.benchmarks.fabric.group import Group
from ds_zipccl.comm.device.choice import GroupChoice
from ds_zipccl.comm.group_state import state_of
from ds_zipccl.policy.cost_model import GATHER, RATIO, SUM, DeviceProfile

#: Width of a layer of Llama 7B, and of its perceptron.
WIDTH, WIDE = 4096, 11008
#: Rank of the adapters of LoRA, and the products of a layer that have some: queries and values.
RANK, ADAPTED = 16, (0, 2)
#: Calls of DeepSpeed's backend -> kind of the cost model, by which frames have their size.
CALLS = {"all_gather_into_tensor": GATHER, "reduce_scatter_tensor": SUM, "all_reduce": SUM}


@dataclass(frozen=True)
class Job:
    """``profile``: keys of :class:`ds_zipccl.policy.cost_model.DeviceProfile`. ``config``: of DeepSpeed. ``lora``: only
    adapters are trained. ``tokens``: of a micro-batch, ``tflops``: 1e12 operations per second; 0: no computing."""

    nodes: int
    each: int
    profile: dict[str, float]
    config: dict[str, Any]
    layers: int
    steps: int
    lora: bool = False
    tflops: float = 0.0
    tokens: float = 0.0
    device: str = "cpu"

    def text(self) -> str:
        return json.dumps(asdict(self))


class _Product(torch.autograd.Function):
    """``work``: seconds of a pass forward; there are two such products in a pass backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, work: float) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.work = work
        _compute(work)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (weight,) = ctx.saved_tensors
        _compute(ctx.work * (1 + ctx.needs_input_grad[1]))
        grad = weight / 64 if weight.is_cuda else torch.zeros_like(weight)
        return grads[0], grad if ctx.needs_input_grad[1] else None, None


def _compute(seconds: float) -> None:
    if seconds:
        Group.clock.busy(seconds)


_product: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] = _Product.apply


class Linear(nn.Module):
    """A product with a weight; ``rank``: that of its adapter, 0 for none."""

    def __init__(self, inputs: int, outputs: int, job: Job, rank: int = 0) -> None:
        super().__init__()
        weight = torch.empty(outputs, inputs)  # without a GPU nobody looks at its words
        self.weight = nn.Parameter(weight.normal_(std=0.02) if weight.is_cuda else weight, requires_grad=not job.lora)
        self.work = 2 * outputs * inputs * job.tokens / (1e12 * job.tflops) if job.tflops else 0.0
        self.adapters = nn.ParameterList([torch.empty(rank, inputs), torch.empty(outputs, rank)] if rank else [])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _product(x, self.weight, self.work)
        for one in self.adapters:
            x = _product(x, one, 0.0)
        return x


def model(job: Job) -> nn.Module:
    """Return the layers of the model."""
    shapes = [(WIDTH, WIDTH)] * 4 + [(WIDTH, WIDE)] * 2 + [(WIDE, WIDTH)]
    return nn.Sequential(*(
        Linear(*shape, job, RANK if job.lora and place in ADAPTED else 0)
        for _ in range(job.layers) for place, shape in enumerate(shapes)
    ))  # fmt: skip


def engine_of(job: Job) -> Any:
    """Return a DeepSpeed engine with the model."""
    import deepspeed

    vars(sys.modules["deepspeed.comm.torch"]).update(build_shm_op=lambda: None)  # DeepSpeed would compile it
    torch.set_default_dtype(torch.bfloat16)
    zero3 = job.config["zero_optimization"]["stage"] == 3
    with deepspeed.zero.Init(config_dict_or_path=job.config) if zero3 else nullcontext():
        found = model(job)
    torch.set_default_dtype(torch.float32)
    trained = [one for one in found.parameters() if one.requires_grad]
    return deepspeed.initialize(model=found, config=job.config, model_parameters=trained)[0]


def watch(launcher: world.Launcher | None) -> dict[str, list[float]]:
    """Give the frames of each call their ratio. Returns the host's microseconds of the calls, by their names."""
    backend, calls = sys.modules["deepspeed.comm.comm"].cdb, defaultdict[str, list[float]](list)

    def timed(name: str, kind: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if launcher is not None:
                launcher.ratio = RATIO[kind]
            begin, apart = time.perf_counter(), Group.clock.apart
            handle = inner(*args, **named)
            calls[name].append(1e6 * (time.perf_counter() - begin - (Group.clock.apart - apart)))
            if launcher is not None:
                launcher.ratio = RATIO[GATHER]
            return handle

        return call

    for name, kind in CALLS.items():
        setattr(backend, name, timed(name, kind, getattr(backend, name)))
    return calls


def train(job: Job) -> list[dict[str, Any]]:
    """Return a row for each step: milliseconds of the step and of collectives on the wire; GB that the node sends to
    others; collectives; for each call of DeepSpeed its number, and the host's median microseconds."""
    launcher = world.install(job.nodes, job.each, DeviceProfile(**job.profile), job.device)
    engine = engine_of(job)
    state_of(None).of(GroupChoice).steps = None  # the trial by whole steps has ended, and moves are coded
    calls, clock, rows = watch(launcher), Group.clock, []
    for _ in range(job.steps):
        calls.clear()
        Group.counts.clear()
        begin = clock.finish()
        x = torch.ones(1, dtype=torch.bfloat16, device=engine.device, requires_grad=True)
        engine.backward(engine(x).float().sum())
        engine.step()
        counts = Group.counts
        row = {"step_ms": 1e3 * (clock.finish() - begin), "wire_ms": 1e3 * counts["wire_s"]}
        row |= {"between_gb": counts["between"] / 1e9, "collectives": int(counts["collectives"])}
        us = {name: [len(found), statistics.median(found)] for name, found in calls.items()}
        rows.append(row | {"calls": us})
    return rows


def main(text: str) -> None:
    """Train the job of a text, and print its steps."""
    job = Job(**json.loads(text))
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(job.nodes * job.each), "DS_ACCELERATOR": job.device}
    os.environ |= place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    torch.set_num_threads(1)
    print(json.dumps(train(job)))


if __name__ == "__main__":
    main(sys.argv[1])
