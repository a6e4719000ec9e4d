"""The ``"zipccl"`` section of ``ds_config.json``, typed, and the environment variables.

Plain pydantic, not DeepSpeed's model class: :mod:`ds_zipccl.comm` takes the same settings where DeepSpeed is not installed.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

SECTION = "zipccl"

Role = Literal["zero_param", "zero_grad", "dp", "tp", "pp", "ep", "sp"]
ROLES: tuple[str, ...] = get_args(Role)

#: Every environment variable that the package reads: name -> meaning.
ENVIRONMENT = {
    "DS_ZIPCCL": "0: off everywhere, whatever the config says. 1: on with defaults. JSON object: on with this section.",
    "DS_ZIPCCL_CACHE": "folder for compiled kernels, to which no other user can write (default: TORCH_EXTENSIONS_DIR, else "
    "~/.cache/torch_extensions)",
    "CUDA_HOME": "where nvcc is looked for, in its bin (default: PATH, then /usr/local/cuda)",
    "CXX": "C++ compiler of the native CPU route, arguments allowed (default: c++, g++ or clang++, whichever is found first)",
}


#: Values that have a new name: key -> old value -> new value.
_RENAMED = {"codec": {"window": "wide"}}


class ConfigError(ValueError):
    """The section cannot be used: unknown key, wrong type, impossible value, or ranks that disagree."""


class ZipcclConfig(BaseModel):
    """Settings of the coded collectives; the field descriptions are the documentation (README shows them)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    enabled: bool = Field(False, description="Code the traffic of this job.")
    mode: Literal["auto", "always", "never"] = Field(
        "auto",
        description="auto: measure, for every kind of message, whether the plain collective, our schedule with uncoded frames or with "
        "coded ones is fastest here, use that, and keep looking. always: coded. never: plain.",
    )
    reduction: Literal["auto", "match", "fp32"] = Field(
        "auto",
        description="Order and type of sums. match: bit for bit what the uncoded backend gives (gloo). fp32: accumulate in "
        "fp32 in rank order, round once. auto: match on gloo, fp32 elsewhere.",
    )
    check: Literal["off", "shadow"] = Field(
        "off", description="shadow: also run the plain collective every time and compare; for debugging, slow."
    )
    codec: Literal["cascade", "wide", "raw"] = Field(
        "cascade",
        description="Lossless exponent coding: cascade has the best ratio, wide is faster. raw: the same schedules with uncoded "
        "frames, to compare.",
    )
    block: Literal[128, 256, 512, 1024] = Field(
        1024,
        description="Elements that share an exponent window. Smaller follows scales closer, larger has less overhead.",
    )
    delta: Literal["auto", "off"] = Field(
        "auto",
        description="auto: gather parameters as differences against the last step's where every rank proves, by a hash, to hold them. "
        "With ZeRO-1 and ZeRO-2 this keeps a copy of the shard that this rank owns; ZeRO-3 needs zero3_base.",
    )
    zero3_base: Literal["off", "host", "device"] = Field(
        "off",
        description="Keep the parameters that ZeRO-3 gathered, so that it has something to send differences against. host: 2 bytes per "
        "bf16 parameter in memory that the ranks of a node share (/dev/shm). device: as much on every rank's device.",
    )
    owner_only: Literal["auto", "off"] = Field(
        "auto",
        description="auto: with ZeRO-1 and ZeRO-2, send every slice of a bucket of gradients to the ranks that keep it, and to no other: "
        "half of what the all-reduce sends. off: all-reduce it.",
    )
    min_bytes: int = Field(65536, ge=0, description="Messages smaller than this many bytes pass through uncoded.")
    staging_mib: int = Field(
        64,
        ge=1,
        description="MiB of memory for frames on their way, for each operation in flight; large messages go in pieces that fit.",
    )
    route: Literal["auto", "native", "numba"] = Field(
        "auto", description="Kernels: native (C++, built at first use), numba, or auto: the first that works."
    )
    roles: dict[Role, Literal["auto", "always", "never"]] = Field(
        default_factory=dict, description="The mode of single roles: " + ", ".join(ROLES) + "."
    )
    log_interval: int = Field(
        100, ge=0, description="Optimizer steps between tables on rank 0; 0 prints the table at the end only."
    )
    step_log: str = Field(
        "",
        description="Path of a file in an existing folder to which rank 0 adds a JSON line of what it sent after every optimizer step; "
        "empty: none.",
    )

    def mode_of(self, role: str) -> str:
        """The mode of a role."""
        return {str(name): str(mode) for name, mode in self.roles.items()}.get(role, self.mode)


#: What :mod:`ds_zipccl.comm` uses when called without a config.
DEFAULT = ZipcclConfig(enabled=True)


def _allowed(annotation: Any) -> str:
    """Human-readable set of values for a field's annotation."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(json.dumps(value) for value in args)
    if origin is dict:
        return f"an object of {_allowed(args[0])} to {_allowed(args[1])}"
    return {bool: "true | false", int: "an integer >= 0", str: "a string"}[annotation]


def parse_section(section: Any) -> ZipcclConfig:
    """Validate the section (a dict as json gives it).

    Raises:
        ConfigError: names every offending key, what was got and what is allowed.
    """
    if not isinstance(section, Mapping):
        raise ConfigError(f'"{SECTION}" must be an object such as {{"enabled": true}}, got {section!r}')
    try:
        return ZipcclConfig.model_validate(dict(section))
    except ValidationError as error:
        problems = sorted({_describe(item["loc"], section) for item in error.errors()})
        raise ConfigError("\n".join(problems)) from None


def _describe(location: tuple[Any, ...], section: Mapping[str, Any]) -> str:
    """One line for one pydantic error."""
    key = str(location[0])
    field = ZipcclConfig.model_fields.get(key)
    if field is None:
        close = difflib.get_close_matches(key, ZipcclConfig.model_fields, n=1)
        hint = f' (did you mean "{close[0]}"?)' if close else ""
        known = ", ".join(ZipcclConfig.model_fields)
        return f'"{SECTION}.{key}" is not a known key{hint}; known keys: {known}'
    renamed = _RENAMED.get(key, {}).get(section[key]) if isinstance(section[key], str) else None
    if renamed is not None:
        return f'"{SECTION}.{key}" is now "{renamed}", it was "{section[key]}"; write "{renamed}"'
    got = json.dumps(section[key], default=repr)
    return f'"{SECTION}.{key}" must be {_allowed(field.annotation)}, got {got}'


def environment_section(environ: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """The section that ``DS_ZIPCCL`` stands for, or None where the variable is unset or empty.

    Raises:
        ConfigError: the value is neither 0, 1 nor a JSON object.
    """
    text = environ.get("DS_ZIPCCL", "").strip()
    if not text:
        return None
    if text in ("0", "1"):
        return {"enabled": text == "1"}
    try:
        section = json.loads(text)
    except json.JSONDecodeError:
        section = None
    if not isinstance(section, dict):
        raise ConfigError(f"DS_ZIPCCL must be 0, 1 or the section as a JSON object, got {text!r}")
    return {"enabled": True, **section}


def near_misses(param_dict: Mapping[str, Any]) -> list[str]:
    """Top-level keys of a DeepSpeed config that look like a misspelt ``"zipccl"`` (DeepSpeed accepts unknown keys silently)."""
    names = {str(key): str(key).lower() for key in param_dict if key != SECTION}
    close = difflib.get_close_matches(SECTION, names.values(), n=len(names) or 1, cutoff=0.75)
    return [key for key, lowered in names.items() if lowered in close]
