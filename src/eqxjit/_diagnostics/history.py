"""The traces of one function: their count, their limit, and which is compared with which."""

import collections
import dataclasses
import functools
import threading
import weakref
from typing import Any

from .._compat import is_staging, trace_configuration, weak_lowering
from .._places import Place, call_site
from .._text import times
from .constants import constants_of
from .description import UNKNOWN, Description, describe_function
from .differences import differences
from .events import listeners
from .log import log_constants, log_streak, logger, switches
from .trace import MAX_COMPARED, Trace, TraceList, closest_of, explanation_of

# How many traces of a function are remembered, and how many parts of calls: large trees take
# many megabytes.
_MAX_REMEMBERED = 256
_MAX_PARTS = 100_000

# After so many traces in a row that were each for something new, a message.
_MANY = 10

# A trace, and how many calls traced nothing before it.
_Streak = list[tuple[Trace, int]]


class TooManyTracesError(RuntimeError):
    """A call would trace a function more often than its `max_traces` allows."""


@dataclasses.dataclass
class Family:
    """Wrappers with the same function, or class, below them, in the same kind of wrapper.

    - `latest`: the function that was traced last.
    - `streak`: the first trace of each member, up to a bound.
    """

    latest: Description | None = None
    streak: _Streak = dataclasses.field(default_factory=list)


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

    def __init__(self, name: str, max_traces: int | None, place: Place, lock: threading.RLock):
        self.name = name
        self.place = place
        self.why_sealed = ""
        self._max_traces = max_traces
        self._lock = lock
        self._n_under_way = 0
        #: Of the functions that were wrapped alike, once this one is traced.
        self._family = Family()
        self._streak: _Streak = []
        self.restart()

    def restart(self) -> None:
        """Begin again, as the cache was cleared."""
        self.n_traces = 0
        # Those with which the first shown are compared, too. Another one, which traces refer to.
        maxlen = _MAX_REMEMBERED + MAX_COMPARED
        self._ended: collections.deque[Trace] = collections.deque(maxlen=maxlen)
        # A longer one has been logged.
        if len(self._streak) < _MANY:
            self._streak.clear()

    @property
    def traces(self) -> TraceList:
        """The latest since the cache was last cleared, the oldest first."""
        return TraceList([*self._ended][-_MAX_REMEMBERED:])

    def begin(self, call: Any) -> Trace:
        """Return a new trace, which `end` must follow; raise if it would be one too many."""
        # Not under the lock, since these run the user's code.
        site, description, functions = call_site(), call.description, self._functions(call)
        with self._lock:
            trace = Trace(
                self.name,
                site,
                # With those of other threads, which may come to their end first.
                self.n_traces + self._n_under_way + 1,
                _place=self.place,
                _description=description,
                _configuration=trace_configuration(),
                _why_dropped=call.entry.why_dropped,
                _ended=self._ended,
                _functions=functions,
            )
            # What is compiled ahead of time is asked for.
            why_not = "" if call.is_staged else self.why_sealed
            limit = self._max_traces
            if not why_not and limit is not None and trace.number > limit:
                why_not = f"`{self.name}` may be traced {times(limit)} (`max_traces={limit}`)"
            self._n_under_way += not why_not
        if why_not:
            lines = [f"{why_not}, and the call at {site} would be trace {trace.number}."]
            lines.append(trace.explanation)
            if why_not is self.why_sealed:
                lines.append("  It is compiled for")
                lines += dict.fromkeys([f"  - {each.summary}" for each in self.traces])
            raise TooManyTracesError("\n".join(lines))
        return trace

    def _functions(self, call: Any) -> tuple[Description, Description] | None:
        """Return the function of the family that was traced before, and that of a first trace."""
        if self._ended or self._n_under_way:
            return None
        function = describe_function(call)
        if function is UNKNOWN:
            return None
        part = function[0].part
        self._family = _family_of(self.place, part.kind, part.nature)
        before, self._family.latest = self._family.latest, function
        # It may be the same, under other options.
        return None if before in (None, function) else (before, function)

    def end(self, trace: Trace) -> None:
        """Count a trace, if the function returned."""
        with self._lock:
            self._n_under_way -= 1
            if not trace._is_made:
                return
            self.n_traces += 1
            trace.number = self.n_traces
            self._ended.append(trace)
            n_parts = 0
            for each in reversed(self._ended):
                n_parts += len(each._description)
                if n_parts > _MAX_PARTS:
                    each._description = UNKNOWN

    def finish(self, trace: Trace, call: Any, jaxpr: Any = None, lowered: Any = None) -> None:
        """Log a trace that JAX is done with.

        `jaxpr` and `lowered` are what it made, if that is known.
        """
        if jaxpr is not None:
            trace._jaxpr, trace._lowering = weakref.ref(jaxpr), weak_lowering(lowered)
            # Now, because names are found in the function and its arguments, which may die.
            trace._constants = constants_of(jaxpr, [*call.function.statics, *call.statics])
            log_constants(trace.function, trace._constants)
            if listeners:
                # For a report that is read when JAX has dropped them.
                _ = trace.program
        if trace.is_internal and is_staging():
            # A library's own function, as a part of another program: nobody knows its name.
            return
        is_of_family = trace._functions is not None
        if trace.number == 1 and not is_of_family:
            return
        if switches[-1].on:
            again = " again" if trace.number > 1 else ""
            logger.warning(
                "`%s` was traced%s (trace %d) for the call at %s, in %s.\n%s",
                *(trace.function, again, trace.number, trace.call_site, trace.seconds),
                trace.explanation,
            )
        # What is prepared ahead of time, or is a part of an outer program, is traced on purpose.
        streak = self._family.streak if is_of_family else self._streak
        if call.is_staged or is_staging() or len(streak) == _MANY:
            return
        hits = call.function.table.info().hits
        streak.append((trace, hits))
        if len(streak) == _MANY:
            # The calls of a member are gone with it.
            n_between = None if is_of_family else hits - streak[0][1]
            log_streak([each for each, _ in streak], n_between)

    def recompile(self, call: Any) -> None:
        """Note why JAX has compiled a program again, without a trace."""
        traces = self.traces
        closest = closest_of(traces, call.description, trace_configuration()) if traces else None
        if closest is None or UNKNOWN in (closest._description, call.description):
            return
        found = differences(closest._description, call.description, self.place)
        closest.recompiled += found
        if found and switches[-1].on:
            logger.warning(
                "`%s` was compiled again, without a trace, for the call at %s.\n%s",
                *(self.name, call_site(), explanation_of(found, closest.number)),
            )
