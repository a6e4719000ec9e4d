"""Tensors of safetensors and torch files, by name. Only tensors and plain containers are unpickled."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ds_zipccl.tools import ToolError

#: Reads one tensor; a file may be larger than the memory.
Loader = Callable[[], torch.Tensor]


def tensors(path: str) -> dict[str, Loader]:
    """Name -> function that reads the CPU tensor, in the order of the file. Nested containers give names such as ``state.0.exp_avg``.

    Raises:
        ToolError: the file cannot be read, is of no known format, or holds objects other than tensors and plain values.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(16)
    except OSError as error:
        raise ToolError(f"cannot read {path}: {error.strerror}") from error
    # a safetensors file begins with a u64 length and a JSON object
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < Path(path).stat().st_size:
        return _safetensors(path)
    if head[:2] in (b"PK", b"\x80\x02"):  # a zip archive or, before torch 1.6, a pickle of protocol 2
        return _torch(path)
    raise ToolError(f"{path} is neither a safetensors file nor a torch file (starts with {head[:8]!r})")


def _safetensors(path: str) -> dict[str, Loader]:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ToolError(f"{path} is not a sound safetensors file: {error}") from error
    return {name: partial(file.get_tensor, name) for name in file.keys()}  # noqa: SIM118 (not a dict)


def _torch(path: str) -> dict[str, Loader]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        # Only the cause of torch's long text: the rest explains how to execute the file after all.
        cause = re.search(r"(Trying to load|Unsupported \w+:).*?(?=\.?(?: Please|\n|$))", str(error))
        raise ToolError(
            f"{path} refused: it holds more than tensors and plain values, and nothing else is unpickled here"
            f"{f' ({cause[0]})' if cause else ''}. Save a state_dict, or better a safetensors file, and analyze that."
        ) from error
    except (RuntimeError, EOFError, ValueError, OSError) as error:
        raise ToolError(f"{path} is not a sound torch file: {str(error).splitlines()[0]}") from error
    return dict(_flatten("", content))


def _flatten(prefix: str, node: Any) -> Iterator[tuple[str, Loader]]:
    if isinstance(node, torch.Tensor):
        yield prefix or "tensor", node.detach
    elif isinstance(node, (Mapping, Sequence)) and not isinstance(node, (str, bytes)):
        for key, child in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _flatten(f"{prefix}.{key}" if prefix else str(key), child)
