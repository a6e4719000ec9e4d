"""Lossy roles of the section: named twice or refused, their settings, and the text of every refusal."""

from __future__ import annotations

import copy
import json
import pickle
import re
from dataclasses import asdict, replace

import pytest

from ds_zipccl import role_settings
from ds_zipccl.config import DEFAULT, ROLES, ConfigError, ZipcclConfig, environment_section, parse_section
from ds_zipccl.integration.config_agreement import canonical
from ds_zipccl.lossy import LOSSY_CODECS, Int, LossyCodec, Round, TacoFp8, Zfp
from ds_zipccl.role_settings import CODEC_ROLES, EXACT_ROLES, RoleSettings

CODECS = '"round" | "taco_fp8" | "int" | "zfp"'


def lossy(**roles: object) -> ZipcclConfig:
    return parse_section({"enabled": True, "lossy": True, "roles": roles})


GOOD: list[tuple[str, dict[str, object], RoleSettings, str]] = [
    ("tp", {"codec": "round"}, RoleSettings(Round(3)), "tp round mantissa 3 forward and backward"),
    (
        "tp",
        {"codec": "taco_fp8", "group": 64, "hadamard": False, "mode": "always", "when": "backward"},
        RoleSettings(TacoFp8(64, False), "always", "backward"),
        "tp taco_fp8 group 64 backward only",
    ),
    ("ep", {"codec": "int", "bits": 6, "when": "forward"}, RoleSettings(Int(6), None, "forward"), ""),
    ("zero_grad", {"codec": "zfp", "rate": 24}, RoleSettings(Zfp(24)), "zero_grad zfp rate 24"),
    ("dp", {"codec": "round", "mantissa": 1, "mode": "auto"}, RoleSettings(Round(1), "auto"), "dp round mantissa 1"),
]


@pytest.mark.parametrize(("role", "value", "wanted", "said"), GOOD, ids=str)
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
    assert lossy(pp="always").lossy_of("pp") is None and DEFAULT.lossy_of("tp") is None
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
    assert config.lossy_of("tp") is None, "the caller's dict is not the config's"


@pytest.mark.parametrize("codec", LOSSY_CODECS)
def test_roles_of_a_codec(codec: str) -> None:
    assert set(CODEC_ROLES[codec]) | set(EXACT_ROLES) <= set(ROLES)
    for role in ROLES:
        section = {"lossy": True, "roles": {role: {"codec": codec}}}
        if role in CODEC_ROLES[codec]:
            found = parse_section(section).lossy_of(role)
            assert isinstance(found, LossyCodec) and found.name == codec
        else:
            with pytest.raises(ConfigError, match=f"{role}"):
                parse_section(section)
    assert not set(CODEC_ROLES[codec]) & set(EXACT_ROLES)


#: (role, its value) -> the line.
REFUSED: list[tuple[str, object, str]] = [
    (
        "zero_param",
        {"codec": "round"},
        '"zipccl.roles.zero_param": role "zero_param" takes no lossy codec: its differences are smaller and exact; write a mode: '
        '"auto" | "always" | "never"',
    ),
    ("sp", {"codec": "round"}, '"zipccl.roles.sp": role "sp" takes no lossy codec: its traffic is exact in this release; write a'),
    ("ep", {"codec": "zfp"}, '.ep.codec": "zfp" is for "zero_grad" | "dp" | "tp" | "pp"; role "ep" takes "round" | "taco_fp8" | "int"'),
    ("tp", {"codec": "taco_fp8", "mode": "never"}, '.tp.mode" must be "auto" | "always" beside a codec, got "never"; write "tp": "never"'),
    ("tp", {"codec": "int", "mode": True}, '"zipccl.roles.tp.mode" must be "auto" | "always", got true'),
    ("tp", {"codec": "taco_fp8", "groups": 64}, '.tp.groups" is not a known key (did you mean "group"?); keys beside'),
    ("tp", {"codec": "taco_fp8", "mantissa": 2}, 'keys beside "codec": "taco_fp8": group, hadamard, mode, when'),
    ("dp", {"codec": "round", "rate": 8}, '"zipccl.roles.dp.rate" is not a known key; keys beside "codec": "round": mantissa, mode'),
    ("tp", {"codec": "round", "mantissa": 7}, '"zipccl.roles.tp.mantissa" must be an integer from 1 to 6, got 7'),
    ("tp", {"codec": "round", "mantissa": True}, '"zipccl.roles.tp.mantissa" must be an integer from 1 to 6, got true'),
    ("tp", {"codec": "round", "mantissa": 3.0}, "an integer from 1 to 6, got 3.0"),
    ("tp", {"codec": "taco_fp8", "group": 100}, '.tp.group" must be 32 | 64 | 128 | 256 | 512, got 100'),
    ("tp", {"codec": "taco_fp8", "hadamard": 1}, '.tp.hadamard" must be false | true, got 1'),
    ("tp", {"codec": "int", "bits": 5}, '.tp.bits" must be 8 | 6 | 4, got 5'),
    ("pp", {"codec": "zfp", "rate": 3}, '.pp.rate" must be an integer from 4 to 24, got 3'),
    ("tp", {"codec": "round", "when": "always"}, '.tp.when" must be "both" | "forward" | "backward", got "always"'),
    ("tp", {"codec": "round", "when": ["both"]}, '.tp.when" must be "both" | "forward" | "backward", got ["both"]'),
    ("zero_grad", {"codec": "round", "when": "backward"}, '.when" is for "tp" | "pp" | "ep": traffic of role "zero_grad" has no direction'),
    ("dp", {"codec": "round", "error": "feedback"}, '"zipccl.roles.dp.error" is not there in this release: errors are not fed back; leave'),
    ("pp", {"codec": "lowrank", "rank": 16}, f'"zipccl.roles.pp.codec": "lowrank" is not there in this release; role "pp" takes {CODECS}'),
    ("zero_grad", {"codec": "powersgd"}, '"powersgd" is not there in this release; role "zero_grad" takes "round"'),
    ("tp", {"codec": "rounds"}, f'"zipccl.roles.tp.codec" must be {CODECS}, got "rounds" (did you mean "round"?)'),
    ("tp", {"codec": ["round"]}, f'"zipccl.roles.tp.codec" must be {CODECS}, got ["round"]'),
    ("tp", {"codec": None}, f'"zipccl.roles.tp.codec" must be {CODECS}, got null'),
    ("tp", {}, f'"zipccl.roles.tp" names no "codec"; add one of {CODECS}, or write a mode: "auto" | "always" | "never"'),
    ("ep", {"mode": "always"}, '"zipccl.roles.ep" names no "codec"; add one of "round" | "taco_fp8" | "int", or write a mode'),
]  # fmt: skip


@pytest.mark.parametrize(("role", "value", "line"), REFUSED, ids=str)
def test_refused_settings(role: str, value: object, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        lossy(**{role: value})
    assert line in str(caught.value) and len(str(caught.value).splitlines()) == 1
    with pytest.raises(ConfigError):
        replace(DEFAULT, lossy=True, roles={role: value})


def test_a_codec_without_the_master_switch() -> None:
    said = (
        '"zipccl.roles.tp.codec": "taco_fp8" changes what is communicated; add "lossy": true to the section to allow it'
    )
    for section in ({}, {"lossy": False}):
        with pytest.raises(ConfigError) as caught:
            parse_section({**section, "roles": {"tp": {"codec": "taco_fp8"}}})
        assert str(caught.value) == said
    with pytest.raises(ConfigError, match=re.escape('"zipccl.lossy" must be true | false, got "true"')):
        parse_section({"lossy": "true", "roles": {"tp": {"codec": "taco_fp8"}}})


def test_the_master_switch_alone_changes_nothing() -> None:
    config = parse_section({"enabled": True, "lossy": True, "roles": {"dp": "always"}})
    assert all(config.lossy_of(role) is None for role in ROLES) and config.lossy_roles == {}


def test_every_wrong_key_has_a_line() -> None:
    roles = {
        "tp": {"codec": "round", "mantissa": 0, "grup": 1},
        "sp": {"codec": "int"},
        "dp": {"codec": "int", "bits": 7},
    }
    with pytest.raises(ConfigError) as caught:
        parse_section({"lossy": True, "roles": roles, "blocks": 1})
    assert len(str(caught.value).splitlines()) == 5


def test_fused_embedding_is_named() -> None:
    with pytest.raises(
        ConfigError, match=re.escape('"zipccl.fused_embedding" is not there in this release; leave the key out')
    ):
        parse_section({"fused_embedding": False})


class Written(int):
    """A number as readers of YAML return it."""


def test_values_of_readers_become_plain() -> None:
    config = lossy(tp={"codec": "round", "mantissa": Written(5)})
    assert config.lossy_of("tp") == Round(5) and type(config.roles["tp"]["mantissa"]) is int  # type: ignore[index, call-overload]
    with pytest.raises(ConfigError, match="got "):
        lossy(tp={"codec": "round", "mantissa": object()})


def test_the_environment_is_lossy_only_by_both_names() -> None:
    def parsed(text: str) -> ZipcclConfig:
        section = environment_section({"DS_ZIPCCL": text})
        return parse_section(section)

    assert not parsed("1").lossy and parsed("1").lossy_roles == {}
    with pytest.raises(ConfigError, match='add "lossy": true'):
        parsed('{"roles": {"tp": {"codec": "round"}}}')
    assert parsed('{"lossy": true}').lossy_of("tp") is None
    assert parsed('{"lossy": true, "roles": {"tp": {"codec": "round"}}}').lossy_of("tp") == Round()


def test_texts_of_the_tables() -> None:
    assert role_settings.said((1, 2, 3)) == "an integer from 1 to 3"
    assert role_settings.said((8, 6, 4)) == "8 | 6 | 4" and role_settings.said((False, True)) == "false | true"
    assert set(role_settings.CODEC_ROLES) == set(LOSSY_CODECS)
