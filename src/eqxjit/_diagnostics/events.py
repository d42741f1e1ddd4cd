"""Times how long JAX traces, lowers and compiles, and adds the times to the records of traces.

JAX reports an event with nothing but the name of a function. When it lowers or compiles, the event
counts for the latest trace under that name that isn't compiled yet, or else for the call in flight,
if its function has that name. So functions with one name may get each other's times. Only times and
explanations depend on this, never results.
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
from .record import COMPILING, LOWERING, TRACING, TraceRecord

_PHASES = {TRACING_EVENT: TRACING, LOWERING_EVENT: LOWERING, COMPILING_EVENT: COMPILING}

#: Functions that are called whenever a phase of any function has ended, in any thread. Their
#: arguments are the function's name, the phase, its seconds (including phases nested in it),
#: whether the program came from the persistent cache, and the record of the trace, which is None
#: for a function that isn't under eqxjit's `filter_jit`.
listeners: list[Callable[[str, str, float, bool, TraceRecord | None], None]] = []


class _Thread(threading.local):
    """The state of JAX in one thread, as its events show it.

    - `depth`: how many functions JAX is tracing, each within the one before.
    - `traced`: the records of functions that JAX has traced and not compiled yet, by name; `None`
        for a function that isn't under eqxjit's `filter_jit`.
    - `hits_persistent_cache`: whether the program being compiled comes from the persistent cache.
    - `recompiled`: a weak reference to the latest call for which JAX compiled a program again.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.traced: dict[str, TraceRecord | None] = {}
        self.hits_persistent_cache = False
        self.recompiled: Callable[[], Any] = lambda: None


_thread = _Thread()


@contextmanager
def tracing(record: TraceRecord, name: str) -> Iterator[None]:
    """Time the user's function while JAX traces it, also within the trace of another function.

    `name` is the function's name in JAX.
    """
    start = time.perf_counter()
    waiting.begin(TRACING, record)
    try:
        yield
    finally:
        waiting.end(TRACING, record)
    record.seconds.tracing += time.perf_counter() - start
    _notify(record.function, TRACING, record.seconds.tracing, False, record)
    _thread.traced[name] = record


@contextmanager
def compiling(record: TraceRecord | None, name: str) -> Iterator[None]:
    """Within this context, add the time of what JAX compiles under a name to an earlier trace."""
    if record is not None:
        _thread.traced[name] = record
    try:
        yield
    finally:
        stop_counting(name)


def stop_counting(name: str) -> None:
    """From now on, add the time of JAX's work under a name to no trace."""
    _thread.traced.pop(name, None)
    # JAX may not report the end of a phase that was interrupted.
    waiting.end(LOWERING)
    waiting.end(COMPILING)


def has_recompiled(call: Any) -> bool:
    """Return whether JAX has compiled a program again in a call, without a trace."""
    return _thread.recompiled() is call


def _notify(function: str, phase: str, seconds: float, from_cache: bool, record: Any) -> None:
    for listener in [*listeners]:
        listener(function, phase, seconds, from_cache, record)


# --- JAX's events -------------------------------------------------------------------------------


def listen(in_flight: Callable[[], Any]) -> None:
    """Listen to JAX's events from now on.

    `in_flight()` returns this thread's innermost call in flight. The core passes it at import,
    because this module may not import the core.
    """
    global _in_flight
    _in_flight = in_flight
    jax.monitoring.register_event_listener(_on_event)
    jax.monitoring.register_scalar_listener(_on_start)
    jax.monitoring.register_event_duration_secs_listener(_on_end)


def _in_flight() -> Any:
    """A placeholder. `listen` replaces this function."""


def _call_named(name: str) -> Any:
    """Return the innermost call in flight if its function has this name; else `None`."""
    call = _in_flight()
    return call if call is not None and name == call.entry.name else None


def _record_named(name: str) -> TraceRecord | None:
    """Return the record of the trace for which JAX lowers or compiles a function right now."""
    if name in _thread.traced:
        return _thread.traced[name]
    # The function was traced earlier: its trace became part of an outer program, or JAX compiles
    # its program again, for a different device, say.
    call = _call_named(name)
    return None if call is None else call.function.table.history.latest_of(call.entry)


def _on_event(event: str, **_: Any) -> None:
    # JAX reports a hit in its persistent cache before the end of the compiling phase, where
    # `_on_end` reads this flag.
    if event == CACHE_HIT_EVENT:
        _thread.hits_persistent_cache = True


def _on_start(event: str, value: float, *, fun_name: Any = "", **_: Any) -> None:
    phase = _PHASES.get(event)
    if phase == TRACING:
        _thread.depth += 1
    elif phase is not None:
        record = _record_named(_name_in(fun_name))
        if record is not None:
            waiting.begin(phase, record)


def _on_end(event: str, duration_secs: float, *, fun_name: Any = "", **_: Any) -> None:
    phase = _PHASES.get(event)
    name = _name_in(fun_name)
    if phase == TRACING:
        _note_trace(name, duration_secs)
    elif phase is not None:
        waiting.end(phase)
        record = _record_named(name)
        from_cache = False
        if phase == COMPILING:
            from_cache = _thread.hits_persistent_cache
            _thread.hits_persistent_cache = False
            _note_compilation(name, record)
        if record is not None:
            seconds = getattr(record.seconds, phase) + duration_secs
            setattr(record.seconds, phase, seconds)
            record.from_persistent_cache |= from_cache
        function = name if record is None else record.function
        _notify(function, phase, duration_secs, from_cache, record)


def _note_trace(name: str, seconds: float) -> None:
    """Note that JAX has traced a function with this name."""
    _thread.depth = max(0, _thread.depth - 1)
    record = _thread.traced.setdefault(name, None)
    # `tracing` has timed functions under `filter_jit` already. Some releases of JAX also report the
    # functions within a trace, which are left out.
    if record is None and not _thread.depth:
        _notify(name, TRACING, seconds, False, None)


def _note_compilation(name: str, record: TraceRecord | None) -> None:
    """Note that JAX has compiled the latest function that it traced under this name."""
    call = None if name in _thread.traced else _call_named(name)
    if call is not None and record is not None and record.seconds.compiling > 0:
        # JAX has compiled this trace before, and now compiles it for a different device, say.
        _thread.recompiled = weakref.ref(call)
    # If a callback of the program compiles something later, its time must not count for this trace.
    _thread.traced.pop(name, None)
    # Forget functions that aren't under `filter_jit`. JAX has compiled them by now, even if this
    # compilation happens in the middle of a lowering of ours.
    _thread.traced = {n: found for n, found in _thread.traced.items() if found}
    # JAX may not have reported the end of a trace that was interrupted.
    _thread.depth = 0


def _name_in(text: str) -> str:
    """Return the name of a function from JAX's text, which may be `jit(name)`."""
    return text[len("jit(") : -1] if text.startswith("jit(") else text
