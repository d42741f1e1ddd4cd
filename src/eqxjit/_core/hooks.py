"""The protocol by which diagnostics come in: the core itself explains and logs nothing."""

import types
from typing import Any

from .._code.place import Place


class TraceHook:
    """An observer of the traces of one function; this one does nothing.

    It holds a record of its own for each: made by `begin`, remembered by `end`, published by
    `complete`. A `call` is the one in flight: a `calls.Call`.
    """

    def __init__(self, name: str, place: Place, home: types.FunctionType | None, number: int):
        """`home` is the Python function below it, if any; `number` tells it from others."""

    @property
    def traces(self) -> list[Any]:
        """The records since the last `restart`, the oldest first."""
        return []

    def begin(self, call: Any, number: int) -> Any:
        """Return the record of a trace that is about to be made."""

    def explain(self, record: Any) -> str:
        """Return how a trace differs from earlier ones."""
        return ""

    def end(self, record: Any, number: int | None) -> None:
        """Remember the record of a trace under its final number; drop it if that is None."""

    def spend(self, record: Any, phase: str, seconds: float, from_cache: bool) -> None:
        """Add the time that JAX spent on a phase: `"tracing"`, `"lowering"` or `"compiling"`."""

    def complete(self, record: Any, call: Any, jaxpr: Any) -> None:
        """Publish the record of a trace that JAX is done with; `jaxpr` is what it lowered."""

    def describe(self, call: Any) -> Any:
        """Return what tells a call from others once its arrays are gone."""

    def summary(self, description: Any) -> str:
        """Return the arguments of a call in a few words."""
        return "..."

    def static_differences(self, old: Any, new: Any) -> list[str]:
        """Return how two calls differ in anything but arrays, in words."""
        return []

    def restart(self) -> None:
        """Begin anew, as the cache was cleared."""


_class = TraceHook


def install(cls: type[TraceHook]) -> type[TraceHook]:
    """Set the class of the hooks of functions first called from now on; return the old one."""
    global _class
    before, _class = _class, cls
    return before


def make_hook(name: str, place: Place, home: types.FunctionType | None, number: int) -> TraceHook:
    """Return a hook of the class in force."""
    return _class(name, place, home, number)
