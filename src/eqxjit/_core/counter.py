"""Counts the traces of one function, limits them, and shows each to a hook.

The hook is the protocol by which diagnostics come in: the core itself explains and logs nothing.
"""

from collections.abc import Callable
from typing import Any

from .._interruptions import Lock, Weak
from .._places import Place, call_site
from .._text import times

_MAX_LISTED = 32

#: Raises for `(args, kwargs)` that a function itself refuses.
Check = Callable[[tuple[Any, ...], dict[str, Any]], Any]


class TraceHook:
    """An observer of the traces of one function; this one does nothing.

    It has a record of each, or None: made by `begin`, remembered by `end`, published by
    `complete`. A `call` is the one in flight: a `calls.Call`.
    """

    def __init__(self, name: str, place: Place, number: int | None):
        """`number` tells Python functions apart; None for one that isn't."""

    @property
    def traces(self) -> list[Any]:
        """The records since the last `restart`, the oldest first."""
        return []

    def begin(self, trace: Any, number: int, begun: Weak[Any]) -> str:
        """Set the record of an `OpenTrace`, one of those under way; return how it differs."""
        return ""

    def end(self, record: Any, number: int) -> None:
        """Remember the record of a trace under its final number."""

    def spend(self, record: Any, phase: str, seconds: float, from_cache: bool) -> None:
        """Add the time that JAX spent on a phase: `"tracing"`, `"lowering"` or `"compiling"`."""

    def complete(self, record: Any, call: Any, jaxpr: Any) -> None:
        """Publish the record of a trace that JAX is done with; `jaxpr` is what it lowered."""

    def describe(self, call: Any) -> Any:
        """Return what tells a call from others once its arrays are gone; `str` makes it short."""
        return "..."

    def static_differences(self, old: Any, new: Any) -> list[str]:
        """Return how two calls differ in anything but arrays, in words."""
        return []

    def restart(self) -> None:
        """Begin anew, as the cache was cleared."""


_class = TraceHook


def install(cls: type[TraceHook]) -> type[TraceHook]:
    global _class
    before, _class = _class, cls
    return before


class TooManyTracesError(RuntimeError):
    """A call would trace a function more often than its `max_traces` allows."""


class TraceCounter:
    """The count of the traces of one function under one set of options.

    - `name`: what to call the function.
    - `hook`: the observer of each trace.
    - `n_traces`: their number since the cache was last cleared.
    - `why_sealed`: why no call may be traced any more; empty if one may be.
    - `check`: tried before a trace is refused, because a wrong argument is no new shape.
    """

    def __init__(
        self,
        name: str,
        max_traces: int | None,
        place: Place,
        number: int | None,
        lock: Lock,
        check: Check | None = None,
    ):
        self.name = name
        self.hook = _class(name, place, number)
        self.n_traces = 0
        self.why_sealed = ""
        self.check = check
        self._max_traces = max_traces
        self._lock = lock
        #: Those under way. An interrupt may keep one from its end, but not alive.
        self._begun: Weak[Any] = Weak()

    def begin(self, trace: Any) -> None:
        """Begin a trace, which `end` must follow, also if this raises that it is one too many."""
        limit = self._max_traces
        with self._lock:
            # With those of other threads, which may come to their end first.
            number = self.n_traces + len(self._begun) + 1
            # What is compiled ahead of time is asked for.
            is_sealed = bool(self.why_sealed) and not trace.call.is_staged
            why_not = self.why_sealed if is_sealed else ""
            if not why_not and limit is not None and number > limit:
                why_not = f"`{self.name}` may be traced {times(limit)} (`max_traces={limit}`)"
            self._begun.add(trace)
        # Not under the lock, since it describes the arguments, which runs the user's code. And for
        # a trace that is refused, too: its error explains it.
        explanation = self.hook.begin(trace, number, self._begun)
        if why_not:
            if self.check is not None:
                self.check(trace.call.args, trace.call.kwargs)
            raise TooManyTracesError(
                f"{why_not}, and the call at {call_site()} would be trace {number}.\n"
                f"{explanation}{self._compiled() if is_sealed else ''}"
            )

    def _compiled(self) -> str:
        """Return what is compiled, a line each, if it is more than the error explains already."""
        compiled = list(dict.fromkeys(trace.summary for trace in self.hook.traces))
        if len(compiled) < 2:
            return ""
        if len(compiled) > _MAX_LISTED:
            compiled[_MAX_LISTED:] = [f"and {len(compiled) - _MAX_LISTED} more"]
        return "\n  - ".join(["\n  It is compiled for", *compiled])

    def end(self, trace: Any, is_made: bool) -> None:
        """Count a trace that was begun, if it came to its end."""
        with self._lock:
            self._begun.discard(trace)
            if is_made:
                self.n_traces += 1
                self.hook.end(trace.record, self.n_traces)
