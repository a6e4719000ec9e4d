"""The page of recipes names every example, and every config that it shows switches ds_zipccl on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from places import EXAMPLES, ROOT

from ds_zipccl.config import DEFAULT, parse_section

PAGE = (ROOT / "docs" / "recipes.md").read_text()
RECIPES = EXAMPLES / "recipes"
#: The key that names a DeepSpeed config in the file of a launcher.
NAMED = re.compile(r"^ *deepspeed(?:_config_file)?: (\S+\.json)$", re.MULTILINE)


def test_every_example_is_on_the_page() -> None:
    scripts = [*EXAMPLES.glob("*.py"), *(path for path in RECIPES.iterdir() if path.is_file())]
    assert len(scripts) > 20
    missing = [name for path in scripts if (name := path.relative_to(ROOT).as_posix()) not in PAGE]
    assert not missing


def test_files_of_the_page_exist() -> None:
    named = set(re.findall(r"examples/[\w/]+\.\w+", PAGE))
    assert len(named) > 20 and all((ROOT / name).is_file() for name in named)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.json")), ids=lambda path: str(path.stem))
def test_sections_switch_coding_on_and_nothing_is_lossy(path: Path) -> None:
    config = parse_section(json.loads(path.read_text())["zipccl"])
    assert config.enabled and config.mode == "auto" and not config.lossy
    for_gpus = path.stem in ("llamafactory_z3", "axolotl_z3")
    assert config.nccl == ("on" if for_gpus else "off")


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: str(path.stem))
def test_files_of_launchers_name_a_config(path: Path) -> None:
    (config,) = NAMED.findall(path.read_text())
    folder = ROOT if "/" in config else RECIPES  # users copy the files without a folder, both of them
    assert "zipccl" in json.loads((folder / config).read_text())


def test_values_auto_of_the_page_are_those_of_the_section() -> None:
    (said,) = re.findall(r"There only (.+?) know `\"auto\"`", PAGE)
    keys = set(re.findall(r"`(\w+)`", said))
    assert keys == {key for key, value in vars(DEFAULT).items() if value == "auto"}
