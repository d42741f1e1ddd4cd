"""Counts the traces of one function, and limits them."""

import dataclasses
import itertools
import operator
import sys
import weakref
from collections.abc import Iterator
from typing import Any

from .._code.call_site import call_site
from .._code.text import times
from .._lock import Lock
from .hooks import TraceHook


class TooManyTracesError(RuntimeError):
    """A call would trace a function more often than its `max_traces` allows."""


def hit_counter() -> Iterator[None]:
    """Count a hit for each `next`: in C, hence without a lock, and faster than an addition."""
    return itertools.repeat(None, sys.maxsize)


@dataclasses.dataclass(eq=False)
class Attempt:
    """A trace, or a recompilation, under way; `record` is what the hook holds of it."""

    is_recompilation: bool
    record: Any = None


class TraceCounter:
    """The count of the traces of one function under one set of options.

    - `name`: what to call the function.
    - `hook`: what is told of each trace.
    - `n_traces`, `n_recompilations`, `n_hits`: since the cache was last cleared.
    - `hits`: its `next` counts a hit.
    """

    def __init__(self, name: str, max_traces: int | None, hook: TraceHook):
        self.name = name
        self.hook = hook
        self.n_traces = 0
        self.n_recompilations = 0
        self.hits = hit_counter()
        self._max_traces = max_traces
        #: Why there may be no further trace at all, once that is so.
        self._why_sealed = ""
        self._has_traced = False
        self._lock = Lock()
        #: Those under way. An interrupt may keep one from its end, but not alive.
        self._begun: weakref.WeakSet[Attempt] = weakref.WeakSet()

    @property
    def n_hits(self) -> int:
        """The number of calls that were served without a trace."""
        return sys.maxsize - operator.length_hint(self.hits)

    @property
    def is_unused(self) -> bool:
        """True as long as no trace was made, or is under way."""
        with self._lock:
            return not self._has_traced and not self._begun

    def begin(self, request: Any, is_recompilation: bool = False) -> Attempt:
        """Begin a trace or a recompilation, to be followed by `end`; raise for one too many."""
        with self._lock:
            number = self.n_traces + self.n_recompilations + len(self._begun) + 1
            attempt = Attempt(is_recompilation)
            limit = self._max_traces
            why_not = self._why_sealed
            if not why_not and limit is not None and number > limit:
                why_not = f"`{self.name}` may be traced {times(limit)} (`max_traces={limit}`)"
            if not why_not:
                self._begun.add(attempt)
        try:
            attempt.record = self.hook.begin(request, number, is_recompilation)
            if why_not:
                raise TooManyTracesError(
                    f"{why_not}, and the call at {call_site()} would be trace {number}.\n"
                    f"{self.hook.explain(attempt.record)}"
                )
        except BaseException:
            self.end(attempt, is_made=False)
            raise
        return attempt

    def end(self, attempt: Attempt, is_made: bool) -> None:
        """Count a trace that was begun, if it came to its end."""
        with self._lock:
            self._begun.discard(attempt)
            if is_made:
                self._has_traced = True
                if attempt.is_recompilation:
                    self.n_recompilations += 1
                else:
                    self.n_traces += 1
            number = self.n_traces + self.n_recompilations if is_made else None
            self.hook.end(attempt.record, number)

    def clear(self) -> None:
        """Count from zero again."""
        with self._lock:
            self.n_traces = self.n_recompilations = 0
            self.hits = hit_counter()
            self.hook.restart()

    def seal(self, why: str) -> None:
        """Allow no further trace; `why` begins the error for one."""
        self._why_sealed = why

    def unseal(self) -> None:
        """Allow as many traces as before `seal`."""
        self._why_sealed = ""
