"""The protocol by which diagnostics come in: the runtime itself explains and logs nothing."""

import types
from typing import Any

from .._code.place import Place


class TraceHook:
    """An observer of the traces of one function; this one does nothing.

    It holds a record of its own for each: made by `begin`, kept by `end`, published by `complete`.
    A `request` is the call that it is for: a `request.Call`.
    """

    def __init__(self, name: str, place: Place, home: types.FunctionType | None, number: int):
        """`home` is the Python function below it, if any; `number` tells it from others."""

    @property
    def traces(self) -> list[Any]:
        """The records since the last `restart`, the oldest first."""
        return []

    def describe(self, request: Any) -> Any:
        """Return what tells a call from others once its arrays are gone."""

    def begin(self, request: Any, number: int, is_recompilation: bool) -> Any:
        """Return the record of a trace that is about to be made, or of a recompilation."""

    def explain(self, record: Any) -> str:
        """Return how a trace differs from earlier ones."""
        return ""

    def end(self, record: Any, number: int | None) -> None:
        """Keep the record of a trace, now with its final number; drop it if that is None."""

    def spend(self, record: Any, phase: str, seconds: float, from_cache: bool) -> None:
        """Add what JAX has spent on a phase: `"tracing"`, `"lowering"` or `"compiling"`."""

    def complete(self, record: Any, request: Any) -> None:
        """Publish the record of a trace that JAX is done with; of a recompilation without call."""

    def restart(self) -> None:
        """Begin anew, as the cache was cleared."""


_class = TraceHook


def install(cls: type[TraceHook]) -> type[TraceHook]:
    """Set the class of the hooks of functions first called from now on; return the old one."""
    global _class
    before, _class = _class, cls
    return before


def make_hook(name: str, place: Place, home: types.FunctionType | None, number: int) -> TraceHook:
    return _class(name, place, home, number)
