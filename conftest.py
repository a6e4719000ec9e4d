"""Fixtures that every test shares: kernel routes, tiers, turns, and the switch that rewrites golden frames."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import programs
import pytest
import tiers
import torch
import variants

from ds_zipccl.telemetry import counters

if importlib.util.find_spec("hypothesis"):  # a machine with a GPU may lack it, and runs the files that do without
    from hypothesis import settings

    # Same examples on every run: a failure repeats, and two runs of one commit agree.
    settings.register_profile("zipccl", deadline=None, derandomize=True, database=None, print_blob=True)
    settings.load_profile("zipccl")
# The tensors here are small, and the cores are shared with other jobs.
torch.set_num_threads(1)

#: Files whose tests run DeepSpeed. On a machine without it they are not collected, and the last lines of pytest say so.
NEED_DEEPSPEED = (
    "benchmarks/tests/test_bench_roles.py",
    "benchmarks/tests/test_bench_train.py",
    "tests/comm/test_environments.py",
    "tests/docs/test_docs.py",
    "tests/integration/test_backend.py",
    "tests/integration/test_backend_traffic.py",
    "tests/integration/test_bases_of_engines.py",
    "tests/integration/test_bypass.py",
    "tests/integration/test_configurations.py",
    "tests/integration/test_engines.py",
    "tests/integration/test_engines_on_streams.py",
    "tests/integration/test_hf.py",
    "tests/integration/test_hook_points.py",
    "tests/integration/test_job.py",
    "tests/integration/test_kernels_at_start.py",
    "tests/integration/test_moe.py",
    "tests/integration/test_moe_calls.py",
    "tests/integration/test_parallel.py",
    "tests/integration/test_peft.py",
    "tests/integration/test_recipes.py",
    "tests/integration/test_start_line.py",
    "tests/integration/test_telemetry_ranks.py",
    "tests/integration/test_train.py",
    "tests/test_traces.py",
    "tests/test_way_of_a_tensor.py",
)
collect_ignore = [] if importlib.util.find_spec("deepspeed") else list(NEED_DEEPSPEED)

_TURNS = pytest.StashKey[tiers.Turns]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite tests/golden from what the routes give now (after a deliberate change of FORMAT.md)",
    )
    parser.addoption(
        "--need-deepspeed", action="store_true", help="run no test where DeepSpeed is missing, as some could not be run"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if collect_ignore:  # not in the header, which a quiet run does not print
        terminalreporter.write_line(f"not collected, because DeepSpeed is missing: {', '.join(collect_ignore)}")


def pytest_configure(config: pytest.Config) -> None:
    """A worker of several has a folder for temporary files in that of the whole run."""
    if config.option.need_deepspeed and collect_ignore:
        raise pytest.UsageError(
            "DeepSpeed is missing, and --need-deepspeed wants every test to run; pip install deepspeed"
        )
    programs.KEEP_REFERENCES = tiers.is_short(config)
    if hasattr(config, "workerinput"):
        config.stash[_TURNS] = tiers.Turns(Path(config.option.basetemp).parent)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers.mark_full(items)
    if not config.option.markexpr:
        tiers.leave_out_repetitions(items)
    tiers.repeat_timings(items)
    if hasattr(config, "workerinput"):
        tiers.by_turns(items, config.workerinput["testrunuid"])
        tiers.in_order(items, Path(__file__).parent, tiers.is_short(config))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Waiting for a turn belongs to no test's duration or time limit."""
    turns = item.config.stash.get(_TURNS, None)
    if turns is None:
        return (yield)
    alone, network = (item.get_closest_marker(name) is not None for name in ("alone", "network"))
    with turns.turn(alone, network):
        return (yield)


@pytest.fixture
def no_counts() -> Iterator[None]:
    """The counters of telemetry are empty before the test and after it."""
    counters.reset()
    yield
    counters.reset()


route = variants.each(variants.ALL)
