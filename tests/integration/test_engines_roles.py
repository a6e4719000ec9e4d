"""Real engines whose collectives are of tensors, sequences, experts and pipelines: each call has the role of its group.

The ways to train such models, and their bits against plain communication, are the matter of other tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import ADAM, Lab, rank_program, sha256
from megatron import Grid
from programs import launch
from torch import nn

from ds_zipccl.telemetry import counters

WIDTH, TOKENS = 64, 32


def start(lab: Lab, model: Any, mpu: Any = None, zero: int = 2, **config: Any) -> Any:
    """Return a new engine, after all state that engines of earlier cases have left in DeepSpeed's module of groups is gone."""
    import deepspeed

    groups = deepspeed.utils.groups
    groups.mpu, groups._TENSOR_MODEL_PARALLEL_GROUP, groups.mesh_device = mpu, None, None
    params: Any = model.parameters()
    if any(getattr(param, "group_name", None) for param in model.parameters()):
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

        params = split({"params": list(params), "name": "all"})
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": zero},
        **config,
    }
    engine = deepspeed.initialize(model=model, model_parameters=params, mpu=mpu, config=settings)[0]
    lab.engines.append(engine)
    counters.reset()  # the start is not of interest
    return engine


def batch(lab: Lab) -> torch.Tensor:
    return torch.randn(2, TOKENS, WIDTH, generator=lab.batches).bfloat16()


def train(lab: Lab, engine: Any, loss: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
    for _ in range(2):
        found = (loss or engine)(batch(lab))
        lab.losses.append(found.item().hex())
        engine.backward(found)
        engine.step()
    end(lab)


def end(lab: Lab) -> None:
    rows: dict[str, Any] = {}
    for row in counters.rows():
        known = {key: row[key] for key in ("op", "kind", "calls", "passed", "ratio", "whole")}
        rows.setdefault(row["role"], []).append(known)
    lab.phases.append({"sha256": sha256(lab.engines[-1].module), "rows": rows})


class Experts(nn.Module):
    def __init__(self) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(WIDTH, expert, num_experts=4, ep_size=2, drop_tokens=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.moe(self.dense(batch))[0].float().square().mean()


def experts(lab: Lab) -> None:
    """Two expert groups of two ranks. The capacity is agreed in the expert group."""
    train(lab, start(lab, Experts(), zero=1))


def experts_and_tensors(lab: Lab) -> None:
    """Two ranks that share tensors drop half of the tokens before experts, and gather the other half after them."""
    import deepspeed

    deepspeed.utils.groups.mpu = mpu = Grid(2)  # the layer of experts asks at its making
    for known in (deepspeed.utils.groups._EXPERT_PARALLEL_GROUP, deepspeed.utils.groups._EXPERT_DATA_PARALLEL_GROUP):
        known.clear()
    train(lab, start(lab, Experts(), mpu))


class Domino(nn.Module):
    def __init__(self, mpu: Any) -> None:
        from deepspeed.runtime.domino import transformer

        super().__init__()
        config = SimpleNamespace(
            params_dtype=torch.float32, kv_channels=16, num_attention_heads=4, hidden_size=WIDTH, ffn_hidden_size=2 * WIDTH,
            init_method=nn.init.xavier_normal_, output_layer_init_method=nn.init.xavier_normal_, perform_initialization=True,
            add_bias_linear=True, gated_linear_unit=False, attention_dropout=0.0, hidden_dropout=0.0, layernorm_epsilon=1e-5,
            num_layers=2, apply_residual_connection_post_layernorm=False, domino_intra_layer_overlap=False,
        )  # fmt: skip
        self.body = transformer.DominoTransformer(config, mpu, None, transformer.ModelType.encoder_or_decoder)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.body(batch.transpose(0, 1).contiguous(), None).float().square().mean()


def domino(lab: Lab) -> None:
    """The engine gets no mpu: DeepSpeed does not know the group."""
    train(lab, start(lab, Domino(Grid(2))))


def ulysses(lab: Lab) -> None:
    """The mpu is the module of Ulysses' groups, which names the sequence group as that of the whole model too."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from tiny_llama import llama

    model = llama(num_key_value_heads=4)
    model.config._attn_implementation = "sdpa"
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model, "sdpa", sequence_parallel_size=2, micro_batch_size=1, seq_length_is_variable=True
    )
    engine = start(lab, model, mpu, zero=3)
    places = torch.arange(TOKENS).view(1, -1) + TOKENS * lab.rank

    def loss(rows: torch.Tensor) -> torch.Tensor:
        tokens = rows[:1, :, 0].abs().mul(10).long()
        return engine(input_ids=tokens, position_ids=places).logits.float().square().mean()  # type: ignore[no-any-return]

    train(lab, engine, loss)


def folding(lab: Lab) -> None:
    """AutoEP and AutoTP over the same two ranks."""
    from deepspeed.module_inject.auto_ep_presets import base
    from transformers import MixtralConfig, MixtralForCausalLM

    # DeepSpeed 0.19.8 cannot move the recorders of router logits of transformers 5.23; nobody reads them here
    base._retarget_transformers_output_recorders_for_modules = lambda **model: 0
    torch.manual_seed(1)
    shape = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=256, use_cache=False, **shape, **experts))
    parts = {"column": r".*self_attn\.[qkv]_proj\.weight$", "row": r".*self_attn\.o_proj\.weight$"}
    specs = [{"patterns": [pattern], "partition_type": kind} for kind, pattern in parts.items()]
    tensors = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": specs}}
    experts_section = {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}
    lab.batches.manual_seed(10)  # ranks of a tensor group have the same data
    engine = start(lab, model, tensor_parallel=tensors, expert_parallel=experts_section)

    def loss(rows: torch.Tensor) -> torch.Tensor:
        tokens = rows[..., 0].abs().mul(10).long()
        return engine(input_ids=tokens).logits.float().square().mean()  # type: ignore[no-any-return]

    train(lab, engine, loss)


def pipeline(lab: Lab) -> None:
    """The first layer and the last one have the same weights, whose gradients are added over both stages."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    def loss(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return (found - wanted).float().square().mean()

    tied = TiedLayerSpec("ends", nn.Linear, WIDTH, WIDTH)
    layers = [tied, *(LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(2)), tied]
    model = PipelineModule(layers, num_stages=2, loss_fn=loss, partition_method="uniform")
    engine = start(lab, model, zero=1, gradient_accumulation_steps=2)
    for _ in range(2):
        lab.losses.append(engine.train_batch(iter([(batch(lab), batch(lab)) for _ in range(2)])).item().hex())
    end(lab)


#: Case on two ranks -> role -> operations with messages of a role that is not one of data.
ON_TWO: dict[str, tuple[Callable[[Any], None], dict[str, set[str]]]] = {
    "domino": (domino, {"tp": {"all_reduce"}}),
    "folding": (folding, {"tp": {"all_reduce", "all_gather"}, "ep": {"all_to_all_single"}}),
    "pipeline": (pipeline, {"pp": {"all_reduce", "broadcast", "send", "recv"}}),
    # the last one, as it changes the attention of all later models
    "ulysses": (ulysses, {"sp": {"all_to_all_single", "all_gather"}}),
}
ON_FOUR: dict[str, tuple[Callable[[Any], None], dict[str, set[str]]]] = {
    "experts": (experts, {"ep": {"all_to_all_single", "all_reduce"}}),
    "experts_and_tensors": (
        experts_and_tensors,
        {"ep": {"all_to_all_single", "all_reduce"}, "tp": {"all_gather_into_tensor", "all_reduce"}},
    ),
}
#: Operations of ZeRO by role; a role of data has no others but small ones.
OF_DATA = {
    "zero_param": {"all_gather_into_tensor"},
    "zero_grad": {"all_reduce", "reduce_to_owners", "reduce_scatter_tensor"},
}


def run(folder: Path, ranks: int, **section: Any) -> dict[str, Any]:
    on = json.dumps({"enabled": True, "mode": "always", "min_bytes": 1024, "log_interval": 0, **section})
    return launch(__file__, ranks, folder, *(ON_TWO if ranks == 2 else ON_FOUR), DS_ZIPCCL=on)


def check(ranks: list[dict[str, Any]], wanted: dict[str, set[str]]) -> None:
    """Check the roles of all calls of a case, and that no sum lacks the owners of its slices."""
    for rows in (rank["phases"][0]["rows"] for rank in ranks):
        found = {role: {row["op"] for row in some if row["calls"] or row["passed"]} for role, some in rows.items()}
        assert {role: ops for role, ops in found.items() if role not in OF_DATA and role != "dp"} == wanted
        assert all(found.get(role, set()) <= ops for role, ops in OF_DATA.items()), found
        assert not any(row["whole"] for some in rows.values() for row in some), rows


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("two"), 2)


@pytest.mark.full(reason="four kinds of engines take ten seconds")
@pytest.mark.parametrize("name", ON_TWO)
def test_roles_on_two_ranks(on_two: dict[str, Any], name: str) -> None:
    check(on_two[name], ON_TWO[name][1])


@pytest.mark.full(reason="four kinds of engines take ten seconds")
def test_a_mode_reaches_all_calls_of_its_role(on_two: dict[str, Any], tmp_path: Path) -> None:
    """The bits of training are those of coded runs."""
    plain = run(tmp_path, 2, roles=dict.fromkeys(("tp", "sp", "pp", "ep"), "never"))
    for name, (_, wanted) in ON_TWO.items():
        for rank, coded in zip(plain[name], on_two[name], strict=True):
            assert rank["losses"] == coded["losses"] and rank["phases"][0]["sha256"] == coded["phases"][0]["sha256"]
            for role in wanted:
                rows, once = rank["phases"][0]["rows"][role], coded["phases"][0]["rows"][role]
                assert not any(row["calls"] for row in rows) and any(row["calls"] for row in once), (name, role)


@pytest.mark.full(reason="four kinds of engines take ten seconds")
def test_equal_sums_of_folding_travel_as_hashes(on_two: dict[str, Any]) -> None:
    """The test above compares the bits."""
    for rank in on_two["folding"]:
        rows = {row["kind"]: row for row in rank["phases"][0]["rows"]["tp"] if row["op"] == "all_reduce"}
        assert rows["replicated"]["calls"] == 16 and rows["replicated"]["ratio"] > 50, rows
        assert rows[""]["calls"] == 20 and rows[""]["ratio"] < 2, rows


@pytest.mark.full(reason="four ranks take ten seconds")
def test_roles_on_four_ranks(tmp_path: Path) -> None:
    found = run(tmp_path, 4)
    for name, (_, wanted) in ON_FOUR.items():
        check(found[name], wanted)


if __name__ == "__main__":
    rank_program({name: case for name, (case, _) in (ON_TWO | ON_FOUR).items()})
