"""A pytest plugin (``-p no_skips``): a skipped test fails, because a test that did not run says nothing; and the figures of the run.

Tests of a CUDA route that the step "build" could not build are left out: each would build it again. That step has failed, and the figures
have their number.

A test that raises :class:`figures.Late` was slow, not wrong: where no test failed otherwise, the status is :data:`figures.SLOW`. With
pytest-xdist the controller counts, and writes the figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator

import figures
import pytest

_counts: Counter[str] = Counter()
_failures: list[str] = []
#: Tests between two writes of the figures, if none fails.
_OFTEN = 20
_MOST = 40


ROUTES = ("native", "cupy")
_of_a_worker = False


def pytest_configure(config: pytest.Config) -> None:
    global _of_a_worker
    _of_a_worker = hasattr(config, "workerinput")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    usable = figures.told("usable")
    useless = [f"cuda-{route}" for route in ROUTES if usable is not None and route not in usable]
    left_out = [item for item in items if any(name in item.nodeid for name in useless)]
    if left_out:
        items[:] = [item for item in items if item not in set(left_out)]
        config.hook.pytest_deselected(items=left_out)
        figures.put(left_out={name: sum(name in item.nodeid for item in left_out) for name in useless})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped:
        reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome, report.longrepr = "failed", f"not run, so not passed: {reason}"
    report.late = call.excinfo is not None and call.excinfo.errisinstance(figures.Late)
    figures.alive()
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _counts["late"] += getattr(report, "late", False)  # which the report of a process that died lacks
    if report.failed:
        _counts["failed"] += 1
        _failures.append(f"{report.nodeid} ({report.when}): {str(report.longrepr)[-700:]}")
    elif report.when == "call":
        _counts["passed"] += 1
    if report.failed or (report.when == "call" and _counts.total() % _OFTEN == 0):
        _write()


def pytest_sessionfinish(session: pytest.Session) -> None:
    _write(session.testscollected or _counts["passed"] + _counts["failed"])
    if session.exitstatus == pytest.ExitCode.TESTS_FAILED and _counts["failed"] == _counts["late"]:
        session.exitstatus = figures.SLOW
    elif session.exitstatus == figures.SLOW:  # pytest's own status for an error of its own
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _write(collected: int | None = None) -> None:
    if _of_a_worker:
        return
    more = {} if collected is None else {"selected": collected}
    figures.put(**{key: _counts[key] for key in ("passed", "failed")}, failures=_failures[:_MOST], **more)
