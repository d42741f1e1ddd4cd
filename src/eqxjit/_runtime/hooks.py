"""The protocol by which diagnostics come in: the runtime itself explains and logs nothing."""

import types
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .._code.place import Place
from .._plan.signature import Signature
from .._trees.partition import StaticTree
from .entry import CacheEntry


class Request(Protocol):
    """The call that a trace or a recompilation is for."""

    @property
    def entry(self) -> CacheEntry:
        """The entry that serves it."""
        ...

    @property
    def signature(self) -> Signature:
        """The function's parameters."""
        ...

    @property
    def fun(self) -> StaticTree:
        """The static half of the function."""
        ...

    @property
    def fun_leaves(self) -> Sequence[Any]:
        """The arrays of the function."""
        ...

    @property
    def fun_varies(self) -> bool:
        """True where wrappers that share the entry may hold other arrays or static values."""
        ...

    @property
    def arguments(self) -> StaticTree:
        """The static half of `(args, kwargs)`."""
        ...

    @property
    def leaves(self) -> Sequence[Any]:
        """The arrays of the arguments."""
        ...

    @property
    def flat(self) -> Sequence[Any]:
        """All arrays, in the order in which JAX is given them."""
        ...

    @property
    def jaxpr(self) -> Any:
        """The first jaxpr that JAX lowered in the call; None if it lowered none."""
        ...

    @property
    def is_staged(self) -> bool:
        """True for a call that is lowered, rather than run."""
        ...

    @property
    def description(self) -> Any:
        """The result of `describe` for a staged call, whose arrays are gone; None for others."""
        ...


class TraceHook(Protocol):
    """An observer of the traces of one function.

    It holds a record of its own for each: made by `begin`, kept by `end`, published by `complete`.
    """

    @property
    def traces(self) -> list[Any]:
        """The records since the last `restart`, the oldest first."""
        ...

    def describe(self, request: Request) -> Any:
        """Return what tells a call from others once its arrays are gone."""
        ...

    def begin(self, request: Request, number: int, is_recompilation: bool) -> Any:
        """Return the record of a trace that is about to be made, or of a recompilation."""
        ...

    def explain(self, record: Any) -> str:
        """Return how a trace differs from earlier ones."""
        ...

    def end(self, record: Any, number: int | None) -> None:
        """Keep the record of a trace, now with its final number; drop it if that is None."""
        ...

    def spend(self, record: Any, phase: str, seconds: float, from_cache: bool) -> None:
        """Add what JAX has spent on a phase: `"tracing"`, `"lowering"` or `"compiling"`."""
        ...

    def complete(self, record: Any, request: Request | None) -> None:
        """Publish the record of a trace that JAX is done with; of a recompilation without call."""
        ...

    def restart(self) -> None:
        """Begin anew, as the cache was cleared."""
        ...


class NoTraceHook:
    """The hook of a runtime without diagnostics."""

    traces: list[Any] = []  # noqa: RUF012

    def __init__(
        self, name: str, place: Place, home: types.FunctionType | None, number: int
    ) -> None:
        pass

    def describe(self, request: Request) -> Any:
        """Return nothing."""

    def begin(self, request: Request, number: int, is_recompilation: bool) -> Any:
        """Return nothing."""

    def explain(self, record: Any) -> str:
        """Return nothing to read."""
        return ""

    def end(self, record: Any, number: int | None) -> None:
        """Do nothing."""

    def spend(self, record: Any, phase: str, seconds: float, from_cache: bool) -> None:
        """Do nothing."""

    def complete(self, record: Any, request: Request | None) -> None:
        """Do nothing."""

    def restart(self) -> None:
        """Do nothing."""


#: A function's label, where it is defined, the Python function below it, and that one's number.
HookFactory = Callable[[str, Place, types.FunctionType | None, int], TraceHook]

_factory: HookFactory = NoTraceHook


def install(factory: HookFactory) -> HookFactory:
    """Set what makes the hook of each function that is first called from now on.

    **Returns:**

    What made them before.
    """
    global _factory
    before, _factory = _factory, factory
    return before


def make_hook(name: str, place: Place, home: types.FunctionType | None, number: int) -> TraceHook:
    """Return the hook of a function."""
    return _factory(name, place, home, number)
