"""Variants that ``bench comm``, ``bench train`` and ``plan --validate`` compare; one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Variant:
    """``label``: name in pictures. ``settings``: keys of the ``"zipccl"`` section; None where ds_zipccl takes no part."""

    label: str
    settings: dict[str, Any] | None

    @property
    def always(self) -> bool:
        """Whether every message must go through our schedule."""
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
    "auto": Variant("the fastest of these, measured", {"mode": "auto"}),
}
