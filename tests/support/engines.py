"""What tests with real DeepSpeed engines share: a model, a case on one rank, and the program that runs cases one after the other.

Starting processes costs far more than training. One launch runs all cases of a rank count, with the test's file as the program of each
rank: a case trains and says, phase by phase, what ought to have become of the gathers of each rank. The tests compare.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from places import PACKAGE
from torch import nn

from ds_zipccl.telemetry import counters

#: What becomes of a shard in a gather.
DIFFERENCE, FIRST, OTHER = "", "nothing was gathered there", "a rank holds something else"
#: Sources of the results of a plain run, beside the test's file.
SOURCES = (Path(__file__), PACKAGE / "telemetry")
VOCABULARY, WIDTH, BATCH, CONTEXT = 384, 256, 2, 16
ADAM = {"lr": 1e-3, "weight_decay": 0.0, "torch_adam": True}


class Model(nn.Module):
    """0.4M parameters: shards of 130 kB and more on three ranks, where 16 KiB is the least that goes as a difference."""

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


class Lab:
    """One case on one rank: makes and trains engines, and keeps what is to be compared."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rank, self.ranks = folder, dist.get_rank(), dist.get_world_size()
        self.engines: list[Any] = []
        self.batches = torch.Generator().manual_seed(10 + self.rank)
        self.losses: list[str] = []
        self.phases: list[dict[str, Any]] = []
        counters.reset()

    def engine(self, seed: int = 1, groups: Callable[[Model], Any] = Model.parameters, **config: Any) -> Any:
        """A new engine; ``config`` has what is different from the settings below, ``zero`` that of its section."""
        import deepspeed

        settings = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": ADAM},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 1_000_000, **config.pop("zero", {})},
        }
        torch.manual_seed(seed)
        model = Model()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=groups(model), config={**settings, **config})
        self.engines.append(engine)
        return engine

    def backward(self, engine: Any, scale: float = 1.0) -> None:
        loss = engine(torch.randint(VOCABULARY, (BATCH, CONTEXT), generator=self.batches))
        self.losses.append(loss.item().hex())
        engine.backward(loss * scale)

    def train(self, engine: Any, steps: int = 1, scale: float = 1.0) -> None:
        """Whole steps, of as many batches as the engine accumulates; ``scale`` is a factor on the loss."""
        for _ in range(steps * engine.gradient_accumulation_steps()):
            self.backward(engine, scale)
            engine.step()

    def ends(self, phase: str, expected: dict[str, int] | list[str]) -> None:
        """A phase is over; how often this rank's shards ought to have gone how, or in which ways at all, sorted."""
        rows = [row for row in counters.rows() if (row["role"], row["op"]) == ("zero_param", "all_gather_into_tensor")]
        row = rows[0] if rows else {"differences": {}, "ratio": 0.0}
        found = {"phase": phase, "expected": expected, "sha256": [sha256(engine.module) for engine in self.engines]}
        self.phases.append(found | {key: row[key] for key in ("differences", "ratio")})
        counters.reset()

    def destroy(self) -> None:
        for engine in self.engines:
            engine.destroy()
        self.engines.clear()
        gc.collect()


def sha256(module: nn.Module) -> str:
    parts = [getattr(parameter, "ds_tensor", parameter) for parameter in module.parameters()]  # ZeRO-3: this rank's
    return hashlib.sha256(torch.cat([part.detach().flatten() for part in parts]).view(torch.uint8).numpy()).hexdigest()


def bits(run: list[dict[str, Any]]) -> list[Any]:
    """All losses and, after each phase, the parameters of all engines, on every rank."""
    return [(rank["losses"], [phase["sha256"] for phase in rank["phases"]]) for rank in run]


def rank_program(cases: Mapping[str, Callable[[Lab], None]]) -> None:
    """Run the cases that the command line names one after the other; rank 0 leaves CASE.json for each: what every rank found."""
    import deepspeed

    folder, *names = sys.argv[1:]
    deepspeed.utils.logging.logger.setLevel("WARNING")
    torch.set_num_threads(1)
    # An inference-only operator that DeepSpeed would otherwise compile now, for one to two minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    gc.freeze()  # DeepSpeed collects garbage again and again; what the imports made is none
    for name in names:
        lab = Lab(Path(folder, name))
        cases[name](lab)
        lab.destroy()
        everyone: list[Any] = [None] * lab.ranks
        dist.all_gather_object(everyone, {"losses": lab.losses, "phases": lab.phases})
        if lab.rank == 0:
            Path(folder, f"{name}.json").write_text(json.dumps(everyone))
    dist.barrier()
    dist.destroy_process_group()
