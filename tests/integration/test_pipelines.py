"""A real PipelineModule of two stages whose tuples have a bool mask: bits, and bytes on the wire."""

from __future__ import annotations

from pathlib import Path

import pytest
from backend_programs import found

ON = '{"mode": "always", "min_bytes": 1024}'
#: 4 steps of 4 micro-batches: activations and gradients of 512 tokens, and a mask of 256 x 256 with each activation.
PIPELINE = """
import hashlib
from torch import nn
from deepspeed.pipe import PipelineModule
from ds_zipccl.telemetry import counters
deepspeed.init_distributed()

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(256, 256)
    def forward(self, inputs):
        hidden, mask = inputs
        scores = (hidden[:, :256] @ hidden[:, :256].transpose(1, 2)).masked_fill(mask, -1e4)
        return hidden + self.linear(torch.cat([scores.softmax(-1) @ hidden[:, :256], hidden[:, 256:]], 1)).relu(), mask

class Last(nn.Module):
    def forward(self, inputs):
        return inputs[0]

def batches(changing):
    generator = torch.Generator().manual_seed(5)
    while True:
        hidden = torch.randn(1, 512, 256, generator=generator).bfloat16()
        mask = torch.ones(256, 256, dtype=torch.bool).triu(1)
        if changing:
            mask &= torch.rand(256, 256, generator=generator) > 0.5
        yield (hidden, mask), hidden.roll(1, 1)

def train(changing):
    torch.manual_seed(1)
    layers = [Block() for _ in range(4)] + [Last()]
    model = PipelineModule(layers, num_stages=2, loss_fn=lambda got, want: nn.functional.mse_loss(got.float(), want.float()),
                           partition_method="uniform")
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "bf16": {"enabled": True},
              "zero_optimization": {"stage": 0}, "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-3}}}
    e = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    data = batches(changing)
    counters.reset()
    losses = [e.train_batch(data).item() for _ in range(4)]
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().view(torch.uint8).numpy().tobytes())
    found = {row["op"]: row for row in counters.rows() if row["op"] in ("send", "recv")}
    sent = found.get("send", {"wire_bytes": 0, "logical_bytes": 0, "reasons": {}})
    return {"losses": losses, "digest": digest.hexdigest(), "wire": sent["wire_bytes"], "logical": sent["logical_bytes"],
            "reasons": sent["reasons"]}

print("FOUND", json.dumps([train(changing) for changing in (False, True)]), flush=True)
leave()
"""


@pytest.mark.full(reason="two launches of two engines, 10 s; tests/comm has the same messages")
def test_masks_of_a_pipeline(tmp_path: Path) -> None:
    (plain, _), (coded, _) = (found(tmp_path, PIPELINE, DS_ZIPCCL=section) for section in ("0", ON))
    for before, after in zip(plain, coded, strict=True):
        for case in range(2):
            assert before[case]["digest"] == after[case]["digest"] and before[case]["losses"] == after[case]["losses"]
    wire = [coded[0][case]["wire"] for case in range(2)]
    assert 2.7e6 < wire[0] <= 2.85e6, (
        "one mask: sent once as bits, then as a hash; 3.85 MB with masks of a byte an element"
    )
    assert wire[1] - wire[0] == pytest.approx(15 * (65536 // 8 - 16), rel=0.25), "new masks go as bits"
