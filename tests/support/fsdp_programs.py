"""Random programs of FSDP2, each plain and coded side by side: after every operation outputs, losses, gradients and shards have equal bits.

A program writes to its sharded parameters where it likes, on the ranks that it likes; ranks differ in their modes, optimizers and garbage.
Nothing here knows when the package looks at a shard.

python tests/support/fsdp_programs.py 17                  # the program of seed 17, plain and coded
python tests/support/fsdp_programs.py 17 --ops 0 3 5      # some of its operations; with --shrink as few as fail
python tests/support/fsdp_programs.py 0 --seeds 1000      # many programs
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import ranks as runner
import torch
import torch.distributed as dist
from drawn import Kind, Program, known, main, nothing, operations
from fsdp_lab import BF16, Adapted, Lab
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_map_only

from ds_zipccl import fsdp

SECTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "base": {"zero3_base": "host", "min_bytes": 0},
    "always": {"mode": "always", "zero3_base": "host", "min_bytes": 0},
}
#: Seconds that a rank waits for another one.
TIMEOUT = 40
#: Programs that fail by an error, after which nothing more runs.
MOST = 5
BATCH, MODELS = 3, 2
LAYERS = ("full", "full", "frozen", "frozen", "adapted", "narrow")
WRITES = ("data", "to_local", "copy", "dtensor", "bit", "numpy")
MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "gradients": contextlib.nullcontext,
}


class Net(nn.Module):
    """Layers, one of two branches, and a head that always trains if anything does. ``traits``: see :func:`program`."""

    def __init__(self, traits: Mapping[str, Any]) -> None:
        super().__init__()
        width = traits["width"]
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.layers = nn.ModuleList(_layer(kind, width, traits["recompute"]) for kind in traits["layers"])
        self.branches = nn.ModuleDict({name: nn.Linear(width, width) for name in "ab"})
        self.branches["a"].requires_grad_(traits["branch"])
        if traits["tied"]:
            self.last.weight = self.first.weight
        if not traits["trains"]:
            self.requires_grad_(False)

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        x = self.first(x)
        for layer in [*self.layers, self.branches[branch]]:
            x = x + torch.tanh(layer(x))
        return self.last(x)


def _layer(kind: str, width: int, recompute: bool) -> nn.Module:
    if kind == "narrow":  # ranks but the first have empty shards of the first weight
        return nn.Sequential(nn.Linear(width, 1, bias=False), nn.Linear(1, width))
    layer: nn.Module = nn.Linear(width, width, bias=kind != "foreign")
    if kind == "foreign":
        layer.weight = nn.Parameter(Foreign(layer.weight.detach()))
    if kind == "adapted":
        layer = Adapted(layer)
    layer.requires_grad_(kind != "frozen") if kind != "adapted" else None
    return checkpoint_wrapper(layer) if recompute else layer


class Foreign(torch.Tensor):
    """As torchao's training tensors: it has no memory of its own, and says itself what is gathered."""

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> Any:
        how = {"strides": inside.stride(), "dtype": inside.dtype, "device": inside.device}
        return torch.Tensor._make_wrapper_subclass(cls, inside.size(), **how)  # type: ignore[attr-defined]

    def __init__(self, inside: torch.Tensor) -> None:
        self.inside = inside

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda one: one.inside, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*args, **kwargs))

    def fsdp_pre_all_gather(self, *_: Any) -> Any:
        return (self.inside.bfloat16(),), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0].view_as(outputs[0]), outputs)


class Trained(NamedTuple):
    """A model, and torch's sharded parameters by name. ``trained``: those that have trained from the start."""

    model: Any
    params: dict[str, Any]
    trained: set[str]

    def shards(self, pattern: str = "") -> Iterator[tuple[str, Any]]:
        """The sharded parameters whose names have ``pattern``; all if there is none."""
        found = {name: one.sharded_param for name, one in self.params.items()}
        return iter({name: one for name, one in found.items() if pattern in name}.items() or found.items())


class Side(Lab):
    """The plain or the coded run of a program on this rank."""

    def __init__(self, rank: int, ranks: int, coded: bool, program: Program) -> None:
        super().__init__(rank, ranks, coded, "")
        self.program, self.on = program, [coded] * MODELS
        self.models: list[Any] = [None] * MODELS
        self.optimizers: list[Any] = [None] * MODELS
        self.kept: dict[Any, Any] = {}
        self.in_backward: list[Any] = []
        self.generator = torch.Generator().manual_seed(program.seed * 8 + rank)
        for number in range(MODELS):
            self.build(number, 0)

    def build(self, number: int, version: int) -> None:
        traits = self.program.traits
        torch.manual_seed(1000 * self.program.seed + 10 * version + number)
        model, shard = Net(traits), {"mp_policy": BF16 if traits["bf16"] else MixedPrecisionPolicy()}
        within = [*model.layers, *model.branches.values(), *([] if traits["root"] else [model.first, model.last])]
        for layer in within:
            fully_shard(layer, **shard, reshard_after_forward=traits["reshard"])
        fully_shard(model, **shard)
        names = {id(param): name for name, param in model.named_parameters()}
        groups = [one._get_fsdp_state()._fsdp_param_group for one in model.modules() if isinstance(one, FSDPModule)]
        found = [one for group in groups if group for one in group.fsdp_params]
        params = {names[id(one.sharded_param)]: one for one in found}
        trained = {name for name, one in params.items() if one.sharded_param.requires_grad}
        self.models[number] = Trained(model, params, trained)
        self.optimizers[number] = None
        if self.on[number]:
            fsdp.apply(model, SECTIONS[self.program.section])
        self.optimize(number, "AdamW", "")
        model._get_fsdp_state()._lazy_init()  # parts may be called first
        if traits["warm"]:
            with torch.no_grad():
                self.loss(model, "a"), self.loss(model, "b")

    def optimize(self, number: int, kind: str, without: str) -> None:
        """Make an optimizer, of parameters whose names lack ``without`` and, if that is "empty", whose shards have elements."""
        found = [
            one
            for name, one in self.models[number].shards()
            if not (without and without in name) and (one.to_local().numel() or without != "empty")
        ]
        make = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD, "Adam": torch.optim.Adam}[kind]
        self.optimizers[number] = make(found, lr=1e-3)

    def loss(self, model: Any, branch: str) -> torch.Tensor:  # type: ignore[override]
        out = model(self.batch(), branch)
        self.note("output", out)
        return out.float().square().mean()

    def write(self, how: str, number: int, pattern: str, by: float, ranks: Sequence[int]) -> None:
        for _, param in self.models[number].shards(pattern) if self.rank in ranks else ():
            local = param._local_tensor
            with torch.no_grad():
                if how == "data":
                    local.data.mul_(by)
                elif how == "to_local":
                    param.to_local().add_(by - 1)
                elif how == "copy":
                    local.copy_(by * local)
                elif how == "dtensor":
                    param.mul_(by)
                elif how == "bit":
                    local.data.view(-1).view(torch.int32)[-1:].bitwise_xor_(1 << 20)
                elif how == "numpy":
                    local.data.view(-1).numpy()[:5] += by

    def note_gradients(self) -> None:
        for number, one in enumerate(self.models):
            for name, param in one.shards():
                if param.grad is not None:
                    self.note(f"{number} gradient of {name}", param.grad)

    def batch(self) -> torch.Tensor:
        return torch.randn(BATCH, self.program.traits["width"], generator=self.generator)

    def end_op(self) -> list[tuple[str, str]]:
        """The facts of an operation, with shards and gradients."""
        for number, one in enumerate(self.models):
            for name, param in one.shards():
                self.note(f"{number} {name}", getattr(param._local_tensor, "inside", param))
        self.note_gradients()
        found, self.facts = self.facts, []
        return found


# ---- operations: how each is drawn, and what it does


def write_args(draw: random.Random, traits: Mapping[str, Any]) -> dict[str, Any]:
    pattern = draw.choice(["", "first", "last", "layers.0", "layers", "branches.a", "branches", "bias"])
    return {"how": draw.choice(WRITES), "pattern": pattern, "by": draw.choice([0.5, 0.9, 1.1, 1.5])}


def _train_args(draw: random.Random, traits: Mapping[str, Any]) -> dict[str, Any]:
    branches = "".join(draw.choice("ab") for _ in range(draw.choice([1, 1, 2, 3])))
    found = {
        "branches": branches, "together": draw.random() < 0.2, "sync": draw.random() < 0.5, "clip": draw.random() < 0.2,
        "skip": draw.random() < 0.3, "closure": draw.random() < 0.15,
    }  # fmt: skip
    return found | (
        {"write": write_args(draw, traits), "at": draw.randrange(len(branches))} if draw.random() < 0.3 else {}
    )


def _train(
    side: Side, number: int, ranks: Sequence[int], branches: str = "a", together: bool = False, sync: bool = True, clip: bool = False,
    skip: bool = False, closure: bool = False, write: Any = None, at: int = -1,
) -> None:  # fmt: skip
    """Accumulate gradients, and take a step; with ``skip`` not on ``ranks``. ``write``: before the backward pass ``at``, on ``ranks``."""
    models = [one.model for one in side.models] if together else [side.models[number].model]
    used = [*side.optimizers] if together else [side.optimizers[number]]
    for _, param in side.models[number].shards() if clip else ():
        param.grad = None  # an optimizer of one rank may have left some, and a norm sends a message for each

    def backward() -> torch.Tensor:
        for count, branch in enumerate(branches):
            for model in models:
                model.set_requires_gradient_sync(sync or count == len(branches) - 1)
            loss = torch.stack([side.loss(model, branch) for model in models]).sum()
            if count == at:
                side.write(number=number, ranks=ranks, **write)
            loss.backward()
        if clip:
            side.note(
                "norm", nn.utils.clip_grad_norm_([one for _, one in side.models[number].shards()], 1.0).full_tensor()
            )
        return loss

    if closure:
        used[0].step(backward)
    else:
        backward()
        for optimizer in used:
            if not (skip and side.rank in ranks) and optimizer is not None:
                optimizer.step()
    side.note_gradients()
    for optimizer in used:
        optimizer.zero_grad()


def evaluate_args(draw: random.Random, traits: Mapping[str, Any]) -> dict[str, Any]:
    """Whether ``ranks`` call layers in place of the model matters to plain too where the root has parameters."""
    mode, other = (draw.choice(traits["modes"]) for _ in range(2))
    evals = draw.choice([True, False])
    return {
        "branches": "".join(draw.choice("ab") for _ in range(draw.choice([1, 1, 2, 3]))), "mode": mode,
        "other": draw.choice([mode, mode, other]), "evals": evals, "parts": not traits["root"] and draw.random() < 0.3,
    }  # fmt: skip


def _evaluate(
    side: Side, number: int, ranks: Sequence[int], branches: str = "a", mode: str = "no_grad", other: str = "no_grad",
    evals: bool = False, parts: bool = False,
) -> None:  # fmt: skip
    """Make passes, which end without a backward pass; ``ranks`` in ``mode``, the others in the mode ``other``."""
    model, mine = side.models[number].model, side.rank in ranks
    was = model.training
    model.train(was and not (mine and evals))
    with MODES[mode if mine else other]():
        for branch in branches:
            side.loss(functools.partial(Net.forward, model) if parts and mine else model, branch)
    model.train(was)


def part_args(draw: random.Random, traits: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "layer": draw.randrange(len(traits["layers"])),
        "mode": draw.choice(traits["modes"]),
        "times": draw.choice([1, 1, 2]),
    }


def _part(side: Side, number: int, ranks: Sequence[int], layer: int, mode: str, times: int) -> None:
    """Call one module of ``fully_shard`` that is not the outermost one."""
    with MODES[mode]():
        for _ in range(times):
            side.note("part", side.models[number].model.layers[layer](side.batch()))


def _load_args(draw: random.Random, traits: Mapping[str, Any]) -> dict[str, Any]:
    return {"by": draw.choice([0.8, 1.25]), "assign": draw.random() < 0.3, "saved": draw.random() < 0.4}


def _load(
    side: Side, number: int, ranks: Sequence[int], by: float = 1.5, assign: bool = False, saved: bool = False
) -> None:
    """Load a state; ``saved``: the one of the last load. On all ranks but ``ranks`` the words are those that are there."""
    model, key = side.models[number].model, ("state", number)
    state = {name: one.detach().clone() for name, one in model.state_dict().items()}
    new = side.kept.get(key, {}) if saved and side.rank in ranks else {}
    new = new or {name: one * (by if side.rank in ranks else 1) for name, one in state.items()}
    model.load_state_dict(new, assign=assign)
    side.kept[key] = state
    if assign:
        side.optimize(number, "AdamW", "")


def _swap(side: Side, number: int, ranks: Sequence[int]) -> None:
    """Change places with averaged parameters, which live on ``ranks``."""
    for name, param in side.models[number].shards() if side.rank in ranks else ():
        local = param._local_tensor.data
        other = side.kept.setdefault(("average", number, name), 0.9 * local)
        side.kept["average", number, name] = local.clone()
        local.copy_(other)


def _toggle(side: Side, number: int, ranks: Sequence[int], pattern: str) -> None:
    """Train what was frozen, and freeze what trained. torch gives no gradients to what was frozen from the start in mixed precision."""
    for name, param in side.models[number].shards(pattern):
        if name in side.models[number].trained or not side.program.traits["bf16"]:
            param.requires_grad_(not param.requires_grad)


def _optimizer_args(draw: random.Random, traits: Mapping[str, Any]) -> dict[str, Any]:
    kinds = ["AdamW", "SGD", "Adam"]
    return {
        "kind": draw.choice(kinds), "other": draw.choice(kinds), "without": draw.choice(["", "empty", "layers.0", "branches", "last"]),
        "collect": draw.random() < 0.5,
    }  # fmt: skip


def _optimizer(
    side: Side,
    number: int,
    ranks: Sequence[int],
    kind: str = "AdamW",
    other: str = "AdamW",
    without: str = "",
    collect: bool = False,
) -> None:
    """Make another optimizer, on ``ranks`` of another kind and without some parameters. The old one is garbage that ``ranks`` collect."""
    if (old := side.optimizers[number]) is not None:
        old.cycle = old
    mine = side.rank in ranks
    side.optimize(number, kind if mine else other, without if mine else "")
    del old
    if collect and mine:
        gc.collect()


def _in_backward(side: Side, number: int, ranks: Sequence[int]) -> None:
    """From now on ``ranks`` take a step as soon as a gradient is there; or no more."""
    mine = [param for _, param in side.models[number].shards() if side.rank in ranks and param.requires_grad]
    while side.in_backward:
        mine = []
        side.in_backward.pop().remove()
    for param in mine:
        one = torch.optim.SGD([param], lr=1e-3)
        side.in_backward.append(param.register_post_accumulate_grad_hook(lambda _, one=one: one.step()))


def _mode(side: Side, number: int, ranks: Sequence[int], train: bool) -> None:
    side.models[number].model.train(train == (side.rank in ranks))


def _unshard(side: Side, number: int, ranks: Sequence[int], layer: int, back: bool) -> None:
    """Gather a module ahead of its pass, and drop it again on all ranks or keep it until then."""
    module = side.models[number].model.layers[layer]
    with MODES[side.program.traits["modes"][0]]():
        module.unshard()
    if back:
        module.reshard()


def _apply(side: Side, number: int, ranks: Sequence[int]) -> None:
    """Coding ends, or begins again."""
    if side.coded:
        model, on = side.models[number].model, side.on[number]
        fsdp.remove(model) if on else fsdp.apply(model, SECTIONS[side.program.section])
        side.on[number] = not on


def _renew(side: Side, number: int, ranks: Sequence[int], version: int) -> None:
    """A model goes, which ``ranks`` alone collect, and another one comes."""
    for key in [key for key in side.kept if key[1] == number]:
        del side.kept[key]
    side.models[number] = side.optimizers[number] = None
    while side.in_backward:
        side.in_backward.pop().remove()
    if side.rank in ranks:
        gc.collect()
    side.build(number, version)


def _layer_args(draw: random.Random, traits: Mapping[str, Any]) -> dict[str, Any]:
    return {"layer": draw.randrange(len(traits["layers"])), "back": draw.random() < 0.5}


OPS = {
    "train": Kind(10, _train_args, _train),
    "evaluate": Kind(10, evaluate_args, _evaluate),
    "part": Kind(3, part_args, _part),
    "write": Kind(6, write_args, lambda side, number, ranks, **args: side.write(number=number, ranks=ranks, **args)),
    "load": Kind(3, _load_args, _load),
    "swap": Kind(2, nothing, _swap),
    "toggle": Kind(2, lambda draw, traits: {"pattern": draw.choice(["layers.0", "branches", "first"])}, _toggle),
    "optimizer": Kind(3, _optimizer_args, _optimizer),
    "in_backward": Kind(1, nothing, _in_backward),
    "mode": Kind(1, lambda draw, traits: {"train": draw.random() < 0.5}, _mode),
    "unshard": Kind(1, _layer_args, _unshard),
    "apply": Kind(1, nothing, _apply),
    "renew": Kind(1, lambda draw, traits: {"version": draw.randrange(1, 99)}, _renew),
}
#: Operations that need something that trains.
TRAINS = ("train", "optimizer", "toggle", "in_backward")


BOTH, COMMAND = (0, 1), "tests/support/fsdp_programs.py"
TRAITS = {
    "width": 256, "layers": (), "root": True, "tied": False, "trains": True, "branch": True, "bf16": False, "reshard": None,
    "recompute": False, "warm": False, "modes": ["no_grad"],
}  # fmt: skip
#: Programs that have failed once.
KNOWN: dict[str, Any] = {
    "a branch after a load": (
        "default", {"trains": False},
        [*(("evaluate", BOTH, {"branches": 2 * one}) for one in "ababb"), ("load", BOTH, {}), ("evaluate", BOTH, {})],
    ),
    "a load between evaluations": (
        "base", {"layers": ("full", "full")},
        [*[("evaluate", BOTH, {"branches": "aaa"})] * 2, ("load", BOTH, {}), ("evaluate", BOTH, {"branches": "aaa"})],
    ),
    "one rank skips a step": (
        "default", {"layers": ("full", "frozen", "full")},
        [*[("train", BOTH, {})] * 3, ("train", (1,), {"skip": True}), *[("train", BOTH, {})] * 2],
    ),
    "one rank has empty shards": (
        "base", {"layers": ("narrow",)}, [("optimizer", BOTH, {"without": "empty"}), *[("train", BOTH, {})] * 4]
    ),
    "shards with a gather of their own": (
        "default", {"layers": ("foreign", "foreign"), "trains": False, "bf16": True}, [("evaluate", BOTH, {"branches": "aaaa"})]
    ),
}  # fmt: skip


def program(seed: int, ranks: int = 0, section: str = "") -> Program:
    """The program of a seed; by default the seed decides ``ranks`` and the section too. Negative ones are those of KNOWN."""
    if seed < 0:
        return known(COMMAND, KNOWN, seed, TRAITS)
    draw = random.Random(f"fsdp {seed}")
    root, trains, warm = draw.random() < 0.6, draw.random() < 0.75, draw.random() < 0.5
    traits = {
        "width": draw.choice([32, 256]), "layers": [draw.choice(LAYERS) for _ in range(draw.randrange(1, 4))], "root": root,
        "tied": root and draw.random() < 0.3, "trains": trains, "branch": draw.random() < 0.5, "bf16": draw.random() < 0.5,
        "reshard": draw.choice([None, True, False]), "recompute": draw.random() < 0.2,
        "warm": warm,
        # torch takes no tensors of a first gather in inference mode outside of it
        "modes": list(MODES) if warm else ["no_grad", "gradients"] if trains or draw.random() < 0.5 else ["inference"],
    }  # fmt: skip
    ranks, section = ranks or 2 + seed % 2, section or sorted(SECTIONS)[seed // 2 % len(SECTIONS)]
    ops = operations(draw, ranks, traits, OPS, () if trains else TRAINS)
    return Program(COMMAND, seed, ranks, section, traits, ops, range(len(ops)))


def run(rank: int, ranks: int, programs: Sequence[Program], coded: Sequence[bool] = (False, True)) -> list[str]:
    """Run programs, and return a text for each that differs. ``coded``: of the two sides.

    Raises:
        RuntimeError: an operation has raised, or waited too long; the message has the program.
    """
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT), dist.group.WORLD)
    gc.disable()  # a program says when, and which ranks
    texts = []
    for one in programs:
        sides, wrong = [Side(rank, ranks, each, one) for each in coded], ""
        for place, op in zip(one.kept, one.ops, strict=True):
            found = []
            for side in sides:
                try:
                    OPS[op.name].run(side, ranks=op.ranks, **op.args)
                except BaseException as error:
                    what = (
                        f"{'coded' if side.coded else 'plain'} operation {place}, {op.name}, in seed {one.seed} fails"
                    )
                    raise RuntimeError(f"{what}: {type(error).__name__}: {error}") from error
                found.append(side.end_op())
            differ = [a[0] for a, b in zip(*found, strict=True) if a != b]
            wrong = wrong or (
                f"operation {place}, {op.name}: {len(differ)} differ, first {differ[:3]}" if differ else ""
            )
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, wrong)
        if any(everyone):
            texts.append("\n".join([*(f"rank {at}: {text}" for at, text in enumerate(everyone) if text), str(one)]))
        del sides, side
        gc.collect()
    return texts


def failures(programs: Sequence[Program], coded: bool = True) -> list[str]:
    """Run programs of equal ranks and section, and return a text for each that has failed. After one that raises others go on."""
    texts, rest = [], list(programs)
    while rest and len(texts) < MOST:
        try:
            return texts + runner.run(run, rest[0].ranks, rest, (False, coded), timeout=600.0)[0]
        except runner.RankFailure as failure:
            at = [number for number, one in enumerate(rest) if f"in seed {one.seed} " in str(failure)]
            texts.append("\n".join([str(failure), *(str(rest[number]) for number in at)]))
            rest = rest[max(at, default=len(rest)) + 1 :]
    return texts


if __name__ == "__main__":
    sys.exit(main(__doc__, program, failures))
