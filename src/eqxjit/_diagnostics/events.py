"""JAX's events: how long it traces, lowers and compiles, and for which trace of ours.

JAX tells the name of a function and no more. What it lowers and compiles is what it traced last
under that name; without such a trace it is the call in flight, if that has the name.
"""

import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import jax

from . import waiting
from .log import logger
from .trace import COMPILING, LOWERING, TRACING, Trace

_PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": TRACING,
    "/jax/core/compile/jaxpr_to_mlir_module_duration": LOWERING,
    "/jax/core/compile/backend_compile_duration": COMPILING,
}
_PERSISTENT_CACHE_HIT = "/jax/compilation_cache/cache_hits"

#: Called with each phase that ended, of eqxjit's functions or others, in any thread:
#: `function, phase, seconds, from_cache, trace`. The seconds include what was compiled within the
#: phase; the trace is None for functions of others.
listeners: list[Callable[[str, str, float, bool, Trace | None], None]] = []


class _Thread(threading.local):
    def __init__(self) -> None:
        #: How many functions JAX is tracing.
        self.depth = 0
        #: The entry and the trace of what JAX has traced and not compiled yet, by its name; twice
        #: None for a function that isn't ours.
        self.traced: dict[str, tuple[Any, Trace | None]] = {}
        self.hits_persistent_cache = False
        #: Whether JAX's warning of donated buffers that it can't reuse is hidden.
        self.hides_warning = False


_thread = _Thread()


class _Pattern:
    """The pattern of a filter of warnings. A regular expression would match in any thread."""

    def match(self, text: str) -> bool:
        return _thread.hides_warning and text.startswith("Some donated buffers were not usable")

    def __reduce__(self) -> Any:
        # Filters may be sent to another process: there it matches nothing.
        return re.compile, ("(?!)",)


# One for good, because it matches nothing where nothing is to be hidden.
_hiding: Any = ("ignore", _Pattern(), Warning, None, 0)


@contextmanager
def tracing(entry: Any, trace: Trace) -> Iterator[None]:
    """Time the user's function while it is traced, which may be within another's trace."""
    start = time.perf_counter()
    _begin(TRACING, trace)
    try:
        yield
    finally:
        _end(TRACING, trace)
    trace.seconds.tracing += time.perf_counter() - start
    _tell(trace.function, TRACING, trace.seconds.tracing, False, trace)
    _thread.traced[entry.name] = entry, trace


@contextmanager
def compiling(entry: Any, trace: Trace) -> Iterator[None]:
    """Have what JAX compiles now belong to an earlier trace."""
    _thread.traced[entry.name] = entry, trace
    try:
        yield
    finally:
        finish(entry)


def finish(entry: Any) -> None:
    """Have what JAX does from now on belong to other traces."""
    _thread.traced.pop(entry.name, None)
    # Of a phase that was interrupted JAX may not tell the end.
    _end(LOWERING)
    _end(COMPILING)


def _begin(phase: str, trace: Trace) -> None:
    thread = threading.get_ident()
    found = waiting.under_way.get(thread)
    # Within a trace others are parts of it.
    if found is None or found.name != TRACING:
        waiting.under_way[thread] = waiting.Phase(phase, trace)
    # A fork leaves its child none.
    if not waiting.watcher.is_alive():
        waiting.watcher = threading.Thread(target=waiting.watch, name="eqxjit", daemon=True)
        waiting.watcher.start()


def _end(phase: str, trace: Trace | None = None) -> None:
    found = waiting.under_way.get(threading.get_ident())
    if found is not None and found.name == phase and trace in (None, found.trace):
        del waiting.under_way[threading.get_ident()]
        if found.n_warnings:
            seconds = time.perf_counter() - found.begun
            logger.warning("`%s`: %s took %.3g s.", found.trace.function, phase, seconds)


def _tell(function: str, phase: str, seconds: float, from_cache: bool, trace: Any) -> None:
    for listener in [*listeners]:
        listener(function, phase, seconds, from_cache, trace)


def listen(in_flight: Callable[[], Any]) -> None:
    """Listen to JAX from now on; `in_flight()` is the innermost call of ours in this thread."""

    def owner_of(name: str) -> tuple[Any, Trace | None]:
        """Return the entry and the trace for which JAX lowers or compiles a function."""
        if name in _thread.traced:
            return _thread.traced[name]
        # Its trace became part of an outer program, or this is for another device.
        call = in_flight()
        if call is None or name != call.entry.name:
            return None, None
        return call.entry, call.entry.latest_trace

    def on_event(event: str, **_: Any) -> None:
        # JAX reports it within the phase in which it would compile otherwise.
        if event == _PERSISTENT_CACHE_HIT:
            _thread.hits_persistent_cache = True

    def on_start(event: str, value: float, *, fun_name: Any = "", **_: Any) -> None:
        phase = _PHASES.get(event)
        if phase is None:
            return
        if phase == TRACING:
            _thread.depth += 1
        elif (trace := owner_of(_name_in(fun_name))[1]) is not None:
            _begin(phase, trace)
        if phase == LOWERING:
            # JAX warns while it lowers.
            call, filters = in_flight(), cast(list[Any], warnings.filters)
            _thread.hides_warning = call is not None and call.entry.hides_donation_warning
            if _thread.hides_warning and filters[:1] != [_hiding]:
                # Not by `warnings.filterwarnings`, which takes nothing but a regular expression.
                with suppress(ValueError):
                    filters.remove(_hiding)
                filters.insert(0, _hiding)

    def on_end(event: str, duration_secs: float, *, fun_name: Any = "", **_: Any) -> None:
        phase = _PHASES.get(event)
        if phase is None:
            return
        name, from_cache = _name_in(fun_name), False
        if phase == TRACING:
            _thread.depth = max(0, _thread.depth - 1)
            _, trace = _thread.traced.setdefault(name, (None, None))
            # What we have timed ourselves; and, in some versions of JAX, a part of another trace.
            if trace is not None or _thread.depth:
                return
        else:
            _end(phase)
            entry, trace = owner_of(name)
            if phase == COMPILING:
                from_cache, _thread.hits_persistent_cache = _thread.hits_persistent_cache, False
                if entry is not None and name not in _thread.traced and trace is not None:
                    # For another device, say.
                    call = in_flight(entry)
                    if call is not None and trace.seconds.compiling > 0:
                        call.is_recompiled = True
                # What a callback of the program compiles isn't the program; and what others are
                # traced for is compiled, unless this is in the middle of a lowering of ours.
                _thread.traced.pop(name, None)
                _thread.traced = {n: found for n, found in _thread.traced.items() if found[1]}
                # Nor need JAX have told the end of a trace that was interrupted.
                _thread.depth = 0
        if trace is not None:
            setattr(trace.seconds, phase, getattr(trace.seconds, phase) + duration_secs)
            trace.from_persistent_cache |= from_cache
        function = name if trace is None else trace.function
        _tell(function, phase, duration_secs, from_cache, trace)

    jax.monitoring.register_event_listener(on_event)
    jax.monitoring.register_scalar_listener(on_start)
    jax.monitoring.register_event_duration_secs_listener(on_end)


def _name_in(text: str) -> str:
    return text[len("jit(") : -1] if text.startswith("jit(") else text
