"""The ``"zipccl"`` section of ``ds_config.json``, typed, and the table of environment variables.

The model class is plain pydantic, not DeepSpeed's: :mod:`ds_zipccl.comm` takes the same settings where DeepSpeed is not installed.
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

#: Every environment variable that the package and its examples read by name: name -> meaning. The documentation shows this table.
ENVIRONMENT = {
    "DS_ZIPCCL": "0: off everywhere, whatever the config says. 1: on with defaults. JSON object: on with this section.",
    "DS_ZIPCCL_CACHE": "Folder for compiled kernels, to which no other user can write (default: TORCH_EXTENSIONS_DIR, else "
    "~/.cache/torch_extensions).",
    "TORCH_EXTENSIONS_DIR": "Folder for compiled kernels where DS_ZIPCCL_CACHE is unset; torch's variable.",
    "CXX": "C++ compiler of the native CPU route, arguments allowed (default: c++, g++ or clang++, whichever is found first).",
    "CUDA_HOME": "Folder whose bin holds nvcc (default: PATH, then /usr/local/cuda).",
    "TORCH_CUDA_ARCH_LIST": "Compute capabilities to compile CUDA kernels for, as torch reads the variable (default: those of the "
    "devices of this machine).",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0: `import torch` loads no extension, so that only ds_zipccl.install() activates the package; "
    "torch's variable. `report` names it.",
    "LOCAL_RANK": "Rank on this node, set by the launcher; rank 0 alone prints notes about the kernel folder.",
    "RANK": "Rank in the job, set by the launcher; examples/train_gpt.py starts ranks by itself where it is unset.",
    "DS_ACCELERATOR": "DeepSpeed's accelerator; examples/train_gpt.py takes cpu where it is unset and there is no GPU.",
}

#: Values that earlier versions took: (key, earlier value) -> the value that replaces it.
RENAMED_VALUES: dict[tuple[str, str], str] = {
    ("codec", "exponent"): "cascade",
    ("codec", "window"): "wide",  # a pair takes effect once its key refuses the earlier value
}


class ConfigError(ValueError):
    """The section has an unknown key, a wrong type or an impossible value, or the ranks have different sections."""


class ZipcclConfig(BaseModel):
    """Settings of the coded collectives. The documentation shows the description of each field."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    enabled: bool = Field(False, description="Code the traffic of this job.")
    mode: Literal["auto", "always", "never"] = Field(
        "auto",
        description="auto: for every kind of message, measure the plain collective, our schedule with uncoded frames and our "
        "schedule with coded frames, use the fastest, and keep measuring. always: coded. never: plain.",
    )
    reduction: Literal["auto", "match", "fp32"] = Field(
        "auto",
        description="Order and type of sums. match: the bits of the plain backend (gloo). fp32: accumulate in fp32 in rank "
        "order, round once; where several nodes have equally many ranks, more than one, first inside each node, then over the nodes. "
        "auto: match on gloo, fp32 elsewhere.",
    )
    check: Literal["off", "shadow"] = Field(
        "off",
        description="shadow: also run the plain collective of every call and compare the results; slow, for debugging.",
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
        description="auto: gather parameters as differences against those of the last step where every rank proves by a hash "
        "that it holds them. ZeRO-1 and ZeRO-2 then keep a copy of the shard that this rank owns; ZeRO-3 needs zero3_base.",
    )
    zero3_base: Literal["off", "host", "device"] = Field(
        "off",
        description="Keep the parameters that ZeRO-3 gathered as the base of later differences. host: 2 bytes per bf16 parameter in "
        "memory that the ranks of a node share (/dev/shm). device: as much on every rank's device.",
    )
    owner_only: Literal["auto", "off"] = Field(
        "auto",
        description="auto: with ZeRO-1 and ZeRO-2, send every slice of a gradient bucket only to the ranks that own it, which "
        "halves the bytes of the all-reduce. off: all-reduce the bucket.",
    )
    min_bytes: int = Field(65536, ge=0, description="Messages smaller than this many bytes pass through uncoded.")
    staging_mib: int = Field(
        64,
        ge=1,
        description="MiB of memory for the frames of each operation in flight; a larger message goes in fragments that fit.",
    )
    route: Literal["auto", "native", "numba"] = Field(
        "auto", description="Kernels: native (C++, built at first use), numba, or auto: the first that works."
    )
    roles: dict[Role, Literal["auto", "always", "never"]] = Field(
        default_factory=dict, description="Mode of single roles, instead of mode: " + ", ".join(ROLES) + "."
    )
    log_interval: int = Field(
        100, ge=0, description="Optimizer steps between two tables of rank 0; 0: one table, at the end."
    )
    step_log: str = Field(
        "",
        description="Path of a file in an existing folder. Rank 0 appends a JSON line with its traffic after every optimizer step; empty: "
        "no file.",
    )

    def mode_of(self, role: str) -> str:
        """Return the mode of a role: its own, else the mode of the section."""
        return {str(name): str(mode) for name, mode in self.roles.items()}.get(role, self.mode)


#: The config of calls of :mod:`ds_zipccl.comm` that name none.
DEFAULT = ZipcclConfig(enabled=True)


def _allowed(annotation: Any) -> str:
    """Return the values that a field's annotation allows, as text for messages."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(json.dumps(value) for value in args)
    if origin is dict:
        return f"an object of {_allowed(args[0])} to {_allowed(args[1])}"
    return {bool: "true | false", int: "an integer >= 0", str: "a string"}[annotation]


def parse_section(section: Any) -> ZipcclConfig:
    """Return the config of a section, a dict as json gives it.

    Raises:
        ConfigError: the section is invalid; the message has a line for every wrong key, with the value got and the values allowed.
    """
    if not isinstance(section, Mapping):
        raise ConfigError(f'"{SECTION}" must be an object such as {{"enabled": true}}, got {section!r}')
    try:
        return ZipcclConfig.model_validate(dict(section))
    except ValidationError as error:
        problems = sorted({_describe(item["loc"], section) for item in error.errors()})
        raise ConfigError("\n".join(problems)) from None


def _describe(location: tuple[Any, ...], section: Mapping[str, Any]) -> str:
    """Return one line for one pydantic error."""
    key = str(location[0])
    field = ZipcclConfig.model_fields.get(key)
    if field is None:
        close = difflib.get_close_matches(key, ZipcclConfig.model_fields, n=1)
        hint = f' (did you mean "{close[0]}"?)' if close else ""
        known = ", ".join(ZipcclConfig.model_fields)
        return f'"{SECTION}.{key}" is not a known key{hint}; known keys: {known}'
    value = section[key]
    if isinstance(value, str) and (key, value) in RENAMED_VALUES:
        new = RENAMED_VALUES[key, value]
        return f'"{SECTION}.{key}" is now "{new}", it was "{value}"; write "{new}"'
    got = json.dumps(value, default=repr)
    return f'"{SECTION}.{key}" must be {_allowed(field.annotation)}, got {got}'


def environment_section(environ: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """Return the section that ``DS_ZIPCCL`` stands for, or None where the variable is unset or empty.

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
    """Return the top-level keys of a DeepSpeed config that look like a misspelled ``"zipccl"``: DeepSpeed accepts unknown keys silently."""
    names = {str(key): str(key).lower() for key in param_dict if key != SECTION}
    close = difflib.get_close_matches(SECTION, names.values(), n=len(names) or 1, cutoff=0.75)
    return [key for key, lowered in names.items() if lowered in close]
