"""Support for tests with real DeepSpeed engines: a model, a case on one rank, and a program that runs cases one after the other.

Starting processes costs far more than training, so one launch runs all cases of a rank count, with the test's file as the program of each
rank. A case trains, and states after each phase the expected outcome of this rank's gathers. The tests compare.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from places import PACKAGE
from programs import launch, reference
from torch import nn

from ds_zipccl.benchmarks.links import slots
from ds_zipccl.telemetry import counters

#: Outcomes of a gather for a shard, as the counters name them.
DIFFERENCE, FIRST, OTHER = "", "nothing was gathered there", "a rank holds something else"
#: Sources of the results of a plain run, beside the test's file.
SOURCES = (Path(__file__), PACKAGE / "telemetry")
VOCABULARY, WIDTH, BATCH, CONTEXT = 384, 256, 2, 16
ADAM = {"lr": 1e-3, "weight_decay": 0.0, "torch_adam": True}
#: All parameters but biases are freed after use, in the forward pass too: the backward pass gathers them again.
ZERO3 = {
    "stage": 3,
    "stage3_param_persistence_threshold": 1000,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 200_000,
}


class Model(nn.Module):
    """A model of 0.4M parameters. On three ranks its shards have 130 kB and more; shards below 16 KiB never go as differences."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + torch.relu(layer(hidden))
        follow = (7 * tokens + 1) % VOCABULARY
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), follow.flatten())


def slot_of(param: Any) -> Any:
    """The base of a parameter of ZeRO-3, None without one."""
    state = getattr(param, "ds_zipccl_state", None)
    return None if state is None else state.slot()


class Lab:
    """One case on one rank: makes and trains engines, and collects the results to compare."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rank, self.ranks = folder, dist.get_rank(), dist.get_world_size()
        self.engines: list[Any] = []
        self.batches = torch.Generator().manual_seed(10 + self.rank)
        self.losses: list[str] = []
        self.phases: list[dict[str, Any]] = []
        counters.reset()

    def engine(
        self,
        seed: int = 1,
        groups: Callable[[Model], Any] = Model.parameters,
        make: Callable[[], Model] = Model,
        **config: Any,
    ) -> Any:
        """Return a new engine. ``config`` overrides the settings below, its ``zero`` those of the section ``zero_optimization``."""
        import deepspeed

        settings = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": ADAM},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 1_000_000, **config.pop("zero", {})},
        }
        torch.manual_seed(seed)
        model = make()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=groups(model), config={**settings, **config})
        self.engines.append(engine)
        return engine

    def backward(self, engine: Any, scale: float = 1.0) -> None:
        loss = engine(torch.randint(VOCABULARY, (BATCH, CONTEXT), generator=self.batches))
        self.losses.append(loss.item().hex())
        engine.backward(loss * scale)

    def train(self, engine: Any, steps: int = 1, scale: float = 1.0) -> None:
        """Take whole steps, of as many batches as the engine accumulates; ``scale`` is a factor on the loss."""
        for _ in range(steps * engine.gradient_accumulation_steps()):
            self.backward(engine, scale)
            engine.step()

    def train_phase(self, engine: Any, steps: int, phase: str, expected: dict[str, int] | list[str]) -> None:
        """Take whole steps, and end a phase."""
        self.train(engine, steps)
        self.ends(phase, expected)

    def ends(self, phase: str, expected: dict[str, int] | list[str]) -> None:
        """End a phase. ``expected`` maps outcomes of this rank's shards to counts, or lists the outcomes, sorted."""
        rows = {f"{row['role']} {row['op']}": row for row in counters.rows()}
        row: Any = rows.get("zero_param all_gather_into_tensor", {"differences": {}, "ratio": 0.0})
        found = {
            "phase": phase,
            "expected": expected,
            "sha256": [digest(engine.module.parameters()) for engine in self.engines],
        }
        found["rows"] = {
            name: {key: one[key] for key in ("calls", "reasons", "host_waits")} for name, one in rows.items()
        }
        self.phases.append(found | {key: row[key] for key in ("differences", "ratio")})
        counters.reset()

    def destroy(self) -> None:
        for engine in self.engines:
            engine.destroy()
        self.engines.clear()
        gc.collect()


def digest(tensors: Iterable[Any]) -> str:
    """Return a hash of the bits of tensors and their dtypes; of parameters of ZeRO-3, of their shards on this rank."""
    found = hashlib.sha256()
    for tensor in tensors:
        shard = getattr(tensor, "ds_tensor", tensor).detach().contiguous()
        found.update(str(shard.dtype).encode() + shard.view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def bits(run: list[dict[str, Any]]) -> list[Any]:
    """Return the losses of every rank, and the hashes of the parameters of all its engines after each phase."""
    return [(rank["losses"], [phase["sha256"] for phase in rank["phases"]]) for rank in run]


#: (ranks, "off" or a kind of coded runs, case) -> results of each rank.
Trained = Callable[[int, str, str], list[dict[str, Any]]]


def train_each(
    program: str, folder: Callable[[str], Path], runs: Iterable[tuple[int, str, str]], sections: Mapping[str, str]
) -> Trained:
    """Launch all of ``runs``, and the plain runs of their cases: one launch for a number of ranks and a kind, even if a case fails.

    ``folder``: makes one. ``sections``: ``DS_ZIPCCL`` of each kind.
    """
    runs, found = list(runs), {}
    for ranks, kind in dict.fromkeys(pair for count, of, _ in runs for pair in ((count, "off"), (count, of))):
        cases = dict.fromkeys(case for count, of, case in runs if count == ranks and kind in ("off", of))
        place = folder(f"{kind}{ranks}")
        if kind == "off":
            found[ranks, kind] = reference(program, ranks, place, *cases, sources=SOURCES, timeout=480)
        else:
            found[ranks, kind] = launch(program, ranks, place, *cases, timeout=480, DS_ZIPCCL=sections[kind])
    return lambda ranks, kind, case: found[ranks, kind][case]


def one_by_one() -> None:
    """Let plain DeepSpeed gather parameters one after the other. It waits for the last one of several gathers alone, up to 0.19.7, and gloo
    may end them in another order: some runs would read old words."""
    from deepspeed.runtime.zero.partition_parameters import Init

    gather = Init._allgather_params_coalesced

    def gather_each(init: Any, params: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        for param in params:
            gather(init, [param], *args, **kwargs)

    Init._allgather_params_coalesced = gather_each


def rank_program(
    cases: Mapping[str, Callable[[Any], None]],
    backend: str | None = None,
    make: Callable[[Path], Lab] = Lab,
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Run the cases that the command line names, one after the other. Rank 0 writes the results of all ranks to CASE.json for each.

    ``backend``: of the default group: "slots", "emulated": the same with the emulated kernels, None: DeepSpeed's choice for this machine.
    ``make``: makes the lab of a case. ``sizes``: of the model, instead of those of this file.
    """
    import deepspeed

    globals().update(sizes or {})

    if backend == "emulated":
        import emulation

        slots.install({"emulated": emulation.load})
    elif backend == slots.NAME:
        slots.install()
    folder, *names = sys.argv[1:]
    deepspeed.utils.logging.logger.setLevel("WARNING")
    torch.set_num_threads(1)
    # DeepSpeed would compile this inference-only operator now, for one to two minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=slots.NAME if backend == "emulated" else backend)
    if os.environ.get("DS_ZIPCCL") == "0" and deepspeed.__version__ < "0.19.8":
        one_by_one()
    gc.freeze()  # DeepSpeed collects garbage again and again; objects of imports never are garbage
    for name in names:
        lab = make(Path(folder, name))
        cases[name](lab)
        lab.destroy()
        everyone: list[Any] = [None] * lab.ranks
        dist.all_gather_object(everyone, {"losses": lab.losses, "phases": lab.phases})
        if lab.rank == 0:
            Path(folder, f"{name}.json").write_text(json.dumps(everyone))
    dist.barrier()
    dist.destroy_process_group()
