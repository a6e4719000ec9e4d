"""The "zipccl" section and DS_ZIPCCL: the values that are accepted, and the messages for all others."""

from __future__ import annotations

import ast
import enum
import json
import re
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path
from typing import get_args

import pytest

import ds_zipccl
from ds_zipccl.config import (
    DEFAULT,
    ENVIRONMENT,
    KEYS,
    RENAMED_VALUES,
    ROLES,
    ConfigError,
    ZipcclConfig,
    environment_section,
    near_misses,
    parse_section,
)

NAMES = (
    "enabled, mode, reduction, check, codec, block, rows, delta, zero3_base, zero3_base_mib, recompute_base, "
    "recompute_base_mib, owner_only, min_bytes, nccl, nccl_min_bytes, staging_mib, route, lossy, roles, fused_embedding, "
    "torch_distributed, log_interval, step_log"
)

GOOD = [
    {},
    {"enabled": True},
    {"reduction": "match", "check": "shadow", "codec": "raw", "block": 128, "min_bytes": 0, "route": "numba"},
    {"roles": dict.fromkeys(ROLES, "never"), "log_interval": 0},
    {"lossy": True},
    {"lossy": True, "roles": {"tp": {"codec": "taco_fp8", "group": 64}, "dp": "never"}},
    {"step_log": ""},
    {"step_log": "runs/first.jsonl"},
]


@pytest.mark.parametrize("section", GOOD, ids=str)
def test_good_sections(section: dict[str, object]) -> None:
    config = parse_section(section)
    assert asdict(config) == {**asdict(ZipcclConfig()), **section}
    assert json.loads(json.dumps(asdict(config))) == asdict(config)
    assert parse_section(asdict(config)) == config


def test_defaults() -> None:
    assert ", ".join(KEYS) == NAMES
    assert not ZipcclConfig().enabled
    assert DEFAULT.enabled and replace(DEFAULT, enabled=False) == ZipcclConfig()
    assert all(key.meaning.endswith(".") and key.takes(key.default) for key in KEYS.values())
    with pytest.raises(FrozenInstanceError):
        DEFAULT.enabled = False  # type: ignore[misc]


def test_a_config_cannot_be_made_wrong() -> None:
    """A config made without a section is as strict as one of a section."""
    with pytest.raises(ConfigError, match=r'^"zipccl.block" must be 128 \| 256 \| 512 \| 1024, got 300$'):
        ZipcclConfig(block=300)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r'^"zipccl.mode" must be .*\n"zipccl.route" must be '):
        replace(DEFAULT, route="cuda", mode="on")
    with pytest.raises(TypeError, match="enable"):
        ZipcclConfig(enable=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        ZipcclConfig(True)  # type: ignore[misc]


class Mode(str, enum.Enum):
    never = "never"


class Quoted(str):
    """A string as readers of YAML return it."""


class Written(int):
    """A number as readers of YAML return it."""


def test_values_of_subclasses_become_plain() -> None:
    section = {
        Quoted("mode"): Mode.never, "codec": Quoted("wide"), "step_log": Quoted("a"), "block": Written(512), "min_bytes": Written(1),
        "lossy": True, "roles": {Quoted("dp"): Mode.never, "tp": {"codec": "round", "mantissa": Written(5), "mode": "auto"}},
    }  # fmt: skip
    plain = {"mode": "never", "codec": "wide", "step_log": "a", "block": 512, "min_bytes": 1}
    plain |= {"lossy": True, "roles": {"dp": "never", "tp": {"codec": "round", "mantissa": 5, "mode": "auto"}}}
    config = asdict(parse_section(section))
    assert config == {**asdict(ZipcclConfig()), **plain}
    assert [type(config[name]) for name in plain] == [str, str, str, int, int, bool, dict]
    assert [type(each) for each in (*config["roles"], config["roles"]["dp"], config["roles"]["tp"]["mantissa"])] == [
        str
    ] * 3 + [int]
    assert parse_section(section).mode_of("dp") == "never"


def test_a_config_keeps_its_roles() -> None:
    roles: dict[str, object] = {"ep": "never"}
    config = parse_section({"roles": roles})
    roles["dp"] = "no mode"
    assert config.roles == {"ep": "never"} and ZipcclConfig().roles == {}


REFUSED = [
    ({"enable": True}, ['"zipccl.enable" is not a known key', 'did you mean "enabled"?', f"known keys: {NAMES}"]),
    ({"xyzzy": 1}, ['"zipccl.xyzzy" is not a known key; known keys: ']),
    ({3: 1}, ['"zipccl.3" is not a known key']),
    ({"enabled": 1}, ['"zipccl.enabled" must be true | false, got 1']),
    ({"enabled": None}, ["got null"]),
    ({"block": 300}, ['"zipccl.block" must be 128 | 256 | 512 | 1024, got 300']),
    ({"block": "512"}, ['got "512"']),
    ({"min_bytes": -1}, ['"zipccl.min_bytes" must be an integer >= 0 and <= 1099511627776, got -1']),
    ({"min_bytes": "64k"}, ['got "64k"']),
    ({"min_bytes": True}, ["<= 1099511627776, got true"]),
    *[
        ({key: 10**20}, [f'"zipccl.{key}" must be an integer >= ', f"<= {one.bounds.most}, got {10**20}"])
        for key, one in KEYS.items()
        if one.type is int
    ],
    ({"block": 512.0}, ["got 512.0"]),
    ({"mode": ["auto"]}, ['"auto" | "always" | "never", got ["auto"]']),
    ({"log_interval": 1.5}, ['"zipccl.log_interval" must be an integer >= 0 and <= 1000000000, got 1.5']),
    ({"step_log": None}, ['"zipccl.step_log" must be a string, got null']),
    ({"reduction": "sum"}, ['"zipccl.reduction" must be "auto" | "match" | "fp32" | "plain", got "sum"']),
    ({"codec": "zstd"}, ['"cascade" | "wide" | "raw", got "zstd"']),
    ({"route": "cuda"}, ['"auto" | "native" | "numba" | "cupy", got "cuda"']),
    ({"check": True}, ['"off" | "shadow", got true']),
    (
        {"roles": {"dq": "always"}},
        ['"zipccl.roles" must be an object of "zero_param" | "zero_grad"', '{"dq": "always"}'],
    ),
    ({"roles": {1: "always"}}, ['got {"1": "always"}']),
    (
        {"roles": {"dp": "sometimes"}},
        ['to "auto" | "always" | "never", or an object with a lossy "codec", got {"dp": "sometimes"}'],
    ),
    ({"roles": ["dp"]}, ['"zipccl.roles" must be', 'got ["dp"]']),
    ({"block": 1, "enabeld": 1}, ['"zipccl.block" must be', '"zipccl.enabeld" is not a known key']),
    ([], ['"zipccl" must be an object such as {"enabled": true}, got []']),
    (True, ["got True"]),
    (None, ["got None"]),
]


@pytest.mark.parametrize("section, words", REFUSED, ids=lambda value: str(value)[:40])
def test_refused_sections(section: object, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_section(section)
    for word in words:
        assert word in str(caught.value)
    problems = len(section) if isinstance(section, dict) else 1
    assert len(str(caught.value).splitlines()) == problems, "one line a key"


@pytest.mark.parametrize(
    ("text", "section"),
    [
        (None, None),
        ("  ", None),
        ("0", {"enabled": False}),
        (" 1\n", {"enabled": True}),
        ("{}", {"enabled": True}),
        ('{"block": 256}', {"enabled": True, "block": 256}),
        ('{"enabled": false}', {"enabled": False}),
    ],
)
def test_environment(text: str | None, section: dict[str, object] | None) -> None:
    assert environment_section({} if text is None else {"DS_ZIPCCL": text}) == section


NO_SECTIONS = ("true", "yes", "2", "01", "[1]", '"1"', "null", "{bad", "{'block': 256}")
TWICE = '{"roles": {"dp": {"codec": "round", "mantissa": 3, "mantissa": 3, "codec": "int4"}}}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, f"must be 0, 1 or the section as a JSON object, got {text!r}") for text in NO_SECTIONS),
        ('{"lossy": false, "lossy": true}', 'has "lossy" more than once'),
        ('{"roles": {"dp": "auto", "dp": "never", "tp": "auto"}}', 'has "dp" more than once'),
        (TWICE, 'has "codec", "mantissa" more than once'),
    ],
)
def test_refused_environment(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"DS_ZIPCCL {said}")):
        environment_section({"DS_ZIPCCL": text})


def test_near_misses() -> None:
    words = "train_batch_size zero_optimization bf16 fp16 gradient_clipping compression_training communication_data_type zipccl"
    ordinary = dict.fromkeys(words.split())
    assert near_misses(ordinary) == []
    for wrong in ("zipcl", "zip_ccl", "zipccI", "ds_zipccl", "zippccl", "zicpcl", "ZipCCL", "ZIPCCL"):
        assert near_misses({**ordinary, wrong: {}}) == [wrong]


def names_read(text: str) -> set[str]:
    """Return the names of the environment variables that a source file reads, by a literal or by a constant of the file."""
    tree = ast.parse(text)
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("environ.get", "environ.setdefault", "getenv")
        ):
            found += node.args[:1]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            found += [node.slice] if ast.unparse(node.value).endswith("environ") else []
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]).endswith("environ"):
            found.append(node.left)
    named = [constants.get(node.id, node) if isinstance(node, ast.Name) else node for node in found]
    return {str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node) for node in named}


def test_names_that_a_file_reads() -> None:
    """The check below sees each form of a read."""
    text = """
SWITCH = "BY_CONSTANT"
os.environ.get("BY_GET"), environ.get(SWITCH), os.getenv("BY_GETENV"), os.environ["BY_KEY"], "BY_IN" in os.environ
os.environ.setdefault("BY_DEFAULT", "1")
os.environ["WRITTEN"] = os.environ.get(unknown)
"""
    read = {"BY_GET", "BY_CONSTANT", "BY_GETENV", "BY_KEY", "BY_IN", "BY_DEFAULT", "unknown"}
    assert names_read(text) == read


def test_environment_table_is_complete() -> None:
    """The table has every variable that the package, its op builders and its examples read, and no other."""
    root = Path(ds_zipccl.__file__).parent
    files = [*root.rglob("*.py"), *(root / "op_builder").glob("*.py"), *(root.parent / "examples").glob("*.py")]
    of_the_table = {"name"}  # `report` shows the value of every variable of the table
    assert set().union(*(names_read(path.read_text()) for path in files)) == set(ENVIRONMENT) | of_the_table


def test_earlier_values_name_their_successors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r'^"zipccl.codec" is now "cascade", it was "exponent"; write "cascade"$'):
        parse_section({"codec": "exponent"})
    monkeypatch.setitem(RENAMED_VALUES, ("route", "cxx"), "native")
    with pytest.raises(ConfigError, match=r'^"zipccl.route" is now "native", it was "cxx"; write "native"$'):
        parse_section({"route": "cxx"})
    for (key, earlier), value in RENAMED_VALUES.items():
        allowed = get_args(KEYS[key].type)
        assert (earlier in allowed) != (value in allowed), "a successor is taken, an earlier value is not"
