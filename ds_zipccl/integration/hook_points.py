"""Hook points: names of DeepSpeed and torch that this package wraps, and the parameters that it relies on. The tables of points are in
:mod:`.hooks`, :mod:`.lossy.calls`, :mod:`.backend` and :mod:`.torch_calls`.

A name that is missing, or that takes other parameters, is left as it is. The traffic that the name stands for then stays as DeepSpeed sends
it, and rank 0 says so in a line at the start.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

#: Attribute of a function that this package has put in place of another.
MARK = "ds_zipccl"
_ABSENT = object()
_NO_GRAPH = (
    "ds_zipccl codes collectives outside of compiled graphs: compile without fullgraph=True, or run with DS_ZIPCCL=0"
)
_untraced: list[Callable[..., Any]] = []
_skipping = False


@dataclass(frozen=True)
class HookPoint:
    """A name that this package reads, replaces or wraps.

    ``owner``: the module of the name. ``name``: a function, "Class.method", or "Class.TABLE.Key" for an entry of a dict whose keys are
    classes. ``around``: called in place of the function, with the function as its first argument; None: the function is not wrapped.
    ``first``: names of the leading parameters; ``named``: names of further parameters. ``without``: the traffic that stays plain without
    the name, a clause; "" where the start-up line about lossy roles alone says it. ``guards``: features that are off without the name, see
    :func:`lacking`. ``optional``: some versions do without the name, and without the change that the name stands for. ``together``: points
    with one value are wrapped all or none. ``copies``: modules that may have copied the name. ``untraced``: torch.compile does not trace
    ``around``, see :func:`skip_frames`. ``roles``: of the calls that a lossy codec may change because ``around`` gives a hint of them.
    """

    owner: str
    name: str
    around: Callable[..., Any] | None = None
    first: tuple[str, ...] = ("self",)
    named: tuple[str, ...] = ()
    without: str = ""
    guards: tuple[str, ...] = ()
    optional: bool = False
    together: str = ""
    copies: tuple[str, ...] = ()
    untraced: bool = False
    roles: tuple[str, ...] = ()


#: Features that a name may guard. "versions": agreements on ZeRO-3's parameters, which need to learn of all changes. "bases": bases of
#: ZeRO-3's gathers. "fused": sums of tied gradients at once. "lossy": lossy codecs. "sums": the order of sums in checkpoints.
GUARDS = ("versions", "bases", "fused", "lossy", "sums")

#: Name -> point.
POINTS: dict[str, HookPoint] = {}

_unfit: dict[str, str] = {}  # name of a point -> its problem, such as "has no A.b"
_said: set[str] = set()


def fitting(name: str, owner: Any) -> Any:
    """Return the object that the point ``name`` stands for; None, with a note for :func:`lines`, where it is missing or takes other
    parameters.

    Args:
        name: a key of :data:`POINTS`.
        owner: the object with the last part of the name: a module, a class, or a dict whose keys are classes; None where it is missing.
    """
    point = POINTS[name]
    found = _member(owner, name.rpartition(".")[2])
    problem = _problem(point, found)
    if problem:
        _unfit[name] = problem
    else:
        _unfit.pop(name, None)
    return None if problem or found is _ABSENT else found


def fits(name: str, owner: Any) -> bool:
    """As :func:`fitting`, for a name whose value may be None; return whether the name is there and fits."""
    fitting(name, owner)
    return name not in _unfit


def lacking(guard: str) -> str:
    """Return why a feature of :data:`GUARDS` is off, a clause such as "this DeepSpeed has no A.b"; "" where nothing keeps it off."""
    if not _unfit:
        return ""
    found = [problem for name, problem in _unfit.items() if guard in POINTS[name].guards]
    return f"this DeepSpeed {'; '.join(found)}" if found else ""


def problems() -> dict[str, str]:
    """Return the points that do not fit, by module and name, each with its problem and the traffic that stays plain."""
    return {
        f"{point.owner}.{name}": f"{problem}: {point.without}"
        for name, problem in _unfit.items()
        if (point := POINTS[name]).without
    }


def lines() -> list[str]:
    """Return a line for each point that does not fit; every line once."""
    new = [name for name in _unfit if name not in _said and POINTS[name].without]
    _said.update(new)
    return [
        f"[ds_zipccl] {_release(POINTS[name].owner)} {_unfit[name]} in {POINTS[name].owner}: {POINTS[name].without}; training goes on"
        for name in new
    ]


def unwrapped(role: str) -> list[str]:
    """Return the names of the points of a role whose functions are not wrapped, with the reason where the function is there.

    Imports their modules, which wraps the functions.
    """
    found = []
    for point in (point for point in POINTS.values() if role in point.roles):
        try:
            module: Any = importlib.import_module(point.owner)
        except ImportError:
            module = None
        function = _member(_holder(module, point.name), point.name.rpartition(".")[2])
        if not hasattr(function, MARK):
            found.append(point.name if function is _ABSENT else f"{point.name} as this package knows it")
    return found


def declare(*points: HookPoint) -> None:
    """Add points to :data:`POINTS`."""
    POINTS.update({point.name: point for point in points})


def adopt(module: Any, owner: str = "") -> None:
    """Wrap the functions of a module at the points of ``owner``, by default the module's own name. Repeating does nothing."""
    points = [point for point in POINTS.values() if point.owner == (owner or module.__name__)]
    incomplete = {point.together for point in points if not fits(point.name, _holder(module, point.name))} - {""}
    for point in points:
        if point.together not in incomplete:
            surround(point.name, _holder(module, point.name))


def surround(name: str, holder: Any) -> None:
    """Wrap the function of ``holder`` at the point ``name``: a module, a class or a subclass, where the function may be static, or a dict
    whose keys are classes. :data:`MARK` is on the wrapper. Repeating does nothing, nor does a name that :func:`fitting` refuses."""
    point, original = POINTS[name], fitting(name, holder)
    around, last = point.around, name.rpartition(".")[2]
    if around is None or original is None or hasattr(original, MARK):
        return

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(method, MARK, True)
    if point.untraced:
        _untraced.extend((around, method))
        if _skipping:
            _skip((around, method))
    if isinstance(holder, dict):
        holder[next(key for key in holder if key.__name__ == last)] = method
    else:
        static = isinstance(inspect.getattr_static(holder, last, None), staticmethod)
        setattr(holder, last, staticmethod(method) if static else method)
    for copy in point.copies:
        if getattr(sys.modules.get(copy), last, None) is original:
            setattr(sys.modules[copy], last, method)


_signature = functools.cache(inspect.signature)


def arguments(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults included.

    Raises:
        TypeError: the function does not take these arguments.
    """
    given = _signature(function).bind(*args, **kwargs)
    given.apply_defaults()
    return given.arguments


def misfit(function: Callable[..., Any], first: tuple[str, ...], named: tuple[str, ...] = ()) -> str:
    """Return the parameters of a function, as a text, where its leading ones are not ``first`` or one of ``named`` is missing; "" where
    they are. Some decorators hide parameters behind ``*args`` and ``**kwargs``: then the parameters in front of these count."""
    if not first and not named:
        return ""
    try:
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function without a readable signature
        return ""
    one = inspect.Parameter
    kinds = {parameter.kind for parameter in parameters.values()}
    if {one.VAR_POSITIONAL, one.VAR_KEYWORD} <= kinds:
        by_place = (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        leading = [name for name, parameter in parameters.items() if parameter.kind in by_place]
        same = all(got == wanted for got, wanted in zip(leading, first, strict=False))
    else:
        same = tuple(parameters)[: len(first)] == first and all(name in parameters for name in named)
    return "" if same else f"({', '.join(parameters)})"


def _problem(point: HookPoint, found: Any) -> str:
    if found is _ABSENT:
        return "" if point.optional else f"has no {point.name}"
    got = misfit(found, point.first, point.named) if point.first or point.named else ""
    wanted = ", ".join((*point.first, *point.named))
    return f"has another {point.name}, got the parameters {got}, wanted ({wanted})" if got else ""


def _holder(module: Any, name: str) -> Any:
    """Return the object that has the last part of the name of a point; None where it is missing."""
    return functools.reduce(lambda found, part: getattr(found, part, None), name.split(".")[:-1], module)


def _member(owner: Any, name: str) -> Any:
    if isinstance(owner, dict):
        return next((value for key, value in owner.items() if getattr(key, "__name__", "") == name), _ABSENT)
    return _ABSENT if owner is None else getattr(owner, name, _ABSENT)  # None has an __init__ too


def _release(owner: str) -> str:
    """Return the name and the version of the package of a module, such as "DeepSpeed 0.19.8"."""
    package = owner.partition(".")[0]
    name = {"deepspeed": "DeepSpeed"}.get(package, package)
    try:
        return f"{name} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"this {name}"


# ---- functions that torch.compile does not trace
#
# Ranks compile a frame again at different times, because their tensors have different sizes, and one rank may give up before the others do.
# A function that decides which messages travel must therefore run alike in compiled programs and in others.


def skip_frames() -> None:
    """Keep torch.compile out of the functions of all points with ``untraced`` from now on; functions that they call may be compiled.
    Imports torch's compiler, which takes seconds: only jobs that code messages call."""
    global _skipping
    _skipping = True
    _skip(_untraced)


def _skip(functions: Iterable[Callable[..., Any]]) -> None:
    for function in functions:
        torch.compiler.disable(function, recursive=False)  # marks its code, and returns the function itself


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` for a traced program: the graph breaks there, and the call runs as in other programs."""
    disable = torch.compiler.disable
    why = {"reason": _NO_GRAPH} if "reason" in inspect.signature(disable).parameters else {}  # torch 2.7 and later
    return disable(function, **why)  # type: ignore[no-any-return, no-untyped-call]
