"""JAX's events: how long it traces, lowers and compiles, and for which trace of ours.

JAX tells the name of a function and no more. What it lowers and compiles is what it traced last
under that name; without such a trace it is the call in flight, if that has the name.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from . import waiting
from .hidden_warnings import hide_warnings
from .trace import COMPILING, LOWERING, TRACING, Trace
from .waiting import Phase

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
        #: Those under way, outside in.
        self.phases: list[Phase] = []
        #: The entry and the trace of what JAX has traced and not compiled yet, by its name; None
        #: for a function that isn't ours.
        self.traced: dict[str, tuple[Any, Trace] | None] = {}
        self.hits_persistent_cache = False
        #: How many traces under way hide JAX's warning of donated buffers.
        self.n_hiding = 0


_thread = _Thread()


@contextmanager
def tracing(entry: Any, trace: Trace) -> Iterator[None]:
    """Time the user's function while it is traced, which may be within another's trace."""
    trace._depth = len(_thread.phases)
    _begin_phase(TRACING, trace)
    _thread.n_hiding += entry.hides_donation_warning
    start = time.perf_counter()
    try:
        yield
    finally:
        _thread.n_hiding -= entry.hides_donation_warning
        _end_phase()
    trace.seconds.tracing += time.perf_counter() - start
    _tell(trace.function, TRACING, trace.seconds.tracing, False, trace)
    _thread.traced[entry.name] = entry, trace


@contextmanager
def compiling(entry: Any, trace: Trace) -> Iterator[None]:
    """Have what JAX compiles now belong to an earlier trace."""
    _thread.traced[entry.name] = entry, trace
    trace._depth = len(_thread.phases)
    try:
        yield
    finally:
        finish(entry, trace)


def finish(entry: Any, trace: Trace) -> None:
    """Have what JAX does from now on belong to other traces."""
    # JAX doesn't tell the end of a phase that raised.
    while len(_thread.phases) > trace._depth:
        _end_phase()
    if _thread.traced.get(entry.name) == (entry, trace):
        del _thread.traced[entry.name]


def _begin_phase(name: str, trace: Trace | None, at_end: Callable[[], None] | None = None) -> None:
    phases = _thread.phases
    if not phases:
        waiting.under_way[threading.get_ident()] = phases
    phases.append(Phase(name, trace, at_end))
    # A fork leaves its child none.
    if trace is not None and not waiting.watcher.is_alive():
        waiting.start()


def _end_phase() -> None:
    if not _thread.phases:
        return
    phase = _thread.phases.pop()
    if not _thread.phases:
        waiting.under_way.pop(threading.get_ident(), None)
    if phase.at_end is not None:
        phase.at_end()
    if phase.n_warnings:
        phase.log_end()


def _tell(function: str, phase: str, seconds: float, from_cache: bool, trace: Any) -> None:
    for listener in [*listeners]:
        listener(function, phase, seconds, from_cache, trace)


def listen(in_flight: Callable[[], Any]) -> None:
    """Listen to JAX from now on; `in_flight()` is the innermost call of ours in this thread."""

    def owner_of(name: str) -> tuple[Any, Trace | None]:
        """Return the entry and the trace for which JAX lowers or compiles a function."""
        if name in _thread.traced:
            return _thread.traced[name] or (None, None)
        # Its trace became part of an outer program, or this is for another device.
        call = in_flight()
        # Some versions of JAX don't tell the name when a phase begins.
        if call is None or name not in ("", call.entry.name):
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
        at_end = None
        entry, trace = (None, None) if phase == TRACING else owner_of(_name_in(fun_name))
        if phase == LOWERING:
            # JAX warns while it lowers.
            call = in_flight()
            if _thread.n_hiding or (call is not None and call.entry.hides_donation_warning):
                at_end = hide_warnings()
        elif phase == COMPILING:
            _thread.hits_persistent_cache = False
            if entry is not None and _name_in(fun_name) not in _thread.traced:
                # For another device, say, where a program may hold other custom calls.
                entry.unclassified = entry.pending = True
                entry.is_recompiled = trace is not None and trace.seconds.compiling > 0
        _begin_phase(phase, trace, at_end)

    def on_end(event: str, duration_secs: float, *, fun_name: Any = "", **_: Any) -> None:
        phase = _PHASES.get(event)
        if phase is None:
            return
        _end_phase()
        name, trace, from_cache = _name_in(fun_name), None, False
        if phase == TRACING:
            # What we have timed ourselves; and, in some versions of JAX, a part of another trace.
            if _thread.traced.setdefault(name, None) is not None or _thread.phases:
                return
        else:
            _, trace = owner_of(name)
        if phase == COMPILING:
            from_cache, _thread.hits_persistent_cache = _thread.hits_persistent_cache, False
            # What a callback of the program compiles isn't the program.
            _thread.traced.pop(name, None)
            if not _thread.phases:
                # Other functions were only parts of what has been compiled.
                _thread.traced = {n: ours for n, ours in _thread.traced.items() if ours}
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
