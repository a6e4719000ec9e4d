"""PowerSGD for the first stage of a real pipeline: all copies of a weight that stages share stay equal, also in one sum."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from backend_programs import found

ON = json.dumps(
    {
        "mode": "always",
        "min_bytes": 1024,
        "lossy": True,
        "fused_embedding": True,
        "roles": {role: {"codec": "powersgd", "rank": 4, "start_step": 0, "stages": 1} for role in ("dp", "zero_grad")},
    }
)
#: Two stages of two ranks each. Per case: hashes of the shared weight and of the others after the last step, and the sums by PowerSGD.
PROGRAM = """
import hashlib
from torch import nn
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from ds_zipccl.integration.lossy import powersgd
deepspeed.init_distributed()
run, sums = powersgd.PowerSum.run, [0]

def counted(self, *args):
    sums[0] += 1
    return run(self, *args)

powersgd.PowerSum.run = counted

def digest(tensors):
    return hashlib.sha256(b"".join(one.detach().float().numpy().tobytes() for one in tensors)).hexdigest()

def head(words, x):
    return x @ words.weight.t()

def train(fused, **more):
    layer = lambda **options: TiedLayerSpec("words", nn.Embedding, 256, 64, **options)
    layers = [layer(), LayerSpec(nn.Linear, 64, 64), LayerSpec(nn.Linear, 64, 64), layer(forward_fn=head)]
    loss = lambda got, want: nn.functional.cross_entropy(got.float().flatten(0, 1), want.flatten())
    torch.manual_seed(1)
    model = PipelineModule(layers, 2, loss_fn=loss, partition_method="uniform")
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 0},
              "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": True, **more}
    e = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    assert e.ds_zipccl_fused is not None
    if not fused:
        e.ds_zipccl_fused = None
    generator = torch.Generator().manual_seed(7 + e.grid.get_data_parallel_rank())
    sums[0] = 0
    for _ in range(3):
        tokens = torch.randint(256, (2, 2, 33), generator=generator)
        e.train_batch(iter([(one[:, :-1], one[:, 1:]) for one in tokens]))
    words = model.tied_modules["words"].weight
    return {"shared": digest([words]), "others": digest(one for one in model.parameters() if one is not words),
            "sums": sums[0], "stage": e.stage_id}

found = {"right": train(False), "fused": train(True)}
original = PipelineModule.get_tied_weights_and_groups
PipelineModule.get_tied_weights_and_groups = lambda self: []  # the plant: shared weights are as others
found["planted"] = train(False)
PipelineModule.get_tied_weights_and_groups = original
found["fused bf16"] = train(  # last: later sums would have the role of ZeRO
    True, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"}, zero_optimization={"stage": 1})
print("FOUND", json.dumps(found), flush=True)
leave()
"""


@pytest.mark.full(reason="one launch of four ranks")
def test_weights_that_stages_share_stay_equal(tmp_path: Path) -> None:
    results, _ = found(tmp_path, PROGRAM, ranks=4, DS_ZIPCCL=ON)
    for case in ("right", "fused", "planted", "fused bf16"):
        for stage in (0, 1):
            ranks = [one[case] for one in results if one[case]["stage"] == stage]
            assert len(ranks) == 2 and len({one["others"] for one in ranks}) == 1, "replicas"
            assert all((one["sums"] > 0) == (stage == 0) for one in ranks), "the first stage alone"
        copies = {one[case]["shared"] for one in results}
        assert (len(copies) == 1) == (case != "planted"), (case, results)
