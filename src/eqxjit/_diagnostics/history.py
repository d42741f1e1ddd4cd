"""The traces of one function: their count, their limit, and which is compared with which."""

import collections
import functools
import threading
import weakref
from typing import Any

from .._compat import is_staging, trace_configuration, weak_lowering
from .._places import Place, call_site
from .._text import times
from .description import UNKNOWN, Description, describe_function
from .differences import differences, distance
from .events import listeners
from .log import log, log_recompiled, log_streak, switches
from .trace import MAX_COMPARED, Trace, TraceList

# How many traces of a function are remembered, and how many parts of calls: large trees take
# many megabytes.
_MAX_REMEMBERED = 256
_MAX_PARTS = 100_000

# After so many traces in a row that were each for something new, a message.
_MANY = 10

# How many of the programs that there are an error lists.
_MAX_LISTED = 32


class TooManyTracesError(RuntimeError):
    """A call would trace a function more often than its `max_traces` allows."""


class Family:
    """Wrappers with the same function, or class, below them, in the same kind of wrapper."""

    def __init__(self) -> None:
        #: What was traced last.
        self.latest: Description | None = None
        #: The first trace of each member, up to a bound.
        self.streak: list[Trace] = []


# Of the latest places, because a session may define functions without end.
@functools.lru_cache(maxsize=1024)
def _family_of(place: Place, *kind: str) -> Family:
    return Family()


class History:
    """The traces of one function under one set of options.

    - `name`: what to call the function.
    - `n_traces`: their number since the cache was last cleared.
    - `why_sealed`: why no call may be traced any more; empty if one may be.
    """

    def __init__(
        self,
        name: str,
        max_traces: int | None,
        place: Place,
        lock: threading.RLock,
    ):
        self.name = name
        self.place = place
        self.n_traces = 0
        self.why_sealed = ""
        self._max_traces = max_traces
        self._lock = lock
        #: Those under way.
        self._begun: list[Trace] = []
        #: The others, cleared ones included, and those with which the first shown are compared.
        maxlen = _MAX_REMEMBERED + MAX_COMPARED
        self._ended: collections.deque[Trace] = collections.deque(maxlen=maxlen)
        #: Of the functions that were wrapped alike, once this one is traced.
        self.family: Family | None = None
        self._era = 0
        self._streak: list[Trace] = []

    @property
    def traces(self) -> TraceList:
        """The latest since the cache was last cleared, the oldest first."""
        with self._lock:
            traces = [trace for trace in self._ended if trace._era == self._era]
        return TraceList(traces[-_MAX_REMEMBERED:])

    def begin(self, call: Any) -> Trace:
        """Return a new trace, which `end` must follow; raise if it would be one too many."""
        where = call_site()
        # Not under the lock, since it runs the user's code.
        description = call.description
        is_first = not (self._ended or self._begun or self.place.is_ours)
        function = describe_function(call) if is_first else UNKNOWN
        with self._lock:
            relative = None
            if function is not UNKNOWN:
                part = function[0].part
                self.family = _family_of(self.place, part.kind, part.nature)
                relative = self.family.latest
                if relative == function:
                    # The same under other options.
                    relative = None
            trace = Trace(
                self.name,
                where,
                # With those of other threads, which may come to their end first.
                self.n_traces + len(self._begun) + 1,
                _place=self.place,
                _description=description,
                _configuration=trace_configuration(),
                _invalidations=call.entry.invalidations,
                _era=self._era,
                _is_staged=call.is_staged,
                _others=(self._ended, self._begun),
                _function=function,
                _relative=relative,
                _is_again=bool(self._ended or self._begun or relative is not None),
            )
            # What is compiled ahead of time is asked for.
            why_not = "" if trace._is_staged else self.why_sealed
            limit = self._max_traces
            if not why_not and limit is not None and trace.number > limit:
                why_not = f"`{self.name}` may be traced {times(limit)} (`max_traces={limit}`)"
            if not why_not:
                self._begun.append(trace)
        if why_not:
            raise TooManyTracesError(
                f"{why_not}, and the call at {where} would be trace {trace.number}.\n"
                f"{trace.explanation()}{self._compiled() if why_not is self.why_sealed else ''}"
            )
        return trace

    def _compiled(self) -> str:
        """Return what is compiled, a line each, if it is more than the error explains already."""
        compiled = list(dict.fromkeys(trace.summary for trace in self.traces))
        if len(compiled) < 2:
            return ""
        if len(compiled) > _MAX_LISTED:
            compiled[_MAX_LISTED:] = [f"and {len(compiled) - _MAX_LISTED} more"]
        return "\n  - ".join(["\n  It is compiled for", *compiled])

    def end(self, trace: Trace) -> None:
        """Count a trace, if the function returned."""
        with self._lock:
            self._begun.remove(trace)
            if not trace._is_made:
                return
            self.n_traces += 1
            trace.number = self.n_traces
            trace._era = self._era
            self._ended.append(trace)
            if self.family is not None and trace._function is not UNKNOWN:
                self.family.latest = trace._function
            self._drop_large(trace)

    def _drop_large(self, latest: Trace) -> None:
        """Drop descriptions, the oldest first, if there are too many parts."""
        # Explaining before that what was compared with them would take longer than the trace.
        n_parts = len(latest._description)
        if n_parts < _MAX_PARTS / (_MAX_REMEMBERED + MAX_COMPARED):
            return
        for trace in [*self._ended][-2::-1]:
            n_parts += len(trace._description)
            if n_parts > _MAX_PARTS:
                trace._description = UNKNOWN

    def finish(self, trace: Trace, jaxpr: Any, lowered: Any, hits: int) -> None:
        """Log a trace that JAX is done with.

        `jaxpr` and `lowered` are what it made, if that is known; `hits` how many calls traced
        nothing so far.
        """
        if jaxpr is not None:
            trace._jaxpr, trace._lowering = weakref.ref(jaxpr), weak_lowering(lowered)
            if listeners:
                # For a report that is read when JAX has dropped them.
                _ = trace.program
        if switches and trace._is_again:
            log(trace)
        # What is prepared ahead of time, or is a part of an outer program, is traced on purpose.
        if trace._is_staged or is_staging():
            return
        if not trace._is_again:
            return
        family = self.family if trace._relative is not None else None
        streak = self._streak if family is None else family.streak
        # A longer one has been logged.
        if len(streak) < _MANY:
            streak.append(trace)
            trace._hits = hits
            if len(streak) == _MANY:
                # The calls of a member are gone with it.
                n_between = None if family else hits - streak[0]._hits
                log_streak(trace, [each.differences for each in streak], n_between)

    def recompile(self, call: Any) -> None:
        """Note why JAX has compiled a program again, without a trace."""
        new = call.description
        traces = [trace for trace in self.traces if trace._description is not UNKNOWN]
        if not traces or new is UNKNOWN:
            return
        latest = traces[: -MAX_COMPARED - 1 : -1]
        closest = min(latest, key=lambda trace: distance(trace._description, new))
        found = differences(closest._description, new, self.place.is_users)
        closest.recompiled += found[:_MAX_LISTED]
        if switches and found:
            log_recompiled(closest, call_site(), found)

    def restart(self) -> None:
        """Begin again, as the cache was cleared."""
        with self._lock:
            self.n_traces = 0
            self._era += 1
            if len(self._streak) < _MANY:
                self._streak.clear()
