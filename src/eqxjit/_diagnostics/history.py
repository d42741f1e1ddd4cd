"""The history of one function: its traces, their limit, and which traces are compared."""

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
from .._text import times
from . import events
from .constants import bytes_of
from .description import UNKNOWN, Description, describe, describe_function
from .differences import differences
from .log import HUGE_BYTES, log_constants, log_streak, logger, switches
from .record import MAX_COMPARED, Circumstances, TraceRecord, closest_of
from .trace import Trace, TraceList, explanation_of

# A function's history holds at most this many traces, and descriptions with at most this many parts
# in all, because the descriptions of large trees take many megabytes.
_MAX_REMEMBERED = 256
_MAX_PARTS = 100_000

# A streak of this many traces is logged.
_MANY = 10

# The first traces that count, each with the number of calls before it that needed no trace.
_Streak = list[tuple[Trace, int]]


class TooManyTracesError(RuntimeError):
    """Raised if a call would trace a function more often than its `max_traces` allows."""


@dataclasses.dataclass
class Family:
    """Functions that are defined at one place, and of one kind, such as partials of one function.

    At the first trace of a member, its function is compared with the member that was traced before.

    - `latest`: the description of the member that was traced last.
    - `streak`: the first traces of the members, up to `_MANY`.
    """

    latest: Description | None = None
    streak: _Streak = dataclasses.field(default_factory=list)


# The cache forgets old families, because a session may define functions without end.
@functools.lru_cache(maxsize=1024)
def _family_of(place: Place, kind: str, nature: str) -> Family:
    """Return the family of the functions at a place whose parts have this kind and nature.

    The same object is returned each time.
    """
    return Family()


class History:
    """The traces of one function under one set of options.

    - `name`: the function's name in messages.
    - `place`: where the function is defined.
    - `n_traces`: the number of traces since the cache was last cleared.
    - `why_sealed`: why no call may be traced any more; empty if calls may be traced.
    """

    def __init__(self, name: str, max_traces: int | None, place: Place):
        self.name = name
        self.place = place
        self.why_sealed = ""
        self._max_traces = max_traces
        # Re-entrant, because garbage collection may run a finalizer of the user's that makes calls.
        self._lock = threading.RLock()
        # The function's first trace puts the family of its place and kind here.
        self._family = Family()
        self._streak: _Streak = []
        # The latest record of each entry, and the record of each program by the program's number.
        self._of_entry: weakref.WeakKeyDictionary[Any, TraceRecord] = weakref.WeakKeyDictionary()
        self._of_program: weakref.WeakValueDictionary[int, TraceRecord] = (
            weakref.WeakValueDictionary()
        )
        self.restart()

    def restart(self) -> None:
        """Begin a new history, because the cache was cleared."""
        self.n_traces = 0
        self._records: collections.deque[TraceRecord] = collections.deque(maxlen=_MAX_REMEMBERED)
        # A full streak stays. It shows that the streak was logged, and it must be logged only once.
        if len(self._streak) < _MANY:
            self._streak.clear()

    @property
    def traces(self) -> TraceList:
        """The latest traces since the cache was last cleared, the oldest first."""
        return TraceList(map(Trace, [*self._records]))

    def latest_of(self, entry: Any) -> TraceRecord | None:
        """Return the record of an entry's latest trace; `None` if there is none."""
        return self._of_entry.get(entry)

    def record_of(self, program: Any) -> TraceRecord | None:
        """Return the record of the trace that became a program; `None` if it was forgotten."""
        return self._of_program.get(program.number)

    # --- What the core calls ------------------------------------------------------------------

    def describe(self, call: Any) -> Description:
        """Describe the arguments of a call, and the arrays of its function."""
        record = self.latest_of(call.entry)
        return describe(call, UNKNOWN if record is None else record.circumstances.description)

    @contextlib.contextmanager
    def tracing(self, call: Any) -> Iterator[TraceRecord]:
        """Time and record the trace of a call that runs in this context.

        The trace counts if the user's function returns. Raises a `TooManyTracesError` if the
        function may not be traced once more.
        """
        record = self._new_record(call)
        self._check_limit(call, record)
        with events.tracing(record, call.entry.name):
            yield record
        self._count(call, record)

    def finish(self, call: Any) -> None:
        """Complete and log the trace of a call, if it has one, when JAX is done with the call.

        This also happens if JAX raised an error.
        """
        record = call.trace
        if record is None:
            if events.has_recompiled(call):
                self._note_recompilation(call)
            return
        events.stop_counting(call.entry.name)
        if not call.is_traced:
            return
        if call.program is not None:
            self._of_program[call.program.number] = record
        if call.jaxpr is not None:
            record.jaxpr, record.lowering = weakref.ref(call.jaxpr), weak_lowering(call.lowered)
            roots = [*call.function.statics, *call.statics]
            record.roots = [weakref.ref(each) for each in roots if type(each).__weakrefoffset__]
            if sum(map(bytes_of, call.jaxpr.consts)) >= HUGE_BYTES:
                log_constants(record.function, record.constants)
            if events.listeners:
                # A report may be read after JAX has dropped the jaxpr, so compute the size now.
                _ = record.program
        self._log(call, record)

    # --- One trace ----------------------------------------------------------------------------

    def _new_record(self, call: Any) -> TraceRecord:
        """Return a record for a trace that begins now, with all that explanations compare."""
        # Outside of the lock, because descriptions run code of the user's.
        functions = self._functions_to_compare(call)
        circumstances = Circumstances(
            number=self.n_traces + 1,
            description=call.description,
            configuration=trace_configuration(),
            why_dropped=call.entry.why_dropped,
        )
        # Copied by a single C call, because other threads append to the deque.
        records = [*self._records]
        return TraceRecord(
            function=self.name,
            place=self.place,
            call_site=call_site(),
            circumstances=circumstances,
            earlier=[each.circumstances for each in records[-MAX_COMPARED:]],
            functions=functions,
        )

    def _functions_to_compare(self, call: Any) -> tuple[Description, Description] | None:
        """Return the member of the family that was traced last, and the function of this call.

        `None` if this isn't the function's first trace, or if there is no such member.
        """
        if self.n_traces:
            return None
        function = describe_function(call)
        if function is UNKNOWN:
            return None
        part = function[0].part
        self._family = _family_of(self.place, part.kind, part.nature)
        before = self._family.latest
        self._family.latest = function
        # The two are equal if one function is wrapped under several sets of options.
        return None if before is None or before == function else (before, function)

    def _check_limit(self, call: Any, record: TraceRecord) -> None:
        """Raise a `TooManyTracesError` if the function may not be traced once more."""
        number = record.circumstances.number
        # Compiling ahead of time is allowed in a sealed history, because the user asks for it.
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
        """Count a trace in which the user's function has returned, and keep its record."""
        with self._lock:
            # The number may be taken by now, because another thread may have traced the function,
            # or because the function calls itself.
            record.circumstances.number = self.n_traces + 1
            self._check_limit(call, record)
            self.n_traces += 1
            self._records.append(record)
            self._of_entry[call.entry] = record
            self._forget_old_descriptions()

    def _forget_old_descriptions(self) -> None:
        """Drop the oldest descriptions while all descriptions have more than `_MAX_PARTS` parts."""
        records = [*self._records]
        n_parts = 0
        for i in range(len(records) - 1, -1, -1):
            circumstances = records[i].circumstances
            n_parts += len(circumstances.description)
            if n_parts > _MAX_PARTS and circumstances.description is not UNKNOWN:
                # Explanations are computed lazily. Compute now those that need this description:
                # the record's own, and those of the later records that are compared with it.
                for each in records[i : i + MAX_COMPARED + 1]:
                    _ = each.explanation
                circumstances.description = UNKNOWN

    def _log(self, call: Any, record: TraceRecord) -> None:
        """Log a trace if explanations are on, and add it to its streak."""
        is_of_family = record.functions is not None
        if record.circumstances.number == 1 and not is_of_family:
            return
        trace = Trace(record)
        if is_staging() and trace.is_internal:
            # Users don't know the name of a library's private function in an outer program.
            return
        if switches[-1].on:
            logger.warning(
                "`%s` was traced%s (trace %d) for the call at %s, in %s.\n%s",
                trace.function,
                " again" if trace.number > 1 else "",
                trace.number,
                trace.call_site,
                trace.seconds,
                trace.explanation,
            )
        self._extend_streak(call, trace, is_of_family)

    def _extend_streak(self, call: Any, trace: Trace, is_of_family: bool) -> None:
        """Add a trace to its streak, and log the streak if that makes it full."""
        streak = self._family.streak if is_of_family else self._streak
        # A program that is compiled ahead of time, or that becomes a part of an outer program, is
        # traced on purpose.
        if call.is_staged or is_staging() or len(streak) == _MANY:
            return
        n_hits = call.function.table.info().hits
        streak.append((trace, n_hits))
        if len(streak) == _MANY:
            # Each member of a family has a table of its own, so their calls can't be counted.
            n_between = None if is_of_family else n_hits - streak[0][1]
            log_streak([each for each, _ in streak], n_between)

    def _note_recompilation(self, call: Any) -> None:
        """Note and log why JAX has compiled a program again in a call, without a trace."""
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
                self.name,
                call_site(),
                explanation_of(found, closest.number),
            )
