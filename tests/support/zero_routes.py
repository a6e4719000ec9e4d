"""Routes by which parameters of ZeRO-3 change, or by which a copy of them could grow stale, on real DeepSpeed engines.

A route is an event on an engine, followed by a training step and an evaluation. Layers note the words that they see. Most routes share an
engine. ``test_bases_of_engines.py`` is the program of a rank.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import engines
import torch
import torch.distributed as dist
from engines import BATCH, CONTEXT, ZERO3, Lab, Model, digest
from torch import nn

from ds_zipccl.comm import work
from ds_zipccl.comm.bases.state import AGREEMENT, GATHER
from ds_zipccl.comm.device.bases import proof
from ds_zipccl.telemetry import counters

SIZES = {"VOCABULARY": 128, "WIDTH": 128}
#: Values of zero3_base. With auto frozen parameters have bases.
BASES = ("off", "auto", "host", "device")

# ---- engines -------------------------------------------------------------------------------------------------------


class Table(Lab):
    """A route on this rank."""

    #: Engines that several routes share, by their settings.
    shared: dict[str, Any] = {}
    current: Table

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        folder.mkdir(exist_ok=True)
        Table.current = self

    def start(self, name: str = "mixed", **more: Any) -> Any:
        """Return a new engine with some settings, whose layers note the words that they see, after its first step."""
        settings = SETTINGS[name] | more
        zero = ZERO3 | {"stage3_gather_16bit_weights_on_model_save": True} | settings.get("zero", {})
        engine = self.engine(**{"groups": MIXED, **settings, "zero": zero})
        for layer in engine.module.modules():
            if isinstance(layer, (nn.Linear, nn.Embedding)):
                layer.register_forward_pre_hook(seen)
        if hasattr(engine.optimizer, "step"):
            self.train(engine)
        return engine

    def common(self, name: str) -> Any:
        """Return the engine of some settings that routes share."""
        if name not in self.shared:
            self.shared[name] = self.start(name)
        self.engines = [self.shared[name]]
        return self.engines[0]

    def evaluate(self, engine: Any) -> None:
        engine.eval()
        with torch.no_grad():
            self.losses.append(engine(torch.arange(BATCH * CONTEXT).view(BATCH, CONTEXT)).item().hex())
        engine.train()

    def ends(self, phase: str, expected: Any = ()) -> None:
        """End a phase, and note the bytes of its gathers, its proofs, and the memory of bases that no engine has."""
        rows = {row["op"]: row["wire_bytes"] for row in counters.rows() if row["role"] == "zero_param"}
        alive = {id(one): one for one in (*self.shared.values(), *self.engines)}.values()
        held = sum(slot.memory.nbytes for one in alive for slot in getattr(one, "ds_zipccl_bases", None) or ())
        super().ends(phase, expected)
        found = self.phases[-1] | {"sent": rows.get(GATHER, 0), "messages": rows.get(AGREEMENT, 0)}
        found["left"] = counters.memory().get("copies of gathered parameters", 0) - held
        self.phases[-1], PROOFS[0] = found | {"proofs": PROOFS[0]}, 0

    def destroy(self) -> None:
        self.engines = [one for one in self.engines if one not in self.shared.values()]
        super().destroy()


PROOFS = [0]


def count_proofs() -> None:
    """Count the proofs of bases of groups in the order of streams."""

    def proof_of(*arguments: Any, original: Any = proof.proof_of) -> Any:
        PROOFS[0] += 1
        return original(*arguments)

    proof.proof_of = proof_of


def seen(layer: Any, *given: Any) -> None:
    """A changed bit may change no loss."""
    Table.current.losses.append(digest([layer.weight.data])[:16])


def trained(model: Model, frozen: Sequence[str] = ()) -> list[Any]:
    """Freeze parameters by the starts of their names; return the others."""
    for name, param in model.named_parameters():
        if name.startswith(tuple(frozen)):
            param.requires_grad_(False)
    return [param for param in model.parameters() if param.requires_grad]


#: Three of five weights. Biases stay gathered.
MIXED = partial(trained, frozen=("embedding", "layers.0.weight", "layers.1.weight"))
BIASES = partial(trained, frozen=("embedding", "head", *(f"layers.{number}.weight" for number in range(3))))


class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class Stored(nn.Module):
    """A layer whose weight is stored in 8 bits, as that of a quantised model."""

    def __init__(self) -> None:
        super().__init__()
        words = torch.randn(engines.WIDTH, 4 * engines.WIDTH).mul(20).clamp(-127, 127).to(torch.int8)
        self.weight = nn.Parameter(words, requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 0.01 * (hidden @ self.weight.to(hidden.dtype)).unflatten(-1, (4, -1)).sum(-2)


class Quantised(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Stored()


def with_adapters() -> Any:
    """The model with adapters of the package of Hugging Face, which needs transformers."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["layers.0", "layers.1"])
    model = get_peft_model(Model(), config, autocast_adapter_dtype=False)
    for name, param in model.named_parameters():
        param.requires_grad_("lora" in name)
        if "lora_B" in name:
            nn.init.normal_(param, std=0.05)
    return model


NO_BF16 = {"bf16": {"enabled": False}}
SETTINGS: dict[str, dict[str, Any]] = {
    "mixed": {},
    "accumulating": {"gradient_accumulation_steps": 2, "zero": {"stage3_prefetch_bucket_size": 0}},
    "fp32": NO_BF16,
    "autocast": NO_BF16 | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "all trained": {"groups": Model.parameters},
    "clipped": {"gradient_clipping": 1e-3},
    "accumulating, all trained": {"groups": Model.parameters, "gradient_accumulation_steps": 2},
    "overlap": {"zero": {"overlap_comm": True}},
    "one by one": {"zero": {"allgather_sequential": True}},
    "offload": {"zero": {f"offload_{what}": {"device": "cpu"} for what in ("optimizer", "param")}}
    | {"zero_force_ds_cpu_optimizer": False},
    "biases": {"groups": BIASES},
    "hpz": {"zero": {"zero_hpz_partition_size": 2}},
    "tied": {"make": Tied, "groups": Model.parameters},
    "quantised": {"make": Quantised},
    "adapters": {"make": with_adapters, "groups": trained},
    "no optimizer": {"groups": lambda model: None, "optimizer": {}},
}

# ---- routes --------------------------------------------------------------------------------------------------------


def gathering(params: Iterable[Any], rank: int | None = 0) -> Any:
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(params), modifier_rank=rank)


def gathered(params: Iterable[Any], rank: int | None = 0) -> Iterator[Any]:
    """Gather parameters, and yield those that this rank changes: all of them on ``rank``, or on all ranks if None, which is forgotten."""
    params = list(params)
    with gathering(params, rank):
        yield from params if rank in (None, dist.get_rank()) else ()


def weights(engine: Any) -> list[Any]:
    """A frozen weight, another one, and a trained one."""
    return [layer.weight for layer in engine.module.layers]


def noise(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Finite words whose frames are as large as the words: signs and exponents of any value below 1."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(1, 120, like.shape, generator=generator).float() - 127
    signs = torch.randint(0, 2, like.shape, generator=generator).float() * 2 - 1
    return (signs * (1 + torch.rand(like.shape, generator=generator)) * torch.exp2(exponents)).to(like.dtype)


def steps(lab: Table, engine: Any) -> None:
    lab.train(engine, 2)


def nothing(lab: Table, engine: Any) -> None:
    pass


def between_batches(lab: Table, engine: Any) -> None:
    """An evaluation and an edit between the batches of a step."""
    lab.backward(engine)
    engine.step()
    lab.evaluate(engine)
    edit(lab, engine)
    lab.backward(engine)
    engine.step()


def no_gradient(lab: Table, engine: Any) -> None:
    """Momentum moves the parameters."""
    lab.train(engine, scale=0.0)


def no_rate(lab: Table, engine: Any) -> None:
    for rate in (0.0, 1e-3):
        for group in engine.optimizer.param_groups:
            group["lr"] = rate
        lab.train(engine)


def skipped(lab: Table, engine: Any) -> None:
    """One rank has an infinite loss."""
    before = engine.skipped_steps
    for turn in range(2):
        lab.train(engine, scale=math.inf if lab.rank == turn else 1.0)
    assert engine.skipped_steps == before + 2


def evaluated(lab: Table, engine: Any) -> None:
    lab.evaluate(engine)
    with torch.no_grad():
        engine(torch.arange(8).view(1, 8))
    lab.evaluate(engine)


def one_rank_evaluates(lab: Table, engine: Any) -> None:
    """All ranks make the same forward passes, one of them in the mode of evaluations."""
    for _ in range(3):
        engine.train(lab.rank > 0)
        with torch.no_grad() if lab.rank == 0 else contextlib.nullcontext():
            lab.losses.append(engine(torch.arange(8).view(1, 8)).item().hex())
        engine.train()


def part(lab: Table, engine: Any) -> None:
    with torch.no_grad():
        hidden = torch.ones(2, engines.WIDTH).bfloat16()
        lab.losses.append(digest([engine.module.layers[2](engine.module.layers[0](hidden))]))


def edit(lab: Table, engine: Any, rank: int = 0) -> None:
    for weight in gathered(weights(engine), rank):
        weight.data.copy_(0.75 * weight.data)


def fill_with_noise(lab: Table, engine: Any) -> None:
    """Words that do not shrink."""
    for weight in gathered(weights(engine)[1:]):
        weight.data.copy_(noise(weight.data, 7))


def read(lab: Table, engine: Any) -> None:
    """Plain DeepSpeed forgets what is written there."""
    for param in gathered(engine.module.parameters(), None):
        lab.losses.append(digest([param.data]))
        param.data.fill_(7.0)


def disturbed(lab: Table, engine: Any) -> None:
    """Noise is added for an evaluation."""
    before: list[torch.Tensor] = []
    for turn in range(2):
        with torch.no_grad():
            for number, weight in enumerate(gathered(weights(engine))):
                before.append(weight.clone())
                noisy = weight + 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
                weight.copy_(before[number] if turn else noisy)
        lab.evaluate(engine)


def other_optimizer(lab: Table, engine: Any) -> None:
    for weight in gathered(weights(engine)[:1]):
        twin = nn.Parameter(weight.data)
        twin.grad = torch.ones_like(twin)
        torch.optim.SGD([twin], lr=0.01).step()


def average(lab: Table, engine: Any) -> None:
    """Averaged weights take the places of the others for an evaluation, in gathered parameters."""
    kept: list[torch.Tensor] = []
    for turn in range(2):
        for number, weight in enumerate(gathered(trained(engine.module))):
            kept.append(weight.data.clone())
            weight.data.copy_(kept[number] if turn else 0.9 * weight.data)
        lab.evaluate(engine)


def average_shards(lab: Table, engine: Any, by: Callable[[Any, torch.Tensor], Any]) -> None:
    """Each rank lets other shards take the places of its own, for an evaluation."""
    shards = [weight.ds_tensor for weight in trained(engine.module)]
    kept = [shard.data.clone() for shard in shards]
    for others in ([0.5 * words for words in kept], kept):
        with torch.no_grad():
            for shard, words in zip(shards, others, strict=True):
                by(shard, words)
        lab.evaluate(engine)


def assign(shard: Any, words: torch.Tensor) -> None:
    shard.data = words


#: Changes of a shard by one rank, behind DeepSpeed's back, to words whose frames are as large.
WRITES: dict[str, Callable[[Any], Any]] = {
    "by data": lambda shard: shard.data[-3:].mul_(0.5),
    "by copy": lambda shard: shard.copy_(0.5 * shard),
    "one bit": lambda shard: shard.data.view(torch.int16)[-1:].bitwise_xor_(1),
    "by numpy": lambda shard: shard.data.view(torch.int16).numpy()[:100].__ixor__(1 << 6),
    "other memory": lambda shard: setattr(shard, "data", -shard.detach()),
}


def direct(lab: Table, engine: Any, which: int) -> None:
    """A weight is changed by one rank after the other, and by all."""
    for turn, change in enumerate((*WRITES.values(), WRITES["one bit"])):
        if lab.rank == turn % 2 or turn == len(WRITES):
            with torch.no_grad():
                change(weights(engine)[which].ds_tensor)
        lab.evaluate(engine)


def and_back(lab: Table, engine: Any) -> None:
    """Nothing has changed when the weight is gathered next."""
    for _ in range(2 if lab.rank else 0):
        WRITES["one bit"](weights(engine)[1].ds_tensor)


def in_a_step(lab: Table, engine: Any) -> None:
    """Rank 1 writes between a forward and its backward pass, and undoes it after the batch."""
    loss = engine(torch.arange(BATCH * CONTEXT).view(BATCH, CONTEXT))
    for scale in (0.5, 2.0):
        if lab.rank:
            weights(engine)[1].ds_tensor.data.mul_(scale)
        engine.backward(loss)
        engine.step()
        loss = engine(torch.arange(BATCH * CONTEXT).view(BATCH, CONTEXT)) if scale < 1 else None


def set_whole(lab: Table, engine: Any, words: Callable[..., torch.Tensor] = noise) -> None:
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    weight = weights(engine)[2]
    safe_set_full_fp32_param(weight, words(torch.empty(weight.ds_shape), 3))
    safe_set_full_optimizer_state(weight, torch.zeros(weight.ds_shape), "exp_avg")


def set_shard(lab: Table, engine: Any) -> None:
    from deepspeed.utils import safe_get_local_fp32_param, safe_set_local_fp32_param

    weight = engine.module.head.weight
    safe_set_local_fp32_param(weight, safe_get_local_fp32_param(weight).mul(0.5 + lab.rank))


def whole(engine: Any) -> dict[str, torch.Tensor]:
    """All words, on rank 0."""
    names = [name for name, _ in engine.module.named_parameters()]
    return {name: param.data.clone() for param, name in zip(gathered(engine.module.parameters()), names)}


def load(engine: Any, words: dict[str, torch.Tensor]) -> None:
    for number, _ in enumerate(gathered(engine.module.parameters())):
        if number == 0:
            engine.module.load_state_dict(words)


def load_words(lab: Table, engine: Any) -> None:
    """A state of the module is loaded into gathered parameters."""
    load(engine, {name: 0.75 * words for name, words in whole(engine).items()})


def saved(lab: Table, engine: Any) -> None:
    """In whole: to a file, and in 32 bits from a checkpoint. The first comes back into gathered parameters."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    assert engine.save_16bit_model(lab.folder, "16.bin")
    engine.save_checkpoint(lab.folder, tag="saved")
    dist.barrier()
    found = get_fp32_state_dict_from_zero_checkpoint(lab.folder, tag="saved")
    words = torch.load(lab.folder / "16.bin", weights_only=True)
    for state in (found, words):
        lab.losses.append(digest([state[name] for name in sorted(state)]))
    lab.train(engine)
    load(engine, words)


def rolled_back(lab: Table, engine: Any, **how: bool) -> None:
    """An earlier state is loaded, whose words do not shrink, as those in between do."""
    set_whole(lab, engine)
    lab.train(engine)
    engine.save_checkpoint(lab.folder, tag="before")
    edit(lab, engine)
    set_whole(lab, engine, torch.full_like)
    lab.train(engine)
    engine.load_checkpoint(lab.folder, tag="before", **how)


def resumed(lab: Table, engine: Any) -> None:
    """A new engine goes on from the state of another one."""
    engine.save_checkpoint(lab.folder, tag="saved")
    other = lab.start(seed=2)
    other.load_checkpoint(lab.folder, tag="saved")
    lab.train(other)
    lab.evaluate(other)


def frozen_later(lab: Table, engine: Any) -> None:
    for trains in (False, True):
        weights(engine)[2].requires_grad_(trains)
        lab.train(engine)


def modes(lab: Table, engine: Any) -> None:
    """One rank is in the mode of evaluations for a step."""
    engine.train(lab.rank > 0)
    lab.train(engine)
    engine.train()


def offloaded(lab: Table, engine: Any) -> None:
    """Shards move to other memory, and come back."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    engine.offload_states(include=[OffloadStateTypeEnum.lp_params], pin_memory=False)
    engine.reload_states()


def swapped(lab: Table, engine: Any) -> None:
    """Layers change places."""
    layers = engine.module.layers
    layers[0], layers[2] = layers[2], layers[0]


def in_turn(lab: Table, engine: Any) -> None:
    other = lab.start(seed=2)
    for one in (engine, other, other, engine):
        lab.train(one)
        edit(lab, one)


def made_anew(lab: Table, engine: Any) -> None:
    """The module of an engine that was destroyed is trained by another one, with more of its parameters."""
    module = engine.module
    lab.destroy()
    gc.collect()
    module.layers.requires_grad_(True)
    other = lab.engine(make=lambda: module, groups=trained, zero=ZERO3)
    lab.train(other, 2)
    lab.evaluate(other)


def merged(lab: Table, engine: Any) -> None:
    """Adapters are merged for an evaluation, unmerged, switched off and on, and frozen for a step."""
    model = engine.module
    for change in (model.merge_adapter, model.unmerge_adapter):
        with gathering(model.parameters()):
            change()
        lab.evaluate(engine)
    with model.disable_adapter():
        lab.evaluate(engine)
    for trains in (False, True):
        for name, param in model.named_parameters():
            param.requires_grad_(trains and "lora" in name)
        lab.evaluate(engine)


def inference(lab: Table, engine: Any) -> None:
    """Without an optimizer, in inference mode, with an edit."""
    for _ in range(2):
        with torch.inference_mode():
            lab.losses.append(engine(torch.arange(32).view(2, 16)).item().hex())
        edit(lab, engine)


def unwaited(lab: Table, engine: Any) -> None:
    """Weights are gathered where DeepSpeed waits for none of several gathers; up to 0.19.7 it waits for the last one alone."""
    import deepspeed

    gather, run = deepspeed.comm.all_gather_into_tensor, work.Work._run

    def lazy(*args: Any, **kwargs: Any) -> Any:
        return mock.Mock() if gather(*args, **kwargs) is not None else None

    def slow(handle: Any, job: Callable[[], None]) -> None:
        time.sleep(0.1)
        run(handle, job)

    for weight in weights(engine):  # or nothing is sent
        weight.ds_tensor.data.mul_(1 + lab.rank)
    with contextlib.ExitStack() as patches:
        if os.environ["DS_ZIPCCL"] != "0":
            patches.enter_context(mock.patch.object(deepspeed.comm, "all_gather_into_tensor", lazy))
            patches.enter_context(mock.patch.object(work.Work, "_run", slow))
        with gathering(weights(engine), None):
            lab.losses.append(digest([weight.data for weight in weights(engine)]))


class Route(NamedTuple):
    """What happens on an engine with the settings ``of``, which other routes share unless it is ``alone``, and what that costs.

    ``changed``: gathers over gloo that find a frozen weight changed. ``waits``: of the host, in the order of streams, in gathers
    and in agreements: two for each step and load of a checkpoint, one for each GatheredParameters, whose words a program may save.
    ``proofs``: of bases there, with zero3_base auto. ``streams``: the bases with which groups in the order of streams give the right bits.
    """

    change: Callable[[Table, Any], None]
    changed: int
    waits: tuple[int, int]
    proofs: int = 0
    of: str = "mixed"
    alone: bool = False
    streams: Sequence[str] = BASES


def by_copy(shard: Any, words: torch.Tensor) -> None:
    shard.data.copy_(words)


#: Direct writes to trained parameters, which have no bases then, and to frozen ones; words whose frames fit.
TRAINED, FROZEN = ("off", "auto"), ("off",)
ROUTES: dict[str, Route] = {
    "optimizer steps": Route(steps, 0, (0, 6)),
    "no gradient": Route(no_gradient, 0, (0, 4)),
    "learning rate 0": Route(no_rate, 0, (0, 6)),
    "clipped": Route(steps, 0, (0, 6), of="clipped"),
    "skipped steps": Route(skipped, 0, (0, 6)),
    "accumulation": Route(between_batches, 2, (3, 5), 2, of="accumulating"),
    "frozen later": Route(frozen_later, 0, (0, 6)),
    "step of another optimizer": Route(other_optimizer, 1, (1, 3), 1),
    "evaluations": Route(evaluated, 0, (0, 2)),
    "one rank evaluates": Route(one_rank_evaluates, 0, (0, 2)),
    "one rank in eval mode": Route(modes, 0, (0, 4)),
    "part of the module": Route(part, 0, (0, 2)),
    "layers swapped": Route(swapped, 0, (0, 2), alone=True),
    "gathered, rank 0 writes": Route(edit, 2, (3, 3), 2),
    "gathered, rank 1 writes": Route(partial(edit, rank=1), 2, (3, 3), 2),
    "gathered, words that do not shrink": Route(fill_with_noise, 1, (2, 3), 1),
    "gathered, read": Route(read, 0, (0, 3)),
    "gathered, noise and back": Route(disturbed, 4, (6, 4), 4),
    "gathered, averages and back": Route(average, 0, (4, 4)),
    "gathered, load_state_dict": Route(load_words, 3, (10, 4), 6),
    "gathered, not waited for": Route(unwaited, 2, (0, 0), alone=True, streams=()),
    "saved in whole": Route(saved, 0, (10, 10), 6),
    "rolled back": Route(rolled_back, 4, (3, 9), 8),
    "rolled back, weights alone": Route(partial(rolled_back, load_module_only=True), 4, (3, 8), 5),
    "another engine resumes": Route(resumed, 3, (2, 11), 6, alone=True),
    "set whole": Route(set_whole, 0, (0, 2)),
    "set a shard": Route(set_shard, 0, (0, 2)),
    "fp32, set whole": Route(set_whole, 0, (1, 2), of="fp32"),
    "fp32, set a shard": Route(set_shard, 0, (0, 2), of="fp32", streams=TRAINED),
    "shards, averages by copy": Route(partial(average_shards, by=by_copy), 0, (0, 2), streams=TRAINED),
    "shards, averages by data": Route(partial(average_shards, by=assign), 0, (0, 2), streams=TRAINED),
    "shards, trained weight": Route(partial(direct, which=2), 0, (0, 2), streams=TRAINED),
    "shards, frozen weight": Route(partial(direct, which=1), 6, (0, 2), streams=FROZEN),
    "shards, in a step": Route(in_a_step, 2, (0, 4), of="accumulating", streams=FROZEN),
    "shards, written and back": Route(and_back, 0, (0, 2)),
    "shards, moved": Route(offloaded, 0, (0, 2), of="all trained"),
    "two engines": Route(in_turn, 8, (14, 19), 8, alone=True),
    "an engine made anew": Route(made_anew, 0, (4, 7), alone=True),
    "no optimizer": Route(inference, 0, (6, 2), of="no optimizer"),
    "biases trained": Route(steps, 0, (0, 3), of="biases"),
    "all trained": Route(edit, 0, (3, 3), of="all trained"),
    "autocast": Route(edit, 2, (6, 2), 2, of="autocast"),
    "overlap": Route(edit, 2, (3, 3), 2, of="overlap"),
    "one by one": Route(edit, 2, (3, 3), 2, of="one by one"),
    "offload": Route(edit, 2, (3, 3), 2, of="offload"),
    "tied": Route(edit, 0, (3, 3), of="tied"),
    "quantised": Route(rolled_back, 4, (4, 9), 7, of="quantised"),
    "adapters": Route(merged, 4, (10, 3), 10, of="adapters"),
}
#: Of engines with secondary shards, which need four ranks.
HPZ = Route(steps, 0, (0, 0), of="hpz")
if not importlib.util.find_spec("peft"):
    del ROUTES["adapters"]


def run(lab: Table, route: Route) -> None:
    shared = not route.alone and route.streams == BASES
    engine = lab.common(route.of) if shared else lab.start(route.of)
    lab.ends("before")
    route.change(lab, engine)
    lab.ends("changed")
    for one in [one for one in lab.engines if hasattr(one.optimizer, "step")]:
        lab.train(one)
    for one in lab.engines:
        lab.evaluate(one)
    lab.ends("used")
