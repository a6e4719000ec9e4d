"""Fixtures that every test shares: kernel routes, and the switch that rewrites golden frames."""

from __future__ import annotations

import pytest
from hypothesis import settings

from ds_zipccl import kernels

# Same examples on every run: a failure repeats, and two runs of one commit agree.
settings.register_profile("zipccl", deadline=None, derandomize=True, database=None, print_blob=True)
settings.load_profile("zipccl")

ROUTES = tuple(kernels.ROUTES["cpu"])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite tests/golden from what the routes give now (after a deliberate change of FORMAT.md)",
    )


def _usable(name: str) -> str:
    """``name``; skips the test, with the reason, where that route cannot run."""
    reason = kernels.why()[name]
    if reason:
        pytest.skip(f"route {name} is not usable here: {reason}")
    return name


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest) -> str:
    """Name of a CPU route; the test runs once for each."""
    return _usable(request.param)


@pytest.fixture
def both_routes() -> tuple[str, ...]:
    """All CPU routes at once, for tests that compare them."""
    return tuple(_usable(name) for name in ROUTES)
