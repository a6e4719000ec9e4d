"""Policy is tables: what is coded by values that all ranks share, steps in turns, and the model of collectives on devices."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_zipccl.comm.device import gather, sums
from ds_zipccl.comm.topology import Levels
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy import admission, base_copies, cost_model, trial, wire
from ds_zipccl.policy.admission import (
    CODED_REDUCE_OPS,
    DELTA_DTYPES,
    DELTA_SHARD_BYTES,
    RULES,
    Decision,
    Message,
    admit,
    candidates,
    is_small,
)
from ds_zipccl.policy.cost_model import (
    ALL_TO_ALL,
    GATHER,
    PCIE,
    RDMA_REACH,
    SUM,
    TCP_REACH,
    DeviceProfile,
    Topology,
    coded_seconds,
    least_bytes,
    moves_may_gain,
    plain_seconds,
)
from ds_zipccl.policy.settled import SUMMED_BYTES, class_of, gaining_sums
from ds_zipccl.policy.trial import CODED, PLAIN, StepTrial
from ds_zipccl.policy.wire import (
    RAW_BELOW_BYTES,
    TOGETHER_BELOW_BYTES,
    encode_together,
    frame_codec,
    incompressible,
    straight_to_owners,
)

GOOD = Message("all_reduce", torch.bfloat16, 1 << 20, 4, "cpu", "gloo", "zero_grad", "SUM")
ON = ZipcclConfig(enabled=True)

REFUSED = {
    "not enabled": (GOOD, ZipcclConfig()),
    "role is never coded": (GOOD, ZipcclConfig(enabled=True, roles={"zero_grad": "never"})),
    "group of one rank": (replace(GOOD, ranks=1), ON),
    "dtype float64": (replace(GOOD, dtype=torch.float64), ON),
    "reduce op MAX": (replace(GOOD, reduce_op="MAX"), ON),
    "sums are the backend's": (replace(GOOD, plain_sums=True), ON),
    "no coded route on xpu yet": (replace(GOOD, device="xpu", backend="xccl"), ON),
    "nccl is off": (replace(GOOD, device="cuda", backend="nccl"), replace(ON, nccl="off")),
    "no coded schedule for backend mpi on cpu": (replace(GOOD, backend="mpi"), ON),
    "no coded schedule for backend gloo on cuda": (replace(GOOD, device="cuda"), ON),
    "smaller than min_bytes": (replace(GOOD, numel=32767), ON),
}


@pytest.mark.parametrize("reason", REFUSED, ids=repr)  # `make gpu` selects ids that end in "cuda"
def test_each_reason(reason: str) -> None:
    assert admit(*REFUSED[reason]) == Decision(False, "", reason)


def test_every_rule_has_a_case() -> None:
    used = {next(at for at, rule in enumerate(RULES) if rule(message, config)) for message, config in REFUSED.values()}
    assert used == set(range(len(RULES)))


def test_a_codec_without_cuda_kernels_passes_on_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "CODES", ("wide",))
    message = replace(GOOD, device="cuda", backend="nccl")
    assert admit(message, ON).reason == "no coded route on cuda for codec cascade yet"
    assert admit(message, replace(ON, codec="wide", nccl_min_bytes=0)).frames


def test_coded() -> None:
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for codec, dtype, op in itertools.product(("cascade", "wide", "raw"), dtypes, (None, *CODED_REDUCE_OPS)):
        message = replace(GOOD, dtype=dtype, reduce_op=op)
        assert admit(message, ZipcclConfig(enabled=True, codec=codec)) == Decision(True, codec, ""), message


def test_what_is_coded() -> None:
    """Roles that are not named, from the first size on. An all-to-all must be decided without sizes, which ranks may see differently."""
    assert admit(GOOD, ZipcclConfig(enabled=True, roles={"zero_grad": "always", "ep": "never"})).frames
    at = replace(GOOD, numel=32768)
    assert admit(at, ON).frames and not admit(at, ZipcclConfig(enabled=True, min_bytes=65537)).frames
    assert admit(replace(GOOD, numel=0), ZipcclConfig(enabled=True, min_bytes=0)).frames
    assert admit(replace(GOOD, op="all_to_all_single", numel=None, reduce_op=None), ON).frames
    with pytest.raises(ValueError, match=r"'zero' of all_reduce is unknown \(did you mean .*; name one of zero_param"):
        admit(replace(GOOD, role="zero"), ON)


def test_small_segments_travel_raw() -> None:
    assert frame_codec("wide", RAW_BELOW_BYTES) == "wide"
    assert frame_codec("cascade", RAW_BELOW_BYTES - 1) == frame_codec("raw", RAW_BELOW_BYTES) == "raw"
    assert is_small(65535, ON) and not is_small(65536, ON)
    assert not is_small(10, ZipcclConfig()), "what is off says so, whatever its size"


PARAMETERS = Message("all_gather_into_tensor", torch.bfloat16, 1 << 20, 4, "cpu", "gloo", "zero_param", based=True)
RAW, DELTA_OFF = (ZipcclConfig(enabled=True, min_bytes=0, **more) for more in ({"codec": "raw"}, {"delta": "off"}))
LEAST = 4 * DELTA_SHARD_BYTES // 2  # elements of four shards
DIFFERENCES = {
    "a base": (PARAMETERS, ON, True),
    "no base": (replace(PARAMETERS, based=False), ON, False),
    "switched off": (PARAMETERS, DELTA_OFF, False),
    "raw": (PARAMETERS, RAW, False),
    "just large enough": (replace(PARAMETERS, numel=LEAST), ZipcclConfig(enabled=True, min_bytes=0), True),
    "too small": (replace(PARAMETERS, numel=LEAST - 1), ZipcclConfig(enabled=True, min_bytes=0), False),
    "sizes differ": (replace(PARAMETERS, numel=None), ON, False),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_what_goes_as_a_difference(case: str) -> None:
    message, config, differs = DIFFERENCES[case]
    assert admit(message, config) == Decision(True, config.codec, "", with_base=differs)


def test_words_that_are_no_floats_go_as_differences_alone() -> None:
    """Storage of quantised weights: without a base it passes, with one its other frames are raw."""
    for dtype in DELTA_DTYPES:
        message = replace(PARAMETERS, dtype=dtype)
        assert admit(message, ON) == Decision(True, "raw", "", with_base=True)
        for one, config in (
            (replace(message, based=False), ON),
            (message, DELTA_OFF),
            (replace(message, numel=9), RAW),
        ):
            assert admit(one, config).reason == f"dtype {str(dtype).removeprefix('torch.')}"
        assert [str(one) for one in candidates(message, ON, True)] == ["plain", "raw frames", "delta frames"]
        there = replace(message, device="cuda", backend="nccl", numel=1 << 24)
        assert admit(there, replace(ON, nccl="on")) == Decision(True, "raw", "", with_base=True, on_device=True)
    assert admit(replace(PARAMETERS, dtype=torch.float8_e4m3fn), ON).reason == "dtype float8_e4m3fn", "gloo refuses it"


def test_what_goes_by_node() -> None:
    """Gathers where several nodes have several ranks each; sums by node would round otherwise."""
    for op, levels, wanted in (("all_gather", True, True), ("all_gather", False, False), ("all_reduce", True, False)):
        message = replace(PARAMETERS, op=op, based=False, reduce_op="SUM" if op == "all_reduce" else None)
        assert [one.by_node for one in candidates(message, ON, True, levels)] == [False] * 3 + [True] * wanted
        always = replace(ON, mode="always")
        assert [one.by_node for one in candidates(message, always, True, levels)] == [wanted]
    based = [str(one) for one in candidates(PARAMETERS, ON, True, True)]
    assert based == ["plain", "raw frames", "cascade frames", "delta frames", "delta frames by node"]


def test_what_hardly_shrinks_is_incompressible() -> None:
    least = 1 << 20
    assert incompressible(least, least) and incompressible(least, int(least / 1.02))
    assert not incompressible(least, int(least / 1.04)) and incompressible(least, 2 * least)
    assert incompressible(RAW_BELOW_BYTES, RAW_BELOW_BYTES), "the smallest frame that is coded"
    assert not incompressible(RAW_BELOW_BYTES - 1, RAW_BELOW_BYTES), "smaller ones tell nothing"


def test_segments_are_encoded_together_where_all_are_small() -> None:
    assert encode_together([RAW_BELOW_BYTES, TOGETHER_BELOW_BYTES - 1])
    for sizes in ([], [9000], [9000, RAW_BELOW_BYTES - 1], [9000, TOGETHER_BELOW_BYTES]):
        assert not encode_together(sizes)


def test_owners_must_not_be_few() -> None:
    """Straight where nearly all own as much; else every rank adds an equal shard first."""
    for one_or_two in ([0], [8], [8, 0], [3, 5]):
        assert straight_to_owners(one_or_two, 8)
    assert straight_to_owners([2, 2, 2, 2], 8) and not straight_to_owners([3, 3, 2, 0], 8)
    assert not straight_to_owners([4, 4, 0, 0], 8) and not straight_to_owners([0, 0, 8, 0], 8)
    assert not straight_to_owners([8, 8, 8], 8)  # all own all
    assert straight_to_owners([0, 0, 0], 8) and straight_to_owners([0, 0, 0], 0)


#: Seconds of a step, by its number.
Step = Callable[[int], float]


class Job:
    """A job whose steps take the seconds of its schedule, times a noise."""

    def __init__(self, start: int, plain: Step, coded: Step, noise: Callable[[int], float]) -> None:
        self.tuner = StepTrial(start)
        self.turn = self.tuner.next_turn()
        self._seconds = {PLAIN: plain, CODED: coded}
        self._noise = noise
        self._times: list[float] = []
        self.schedules: list[int] = []
        self.chosen: list[int] = []
        self.agreements: list[int] = []
        self.spent = 0.0

    def run(self, steps: int) -> Job:
        for _ in range(steps):
            number = len(self.schedules)
            self.schedules.append(self.turn.schedule)
            seconds = self._seconds[self.turn.schedule](number) * self._noise(number)
            self.spent += seconds
            if self.turn.timed:
                self._times.append(seconds)
            if self.turn.agree:
                self.agreements.append(number)
                self.tuner.agree(self._times)
                self._times = []
            self.turn = self.tuner.next_turn()
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
def test_noise_switches_nothing(kind: str, start: int) -> None:
    """By the rules once in 4,000 trials. Of 3,000 runs with seeds from 1000 on none switched."""
    switched = sum(
        len(set(Job(start, lambda step: 1.0, lambda step: 1.0, noises(seed)[kind]).run(10_000).chosen)) > 1
        for seed in range(1000, 1010)
    )
    assert switched == 0


@pytest.mark.parametrize("kind", noises(0))
@pytest.mark.parametrize("start", [PLAIN, CODED])
@pytest.mark.parametrize("better", [PLAIN, CODED])
def test_the_better_arm_is_found(kind: str, start: int, better: int) -> None:
    """It takes a quarter less."""
    seconds: dict[int, Step] = {better: lambda step: 0.75, 1 - better: lambda step: 1.0}
    for seed in range(5):
        job = Job(start, seconds[PLAIN], seconds[CODED], noises(seed)[kind]).run(4000)
        assert job.tuner.chosen == better, seed
        if start == better:
            assert set(job.chosen) == {better}


@pytest.mark.parametrize(("coded", "agreements", "most"), [(0.9, 2, 100), (0.6, 1, 35)])
def test_a_gain_is_found_in_the_first_trial(coded: float, agreements: int, most: int) -> None:
    """A probe alone shows a large one."""
    job = Job(PLAIN, lambda step: 1.0, lambda step: coded, noises(0)["normal"]).run(120)
    decided = job.agreements[agreements - 1]
    assert decided < most and job.chosen[decided - 1 : decided + 1] == [PLAIN, CODED]


@pytest.mark.parametrize("slower", [1.1, 1.5, 2.0, 5.0])
def test_trials_cost_little(slower: float) -> None:
    """After the first trial, looking for a change costs at most one step in a hundred."""
    job = Job(CODED, lambda step: slower, lambda step: 1.0, lambda step: 1.0).run(100)
    before = job.spent
    job.run(20_000)
    assert job.tuner.chosen == CODED and (job.spent - before) / 20_000 <= 1.0 + trial.PROBE_SHARE
    assert job.schedules[100:].count(PLAIN) > 0 and len(job.agreements) < 40


def test_a_change_of_the_network_is_found() -> None:
    """Coding is slower at first; after 3000 steps the network is shared with another job."""
    job = Job(PLAIN, lambda step: 1.0 if step < 3000 else 1.5, lambda step: 1.1, noises(1)["normal"]).run(3000)
    assert set(job.chosen) == {PLAIN}
    job.run(3000)
    assert job.tuner.chosen == CODED
    switches = sum(before != after for before, after in zip(job.chosen, job.chosen[1:], strict=False))
    assert switches == 1


def timed_steps(job: Job) -> int:
    """The number of timed steps up to the next agreement."""
    count = 0
    while True:
        count += job.turn.timed
        if job.turn.agree:
            return count
        job.turn = job.tuner.next_turn()


def test_a_probe_alone_switches_nothing() -> None:
    """A probe that finds the other schedule somewhat better is followed by a whole trial."""
    job = Job(PLAIN, lambda step: 1.0, lambda step: 1.1, lambda step: 1.0).run(100)
    assert timed_steps(job) == 2 * trial.PROBE_WINDOWS * trial.WINDOW_STEPS
    window = [1.0] * trial.WINDOW_STEPS + [0.8] * trial.WINDOW_STEPS
    for windows, chosen in ((trial.PROBE_WINDOWS, PLAIN), (trial.TRIAL_WINDOWS, CODED)):
        job.tuner.agree(window * windows)
        job.turn = job.tuner.next_turn()
        assert job.tuner.chosen == chosen
        assert (
            timed_steps(job)
            == 2 * trial.WINDOW_STEPS * {PLAIN: trial.TRIAL_WINDOWS, CODED: trial.PROBE_WINDOWS}[chosen]
        )


@pytest.mark.parametrize("wrong", [math.inf, math.nan, 0.0])
def test_times_that_did_not_arrive_do_not_count(wrong: float) -> None:
    job = Job(CODED, lambda step: 0.1, lambda step: 1.0, lambda step: wrong).run(1000)
    assert set(job.chosen) == {CODED} and job.agreements
    some = Job(CODED, lambda step: 0.5, lambda step: 1.0, lambda step: wrong if step % 3 == 0 else 1.0).run(100)
    assert some.tuner.chosen == PLAIN


EIGHT, FOUR, ONE = Topology(4, 8), Topology(4, 4), Topology(4, 1)
S = 256e6
NO_DELAYS = {"launch": 1e-12, "agreement": 1e-12, "exchange": 1e-12, "hop": 0.0, "step": 0.0}


def node(cards: int, gbits: float, reach: float = RDMA_REACH, **more: float) -> DeviceProfile:
    return DeviceProfile(cards * gbits * 1e9 / 8 * reach, **more)


#: name -> topology, profile, plain ms, gather, sums in one level, sums in two levels: at 0.5, 1.0 and 1.5 TB/s, or at 1.0 alone. The plain
#: times follow from (n-1)/n at the slowest hop, and from the steps of a ring.
TABLE: dict[str, tuple[Topology, DeviceProfile, float, tuple[float, ...], float, tuple[float, ...]]] = {
    "8x400G": (EIGHT, node(8, 400), 0.81, (0.66, 0.83, 0.91), 0.24, (0.52, 0.54, 0.55)),
    "8x200G": (EIGHT, node(8, 200), 1.44, (0.87, 1.03, 1.09), 0.23, (0.75, 0.78, 0.79)),
    "8x100G": (EIGHT, node(8, 100), 2.75, (1.07, 1.19, 1.24), 0.23, (1.05, 1.08, 1.09)),
    "400G a node": (EIGHT, node(1, 400), 5.36, (1.33, 1.43, 1.46), 0.23, (1.32, 1.35, 1.36)),
    "100G a node": (EIGHT, node(1, 100), 21.0, (1.71, 1.74, 1.76), 0.23, (1.67, 1.68, 1.68)),
    "25G TCP a node": (EIGHT, node(1, 25, TCP_REACH), 93.5, (1.84, 1.85, 1.86), 0.23, (1.79, 1.80, 1.80)),
    "1 GPU, 400G": (ONE, node(1, 400), 4.07, (1.30,), 1.20, (1.20,)),
    "1 GPU, 100G": (ONE, node(1, 100), 16.2, (1.42,), 1.36, (1.36,)),
    "4 PCIe GPUs, 100G": (FOUR, node(1, 100, inside=PCIE), 20.3, (1.41,), 0.44, (0.98,)),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_model_gives_the_table_of_the_design(name: str) -> None:
    topology, profile, plain_ms, gathers, one_level, in_levels = TABLE[name]
    plain = plain_seconds(GATHER, S, topology, profile)
    assert plain == plain_seconds(SUM, S, topology, profile) == pytest.approx(plain_ms * 1e-3, rel=0.01)
    codecs = (0.5e12, 1e12, 1.5e12) if len(gathers) == 3 else (1e12,)
    for codec, gathered, summed in zip(codecs, gathers, in_levels, strict=True):
        found = replace(profile, encode=codec, decode=codec)
        assert plain / coded_seconds(GATHER, S, topology, found) == pytest.approx(gathered, rel=0.03)
        assert plain / coded_seconds(SUM, S, topology, found) == pytest.approx(summed, rel=0.03)
    flat = plain / coded_seconds(SUM, S, replace(topology, even=False), profile)
    assert flat == pytest.approx(one_level, rel=0.04)


@pytest.mark.parametrize(("nodes", "each"), [(2, 8), (4, 8), (2, 2), (4, 1), (1, 8)])
def test_a_ring_passes_its_slowest_hop(nodes: int, each: int) -> None:
    """Every shard goes from rank to rank until all have it; the edges that leave a node are counted one by one."""
    ranks, crossing = nodes * each, [0] * nodes
    for first in range(ranks):
        for sender in range(first, first + ranks - 1):
            if sender % each == each - 1:
                crossing[sender % ranks // each] += 1
    profile = DeviceProfile(network=10e9, inside=1e12, **NO_DELAYS)
    wanted = max(crossing) * S / ranks / profile.network if nodes > 1 else S * (ranks - 1) / ranks / profile.inside
    assert plain_seconds(GATHER, S, Topology(nodes, each), profile) == pytest.approx(wanted)
    sums = coded_seconds(SUM, S, Topology(nodes, each), replace(profile, encode=1e15, decode=1e15), 1.0)
    if each > 1 and nodes > 1:  # in two levels, of the plain bytes
        assert sums == pytest.approx(S * (nodes - 1) / nodes / profile.network, rel=0.02)


@pytest.mark.parametrize(
    ("cards", "gbits", "least", "most"), [(8, 400, 0.87, 1.11), (8, 200, 1.09, 1.26), (8, 100, 1.25, 1.35)]
)
def test_exchanges_of_experts(cards: int, gbits: float, least: float, most: float) -> None:
    """134 MB a GPU over 32 ranks."""
    for codec, wanted in ((0.5e12, least), (1.5e12, most)):
        profile = node(cards, gbits, encode=codec, decode=codec)
        plain = plain_seconds(ALL_TO_ALL, 134e6, EIGHT, profile)
        assert plain / coded_seconds(ALL_TO_ALL, 134e6, EIGHT, profile) == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize(
    ("gbits", "reach", "megabytes"), [(400, RDMA_REACH, 134), (100, RDMA_REACH, 21.8), (25, TCP_REACH, 4.57)]
)
def test_break_even_sizes(gbits: float, reach: float, megabytes: float) -> None:
    """Above the size every gather pays, and some below does not; a wait of the host makes it larger."""
    profile = node(1, gbits, reach)
    sizes = [least_bytes(EIGHT, profile, waits=waits) for waits in (0, 1)]
    assert sizes[1] == pytest.approx(megabytes * 1e6, rel=0.01) and sizes[0] < sizes[1]
    for waits, size in enumerate(sizes):
        assert all(cost_model.pays(GATHER, EIGHT, profile, size * more, waits=waits) for more in (1, 1.5, 3))
        below = max(one for one in cost_model._LEAST_SIZES if one < size)
        assert not cost_model.pays(GATHER, EIGHT, profile, below, waits=waits)
    assert math.isinf(least_bytes(ONE, replace(profile, decode=1e9), waits=1))
    assert least_bytes(EIGHT, DeviceProfile(1e9, **NO_DELAYS), waits=1) == 0


# ---- fragments; cases have every second size, those that their neighbors lack: all pairs of values have one ---------------

SIZES = [16 << 20, 20_000_003, 50 << 20, 64 << 20, 100_000_001, 256 << 20, 405 << 20, 10**9, (2 << 30) - 2]
RANKS = [2, 3, 8, 16, 31, 64, 128, 512, 1024]
BUDGETS = [1 << 30, 64 << 20, 16 << 20]


def planned(
    numels: Sequence[int], topology: Topology, by: DeviceProfile, budget: int
) -> tuple[gather.Plan, list[int], int]:
    """The layout of a gather of parameters of so many elements per rank, the bytes of its fragments, and those of its largest frame."""
    ranks, levels = topology.ranks, cost_model.levels_from(topology, by)
    cut = SimpleNamespace(
        gather=partial(cost_model.gather_fragments, topology=topology, profile=by), levels_from=levels
    )
    ctx: Any = SimpleNamespace(size=ranks, budget=budget, cut=cut, config=ON)
    pieces = gather.pieces_of([numels], 2, ranks, budget)
    flats = [torch.empty(sum(numels) * more, dtype=torch.bfloat16, device="meta") for more in (1, ranks)]
    sizes = [int(piece.numel * 2 / cost_model.RATIO[GATHER]) for piece in pieces]
    plan = gather.plan_of(ctx, [gather.Shard(*flats, numels)], pieces, sizes)
    return plan, [ranks * one.table.part_bytes for one in plan.fragments], ranks * wire.slot_bytes(max(sizes))


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("ranks", RANKS)
def test_gathers_cut_as_many_fragments_as_the_model_assumes(ranks: int, budget: int) -> None:
    """Of one parameter, of many, and of parameters as a layer of Llama has them. They fit the budget, and are equal but for a frame."""
    draw, by = random.Random(ranks), DeviceProfile(50e9)
    topology = Topology(ranks // 8, 8) if ranks % 8 == 0 and ranks > 8 else Topology(ranks, 1)
    levels = cost_model.levels_from(topology, by)
    for nbytes in SIZES[(BUDGETS.index(budget) + RANKS.index(ranks)) % 2 :: 2]:
        numel = nbytes // 2 // ranks
        cuts = sorted(draw.sample(range(1, numel), 12))
        layers = [numel * part // 24 for part in (1, 1, 1, 1, 6, 6, 8)]
        for numels in ([numel], [end - begin for begin, end in zip([0, *cuts], [*cuts, numel])], layers):
            plan, parts, frame = planned(numels, topology, by, budget)
            ends = [one.last for one in plan.fragments]
            assert [one.first for one in plan.fragments] == [0, *ends[:-1]] and ends[-1] == len(plan.pieces)
            sizes = 2 * ranks * sum(numels), sum(parts), topology, by
            wanted = cost_model.gather_fragments(*sizes, frame=frame, budget=budget, least=levels)
            assert len(parts) == wanted[0] or len(parts) < wanted[0] > sum(parts) / frame, "none is empty"
            assert plan.in_levels == wanted[1]
            assert max(parts) - min(parts) <= 2 * frame and max(parts) <= max(budget, 2 * frame)


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("mib", [64, 360, 1024])
@pytest.mark.parametrize("numels", [[4096] * 2, [11008], [14336], [14336] * 2], ids=["67MB", "90MB", "117MB", "235MB"])
def test_gathers_of_deepspeed_send_what_their_level_needs(nodes: int, mib: int, numels: list[int]) -> None:
    """Between nodes; and hardly longer than the best of 1 to 8 equal fragments that fit. Ring or two levels is one choice for all."""
    topology = Topology(nodes, 8)
    for gbits in (25, 50, 100, 200, 400):
        by = node(1, gbits)
        plan, parts, frame = planned([4096 * one // topology.ranks for one in numels], topology, by, mib << 20)
        frames = 2 * 4096 * sum(numels) / cost_model.RATIO[GATHER]
        assert sum(parts) <= 1.01 * frames and max(parts) <= mib << 20 and max(parts) - min(parts) <= 2 * frame
        delay, per_byte = cost_model.gather_way(topology, by, in_levels=plan.in_levels)
        fits = [count for count in range(1, 9) if frames <= count * mib << 20]
        best = min(count * cost_model.gather_wire(frames / count, topology, by) for count in fits)
        assert len(parts) * delay + sum(parts) * per_byte <= 1.02 * best


@pytest.mark.parametrize("decode", [1e9, 1e10, 1e11, 1e12])
def test_the_number_of_fragments_is_the_best(decode: float) -> None:
    """A fragment more costs its latency and time of the host, and hides some of the codec if the buffers hold two fragments."""
    profile, mib = node(1, 100, decode=decode), 1 << 20
    codec = sum(cost_model.coding_seconds(GATHER, S, ONE, profile))
    delay = cost_model.ring_latency(ONE, profile) + profile.launch
    for budget, least, paired in ((1 << 40, 1, 1), (300 * mib, 1, 2), (100 * mib, 2, 4)):
        found = cost_model.gather_fragments(S, S / 1.46, ONE, profile, budget=budget, least=math.inf)
        seconds = {count: count * delay + codec / count for count in range(paired, max(4, paired) + 1)}
        best = min(seconds, key=lambda count: seconds[count])
        assert found == (best if seconds[best] < least * delay + codec else least, False)


def cut_sum(topology: Topology, numel: int, budget: int, least: int) -> tuple[int, int]:
    """The agreements of a sum of parts of ``numel`` elements that follow each other, and the fragments of the first one."""
    ranks, nodes, each = topology.ranks, topology.nodes, topology.each
    whole = torch.empty(ranks * numel, dtype=torch.bfloat16, device="meta")
    parts = [sums.Part((whole, slice(rank * numel, (rank + 1) * numel))) for rank in range(ranks)]
    of_nodes = [range(node * each, (node + 1) * each) for node in range(nodes)]
    ctx: Any = SimpleNamespace(size=ranks, budget=budget, cut=SimpleNamespace(sum=least), codec="raw")
    summing: Any = sums.Summing(ctx, Levels(of_nodes, 0, 0), parts, parts[0], 1)
    cut: list[int] = []
    summing._node_sums = lambda begin, end: nullcontext([whole[: end - begin]] * nodes)
    summing._fragment = lambda words, sizes, place: cut.append(len(words[0]))
    step = summing.step(numel)
    summing.sum(0, step)
    assert sum(cut) == step
    rows = 2 * summing._rows
    assert rows * step <= max(3 * budget // 4, rows * wire.FRAGMENT_UNIT), "node sums leave room for fragments"
    return len(range(0, numel, step)), len(cut)


@pytest.mark.parametrize("budget", BUDGETS[:2])
@pytest.mark.parametrize("ranks", RANKS)
def test_sums_cut_as_many_fragments_as_the_model_assumes(ranks: int, budget: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(cost_model, "STAGING", budget)
    by = DeviceProfile(50e9)
    for topology in (Topology(ranks, 1), *([Topology(ranks // 8, 8)] if ranks % 8 == 0 and ranks > 8 else ())):
        least = cost_model.least_of_sum(topology, by)
        for nbytes in SIZES[(BUDGETS.index(budget) + RANKS.index(ranks)) % 2 :: 2]:
            numel = nbytes // 2 // ranks // 8 * 8
            assert cut_sum(topology, numel, budget, least) == cost_model.sum_fragments(2 * ranks * numel, topology, by)


def test_a_step_of_7b_is_coarse() -> None:
    """A bucket in at most 8 exchanges with one agreement, on 2 x 8 and 4 x 8."""
    for nodes in (2, 4):
        topology, by = Topology(nodes, 8), cost_model.UNMEASURED
        steps, pieces = cost_model.sum_fragments(1e9, topology, by)
        assert steps == 1 and nodes + pieces <= 8


def test_default_sizes_of_staging_buffers() -> None:
    gib = 1 << 30
    assert wire.device_staging(80 * gib, 30 * gib) == gib
    assert wire.device_staging(24 * gib, 20 * gib) == int(0.015 * 24 * 1024) << 20
    assert wire.device_staging(80 * gib, 2 * gib) == int(0.1 * 2 * 1024) << 20
    assert wire.device_staging(80 * gib, 0) == wire.LEAST_STAGING


# ---- choices with other speeds than those that were measured -----------------------------------------------------------

NETWORKS = [
    10e9 / 8 * TCP_REACH,
    25e9 / 8 * TCP_REACH,
    *(gbits * 1e9 / 8 * RDMA_REACH for gbits in (100, 400, 800, 1600, 3200)),
]


def judged(topology: Topology, profile: DeviceProfile) -> Iterator[float]:
    """By how many times the operations that are coded are faster, with all other speeds."""
    least = least_bytes(topology, profile, waits=1) if moves_may_gain(topology, profile) else math.inf
    gathers = [size for size in (4e6, 50e6, 200e6, 405e6, 1e9) if size >= least]
    dtypes, lightest = gaining_sums(topology, profile)
    summed = [size for size in (lightest, 33e6, *SUMMED_BYTES) if dtypes and size >= lightest]
    for doubt in itertools.product((0.5, 1.0, 2.0), (0.7, 1.0, 1.4), (0.7, 1.0, 1.4)):
        true = profile.doubted(*doubt)
        for kind, sizes in ((GATHER, gathers), (SUM, summed)):
            for size in sizes:
                coded = coded_seconds(kind, size, topology, true, waits=1, cut_by=profile)
                yield plain_seconds(kind, size, topology, true) / coded


@pytest.mark.parametrize("each", [1, 8])
@pytest.mark.parametrize("nodes", [2, 4, 8, 16, 32, 64, 128])
def test_choices_lose_nothing_where_the_measurement_was_off(nodes: int, each: int) -> None:
    gains = [one for network in NETWORKS for one in judged(Topology(nodes, each), DeviceProfile(network))]
    assert gains and min(gains) >= 0.98, min(gains)


@pytest.mark.parametrize(("nodes", "each"), [(2, 8), (4, 8), (2, 2), (8, 4)])
def test_gathers_in_two_levels(nodes: int, each: int) -> None:
    """Without delays the bytes between nodes decide: (m-1)/m of the whole, (n-1)/n in a ring, in words as in frames."""
    topology, profile = Topology(nodes, each), DeviceProfile(10e9, inside=1e13, encode=1e15, decode=1e15, **NO_DELAYS)
    fewer = (1 - 1 / topology.ranks) / (1 - 1 / nodes)
    plain = plain_seconds(GATHER, S, topology, profile)
    assert plain / cost_model.gather_wire(S, topology, profile) == pytest.approx(fewer, rel=0.01)
    coded = plain / coded_seconds(GATHER, S, topology, profile)
    assert coded == pytest.approx(fewer * cost_model.RATIO[GATHER], rel=0.01)
    assert not cost_model.gathers_raw(topology, profile), "coding is free"
    assert cost_model.gathers_raw(topology, replace(profile, decode=5e9))
    assert math.isinf(cost_model.levels_from(topology, replace(profile, inside=5e9))), "the ranks of a node are as slow"
    for other in (Topology(nodes, 1), Topology(1, each), Topology(nodes, each, even=False)):
        assert math.isinf(cost_model.levels_from(other, profile))


def test_choices_without_doubts_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_model, "DOUBTS", ())
    assert min(one for network in NETWORKS for one in judged(Topology(2, 1), DeviceProfile(network))) < 0.9


def test_rules() -> None:
    """Bases in host memory gain on networks slower than the bus, those on devices where a node has several that are faster. Nothing reads
    one where moves are plain."""
    rows = {name: (topology, profile) for name, (topology, profile, *_) in TABLE.items()}
    assert {name for name, row in rows.items() if gaining_sums(*row)[0]} == {"100G a node", "25G TCP a node"}
    assert {name for name, row in rows.items() if not moves_may_gain(*row)} == {"8x400G", "8x200G"}
    gaining = {"100G a node", "25G TCP a node", "1 GPU, 100G", "4 PCIe GPUs, 100G"}
    spread = {"8x400G", "8x200G", "8x100G", "400G a node", "100G a node", "25G TCP a node"}
    kinds = {name: base_copies.gaining(*row) for name, row in rows.items()}
    assert {name for name, found in kinds.items() if "host" in found} == gaining
    assert {name for name, found in kinds.items() if found[:1] == ("node",)} == spread


@pytest.mark.parametrize("gbits", [1, 10, 100])
def test_gathers_of_unchanged_parameters_are_copied_from_a_size_on(gbits: int) -> None:
    """From a smaller one than coded gathers; nothing is sent."""
    topology, profile = Topology(2, 1), node(1, gbits)
    least = base_copies.least_bytes("host", topology, profile)
    assert 0 < least < least_bytes(topology, profile, waits=0) / 2
    for size in (0.9, 1.01, 10):
        copied = cost_model.GAINING * (profile.launch + size * least / profile.bus)
        assert (plain_seconds(GATHER, size * least, topology, profile) > copied) == (size > 1)
    assert math.isinf(base_copies.least_bytes("host", topology, replace(profile, bus=profile.network / 3)))


def test_nodes_that_are_not_even_and_groups_inside_one_have_plain_sums() -> None:
    assert Topology.of([[0, 1, 2], [3, 4]]) == Topology(2, 3, even=False)
    assert Topology.of([[0, 2], [1, 3]]) == Topology(2, 2)
    for topology, gains in ((Topology(2, 3, even=False), True), (Topology(1, 2), False), (Topology(1, 8), False)):
        assert not gaining_sums(topology, node(1, 100))[0] and moves_may_gain(topology, node(1, 100)) == gains


def test_sums_follow_facts_that_repeat() -> None:
    """The class of the network and powers of two, not what one start has measured."""
    first = DeviceProfile(network=2.3e9, inside=150e9, encode=0.6e12, decode=0.9e12, agreement=3e-5, hop=1e-5)
    for other in (
        replace(first, network=3.1e9),
        replace(first, encode=1e12),
        replace(first, inside=250e9, agreement=2e-4, hop=5e-5),
    ):
        assert gaining_sums(EIGHT, first) == gaining_sums(EIGHT, other) and gaining_sums(EIGHT, first)[0]
    assert gaining_sums(EIGHT, first)[1] < gaining_sums(EIGHT, replace(first, network=3.2e9))[1], "another class"
    assert gaining_sums(EIGHT, replace(first, network=400e9)) == ((), 0)
    ends = [class_of(network) for network in (1e6, 3.1e9, 3.2e9, 24e9, 26e9, 400e9)]
    assert [first for first, _ in ends] == [0.125e9, 0.125e9, 3.125e9, 12.5e9, 25e9, 25e9]
    assert all(low < high for low, high in ends)


def test_a_codec_that_is_too_slow_is_not_tried() -> None:
    slow = replace(node(1, 400), decode=2e10)
    assert not moves_may_gain(ONE, slow) and not gaining_sums(ONE, slow)[0]
    assert cost_model.gathers_raw(EIGHT, slow), "two levels gain without it"


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan])
def test_profiles_refuse_numbers(wrong: float) -> None:
    with pytest.raises(ValueError, match="measure again"):
        cost_model.DeviceProfile(network=wrong)
