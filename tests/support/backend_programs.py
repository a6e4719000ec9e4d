"""Programs of n ranks that use DeepSpeed with the backend: a prelude for their text, and launches that return what each rank said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import programs

PRELUDE = """
import json, os, sys, time
import deepspeed
import deepspeed.comm as dist
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
import torch
rank = int(os.environ["RANK"])
def engine(section, stage=2, **more):
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage},
              "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, **more}
    if section is not None:
        config["zipccl"] = section
    torch.manual_seed(1)
    model = torch.nn.Linear(256, 256)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
def steps(engine, count):
    for _ in range(count):
        engine.backward(engine(torch.ones(1, 256, dtype=torch.bfloat16)).float().mean())
        engine.step()
def backend():
    return type(deepspeed.comm.comm.cdb).__name__
def leave():
    dist.barrier()
    torch.distributed.destroy_process_group()
    time.sleep(0.2)  # as in examples/train_gpt.py: torch may abort at exit otherwise, with or without ds_zipccl
"""
#: Seconds that a launch may take.
_SECONDS = 180


def launch(
    folder: Path, program: str, ranks: int = 2, fresh: bool = False, **environment: str | list[str]
) -> list[tuple[int, str]]:
    """Run ``program`` on ranks; (exit status, output) of each.

    Args:
        fresh: start an interpreter for each rank, for programs about the import and the activation. Without it ranks are forked from a
            process that has imported DeepSpeed.
        environment: changes to the environment. A list has one value per rank ("" = unset).
    """
    script = folder / "program.py"
    script.write_text(program)
    # DeepSpeed's optimizers would load torch's compiler, for six seconds a rank.
    values = {"DS_ZIPCCL": "", "DEEPSPEED_TIMEOUT": "2", "TORCHDYNAMO_DISABLE": "1", **environment}
    own = [
        {key: value if isinstance(value, str) else value[rank] for key, value in values.items()}
        for rank in range(ranks)
    ]
    if not fresh:
        ended = programs.run([str(script)], own, folder, timeout=_SECONDS, grace=_SECONDS)
        return [(end.status, end.text) for end in ended]
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(programs.free_port())}
    place |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    started = []
    try:
        for rank in range(ranks):
            environ = {**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank), **own[rank]}
            environ = {key: value for key, value in environ.items() if value}
            command, pipe = [sys.executable, str(script)], subprocess.PIPE
            started.append(
                subprocess.Popen(command, env=environ, cwd=folder, text=True, stdout=pipe, stderr=subprocess.STDOUT)
            )
        said = [process.communicate(timeout=_SECONDS)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


def succeed(
    folder: Path, program: str, ranks: int = 2, fresh: bool = False, **environment: str | list[str]
) -> list[str]:
    """Outputs of the ranks of ``PRELUDE + program``; fails where a rank does."""
    results = launch(folder, PRELUDE + program, ranks, fresh, **environment)
    for status, output in results:
        assert status == 0, output
    return [output for _, output in results]


def found(folder: Path, program: str, ranks: int = 2, **environment: str | list[str]) -> tuple[list[Any], list[str]]:
    """What each rank of ``PRELUDE + program`` has printed as JSON behind "FOUND", and the outputs."""
    texts = succeed(folder, program, ranks, **environment)
    return [json.loads(text.split("FOUND ", 1)[1].splitlines()[0]) for text in texts], texts
