"""The traces of one function: counts, limits and explains them, and warns of storms."""

import collections
import os
import threading
import types
import warnings
from collections.abc import Hashable
from typing import NamedTuple

from ._description import UNKNOWN
from ._differences import (
    CACHE,
    FUNCTION,
    STATIC_VALUE,
    UNKNOWN_REASON,
    Difference,
    configuration_differences,
    differences,
    distance,
)
from ._trace import Trace

# How many traces of a function are remembered, and with how many of them a new one is compared.
_MAX_REMEMBERED = 256
_MAX_COMPARED = 64

# How many parts of descriptions are remembered, a few dozen megabytes: large trees differ in many.
_MAX_PARTS = 200_000

# After so many traces in a row that one static value alone was the reason for, a warning.
_STORM = 10

# How many definitions of functions are remembered, so that a function made anew is recognised.
_MAX_DEFINITIONS = 256


class TooManyTracesError(RuntimeError):
    """A function was to be traced more often than its `max_traces` allows."""


class RetraceWarning(UserWarning):
    """A function is traced again and again, for the sake of one static value."""


class Definition(NamedTuple):
    """Where a Python function is defined.

    - `place`: the file and the line.
    - `code`: equal for all functions made of this code.
    - `number`: tells this function from the others.
    """

    place: str
    code: Hashable
    number: int


def definition_of(fun: types.FunctionType, number: int) -> Definition:
    """Where a function is defined; `number` tells it from others of its code."""
    code = fun.__code__
    place = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"
    return Definition(
        place, (code.co_filename, code.co_firstlineno, code.co_qualname, hash(code.co_code)), number
    )


class History:
    """The traces of one function under one set of options.

    - `name`: what to call the function.
    - `definition`: where it is defined; `None` where no Python function is below it.
    - `max_traces`: how many traces there may be; `None` for any number.
    """

    def __init__(self, name: str, definition: Definition | None, max_traces: int | None):
        self.name = name
        self.max_traces = max_traces
        self.n_traces = 0
        self.n_recompilations = 0
        self._definition = definition
        self._lock = threading.RLock()
        self._n_begun = 0
        self._remembered: collections.deque[Trace] = collections.deque(maxlen=_MAX_REMEMBERED)
        #: How many of the remembered traces are from before the last `clear_cache`.
        self._n_cleared = 0
        self._storm: tuple[str, int] = ("", 0)
        self._has_warned = False

    @property
    def traces(self) -> list[Trace]:
        """Those since the cache was last cleared, the oldest first; the latest 256 of them."""
        with self._lock:
            return list(self._remembered)[self._n_cleared :]

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
            n_before = self.n_traces + self.n_recompilations + self._n_begun
            trace.number = n_before + 1
            self._explain(trace)
            if self.max_traces is not None and n_before >= self.max_traces:
                raise TooManyTracesError(
                    f"`{self.name}` may be traced {_times(self.max_traces)} "
                    f"(`max_traces={self.max_traces}`), and the call at {trace.call_site} would be "
                    f"trace {trace.number}.\n{trace.explanation()}"
                )
            self._n_begun += 1

    def end(self, trace: Trace, is_made: bool) -> None:
        """Counts a trace that was begun, if it came to its end."""
        with self._lock:
            self._n_begun -= 1
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
            self._n_cleared = len(self._remembered)

    def _explain(self, trace: Trace) -> None:
        """Fills in how a trace differs from the closest of those before."""
        earlier = self._closest(trace)
        if earlier is None:
            trace.differences = _defined_again(self._definition)
            return
        trace.description = trace.description.sharing(earlier.description)
        if trace.configuration == earlier.configuration:
            trace.configuration = earlier.configuration
        found = [
            *differences(earlier.description, trace.description),
            *configuration_differences(earlier.configuration, trace.configuration),
        ]
        if not found and UNKNOWN not in (earlier.description, trace.description):
            found = [Difference(CACHE, "", "", _why_forgotten(earlier, trace))]
        trace.differences = tuple(
            found or [Difference(UNKNOWN_REASON, "", "", "the arguments can't be described")]
        )
        is_earlier_cleared = earlier in list(self._remembered)[: self._n_cleared]
        trace.compared_with = None if is_earlier_cleared else earlier.number

    def _closest(self, trace: Trace) -> Trace | None:
        def how_far(earlier: Trace) -> int:
            far = distance(earlier.description, trace.description)
            return far + len(configuration_differences(earlier.configuration, trace.configuration))

        # Of those that are as close, the latest.
        latest = list(self._remembered)[: -_MAX_COMPARED - 1 : -1]
        return min(latest, key=how_far, default=None)

    def warn_of_storm(self, trace: Trace) -> None:
        """Warns once, after many traces in a row for the sake of one static value."""
        with self._lock:
            found = trace.differences
            path = found[0].path if [d.category for d in found] == [STATIC_VALUE] else ""
            last_path, n_in_a_row = self._storm
            n_in_a_row = n_in_a_row + 1 if path and path == last_path else bool(path)
            self._storm = path, n_in_a_row
            if self._has_warned or n_in_a_row < _STORM:
                return
            self._has_warned = True
        remedy = f" {found[0].remedy}." if found[0].remedy else ""
        warnings.warn_explicit(
            f"`{self.name}` was traced {n_in_a_row} times in a row because the static value "
            f"`{path}` changed: last from {found[0].old} to {found[0].new}.{remedy}",
            RetraceWarning,
            trace.call_site.filename,
            trace.call_site.line,
        )


def _why_forgotten(earlier: Trace, trace: Trace) -> str:
    """Why a trace doesn't serve a call that is just like its own."""
    if earlier.fate:
        return earlier.fate[-1]
    if earlier.fate is not trace.fate:
        return "a static object of that trace's was changed in place"
    if trace.is_recompilation:
        return (
            "JAX compiled it for a transformation (`jax.grad`, `jax.vmap`), or its own caches no "
            "longer hold it (`jax.clear_caches()`)"
        )
    return "JAX's own caches no longer hold it (`jax.clear_caches()`)"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


# Which function of those defined at one place was traced last.
_last_traced: collections.OrderedDict[Hashable, int] = collections.OrderedDict()
_last_traced_lock = threading.Lock()


def _remember_definition(definition: Definition | None) -> None:
    if definition is None:
        return
    with _last_traced_lock:
        _last_traced[definition.code] = definition.number
        _last_traced.move_to_end(definition.code)
        if len(_last_traced) > _MAX_DEFINITIONS:
            _last_traced.popitem(last=False)


def _defined_again(definition: Definition | None) -> tuple[Difference, ...]:
    if definition is None:
        return ()
    with _last_traced_lock:
        if _last_traced.get(definition.code, definition.number) == definition.number:
            return ()
    what = f"another function made of the same code ({definition.place}) was traced before"
    remedy = "Define and wrap it once, outside of loops and of the functions that call it"
    return (Difference(FUNCTION, "", "", what, remedy),)
