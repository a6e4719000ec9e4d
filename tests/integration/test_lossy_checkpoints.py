"""Files with the state of lossy codecs, in one process: those that fit are read, all others are refused with a reason."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ds_zipccl.config import parse_section
from ds_zipccl.integration.lossy import checkpoints, state

CONFIG = parse_section(
    {"enabled": True, "lossy": True, "roles": {"pp": {"codec": "lowrank", "when": "backward", "error": "lazy_run"}}}
)
KEY = (1, "backward", 0)


class Engine:
    global_steps, stage_id, num_stages, data_parallel_group = 7, 1, 2, None


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A file of one entry, and the job that it is for."""
    fake = types.SimpleNamespace(
        get_rank=lambda: 1, get_world_size=lambda: 2, get_process_group_ranks=lambda group: [1]
    )
    monkeypatch.setattr(checkpoints, "dist", fake)
    monkeypatch.setattr(checkpoints, "resolve_group", lambda group: group)
    engine = Engine()
    entry = state.of(engine).entry("pp", KEY, (6, 4), torch.bfloat16, 2)
    entry.error, entry.factor = torch.randn(6, 4), torch.randn(4, 2)
    checkpoints.save(engine, CONFIG, {"save_dir": str(tmp_path), "tag": None})
    yield checkpoints.file_of(str(tmp_path), "global_step7"), checkpoints._job(engine, CONFIG)
    state.forget(engine)


def test_a_file_has_the_state(saved: tuple[Path, dict[str, Any]]) -> None:
    path, job = saved
    assert path.name == "ds_zipccl_rank1.safetensors" and not list(path.parent.glob("*.tmp"))
    ((role, key, entry),) = checkpoints._read(path, job)
    assert (role, key, entry.kind) == ("pp", KEY, ((6, 4), torch.bfloat16, 2))
    assert entry.error is not None and entry.error.shape == (6, 4)
    assert entry.factor is not None and entry.factor.shape == (4, 2)


def refused(path: Path, job: dict[str, Any], why: str) -> None:
    with pytest.raises(checkpoints._Refused, match=why):
        list(checkpoints._read(path, job))


OTHER_JOB = {
    "rank": 0,
    "world_size": 4,
    "step": 8,
    "stage": [0, 2],
    "version": 2,
    "roles": {},
    "data_parallel_ranks": [0],
}


@pytest.mark.parametrize("key", OTHER_JOB)
def test_a_file_of_another_job_is_refused(saved: tuple[Path, dict[str, Any]], key: str) -> None:
    path, job = saved
    refused(path, job | {key: OTHER_JOB[key]}, f"is for {key} .*, this job has")


NOT_OURS, OTHER_ERROR, OTHER_FACTOR = "this release does not write such an entry", "0.error is F32", "0.factor is F32"
#: Changes of the metadata, of its entry or of the tensors, and the reason to refuse the file.
BROKEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "entries": ("metadata", {"entries": 3}, "no metadata"),
    "entry of a number": ("metadata", {"entries": [3]}, NOT_OURS),
    "role": ("entry", {"role": "tp"}, NOT_OURS),
    "role of a list": ("entry", {"role": []}, NOT_OURS),
    "key": ("entry", {"key": [{}]}, NOT_OURS),
    "shape": ("entry", {"shape": [-6, -4]}, NOT_OURS),
    "matrix of three dimensions": ("entry", {"shape": [6, 1, 4]}, NOT_OURS),
    "other shape": ("entry", {"shape": [6, 5]}, OTHER_ERROR),
    "dtype": ("entry", {"dtype": "int8"}, NOT_OURS),
    "dtype of a list": ("entry", {"dtype": []}, NOT_OURS),
    "ranks": ("entry", {"ranks": "2"}, NOT_OURS),
    "error": ("tensors", {"0.error": torch.zeros(5)}, OTHER_ERROR),
    "turned error": ("tensors", {"0.error": torch.zeros(4, 6)}, OTHER_ERROR),
    "three dimensions": ("tensors", {"0.error": torch.zeros(6, 1, 4)}, OTHER_ERROR),
    "dtype of a tensor": ("tensors", {"0.error": torch.zeros(6, 4).half()}, "0.error is F16"),
    "not finite": ("tensors", {"0.error": torch.full((6, 4), torch.nan)}, "not finite"),
    "wide factor": ("tensors", {"0.factor": torch.zeros(4, 99)}, OTHER_FACTOR),
    "other factor": ("tensors", {"0.factor": torch.zeros(6, 2)}, OTHER_FACTOR),
    "flat factor": ("tensors", {"0.factor": torch.zeros(4)}, OTHER_FACTOR),
    "more": ("tensors", {"1.error": torch.zeros(4)}, "no entry names"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_contradicts_itself_is_refused(saved: tuple[Path, dict[str, Any]], name: str) -> None:
    path, job = saved
    part, change, why = BROKEN[name]
    entry = {"role": "pp", "key": list(KEY), "shape": [6, 4], "dtype": "bfloat16", "ranks": 2}
    tensors = {"0.error": torch.zeros(6, 4), "0.factor": torch.zeros(4, 2)}
    file: dict[str, Any] = {"metadata": {**job, "entries": [entry]}, "entry": entry, "tensors": tensors}
    save_file(tensors, path, {"ds_zipccl": json.dumps(file["metadata"])})
    assert len(list(checkpoints._read(path, job))) == 1
    file[part].update(change)
    save_file(tensors, path, {"ds_zipccl": json.dumps(file["metadata"])})
    refused(path, job, why)


def test_damaged_and_missing_files_are_refused(saved: tuple[Path, dict[str, Any]]) -> None:
    path, job = saved
    content = path.read_bytes()
    for damaged in (b"", content[:7], content[:-3], b"\xff" * 64, content[:8] + b"{" + content[8:]):
        path.write_bytes(damaged)
        refused(path, job, "cannot be read")
    for text in ("null", "[]", "{", "3", "[" * 100_000):
        save_file({}, path, {"ds_zipccl": text})
        refused(path, job, "cannot be read|no metadata")
    save_file({"x": torch.zeros(1)}, path)
    refused(path, job, "no metadata")
    path.unlink()
    refused(path, job, "cannot be read")


OTHER = "cannot be read: too short"
NOT_LOADED = checkpoints._NOT_LOADED
MODULE, WITHOUT_STATES = {"load_module_only": True}, {"load_optimizer_states": False}
#: Whether this rank has loaded, the reason of rank 1, and arguments; then the error that this rank has after the load (1 before, 2 in the
#: file), the texts that it has told, and a part of its line.
LOADS: dict[str, tuple[bool, str, dict[str, Any], list[float], list[str], str]] = {
    "all": (True, "", {}, [2.0], [""], ""),
    "none": (False, NOT_LOADED, {}, [1.0], [NOT_LOADED], ""),
    "rank 0 alone": (True, NOT_LOADED, {}, [], [""], f"rank 1: {NOT_LOADED}"),
    "rank 1 alone": (False, "", {}, [], [NOT_LOADED], f"rank 0: {NOT_LOADED}"),
    "rank 1 refused": (True, OTHER, {}, [], [""], f"rank 1: {OTHER}"),
    "rank 1 alone, refused": (False, OTHER, {}, [], [NOT_LOADED], f"rank 0: {NOT_LOADED}"),
    "module": (True, "", MODULE, [], [], ""),
    "no module": (False, NOT_LOADED, MODULE, [1.0], [], ""),
    "without states": (True, "", WITHOUT_STATES, [], [], ""),
}


def first_errors(engine: Any) -> list[float]:
    return [float(entry.error[0, 0]) for _, _, entry in state.of(engine).entries() if entry.error is not None]


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize("case", LOADS)
def test_all_ranks_take_their_state_or_none(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every rank tells its reason, also one without a checkpoint: the others wait for it. Planted: an early return there."""
    loaded, other, given, left, wanted, line = LOADS[case]
    told: list[str] = []

    def tell(group: Any, text: str) -> dict[int, str]:
        told.append(text)
        return {0: text, 1: other}

    monkeypatch.setattr(checkpoints.topology, "tell", tell)
    monkeypatch.setattr(checkpoints.dist, "get_rank", lambda: 0)
    engine = Engine()
    entry = state.of(engine).entry("pp", KEY, (6, 4), torch.bfloat16, 2)
    entry.error = torch.full((6, 4), 2.0)
    checkpoints.save(engine, CONFIG, {"save_dir": str(tmp_path), "tag": "last"})
    entry.error = torch.ones(6, 4)
    load = {"load_dir": str(tmp_path), "tag": "last", "load_module_only": False, "load_optimizer_states": True}
    checkpoints.load(engine, CONFIG, load | given, loaded)
    said = capsys.readouterr().out
    assert (first_errors(engine), told) == (left, wanted)
    assert line in said and bool(line) == bool(said)
    checkpoints.load(engine, CONFIG, load | {"tag": "absent"}, True)
    assert first_errors(engine) == [] and "cannot be read" in told[-1] and "cannot be read" in capsys.readouterr().out
    state.forget(engine)


def test_codecs_without_state_ask_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints.topology, "tell", None)
    config = parse_section({"enabled": True, "lossy": True, "roles": {"pp": {"codec": "round"}}})
    for loaded in (False, True):
        checkpoints.load(Engine(), config, {"load_module_only": False, "load_optimizer_states": True}, loaded)
