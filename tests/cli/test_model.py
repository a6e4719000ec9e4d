"""``--model``, ``--adapter`` and ``--ds-config`` of ``plan``: parameters as transformers and peft count them, and the options of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import assert_refused, outcome

from ds_zipccl.cli import ToolError
from ds_zipccl.cli.planning import model

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
MOE = LLAMA | {"hidden_size": 2048, "num_hidden_layers": 8, "num_experts_per_tok": 2, "head_dim": 128}
#: Configs with the sizes of published models or with their keys, and what a token uses of all parameters.
MODELS: dict[str, dict[str, Any]] = {
    "llama 8B": LLAMA,
    "llama 1B": LLAMA | {"hidden_size": 2048, "num_hidden_layers": 16, "head_dim": 64, "tie_word_embeddings": True},
    "llama of old": {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"},
    "llama with biases": LLAMA | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": None},
    "mistral 12B": LLAMA | {"model_type": "mistral", "hidden_size": 5120, "num_hidden_layers": 40, "head_dim": 128},
    "qwen2": LLAMA | {"model_type": "qwen2", "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2},
    "qwen3": LLAMA | {"model_type": "qwen3", "hidden_size": 1024, "attention_bias": True},
    "qwen3_moe": MOE | {"model_type": "qwen3_moe", "moe_intermediate_size": 768, "num_experts": 128},
    "qwen3_moe, some layers": MOE | {
        "model_type": "qwen3_moe", "moe_intermediate_size": 768, "num_experts": 16, "decoder_sparse_step": 2, "mlp_only_layers": [3]
    },
    "mixtral": MOE | {"model_type": "mixtral", "num_local_experts": 8},
    "gpt2": {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257},
    "gpt_neox": LLAMA | {"model_type": "gpt_neox"},
    "gpt_neox, tied": LLAMA | {"model_type": "gpt_neox", "attention_bias": False, "tie_word_embeddings": True},
}  # fmt: skip


def written(folder: Path, content: dict[str, Any], name: str = model.FILE) -> str:
    (folder / name).write_text(json.dumps(content))
    return str(folder / name)


def instance(folder: Path) -> torch.nn.Module:
    """The model of the config in a folder, without memory for its weights."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))


def numel(module: torch.nn.Module, trained: bool = False) -> int:
    return sum(one.numel() for one in module.parameters() if one.requires_grad or not trained)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_that_transformers_makes(name: str, tmp_path: Path) -> None:
    found = model.read(written(tmp_path, MODELS[name]))
    made = instance(tmp_path)
    assert found.params == numel(made)
    unused = 0  # of each layer of experts, those that a token does not use
    for module in made.modules():
        if hasattr(module, "gate_up_proj") and hasattr(module, "num_experts"):
            unused += numel(module) * (module.num_experts - found.experts[1]) // module.num_experts
    assert found.active == found.params - unused
    assert bool(unused) == bool(found.experts[0]) == ("moe" in name or name == "mixtral")


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama 8B", {"target_modules": ["q_proj", "v_proj"]}),
        ("llama 8B", {"target_modules": "all-linear", "use_dora": True}),
        ("llama 1B", {"target_modules": r".*\.(self_attn|mlp)\.(q|down)_proj", "r": 64}),
        ("qwen3_moe", {"target_modules": ["q_proj", "o_proj"]}),
        ("gpt2", {"target_modules": ["c_attn", "c_proj"]}),
        ("gpt_neox", {"target_modules": "all-linear"}),
    ],
)
def test_adapters_are_those_that_peft_makes(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    found = model.read(written(tmp_path, MODELS[name]))
    adapted = peft.get_peft_model(instance(tmp_path), peft.LoraConfig(**{"r": 8, "task_type": "CAUSAL_LM"} | more))
    (tmp_path / "out").mkdir()
    adapted.peft_config["default"].save_pretrained(tmp_path / "out")
    trained, said = model.adapter(str(tmp_path / "out"), found)
    assert trained == numel(adapted, trained=True)
    assert found.params + trained == numel(adapted)
    assert f"LoRA of rank {more.get('r', 8)} on " in said


@pytest.mark.parametrize(
    ("content", "adapter", "complaint"),
    [
        ({"vocab_size": None}, None, 'has no key "vocab_size"; give --params in place of --model'),
        ({"model_type": "mamba"}, None, "\"model_type\" is 'mamba', known are gpt2, gpt_neox, llama, mistral"),
        ({"model_type": "mistral", "num_key_value_heads": None}, None, 'has no key "num_key_value_heads"'),
        ({"hidden_size": "auto"}, None, 'hidden_size must be a whole number of at least 1'),
        ({}, {"r": None}, 'has no key "r"; give --trainable in place of --adapter'),
        ({}, {"peft_type": "IA3"}, "no size is known of peft_type 'IA3'; give --trainable"),
        ({}, {"rank_pattern": {"q_proj": 4}}, "no size is known of rank_pattern {'q_proj': 4}"),
        ({}, {"target_modules": ["c_attn"]}, "target_modules ['c_attn'], that the layers of llama do not have"),
        ({}, {"modules_to_save": ["lm_head"]}, "no size is known of modules_to_save ['lm_head']"),
        ({}, {"target_modules": "("}, "target_modules is no regular expression"),
        ({"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}, {"target_modules": ["w1"]}, "in experts"),
    ],
)  # fmt: skip
def test_files_without_a_size(
    content: dict[str, Any], adapter: dict[str, Any] | None, complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ToolError) as error:
        found = model.read(written(tmp_path, LLAMA | content))
        usual = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}
        model.adapter(written(tmp_path, usual | (adapter or {}), model.ADAPTER), found)
    assert complaint in str(error.value)


JOB = {
    "bf16": {"enabled": True},
    "gradient_accumulation_steps": 4,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1e9, "round_robin_gradients": True},
    "zipccl": {"enabled": True, "delta": "off"},
}


def test_a_plan_of_a_job_from_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files stand for options, and an option precedes a file."""
    files = f"plan --ds-config {written(tmp_path, JOB, 'ds.json')} --model {written(tmp_path, LLAMA)}"
    network = " --gpus 16 --network 100gbit/node"
    found = outcome(tmp_path, files + network)
    options = "plan --params 8030261248 --zero 2 --accumulation 4 --round-robin --delta off --bucket 2e9"
    rows = outcome(tmp_path, options + network)["rows"]
    gradients = [row for row in found["rows"] if row["what"] == "gradients"]
    assert gradients == [row for row in rows if row["what"] == "gradients"] and gradients[0]["calls"] == 4 * 9
    said = capsys.readouterr().out
    assert (
        "model: llama, 32 layers of width 4,096, 8.03e+09 parameters\n" in said
        and "ZeRO-2, bfloat16, accumulation 4" in said
    )
    fewer = outcome(tmp_path, f"{files} --accumulation 1 --params 1e9{network}")["rows"]
    assert fewer[0]["calls"] == 1
    written(tmp_path, {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}, model.ADAPTER)
    adapted = outcome(tmp_path, files + network)["rows"]
    assert (
        f"LoRA of rank 8 on 32 modules, 2.097e+06 parameters, by {tmp_path / model.ADAPTER}" in capsys.readouterr().out
    )
    assert adapted[0]["calls"] == 4 and adapted[0]["ms"] < gradients[0]["ms"] / 1000


def test_computing_is_of_the_parameters_that_a_token_uses(tmp_path: Path) -> None:
    path = written(tmp_path, MODELS["mixtral"])
    found, network = model.read(path), "--gpus 16 --network 100gbit/node --tflops 400 --tokens 4096"
    steps = outcome(tmp_path, f"plan --model {path} {network}")["steps"]
    whole = outcome(tmp_path, f"plan --params {found.params} {network}")["steps"]
    assert steps[0]["ms"] == whole[0]["ms"]
    share = steps[0]["computing_ms"] / whole[0]["computing_ms"]
    assert share == pytest.approx(found.active / found.params) and share < 0.5


def test_jobs_that_no_model_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, JOB | {"zero_optimization": {"stage": 0}}, "ds.json")
    words = f"plan --ds-config {path} --params 1e9 --gpus 16 --network 100gbit/node"
    assert_refused(words.split(), "ZeRO stage 0 has no prediction", capsys)
