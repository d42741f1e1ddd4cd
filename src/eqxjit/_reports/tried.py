"""Runs calls of a function under Equinox's `filter_jit`, too, and records the differences."""

import dataclasses
import functools
import io
import random
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from .._compat import (
    ArrayImpl,
    UpstreamWrapper,
    calls_users_python,
    changes_something,
    native,
    trace_context,
    upstream_filter_jit,
)
from .._core.slow import bind_and_split
from .._core.wrapper import JitFunction, filter_jit
from .._diagnostics import waiting
from .._diagnostics.trace import Trace
from .._places import CallSite, captured, code_of, place_of, wrapped_by
from .._signals import comes_from_signal_handler, suppressed
from .._spec.static_key import interchangeable
from .._spec.tree import combine, split
from .comparison import Unequal, compare, compare_errors
from .log import AWAITED, OURS, THEIRS

#: How many calls of each kind are compared first.
N_FIRST = 3

# Equinox's own functions. The first is in a `partial`, because `install` replaces the plain
# function wherever a module refers to it.
_upstream_filter_jit = functools.partial(upstream_filter_jit)
_upstream_call: Any = vars(UpstreamWrapper or object).get("__call__")

_AssertMaxTraces: Any = type(eqx.debug.assert_max_traces(abs, max_traces=None))

# A function that uses one of these may compute something different in each call.
_STATEFUL = np.random.Generator, np.random.RandomState, random.Random, io.IOBase


#: The mode of nested calls that Equinox traces again, although it may have traced them before.
ANEW = "anew"


class _Comparison(threading.local):
    """The comparison that runs in a thread.

    - `nested_mode`: tells who serves the jitted functions that the compared function calls:
        `THEIRS`, `ANEW` or `OURS`. Empty while no comparison runs.
    - `n_traces`: how many traces JAX has reported so far. A comparison checks whether it grows.
    """

    nested_mode = ""
    n_traces = 0


comparing = _Comparison()


class Parts(NamedTuple):
    """The arguments of a call: their spec, their arrays, and their static objects.

    `kind` is all that a trace depends on: the spec, and the arrays' shapes, dtypes and weak types.
    """

    spec: Any
    arrays: list[Any]
    statics: list[Any]
    kind: Any

    def arguments(self) -> tuple[Any, Any]:
        """Return the positional and the keyword arguments."""
        return combine(self.spec, iter(self.arrays), iter(self.statics))


class Outcome(NamedTuple):
    """The result of a call, or the error that it raised."""

    result: Any
    error: Exception | None


def _times() -> dict[str, deque[float]]:
    return {mode: deque(maxlen=2_000) for mode in (OURS, AWAITED, THEIRS)}


@dataclasses.dataclass(eq=False)
class Tried:
    """The state of a trial for one function.

    - `name`, `site`: the function's name, and where it is defined.
    - `options`: the options of its `filter_jit`.
    - `effects`: why at most one call is compared; empty if there is no reason.
    - `is_excluded`: whether no call may run under Equinox.
    - `was_traced`: whether eqxjit traced the function before the trial.
    - `calls`: how often the function was called.
    - `n_ours`, `n_short`: how many calls the main thread made after start-up, in long and in short
        blocks.
    - `n_due`: how many of the next calls are examined, because their kind may not have been
        compared often enough. Zero or negative if no call is.
    - `by_kind`: how many calls of each kind were compared.
    - `uncompared`: the kinds of calls that eqxjit traced in a call that wasn't compared.
    - `traced`: the avals and the static objects of calls for which Equinox has traced the function,
        with the same results, by their entries.
    - `unequal`: the first difference found at each path.
    - `known`: a documented difference; empty if there is none.
    - `traces`: eqxjit's traces of the function during the trial.
    - `times`: the seconds of the latest timed calls, by mode.
    - `least`: the seconds of a fast call under eqxjit. A tenth are faster. 0 if none was timed.
    """

    name: str
    site: CallSite | None
    options: Any
    effects: str = ""
    is_excluded: bool = False
    was_traced: bool = False
    calls: int = 0
    n_ours: int = 0
    n_short: int = 0
    n_due: int = N_FIRST
    by_kind: Counter[Any] = dataclasses.field(default_factory=Counter)
    uncompared: set[Any] = dataclasses.field(default_factory=set)
    traced: Any = dataclasses.field(default_factory=weakref.WeakKeyDictionary)
    unequal: dict[str, Unequal] = dataclasses.field(default_factory=dict)
    known: str = ""
    traces: list[Trace] = dataclasses.field(default_factory=list)
    times: dict[str, deque[float]] = dataclasses.field(default_factory=_times)
    least: float = 0.0

    @functools.cached_property
    def row(self) -> Any:
        """The key of the function's row in the table.

        Functions of one definition, such as those that an outer function defines, share a row.
        """
        return (self.name, self.site) if self.site else self

    @property
    def compared(self) -> int:
        """The number of calls that were compared."""
        return self.by_kind.total()

    @property
    def donates(self) -> bool:
        return self.options.donate != "none"

    @property
    def is_wrong(self) -> bool:
        """True if results differ by more than rounding, in a way that isn't documented."""
        return any(each.rounding is None for each in self.unequal.values())

    @property
    def is_comparable(self) -> bool:
        """True if a call may run under Equinox, too."""
        return not (self.is_excluded or (self.effects and self.compared))

    @property
    def is_right(self) -> bool:
        """True if Equinox may serve the calls that it has traced."""
        return bool(self.traced) and not (self.is_excluded or self.known or self.is_wrong)

    def parts_of(self, args: Any, kwargs: Any) -> Parts | None:
        """Return the parts of a call; None if the function is excluded, or if there are none."""
        if self.is_excluded:
            return None
        # If this fails, the call itself raises a better error.
        with suppressed:
            spec, arrays, statics = split((args, kwargs))
            self.exclude_if_stateful(statics)
            return Parts(spec, arrays, statics, (spec, tuple(_avals(arrays))))
        return None

    def exclude(self, why: str) -> None:
        """Run no more calls of the function under Equinox."""
        self.effects, self.is_excluded = why, True

    def exclude_if_stateful(self, values: list[Any]) -> None:
        """Exclude the function if it reads something that changes with each call."""
        for each in values:
            if issubclass(type(each), _STATEFUL) or hasattr(type(each), "__next__"):
                self.exclude(f"it reads a `{type(each).__name__}`")

    def note_effects(self, trace: Trace) -> None:
        """Note what the program of a trace does besides computing."""
        if changes_something(trace._record.jaxpr()):
            self.exclude("each run of it changes something")
        elif calls_users_python(trace._record.lowering()):
            self.effects = self.effects or "it calls Python"

    def has_traced(self, ours: Any, args: Any, kwargs: Any) -> bool:
        """Return whether Equinox may serve a call, because it has traced one that is like it.

        `ours` is the function's wrapper. `Interceptor` tells why this must be fast.
        """
        found = _match(ours, args, kwargs) if self.is_right else None
        if found is None:
            return False
        entry, avals, statics = found
        return any(
            # For static objects that are only equal, Equinox would return those that it has traced.
            avals == known_avals and all(map(_may_replace, statics, known_statics))
            for known_avals, known_statics in self.traced.get(entry, ())
        )

    def copied(self, parts: Parts) -> Parts:
        """Return the parts. Copy arrays that the call may donate, or the program may overwrite."""
        arrays = [
            each.copy() if self.donates or not isinstance(each, jax.Array) else each
            for each in parts.arrays
        ]
        return parts._replace(arrays=arrays)

    def compare(self, wrapper: Any, theirs: Any, parts: Parts, ours: Outcome) -> None:
        """Run a call under Equinox, and keep how its outcome differs from that of eqxjit.

        `theirs` is the same function as `wrapper`, under Equinox's `filter_jit`.
        """
        # A trace may draw random numbers, which are the program's. While other threads run, what
        # they draw meanwhile would be drawn once more.
        states = None
        others = [each for each in threading.enumerate() if each is not waiting.watcher]
        if others == [threading.current_thread()]:
            states = random.getstate(), np.random.get_state()
        try:
            self._compare(wrapper, theirs, parts, ours)
        except Exception as error:
            # The program must not fail because a comparison does, for lack of memory, for example.
            if comes_from_signal_handler(error):
                raise
            self.exclude(f"comparing it raises {type(error).__name__}: {error}")
        finally:
            if states is not None:
                random.setstate(states[0])
                np.random.set_state(states[1])
        # Otherwise, the comparison gave no result.
        if not self.is_excluded:
            self.by_kind[parts.kind] += 1

    def _compare(self, wrapper: Any, theirs: Any, parts: Parts, ours: Outcome) -> None:
        n_traces = comparing.n_traces
        of_equinox = self._run(theirs, parts, THEIRS)
        # If not, Equinox has used a trace of a call with the same key, maybe with an equal value.
        is_traced = comparing.n_traces > n_traces
        found = _differences(ours, of_equinox)
        if any(each.rounding is None for each in found):
            # Equinox may have returned static objects that it has traced for equal ones.
            new = renewed(wrapper.__wrapped__)
            retraced = self._run(upstream(new, self.options), parts, ANEW)
            if not _differences(ours, retraced):
                why = "Equinox returns what it traced for an equal static value"
                self.known = f"{found[0]}: {why}"
                return
            if _differences(of_equinox, retraced):
                self.exclude("its results differ from trace to trace")
                return
            # The function may read something that has changed since eqxjit traced it. Otherwise, a
            # difference isn't excused by a new trace, because a fault of the fast path isn't in it.
            is_older = self.was_traced or parts.kind in self.uncompared
            options = self.options
            ours_anew = filter_jit(new, donate=options.donate, **dict(options.jit_arguments))
            may_differ = is_older or of_equinox.error is not None
            if may_differ and not _differences(self._run(ours_anew, parts, OURS), retraced):
                when = "before the trial" if self.was_traced else "earlier"
                why = f"it was traced {when}, and a new trace gives a different result"
                self.known = f"{found[0]}: {why}"
                return
        elif is_traced and of_equinox.error is None:
            matched = _match(wrapper, *parts.arguments())
            if matched is not None:
                entry, avals, statics = matched
                self.traced.setdefault(entry, []).append((avals, statics))
        for each in found[:10]:
            self.unequal.setdefault(each.path, each)

    def _run(self, served: Any, parts: Parts, nested_mode: str) -> Outcome:
        args, kwargs = self.copied(parts).arguments()
        # Another thread may have a comparison under way.
        muted = sys.stdout if isinstance(sys.stdout, _Muted) else _Muted(sys.stdout)
        sys.stdout, thread = muted, threading.get_ident()
        muted.n_printed[thread] = 0
        comparing.nested_mode = nested_mode
        try:
            return Outcome(served(*args, **kwargs), None)
        except Exception as error:
            if comes_from_signal_handler(error):
                raise
            # The frames of a traceback would keep the arguments alive until garbage collection.
            return Outcome(None, error.with_traceback(None))
        finally:
            comparing.nested_mode = ""
            # It isn't there if a trial within this trial has compared a part of the call.
            if muted.n_printed.pop(thread, 0):
                self.effects = self.effects or "it prints"
            if sys.stdout is muted and not muted.n_printed:
                sys.stdout = muted.stream


def _match(ours: Any, args: Any, kwargs: Any) -> tuple[Any, list[Any], Sequence[Any]] | None:
    """Return the entry of a call, the avals of its arrays after JAX's settings, and its statics.

    The function's own arrays and static objects are among them. `None` if the entry has no fast
    path or, without C, if there is no entry.
    """
    # If this fails, the call itself raises a better error.
    with suppressed:
        function = ours._function
        if native is not None:
            entry, arrays, statics = native.match(ours, *args, **kwargs) or (None, (), ())
        else:
            bound = bind_and_split(function, args, kwargs)
            entry = function.table.entries.get(bound.spec)
            arrays, statics = (*bound.arrays, *ours._handler.fun_arrays), bound.statics
        return entry and (
            entry,
            [trace_context(), *_avals(arrays)],
            (*statics, *function.statics),
        )
    return None


def _avals(arrays: Sequence[Any]) -> list[Any]:
    # `jax.typeof` gives NumPy arrays the avals that JAX traces for them, but it is slower.
    return [x.aval if type(x) is ArrayImpl else jax.typeof(x) for x in arrays]


def tried_of(ours: Any) -> Tried:
    """Return a new `Tried` for the function of one of our wrappers."""
    function, fun = ours._function, ours.__wrapped__
    tried = Tried(function.signature.label, place_of(fun).site, function.options)
    for trace in ours.traces():
        tried.note_effects(trace)
    tried.was_traced = ours.cache_info().traces > 0
    if type(ours) is not JitFunction:
        tried.exclude("Equinox has no counterpart")
    elif jax.process_count() > 1:
        # The other processes may compare a different call, so collectives of different calls would
        # be combined.
        tried.exclude("several processes run it together")
    *_, innermost = wrapped_by(fun)
    code = code_of(innermost)
    if code is not None:
        variables = getattr(innermost, "__globals__", {})
        tried.exclude_if_stateful([variables.get(name) for name in code.co_names])
        if hasattr(innermost, "__closure__"):
            tried.exclude_if_stateful([value for _, value in captured(innermost)])
    return tried


def _may_replace(a: Any, b: Any) -> bool:
    """Return whether one static object may be returned in place of another that equals it."""
    if a is b:
        return True
    if type(a) is type(b) and dataclasses.is_dataclass(a) and hasattr(a, "__dict__"):
        # All attributes count, because the `==` of the class may leave out some.
        a, b = tuple(vars(a).items()), tuple(vars(b).items())
    # For Equinox, each NaN is a different static object.
    return interchangeable(a, b) and bool(a == b)


def renewed(fun: Any) -> Any:
    """Return a new function around the same one, so that JAX and Equinox trace it again."""
    return eqx.Partial(lambda f, *args, **kwargs: f(*args, **kwargs), _uncounted(fun))


def _uncounted(fun: Any) -> Any:
    # The traces of a comparison aren't the program's.
    return fun.__wrapped__ if isinstance(fun, _AssertMaxTraces) else fun


def upstream(fun: Any, options: Any) -> Any:
    """Return a function under Equinox's own `filter_jit`, with the options of ours."""
    wrapper = _upstream_filter_jit(
        _uncounted(fun), donate=options.donate, **dict(options.jit_arguments)
    )
    return wrapper if _upstream_call is None else functools.partial(_upstream_call, wrapper)


def _differences(ours: Outcome, theirs: Outcome) -> list[Unequal]:
    if ours.error is not None or theirs.error is not None:
        return [*compare_errors(ours.error, theirs.error)]
    return [*compare(ours.result, theirs.result)]


class _Muted:
    """Stands for the standard output, and drops what some threads print.

    - `stream`: the standard output.
    - `n_printed`: how many strings were dropped, by the threads whose strings are dropped.
    """

    def __init__(self, stream: Any):
        self.stream = stream
        self.n_printed: dict[int, int] = {}

    def write(self, text: str) -> int:
        thread = threading.get_ident()
        if thread not in self.n_printed:
            return self.stream.write(text)
        self.n_printed[thread] += 1
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
