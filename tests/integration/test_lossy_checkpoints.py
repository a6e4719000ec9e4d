"""Files with the state of lossy codecs, in one process: those that fit are read, all others are refused with a reason."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ds_zipccl.config import parse_section
from ds_zipccl.integration.lossy import checkpoints, state

CONFIG = parse_section(
    {
        "enabled": True,
        "lossy": True,
        "roles": {"pp": {"codec": "lowrank", "when": "backward", "error": "lazy_run"}},
    }
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
    entry = state.state_of("pp", KEY, (6, 4), torch.bfloat16, 2, state.owner_of(engine))
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


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("rank", 0),
        ("world_size", 4),
        ("step", 8),
        ("stage", [0, 2]),
        ("version", 2),
        ("roles", {}),
        ("data_parallel_ranks", [0]),
    ],
)
def test_a_file_of_another_job_is_refused(saved: tuple[Path, dict[str, Any]], key: str, other: Any) -> None:
    path, job = saved
    refused(path, job | {key: other}, f"is for {key} .*, this job has")


def _entries(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], None]:
    return lambda said, tensors: change(said["entries"][0])


BROKEN: dict[str, tuple[Callable[[dict[str, Any], dict[str, torch.Tensor]], Any], str]] = {
    "entries": (lambda said, tensors: said.update(entries=3), "no metadata"),
    "entry": (lambda said, tensors: said.update(entries=[3]), "none that this release writes"),
    "role": (_entries(lambda one: one.update(role="tp")), "none that this release writes"),
    "role of a list": (_entries(lambda one: one.update(role=[])), "none that this release writes"),
    "key": (_entries(lambda one: one.update(key=[{}])), "none that this release writes"),
    "shape": (_entries(lambda one: one.update(shape=[-6, -4])), "none that this release writes"),
    "dtype": (_entries(lambda one: one.update(dtype="int8")), "none that this release writes"),
    "dtype of a list": (_entries(lambda one: one.update(dtype=[])), "none that this release writes"),
    "ranks": (_entries(lambda one: one.update(ranks="2")), "none that this release writes"),
    "other shape": (_entries(lambda one: one.update(shape=[6, 5])), "0.error is F32"),
    "error": (lambda said, tensors: tensors.update({"0.error": torch.zeros(5)}), "0.error is F32"),
    "turned error": (lambda said, tensors: tensors.update({"0.error": torch.zeros(4, 6)}), "0.error is F32"),
    "three dimensions": (lambda said, tensors: tensors.update({"0.error": torch.zeros(6, 1, 4)}), "0.error is F32"),
    "matrix of three dimensions": (_entries(lambda one: one.update(shape=[6, 1, 4])), "none that this release writes"),
    "wide factor": (lambda said, tensors: tensors.update({"0.factor": torch.zeros(4, 99)}), "0.factor is F32"),
    "other factor": (lambda said, tensors: tensors.update({"0.factor": torch.zeros(6, 2)}), "0.factor is F32"),
    "flat factor": (lambda said, tensors: tensors.update({"0.factor": torch.zeros(4)}), "0.factor is F32"),
    "dtype of a tensor": (
        lambda said, tensors: tensors.update({"0.error": torch.zeros(6, 4).half()}),
        "0.error is F16",
    ),
    "not finite": (lambda said, tensors: tensors.update({"0.error": torch.full((6, 4), torch.nan)}), "not finite"),
    "more": (lambda said, tensors: tensors.update({"1.error": torch.zeros(4)}), "no entry names"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_contradicts_itself_is_refused(saved: tuple[Path, dict[str, Any]], name: str) -> None:
    path, job = saved
    change, why = BROKEN[name]
    entry = {"role": "pp", "key": list(KEY), "shape": [6, 4], "dtype": "bfloat16", "ranks": 2}
    said, tensors = {**job, "entries": [entry]}, {"0.error": torch.zeros(6, 4), "0.factor": torch.zeros(4, 2)}
    save_file(tensors, path, {"ds_zipccl": json.dumps(said)})
    assert len(list(checkpoints._read(path, job))) == 1
    change(said, tensors)
    save_file(tensors, path, {"ds_zipccl": json.dumps(said)})
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


def first_errors(owner: int) -> list[float]:
    return [float(entry.error[0, 0]) for _, _, entry in state.entries_of(owner) if entry.error is not None]


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
    owner = state.owner_of(engine)
    entry = state.state_of("pp", KEY, (6, 4), torch.bfloat16, 2, owner)
    entry.error = torch.full((6, 4), 2.0)
    checkpoints.save(engine, CONFIG, {"save_dir": str(tmp_path), "tag": "last"})
    entry.error = torch.ones(6, 4)
    load = {"load_dir": str(tmp_path), "tag": "last", "load_module_only": False, "load_optimizer_states": True}
    checkpoints.load(engine, CONFIG, load | given, loaded)
    said = capsys.readouterr().out
    assert (first_errors(owner), told) == (left, wanted)
    assert line in said and bool(line) == bool(said)
    checkpoints.load(engine, CONFIG, load | {"tag": "absent"}, True)
    assert first_errors(owner) == [] and "cannot be read" in told[-1] and "cannot be read" in capsys.readouterr().out
    state.forget(engine)


def test_codecs_without_state_ask_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints.topology, "tell", None)
    config = parse_section({"enabled": True, "lossy": True, "roles": {"pp": {"codec": "round"}}})
    for loaded in (False, True):
        checkpoints.load(Engine(), config, {"load_module_only": False, "load_optimizer_states": True}, loaded)
