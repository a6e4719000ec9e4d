"""The gradient of an embedding that first and last stage share: one sum over both and all data-parallel ranks, in real engines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from backend_programs import found

from ds_zipccl.config import ConfigError, parse_section
from ds_zipccl.integration.job import Job
from ds_zipccl.integration.lossy import fused_embedding
from ds_zipccl.policy.pipeline_rules import sharing_ranks

ON = '{"mode": "always", "min_bytes": 1024, "fused_embedding": true}'
#: Two stages of two ranks each. Per case: the gradients at the optimizer step in two sums and in one, and the bytes of the sums.
PROGRAM = """
import hashlib
from torch import nn
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe import engine as pipe, schedule
from ds_zipccl.config import ConfigError
deepspeed.init_distributed()
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

class Words(nn.Embedding):
    pass

def head(words, x):
    return x @ words.weight.t()

def train(fused, dtype, stages=2, tied=True, **more):
    layer = lambda *more, **options: TiedLayerSpec("words", Words, 256, 64, *more, **options)
    layers = [layer(), LayerSpec(nn.Linear, 64, 64), LayerSpec(nn.Linear, 64, 64),
              layer(forward_fn=head) if tied else LayerSpec(nn.Linear, 64, 256)]
    loss = lambda got, want: nn.functional.cross_entropy(got.float().flatten(0, 1), want.flatten())
    torch.manual_seed(1)
    model = PipelineModule(layers, stages, loss_fn=loss, partition_method="uniform")
    mixed = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 0},
              "optimizer": {"type": "SGD", "params": {"lr": 1e-2}}, "zero_allow_untested_optimizer": True, **mixed, **more}
    e = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    if not fused:
        e.ds_zipccl_fused = None
    else:
        assert (getattr(e, "ds_zipccl_fused", None) is not None) == (tied and stages == 2), "made, or not"
    generator = torch.Generator().manual_seed(7 + e.grid.get_data_parallel_rank())
    tokens = torch.randint(256, (2, 2, 33), generator=generator)
    bytes_sent[0] = 0
    cdb = deepspeed.comm.comm.cdb
    original, cdb.all_reduce = cdb.all_reduce, count(cdb.all_reduce)
    seen.clear()
    e.train_batch(iter([(one[:, :-1], one[:, 1:]) for one in tokens]))
    cdb.all_reduce = original
    return dict(seen), bytes_sent[0]

def compare(dtype, **more):
    (two, sent_two), (one, sent_one) = (train(fused, dtype, **more) for fused in (False, True))
    words = one.pop("tied_modules.words.weight")
    before = two.pop("tied_modules.words.weight")
    return {"error": float((words - before).norm() / before.norm()),
            "others": all(torch.equal(one[name], two[name]) for name in one),
            "digest": hashlib.sha256(words.numpy().tobytes()).hexdigest(),
            "weight": words.numel() * (4 if dtype == "fp32" else 2), "saved": sent_two - sent_one}

found = {"fp32": compare("fp32"), "bf16": compare("bf16"),
         "fp32 in bf16": compare("bf16", data_types={"grad_accum_dtype": "fp32"}, zero_optimization={"stage": 1})}
train(True, "fp32", tied=False)
try:
    train(True, "bf16", zero_optimization={"stage": 1})
    found["refused"] = ""
except ConfigError as error:
    found["refused"] = str(error)
print("FOUND", json.dumps(found), flush=True)
leave()
"""


@pytest.mark.full(reason="one launch of four ranks with eight engines, 15 s")
def test_one_sum(tmp_path: Path) -> None:
    everyone, (text, *_) = found(tmp_path, PROGRAM, ranks=4, DS_ZIPCCL=ON)
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
