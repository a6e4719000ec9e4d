"""Times of calls, by tables: one rank's stopwatch, what ranks tell each other, and whose time counts."""

from __future__ import annotations

import math

import pytest
import torch

from ds_zipccl.comm.host import tuner
from ds_zipccl.comm.host.tuner import CallTimer, agreed_seconds
from ds_zipccl.comm.work import CommError

INF, NAN = math.inf, math.nan


# ---- times of all ranks ------------------------------------------------------------------------------------------------

#: (seconds, met) of each rank, and what counts.
TIMES: dict[str, tuple[list[tuple[float, float]], float]] = {
    "all have met: the agreed_seconds": ([(1.0, 1), (3.0, 1), (2.0, 1)], 3.0),
    "the first has not: the fastest": ([(2.0, 0), (3.0, 1), (1.0, 1)], 1.0),
    "the last has not: the fastest": ([(1.0, 1), (3.0, 1), (2.0, 0)], 1.0),
    "none has: the fastest": ([(2.0, 0), (3.0, 0), (4.0, 0)], 2.0),
    "one did not run, all have met": ([(1.0, 1), (INF, 1), (2.0, 1)], INF),
    "one did not run, none has met": ([(1.0, 0), (INF, 0), (2.0, 0)], 1.0),
    "no number": ([(1.0, 1), (NAN, 1), (2.0, 1)], INF),
    "no number where none has met": ([(NAN, 0), (NAN, 0), (NAN, 0)], INF),
}


@pytest.mark.parametrize("case", TIMES)
def test_whose_time_counts(case: str) -> None:
    ranks, wanted = TIMES[case]
    told = [(*pair, 1.0) for pair in ranks]
    assert agreed_seconds(torch.tensor(told, dtype=torch.float64)[:, None], 1) == [wanted]


def test_every_call_counts_by_itself() -> None:
    told = [[(1.0, 1, 100), (5.0, 0, 100)], [(2.0, 1, 100), (4.0, 1, 100)]]
    assert agreed_seconds(torch.tensor(told, dtype=torch.float64), 100) == [2.0, 4.0]


@pytest.mark.parametrize(
    ("sizes", "wanted"), [((100, 100), 3.0), ((50, 50), 6.0), ((0, 100), 6.0), ((0, 25), 24.0), ((800, 800), 0.375)]
)
def test_times_are_those_of_the_message(sizes: tuple[int, int], wanted: float) -> None:
    """Not of one rank's part of it, which may be empty."""
    told = [[(seconds, 1.0, nbytes)] for seconds, nbytes in zip((1.0, 3.0), sizes, strict=True)]
    assert agreed_seconds(torch.tensor(told, dtype=torch.float64), 100) == [wanted]


@pytest.mark.parametrize("nbytes", [0, 12, 801])
def test_messages_of_quite_another_size_do_not_count(nbytes: int) -> None:
    told = torch.tensor([[(1.0, 1.0, nbytes)]] * 2, dtype=torch.float64)
    assert math.isnan(*agreed_seconds(told, 100))


# ---- one rank's stopwatch ----------------------------------------------------------------------------------------------


class _Meeting:
    """Counts how often it is waited for. ``flags``: whether each rank meets the others."""

    calls = 0

    def __init__(self, *flags: float) -> None:
        self.flags = flags or (1.0, 1.0)

    def all(self) -> torch.Tensor:
        self.calls += 1
        return torch.tensor([[[0.0, flag, 0.0]] for flag in self.flags])


def test_a_stopwatch(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((10.0, 12.5, 20.0, 21.0))
    monkeypatch.setattr(tuner.time, "perf_counter", lambda: next(clock))
    meeting, stopped = _Meeting(), []
    watch = CallTimer(meeting, True)  # type: ignore[arg-type]
    watch.nbytes, watch.on_stop = 100, lambda: stopped.append(watch.reading())
    assert watch.reading() == (INF, 0.0, 100.0), "it has not run"
    watch.start()
    assert meeting.calls == 1 and watch.reading() == (INF, 1.0, 100.0), "it runs still"
    watch.stop()
    assert watch.reading() == (2.5, 1.0, 100.0) and stopped == [watch.reading()]
    watch = CallTimer(meeting, False)  # type: ignore[arg-type]
    watch.on_stop = lambda: stopped.append(watch.reading())
    watch.start()
    watch.stop()
    assert meeting.calls == 1 and watch.reading() == (1.0, 0.0, 0.0) and len(stopped) == 1


def test_one_rank_that_does_not_wait_is_known_to_all() -> None:
    """The others have waited for it, and know that it runs ahead from here on: nothing is sent at the end of the call."""
    watch = CallTimer(_Meeting(1.0, 0.0), True)  # type: ignore[arg-type]
    watch.on_stop = lambda: pytest.fail("the times were sent")
    watch.start()
    watch.stop()
    assert watch.reading()[1] == 0.0


def test_a_handle_stops_it_when_it_is_done() -> None:
    for wrap in (lambda future: future, lambda future: type("Handle", (), {"get_future": lambda self: future})()):
        watch, future = CallTimer(_Meeting(), False), torch.futures.Future()  # type: ignore[arg-type,var-annotated]
        watch.start()
        watch.stop_after(wrap(future))
        assert watch.reading() == (INF, 0.0, 0.0)
        future.set_result(None)
        assert watch.reading()[0] < INF
    watch = CallTimer(_Meeting(), False)  # type: ignore[arg-type]
    watch.start()
    watch.stop_after(object())
    assert watch.reading() == (INF, 0.0, 0.0), "a handle that cannot tell"


# ---- what ranks tell each other ----------------------------------------------------------------------------------------


def test_telling_waits_and_names() -> None:
    """Times come from all ranks, this one first; a rank that is gone is an error with the place."""

    class Link:
        peers: tuple[int, ...] = ()

        def where(self) -> str:
            return "all_reduce (group 'x')"

        def tag(self, index: int) -> int:
            return index

    told = tuner.TimingExchange(Link(), [(1.5, 1.0, 7.0), (2.5, 0.0, 8.0)])  # type: ignore[arg-type]
    assert told.all().tolist() == [[[1.5, 1.0, 7.0], [2.5, 0.0, 8.0]]]

    class Done:
        waits = 0

        def wait(self) -> None:
            self.waits += 1

    class Gone:
        def wait(self) -> None:
            raise RuntimeError("closed")

    told._handles = [done := Done()]  # type: ignore[list-item]
    assert told.all().equal(told.all()) and done.waits == 1
    told._handles = [Gone()]  # type: ignore[list-item]
    with pytest.raises(CommError, match=r"all_reduce \(group 'x'\): waiting for the times .*: closed"):
        told.all()
