"""DeepSpeed broadcasts the parameters of a new engine as bytes: they go as the words that they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from backend_programs import succeed

ON = '{"mode": "always"}'
START = """
from ds_zipccl.telemetry import counters
deepspeed.init_distributed()
for stage, precision in ((0, "bf16"), (2, "bf16"), (3, "bf16"), (1, "fp32")):
    counters.reset()
    torch.manual_seed(100 * rank)  # every rank begins with other parameters
    model = torch.nn.Sequential(torch.nn.Linear(512, 500), torch.nn.Linear(500, 512, bias=False), torch.nn.Linear(512, 7))
    want = [parameter.detach().clone() for parameter in model.parameters()]
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage},
              "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
        want = [tensor.bfloat16() for tensor in want]
    e = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    for tensor in want:
        torch.distributed.broadcast(tensor, 0)
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        for parameter, tensor in zip(model.parameters(), want):
            assert torch.equal(parameter.detach().view(torch.uint8), tensor.view(torch.uint8)), (stage, precision)
    (row,) = [row for row in counters.rows() if row["op"] == "broadcast"]
    least = {"bf16": 1.45, "fp32": 1.15}[precision]
    assert "dtype uint8" not in row["reasons"], (stage, row)
    if rank == 0:
        itemsize = 2 if precision == "bf16" else 4
        assert row["logical_bytes"] >= 2 * 512 * 500 * itemsize and row["ratio"] > least, (stage, precision, row)
leave()
"""


@pytest.mark.full(reason="four engines, 8 s; tests/comm has the same broadcasts")
def test_parameters_of_a_new_engine(tmp_path: Path) -> None:
    succeed(tmp_path, START, DS_ZIPCCL=ON)
