#!/usr/bin/env python3
"""Train a small GPT with DeepSpeed on text that every machine has: the sources of Python's standard library.

    python examples/train_gpt.py --compare                # plain and coded from one seed: same bits?
    python examples/train_gpt.py --ranks 4 --size tiny    # starts its four ranks itself
    torchrun --nproc-per-node 2 examples/train_gpt.py --ds-config examples/ds_config_zero2.json
    deepspeed --num_accelerators 2 examples/train_gpt.py --ds-config examples/ds_config_moe.json --experts 8 --top-k 2

No line below makes ds_zipccl code the traffic: installing the package and "zipccl": {"enabled": true} in the config
is all. Only bytes_sent names it, to read its counters. With DS_ZIPCCL=0 in the environment nothing is coded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore", category=FutureWarning)  # torch renames collectives that DeepSpeed still calls

import torch  # noqa: E402
from gpt import GPT, ON_GPU, SIZES, Experts, Size  # noqa: E402
from source_text import batches, read_text, tokenise  # noqa: E402
from torch import nn  # noqa: E402
from tqdm import tqdm  # noqa: E402

os.environ.setdefault("DS_ACCELERATOR", "cuda" if ON_GPU else "cpu")  # before deepspeed is imported
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic algorithms on GPUs need it


def build_gpt(args: argparse.Namespace, world: int, size: Size | None = None) -> tuple[nn.Module, list]:
    """The model, and groups of its trained parameters."""
    experts = None
    if args.experts:
        experts = Experts(args.experts, args.top_k, args.spread or math.gcd(args.experts, world), args.bias)
    model = GPT(size or SIZES[args.size], experts)
    groups: list = [{"params": list(model.parameters()), "name": "all"}]
    if args.experts:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    return model, groups


Batches = Iterator[torch.Tensor]


def step_by_calls(engine: nn.Module, batches: Batches) -> torch.Tensor:
    """All micro-batches of a step; returns the loss of the last one."""
    for _ in range(engine.gradient_accumulation_steps()):
        loss = engine(next(batches).to(engine.device))
        engine.backward(loss)
        engine.step()
    return loss


def join_by_deepspeed(args: argparse.Namespace, clock: Any) -> None:
    """Make the process group."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # inference on CPUs; minutes of compiling
    deepspeed.init_distributed(dist_backend=args.backend)
    if args.comm_time:
        clock.watch(deepspeed.comm.comm.cdb)


def start_deepspeed(model: nn.Module, groups: list, config: dict, clock: Any) -> Any:
    """The engine of a model."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    clock.learn(engine)
    return engine


#: Of the file: inside a class the name is that of the class's text.
ABOUT = __doc__ or ""


@dataclass(frozen=True)
class Example:
    """A training of this folder: its script, default config, sizes, builder of the model, further hashes of parameters, and the number of
    ranks that share one model, which see the same text: neighbours, or ranks as far apart as there are models. All ranks hold the same
    values of those parameters that they share."""

    script: str = __file__
    config: str = "ds_config_zero3.json"
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None  # adds its own options
    configure: Callable[[dict, argparse.Namespace, int], dict] = lambda config, args, world: config  # DeepSpeed's
    about: str = ABOUT
    sizes: Mapping[str, Any] = field(default_factory=lambda: SIZES)
    build: Callable[[argparse.Namespace, int], tuple[nn.Module, list]] = build_gpt
    hashes: Callable[[nn.Module, bool], dict[str, str]] = lambda model, zero3: {}
    split: Callable[[argparse.Namespace, int], int] = lambda args, world: 1
    neighbours: bool = True
    shared: Callable[[str], bool] = lambda name: True  # by its name, where its shape is that of the whole model
    step: Callable[[Any, Batches], torch.Tensor] = step_by_calls
    join: Callable[[argparse.Namespace, Any], None] = join_by_deepspeed
    start: Callable[[nn.Module, list, dict, Any], Any] = start_deepspeed


# ---- one rank ----------------------------------------------------------------------------------------------


def bytes_sent() -> dict[str, float] | None:
    """What this rank has sent so far, None without ds_zipccl: wire_bytes for logical_bytes in coded calls, passed_bytes in the others."""
    try:
        from ds_zipccl.telemetry import counters
    except ImportError:
        return None
    rows, totals = counters.rows(), counters.totals()
    return {
        **{key: totals[key] for key in ("logical_bytes", "wire_bytes")},
        "coded_calls": sum(row["calls"] for row in rows),
        "passed_bytes": sum(row["passed_bytes"] for row in rows),
        "host_waits": sum(row["host_waits"] for row in rows),
    }


def parameters_hash(named: Iterable[tuple[str, nn.Parameter]], zero3: bool) -> str:
    """sha256 of parameters as this rank sees them; those of ZeRO-3 and FSDP2 are gathered one at a time."""
    import deepspeed

    digest = hashlib.sha256()
    for name, parameter in named:
        with deepspeed.zero.GatheredParameters([parameter]) if zero3 else nullcontext():
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            digest.update(whole.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def deepspeed_config(args: argparse.Namespace) -> dict:
    """What the config file says, and --batch, --accumulation, --lr, --schedule and --zeropp change."""
    config = json.loads(args.ds_config.read_text())
    config |= {"train_micro_batch_size_per_gpu": args.batch} if args.batch else {}
    config |= {"gradient_accumulation_steps": args.accumulation} if args.accumulation else {}
    if args.lr is not None:
        config["optimizer"]["params"]["lr"] = args.lr
    if args.schedule == "cosine":
        steps = {"total_num_steps": args.steps, "warmup_num_steps": max(1, args.steps // 20)}
        config["scheduler"] = {"type": "WarmupCosineLR", "params": {**steps, "warmup_type": "linear"}}
    if args.zeropp:
        import zeropp

        config = zeropp.on(config)
    return config


def train(args: argparse.Namespace, example: Example | None = None) -> dict:
    """Train on this rank, with a progress bar on rank 0; every rank returns the results of all."""
    import deepspeed
    import torch.distributed as dist
    from comm_time import CommTime, StageTime, exchanging

    deepspeed.utils.logging.logger.setLevel("WARNING")
    torch.set_num_threads(args.threads)  # sums depend on how they are split over threads
    torch.use_deterministic_algorithms(ON_GPU)  # CPU kernels repeat bit for bit anyway
    clock, example = CommTime(), example or Example()
    example.join(args, clock)
    rank, world, size = dist.get_rank(), dist.get_world_size(), example.sizes[args.size]
    split = example.split(args, world)

    torch.manual_seed(args.seed)
    model, groups = example.build(args, world)
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    whole = {name: parameter.shape for name, parameter in model.named_parameters()}
    config = example.configure(deepspeed_config(args), args, world)
    engine = example.start(model, groups, config, clock)
    stage, stage_ms = StageTime(engine if args.comm_time else None), []

    tokens = tokenise(read_text(args.data, size.characters), size.vocabulary)
    batch, models = engine.train_micro_batch_size_per_gpu(), world // split
    places = [rank % split if example.neighbours else rank // models for rank in range(world)]  # in their models
    source = batches(
        tokens, batch, size.context, args.seed, rank // split if example.neighbours else rank % models, models
    )
    losses, step_ms, comm_ms, role_ms, calls = [], [], [], [], []
    with tqdm(range(args.steps), disable=rank != 0, unit="step", desc=args.name or args.ds_config.stem) as bar:
        for _ in bar:
            started, waited, _ = time.perf_counter(), clock.times(), clock.calls()
            losses.append(example.step(engine, source).item())
            step_ms.append(1000 * (time.perf_counter() - started))
            role_ms.append(clock.times(waited))
            comm_ms.append(sum(role_ms[-1].values()))
            calls.append(clock.calls())
            stage_ms.append(stage.clear())
            sent = bytes_sent() if rank == 0 else None
            saved = f"{(sent['logical_bytes'] - sent['wire_bytes']) / 1e6:.1f}MB" if sent else "n/a"
            bar.set_postfix(loss=f"{losses[-1]:.4f}", saved=saved)

    zero3 = engine.zero_optimization_stage() == 3
    hashes = {"params_sha256": parameters_hash(model.named_parameters(), zero3), **example.hashes(model, zero3)}
    named = [(name, one) for name, one in model.named_parameters() if split > 1 and example.shared(name)]
    unsplit = [(name, one) for name, one in named if one.shape == whole.get(name)]
    everyone: list = [None] * world
    # through torch: not part of the counted traffic
    mine = losses, hashes, bytes_sent(), parameters_hash(unsplit, zero3), calls, bool(unsplit)
    dist.all_gather_object(everyone, mine)
    curves, digests, sent, alike, timed, sharing = zip(*everyone)
    # ranks at one place of their models hold the same parameters, and all ranks that hold shared ones hold the same
    replicas = len({one for one, shares in zip(alike, sharing) if shares}) <= 1
    replicas &= all(one == digests[places.index(place)] for place, one in zip(places, digests))
    return {
        "ranks": world,
        "parameters": sum(count for count, _ in counts),
        "trained": sum(count for count, trained in counts if trained),
        "micro_batches": engine.gradient_accumulation_steps(),
        "losses": [(sum(step) / world).hex() for step in zip(*curves)],  # means over ranks, every bit of them
        **{key: hashlib.sha256("".join(one[key] for one in digests).encode()).hexdigest() for key in hashes},
        "replicas_equal": bool(args.experts) or replicas,  # experts do differ by rank
        "step_ms": step_ms,
        "comm_ms": comm_ms if args.comm_time else None,
        # a send of one stage is a receive of another, so that calls of stages have no pairs
        "exchange_ms": exchanging(timed) if args.comm_time and not any(stage_ms) else None,
        "stage_ms": stage_ms if any(stage_ms) else None,
        "role_ms": role_ms if args.comm_time else None,
        "sent": {key: sum(one[key] for one in sent) / world for key in sent[0]} if sent[0] else None,
    }


def train_one_rank(args: argparse.Namespace, example: Example) -> None:
    """What each process of torchrun or deepspeed does."""
    import torch.distributed as dist

    results = train(args, example)
    if args.results and dist.get_rank() == 0:
        args.results.write_text(json.dumps(results))
    dist.barrier()  # gloo aborts at exit where a rank leaves while another is still talking
    dist.destroy_process_group()
    time.sleep(0.2)  # and where its threads still hold tensors, for whose release they need the interpreter


# ---- all ranks ---------------------------------------------------------------------------------------------


def launch(args: argparse.Namespace, script: str, extra: list[str], environment: dict[str, str]) -> dict:
    """Run the script with the same options on args.ranks local ranks under torchrun; returns the results."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks)]
        command += ["--master-addr", "127.0.0.1", "--master-port", str(port), script]
        command += [*(option for option in sys.argv[1:] if option != "--compare"), *extra]
        # DeepSpeed's optimizers load torch's compiler, which takes seconds; nothing here is compiled.
        environment = {"OMP_NUM_THREADS": str(args.threads), "TORCHDYNAMO_DISABLE": "1", **os.environ, **environment}
        status = subprocess.run([*command, "--results", str(results)], env=environment).returncode
        if status:
            raise SystemExit(f"training on {args.ranks} ranks ended with status {status}; see above")
        return json.loads(results.read_text())


def asked_differences(args: argparse.Namespace) -> str:
    """Why bits may differ, a clause about the config; "" where they must not."""
    section = json.loads(args.ds_config.read_text()).get("zipccl", {})
    roles = [role for role, value in section.get("roles", {}).items() if isinstance(value, dict)]
    asked = [f"lossy by config: {', '.join(roles)}"] if roles and section.get("lossy") else []
    asked += ["fused_embedding sums in another order"] if section.get("fused_embedding") else []
    return f", as the config asks for ({'; '.join(asked)})" if asked else ""


def compare(args: argparse.Namespace, script: str) -> int:
    """Train plain and coded from the same seed and print whether anything differs; 0 where nothing does."""
    plain = launch(args, script, ["--name", "plain"], {"DS_ZIPCCL": "0"})
    coded = launch(args, script, ["--name", "coded"], {})
    if args.results:
        args.results.write_text(json.dumps({"plain": plain, "coded": coded}))
    print(f"\n{args.ds_config.stem}, {plain['parameters']:,} parameters, {args.ranks} ranks, {args.steps} steps\n")
    print(f"{'step':>6}{'plain loss':>14}{'coded loss':>14}")
    for step in sorted({*range(0, args.steps, max(1, args.steps // 10)), args.steps - 1}):
        values = (float.fromhex(run["losses"][step]) for run in (plain, coded))
        print(f"{step + 1:>6}" + "".join(f"{value:>14.6f}" for value in values))

    words = {True: "yes", False: "no"}
    losses, parameters = (plain[key] == coded[key] for key in ("losses", "params_sha256"))
    print(f"\nlosses bit-identical:      {words[losses]}")
    print(f"parameters bit-identical:  {words[parameters]}  (sha256 {coded['params_sha256'][:16]})")
    sent = coded["sent"]
    if not sent or not sent["coded_calls"]:
        print(f"nothing was coded: is ds_zipccl installed, and is its section in {args.ds_config} enabled?")
        return 1
    logical, wire, passed = (sent[key] / 1e6 for key in ("logical_bytes", "wire_bytes", "passed_bytes"))
    print(f"logical bytes per rank:    {logical:.1f} MB in coded calls (and {passed:.1f} MB passed)")
    print(f"wire bytes per rank:       {wire:.1f} MB for them, {logical - wire:.1f} MB saved")
    print(f"wire ratio, coded bytes:   {logical / wire:.3f}")
    medians = [statistics.median(run["step_ms"]) for run in (plain, coded)]
    print(f"median step:               {medians[0]:.0f} ms plain, {medians[1]:.0f} ms coded")
    replicas = plain["replicas_equal"] and coded["replicas_equal"]
    identical = losses and parameters and replicas
    if not replicas:
        print("copies of parameters differ between ranks: no config asks for that")
    excuse = asked_differences(args) if replicas and not identical else ""
    print(f"\nbit-identical: {words[identical]}{excuse}")
    return 0 if identical else 1


def options(example: Example | None = None) -> argparse.ArgumentParser:
    example, here = example or Example(), Path(__file__).resolve().parent
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=example.about, formatter_class=formatter, allow_abbrev=False)
    option = parser.add_argument
    option("--ds-config", "--deepspeed_config", type=Path, default=here / example.config, metavar="FILE")
    option("--size", choices=example.sizes, default="small", help="of model and text (default: small)")
    option("--steps", type=int, default=30, help="optimizer steps (30)")
    option("--accumulation", type=int, metavar="N", help="micro-batches per step (default: what the config file says)")
    option("--lr", type=float, metavar="X", help="learning rate (default: what the config file says)")
    option("--schedule", choices=("config", "cosine"), default="config", help="cosine: 5%% warm-up, then cosine decay")
    option("--zeropp", action="store_true", help="DeepSpeed's lossy ZeRO++ (ZeRO-3 only), to compare")
    option("--batch", type=int, metavar="N", help="sequences of a micro-batch (default: what the config file says)")
    option("--experts", type=int, default=0, help="experts per layer (default: none; not with ZeRO-3)")
    option("--top-k", type=int, default=1, metavar="K", help="experts of a token (default: 1)")
    option("--bias", action="store_true", help="experts with biases, as torch's linear layers have")
    option("--spread", type=int, metavar="N", help="ranks that share out one set of experts (default: as many as fit)")
    option("--data", type=Path, metavar="FILE", help="text to train on (default: the standard library)")
    option("--seed", type=int, default=1, help="of weights and batches (1)")
    option("--threads", type=int, default=1, help="CPU threads per rank")
    option("--ranks", type=int, default=2, help="local ranks to start where no launcher did")
    option("--backend", metavar="NAME", help="of torch.distributed (default: that of DeepSpeed's accelerator)")
    option("--compare", action="store_true", help="train plain and coded, and compare")
    option("--results", type=Path, metavar="FILE", help="rank 0 writes losses, hash and bytes here (JSON)")
    option("--comm-time", action="store_true", help="results have rank 0's time in collectives, per step")
    option("--name", help=argparse.SUPPRESS)  # of the progress bar
    option("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    example.options(parser)
    return parser


def main(example: Example | None = None) -> int:
    example = example or Example()
    args = options(example).parse_args()
    for file in (args.ds_config, args.data):
        if file and not file.is_file():
            raise SystemExit(f"{file}: no such file")
    if "RANK" in os.environ:
        if args.compare:
            raise SystemExit("--compare starts ranks of its own: run it with python, without torchrun or deepspeed")
        train_one_rank(args, example)
        return 0
    if args.compare:
        return compare(args, example.script)
    results = launch(args, example.script, [], {})
    if args.results:
        args.results.write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
