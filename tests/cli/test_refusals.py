"""Requests that the command line refuses: it ends with status 2 before it does anything, and says what to do."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

import pytest
from commands import Capture, assert_refused
from places import ROOT

from ds_zipccl.__main__ import COMMANDS, main
from ds_zipccl.tools import ToolError, link

COUNTS = [
    (f"{option} {number}", f"{number!r} is not a whole number from 1 to ")
    for option in ("--gpus", "--gpus-per-node", "--params", "--accumulation", "--bucket", "--tokens")
    for number in ("99999999999999999999999", "1e999", "nan", "0", "-8", "1.5", "many")
]
#: Beginning of a request -> its ends, and the message of each.
REFUSED: dict[str, list[tuple[str, str]]] = {
    "": [
        ("", "required"),
        ("nosuch", "report"),
        ("analyze /nonexistent/file", "cannot read"),
        (f"analyze {__file__}", "neither"),
        (f"analyze {__file__} --data normal", "write - instead"),
        ("steps /nonexistent/run.jsonl", "cannot read"),
        ("steps /dev/null", "it is empty"),
    ],
    "doctor": [
        ("--params 1e30", "from 1 to 1e+15"),
        ("--params 1e9", "name --ds-config too"),
        ("--step-ms 400", "name --params too"),
        ("--trainable 1e9", "--trainable is a part of --params"),
        ("--ranks 1", "--ranks must be at least 2"),
        ("--ds-config missing.json", "cannot read the DeepSpeed config of the job missing.json"),
        ("--report /nonexistent/x", "cannot write /nonexistent/x"),
        ("--params -1", "is not a whole number from 1"),
    ],
    "plan": [
        *COUNTS,
        ("", "missing: --gpus and --params or --model and --network, such as --network 8x100gbit/node"),
        ("--gpus 16 --network", "missing: --params or --model"),
        ("--model missing.json --gpus 16", "cannot read the config of the model missing.json"),
        ("--adapter adapter --gpus 16", "--adapter adds to a model: name --model too"),
        ("--params 1e9 --trainable 2e9 --gpus 16", "--trainable is a part of --params or --model"),
        ("--nosuch", "plan: error: unknown: --nosuch; python -m ds_zipccl plan --help lists the options"),
    ],
    "plan --params 1e9 --gpus 16 --gpus-per-node 4 --network 10gbit/gpu --live 0": [
        ("--params 0", "70e9"),
        ("--gpus 18", "two nodes"),
        ("--gpus 4", "two nodes"),
        ("--network 10gbit", "write 10gbit/node for all cards of a node, or 10gbit/gpu"),
        ("--trainable 2e9", "--trainable is a part of --params or --model"),
        ("--zero 4", "1, 2, 3"),
        ("--ratio 0", "above 0"),
        ("--delta-ratio 0.9", "at least 1"),
        ("--delta-ratio inf", "at least 1"),
        ("--delta-ratio nan", "at least 1"),
        ("--delta on", "auto"),
        ("--owner-only on", "auto"),
        ("--zero3-base disk", "host"),
        ("--zero3-base host --zero 2", "add --zero 3"),
        ("--zero3-base host --delta off", "--delta auto"),
        ("--dtype e4m3", "float32"),
        ("--backend gloo", "plan: error: unknown: --backend gloo"),
        ("--gpu-profile /nonexistent", "cannot read"),
        (f"--gpu-profile {ROOT}/docs/results/train.json", "holds no speeds"),
        (f"--gpu-profile {ROOT}/pyproject.toml", "cannot read"),
        (f"--gpu-profile {ROOT}/docs/results/cuda.json --dtype fp32", "has no row for cascade of normal float32"),
    ],
    "plan --params 7e9 --gpus 32 --gpus-per-node 8 --live 0": [
        ("", "missing: --network, such as --network 8x100gbit/node"),
        ("--network fast", "'fast' is not a network; write"),
        ("--network 0gbit/node", "is not a network; write"),
        ("--network 10gbit-tcp", "write 10gbit-tcp/node for all cards of a node, or 10gbit-tcp/gpu"),
        ("--network --gpu-profile assumed-2", "cannot read"),
        ("--network --gpus 12", "two nodes"),
        ("--network --expert-parallel 6", "autoep_size is 6, wanted is a divisor of experts and GPUs"),
        ("--network --tflops 400", "wants --tflops and --tokens"),
        ("--network --plot x.png", "wants --tflops and --tokens"),
        ("--network --expert-parallel 8 --tokens 9", "got None and 9; --tokens alone is for experts of --model"),
        ("--network --tflops 0 --tokens 1", "above 0"),
        ("--network --tflops 1 --tokens 1 --overlap 1.5", "--overlap is wanted from 0 to 1"),
        ("--network --hop -1", "--hop must be at least 0"),
    ],
    "bench codec": [
        ("--numl 64K", "codec: error: unknown: --numl 64K; did you mean --numel?"),
        ("--data nosuch", "known: normal"),
        ("--data normal:0", "number above 0"),
        ("--data zeros:2", "has no scale"),
        ("--numel 1.5M", "64K"),
        ("--route nosuch", "native"),
        ("--dtype bf16 --data bf16_in_fp32", "for fp32"),
        ("--threads 0", "at least 1, got 0"),
        ("--peers nosuch", "zipnn"),
        ("--corpus /nonexistent/file", "cannot read"),
        ("--tile", "--corpus"),
        ("--data changed:1%", "add --codec delta"),
        ("--data changed:1 --codec delta", "percentage"),
        ("--data changed:101% --codec delta", "percentage"),
        ("--data adamw:2 --codec delta", "a rate"),
        ("--data normal --codec delta", "has no base"),
        ("--codec delta raw", "name it alone"),
        ("--codec delta --dtype e4m3", "bf16, fp16 and fp32"),
        ("--codec delta --peers lz4", "does not code differences"),
        ("--peers pairs", "add --codec delta"),
        ("--data repeated:10%", "add --codec rows"),
        ("--data repeated:10 --codec rows", "percentage"),
        ("--data scaled:101% --codec rows", "percentage"),
        ("--data normal --codec rows", "no repeated or scaled rows"),
        ("--codec rows raw", "name it alone"),
        ("--codec rows --width 0", "at least 1"),
        ("--codec rows --device cuda", "cpu only"),
        ("--codec rund", "no codec 'rund'; the lossy codecs are round, taco_fp8, int, zfp"),
        ("--codec round:7", "mantissa of round must be 1 to 6, got '7'"),
        ("--codec round:3:4", "the settings of round are mantissa, each once"),
        ("--codec int:8:bits=6", "the settings of int are bits, group, hadamard, each once"),
        ("--codec round delta", "name it alone"),
        ("--codec round --peers lz4", "--peers are lossless"),
        ("--codec round --data changed:1%", "add --codec delta"),
        ("--codec round --dtype e4m3 --data normal", "no tensor of a dtype that lossy codecs take"),
    ],
    "bench doctor": [
        ("--link loopback", "--link wants a rate"),
        ("--link 1gbit --steps 3", "need --steps > --skip"),
    ],
    "bench comm": [("--ranks 1", "at least 2"), ("--op nosuch", "all_gather")],
    "bench train": [
        *((f"--set {bad}", bad.split("=")[0]) for bad in ("zero3_base=disk", "zero3", "mode=never", "delta")),
        ("--workload zero3 moe --variants zeropp", "zeropp needs ZeRO-3: leave it out with --workload moe"),
        ("--variants plain code", "'code' is no variant"),
    ],
}  # fmt: skip
for bench in ("bench comm", "bench train"):
    REFUSED[bench] += [
        ("--link 1gbit --ranks 4 6 --nodes 4", "got 4 nodes for 6 ranks"),
        ("--link 1gbit --ranks 2 --nodes 4", "got 4 nodes for 2 ranks"),
        ("--link 1gbit --ranks 2 --nodes 0", "got 0 nodes for 2 ranks"),
        ("--link loopback --ranks 2 --nodes 2", "--nodes needs a --link"),
    ]
CASES = [(begin, *case) for begin, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(
    ("begin", "end", "message"), CASES, ids=[f"{begin.split(' --')[0]} {end}" for begin, end, _ in CASES]
)
def test_refused_requests(begin: str, end: str, message: str, capsys: Capture) -> None:
    assert_refused([*begin.split(), *end.split()], message, capsys)


NO_LINKS = ["", "1 gbit", *"1 1Gbit -1gbit 1e9bit gbit 1gbit; 1gbit, 1gbit,20 1gbit,0.1 1gbit,~2ms 20ms 0.1%".split()]
NO_LINKS += "1gbit,0.1%,20ms 1gbit,20ms,20ms 1gbit,-1ms 1gbit,-1% loopback,20ms".split()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "is not a link; write RATE") for text in NO_LINKS),
        ("5kbit", "rate must be at least 100kbit"),
        ("1gbit,0ms", "delay must be from 1us to 2s"),
        ("1gbit,2.1s", "delay must be from 1us to 2s"),
        ("1gbit,20ms~0us", "jitter must be from 1us to the delay"),
        ("1gbit,20ms~21ms", "jitter must be from 1us to the delay"),
        ("1gbit,0%", "loss must be above 0% and at most 20%"),
        ("1gbit,100%", "loss must be above 0% and at most 20%"),
    ],
)
def test_refused_links(text: str, message: str, capsys: Capture) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(message)):
        link.parse(text)
    assert_refused(["bench", "comm", f"--link={text}"], message, capsys)


# ---- files that commands write: told before the measurement where they cannot be written, and as before until there are results

#: Every command that writes a file, with an option of each kind that it has.
WRITERS = [
    *[[*words, "--json"] for words in COMMANDS],
    *[[*words, "--plot"] for words in (("bench", "train"), ("steps", "-"), ("plan",))],
]


@pytest.mark.parametrize("words", WRITERS, ids=" ".join)
def test_files_that_cannot_be_written_are_told_at_once(
    words: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command itself does not begin."""
    name = COMMANDS[tuple(word for word in words if word[0] != "-")][0]
    monkeypatch.setattr(f"ds_zipccl.{name}.main", lambda args: pytest.fail("the command has begun"))
    if words[0] in ("analyze", "steps") and words[-2] != "-":
        words = [words[0], "-", words[-1]]
    for path in (tmp_path, tmp_path / "missing" / "x", "/proc/x", ""):
        assert_refused([*words, str(path)], "cannot write", capsys)


def test_files_are_as_before_until_there_are_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new, old, link, pipe = (tmp_path / name for name in ("new", "old", "link", "pipe"))
    old.write_text("kept")
    link.symlink_to(tmp_path / "later")
    os.mkfifo(pipe)
    seen = []

    def begin(args: Any) -> int:
        seen.append(old.read_text())
        assert not new.exists() and link.is_symlink() and not link.exists()
        raise ToolError("no result")

    monkeypatch.setattr("ds_zipccl.cli.report.main", begin)
    for path in (new, old, link, pipe):
        assert main(["report", "--json", str(path)]) == 2
    assert (
        seen == ["kept"] * 4 and old.read_text() == "kept" and sorted(os.listdir(tmp_path)) == ["link", "old", "pipe"]
    )
    monkeypatch.setenv("RANK", "1")
    assert main(["report", "--json", "/nonexistent/x"]) == 2  # rank 0 writes, here or on another machine
    assert len(seen) == 5


def test_one_file_for_table_and_picture(tmp_path: Path, capsys: Capture) -> None:
    path = str(tmp_path / "x.png")
    assert_refused(["steps", "-", "--json", path, "--plot", path], "are one file", capsys)
