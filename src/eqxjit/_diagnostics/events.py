"""JAX's events: how long it traces, lowers and compiles, and for which trace of ours.

JAX tells the name of a function and no more. What it lowers and compiles is what it traced last
under that name; without such a trace it is the call in flight, if that has the name. So functions
of one name may get each other's times. Nothing but times depends on this.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from .._compat import CACHE_HIT_EVENT, COMPILING_EVENT, LOWERING_EVENT, TRACING_EVENT
from . import waiting
from .log import logger
from .record import COMPILING, LOWERING, TRACING, TraceRecord

_PHASES = {TRACING_EVENT: TRACING, LOWERING_EVENT: LOWERING, COMPILING_EVENT: COMPILING}

#: Called with each phase that ended, of eqxjit's functions or others, in any thread:
#: `function, phase, seconds, from_cache, record`. The seconds include what was compiled within the
#: phase; the record is None for functions of others.
listeners: list[Callable[[str, str, float, bool, TraceRecord | None], None]] = []


class _Thread(threading.local):
    def __init__(self) -> None:
        #: How many functions JAX is tracing.
        self.depth = 0
        #: The record of what JAX has traced and not compiled yet, by its name; None for a function
        #: that isn't ours.
        self.traced: dict[str, TraceRecord | None] = {}
        self.hits_persistent_cache = False
        #: The latest call in flight for which JAX has compiled a program again.
        self.recompiled: Callable[[], Any] = lambda: None


_thread = _Thread()


@contextmanager
def tracing(record: TraceRecord, name: str) -> Iterator[None]:
    """Time the user's function while it is traced, which may be within another's trace.

    `name` is JAX's for the function.
    """
    start = time.perf_counter()
    _begin(TRACING, record)
    try:
        yield
    finally:
        _end(TRACING, record)
    record.seconds.tracing += time.perf_counter() - start
    _tell(record.function, TRACING, record.seconds.tracing, False, record)
    _thread.traced[name] = record


@contextmanager
def compiling(record: TraceRecord | None, name: str) -> Iterator[None]:
    """Have what JAX compiles now belong to an earlier trace."""
    if record is not None:
        _thread.traced[name] = record
    try:
        yield
    finally:
        finish(name)


def finish(name: str) -> None:
    """Have what JAX does from now on under a name belong to other traces."""
    _thread.traced.pop(name, None)
    # Of a phase that was interrupted JAX may not tell the end.
    _end(LOWERING)
    _end(COMPILING)


def has_recompiled(call: Any) -> bool:
    """Return whether JAX has compiled a program again in a call, without a trace."""
    return _thread.recompiled() is call


def _begin(phase: str, record: TraceRecord) -> None:
    thread = threading.get_ident()
    found = waiting.under_way.get(thread)
    # Within a trace others are parts of it.
    if found is None or found.name != TRACING:
        waiting.under_way[thread] = waiting.Phase(phase, record)
    # A fork leaves its child none.
    if not waiting.watcher.is_alive():
        waiting.watcher = threading.Thread(target=waiting.watch, name="eqxjit", daemon=True)
        waiting.watcher.start()


def _end(phase: str, record: TraceRecord | None = None) -> None:
    found = waiting.under_way.get(threading.get_ident())
    if found is not None and found.name == phase and record in (None, found.record):
        del waiting.under_way[threading.get_ident()]
        if found.n_warnings:
            seconds = time.perf_counter() - found.begun
            logger.warning("`%s`: %s took %.3g s.", found.record.function, phase, seconds)


def _tell(function: str, phase: str, seconds: float, from_cache: bool, record: Any) -> None:
    for listener in [*listeners]:
        listener(function, phase, seconds, from_cache, record)


# --- What JAX tells -----------------------------------------------------------------------------


def listen(in_flight: Callable[[], Any]) -> None:
    """Listen to JAX from now on. `in_flight()` returns this thread's innermost call of ours."""
    global _in_flight
    _in_flight = in_flight
    jax.monitoring.register_event_listener(_on_event)
    jax.monitoring.register_scalar_listener(_on_start)
    jax.monitoring.register_event_duration_secs_listener(_on_end)


def _in_flight() -> Any:
    """Return nothing until `listen` is called."""


def _call_named(name: str) -> Any:
    """Return the innermost call in flight if its function has this name; else `None`."""
    call = _in_flight()
    return call if call is not None and name == call.entry.name else None


def _record_named(name: str) -> TraceRecord | None:
    """Return the record of the trace for which JAX lowers or compiles a function now."""
    if name in _thread.traced:
        return _thread.traced[name]
    # Its trace became part of an outer program before, or JAX compiles it for another device.
    call = _call_named(name)
    return None if call is None else call.function.table.history.latest_of(call.entry)


def _on_event(event: str, **_: Any) -> None:
    # JAX reports it within the phase in which it would compile otherwise.
    if event == CACHE_HIT_EVENT:
        _thread.hits_persistent_cache = True


def _on_start(event: str, value: float, *, fun_name: Any = "", **_: Any) -> None:
    phase = _PHASES.get(event)
    if phase == TRACING:
        _thread.depth += 1
    elif phase is not None and (record := _record_named(_name_in(fun_name))) is not None:
        _begin(phase, record)


def _on_end(event: str, duration_secs: float, *, fun_name: Any = "", **_: Any) -> None:
    phase, name = _PHASES.get(event), _name_in(fun_name)
    if phase == TRACING:
        _note_trace(name, duration_secs)
    elif phase is not None:
        _end(phase)
        record, from_cache = _record_named(name), False
        if phase == COMPILING:
            from_cache, _thread.hits_persistent_cache = _thread.hits_persistent_cache, False
            _note_compilation(name, record)
        if record is not None:
            seconds = getattr(record.seconds, phase) + duration_secs
            setattr(record.seconds, phase, seconds)
            record.from_persistent_cache |= from_cache
        function = name if record is None else record.function
        _tell(function, phase, duration_secs, from_cache, record)


def _note_trace(name: str, seconds: float) -> None:
    """Note that JAX has traced a function of this name."""
    _thread.depth = max(0, _thread.depth - 1)
    record = _thread.traced.setdefault(name, None)
    # We have timed our own functions. Some versions of JAX also tell of the parts of a trace.
    if record is None and not _thread.depth:
        _tell(name, TRACING, seconds, False, None)


def _note_compilation(name: str, record: TraceRecord | None) -> None:
    """Note that JAX has compiled what it traced last under this name."""
    call = None if name in _thread.traced else _call_named(name)
    if call is not None and record is not None and record.seconds.compiling > 0:
        # It was compiled before: now for another device, say.
        _thread.recompiled = weakref.ref(call)
    # What a callback of the program compiles later isn't the program. Functions that aren't ours
    # are compiled by now, even if this happens in the middle of a lowering of ours.
    _thread.traced.pop(name, None)
    _thread.traced = {n: found for n, found in _thread.traced.items() if found}
    # JAX may not have told the end of a trace that was interrupted.
    _thread.depth = 0


def _name_in(text: str) -> str:
    return text[len("jit(") : -1] if text.startswith("jit(") else text
