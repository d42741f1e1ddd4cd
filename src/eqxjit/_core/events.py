"""JAX's events: what it traces, lowers and compiles, and for which trace of ours.

Between the beginning of a trace and its end in `settle`, the events of its thread belong to it.
"""

import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import CO_GENERATOR
from types import FrameType
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from .._compat import LoweredModule, is_staging, local_of_class, may_raise
from .._interruptions import Weak
from .calls import Call, in_flight
from .hidden_warnings import hide_warnings

TRACING, LOWERING, COMPILING = "tracing", "lowering", "compiling"
_PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": TRACING,
    "/jax/core/compile/jaxpr_to_mlir_module_duration": LOWERING,
    "/jax/core/compile/backend_compile_duration": COMPILING,
}
_PERSISTENT_CACHE_HIT = "/jax/compilation_cache/cache_hits"

#: Observers of all that is compiled, by eqxjit or not, in any thread, each as long as it lives.
#: Each takes `function, phase, seconds, from_cache, record`: the seconds include what was compiled
#: within the phase, and the record is the hook's, or None.
observers: Weak[Callable[[str, str, float, bool, Any], None]] = Weak()


@dataclasses.dataclass(eq=False)
class OpenTrace:
    """A trace from its beginning until it is settled.

    - `call`: the call in flight that needs it.
    - `record`: the hook's.
    - `is_traced`: whether the user's function has returned, and what it returned was read.
    - `jaxpr`: the first that JAX lowers afterwards.
    - `may_raise`: whether a program that JAX compiles afterwards can raise; None if there is none.
    """

    call: Call
    record: Any = None
    is_traced: bool = False
    jaxpr: Any = None
    may_raise: bool | None = None

    @property
    def hook(self) -> Any:
        return self.call.function.table.counter.hook


class _State(threading.local):
    def __init__(self) -> None:
        #: The traces that aren't settled, outside in.
        self.traces: list[OpenTrace] = []
        #: How many phases are under way, one in another.
        self.depth = 0
        self.hits_persistent_cache = False
        #: What ends the hiding of JAX's warning of donated buffers.
        self.show_warning: Callable[[], None] | None = None


_state = _State()


def open_trace(trace: OpenTrace) -> None:
    _state.traces.append(trace)


def close_trace(entry: Any) -> OpenTrace | None:
    """Return this thread's trace of an entry that isn't settled, and drop it; None without one.

    Traces inside of it that weren't settled were interrupted.
    """
    traces = _state.traces
    # A copy, because a call that a hook makes in between may empty the list.
    for index, trace in reversed([*enumerate(traces)]):
        if trace.call.entry is entry:
            # Others that no call is waiting for are left over from interrupts, too: they would keep
            # arrays alive, and their phases would seem to go on.
            around = [other for other in traces[:index] if other.call.entry is not entry]
            traces[:] = [other for other in around if in_flight(other.call.entry) is not None]
            if not traces and not is_staging():
                _state.depth = 0
            return trace
    return None


@contextmanager
def tracing(trace: OpenTrace) -> Iterator[None]:
    """Time the user's function while it is traced, which may be within another's trace."""
    label = trace.call.entry.label
    _state.depth += 1
    start = time.perf_counter()
    try:
        yield
        trace.is_traced = True
    finally:
        seconds = time.perf_counter() - start
        # JAX reports no phase for a trace within another one's.
        trace.hook.spend(trace.record, TRACING, seconds, False)
        _end_phase(label, TRACING, seconds, False, trace.record if trace.is_traced else None)


def _end_phase(function: str, phase: str, seconds: float, from_cache: bool, record: Any) -> None:
    # A call that a hook makes in between may begin to count anew.
    _state.depth = max(0, _state.depth - 1)
    for observer in observers.alive():
        observer(function, phase, seconds, from_cache, record)


# --- JAX's events ---------------------------------------------------------------------------------


def _on_event(event: str, **_: Any) -> None:
    # JAX reports it within the phase in which it would compile otherwise.
    if event == _PERSISTENT_CACHE_HIT:
        _state.hits_persistent_cache = True


def _current() -> tuple[OpenTrace | None, Call | None]:
    # A slice, because a signal handler may empty the list between a look and an index.
    for latest in _state.traces[-1:]:
        if latest.is_traced:
            return latest, latest.call
    return None, in_flight()


def _on_start(event: str, value: float, **_: Any) -> None:
    phase = _PHASES.get(event)
    if phase is None:
        return
    _state.depth += 1
    if phase == TRACING:
        return
    trace, call = _current()
    if call is None:
        return
    hides = [c.entry.hides_donation_warning for c in (call, *[t.call for t in _state.traces])]
    if phase == LOWERING and any(hides):
        # JAX warns while it lowers.
        _state.show_warning = hide_warnings()
    if phase == COMPILING:
        _state.hits_persistent_cache = False
    if trace is None:
        if phase == COMPILING:
            # Say, for another device, where a program may hold other custom calls.
            call.entry.unclassified = call.entry.pending = True
        return
    # JAX passes a name and no more: the rest is in the frame that reports the phase.
    frame = _frame_of_with()
    # Only the first: a `jax.jit` within the program is lowered as a part of it.
    if phase == LOWERING and trace.jaxpr is None:
        trace.jaxpr = local_of_class(frame, ClosedJaxpr)
    elif phase == COMPILING and not trace.may_raise:
        module = local_of_class(frame, LoweredModule)
        trace.may_raise = None if module is None else may_raise(module)


def _frame_of_with() -> Any:
    """Return the frame whose `with` a phase is: JAX's, that lowers or compiles."""
    frame: FrameType | None = sys._getframe(1)
    is_entered = False
    # A generator is on the stack only while it runs, not while its `with` lasts.
    while frame is not None and (not is_entered or frame.f_code.co_flags & CO_GENERATOR):
        is_entered = frame.f_code.co_name == "__enter__"
        frame = frame.f_back
    return frame


def _on_duration(event: str, duration_secs: float, *, fun_name: Any = "", **_: Any) -> None:
    phase = _PHASES.get(event)
    if phase is None:
        return
    if phase == TRACING and _state.depth > 1:
        # Some versions of JAX report nested traces, too: parts of the outer one to us.
        _state.depth -= 1
        return
    if phase == LOWERING and _state.show_warning is not None:
        show, _state.show_warning = _state.show_warning, None
        show()
    from_cache = False
    if phase == COMPILING:
        from_cache, _state.hits_persistent_cache = _state.hits_persistent_cache, False
    trace, call = _current()
    record = None
    if trace is not None:
        record = trace.record
    elif call is not None and phase != TRACING:
        # A trace that became part of an outer program is compiled for itself now.
        record = call.entry.latest_record
    if call is not None and record is not None:
        call.function.table.counter.hook.spend(record, phase, duration_secs, from_cache)
    label = fun_name[len("jit(") : -1] if fun_name.startswith("jit(") else fun_name
    if call is not None and call.entry.name == label:
        label = call.entry.label
    # What JAX compiles meanwhile for itself is no part of it.
    is_of_call = call is not None and label == call.entry.label
    _end_phase(label, phase, duration_secs, from_cache, record if is_of_call else None)


jax.monitoring.register_event_listener(_on_event)
jax.monitoring.register_scalar_listener(_on_start)
jax.monitoring.register_event_duration_secs_listener(_on_duration)
