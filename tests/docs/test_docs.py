"""README.md and the pages in docs say what the code says: generated sections, support matrix, commands, links and names."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch
import yaml
from deepspeed.comm.torch import TorchBackend
from deepspeed.launcher.runner import fetch_hostfile
from places import EXAMPLES, ROOT
from torch.distributed.run import get_args_parser

import ds_zipccl
from ds_zipccl.__main__ import parse
from ds_zipccl.config import DEFAULT, ROLES, ZipcclConfig, parse_section
from ds_zipccl.integration import backend
from ds_zipccl.integration.start_line import Group, lossy_line
from ds_zipccl.lossy import Round
from ds_zipccl.ops import OPS
from ds_zipccl.policy import admission, wire
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.telemetry import counters, table

sys.path.insert(0, str(ROOT / "docs"))
generate = importlib.import_module("generate")
measured = importlib.import_module("measured")
trained = importlib.import_module("trained")

PAGES = generate.pages()
README = ROOT / "README.md"
LINES = README.read_text().splitlines()
#: The page with the support matrix.
MATRIX = ROOT / "docs" / "index.md"
#: Files with links, beside the pages.
OTHERS = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
COMMAND = re.compile(r"^(?:    )?(?:sudo -E )?(?:python|torchrun .+?) -m ds_zipccl (.+?)(?:  |$)", re.MULTILINE)


def name(page: Any) -> str:
    return str(Path(page).name) if isinstance(page, Path) else str(page)


def section(page: Path, marker: str) -> str:
    """The generated section of a page as it stands there."""
    found = re.search(rf"<!-- begin {marker} -->\n(.*?)\n<!-- end -->", page.read_text(), re.DOTALL)
    assert found is not None, f"{page} has no section {marker}"
    return found[1]


# ---- generated sections ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_generated_sections_are_up_to_date(page: Path) -> None:
    assert generate.generate(page.read_text(), page) == page.read_text(), "run python docs/generate.py"


def test_every_section_is_on_some_page() -> None:
    found = {marker for page in PAGES for marker in re.findall(r"<!-- begin (\w+) -->", page.read_text())}
    assert found == set(generate.SECTIONS)


def test_an_edited_section_is_noticed_and_an_unknown_one_refused() -> None:
    edited = README.read_text().replace("LoRA, FSDP2", "LoRA, FSDP")
    assert generate.generate(edited, README) != edited != README.read_text()
    with pytest.raises(KeyError, match="nonsense"):
        generate.generate("<!-- begin nonsense -->\n<!-- end -->", README)


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "results").glob("*.json")), ids=name)
def test_results_are_shown_with_their_origin(path: Path) -> None:
    content = measured.results(path.stem)
    origin = measured.provenance(content)
    assert any(generate.folded(origin) in page.read_text() for page in (ROOT / "docs").glob("*.md"))
    for fact in (content["date"], content["machine"]["processor"], content["versions"]["torch"]):
        assert fact in origin


def test_phases_of_a_training() -> None:
    """A peak, and the halves of the decay after it."""
    found = trained.phases([0, 0.5, 1, 0.95, 0.8, 0.6, 0.4, 0.2, 0.1, 0])
    assert list(found.values()) == [[2, 3], [2, 3, 4, 5], [6, 7, 8, 9], [9]]


def test_pages_fit_in_120_columns() -> None:
    """Tables, hand-written commands, output and HTML are as long as they are."""
    for page in (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"):
        text = re.sub(r"^ *```.+?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        long = [line for line in text.splitlines() if len(line) > 120 and not re.match(r"\||    |\s*<", line)]
        assert not long, f"{page.name}: {long}"


# ---- README ----------------------------------------------------------------------------------------------------------


def test_readme_is_short_and_keeps_its_order() -> None:
    assert len(LINES) <= 110
    assert "NCCL" in "\n".join(LINES[:45])
    order = ["pip install", "make demo", '"zipccl": {', "begin jobs", "doctor", "results/train.png", "how-dark.svg"]
    order += ["how-light.svg", "## Guarantees", "make test", "Apache-2.0", "CITATION"]
    text, at = README.read_text(), 0
    for part in order:
        assert part in text[at:], f"{part} is missing, or not in its place"
        at = text.index(part, at)
    rows = section(README, "jobs").splitlines()[2:]
    assert 4 <= len(rows) <= 9 and all(row.startswith("|") for row in rows)
    assert re.search("no gain|slower", rows[-1]) and "a model" in rows[-2], "a row without gain, and one of a model"


def test_benchmarks_begin_with_five_measured_jobs_whose_figures_stand_in_their_sections() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    rows = section(ROOT / "docs" / "benchmarks.md", "front").splitlines()[2:]
    assert len(rows) == 5 and re.search("no gain|slower", rows[-1]) and page.index("begin front") < page.index("\n## ")
    for row in rows:
        place, plain, coded = re.search(r"\(#(.+?)\).*?\| (\d+) \| (\d+) \|", row).groups()  # type: ignore[union-attr]
        part = next(one for one in page.split("\n## ") if _anchor(one.split("\n")[0]) == place)
        assert f"| {plain} |" in part and f"| {coded} |" in part, row


def test_drawings_for_light_and_dark_pages_differ_in_colours_alone() -> None:
    texts = [(ROOT / "docs" / "results" / f"how-{theme}.svg").read_text() for theme in ("light", "dark")]
    light, dark = (re.sub("#[0-9a-f]{6}", "", text) for text in texts)
    assert light == dark and texts[0] != texts[1]
    ElementTree.fromstring(light)


def test_demo_prints_what_the_readme_says() -> None:
    printed = (ROOT / "examples" / "train_gpt.py").read_text()
    block = re.search(r"```text\n(.*?)```", README.read_text(), re.DOTALL)
    assert block is not None
    for line in block[1].splitlines():
        assert line.removesuffix("yes").strip() in printed


# ---- support matrix --------------------------------------------------------------------------------------------------


def rows() -> dict[tuple[str, str], list[str]]:
    """(device, backend) -> the cells of the matrix."""
    lines = section(MATRIX, "matrix").splitlines()
    cells = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]
    body = [line for line in cells if len(line) == 1 + len(generate.TRAFFIC)][2:]
    return {tuple(row[0].lower().split(", ")): row[1:] for row in body[:-1]}  # type: ignore[misc]


def test_matrix_has_every_coded_backend_and_nccl() -> None:
    coded = {(device, backend) for device, backends in admission.CODED_BACKENDS.items() for backend in backends}
    assert set(rows()) == coded | {("cuda", "nccl"), ("cpu", "gloo"), ("cuda", "gloo")}
    assert all(OPS[op].coded for operations, _ in generate.TRAFFIC.values() for op, _ in operations)


def test_matrix_says_what_the_policy_decides() -> None:
    for (device, place), cells in rows().items():
        streams = place in admission.STREAM_BACKENDS
        for column, text in zip(generate.TRAFFIC, cells, strict=True):
            operations, differences = generate.TRAFFIC[column]
            sends = any(OPS[op].point_to_point for op, _ in operations)
            coded = place in admission.CODED_BACKENDS.get(device, ())
            coded &= not streams or all(OPS[op].on_device for op, _ in operations)
            passes = not coded or (sends and device not in generate.POINT_TO_POINT_DEVICES)
            assert (text == generate.PASSES) == passes, (device, place, column)
            summed = streams and not passes and any("reduce" in op for op, _ in operations)
            assert (generate.SUMS in text) == summed and DEFAULT.nccl == "auto"
            based = differences is not None and not passes
            based &= all(generate.admitted(op, role, device, place).with_base for op, role in operations[1:])
            based &= not (streams and column == "FSDP2")  # no sizes are agreed on
            assert ("differences" in text) == based, (device, place, column)


def test_sends_pass_as_the_matrix_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend, not the policy, passes the sends of some devices through."""
    called: list[str] = []
    monkeypatch.setattr(TorchBackend, "send", lambda self, tensor, *rest: called.append("plain"))
    monkeypatch.setattr(ds_zipccl.comm, "send", lambda tensor, *rest, **more: called.append("coded"))
    ours = mock.MagicMock(zipccl=DEFAULT)  # the backend, without a process group
    ours.job.config, ours.job.role_of.return_value = DEFAULT, "pp"
    for device in generate.USED_BACKENDS:
        tensor = mock.MagicMock(numel=lambda: 1 << 20, element_size=lambda: 2, **{"device.type": device})
        backend._coded("send")(ours, tensor, 1)
    counters.reset()
    coded = tuple(device for device, by in zip(generate.USED_BACKENDS, called, strict=True) if by == "coded")
    assert coded == generate.POINT_TO_POINT_DEVICES


# ---- decisions -------------------------------------------------------------------------------------------------------

GOOD = admission.Message("all_reduce", torch.bfloat16, 1 << 20, 2, "cpu", "gloo", "dp", "SUM")


CHANGES = [{"numel": 1}, {"ranks": 1}, {"dtype": torch.int64}, {"reduce_op": "MAX"}, {"device": "xpu"}, {"role": "ep"}]


@pytest.mark.parametrize("change", [*CHANGES, {"device": "cuda", "backend": "nccl"}], ids=str)
def test_reasons_of_the_policy_have_a_remedy(change: dict[str, Any]) -> None:
    config = replace(DEFAULT, roles={"ep": "never"})
    assert admission.admit(GOOD, config).frames
    message = admission.Message(**{**vars(GOOD), **change})
    decision = admission.admit(message, config)
    fitting = [one for one in PassReason if re.fullmatch(re.escape(one.value).replace(r"\{\}", ".+"), decision.reason)]
    best = max(fitting, key=lambda one: len(one.value))
    assert not decision.frames and best.meaning and best.remedy
    assert f"`{best.of('...')}`" in section(ROOT / "docs" / "troubleshooting.md", "reasons")


def test_figures_of_the_text_are_those_of_the_code() -> None:
    def text(page: str) -> str:
        return " ".join((ROOT / "docs" / page).read_text().split())

    assert f"at least {wire.FRAGMENT_UNIT} elements" in text("how-it-works.md")
    assert f"each block of {DEFAULT.block} values" in text("how-it-works.md")


def test_help_texts_are_no_markdown() -> None:
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--link", metavar="LINK", help="RATE[,DELAY][,LOSS] or <none> | 5%%")

    text, _ = generate._options(SimpleNamespace(add_arguments=add_arguments))
    assert text.splitlines()[-1] == r"| `--link LINK` | RATE\[,DELAY\]\[,LOSS\] or \<none\> \| 5% |"


# ---- commands, targets, links and names ------------------------------------------------------------------------------

COMMANDS = [
    (page, one) for page in (*PAGES, *OTHERS) for one in COMMAND.findall(page.read_text().replace(" \\\n   ", ""))
]


def test_commands_parse() -> None:
    assert {page.name for page, _ in COMMANDS} >= {"README.md", "tools.md", "benchmarks.md", "how-it-works.md"}
    for page, command in COMMANDS:
        assert callable(parse(shlex.split(command)).main), (page.name, command)


def test_make_targets_exist() -> None:
    made = {target for page in (*PAGES, *OTHERS) for target in re.findall(r"\bmake ([a-z-]+)", _code(page.read_text()))}
    assert made >= {"demo", "test", "docs"}
    makefile = (ROOT / "Makefile").read_text()
    missing = [target for target in sorted(made) if not re.search(rf"^{target}:", makefile, re.MULTILINE)]
    assert not missing


def _code(text: str) -> str:
    """The parts of Markdown that are code: spans, and indented or fenced blocks."""
    spans = re.findall(r"`([^`\n]+)`", text)
    blocks = re.findall(r"^    .*$|^```\w*\n.*?^```", text, re.MULTILINE | re.DOTALL)
    return "\n".join([*spans, *blocks])


def _anchor(heading: str) -> str:
    """The anchor of a heading, as GitHub and mkdocs make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def _anchors(page: Path) -> set[str]:
    return set(map(_anchor, re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)))


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.is_file(), f"{page.name} links to {target}"
        assert not anchor or anchor in _anchors(goal), f"{page.name} links to {target}"
    for path in re.findall(r'^--8<-- "(.+)"$', page.read_text(), re.MULTILINE):
        assert (ROOT / path).is_file(), f"{page.name} includes {path}"


def test_names_of_the_python_api_exist() -> None:
    text = (ROOT / "docs" / "python-api.md").read_text()
    documented = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    for dotted in documented:
        module, _, attribute = dotted.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), dotted
    for exported in set(ds_zipccl.__all__) - {"__version__"}:
        assert f"ds_zipccl.{exported}" in documented
    for called in re.findall(r"\bds_zipccl\.(\w+)\(", text):
        assert called in ds_zipccl.__all__


def test_pages_of_the_site_are_in_its_navigation() -> None:
    listed = set(re.findall(r"^ +- [\w ]+: ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {page.name for page in PAGES if page.parent == ROOT / "docs"}


def test_citation_and_changelog_have_the_version() -> None:
    version = ds_zipccl.__version__
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert version in (ROOT / "CHANGELOG.md").read_text()


# ---- lossy modes and recipes: example configs, sections and lines that are quoted --------------------------------------

PAGE = (ROOT / "docs" / "lossy.md").read_text()
HYBRID, TACO, OPTIMUS = ((ROOT / "docs" / f"lossy-{name}.md").read_text() for name in ("hybrid", "taco", "optimus"))
RECIPES, RECIPES_PAGE = EXAMPLES / "recipes", (ROOT / "docs" / "recipes.md").read_text()
#: The key that names a DeepSpeed config in the file of a launcher.
NAMED = re.compile(r"^ *deepspeed(?:_config_file)?: (\S+\.json)$", re.MULTILINE)
#: Example -> the codecs of its roles; all other roles are lossless.
POLICIES = {
    "mzhybrid": {"zero_grad": Round(2), "dp": Round(2)},
    "zhybrid": {"zero_grad": Round(2), "dp": Round(2), "tp": Round(5), "pp": Round(5)},
}


@pytest.mark.parametrize("name", POLICIES)
def test_example_configs_are_the_policies_of_the_page(name: str) -> None:
    text = (ROOT / "examples" / f"ds_config_{name}.json").read_text()
    settings = json.loads(text)
    config = parse_section(settings["zipccl"])
    assert config.enabled and config.mode == "auto"
    found = {role: codec for role in ROLES if (codec := config.lossy_of(role)) is not None}
    assert found == POLICIES[name]
    assert settings["zero_optimization"]["stage"] == 1, "as in the paper"
    assert f'--8<-- "examples/ds_config_{name}.json"' in HYBRID
    plain = json.loads((ROOT / "examples" / "ds_config_zero1.json").read_text())
    assert {**settings, "zipccl": 0} == {**plain, "zipccl": 0}, "only our section differs from the lossless example"


def sections(text: str) -> list[ZipcclConfig]:
    """The sections that a page shows."""
    shown = re.findall(r'^```json\n("zipccl": .*?)\n```', text, re.MULTILINE | re.DOTALL)
    return [parse_section(json.loads(f"{{{one}}}")["zipccl"]) for one in shown]


def test_sections_of_the_pages_are_accepted() -> None:
    assert [len(config.lossy_roles) for config in sections(PAGE)] == [1]
    assert [sorted(config.lossy_roles) for config in sections(TACO)] == [["tp"]]
    (optimus,) = sections(OPTIMUS)
    assert sorted(optimus.lossy_roles) == ["dp", "pp"] and optimus.fused_embedding
    lossy = [config for config in sections((ROOT / "docs" / "configuration.md").read_text()) if config.lossy]
    assert [sorted(config.lossy_roles) for config in lossy] == [["tp", "zero_grad"]]


def test_lines_of_the_page_are_those_of_a_job() -> None:
    assert lossy_line([Group(2, {"cpu": "gloo"})], "cpu", sections(PAGE)[0]) in PAGE
    counters.reset()
    counters.record("tp", "all_reduce", 2350, 1000)
    counters.record_lossy("tp", "all_reduce", str(Round(3)), 4800)
    counters.record_error("tp", "all_reduce", str(Round(3)), 0.0265**2, 1.0)
    said = table.render().splitlines()[-1]
    counters.reset()
    assert f"\n{said}\n" in PAGE


def test_the_readme_promises_nothing_by_small_models() -> None:
    readme = (ROOT / "README.md").read_text()
    for words in ("Lossy only on request", "small models"):
        assert words in readme and words in PAGE
    assert "docs/lossy.md" in readme


# ---- recipes


def test_every_example_is_on_the_page() -> None:
    scripts = [*EXAMPLES.glob("*.py"), *(path for path in RECIPES.iterdir() if path.is_file())]
    assert len(scripts) > 20
    missing = [name for path in scripts if (name := path.relative_to(ROOT).as_posix()) not in RECIPES_PAGE]
    assert not missing


def test_files_of_the_page_exist() -> None:
    named = set(re.findall(r"examples/[\w/]+\.\w+", RECIPES_PAGE))
    assert len(named) > 20 and all((ROOT / name).is_file() for name in named)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.json")), ids=lambda path: str(path.stem))
def test_sections_switch_coding_on_and_nothing_is_lossy(path: Path) -> None:
    config = parse_section(json.loads(path.read_text())["zipccl"])
    assert config.enabled and config.mode == "auto" and not config.lossy
    assert config.nccl == "auto"


def test_the_config_of_llamafactory_is_that_of_trainer_in_most() -> None:
    """test_recipes.py trains with that of Trainer."""
    own, trainer = (
        json.loads((RECIPES / f"{name}.json").read_text()) for name in ("llamafactory_z3", "hf_trainer_lora")
    )
    assert own.pop("zero_allow_untested_optimizer") and own["zero_optimization"].pop("overlap_comm") is False
    assert own | {"zipccl": 0} == trainer | {"zipccl": 0}


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*[!2].yaml")), ids=lambda path: str(path.stem))  # not for FSDP2
def test_files_of_launchers_name_a_config(path: Path) -> None:
    (config,) = NAMED.findall(path.read_text())
    folder = ROOT if "/" in config else RECIPES  # users copy the files without a folder, both of them
    assert "zipccl" in json.loads((folder / config).read_text())


def test_values_auto_of_the_page_are_those_of_the_section() -> None:
    (said,) = re.findall(r"There only (.+?) know `\"auto\"`", RECIPES_PAGE, re.DOTALL)
    keys = set(re.findall(r"`(\w+)`", said))
    assert keys == {key for key, value in vars(DEFAULT).items() if value == "auto"}


def test_the_slurm_script_starts_torchrun_on_every_node(tmp_path: Path) -> None:
    """With commands of Slurm that say what they were called with; torchrun's own parser reads the rest."""
    script = RECIPES / "slurm.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script.read_text(), re.MULTILINE))
    assert asked["nodes"] == "2" and asked["ntasks-per-node"] == "1", "torchrun starts the ranks of a node"
    for command, lines in (("srun", 'printf "%s\\n" "$@"'), ("scontrol", "echo gpu07; echo gpu08")):
        (tmp_path / command).write_text(f"#!/bin/bash\n{lines}\n")
        (tmp_path / command).chmod(0o755)
    slurm = {
        "SLURM_JOB_NODELIST": "gpu[07-08]",
        "SLURM_JOB_ID": "81234567",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
    }
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **slurm}
    for given, wanted in (["train.py", "--deepspeed", "a b.json"],) * 2, ([], ["examples/recipes/hf_trainer_lora.py"]):
        said = subprocess.run(["bash", script, *given], env=environment, capture_output=True, text=True, check=True)
        program, *words = said.stdout.splitlines()
        found = get_args_parser().parse_args(words)
        assert program == "torchrun" and [found.training_script, *found.training_script_args] == wanted
        assert (found.nnodes, found.nproc_per_node, found.rdzv_endpoint) == ("2", "8", "gpu07:34567")


def test_nodes_of_torchrun_meet_without_a_rank_of_the_node() -> None:
    """Torchrun's default, static, waits for ever where every node is the first one."""
    commands = [line for page in (*PAGES, *OTHERS) for line in re.findall("torchrun (--nnodes .+)", page.read_text())]
    assert commands and {get_args_parser().parse_args(line.split()).rdzv_backend for line in commands} == {"c10d"}


def test_deepspeed_reads_the_hostfile() -> None:
    assert fetch_hostfile(str(RECIPES / "hostfile")) == {"node1": 8, "node2": 8}


def test_a_bug_report_asks_for_what_the_first_answer_would_ask_for() -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    required = [str(one["attributes"]) for one in form["body"] if one.get("validations", {}).get("required")]
    for words in ("python -m ds_zipccl report", "start-up line", "DeepSpeed config", "DS_ZIPCCL=0"):
        assert any(words in one for one in required), words
    assert len({one["id"] for one in form["body"]}) == len(form["body"])


def test_trainers_that_are_tested_name_their_test_and_the_day() -> None:
    table = RECIPES_PAGE.split("## Trainers")[1].split("\n## ")[0].splitlines()
    rows = [line.strip("| ").split(" | ") for line in table if "|" in line][2:]
    for trainer, state, versions, shown in rows:
        named = re.findall(r"`(tests/\S+\.py)`", shown)
        assert all((ROOT / name).is_file() for name in named), trainer
        dated = re.search(r"\d{4}-\d\d-\d\d$|versions\.md", versions) is not None
        assert dated == (state.startswith("run by hand") or (state.startswith("tested") and bool(named))), trainer
    states = {trainer: state for trainer, state, *_ in rows}
    recipes = (ROOT / "tests/integration/test_recipes.py").read_text()
    packages = {"trl": "TRL", "llamafactory": "LLaMA-Factory", "swift": "ms-swift", "axolotl": "Axolotl"}
    for package, trainer in (packages | {"torchtitan": "torchtitan"}).items():
        assert states[trainer].startswith("tested") == (f', "{package}")' in recipes), trainer
