"""Sequence, tensor and pipeline parallelism on real engines, and ZeRO-3 with secondary shards: the bits of plain DeepSpeed."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron import Grid
from parallel import (
    BATCH,
    CONTEXT,
    STEPS,
    VOCABULARY,
    WIDTH,
    Lab,
    Trained,
    assert_trained,
    bits,
    each,
    fixture_of,
    rank_program,
    results,
)
from test_moe import native
from torch import nn

LAYERS, HEADS = 2, 4


def cross_entropy(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of predicting a function of each token."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), (7 * tokens + 1).flatten() % VOCABULARY)


class Layered(nn.Module):
    """Residual layers between an embedding and a head."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(layers)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return cross_entropy(self.head(x), tokens)


# ---- sequences -----------------------------------------------------------------------------------------------------


class Ulysses(nn.Module):
    """Attention over tokens of all ranks of a group, by DeepSpeed's DistributedAttention."""

    def __init__(self, group: Any) -> None:
        from deepspeed.sequence.layer import DistributedAttention

        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention = DistributedAttention(self.local, group, 2, 1)

    @staticmethod
    def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *unused: Any) -> torch.Tensor:
        mixed = nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return mixed.transpose(1, 2).contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(BATCH, -1, HEADS, 3 * WIDTH // HEADS).chunk(3, -1)
        return self.attention(q.contiguous(), k.contiguous(), v.contiguous(), batch_dim_idx=0).flatten(2)


def ulysses(lab: Lab, zero: int) -> None:
    group = dist.new_group(list(range(lab.ranks)))
    lab.start(Layered([Ulysses(group) for _ in range(LAYERS)]), zero)
    lab.train(lambda step: (lab.tokens(step),))


def llama(kv_heads: int = HEADS) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=kv_heads, use_cache=False, attn_implementation="sdpa",
        )
    )  # fmt: skip


def of_tokens(found: Any, tokens: torch.Tensor, *more: Any) -> torch.Tensor:
    return cross_entropy(found.logits, tokens)


def ulysses_of_transformers(lab: Lab, kv_heads: int) -> None:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        model = llama(kv_heads)
        mpu = UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model, core_attn_implementation="sdpa", sequence_parallel_size=lab.ranks,
            micro_batch_size=BATCH, seq_length_is_variable=True,
        )  # fmt: skip
        lab.start(
            model, {"stage": 3, "stage3_param_persistence_threshold": 0}, mpu=mpu, sequence_parallel_size=lab.ranks
        )
        places = torch.arange(lab.rank * CONTEXT, (lab.rank + 1) * CONTEXT).expand(BATCH, -1)
        lab.train(lambda step: (lab.tokens(step), None, places), of_tokens)
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = own


# ---- tensors -------------------------------------------------------------------------------------------------------


def auto_tp(lab: Lab, zero: int = 1, size: int = 2, checkpointing: dict[str, Any] | None = None, **more: Any) -> None:
    model = llama()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    lab.start(model, zero, tensor_parallel={"autotp_size": size, **more})
    lab.train(lambda step: (lab.tokens(step, lab.rank // size),), of_tokens)


class Domino(nn.Module):
    """DeepSpeed's Domino transformer, called as a layer."""

    def __init__(self, mpu: Grid, intra: bool) -> None:
        from deepspeed.runtime.domino import async_linear
        from deepspeed.runtime.domino.transformer import DominoTransformer, ModelType

        super().__init__()
        async_linear.TP_group = None  # of an earlier case

        def init(weight: torch.Tensor) -> None:
            nn.init.normal_(weight, std=0.02)

        config = SimpleNamespace(
            hidden_size=WIDTH, ffn_hidden_size=2 * WIDTH, num_layers=LAYERS, num_attention_heads=HEADS,
            kv_channels=WIDTH // HEADS, layernorm_epsilon=1e-5, apply_residual_connection_post_layernorm=False,
            attention_dropout=0.0, hidden_dropout=0.0, gated_linear_unit=False, add_bias_linear=True,
            params_dtype=torch.bfloat16, perform_initialization=True, init_method=init,
            output_layer_init_method=init, domino_intra_layer_overlap=intra,
        )  # fmt: skip
        self.inner = DominoTransformer(config, mpu, None, ModelType.encoder_or_decoder)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.inner(x.transpose(0, 1).contiguous(), None)
        return found.transpose(0, 1)


def domino(lab: Lab, intra: bool) -> None:
    """An engine whose layers overlap inside gets no mpu: DeepSpeed does not know the group."""
    mpu = Grid(2)
    lab.start(Layered([Domino(mpu, intra)]), 1, **({} if intra else {"mpu": mpu}))
    lab.train(lambda step: (lab.tokens(step, lab.rank // 2),))


# ---- layers --------------------------------------------------------------------------------------------------------


class Words(nn.Embedding):
    """The first stage of a pipeline; hands on the mask, if there is one."""

    def forward(self, given: Any) -> Any:  # type: ignore[override]
        return (super().forward(given[0]), given[1]) if isinstance(given, tuple) else super().forward(given)


class Middle(nn.Linear):
    def forward(self, given: Any) -> Any:  # type: ignore[override]
        x, mask = given if isinstance(given, tuple) else (given, None)
        y = x + torch.relu(super().forward(x))
        return y if mask is None else (y.masked_fill(mask, 0.5), mask)


class Head(nn.Linear):
    def forward(self, given: Any) -> torch.Tensor:  # type: ignore[override]
        return super().forward(given[0] if isinstance(given, tuple) else given)


def pipeline(lab: Lab, zero: int, mask: bool, tied: bool = False) -> None:
    """``tied``: a layer of each stage has the same weights, whose gradients are added over both."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    ends = TiedLayerSpec("ends", Middle, WIDTH, WIDTH) if tied else LayerSpec(Middle, WIDTH, WIDTH)
    middle = [ends, *(LayerSpec(Middle, WIDTH, WIDTH) for _ in range(2)), ends]
    specs = [LayerSpec(Words, VOCABULARY, WIDTH), *middle, LayerSpec(Head, WIDTH, VOCABULARY)]
    model = PipelineModule(specs, num_stages=2, loss_fn=cross_entropy, partition_method="uniform")
    engine = lab.start(model, zero, gradient_accumulation_steps=4, gradient_clipping=0.0)

    masked = torch.arange(BATCH * CONTEXT * WIDTH).view(BATCH, CONTEXT, WIDTH) % 7 == 0

    def batches() -> Iterator[Any]:
        for step in range(4 * STEPS):
            tokens = lab.tokens(step, engine.grid.get_data_parallel_id())
            yield ((tokens, masked) if mask else tokens), tokens

    data = batches()
    for _ in range(STEPS):
        lab.losses.append(engine.train_batch(data).item().hex())


class Numbers(nn.Linear):
    """A layer that hands on numbers and factors too. DeepSpeed receives the gradients of the factors in the memory of the numbers."""

    def forward(self, given: Any) -> Any:  # type: ignore[override]
        if not isinstance(given, tuple):
            given = given, torch.arange(4096), torch.ones(2, WIDTH, dtype=given.dtype, requires_grad=True)
        x, numbers, factors = given
        return super().forward(x) * factors[:1], numbers, factors


class Mean(nn.Module):
    def forward(self, given: Any) -> torch.Tensor:
        return given[0].float().pow(2).mean()


def numbers(lab: Lab) -> None:
    from deepspeed.pipe import PipelineModule

    layers = [*(Numbers(WIDTH, WIDTH) for _ in range(6)), Mean()]
    model = PipelineModule(layers, num_stages=3, loss_fn=lambda found, _: found)
    engine = lab.start(model, 0, gradient_accumulation_steps=2, gradient_clipping=0.0)
    for step in range(STEPS):
        x = torch.full((BATCH, WIDTH), 1.0 + step).bfloat16()
        lab.losses.append(engine.train_batch(iter([(x, x)] * 2)).item().hex())


class Unlike(nn.Module):
    """Ranks use two layers in another order, or, with ``heads``, one of them each: sums of DeepSpeed mix their gradients up."""

    def __init__(self, heads: bool) -> None:
        super().__init__()
        self.trunk, self.heads = nn.Linear(WIDTH, WIDTH), heads
        self.ends = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=heads or not turn) for turn in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, ends = self.trunk(x), list(self.ends)[:: 1 - 2 * (dist.get_rank() % 2)]
        for layer in ends[: 1 if self.heads else 2]:
            x = layer(x)
        return x.float().pow(2).mean()


def unlike(lab: Lab, heads: bool, bucket: int = 10_000_000) -> None:
    lab.start(Unlike(heads), {"stage": 2, "reduce_bucket_size": bucket})
    lab.train(lambda step: (torch.full((BATCH, WIDTH), 1.0 + step + lab.rank).bfloat16(),))


def secondary(lab: Lab) -> None:
    lab.start(llama(), {"stage": 3, "zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0})
    lab.train(lambda step: (lab.tokens(step),), of_tokens)


Case = Callable[[Lab], None]
make = functools.partial
EXCHANGES, SUMS, GATHERS, OWNERS = "all_to_all_single", "all_reduce", "all_gather_into_tensor", "reduce_to_owners"
ULYSSES, LLAMA, TENSORS = {"sp": {EXCHANGES}}, {"sp": {EXCHANGES, "all_gather"}}, {"tp": {SUMS, GATHERS}}
DOMINO, STAGES = {"tp": {SUMS}}, {"pp": {"send", "recv", SUMS, "broadcast"}}
#: Ranks -> cases, each with the operations by role, without those of data; and the operations that must be coded.
CASES: dict[int, dict[str, tuple[Case, dict[str, set[str]], set[str]]]] = {
    2: {
        "ulysses zero1": (make(ulysses, zero=1), ULYSSES, {EXCHANGES, OWNERS, GATHERS}),
        "ulysses zero3": (make(ulysses, zero=3), ULYSSES, {EXCHANGES}),
        "ulysses of transformers": (make(ulysses_of_transformers, kv_heads=HEADS), LLAMA, {EXCHANGES, GATHERS}),
        "autotp zero1": (make(auto_tp), TENSORS, {SUMS}),
        "autotp zero2 overlap": (make(auto_tp, zero=2, tp_overlap_comm=True), TENSORS, {SUMS}),
        "autotp checkpointing": (make(auto_tp, checkpointing={"use_reentrant": True}), TENSORS, {SUMS}),
        "domino": (make(domino, intra=False), DOMINO, {SUMS}),
        "domino inside layers": (make(domino, intra=True), DOMINO, {SUMS}),
        "pipeline": (make(pipeline, zero=0, mask=False), STAGES, {"send"}),
        "pipeline mask": (make(pipeline, zero=1, mask=True), STAGES, {"send"}),
        "pipeline tied": (make(pipeline, zero=1, mask=False, tied=True), STAGES, {"send", SUMS}),
        "other orders": (make(unlike, heads=False), {}, {GATHERS}),
        "other heads": (make(unlike, heads=True), {}, {GATHERS}),
        "other heads, small buckets": (make(unlike, heads=True, bucket=WIDTH * WIDTH), {}, {GATHERS}),
    },
    3: {"pipeline of numbers": (numbers, STAGES, {"send"})},
    4: {
        "ulysses zero1": (make(ulysses, zero=1), ULYSSES, {EXCHANGES, OWNERS, GATHERS}),
        "ulysses of transformers, 2 kv heads": (make(ulysses_of_transformers, kv_heads=2), LLAMA, {EXCHANGES, GATHERS}),
        "autotp 4": (make(auto_tp, size=4), TENSORS, {SUMS}),
        "autotp 2 of 4, zero2": (make(auto_tp, zero=2), TENSORS, {SUMS, OWNERS, GATHERS}),
        "domino 2 of 4": (make(domino, intra=False), DOMINO, {SUMS, OWNERS}),
        "pipeline of 2 stages, zero1": (make(pipeline, zero=1, mask=True), STAGES, {"send", GATHERS}),
        "secondary shards": (secondary, {}, {GATHERS, "reduce_scatter_tensor"}),
    },
}
#: Cases of the short tier, on two ranks.
SHORT = [(2, name) for name in ("ulysses zero1", "domino", "pipeline mask", "other orders", "other heads")]

trained = fixture_of(__file__, CASES)


@each(CASES, SHORT)
def test_always_has_the_bits_of_plain_runs_and_each_call_the_role_of_its_group(
    trained: Trained, ranks: int, name: str
) -> None:
    plain, always = trained(ranks, "plain")[name], trained(ranks, "always")[name]
    _, roles, coded = CASES[ranks][name]
    assert_trained(plain)
    assert not any(rank["calls"] for rank in plain)
    assert bits(always) == bits(plain)
    assert coded <= {name for rank in always for name in rank["calls"]}, [rank["calls"] for rank in always]
    for rank in always:
        assert {role: set(ops) for role, ops in rank["roles"].items()} == roles
        assert not rank["whole"] or name == "pipeline", "ZeRO's sums alone have owners"
    if name == "pipeline mask":  # the first stage sends activations and masks of 4 kB, the last one as many gradients
        first, last = (rank["sent"]["pp"] for rank in always)
        masks = 4 * STEPS * (32 + BATCH * CONTEXT * WIDTH // 8)
        assert first - last < masks + 500, "a mask goes as bits"


FULL = pytest.mark.full(reason="one more launch, of cases that only the full tier has")


@FULL
def test_wrong_bit_changes_the_result(trained: Trained, tmp_path: Path) -> None:
    """The tests above see a single wrong bit per message of one rank."""
    names = ["ulysses zero1", "autotp zero1", "domino", "pipeline"]
    wrong = results(__file__, 2, "wrong bit", tmp_path, names)
    for name in names:
        assert bits(wrong[name]) != bits(trained(2, "plain")[name])


@FULL
def test_a_mode_reaches_all_calls_of_its_role(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Only data parallelism is coded. The plain run has the same cases: DeepSpeed's AutoTP changes the weights of later models."""
    names = ["ulysses zero1", "domino", "pipeline tied", "experts"]
    plain, found = (
        results(__file__, 2, mode, tmp_path_factory.mktemp("modes"), names) for mode in ("plain", "data alone")
    )
    for name in names:
        assert bits(found[name]) == bits(plain[name]), name
        for rank in found[name]:
            assert set(rank["calls"]) <= {OWNERS, GATHERS}, name
            assert set(rank["roles"]) == ({"ep"} if name == "experts" else set(CASES[2][name][1])), name


if __name__ == "__main__":
    rank_program({name: run for name, (run, *_) in CASES[int(os.environ["WORLD_SIZE"])].items()} | {"experts": native})
