"""Low-rank gradients of a pipeline, in one process: which sends are coded, and what becomes of their errors."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ds_zipccl.codecs import decompress, lowrank
from ds_zipccl.comm.buffer_pool import PooledBuffers
from ds_zipccl.config import parse_section
from ds_zipccl.integration import hooks
from ds_zipccl.integration.lossy import pipeline
from ds_zipccl.integration.lossy import state as lossy_state
from ds_zipccl.lossy import LowRank
from ds_zipccl.policy.admission import compresses
from ds_zipccl.role_settings import RoleSettings
from ds_zipccl.telemetry import counters

KEY = (0, "backward", 0)
OWN = lossy_state.State()
ROWS, WIDTH, RANK = 96, 64, 4


class Stepping:
    """An engine that takes optimizer steps; its state is OWN."""

    def __init__(self) -> None:
        self.optimizer = types.SimpleNamespace(loss_scale=1.0)
        self.applied = True

    def was_step_applied(self) -> bool:
        return self.applied


@pytest.fixture(autouse=True)
def stepping(no_counts: None) -> Iterator[Stepping]:
    engine = Stepping()
    OWN.drop()
    lossy_state._states[engine] = OWN
    yield engine
    lossy_state.forget(engine)


# ---- the epilogue


def of_schedule(stages: int, micro_batches: int, stage: int) -> list[tuple[str, int]]:
    """The forwards, sends and receives of gradients of a stage, in DeepSpeed's order, with the micro-batches in order of their kind."""
    from deepspeed.runtime.pipe import schedule

    names = {schedule.ForwardPass: "forward", schedule.SendGrad: "send", schedule.RecvGrad: "recv"}
    counts = dict.fromkeys(names.values(), 0)
    found = []
    for step in schedule.TrainSchedule(micro_batches, stages, stage).steps():
        for command in step:
            if (name := names.get(type(command))) is not None:
                found.append((name, counts[name]))
                counts[name] += 1
    return found


def after_last_forward(events: list[tuple[str, int]], kind: str) -> list[bool]:
    """For each event of a kind whether no forward follows."""
    last = max(at for at, (name, _) in enumerate(events) if name == "forward")
    return [at > last for at, (name, _) in enumerate(events) if name == kind]


@pytest.mark.parametrize("stages", range(2, 9))
def test_the_rule_is_that_of_the_schedule(stages: int) -> None:
    apart = 0
    for micro_batches in range(1, 17):
        for stage in range(1, stages):
            sender, receiver = (of_schedule(stages, micro_batches, one) for one in (stage, stage - 1))
            rule = [compresses(stage, stages, micro_batches, index) for index in range(micro_batches)]
            assert after_last_forward(sender, "send") == rule
            assert sum(rule) == min(micro_batches, stages - stage)
            apart += after_last_forward(receiver, "recv") != rule
    assert apart, "the receiver cannot use its own last forward"


# ---- errors


def link(error: str, rank: int = RANK, own: lossy_state.State = OWN) -> Any:
    return pipeline._Link(RoleSettings(LowRank(rank), error=error, when="backward"), KEY, WIDTH, 2, own)


def gradient(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A matrix of which a few directions hold the most."""
    source = torch.Generator().manual_seed(seed)
    sizes = 0.8 ** torch.arange(WIDTH)
    return (torch.randn(3, ROWS // 3, WIDTH, generator=source) * sizes).to(dtype)


def entry() -> lossy_state.Entry:
    return OWN.entry("pp", KEY, (ROWS, WIDTH), torch.float32, 2)


def sent_in_steps(
    engine: Stepping, error: str, calls: int = 50, per_step: int = 5
) -> list[tuple[list[torch.Tensor], list[torch.Tensor], Any]]:
    """For each optimizer step: the gradients, the values that went out, and the error at its end."""
    settings = {"pp": link(error).settings}
    found = []
    for step in range(calls // per_step):
        given = [gradient(step * per_step + at) for at in range(per_step)]
        sent = [link(error).factored(one, "send", "auto").values.clone() for one in given]
        kept = entry().error
        found.append((given, sent, None if kept is None else kept.clone()))
        with lossy_state.stepping(engine, settings):
            pass
    return found


def gap(given: list[torch.Tensor], sent: list[torch.Tensor], kept: torch.Tensor | None) -> float:
    """|sum sent + E - sum G| over the sum of |G|."""
    missing = sum(sent) - sum(given) + (0 if kept is None else kept.view_as(given[0]))
    return float(missing.norm() / sum(one.norm() for one in given))


def gaps(engine: Stepping, error: str) -> list[float]:
    """Of each step for "lazy", of all calls together otherwise."""
    steps = sent_in_steps(engine, error)
    if error == "lazy":
        return [gap(*one) for one in steps]
    given, sent = ([tensor for one in steps for tensor in one[part]] for part in (0, 1))
    return [gap(given, sent, steps[-1][2])]


@pytest.mark.parametrize("error", ["off", "lazy", "lazy_run"])
def test_what_was_not_delivered_is_kept_in_a_step_or_in_the_run(stepping: Stepping, error: str) -> None:
    found = gaps(stepping, error)
    assert found[0] > 1e-2 if error == "off" else max(found) <= 1e-5
    assert (entry().error is not None) == (error == "lazy_run") and entry().factor is not None


#: Mistakes: E as a function of the right one, of the one before, and of that of factors before they are rounded.
PLANTS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "E of unrounded factors": lambda right, before, unrounded: unrounded,
    "E without the old E": lambda right, before, unrounded: right - before,
    "wrong sign": lambda right, before, unrounded: -right,
}


@pytest.mark.parametrize("name", PLANTS)
@pytest.mark.parametrize("error", ["lazy", "lazy_run"])
def test_wrong_errors_are_seen(stepping: Stepping, monkeypatch: pytest.MonkeyPatch, name: str, error: str) -> None:
    original = pipeline._Link._step

    def step(self: Any, given: torch.Tensor, shape: Any, state: Any, *more: Any) -> Any:
        before = torch.zeros_like(given) if state.error is None else state.error
        start = lowrank.first_factor(WIDTH, RANK, 0) if state.factor is None else state.factor
        found = original(self, given, shape, state, *more)
        p, q = lowrank.power_step(given + before, start)
        state.error = PLANTS[name](state.error, before, given + before - p @ q.t())
        return found

    monkeypatch.setattr(pipeline._Link, "_step", step)
    assert max(gaps(stepping, error)) > 1e-4


def test_a_linear_stage_with_equal_micro_batches_gets_the_exact_gradient() -> None:
    """The weight gradient is sum X^T G': exact up to X^T E of the last micro-batch."""
    x = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(7))
    given = [gradient(one) for one in range(6)]
    got = sum(x.t() @ link("lazy").factored(one, "send", "auto").values.view(ROWS, WIDTH) for one in given)
    kept = entry().error
    assert kept is not None
    wanted = sum(x.t() @ one.view(ROWS, WIDTH) for one in given)
    assert torch.allclose(got + x.t() @ kept, wanted, rtol=1e-4, atol=1e-3)
    assert not torch.allclose(got, wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_goes_exact(value: float) -> None:
    """No error is left of it, and the factor stays."""
    link("lazy_run").factored(gradient(0), "send", "auto")
    factor = entry().factor
    bad = gradient(1)
    bad[0, 3, 5] = value
    assert link("lazy_run").factored(bad, "send", "auto") is None
    assert entry().error is None and entry().factor is factor
    (said,) = counters.lossy()
    assert (said["frames"], said["exact"]) == (2, {"not finite": 1})


def test_values_beyond_the_dtype_go_exact() -> None:
    big = gradient(0).sign().mul(6e4).half()
    found = link("off").factored(big, "send", "auto")
    assert found is None or bool(found.values.isfinite().all())


def test_a_step_that_is_not_taken_takes_the_state_with_it_and_errors_follow_the_loss_scale(stepping: Stepping) -> None:
    settings = {"pp": link("lazy_run").settings}
    link("lazy_run").factored(gradient(0), "send", "auto")
    before = entry().error
    assert before is not None
    with lossy_state.stepping(stepping, settings):
        stepping.optimizer.loss_scale = 2.0
    after = entry().error
    assert after is not None and torch.equal(after, 2 * before)
    stepping.applied = False
    with lossy_state.stepping(stepping, settings):
        stepping.optimizer.loss_scale = 1.0
    assert entry().error is None and entry().factor is None
    stepping.applied = True
    assert max(gaps(stepping, "lazy_run")) <= 1e-5


@pytest.mark.parametrize("rows_rank", [(ROWS, 32), (1, 4)])
def test_shapes_without_use_go_exact(rows_rank: tuple[int, int]) -> None:
    rows, rank = rows_rank
    assert link("off", rank).factored(torch.randn(rows, WIDTH), "send", "auto") is None
    assert counters.lossy()[0]["exact"] == {"shape": 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_frame_has_the_values_of_the_sender(dtype: torch.dtype) -> None:
    found = link("off").factored(gradient(3, dtype), "send", "auto")
    frame = found.frame(1024, "auto", PooledBuffers())
    values = torch.empty(ROWS * WIDTH, dtype=dtype)
    decompress(frame, values)
    assert torch.equal(values.view_as(found.values), found.values)
    assert frame.nbytes < found.values.nbytes / (2 if dtype != torch.float32 else 4)


# ---- micro-batches


class Engine:
    """As much of a pipeline engine as the hints ask for."""

    def __init__(self, stage_id: int = 1, num_stages: int = 2, micro_batches: int = 3) -> None:
        self.stage_id, self.prev_stage, self.num_stages = stage_id, stage_id - 1, num_stages
        self.micro_batches = micro_batches
        self.grid = types.SimpleNamespace(stage_to_global=lambda stage_id: 10 + stage_id)
        self.is_grad_partitioned = self.dynamic_shape = False
        self.pipe_buffers: dict[str, list[Any]] = {"inputs": [gradient(0)]}


def asked(engine: Any, settings: RoleSettings) -> list[Any]:
    _, ready = pipeline.gradients(engine, 0)
    return [ready(one, settings) for one in pipeline._sent_for(engine, 0)]


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)


@pytest.mark.usefixtures("two_ranks")
def test_micro_batches_count_from_0_in_every_batch() -> None:
    engine, settings = Engine(), RoleSettings(LowRank(RANK), send="epilogue", when="backward")
    for sends in (3, 2, 3):  # the second batch fails after two sends
        pipeline.begin_batch(engine)
        found = [bool(asked(engine, settings)[0]) for _ in range(sends)]
        assert found == [False, False, True][:sends]
    other = Engine(micro_batches=1)
    assert asked(other, settings)[0], "engines count by themselves"


@pytest.mark.usefixtures("two_ranks")
def test_each_gradient_of_a_micro_batch_has_a_state_of_its_own() -> None:
    engine, settings = Engine(micro_batches=1), RoleSettings(LowRank(RANK), when="backward")
    engine.pipe_buffers["inputs"] = [(torch.ones(8, 4), torch.arange(3), torch.ones(2, 8))]
    first, second = asked(engine, settings)
    assert (first.key, first.width) == ((10, "backward", 0), 4)
    assert (second.key, second.width) == ((10, "backward", 1), 8)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("together", [False, True])
def test_a_slice_of_a_gradient_keeps_the_width_of_its_rows(together: bool) -> None:
    """Tensor-parallel ranks share a gradient out, and each sends a flat slice behind its sizes."""
    engine, settings = Engine(micro_batches=1), RoleSettings(LowRank(RANK), error="lazy", when="backward")
    engine.is_grad_partitioned = True
    engine.pipe_buffers["inputs"] = [(gradient(0), torch.ones(3)) if together else gradient(0)]
    part = gradient(0).flatten()[: ROWS * WIDTH // 2]
    count, ready = pipeline.gradients(engine, 0)
    made = ready(part, settings)
    assert count == 1
    found = made.factored(part, "send", "auto")
    assert found.values.shape == part.shape and found.p.shape == (ROWS // 2, RANK)
    assert made.factored(part[: 7 * WIDTH + 1], "send", "auto") is None, "no rows"


@pytest.mark.usefixtures("two_ranks")
def test_other_codecs_take_every_gradient() -> None:
    from ds_zipccl.lossy import Round

    assert asked(Engine(micro_batches=9), RoleSettings(Round(3))) == [True]


@pytest.mark.usefixtures("two_ranks")
def test_rho_is_the_cosine_of_the_last_two_inputs() -> None:
    engine, settings = Engine(), RoleSettings(LowRank(RANK), send="all", error="lazy", when="backward")
    inputs = [gradient(one) for one in range(3)]
    inputs[2] = 0.6 * inputs[1] + 0.8 * inputs[0] * inputs[1].norm() / inputs[0].norm()
    pipeline.begin_batch(engine)
    for one in inputs:
        engine.pipe_buffers["inputs"] = [one]
        asked(engine, settings)
    wanted = torch.nn.functional.cosine_similarity(inputs[1].flatten(), inputs[2].flatten(), dim=0)
    found = counters.lossy()[0]["alike"]
    assert found == pytest.approx(float(wanted), abs=1e-5)


@pytest.mark.usefixtures("two_ranks")
def test_shapes_that_change_leave_no_state() -> None:
    """With dynamic shapes it ends with the batch; other engines keep theirs."""
    engines = [Engine(), Engine()]
    engine = engines[0]

    def kept() -> list[bool]:
        return [("pp", KEY) in lossy_state.of(one).held for one in engines]

    for forget in (pipeline.begin_batch, pipeline.forget_shapes, lossy_state.forget):
        for one in engines:
            link("lazy_run", own=lossy_state.of(one)).factored(gradient(0), "send", "auto")
        engine.dynamic_shape = False
        pipeline.begin_batch(engine)
        assert kept() == [True, True]
        engine.dynamic_shape = True
        forget(engine)
        assert kept() == [False, True]
    left = weakref.ref(lossy_state.of(engines.pop()))
    del one
    gc.collect()
    assert left() is None, "state goes with the engine"


def test_batches_of_exact_jobs_touch_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_job", lambda: types.SimpleNamespace(config=parse_section({})))
    monkeypatch.setattr(hooks, "pipeline", None)
    engine = Engine()
    assert hooks._train_batch(id, engine) == hooks._reset_shapes(id, engine) == id(engine)


def test_an_engine_that_is_collected_late_takes_no_state_of_a_later_one() -> None:
    """DeepSpeed keeps references to engines that have ended. Planted: states by the type of the engine, and the assertion fails."""
    ended = Stepping()
    lossy_state.of(ended)
    later = Stepping()
    lossy_state.of(later).entry("pp", KEY, (2, 2), torch.float32, 2).error = torch.zeros(2, 2)
    lossy_state.forget(ended)
    del ended
    gc.collect()
    assert lossy_state.of(later).entries()


def test_another_shape_drops_the_state_with_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    lossy_state._warned.clear()
    for shape in ((ROWS, WIDTH), (8, 8), (9, 9)):
        found = OWN.entry("pp", KEY, shape, torch.float32, 2)
        assert found.error is None
        found.error = torch.zeros(shape)
    assert capsys.readouterr().out.count("it starts anew") == 1
