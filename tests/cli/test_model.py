"""``--model``, ``--adapter`` and ``--ds-config`` of ``plan``: parameters as transformers and peft count them, and the options of a job."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from commands import Capture, assert_refused, outcome

from ds_zipccl.cli import doctor
from ds_zipccl.cli.planning import model, user_job
from ds_zipccl.policy.cost_model import EXCHANGE_S, NVLINK, RDMA_REACH
from ds_zipccl.tools import ToolError

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
        ({}, {"target_modules": "([a-z0-9._]+)+!"}, "it did not end in 3 seconds; give --trainable"),
        ({"num_hidden_layers": 3e8}, None, "got 300,000,000 layers, at most 100,000 are planned for"),
        ({"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}, {"target_modules": ["w1"]}, "in experts"),
    ],
)  # fmt: skip
def test_files_without_a_size(
    content: dict[str, Any],
    adapter: dict[str, Any] | None,
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model, "MATCH_SECONDS", 3)
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


def test_a_plan_of_a_job_from_its_files(tmp_path: Path, capsys: Capture) -> None:
    """The files stand for options, and an option precedes a file. An adapter counts where it is named."""
    job = JOB | {"zipccl": {"enabled": True, "delta": "off", "nccl": "on"}}
    files = f"plan --ds-config {written(tmp_path, job, 'ds.json')} --model {written(tmp_path, LLAMA)}"
    network = " --gpus 16 --network 100gbit/node"
    found = outcome(tmp_path, files + network)
    options = "plan --params 8030261248 --zero 2 --accumulation 4 --round-robin --delta off --bucket 2e9"
    rows = outcome(tmp_path, options + network)["rows"]
    gradients = [row for row in found["rows"] if row["what"] == "gradients"]
    assert gradients == [row for row in rows if row["what"] == "gradients"] and gradients[0]["calls"] == 4 * 9
    said = capsys.readouterr().out
    assert "model: llama, 32 layers of width 4,096, 8.03e+09 parameters\n" in said
    assert "ZeRO-2, bfloat16, accumulation 4" in said
    fewer = outcome(tmp_path, f"{files} --accumulation 1 --params 1e9 --zero 3{network}")["rows"]
    assert (fewer[0]["calls"], fewer[0]["what"]) == (20, "parameters, forward")
    path = written(tmp_path, {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}, model.ADAPTER)
    capsys.readouterr()
    assert outcome(tmp_path, files + network)["rows"] == found["rows"]
    assert f"8.03e+09 parameters; all are trained: for LoRA add --adapter {path}\n" in capsys.readouterr().out
    adapted = outcome(tmp_path, f"{files} --adapter {path}{network}")["rows"]
    assert f"LoRA of rank 8 on 32 modules, 2.097e+06 parameters, by {path}" in capsys.readouterr().out
    assert adapted[0]["calls"] == 4 and adapted[0]["ms"] < gradients[0]["ms"] / 1000
    written(tmp_path, JOB | {"zero_optimization": {"stage": 0}}, "ds.json")
    assert_refused((files + network).split(), "ZeRO stage 0 has no prediction", capsys)


NCCL, FAST = "--network 100gbit/node", "--network 8x400gbit/node"


@pytest.mark.parametrize(
    ("section", "place", "how", "said"),
    [  # how: of gradients, of parameters
        ({}, NCCL, "coded coded", 'with the default config 0.'),
        ({"nccl": "on"}, NCCL, "coded coded", '), with "nccl": "on" 0.'),
        ({"reduction": "plain"}, NCCL, "plain coded", 'with "reduction": "plain" 0.'),
        ({"nccl": "off"}, NCCL, "plain plain", 'with "nccl": "off" as long\n'),
        ({"mode": "never"}, NCCL, "plain plain", 'with "mode": "never" as long'),
        ({"reduction": "fp32"}, NCCL, "coded coded", 'with "reduction": "fp32" 0.'),
        ({"nccl": "on", "roles": {"zero_param": "never"}}, NCCL, "coded plain", '"roles": {"zero_param": "never"}'),
        ({"nccl": "on"}, FAST, "plain plain", 'with "nccl": "on" as long\n'),
        ({"nccl": "on", "mode": "always"}, FAST, "coded coded", 'with "mode": "always" and "nccl": "on" '),
        ({"enabled": False}, NCCL, "plain plain", 'with "enabled": false as long'),
        ({"mode": "never", "roles": {"zero_grad": "always"}, "nccl": "on"}, NCCL, "coded plain", 'with "mode": "never" and "roles": '),
        # Messages of gathers have 100 MB, of gradients 1 GB.
        ({"min_bytes": 1 << 28, "reduction": "fp32"}, NCCL, "coded plain", '"min_bytes": 268435456'),
        ({"nccl_min_bytes": 1 << 30, "nccl": "on"}, NCCL, "plain plain", 'and "nccl_min_bytes": 1073741824'),
        ({"reduction": "match"}, f"{NCCL} --gpu-profile assumed-1.0", "plain coded", '"match" 0.225 s (1.41 times less)'),
        ({"zero3_base_mib": 572}, f"{NCCL} --trainable 1e8", "coded coded", "as far as zero3_base_mib (572 MiB) allows; the rest is"),
        ({"reduction": "match", "nccl": "on", "mode": "never"}, NCCL, "plain plain", '"mode": "never" and "reduction": "match"'),
    ],
)  # fmt: skip
def test_the_section_decides(section: dict[str, Any], place: str, how: str, said: str, tmp_path: Path, capsys: Any) -> None:  # fmt: skip
    job = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "zipccl": {"enabled": True} | section}
    words = f"plan --ds-config {written(tmp_path, job, 'ds.json')} --params 1e9 --gpus 16 {place}"
    coded = {row["what"]: row["how"] for row in outcome(tmp_path, words)["rows"] if row["variant"] == "coded"}
    assert f"{coded['gradients']} {coded['parameters, forward']}" == how
    assert said in capsys.readouterr().out


BATCH = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        (BATCH, 2),
        (BATCH | {"sequence_parallel_size": 4}, 8),
        (BATCH | {"tensor_parallel": {"autotp_size": 2}}, 4),
        (BATCH | {"gradient_accumulation_steps": 3}, 3),
        (BATCH | {"train_batch_size": "auto"}, 1),
    ],
)
def test_micro_batches_follow_from_batch_sizes(keys: dict[str, Any], wanted: int, tmp_path: Path) -> None:
    assert user_job.read(written(tmp_path, keys), 16).accumulation == wanted
    with pytest.raises(ToolError, match="train_batch_size is 63, wanted is train_micro_batch_size_per_gpu x 16 data"):
        user_job.read(written(tmp_path, BATCH | {"train_batch_size": 63}), 16)


def test_computing_is_of_the_parameters_that_a_token_uses(tmp_path: Path) -> None:
    path = written(tmp_path, MODELS["mixtral"])
    found, network = model.read(path), "--gpus 16 --network 100gbit/node --tflops 400 --tokens 4096"
    steps = outcome(tmp_path, f"plan --model {path} {network}")["steps"]
    whole = outcome(tmp_path, f"plan --params {found.params} {network}")["steps"]
    assert steps[0]["ms"] == whole[0]["ms"]
    share = steps[0]["computing_ms"] / whole[0]["computing_ms"]
    assert share == pytest.approx(found.active / found.params) and share < 0.5


@pytest.mark.parametrize(("shared", "same", "nodes"), [(4, 8, 1), (8, 4, 1), (16, 2, 2), (32, 1, 4)])
def test_ranks_share_experts_out(shared: int, same: int, nodes: int, tmp_path: Path, capsys: Any) -> None:
    """32 GPUs of 4 nodes. ``same``: GPUs with the same experts. ``nodes``: those whose GPUs hold all experts of a layer once."""
    path = written(tmp_path, MODELS["qwen3_moe"])
    job = written(tmp_path, JOB | {"expert_parallel": {"enabled": True, "autoep_size": shared}}, "ds.json")
    words = f"plan --ds-config {job} --model {path} --accumulation 1 --gpus 32 --tokens 1024"
    rows = outcome(tmp_path, f"{words} --network 8x100gbit/node --hop 0")["rows"]
    ms = {row["what"]: row["ms"] for row in rows if row["variant"] == "plain"}
    network, routed = 8 * 12.5e9 * RDMA_REACH / 1e3, 8 * 128 * 3 * 2048 * 768  # bytes in a ms, and parameters
    assert ms["gradients"] == pytest.approx(4 * (model.read(path).params - routed) * 31 / 32 / network)
    own = 2 * routed / shared * (same - 1) / same / (network * max(1, 8 // shared) / 8)
    assert [ms.get(f"experts, {what}", 0) for what in ("gradients", "parameters")] == pytest.approx([2 * own, own])
    sent = 2 * 1024 * 2 * 2048  # bytes of a rank in each of 4 exchanges of 8 layers
    each = 8 * sent * (nodes - 1) / nodes / network if nodes > 1 else sent * (shared - 1) / shared / NVLINK * 1e3
    assert ms["exchanges of experts"] == pytest.approx(4 * 8 * (1e3 * EXCHANGE_S + each))
    outcome(tmp_path, words.partition(" --tokens")[0] + " --network 8x100gbit/node")
    told = capsys.readouterr().out
    assert f"; {128 // shared} experts on every rank\n" in told and "tokens are not predicted without --tokens" in told


def test_jobs_that_are_refused(tmp_path: Path, capsys: Capture) -> None:
    fsdp2 = "FSDP2 takes ds_zipccl.fsdp.apply(model) in place of a config; plan --zero 3 predicts it, on NCCL"
    path = written(tmp_path, JOB | {"zero_optimization": {"stage": 0}}, "ds.json")
    assert_refused(f"plan --ds-config {path} --params 1e9 --gpus 16 {NCCL}".split(), fsdp2, capsys)


def test_auto_is_what_trainers_fill_in(tmp_path: Path) -> None:
    """Of Trainer by its own code; in the doctor and in the plan."""
    trainer = pytest.importorskip("transformers.integrations.deepspeed")
    zero = {"stage": 3} | dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size"), "auto")
    files = {"ds_config": written(tmp_path, {"zero_optimization": zero}, "ds.json"), "model": written(tmp_path, LLAMA)}
    job, _ = doctor._read(argparse.Namespace(**files, ranks=2, params=None, trainable=None, adapter=None))
    config = trainer.HfTrainerDeepSpeedConfig({"zero_optimization": zero})
    config.trainer_config_finalize(Mock(get_warmup_steps=int), Mock(config=Mock(hidden_size=4096)), 1)
    _, reduce, prefetch = config.config["zero_optimization"].values()
    assert job is not None and (job.buckets.reduce, job.buckets.prefetch) == (reduce, prefetch)
    assert f"{reduce} taken, as Trainer and Accelerate fill it in by hidden_size" in str(job.notes)
    words = f"plan --ds-config {files['ds_config']} --model {files['model']} --gpus 16 {NCCL}"
    assert -(-8030261248 // reduce) in {row["calls"] for row in outcome(tmp_path, words)["rows"]}
