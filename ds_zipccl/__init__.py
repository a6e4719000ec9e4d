"""Lossless exponent-coded communication for DeepSpeed. Importing this costs nothing: names load when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

#: public name -> module that has it
_EXPORTS = {
    "compress": "ds_zipccl.codecs.arrays",
    "compress_segments": "ds_zipccl.codecs",
    "decompress": "ds_zipccl.codecs.arrays",
    "decompress_add": "ds_zipccl.codecs.arrays",
    "compress_bound": "ds_zipccl.codecs",
    "region_hash": "ds_zipccl.codecs.arrays",
    "FrameError": "ds_zipccl.frame",
    "ZipcclConfig": "ds_zipccl.config",
    "ConfigError": "ds_zipccl.config",
    "install": "ds_zipccl.integration.autoload",
    "ZipcclCallback": "ds_zipccl.telemetry.trainer",
}
__all__ = [*(name for name in _EXPORTS if name != "ZipcclCallback"), "__version__"]  # that one imports transformers

if TYPE_CHECKING:
    from ds_zipccl.codecs import compress, compress_bound, compress_segments, decompress, decompress_add, region_hash
    from ds_zipccl.config import ConfigError, ZipcclConfig
    from ds_zipccl.frame import FrameError
    from ds_zipccl.integration.autoload import install
    from ds_zipccl.telemetry.trainer import ZipcclCallback


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'ds_zipccl' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
