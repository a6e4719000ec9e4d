"""``bench train``: whole training runs from one seed, plain and compressed, whose bits must be equal.

Every run starts ``train_gpt.py``, ``train_moe.py``, ``train_lora.py``, ``train_tp.py``, ``train_pipeline.py`` or
``train_fsdp.py`` of ``examples/`` in new processes. The variants run in turn, plain first. Columns:

* ``workload``: ``zero1``, ``zero2``, ``zero3``: ZeRO stages. ``moe``, ``moe-top2``: ZeRO-2 and DeepSpeed-MoE, 8 experts
  with biases, top-1 or top-2. ``mixtral`` (8 experts, top-2), ``qwen`` (32, top-4), ``qwen64`` (64, top-8): ZeRO-2 and
  DeepSpeed's AutoEP with Mixtral and Qwen3-MoE of Hugging Face (``pip install transformers``). The experts are
  distributed over all ranks, and more than 60% of the bytes are all-to-alls. ``finetune``: ZeRO-3 from fresh weights at
  a learning rate of 2e-5. An update of fresh weights changes more bits than one of trained weights. Every parameter is
  gathered for the forward and again for the backward pass, as in a model too large to stay gathered. ``lora``: ZeRO-3
  and LoRA adapters of a Llama of Hugging Face, with the values that its Trainer takes for "auto" (persistence threshold
  10 x hidden size); needs ``pip install transformers peft``. ``fsdp2``, ``fsdp2-lora``: PyTorch's FSDP2 with the models
  of ``finetune`` and ``lora``. ``tp``: ZeRO-1 and DeepSpeed's AutoTP. All ranks, or N with ``--options '--tensor N'``,
  share the layers of a Llama of Hugging Face and sum activations of 4 MiB; needs ``pip install transformers``.
  ``pipeline``: DeepSpeed's PipelineModule in two stages, or N with ``--options '--stages N'``. The first and the last
  stage share an embedding.
* ``ranks``, ``nodes``, ``link``: number of processes; number of nodes, which hold consecutive ranks; network between
  the nodes. ``loopback`` has one node. ``--link`` has one node per rank, or the number of ``--nodes``.
* ``variant``: ``plain``: without ds_zipccl (``DS_ZIPCCL=0``). ``raw``: the schedules of ds_zipccl, uncompressed.
  ``coded``: the same, compressed. ``auto``: ``"mode": "auto"``, which compares plain and coded steps in the first 30
  to 100. ``raw``, ``coded`` and ``auto`` have ``reduction: match``, which promises the bits of
  the plain run, and the keys of ``--set``. ``zeropp``: DeepSpeed's ZeRO++ (8-bit weights, 4-bit gradients from two
  nodes on, second copies of the weights inside nodes of several ranks). On CPUs torch operations replace its CUDA
  kernels. ZeRO++ is lossy: a line below the rows has the deviation of its losses from the plain losses.
* ``step_ms``: median of rank 0's steps, without the first ``--skip`` steps.
* ``comm_ms``: median over the same steps of the time of rank 0 in calls of collectives and in ``wait()`` of their
  handles, including the delays of late ranks. Communication that overlaps with computing does not count.
* ``exchange_ms``: the same without the wait for late ranks. Each call counts with its shortest time of all ranks, which
  is that of the last rank to call. "-" if the ranks' calls differ. ``quiet_ms``: the sum of each call's shortest such
  time of all steps, which other programs disturb least. ``of_plain``, ``of_coded``: this / that of the variant.
* ``ep_ms``: ``comm_ms`` of exchanges of experts only. The JSON file has it for every role (``role_ms``).
* ``epilogue_ms``, ``reductions_ms``, of ``pipeline``: median times of the first stage from the end of its last forward
  pass to its optimizer step, and in sums of gradients: of the shared embedding, and over ranks of the same stage.
* ``logical_bytes``: bytes that bandwidth-optimal plain schedules of DeepSpeed's operations send, per rank (mean) and
  run. All traffic counts, from initialization to the gather of the final parameters, also calls that passed through.
* ``wire_bytes``: the same, with the sent bytes of coded calls, headers included. With ZeRO-1 and ZeRO-2 even raw frames
  send less, because each gradient is sent only to its owner. The plain row repeats ``logical_bytes``.
* ``gather_ratio``: bytes of the plain gathers of parameters / bytes sent for them, from the second step on, on rank 0.
* ``step_m``: bytes that rank 0 sends per step, mean from the second step on, in units of M = 2 bytes x elements of the
  model x (n - 1) / n on n ranks. With two gathers per parameter plain ZeRO-3 sends 3 M. The JSON file has steps.
* ``loss_last``: mean over ranks; "-" if it is not finite.
* ``params_sha256``: hash of all final parameters of all ranks (the table shows 16 digits). ``lora`` compares its
  adapters and merged weights too.
* ``speedup``: plain ``step_ms`` / this row's ``step_ms``. ``comm_speedup``: plain ``comm_ms`` / this row's ``comm_ms``.

Lines below the rows of a configuration have the ratio over coded bytes alone, and ``bits: equal`` or all problems. With
experts, a line per variant has the share of their exchanges in rank 0's bytes from the second step on, and ratios.

A variant may also be settings, separated by commas, that are added to ``coded``: a lossy codec for a role in the
notation of ``bench codec`` (``tp=round:3``, ``ep=round:3,zero_grad=round:1``), further keys of the role
(``pp=lowrank:16:when=backward``), or other keys of the section (``fused_embedding=true``). Its runs are compared with
each other, and a line has the deviation of the losses from the plain losses. ``--set lossy=true roles='{"tp": {"codec":
"round", "mantissa": 3}}'`` gives all variants except plain a lossy codec; their bits are then compared with each other.

``--backend nccl`` trains on GPUs with NCCL groups, which code messages from 64 KiB on. Rank i has GPU i. If ranks
outnumber GPUs, ranks share GPUs and communicate over sockets, with the NCCL variables that the output names; unless
``--link`` shapes a network, their times say nothing about one. ``--set nccl=auto`` gives the variants the default of
jobs. The column ``host_waits`` counts how often the host of a rank waits for its device in coded calls, per step
(mean). ``comm_ms`` is the host's time in calls, during which the device works. NCCL promises no order of additions.
With more than two ranks the variants except plain therefore have ``reduction: fp32`` and are compared with each other.

``--backend slots`` trains on CPUs by the schedules of NCCL groups, as in ``bench comm --help``; ``--nodes M`` needs no
link then. ``host_waits`` are those of a GPU job. ``between_mb``: 1e6 bytes that rank 0's node has sent to other nodes
in coded calls of the whole run, if its ranks send alike. Times say nothing about GPUs.

``--link LINK`` is ``RATE[,DELAY[~JITTER]][,LOSS]``, as in ``bench comm --help``. It needs root and pyroute2.

The exit status is 1 if a run failed or any bit differs.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_zipccl.benchmarks.comm import variants
from ds_zipccl.benchmarks.comm.variants import VARIANTS, changes, find
from ds_zipccl.benchmarks.fabric import bench as fabric
from ds_zipccl.benchmarks.links.backends import BACKENDS, Backend
from ds_zipccl.benchmarks.train.results import ZEROPP, judge, rows
from ds_zipccl.benchmarks.train.trial import WORKLOADS, Results, Training, find_script, run
from ds_zipccl.config import ConfigError, parse_section
from ds_zipccl.tools import ToolError, link, namespaces
from ds_zipccl.tools.tables import Column, Table, alike, complain, say, write_json

#: Columns of pipelines, measured in the first stage.
STAGE_TIMES = ("epilogue_ms", "reductions_ms")
#: Smallest coded message on NCCL groups in bytes: the default of gloo groups, because the models here are small.
NCCL_MIN_BYTES = 65536

__doc__ = f"{__doc__}\n{fabric.__doc__}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench train``."""
    option = parser.add_argument
    option("--workload", nargs="+", choices=WORKLOADS, default=["zero3"], help="trainings to run (default: zero3)")
    which = (
        f"{', '.join((*VARIANTS, ZEROPP))}, or settings such as tp=round:3; plain always runs (default: plain coded)"
    )
    option("--variants", nargs="+", type=_variant, default=["plain", "coded"], metavar="V", help=which)
    option(
        "--backend",
        choices=BACKENDS,
        default="gloo",
        help="gloo: on CPUs; nccl: on GPUs; slots: NCCL's schedules on CPUs (default: gloo)",
    )
    option("--ranks", nargs="+", type=int, default=[2], metavar="N", help="number of processes (default: 2)")
    link.add_arguments(parser)
    option("--steps", type=int, default=20, metavar="K", help="optimizer steps per run (default: 20)")
    option("--skip", type=int, default=3, metavar="K", help="first steps left out of the times (default: 3)")
    option("--repeat", type=int, default=1, metavar="K", help="runs of each variant, in turn (default: 1)")
    sizes = "model (default: small, 11M parameters; lora 60M; with experts 8 to 40M)"
    option("--size", choices=("tiny", "small", "medium"), default="small", help=sizes)
    keys = 'keys of the "zipccl" section for all runs except plain'
    option("--set", nargs="+", default=[], metavar="KEY=VALUE", help=keys)
    further = "further options of the script, such as '--lr 2e-5 --accumulation 4'"
    option("--options", type=shlex.split, default=[], metavar="TEXT", help=further)
    option("--script", type=Path, metavar="FILE", help="training script (default: the package's own)")
    option("--timeout", type=float, default=1800, metavar="S", help="seconds for one run (default: 1800)")
    option("--json", metavar="FILE", help="write rows and verdicts to this file")
    fabric.add_arguments(parser)
    option("--plot", metavar="PNG", help="draw computing and communication of a step (needs matplotlib)")


def main(args: argparse.Namespace) -> int:
    """Run ``bench train``; 0 if every run succeeded with equal bits, else 1.

    Raises:
        ToolError: options contradict each other, the training script is missing, or a file cannot be written.
    """
    if args.repeat < 1 or not 0 <= args.skip < args.steps:
        raise ToolError(
            f"need --repeat >= 1 and --steps > --skip >= 0, got {args.repeat}, {args.steps} and {args.skip}"
        )
    if args.fabric:
        return fabric.main(args)
    backend = BACKENDS[args.backend].on(args.nodes)
    link.check(args.link, args.ranks, args.nodes, bool(backend.nodes))
    backend.check()
    # Wrong settings are refused before hours of runs.
    sections = [_section(variant, args.set, backend) for variant in args.variants]
    own = {variant for variant in args.variants if variant != ZEROPP and find(variant).changes}
    lossy = next(
        (said for name, section in zip(args.variants, sections) if name not in own and (said := _lossy(section))), ""
    )
    for workload in args.workload:
        WORKLOADS[workload].check(workload)
        if ZEROPP in args.variants and WORKLOADS[workload].stage != 3:
            raise ToolError(f"variant {ZEROPP} needs ZeRO-3: leave it out with --workload {workload}")
    scripts = {workload: find_script(args.script, workload) for workload in args.workload}
    if args.plot:
        from ds_zipccl.benchmarks.train import plot  # before hours of runs: matplotlib may be missing
    for line in backend.lines(args.ranks, any(args.link)):
        say(line)
    table, written, judgements = Table(_columns(args, backend)), [], []
    for workload, ranks, spec in itertools.product(args.workload, args.ranks, args.link):
        options = tuple(args.options)
        training = Training(
            scripts[workload], workload, ranks, args.steps, args.size, args.timeout, spec, args.nodes, options, backend
        )
        found, judged = _measure(training, args, bool(lossy))
        for row in found:
            table.add(dict.fromkeys(STAGE_TIMES) | row | {"params_sha256": row["params_sha256"][:16]})
        ratios = ", ".join(f"{variant} {ratio:.3f}" for variant, ratio in judged["ratio_coded"].items())
        same = training.same_sums and not lossy
        bits = "NOT proven equal" if judged["problems"] else "equal" if same else "equal among our runs"
        where = f"{workload}, {ranks} ranks, {link.name(spec)}"
        say(f"# {where}: {f'ratio over coded bytes {ratios}; ' if ratios else ''}bits: {bits}")
        for line in _experts_lines(judged):
            say(f"# {where}: {line}")
        changed = {ZEROPP: judged.get("deviation"), lossy: judged.get("lossy"), **judged.get("changed", {})}
        for name, far in changed.items():
            if far:
                largest, last = (_loss(far[key]) for key in ("largest", "last"))
                say(f"# {where}: {name} is lossy: its losses are off by up to {largest}, the last one by {last}")
        for problem in judged["problems"]:
            complain(f"{where}: {problem}")
        written += found
        judgements.append(judged)
    if args.json:
        more = {
            "verdicts": judgements,
            "steps": args.steps,
            "skip": args.skip,
            "size": args.size,
            "repeat": args.repeat,
        }
        write_json(args.json, written, args.command, **more, **backend.about(max(args.ranks), any(args.link)))
    if args.plot and written:
        plot.trainings(args.plot, written)
    return int(any(judged["problems"] for judged in judgements))


def _measure(training: Training, args: argparse.Namespace, lossy: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run one configuration and return rows and verdict; a failed run gives no rows, and a problem in the verdict."""
    runs: dict[str, list[Results]] = {
        variant: []
        for variant in dict.fromkeys(("plain", ZEROPP, *VARIANTS, *args.variants))  # baselines first
        if variant in ("plain", *args.variants)
    }
    turns = list(runs) * args.repeat
    try:
        with namespaces.joined(training.link, training.ranks, training.nodes) as network:
            for number, variant in enumerate(turns, 1):
                # The progress bar of the script starts seconds later, with the first step.
                complain(f"# {training.workload}, {training.ranks} ranks, run {number} of {len(turns)}: {variant}")
                section = _section(variant, args.set, training.backend, training.same_sums)
                options = (*training.options, *(["--zeropp"] if variant == ZEROPP else []))
                runs[variant].append(run(replace(training, options=options), variant, section, network))
    except ToolError as error:
        return [], training.place | {"ratio_coded": {}, "problems": [str(error)]}
    return rows(training, runs, args.skip), training.place | judge(training, runs, lossy)


def _section(variant: str, settings: Sequence[str], backend: Backend, same_sums: bool = True) -> dict[str, Any] | None:
    """Return the ``"zipccl"`` section of a variant's processes; None without ds_zipccl.

    Args:
        settings: texts "key=value"; the value is JSON, or a string without quotes.
        same_sums: whether sums must have the bits of the plain sums.

    Raises:
        ToolError: a setting has no value, the variant sets its key, or the section is invalid.
    """
    if variant == ZEROPP:
        return {"enabled": True, "mode": "never"}  # plain collectives, whose bytes are counted
    own = find(variant).settings
    if own is None:
        return None
    section = {"enabled": True, "reduction": "match" if same_sums else "fp32", **own}
    given = variants.settings(settings, variant, section)
    section |= backend.settings | {"nccl_min_bytes": NCCL_MIN_BYTES} if backend.streams else {}
    section |= given
    try:
        parse_section(section)
    except ConfigError as error:
        raise ToolError(str(error)) from None
    return section


def _lossy(section: dict[str, Any] | None) -> str:
    """Return the settings of a section that change results; "" if results have the bits of the plain run."""
    return "" if section is None else changes(parse_section(section))


def _variant(text: str) -> str:
    """Check a value of ``--variants`` (argparse type)."""
    if text != ZEROPP:
        try:
            find(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _experts_lines(judged: dict[str, Any]) -> list[str]:
    """Return a line for each variant with exchanges of experts."""
    lines = []
    for variant, found in judged.get("experts", {}).items():
        if found and variant != ZEROPP:
            ratios = ", ".join(f"{part.removeprefix('ep ')} {ratio:.3f}" for part, ratio in found["ratios"].items())
            lines.append(f"{variant}: exchanges of experts are {found['share']:.1%} of the bytes; ratios {ratios}")
    return lines


def _loss(difference: float | None) -> str:
    return "infinity" if difference is None else f"{difference:.2g}"


def _columns(args: argparse.Namespace, backend: Backend) -> tuple[Column, ...]:
    more: tuple[Column, ...] = (Column("host_waits", ".1f"),) if backend.streams else ()
    more += (Column("between_mb", ".1f", 10),) if backend.nodes else ()
    stages = any(WORKLOADS[name].stages for name in args.workload)
    experts = (Column("ep_ms", ".1f", 8),) if any(WORKLOADS[name].experts for name in args.workload) else ()
    return (
        Column("workload"),
        *alike("ranks nodes", "d"),
        Column("link", width=max(len(link.name(spec)) for spec in args.link)),
        Column("variant", width=max(map(len, args.variants))),
        *alike("step_ms comm_ms", ".1f", 8),
        Column("exchange_ms", ".1f"),
        Column("quiet_ms", ".1f", 8),
        *alike("of_plain of_coded", ".3f"),
        *experts,
        *(Column(key, ".1f") for key in STAGE_TIMES if stages),
        *alike("logical_bytes wire_bytes", ",d", 15),
        *more,
        Column("gather_ratio", ".1f"),
        Column("step_m", ".4f"),
        Column("loss_last", ".6f"),
        Column("params_sha256", width=16),
        *alike("speedup comm_speedup", ".3f"),
    )
