"""The commands of docs/recipes.md, as their users type them: coded, and with the bits of plain DeepSpeed.

``DS_ZIPCCL`` has the section of each config, and the keys that make tiny messages coded. Trainers that the environment of development lacks
are skipped there; docs/recipes.md says what each needs.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engines import digest
from places import EXAMPLES, ROOT
from safetensors.torch import load_file

pytestmark = pytest.mark.full(
    reason="a dozen launches; test_hf.py, test_moe.py, test_parallel.py have the same engines"
)

RECIPES, PAGE = EXAMPLES / "recipes", (ROOT / "docs" / "recipes.md").read_text()
STEPS = 4
#: Beside the keys of the example's own section.
ADDED = {"mode": "always", "min_bytes": 1024, "step_log": "steps.jsonl"}
#: Script and options -> the roles of its coded messages, its config, and a package that not every environment has.
ADAPTERS, WHOLE = (("zero_param",), "hf_trainer_lora"), (("zero_param", "zero_grad"), "hf_trainer_lora")
SCRIPTS = {
    "hf_trainer_lora": (*ADAPTERS, "peft"),
    "accelerate_finetune": (("zero_param", "zero_grad"), "accelerate_finetune", "accelerate"),
    "deepspeed_moe": (("ep", "zero_grad"), "deepspeed_moe", "torch"),
    "autotp": (("tp",), "autotp", "transformers"),
    "pipeline": (("pp",), "pipeline", "torch"),
    "trl_lora": (*ADAPTERS, "trl"),
    "trl_lora --dpo": (*ADAPTERS, "trl"),
    "trl_lora --full": (*WHOLE, "trl"),
    "trl_lora --dpo --full": (*WHOLE, "trl"),
    "llamafactory": (("zero_param",), "llamafactory_z3", "llamafactory"),
}
#: Scripts of SCRIPTS that save no weights in the folder ``out``.
NOT_SAVING = ("deepspeed_moe", "autotp", "pipeline")
LOSS = re.compile(r"loss'?:? '?(\d[\d.e+-]*)")

#: A program that writes a tiny Llama and a tokenizer of bytes into the folder ``llama``.
MODEL = """
import torch, transformers
from tokenizers import Tokenizer, models, pre_tokenizers
tokenizer = Tokenizer(models.BPE({one: number for number, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|eot_id|>").save_pretrained("llama")
torch.manual_seed(0)
shape = transformers.LlamaConfig(vocab_size=320, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4)
transformers.LlamaForCausalLM(shape).bfloat16().save_pretrained("llama")
"""


#: Python runs this at its start: DeepSpeed compiles no operator of inference, for minutes in every new environment.
SITE = """
import collections, sys
class NoOperators:
    def find_spec(name, *more):
        if name == "deepspeed.comm.torch":
            sys.modules["deepspeed.ops"].__compatible_ops__ = collections.defaultdict(bool)
sys.meta_path.insert(0, NoOperators)
"""


@dataclass(frozen=True)
class Run:
    """Losses that the ranks printed, in order of size; hashes of saved tensors; lines of the step log."""

    losses: list[str]
    files: dict[str, str]
    log: list[dict[str, Any]]

    def sent(self, role: str, first: int = 1) -> tuple[int, int]:
        """Bytes before and after coding of a role's coded messages, from step ``first`` on."""
        roles = [line["roles"].get(role, {}) for line in self.log if line["step"] >= first]
        return sum(one.get("logical_bytes", 0) for one in roles), sum(one.get("wire_bytes", 0) for one in roles)


def command(script: str, folder: Path) -> list[str]:
    """The command of the page that starts a script, with the script's options and fewer steps."""
    if script == "llamafactory":
        return llamafactory(folder)
    name, *options = script.split()
    (found,) = set(re.findall(rf"`((?:torchrun|accelerate launch) \S.* examples/recipes/{name}\.py)`", PAGE))
    return [*shlex.split(found), *options, "--steps", str(STEPS)]


def llamafactory(folder: Path) -> list[str]:
    """Make a model, a data set and the files of the page in ``folder``; return the command of the page for CPUs."""
    (program,) = re.findall(r"^```python\n(import deepspeed\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (started,) = re.findall(r"`(torchrun \S+ \d \S+ llamafactory_lora\.yaml)`", PAGE)
    (folder / shlex.split(started)[-2]).write_text(program)
    shutil.copy(RECIPES / "llamafactory_z3.json", folder)
    text = (RECIPES / "llamafactory_lora.yaml").read_text()
    own = re.sub(r"(?m)^(model_name_or_path: ).*", r"\1llama", text)
    (folder / "llamafactory_lora.yaml").write_text(own + "use_cpu: true\nlogging_steps: 1\n")
    subprocess.run([sys.executable, "-c", MODEL], cwd=folder, check=True)
    lines = Path(__file__).read_text().splitlines()[: 16 * STEPS]
    (folder / "data").mkdir()
    (folder / "data/lines.json").write_text(
        json.dumps([{"instruction": one, "input": "", "output": one} for one in lines])
    )
    (folder / "data/dataset_info.json").write_text(json.dumps({"alpaca_en_demo": {"file_name": "lines.json"}}))
    return shlex.split(started)


def trained(script: str, config: str, folder: Path, coded: bool, options: Sequence[str] = ()) -> Run:
    """Run the command of a script in ``folder``, where ``examples`` is, coded with the section of ``config`` or plain."""
    (folder / "examples").symlink_to(EXAMPLES)
    (folder / "sitecustomize.py").write_text(SITE)
    section = json.loads((RECIPES / f"{config}.json").read_text())["zipccl"] | ADDED
    environment = os.environ | {
        "DS_ZIPCCL": json.dumps(section) if coded else "0",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        "PET_STANDALONE": "1",  # torchrun takes a free port
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hub"),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # else the optimizer of each rank loads torch's compiler
    }
    words = [*command(script, folder), *options]
    ended = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said[-6000:]
    log, files = folder / "steps.jsonl", {}
    for path in sorted((folder / "out").rglob("*.safetensors")):
        files |= {f"{path.relative_to(folder)} {key}": digest([tensor]) for key, tensor in load_file(path).items()}
    lines = log.read_text().splitlines() if log.exists() else []
    return Run(sorted(LOSS.findall(said)), files, [json.loads(line) for line in lines])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """:func:`trained` in a folder of its own; each run happens once."""

    @functools.cache
    def once(script: str, config: str, coded: bool = True, options: tuple[str, ...] = ()) -> Run:
        return trained(script, config, tmp_path_factory.mktemp("run"), coded, options)

    return once


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_command_of_the_page_is_coded_and_keeps_its_bits(script: str, run: Callable[..., Run]) -> None:
    roles, config, package = SCRIPTS[script]
    pytest.importorskip(package)
    plain, coded = run(script, config, False), run(script, config)
    assert len(set(coded.losses)) >= STEPS and coded.losses == plain.losses
    assert coded.files == plain.files and bool(coded.files) == (script not in NOT_SAVING)
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
    given = ("--deepspeed", "examples/recipes/axolotl_z3.json")
    plain, coded = run("hf_trainer_lora", "hf_trainer_lora", False), run("hf_trainer_lora", "axolotl_z3", True, given)
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
