"""Scripts without a line for ds_zipccl: HF Trainer (ZeRO-3) and Accelerate (ZeRO-2), with the section in their config.

Their traffic is coded, and losses and parameters are those of the run with ``DS_ZIPCCL=0``. Two launches of this file on two ranks, and a
third that resumes a training of Trainer.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from places import PACKAGE
from programs import launch, reference

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

STEPS = 4
CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "zipccl": {"enabled": True, "mode": "always", "min_bytes": 4096},
}
ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results with ``DS_ZIPCCL=0``, and with nothing but the section in the DeepSpeed config."""
    folders = [tmp_path_factory.mktemp("run") for _ in range(2)]
    plain = reference(__file__, 2, folders[0], sources=[PACKAGE / "telemetry"], HF_HUB_OFFLINE="1")
    coded = launch(__file__, 2, folders[1], DS_ZIPCCL="", HF_HUB_OFFLINE="1")
    return plain["results"], coded["results"] | {"folder": folders[1]}


@pytest.mark.full(reason="another launch")
def test_a_resumed_training_has_the_bits_of_an_uninterrupted_one(runs: tuple[dict, dict]) -> None:
    """In a new process: Trainer cannot resume with ZeRO-3 in the process of the first training, plain either (a tracing error)."""
    plain, coded = runs[0]["trainer"], runs[1]["trainer"]
    resumed = launch(__file__, 2, runs[1]["folder"], "resume", DS_ZIPCCL="", HF_HUB_OFFLINE="1")["results"]["trainer"]
    assert set(resumed["coded_calls"]) == {"dp", "zero_grad", "zero_param"}
    assert resumed["coded_calls"]["zero_grad"] < coded["coded_calls"]["zero_grad"], "fewer steps"
    assert (resumed["losses"], resumed["params_sha256"]) == (plain["losses"], plain["params_sha256"])


@pytest.mark.parametrize("library", ["trainer", "accelerate"])
def test_unchanged_script_is_coded_and_keeps_its_bits(runs: tuple[dict, dict], library: str) -> None:
    plain, coded = (results[library] for results in runs)
    assert plain["coded_calls"] == {}
    assert set(coded["coded_calls"]) == {"dp", "zero_grad", "zero_param"}
    assert len(coded["losses"]) == STEPS and len(set(coded["losses"])) == STEPS
    assert coded["losses"] == plain["losses"]
    assert coded["params_sha256"] == plain["params_sha256"]


# ---- the program of one rank ---------------------------------------------------------------------------------------


def rank_program(folder: Path, resume: bool) -> None:
    """Run a user's script. Only after training it imports ds_zipccl, to read the counters."""
    import deepspeed
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # an unused operator that takes a minute to build
    results = {}
    programs = {"trainer": with_trainer} if resume else {"trainer": with_trainer, "accelerate": with_accelerate}
    for library, program in programs.items():
        losses, engine = program(folder, resume)
        from ds_zipccl.telemetry import counters

        assert isinstance(engine, deepspeed.DeepSpeedEngine), engine
        digest = hashlib.sha256()
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            for parameter in engine.module.parameters():
                digest.update(parameter.detach().view(torch.uint8).numpy().tobytes())
        calls: dict[str, int] = {}
        for row in counters.rows():
            if row["calls"]:
                calls[row["role"]] = calls.get(row["role"], 0) + row["calls"]
        counters.reset()
        results[library] = {"losses": losses, "params_sha256": digest.hexdigest(), "coded_calls": calls}
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def make_model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **shape))


def make_data() -> list[dict[str, Any]]:
    import torch

    rows = torch.randint(1024, (64, 32), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


def with_trainer(folder: Path, resume: bool) -> tuple[list[float], Any]:
    """Train with Trainer, from the start or from the checkpoint in the middle of an earlier run; return the losses that it logs, and the
    DeepSpeed engine."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=2,
        max_steps=STEPS,
        logging_steps=1,
        bf16=True,
        use_cpu=True,
        deepspeed=CONFIG | {"optimizer": ADAM},
        report_to=[],
        save_strategy="steps",
        save_steps=STEPS // 2,
        disable_tqdm=True,
        learning_rate=1e-3,
    )
    trainer = Trainer(model=make_model(), args=arguments, train_dataset=make_data())
    trainer.train(resume_from_checkpoint=str(folder / "out" / f"checkpoint-{STEPS // 2}") if resume else None)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer.model_wrapped


def with_accelerate(folder: Path, resume: bool) -> tuple[list[float], Any]:
    """Train with Accelerate; return this rank's losses, and the DeepSpeed engine."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DummyOptim
    from torch.utils.data import DataLoader

    AcceleratorState._reset_state(reset_partial_state=True)  # Trainer's, in this process
    config = CONFIG | {"zero_optimization": {"stage": 2}, "optimizer": ADAM, "train_micro_batch_size_per_gpu": 2}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = make_model()
    engine, _, loader = accelerator.prepare(
        model, DummyOptim(model.parameters()), DataLoader(make_data(), batch_size=2)
    )
    losses = []
    for _, batch in zip(range(STEPS), loader):
        loss = engine(**batch).loss
        accelerator.backward(loss)
        losses.append(loss.item())
    return losses, engine


if __name__ == "__main__":
    rank_program(Path(sys.argv[1]), "resume" in sys.argv)
