"""Names of DeepSpeed and torch that are missing or take other parameters: a line says so, and their traffic stays plain."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from backend_programs import succeed

from ds_zipccl.config import parse_section
from ds_zipccl.integration import backend, hook_points, hooks, torch_calls
from ds_zipccl.integration.hook_points import HookPoint
from ds_zipccl.integration.job import Job
from ds_zipccl.integration.lossy import calls, fused_embedding
from ds_zipccl.ops import OPS

NAMES = [*hook_points.POINTS]
#: Names that have a line of their own. The start-up line about lossy roles names the others.
TOLD = [name for name in NAMES if hook_points.POINTS[name].without]


def planted(this: Any, *args: Any, **kwargs: Any) -> Any:
    """A function whose first parameter has another name than DeepSpeed's."""


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Nothing is noted, and nothing that a hook replaces stays replaced. The lines of the test go here, by name."""
    monkeypatch.setattr(hook_points, "_unfit", {})
    monkeypatch.setattr(hook_points, "_said", set())
    monkeypatch.setattr(torch_calls, "_job", None)
    for name in torch_calls.CALLS:
        if hasattr(torch.distributed, name):
            monkeypatch.setattr(torch.distributed, name, getattr(torch.distributed, name))
    assert set(NAMES) == set(hook_points.POINTS) and backend.OFFERED
    return {}


def owner_of(point: HookPoint) -> tuple[Any, Any, list[str]]:
    """The module of a point, the object that has its last part, and the parts of its name."""
    module = importlib.import_module("torch" if point.owner == "torch.distributed" else point.owner)
    parts, owner = point.name.split("."), module
    for part in parts[:-1]:
        owner = getattr(owner, part)
    return module, owner, parts


def key_of(owner: Any, last: str) -> Any:
    return next(key for key in owner if key.__name__ == last)


def remove(point: HookPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the name of a point be missing; with its class, where a base class has the name too."""
    module, owner, parts = owner_of(point)
    if isinstance(owner, dict):
        monkeypatch.delitem(owner, key_of(owner, parts[-1]))
        return
    monkeypatch.delattr(owner, parts[-1], raising=False)
    if hasattr(owner, parts[-1]):
        monkeypatch.delattr(module, parts[0])


def replace(point: HookPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the name of a point take other parameters."""
    _, owner, parts = owner_of(point)
    if isinstance(owner, dict):
        monkeypatch.setitem(owner, key_of(owner, parts[-1]), planted)
    else:
        static = isinstance(vars(owner).get(parts[-1]), staticmethod)
        monkeypatch.setattr(owner, parts[-1], staticmethod(planted) if static else planted)


def execute_again(module: ModuleType) -> ModuleType:
    """Execute the file of a module under another name."""
    spec = importlib.util.spec_from_file_location("executed_again", str(module.__file__))
    assert spec is not None and spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    return again


def hook(point: HookPoint) -> tuple[list[str], ModuleType | None]:
    """Hook into the module of a point, as at the start of a job; the lines, and the module with the backend where it was made anew."""
    again = None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if point.owner == "torch.distributed":
            torch_calls.wrap(Job())
        elif point.owner == "deepspeed.comm.torch":
            again = execute_again(backend)
        else:
            hooks.adopt(importlib.import_module(point.owner))
    said = [str(one.message) for one in warned if "[ds_zipccl]" in str(one.message)]
    return [line for text in said for line in text.splitlines()] + hook_points.lines(), again


def release(point: HookPoint) -> str:
    package = point.owner.partition(".")[0]
    return f"{'DeepSpeed' if package == 'deepspeed' else package} {importlib.metadata.version(package)}"


def member(point: HookPoint) -> Any:
    """What stands at the name of a point now."""
    _, owner, parts = owner_of(point)
    return owner[key_of(owner, parts[-1])] if isinstance(owner, dict) else getattr(owner, parts[-1], None)


@pytest.mark.parametrize("name", NAMES)
def test_all_names_fit_and_are_hooked_once(name: str, lines: dict[str, str]) -> None:
    """This DeepSpeed and this torch have each name, with the parameters that are relied on."""
    point = hook_points.POINTS[name]
    said, _ = hook(point)
    once = member(point)
    assert said == hook(point)[0] == [] and hook_points._unfit == {}
    assert member(point) == once


#: Names whose parameters count.
CALLED = [name for name in TOLD if hook_points.POINTS[name].first]


@pytest.mark.parametrize(
    ("name", "change"), [*((name, remove) for name in TOLD), *((name, replace) for name in CALLED)]
)
def test_a_name_that_does_not_fit_is_said(
    name: str, change: Any, lines: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing name, and one with other parameters, whose function stays as it is."""
    point = hook_points.POINTS[name]
    change(point, monkeypatch)
    said, again = hook(point)
    wanted = ", ".join((*point.first, *point.named))
    another = f"has another {name}, got the parameters (this, args, kwargs), wanted ({wanted})"
    problem, fits = (f"has no {name}", point.optional) if change is remove else (another, False)
    line = f"[ds_zipccl] {release(point)} {problem} in {point.owner}: {point.without}; training goes on"
    assert said.count(line) == (0 if fits else 1), said
    for guard in hook_points.GUARDS:
        assert (problem in hook_points.lacking(guard)) == (guard in point.guards and not fits)
    if change is replace:
        assert member(point) is planted
    if again is not None:
        check_backend(again, name)


def check_backend(again: ModuleType, name: str) -> None:
    """A backend for a TorchBackend without a method leaves it out, and has all others."""
    last, offered = name.rpartition(".")[2], again.OFFERED
    own = vars(again.ZipcclBackend)
    assert last not in own and last not in offered
    others = {*OPS, "batch_isend_irecv"} - {last, "reduce_to_owners"}
    assert others <= set(own)


def test_a_line_comes_once_and_a_note_goes(lines: dict[str, str]) -> None:
    name = "MOELayer.forward"
    assert not hook_points.fits(name, None) and len(hook_points.lines()) == 1
    assert not hook_points.fits(name, None) and hook_points.lines() == []
    assert hook_points.fits(name, torch.nn.Module) is True and hook_points._unfit == {}


@pytest.mark.parametrize(
    ("function", "first", "named", "fits"),
    [
        (lambda self, a, b: 0, ("self", "a"), (), True),
        (lambda self, a, b: 0, ("self", "b"), (), False),
        (lambda self, a, b: 0, ("self",), ("b",), True),
        (lambda self, a: 0, ("self",), ("b",), False),
        (lambda self: 0, ("self", "a"), (), False),
        (lambda *args, **kwargs: 0, ("self", "a"), ("b",), True),
        (lambda self, *args, **kwargs: 0, ("self", "a"), ("b",), True),
        (lambda this, *args, **kwargs: 0, ("self", "a"), (), False),
        (lambda self, *args: 0, ("self", "a"), (), False),
        (lambda: 0, (), (), True),
        (len, (), ("nothing",), False),
    ],
)
def test_parameters(function: Any, first: tuple[str, ...], named: tuple[str, ...], fits: bool) -> None:
    assert (hook_points.misfit(function, first, named) == "") is fits


def test_places_of_lossy_codecs_with_other_parameters(lines: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The start-up line about lossy roles names the place, no other line does, and the place gives no hint."""
    codec = {"codec": "round", "mantissa": 3}
    sites = [site for site in calls.SITES if site.first]
    assert len(sites) == 6
    for site in sites:
        role = site.roles[0]
        config = parse_section({"enabled": True, "lossy": True, "roles": {role: codec}})
        with monkeypatch.context() as patch:
            replace(site, patch)
            said, _ = hook(site)
            assert not said and not hook_points.problems() and site.name in hook_points._unfit
            assert f"no {site.name} as this package knows it" in calls.unhooked(config)[role]
            assert member(site) is planted


def test_tied_gradients_are_not_fused_where_a_name_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The three functions fuse together or not at all: a gradient that is summed at once must be left out of the later sum."""
    monkeypatch.setattr(hook_points, "_unfit", {})
    monkeypatch.setattr(fused_embedding.dist, "get_rank", lambda: 0)
    job: Any = SimpleNamespace(config=parse_section({"enabled": True, "fused_embedding": True}), zero_stages=[1])
    grid = SimpleNamespace(data_parallel_size=2)  # no more is asked of the grid
    engine = SimpleNamespace(module=SimpleNamespace(_layer_specs=[]), grid=grid)
    for name in [name for name, point in hook_points.POINTS.items() if "fused" in point.guards]:
        assert not hook_points.fits(name, None)
        fused_embedding.begin(engine, job)
        said = capsys.readouterr().out
        assert said == f"[ds_zipccl] fused_embedding: has no effect: this DeepSpeed has no {name}\n"
        hook_points._unfit.clear()
    with pytest.raises(AttributeError):
        fused_embedding.begin(engine, job)  # asks the grid: nothing is missing


PROGRAM = """
import importlib, inspect
from ds_zipccl.integration import hook_points, hooks
from ds_zipccl.telemetry import counters

def unhooked(function):
    return inspect.unwrap(function, stop=lambda one: "/ds_zipccl/" not in one.__code__.co_filename)

def renamed(function):
    def other(this, *args, **kwargs):
        return function(this, *args, **kwargs)
    return other

# The start of ZeRO-3 is hooked: agreements would begin there, if they did not need the other names.
engines = [point for point in hook_points.POINTS.values()
           if point.first and point.without
           and not point.owner.startswith(("deepspeed.comm.", "torch")) and "_zero_optimizer" not in point.name]
for point in engines:
    owner = importlib.import_module(point.owner)
    *parts, last = point.name.split(".")
    for part in parts:
        owner = getattr(owner, part)
    if isinstance(owner, dict):
        key = next(key for key in owner if key.__name__ == last)
        owner[key] = renamed(unhooked(owner[key]))
    else:
        other = renamed(unhooked(getattr(owner, last)))
        static = isinstance(inspect.getattr_static(owner, last), staticmethod)
        setattr(owner, last, staticmethod(other) if static else other)
for point in engines:
    hooks.adopt(sys.modules[point.owner])

def train(section, stage):
    built = engine(section, stage)
    losses = []
    for number in range(3):
        loss = built(torch.full((1, 256), 1.0 + rank + number, dtype=torch.bfloat16)).float().square().mean()
        losses.append(loss.item().hex())
        built.backward(loss)
        built.step()
    built.destroy()
    return losses

plain = {stage: train(None, stage) for stage in (1, 2, 3)}
section = {"enabled": True, "mode": "always", "lossy": True, "roles": {"zero_grad": {"codec": "round", "mantissa": 2}}}
for stage in plain:
    counters.reset()
    found = train(section, stage)
    assert found == plain[stage], (stage, found, plain[stage])
    rows = {(row["role"], row["op"]): row for row in counters.rows()}
    coded = {role for (role, _), row in rows.items() if row["calls"]}
    assert {"zero_grad", "zero_param"} <= coded, (stage, rows)
    if stage < 3:
        assert rows["zero_grad", "all_reduce"]["whole"], rows
        assert not any(row["differences"] for row in rows.values()), rows
    assert not counters.lossy(), counters.lossy()
assert all(hook_points.lacking(guard) for guard in hook_points.GUARDS)
if rank == 0:
    json.dump([point.name for point in engines], open("names.json", "w"))
leave()
"""


@pytest.mark.full(reason="one more launch, of a DeepSpeed that no release is like")
def test_training_without_hooks(tmp_path: Path) -> None:
    """All functions around the collectives but one take other parameters: each has a line, and training has the bits of plain
    communication, also with a lossy codec in the section."""
    first, second = succeed(tmp_path, PROGRAM)
    names = json.loads((tmp_path / "names.json").read_text())
    assert len(names) > 25
    said = [line for line in first.splitlines() if "has another" in line and not line.startswith("[ds_zipccl] LOSSY")]
    for name in names:
        (line,) = [line for line in said if f" has another {name}, " in line]
        assert line.startswith(release(hook_points.POINTS[name]), len("[ds_zipccl] "))
        assert f": {hook_points.POINTS[name].without}; training goes on" in line
    assert len(said) == len(names) and "has another" not in second, "rank 0 speaks"
    assert "LOSSY by config" in first and "bit-exact all the same: some calls of zero_grad" in first


def test_ds_report_lists_our_builders(capsys: pytest.CaptureFixture[str]) -> None:
    """And DeepSpeed's own table of them stays as it is."""
    from deepspeed import env_report
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    before = dict(ALL_OPS)
    env_report.op_report(verbose=False)
    said = capsys.readouterr().out
    assert {"zipccl_cpu", "zipccl_cuda", *before} <= set(said.split())
    assert env_report.ALL_OPS is ALL_OPS and before == ALL_OPS
