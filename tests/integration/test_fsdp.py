"""FSDP2 with coded communication: the bits of plain FSDP2, fewer bytes, and lines about what stays plain."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import fsdp_lab
import pytest
import ranks as runner
import safetensors.torch
import tiers
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_checkpoint
from fsdp_lab import BF16, Lab, Model, adapted
from places import EXAMPLES, TESTS
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard

from ds_zipccl import ConfigError, comm, fsdp
from ds_zipccl.benchmarks.links import slots
from ds_zipccl.comm import engine, topology
from ds_zipccl.comm.group_state import state_of
from ds_zipccl.comm.host import cached
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.policy.settled import DTYPES
from ds_zipccl.telemetry import counters

HOST = {"zero3_base": "host"}
RECIPES = EXAMPLES / "recipes"


def full(lab: Lab) -> Any:
    """Full fine-tuning: gathers after a step go as differences, gathers in the backward pass as copies."""
    model = lab.start(section=HOST)
    lab.train(model, 6)
    return model


def lora(lab: Lab) -> Any:
    """Adapters on a frozen model, whose parameters are sent once."""
    model = lab.start(lambda: adapted(Model()))
    lab.train(model, 6)
    return model


def by_trial(lab: Lab) -> Any:
    """Plain, raw and coded schedules compete, and take turns."""
    model = lab.start(section={**HOST, "mode": "auto"})
    lab.train(model, 12)
    return model


# ---- options of fully_shard


def with_options(**shard: Any) -> Callable[[Lab], Any]:
    """A full fine-tuning with arguments of ``fully_shard``."""

    def train(lab: Lab) -> Any:
        model = lab.start(section=HOST, **shard)
        lab.train(model)
        return model

    return train


def to_fewer_ranks(lab: Lab) -> Any:
    """After the forward pass each pair of ranks keeps whole parameters."""
    return with_options(reshard_after_forward=2 if lab.ranks > 2 else True)(lab)


def uneven(lab: Lab) -> Any:
    """Shards are padded; a norm has fewer elements than there are ranks."""
    model = lab.start(lambda: Model(extra=3), HOST)
    lab.train(model)
    return model


def across_columns(lab: Lab) -> Any:
    return with_options(shard_placement_fn=lambda param: Shard(1) if param.dim() > 1 else None)(lab)


def hybrid(lab: Lab) -> Any:
    """HSDP; the first of two micro-batches is not summed over the replicas."""
    mesh = init_device_mesh("cpu", (lab.ranks // 2, 2), mesh_dim_names=("replicas", "shards"))
    model = lab.start(section=HOST, mesh=mesh)
    for _ in range(3):
        for last in (False, True):
            model.set_requires_all_reduce(last)
            lab.loss(model).backward()
        lab.step(model)
    return model


def several_groups(lab: Lab) -> Any:
    """The root has parameters on two meshes."""
    first, second = init_device_mesh("cpu", (lab.ranks,)), DeviceMesh.from_group(dist.new_group(), "cpu")
    other = ShardPlacementResult(None, FSDPMeshInfo(second, shard_mesh_dim=0))
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=first, mp_policy=BF16)
    head = model.head.weight
    fully_shard(
        model, mesh=first, mp_policy=BF16, shard_placement_fn=lambda param: other if param is head else Shard(0)
    )
    model = lab.apply(model, HOST)
    lab.train(model)
    return model


def sharded_late(lab: Lab) -> Any:
    """The blocks are coded; the root was not sharded at that time."""
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block, mp_policy=BF16)
    if lab.coded:
        fsdp.apply(model, fsdp_lab.ALWAYS)
    fully_shard(model, mp_policy=BF16)
    lab.optimizer = torch.optim.AdamW(model.parameters(), 3e-5)
    lab.train(model)
    return model


def together(lab: Lab) -> Any:
    """Two modules are sharded as one."""
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block, mp_policy=BF16)
    fully_shard([model.norm, model.head], mp_policy=BF16)
    model = lab.apply(fully_shard(model, mp_policy=BF16), HOST)
    lab.train(model)
    return model


# ---- ways to train; tests/integration/test_random_programs.py has more of them


def summed(lab: Lab) -> Any:
    """Sums in place of averages, divided afterwards by a number that is not that of the ranks."""
    model = lab.start(section=HOST)
    for one in model.modules():
        if isinstance(one, FSDPModule):
            one.set_force_sum_reduction_for_comms(True)
            one.set_gradient_divide_factor(3.0)
    lab.train(model)
    return model


def ahead(lab: Lab) -> Any:
    """Gathers begin before the forward pass, and are in flight together; a block is gathered in advance of its turn."""
    model = lab.start(section=HOST)
    for _ in range(3):
        handles = [block.unshard(async_op=True) for block in model.blocks]
        model.set_modules_to_forward_prefetch([model.blocks[0]])
        lab.loss(model).backward()
        assert all(handle is not None for handle in handles)
        lab.step(model)
    return model


def compiled(lab: Lab) -> Any:
    def make() -> nn.Module:
        model = Model()
        for block in model.blocks:
            block.compile(backend="aot_eager")
        return model

    model = lab.start(make, HOST)
    lab.train(model)
    return model


def by_hand(lab: Lab) -> Any:
    """No optimizer of torch changes the parameters, and frozen ones change too, between two passes."""
    model = lab.start(lambda: adapted(Model()), HOST)
    for _ in range(3):
        lab.loss(model).backward()
        with torch.no_grad():
            for param in model.parameters():
                local = param.to_local()
                local.data.mul_(0.99) if param.grad is None else local.sub_(0.1 * param.grad.to_local())
        model.zero_grad()
    return model


def saved(lab: Lab) -> Any:
    """Full and sharded states are saved and loaded in the middle, in place and by assignment."""
    model = lab.start(section=HOST)
    lab.train(model, 2)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    for name, tensor in sorted(whole.items()):
        lab.note(f"saved {name}", tensor)
    states = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, lab.optimizer)}
    dist_checkpoint.save(states, checkpoint_id=lab.folder)
    copy = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lab.train(model, 2)
    dist_checkpoint.load(states, checkpoint_id=lab.folder)
    set_optimizer_state_dict(model, lab.optimizer, states["optimizer"])
    lab.train(model, 2)
    if not lab.rank:
        whole = {name: tensor * 0.9 for name, tensor in whole.items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole if not lab.rank else {}, options=options)
    lab.train(model, 2)
    with torch.no_grad():
        lab.loss(model)
        model.load_state_dict(copy, assign=True)
        lab.loss(model)
    lab.optimizer = torch.optim.AdamW(model.parameters(), 3e-5)
    lab.train(model, 2)
    return model


def failing(lab: Lab) -> Any:
    """A backward pass fails in the middle on all ranks; the next step goes on."""
    model = lab.start(section=HOST)
    lab.train(model, 2)

    def fail(*_: Any) -> None:
        raise ValueError("planted")

    handle = model.blocks[1].register_full_backward_pre_hook(fail)
    with pytest.raises(ValueError, match="planted"):
        lab.loss(model).backward()
    handle.remove()
    model.reset_iter_state()
    model.zero_grad()
    lab.train(model, 2)
    return model


def calls() -> int:
    """The calls so far, coded or not."""
    return sum(row["calls"] + row["passed"] for row in counters.rows())


def removed(lab: Lab) -> Any:
    """Coding ends, and begins again."""
    model = lab.start(section=HOST)
    lab.train(model, 2)
    if lab.coded:
        before = calls()
        assert fsdp.remove(model) is model and "copies of gathered parameters" not in counters.memory()
    lab.train(model, 2)
    if lab.coded:
        assert calls() == before
        fsdp.apply(model)
    lab.train(model, 2)
    return model


@dataclass(frozen=True)
class Case:
    """A training, and the least ratio of plain to sent bytes, of all messages and of gathers; ``said``: what rank 0 prints."""

    train: Callable[[Lab], Any]
    ratio: float = 1.2
    gathers: float = 1.2
    said: str = "FSDP2, zero3_base"


ALL_FP16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
FP32_SUMS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES = {
    "full": Case(full, 3.0, 6.0),
    "lora": Case(lora, 4.0, 5.0),
    "by trial": Case(by_trial, 1.1),
    "to fewer ranks": Case(to_fewer_ranks),
    "fp32": Case(with_options(mp_policy=MixedPrecisionPolicy()), 1.0),
    "fp16": Case(with_options(mp_policy=ALL_FP16)),
    "fp32 sums": Case(with_options(mp_policy=FP32_SUMS)),
    "cpu offload": Case(with_options(offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "uneven": Case(uneven),
    "across columns": Case(across_columns),
    "hybrid": Case(hybrid, said="all-reduces between replicas stay plain"),
    "several groups": Case(several_groups, said="the root stays plain: it has 2 groups of parameters"),
    "sharded late": Case(sharded_late, said="the root stays plain: fully_shard came after fsdp.apply; call"),
    "together": Case(together),
    "summed": Case(summed),
    "ahead": Case(ahead),
    "compiled": Case(compiled),
    "by hand": Case(by_hand),
    "saved": Case(saved),
    "failing": Case(failing),
    "removed": Case(removed),
}


def check(rank: int, ranks: int, name: str, folder: str) -> None:
    case = CASES[name]
    text, whole, gathers = fsdp_lab.bits(rank, ranks, case.train, folder)
    for (plain, coded), least in ((whole, case.ratio), (gathers, case.gathers)):
        assert plain >= least * coded, f"{name}: {plain} bytes became {coded}, wanted {least} times fewer"
    assert rank or case.said in text, text


@pytest.mark.parametrize("ranks", tiers.mostly_full([2, 4], [2], "four ranks on two cores"))
@pytest.mark.parametrize("name", tiers.mostly_full(CASES, ["full", "lora"], "a launch each"))
def test_bits_are_those_of_plain_fsdp2(name: str, ranks: int, tmp_path: Path) -> None:
    runner.run(check, ranks, name, str(tmp_path))


# ---- mistakes


def _no_questions() -> None:
    """A rank does not look whether its shard has changed."""
    cached.same_bits = lambda shard, row: True


def _other_sums() -> None:
    run = comm.reduce_scatter_tensor

    def summed(output: torch.Tensor, input: torch.Tensor, op: Any, *args: Any, **options: Any) -> Any:
        return run(output, input, dist.ReduceOp.SUM, *args, **options)

    comm.reduce_scatter_tensor = summed


def _another_row() -> None:
    """A copy gives the parameters of ranks in another order."""

    def copy(self: cached.BasedShard, rows: torch.Tensor, rank: int) -> None:
        rows.copy_(self.slot.memory.flip(0))

    cached.BasedShard.copy = copy  # type: ignore[method-assign]


MISTAKES = {
    "no questions": (_no_questions, "by hand", "differ"),
    "other sums": (_other_sums, "full", "differ"),
    "another row": (_another_row, "lora", "differ"),
}


@pytest.mark.full(reason="a launch each")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str, tmp_path: Path) -> None:
    plant, case, wanted = MISTAKES[name]
    with pytest.raises(runner.RankFailure, match=wanted):
        runner.run(check, 2, case, str(tmp_path), plant=plant)


def collected(rank: int, ranks: int) -> int:
    """The ends of steps of a rank. Rank 0 alone collects its first optimizer."""
    lab, ends = Lab(rank, ranks, True, ""), list[int]()
    gc.disable()
    model = lab.start()
    with mock.patch.object(engine, "end_step", lambda _: ends.append(1)):  # keeps nothing alive
        for _ in range(2):
            lab.train(model)
            lab.optimizer.cycle = lab.optimizer
            lab.optimizer = torch.optim.AdamW(model.parameters(), 3e-5)
            if not rank:
                gc.collect()
    return len(ends)


def test_garbage_of_one_rank_ends_no_step() -> None:
    first, second = runner.run(collected, 2)
    assert first == second > 0


def off(rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=r"Linear has no module of fully_shard; call fully_shard\(model\) first"):
        fsdp.apply(nn.Linear(2, 2))
    model = fully_shard(Model())
    with pytest.raises(ConfigError, match="mod"):
        fsdp.apply(model, {"mod": "always"})
    theirs = model._get_fsdp_state()._fsdp_param_group._all_gather_comm
    assert fsdp.apply(model, {"enabled": False}) is model and fsdp.remove(model) is model
    assert model._get_fsdp_state()._fsdp_param_group._all_gather_comm is theirs


def on(rank: int, ranks: int, folder: str) -> None:
    model = fully_shard(Model())
    (path := Path(folder, f"{rank}.json")).write_text('{"zipccl": {"mode": "never", "log_interval": 7}}')
    with fsdp_lab.spoken() as text:
        assert fsdp.apply(model, path) is model
    assert rank or "log_interval 7" in text.getvalue()
    with pytest.raises(ConfigError, match="this process already runs with"):
        fsdp.apply(fully_shard(Model()), {"mode": "always"})
    theirs = fully_shard(Model())
    theirs.set_custom_all_gather(
        type("Theirs", (type(theirs._get_fsdp_state()._fsdp_param_group._all_gather_comm),), {})()
    )
    for again, said in (
        (model, "an earlier fsdp.apply has coded"),
        (theirs, "the root stays plain: it has collectives"),
    ):
        with fsdp_lab.spoken() as text:
            fsdp.apply(again)
        assert rank or f"FSDP2: {said}" in text.getvalue()


def test_sections_and_models_that_are_refused(tmp_path: Path) -> None:
    runner.run_each(2, off, (on, str(tmp_path)))


def test_an_older_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FSDPModule, "set_custom_all_gather")
    with pytest.raises(RuntimeError, match=r"has no FSDPModule.set_custom_all_gather .* install torch 2.9 or later"):
        fsdp.apply(nn.Linear(2, 2))


LLAMA, FSDP2 = "transformers.models.llama.modeling_llama", "torch.distributed.fsdp"
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
CONFIG = str(RECIPES / "accelerate_fsdp2.yaml")
LAUNCH = [*"accelerate.commands.launch --main_process_port 0 --config_file".split(), CONFIG]
#: Recipe -> the module that starts it and its arguments, what follows the recipe's name, and the modules that its ranks import.
STARTS = {
    "lora": (TORCHRUN, ["fsdp2.py", "--lora"], []),
    "full": (TORCHRUN, ["fsdp2.py"], []),
    "accelerate": (LAUNCH, ["accelerate_fsdp2.py"], ["accelerate.state", LLAMA]),
    "trainer": (TORCHRUN, ["hf_trainer_fsdp2.py"], ["accelerate.state", LLAMA, "transformers.trainer", "peft"]),
}


def weights(path: Path) -> dict[str, torch.Tensor]:
    """The weights that a recipe has saved."""
    if path.is_file():
        return torch.load(path)
    return safetensors.torch.load_file(next(path.glob("*.safetensors")))


@pytest.mark.full(reason="four launches")
@pytest.mark.parametrize("recipe", STARTS)
def test_a_recipe_is_coded_and_keeps_its_bits(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, (name, *options), modules = STARTS[recipe]
    for module in modules:
        pytest.importorskip(module.partition(".")[0])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("DS_ZIPCCL", json.dumps({"mode": "always", "min_bytes": 1024, "zero3_base": "host"}))
    rank = [str(TESTS / "support" / "plain_then_coded.py"), ",".join(["torch._dynamo", FSDP2, *modules])]
    words = [*rank, str(RECIPES / name), *options, "--steps", "4", "--out", str(tmp_path)]
    ((status, text, errors),) = runner.whole_programs(["-m", *start, *words])
    assert status == 0, errors
    losses = re.findall(r"\bloss'?:? '?(\d[\d.e+-]*)", text)
    assert len(losses) == 8 and len(set(losses)) > 1 and losses[:4] == losses[4:]
    assert float(re.search(r"^total .* ([\d.]+)$", text, re.MULTILINE)[1]) > 2, text  # type: ignore[index]
    plain, coded = (weights(tmp_path / run) for run in ("plain", "coded"))
    assert plain.keys() == coded.keys() and all(torch.equal(plain[name], coded[name]) for name in plain)


def settled_sums(rank: int, ranks: int, section: dict[str, Any]) -> tuple[str, ...]:
    """The sums of a model on groups in stream order, after some steps on two nodes."""
    topology.here = lambda: str(rank)
    lab = Lab(rank, ranks, True, "")
    lab.train(lab.start(section=section), 2)
    found = state_of(None).device_sums
    assert found is not None and ("no place for an order" in found.why) == ("reduction" not in section)
    reasons = {reason for row in counters.rows() if row["role"] == "zero_grad" for reason in row["reasons"]}
    assert (PassReason.PLAIN_SUMS.value in reasons) == (not found.dtypes), reasons
    return found.dtypes


def test_sums_in_stream_order_stay_the_backends_unless_asked_for() -> None:
    """Checkpoints of FSDP2 have no place for their order."""
    sections = ({"nccl_min_bytes": 0}, {"nccl_min_bytes": 0, "reduction": "fp32"})
    found = [runner.run(settled_sums, 2, section, backend=slots.NAME) for section in sections]
    assert found == [[()] * 2, [DTYPES] * 2]
