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


def listen(in_flight: Callable[[], Any]) -> None:
    """Listen to JAX from now on; `in_flight()` is the innermost call of ours in this thread."""

    def call_of(name: str) -> Any:
        """Return the innermost call in flight, if its function has a name; else None."""
        call = in_flight()
        return call if call is not None and name == call.entry.name else None

    def record_of(name: str) -> TraceRecord | None:
        """Return the record for which JAX lowers or compiles a function."""
        if name in _thread.traced:
            return _thread.traced[name]
        # Its trace became part of an outer program, or this is for another device.
        call = call_of(name)
        return None if call is None else call.function.table.history.latest_of(call.entry)

    def on_event(event: str, **_: Any) -> None:
        # JAX reports it within the phase in which it would compile otherwise.
        if event == CACHE_HIT_EVENT:
            _thread.hits_persistent_cache = True

    def on_start(event: str, value: float, *, fun_name: Any = "", **_: Any) -> None:
        phase = _PHASES.get(event)
        if phase == TRACING:
            _thread.depth += 1
        elif phase is not None and (record := record_of(_name_in(fun_name))) is not None:
            _begin(phase, record)

    def on_end(event: str, duration_secs: float, *, fun_name: Any = "", **_: Any) -> None:
        phase = _PHASES.get(event)
        if phase is None:
            return
        name, from_cache = _name_in(fun_name), False
        if phase == TRACING:
            _thread.depth = max(0, _thread.depth - 1)
            record = _thread.traced.setdefault(name, None)
            # What we have timed ourselves; and, in some versions of JAX, a part of another trace.
            if record is not None or _thread.depth:
                return
        else:
            _end(phase)
            record = record_of(name)
            if phase == COMPILING:
                from_cache, _thread.hits_persistent_cache = _thread.hits_persistent_cache, False
                call = None if name in _thread.traced else call_of(name)
                if call is not None and record is not None and record.seconds.compiling > 0:
                    # For another device, say.
                    _thread.recompiled = weakref.ref(call)
                # What a callback of the program compiles isn't the program; and what others are
                # traced for is compiled, unless this is in the middle of a lowering of ours.
                _thread.traced.pop(name, None)
                _thread.traced = {n: found for n, found in _thread.traced.items() if found}
                # Nor need JAX have told the end of a trace that was interrupted.
                _thread.depth = 0
        if record is not None:
            seconds = record.seconds
            setattr(seconds, phase, getattr(seconds, phase) + duration_secs)
            record.from_persistent_cache |= from_cache
        function = name if record is None else record.function
        _tell(function, phase, duration_secs, from_cache, record)

    jax.monitoring.register_event_listener(on_event)
    jax.monitoring.register_scalar_listener(on_start)
    jax.monitoring.register_event_duration_secs_listener(on_end)


def _name_in(text: str) -> str:
    return text[len("jit(") : -1] if text.startswith("jit(") else text
