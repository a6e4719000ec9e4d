"""The pages about lossy modes and recipes: example configs, sections and lines that are quoted, and that each example is named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from places import EXAMPLES, ROOT

from ds_zipccl.config import DEFAULT, ROLES, ZipcclConfig, parse_section
from ds_zipccl.integration.start_line import Group, lossy_line
from ds_zipccl.lossy import Round
from ds_zipccl.telemetry import counters, table

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
    for words in ("Nothing is lossy unasked", "promise nothing about large ones"):
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
    assert config.nccl == ("on" if path.stem in ("llamafactory_z3", "axolotl_z3") else "off")  # those are for GPUs


def test_the_config_of_llamafactory_is_that_of_trainer_in_most() -> None:
    """test_recipes.py trains with that of Trainer."""
    own, trainer = (
        json.loads((RECIPES / f"{name}.json").read_text()) for name in ("llamafactory_z3", "hf_trainer_lora")
    )
    assert own.pop("zero_allow_untested_optimizer") and own["zero_optimization"].pop("overlap_comm") is False
    assert own | {"zipccl": 0} == trainer | {"zipccl": 0}


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: str(path.stem))
def test_files_of_launchers_name_a_config(path: Path) -> None:
    (config,) = NAMED.findall(path.read_text())
    folder = ROOT if "/" in config else RECIPES  # users copy the files without a folder, both of them
    assert "zipccl" in json.loads((folder / config).read_text())


def test_values_auto_of_the_page_are_those_of_the_section() -> None:
    (said,) = re.findall(r"There only (.+?) know `\"auto\"`", RECIPES_PAGE)
    keys = set(re.findall(r"`(\w+)`", said))
    assert keys == {key for key, value in vars(DEFAULT).items() if value == "auto"}
