"""Serves calls of jitted functions by eqxjit and by Equinox: compares some, times blocks."""

import contextlib
import copy
import dataclasses
import functools
import gc
import io
import random
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np

from .._compat import UpstreamWrapper, connect, is_transforming, native, upstream_filter_jit
from .._core.wrapper import JitFunction
from .._diagnostics.events import listeners
from .._diagnostics.record import TRACING, TraceRecord
from .._diagnostics.trace import Trace
from .._places import CallSite, captured, code_of, innermost_line, place_of, trim, wrapped_by
from .._spec.static_key import CONSTANTS
from .._spec.tree import combine, split
from .comparison import Unequal, compare, compare_errors
from .sampler import Clock, Sampler

# Taken and hidden before `install` replaces them.
_upstream_filter_jit = functools.partial(upstream_filter_jit)
_upstream_call: Any = vars(UpstreamWrapper or object).get("__call__")

# How many calls of each structure are compared first; after that, one call in so many.
_N_FIRST, _ONE_IN = 3, 50

# A block ends after so many calls or seconds. The first calls of a function in a block run with
# cold caches. A function with so many times of each kind is timed no more.
_BLOCK_CALLS, _BLOCK_SECONDS, _N_COLD, _N_TIMES = 24, 0.1, 3, 400

# Lines are sampled in other phases than blocks are timed in, four times as long. These take so many
# seconds, at first and at most.
_PHASE, _LONGEST_PHASE = 0.05, 0.4

# The part of the run that the trial's own work may take; a short run may take some seconds more.
_BUDGET, _AT_ONCE = 0.25, 0.1

#: Who serves the calls of a block. In an awaited one each call waits for its results.
OURS, AWAITED, THEIRS = "ours", "awaited", "theirs"
_TURNS = THEIRS, OURS, THEIRS, OURS, AWAITED, OURS

_STATEFUL = np.random.Generator, np.random.RandomState, random.Random, io.IOBase


def _deques() -> dict[str, deque[float]]:
    return {mode: deque(maxlen=2_000) for mode in _TURNS}


@dataclasses.dataclass(eq=False)
class Tried:
    """What the trial knows of one function.

    - `effects`: why at most one call is compared, or none if it `is_excluded`; empty without a
        reason.
    - `compared`: how many calls were compared; `by_structure`: those of each spec, of which
        `statics` has the static objects of the first.
    - `unequal`: the first parts that differed, by their paths.
    - `known`: how calls differ that differ as documented; empty if none does.
    - `traces`: those that eqxjit has made in calls during the trial.
    - `times`, `cold`: the seconds of warm calls, in the middle and at the beginning of a block, by
        who served them; `periods`: the seconds from one call to the next call of any function.
    - `n_elsewhere`: how many warm calls were not served as usual.
    - `n_due`: how many of the next calls are looked at, because there may be a new structure.
    """

    name: str
    site: CallSite | None
    donates: bool
    effects: str = ""
    is_excluded: bool = False
    calls: int = 0
    compared: int = 0
    by_structure: Counter[Any] = dataclasses.field(default_factory=Counter)
    statics: dict[Any, list[Any]] = dataclasses.field(default_factory=dict)
    unequal: dict[str, Unequal] = dataclasses.field(default_factory=dict)
    known: str = ""
    traces: list[Trace] = dataclasses.field(default_factory=list)
    times: dict[str, deque[float]] = dataclasses.field(default_factory=_deques)
    cold: dict[str, deque[float]] = dataclasses.field(default_factory=_deques)
    periods: dict[str, deque[float]] = dataclasses.field(default_factory=_deques)
    n_elsewhere: int = 0
    n_due: int = _N_FIRST
    block: int = 0
    n_in_block: int = 0

    @property
    def is_wrong(self) -> bool:
        return any(each.rounding is None for each in self.unequal.values())

    def can_be(self, mode: str) -> bool:
        """Return whether Equinox may serve calls, and whether more of them should be timed."""
        if not self.compared or self.known or self.is_wrong:
            return False
        return len(self.times[mode]) < _N_TIMES

    @property
    def is_timed(self) -> bool:
        """Whether there are enough times. Later ones, of a busier machine, would mislead."""
        return len(self.times[THEIRS]) >= _N_TIMES


class _Thread(threading.local):
    is_inside = is_copying = False
    # Since the latest call began: whether JAX compiled something, and the traces of eqxjit.
    has_compiled = False
    traces: tuple[Trace, ...] = ()


class Interceptor:
    """Called in the place of a wrapper while a trial is on; `ours` is a copy of the wrapper."""

    __slots__ = "n_quick", "ours", "swap", "theirs", "tried"

    def __init__(self, swap: "Swap", ours: Any):
        self.swap, self.ours = swap, ours
        self.theirs: Any = None
        self.tried: Any = None
        #: How many of the next calls are timed, and no more.
        self.n_quick = 0

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        now = time.perf_counter()
        swap = self.swap
        thread = swap.thread
        # A call that is traced is part of another program; one in a callback, of another call.
        if thread.is_inside or is_transforming():
            return self.ours(*args, **kwargs)
        thread.is_inside = True
        try:
            if not self.n_quick or threading.get_ident() != swap.main:
                return swap.call(self, args, kwargs, now)
            # As `Swap.call`, for most calls of a loop: what it takes itself would show in shares.
            self.n_quick -= 1
            clock = swap.clock
            clock.hold(now)
            clock.is_calling = True
            thread.has_compiled = False
            start = time.perf_counter()
            try:
                result = self.ours(*args, **kwargs)
            finally:
                end = time.perf_counter()
                clock.is_calling = False
                swap.add_quick(self, start, end)
                finish = time.perf_counter()
                clock.release(finish)
                # What this takes counts as the call: in a program that does something for a fixed
                # time it takes the place of calls.
                swap.calling += finish - end + start - now
            if thread.has_compiled:
                swap.compare_new(self, args, kwargs, result, time.perf_counter())
            return result
        except BaseException:
            trim()
            raise
        finally:
            thread.is_inside = False


class Swap:
    """Intercepts the calls of all jitted functions in the process while it is `running`.

    - `tried`: what is known of each function, by its table of entries.
    - `startup`: seconds until the first warm call, and of first calls later.
    - `calling`, `compiling`: seconds of warm calls, and of later traces, since the first warm call.
    - `spent`: what the trial has taken so far, compilations of Equinox's included, in seconds.
    """

    def __init__(self, compares: bool):
        self.compares = compares
        self.tried: dict[Any, Tried] = {}
        self.thread = _Thread()
        self.clock = Clock()
        self.main = threading.get_ident()
        self.sampler = Sampler(self.main, self.clock, Interceptor.__call__.__code__)
        self.begun = self.ended = time.perf_counter()
        self.is_steady = False
        self.startup = self.calling = self.compiling = self.spent = 0.0
        self._free_before = self.begun
        # Without compilations of Equinox's.
        self._used = 0.0
        self._is_mixed, self._phase, self._phase_ends = False, _PHASE, 0.0
        self._block, self._n_in_block, self._block_begun = 0, 0, self.begun
        #: The latest call: whose it was, how it was served, when it began, what the trial took.
        self._last: tuple[Tried, str, float, float] | None = None
        self._seen: set[Any] = set()
        self._intercepted: dict[int, weakref.ref[Any]] = {}

    # --- Interception -------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        make = JitFunction.__init__

        def init(wrapper: Any, function: Any, arrays: Any) -> None:
            make(wrapper, function, arrays)
            if not self.thread.is_copying:
                self._intercept(wrapper)

        if gc.get_freeze_count():
            # Frozen objects aren't listed.
            gc.unfreeze()
        for wrapper in [each for each in gc.get_objects() if isinstance(each, JitFunction)]:
            if hasattr(wrapper, "_handler"):
                # It isn't being unpickled at this moment.
                self._intercept(wrapper)
        JitFunction.__init__ = init  # type: ignore[method-assign]
        listeners.append(self._observe)
        self.begun = self._block_begun = self._free_before = time.perf_counter()
        self.sampler.start()
        try:
            yield
        finally:
            self.ended = time.perf_counter()
            self._end_period(self.ended)
            self.sampler.stop()
            listeners.remove(self._observe)
            JitFunction.__init__ = make
            for wrapper in [ref() for ref in [*self._intercepted.values()]]:
                if wrapper is not None:
                    _set_interceptor(wrapper, None)

    def _intercept(self, wrapper: Any) -> None:
        self.thread.is_copying = True
        try:
            # It shares all that is compiled with the wrapper.
            ours = copy.copy(wrapper)
        finally:
            self.thread.is_copying = False
        _set_interceptor(wrapper, Interceptor(self, ours))
        # Not a `WeakSet`, because the hash of a wrapper is that of its arrays.
        key, intercepted = id(wrapper), self._intercepted
        intercepted[key] = weakref.ref(wrapper, lambda _: intercepted.pop(key, None))

    def free(self) -> float:
        """Return the seconds outside of jitted calls, since the first warm call if there is one."""
        return self.clock.free(self.ended) - self._free_before

    # --- A call -------------------------------------------------------------------------------

    def call(self, to: Interceptor, args: Any, kwargs: Any, now: float) -> Any:
        __tracebackhide__ = True
        tried = to.tried = self._tried(to.ours)
        is_main = threading.get_ident() == self.main
        mode = OURS
        if is_main:
            self.clock.hold(now)
            self._end_period(now)
            mode = self._mode_of(tried, now)
        seconds, self.thread.traces = 0.0, ()
        try:
            tried.calls += 1
            parts, is_compared = self._look(tried, mode, args, kwargs, now)
            if is_compared or (mode is THEIRS and parts is None):
                mode = OURS
            # Before the call, which may donate them.
            given = _copied(parts[1], tried.donates) if parts and is_compared else []
            served = self._upstream(to) if mode is THEIRS else to.ours
            prints = _Prints(is_compared)
            with prints:
                start, result, error, end = self._timed(served, args, kwargs, mode)
            seconds = end - start
            self._account(tried, mode, start, end, is_main)
            if prints.n_printed:
                tried.effects = tried.effects or "it prints"
            if is_compared:
                self._compare(to, tried, parts, given, result, error)
        finally:
            own = self._end(now, seconds, is_main)
            if is_main and self._is_mixed:
                self._last = tried, mode, now, own
        if self.thread.traces and not is_compared and error is None:
            self.compare_new(to, args, kwargs, result, time.perf_counter())
        if is_main and self.is_steady and not self._is_mixed:
            is_quick = seconds < 1e-3 and (tried.n_due <= 0 or not self.compares)
            # Those that donate can't be compared after the call.
            is_safe = not tried.donates or not self.compares
            most = _ONE_IN if is_safe else 8 if tried.calls > 100 else 0
            to.n_quick = random.randrange(most) if is_quick and most else 0
        try:
            if error is not None:
                raise error
            return result
        finally:
            # Its traceback has this frame.
            del error

    def add_quick(self, to: Interceptor, start: float, end: float) -> None:
        tried = to.tried
        tried.calls += 1
        if self.thread.has_compiled:
            to.n_quick = 0
            self._account(tried, OURS, start, end, True)
        else:
            self.calling += end - start
            tried.cold[OURS].append(end - start)

    def compare_new(self, to: Interceptor, args: Any, kwargs: Any, result: Any, now: float) -> None:
        """Compare a call that has traced for a new structure; if it donates, the next ones."""
        to.tried.n_due, is_main = _N_FIRST, threading.get_ident() == self.main
        if not self.thread.traces or to.tried.donates:
            return
        if is_main:
            self.clock.hold(now)
        parts, is_compared = self._look(to.tried, OURS, args, kwargs, now)
        if is_compared:
            # Its arguments are still there.
            given = _copied(parts[1], False)
            self._compare(to, to.tried, parts, given, result, None)
        self._end(now, 0.0, is_main)
        self._last = None if is_main else self._last

    def _end(self, now: float, seconds: float, is_main: bool) -> float:
        """Return what the trial took since then, beside a call that took some seconds."""
        finish = time.perf_counter()
        own = finish - now - seconds
        self.spent += own
        self._used += own
        if is_main:
            if self._is_mixed:
                self.clock.rest(self._phase_ends)
            else:
                self.clock.release(finish)
        return own

    def _timed(
        self, served: Any, args: Any, kwargs: Any, mode: str
    ) -> tuple[float, Any, Any, float]:
        thread, clock, error, result = self.thread, self.clock, None, None
        thread.has_compiled, thread.traces = False, ()
        clock.is_calling = mode is OURS
        start = time.perf_counter()
        try:
            result = served(*args, **kwargs)
            if mode is AWAITED:
                jax.block_until_ready(result)
        except Exception as raised:
            error = raised
        finally:
            end = time.perf_counter()
            clock.is_calling = False
        return start, result, error, end

    def _account(self, tried: Tried, mode: str, start: float, end: float, is_main: bool) -> bool:
        """Note how long a call took; return whether eqxjit has traced in it."""
        seconds, traces = end - start, self.thread.traces
        if self.thread.has_compiled:
            if mode is THEIRS:
                pass
            elif is_main and traces and not tried.traces:
                self.startup += seconds
            elif is_main:
                self.compiling += seconds
            tried.traces += traces
            if any(trace.program and trace.program.calls_python for trace in traces):
                tried.effects = tried.effects or "it calls Python"
            return bool(traces)
        if is_main and not self.is_steady:
            self.is_steady, self.calling, self.compiling = True, 0.0, 0.0
            self.startup = start - self.begun - self.spent
            self._free_before = self.clock.free(start)
            self._phase_ends = start + _PHASE / 4
            self.sampler.restart()
        is_warm = self._is_mixed and tried.n_in_block > _N_COLD and not tried.is_timed
        (tried.times if is_warm else tried.cold)[mode].append(seconds)
        if mode is THEIRS:
            typical = tried.times[OURS] or tried.cold[OURS] or [seconds]
            self._used += max(0.0, seconds - typical[-1])
        if is_main and self._is_mixed:
            tried.n_elsewhere += 1
        elif is_main:
            self.calling += seconds
        return False

    def _tried(self, ours: Any) -> Tried:
        function = ours._function
        if function.table not in self.tried:
            fun = ours.__wrapped__
            place = place_of(fun)
            tried = Tried(function.signature.label, place.site, function.options.donate != "none")
            if type(ours) is not JitFunction:
                tried.effects, tried.is_excluded = "Equinox has none like it", True
            *_, below = wrapped_by(fun)
            code = code_of(below)
            if code is not None:
                names = {
                    name: getattr(below, "__globals__", {}).get(name) for name in code.co_names
                }
                captures = captured(below) if hasattr(below, "__closure__") else []
                _has_state(tried, [*names.values(), *[value for _, value in captures]])
            self.tried[function.table] = tried
        return self.tried[function.table]

    # --- Blocks -------------------------------------------------------------------------------

    def _mode_of(self, tried: Tried, now: float) -> str:
        if not (self.is_steady and self.compares):
            return OURS
        if now >= self._phase_ends:
            self._next_phase(now)
        if not self._is_mixed:
            return OURS
        seconds = now - self._block_begun
        is_long = seconds > _BLOCK_SECONDS and self._n_in_block > 2 * _N_COLD
        if self._n_in_block >= _BLOCK_CALLS or is_long:
            self._n_in_block, self._block_begun = 0, now
            self._block += 1
        self._n_in_block += 1
        if tried.block != self._block:
            tried.block, tried.n_in_block = self._block, 0
        tried.n_in_block += 1
        mode = _TURNS[self._block % len(_TURNS)]
        return mode if tried.can_be(mode) and self._may_use(now) else OURS

    def _next_phase(self, now: float) -> None:
        """Begin a phase in which blocks are timed, or one in which lines are sampled."""
        if self._is_mixed:
            self._is_mixed, self._phase_ends = False, now + 4 * self._phase
            self._phase = min(2 * self._phase, _LONGEST_PHASE)
        elif self._may_use(now) and any(t.can_be(THEIRS) for t in self.tried.values()):
            self._is_mixed, self._phase_ends = True, now + self._phase
            self._n_in_block = _BLOCK_CALLS

    def _end_period(self, now: float) -> None:
        if self._last is not None:
            tried, mode, begun, own = self._last
            self._last = None
            if tried.n_in_block > _N_COLD and not tried.is_timed:
                tried.periods[mode].append(now - begun - own)

    def _may_use(self, now: float, seconds: float = 0.0) -> bool:
        return self._used + seconds <= _AT_ONCE + _BUDGET * (now - self.begun)

    # --- Comparison ---------------------------------------------------------------------------

    def _look(
        self, tried: Tried, mode: str, args: Any, kwargs: Any, now: float
    ) -> tuple[Any, bool]:
        """Return a call's parts, None unless they are needed; and whether the call is compared."""
        is_due = tried.n_due > 0 or self.thread.traces
        is_done = tried.effects and tried.compared
        if not self.compares or tried.is_excluded or (is_done and mode is not THEIRS):
            return None, False
        is_random = random.random() < 1 / _ONE_IN
        can = self._may_use(now, 1e-4)
        if mode is not THEIRS and not is_due and not (can and (is_random or tried.donates)):
            return None, False
        try:
            parts = split((args, kwargs))
        except Exception:
            # The call raises a better error.
            return None, False
        if _has_state(tried, parts[2]):
            return None, False
        tried.n_due -= 1
        spec, _, statics = parts
        n, known = tried.by_structure[spec], tried.statics.get(spec)
        is_known = known is not None and all(
            a is b or type(a) in CONSTANTS for a, b in zip(statics, known, strict=True)
        )
        if is_done:
            return (parts if is_known else None), False
        if not n:
            return parts, True
        # Equinox might return the other object, or what it has traced for it.
        n_wanted = _N_FIRST if is_known else 2 * _N_FIRST
        is_wanted = n < n_wanted or (is_random and mode is OURS)
        if is_wanted and self._may_use(now, max(tried.times[OURS], default=0.0)):
            return parts, True
        return (parts if is_known else None), False

    def _upstream(self, to: Interceptor) -> Any:
        to.theirs = to.theirs or _upstream(to.ours.__wrapped__, to.ours._function.options)
        return to.theirs

    def _compare(
        self, to: Interceptor, tried: Tried, parts: Any, given: Any, result: Any, error: Any
    ) -> None:
        spec, _, statics = parts
        tried.compared += 1
        tried.by_structure[spec] += 1
        tried.statics.setdefault(spec, statics)

        def run(served: Any) -> tuple[Any, Any]:
            args, kwargs = combine(spec, iter(_copied(given, tried.donates)), iter(statics))
            with _Prints(True, drops=True):
                start, *outcome, end = self._timed(served, args, kwargs, THEIRS)
            if self.thread.has_compiled:
                self._used -= end - start
            return tuple(outcome)

        theirs = run(self._upstream(to))
        found = _differences((result, error), theirs)
        if any(each.rounding is None for each in found):
            # Equinox once more, as if it had traced nothing so far: a new function each time.
            options, fun = to.ours._function.options, to.ours.__wrapped__
            anew = run(_upstream(eqx.Partial(lambda f, *a, **k: f(*a, **k), fun), options))
            if not _differences((result, error), anew):
                tried.known = (
                    f"{found[0]}: Equinox returns what it traced for an equal static value"
                )
                return
            if _differences(theirs, anew):
                tried.effects = tried.known = "its results differ from trace to trace"
                return
        for each in found[:10]:
            tried.unequal.setdefault(each.path, each)

    # --- What JAX compiles outside of jitted functions ----------------------------------------

    def _observe(
        self, name: str, phase: str, seconds: float, _: bool, trace: TraceRecord | None
    ) -> None:
        if self.thread.is_inside:
            self.thread.has_compiled = True
            if trace is not None and phase == TRACING:
                self.thread.traces += (Trace(trace),)
        elif threading.get_ident() == self.main:
            line = innermost_line(sys._getframe(1))
            moved = self.sampler.compiled(time.perf_counter() - seconds, line)
            if line is not None and (name, phase, line) not in self._seen:
                self._seen.add((name, phase, line))
                self.sampler.drop(line, moved)
                self.startup += moved
                self._free_before += moved


def _set_interceptor(wrapper: Any, interceptor: Interceptor | None) -> None:
    """Have calls of a wrapper go to an interceptor; None ends that."""
    if native is not None:
        native.intercept(wrapper, interceptor)
        return
    handler = wrapper._handler
    if interceptor is None:
        handler.unlink()
    else:
        # Or a new fast path would put the slow path in the interceptor's place.
        handler.table.linked.discard(weakref.ref(handler))
        connect(wrapper, interceptor)


def _upstream(fun: Any, options: Any) -> Any:
    wrapper = _upstream_filter_jit(fun, donate=options.donate, **dict(options.jit_arguments))
    return wrapper if _upstream_call is None else functools.partial(_upstream_call, wrapper)


def _copied(arrays: list[Any], donates: bool) -> list[Any]:
    """Return copies of the arrays that a call may delete, or their owner overwrite."""
    return [each.copy() if donates or not isinstance(each, jax.Array) else each for each in arrays]


def _differences(ours: tuple[Any, Any], theirs: tuple[Any, Any]) -> list[Unequal]:
    (result, error), (other, other_error) = ours, theirs
    if error is not None or other_error is not None:
        return [*compare_errors(error, other_error)]
    return [*compare(result, other)]


def _has_state(tried: Tried, values: list[Any]) -> bool:
    """Exclude a function that reads what changes with each use: two runs see different values."""
    for each in values:
        if isinstance(each, _STATEFUL) or hasattr(type(each), "__next__"):
            tried.effects, tried.is_excluded = f"it reads a `{type(each).__name__}`", True
    return tried.is_excluded


class _Prints:
    """Counts what this thread prints; what the comparison prints once more is dropped."""

    def __init__(self, is_on: bool, drops: bool = False):
        self._is_on, self._drops, self._thread = is_on, drops, threading.get_ident()
        self.n_printed = 0
        self._stream: Any = None

    def __enter__(self) -> None:
        if self._is_on:
            self._stream, sys.stdout = sys.stdout, self  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        if self._is_on and sys.stdout is self:
            sys.stdout = self._stream

    def write(self, text: str) -> int:
        is_mine = threading.get_ident() == self._thread
        self.n_printed += is_mine
        return len(text) if is_mine and self._drops else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
