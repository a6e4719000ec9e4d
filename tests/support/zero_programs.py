"""Random programs of ZeRO-3 over DeepSpeed engines, plain and coded: after every operation outputs, losses and shards have equal bits.

As :mod:`fsdp_programs`, but that a process has either plain engines or coded ones. This file is the program of a rank too.

python tests/support/zero_programs.py 17
"""

from __future__ import annotations

import functools
import gc
import os
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import engines
import torch
import torch.distributed as dist
from drawn import Kind, Program, known, main, nothing, operations
from engines import digest, rank_program
from fsdp_programs import LAYERS, MODES, TIMEOUT, Net, evaluate_args, part_args, write_args
from programs import launch, reference

SECTIONS = {
    "default": '{"enabled": true}',
    "base": '{"enabled": true, "zero3_base": "host", "min_bytes": 0}',
    "always": '{"enabled": true, "mode": "always", "zero3_base": "host", "min_bytes": 0}',
}
SOURCES = [Path(__file__).with_name(name) for name in ("drawn.py", "engines.py", "fsdp_programs.py", "fsdp_lab.py")]
MODELS = 2


class Lab(engines.Lab):
    """A run of a program on this rank."""

    def start(self, program: Program) -> None:
        self.program, self.models, self.kept = program, [None] * MODELS, {}
        self.facts: list[str] = []
        self.batches = torch.Generator().manual_seed(program.seed * 8 + self.rank)

    def model(self, number: int) -> Any:
        """The engine, which the first operation on it makes."""
        traits = self.program.traits
        if self.models[number] is None:
            zero = {
                "stage3_gather_16bit_weights_on_model_save": True,
                **engines.ZERO3,
                **{f"stage3_{key}": value for key, value in traits["zero"].items()},
            }
            config = {"bf16": {"enabled": traits["bf16"]}, "gradient_accumulation_steps": traits["batches"]}
            more = {"groups": trained} if traits["trains"] else {"groups": lambda model: None, "optimizer": {}}
            seed, make = self.program.seed + number, functools.partial(Net, traits)
            self.models[number] = self.engine(seed=seed, make=make, zero=zero, **config, **more)
        return self.models[number]

    def shards(self, number: int, pattern: str = "") -> list[tuple[str, Any]]:
        """The parameters whose names have ``pattern``; all if there is none."""
        found = list(self.model(number).module.named_parameters())
        return [one for one in found if pattern in one[0]] or found

    def note(self, name: str, *tensors: Any) -> None:
        self.facts.append(f"{name} {digest(tensors)[:16]}")

    def batch(self) -> torch.Tensor:
        x = torch.randn(3, self.program.traits["width"], generator=self.batches)
        return x.bfloat16() if self.program.traits["bf16"] else x

    def loss(self, model: Any, branch: str) -> torch.Tensor:
        out = model(self.batch(), branch)
        self.note("output", out)
        return out.float().square().mean()

    def write(self, how: str, number: int, pattern: str, by: float, ranks: Sequence[int]) -> None:
        for _, param in [one for one in self.shards(number, pattern) if self.rank in ranks]:
            shard = param.ds_tensor
            words = shard.data.view(-1).view(torch.int16)
            with torch.no_grad():
                if how in ("data", "to_local"):
                    shard.data.mul_(by)
                elif how == "copy":
                    shard.copy_(by * shard)
                elif how == "dtensor":
                    shard.data = by * shard.detach()
                elif how == "bit":
                    words[-1:].bitwise_xor_(1 << 3)
                elif how == "numpy":
                    words.numpy()[:5] ^= 1 << 3


def trained(model: torch.nn.Module) -> list[Any]:
    return [one for one in model.parameters() if one.requires_grad]


def _evaluate_args(draw: random.Random, traits: Mapping[str, Any]) -> dict[str, Any]:
    found = evaluate_args(draw, traits)
    return found | {"parts": False}


def _train_args(draw: random.Random, traits: Mapping[str, Any]) -> dict[str, Any]:
    branches = "".join(draw.choice("ab") for _ in range(traits["batches"]))
    found: dict[str, Any] = {"branches": branches, "evals": draw.random() < 0.3}
    within = (
        draw.random() < 0.3 and not traits["zero"]["prefetch_bucket_size"]
    )  # or plain reads ahead while a program writes
    return found | ({"write": write_args(draw, traits), "at": draw.randrange(len(branches))} if within else {})


def _train(
    lab: Lab,
    number: int,
    ranks: Sequence[int],
    branches: str = "a",
    evals: bool = False,
    write: Any = None,
    at: int = -1,
) -> None:
    """Take a step; with ``evals`` ``ranks`` in the mode of evaluations. ``write``: before the backward pass ``at``, on ``ranks``."""
    engine = lab.model(number)
    engine.train(not (evals and lab.rank in ranks))
    for count, branch in enumerate(branches):
        loss = lab.loss(engine, branch)
        if count == at:
            lab.write(number=number, ranks=ranks, **write)
        engine.backward(loss)
        engine.step()
    engine.train()


def _evaluate(
    lab: Lab, number: int, ranks: Sequence[int], branches: str = "a", mode: str = "no_grad", other: str = "no_grad",
    evals: bool = False, parts: bool = False,
) -> None:  # fmt: skip
    """As that of FSDP2."""
    engine, mine = lab.model(number), lab.rank in ranks
    engine.train(not (mine and evals))
    with MODES[mode if mine else other]():
        for branch in branches:
            lab.loss(functools.partial(Net.forward, engine.module) if parts and mine else engine, branch)
    engine.train()


def _part(lab: Lab, number: int, ranks: Sequence[int], layer: int, mode: str, times: int) -> None:
    engine = lab.model(number)
    with MODES[mode]():
        for _ in range(times):
            lab.note("part", engine.module.layers[layer](lab.batch()))


def _swap(lab: Lab, number: int, ranks: Sequence[int]) -> None:
    """Change places with averaged shards, which live on ``ranks``."""
    for name, param in [one for one in lab.shards(number) if lab.rank in ranks]:
        shard = param.ds_tensor.data
        other = lab.kept.setdefault((number, name), 0.9 * shard)
        lab.kept[number, name] = shard.clone()
        shard.copy_(other)


def _gathered(lab: Lab, number: int, ranks: Sequence[int], pattern: str, by: float, how: str) -> None:
    """Read whole parameters, and change them: on rank 0 for all ranks with ``how`` "bit" or "copy", otherwise plain forgets it."""
    import deepspeed

    params, root = [one for _, one in lab.shards(number, pattern)], 0 if how in ("bit", "copy") else None
    with deepspeed.zero.GatheredParameters(params, modifier_rank=root):
        lab.note("gathered", *(param.data for param in params))
        for param in params if lab.rank == 0 else ():
            param.data.mul_(by)


def _local(lab: Lab, number: int, ranks: Sequence[int], pattern: str, by: float, how: str) -> None:
    """Set the optimizer's own copies, of shards on ``ranks`` or, with ``how`` "copy", of whole parameters."""
    from deepspeed.utils import safe_get_local_fp32_param, safe_set_full_fp32_param, safe_set_local_fp32_param

    for _, param in lab.shards(number, pattern):
        if param.requires_grad and how == "copy" and param.ds_numel % lab.ranks == 0:
            value = torch.full(param.ds_shape, by / 10) + torch.arange(param.ds_numel).view(param.ds_shape) % 7 / 50
            safe_set_full_fp32_param(param, value)
        elif param.requires_grad and lab.rank in ranks:
            safe_set_local_fp32_param(param, by * safe_get_local_fp32_param(param))


def _checkpoint(lab: Lab, number: int, ranks: Sequence[int], load: bool) -> None:
    """Load the state that was saved last, or save one."""
    folder, engine = lab.folder / str(number), lab.model(number)
    if load and folder in lab.kept:
        engine.load_checkpoint(folder, tag="saved")
    else:
        engine.save_checkpoint(folder, tag="saved")
        lab.kept[folder] = True


def _save(lab: Lab, number: int, ranks: Sequence[int]) -> None:
    """Gather all parameters for a file."""
    lab.folder.mkdir(exist_ok=True)
    engine = lab.model(number)
    engine.save_16bit_model(lab.folder, "16.bin")
    if lab.rank == 0:
        words = torch.load(lab.folder / "16.bin", weights_only=True)
        lab.note("saved", *(words[name] for name in sorted(words)))


def _mode(lab: Lab, number: int, ranks: Sequence[int]) -> None:
    """Only ``ranks`` are in the mode of training, until they train or evaluate."""
    lab.model(number).train(lab.rank in ranks)
    if lab.rank in ranks:
        gc.collect()


OPS = {
    "train": Kind(10, _train_args, _train),
    "evaluate": Kind(10, _evaluate_args, _evaluate),
    "part": Kind(3, part_args, _part),
    "write": Kind(
        6, write_args, lambda lab, number, ranks, **args: lab.write(number=number, ranks=ranks, **args)
    ),
    "swap": Kind(2, nothing, _swap),
    "gathered": Kind(3, write_args, _gathered),
    "local": Kind(2, write_args, _local),
    "checkpoint": Kind(2, lambda draw, traits: {"load": draw.random() < 0.5}, _checkpoint),
    "save": Kind(1, nothing, _save),
    "mode": Kind(1, nothing, _mode),
}  # fmt: skip


BOTH, COMMAND = (0, 1), "tests/support/zero_programs.py"
TRAITS = {
    "width": 256, "layers": ("frozen", "frozen"), "tied": False, "trains": True, "branch": True, "bf16": True, "recompute": False,
    "batches": 1, "zero": {"param_persistence_threshold": 0},
}  # fmt: skip
#: Programs that have failed once.
KNOWN: dict[str, Any] = {
    "one rank evaluates": (
        "default", {},
        [("train", BOTH, {}), ("evaluate", (0,), {"branches": "aaa", "other": "gradients", "evals": True})] * 3,
    ),
    # at the end: DeepSpeed broadcasts its order of modules in a call of the model that follows
    "one rank calls layers": ("default", {}, [*[("train", BOTH, {})] * 3, ("evaluate", (0,), {"parts": True})]),
}  # fmt: skip


def program(seed: int, ranks: int = 0, section: str = "") -> Program:
    """The program of a seed; by default the seed decides ``ranks`` and the section too. Negative ones are those of KNOWN."""
    if seed < 0:
        return known(COMMAND, KNOWN, seed, TRAITS)
    draw = random.Random(f"zero {seed}")
    ahead, trains = draw.random() < 0.3, draw.random() < 0.8
    layers = [draw.choice(LAYERS) for _ in range(draw.randrange(1, 4))]
    traits = {
        "width": draw.choice([32, 256]), "layers": layers, "tied": draw.random() < 0.2, "trains": trains, "branch": draw.random() < 0.5,
        "bf16": draw.random() < 0.7, "recompute": False, "batches": draw.choice([1, 1, 2]), "root": ahead,
        "modes": ["no_grad", "gradients"] if trains else list(MODES),
        "zero": {"prefetch_bucket_size": 200_000 * ahead, "param_persistence_threshold": draw.choice([0, 1000])},
    }  # fmt: skip
    ranks, section = ranks or 2 + seed % 2, section or sorted(SECTIONS)[seed // 2 % len(SECTIONS)]
    ops = operations(draw, ranks, traits, OPS, () if trains else ("train", "local", "checkpoint", "save"))
    return Program(COMMAND, seed, ranks, section, traits, ops, range(len(ops)))


def run(lab: Lab, name: str) -> None:
    """Run the program of a name: the seed, the ranks, and the operations."""
    seed, _, *kept = map(int, name.split("_"))
    one = program(seed, lab.ranks).only(kept)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT), dist.group.WORLD)
    lab.start(one)
    for place, op in zip(one.kept, one.ops, strict=True):
        try:
            OPS[op.name].run(lab, ranks=op.ranks, **op.args)
        except BaseException as error:
            raise RuntimeError(f"operation {place}, {op.name}, in seed {seed} fails: {error}") from error
        for number, engine in enumerate(lab.models):
            for which, param in engine.module.named_parameters() if engine else ():
                shard = param.ds_tensor.detach().view(-1)  # the last ones are padded with what was there
                lab.note(f"{number} {which}", shard[: max(0, param.ds_numel - lab.rank * shard.numel())])
        lab.losses += [f"operation {place}, {op.name}: {fact}" for fact in lab.facts]
        lab.facts.clear()


class Cases(dict[str, Any]):
    """Name of a program -> what runs it."""

    def __missing__(self, name: str) -> Any:
        return functools.partial(run, name=name)


def failures(programs: Sequence[Program], coded: bool = True) -> list[str]:
    """Run programs of equal ranks and section, and return a text for each that has failed; after one that raises no other one counts."""
    names = {"_".join(map(str, [one.seed, one.ranks, *one.kept])): one for one in programs}
    ranks, section = programs[0].ranks, SECTIONS[programs[0].section] if coded else "0"
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder, name) for name in ("plain", "coded")]
        for place in places:
            place.mkdir()
        try:
            wanted = reference(__file__, ranks, places[0], *names, sources=SOURCES, timeout=600)
            found, texts = launch(__file__, ranks, places[1], *names, timeout=600, DS_ZIPCCL=section), []
        except AssertionError as error:
            at = [str(one) for one in programs if f"in seed {one.seed} " in str(error)]
            return ["\n".join([str(error), *at])]
    for name, one in names.items():
        pairs = [
            list(zip(a["losses"], b["losses"], strict=True)) for a, b in zip(wanted[name], found[name], strict=True)
        ]
        differ = [next((f"rank {rank}: {b}" for a, b in pair if a != b), "") for rank, pair in enumerate(pairs)]
        if any(differ):
            texts.append("\n".join([*filter(None, differ), str(one)]))
    return texts


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        rank_program(Cases(), make=Lab)
    else:
        sys.exit(main(__doc__, program, failures))
