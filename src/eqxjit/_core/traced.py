"""The function that JAX traces for an entry, in the middle of the first call that needs it."""

import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import jax

from .._compat import debug_info, is_jit_disabled, is_staging
from .._diagnostics import events, size
from .._places import CallSite
from .._spec.tree import combine, count_arrays, has_tracers
from . import donation
from .entry import Call, Entry, Output
from .in_flight import in_flight

events.listen(in_flight)


# --- Traces ---------------------------------------------------------------------------------------


class NotInFlight(RuntimeError):
    """JAX called a traced function while its entry has no call in flight.

    That happens if JAX looks for a program whose trace is no longer in its caches.
    """


class TracedFunction:
    """The function of flat arrays that is passed to `jax.jit` for an entry.

    When JAX calls it, it combines the arguments of the call in flight, and calls the user's
    function with them.
    """

    # Set on the class, because JAX reads the signature often, and `inspect` is slow to compute it.
    __signature__ = inspect.signature(lambda *leaves: None)

    def __init__(self, entry: Entry, site: CallSite | None):
        """`site` is where the user's function is defined, if that is known."""
        self.__name__ = self.__qualname__ = entry.name
        # A weak reference, because JAX keeps traced functions for longer than users keep their own
        # functions. So a traced function must refer to nothing of the user's.
        self._entry_ref = weakref.ref(entry)
        self._source = entry.name
        self._debug_info: Any = None
        if site is not None:
            self._source += f" at {site.filename}:{site.line}"
            # Some parts of JAX don't read `__fun_debug_info__`. They take the place from the code.
            code = (lambda: None).__code__
            self.__code__ = code.replace(co_filename=site.filename, co_firstlineno=site.line)

    @property
    def __fun_debug_info__(self) -> Any:
        """The names of the function and its arguments, for JAX; `None` to let JAX name them."""
        if self._debug_info is None:
            call = self._call_in_flight()
            if call is not None:
                self._debug_info = debug_info(self._source, call.array_paths)
        return self._debug_info

    def _call_in_flight(self) -> Call | None:
        """Return this thread's innermost call in flight of the entry; `None` without one."""
        entry = self._entry_ref()
        return None if entry is None else in_flight(entry)

    def __call__(self, *leaves: Any) -> Output:
        call = self._call_in_flight()
        if call is None:
            raise NotInFlight
        is_trace = has_tracers(leaves)
        if not leaves:
            # Without arrays there is no tracer by which to recognise a trace.
            is_trace = is_staging() and not is_jit_disabled()
        if is_trace:
            return _trace(call, leaves)
        # Under `jax.disable_jit` and `EQX_ON_ERROR=breakpoint` nothing is traced. With
        # `jax_debug_nans`, if a program returned a NaN, JAX calls its function again with arrays
        # instead of tracers.
        return _run(call, leaves)


def _trace(call: Call, leaves: Sequence[Any]) -> Output:
    """Run the user's function on tracers, and record that as a trace of the call."""
    call.is_traced = False
    # `tracing` raises if the function has reached its `max_traces`.
    with call.function.table.history.tracing(call) as call.trace:
        output = _run(call, leaves)
    call.is_traced = True
    call.function.stop_sharing_if_changed(call.fun_arrays)
    if call.entry.hides_donation_warning:
        donation.hide_warning()
    return output


def _run(call: Call, leaves: Sequence[Any]) -> Output:
    """Run the user's function on these arrays and on the static objects of the call in flight."""
    # Equinox looks for this name on the stack to find where a jitted function begins.
    __equinox_jit_id__ = b"eqxjit"  # noqa: F841
    entry = call.entry
    n = entry.n_arrays - entry.n_fun
    fun = call.function.combine(leaves[n:])
    args, kwargs = combine(call.spec, iter(leaves[:n]), iter(call.statics))
    return entry.split_output(fun(*args, **kwargs), call.all_statics)


size.begin_stacks_at(_run.__code__)


def new_entry(function: Any, spec: Any, n_fun: int) -> Entry:
    """Return a new entry for the calls of a function with this spec. Nothing is traced yet.

    `n_fun` is the number of the function's own arrays.
    """
    entry = Entry(spec, function, n_fun)
    # Each entry has a new traced function, because JAX looks up its traces by the function.
    traced = TracedFunction(entry, function.table.history.place.site)
    donated = _donated(entry, function)
    jit_arguments = dict(function.options.jit_arguments)
    # Look up `jax.jit` here, not at import, because Equinox replaces it under
    # `EQX_ON_ERROR=breakpoint`.
    entry.jitted = jax.jit(traced, donate_argnums=donated, **jit_arguments)
    return entry


def _donated(entry: Entry, function: Any) -> range:
    """Return the indices of the arrays that the function's option `donate` donates."""
    donate = function.options.donate
    if donate == "none":
        return range(0)
    end = entry.n_arrays
    if function.keeps_arrays:
        # A frozen function passes the same arrays in every call, so they are never donated.
        end -= entry.n_fun
    # The spec is that of `(args, kwargs)`, and the children of a node begin at index 3.
    args = entry.spec[3][3:]
    start = count_arrays(args[0]) if donate.endswith("first") and args else 0
    return range(start, end)


def currently_jitting() -> bool:
    """Return whether operations are being traced into a program right now, rather than executed.

    The answer is that of Equinox's private `currently_jitting`, which takes about a hundred times
    as long.

    **Returns:**

    `True` inside `jax.jit`, `jax.lax.scan` and similar functions, also if there is a `jax.vmap` or
    `jax.grad` inside of them. `False` outside, also directly under `jax.vmap` or `jax.grad`, and
    within `jax.ensure_compile_time_eval`.

    !!! example

        ```python
        >>> import jax
        >>> from eqxjit import currently_jitting
        >>> currently_jitting(), bool(jax.jit(lambda x: x & currently_jitting())(True))
        (False, True)

        ```
    """
    return is_staging()
