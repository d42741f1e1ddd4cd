"""Intercepts the calls of all jitted functions, compares the results of some, and times others.

Most calls are served by eqxjit, as usual. A call that is compared runs under Equinox, too, on
copies of its arguments. In short blocks, calls are timed while they are served in different modes,
by Equinox instead of eqxjit, for example.
"""

import contextlib
import functools
import gc
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax

from .._compat import connect, is_transforming, native
from .._core.wrapper import JitFunction
from .._diagnostics.events import listeners
from .._diagnostics.record import TRACING, TraceRecord
from .._diagnostics.trace import Trace
from .._places import CallSite, trim
from .._signals import comes_from_signal_handler, suppressed
from .log import AWAITED, OURS, THEIRS, Log
from .sampler import COMPILING, Sampler
from .spans import Spans
from .tried import N_FIRST, Outcome, Parts, Tried, comparing, renewed, tried_of, upstream

# After a function's first comparison, there are others only while all comparisons together have
# taken less than this many seconds, or less than this part of the program's time.
_FEW_SECONDS, _SMALL_PART = 0.5, 0.25

# At most this many calls of the main thread are kept, until a block ends.
_MAX_ROWS = 5_000

# Only the main thread has spans. In any other thread, and before the first warm call, one call in
# this many is compared, except while calls are only logged.
_ONE_IN = 50


class _Current(threading.local):
    # One object, because each attribute of a `threading.local` takes some time to read.
    def __init__(self) -> None:
        self.log = Log(max_rows=0)


class Interceptor:
    """Called instead of a wrapper while a trial is on.

    - `swap`: the trial's `Swap`.
    - `ours`: a copy of the wrapper, which shares its compiled programs.
    - `tried`: the function's `Tried`; `None` before the first call.
    """

    def __init__(self, swap: "Swap", ours: Any):
        self.swap, self.ours = swap, ours
        self.tried: Any = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        swap, tried = self.swap, self.tried
        log, main = swap.current.log, swap.main
        # A call under a transformation becomes part of another program, and a call that a callback
        # makes is part of another call.
        if log.is_inside or is_transforming():
            return self.nested(*args, **kwargs)
        log.is_inside = True
        try:
            now = time.perf_counter()
            if tried is None or tried.n_due > 0 or now >= main.logs_until:
                return swap.call(self, args, kwargs, now)
            mode, served = OURS, self.ours
            if log is main and log.mode is THEIRS:
                # Do as little as possible before the call. Any work replaces the call's data in the
                # caches of the CPU, so the call that is timed would be slower.
                swap.sampler.hold(now)
                if not tried.has_traced(self.ours, args, kwargs):
                    return swap.call(self, args, kwargs, now)
                mode, served = THEIRS, self.theirs
                tried.n_short += 1
                now = time.perf_counter()
                swap.sampler.release(now)
            elif log is main:
                tried.n_ours += 1
            tried.calls += 1
            begun = now - log.offset
            if log is main:
                log.latest, log.begun = tried, begun
            result = served(*args, **kwargs)
            if log is main:
                log.add(mode, time.perf_counter() - log.offset)
            if log.has_compiled:
                swap.finish(self, args, kwargs, Outcome(result, None))
            return result
        except BaseException:
            # An error of a signal handler may come while the clock is held.
            swap.sampler.release(time.perf_counter())
            if log.has_compiled and tried is not None:
                swap.count_as_compiling(tried)
            trim()
            raise
        finally:
            log.is_inside = log.has_compiled = False
            log.forget_trace()

    def account(
        self, result: Any, error: BaseException | None, /, *args: Any, **kwargs: Any
    ) -> None:
        """Account for a call that C has made, and that has failed, or in which JAX has compiled.

        C has logged the call unless it has failed.
        """
        log = self.swap.current.log
        try:
            if error is None:
                self.swap.finish(self, args, kwargs, Outcome(result, None))
                return
            self.tried.calls += 1
            self.tried.n_ours += 1
            if log.has_compiled:
                self.swap.count_as_compiling(self.tried)
        finally:
            log.forget_trace()

    @property
    def nested(self) -> Any:
        """The function that serves a call inside another jitted function."""
        # While Equinox traces a function to compare its results, a fault of eqxjit in a nested
        # function would be in both results.
        if comparing.nested_mode in ("", OURS) or type(self.ours) is not JitFunction:
            return self.ours
        return self._theirs_nested if comparing.nested_mode is THEIRS else self._new_theirs()

    @functools.cached_property
    def _theirs_nested(self) -> Any:
        """Serves nested calls, which must not decide what `theirs` traces for an equal value."""
        return self._new_theirs()

    def _new_theirs(self) -> Any:
        return upstream(renewed(self.ours.__wrapped__), self.ours._function.options)

    @functools.cached_property
    def theirs(self) -> Any:
        """The same function under Equinox's `filter_jit`, created on first use."""
        return upstream(self.ours.__wrapped__, self.ours._function.options)


class Swap:
    """Serves the calls of all jitted functions in the process while it is `running`.

    - `compares`: whether calls run under Equinox at all.
    - `functions`: what the trial knows of each function.
    - `current`: the state of the current thread, as `current.log`.
    - `main`: the state of the thread in which the trial began. Only its calls are logged.
    - `sampler`: samples where the main thread spends its time.
    - `spans`: the spans of the main thread, which decide in which mode its calls are served.
    - `is_steady`: whether a call of the main thread needed no trace. The first such call ends
        start-up.
    - `startup`: the seconds of start-up, and of what was compiled for the first time after it.
    """

    def __init__(self, compares: bool):
        self.functions: list[Tried] = []
        self.current = _Current()
        self.main = self.current.log = Log(_MAX_ROWS)
        self.sampler = Sampler(self.main, Interceptor.__call__.__code__)
        self.spans = Spans(self.sampler, self.functions)
        self.is_steady = False
        self.startup = 0.0
        self.compares = compares
        # Each `Tried`, by the function's table of entries. The keys are weak, because a program may
        # define functions in a loop. When it drops a function that wasn't compared, the compiled
        # programs are freed. Equinox's own caches keep a function that was compared.
        self._by_table: weakref.WeakKeyDictionary[Any, Tried] = weakref.WeakKeyDictionary()
        # The rows of the functions, and the lines of the operations, for which JAX has compiled
        # something, with the time when the main thread's latest call had begun by then.
        self._compiled: dict[Any, float] = {}
        # The seconds that comparisons have taken, without compilations.
        self._comparing = 0.0
        # The wrappers, by their `id`. Only the wrappers refer to their interceptors, because an
        # interceptor keeps the user's function alive, which may refer to the wrapper.
        self._intercepted: dict[int, weakref.ref[Any]] = {}

    # --- Interception -------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Intercept the calls of all wrappers, existing and new ones."""
        if self.compares:
            # Have Equinox trace all functions again, those of an earlier trial included.
            eqx.clear_caches()

        _running.append(self)
        listeners.append(self._observe)
        # If an interrupt comes while some are intercepted, all wrappers are as before at the end.
        try:
            for wrapper in _all_wrappers():
                self._intercept(wrapper)
            JitFunction.__init__ = _init_intercepted  # type: ignore[method-assign]
            self.sampler.start()
            yield
        finally:
            self.sampler.stop()
            self.spans.end_block()
            listeners.remove(self._observe)
            _running.remove(self)
            if not _running:
                JitFunction.__init__ = _init
            for ref in [*self._intercepted.values()]:
                wrapper = ref()
                if wrapper is None:
                    continue
                # Another trial may be running, which began earlier or, in another thread, later.
                if _running and id(wrapper) in _running[-1]._intercepted:
                    _running[-1]._intercept(wrapper)
                else:
                    _set_interceptor(wrapper, None)

    def _intercept(self, wrapper: Any) -> None:
        # Not `copy.copy`, by which the copy would be intercepted, too.
        ours = JitFunction.__new__(type(wrapper))
        _init(ours, wrapper._function, wrapper._handler.fun_arrays)
        # The trials around this one serve the calls of this one.
        for outer in itertools.takewhile(lambda each: each is not self, [*_running]):
            outer._intercept(ours)
        # Not a `WeakKeyDictionary`, because the hash of a wrapper is that of its arrays.
        key, intercepted = id(wrapper), self._intercepted
        intercepted[key] = weakref.ref(wrapper, lambda _: intercepted.pop(key, None))
        _set_interceptor(wrapper, Interceptor(self, ours))

    def count_calls(self) -> None:
        """Count the calls so far, if this is the thread in which the trial began."""
        if self.current.log is self.main:
            self.main.read()

    # --- A call -------------------------------------------------------------------------------

    def call(self, to: Interceptor, args: Any, kwargs: Any, begun: float) -> Any:
        """Serve a call that may be compared, or belong to a short block, or end a long one."""
        __tracebackhide__ = True
        log, sampler = self.current.log, self.sampler
        try:
            sampler.hold(begun)
            tried = to.tried = self._tried_of(to.ours)
            is_extra = tried.calls % _ONE_IN == _ONE_IN - 1
            if log is self.main and self.is_steady:
                is_extra = self.spans.begin_call(tried, begun)
            tried.calls += 1
            served_by, compared = self._choose(to, is_extra, args, kwargs)
            outcome = self._serve(to, served_by, args, kwargs)
            self.finish(to, args, kwargs, outcome, compared)
        finally:
            log.has_compiled = False
            sampler.release(time.perf_counter())
        if outcome.error is None:
            return outcome.result
        try:
            raise outcome.error
        finally:
            # The traceback refers to this frame. If the frame referred to the error, the arguments
            # would stay alive until the garbage collector runs.
            del outcome

    def _choose(
        self, to: Interceptor, is_extra: bool, args: Any, kwargs: Any
    ) -> tuple[str, Parts | None]:
        """Return the mode in which a call is served, and its parts if it is to be compared.

        `is_extra` tells whether to compare the call even if enough calls of its kind were compared.
        """
        log, tried = self.current.log, to.tried
        mode = log.mode
        awaited = AWAITED if is_extra and log is self.main else mode
        if not (tried.n_due > 0 or is_extra or mode is THEIRS):
            return awaited, None
        tried.n_due -= 1
        parts = tried.parts_of(args, kwargs)
        is_due = is_extra or (parts and tried.by_kind[parts.kind] < N_FIRST)
        if parts is not None and is_due and self._may_compare(tried):
            # Await the call. Otherwise Equinox would wait for what the calls so far have left to
            # compute. If an array was deleted, for example, the call itself raises a better error.
            with suppressed:
                return AWAITED, tried.copied(parts)
        if mode is THEIRS and not tried.has_traced(to.ours, args, kwargs):
            return OURS, None
        return awaited, None

    def _serve(self, to: Interceptor, mode: str, args: Any, kwargs: Any) -> Outcome:
        __tracebackhide__ = True
        log, sampler = self.current.log, self.sampler
        served = to.theirs if mode is THEIRS else to.ours
        if log is self.main:
            sampler.release(time.perf_counter())
            log.latest, log.begun = to.tried, sampler.clock()
        # Without a mode, the call isn't timed, because a call that fails takes an unusual time.
        served_by = ""
        try:
            result = served(*args, **kwargs)
            if mode is AWAITED:
                begun = sampler.clock()
                # If the computation has failed, the program finds out when it reads the result.
                with suppressed:
                    jax.block_until_ready(result)
                if log is self.main and log.mode is OURS:
                    # At the end of a long block, the trial waits for what later calls would.
                    sampler.waited_in_calls += sampler.clock() - begun
            served_by = mode
            return Outcome(result, None)
        except Exception as error:
            if comes_from_signal_handler(error):
                # The function hasn't raised this error, so the call isn't compared.
                raise
            return Outcome(None, error)
        finally:
            if log is self.main:
                sampler.hold(time.perf_counter())
                log.add(served_by, sampler.clock())

    def finish(
        self,
        to: Interceptor,
        args: Any,
        kwargs: Any,
        outcome: Outcome,
        compared: Parts | None = None,
    ) -> None:
        """Account for a call that was served. Compare it if it is to be compared, or has traced.

        `compared` are its parts, from before the call, if it is to be compared.
        """
        log, tried = self.current.log, to.tried
        self.sampler.hold(time.perf_counter())
        try:
            self._account(tried, outcome, compared is not None)
            if log.trace is not None and outcome.error is None:
                tried.n_due = N_FIRST
                if compared is None:
                    # The call was to be served as usual, but turned out to trace.
                    parts = tried.parts_of(args, kwargs)
                    # If the function donates, the arguments are gone. The next calls are compared.
                    if not tried.donates and self._may_compare(tried):
                        compared = parts
                    elif parts is not None:
                        tried.uncompared.add(parts.kind)
            if compared is not None and not tried.is_excluded:
                self._compare(to, compared, outcome)
        finally:
            self.sampler.release(time.perf_counter())

    def _account(self, tried: Tried, outcome: Outcome, is_compared: bool) -> None:
        """Record the trace of a call, or the end of start-up."""
        log = self.current.log
        if log.has_compiled:
            self.count_as_compiling(tried)
        if log.trace is not None:
            tried.traces.append(log.trace)
            tried.note_effects(log.trace)
        if log.has_compiled or log is not self.main:
            return
        if self.is_steady and is_compared:
            self.spans.abandon(False)
        elif not self.is_steady and outcome.error is None:
            self.is_steady = True
            self.startup += log.begun
            self.spans.begin(tried, log.begun)

    def _tried_of(self, ours: Any) -> Tried:
        table = ours._function.table
        tried = self._by_table.get(table)
        if tried is None:
            tried = self._by_table[table] = tried_of(ours)
            if not self.compares:
                tried.n_due, tried.is_excluded = 0, True
            self.functions.append(tried)
        return tried

    def count_as_compiling(self, tried: Tried) -> None:
        """Count all of the call under way as a compilation, because JAX has compiled in it."""
        sampler = self.sampler
        if self.current.log is not self.main:
            return
        sampler.forget_call()
        _, line = sampler.place_of(sys._getframe())
        self._add_compiling(tried.row, line, sampler.clock() - self.main.begun)
        self.spans.abandon(True)

    def _may_compare(self, tried: Tried) -> bool:
        """Return whether a call of a function may be compared, and there is time for it."""
        limit = max(_FEW_SECONDS, _SMALL_PART * self.sampler.clock())
        return tried.is_comparable and (not tried.compared or self._comparing < limit)

    def _compare(self, to: Interceptor, parts: Parts, ours: Outcome) -> None:
        log, tried = self.current.log, to.tried
        begun, compiling = time.perf_counter(), log.compiling
        try:
            theirs = to.theirs
        except Exception as error:
            # The function has no signature, for example, as some builtin functions.
            tried.exclude(f"Equinox can't wrap it: {error}")
            return
        tried.compare(to.ours, theirs, parts, ours)
        self._comparing += time.perf_counter() - begun - (log.compiling - compiling)

    # --- What JAX compiles --------------------------------------------------------------------

    def _observe(
        self, _: str, phase: str, seconds: float, __: bool, record: TraceRecord | None
    ) -> None:
        """Note that JAX has traced, lowered or compiled something, in some seconds until now."""
        log = self.current.log
        # Phases that are nested in this phase have ended before it, and are part of its seconds.
        now = time.perf_counter()
        begun = now - seconds
        seconds -= sum([spent for end, spent in log.phases if end > begun])
        log.phases.append((now, seconds))
        log.compiling += seconds
        comparing.n_traces += phase == TRACING
        sampler = self.sampler
        if log.is_inside:
            log.has_compiled = True
            # After the function's own trace, JAX lowers the function, and may trace parts of it.
            if record is not None and phase == TRACING and begun < log.traced:
                log.trace, log.traced = Trace(record), now
        elif log is self.main:
            # The samples count these seconds as an operation. Move them.
            kind, line = sampler.place_of(sys._getframe(1))
            sampler.add((kind, line), sampler.function_of(kind), -seconds)
            self._add_compiling(line, line, seconds)

    def _add_compiling(self, compiled: Any, line: CallSite, seconds: float) -> None:
        """Count the seconds of a compilation as start-up, or as a line's if it isn't the first.

        `compiled` is the row of the function, or the line of the operations, that was compiled.
        """
        # One line may compile many operations, such as a line that creates a model. They are a part
        # of start-up unless the main thread has made another call meanwhile.
        begun = self.main.begun
        if self._compiled.setdefault(compiled, begun) == begun:
            self.startup += seconds
            self.main.offset += seconds
        else:
            self.sampler.add((COMPILING, line), None, seconds)


# The trials that are running, outermost first.
_running: list[Swap] = []

_init: Any = JitFunction.__init__


def _init_intercepted(wrapper: Any, function: Any, arrays: Any) -> None:
    """Create a wrapper during a trial. Replaces `JitFunction.__init__`."""
    _init(wrapper, function, arrays)
    for swap in [*_running]:
        swap._intercept(wrapper)


def _all_wrappers() -> list[Any]:
    """Return all wrappers that exist."""
    is_frozen = gc.get_freeze_count() > 0
    # `gc.get_objects` doesn't list frozen objects.
    gc.unfreeze()
    # Not `isinstance`, which asks other objects for `__class__`. A dead weak proxy raises then.
    found = [each for each in gc.get_objects() if issubclass(type(each), JitFunction)]
    if is_frozen:
        # Objects that were created since the program froze its objects become frozen, too.
        gc.freeze()
    # A wrapper without a handler is being unpickled at this moment.
    return [each for each in found if hasattr(each, "_handler")]


def _set_interceptor(wrapper: Any, interceptor: Any) -> None:
    """Redirect the calls of a wrapper to an interceptor, or back if it is `None`."""
    if native is not None:
        if interceptor is None:
            native.intercept(wrapper)
        elif len(_running) > 1:
            # The trial around this one makes the calls, so that it logs them, too.
            native.intercept(wrapper, interceptor)
        else:
            native.intercept(wrapper, interceptor, interceptor.swap.main)
        return
    handler = wrapper._handler
    if interceptor is None:
        handler.unlink()
    else:
        # If the handler stayed linked, a new fast path would replace the interceptor.
        handler.table.linked.discard(weakref.ref(handler))
        connect(wrapper, interceptor)
