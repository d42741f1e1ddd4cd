"""The history of one function's traces: it explains each by those before."""

import collections
import inspect
import types
import weakref
from collections.abc import Hashable
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
from .._spec.tree import children, has_tracers
from .description import UNKNOWN, Description, describe, summary
from .differences import (
    CACHE,
    FUNCTION,
    OF_ARRAYS,
    UNKNOWN_REASON,
    Difference,
    configuration_differences,
    differences,
    distance,
    with_apt_remedies,
)
from .iterators import log_iterators
from .jaxpr_size import measure
from .log import log
from .outline import outline
from .storms import Streak, streak_of
from .trace import Trace, TraceList

# How many traces of a function are remembered, and with how many of them a new one is compared.
_MAX_REMEMBERED = 256
_MAX_COMPARED = 16

# How many parts of descriptions are remembered, a few dozen megabytes: large trees differ in many.
_MAX_PARTS = 200_000

# How many definitions of functions are remembered, so that a function made anew is recognised.
_MAX_DEFINITIONS = 256


class Definition:
    """The definition of a Python function: read when a trace asks, without its objects.

    - `number`: tells this function from the others.
    """

    __slots__ = ("_fun", "_key", "number")

    def __init__(self, fun: types.FunctionType, number: int):
        self.number = number
        self._fun = weakref.ref(fun)
        self._key: tuple[Hashable, ...] | None = None

    def key(self) -> tuple[Hashable, ...]:
        """Return a key that is equal for functions made of one code with the same captured values.

        As far as these were looked at; empty where it can't be told.
        """
        if self._key is None:
            self._key = unless_it_raises(self._read_key, ())
        return self._key

    def _read_key(self) -> tuple[Hashable, ...]:
        # Decorators have one code for all that they decorate.
        fun: Any = inspect.unwrap(self._fun())  # type: ignore[arg-type]
        code = fun.__code__
        captured = [cell.cell_contents for cell in fun.__closure__ or ()]
        where = (code.co_filename, code.co_firstlineno, code.co_qualname)
        # Two lambdas on one line may differ in a constant alone.
        return (*where, hash(code), *outline(captured))


class History(TraceHook):
    """The traces of one function under one set of options: the hook that explains them.

    - `name`: what to call the function.
    - `place`: where what is called is defined, a Python function or not.
    """

    def __init__(self, name: str, place: Place, home: types.FunctionType | None, number: int):
        self.name = name
        self.place = place
        self._definition = None if home is None else Definition(home, number)
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
        found = differences(old, new)
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
        if earlier is not None and _cause(trace) in (UNKNOWN_REASON, CACHE):
            path = _first_difference(self._entries[earlier](), call)
            if path:
                first, *others = trace.differences
                new = f"{first.new}; the first that differs is `{path}`"
                trace.differences = (first._replace(new=new), *others)
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
            _remember_definition(self._definition)

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
        earlier = self._closest(trace)
        if earlier is None:
            trace.differences = _defined_again(self._definition, self.place)
            return None
        if trace.configuration == earlier.configuration:
            trace.configuration = earlier.configuration
        trace.description = trace.description.sharing(earlier.description)
        found = self._differences(earlier, trace)
        trace.differences = found or (_why_it_does_not_serve(earlier, trace),)
        is_earlier_cleared = earlier in list(self._remembered)[: self._n_cleared]
        trace.compared_with = None if is_earlier_cleared else earlier.number
        return earlier

    def _closest(self, trace: Trace) -> Trace | None:
        def how_far(earlier: Trace) -> int:
            far = distance(earlier.description, trace.description)
            return far + len(configuration_differences(earlier.configuration, trace.configuration))

        # Of those that are as close, the latest: one that isn't complete yet, in a recursion.
        begun = sorted(self._begun.alive(), key=lambda earlier: earlier.number)
        latest = [*self._remembered, *begun][: -_MAX_COMPARED - 1 : -1]
        return min(latest, key=how_far, default=None)

    def _differences(self, earlier: Trace, trace: Trace) -> tuple[Difference, ...]:
        if UNKNOWN in (earlier.description, trace.description):
            why = "the arguments are too large to be compared, or can't be"
            return (Difference(UNKNOWN_REASON, "", "", why),)
        found = differences(earlier.description, trace.description, self.place.is_users)
        found += configuration_differences(earlier.configuration, trace.configuration)
        return with_apt_remedies(found)

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
    """Return the path at which an entry's spec first differs from a call's; empty if none."""
    if entry is None or entry is call.entry:
        return ""

    def walk(old: Any, new: Any, value: Any, path: str) -> str:
        if old == new:
            return ""
        if type(old) is not tuple or type(new) is not tuple or old[:3] != new[:3]:
            return path
        if len(old) != len(new):
            return path
        for before, (suffix, spec, child, _) in zip(old[3:], children(new, value), strict=True):
            found = walk(before, spec, child, path + suffix)
            if found:
                return found
        return path

    def find() -> str:
        names = [*call.function.signature.path_names(len(call.args)), *sorted(call.kwargs)]
        values = [*call.args, *[call.kwargs[name] for name in sorted(call.kwargs)]]
        old = [*entry.spec[3][3:], *entry.spec[4][3:]]
        new = [*call.spec[3][3:], *call.spec[4][3:]]
        if len(old) != len(new):
            return ""
        found = map(walk, old, new, values, names)
        return next(filter(None, found), "")

    # Say, a node of the user's that can't be flattened again.
    return unless_it_raises(find, "")


def _why_it_does_not_serve(earlier: Trace, trace: Trace) -> Difference:
    """Why a trace doesn't serve a call that looks just like its own."""
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
_last_traced: collections.OrderedDict[Hashable, int] = collections.OrderedDict()
_last_traced_lock = Lock()


def _remember_definition(definition: Definition | None) -> None:
    if definition is None:
        return
    key = definition.key()
    if not key:
        return
    with _last_traced_lock:
        _last_traced[key] = definition.number
        _last_traced.move_to_end(key)
        if len(_last_traced) > _MAX_DEFINITIONS:
            _last_traced.popitem(last=False)


def _defined_again(definition: Definition | None, place: Place) -> tuple[Difference, ...]:
    if definition is None:
        return ()
    key = definition.key()
    with _last_traced_lock:
        if _last_traced.get(key, definition.number) == definition.number:
            return ()
    what = f"another function made of the same code ({place.site}) was traced before"
    remedy = "Define and wrap it once, outside of loops and of the functions that call it"
    return (Difference(FUNCTION, "", "", what, remedy if place.is_users else ""),)
