"""``bench train``: whole training runs from one seed, plain and compressed, whose bits must be equal.

Every run is ``examples/train_gpt.py`` in processes of its own, or ``train_moe.py``, ``train_lora.py``, ``train_tp.py``,
``train_pipeline.py`` or ``train_fsdp.py``. The variants take turns, plain first. Columns:

* ``workload``: the training: ``zero1``, ``zero2``, ``zero3`` (ZeRO stages). ``moe``, ``moe-top2``: ZeRO-2 and DeepSpeed-MoE, 8 experts with
  biases, one or two of them for a token. ``mixtral`` (8 experts, 2 for a token), ``qwen`` (32 and 4), ``qwen64`` (64 and 8): ZeRO-2 and
  DeepSpeed's AutoEP with Mixtral and Qwen3-MoE of Hugging Face; need ``pip install transformers``. All experts are shared out over all
  ranks, and more than 60% of the bytes are all-to-alls. ``finetune``: ZeRO-3 at a learning
  rate of 2e-5, from fresh weights, whose updates change more bits than those of trained ones; every parameter is gathered for the forward
  and again for the backward pass, as in a model that is too large to be kept. ``lora``: ZeRO-3, LoRA adapters of a Llama of Hugging Face,
  with the values that its Trainer takes for "auto" (threshold of persistence 10 x hidden size); needs ``pip install transformers peft``.
  ``fsdp2``, ``fsdp2-lora``: PyTorch's FSDP2 with the model of ``finetune``, and with that of ``lora``.
  ``tp``: ZeRO-1 and DeepSpeed's AutoTP: all ranks, or as many as ``--options '--tensor N'`` says, share the layers of a Llama of Hugging
  Face, and sum activations of 4 MiB; needs ``pip install transformers``. ``pipeline``: DeepSpeed's PipelineModule in two stages, or as many
  as ``--options '--stages N'`` says, whose first and last one share an embedding.
* ``ranks``, ``nodes``, ``link``: number of processes; number of nodes that share out the processes in blocks; network between the
  nodes. On ``loopback`` there is one node. With ``--link`` there is one node per rank, or as many as ``--nodes`` says.
* ``variant``: ``plain``: ds_zipccl is off (``DS_ZIPCCL=0``). ``raw``: our schedules with the codec raw. ``coded``: our schedules,
  compressed. ``auto``: the fastest of these three for a message, which 25 blocking calls of its kind find out, or 85 asynchronous ones.
  These three have ``reduction: match``, which promises the bits of the plain run, and the keys of ``--set``. ``zeropp``: DeepSpeed's ZeRO++
  (8-bit weights, 4-bit gradients, second copies of the weights inside nodes of several ranks), on CPUs with torch's arithmetic in place of
  its CUDA kernels. It is lossy: a line below the rows says how far its losses are from the plain ones. Its gradients are of 4 bits from two
  nodes on.
* ``step_ms``: median of rank 0's steps, without the first ``--skip``.
* ``comm_ms``: median over the same steps of the time in which rank 0 stood still for communication: in calls of collectives and in
  ``wait()`` of their handles. The delays of other ranks are in it. Communication that overlaps with computing is not.
* ``exchange_ms``: the same without the waiting for ranks that come later: of each call the shortest time of all ranks, that of the rank
  that came last. "-" where the calls of ranks differ. ``quiet_ms``: of each of a step's calls the shortest such time of all steps,
  together: what calls take where no other program disturbs. ``of_plain``, ``of_coded``: the ratio of ``quiet_ms`` to that of these
  variants.
* ``ep_ms``: the same as ``comm_ms`` for exchanges of experts alone. The JSON file has it for every role (``role_ms``).
* ``epilogue_ms``, ``reductions_ms``, of ``pipeline``: median times of the first stage from the end of its last forward pass to its
  optimizer step, and in sums of gradients: of the shared embedding, and over ranks of the same stage.
* ``logical_bytes``: bytes that bandwidth-optimal plain schedules of DeepSpeed's operations send, per rank (mean) and run. All
  traffic counts, from initialization to the gather of the final parameters, also calls that passed through.
* ``wire_bytes``: the same with coded calls at the bytes that they sent, headers included. With ZeRO-1 and ZeRO-2 even raw frames
  send less, because gradients go to their owners only. The plain row has ``logical_bytes`` here: the bytes of the plain backend's
  own schedules cannot be seen from outside.
* ``gather_ratio``: bytes of the plain gathers of parameters / bytes sent for them, from the second step on, on rank 0.
* ``step_m``: bytes that rank 0 sends in a step, mean from the second step on, in units of the model: M is 2 bytes x elements x (n - 1) / n
  on n ranks. Where every parameter is gathered twice, plain ZeRO-3 sends 3 M. The JSON file has it by step (``volume``).
* ``loss_last``: mean over ranks; "-" if it is not finite.
* ``params_sha256``: hash of all final parameters of all ranks (the table shows 16 digits). The bits of ``lora`` are equal only if the
  hashes of its adapters and of its merged weights are too.
* ``speedup``: plain ``step_ms`` / this row's ``step_ms``. ``comm_speedup``: plain ``comm_ms`` / this row's ``comm_ms``.

A line below the rows of a configuration has the ratio over coded bytes alone, and ``bits: equal`` or everything that is wrong. With
experts a line for each variant has the part of their exchanges in the logical bytes of rank 0 from the second step on, and their ratios.

A variant may also be written as settings of its own, with commas between them: ``coded`` with a lossy codec for a role, named as for
``bench codec`` (``tp=round:3``, ``ep=round:3,zero_grad=round:1``) with further keys of the role behind (``pp=lowrank:16:when=backward``),
or with other keys of the section (``fused_embedding=true``). Its runs are compared with each other, and a line says how far the losses
are from the plain ones. ``--set lossy=true roles='{"tp": {"codec": "round", "mantissa": 3}}'`` gives all our runs a lossy codec. The bits
of ``raw``, ``coded`` and ``auto`` are then compared with each other, not with those of the plain run.

``--backend nccl`` trains on GPUs with NCCL groups, which code messages of at least 64 KiB. A rank has the GPU of its number; where there
are more ranks than GPUs, ranks share them, over sockets, with variables of NCCL that the output names: right results, and times that say
nothing about a network, unless ``--link`` shapes one between them. ``--set nccl=auto`` gives our runs the default of jobs. The column
``host_waits`` has the times that the host of a rank waits for its device in coded calls, per step (mean), and
``comm_ms`` the host's time in calls, during which the device works. NCCL promises no order of its additions: with more than two ranks our
runs have ``reduction: fp32``, and their bits are compared with each other, not with the plain run's.

``--link LINK`` is ``RATE[,DELAY[~JITTER]][,LOSS]``, as in ``bench comm --help``. It needs root, and
``pip install ds-zipccl[bench]`` for pyroute2.

The exit status is 1 if a run failed or any bit differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_zipccl.benchmarks.comm.variants import VARIANTS, changes, find
from ds_zipccl.benchmarks.links import link, namespaces
from ds_zipccl.benchmarks.links.backends import BACKENDS, Backend
from ds_zipccl.benchmarks.train.results import ZEROPP, judge, rows
from ds_zipccl.benchmarks.train.trial import WORKLOADS, Results, Training, find_script, run
from ds_zipccl.cli import ToolError
from ds_zipccl.cli.tables import Column, Table, alike, complain, say, write_json
from ds_zipccl.config import ConfigError, parse_section

#: Columns of the first stage of a pipeline.
STAGE_TIMES = ("epilogue_ms", "reductions_ms")
#: Smallest message in bytes that is coded on NCCL groups: the default of gloo's groups, as models of benchmarks are small.
NCCL_MIN_BYTES = 65536


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench train``."""
    option = parser.add_argument
    option("--workload", nargs="+", choices=WORKLOADS, default=["zero3"], help="trainings to run (default: zero3)")
    which = (
        f"{', '.join((*VARIANTS, ZEROPP))}, or settings such as tp=round:3; plain always runs (default: plain coded)"
    )
    option("--variants", nargs="+", type=_variant, default=["plain", "coded"], metavar="V", help=which)
    option("--backend", choices=BACKENDS, default="gloo", help="gloo: on CPUs; nccl: on GPUs (default: gloo)")
    option("--ranks", nargs="+", type=int, default=[2], metavar="N", help="number of processes (default: 2)")
    link.add_arguments(parser)
    option("--steps", type=int, default=20, metavar="K", help="optimizer steps per run (default: 20)")
    option("--skip", type=int, default=3, metavar="K", help="first steps left out of the times (default: 3)")
    option("--repeat", type=int, default=1, metavar="K", help="runs of each variant, in turn (default: 1)")
    sizes = "model (default: small, 11M parameters; of lora 60M, with experts 8 to 40M)"
    option("--size", choices=("tiny", "small", "medium"), default="small", help=sizes)
    keys = 'keys of the "zipccl" section for all runs but plain ones'
    option("--set", nargs="+", default=[], metavar="KEY=VALUE", help=keys)
    further = "further options of the script, such as '--lr 2e-5 --accumulation 4'"
    option("--options", type=shlex.split, default=[], metavar="TEXT", help=further)
    option("--script", type=Path, metavar="FILE", help="training script (default: the package's own)")
    option("--timeout", type=float, default=1800, metavar="S", help="seconds for one run (default: 1800)")
    option("--json", metavar="FILE", help="write rows and judgements of runs here")
    option("--plot", metavar="PNG", help="draw computing and communication of a step (needs matplotlib)")


def main(args: argparse.Namespace) -> int:
    """Run ``bench train``; 0 if every run worked and every bit is equal, else 1.

    Raises:
        ToolError: the options do not fit together, there is no training script, or a file cannot be written.
    """
    if args.repeat < 1 or not 0 <= args.skip < args.steps:
        raise ToolError(
            f"need --repeat >= 1 and --steps > --skip >= 0, got {args.repeat}, {args.steps} and {args.skip}"
        )
    link.check(args.link, args.ranks, args.nodes)
    backend = BACKENDS[args.backend]
    backend.check()
    # Before hours of measuring.
    sections = [_section(variant, args.set, backend) for variant in args.variants]
    own = {variant for variant in args.variants if variant != ZEROPP and find(variant).changes}
    lossy = next(
        (said for name, section in zip(args.variants, sections) if name not in own and (said := _lossy(section))), ""
    )
    for workload in args.workload:
        WORKLOADS[workload].check(workload)
        if ZEROPP in args.variants and WORKLOADS[workload].stage != 3:
            raise ToolError(f"the row {ZEROPP} is of ZeRO-3: leave it out with --workload {workload}")
    scripts = {workload: find_script(args.script, workload) for workload in args.workload}
    if args.plot:
        from ds_zipccl.benchmarks import plots  # before hours of measuring: matplotlib may be missing
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
        plots.trainings(args.plot, written)
    return int(any(judged["problems"] for judged in judgements))


def _measure(training: Training, args: argparse.Namespace, lossy: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and judgement of one configuration; a failed run is a problem in the judgement and gives no rows."""
    runs: dict[str, list[Results]] = {
        variant: []
        for variant in dict.fromkeys(("plain", ZEROPP, *VARIANTS, *args.variants))  # ZeRO++ and plain runs come first
        if variant in ("plain", *args.variants)
    }
    turns = list(runs) * args.repeat
    try:
        with namespaces.joined(training.link, training.ranks, training.nodes) as network:
            for number, variant in enumerate(turns, 1):
                # The bar of the script begins with its first step, seconds after its start.
                complain(f"# {training.workload}, {training.ranks} ranks, run {number} of {len(turns)}: {variant}")
                section = _section(variant, args.set, training.backend, training.same_sums)
                options = (*training.options, *(["--zeropp"] if variant == ZEROPP else []))
                runs[variant].append(run(replace(training, options=options), variant, section, network))
    except ToolError as error:
        return [], training.place | {"ratio_coded": {}, "problems": [str(error)]}
    return rows(training, runs, args.skip), training.place | judge(training, runs, lossy)


def _section(variant: str, settings: Sequence[str], backend: Backend, same_sums: bool = True) -> dict[str, Any] | None:
    """The ``"zipccl"`` section of a variant's processes; None if ds_zipccl is off.

    Args:
        settings: "key=value" each; the value is JSON, or a string without quotes.
        same_sums: whether our sums must have the bits of the plain ones.

    Raises:
        ToolError: a setting has no value, the variant needs another value of its key, or :func:`ds_zipccl.config.parse_section`
            refuses it.
    """
    if variant == ZEROPP:
        return {"enabled": True, "mode": "never"}  # plain DeepSpeed, whose bytes are counted
    own = find(variant).settings
    if own is None:
        return None
    section = {"enabled": True, "reduction": "match" if same_sums else "fp32", **own}
    reserved = set(section)
    if backend.streams:
        section |= backend.settings | {"nccl_min_bytes": NCCL_MIN_BYTES}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or key in reserved:
            raise ToolError(
                f"--set wants KEY=VALUE with a key that {variant} runs do not set themselves, got {setting}"
            )
        try:
            section[key] = json.loads(value)
        except json.JSONDecodeError:
            section[key] = value
    try:
        parse_section(section)
    except ConfigError as error:
        raise ToolError(str(error)) from None
    return section


def _lossy(section: dict[str, Any] | None) -> str:
    """What the settings of a section change; "" where results have the bits of the plain run."""
    return "" if section is None else changes(parse_section(section))


def _variant(text: str) -> str:
    """The type of ``--variants``."""
    if text != ZEROPP:
        try:
            find(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _experts_lines(judged: dict[str, Any]) -> list[str]:
    """A line for each variant whose exchanges of experts are known."""
    lines = []
    for variant, found in judged.get("experts", {}).items():
        if found and variant != ZEROPP:
            ratios = ", ".join(f"{part.removeprefix('ep ')} {ratio:.3f}" for part, ratio in found["ratios"].items())
            lines.append(f"{variant}: exchanges of experts are {found['share']:.1%} of the bytes; ratios {ratios}")
    return lines


def _loss(difference: float | None) -> str:
    return "infinity" if difference is None else f"{difference:.2g}"


def _columns(args: argparse.Namespace, backend: Backend) -> tuple[Column, ...]:
    more = (Column("host_waits", ".1f"),) if backend.streams else ()
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
