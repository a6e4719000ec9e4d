"""The cost model by hand and whatever the numbers, and what calibrate finds: the same on all ranks, in time, and true."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import ranks as runner
import torch
import torch.distributed as dist

from ds_zipccl.benchmarks.comm import cases, launch, variants
from ds_zipccl.comm.transport import TRANSPORTS, calibration
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.lossy import Int, LossyCodec, Round, TacoFp8, Zfp
from ds_zipccl.ops import TRAFFIC
from ds_zipccl.policy import admission, cost_model, trial
from ds_zipccl.policy.cost_model import VARIANTS, LinkProfile, lossy_size, predict, typical_ratio
from ds_zipccl.tools import link, namespaces

PIECE_BYTES = 4 << 20

POINTS = ((4096.0, 1e-4), (65536.0, 3e-4), (2.0**20, 1.4e-3), (2.0**23, 1e-2))
PROFILE = LinkProfile(POINTS, encode=8e9, decode=10e9, add=5e9, copy=20e9, add_raw=1e9, call=5e-5)
FREE = 1e30  # bytes a second of a codec that costs nothing
MIB = 1 << 20


def test_points_and_what_lies_between_and_beyond() -> None:
    assert [PROFILE.seconds(size) for size, _ in POINTS] == [pytest.approx(seconds) for _, seconds in POINTS]
    assert PROFILE.seconds(0) == PROFILE.seconds(4096) == PROFILE.alpha == 1e-4
    assert PROFILE.seconds((4096 + 65536) / 2) == pytest.approx(2e-4)
    assert PROFILE.bandwidth == pytest.approx(7 * MIB / 8.6e-3)
    assert PROFILE.seconds(15 * MIB) == pytest.approx(1e-2 + 8.6e-3)
    assert LinkProfile(((1000.0, 0.5),), 1, 1, 1, 1, 1, 0).seconds(2000) == 1.0


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"encode": 0}, "above 0"),
        ({"call": -1}, "above 0"),
        ({"decode": math.inf}, "finite"),
        ({"add": "fast"}, "finite"),
        ({"copy": True}, "finite"),
        ({"more": 1}, "keys"),
        ({"transfer": []}, "at least one"),
        ({"transfer": [[1, 2], [1, 3]]}, "rise"),
        ({"transfer": [[1, 2], [3, 2]]}, "rise"),
        ({"transfer": [[1, math.nan]]}, "finite"),
        ({"transfer": [[1]]}, "pairs"),
        ({"transfer": 7}, "pairs"),
    ],
)
def test_bad_profiles_are_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        LinkProfile.from_json(PROFILE.to_json() | change)


def test_json_has_all_keys() -> None:
    assert LinkProfile.from_json(json.loads(json.dumps(PROFILE.to_json()))) == PROFILE
    for content in ({}, [], None, {"transfer": [[1, 2]]}):
        with pytest.raises(ValueError, match=r"keys add, .*got"):
            LinkProfile.from_json(content)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("op", TRAFFIC)
def test_more_never_takes_less(op: str, variant: str) -> None:
    around = (PIECE_BYTES * n + d for n in (1, 2, 3, 4) for d in (-1, 0, 1))
    sizes = sorted({0, 1, *(1 << power for power in range(10, 31)), *around})
    for ranks in (2, 3, 8):
        for piece in (PIECE_BYTES, math.inf):
            times = [predict(op, variant, size, ranks, PROFILE, 1.5, piece) for size in sizes]
            assert all(before <= after for before, after in pairwise(times))
            assert times[0] >= PROFILE.alpha
    ratios = [predict(op, variant, 1 << 28, 4, PROFILE, ratio) for ratio in (1, 1.2, 1.5, 2, 1e9)]
    assert ratios == sorted(ratios, reverse=True)
    assert (ratios[0] > ratios[1]) == (variant == "coded")


@pytest.mark.parametrize("op", TRAFFIC)
def test_a_codec_that_costs_nothing_and_gains_nothing_is_raw_is_plain(op: str) -> None:
    free = replace(PROFILE, encode=FREE, decode=FREE, add=FREE, copy=FREE, add_raw=FREE, call=0)
    for ranks in (2, 5):
        for nbytes in (1 << 12, 1 << 26):
            raw, coded = (predict(op, variant, nbytes, ranks, free) for variant in ("raw", "coded"))
            assert raw == pytest.approx(coded)
    if op != "broadcast":  # whose plain form is a tree
        straight = replace(free, transfer=((1.0, 1e-4 + 1e-9), (1e9, 1e-4 + 1.0)))
        plain, raw = (predict(op, variant, 1 << 26, 3, straight) for variant in ("plain", "raw"))
        assert raw == pytest.approx(plain, rel=1e-6)


def test_every_term_counts_once() -> None:
    """One piece on two ranks: nothing overlaps, so that time is the sum of its parts."""
    line = replace(PROFILE, transfer=((1.0, 1e-3), (1e9 + 1, 1.001)))  # 1 ms and 1 GB/s
    shard = 32 * MIB
    wire, encode, decode, copy = (shard / speed for speed in (1.5e9, 8e9, 10e9, 20e9))
    coded = {op: predict(op, "coded", 2 * shard, 2, line, 1.5, math.inf) for op in TRAFFIC}
    gather = 1e-3 + wire + encode + decode + copy
    scatter = 1e-3 + wire + encode + decode + 3 * copy
    assert coded["all_gather"] == pytest.approx(5e-5 + gather)
    assert coded["all_to_all"] == pytest.approx(5e-5 + gather)
    assert coded["reduce_scatter"] == pytest.approx(5e-5 + scatter)
    assert coded["all_reduce"] == pytest.approx(5e-5 + gather + scatter)
    assert coded["broadcast"] == pytest.approx(5e-5 + 1e-3 + 2 * (wire + encode + decode))
    assert predict("reduce_scatter", "raw", 2 * shard, 2, line, 1.5, math.inf) == pytest.approx(
        5e-5 + 1e-3 + 1.5 * wire + 5 * copy
    )
    assert predict("all_reduce", "plain", 3 * shard, 3, line) == pytest.approx(4e-3 + 4 * shard / 1e9)

    # Of three ranks a gather encodes one frame, a scatter one for each peer, of which the second while the first travels; of two that come
    # one is decoded, and in sums the other is added.
    add, add_raw = (shard / speed for speed in (5e9, 1e9))
    found = {op: predict(op, "coded", 3 * shard, 3, line, 1.5, math.inf) for op in TRAFFIC}
    common = 5e-5 + 2e-3 + 2 * wire + encode + decode
    assert found["all_gather"] == found["all_to_all"] == pytest.approx(common + decode + copy)
    assert found["reduce_scatter"] == pytest.approx(common + add + 3 * copy)
    assert found["broadcast"] == pytest.approx(5e-5 + 2e-3 + 3 * (2 * wire + encode + decode))
    raw = predict("reduce_scatter", "raw", 3 * shard, 3, line, 1.5, math.inf)
    assert raw == pytest.approx(5e-5 + 2e-3 + 3 * wire + add_raw + 5 * copy)


def test_pieces_hide_coding_behind_the_wire() -> None:
    slow = replace(PROFILE, transfer=((1.0, 1e-6), (1e9, 1.0)), copy=FREE, call=0)
    whole, pieces, half = (
        predict("all_gather", "coded", 1 << 28, 2, slow, 1.5, size) for size in (math.inf, PIECE_BYTES, 1 << 26)
    )
    wire, coding = (1 << 27) / 1.5e9, 1 / 8e9 + 1 / 10e9
    assert pieces == pytest.approx(wire + PIECE_BYTES * coding, rel=1e-3)
    assert whole == pytest.approx(wire + (1 << 27) * coding, rel=1e-3)
    assert pieces < half < whole
    # where the codec is the bottleneck, it is all that counts
    fast = replace(slow, transfer=((1.0, 1e-9), (1e15, 1.0)))
    assert predict("all_gather", "coded", 1 << 28, 2, fast, 1.5) == pytest.approx((1 << 27) * coding, rel=1e-3)


def test_a_second_exchange_has_no_burst() -> None:
    burst = replace(
        PROFILE, transfer=((1e6, 1e-3), (1e7, 2e-3), (1e8, 1.0)), encode=FREE, decode=FREE, add=FREE, copy=FREE, call=0
    )
    once = predict("all_gather", "coded", 2e7, 2, burst)
    assert once == pytest.approx(2e-3)
    assert predict("all_reduce", "coded", 2e7, 2, burst) == pytest.approx(once + 1e-3 + 1e7 / burst.bandwidth)


def test_trees_of_gloo() -> None:
    line = replace(PROFILE, transfer=((1.0, 1e-9), (1e9, 1.0)))
    tensors = {ranks: predict("broadcast", "gloo", 1e9, ranks, line) for ranks in (2, 3, 4, 8)}
    assert tensors == {ranks: pytest.approx(count, rel=1e-6) for ranks, count in {2: 1, 3: 2, 4: 3, 8: 6}.items()}


def test_variants_are_those_of_bench_comm() -> None:
    assert set(variants.VARIANTS) - {"auto"} < set(VARIANTS)


@pytest.mark.parametrize(
    "wrong",
    [("gather", "raw", 1, 2), ("all_gather", "zip", 1, 2), ("all_gather", "raw", 1, 1), ("all_gather", "raw", -1, 2)],
)
def test_nonsense_is_refused(wrong: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="got"):
        predict(*wrong, PROFILE)
    for more in ({"ratio": 0}, {"piece": 0}, {"ratio": math.nan}):
        with pytest.raises(ValueError, match="ratio and piece > 0"):
            predict("all_gather", "coded", 1, 2, PROFILE, **more)


# ---- what the policy asks ----------------------------------------------------------------------------------------------

ON = ZipcclConfig(enabled=True, min_bytes=0)
GATHER = admission.Message("all_gather", torch.bfloat16, 1 << 22, 2, "cpu", "gloo", "dp")


def line(seconds_a_byte: float, speed: float = 8e9) -> LinkProfile:
    """A link without latency, and a codec of one speed for everything."""
    return LinkProfile(((1.0, seconds_a_byte), (1e9, 1e9 * seconds_a_byte)), *(speed,) * 5, call=0)


def chosen(message: admission.Message, profile: LinkProfile | None, *levels: bool, **config: Any) -> str:
    plans = admission.candidates(message, replace(ON, **config), True, *levels)
    return str(cost_model.fastest(plans, message, profile))


def test_the_schedule_follows_the_link_and_the_codec() -> None:
    """Of a gather, and of an exchange of which each rank knows its own size: coded on a slow link, plain where the codec is slower, or
    where frames save less than a clear share; raw frames where they hide what gloo's own schedule does not."""
    uneven = replace(GATHER, op="all_to_all_single", numel=None)
    for message in (GATHER, uneven, replace(GATHER, op="reduce", reduce_op="SUM")):
        assert chosen(message, line(1e-8)) == "cascade frames"
        assert chosen(message, line(1e-12)) == "plain"
    assert chosen(GATHER, replace(line(1e-8), encode=1e8, decode=1e8)) == "raw frames"
    share = [predict("all_gather", way, 1 << 23, 2, line(1e-9, 2.4e9), 1.5) for way in ("gloo", "coded")]
    assert 0.85 < share[1] / share[0] < 1 and chosen(GATHER, line(1e-9, 2.4e9)) == "plain"


def test_frames_of_a_lossy_codec_are_predicted_by_its_own_ratio() -> None:
    """On a slow link coded frames take as much less time as they are smaller."""
    exact, rounded = (cost_model._coded_ratio(replace(GATHER, lossy=codec)) for codec in (None, Round(1)))
    assert exact == typical_ratio(torch.bfloat16) and 3.0 < rounded < 3.5
    assert cost_model._coded_ratio(replace(GATHER, lossy=Int(4))) == pytest.approx(16 / 4.125)


def test_differences_are_predicted_to_shrink_most() -> None:
    based = replace(GATHER, op="all_gather_into_tensor", based=True)
    assert chosen(based, line(1e-8)) == "delta frames" == chosen(based, line(1e-9, speed=1e12))


def test_what_nothing_is_known_of_is_coded() -> None:
    """Without a measured link, and with a lossy codec without an expected size; by node where there are nodes."""
    assert chosen(GATHER, None) == "cascade frames" and chosen(GATHER, None, codec="raw") == "raw frames"
    message = replace(GATHER, lossy=LossyCodec())
    assert cost_model.fastest(admission.candidates(message, ON, True), message, line(1e-12)).frames
    for op in ("all_gather_coalesced", "reduce_to_owners"):
        assert chosen(replace(GATHER, op=op), line(1e-8)) == "cascade frames"
    for profile in (None, line(1e-8)):
        assert chosen(GATHER, profile, True) == "cascade frames by node"


def test_a_send_is_coded_where_frames_save_time() -> None:
    """At 1 GB/s of link, a send of eight fragments hides most of the coding, and a send of one fragment nothing; bf16 saves a third. A
    clear gain is wanted: 15%."""
    nbytes, staging = 32 << 20, 64 << 20
    for speed, coded, one in ((1.3e9, 0, 0), (1.4e9, 1, 0), (2.5e9, 1, 0), (12e9, 1, 1)):
        link = line(1e-9, speed)
        assert cost_model.send_may_gain(nbytes // 2, link, staging) == coded, speed
        assert cost_model.send_may_gain(1 << 19, link, staging) == one, speed
        alone = replace(line(2e-9, speed), one_way=0.5)  # a link that both directions of an exchange share
        assert cost_model.send_may_gain(nbytes // 2, alone, staging) == coded, speed
    link = line(1e-9, 8e9)
    piece = 4 << 20
    wanted = 2 * piece / 8e9 + nbytes / 1.5 * 1e-9 + 1e-9
    assert cost_model.send_seconds(nbytes, link, staging) == pytest.approx(wanted)
    one = 1 << 20
    wanted = 2 * one / 8e9 + one / 1.5 * 1e-9
    assert cost_model.send_seconds(one, link, staging) == pytest.approx(wanted), "one frame: no overlap"


def test_against_a_base_every_copy_counts() -> None:
    profile = replace(PROFILE, copy=4e9)
    for copies, decode in ((0, 2e9), (1, 1 / (1 / 2e9 + 1 / 4e9)), (2, 1e9)):
        found = cost_model.against_base(profile, 1e9, 2e9, copies)
        assert (found.encode, found.decode) == (1e9, pytest.approx(decode)) and found.add == profile.add


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


@pytest.mark.full(reason="alone for six seconds")
@pytest.mark.alone
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_find_the_same_in_time(size: int) -> None:
    answers = runner.run(measured, size)
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
    (few, one), (more, other) = runner.run(unequal, 2)
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


@pytest.mark.parametrize(("times", "found"), [((1, 1.2), 1), ((1, 2, 1.5), 1.5), ((3, 1, 2), 2)])
def test_a_third_time_decides_between_two(times: tuple[float, ...], found: float) -> None:
    """Two times that agree need none."""
    left = list(times)
    assert trial.in_rounds((1,), lambda size: (left.pop(0), 0.0), 9.0) == [(1.0, found)] and not left


def test_sizes_that_take_long_are_left_out() -> None:
    """The first one is measured in any case."""
    for sizes, wanted in (((1, 2, 40), [(1.0, 0.1), (2.0, 0.2)]), ((20, 40), [(20.0, 2.0)])):
        assert trial.in_rounds(sizes, lambda size: (size / 10, size / 10), 1.0) == wanted


@runner.together(2)
def groups_that_cannot_be_measured(rank: int, size: int) -> None:
    alone = [dist.new_group([member]) for member in range(size)][rank]
    with pytest.raises(ValueError, match="gloo"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
        calibration.measure()
    with pytest.raises(ValueError, match=r"at least 2.*got 1"):
        calibration.measure(alone)


@pytest.mark.full(reason="alone for eight seconds")
@pytest.mark.alone
@needs_network
@pytest.mark.parametrize("rate", ["100mbit", "200mbit"])
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


test_programs = runner.programs(__name__)


# ---- expected sizes of lossy frames

#: Measured on tensors of a GPT of 11M parameters in bfloat16: lossless bits of activations forward and backward and of gradients, and
#: the bits and the error of each codec.
LOSSLESS = (10.73, 11.34, 11.04)
MEASURED: list[tuple[LossyCodec, tuple[float, float, float], float]] = [
    (Round(5), (8.74, 9.36, 9.05), 0.007),
    (Round(3), (6.74, 7.36, 7.04), 0.0266),
    (Round(2), (5.75, 6.37, 6.04), 0.053),
    (Round(1), (4.76, 5.37, 5.04), 0.104),
    (TacoFp8(), (6.79, 6.75, 6.76), 0.0265),
    (TacoFp8(hadamard=False), (6.81, 7.28, 6.98), 0.0267),
    (Int(8), (8.13, 8.13, 8.13), 0.0065),
    (Int(6), (6.13, 6.13, 6.13), 0.0266),
    (Int(4), (4.13, 4.13, 4.13), 0.118),
]


@pytest.mark.parametrize(("codec", "bits", "error"), MEASURED, ids=str)
def test_expected_sizes_are_the_measured_ones(codec: LossyCodec, bits: tuple[float, ...], error: float) -> None:
    for lossless, wanted in zip(LOSSLESS, bits, strict=True):
        found = lossy_size(codec, "bfloat16", lossless)
        assert found is not None and found.bits == pytest.approx(wanted, rel=0.02)
        assert found.error == pytest.approx(error, rel=0.06)


def test_expected_sizes_of_other_dtypes() -> None:
    """Rounded values have as many bits in every dtype; nothing is cleared where the mantissa is short."""
    assert {lossy_size(Round(2), dtype, 3 + bits).bits for dtype, bits in (("float16", 10), ("float32", 23))} == {5}
    assert lossy_size(Zfp(12), "float32", 26).bits == 12
    assert lossy_size(Zfp(12), "float32", 26).error == pytest.approx(3.4e-3, rel=0.02)
