"""The function that JAX traces, for one cache entry."""

import contextlib
import inspect
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jax

from .._code.location import stub_at
from .._compat import debug_info, is_staging
from .._plan.signature import Signature
from .._trees.array_layout import ArrayLayout
from .._trees.out_spec import Output
from .._trees.partition import has_tracers
from .debug_info import argument_names
from .entry import ENTRY_VARIABLE, CacheEntry
from .events import tracing
from .options import Options
from .request import CALL_VARIABLE, Call
from .stack import CacheMiss, Traced, frameless_in, is_foreign


def new_entry(
    signature: Signature, options: Options, layout: ArrayLayout, donated: tuple[int, ...]
) -> CacheEntry:
    """Return a new entry, not yet traced; `donated` are positions among all arrays of a call."""
    traced = TracedFunction(signature)
    # `jax.jit` as it is now: `EQX_ON_ERROR=breakpoint` replaces it.
    jitted = jax.jit(traced, donate_argnums=donated, **dict(options.jit_arguments))
    entry = CacheEntry(signature, options, layout, jitted)
    traced.entry_ref = weakref.ref(entry)
    return entry


def _current_call(entry: CacheEntry | None) -> Call | None:
    """Return the call that JAX traces for now; None if it is in a warm call."""
    frame: FrameType | None = sys._getframe(2)
    if entry is not None and entry.has_frameless_calls and is_foreign(frame):
        # `jax.disable_jit` has JAX call the function as it is.
        return None
    while frame is not None and frameless_in(frame) is None:
        names = frame.f_code.co_varnames
        if CALL_VARIABLE in names:
            return frame.f_locals.get(CALL_VARIABLE)
        if ENTRY_VARIABLE in names or ENTRY_VARIABLE in frame.f_globals:
            return None
        frame = frame.f_back
    return None


class TracedFunction(Traced):
    """The function that JAX traces: it rebuilds the call that is in the miss path, and makes it.

    It refers to nothing of the user's: JAX keeps what it jits longer than its user does.
    """

    # Asked for by JAX each time, and slow to find out.
    __signature__ = inspect.Signature(
        [inspect.Parameter("leaves", inspect.Parameter.VAR_POSITIONAL)]
    )

    def __init__(self, signature: Signature):
        self.__name__ = self.__qualname__ = signature.name
        self._source = "_".join(signature.name.split()) or "function"
        self._debug_info: Any = None
        site = signature.location
        if site is not None:
            self._source += f" at {site.filename}:{site.line}"
            # By which JAX finds the place, where it doesn't ask for `__fun_debug_info__`.
            self.__code__ = stub_at(site)

    def __repr__(self) -> str:
        return self._source

    @property
    def __fun_debug_info__(self) -> Any:
        """JAX's record of the names of the function and its arguments; None to leave it to JAX."""
        call = _current_call(self.entry_ref())
        if self._debug_info is None and call is not None and call.entry is self.entry_ref():
            names = argument_names(call.signature, call.arguments, call.fun, call.entry.layout)
            self._debug_info = debug_info(self._source, names)
        return self._debug_info

    def __call__(self, *leaves: Any) -> Output:
        entry = self.entry_ref()
        call = _current_call(entry)
        # With `jax_debug_nans` JAX also runs what has made a NaN, on the arrays themselves.
        is_traced = has_tracers(leaves) or (not leaves and is_staging())
        if not is_traced:
            _check_not_donated(self.__name__, leaves)
        if call is None or entry is None or call.entry is not entry:
            raise CacheMiss
        fun_static, arguments = call.wrapped.fun_to_trace, call.arguments
        # The user's function may call its own wrapper, which is a call of its own.
        __eqxjit_call__ = None  # noqa: F841
        try:
            with _counted(call) if is_traced else contextlib.nullcontext():
                fun = fun_static.combine(entry.layout.of_fun(leaves))
                args, kwargs = arguments.combine(entry.layout.of_arguments(leaves))
                return entry.describe(fun(*args, **kwargs), call.wrapped.given(arguments))
        except BaseException:
            call.user_raised = True
            raise


def _check_not_donated(name: str, leaves: Sequence[Any]) -> None:
    """Raise JAX's error for a NaN where JAX can't find it, because the arrays are gone."""
    config: Any = jax.config
    if config.jax_disable_jit or not (config.jax_debug_nans or config.jax_debug_infs):
        return
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
        raise FloatingPointError(
            f"invalid value (nan or inf) encountered in the output of `{name}`. Which operation "
            "made it can't be found, because the arguments were donated: call it without `donate`."
        )


@contextmanager
def _counted(call: Call) -> Iterator[None]:
    """Limit, count and time a trace of the user's function."""
    attempt = call.counter.begin(call)
    is_made = False
    try:
        with tracing(call.entry.label, call.counter.hook, attempt.record):
            yield
        is_made = True
    finally:
        call.counter.end(attempt, is_made)
    # Now: an interrupt may have kept the trace from its end.
    call.traces.append(attempt.record)
