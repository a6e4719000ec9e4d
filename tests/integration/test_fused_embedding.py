"""The embedding that first and last stage of a real pipeline share: its gradient in one sum over both stages and all data-parallel ranks,
and all of its copies equal where PowerSGD sums the other gradients of the first stage."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from backend_programs import found

from ds_zipccl.config import ConfigError, parse_section
from ds_zipccl.integration.job import Job
from ds_zipccl.integration.lossy import fused_embedding
from ds_zipccl.policy.admission import sharing_ranks

ON = {"mode": "always", "min_bytes": 1024, "fused_embedding": True}
POWER = {"codec": "powersgd", "rank": 4, "start_step": 0, "stages": 1}
LOSSY = ON | {"lossy": True, "roles": {role: POWER for role in ("dp", "zero_grad")}}
#: Two stages of two ranks each.
PIPELINE = """
import hashlib
from torch import nn
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
deepspeed.init_distributed()

def digest(tensors):
    return hashlib.sha256(b"".join(one.detach().float().numpy().tobytes() for one in tensors)).hexdigest()

def head(words, x):
    return x @ words.weight.t()

def start(fused, stages=2, tied=True, rate=1e-2, **more):
    layer = lambda **options: TiedLayerSpec("words", nn.Embedding, 256, 64, **options)
    layers = [layer(), LayerSpec(nn.Linear, 64, 64), LayerSpec(nn.Linear, 64, 64),
              layer(forward_fn=head) if tied else LayerSpec(nn.Linear, 64, 256)]
    loss = lambda got, want: nn.functional.cross_entropy(got.float().flatten(0, 1), want.flatten())
    torch.manual_seed(1)
    model = PipelineModule(layers, stages, loss_fn=loss, partition_method="uniform")
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 0},
              "optimizer": {"type": "SGD", "params": {"lr": rate}}, "zero_allow_untested_optimizer": True, **more}
    e = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    assert (getattr(e, "ds_zipccl_fused", None) is not None) == (tied and stages == 2), "made, or not"
    if not fused:
        e.ds_zipccl_fused = None
    return e

def train(e, count=1):
    generator = torch.Generator().manual_seed(7 + e.grid.get_data_parallel_rank())
    for _ in range(count):
        tokens = torch.randint(256, (2, 2, 33), generator=generator)
        e.train_batch(iter([(one[:, :-1], one[:, 1:]) for one in tokens]))
    return e

BF16 = {"bf16": {"enabled": True}}
"""
#: Per case: the gradients at the optimizer step in two sums and in one, and the bytes of the sums.
SUMS = """
from deepspeed.runtime.pipe import engine as pipe, schedule
from ds_zipccl.config import ConfigError
seen, bytes_sent = {}, [0.0]
table = pipe.PipelineEngine._INSTRUCTION_MAP

def look(step):
    def optimizer_step(engine, *args, **kwargs):
        for name, one in engine.module.named_parameters():
            seen[name] = (one._hp_grad if engine.using_bf16_optimizer else one.grad).float().clone()
        return step(engine, *args, **kwargs)
    return optimizer_step

def count(call):
    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        ranks = dist.get_world_size(group)
        bytes_sent[0] += 2 * (ranks - 1) / ranks * tensor.nbytes if tensor.nbytes > 1024 else 0
        return call(tensor, op, group, async_op)
    return all_reduce

table[schedule.OptimizerStep] = look(table[schedule.OptimizerStep])

def measure(fused, **more):
    e = start(fused, **more)
    bytes_sent[0] = 0
    cdb = deepspeed.comm.comm.cdb
    original, cdb.all_reduce = cdb.all_reduce, count(cdb.all_reduce)
    seen.clear()
    train(e)
    cdb.all_reduce = original
    return dict(seen), bytes_sent[0]

def compare(**more):
    (two, sent_two), (one, sent_one) = (measure(fused, **more) for fused in (False, True))
    words = one.pop("tied_modules.words.weight")
    before = two.pop("tied_modules.words.weight")
    return {"error": float((words - before).norm() / before.norm()),
            "others": all(torch.equal(one[name], two[name]) for name in one), "digest": digest([words]),
            "weight": words.numel() * (2 if more else 4), "saved": sent_two - sent_one}

found = {"fp32": compare(), "bf16": compare(**BF16),
         "fp32 in bf16": compare(**BF16, data_types={"grad_accum_dtype": "fp32"}, zero_optimization={"stage": 1})}
train(start(True, tied=False))
try:
    start(True, **BF16, zero_optimization={"stage": 1})
    found["refused"] = ""
except ConfigError as error:
    found["refused"] = str(error)
print("FOUND", json.dumps(found), flush=True)
leave()
"""


@pytest.mark.full(reason="one launch of four ranks with eight engines, 15 s")
def test_one_sum(tmp_path: Path) -> None:
    everyone, (text, *_) = found(tmp_path, PIPELINE + SUMS, ranks=4, DS_ZIPCCL=json.dumps(ON))
    bounds = {"fp32": 1e-6, "bf16": 2**-7, "fp32 in bf16": 2**-7}
    for case, bound in bounds.items():
        results = [one[case] for one in everyone]
        assert len({one["digest"] for one in results}) == 1, f"{case}: the same bits on all ranks"
        for result in results:
            assert result["error"] <= bound, f"{case}: as in two sums"
            assert result["others"], f"{case}: other gradients have the bits of before"
            # two sums: 2V(D-1)/D + V; one: 2V(2D-1)/(2D), with D = 2; DeepSpeed sums over stages in the gradient's own dtype
            wider = result["weight"] if case == "fp32 in bf16" else 0
            assert result["saved"] == pytest.approx(result["weight"] * (2 - 1.5) + wider), f"{case}: bytes"
    assert all("ZeRO-1" in one["refused"] and "fused_embedding" in one["refused"] for one in everyone)
    assert "fused_embedding: 'words' of stages 0, 1: one sum over 4 ranks" in text
    assert "fused_embedding: has no effect: no two stages share a tied layer" in text


#: Per case: hashes of the shared weight and of the others after the last step, and the sums by PowerSGD.
COPIES = """
from ds_zipccl.integration.lossy import powersgd
run, sums = powersgd.PowerSum.run, [0]

def counted(self, *args):
    sums[0] += 1
    return run(self, *args)

powersgd.PowerSum.run = counted

def copies(fused, **more):
    sums[0] = 0
    e = train(start(fused, rate=0.1, **more), 3)
    words = e.module.tied_modules["words"].weight
    others = digest(one for one in e.module.parameters() if one is not words)
    return {"shared": digest([words]), "others": others, "sums": sums[0], "stage": e.stage_id}

found = {"right": copies(False), "fused": copies(True)}
original = PipelineModule.get_tied_weights_and_groups
PipelineModule.get_tied_weights_and_groups = lambda self: []  # the plant: shared weights are as others
found["planted"] = copies(False)
PipelineModule.get_tied_weights_and_groups = original
found["fused bf16"] = copies(  # last: later sums would have the role of ZeRO
    True, **BF16, data_types={"grad_accum_dtype": "fp32"}, zero_optimization={"stage": 1})
print("FOUND", json.dumps(found), flush=True)
leave()
"""


@pytest.mark.full(reason="one launch of four ranks")
def test_weights_that_stages_share_stay_equal_beside_powersgd(tmp_path: Path) -> None:
    results, _ = found(tmp_path, PIPELINE + COPIES, ranks=4, DS_ZIPCCL=json.dumps(LOSSY))
    for case in ("right", "fused", "planted", "fused bf16"):
        for stage in (0, 1):
            ranks = [one[case] for one in results if one[case]["stage"] == stage]
            assert len(ranks) == 2 and len({one["others"] for one in ranks}) == 1, "replicas"
            assert all((one["sums"] > 0) == (stage == 0) for one in ranks), "the first stage alone"
        copies = {one[case]["shared"] for one in results}
        assert (len(copies) == 1) == (case != "planted"), (case, results)


def coordinates(tensor: int, stages: int, data: int) -> list[dict[str, int]]:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=tensor, num_dp=data)
    return [topology.get_coord(rank)._asdict() for rank in range(topology.world_size())]


def wrong_groups(groups: list[list[int]], places: list[dict[str, int]], stages: list[int], data: int) -> list[str]:
    """Return what is wrong with the groups of a weight of which every tensor-parallel rank holds another part."""
    sizes = {len(ranks) for ranks in groups} - {len(stages) * data}
    mixed = [ranks for ranks in groups if len({places[rank].get("model", 0) for rank in ranks}) > 1]
    members = sorted(rank for ranks in groups for rank in ranks)
    wanted = [rank for rank, place in enumerate(places) if place["pipe"] in stages]
    return ["size"] * bool(sizes) + ["parts"] * bool(mixed) + ["members"] * (members != wanted)


@pytest.mark.parametrize(("tensor", "stages", "data"), [(2, 2, 2), (2, 4, 3), (1, 2, 4), (4, 2, 1), (3, 3, 2)])
def test_groups(tensor: int, stages: int, data: int) -> None:
    places, ends = coordinates(tensor, stages, data), [0, stages - 1]
    groups = sharing_ranks(places, ends)
    assert len(groups) == tensor
    assert wrong_groups(groups, places, ends, data) == []
    # one group for all tensor-parallel ranks would add different parts of a vocabulary
    planted = [sorted(rank for ranks in groups for rank in ranks)]
    assert (wrong_groups(planted, places, ends, data) == []) == (tensor == 1)


@pytest.mark.parametrize(
    ("fused", "pipeline", "told"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_an_engine_without_a_pipeline_is_told(monkeypatch, fused, pipeline, told) -> None:
    said: list[str] = []
    monkeypatch.setattr(fused_embedding, "_say", said.append)
    config = parse_section({"enabled": True, "fused_embedding": fused})
    fused_embedding.begin_engine(SimpleNamespace(pipeline_parallelism=pipeline), config)
    assert said == ["has no effect: the engine has no pipeline"] * told


def test_copies_that_would_drift_apart_are_refused() -> None:
    """Each stage would sum its copy lossily by itself. Planted: without the check nothing is raised."""
    lossy = parse_section({"lossy": True, "roles": {"dp": {"codec": "round"}, "zero_grad": {"codec": "powersgd"}}})
    words = {"words": [0, 1]}
    with pytest.raises(
        ConfigError,
        match=r'roles\.dp\.codec": "round" .* tied layer \'words\' on stages 0, 1 .*add "fused_embedding": true',
    ):
        fused_embedding._refuse_drift(lossy, "dp", words)
    for role, shared in (("dp", {}), ("zero_grad", words), ("pp", words)):
        fused_embedding._refuse_drift(lossy, role, shared)
    tied = [SimpleNamespace(tied_weight_attr="weight", key="words") for _ in range(2)]
    module = SimpleNamespace(_layer_specs=tied, stage_owner=lambda index: index)
    engine: Any = SimpleNamespace(module=module, grid=SimpleNamespace(data_parallel_size=2))
    fused_embedding.begin(engine, Job(config=lossy, zero_stages=frozenset({0, 1})))
    with pytest.raises(ConfigError, match=r"roles\.dp\.codec"):
        fused_embedding.begin(engine, Job(config=lossy, zero_stages=frozenset({0})))
