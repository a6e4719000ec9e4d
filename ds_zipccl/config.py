"""The ``"zipccl"`` section of ``ds_config.json``, typed, and the table of environment variables.

A plain dataclass: :mod:`ds_zipccl.comm` takes the same settings where neither DeepSpeed nor pydantic is installed.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ds_zipccl import role_settings
from ds_zipccl.lossy import LossyCodec
from ds_zipccl.role_settings import RoleSettings, hint

SECTION = "zipccl"

Role = Literal["zero_param", "zero_grad", "dp", "tp", "pp", "ep", "sp"]
ROLES: tuple[str, ...] = get_args(Role)

#: Every environment variable that the package and its examples read by name: name -> meaning. The documentation shows this table.
ENVIRONMENT = {
    "DS_ZIPCCL": "0: off everywhere, whatever the config says. 1: on with defaults, and so never lossy. JSON object: on with this section.",
    "DS_ZIPCCL_CACHE": "Folder for compiled kernels, to which no other user can write (default: TORCH_EXTENSIONS_DIR, else "
    "~/.cache/torch_extensions).",
    "TORCH_EXTENSIONS_DIR": "Folder for compiled kernels where DS_ZIPCCL_CACHE is unset; torch's variable.",
    "CXX": "C++ compiler of the native CPU route, arguments allowed (default: c++, g++ or clang++, whichever is found first).",
    "CUDA_HOME": "Folder whose bin holds nvcc (default: PATH, then /usr/local/cuda).",
    "TORCH_CUDA_ARCH_LIST": "Compute capabilities to compile CUDA kernels for where no device is visible, as torch reads the variable. "
    "Otherwise those of the visible devices.",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0: `import torch` loads no extension, so that only ds_zipccl.install() activates the package; "
    "torch's variable. `report` names it.",
    "LOCAL_RANK": "Rank on this node, set by the launcher: the number of its CUDA device, as for DeepSpeed. Rank 0 alone prints notes "
    "about the kernel folder.",
    "LOCAL_WORLD_SIZE": "Ranks of this node, set by the launcher; examples/zeropp.py makes them the groups of hpZ.",
    "RANK": "Rank in the job, set by the launcher; `doctor` and examples/train_gpt.py start the ranks where it is unset.",
    "WORLD_SIZE": "Ranks of the job, set by the launcher; `doctor` names the number.",
    "MASTER_ADDR": "Address at which ranks meet, set by the launcher; `doctor` names it where they do not.",
    "MASTER_PORT": "Port at which ranks meet, set by the launcher, as MASTER_ADDR.",
    "DS_ACCELERATOR": "DeepSpeed's accelerator; examples/train_gpt.py takes cpu where it is unset and there is no GPU.",
    "CUDA_DEVICE_MAX_CONNECTIONS": "CUDA's number of hardware queues. 1: gathers and all-to-alls on NCCL groups stay plain in mode auto.",
    "NCCL_CONF_FILE": "NCCL's file of settings (default: ~/.nccl.conf, in addition to /etc/nccl.conf). Where it or the environment sets "
    "NCCL_ALGO or NCCL_PROTO, gradient sums of reduction auto are NCCL's.",
    "CUBLAS_WORKSPACE_CONFIG": "Memory of cuBLAS; examples/train_gpt.py takes :4096:8 where it is unset: products repeat bit for bit.",
}

#: Values that earlier versions took: (key, earlier value) -> the value that replaces it.
RENAMED_VALUES: dict[tuple[str, str], str] = {
    ("codec", "exponent"): "cascade",
    ("route", "nvrtc"): "cupy",
    ("codec", "window"): "wide",  # a pair takes effect once its key refuses the earlier value
}
_CODED_TWICE = "messages that activation checkpointing repeats are coded again like all others; take the key out"
#: Keys that earlier versions took -> what holds instead.
REMOVED_KEYS = {"recompute_base": _CODED_TWICE, "recompute_base_mib": _CODED_TWICE}


class ConfigError(ValueError):
    """The section has an unknown key, a wrong type or an impossible value, or the ranks have different sections."""


@dataclass(frozen=True)
class Within:
    """The smallest and the largest value of an integer. A larger one is a slip of a hand or of a unit."""

    least: int
    most: int


#: Most bytes (1 TiB) and MiB (16 TiB) of a key, and most optimizer steps.
_BYTES, _MIB, _STEPS = 1 << 40, 1 << 24, 10**9


@dataclass(frozen=True, kw_only=True)
class ZipcclConfig:
    """Settings of the coded collectives. :data:`KEYS` has the meaning of each field, and the documentation shows it.

    Values of subclasses, such as the strings of a YAML reader or the members of a string enum, become plain values.

    Raises:
        ConfigError: a value is impossible; the message has a line for every wrong field.
    """

    enabled: Annotated[bool, "Code the traffic of this job."] = False
    mode: Annotated[
        Literal["auto", "always", "never"],
        "auto: for every kind of message, measure the plain collective, our schedule with raw frames and our schedule with "
        "coded frames, use the fastest, and keep measuring. always: coded. never: plain.",
    ] = "auto"
    reduction: Annotated[
        Literal["auto", "match", "fp32", "plain"],
        "Order and type of sums. match: the bits of the plain backend (gloo). fp32: accumulate in fp32 in rank order, round once; where "
        "several nodes have equally many ranks, more than one, first inside each node, then over the nodes. plain: the plain backend's own "
        "sums. auto: match on gloo; on NCCL fp32 for gradients where it is faster, decided before the first step and saved with "
        "checkpoints, the backend's own otherwise. NCCL itself promises no order: match has its own sums.",
    ] = "auto"
    check: Annotated[
        Literal["off", "shadow"],
        "shadow: also run the plain collective of every call and compare the results; slow, for debugging.",
    ] = "off"
    codec: Annotated[
        Literal["cascade", "wide", "raw"],
        "Lossless exponent coding: cascade has the best ratio, wide is faster. raw: the same schedules with raw frames, to "
        "compare.",
    ] = "cascade"
    block: Annotated[
        Literal[128, 256, 512, 1024],
        "Elements that share an exponent window. Smaller follows scales closer, larger has less overhead.",
    ] = 1024
    rows: Annotated[
        Literal["auto", "off"],
        "auto: expert traffic (role ep) carries a row that occurs several times in a message to a rank once, and rows that are "
        "multiples of others as differences. off: all rows travel, as on all ranks where one rank lacks the C++ kernels.",
    ] = "auto"
    delta: Annotated[
        Literal["auto", "off"],
        "auto: gather parameters as differences against those of the last step where every rank proves by a hash that it holds "
        "them. ZeRO-1 and ZeRO-2 then keep a copy of the shard that this rank owns; for ZeRO-3 see zero3_base. off: no differences, as "
        "on all ranks where one rank lacks the C++ kernels.",
    ] = "auto"
    zero3_base: Annotated[
        Literal["auto", "off", "host", "node", "device"],
        "Keep the parameters that ZeRO-3 gathered, as many bytes as they have. Gathers of unchanged parameters copy them, later ones send "
        "differences. auto: frozen parameters, in memory that the ranks of a node share, or spread over its GPUs where they are faster, as "
        "far as zero3_base_mib allows. host: all parameters, in such memory. node: all parameters, one copy spread over the GPUs of each "
        "node. device: all parameters, on every rank's device.",
    ] = "auto"
    zero3_base_mib: Annotated[
        int,
        Within(0, _MIB),
        "With zero3_base auto: MiB that the bases may take on a node. 0: a quarter of the memory that the node has available at the start, "
        "or its GPUs after two steps.",
    ] = 0
    owner_only: Annotated[
        Literal["auto", "off"],
        "auto: with ZeRO-1 and ZeRO-2, send every slice of a gradient bucket only to the ranks that own it, which halves the bytes "
        "of the all-reduce. off: all-reduce the bucket.",
    ] = "auto"
    min_bytes: Annotated[int, Within(0, _BYTES), "Smaller messages pass; a send's elements count 2 bytes."] = 65536
    nccl: Annotated[
        Literal["auto", "on", "off"],
        "auto: code NCCL groups, once the first four optimizer steps have shown that coded copies have the words of the plain results, and "
        "coded sums those of sums without coding. on: code from the first call on. off: NCCL groups pass through.",
    ] = "auto"
    nccl_min_bytes: Annotated[
        int, Within(0, _BYTES), "On NCCL groups, messages smaller than this many bytes pass through."
    ] = 4194304
    staging_mib: Annotated[
        int,
        Within(0, _MIB),
        "MiB of memory for the frames of each operation in flight; a larger message goes in fragments that fit. 0: 64; on NCCL groups, "
        "from the second optimizer step on, the least over all ranks of 1,024 MiB, 1.5% of the GPU's memory and 10% of what is free then.",
    ] = 0
    route: Annotated[
        Literal["auto", "native", "numba", "cupy"],
        "Kernels: native (C++ and CUDA, compiled at first use), numba (CPU tensors; no differences, repeated rows and lossy codecs), cupy "
        "(CUDA tensors, needs no compiler), or auto: the first that works. Tensors of a device that has no route of this name take auto.",
    ] = "auto"
    lossy: Annotated[
        bool,
        "Allow lossy codecs. Nothing is lossy by this key alone: a role must name a codec too.",
    ] = False
    roles: Annotated[
        dict[Role, Literal["auto", "always", "never"] | dict[str, Any]],
        "Mode of single roles, instead of mode: "
        + ", ".join(ROLES)
        + '. Or an object with a lossy "codec", which "lossy" must allow.',
    ] = field(default_factory=dict)
    fused_embedding: Annotated[
        bool,
        "Pipelines with an embedding tied between the first and the last stage: sum its gradients in one all-reduce over both stages and "
        "all data-parallel ranks, instead of one after the other. Nothing is lost, but the order of the sum is another one.",
    ] = False
    torch_distributed: Annotated[
        bool,
        "Code direct calls of torch.distributed too, over the groups that the engine's mpu names as tensor or sequence parallel. "
        "Megatron-DeepSpeed and GPT-NeoX make such calls.",
    ] = False
    log_interval: Annotated[
        int, Within(0, _STEPS), "Optimizer steps between two tables of rank 0; 0: one table, at the end."
    ] = 100
    step_log: Annotated[
        str,
        "Path of a file in an existing folder. Rank 0 appends a JSON line with its traffic after every optimizer step; empty: no "
        "file.",
    ] = ""

    def __post_init__(self) -> None:
        _check(vars(self))
        for name, value in vars(self).items():  # a copy too: the caller may change its own dict
            object.__setattr__(self, name, json.loads(json.dumps(value)))

    @property
    def staging(self) -> int:
        """Bytes of memory for the frames of an operation; on NCCL groups the ranks may agree on others in place of the default."""
        return (self.staging_mib or 64) << 20

    def mode_of(self, role: str) -> str:
        """Return the mode of a role: its own, else the mode of the section."""
        if role in self.lossy_roles:
            return self.lossy_roles[role].mode or self.mode
        return str(self.roles[role]) if role in self.roles else self.mode

    @property
    def always_codes(self) -> bool:
        """Return whether some role is coded whatever the times are."""
        return any(self.mode_of(role) == "always" for role in ROLES)

    def lossy_of(self, role: str, direction: str = "") -> LossyCodec | None:
        """Return the lossy codec for traffic of a role, None where that traffic is exact.

        Args:
            direction: "forward" or "backward"; "" for traffic of both directions or of none, which a codec of one direction leaves exact.
        """
        found = self.lossy_roles.get(role) if self.lossy else None
        return found.codec if found is not None and found.covers(direction) else None

    @cached_property
    def lossy_roles(self) -> dict[str, RoleSettings]:
        """The roles whose value is an object -> their settings. Made once: every call asks."""
        return {name: role_settings.settings(one) for name, one in self.roles.items() if isinstance(one, dict)}


@dataclass(frozen=True)
class Key:
    """A key of the section: the values that it takes, its default and its meaning."""

    type: Any
    default: Any
    #: The values of an integer; None for other types.
    bounds: Within | None
    meaning: str

    def takes(self, value: Any) -> bool:
        """Return whether the key takes ``value``. Types are strict: 1 is no bool, True and "1" are no integers."""
        return _is_a(self.type, value) and (self.bounds is None or self.bounds.least <= value <= self.bounds.most)

    def values(self) -> str:
        """Return the values that the key takes, as text."""
        at = self.bounds
        return _values(self.type) if at is None else f"an integer >= {at.least} and <= {at.most}"


#: Origins of ``a | b``, by version of Python and kind of ``a``.
_UNIONS = (Union, UnionType)


def _is_a(wanted: Any, value: Any) -> bool:
    origin, args = get_origin(wanted), get_args(wanted)
    if wanted is Any or origin in _UNIONS:
        return wanted is Any or any(_is_a(one, value) for one in args)
    if origin is Literal:
        return any(_is_a(type(one), value) and value == one for one in args)
    if origin is dict:
        return isinstance(value, dict) and all(
            _is_a(args[0], name) and _is_a(args[1], one) for name, one in value.items()
        )
    return isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))  # True is an int for Python


def _values(wanted: Any) -> str:
    origin, args = get_origin(wanted), get_args(wanted)
    if origin is Literal:
        return " | ".join(json.dumps(value) for value in args)
    if origin in _UNIONS:
        return ", or ".join(map(_values, args))
    if origin is dict and args[1] is Any:
        return 'an object with a lossy "codec"'
    if origin is dict:
        return f"an object of {_values(args[0])} to {_values(args[1])}"
    return {bool: "true | false", str: "a string"}[wanted]


def _keys() -> Iterator[tuple[str, Key]]:
    hints = get_type_hints(ZipcclConfig, include_extras=True)
    for one in fields(ZipcclConfig):
        *bounds, meaning = hints[one.name].__metadata__
        default = one.default if one.default_factory is MISSING else one.default_factory()
        yield one.name, Key(hints[one.name].__origin__, default, bounds[0] if bounds else None, meaning)


#: Every key of the section, in the order of the documentation.
KEYS = dict(_keys())


def _check(section: Mapping[Any, Any]) -> None:
    """Raise ConfigError with a line for every wrong key of a section, and of the objects in its roles, sorted."""
    wrong = [key for key, value in section.items() if key not in KEYS or not KEYS[key].takes(value)]
    lines = [line for key in wrong for line in _described(key, section[key])]
    if "roles" in section and not {"roles", "lossy", "mode"} & set(wrong):
        mode, lossy = section.get("mode", KEYS["mode"].default), section.get("lossy") is True
        lines += role_settings.problems(f"{SECTION}.roles", section["roles"], lossy, mode)
    if lines:
        raise ConfigError("\n".join(sorted(lines)))


def _described(key: Any, value: Any) -> Iterator[str]:
    """Yield a line for a wrong key, or for every wrong role in it."""
    place = f"{SECTION}.{key}"
    if key in REMOVED_KEYS:
        yield f'"{place}" is no key any more: {REMOVED_KEYS[key]}'
    elif key not in KEYS:
        yield f'"{place}" is not a known key{hint(key, tuple(KEYS))}; known keys: {", ".join(KEYS)}'
    elif isinstance(value, str) and (new := RENAMED_VALUES.get((key, value))):
        yield f'"{place}" is now "{new}", it was "{value}"; write "{new}"'
    elif key == "roles" and isinstance(value, dict):
        wanted = get_args(KEYS[key].type)[1]
        for role, one in value.items():
            if role not in ROLES:
                yield f'"{place}" has the unknown role "{role}"{hint(role, ROLES)}; name one of {", ".join(ROLES)}'
            elif not _is_a(wanted, one):
                yield f'"{place}.{role}" must be {_values(wanted)}, got {json.dumps(one, default=repr)}'
    else:
        yield f'"{place}" must be {KEYS[key].values()}, got {json.dumps(value, default=repr)}'


#: The config of calls of :mod:`ds_zipccl.comm` that name none.
DEFAULT = ZipcclConfig(enabled=True)


def parse_section(section: Any) -> ZipcclConfig:
    """Return the config of a section, a dict as json gives it.

    Raises:
        ConfigError: the section is invalid; the message has a line for every wrong key, with the value got and the values allowed.
    """
    if not isinstance(section, Mapping):
        raise ConfigError(f'"{SECTION}" must be an object such as {{"enabled": true}}, got {section!r}')
    _check(section)
    return ZipcclConfig(**section)


def environment_section(environ: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """Return the section that ``DS_ZIPCCL`` stands for, or None where the variable is unset or empty.

    Raises:
        ConfigError: the value is neither 0, 1 nor a JSON object, or an object of it has a key twice.
    """
    text = environ.get("DS_ZIPCCL", "").strip()
    if text in ("", "0", "1"):
        return {"enabled": text == "1"} if text else None
    try:
        section = json.loads(text, object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:  # of a number of 5,000 digits, of 100,000 brackets
        if isinstance(error, ConfigError):
            raise
        section = None
    if not isinstance(section, dict):
        raise ConfigError(f"DS_ZIPCCL must be 0, 1 or the section as a JSON object, got {text[:200]!r}")
    return {"enabled": True, **section}


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, of which json by itself keeps the last value of each key."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twins = sorted({name for name, _ in pairs if [one for one, _ in pairs].count(name) > 1})
        raise ConfigError(
            f"DS_ZIPCCL has {', '.join(map(json.dumps, twins))} more than once in one object; write each key once"
        )
    return found


def near_misses(param_dict: Mapping[str, Any]) -> list[str]:
    """Return the top-level keys of a DeepSpeed config that look like a misspelled ``"zipccl"``: DeepSpeed accepts unknown keys silently."""
    names = {str(key): str(key).lower() for key in param_dict if key != SECTION}
    close = difflib.get_close_matches(SECTION, names.values(), n=len(names) or 1, cutoff=0.75)
    return [key for key, lowered in names.items() if lowered in close]
