"""The choice between plain and coded moves by times of whole steps: it finds the better schedule, ignores noise, and costs little."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from ds_zipccl.policy import step_rules
from ds_zipccl.policy.step_rules import CODED, PLAIN, StepTuner, other

#: Seconds of a step, by its number.
Step = Callable[[int], float]


class Job:
    """A job whose steps take the seconds of its schedule, times a noise."""

    def __init__(self, start: str, plain: Step, coded: Step, noise: Callable[[int], float]) -> None:
        self.tuner = StepTuner(start)
        self._seconds = {PLAIN: plain, CODED: coded}
        self._noise = noise
        self._times: list[float] = []
        self.schedules: list[str] = []
        self.chosen: list[str] = []
        self.agreements: list[int] = []
        self.spent = 0.0

    def run(self, steps: int) -> Job:
        for _ in range(steps):
            number = len(self.schedules)
            self.schedules.append(self.tuner.schedule)
            seconds = self._seconds[self.tuner.schedule](number) * self._noise(number)
            self.spent += seconds
            timed, agree = self.tuner.end_step()
            if timed:
                self._times.append(seconds)
            if agree:
                self.agreements.append(number)
                self.tuner.decide(self._times)
                self._times = []
            self.chosen.append(self.tuner.chosen)
        return self


def noises(seed: int) -> dict[str, Callable[[int], float]]:
    """Kinds of noise, as factors."""
    rng = random.Random(seed)
    phase = rng.randrange(100)
    return {
        "normal": lambda step: max(0.5, rng.gauss(1.0, 0.05)),
        "heavy": lambda step: rng.lognormvariate(0.0, 0.1),
        "checkpoints": lambda step: 20.0 if (step + phase) % 50 == 0 else rng.gauss(1.0, 0.01),
        "two kinds of batches": lambda step: rng.choice((1.0, 1.3)),
        "slow phases": lambda step: (1.2 if (step + phase) // 40 % 2 else 1.0) * rng.gauss(1.0, 0.02),
        "a drift": lambda step: (1.0 + 1e-4 * step) * rng.gauss(1.0, 0.01),
    }


@pytest.mark.parametrize("kind", noises(0))
@pytest.mark.parametrize("start", [PLAIN, CODED])
def test_noise_switches_nothing(kind: str, start: str) -> None:
    """By the rules once in 4,000 trials. Of 3,000 runs with seeds from 1000 on none switched."""
    switched = sum(
        len(set(Job(start, lambda step: 1.0, lambda step: 1.0, noises(seed)[kind]).run(10_000).chosen)) > 1
        for seed in range(1000, 1010)
    )
    assert switched == 0


@pytest.mark.parametrize("kind", noises(0))
@pytest.mark.parametrize("start", [PLAIN, CODED])
@pytest.mark.parametrize("better", [PLAIN, CODED])
def test_the_better_arm_is_found(kind: str, start: str, better: str) -> None:
    """It takes a quarter less."""
    seconds: dict[str, Step] = {better: lambda step: 0.75, other(better): lambda step: 1.0}
    for seed in range(5):
        job = Job(start, seconds[PLAIN], seconds[CODED], noises(seed)[kind]).run(4000)
        assert job.tuner.chosen == better, seed
        if start == better:
            assert set(job.chosen) == {better}


def test_a_clear_gain_is_found_in_the_first_trial() -> None:
    job = Job(PLAIN, lambda step: 1.0, lambda step: 0.9, noises(0)["normal"]).run(100)
    first = job.agreements[0]
    assert first < 80 and job.chosen[first - 1 : first + 1] == [PLAIN, CODED]


@pytest.mark.parametrize("slower", [1.1, 1.5, 2.0, 5.0])
def test_trials_cost_little(slower: float) -> None:
    """After the first trial, looking for a change costs at most one step in a hundred."""
    job = Job(CODED, lambda step: slower, lambda step: 1.0, lambda step: 1.0).run(100)
    before = job.spent
    job.run(20_000)
    assert job.tuner.chosen == CODED and (job.spent - before) / 20_000 <= 1.0 + step_rules.PROBE_SHARE
    assert job.schedules[100:].count(PLAIN) > 0 and len(job.agreements) < 40


def test_a_change_of_the_network_is_found() -> None:
    """Coding is slower at first; after 3000 steps the network is shared with another job."""
    job = Job(PLAIN, lambda step: 1.0 if step < 3000 else 1.5, lambda step: 1.1, noises(1)["normal"]).run(3000)
    assert set(job.chosen) == {PLAIN}
    job.run(3000)
    assert job.tuner.chosen == CODED
    switches = sum(before != after for before, after in zip(job.chosen, job.chosen[1:], strict=False))
    assert switches == 1


def test_a_probe_alone_switches_nothing() -> None:
    """A probe that finds the other schedule better is followed by a whole trial."""
    job = Job(PLAIN, lambda step: 1.0, lambda step: 1.1, lambda step: 1.0).run(100)
    while job.tuner.end_step().timed is False:  # up to the probe
        pass
    count = 1
    while True:
        timed, agree = job.tuner.end_step()
        count += timed
        if agree:
            break
    assert count == 2 * step_rules.PROBE_WINDOWS * step_rules.WINDOW_STEPS
    window = [1.0] * step_rules.WINDOW_STEPS + [0.5] * step_rules.WINDOW_STEPS
    assert not job.tuner.decide(window * step_rules.PROBE_WINDOWS) and job.tuner.chosen == PLAIN
    count = 0
    while True:
        timed, agree = job.tuner.end_step()
        count += timed
        if agree:
            break
    assert count == 2 * step_rules.TRIAL_WINDOWS * step_rules.WINDOW_STEPS
    assert job.tuner.decide(window * step_rules.TRIAL_WINDOWS) and job.tuner.chosen == CODED


def test_arms_follow_step_numbers_and_agreed_times_alone() -> None:
    """Tuners with equal agreed times are in step, whatever their ranks measured."""
    one, two = StepTuner(CODED), StepTuner(CODED)
    rng = random.Random(5)
    timed = 0
    for _ in range(5000):
        assert one.schedule == two.schedule
        ended = one.end_step()
        assert ended == two.end_step()
        timed += ended.timed
        if ended.agree:
            times = [rng.uniform(0.5, 1.5) for _ in range(timed)]
            assert one.decide(times) == two.decide(times)
            timed = 0


@pytest.mark.parametrize("wrong", [math.inf, math.nan, 0.0])
def test_times_that_did_not_arrive_do_not_count(wrong: float) -> None:
    job = Job(CODED, lambda step: 0.1, lambda step: 1.0, lambda step: wrong).run(1000)
    assert set(job.chosen) == {CODED} and job.agreements
    some = Job(CODED, lambda step: 0.5, lambda step: 1.0, lambda step: wrong if step % 3 == 0 else 1.0).run(100)
    assert some.tuner.chosen == PLAIN
