"""The traces of one function: counts, limits and explains them."""

import collections
import inspect
import itertools
import operator
import sys
import types
import weakref
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any

from ._call_site import CallSite
from ._description import UNKNOWN, Template, made_at
from ._differences import (
    CACHE,
    FUNCTION,
    TRANSFORMATION,
    UNKNOWN_REASON,
    Difference,
    configuration_differences,
    differences,
    distance,
    with_apt_remedies,
)
from ._lock import Lock
from ._outline import outline
from ._partition import StaticHalf
from ._storms import Place, Streak, streak_of
from ._trace import Trace

if TYPE_CHECKING:
    from ._entry import Entry

# How many traces of a function are remembered, and with how many of them a new one is compared.
_MAX_REMEMBERED = 256
_MAX_COMPARED = 64

# How many parts of descriptions are remembered, a few dozen megabytes: large trees differ in many.
_MAX_PARTS = 200_000

# Of how many static structures a description is kept, for calls that differ in their arrays alone.
_MAX_TEMPLATES = 8

# How many definitions of functions are remembered, so that a function made anew is recognised.
_MAX_DEFINITIONS = 256


class TooManyTracesError(RuntimeError):
    """A function was to be traced more often than its `max_traces` allows."""


class Definition:
    """Where a Python function is defined: read when a trace asks, and without its objects.

    - `number`: tells this function from the others.
    """

    __slots__ = ("_fun", "_read", "number")

    def __init__(self, fun: types.FunctionType, number: int):
        self.number = number
        self._fun = weakref.ref(fun)
        self._read: tuple[CallSite | None, Hashable] | None = None

    @property
    def place(self) -> CallSite | None:
        """The file and the line."""
        return self._place_and_code[0]

    @property
    def code(self) -> Hashable:
        """Equal for functions made of one code with the same captured values, as far as these were
        looked at; None where that can't be told.
        """
        return self._place_and_code[1]

    @property
    def _place_and_code(self) -> tuple[CallSite | None, Hashable]:
        if self._read is None:
            try:
                # Decorators have one code for all that they decorate.
                fun: Any = inspect.unwrap(self._fun())  # type: ignore[arg-type]
                code = fun.__code__
                captured = [cell.cell_contents for cell in fun.__closure__ or ()]
                where = (code.co_filename, code.co_firstlineno, code.co_qualname)
                self._read = made_at(fun), (*where, hash(code.co_code), *outline(captured))
            except Exception:
                self._read = None, None
        return self._read


def hit_counter() -> Iterator[None]:
    """Counts a hit for each `next`: in C, hence without a lock, and faster than an addition."""
    return itertools.repeat(None, sys.maxsize)


class History:
    """The traces of one function under one set of options.

    - `name`: what to call the function.
    - `definition`: where it is defined; `None` where no Python function is below it.
    - `max_traces`: how many traces there may be; `None` for any number.
    - `place`: where what is called is defined, a Python function or not.
    """

    def __init__(
        self, name: str, definition: Definition | None, max_traces: int | None, place: Place
    ):
        self.name = name
        self.place = place
        self.n_traces = 0
        self.n_recompilations = 0
        self.hits = hit_counter()
        self._definition = definition
        self._max_traces = max_traces
        #: Why there may be no further trace at all, once that is so.
        self._why_sealed = ""
        self._lock = Lock()
        #: Those under way. An interrupt may keep one from its end, but not alive.
        self._begun: weakref.WeakSet[Trace] = weakref.WeakSet()
        #: The entries that were described last.
        self._described: collections.deque[weakref.ref[Entry]] = collections.deque()
        self._remembered: collections.deque[Trace] = collections.deque(maxlen=_MAX_REMEMBERED)
        #: How many of the remembered traces are from before the last `clear_cache`.
        self._n_cleared = 0
        self._streak = Streak(place)

    @property
    def traces(self) -> list[Trace]:
        """Those since the cache was last cleared, the oldest first; the latest 256 of them."""
        with self._lock:
            return list(self._remembered)[self._n_cleared :]

    @property
    def seconds(self) -> float:
        """How long its traces took."""
        return sum([trace.seconds.total for trace in self.traces])

    @property
    def n_hits(self) -> int:
        """How many calls were served without a trace."""
        return sys.maxsize - operator.length_hint(self.hits)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was traced so far, or begun to be."""
        with self._lock:
            return not self._remembered and not self._begun

    def uncompiled(self, like: Trace) -> Trace | None:
        """A trace like this one that hasn't been compiled for itself yet: it was lowered ahead of
        time, say, or was part of an outer program.
        """
        with self._lock:
            for trace in self._remembered:
                if (
                    not trace.seconds.compiling
                    and trace.fate is like.fate
                    and trace.configuration == like.configuration
                    and not distance(trace.description, like.description)
                ):
                    return trace
        return None

    def begin(self, trace: Trace) -> None:
        """Explains a trace that is about to be made.

        **Raises:**

        - `TooManyTracesError`, if it is one too many. Then nothing is counted.
        """
        with self._lock:
            n_before = self.n_traces + self.n_recompilations + len(self._begun)
            trace.number = n_before + 1
            self._explain(trace)
            limit = self._max_traces
            why_not = self._why_sealed
            if not why_not and limit is not None and n_before >= limit:
                why_not = f"`{self.name}` may be traced {_times(limit)} (`max_traces={limit}`)"
            if why_not:
                raise TooManyTracesError(
                    f"{why_not}, and the call at {trace.call_site} would be trace "
                    f"{trace.number}.\n{trace.explanation()}"
                )
            self._begun.add(trace)

    def end(self, trace: Trace, is_made: bool) -> None:
        """Counts a trace that was begun, if it came to its end."""
        with self._lock:
            self._begun.discard(trace)
            if not is_made:
                return
            if trace.is_recompilation:
                self.n_recompilations += 1
            else:
                self.n_traces += 1
            trace.number = self.n_traces + self.n_recompilations
            if len(self._remembered) == _MAX_REMEMBERED:
                self._n_cleared = max(0, self._n_cleared - 1)
            self._remembered.append(trace)
            self._forget_descriptions()
            _remember_definition(self._definition)

    def keep_template(self, entry: "Entry", fun: StaticHalf | None, template: Template) -> None:
        """Keeps what describes an entry's calls, with the entry: of the latest few."""
        with self._lock:
            entry.template = template, None if fun is None else weakref.ref(fun)
            self._described.append(weakref.ref(entry))
            if len(self._described) > _MAX_TEMPLATES:
                oldest = self._described.popleft()()
                if oldest is not None and oldest is not entry:
                    oldest.template = None

    def _forget_descriptions(self) -> None:
        n_parts = 0
        for trace in reversed(self._remembered):
            n_parts += len(trace.description.parts)
            if n_parts > _MAX_PARTS and trace is not self._remembered[-1]:
                trace.description = UNKNOWN

    def clear(self) -> None:
        """Starts counting anew. The traces so far are still compared with."""
        with self._lock:
            self.n_traces = self.n_recompilations = 0
            self.hits = hit_counter()
            self._n_cleared = len(self._remembered)
        self._streak.restart()

    def seal(self, why: str) -> None:
        """Allows no further trace; `why` begins the error for one."""
        self._why_sealed = why

    def unseal(self) -> None:
        """Allows as many traces as before `seal`."""
        self._why_sealed = ""

    def _explain(self, trace: Trace) -> None:
        """Fills in how a trace differs from the closest of those before."""
        earlier = self._closest(trace)
        if earlier is None:
            trace.differences = _defined_again(self._definition, self.place.is_users)
            return
        trace.description = trace.description.sharing(earlier.description)
        if trace.configuration == earlier.configuration:
            trace.configuration = earlier.configuration
        found = [
            *differences(earlier.description, trace.description, self.place.is_users),
            *configuration_differences(earlier.configuration, trace.configuration),
        ]
        if UNKNOWN in (earlier.description, trace.description):
            why = "the arguments are too large to be compared, or can't be"
            found = [Difference(UNKNOWN_REASON, "", "", why)]
        elif not found:
            found = [_why_it_does_not_serve(earlier, trace)]
        trace.differences = with_apt_remedies(found)
        is_earlier_cleared = earlier in list(self._remembered)[: self._n_cleared]
        trace.compared_with = None if is_earlier_cleared else earlier.number

    def _closest(self, trace: Trace) -> Trace | None:
        def how_far(earlier: Trace) -> int:
            far = distance(earlier.description, trace.description)
            return far + len(configuration_differences(earlier.configuration, trace.configuration))

        # Of those that are as close, the latest: one that isn't complete yet, in a recursion.
        begun = sorted(self._begun, key=lambda earlier: earlier.number)
        latest = [*self._remembered, *begun][: -_MAX_COMPARED - 1 : -1]
        return min(latest, key=how_far, default=None)

    def add_to_streak(self, trace: Trace) -> None:
        """Counts a trace among those in a row, which are logged once they are many."""
        if trace.differences and trace.differences[0].category != FUNCTION:
            self._streak.add(trace)
        else:
            streak_of(self.place).add_function(trace)


def _why_it_does_not_serve(earlier: Trace, trace: Trace) -> Difference:
    """Why a trace doesn't serve a call that looks just like its own."""
    if trace.is_recompilation and trace.is_transformed:
        return Difference(TRANSFORMATION, "", "", "`jax.grad`, `jax.vmap` or the like was applied")
    if earlier.fate:
        why = earlier.fate[-1]
    elif earlier.fate is not trace.fate:
        why = (
            "a static object of that trace's was changed in place, or differs in what neither its "
            "text nor its hash shows"
        )
    else:
        why = "JAX's own caches no longer hold it (`jax.clear_caches()`)"
        if trace.is_recompilation:
            why += ", or it was compiled with other options (`f.lower(...).compile(...)`)"
    return Difference(CACHE, "", "", why)


def _times(count: int | None) -> str:
    return "once" if count == 1 else f"{count} times"


# Which function of those defined at one place was traced last.
_last_traced: collections.OrderedDict[Hashable, int] = collections.OrderedDict()
_last_traced_lock = Lock()


def _remember_definition(definition: Definition | None) -> None:
    code = definition and definition.code
    if definition is None or code is None:
        return
    with _last_traced_lock:
        _last_traced[code] = definition.number
        _last_traced.move_to_end(code)
        if len(_last_traced) > _MAX_DEFINITIONS:
            _last_traced.popitem(last=False)


def _defined_again(definition: Definition | None, is_users: bool) -> tuple[Difference, ...]:
    if definition is None:
        return ()
    with _last_traced_lock:
        if _last_traced.get(definition.code, definition.number) == definition.number:
            return ()
    what = f"another function made of the same code ({definition.place}) was traced before"
    remedy = "Define and wrap it once, outside of loops and of the functions that call it"
    return (Difference(FUNCTION, "", "", what, remedy if is_users else ""),)
