"""Listens to what JAX traces, lowers and compiles, and tells which call each event belongs to.

JAX also compiles in a warm call, without tracing again: for a new device, say. The jaxpr stays, but
what it is lowered to may hold other custom calls; so its entry has to be looked at once more.
"""

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import jax

from ._history import TooManyTracesError
from ._partition import has_tracers
from ._trace import Trace
from ._tracebacks import OUR_FILES

if TYPE_CHECKING:
    from ._entry import Call, Entry
    from ._site import Site

#: The entries with a program that was compiled in a warm call and hasn't been looked at.
recompiled: set["Entry"] = set()

#: The local variable that holds the `Call` in the miss path.
CALL_VARIABLE = "__eqxjit_call__"

#: The variable, local or global, that holds the entry of a warm call.
ENTRY_VARIABLE = "__eqxjit_entry__"

TRACING, LOWERING, COMPILING = "tracing", "lowering", "compiling"
_PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": TRACING,
    "/jax/core/compile/jaxpr_to_mlir_module_duration": LOWERING,
    "/jax/core/compile/backend_compile_duration": COMPILING,
}
_PERSISTENT_CACHE_HIT = "/jax/compilation_cache/cache_hits"
_JAX_FILES = (os.path.dirname(jax.__file__) + os.sep, contextlib.__file__)


class Observer(Protocol):
    """Is told of all that is compiled, by eqxjit or not, in any thread."""

    def begun(self, function: str, phase: str) -> None:
        """A phase of a function begins: `"tracing"`, `"lowering"` or `"compiling"`."""
        ...

    def ended(self, function: str, phase: str, seconds: float, from_cache: bool) -> None:
        """A phase has taken so many seconds, without what was compiled within it."""
        ...

    def traced(self, trace: Trace) -> None:
        """A trace of ours is complete."""
        ...


#: Whoever wants to know.
observers: list[Observer] = []


class _State(threading.local):
    def __init__(self) -> None:
        #: For each phase under way, outside in: how many seconds of it weren't its own.
        self.nested: list[float] = []
        self.hits_persistent_cache = False
        #: How long the last program that was lowered in a warm call took, and whose it is.
        self.lowering: tuple[Entry | None, float] = (None, 0.0)
        #: What JAX compiles in a warm call right now, and whether that is yet to be counted.
        self.recompilation: tuple[Site, Trace, bool] | None = None


_state = _State()


@contextmanager
def tracing(function: str, trace: Trace) -> Iterator[None]:
    """While a function of ours is traced, which may be within another's trace."""
    _begin_phase(function, TRACING)
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - start
        trace.seconds.tracing = seconds
        _end_phase(function, TRACING, seconds)


def _begin_phase(function: str, phase: str) -> None:
    _state.nested.append(0.0)
    for observer in tuple(observers):
        observer.begun(function, phase)


def _end_phase(function: str, phase: str, seconds: float, from_cache: bool = False) -> None:
    nested = _state.nested.pop() if _state.nested else 0.0
    if _state.nested:
        _state.nested[-1] += seconds
    for observer in tuple(observers):
        observer.ended(function, phase, max(0.0, seconds - nested), from_cache)


# --- JAX's events -----------------------------------------------------------------------------


def _on_event(event: str, **_: Any) -> None:
    if event == _PERSISTENT_CACHE_HIT:
        _state.hits_persistent_cache = True


def _on_start(event: str, value: float, *, fun_name: Any = "", **_: Any) -> None:
    phase = _PHASES.get(event)
    if phase is None:
        return
    # Some versions of JAX report nested traces, too: parts of the outer one to us.
    is_part = phase == TRACING and _state.nested
    if is_part or (phase != COMPILING and not observers):
        _state.nested.append(0.0)
        return
    origin = _Origin(fun_name)
    if phase == COMPILING and origin.compiles_without_tracing:
        try:
            _state.recompilation = origin.begin_recompilation()
        except TooManyTracesError:
            raise
        except Exception:
            # What can't be told about mustn't fail.
            _state.recompilation = None
    _begin_phase(origin.label, phase)


def _on_duration(event: str, duration_secs: float, *, fun_name: Any = "", **_: Any) -> None:
    phase = _PHASES.get(event)
    if phase is None:
        return
    if phase == TRACING and len(_state.nested) > 1:
        nested = _state.nested.pop()
        _state.nested[-1] += nested
        return
    origin = _Origin(fun_name)
    from_cache = False
    if phase == COMPILING:
        from_cache, _state.hits_persistent_cache = _state.hits_persistent_cache, False
    if origin.call is not None and origin.call.traces:
        _add(origin.call.traces[-1], phase, duration_secs, from_cache)
    elif origin.called is not None and phase == LOWERING:
        _state.lowering = origin.called, duration_secs
    elif origin.called is not None and phase == COMPILING:
        _end_recompilation(origin.called, duration_secs, from_cache)
    if origin.entry is not None and phase == COMPILING:
        recompiled.add(origin.entry)
    _end_phase(origin.label, phase, duration_secs, from_cache)


def _add(trace: Trace, phase: str, seconds: float, from_cache: bool) -> None:
    if phase == TRACING:
        # What JAX does around the function's own trace included.
        trace.seconds.tracing = seconds
    elif phase == LOWERING:
        trace.seconds.lowering += seconds
    else:
        trace.seconds.compiling += seconds
        trace.from_persistent_cache = from_cache


def _end_recompilation(entry: "Entry", seconds: float, from_cache: bool) -> None:
    if _state.recompilation is None:
        return
    (site, trace, is_new), _state.recompilation = _state.recompilation, None
    (lowered, lowering_seconds), _state.lowering = _state.lowering, (None, 0.0)
    _add(trace, LOWERING, lowering_seconds if lowered is entry else 0.0, False)
    _add(trace, COMPILING, seconds, from_cache)
    if is_new:
        site.program.history.end(trace, is_made=True)
        site.tell(trace)


class _Origin:
    """Whose function an event is about.

    - `call`: the call in the miss path whose program it is; None if it isn't one's.
    - `entry`: the entry of the warm call whose program it is; None if it isn't one's.
    - `label`: what to call the function.
    """

    def __init__(self, fun_name: str):
        self.call: Call | None = None
        self.entry: Entry | None = None
        self.label = fun_name[len("jit(") : -1] if fun_name.startswith("jit(") else fun_name
        frame = sys._getframe(2)
        # Other code in between is that of a host callback, say, run by a CPU in this thread.
        while frame is not None and not self._find(frame):
            frame = frame.f_back if frame.f_code.co_filename.startswith(_JAX_FILES) else None
        self._frame = frame

    def _find(self, frame: FrameType) -> bool:
        """Whether a frame is of the innermost call through eqxjit on the stack."""
        if not frame.f_code.co_filename.startswith(OUR_FILES):
            return False
        self.call = frame.f_locals.get(CALL_VARIABLE)
        if self.call is not None:
            self.label = self.call.entry.label
            return True
        self.entry = frame.f_locals.get(ENTRY_VARIABLE) or frame.f_globals.get(ENTRY_VARIABLE)
        if self.entry is not None:
            self.label = self.entry.label
            return True
        return False

    @property
    def called(self) -> "Entry | None":
        """The entry whose program it is; None if it isn't one's."""
        return self.entry if self.call is None else self.call.entry

    @property
    def compiles_without_tracing(self) -> bool:
        """Whether no trace of ours stands for what is compiled."""
        return self.entry is not None or (self.call is not None and not self.call.traces)

    def begin_recompilation(self) -> "tuple[Site, Trace, bool]":
        """The trace that JAX begins to compile; whether it is a new record."""
        if self.call is not None and self.call.description is not None:
            call, site = self.call, self.call.site
            return site, *site.begin_recompilation(call.entry, self.call.description, False)
        assert self._frame is not None
        assert self.entry is not None
        variables = self._frame.f_locals
        for value in variables.values():
            # A generated call holds its entry's part of its site.
            if type(value) is functools.partial and any(arg is self.entry for arg in value.args):
                site: Site = value.func.__self__  # type: ignore[attr-defined]
                args, kwargs = site.wrapped.binding.arguments_among(variables)
                break
        else:
            site, args, kwargs = variables["self"], variables["args"], variables["kwargs"]
        leaves, static = site.partition(args, kwargs)
        description = site.describe(static, leaves)
        return site, *site.begin_recompilation(self.entry, description, has_tracers(leaves))


jax.monitoring.register_event_listener(_on_event)
jax.monitoring.register_scalar_listener(_on_start)
jax.monitoring.register_event_duration_secs_listener(_on_duration)
