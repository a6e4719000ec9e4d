"""The "zipccl" section and DS_ZIPCCL: the values that are accepted, the messages for all others, and roles that are named lossy twice."""

from __future__ import annotations

import ast
import copy
import enum
import json
import pickle
import re
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path
from typing import get_args

import pytest

import ds_zipccl
from ds_zipccl import role_settings
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
from ds_zipccl.integration.config_agreement import canonical
from ds_zipccl.lossy import LOSSY_CODECS, Int, LossyCodec, LowRank, PowerSgd, Round, TacoFp8, Zfp
from ds_zipccl.role_settings import CODEC_ROLES, EXACT_ROLES, USES, RoleSettings

NAMES = (
    "enabled, mode, reduction, check, codec, block, rows, delta, zero3_base, zero3_base_mib, "
    "owner_only, min_bytes, nccl, nccl_min_bytes, staging_mib, route, lossy, roles, fused_embedding, "
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
    assert not ZipcclConfig().enabled and ZipcclConfig().roles == {}
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


REFUSED = [
    ({"enable": True}, ['"zipccl.enable" is not a known key', 'did you mean "enabled"?', f"known keys: {NAMES}"]),
    (
        {"recompute_base": "host"},
        ['"zipccl.recompute_base" is no key any more: messages that activation', "take the key out"],
    ),
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
    ({"roles": {"zero_param_": "auto"}}, ['the unknown role "zero_param_" (did you mean "zero_param"?); name']),
    ({"roles": {"TP": "auto"}}, ['"TP" (did you mean "tp"?); name one of zero_param, zero_grad, dp']),
    ({"roles": {1: "always"}}, ['the unknown role "1"; name one of']),
    ({"roles": {"dp": "some"}}, ['roles.dp" must be "auto" | "always" | "never", or an object', 'got "some"']),
    ({"roles": ["dp"]}, ['"zipccl.roles" must be an object of "zero_param" | "zero_grad"', 'got ["dp"]']),
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
        *((text, "must be 0, 1 or the section as a JSON object, got ") for text in ("1" * 100_000, "[" * 100_000)),
        ('{"lossy": false, "lossy": true}', 'has "lossy" more than once'),
        ('{"roles": {"dp": "auto", "dp": "never", "tp": "auto"}}', 'has "dp" more than once'),
        (TWICE, 'has "codec", "mantissa" more than once'),
    ],
)
def test_refused_environment(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"DS_ZIPCCL {said}")) as error:
        environment_section({"DS_ZIPCCL": text})
    assert len(str(error.value)) < 400


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


# ---- lossy roles of the section

CODECS = '"round" | "taco_fp8" | "int" | "zfp"'
EPILOGUE = RoleSettings(LowRank(16), None, "backward", send="epilogue")
POWER = RoleSettings(PowerSgd(32), error="feedback", start_step=100)


def lossy(**roles: object) -> ZipcclConfig:
    return parse_section({"enabled": True, "lossy": True, "roles": roles})


#: (role, value, settings, words of the start-up line).
GOOD_ROLES: list[tuple[str, dict[str, object], RoleSettings, str]] = [
    ("tp", {"codec": "round"}, RoleSettings(Round(3)), "tp round mantissa 3 forward and backward"),
    ("tp", {"codec": "taco_fp8", "group": 64, "hadamard": False, "mode": "always", "when": "backward"},
     RoleSettings(TacoFp8(64, False), "always", "backward"), "tp taco_fp8 group 64 backward only"),
    ("ep", {"codec": "int", "bits": 6, "when": "forward"}, RoleSettings(Int(6), None, "forward"), ""),
    ("zero_grad", {"codec": "zfp", "rate": 24}, RoleSettings(Zfp(24)), "zero_grad zfp rate 24"),
    ("dp", {"codec": "round", "mantissa": 1, "mode": "auto"}, RoleSettings(Round(1), "auto"), "dp round mantissa 1"),
    ("zero_grad", {"codec": "int"}, RoleSettings(Int(8)), "zero_grad int bits 8 group 128"),
    ("pp", {"codec": "lowrank", "when": "backward"}, EPILOGUE, "pp lowrank rank 16 backward epilogue"),
    ("pp", {"codec": "lowrank", "rank": 4, "when": "backward", "send": "all", "error": "lazy_run"},
     RoleSettings(LowRank(4), None, "backward", "all", "lazy_run"), "pp lowrank rank 4 backward all, error lazy_run"),
    ("dp", {"codec": "powersgd"}, POWER, "dp powersgd rank 32 from step 100"),
    ("zero_grad", {"codec": "powersgd", "stages": 3}, replace(POWER, stages=3), "zero_grad powersgd rank 32 from step 100, stages 0-2"),
    ("zero_grad", {"codec": "powersgd", "rank": 4, "start_step": 0, "stages": 1, "error": "off"},
     RoleSettings(PowerSgd(4), start_step=0, stages=1), "zero_grad powersgd rank 4 from step 0, stage 0, error off"),
]  # fmt: skip


@pytest.mark.parametrize(("role", "value", "wanted", "said"), GOOD_ROLES, ids=str)
def test_settings_of_a_role(role: str, value: dict[str, object], wanted: RoleSettings, said: str) -> None:
    config = lossy(**{role: value})
    assert config.lossy_roles == {role: wanted} and config.roles == {role: value}
    assert config.mode_of(role) == (wanted.mode or "auto")
    assert said in wanted.describe(role)


def test_a_role_is_lossy_only_where_it_is_named_twice() -> None:
    config = lossy(tp={"codec": "round"}, pp="always")
    assert config.lossy_of("tp") == Round(3)
    assert [role for role in ROLES if config.lossy_of(role) is not None] == ["tp"]
    assert config.mode_of("pp") == "always"
    assert lossy(pp="always").lossy_roles == {} and DEFAULT.lossy_of("tp") is None
    object.__setattr__(config, "lossy", False)  # no config can be made like this
    assert config.lossy_of("tp") is None


@pytest.mark.parametrize(
    ("when", "covered"),
    [({}, ["", "forward", "backward"]), ({"when": "forward"}, ["forward"]), ({"when": "backward"}, ["backward"])],
)
def test_directions(when: dict[str, str], covered: list[str]) -> None:
    config = lossy(tp={"codec": "round", **when})
    asked = ["", "forward", "backward", "sideways"]
    assert [direction for direction in asked if config.lossy_of("tp", direction)] == covered
    both = lossy(zero_grad={"codec": "round"})
    assert all(both.lossy_of("zero_grad", direction) for direction in ("", "forward", "backward"))


def test_the_mode_of_the_section_holds_where_the_object_has_none() -> None:
    section = {
        "lossy": True,
        "mode": "always",
        "roles": {"tp": {"codec": "int"}, "pp": {"codec": "int", "mode": "auto"}},
    }
    config = parse_section(section)
    assert (config.mode_of("tp"), config.mode_of("pp"), config.mode_of("dp")) == ("always", "auto", "always")
    section["mode"] = "never"
    with pytest.raises(
        ConfigError, match=re.escape('"zipccl.roles.tp.codec": "int" has no use with the section\'s "mode": "never"')
    ) as caught:
        parse_section(section)
    assert len(str(caught.value).splitlines()) == 1, "pp has a mode of its own"


def test_a_lossy_config_travels_and_is_copied() -> None:
    """As JSON, as the text on which ranks agree, as a copy, and as a replacement."""
    section = {"lossy": True, "roles": {"tp": {"codec": "taco_fp8", "when": "forward"}, "ep": "always"}}
    config = parse_section(section)
    assert config.lossy_of("tp", "forward") == TacoFp8()
    assert parse_section(json.loads(json.dumps(asdict(config)))) == config
    assert canonical(asdict(config)) == canonical(json.loads(json.dumps(asdict(config))))
    assert canonical(section) != canonical({**section, "roles": {"tp": {"codec": "taco_fp8"}, "ep": "always"}})
    for other in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert other == config and other.lossy_of("tp", "forward") == TacoFp8()
    assert replace(config, roles={}).lossy_of("tp", "forward") is None
    changed = replace(config, roles={"tp": {"codec": "round", "mantissa": 5}})
    assert changed.lossy_of("tp") == Round(5) and config.lossy_of("tp") is None
    section["roles"]["tp"]["when"] = "both"  # type: ignore[index]
    assert config.lossy_of("tp") is None and config.roles != section["roles"], "the caller's dict is not the config's"


@pytest.mark.parametrize("codec", LOSSY_CODECS)
def test_roles_of_a_codec(codec: str) -> None:
    assert set(CODEC_ROLES[codec]) | set(EXACT_ROLES) <= set(ROLES)
    when = {"when": "backward"} if codec == "lowrank" else {}
    for role in ROLES:
        section = {"lossy": True, "roles": {role: {"codec": codec, **when}}}
        if role in CODEC_ROLES[codec]:
            found = parse_section(section).lossy_of(role, when.get("when", ""))
            assert isinstance(found, LossyCodec) and found.name == codec
        else:
            with pytest.raises(ConfigError, match=f"{role}"):
                parse_section(section)
    assert not set(CODEC_ROLES[codec]) & set(EXACT_ROLES)


BACKWARD = {"codec": "lowrank", "when": "backward"}
#: (role, its value) -> the line.
REFUSED_ROLES: list[tuple[str, object, str]] = [
    (
        "zero_param",
        {"codec": "round"},
        '"zipccl.roles.zero_param": role "zero_param" takes no lossy codec: its differences are smaller and exact; write a mode: '
        '"auto" | "always" | "never"',
    ),
    ("sp", {"codec": "round"}, '"zipccl.roles.sp": role "sp" takes no lossy codec: its traffic is exact in this release; write a'),
    ("ep", {"codec": "zfp"}, '.ep.codec": "zfp" is for "zero_grad" | "dp" | "tp" | "pp"; role "ep" takes "round" | "taco_fp8" | "int"'),
    ("tp", {"codec": "taco_fp8", "mode": "never"}, '.tp.mode" must be "auto" | "always" with a codec, got "never"; write "tp": "never"'),
    ("tp", {"codec": "int", "mode": True}, '"zipccl.roles.tp.mode" must be "auto" | "always", got true'),
    ("tp", {"codec": "taco_fp8", "groups": 64}, '.tp.groups" is not a known key (did you mean "group"?); keys next to'),
    ("tp", {"codec": "taco_fp8", "mantissa": 2}, 'keys next to "codec": "taco_fp8": group, hadamard, mode, when'),
    ("dp", {"codec": "round", "rate": 8}, '"zipccl.roles.dp.rate" is not a known key; keys next to "codec": "round": mantissa, mode'),
    ("tp", {"codec": "round", "mantissa": 7}, '"zipccl.roles.tp.mantissa" must be an integer from 1 to 6, got 7'),
    ("tp", {"codec": "round", "mantissa": True}, '"zipccl.roles.tp.mantissa" must be an integer from 1 to 6, got true'),
    ("tp", {"codec": "taco_fp8", "group": 100}, '.tp.group" must be 32 | 64 | 128 | 256 | 512, got 100'),
    ("tp", {"codec": "int", "bits": 5}, '.tp.bits" must be 8 | 6 | 4, got 5'),
    ("pp", {"codec": "zfp", "rate": 3}, '.pp.rate" must be an integer from 4 to 24, got 3'),
    ("tp", {"codec": "round", "when": "always"}, '.tp.when" must be "both" | "forward" | "backward", got "always"'),
    ("zero_grad", {"codec": "round", "when": "backward"}, '.when" is for "tp" | "pp" | "ep": traffic of role "zero_grad" has no direction'),
    ("dp", {"codec": "round", "error": "feedback"}, '.error" is not a known key; keys next to "codec": "round": mantissa, mode'),
    ("tp", {"codec": "int", "errors": "off"}, 'keys next to "codec": "int": bits, group, hadamard, mode, when'),
    (
        "pp",
        {"codec": "lowrank", "rank": 16},
        '"zipccl.roles.pp.codec": "lowrank" is for "pp" with "when": "backward"; add "when": "backward" to the object',
    ),
    ("pp", {"codec": "lowrank", "when": "forward"}, '"lowrank" is for "pp" with "when": "backward"; add'),
    ("pp", {**BACKWARD, "rank": 0}, '"zipccl.roles.pp.rank" must be an integer from 1 to 1024, got 0'),
    ("pp", {**BACKWARD, "send": "some"}, '"zipccl.roles.pp.send" must be "epilogue" | "all", got "some"'),
    ("pp", {**BACKWARD, "error": "feedback"}, '"zipccl.roles.pp.error" must be "off" | "lazy" | "lazy_run", got "feedback"'),
    ("pp", {**BACKWARD, "stages": 2}, '.stages" is not a known key; keys next to "codec": "lowrank": rank, send, error, mode, when'),
    ("tp", {"codec": "lowrank"}, '"zipccl.roles.tp.codec": "lowrank" is for "pp"; role "tp" takes "round" | "taco_fp8" | "int" | "zfp"'),
    ("tp", {"codec": "powersgd"}, '"zipccl.roles.tp.codec": "powersgd" is for "zero_grad" | "dp"; role "tp" takes "round"'),
    ("dp", {"codec": "powersgd", "stages": 0}, '"zipccl.roles.dp.stages" must be an integer from 1 to 1024, got 0'),
    ("dp", {"codec": "powersgd", "start_step": -1}, '.dp.start_step" must be an integer from 0 to 2147483647, got -1'),
    ("dp", {"codec": "powersgd", "send": "all"}, 'keys next to "codec": "powersgd": rank, start_step, stages, error, mode'),
    ("tp", {"codec": "rounds"}, f'"zipccl.roles.tp.codec" must be {CODECS}, got "rounds" (did you mean "round"?)'),
    ("tp", {"codec": ["round"]}, f'"zipccl.roles.tp.codec" must be {CODECS}, got ["round"]'),
    ("tp", {}, f'"zipccl.roles.tp" names no "codec"; add one of {CODECS}, or write a mode: "auto" | "always" | "never"'),
    ("ep", {"mode": "always"}, '"zipccl.roles.ep" names no "codec"; add one of "round" | "taco_fp8" | "int", or write a mode'),
]  # fmt: skip


@pytest.mark.parametrize(("role", "value", "line"), REFUSED_ROLES, ids=str)
def test_refused_settings(role: str, value: object, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        lossy(**{role: value})
    assert line in str(caught.value) and len(str(caught.value).splitlines()) == 1
    with pytest.raises(ConfigError):
        replace(DEFAULT, lossy=True, roles={role: value})


def test_a_codec_without_the_master_switch() -> None:
    named = (
        '"zipccl.roles.tp.codec": "taco_fp8" changes what is communicated; add "lossy": true to the section to allow it'
    )
    for section, said in (
        ({}, named),
        ({"lossy": False}, named),
        ({"lossy": "true"}, '"zipccl.lossy" must be true | false, got "true"'),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
            parse_section({**section, "roles": {"tp": {"codec": "taco_fp8"}}})


def test_every_wrong_key_has_a_line() -> None:
    roles = {
        "tp": {"codec": "round", "mantissa": 0, "grup": 1},
        "sp": {"codec": "int"},
        "dp": {"codec": "int", "bits": 7},
    }
    with pytest.raises(ConfigError) as caught:
        parse_section({"lossy": True, "roles": roles, "blocks": 1})
    assert len(str(caught.value).splitlines()) == 5


def test_texts_of_the_tables() -> None:
    assert role_settings.said(range(1, 4)) == "an integer from 1 to 3"
    assert role_settings.said((8, 6, 4)) == "8 | 6 | 4" and role_settings.said((False, True)) == "false | true"
    assert set(CODEC_ROLES) == set(LOSSY_CODECS) and set(USES) < set(LOSSY_CODECS)
    for codec, uses in USES.items():
        assert not set(uses) & {*LOSSY_CODECS[codec].wanted, "codec", "mode", "when"}
