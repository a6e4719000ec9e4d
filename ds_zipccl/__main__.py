"""``python -m ds_zipccl``: the command line. Only the module of the command that runs is imported."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ds_zipccl import __version__
from ds_zipccl.tools import ToolError

PROGRAM = "python -m ds_zipccl"

#: Words on the command line -> module in ds_zipccl, one-line help.
COMMANDS: dict[tuple[str, ...], tuple[str, str]] = {
    ("report",): ("cli.report", "versions, routes and op builders: which of them work here, and why the rest does not"),
    ("doctor",): (
        "cli.doctor",
        "link, codec and hooks on the real ranks of a job, and the gain expected for its config",
    ),
    ("analyze",): ("cli.analyze", "entropy, bound and ratio of the tensors of a file, or of synthetic data"),
    ("bench", "codec"): ("benchmarks.codec.bench", "ratio and speed of compress and decompress, compared with memcpy"),
    ("bench", "comm"): (
        "benchmarks.comm.bench",
        "time, bandwidth and bytes of collectives: plain, our schedule, compressed",
    ),
    ("bench", "train"): ("benchmarks.train.bench", "trainings, plain and compressed, whose bits must be equal"),
    ("bench", "doctor"): ("benchmarks.train.doctor", "predictions of doctor, compared with trainings on shaped links"),
    ("bench", "sync"): (
        "benchmarks.sync",
        "bytes and speed of weight sync, compared with pairs of index and value and XOR with zstd",
    ),
    ("steps",): ("cli.steps", "ratios over a training, from its step logs"),
    ("plan",): ("cli.plan", "predicted communication time of a training step, on NCCL groups"),
}
GROUPS = {"bench": "measurements: codec, comm, train, doctor, sync"}


def _parser(chosen: tuple[str, ...] | None) -> argparse.ArgumentParser:
    """Parser with the names of all commands and the options of the ``chosen`` one."""
    parser = argparse.ArgumentParser(
        PROGRAM, description="Lossless compressed communication for DeepSpeed.", allow_abbrev=False
    )
    parser.set_defaults(parser=parser)
    parser.add_argument("--version", action="version", version=f"ds_zipccl {__version__}")
    levels: dict[tuple[str, ...], Any] = {(): parser.add_subparsers(metavar="COMMAND", required=True)}
    for group, text in GROUPS.items():
        sub = levels[()].add_parser(group, help=text, description=text, allow_abbrev=False)
        levels[(group,)] = sub.add_subparsers(metavar="WHAT", required=True)
    for words, (name, text) in COMMANDS.items():
        command = levels[words[:-1]].add_parser(
            words[-1], help=text, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        if words == chosen:
            module = importlib.import_module(f"ds_zipccl.{name}")
            command.description = (module.__doc__ or text).replace("``", "")
            module.add_arguments(command)
            command.set_defaults(main=module.main, parser=command)
    return parser


def _refuse(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """Exit with status 2 and name the options that may have been meant; argparse by itself shows the usage of the whole program."""
    known = re.findall(r"--[a-z][a-z-]*", parser.format_usage())
    near = [found for word in unknown for found in difflib.get_close_matches(word.partition("=")[0], known, 1)]
    hint = f"did you mean {' '.join(near)}?" if near else f"{parser.prog} --help lists the options"
    parser.error(f"unknown: {' '.join(unknown)}; {hint}")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Arguments of a command line without the program's name; exits with status 2 if the line makes no sense."""
    chosen = next((command for command in COMMANDS if tuple(words[: len(command)]) == command), None)
    args, unknown = _parser(chosen).parse_known_args(words)
    if unknown:
        _refuse(args.parser, unknown)
    args.command = shlex.join([*PROGRAM.split(), *words])
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        Exit status: 0 all is well; 1 a measured result is wrong, or no route works here; 2 the command could not do its task.
    """
    args = parse(list(sys.argv[1:] if argv is None else argv))
    from ds_zipccl.tools import tables

    try:
        tables.check_outputs(args)
        return int(args.main(args))
    except ToolError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # of `| head`; the last flush of the interpreter must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
