"""Adapters trained by HF Trainer (ZeRO-3) and by Accelerate (ZeRO-3 and ZeRO-2): the bits of plain DeepSpeed.

The scripts have no line for ds_zipccl: the section is in their DeepSpeed config. Two launches of this file on two ranks.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from places import PACKAGE, TESTS
from programs import launch, reference

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

pytestmark = pytest.mark.full(reason="test_hf.py runs the same libraries, test_peft.py the same adapters")

STEPS = 4
#: The least ratio of the bytes of frozen weights that plain DeepSpeed sends to those that are sent.
LEAST = 200
ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "reduce_bucket_size": "auto",
        "stage3_max_live_parameters": 100_000,
        "stage3_max_reuse_distance": 0,  # else evaluation gathers once, with plain DeepSpeed too
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "optimizer": ADAM,
    "zipccl": {
        "enabled": True,
        "mode": "always",
        "min_bytes": 16384,
        "roles": {"dp": "never"},
        "step_log": "steps.jsonl",
    },
}
KEYS = ("losses", "params", "files", "merged")
#: Of two evaluations of two batches each, a frozen weight of which is sent anew, and of a save.
AGREEMENTS = [2 + 1, 2 + 1, 1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """Results with ``DS_ZIPCCL=0``, and with the section in the DeepSpeed config; the step log of the second run."""
    folders = [tmp_path_factory.mktemp("run") for _ in range(2)]
    sources = [PACKAGE / "telemetry", TESTS / "support" / "tiny_llama.py", TESTS / "support" / "engines.py"]
    plain = reference(__file__, 2, folders[0], sources=sources, HF_HUB_OFFLINE="1")
    coded = launch(__file__, 2, folders[1], DS_ZIPCCL="", HF_HUB_OFFLINE="1")
    log = [json.loads(line) for line in (folders[1] / "steps.jsonl").read_text().splitlines()]
    return plain["results"], coded["results"], log


@pytest.mark.parametrize("script", ["trainer", "accelerate 3", "accelerate 2"])
def test_bits_are_those_of_plain_deepspeed(runs: Any, script: str) -> None:
    plain, coded = (results[script] for results in runs[:2])
    assert len(set(coded["losses"])) == len(coded["losses"]) >= STEPS
    assert {key: coded[key] for key in KEYS} == {key: plain[key] for key in KEYS}
    assert all(one["plain"] == one["sent"] for one in plain["steps"])


@pytest.mark.parametrize("script", ["trainer", "accelerate 3"])
def test_frozen_weights_send_a_proof_from_the_second_step_on(runs: Any, script: str) -> None:
    first, *later = runs[1][script]["steps"]
    assert first["sent"] > first["plain"] / 10
    assert later and all(one["plain"] >= LEAST * one["sent"] > 0 for one in later), later


def test_a_batch_and_a_save_have_an_agreement_each(runs: Any) -> None:
    assert runs[1]["trainer"]["agreements"] == AGREEMENTS


def test_the_step_log_has_each_step(runs: Any) -> None:
    steps = [line["step"] for line in runs[2]]
    assert steps[:STEPS] == list(range(1, STEPS + 1)) and len(steps) > STEPS
    assert all(set(line["differences"]) == {"as differences"} for line in runs[2][1:STEPS])


# ---- the program of one rank ---------------------------------------------------------------------------------------


def rank_program(folder: Path) -> None:
    import deepspeed
    import tiny_llama
    import torch
    import torch.distributed as dist

    deepspeed.utils.logging.logger.setLevel("WARNING")
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # an unused operator that takes a minute to build
    deepspeed.init_distributed()
    if dist.get_rank() == 0:
        tiny_llama.llama().save_pretrained(folder / "llama")
    dist.barrier()
    meter = tiny_llama.Meter()
    results = {
        "trainer": with_trainer(folder, meter),
        "accelerate 3": with_accelerate(folder, meter, 3),
        "accelerate 2": with_accelerate(folder, meter, 2),
    }
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def load_model(folder: Path) -> Any:
    """Return the model of a file, in bf16, with adapters in 32 bits, as peft makes them. ZeRO-3 loads one partition a rank."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.bfloat16)
    torch.manual_seed(2)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"]))


def make_data(rows: int = 64) -> list[dict[str, Any]]:
    import torch

    words = torch.randint(256, (rows, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in words]


def finish(
    folder: Path, engine: Any, losses: list[float], steps: list[dict[str, int]], adapter: Path
) -> dict[str, Any]:
    """Return the results of a script, among them the weights into which the saved adapter is merged, offline."""
    import tiny_llama
    import torch.distributed as dist
    from peft import PeftModel
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    found = {"losses": losses, "steps": steps, "params": tiny_llama.digest(engine.module.parameters())}
    engine.destroy()
    unset_hf_deepspeed_config()
    dist.barrier()
    if dist.get_rank() == 0:
        model = PeftModel.from_pretrained(tiny_llama.llama(), adapter).merge_and_unload()
        found |= {"files": tiny_llama.of_files(adapter), "merged": tiny_llama.digest(model.parameters())}
    dist.barrier()
    return found


def agreements() -> int:
    from ds_zipccl.telemetry import counters

    return sum(row["calls"] for row in counters.rows() if row["op"] == "agreement")


def forget_accelerators() -> None:
    """Let this process be one of a new script."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def with_trainer(folder: Path, meter: Any) -> dict[str, Any]:
    """Train with checkpointing of activations; evaluate and save in the middle. Then write to a frozen weight before evaluations."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    steps: list[dict[str, int]] = []

    class Note(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            steps.append(meter.read())

    forget_accelerators()
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": True},
        bf16=True,
        use_cpu=True,
        deepspeed=CONFIG,
        report_to=[],
        disable_tqdm=True,
        learning_rate=1e-3,
    )
    trainer = Trainer(
        model=load_model(folder),
        args=arguments,
        train_dataset=make_data(),
        eval_dataset=make_data(8),
        callbacks=[Note()],
    )
    meter.read()
    trainer.train()
    counts = []
    weight = next(one for name, one in trainer.model.named_parameters() if "mlp.up_proj" in name)
    for number in range(3):  # the first one gathers anew after a save
        if trainer.args.process_index == number % 2:
            weight.ds_tensor.data.mul_(1.5)
        trainer.evaluate()
        counts.append(agreements())
    losses = [entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry]
    trainer.save_model(str(folder / "adapter"))
    counts.append(agreements())
    found = {"agreements": [after - before for before, after in itertools.pairwise(counts)]}
    return found | finish(folder, trainer.model_wrapped, losses, steps, folder / "adapter")


def with_accelerate(folder: Path, meter: Any, stage: int) -> dict[str, Any]:
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim
    from torch.utils.data import DataLoader

    forget_accelerators()
    zero = {"stage": stage} if stage == 2 else CONFIG["zero_optimization"]
    config = CONFIG | {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 2}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = load_model(folder)
    engine, _, loader = accelerator.prepare(
        model,
        DummyOptim([one for one in model.parameters() if one.requires_grad]),
        DataLoader(make_data(), batch_size=2),
    )
    losses, steps = [], []
    meter.read()
    for _, batch in zip(range(STEPS), loader):
        loss = engine(**batch).loss
        accelerator.backward(loss)
        losses.append(loss.item())
        steps.append(meter.read())
    adapter = folder / f"adapter{stage}"
    accelerator.unwrap_model(engine).save_pretrained(
        adapter, is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(engine)
    )
    return finish(folder, engine, losses, steps, adapter)


if __name__ == "__main__":
    rank_program(Path(sys.argv[1]))
