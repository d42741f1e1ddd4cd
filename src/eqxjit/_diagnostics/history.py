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
from .._lock import Lock, alive
from .._plan.check import first_mismatch
from .._runtime.entry import CacheEntry
from .._runtime.events import LOWERING, TRACING, observers
from .._runtime.hooks import TraceHook
from .._runtime.request import Call
from .._runtime.staging import currently_jitting
from .._trees.partition import StaticTree, has_tracers
from .description import (
    UNKNOWN,
    AnyTemplate,
    Deferred,
    Description,
    made,
    template_of,
)
from .differences import (
    CACHE,
    FUNCTION,
    OF_ARRAYS,
    TRANSFORMATION,
    UNKNOWN_REASON,
    Difference,
    configuration_differences,
    distance,
)
from .iterators import log_iterators
from .jaxpr_size import measure
from .log import log
from .outline import outline
from .storms import Streak, streak_of
from .trace import Trace

# How many traces of a function are remembered, and with how many of them a new one is compared.
_MAX_REMEMBERED = 256
_MAX_COMPARED = 64

# How many parts of descriptions are remembered, a few dozen megabytes: large trees differ in many.
_MAX_PARTS = 200_000

# Of how many static structures a description is kept, for calls that differ in their arrays alone.
_MAX_TEMPLATES = 8

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
            try:
                # Decorators have one code for all that they decorate.
                fun: Any = inspect.unwrap(self._fun())  # type: ignore[arg-type]
                code = fun.__code__
                captured = [cell.cell_contents for cell in fun.__closure__ or ()]
                where = (code.co_filename, code.co_firstlineno, code.co_qualname)
                # Two lambdas on one line may differ in a constant alone.
                self._key = (*where, hash(code), *outline(captured))
            except Exception:
                self._key = ()
        return self._key


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
        self._begun: weakref.WeakSet[Trace] = weakref.WeakSet()
        #: The entries that they were made for.
        self._entries: weakref.WeakKeyDictionary[Trace, weakref.ref[CacheEntry]] = (
            weakref.WeakKeyDictionary()
        )
        #: What describes the calls of an entry, of the latest few; and the function's static half
        #: that is described with it.
        self._templates: weakref.WeakKeyDictionary[
            CacheEntry, tuple[AnyTemplate, weakref.ref[StaticTree] | None]
        ] = weakref.WeakKeyDictionary()
        #: The entries that were described last.
        self._described: collections.deque[weakref.ref[CacheEntry]] = collections.deque()
        self._remembered: collections.deque[Trace] = collections.deque(maxlen=_MAX_REMEMBERED)
        #: How many of the remembered traces are from before the last `clear_cache`.
        self._n_cleared = 0
        self._streak = Streak(place)

    @property
    def traces(self) -> list[Trace]:
        """Those since the cache was last cleared, the oldest first; the latest 256 of them."""
        with self._lock:
            return list(self._remembered)[self._n_cleared :]

    def describe(self, request: Call) -> Description:
        """Describe what a call is made with, function included."""
        return made(self._describe(request))

    def _describe(self, request: Call) -> Description | Deferred:
        if request.description is not None:
            return request.description
        fun = request.fun if request.fun_varies else None
        arrays = [*request.leaves, *request.fun_leaves] if fun is not None else request.leaves
        fun_ref = None if fun is None else weakref.ref(fun)
        template, known_ref = self._templates.get(request.entry, (None, None))
        if template is None or known_ref != fun_ref:
            template = template_of(request.signature, fun, request.arguments)
            self._keep_template(request.entry, template, fun_ref)
        return template.describe(arrays)

    def _keep_template(
        self, entry: CacheEntry, template: AnyTemplate, fun_ref: weakref.ref[StaticTree] | None
    ) -> None:
        with self._lock:
            self._templates[entry] = template, fun_ref
            self._described.append(weakref.ref(entry))
            if len(self._described) > _MAX_TEMPLATES:
                oldest = self._described.popleft()()
                if oldest is not None and oldest is not entry:
                    self._templates.pop(oldest, None)

    def begin(self, request: Call, number: int, is_recompilation: bool) -> Trace:
        """Explain a trace that is about to be made, or a recompilation."""
        trace = Trace(
            self.name,
            self._describe(request),
            trace_configuration(),
            call_site(),
            number,
            is_recompilation=is_recompilation,
            is_transformed=has_tracers(request.leaves),
            is_ahead_of_time=request.is_staged and not is_recompilation,
            invalidation_reasons=request.entry.invalidation_reasons,
        )
        with self._lock:
            earlier = self._explain(trace)
            self._entries[trace] = weakref.ref(request.entry)
            self._begun.add(trace)
        if earlier is not None and _cause(trace) in (UNKNOWN_REASON, CACHE):
            # Not with the lock: it compares the user's objects.
            path = _first_mismatch(self._entries[earlier](), request)
            if path is not None:
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

    def complete(self, record: Trace, request: Call | None) -> None:
        """Measure a trace, and notify observers and the log."""
        if request is not None:
            measure(record, request)
        for observer in alive(observers):
            observer.traced(record)
        log(record)
        # What is prepared ahead of time, or is a part of an outer program, is traced on purpose.
        if not record.is_ahead_of_time and not currently_jitting():
            self._add_to_streak(record)
        if request is not None:
            log_iterators(record, self.place, request.arguments, request.fun)

    def _forget_descriptions(self) -> None:
        n_parts = 0
        for trace in reversed(self._remembered):
            n_parts += trace.n_parts
            if n_parts > _MAX_PARTS and trace is not self._remembered[-1]:
                # What finds the differences holds the description.
                _ = trace.differences
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
        of_user = self.place.is_users
        if trace.n_arrays_unlike(earlier):
            trace.differences = trace.comparison(earlier, of_user)
        else:
            trace.description = trace.description.sharing(earlier.description)
            found = trace.comparison(earlier, of_user)()
            trace.differences = found or (_why_it_does_not_serve(earlier, trace),)
        is_earlier_cleared = earlier in list(self._remembered)[: self._n_cleared]
        trace.compared_with = None if is_earlier_cleared else earlier.number
        return earlier

    def _closest(self, trace: Trace) -> Trace | None:
        def how_far(earlier: Trace) -> int:
            n_arrays = trace.n_arrays_unlike(earlier)
            far = n_arrays or distance(earlier.description, trace.description)
            return far + len(configuration_differences(earlier.configuration, trace.configuration))

        # Of those that are as close, the latest: one that isn't complete yet, in a recursion.
        begun = sorted(alive(self._begun), key=lambda earlier: earlier.number)
        latest = [*self._remembered, *begun][: -_MAX_COMPARED - 1 : -1]
        return min(latest, key=how_far, default=None)

    def _add_to_streak(self, trace: Trace) -> None:
        """Count a trace among those in a row, which are logged once they are many."""
        if _cause(trace) in (None, FUNCTION):
            streak_of(self.place).add_function(trace)
        else:
            self._streak.add(trace)


def _cause(trace: Trace) -> str | None:
    """Return the category of the first difference: of arrays, if it is still to be found."""
    if not trace.is_explained:
        return OF_ARRAYS[0]
    return next((difference.category for difference in trace.differences), None)


def _first_mismatch(entry: CacheEntry | None, request: Call) -> str | None:
    """Return the path of the first guard of an entry's specialised call that fails."""
    call = entry and (entry.specialized or entry.second_chance)
    if not call or entry is request.entry:
        return None
    try:
        args, kwargs = request.arguments.combine(request.leaves)
        return first_mismatch(call.plan(), args, kwargs)
    except Exception:
        # Say, a node of the user's that can't be made anew.
        return None


def _why_it_does_not_serve(earlier: Trace, trace: Trace) -> Difference:
    """Why a trace doesn't serve a call that looks just like its own."""
    if trace.is_recompilation and trace.is_transformed:
        return Difference(TRANSFORMATION, "", "", "`jax.grad`, `jax.vmap` or the like was applied")
    if earlier.invalidation_reasons:
        why = earlier.invalidation_reasons[-1]
    elif earlier.invalidation_reasons is not trace.invalidation_reasons:
        why = (
            "a static object of that trace's was changed in place, or differs in what neither its "
            "text nor its hash shows"
        )
    else:
        why = "JAX's own caches no longer hold it (`jax.clear_caches()`)"
        if trace.is_recompilation:
            why += ", or it was compiled with other options (`f.lower(...).compile(...)`)"
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
