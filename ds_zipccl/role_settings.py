"""Roles with a lossy codec: the objects among the values of ``"roles"``, such as ``{"codec": "taco_fp8", "group": 128}``.

Settings of such an object: ``codec``, the keys of that codec, ``mode``, ``when`` where traffic has directions, and the keys of
:data:`USES`, which say for which messages the codec is and where its errors go.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_zipccl.lossy import LOSSY_CODECS, LossyCodec, takes

_GRADIENTS = ("zero_grad", "dp", "tp", "pp", "ep")
#: Codec -> the roles that it is for.
CODEC_ROLES: dict[str, tuple[str, ...]] = {
    "round": _GRADIENTS,
    "taco_fp8": _GRADIENTS,
    "int": _GRADIENTS,
    "zfp": ("zero_grad", "dp", "tp", "pp"),
    "lowrank": ("pp",),
    "powersgd": ("zero_grad", "dp"),
}
#: Codec -> the only ``when`` that it is for.
_CODEC_WHEN = {"lowrank": "backward"}
#: Roles that are never lossy -> why.
EXACT_ROLES = {
    "zero_param": "its differences are smaller and exact",
    "sp": "its traffic is exact in this release",
}
#: Roles whose traffic has a forward and a backward direction.
DIRECTED_ROLES = ("tp", "pp", "ep")
#: Value of ``when`` -> the directions that it covers; "" stands for traffic without a direction, or of both.
COVERED: dict[str, tuple[str, ...]] = {
    "both": ("", "forward", "backward"),
    "forward": ("forward",),
    "backward": ("backward",),
}
#: Modes with a codec.
MODES = ("auto", "always")


@dataclass(frozen=True)
class Use:
    """A key of a role's object that changes no frame of the codec: the default, and the values that it takes."""

    default: Any
    values: Sequence[Any]


#: Codec -> its keys of this kind, fields of :class:`RoleSettings`.
USES: dict[str, dict[str, Use]] = {
    "lowrank": {
        "send": Use("epilogue", ("epilogue", "all")),
        "error": Use("off", ("off", "lazy", "lazy_run")),
    },
    "powersgd": {
        "start_step": Use(100, range(1 << 31)),
        "stages": Use(None, range(1, 1025)),
        "error": Use("feedback", ("feedback", "off")),
    },
}


@dataclass(frozen=True)
class RoleSettings:
    """A role's lossy codec, and the messages that it is for.

    ``mode``: None is the section's. ``when``: the directions that the codec is for, a key of :data:`COVERED`. ``send``: of the sends
    backward of a pipeline stage, those after its last forward ("epilogue") or "all". ``error``: of one message, "feedback" adds it to the
    next message of the same parameter, "lazy" to the next one of the same link within an optimizer step, "lazy_run" also beyond; "off"
    leaves it. ``start_step``: optimizer steps that stay exact. ``stages``: the codec is for so many first pipeline stages; None: for all.
    """

    codec: LossyCodec
    mode: str | None = None
    when: str = "both"
    send: str = "all"
    error: str = "off"
    start_step: int = 0
    stages: int | None = None

    def covers(self, direction: str) -> bool:
        """Return whether the codec is for traffic of ``direction``: "forward", "backward", or "" for both at once."""
        return direction in COVERED[self.when]

    def describe(self, role: str) -> str:
        """Return the settings as the start-up line has them, such as "tp taco_fp8 group 128 hadamard forward and backward"."""
        uses = USES.get(self.codec.name, {})
        said = f"{role} {self.codec}"
        if "send" in uses:
            said += f" {self.when} {self.send}"
        elif role in DIRECTED_ROLES:
            said += " forward and backward" if self.when == "both" else f" {self.when} only"
        if "start_step" in uses:
            said += f" from step {self.start_step}"
        if self.stages is not None:
            said += f", stages 0-{self.stages - 1}" if self.stages > 1 else ", stage 0"
        if "error" in uses and self.error != uses["error"].default:
            said += f", error {self.error}"
        return said


def settings(value: Mapping[str, Any]) -> RoleSettings:
    """Return the settings of an object that has no :func:`problems`."""
    name = value["codec"]
    codec = LOSSY_CODECS[name](**{key: value[key] for key in LOSSY_CODECS[name].wanted if key in value})
    uses = {key: value.get(key, use.default) for key, use in USES.get(name, {}).items()}
    return RoleSettings(codec, value.get("mode"), value.get("when", "both"), **uses)


def problems(place: str, roles: Mapping[Any, Any], lossy: bool, mode: str) -> Iterator[str]:
    """Yield a line for everything that is wrong with the objects of ``roles``; modes are not looked at.

    Args:
        place: the name of ``roles`` in the messages.
        lossy: whether the section allows lossy codecs.
        mode: the mode of the section.
    """
    for role, value in json.loads(json.dumps(roles, default=repr)).items():
        if isinstance(value, dict):
            yield from _problems(f"{place}.{role}", role, value, lossy, mode)


def _problems(place: str, role: str, value: dict[str, Any], lossy: bool, mode: str) -> Iterator[str]:
    codec, wanted = value.get("codec"), [name for name, roles in CODEC_ROLES.items() if role in roles]
    if role in EXACT_ROLES:
        yield f'"{place}": role "{role}" takes no lossy codec: {EXACT_ROLES[role]}; write a mode: {_modes()}'
        return
    if "codec" not in value:
        yield f'"{place}" names no "codec"; add one of {_list(wanted)}, or write a mode: {_modes()}'
        return
    if codec not in (known := tuple(LOSSY_CODECS)):
        yield f'"{place}.codec" must be {_list(wanted)}, got {json.dumps(codec)}{hint(codec, known)}'
        return
    if role not in CODEC_ROLES[codec]:
        yield f'"{place}.codec": "{codec}" is for {_list(CODEC_ROLES[codec])}; role "{role}" takes {_list(wanted)}'
        return
    only = _CODEC_WHEN.get(codec)
    if only is not None and value.get("when", "both") in [one for one in COVERED if one != only]:
        yield f'"{place}.codec": "{codec}" is for "{role}" with "when": "{only}"; add "when": "{only}" to the object'
    if not lossy:
        allow = 'add "lossy": true to the section to allow it'
        yield f'"{place}.codec": "{codec}" changes what is communicated; {allow}'
    if mode == "never" and "mode" not in value:
        yield f'"{place}.codec": "{codec}" has no use with the section\'s "mode": "never"; add a mode to the object: {_list(MODES)}'
    for key, got in value.items():
        if key != "codec":
            yield from _of_key(f"{place}.{key}", role, codec, key, got)


def _of_key(place: str, role: str, codec: str, key: str, got: Any) -> Iterator[str]:
    """Yield a line if one key beside ``codec`` is wrong."""
    own, uses = LOSSY_CODECS[codec].wanted, USES.get(codec, {})
    if key == "mode":
        if got == "never":
            yield f'"{place}" must be {_list(MODES)} with a codec, got "never"; write "{role}": "never" for plain, exact traffic'
        elif got not in MODES:
            yield f'"{place}" must be {_list(MODES)}, got {json.dumps(got)}'
    elif key == "when" and role not in DIRECTED_ROLES:
        yield f'"{place}" is for {_list(DIRECTED_ROLES)}: traffic of role "{role}" has no direction'
    elif key == "when":
        if not isinstance(got, str) or got not in COVERED:
            yield f'"{place}" must be {_list(tuple(COVERED))}, got {json.dumps(got)}'
    elif key not in own and key not in uses:
        known = (*own, *uses, "mode", *(("when",) if role in DIRECTED_ROLES else ()))
        beside = f'keys next to "codec": "{codec}": {", ".join(known)}'
        yield f'"{place}" is not a known key{hint(key, known)}; {beside}'
    else:
        values = uses[key].values if key in uses else own[key]
        if not takes(values, got):
            yield f'"{place}" must be {said(values)}, got {json.dumps(got)}'


def said(values: Sequence[Any]) -> str:
    """Return the values of a codec's key as text."""
    return f"an integer from {values[0]} to {values[-1]}" if isinstance(values, range) else _list(values)


def _list(values: Sequence[Any]) -> str:
    return " | ".join(json.dumps(value) for value in values)


def _modes() -> str:
    return _list((*MODES, "never"))


def hint(got: Any, known: tuple[str, ...]) -> str:
    """Return a guess at the name that was meant, "" without one."""
    close = difflib.get_close_matches(str(got).lower(), known, n=1)
    return f' (did you mean "{close[0]}"?)' if close else ""
