"""The state of lossy codecs in checkpoints: a safetensors file of each rank beside DeepSpeed's files.

A file is input: all of it is checked before any of it is used. A rank whose file is missing or is for another job says so to all ranks, and
all of them start from an empty state: factors of sums over ranks must be equal on them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from ds_zipccl.comm import topology
from ds_zipccl.comm.group_state import resolve_group
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.integration.lossy import state
from ds_zipccl.integration.lossy.state import Entry, Key

_VERSION = 1
_DTYPES = {str(one).removeprefix("torch."): one for one in (torch.bfloat16, torch.float16, torch.float32)}
#: Tensors of an entry.
_PARTS = ("error", "factor")
#: Reason of a rank for which DeepSpeed has found no checkpoint.
_NOT_LOADED = "DeepSpeed loaded no checkpoint there"


class _Refused(ValueError):
    """A file that does not fit this job; the text is the reason."""


def file_of(folder: str, tag: str) -> Path:
    """Return the file of this rank in the checkpoint ``tag`` of ``folder``."""
    return Path(folder, tag, f"ds_zipccl_rank{dist.get_rank()}.safetensors")


def save(engine: Any, config: ZipcclConfig, given: dict[str, Any]) -> None:
    """Write the state of an engine to its file. Runs before DeepSpeed's own saving, whose end waits for all ranks. Blocks.

    Args:
        given: the arguments of ``save_checkpoint``.

    Raises:
        OSError: the file cannot be written.
    """
    from safetensors.torch import save_file

    tag = f"global_step{engine.global_steps}" if given["tag"] is None else str(given["tag"])
    path, tensors, entries = file_of(given["save_dir"], tag), {}, []
    for number, (role, key, entry) in enumerate(state.of(engine).entries()):
        shape, dtype, ranks = entry.kind
        named = str(dtype).removeprefix("torch.")
        entries.append({"role": role, "key": key, "shape": shape, "dtype": named, "ranks": ranks})
        for part in _PARTS:
            if (tensor := getattr(entry, part)) is not None:
                tensors[f"{number}.{part}"] = tensor.detach().cpu().contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.with_suffix(".tmp")
    save_file(tensors, begun, {"ds_zipccl": json.dumps({**_job(engine, config), "entries": entries})})
    os.replace(begun, path)


def load(engine: Any, config: ZipcclConfig, given: dict[str, Any], loaded: bool) -> None:
    """Take the state of an engine from its file; without a sound one on every rank, start from an empty state. Where no rank has loaded a
    checkpoint, nothing changes. A collective; blocks.

    Args:
        given: the arguments of ``load_checkpoint``, the same on all ranks.
        loaded: whether DeepSpeed has loaded a checkpoint on this rank. With folders of their own, nodes may differ.
    """
    own = state.of(engine)
    keeps = any(one.error != "off" or one.codec.matrices for one in config.lossy_roles.values())
    if not keeps or given["load_module_only"] or not given["load_optimizer_states"]:
        if loaded:
            own.drop()
        return
    found: list[tuple[str, Key, Entry]] = []
    why = "" if loaded else _NOT_LOADED
    if loaded:
        try:
            found = list(_read(_path(given), _job(engine, config)))
        except _Refused as error:
            why = str(error)
    reasons = topology.tell(resolve_group(None), why)
    if set(reasons.values()) == {_NOT_LOADED}:
        return
    own.drop()
    refused = {rank: said for rank, said in reasons.items() if said}
    if not refused:
        for role, key, entry in found:
            restored = own.entry(role, key, *entry.kind)
            restored.error, restored.factor = entry.error, entry.factor
    elif dist.get_rank() == 0:
        rank, said = next(iter(refused.items()))
        print(
            f"[ds_zipccl] lossy codecs start without the errors and factors of the checkpoint: rank {rank}: {said}",
            flush=True,
        )


def _job(engine: Any, config: ZipcclConfig) -> dict[str, Any]:
    """Return what must be equal where state is saved and where it is loaded, as json gives it."""
    roles = {name: one for name, one in config.roles.items() if name in config.lossy_roles}
    stages = [getattr(engine, "stage_id", 0), getattr(engine, "num_stages", 1)]
    group = getattr(engine, "data_parallel_group", None)
    return {
        "version": _VERSION,
        "roles": dict(sorted(roles.items())),
        "world_size": dist.get_world_size(),
        "rank": dist.get_rank(),
        "stage": stages,
        "data_parallel_ranks": dist.get_process_group_ranks(resolve_group(group)),
        "step": engine.global_steps,
    }


def _path(given: dict[str, Any]) -> Path:
    folder, tag = given["load_dir"], given["tag"]
    if tag is None:
        try:
            tag = Path(folder, "latest").read_text().strip()
        except OSError as error:
            raise _Refused(f"the name of the latest checkpoint is not known: {error}") from error
    return file_of(folder, str(tag))


def _read(path: Path, job: dict[str, Any]) -> Iterator[tuple[str, Key, Entry]]:
    """Yield the role, key and entry of all state in a file.

    Raises:
        _Refused: there is no file, it is damaged, or it is for another job than ``job``.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            said = json.loads((file.metadata() or {}).get("ds_zipccl", "null"))
            entries = said.pop("entries") if isinstance(said, dict) and isinstance(said.get("entries"), list) else None
            if entries is None:
                raise _Refused(f"{path} has no metadata of ds_zipccl")
            if different := [key for key in job if said.get(key) != job[key]]:
                first = different[0]
                raise _Refused(
                    f"{path} is for {first} {json.dumps(said.get(first))}, this job has {json.dumps(job[first])}"
                )
            unread = set(file.keys())
            for number, one in enumerate(entries):
                role, key, entry = _entry(one, job)
                for part in _PARTS:
                    if (name := f"{number}.{part}") in unread:
                        unread.remove(name)
                        setattr(entry, part, _tensor(file, name, part, entry.kind[0]))
                yield role, key, entry
            if unread:
                raise _Refused(f"{path} has tensors that no entry names, such as {min(unread)}")
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        if isinstance(error, _Refused):
            raise
        raise _Refused(f"{path} cannot be read: {error}") from error


def _entry(one: Any, job: dict[str, Any]) -> tuple[str, Key, Entry]:
    """Return an entry of the metadata, without its tensors."""
    fields = one if isinstance(one, dict) else {}
    role, key, shape = fields.get("role"), fields.get("key"), fields.get("shape")
    sound = (
        role in tuple(job["roles"])
        and isinstance(key, list)
        and all(type(part) in (str, int) for part in key)
        and isinstance(shape, list)
        and len(shape) == 2
        and all(type(size) is int and size > 0 for size in shape)
        and fields.get("dtype") in tuple(_DTYPES)
        and type(fields.get("ranks")) is int
    )
    if not sound:
        raise _Refused(f"this release does not write such an entry: {json.dumps(one)[:200]}")
    return (
        str(role),
        tuple(cast("list[Any]", key)),
        Entry((tuple(cast("list[int]", shape)), _DTYPES[fields["dtype"]], fields["ranks"])),
    )


def _tensor(file: Any, name: str, part: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of a file, which has the shape that its entry asks for, in fp32 and finite."""
    view = file.get_slice(name)
    sizes = list(view.get_shape())
    factor = len(sizes) == 2 and sizes[0] == shape[-1] and 1 <= sizes[1] <= min(shape)
    fits = factor if part == "factor" else sizes == list(shape)
    if view.get_dtype() != "F32" or not fits:
        raise _Refused(f"tensor {name} is {view.get_dtype()} of {sizes}, for a matrix of {list(shape)}")
    tensor: torch.Tensor = file.get_tensor(name)
    if not bool(tensor.isfinite().all()):
        raise _Refused(f"tensor {name} has values that are not finite")
    return tensor
