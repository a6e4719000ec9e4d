"""Sends in mode auto: the times of the receiver choose between coded frames and bytes; reports that are lost or nonsense change nothing."""

from __future__ import annotations

import math
import struct
import time
import zlib
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
import ranks as runner
import torch
import torch.distributed as dist

from ds_zipccl import comm
from ds_zipccl.comm.host.p2p import choice, message
from ds_zipccl.comm.work import CommError
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.policy import send_rules
from ds_zipccl.telemetry import counters

AUTO = ZipcclConfig(enabled=True, staging_mib=1)
SLOW = 0.06  # seconds


def ways() -> Counter[bool]:
    """Count the ways of the sends of this rank from now on, uncoded or not."""
    seen: Counter[bool] = Counter()
    next_way = choice.next_way

    def noted(*arguments: Any) -> choice.Way:
        way = next_way(*arguments)
        seen[way.uncoded] += 1
        return way

    choice.next_way = noted  # type: ignore[assignment]
    return seen


def choose(rank: int, ranks: int, slow: str, numel: int) -> tuple[Counter[bool], list[str]]:
    """40 sends where one way, or the reports, are slow or bad at the receiver; the ways after the trials, and the choices."""
    if rank == 1:
        _plant(slow)
    tensor = torch.randn(numel).bfloat16()
    seen = Counter[bool]()
    for number in range(40):
        if number == 2 * send_rules.TRIAL_SENDS + 2:
            seen = ways()
        if rank == 0:
            comm.send(tensor, 1, config=AUTO, role="pp")
            time.sleep(1e-3)  # for the report of the last trial
        else:
            got = torch.zeros_like(tensor)
            comm.recv(got, 0, config=AUTO, role="pp")
            assert torch.equal(got, tensor)
    return seen, [text for row in counters.rows() for text, _ in row["choices"].values()]


def _plant(what: str) -> None:
    """Make a way slow for this receiver, or its reports useless."""
    name = {"coded": "_take_frames", "uncoded": "_take_bytes"}.get(what)
    if name is not None:
        take = getattr(message.Incoming, name)

        def slow(*arguments: Any) -> None:
            time.sleep(SLOW)
            take(*arguments)

        setattr(message.Incoming, name, slow)
        return
    send = choice.report

    def report(ctx: Any, peer: int, number: int, seconds: float) -> None:
        if what == "nonsense":
            send(ctx, peer, number, (math.nan, math.inf, -1.0, 0.0)[number % 4])
        elif what == "another number":
            content = choice._LAYOUT.pack(choice._MAGIC, number + 1, seconds)
            _raw_report(ctx, peer, number, content + struct.pack("<I", zlib.crc32(content)))
        elif what == "checksum":
            _raw_report(ctx, peer, number, choice._LAYOUT.pack(choice._MAGIC, number, seconds) + bytes(4))

    assert what in ("lost", "nonsense", "another number", "checksum")
    choice.report = report


def _raw_report(ctx: Any, peer: int, number: int, content: bytes) -> None:
    buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    handle = ctx.transport.post_send(buffer, peer, choice.TagRange.REPORT + number)
    choice._of(ctx.state).reports.append((handle, buffer))


@pytest.mark.parametrize("numel", [40_000, pytest.param(300_000, marks=pytest.mark.full(reason="as of one fragment"))])
@pytest.mark.parametrize("slow", ["coded", "uncoded"])
def test_the_receivers_times_choose(slow: str, numel: int) -> None:
    (seen, choices), _ = runner.run(choose, 2, slow, numel)
    wanted = slow == "coded"
    assert seen[wanted] == 40 - 2 * send_rules.TRIAL_SENDS - 2 and not seen[not wanted], (seen, choices)
    (text,) = choices
    assert text.startswith(f"{'uncoded' if wanted else 'coded'} from send"), text


@pytest.mark.full(reason="four runs of 40 sends; the choice itself is in the short tier")
@pytest.mark.parametrize("what", ["lost", "nonsense", "another number", "checksum"])
def test_without_reports_sends_stay_coded(what: str) -> None:
    (seen, choices), _ = runner.run(choose, 2, what, 300_000, timeout=60)
    assert not seen[True] and seen[False] and not choices, (seen, choices)


def burst(rank: int, ranks: int) -> None:
    """60 sends before the first receive: nobody waits for a report."""
    tensors = [torch.full((100_000,), float(number)).bfloat16() for number in range(60)]
    if rank == 0:
        works = [comm.isend(tensor, 1, config=AUTO) for tensor in tensors]
        dist.barrier()
        for work in works:
            work.wait()
    else:
        dist.barrier()
        for tensor in tensors:
            got = torch.zeros_like(tensor)
            comm.recv(got, 0, config=AUTO)
            assert torch.equal(got, tensor)


def test_nobody_waits_for_a_report() -> None:
    runner.run(burst, 2, timeout=60)


def crossing(rank: int, ranks: int) -> None:
    """Both ranks wait for their sends first: a trial must not need the receiver's wait()."""
    for numel in (40_000, 300_000):
        for number in range(2 * send_rules.TRIAL_SENDS + 2):
            tensor, got = torch.full((numel,), float(number)).bfloat16(), torch.zeros(numel).bfloat16()
            sending, receiving = comm.isend(tensor, 1 - rank, config=AUTO), comm.irecv(got, 1 - rank, config=AUTO)
            assert sending.wait() and receiving.wait() and torch.equal(got, tensor)


def test_trials_do_not_need_the_receivers_wait() -> None:
    runner.run(crossing, 2, timeout=60)


def test_trials_take_turns() -> None:
    trials, found = {False: 0, True: 0}, ""
    for call in range(1, 300):
        uncoded = send_rules.next_trial(trials[False], trials[True], call)
        found += "." if uncoded is None else "cu"[uncoded]
        if uncoded is not None:
            trials[uncoded] += 1
    first, rest = found[: 2 * send_rules.TRIAL_SENDS], found[2 * send_rules.TRIAL_SENDS :]
    assert sorted(first) == ["c"] * send_rules.TRIAL_SENDS + ["u"] * send_rules.TRIAL_SENDS
    assert first[:6] == "cuuccu" and sorted(rest.replace(".", "")) == ["c", "c", "u", "u"], found


def test_noise_does_not_move_the_choice() -> None:
    assert send_rules.uncoded_is_faster(2.0, 1.9, None) and not send_rules.uncoded_is_faster(1.9, 2.0, None)
    assert not send_rules.uncoded_is_faster(2.0, 1.96, False) and send_rules.uncoded_is_faster(2.0, 1.8, False)
    assert send_rules.uncoded_is_faster(1.96, 2.0, True) and not send_rules.uncoded_is_faster(1.8, 2.0, True)


def long_before(rank: int, ranks: int) -> None:
    """Rank 0 posts a receive long before the message, and later waits for one that never comes."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    out = torch.zeros(1 << 20, dtype=torch.bfloat16)
    if rank:
        time.sleep(3)
        comm.send(torch.ones_like(out), 0, group, config=AUTO)
        comm.recv(out, 0, group, config=AUTO)
        assert bool((out == 1).all())
    else:
        handle = comm.irecv(out, 1, group, config=AUTO)
        time.sleep(3.5)
        handle.wait()
        comm.send(out, 1, group, config=AUTO)
        started = time.monotonic()
        with pytest.raises(CommError, match="not done after 0:00:02"):
            comm.irecv(out, 1, group, config=AUTO).wait()
        assert time.monotonic() - started < 10
    dist.barrier()


@pytest.mark.full(reason="it sleeps beyond a timeout")
def test_the_timeout_of_a_receive_begins_with_its_wait() -> None:
    runner.run(long_before, 2)
