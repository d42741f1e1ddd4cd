"""Listens to what JAX traces, lowers and compiles, and tells which call each event belongs to.

JAX also compiles in a warm call, without tracing again: for a new device, say. The jaxpr stays, but
what it is lowered to may hold other custom calls; so its entry has to be looked at once more.
"""

import dataclasses
import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import CO_GENERATOR
from types import FrameType
from typing import Any, NamedTuple, Protocol

import jax

from .._compat import call_in_flight, jaxpr_lowered_in, module_compiled_in
from .._lock import alive
from .counter import Attempt, TooManyTracesError, TraceCounter
from .donation import hide_donation_warning
from .effects import may_raise
from .entry import CacheEntry
from .hooks import TraceHook
from .request import CALL_VARIABLE, Call, TraceKey
from .stack import call_in, frameless_in, is_foreign

TRACING, LOWERING, COMPILING = "tracing", "lowering", "compiling"
_PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": TRACING,
    "/jax/core/compile/jaxpr_to_mlir_module_duration": LOWERING,
    "/jax/core/compile/backend_compile_duration": COMPILING,
}
_PERSISTENT_CACHE_HIT = "/jax/compilation_cache/cache_hits"


class Observer(Protocol):
    """An observer of all that is compiled, by eqxjit or not, in any thread."""

    def begun(self, function: str, phase: str) -> None:
        """Note that a phase begins: `"tracing"`, `"lowering"` or `"compiling"`."""
        ...

    def ended(self, function: str, phase: str, seconds: float, from_cache: bool) -> None:
        """Note the seconds of a phase that ended, without what was compiled within it."""
        ...

    def traced(self, trace: Any) -> None:
        """Note a trace of ours that is complete."""
        ...


#: Whoever wants to know, as long as it lives.
observers: weakref.WeakSet[Observer] = weakref.WeakSet()


class _Recompilation(NamedTuple):
    """A compilation that JAX began without tracing.

    - `counter_ref`: counts the function's traces; weakly.
    - `record`: that of the trace.
    - `attempt`: what is to be counted; None for a trace's first compilation.
    - `trace_key`: what it is compiled for.
    """

    counter_ref: weakref.ref[TraceCounter]
    record: Any
    attempt: Attempt | None
    trace_key: TraceKey


@dataclasses.dataclass(eq=False)
class _Phase:
    """A phase under way.

    - `frame`: which frame's `with` it is.
    - `nested`: how many seconds of it weren't its own.
    - `recompilation`: what JAX compiles in a warm call.
    - `show_warning`: ends the hiding of JAX's warning of donated buffers.
    """

    frame: tuple[int, int]
    nested: float = 0.0
    recompilation: _Recompilation | None = None
    show_warning: Callable[[], None] | None = None


def _identity(frame: FrameType | None) -> tuple[int, int]:
    """Tell a frame from others without holding it: another's may come to be at its address."""
    return id(frame), id(None if frame is None else frame.f_code)


def _frame_of_with() -> FrameType | None:
    """Return the frame whose `with` a phase is."""
    frame: FrameType | None = sys._getframe(1)
    is_entered = False
    # A generator is on the stack only while it runs, not while its `with` lasts.
    while frame is not None and (not is_entered or frame.f_code.co_flags & CO_GENERATOR):
        is_entered = frame.f_code.co_name == "__enter__"
        frame = frame.f_back
    return frame


class _State(threading.local):
    def __init__(self) -> None:
        #: The phases under way, outside in.
        self.phases: list[_Phase] = []
        self.hits_persistent_cache = False
        #: How long the last program that was lowered in a warm call took, and whose it is.
        self.lowering: tuple[weakref.ref[CacheEntry] | None, float] = (None, 0.0)


_state = _State()


def drop_interrupted() -> None:
    """Drop the phases that an interrupt kept from their end: their frames left the stack."""
    missing = {phase.frame for phase in _state.phases}
    frame: FrameType | None = sys._getframe(1)
    # Mostly they are near: the rest of the stack isn't gone through.
    while missing and frame is not None:
        missing.discard(_identity(frame))
        frame = frame.f_back
    if missing:
        _state.phases[:] = [phase for phase in _state.phases if phase.frame not in missing]


@contextmanager
def tracing(function: str, hook: TraceHook, record: Any) -> Iterator[None]:
    """Time a function of ours while it is traced, which may be within another's trace."""
    _begin_phase(function, TRACING)
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - start
        hook.spend(record, TRACING, seconds, False)
        _end_phase(function, TRACING, seconds)


def _push_phase() -> _Phase:
    drop_interrupted()
    phase = _Phase(_identity(_frame_of_with()))
    # One `with` of a frame has come to its end when the next begins; and an `id` may be reused.
    _state.phases[:] = [other for other in _state.phases if other.frame != phase.frame]
    _state.phases.append(phase)
    return phase


def _begin_phase(function: str, phase: str) -> _Phase:
    begun = _push_phase()
    for observer in alive(observers):
        observer.begun(function, phase)
    return begun


def _end_phase(function: str, phase: str, seconds: float, from_cache: bool = False) -> None:
    ended = _state.phases.pop() if _state.phases else None
    nested = ended.nested if ended is not None else 0.0
    if ended is not None and ended.show_warning is not None:
        ended.show_warning()
    if _state.phases:
        _state.phases[-1].nested += seconds
    for observer in alive(observers):
        observer.ended(function, phase, max(0.0, seconds - nested), from_cache)


# --- JAX's events -----------------------------------------------------------------------------


def _on_event(event: str, **_: Any) -> None:
    if event == _PERSISTENT_CACHE_HIT:
        _state.hits_persistent_cache = True


def _on_start(event: str, value: float, *, fun_name: Any = "", **_: Any) -> None:
    phase = _PHASES.get(event)
    if phase is None:
        return
    drop_interrupted()
    # Some versions of JAX report nested traces, too: parts of the outer one to us.
    is_part = phase == TRACING and _state.phases
    if is_part or (phase == TRACING and not observers):
        _push_phase()
        return
    origin = _Origin(fun_name)
    recompilation = None
    if phase == COMPILING:
        _state.hits_persistent_cache = False
        if origin.compiles_without_tracing:
            try:
                recompilation = origin.begin_recompilation()
            except TooManyTracesError:
                raise
            except Exception:
                # What can't be told about mustn't fail.
                pass
    begun = _begin_phase(origin.label, phase)
    begun.recompilation = recompilation
    if origin.call is not None:
        _look_at_program(origin.call, phase)
    elif phase == LOWERING and origin.entry is not None and origin.entry.hides_donation_warning:
        # JAX lowers in a warm call, as it does for a transformation, and warns while it does.
        begun.show_warning = hide_donation_warning()


def _look_at_program(call: Call, phase: str) -> None:
    """Note what JAX lowers and compiles for a call, as it begins to: to ask later takes longer."""
    frame = _frame_of_with()
    if frame is None:
        return
    if phase == LOWERING and call.jaxpr is None:
        call.jaxpr = jaxpr_lowered_in(frame)
    elif phase == COMPILING and not call.may_raise:
        module = module_compiled_in(frame)
        call.may_raise = None if module is None else may_raise(module)


def _on_duration(event: str, duration_secs: float, *, fun_name: Any = "", **_: Any) -> None:
    phase = _PHASES.get(event)
    if phase is None:
        return
    drop_interrupted()
    if phase == TRACING and len(_state.phases) > 1:
        nested = _state.phases.pop().nested
        _state.phases[-1].nested += nested
        return
    origin = _Origin(fun_name)
    from_cache = False
    if phase == COMPILING:
        from_cache, _state.hits_persistent_cache = _state.hits_persistent_cache, False
    call = origin.call
    if call is not None and call.traces:
        call.counter.hook.spend(call.traces[-1], phase, duration_secs, from_cache)
        if phase == COMPILING:
            call.is_compiled = True
            call.entry.drop_uncompiled(call.trace_key)
    elif origin.entry is not None and phase == LOWERING:
        _state.lowering = weakref.ref(origin.entry), duration_secs
    elif origin.entry is not None and phase == COMPILING:
        _end_recompilation(origin.entry, duration_secs, from_cache)
    is_ahead_of_time = call is not None and call.is_staged
    if phase == COMPILING and origin.entry is not None and not is_ahead_of_time:
        # Seen by the call itself, once the program has run.
        origin.entry.begin_classifying()
    _end_phase(origin.label, phase, duration_secs, from_cache)


def _end_recompilation(entry: CacheEntry, seconds: float, from_cache: bool) -> None:
    recompilation = _state.phases[-1].recompilation if _state.phases else None
    if recompilation is None:
        return
    counter_ref, record, attempt, trace_key = recompilation
    (lowered, lowering_seconds), _state.lowering = _state.lowering, (None, 0.0)
    counter = counter_ref()
    if counter is None:
        return
    is_its_own = lowered is not None and lowered() is entry
    counter.hook.spend(record, LOWERING, lowering_seconds if is_its_own else 0.0, False)
    counter.hook.spend(record, COMPILING, seconds, from_cache)
    if attempt is None:
        entry.drop_uncompiled(trace_key)
    else:
        counter.end(attempt, is_made=True)
        counter.hook.complete(record, None)


class _Origin:
    """The function that an event is about.

    - `entry`: the entry whose program it is; None if it isn't one's.
    - `call`: the call whose program it is, if that is in the miss path; None if it is warm.
    - `label`: what to call the function.
    """

    def __init__(self, fun_name: str):
        self.call: Call | None = None
        self.entry: CacheEntry | None = None
        self.label = fun_name[len("jit(") : -1] if fun_name.startswith("jit(") else fun_name
        self._name = self.label
        frame = sys._getframe(2)
        # Other code in between is that of a host callback, say, run by a CPU in this thread.
        while frame is not None:
            self.call, self.entry = call_in(frame)
            if self.entry is not None:
                self.label = self.entry.label
                break
            # That of a traced function belongs to the user's, too.
            is_last = is_foreign(frame) or CALL_VARIABLE in frame.f_code.co_varnames
            frame = None if is_last else frame.f_back
        self._frame = frame

    @property
    def compiles_without_tracing(self) -> bool:
        """True where JAX compiles without a trace of ours."""
        if self.entry is None or self._name not in ("", self.entry.name):
            # Also what comparing static values compiles, say, or an object's own unflatten.
            return False
        return self.call is None or not self.call.traces

    def begin_recompilation(self) -> _Recompilation | None:
        """Count what JAX begins to compile, unless it is a trace's first compilation."""
        call = self.call if self.call is not None else self._warm_call()
        if self.call is None and call.arguments.key != call.entry.key:
            # The guards have not held yet.
            return None
        trace_key, counter = call.key_of_trace(), call.counter
        counter_ref = weakref.ref(counter)
        for record in call.entry.uncompiled(trace_key):
            return _Recompilation(counter_ref, record, None, trace_key)
        attempt = counter.begin(call, is_recompilation=True)
        return _Recompilation(counter_ref, attempt.record, attempt, trace_key)

    def _warm_call(self) -> Call:
        """Return the warm call that this is for."""
        assert self._frame is not None
        assert self.entry is not None
        if frameless_in(self._frame) is not None:
            dispatcher, args, kwargs = call_in_flight(self.entry)
            bound = dispatcher.receive(dispatcher.partition, args, kwargs)
            return dispatcher.request(self.entry, bound)
        variables = self._frame.f_locals
        for value in variables.values():
            # A generated call holds its entry's part of its dispatcher.
            if type(value) is functools.partial and any(arg is self.entry for arg in value.args):
                dispatcher: Any = value.func.__self__  # type: ignore[attr-defined]
                args, kwargs = dispatcher.wrapped.signature.arguments_among(variables)
                break
        else:
            dispatcher, args, kwargs = variables["self"], variables["args"], variables["kwargs"]
        return dispatcher.request(self.entry, dispatcher.partition(args, kwargs))


jax.monitoring.register_event_listener(_on_event)
jax.monitoring.register_scalar_listener(_on_start)
jax.monitoring.register_event_duration_secs_listener(_on_duration)
