"""The pages about lossy modes: the example configs, the lines that are quoted, and the policies that the text describes."""

from __future__ import annotations

import json
import re

import pytest
from places import ROOT

from ds_zipccl.config import ROLES, ZipcclConfig, parse_section
from ds_zipccl.integration.start_line import Group, lossy_line
from ds_zipccl.lossy import Round
from ds_zipccl.telemetry import counters, table

PAGE = (ROOT / "docs" / "lossy.md").read_text()
HYBRID, TACO, OPTIMUS = ((ROOT / "docs" / f"lossy-{name}.md").read_text() for name in ("hybrid", "taco", "optimus"))
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
    for words in ("Nothing is lossy unasked", "promise nothing about large ones", "docs/lossy.md"):
        assert words in readme
    assert "Nothing is lossy unasked" in PAGE and "promise nothing about large ones" in PAGE
