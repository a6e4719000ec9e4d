"""The table of routes: which one a name means on a device, and what is known of the others."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from ds_zipccl import kernels
from ds_zipccl.comm.host import frames


def fails() -> Any:
    raise ImportError("not here")


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        kernels, "ROUTES", {"cpu": {"native": object, "numba": fails}, "cuda": {"native": fails, "cupy": object}}
    )
    monkeypatch.setattr(kernels, "_loaded", {})


def test_a_name_of_other_devices_means_the_best_route() -> None:
    names = ("auto", "native", "numba", "cupy")
    assert [kernels.preferred(name, "cpu") for name in names] == ["auto", "native", "numba", "auto"]
    assert [kernels.preferred(name, "cuda") for name in names] == ["auto", "native", "auto", "cupy"]
    assert kernels.preferred("native", "xpu") == "auto"


def test_calls_that_name_a_route_are_strict() -> None:
    with pytest.raises(ValueError, match="no route 'numba' for device 'cuda'; known routes: auto, native, cupy"):
        kernels.route("numba", "cuda")


def test_only_tried_routes_are_told() -> None:
    assert kernels.tried("cuda") == {}
    kernels.route("auto", "cuda")
    assert kernels.tried("cuda") == {"native": "ImportError: not here", "cupy": ""} and kernels.tried("cpu") == {}
    kernels.route("auto", "cpu")
    assert kernels.tried("cpu") == {"native": ""}, "numba was not needed"
    assert kernels.tried("xpu") == {}


def test_frames_of_a_config_take_the_preferred_route(monkeypatch: pytest.MonkeyPatch) -> None:
    class Context:
        class config:
            block, route = 1024, "cupy"

        codec, rounding, op, role = "cascade", None, "send", "pp"
        state, refusing = SimpleNamespace(backoff=lambda *kind: None), None

    assert frames.FrameCoder(Context).route == "auto"  # type: ignore[arg-type]
    Context.config.route = "numba"
    assert frames.FrameCoder(Context).route == "numba"  # type: ignore[arg-type]


def test_one_route_is_used_while_another_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling for a GPU takes a minute, during which CPU tensors are coded."""
    begun, end = threading.Event(), threading.Event()

    def slow() -> Any:
        begun.set()
        assert end.wait(60)
        return object()

    monkeypatch.setitem(kernels.ROUTES["cuda"], "cupy", slow)
    thread = threading.Thread(target=kernels.route, args=("cupy", "cuda"))
    thread.start()
    assert begun.wait(60)
    other = threading.Thread(target=kernels.route, args=("native", "cpu"))
    other.start()
    other.join(20)
    done = not other.is_alive()
    end.set()
    thread.join()
    other.join()
    assert done
