"""The short scripts of examples/recipes, as their users start them: coded, and with the bits of plain DeepSpeed.

The section of each config stays where it is, and gets the keys that make tiny messages coded. One launch of two ranks for each run.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import programs
import pytest
from places import EXAMPLES, ROOT

pytestmark = pytest.mark.full(
    reason="a dozen launches; test_hf.py, test_moe.py, test_parallel.py have the same engines"
)

RECIPES = EXAMPLES / "recipes"
STEPS = 4
#: Beside the keys of the example's own section.
ADDED = {"mode": "always", "min_bytes": 1024, "step_log": "steps.jsonl"}
#: Script -> the roles of its coded messages, and its packages.
SCRIPTS = {
    "hf_trainer_lora": (("zero_param",), ("transformers", "accelerate", "peft")),
    "accelerate_finetune": (("zero_param", "zero_grad"), ("transformers", "accelerate")),
    "deepspeed_moe": (("ep", "zero_grad"), ()),
    "autotp": (("tp",), ("transformers",)),
    "pipeline": (("pp",), ()),
}
#: Scripts of SCRIPTS that save weights, in the folder ``out``.
SAVING = ("hf_trainer_lora", "accelerate_finetune")
LOSS = re.compile(r"\bloss'?:? '?(\d[\d.e+-]*)")


@dataclass(frozen=True)
class Run:
    """Losses in the order of printing, of all ranks; hashes of saved files; lines of the step log."""

    losses: list[str]
    files: dict[str, str]
    log: list[dict[str, Any]]

    def sent(self, role: str, first: int = 1) -> tuple[int, int]:
        """Bytes before and after coding of a role's coded messages, from step ``first`` on."""
        roles = [line["roles"].get(role, {}) for line in self.log if line["step"] >= first]
        return sum(one.get("logical_bytes", 0) for one in roles), sum(one.get("wire_bytes", 0) for one in roles)


def trained(script: str, config: str, folder: Path, ds_zipccl: str) -> Run:
    """Run a script on two ranks with a config; ``ds_zipccl`` is the variable ``DS_ZIPCCL``."""
    content = json.loads((RECIPES / f"{config}.json").read_text())
    content["zipccl"] = content["zipccl"] | ADDED
    (folder / "config.json").write_text(json.dumps(content))
    environment = {"DS_ZIPCCL": ds_zipccl, "HF_HUB_OFFLINE": "1"}
    ended = programs.run([__file__, script, str(STEPS)], [environment] * 2, folder)
    assert not any(end.status for end in ended), "\n".join(end.text[-3000:] for end in ended)
    log = folder / "steps.jsonl"
    saved = sorted((folder / "out").glob("*.safetensors"))
    return Run(
        [loss for end in ended for loss in LOSS.findall(end.text)],
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in saved},
        [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else [],
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """:func:`trained` in a folder of its own; each run happens once."""

    @functools.cache
    def once(script: str, config: str, ds_zipccl: str = "") -> Run:
        return trained(script, config, tmp_path_factory.mktemp("run"), ds_zipccl)

    return once


@pytest.mark.parametrize("script", SCRIPTS)
def test_recipe_is_coded_and_keeps_its_bits(script: str, run: Callable[..., Run]) -> None:
    roles, packages = SCRIPTS[script]
    for package in packages:
        pytest.importorskip(package)
    plain, coded = run(script, script, "0"), run(script, script)
    assert len(set(coded.losses)) >= STEPS and coded.losses == plain.losses
    assert coded.files == plain.files and bool(coded.files) == (script in SAVING)
    assert not plain.log and [line["step"] for line in coded.log] == list(range(1, STEPS + 1))
    for role in roles:
        logical, wire = coded.sent(role)
        assert 0 < wire < logical, (role, coded.log)


def test_frozen_weights_of_lora_are_gathered_once(run: Callable[..., Run]) -> None:
    pytest.importorskip("peft")
    logical, wire = run("hf_trainer_lora", "hf_trainer_lora").sent("zero_param", first=2)
    assert logical > 50 * wire > 0


def test_the_config_of_axolotl_trains_with_trainer(run: Callable[..., Run]) -> None:
    """That of LLaMA-Factory is the one of ``hf_trainer_lora`` but for three keys (tests/docs/test_docs.py)."""
    pytest.importorskip("peft")
    plain, coded = run("hf_trainer_lora", "hf_trainer_lora", "0"), run("hf_trainer_lora", "axolotl_z3")
    assert coded.losses == plain.losses and coded.files == plain.files
    logical, wire = coded.sent("zero_param")
    assert 0 < wire < logical


# ---- the notebook: its code cells run in order, without Jupyter ------------------------------------------------------


def cells(kind: str) -> list[str]:
    """The cells of a kind in the notebook."""
    content = json.loads((RECIPES / "two_ranks.ipynb").read_text())
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
    assert all(not cell.get("outputs") for cell in content["cells"]), "outputs are of one machine, and grow the file"
    return ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == kind]


@pytest.mark.network
def test_cells_run_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With fewer steps than a reader takes."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    state: dict[str, Any] = {}
    steps = 0
    for number, code in enumerate(cells("code")):
        shorter = code.replace("STEPS = 20", "STEPS = 6")
        steps += shorter != code
        exec(compile(shorter, f"cell {number}", "exec"), state)
    assert steps == 1
    rows = state["rows"]
    assert list(rows) == ["plain", "raw", "coded"] and state["link"] in ("100mbit", "loopback")
    assert rows["coded"]["wire_bytes"] < rows["raw"]["wire_bytes"] <= rows["plain"]["wire_bytes"]
    times, sizes = state["figure"].axes
    assert [patch.get_height() for patch in sizes.patches] == [row["wire_bytes"] / 1e6 for row in rows.values()]
    assert len(times.patches) == 2 * len(rows)
    assert not list(tmp_path.iterdir()), "the notebook leaves no file behind"


def test_the_notebook_says_that_times_are_local() -> None:
    assert "of this machine only" in cells("markdown")[0]


# ---- the program of one rank ---------------------------------------------------------------------------------------


def rank_program(script: str, steps: str) -> None:
    """Become the script. An environment of Accelerate comes from its own launcher."""
    import deepspeed
    import torch

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # an unused operator that takes a minute to build
    path = str(RECIPES / f"{script}.py")
    options = ["--steps", steps]
    if script != "accelerate_finetune":  # the launcher of DeepSpeed gives it to each script; that of torch does not
        options.append(f"--local_rank={os.environ['LOCAL_RANK']}")
    if script == "accelerate_finetune":
        os.environ |= environment_of_accelerate(path) | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "config.json"}
        options += ["--out", "out"]
    else:
        options += ["--deepspeed", "config.json"] + ["--out", "out"] * (script == "hf_trainer_lora")
    sys.argv = [path, *options]
    runpy.run_path(path, run_name="__main__")


def environment_of_accelerate(script: str) -> dict[str, str]:
    """The variables that ``accelerate launch --config_file accelerate_finetune.yaml`` sets."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    given = ["--config_file", str(RECIPES / "accelerate_finetune.yaml"), "--main_process_port", "0", script]
    with mock.patch.object(launch, "deepspeed_launcher") as launcher:
        launch.launch_command(launch.launch_command_parser().parse_args(given))
    args = launcher.call_args.args[0]
    _, environment = prepare_deepspeed_cmd_env(args)
    config = ROOT / environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"]
    assert config == RECIPES / "accelerate_finetune.json" and args.num_processes == 2
    return {name: value for name, value in environment.items() if name.startswith("ACCELERATE_")}


if __name__ == "__main__":
    rank_program(*sys.argv[1:])
