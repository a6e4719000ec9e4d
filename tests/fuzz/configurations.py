"""Random configurations of ds_zipccl and DeepSpeed, each trained plain and coded: the same bits, or the same error of DeepSpeed.

make fuzz-config CONFIGS=100                      # seeds 0 to 99
make fuzz-config CONFIGS="1 --first 77"           # seed 77, with its configuration
make fuzz-config CONFIGS="1 --first 77 --minimise"  # fewer keys, as long as plain and coded differ

A seed is one configuration. Ranks of a launch train many, each in processes and a group of its own.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import engines
import forked
import torch
from programs import launch
from torch import nn

from ds_zipccl.config import KEYS, ROLES

#: Seconds of one configuration: beyond them it hangs.
LIMIT_S = 120.0
#: Configurations of one launch.
TOGETHER = 20
VOCABULARY, BATCH, CONTEXT = 64, 2, 8
#: Keys of the section whose values are not all drawn. Numba would compile for a minute; "never" alone tests nothing. Sums in fp32 have
#: the bits of plain on two ranks alone, see below.
SECTION: dict[str, Sequence[Any]] = {
    "mode": ("auto", "always", "always", "always"),
    "route": ("auto", "native", "cupy"),
    "zero3_base_mib": (0, 1, 64),
    "min_bytes": (0, 1024, 65536),
    "nccl_min_bytes": (0, 4194304),
    "staging_mib": (0, 1),
    "log_interval": (0, 1, 2),
    "step_log": ("", "steps.jsonl"),
    "roles": ({},),  # drawn below
}
#: Keys of the section "zero_optimization", the values of the commonest jobs among them.
ZERO: dict[str, Sequence[Any]] = {
    "contiguous_gradients": (True, False),
    "overlap_comm": (True, False),
    "reduce_scatter": (True, False),
    "reduce_bucket_size": (500, 5000, 50_000, 500_000_000),
    "allgather_bucket_size": (1000, 50_000, 500_000_000),
    "allgather_partitions": (True, False),
    "use_multi_rank_bucket_allreduce": (True, False),
    "round_robin_gradients": (True, False),
    "ignore_unused_parameters": (True, False),
    "load_from_fp32_weights": (True, False),
    "elastic_checkpoint": (False,) * 7 + (True,),
    "sub_group_size": (1000, 50_000, 1_000_000_000),
    "offload_optimizer": ({"device": "cpu"}, {"device": "none"}),
    "offload_param": ({"device": "cpu"}, {"device": "none"}),
    "stage3_param_persistence_threshold": (0, 100, 2000, 100_000),
    "stage3_prefetch_bucket_size": (0, 1000, 50_000_000),
    "stage3_max_live_parameters": (0, 5000, 1_000_000_000),
    "stage3_max_reuse_distance": (0, 5000, 1_000_000_000),
    "stage3_module_granularity_threshold": (0, 10_000),
    "stage3_use_all_reduce_for_fetch_params": (False, True),
    "stage3_allgather_sequential": (False, True),
    "zero_hpz_partition_size": (1, 2),
    "zero_quantized_weights": (False,) * 15 + (True,),
    "zero_quantized_nontrainable_weights": (False,) * 15 + (True,),
    "zero_quantized_gradients": (False,) * 15 + (True,),
    "memory_efficient_linear": (True, False),
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "bf16 whole": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
    "bf16 sums in fp32": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}},
    "fp32": {},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}
#: Of the whole config. An absent key has its default.
CONFIG: dict[str, Sequence[Any]] = {
    "gradient_accumulation_steps": (1, 2, 3),
    "gradient_clipping": (0.0, 0.1, 1.0),
    "communication_data_type": ("fp32", "bf16", "fp16"),
    "prescale_gradients": (True,),
    "gradient_predivide_factor": (2.0,),
    "disable_allgather": (True, False),
}
#: DeepSpeed's own kernels of optimizers would be compiled for minutes, and so are Muon's when they are imported.
OPTIMIZERS: tuple[dict[str, Any], ...] = (
    {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True, "weight_decay": 0.1}},
    {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}},
)
Drawn = dict[str, Any]


class Model(nn.Module):
    """Layers between an embedding and a head. ``kind``: one of :data:`MODELS`."""

    def __init__(self, kind: str, width: int, ranks: int) -> None:
        super().__init__()
        self.kind, self.words = kind, nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        if kind == "tied":
            self.head.weight = self.words.weight
        elif kind == "frozen":
            self.layers[:2].requires_grad_(False)
            self.words.requires_grad_(False)
        elif kind == "moe":
            from deepspeed.moe.layer import MoE

            expert = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            self.experts = MoE(width, expert, 2 * ranks, ranks, min_capacity=2)
        elif kind == "empty":
            self.nothing = nn.ParameterList(
                nn.Parameter(torch.empty(shape)) for shape in ((0,), (0, width), (width, 0))
            )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        if self.kind == "moe":
            x = x + self.experts(x)[0]
        elif self.kind == "empty":
            x = x + self.nothing[0].sum() + self.nothing[1].sum(0)  # the last one stays unused
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        return nn.functional.cross_entropy(logits, (7 * tokens + 1).flatten() % VOCABULARY)


MODELS = ("dense", "tied", "frozen", "moe", "empty")


def some(draw: random.Random, keys: dict[str, Sequence[Any]], share: float) -> dict[str, Any]:
    """Return some of the keys, ``share`` of them on average, with a value each."""
    return {key: copy.deepcopy(draw.choice(values)) for key, values in keys.items() if draw.random() < share}


def configuration(seed: int) -> Drawn:
    """Return the configuration of a seed: number of ranks, model, width, section and config of DeepSpeed."""
    draw = random.Random(seed)
    ranks = draw.choice((2, 2, 2, 3))
    keys = {name: SECTION.get(name) or get_args(key.type) or (True, False) for name, key in KEYS.items()}
    section = some(draw, keys, draw.choice((0.1, 0.4, 0.7))) | {"enabled": True}
    if ranks > 2 and section.get("reduction") == "fp32":
        section["reduction"] = "match"
    if "roles" in section:
        section["roles"] = some(draw, {role: ("auto", "always", "never") for role in ROLES}, 0.3)
    section.setdefault("mode", draw.choice(SECTION["mode"]))
    section.setdefault("min_bytes", draw.choice((0, 0, 1024)))
    stage = draw.choice((0, 1, 2, 2, 3, 3, 3))
    allowed = {
        key: values for key, values in ZERO.items() if stage == 3 or ("stage3" not in key and key[-6:] != "_param")
    }
    precisions = [name for name in PRECISIONS if stage or name != "bf16 whole"]
    allowed |= {"zero_hpz_partition_size": (1, ranks)}
    model = draw.choice(MODELS if stage < 3 else [name for name in MODELS if name != "moe"])
    allowed |= {"contiguous_gradients": (True,), "reduce_scatter": (True,)} if model == "moe" else {}
    config = some(draw, CONFIG, draw.choice((0.1, 0.3))) | copy.deepcopy(
        PRECISIONS[draw.choice(("bf16", "bf16", *precisions))]
    )
    config |= {
        "zero_optimization": {"stage": stage, **some(draw, allowed, draw.choice((0.1, 0.3, 0.5)))},
        "optimizer": draw.choice((*OPTIMIZERS[:1] * 3, *OPTIMIZERS * 4)),
        "zero_allow_untested_optimizer": draw.random() < 0.95,
    }
    refused = ("prescale_gradients", "gradient_predivide_factor")  # by stages 2 and 3 that scatter
    if any(key in config for key in refused):
        config["zero_optimization"]["reduce_scatter"] = False
    actions = [draw.choice(("train", "train", "train", "evaluate", "reload")) for _ in range(draw.choice((2, 4)))]
    return {
        "ranks": ranks, "model": model, "width": draw.choice((33, 192)), "init": stage == 3 and draw.random() < 0.3,
        "actions": ["train", *actions, "train"], "section": section, "config": config,
    }  # fmt: skip


def train(drawn: Drawn, coded: bool, place: Path, found: dict[str, Any]) -> None:
    """Train on this rank, and note losses and the hashes of parameters."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    get_accelerator().is_fp16_supported = lambda: True  # torch computes it on CPUs
    rank, config = int(os.environ["RANK"]), {"train_micro_batch_size_per_gpu": BATCH, **drawn["config"]}
    config["zero_force_ds_cpu_optimizer"] = False
    if coded:
        config["zipccl"] = drawn["section"]
    torch.manual_seed(1)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=drawn["init"]):
        model = Model(drawn["model"], drawn["width"], drawn["ranks"])
    params: Any = [param for param in model.parameters() if param.requires_grad]
    if drawn["model"] == "moe":
        params = split([{"params": params, "name": "all"}])
    engine, *_ = deepspeed.initialize(model=model, model_parameters=params, config=config)
    source = torch.Generator().manual_seed(10 + rank)
    found["losses"] = []
    for action in drawn["actions"]:
        if action == "reload":
            engine.save_checkpoint(place, tag="saved")
            engine.load_checkpoint(place, tag="saved")
            continue
        engine.train(action == "train")
        for _ in range(engine.gradient_accumulation_steps() if action == "train" else 1):
            with torch.set_grad_enabled(action == "train"):
                loss = engine(torch.randint(VOCABULARY, (BATCH, CONTEXT), generator=source))
            found["losses"].append(loss.item().hex())
            if action == "train":
                engine.backward(loss)
                engine.step()
    found["sha256"] = engines.digest(map(without_padding, engine.module.parameters()))
    engine.destroy()


def without_padding(param: Any) -> torch.Tensor:
    """Return a parameter; of ZeRO-3, its shard on this rank without the padding behind the last one, which nobody writes."""
    shard = getattr(param, "ds_tensor", None)
    if shard is None:
        return param
    return shard[: max(0, param.ds_numel - shard.ds_numel * int(os.environ["RANK"]))]


def differences(drawn: dict[str, Drawn], limit: float = LIMIT_S) -> dict[str, str]:
    """Train configurations by name, plain and coded. Returns the names of those that differ, with the difference. Blocks.

    Errors are equal if their classes are, on every rank. A configuration that hangs plain too differs: it was not compared.
    """
    told = {}
    for ranks in sorted({one["ranks"] for one in drawn.values()}):
        names = [name for name, one in drawn.items() if one["ranks"] == ranks]
        found = {}
        for kind in ("plain", "coded"):
            with tempfile.TemporaryDirectory() as place:
                Path(place, "drawn").write_text(json.dumps(drawn))
                off = {"DS_ZIPCCL": "0"} if kind == "plain" else {}
                words = (kind, str(limit), *names)
                found[kind] = launch(__file__, ranks, Path(place), *words, timeout=limit * len(names) + 60, **off)
        for name in names:
            plain, coded = (forked.of_all_ranks(found[kind], name, ranks) for kind in found)
            keys = ("error", "losses", "sha256")
            wrong = [
                rank
                for rank, both in enumerate(zip(plain, coded))
                if any(one["error"] == "hang" for one in both)
                or len({str([one.get(k) for k in keys]) for one in both}) > 1
            ]
            if wrong:
                told[name] = "\n".join(
                    f"rank {rank}: {_said(plain[rank])}; coded: {_said(coded[rank])}" for rank in wrong
                )
            OUTCOMES.append((name, plain[0]["error"], plain[0].get("text", "")[:150]))
    return told


#: (name, class of plain's error or "", its text) of the configurations that this process has had.
OUTCOMES: list[tuple[str, str, str]] = []


def _said(found: dict[str, Any]) -> str:
    if found["error"]:
        return f"{found['error']} {found.get('text', '')[:600]} {found.get('trace', '')[-900:]}".rstrip()
    return f"{found['losses']}, {found['sha256'][:8]}"


def minimised(drawn: Drawn) -> Drawn:
    """Return the configuration with fewer keys and actions, of which none can go alone without the difference."""
    while True:
        paths = _removable(drawn)
        told = differences({str(at): _without(drawn, [path]) for at, path in enumerate(paths)})
        gone = [path for at, path in enumerate(paths) if str(at) in told]
        if not gone:
            return drawn
        smaller = _without(drawn, gone)
        drawn = smaller if differences({"all": smaller}) else _without(drawn, gone[:1])


def _without(drawn: Drawn, paths: Sequence[tuple[Any, ...]]) -> Drawn:
    found = copy.deepcopy(drawn)
    for *above, last in reversed(paths):  # places in lists: the last ones first
        del functools.reduce(lambda one, key: one[key], above, found)[last]
    return found


def _removable(drawn: Drawn) -> list[tuple[Any, ...]]:
    config = drawn["config"]
    return [
        *(("section", key) for key in drawn["section"] if key != "enabled"),
        *(("config", "zero_optimization", key) for key in config["zero_optimization"] if key != "stage"),
        *(("config", key) for key in config if key not in ("zero_optimization", "optimizer")),
        *(("actions", at) for at in range(len(drawn["actions"]) - 1)),
    ]


def check(seeds: Sequence[int]) -> list[str]:
    """Train the configurations of seeds. Returns a text for each that differs, with the command that repeats it."""
    drawn = {str(seed): configuration(seed) for seed in seeds}
    return [
        f"seed {name}: make fuzz-config CONFIGS='1 --first {name}'\n{json.dumps(drawn[name])}\n{text}"
        for name, text in differences(drawn).items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="?", default=100, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--minimise", action="store_true", help="of each seed that differs, drop keys that do not matter"
    )
    args = parser.parse_args()
    failed, begun, seeds = 0, time.monotonic(), range(args.first, args.first + args.seeds)
    for first in range(0, len(seeds), TOGETHER):
        some_seeds = seeds[first : first + TOGETHER]
        for text in check(some_seeds):
            failed += 1
            print(f"fuzz-config: {text}", flush=True)
            if args.minimise:
                seed = int(text.split(":")[0].split()[1])
                print(f"fuzz-config: minimised: {json.dumps(minimised(configuration(seed)))}", flush=True)
        done, refused = first + len(some_seeds), sum(bool(error) for _, error, _ in OUTCOMES)
        said = f"{done} of {len(seeds)}, {refused} refused by plain DeepSpeed too, {failed} differ"
        print(f"fuzz-config: {said}, {time.monotonic() - begun:.0f} s", flush=True)
    if args.seeds == 1:
        print(json.dumps(configuration(args.first), indent=1))
    for outcome in OUTCOMES:
        if outcome[1]:
            print("fuzz-config: plain too:", *outcome)
    return int(failed > 0)


def rank_program() -> None:
    place, kind, limit, *names = sys.argv[1:]
    drawn = json.loads(Path(place, "drawn").read_text())
    cases = {
        name: functools.partial(train, drawn[name], kind == "coded", Path(place, f"{name} saved")) for name in names
    }
    forked.each(Path(place), cases, float(limit))


if __name__ == "__main__":
    sys.exit(rank_program() if "RANK" in os.environ else main())
