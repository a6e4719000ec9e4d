"""Scripts of HF Trainer and Accelerate without a line for ds_zipccl: the section is in their DeepSpeed config.

Their traffic is coded, and losses, parameters and files are those of the run with ``DS_ZIPCCL=0``. A launch of this file on two ranks
trains whole models, another one adapters of frozen models, and a third resumes a training of Trainer.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from places import PACKAGE, TESTS
from programs import launch, reference
from tiers import mostly_full

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

STEPS = 4
#: The least ratio of the bytes of frozen weights that plain DeepSpeed sends to those that are sent.
LEAST = 200
#: Models -> what is not by default in the section.
SECTIONS: dict[str, dict[str, Any]] = {
    "whole": {"min_bytes": 4096},
    "adapters": {"min_bytes": 16384, "roles": {"dp": "never"}, "step_log": "steps.jsonl"},
}
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
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
SCRIPTS = [("whole", "trainer"), ("whole", "accelerate"), ("adapters", "trainer"), ("adapters", "accelerate")]
Runs = Callable[[str], tuple[dict[str, Any], dict[str, Any], Path]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return a function models -> results with ``DS_ZIPCCL=0``, and with nothing but the section in the DeepSpeed config; their folder."""
    import tiny_llama

    @functools.cache
    def get(models: str) -> tuple[dict[str, Any], dict[str, Any], Path]:
        folders = [tmp_path_factory.mktemp(models) for _ in range(2)]
        for folder in folders:
            tiny_llama.llama().save_pretrained(folder / "llama")
        sources = [PACKAGE / "telemetry", TESTS / "support/tiny_llama.py", TESTS / "support/engines.py"]
        plain = reference(__file__, 2, folders[0], models, sources=sources)
        coded = launch(__file__, 2, folders[1], models, DS_ZIPCCL="")
        return plain["results"], coded["results"], folders[1]

    return get


@pytest.mark.parametrize(("models", "library"), mostly_full(SCRIPTS, SCRIPTS[:2], "test_peft.py has the adapters"))
def test_unchanged_script_is_coded_and_keeps_its_bits(runs: Runs, models: str, library: str) -> None:
    plain, coded = (results[library] for results in runs(models)[:2])
    assert plain["coded_calls"] == {}
    roles = {"whole": {"zero_grad", "zero_param"}, "adapters": {"zero_param"}}[models]
    assert set(coded["coded_calls"]) == roles
    assert len(set(coded["losses"])) == len(coded["losses"]) >= STEPS
    for key in ("losses", "params", "files", "merged"):
        assert coded.get(key) == plain.get(key), key
    if models == "adapters":  # frozen weights send a proof from the second step on
        first, *later = coded["steps"]
        assert all(one["plain"] == one["sent"] for one in plain["steps"])
        assert first["sent"] > first["plain"] / 10
        assert later and all(one["plain"] >= LEAST * one["sent"] > 0 for one in later), later


@pytest.mark.full(reason="another launch")
def test_a_resumed_training_has_the_bits_of_an_uninterrupted_one(runs: Runs) -> None:
    """In a new process: Trainer cannot resume with ZeRO-3 in the process of the first training, plain either (a tracing error)."""
    (plain, _, folder), options = runs("whole"), ("whole", "resume")
    found = launch(__file__, 2, folder, *options, DS_ZIPCCL="")["results"]["trainer"]
    assert found["coded_calls"]["zero_grad"] > 0 and len(found["steps"]) == STEPS // 2, "fewer steps"
    for key in ("losses", "params"):
        assert found[key] == plain["trainer"][key], key


@pytest.mark.full(reason="test_peft.py has the adapters")
def test_the_step_log_has_each_step(runs: Runs) -> None:
    lines = [json.loads(line) for line in (runs("adapters")[2] / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines[:STEPS]] == list(range(1, STEPS + 1)) and len(lines) > STEPS
    assert all(set(line["differences"]) == {"as differences"} for line in lines[1:STEPS])


@pytest.mark.full(reason="eight seconds; the unchanged script stays")
def test_logs_of_trainer_have_the_figures(tmp_path: Path) -> None:
    """Those of DeepSpeed's monitors, in each entry of training and for a reporter that Trainer had before; none in those of evaluations."""
    import tiny_llama

    tiny_llama.llama().save_pretrained(tmp_path / "llama")
    found = launch(__file__, 2, tmp_path, "logs", DS_ZIPCCL="")["results"]
    training = [entry for entry in found["history"] if "eval_loss" not in entry]
    assert len(training) == STEPS + 1 and len(found["history"]) > len(training)
    names = {f"zipccl/{name}" for name in ("logical_bytes", "wire_bytes", "saved_bytes", "ratio", "seconds_saved")}
    assert all(names <= set(entry) for entry in training)
    assert not any(name.startswith("zipccl") for entry in found["history"] if "eval_loss" in entry for name in entry)
    saved = [entry["zipccl/saved_bytes"] for entry in training]
    assert saved == [entry["zipccl/logical_bytes"] - entry["zipccl/wire_bytes"] for entry in training]
    assert 0 < saved[0] < saved[1] < saved[2] and "zipccl/zero_grad/ratio" in training[1]
    assert [entry["zipccl/seconds_saved"] for entry in training[:STEPS]] == [0.5, 1.0, 1.5, 2.0]
    assert found["reported"] == [
        {name: value for name, value in entry.items() if name != "step"} for entry in found["history"]
    ]
    events = dict(found["events"])
    assert events["Train/zipccl/saved_bytes"] == saved[-1] and events["Train/zipccl/seconds_saved"] == 2.0


# ---- the program of one rank ---------------------------------------------------------------------------------------


def rank_program(folder: Path, models: str, resume: bool) -> None:
    """Run users' scripts. Those with whole models import nothing of ds_zipccl before the end of training."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    deepspeed.utils.logging.logger.setLevel("WARNING")
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # an unused operator that takes a minute to build
    if models == "logs":
        return with_callback(folder)
    results, read = {}, dict[str, int]
    if models == "adapters":
        import tiny_llama

        deepspeed.init_distributed()
        read = tiny_llama.Meter().read
    for library, script in (("trainer", with_trainer), ("accelerate", with_accelerate))[: 1 if resume else 2]:
        AcceleratorState._reset_state(reset_partial_state=True)  # a new script
        saved = folder / f"saved {library}"
        losses, steps, engine = script(saved, load_model(folder, models), models, read, resume)
        import tiny_llama

        found = {"losses": losses, "steps": steps, "params": [None] * 2, "coded_calls": coded_calls()}
        dist.all_gather_object(found["params"], tiny_llama.digest(engine.module.parameters()))
        assert isinstance(engine, deepspeed.DeepSpeedEngine), engine
        engine.destroy()
        unset_hf_deepspeed_config()
        if dist.get_rank() == 0:
            found["files"] = tiny_llama.of_files(saved)
            if models == "adapters":
                found["merged"] = merged(saved)
        results[library] = found
        dist.barrier()
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def coded_calls() -> dict[str, int]:
    """Return the coded calls of a script by role."""
    from ds_zipccl.telemetry import counters

    found: dict[str, int] = {}
    for row in counters.rows():
        if row["calls"]:
            found[row["role"]] = found.get(row["role"], 0) + row["calls"]
    counters.reset()
    return found


def load_model(folder: Path, models: str) -> Any:
    """Return the model of a file, in bf16, with adapters in 32 bits, as peft makes them. ZeRO-3 loads one partition a rank."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.bfloat16)
    if models == "whole":
        return model
    torch.manual_seed(2)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"]))


def merged(adapter: Path) -> str:
    """Return a hash of the weights into which a saved adapter is merged, offline."""
    import tiny_llama
    from peft import PeftModel

    return tiny_llama.digest(PeftModel.from_pretrained(tiny_llama.llama(), adapter).merge_and_unload().parameters())


def make_data(rows: int = 64) -> list[dict[str, Any]]:
    import torch

    words = torch.randint(256, (rows, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in words]


def section(models: str) -> dict[str, Any]:
    return {"zipccl": {"enabled": True, "mode": "always", **SECTIONS[models]}}


def with_trainer(saved: Path, model: Any, models: str, read: Any, resume: bool) -> tuple[list[float], Any, Any]:
    """Train with checkpointing of activations, from the start or from the checkpoint in the middle of an earlier run; evaluate and save in
    the middle. Then write to a frozen weight before evaluations. Return the losses, the bytes of steps, and the DeepSpeed engine."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    steps: list[dict[str, int]] = []

    class Note(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            steps.append(read())

    out = saved.parent / "out"
    arguments = TrainingArguments(
        output_dir=str(out), per_device_train_batch_size=2, per_device_eval_batch_size=2, gradient_accumulation_steps=2,
        max_steps=STEPS, logging_steps=1, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=STEPS // 2,
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}, bf16=True, use_cpu=True,
        deepspeed=CONFIG | section(models), report_to=[], disable_tqdm=True, learning_rate=1e-3,
    )  # fmt: skip
    data = {"train_dataset": make_data(), "eval_dataset": make_data(8)}
    trainer = Trainer(model=model, args=arguments, callbacks=[Note()], **data)
    read()
    trainer.train(resume_from_checkpoint=str(out / f"checkpoint-{STEPS // 2}") if resume else None)
    weight = next(one for name, one in trainer.model.named_parameters() if "mlp.up_proj" in name)
    for number in range(3 if models == "adapters" else 0):  # the first one gathers anew after a save
        if trainer.args.process_index == number % 2:
            weight.ds_tensor.data.mul_(1.5)
        trainer.evaluate()
    losses = [entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry]
    trainer.save_model(str(saved))
    return losses, steps, trainer.model_wrapped


def with_callback(folder: Path) -> None:
    """Train with the callback and a reporter before it; each step saves half a second."""
    import torch.distributed as dist
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from ds_zipccl import ZipcclCallback
    from ds_zipccl.telemetry import counters, monitor

    reported: list[dict[str, float]] = []

    class Reporter(TrainerCallback):
        def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
            reported.append(dict(logs))

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            counters.record_saved("steps", 0.5)

    arguments = TrainingArguments(
        output_dir=str(folder / "out"), per_device_train_batch_size=2, max_steps=STEPS, logging_steps=1, eval_strategy="steps",
        eval_steps=2, save_strategy="no", bf16=True, use_cpu=True, deepspeed=CONFIG | section("whole"), report_to=[],
        disable_tqdm=True, learning_rate=1e-3,
    )  # fmt: skip
    data = {"train_dataset": make_data(), "eval_dataset": make_data(8)}
    trainer = Trainer(model=load_model(folder, "whole"), args=arguments, callbacks=[Reporter()], **data)
    ZipcclCallback.add_to(trainer)
    trainer.train()
    if dist.get_rank() == 0:
        found = {
            "history": trainer.state.log_history,
            "reported": reported,
            "events": [one[:2] for one in monitor.events(1)],
        }
        (folder / "results.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def with_accelerate(saved: Path, model: Any, models: str, read: Any, resume: bool) -> tuple[list[float], Any, Any]:
    """Train with Accelerate: adapters with ZeRO-3, whole models with ZeRO-2."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim
    from torch.utils.data import DataLoader

    config = CONFIG | section(models) | {"train_micro_batch_size_per_gpu": 2}
    if models == "whole":
        config["zero_optimization"] = {"stage": 2}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    optimizer = DummyOptim([one for one in model.parameters() if one.requires_grad])
    engine, _, loader = accelerator.prepare(model, optimizer, DataLoader(make_data(), batch_size=2))
    losses, steps = [], []
    read()
    for _, batch in zip(range(STEPS), loader):
        loss = engine(**batch).loss
        accelerator.backward(loss)
        losses.append(loss.item())
        steps.append(read())
    states = {"state_dict": accelerator.get_state_dict(engine)}
    accelerator.unwrap_model(engine).save_pretrained(saved, is_main_process=accelerator.is_main_process, **states)
    return losses, steps, engine


if __name__ == "__main__":
    rank_program(Path(sys.argv[1]), sys.argv[2], "resume" in sys.argv)
