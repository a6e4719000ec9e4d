"""Fixtures that every test shares: kernel routes, and the switch that rewrites golden frames."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import variants
from hypothesis import settings

# Same examples on every run: a failure repeats, and two runs of one commit agree.
settings.register_profile("zipccl", deadline=None, derandomize=True, database=None, print_blob=True)
settings.load_profile("zipccl")
# The tensors here are small, and the cores are shared with other jobs.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite tests/golden from what the routes give now (after a deliberate change of FORMAT.md)",
    )


@pytest.fixture(params=variants.ALL, ids=str)
def route(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name of a CPU route, once for every instruction set it has; skips, with the reason, what cannot run here."""
    reason = request.param.why_not()
    if reason:
        pytest.skip(f"{request.param} is not usable here: {reason}")
    with request.param.in_use() as name:
        yield name
