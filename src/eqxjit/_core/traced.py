"""The function that JAX traces for one entry, in the middle of whatever call needs it."""

import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import jax

from .._compat import debug_info, is_staging
from .._diagnostics import events, size
from .._places import CallSite
from .._spec.tree import combine, count_arrays, has_tracers
from . import donation
from .entry import Call, Entry, Output
from .in_flight import in_flight

events.listen(in_flight)


# --- Traces ---------------------------------------------------------------------------------------


class NotInFlight(RuntimeError):
    """JAX asks for a trace outside of any call: its caches no longer hold one that it had."""


class TracedFunction:
    """The function that JAX traces: it rebuilds the arguments of the call in flight, and calls.

    It refers to nothing of the user's, because JAX keeps what it jits longer than its user does.
    """

    # Asked for by JAX each time, and slow to find out.
    __signature__ = inspect.signature(lambda *leaves: None)

    def __init__(self, name: str, site: CallSite | None, entry: Entry):
        self.__name__ = self.__qualname__ = name
        self.entry_ref = weakref.ref(entry)
        self._source = name
        self._debug_info: Any = None
        if site is not None:
            self._source += f" at {site.filename}:{site.line}"
            # By which JAX finds the place, where it doesn't ask for `__fun_debug_info__`.
            code = (lambda: None).__code__
            self.__code__ = code.replace(co_filename=site.filename, co_firstlineno=site.line)

    @property
    def __fun_debug_info__(self) -> Any:
        """JAX's record of the names of the function and its arguments; None to leave it to JAX."""
        if self._debug_info is None:
            entry = self.entry_ref()
            call = None if entry is None else in_flight(entry)
            if call is not None:
                self._debug_info = debug_info(self._source, call.array_paths)
        return self._debug_info

    def __call__(self, *leaves: Any) -> Output:
        entry = self.entry_ref()
        call = None if entry is None else in_flight(entry)
        if entry is None or call is None:
            raise NotInFlight
        # Without arrays, no tracer shows whether this is a trace.
        if has_tracers(leaves) or (not leaves and is_staging() and not is_disabled()):
            return _trace(entry, call, leaves)
        # Under `jax.disable_jit` and `EQX_ON_ERROR=breakpoint` nothing is traced; and with
        # `jax_debug_nans` JAX runs the function that made a NaN again, on the arrays themselves.
        return _run(entry, call, leaves)


def _trace(entry: Entry, call: Call, leaves: Sequence[Any]) -> Output:
    call.is_traced = False
    # It raises if the function may not be traced any more.
    with call.function.table.history.tracing(call) as call.trace:
        output = _run(entry, call, leaves)
    call.is_traced = True
    if entry.hides_donation_warning:
        donation.hide_warning()
    return output


def _run(entry: Entry, call: Call, leaves: Sequence[Any]) -> Output:
    """Run the user's function on these arrays and on the static objects of the call in flight."""
    # Equinox looks for this name on the stack, to tell where the jitted part begins.
    __equinox_jit_id__ = b"eqxjit"  # noqa: F841
    n = entry.n_arrays - entry.n_fun
    fun = call.function.combine(leaves[n:])
    args, kwargs = combine(call.spec, iter(leaves[:n]), iter(call.statics))
    return entry.split_output(fun(*args, **kwargs), call.all_statics)


size.begin_stacks_at(_run.__code__)


def is_disabled() -> bool:
    """Return whether `jax.disable_jit` is in force."""
    return jax.config.jax_disable_jit  # type: ignore[attr-defined]


def new_entry(function: Any, spec: Any, n_fun: int) -> Entry:
    """Return a new entry for a structure of a function's calls, not yet traced.

    `n_fun` is the number of the function's own arrays.
    """
    donate = function.options.donate
    entry = Entry(spec, function, n_fun)
    # New for each entry: JAX keeps what it traced by the function that it jits.
    traced = TracedFunction(entry.name, function.table.history.place.site, entry)
    first = last = 0
    if donate != "none":
        # The arrays of a frozen function are never donated: the next call passes the same ones.
        last = entry.n_arrays - (entry.n_fun if function.keeps_arrays else 0)
        args = spec[3][3:]
        if donate.endswith("first") and args:
            first = count_arrays(args[0])
    jit_arguments = dict(function.options.jit_arguments)
    # Look up `jax.jit` here, not at import, because Equinox replaces it under
    # `EQX_ON_ERROR=breakpoint`.
    entry.jitted = jax.jit(traced, donate_argnums=range(first, last), **jit_arguments)
    return entry


def currently_jitting() -> bool:
    """Return whether operations are being traced into a program right now, rather than executed.

    Answers as Equinox's (private) `currently_jitting` does, in about a hundredth of the time.

    **Returns:**

    `True` inside `jax.jit`, `jax.lax.scan` and the like, also below a `jax.vmap` or `jax.grad`
    there; `False` outside, directly under `jax.vmap` or `jax.grad`, and within
    `jax.ensure_compile_time_eval`.

    !!! example

        ```python
        >>> import jax
        >>> from eqxjit import currently_jitting
        >>> currently_jitting(), bool(jax.jit(lambda x: x & currently_jitting())(True))
        (False, True)

        ```
    """
    return is_staging()
