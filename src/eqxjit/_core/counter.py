"""Counts the traces of one function, and limits them."""

import weakref
from typing import Any

from .._code.call_site import call_site
from .._code.text import times
from .._lock import Lock
from .hooks import TraceHook


class TooManyTracesError(RuntimeError):
    """A call would trace a function more often than its `max_traces` allows."""


class TraceCounter:
    """The count of the traces of one function under one set of options.

    - `name`: what to call the function.
    - `hook`: the observer of each trace.
    - `n_traces`: their number since the cache was last cleared.
    - `why_sealed`: why there may be no further trace at all; empty if there may be.
    """

    def __init__(self, name: str, max_traces: int | None, hook: TraceHook):
        self.name = name
        self.hook = hook
        self.n_traces = 0
        self.why_sealed = ""
        self._max_traces = max_traces
        self._lock = Lock()
        #: Those under way. An interrupt may keep one from its end, but not alive.
        self._begun: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self, trace: Any) -> None:
        """Begin a trace, to be followed by `end`; give it the hook's record.

        **Raises:**

        - `TooManyTracesError`, if it would be one too many.
        """
        limit = self._max_traces
        with self._lock:
            number = self.n_traces + len(self._begun) + 1
            why_not = self.why_sealed
            if not why_not and limit is not None and number > limit:
                why_not = f"`{self.name}` may be traced {times(limit)} (`max_traces={limit}`)"
            self._begun.add(trace)
        try:
            trace.record = self.hook.begin(trace.call, number)
            if why_not:
                raise TooManyTracesError(
                    f"{why_not}, and the call at {call_site()} would be trace {number}.\n"
                    f"{self.hook.explain(trace.record)}"
                )
        except BaseException:
            self.end(trace, is_made=False)
            raise

    def end(self, trace: Any, is_made: bool) -> None:
        """Count a trace that was begun, if it came to its end."""
        with self._lock:
            self._begun.discard(trace)
            self.n_traces += is_made
            self.hook.end(trace.record, self.n_traces if is_made else None)

    def clear(self) -> None:
        """Count from zero again."""
        with self._lock:
            self.n_traces = 0
            self.hook.restart()
