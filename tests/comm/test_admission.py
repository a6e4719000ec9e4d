"""The policy is a table over values that all ranks share."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from ds_zipccl.config import ZipcclConfig
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
from ds_zipccl.policy.tuner_rules import CHECK_CALLS, CHECK_SECONDS, check_calls
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
    "nccl is off": (replace(GOOD, device="cuda", backend="nccl"), ON),
    "no coded schedule for backend mpi yet": (replace(GOOD, backend="mpi"), ON),
    "smaller than min_bytes": (replace(GOOD, numel=32767), ON),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_each_reason(reason: str) -> None:
    assert admit(*REFUSED[reason]) == Decision(False, "", reason)


def test_every_rule_has_a_case() -> None:
    used = {next(at for at, rule in enumerate(RULES) if rule(message, config)) for message, config in REFUSED.values()}
    assert used == set(range(len(RULES)))


@pytest.mark.parametrize("codec", ["cascade", "wide", "raw"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("reduce_op", [None, *CODED_REDUCE_OPS])
def test_coded(codec: str, dtype: torch.dtype, reduce_op: str | None) -> None:
    message = replace(GOOD, dtype=dtype, reduce_op=reduce_op)
    assert admit(message, ZipcclConfig(enabled=True, codec=codec)) == Decision(True, codec, "")


def test_a_role_that_is_not_named_is_coded() -> None:
    assert admit(GOOD, ZipcclConfig(enabled=True, roles={"zero_grad": "always", "ep": "never"})).frames


def test_min_bytes_is_the_first_size_coded() -> None:
    at = replace(GOOD, numel=32768)
    assert admit(at, ON).frames and not admit(at, ZipcclConfig(enabled=True, min_bytes=65537)).frames
    assert admit(replace(GOOD, numel=0), ZipcclConfig(enabled=True, min_bytes=0)).frames


def test_unknown_sizes_are_coded() -> None:
    """An all-to-all must be decided without sizes, which ranks may see differently."""
    assert admit(replace(GOOD, op="all_to_all_single", numel=None, reduce_op=None), ON).frames


def test_unknown_role() -> None:
    with pytest.raises(ValueError, match="role 'zero' of all_reduce is unknown; roles are zero_param, zero_grad"):
        admit(replace(GOOD, role="zero"), ON)


def test_small_segments_travel_raw() -> None:
    assert frame_codec("wide", RAW_BELOW_BYTES) == "wide"
    assert frame_codec("cascade", RAW_BELOW_BYTES - 1) == frame_codec("raw", RAW_BELOW_BYTES) == "raw"


def test_small_is_a_reason_only_where_coding_is_on() -> None:
    """What is off says so, whatever its size."""
    assert is_small(65535, ON) and not is_small(65536, ON) and not is_small(10, ZipcclConfig())


GATHER = Message("all_gather_into_tensor", torch.bfloat16, 1 << 20, 4, "cpu", "gloo", "zero_param", based=True)
RAW, DELTA_OFF = (ZipcclConfig(enabled=True, min_bytes=0, **more) for more in ({"codec": "raw"}, {"delta": "off"}))
LEAST = 4 * DELTA_SHARD_BYTES // 2  # elements of four shards
DIFFERENCES = {
    "a base": (GATHER, ON, True),
    "no base": (replace(GATHER, based=False), ON, False),
    "switched off": (GATHER, DELTA_OFF, False),
    "raw": (GATHER, RAW, False),
    "staged": (replace(GATHER, device="cuda"), ON, False),
    "just large enough": (replace(GATHER, numel=LEAST), ZipcclConfig(enabled=True, min_bytes=0), True),
    "too small": (replace(GATHER, numel=LEAST - 1), ZipcclConfig(enabled=True, min_bytes=0), False),
    "sizes differ": (replace(GATHER, numel=None), ON, False),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_what_goes_as_a_difference(case: str) -> None:
    message, config, differs = DIFFERENCES[case]
    assert admit(message, config) == Decision(True, config.codec, "", with_base=differs)


def test_words_that_are_no_floats_go_as_differences_alone() -> None:
    """Storage of quantised weights: without a base it passes, with one its other frames are raw."""
    for dtype in DELTA_DTYPES:
        message = replace(GATHER, dtype=dtype)
        assert admit(message, ON) == Decision(True, "raw", "", with_base=True)
        for other, config in (
            (replace(message, based=False), ON),
            (message, DELTA_OFF),
            (replace(message, numel=9), RAW),
        ):
            assert admit(other, config).reason == f"dtype {str(dtype).removeprefix('torch.')}"
        assert [str(one) for one in candidates(message, ON, True)] == ["plain", "uncoded frames", "delta frames"]
        there = replace(message, device="cuda", backend="nccl", numel=1 << 24)
        assert admit(there, replace(ON, nccl="on")) == Decision(True, "raw", "", with_base=True, on_device=True)
    assert admit(replace(GATHER, dtype=torch.float8_e4m3fn), ON).reason == "dtype float8_e4m3fn", "gloo refuses it"


def test_what_goes_by_node() -> None:
    """Gathers where several nodes have several ranks each; sums by node would round otherwise."""
    for op, levels, wanted in (("all_gather", True, True), ("all_gather", False, False), ("all_reduce", True, False)):
        message = replace(GATHER, op=op, based=False, reduce_op="SUM" if op == "all_reduce" else None)
        assert [one.by_node for one in candidates(message, ON, True, levels)] == [False] * 3 + [True] * wanted
        always = replace(ON, mode="always")
        assert [one.by_node for one in candidates(message, always, True, levels)] == [wanted]
    based = [str(one) for one in candidates(GATHER, ON, True, True)]
    assert based == ["plain", "uncoded frames", "cascade frames", "delta frames", "delta frames by node"]


def test_slow_calls_are_checked_more_often() -> None:
    assert check_calls(CHECK_SECONDS) == CHECK_CALLS[1] > CHECK_CALLS[0] == check_calls(1.01 * CHECK_SECONDS)
    assert check_calls(math.inf) == CHECK_CALLS[0]


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
