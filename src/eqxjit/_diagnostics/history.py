"""The traces of one function: their count, their limit, and which is compared with which."""

import collections
import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from .._compat import is_staging, trace_configuration, weak_lowering
from .._places import Place, call_site, is_within_pmap
from .._text import comes_from_signal_handler, times
from . import events
from .constants import constants_of
from .description import UNKNOWN, Description, describe, describe_function
from .differences import differences
from .log import log_constants, log_streak, logger, switches
from .record import MAX_COMPARED, Circumstances, TraceRecord, closest_of
from .trace import Trace, TraceList, explanation_of

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

    - `name`: what to call the function; `place`: where it is defined.
    - `n_traces`: how many traces there were since the cache was last cleared.
    - `why_sealed`: why no call may be traced any more; empty if one may be.
    """

    def __init__(self, name: str, max_traces: int | None, place: Place):
        self.name = name
        self.place = place
        self.why_sealed = ""
        self._max_traces = max_traces
        # Re-entrant, because garbage collection may run code of the user's that makes calls.
        self._lock = threading.RLock()
        #: The family of the function, once it is traced.
        self._family = Family()
        self._streak: _Streak = []
        #: The latest record of each entry, and the record of each program by its number.
        self._of_entry: weakref.WeakKeyDictionary[Any, TraceRecord] = weakref.WeakKeyDictionary()
        self._of_program: weakref.WeakValueDictionary[int, TraceRecord] = (
            weakref.WeakValueDictionary()
        )
        self.restart()

    def restart(self) -> None:
        """Begin again, as the cache was cleared."""
        self.n_traces = 0
        self._records: collections.deque[TraceRecord] = collections.deque(maxlen=_MAX_REMEMBERED)
        # A longer streak has been logged.
        if len(self._streak) < _MANY:
            self._streak.clear()

    @property
    def traces(self) -> TraceList:
        """The latest traces since the cache was last cleared, the oldest first."""
        return TraceList(map(Trace, [*self._records]))

    def latest_of(self, entry: Any) -> TraceRecord | None:
        """Return the record of an entry's latest trace; `None` if nothing is known of it."""
        return self._of_entry.get(entry)

    def record_of(self, program: Any) -> TraceRecord | None:
        """Return the record of the trace that became a program; `None` if it is forgotten."""
        return self._of_program.get(program.number)

    # --- What the core calls ------------------------------------------------------------------

    def describe(self, call: Any) -> Description:
        """Describe the arguments of a call, and its function where copies of it may differ."""
        record = self.latest_of(call.entry)
        return describe(call, UNKNOWN if record is None else record.circumstances.description)

    @contextlib.contextmanager
    def tracing(self, call: Any) -> Iterator[TraceRecord]:
        """Record a trace, and count it if the user's function returns.

        **Raises:**

        - `TooManyTracesError`, if the function may not be traced once more.
        """
        record = self._record(call)
        self._refuse_too_many(call, record)
        with events.tracing(record, call.entry.name):
            yield record
        self._count(call, record)

    def finish(self, call: Any) -> None:
        """Log the trace that was made in a call, now that JAX is done with it, or has failed."""
        record = call.trace
        if record is None:
            if events.has_recompiled(call):
                self._note_recompilation(call)
            return
        events.finish(call.entry.name)
        if not call.is_traced:
            return
        if call.program is not None:
            self._of_program[call.program.number] = record
        if call.jaxpr is not None:
            record.jaxpr, record.lowering = weakref.ref(call.jaxpr), weak_lowering(call.lowered)
            # Now, because names are found in the function and its arguments, which may die.
            try:
                record.constants = constants_of(call.jaxpr, [*call.function.statics, *call.statics])
            except Exception as error:
                # It goes through objects of the user's, which may be of any kind. The call has run,
                # and mustn't fail for a lack of names.
                if comes_from_signal_handler(error):
                    raise
            log_constants(record.function, record.constants)
            if events.listeners:
                # For a report that is read when JAX has dropped them.
                _ = record.program
        self._log(call, record)

    # --- One trace ----------------------------------------------------------------------------

    def _record(self, call: Any) -> TraceRecord:
        # Not under the lock, since these run the user's code.
        site, description, functions = call_site(), call.description, self._functions(call)
        # In one C call, because other threads change it.
        earlier = [*self._records][-MAX_COMPARED:]
        return TraceRecord(
            self.name,
            self.place,
            site,
            Circumstances(
                self.n_traces + 1, description, trace_configuration(), call.entry.why_dropped
            ),
            [each.circumstances for each in earlier],
            functions,
        )

    def _functions(self, call: Any) -> tuple[Description, Description] | None:
        """Return the function of the family that was traced before, and that of a first trace."""
        if self.n_traces:
            return None
        function = describe_function(call)
        if function is UNKNOWN:
            return None
        part = function[0].part
        self._family = _family_of(self.place, part.kind, part.nature)
        before, self._family.latest = self._family.latest, function
        # It may be the same, under other options.
        return None if before in (None, function) else (before, function)

    def _refuse_too_many(self, call: Any, record: TraceRecord) -> None:
        """Raise if a trace is one too many."""
        number = record.circumstances.number
        # What is compiled ahead of time is asked for.
        why_not = "" if call.is_staged else self.why_sealed
        if not why_not and self._max_traces is not None and number > self._max_traces:
            limit = self._max_traces
            why_not = f"`{self.name}` may be traced {times(limit)} (`max_traces={limit}`)"
        if not why_not:
            return
        lines = [f"{why_not}, and the call at {record.call_site} would be trace {number}."]
        lines.append(explanation_of(*record.explanation))
        if is_within_pmap():
            lines.append("  `jax.pmap` and `equinox.filter_pmap` trace twice: allow twice as many.")
        if why_not is self.why_sealed:
            lines.append("  It is compiled for")
            lines += dict.fromkeys([f"  - {each.summary}" for each in self.traces])
        raise TooManyTracesError("\n".join(lines))

    def _count(self, call: Any, record: TraceRecord) -> None:
        """Count a trace whose function has returned."""
        with self._lock:
            # Other threads may have ended theirs meanwhile, and functions that call themselves.
            record.circumstances.number = self.n_traces + 1
            self._refuse_too_many(call, record)
            self.n_traces += 1
            self._records.append(record)
            self._of_entry[call.entry] = record
            self._forget_large()

    def _forget_large(self) -> None:
        """Forget the oldest descriptions, if all have too many parts."""
        records = [*self._records]
        n_parts = 0
        for i in range(len(records) - 1, -1, -1):
            circumstances = records[i].circumstances
            n_parts += len(circumstances.description)
            if n_parts > _MAX_PARTS and circumstances.description is not UNKNOWN:
                # These are compared with it, and may be read later.
                for later in records[i : i + MAX_COMPARED + 1]:
                    _ = later.explanation
                circumstances.description = UNKNOWN

    def _log(self, call: Any, record: TraceRecord) -> None:
        is_of_family = record.functions is not None
        if record.circumstances.number == 1 and not is_of_family:
            return
        trace = Trace(record)
        if is_staging() and trace.is_internal:
            # A library's own function, as a part of another program: nobody knows its name.
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

    def _note_recompilation(self, call: Any) -> None:
        """Note why JAX has compiled a program again, without a trace."""
        earlier = [each.circumstances for each in [*self._records]]
        if not earlier:
            return
        closest = closest_of(earlier, call.description, trace_configuration())
        if UNKNOWN in (closest.description, call.description):
            return
        found = differences(closest.description, call.description, self.place)
        for record in [*self._records]:
            if record.circumstances is closest:
                record.recompiled += found
        if found and switches[-1].on:
            logger.warning(
                "`%s` was compiled again, without a trace, for the call at %s.\n%s",
                *(self.name, call_site(), explanation_of(found, closest.number)),
            )
