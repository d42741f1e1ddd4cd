"""The history of one function's traces: it explains each by those before."""

import collections
import dataclasses
import functools
from typing import Any

from .._compat import is_staging, trace_configuration
from .._core.counter import TraceHook
from .._core.events import COMPILING, TRACING, OpenTrace
from .._interruptions import Lock, Weak
from .._places import Place, call_site
from .description import UNKNOWN, Description, describe
from .differences import FUNCTION, OF_ARRAYS, Difference, defined_again, differences
from .log import log, log_streak, switches
from .trace import Trace, TraceList, size_of

# How many traces of a function are remembered, and with how many of them a new one is compared.
_MAX_REMEMBERED = 256
_MAX_COMPARED = 16
# Larger descriptions are dropped once they are compared with no more: they are many megabytes.
_MAX_PARTS = 1_000

# After so many traces in a row that were each for something new, a message.
_MANY = 10

# One lock for all that is remembered here, because making one takes longer than waiting for it.
_lock = Lock()


# How each of the traces in a row of one function, or place, differs from those before.
_Streak = list[tuple[Difference, ...]]


def _extend(streak: _Streak, trace: Trace, causes: tuple[Difference, ...]) -> None:
    """Count a trace, and log the streak once it is long."""
    with _lock:
        # One that is longer has been logged.
        if len(streak) == _MANY:
            return
        streak.append(causes)
        if len(streak) < _MANY:
            return
    # Not under the lock: a handler may be anybody's code.
    log_streak(trace, streak)


@dataclasses.dataclass
class _Definition:
    """The functions that are defined at one place."""

    #: The number of the function that was traced last.
    latest: int | None = None
    has_function: bool = False
    streak: _Streak = dataclasses.field(default_factory=list)


# Of the latest places, because a session may define functions without end.
@functools.lru_cache(maxsize=1024)
def definition_at(place: Place) -> _Definition:
    return _Definition()


class History(TraceHook):
    """The traces of one function under one set of options: the hook that explains them."""

    def __init__(self, name: str, place: Place, number: int | None):
        self.name = name
        self.place = place
        self._number = number
        self._traces: collections.deque[Trace] = collections.deque(maxlen=_MAX_REMEMBERED)
        # Those that a new one is compared with, the latest first, cleared ones included.
        self._latest: collections.deque[Trace] = collections.deque()
        self._streak: _Streak = []

    @property
    def traces(self) -> TraceList:
        with _lock:
            return TraceList(self._traces)

    def describe(self, call: Any) -> Description:
        return describe(call)

    def static_differences(self, old: Description, new: Description) -> list[str]:
        return [str(d) for d in differences(old, new) if d.category not in OF_ARRAYS]

    def begin(self, trace: OpenTrace, number: int, begun: Weak[OpenTrace]) -> str:
        call, reasons = trace.call, trace.call.entry.invalidation_reasons
        configuration = trace_configuration()
        record = Trace(self.name, call_site(), number, configuration, describe(call), reasons)
        with _lock:
            records = [other.record for other in begun.alive() if other.record is not None]
            self._explain(record, sorted(records, key=lambda earlier: -earlier.number))
            trace.record = record
        return record.explanation()

    def end(self, record: Trace, number: int) -> None:
        with _lock:
            record.number = number
            self._traces.append(record)
            self._latest.appendleft(record)
            if len(self._latest) > _MAX_COMPARED:
                old = self._latest.pop()
                if len(old.description) > _MAX_PARTS:
                    old.description = UNKNOWN
            if self._number is not None:
                definition_at(self.place).latest = self._number

    def spend(self, record: Trace, phase: str, seconds: float, from_cache: bool) -> None:
        # What JAX reports of the function's trace includes what we measured.
        before = 0.0 if phase == TRACING else getattr(record.seconds, phase)
        setattr(record.seconds, phase, before + seconds)
        if phase == COMPILING:
            record.from_persistent_cache = from_cache

    def complete(self, record: Trace, call: Any, jaxpr: Any) -> None:
        if jaxpr is not None:
            record.equations, record.busiest_line = size_of(jaxpr)
        if switches and record.differences:
            log(record)
        # What is prepared ahead of time, or is a part of an outer program, is traced on purpose.
        if call.is_staged or is_staging():
            return
        if record.differences and record.differences[0].category != FUNCTION:
            _extend(self._streak, record, record.differences)
            return
        definition = definition_at(self.place)
        with _lock:
            is_first, definition.has_function = not definition.has_function, True
        if not is_first and not self.place.is_loaded:
            causes = record.differences or (defined_again(self.place),)
            _extend(definition.streak, record, causes)

    def restart(self) -> None:
        with _lock:
            self._traces.clear()
            if len(self._streak) < _MANY:
                self._streak.clear()

    def _explain(self, trace: Trace, begun: list[Trace]) -> None:
        """Fill in how a trace differs from the closest of those before, or under way."""
        # Of those that are as close, the latest: one that isn't complete yet, in a recursion.
        latest = [*begun, *self._latest][:_MAX_COMPARED]
        if not latest:
            another = None if self._number is None else definition_at(self.place).latest
            if another not in (None, self._number) and not self.place.is_loaded:
                trace.differences = (defined_again(self.place),)
            return
        earlier = min(latest, key=lambda each: _distance(each, trace))
        if UNKNOWN in (earlier.description, trace.description):
            why = "the arguments are too large to be compared, or can't be"
            trace.differences = (Difference("unknown", "", "", why),)
        else:
            found = differences(earlier.description, trace.description, self.place.is_users)
            # The names depend on the release of JAX, and a user may add contexts.
            was = earlier.configuration
            found += [
                Difference("configuration changed", name, was.get(name, "absent"), text)
                for name, text in trace.configuration.items()
                if was.get(name) != text
            ]
            trace.differences = tuple(found) or (_why_it_does_not_serve(earlier, trace),)
        # That of a cleared one may be another trace's by now.
        is_counted = earlier in (*begun, *self._traces)
        trace.compared_with = earlier.number if is_counted else None


def _distance(earlier: Trace, trace: Trace) -> int:
    """Return in how many parts two traces differ, those in nodes that differ included."""
    old, new = earlier.description, trace.description
    parts = {row.path: row.part for row in old}
    n_same = sum([parts.get(row.path) == row.part for row in new])
    # Or the same paths in another order.
    is_alike = [*parts] == [row.path for row in new]
    is_set_anew = earlier.configuration != trace.configuration
    return max(len(old), len(new)) - n_same + (not is_alike) + is_set_anew


def _why_it_does_not_serve(earlier: Trace, trace: Trace) -> Difference:
    # The call looks just like that of the trace.
    why = "JAX's caches no longer hold it (`jax.clear_caches()`)"
    if earlier.invalidation_reasons:
        why = earlier.invalidation_reasons[-1]
    elif earlier.invalidation_reasons is not trace.invalidation_reasons:
        why = (
            "a static object of that trace's was changed in place, or differs in what neither its "
            "text nor its hash shows"
        )
    return Difference("cache evicted or cleared", "", "", why)
