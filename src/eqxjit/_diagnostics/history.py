"""The history of one function's traces: it explains each by those before."""

import collections
import types
import weakref
from typing import Any

from .._code.call_site import call_site
from .._code.place import Place
from .._compat import trace_configuration
from .._core.counter import TraceHook
from .._core.entry import Entry
from .._core.events import LOWERING, TRACING, observers
from .._core.staging import currently_jitting
from .._interruptions import unless_it_raises
from .._lock import Lock, Weak
from .._spec.tree import has_tracers, leaf_paths
from .advice import Change
from .description import UNKNOWN, Description, describe, named_specs, summary
from .differences import (
    CACHE,
    FUNCTION,
    OF_ARRAYS,
    UNKNOWN_REASON,
    Difference,
    causes,
    configuration_differences,
    defined_again,
    differences,
    distance,
    with_apt_remedies,
)
from .jaxpr_size import measure
from .log import Streak, log, log_iterators, streak_of
from .trace import Trace, TraceList

# How many traces of a function are remembered, and with how many of them a new one is compared.
_MAX_REMEMBERED = 256
_MAX_COMPARED = 16

# How many parts of descriptions are remembered, a few dozen megabytes: large trees differ in many.
_MAX_PARTS = 200_000

# How many places are remembered at which functions are defined.
_MAX_DEFINITIONS = 256


class History(TraceHook):
    """The traces of one function under one set of options: the hook that explains them.

    - `name`: what to call the function.
    - `place`: where what is called is defined, a Python function or not.
    """

    def __init__(self, name: str, place: Place, home: types.FunctionType | None, number: int):
        self.name = name
        self.place = place
        self._number = None if home is None else number
        self._lock = Lock()
        #: Those under way. An interrupt may keep one from its end, but not alive.
        self._begun: Weak[Trace] = Weak()
        #: The entries that they were made for.
        self._entries: weakref.WeakKeyDictionary[Trace, weakref.ref[Entry]] = (
            weakref.WeakKeyDictionary()
        )
        self._remembered: collections.deque[Trace] = collections.deque(maxlen=_MAX_REMEMBERED)
        #: How many of the remembered traces are from before the last `clear_cache`.
        self._n_cleared = 0
        self._streak = Streak(place)

    @property
    def traces(self) -> TraceList:
        """Those since the cache was last cleared, the oldest first; the latest 256 of them."""
        with self._lock:
            return TraceList(list(self._remembered)[self._n_cleared :])

    def describe(self, call: Any) -> Description:
        """Describe the arguments of a call."""
        return describe(call)

    def compiled(self) -> list[str]:
        """Return the arguments of each trace that is remembered, in a few words."""
        return [self.summary(trace.description) for trace in self.traces]

    def summary(self, description: Description) -> str:
        """Return the arguments of a call in a few words."""
        return ", ".join(summary(description))

    def static_differences(self, old: Description, new: Description) -> list[str]:
        """Return how two calls differ in anything but arrays, in words."""
        found = differences(causes(old, new))
        return [str(difference) for difference in found if difference.category not in OF_ARRAYS]

    def begin(self, call: Any, number: int) -> Trace:
        """Explain a trace that is about to be made."""
        trace = Trace(
            self.name,
            describe(call),
            trace_configuration(),
            call_site(),
            number,
            is_transformed=has_tracers(call.arrays),
            is_ahead_of_time=call.is_staged,
            invalidation_reasons=call.entry.invalidation_reasons,
        )
        with self._lock:
            earlier = self._explain(trace)
            self._entries[trace] = weakref.ref(call.entry)
            self._begun.add(trace)
        if earlier is not None and _cause(trace) == CACHE:
            entry = self._entries[earlier]()
            # The user's `__eq__` compares, and a node is flattened once more.
            path = unless_it_raises(lambda: _first_difference(entry, call), "")
            if path:
                [cause] = trace.differences
                trace.differences = (cause._replace(new=f"{cause.new}: `{path}`"),)
        return trace

    def explain(self, record: Trace) -> str:
        """Return how a trace differs from the closest one before."""
        return record.explanation()

    def end(self, record: Trace | None, number: int | None) -> None:
        """Remember a trace that was begun, if it came to its end."""
        with self._lock:
            if record is not None:
                self._begun.discard(record)
            if record is None or number is None:
                return
            record.number = number
            if len(self._remembered) == _MAX_REMEMBERED:
                self._n_cleared = max(0, self._n_cleared - 1)
            self._remembered.append(record)
            self._forget_descriptions()
            self._remember_definition()

    def spend(self, record: Trace, phase: str, seconds: float, from_cache: bool) -> None:
        if phase == TRACING:
            # What JAX does around the function's own trace included.
            record.seconds.tracing = seconds
        elif phase == LOWERING:
            record.seconds.lowering += seconds
        else:
            record.seconds.compiling += seconds
            record.from_persistent_cache = from_cache

    def complete(self, record: Trace, call: Any, jaxpr: Any) -> None:
        """Measure a trace, and notify observers and the log."""
        measure(record, call, jaxpr)
        for observer in observers.alive():
            observer.traced(record)
        log(record)
        # What is prepared ahead of time, or is a part of an outer program, is traced on purpose.
        if not record.is_ahead_of_time and not currently_jitting():
            self._add_to_streak(record)
        log_iterators(record, self.place, call)

    def _forget_descriptions(self) -> None:
        # Copied: a signal handler's call may be traced meanwhile, and remembered.
        latest, *others = reversed([*self._remembered])
        n_parts = len(latest.description.parts)
        for trace in others:
            n_parts += len(trace.description.parts)
            if n_parts > _MAX_PARTS:
                trace.description = UNKNOWN

    def restart(self) -> None:
        """Begin anew. The traces so far are still compared with."""
        with self._lock:
            self._n_cleared = len(self._remembered)
        self._streak.restart()

    def _explain(self, trace: Trace) -> Trace | None:
        """Fill in how a trace differs from the closest of those before, and return that."""
        # Of those that are as close, the latest: one that isn't complete yet, in a recursion.
        begun = sorted(self._begun.alive(), key=lambda earlier: earlier.number)
        latest = [*self._remembered, *begun][: -_MAX_COMPARED - 1 : -1]
        if not latest:
            trace.differences = self._defined_again()
            return None
        compared = [self._compared(earlier, trace) for earlier in latest]
        n_least = min(sum(map(len, each)) for each in compared)
        closest = [i for i, each in enumerate(compared) if sum(map(len, each)) == n_least]
        index = min(closest, key=lambda i: distance(latest[i].description, trace.description))
        earlier, (found, changed) = latest[index], compared[index]
        trace.configuration = trace.configuration if changed else earlier.configuration
        trace.description = trace.description.sharing(earlier.description)
        if UNKNOWN in (earlier.description, trace.description):
            why = "the arguments are too large to be compared, or can't be"
            trace.differences = (Difference(UNKNOWN_REASON, "", "", why),)
        else:
            shown = with_apt_remedies([*differences(found), *changed])
            trace.differences = shown or (_why_it_does_not_serve(earlier, trace),)
        is_earlier_cleared = earlier in list(self._remembered)[: self._n_cleared]
        trace.compared_with = None if is_earlier_cleared else earlier.number
        return earlier

    def _compared(
        self, earlier: Trace, trace: Trace
    ) -> tuple[list[list[Change]], list[Difference]]:
        """Return how two traces differ, in their arguments and in JAX's configuration."""
        found = causes(earlier.description, trace.description, self.place.is_users)
        return found, configuration_differences(earlier.configuration, trace.configuration)

    def _defined_again(self) -> tuple[Difference, ...]:
        """Return why the first trace of a function is none: another one was defined there."""
        with _last_traced_lock:
            if self._number is None or self.place.is_loaded:
                return ()
            if _last_traced.get(self.place, self._number) == self._number:
                return ()
        return (defined_again(self.place),)

    def _remember_definition(self) -> None:
        if self._number is None:
            return
        with _last_traced_lock:
            _last_traced[self.place] = self._number
            _last_traced.move_to_end(self.place)
            if len(_last_traced) > _MAX_DEFINITIONS:
                _last_traced.popitem(last=False)

    def _add_to_streak(self, trace: Trace) -> None:
        """Count a trace among those in a row, which are logged once they are many."""
        if _cause(trace) in (None, FUNCTION):
            streak_of(self.place).add_function(trace)
        else:
            self._streak.add(trace)


def _cause(trace: Trace) -> str | None:
    """Return the category of the first difference."""
    return trace.differences[0].category if trace.differences else None


def _first_difference(entry: Entry | None, call: Any) -> str:
    """Return the path of the first static value that differs though it looks the same."""
    if entry is None or entry is call.entry:
        return ""
    pairs = zip(named_specs(call, entry.spec), named_specs(call, call.spec), strict=True)
    for (name, old, value), (_, new, _) in pairs:
        # Of one structure, or there would be more to say.
        leaves = zip(leaf_paths(old, value, name), leaf_paths(new, value, name), strict=True)
        for (path, was, _), (_, is_now, _) in leaves:
            if was != is_now:
                return path
    return ""


def _why_it_does_not_serve(earlier: Trace, trace: Trace) -> Difference:
    """Return why a trace doesn't serve a call that looks just like its own."""
    if earlier.invalidation_reasons:
        why = earlier.invalidation_reasons[-1]
    elif earlier.invalidation_reasons is not trace.invalidation_reasons:
        why = (
            "a static object of that trace's was changed in place, or differs in what neither its "
            "text nor its hash shows"
        )
    else:
        why = "JAX's own caches no longer hold it (`jax.clear_caches()`)"
    return Difference(CACHE, "", "", why)


# Which function of those defined at one place was traced last.
_last_traced: collections.OrderedDict[Place, int] = collections.OrderedDict()
_last_traced_lock = Lock()
