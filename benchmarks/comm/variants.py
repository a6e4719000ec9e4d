"""Variants that ``bench comm`` and ``bench train`` compare: a table, or settings of the user."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ds_zipccl.config import ROLES, ConfigError, ZipcclConfig, parse_section
from ds_zipccl.lossy import LOSSY_CODECS
from ds_zipccl.role_settings import RoleSettings
from ds_zipccl.tools import ToolError


@dataclass(frozen=True)
class Variant:
    """``label``: name in plots. ``settings``: keys of the ``"zipccl"`` section; None without ds_zipccl. ``changes``:
    settings that change values or the order of sums; "" if results have the bits of the plain run."""

    label: str
    settings: dict[str, Any] | None
    changes: str = ""

    @property
    def always(self) -> bool:
        """Whether every message must use the schedule of ds_zipccl."""
        return self.settings is not None and self.settings["mode"] == "always"

    @property
    def compressed(self) -> bool:
        """Whether messages may be compressed."""
        return self.settings is not None and self.settings.get("codec") != "raw"


#: Variants by their keys in rows and options, the baseline first.
VARIANTS: dict[str, Variant] = {
    "plain": Variant("DeepSpeed", None),
    "raw": Variant("our schedule, uncompressed", {"mode": "always", "codec": "raw"}),
    "coded": Variant("our schedule, compressed", {"mode": "always"}),
    "auto": Variant("mode auto (default)", {"mode": "auto"}),
}
#: Keys of a role's object that are not settings of its codec.
_BESIDE_CODEC = tuple(one.name for one in fields(RoleSettings) if one.name != "codec")


def find(text: str) -> Variant:
    """Return a variant of :data:`VARIANTS`, or "coded" with further settings.

    Args:
        text: a key of :data:`VARIANTS`, or settings separated by commas. ROLE=CODEC gives a role a lossy codec in the
            notation of ``bench codec``, followed by other keys of the role: "tp=round:3",
            "pp=lowrank:16:when=backward". KEY=VALUE sets another key of the section: "fused_embedding=true".

    Raises:
        ValueError: the text is not a variant; the message says why.
    """
    if text in VARIANTS:
        return VARIANTS[text]
    if "=" not in text:
        raise ValueError(f"{text!r} is no variant: take one of {', '.join(VARIANTS)}, or settings such as tp=round:3")
    base = VARIANTS["coded"].settings or {}
    section: dict[str, Any] = {**base}
    roles: dict[str, Any] = {}
    for setting in text.split(","):
        key, _, value = setting.partition("=")
        (roles if key in ROLES else section)[key] = _role(value) if key in ROLES else _value(value)
    lossy = any(isinstance(value, dict) for value in roles.values())
    section |= {"roles": roles} if roles else {}
    section |= {"lossy": True} if lossy else {}
    try:
        config = parse_section({"enabled": True, **section})
    except ConfigError as error:
        raise ValueError(f"{text!r} is no variant: {error}") from None
    return Variant(text.replace(",", ", "), section, changes(config))


def changes(config: ZipcclConfig) -> str:
    """Return the names of the settings that change values or the order of sums; "" without such settings."""
    said = [one.describe(role) for role, one in config.lossy_roles.items()]
    return ", ".join([*said, *(["fused embeddings"] if config.fused_embedding else [])])


def _role(text: str) -> Any:
    """Parse the value of a role: a mode, or a lossy codec and further keys as an object."""
    from ds_zipccl.benchmarks.codec import lossy as lossy_trial

    words = text.split(":")
    if len(words) == 1 and words[0] in ("auto", "always", "never"):
        return text
    pairs = dict(word.split("=", 1) for word in words if "=" in word)
    beside = {key: value for key, value in pairs.items() if key in _BESIDE_CODEC}
    codec = lossy_trial.codec(":".join(word for word in words if word.partition("=")[0] not in beside), LOSSY_CODECS)
    return {"codec": codec.name, **asdict(codec), **{key: _value(value) for key, value in beside.items()}}


def settings(texts: Sequence[str], variant: str, reserved: Collection[str]) -> dict[str, Any]:
    """Return the settings of ``--set``, texts "key=value". ``reserved``: keys that runs of the variant set themselves.

    Raises:
        ToolError: a text has no value, or its key is reserved.
    """
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or key in reserved:
            raise ToolError(f"--set wants KEY=VALUE with a key that {variant} runs do not set, got {text}")
        found[key] = _value(value)
    return found


def _value(text: str) -> Any:
    """Parse a value of the section: JSON, or a string without quotes."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
