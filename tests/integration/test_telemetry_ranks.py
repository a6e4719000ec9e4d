"""Telemetry of real engines: the summary of DeepSpeed's comms logger, and the ranges of torch's profilers."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from backend_programs import succeed
from places import ROOT
from torch.profiler import ProfilerActivity, profile

from ds_zipccl.comm.device.streams import Stage, streams_of
from ds_zipccl.integration import hook_points, hooks  # noqa: F401  hooks has the table of points
from ds_zipccl.telemetry import comms_log, counters, monitor, ranges

RANGES = {"ds_zipccl.encode", "ds_zipccl.wire", "ds_zipccl.decode"}


@pytest.fixture(autouse=True)
def empty(no_counts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of zero, and no group of an earlier test, whose NCCL the profiler of a torch without NCCL would ask for its version."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)


# ---- ranges


def ranges_of(found: Any) -> set[str]:
    return {event.key for event in found.key_averages()} & RANGES


def test_each_stream_of_a_device_is_a_range() -> None:
    streams = streams_of(torch.device("cpu"))
    assert {ranges.RANGES[stage.value] for stage in Stage} == RANGES
    for stage in Stage:
        with profile(activities=[ProfilerActivity.CPU]) as found, streams.on(stage):
            torch.zeros(1)
        assert ranges_of(found) == {f"ds_zipccl.{stage.value}"}


def test_without_a_profiler_there_is_no_range() -> None:
    """The caller's own context comes back as it is: a range costs a look at an attribute."""
    context = io.StringIO()
    assert ranges.inside(ranges.ENCODE, context) is context
    with profile(activities=[ProfilerActivity.CPU]):
        assert ranges.inside(ranges.ENCODE, context) is not context


def test_a_range_ends_with_an_error_and_keeps_what_its_context_makes_of_it() -> None:
    class Refusing:
        def __enter__(self) -> None: ...

        def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
            raise KeyError("as planted") from error

    with profile(activities=[ProfilerActivity.CPU]) as found:
        with pytest.raises(KeyError, match="as planted"), ranges.inside(ranges.DECODE, Refusing()):
            raise ValueError
        with ranges.inside(ranges.ENCODE):
            pass
    assert ranges_of(found) == {ranges.DECODE, ranges.ENCODE}


# ---- the monitor


def test_events_are_those_of_the_documentation() -> None:
    counters.record("pp", "send", 3000, 2000)
    counters.record_lossy("pp", "send", "lowrank rank 2", 1)
    counters.record_error("pp", "send", "lowrank rank 2", 1.0, 4.0)
    counters.record_kept("pp", "send", 1.0, 4.0)
    counters.record_alike("pp", "send", 0.5)
    counters.record_saved("steps", 0.5)
    events = [name.replace("/pp/", "/<role>/") for name, *_ in monitor.events(8)]
    page = (ROOT / "docs" / "tools.md").read_text()
    assert sorted(events) == sorted(re.findall(r"^\| `(Train/zipccl/\S+)` \|", page, flags=re.M))


# ---- the comms logger


def test_summary_by_operation() -> None:
    counters.record("zero_param", "all_gather_into_tensor", 3000, 2000)
    counters.record("dp", "all_gather_into_tensor", 1000, 500)
    counters.record_pass("dp", "all_reduce", 10, "smaller than min_bytes")
    assert comms_log.summary() == {
        "all_gather_into_tensor": {
            "count": 2, "logical_bytes": 4000, "wire_bytes": 2500, "ratio": 1.6, "passed_count": 0, "passed_bytes": 0,
        },
        "all_reduce": {
            "count": 0, "logical_bytes": 0, "wire_bytes": 0, "ratio": 1.0, "passed_count": 1, "passed_bytes": 10,
        },
    }  # fmt: skip
    assert [" ".join(line.split()) for line in comms_log.render().splitlines()] == [
        "Coded Op Count Logical Bytes Wire Bytes Ratio Passed Count Passed Bytes",
        "all_gather_into_tensor", "2 4000 2500 1.600 0 0", "all_reduce", "0 0 0 1.000 1 10",
    ]  # fmt: skip
    comms_log.reset()
    assert comms_log.summary() == {} and comms_log.render() == ""
    counters.record("dp", "all_reduce", 8, 4)
    assert list(comms_log.summary()) == ["all_reduce"] and comms_log.summary()["all_reduce"]["passed_count"] == 0
    counters.reset()
    counters.record("dp", "all_gather_into_tensor", 6000, 4000)
    assert comms_log.summary()["all_gather_into_tensor"]["logical_bytes"] == 6000, "counters that were reset since"


class Logger:
    """DeepSpeed's logger, as far as it is hooked."""

    def log_all(self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False) -> Any:
        """DeepSpeed's method."""
        return {"summary": {}} if return_dict else None

    def reset_data(self) -> str:
        return "reset"


def test_the_logger_is_watched_and_left_alone_without_coded_calls() -> None:
    module: Any = SimpleNamespace(comms_logger=Logger())
    hook_points.adopt(module, "deepspeed.comm.comm")
    once = module.comms_logger.log_all
    assert once.__doc__ == "DeepSpeed's method."
    with redirect_stdout(io.StringIO()) as said:
        assert once() is None and once(return_dict=True) == {"summary": {}}
        assert said.getvalue() == ""
        counters.record("dp", "all_reduce", 8, 4)
        assert once(False, return_dict=True) == {"summary": {}, "ds_zipccl": comms_log.summary()}
        assert said.getvalue() == ""
        assert once() is None and said.getvalue() == f"{comms_log.render()}\n"
    assert module.comms_logger.reset_data() == "reset" and comms_log.summary() == {}


PROGRAM = """
import contextlib, io
from torch.profiler import profile, ProfilerActivity
from ds_zipccl.telemetry import counters

RANGES = {"ds_zipccl.encode", "ds_zipccl.wire", "ds_zipccl.decode"}
def ranges_of(found):
    return {event.key for event in found.key_averages()} & RANGES
section = {"enabled": True, "mode": "always"}
built = engine(section, 2, comms_logger={"enabled": True, "prof_all": True})
said = io.StringIO()
steps(built, 1)
dist.reset_log()
counters.reset()
steps(built, 3)
with contextlib.redirect_stdout(said):
    found = dist.log_summary(return_dict=True)
rows = counters.rows()
coded = found["ds_zipccl"]
for op, row in coded.items():
    for key, other in (("count", "calls"), ("logical_bytes", "logical_bytes"), ("wire_bytes", "wire_bytes")):
        assert row[key] == sum(one[other] for one in rows if one["op"] == op), (op, row, rows)
gathers = coded["all_gather_into_tensor"]
assert gathers["count"] == 3 and 0 < gathers["wire_bytes"] < gathers["logical_bytes"] == 3 * 65792, gathers
# DeepSpeed's own rows: the calls of the program, by the size of their tensors
logged = found["summary"]["all_gather_into_tensor"]
assert {size: row["count"] for size, row in logged.items()} == {65792: 3}, logged
assert ("Coded Op" in said.getvalue()) == (rank == 0), said.getvalue()
straggling = dist.log_summary(show_straggler=True, return_dict=True)
assert straggling["straggler_analysis"]["all_gather_into_tensor"] and straggling["ds_zipccl"]
dist.reset_log()
dist.configure(enabled=False)

def names(**more):
    tensor, other = torch.randn(1 << 17).bfloat16(), torch.empty(1 << 18, dtype=torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU], **more) as found:
        if more:
            dist.all_gather_into_tensor(other, tensor, async_op=True).wait()
        else:
            steps(built, 1)
    return ranges_of(found)

everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
found = {"steps": names(), "asynchronous": names(experimental_config=everywhere)}
assert found == dict.fromkeys(found, RANGES), found
tensor = torch.randn(1 << 17).bfloat16()
with profile(activities=[ProfilerActivity.CPU]) as seen:
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
assert ranges_of(seen) == RANGES - {"ds_zipccl.decode" if rank == 0 else "ds_zipccl.encode"}, ranges_of(seen)
leave()
"""


@pytest.mark.full(reason="one more launch")
def test_real_engines(tmp_path: Path) -> None:
    succeed(tmp_path, PROGRAM)
