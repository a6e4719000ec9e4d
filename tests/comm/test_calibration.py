"""What calibrate finds: the same on all ranks, in time, and true where the truth is known."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import ranks
import tiers
import torch
import torch.distributed as dist

from ds_zipccl import comm
from ds_zipccl.benchmarks.comm import cases, launch
from ds_zipccl.benchmarks.links import link, namespaces
from ds_zipccl.comm.decision import decision_memory
from ds_zipccl.comm.group_state import group_state, link_profile
from ds_zipccl.comm.host import calibration, tuner
from ds_zipccl.comm.transport import TRANSPORTS
from ds_zipccl.comm.transport.protocol import TAGS_PER_RANGE, TagRange
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy.cost_model import LinkProfile

needs_network = pytest.mark.skipif(bool(namespaces.why_not()), reason=f"no shaped network here: {namespaces.why_not()}")


def measured(rank: int, size: int) -> tuple[list[float], LinkProfile]:
    """Seconds of three times, on a machine that does other things too, and what the last one found."""
    calibration.measure()  # builds kernels, if nobody has yet
    times = []
    for _ in range(3):
        if rank == 1:
            time.sleep(0.05)  # ranks need not come together
        dist.barrier()
        start = time.perf_counter()
        profile = calibration.measure(dist.group.WORLD)
        times.append(time.perf_counter() - start)
    return times, profile


@pytest.mark.alone
@pytest.mark.parametrize("size", tiers.mostly_full([2, 3], [3], "nobody runs beside"))
def test_all_ranks_find_the_same_in_time(size: int) -> None:
    answers = ranks.run(measured, size)
    profile = answers[0][1]
    assert [other for _, other in answers] == [profile] * size
    assert min(map(max, zip(*(times for times, _ in answers)))) < 2
    assert all(low < high for before, after in pairwise(profile.transfer) for low, high in zip(before, after))
    assert {size for size, _ in profile.transfer} <= set(calibration.SIZES)
    assert profile.alpha < 0.1
    for speed in (profile.bandwidth, profile.encode, profile.decode, profile.add, profile.copy, profile.add_raw):
        assert 1e7 < speed < 1e12
    assert 2 * calibration._NUMEL / profile.encode > 2 * profile.call, "a whole tensor is coded, not an empty one"
    assert 1e-6 < profile.call < 0.1 and 0 < profile.one_way <= 1


def unequal(rank: int, size: int) -> tuple[int, LinkProfile]:
    """Rank 1 is told other times than rank 0."""
    right = calibration._seconds
    calibration._seconds = lambda step: right(step) + 0.03 * rank
    try:
        tensors = torch.zeros(2, 4096, dtype=torch.uint8)
        times = calibration._exchanges(dist.group.WORLD, TRANSPORTS["gloo"](dist.group.WORLD), *tensors)
        return len(times), calibration.measure()
    finally:
        calibration._seconds = right


def test_the_slowest_rank_decides_for_all() -> None:
    (few, one), (more, other) = ranks.run(unequal, 2)
    assert few == more < calibration._MOST
    assert one == other
    assert one.alpha > 0.03 and one.call > 0.03


def test_a_bad_first_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """All messages of the first round are ten times slower: the link that is found is that of the other rounds."""
    calls: list[int] = []

    def exchanges(group: object, transport: object, sent: torch.Tensor, received: torch.Tensor) -> list[float]:
        size = sent.numel()
        assert received.numel() == size and sent.data_ptr() != received.data_ptr()
        calls.append(size)
        seconds = (10 if calls.count(size) == 1 else 1) * (1e-5 + size / 1e9)
        return [seconds] * (1 if seconds > calibration._SIZE_BUDGET_S else 3)

    monkeypatch.setattr(calibration, "_exchanges", exchanges)
    transfer = calibration._transfer(None, None)  # type: ignore[arg-type]
    assert transfer == tuple((float(size), 1e-5 + size / 1e9) for size in calibration.SIZES)


def test_sizes_that_take_long_are_left_out() -> None:
    def slow(size: int) -> tuple[float, float]:
        return size / 10, size / 10

    assert calibration.in_rounds((1, 2, 40), slow, 1.0) == [(1.0, 0.1), (2.0, 0.2)]
    assert calibration.in_rounds((20, 40), slow, 1.0) == [(20.0, 2.0)], "the first size is measured in any case"


@pytest.mark.parametrize(("times", "found"), [((1, 1.2), 1), ((1, 2, 1.5), 1.5), ((3, 1, 2), 2)])
def test_a_third_time_decides_between_two(times: tuple[float, ...], found: float) -> None:
    """Two times that agree need none."""
    left = list(times)
    assert calibration.in_rounds((1,), lambda size: (left.pop(0), 0.0), 9.0) == [(1.0, found)] and not left


def corrected(rank: int, size: int, factor: float) -> tuple[LinkProfile, int]:
    """Gathers of a group whose link was measured ``factor`` times as fast as it is; plain ones take as long as the true one predicts."""
    nbytes, state = 8 << 20, group_state(None)
    tensor = torch.ones(nbytes // 2 // size, dtype=torch.bfloat16)
    seconds = 2 * nbytes / 1e8  # the nominal size is twice as large
    true = LinkProfile(((1.0, 1e-4), (1e9, 10.0)), 1e11, 1e11, 1e11, 1e11, 1e11, 1e-6)
    state.profiles["cpu", "gloo"] = true.slowed(1 / factor)
    tuners = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "agreed_seconds", lambda told, nominal: [seconds] * told.shape[1])
        for _ in range(40):
            comm.all_gather_into_tensor(
                tensor.new_empty(size * tensor.numel()), tensor, config=ZipcclConfig(enabled=True, min_bytes=0)
            )
            tuners += [one for one in decision_memory(state).tuners.values() if one not in tuners]
    return link_profile(state, "cpu"), len(tuners)


@pytest.mark.parametrize(("factor", "followed"), [(1.0, False), (100.0, True), (0.01, True), (0.6, False)])
def test_a_wrong_measurement_of_the_link_is_corrected(factor: float, followed: bool) -> None:
    """Once, by all ranks at the same call; then the schedules compete anew. A link that is a little off stays."""
    answers = ranks.run(corrected, 2, factor)
    assert answers[0] == answers[1]
    profile, tuners = answers[0]
    assert profile.bandwidth == pytest.approx(1e8 * (1 if followed else factor), rel=0.6 if followed else 1e-3)
    assert tuners == 1 + followed


def refused(rank: int, size: int) -> str:
    alone = [dist.new_group([member]) for member in range(size)][rank]
    with pytest.raises(ValueError, match="gloo"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
        calibration.measure()
    with pytest.raises(ValueError) as error:
        calibration.measure(alone)
    return str(error.value)


def test_groups_that_cannot_be_measured() -> None:
    assert all("at least 2" in text and "got 1" in text for text in ranks.run(refused, 2))


def test_the_tag_is_nobody_elses() -> None:
    assert TagRange.SHADOW + TAGS_PER_RANGE <= TagRange.CALIBRATION < 1 << 31


@pytest.mark.alone
@needs_network
@pytest.mark.parametrize(
    "rate", [pytest.param("100mbit", marks=pytest.mark.full(reason="a faster link stays")), "200mbit"]
)
def test_bandwidth_of_a_known_link(rate: str) -> None:
    start = time.perf_counter()
    spec = link.parse(rate)
    assert spec is not None
    with namespaces.shaped(spec, 2) as network:  # three times, for a machine that does other things too
        found = list(launch.launch(2, [cases.Calibration(60)] * 3, network))
    assert time.perf_counter() - start < 30
    wanted = spec.rate / 8
    profiles = [LinkProfile.from_json(row) for row in found]
    assert any(profile.bandwidth == pytest.approx(wanted, rel=0.15) for profile in profiles)
    shares = [profile.one_way for profile in profiles]
    assert max(shares) > 0.75, f"directions of a network do not share its rate; got {shares}"
