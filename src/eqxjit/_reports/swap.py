"""Serves calls of jitted functions by eqxjit and by Equinox: compares some, and times some.

The program's calls are served by eqxjit, as usual, but for two exceptions:

- A call that is *compared* also runs under Equinox, on copies of its arguments.
- A *block* of consecutive calls is served in one of three ways and timed. A series of blocks, one
  for each way, tells what the swap gives: as they follow each other, they see the same load.

A series or a comparison is followed by a pause, four times as long, in which calls are counted only.
"""

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
from .._places import CallSite, captured, code_of, place_of, trim, wrapped_by
from .._spec.static_key import CONSTANTS
from .._spec.tree import combine, split
from .comparison import Unequal, compare, compare_errors
from .sampler import COMPILING, Sampler

# Equinox's own, because `install` replaces these names while a trial is on.
_upstream_filter_jit = functools.partial(upstream_filter_jit)
_upstream_call: Any = vars(UpstreamWrapper or object).get("__call__")

#: Who serves a call. An awaited call is served by eqxjit, and waits for its results.
OURS, AWAITED, THEIRS = "ours", "awaited", "theirs"

# How many calls of each structure are compared first. Later calls are compared at random; in
# threads other than the main thread, which has no pauses, one in so many.
_N_FIRST, _ONE_IN = 3, 50

# The first calls of a block aren't timed, because the caches of the CPU hold what served the block
# before. A block has at least so many calls, and takes at least so long.
_N_COLD, _N_CALLS, _BLOCK_SECONDS = 3, 6, 0.01

# The first pause takes this many times as long as what precedes it. The more series there were, the
# longer a pause takes.
_PAUSE = 4

# Arrays are random numbers for a function that reads one of these, so no two runs are equal.
_STATEFUL = np.random.Generator, np.random.RandomState, random.Random, io.IOBase


def _times() -> dict[str, deque[float]]:
    return {mode: deque(maxlen=2_000) for mode in (OURS, AWAITED, THEIRS)}


#: The spec, the arrays, and the static objects of a call.
Parts = tuple[Any, list[Any], list[Any]]


@dataclasses.dataclass(eq=False)
class Tried:
    """What the trial knows of one function.

    - `name`, `site`: the function's name, and where it is defined.
    - `donates`: whether its calls may delete their arrays.
    - `effects`: why at most one call is compared; empty without a reason.
    - `is_excluded`: whether no call may run under Equinox.
    - `calls`: how often the function was called.
    - `n_due`: how many of the next calls are looked at, because there may be a new structure.
    - `compared`: how many calls were compared.
    - `by_structure`: how many calls of each spec were compared.
    - `statics`: the static objects of the first compared call of each spec.
    - `unequal`: the first parts that differed, by their paths.
    - `known`: how calls differ that differ as documented; empty if none does.
    - `traces`: the traces that eqxjit made in calls of the function.
    - `times`: the seconds of the timed calls, by who served them.
    """

    name: str
    site: CallSite | None
    donates: bool
    effects: str = ""
    is_excluded: bool = False
    calls: int = 0
    n_due: int = _N_FIRST
    compared: int = 0
    by_structure: Counter[Any] = dataclasses.field(default_factory=Counter)
    statics: dict[Any, list[Any]] = dataclasses.field(default_factory=dict)
    unequal: dict[str, Unequal] = dataclasses.field(default_factory=dict)
    known: str = ""
    traces: list[Trace] = dataclasses.field(default_factory=list)
    times: dict[str, deque[float]] = dataclasses.field(default_factory=_times)

    @property
    def is_wrong(self) -> bool:
        return any(each.rounding is None for each in self.unequal.values())

    @property
    def is_right(self) -> bool:
        """Whether calls were compared and Equinox's results were the same."""
        return self.compared > 0 and not (self.known or self.is_wrong)

    def knows(self, spec: Any, statics: list[Any]) -> bool:
        """Return whether Equinox has traced this structure for these very static objects.

        For equal objects it returns those that it has traced.
        """
        known = self.statics.get(spec)
        return known is not None and all(
            a is b or type(a) in CONSTANTS for a, b in zip(statics, known, strict=True)
        )


@dataclasses.dataclass
class Block:
    """Consecutive calls of the main thread that are served in one way.

    - `mode`: who serves them.
    - `begun`: when the block began, in seconds.
    - `n_calls`: how many calls it has had.
    """

    mode: str
    begun: float
    n_calls: int = 0


class _Thread(threading.local):
    """The state of one thread.

    - `is_main`: whether it is the thread in which the trial began.
    - `is_inside`: whether it is inside an intercepted call.
    - `is_copying`: whether it copies a wrapper for an interceptor.
    - `has_compiled`: whether JAX has compiled something since the latest call began.
    - `traces`: eqxjit's traces since then.
    """

    is_main = is_inside = is_copying = has_compiled = False
    traces: tuple[Trace, ...] = ()


class Interceptor:
    """Called in the place of a wrapper while a trial is on.

    - `swap`: serves the calls.
    - `ours`: a copy of the wrapper, which shares all that is compiled with the wrapper.
    - `theirs`: the same function under Equinox's `filter_jit`; None until it is needed.
    - `tried`: what is known of the function; None before the first call.
    """

    __slots__ = "ours", "swap", "theirs", "tried"

    def __init__(self, swap: "Swap", ours: Any):
        self.swap, self.ours = swap, ours
        self.theirs: Any = None
        self.tried: Tried | None = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        swap, tried = self.swap, self.tried
        thread = swap.thread
        # A call that is traced is part of another program; one in a callback, of another call.
        if thread.is_inside or is_transforming():
            return self.ours(*args, **kwargs)
        thread.is_inside = True
        try:
            now = time.perf_counter()
            if tried is None or tried.n_due > 0 or now >= swap.paused_until:
                return swap.call(self, args, kwargs, now)
            tried.calls += 1
            swap.n_served[OURS] += thread.is_main
            result = self.ours(*args, **kwargs)
            if thread.traces:
                swap.compare_afterwards(self, args, kwargs, result)
            return result
        except BaseException:
            trim()
            raise
        finally:
            thread.is_inside = False


class Swap:
    """Intercepts the calls of all jitted functions in the process while it is `running`.

    - `tried`: what is known of each function, by its table of entries.
    - `sampler`: samples where the main thread spends its time.
    - `is_steady`: whether there was a call without a trace; start-up ends with the first of them.
    - `startup`: the seconds of the main thread until then, and of first calls later.
    - `n_served`: how many calls of the main thread each has served since start-up.
    - `paused_until`: the time until which calls are neither compared nor timed.
    """

    def __init__(self, compares: bool):
        self.compares = compares
        self.tried: dict[Any, Tried] = {}
        self.thread = _Thread()
        self.thread.is_main = True
        self.sampler = Sampler(Interceptor.__call__.__code__)
        self.is_steady = False
        self.startup = 0.0
        self.n_served = Counter[str]()
        self.paused_until = 0.0
        self._begun = self._ended = 0.0
        # The series of blocks: when it began, the block now, and the modes of those to come.
        self._series_begun = 0.0
        self._block: Block | None = None
        self._modes = list[str]()
        self._n_series = 0
        # What JAX has traced, lowered or compiled, and when: `_observe` explains.
        self._seen = set[Any]()
        self._phases = deque[tuple[float, float]](maxlen=1_000)
        self._intercepted: dict[int, weakref.ref[Any]] = {}

    @property
    def seconds(self) -> float:
        """The seconds of the main thread, without what the trial added."""
        return self.sampler.clock(self._ended) - self._begun

    # --- Interception -------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        make = JitFunction.__init__

        def init(wrapper: Any, function: Any, arrays: Any) -> None:
            make(wrapper, function, arrays)
            if not self.thread.is_copying:
                self._intercept(wrapper)

        is_frozen = gc.get_freeze_count() > 0
        if is_frozen:
            # `gc.get_objects` doesn't list frozen objects.
            gc.unfreeze()
        wrappers = [each for each in gc.get_objects() if isinstance(each, JitFunction)]
        if is_frozen:
            gc.freeze()
        for wrapper in wrappers:
            # A wrapper without a handler is being unpickled at this moment.
            if hasattr(wrapper, "_handler"):
                self._intercept(wrapper)
        JitFunction.__init__ = init  # type: ignore[method-assign]
        listeners.append(self._observe)
        self._begun = time.perf_counter()
        self.sampler.start()
        try:
            yield
        finally:
            self._ended = time.perf_counter()
            self.sampler.stop()
            listeners.remove(self._observe)
            JitFunction.__init__ = make
            for wrapper in [ref() for ref in [*self._intercepted.values()]]:
                if wrapper is not None:
                    _set_interceptor(wrapper, None)

    def _intercept(self, wrapper: Any) -> None:
        self.thread.is_copying = True
        try:
            ours = copy.copy(wrapper)
        finally:
            self.thread.is_copying = False
        _set_interceptor(wrapper, Interceptor(self, ours))
        # Not a `WeakSet`, because the hash of a wrapper is that of its arrays.
        key, intercepted = id(wrapper), self._intercepted
        intercepted[key] = weakref.ref(wrapper, lambda _: intercepted.pop(key, None))

    # --- A call -------------------------------------------------------------------------------

    def call(self, to: Interceptor, args: Any, kwargs: Any, begun: float) -> Any:
        """Serve a call, which may be compared, or belong to a block."""
        __tracebackhide__ = True
        thread, sampler = self.thread, self.sampler
        if thread.is_main:
            sampler.hold(begun)
        result, error = None, None
        start = end = begun
        try:
            tried = to.tried = self._tried(to.ours)
            tried.calls += 1
            block = self._next_block(begun) if thread.is_main else None
            mode, parts, is_compared = self._choose(tried, block, args, kwargs)
            # The call may donate them.
            given = _copied(parts[1], tried.donates) if parts and is_compared else []
            served = self._upstream(to) if mode is THEIRS else to.ours
            thread.has_compiled, thread.traces = False, ()
            prints = _Prints(is_compared)
            if thread.is_main:
                self.n_served[mode] += 1
                if mode is OURS:
                    sampler.release(time.perf_counter())
            with prints:
                start = time.perf_counter()
                try:
                    result = served(*args, **kwargs)
                    if mode is AWAITED:
                        jax.block_until_ready(result)
                except Exception as raised:
                    error = raised
                finally:
                    end = time.perf_counter()
                    if thread.is_main:
                        sampler.hold(end)
            self._account(tried, mode, block, start, end)
            if prints.n_printed:
                tried.effects = tried.effects or "it prints"
            if parts and is_compared:
                self._compare(to, tried, parts, given, (result, error))
            elif thread.traces and error is None:
                self.compare_afterwards(to, args, kwargs, result)
        finally:
            thread.traces = ()
            if thread.is_main:
                self._end_call(begun)
        try:
            if error is not None:
                raise error
            return result
        finally:
            # Its traceback has this frame.
            del error

    def _choose(
        self, tried: Tried, block: Block | None, args: Any, kwargs: Any
    ) -> tuple[str, Parts | None, bool]:
        """Return who serves a call, its parts if they are needed, and whether it is compared."""
        mode = OURS if block is None else block.mode
        is_random = block is None and (self.thread.is_main or random.random() < 1 / _ONE_IN)
        if not (self.compares and (tried.n_due > 0 or is_random or mode is THEIRS)):
            return mode, None, False
        tried.n_due -= 1
        parts = self._parts_of(tried, args, kwargs)
        if parts is None:
            return OURS if mode is THEIRS else mode, None, False
        spec, _, statics = parts
        is_known = tried.knows(spec, statics)
        n, n_wanted = tried.by_structure[spec], _N_FIRST if is_known else 2 * _N_FIRST
        is_done = tried.effects and tried.compared
        if not is_done and (n < n_wanted or is_random):
            return OURS, parts, True
        if mode is THEIRS and not (is_known and tried.is_right):
            mode = OURS
        return mode, parts, False

    def _parts_of(self, tried: Tried, args: Any, kwargs: Any) -> Parts | None:
        """Return the parts of a call; None if Equinox can't run the call, or not twice."""
        if tried.is_excluded:
            return None
        try:
            parts = split((args, kwargs))
        except Exception:
            # The call itself raises a better error.
            return None
        return None if _has_state(tried, parts[2]) else parts

    def _account(
        self, tried: Tried, mode: str, block: Block | None, start: float, end: float
    ) -> None:
        """Note how long a call took, or what it has traced."""
        thread = self.thread
        if thread.has_compiled:
            if thread.traces:
                # The traces of functions within it have ended before.
                tried.traces.append(thread.traces[-1])
            if any(trace.program and trace.program.calls_python for trace in thread.traces):
                tried.effects = tried.effects or "it calls Python"
        elif thread.is_main and not self.is_steady:
            self.is_steady = True
            self.n_served = Counter([mode])
            self.startup = self.sampler.clock(end) - (end - start) - self._begun
            self.sampler.forget()
        elif block is not None and block.n_calls > _N_COLD and mode is block.mode:
            tried.times[mode].append(end - start)

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
                variables = getattr(below, "__globals__", {})
                captures = captured(below) if hasattr(below, "__closure__") else []
                read = [variables.get(name) for name in code.co_names]
                _has_state(tried, [*read, *[value for _, value in captures]])
            self.tried[function.table] = tried
        return self.tried[function.table]

    # --- Blocks -------------------------------------------------------------------------------

    def _next_block(self, now: float) -> Block | None:
        """Return the block to which a call of the main thread belongs; None for no block."""
        block = self._block
        if block is None and self._modes:
            block = self._block = Block(self._modes.pop(), now)
            self.sampler.served_by = "" if block.mode is OURS else block.mode
        if block is not None:
            block.n_calls += 1
        return block

    def _end_call(self, begun: float) -> None:
        """Begin or end a block or a series after a call of the main thread."""
        block, now = self._block, time.perf_counter()
        if block is None:
            if self.is_steady and not self._modes:
                self._begin_series(begun)
        elif block.n_calls >= _N_CALLS and now - block.begun >= _BLOCK_SECONDS:
            self._block = None
            self.sampler.served_by = ""
            if not self._modes:
                self._n_series += 1
                pause = (_PAUSE + self._n_series) * (now - self._series_begun)
                self.paused_until = now + pause
        self.sampler.release(time.perf_counter())

    def _begin_series(self, now: float) -> None:
        can_swap = any(tried.is_right for tried in self.tried.values())
        modes = [OURS, AWAITED, THEIRS] if can_swap else [OURS, AWAITED]
        # In any order, so that what comes first isn't favored.
        self._modes = random.sample(modes, len(modes))
        self._series_begun = now
        self.paused_until = 0.0

    # --- Comparison ---------------------------------------------------------------------------

    def compare_afterwards(self, to: Interceptor, args: Any, kwargs: Any, result: Any) -> None:
        """Compare a call that has traced for a structure that is new.

        If the function donates, its arguments are gone, so the next calls are compared instead.
        """
        thread, tried = self.thread, to.tried
        assert tried is not None
        traces, thread.traces = thread.traces, ()
        tried.n_due = _N_FIRST
        if not tried.traces or tried.traces[-1] is not traces[-1]:
            tried.traces.append(traces[-1])
        is_done = tried.effects and tried.compared
        if tried.donates or is_done or not self.compares:
            return
        was_held = self.sampler.is_held
        if thread.is_main:
            self.sampler.hold(time.perf_counter())
        parts = self._parts_of(tried, args, kwargs)
        if parts is not None:
            self._compare(to, tried, parts, _copied(parts[1], False), (result, None))
        if thread.is_main and not was_held:
            self.sampler.release(time.perf_counter())

    def _upstream(self, to: Interceptor) -> Any:
        to.theirs = to.theirs or _upstream(to.ours.__wrapped__, to.ours._function.options)
        return to.theirs

    def _compare(
        self, to: Interceptor, tried: Tried, parts: Parts, given: list[Any], ours: tuple[Any, Any]
    ) -> None:
        """Run a call under Equinox, and compare the result and the error with `ours`."""
        spec, _, statics = parts
        tried.compared += 1
        tried.by_structure[spec] += 1
        tried.statics.setdefault(spec, statics)

        def run(served: Any) -> tuple[Any, Any]:
            args, kwargs = combine(spec, iter(_copied(given, tried.donates)), iter(statics))
            with _Prints(True, drops=True):
                try:
                    return served(*args, **kwargs), None
                except Exception as error:
                    return None, error

        theirs = run(self._upstream(to))
        found = _differences(ours, theirs)
        if any(each.rounding is None for each in found):
            # Equinox once more, as if it had traced nothing so far: a new function each time.
            options, fun = to.ours._function.options, to.ours.__wrapped__
            anew = run(_upstream(eqx.Partial(lambda f, *a, **k: f(*a, **k), fun), options))
            if not _differences(ours, anew):
                tried.known = (
                    f"{found[0]}: Equinox returns what it traced for an equal static value"
                )
                return
            if _differences(theirs, anew):
                tried.effects = tried.known = "its results differ from trace to trace"
                return
        for each in found[:10]:
            tried.unequal.setdefault(each.path, each)

    # --- What JAX compiles --------------------------------------------------------------------

    def _observe(
        self, name: str, phase: str, seconds: float, _: bool, record: TraceRecord | None
    ) -> None:
        """Note that JAX has traced, lowered or compiled something."""
        thread = self.thread
        if thread.is_inside:
            thread.has_compiled = True
            if record is not None and phase == TRACING:
                thread.traces += (Trace(record),)
        if not thread.is_main or self.sampler.is_held:
            return
        # Nested phases have ended before, and are part of these seconds.
        now = time.perf_counter()
        nested = sum([spent for end, spent in self._phases if end > now - seconds])
        seconds -= nested
        self._phases.append((now, seconds))
        # Samples can't tell a call that compiles from others, so the seconds are moved from it.
        _, line = place = self.sampler.place_of(sys._getframe(1))
        key = name, phase, line if record is None else record.place
        self.sampler.seconds[place] -= seconds
        if key in self._seen:
            self.sampler.seconds[COMPILING, line] += seconds
        else:
            self._seen.add(key)
            self.startup += seconds


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
