"""The variants of kernels that have the functions of a lossy codec; the others cannot run its tests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import variants

from ds_zipccl import kernels

#: Words in the reason of each such skip: ``make gpu`` lets these tests be.
MISSING = "without kernels of this lossy codec"


def has(route: str, function: str) -> bool:
    """Whether the route can run here and has that function of :class:`ds_zipccl.kernels.LossyBackend`."""
    try:
        kernels.lossy_route(route, "cpu", function)
    except kernels.RouteUnavailable:
        return False
    return True


def need(route: str, function: str) -> None:
    """Skip the test where the route lacks the function."""
    if not has(route, function):
        pytest.skip(f"{route} is {MISSING}: no {function}")


def usable(function: str) -> Sequence[variants.Variant]:
    """The variants that run here and have the function."""
    return [variant for variant in variants.usable() if has(variant.route, function)]
