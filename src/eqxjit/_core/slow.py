"""The slow path: the specification of a call.

Bind the arguments, split them, find the entry of their spec or add one, call its jitted function,
finish what was traced meanwhile, and combine the output. A fast path is a guarded replay of this.
"""

import contextlib
import functools
import weakref
from typing import Any

import jax
from jax.tree_util import tree_map

from .._compat import ArrayImpl, connect, is_transforming, may_raise
from .._fast.make import fast_path, link
from .._fast.numpy_inputs import as_array
from .._fast.writer import TooLarge, Writer
from .._places import trim, trimming
from .._spec.tree import (
    Spec,
    are_aligned,
    combine,
    has_tracers,
    is_array,
    is_transformed,
    resplit,
    split,
)
from .._text import switch
from .calls import Call, make
from .entry import Entry, Output, arrays_of
from .errors import (
    array_error,
    note_shapes,
    note_tracers,
    raise_instead,
    runtime_error,
    split_named,
)
from .function import Function
from .table import Table
from .traced import NotInFlight, argument_names, is_disabled, new_entry

#: `EQXJIT_SPECIALIZE=0` leaves all calls to the slow path.
HAS_FAST_PATHS = switch("EQXJIT_SPECIALIZE") is not False


class CallHandler:
    """The calls of one wrapper.

    - `function`: the function, without its arrays; `fun_arrays`: its arrays.
    - `wrapper`: what calls this; weakly, so that no cycle keeps arrays alive.
    """

    def __init__(self, function: Function, fun_arrays: tuple[Any, ...], wrapper: Any):
        self.function = function
        self.fun_arrays = fun_arrays
        self.wrapper = weakref.ref(wrapper)

    # Found at the first call, because many copies of a wrapper are never called.
    @functools.cached_property
    def table(self) -> Table:
        return self.function.table

    # --- A call, from top to bottom -----------------------------------------------------------

    def first_call(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call, and have the fast paths of the function tried from now on."""
        __tracebackhide__ = True
        wrapper = self.wrapper()
        with trimming:
            if wrapper is None:
                return self.slow_call(*args, **kwargs)
            self.link(wrapper)
            return wrapper(*args, **kwargs)

    def slow_call(self, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        # Not `with trimming`, because here all calls pass that no fast path matches.
        try:
            return self.call(*self.bind(args, kwargs))
        except BaseException:
            trim()
            raise

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.function.signature.bind(args, kwargs)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call with arguments that are bound."""
        __tracebackhide__ = True
        call, entry = self.take_apart(args, kwargs)
        if is_disabled():
            return self.call_unjitted(args, kwargs)
        if entry is not None and entry.aliases and not entry.serves(call.all_statics):
            # The function is asked again which of them it returns.
            entry.invalidate("it returned one of two static arguments that were the same object")
            self.table.drop(entry.spec)
            entry = None
        entry = call.entry = entry or self.table.add(new_entry(call))
        result = self.finish_trace(self.run(call), call)
        # While something is pending, each call would leave a fast path for `finish_fast`.
        if HAS_FAST_PATHS and not entry.pending and self.table.wants_fast(entry):
            fast = fast_path(call)
            if fast is not None:
                self.table.add_fast(fast)
        return result

    def take_apart(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], is_staged: bool = False
    ) -> tuple[Call, Entry | None]:
        """Return a call, taken apart, and its entry if there is one.

        An error names a bad argument.
        """
        __tracebackhide__ = True
        spec, arrays, statics = split_named(
            (args, kwargs), lambda: self.function.signature.named(args, kwargs)
        )
        if is_staged:
            # A `ShapeDtypeStruct` is a static leaf to a call, and an array to what is lowered.
            spec, arrays, statics = resplit(spec, arrays, statics, _is_dynamic)
            arrays = [*map(canonical, arrays)]
        call = Call(self.function, self.fun_arrays, args, kwargs, spec, arrays, statics)
        call.is_staged = is_staged
        # This compares static objects.
        return call, self.find(spec)

    def find(self, spec: Spec) -> Entry | None:
        return self.table.find(spec)

    def run(self, call: Call) -> Output:
        """Return what the entry's jitted function returns, once it is there if it can raise."""
        __tracebackhide__ = True
        entry = call.entry
        try:
            output = make(call, entry.jitted, *map(as_array, call.flat))
            if entry.must_wait or is_transformed(output):
                entry.wait_for(output)
        except BaseException as error:
            self.failed(error, call)
            raise
        return output

    def finish_trace(self, output: Output, call: Call) -> Any:
        """Return the result of a call, after the end of a trace that was made in it.

        Finds out whether the program can raise, so that calls must wait for it, and waits if that
        is new: the program has just run, or another thread is still compiling it.
        """
        __tracebackhide__ = True
        entry = call.entry
        if not (entry.pending or entry.unclassified):
            self.table.n_hits += 1
            return self.combine(output, call)
        # None also where another thread traces: this call waited for it, within JAX.
        trace = entry.end()
        self.table.n_hits += trace is None
        if trace is not None and entry.aliases:
            # It knows others.
            self.table.remove_fast(entry)
        jaxpr = lowered = can_raise = None
        # A transformed program is a part of another one, which can't be read. So is one that is
        # called on arrays alone, if it refers to the axis of a `vmap` by its name.
        if not is_transforming() and not has_tracers(arrays_of(output)):
            jaxpr, lowered, can_raise = self.read_program(call)
        entry.classify(can_raise)
        if entry.is_recompiled and trace is None:
            self.table.history.recompile(call)
        entry.is_recompiled = False
        try:
            entry.wait_for(output)
        except BaseException as error:
            self.failed(error, call)
            raise
        finally:
            # Last, because its log line shows the time of all that JAX did for it.
            if trace is not None:
                self.table.history.finish(trace, jaxpr, lowered, self.table.info().hits)
        return self.combine(output, call)

    def read_program(self, call: Call) -> tuple[Any, Any, bool]:
        """Return what JAX has made of a call, a jaxpr, lowered, and whether that can raise."""
        jitted = call.entry.jitted
        # `EQX_ON_ERROR=breakpoint` replaces `jax.jit`.
        if not hasattr(jitted, "trace"):
            return None, None, True
        try:
            # Served from JAX's caches: fastest for arrays that say no more than their types.
            traced = jitted.trace(
                *[x.aval if type(x) is ArrayImpl and not x.committed else x for x in call.flat]
            )
            lowered = traced.lower()
            return traced.jaxpr, lowered, may_raise(lowered.compiler_ir("stablehlo"))
        except NotInFlight:
            # They were cleared meanwhile.
            return None, None, True

    def combine(self, output: Output, call: Call) -> Any:
        out = call.entry.out_of(output)
        statics = out.statics
        # Mostly none came in, and a list of all that did takes a while.
        if any(slot >= 0 for slot in out.slots):
            came_in = call.all_statics
            statics = [came_in[i] if i >= 0 else v for v, i in zip(statics, out.slots, strict=True)]
        return combine(out.spec, iter(arrays_of(output)), iter(statics))

    # --- From fast paths ----------------------------------------------------------------------

    def link(self, wrapper: Any) -> None:
        """Have a wrapper try the fast paths of its function, then the slow path."""
        if HAS_FAST_PATHS:
            self.table.link(self)
            link(wrapper, self, self.table.fasts)
        else:
            connect(wrapper, self.slow_call)

    def unlink(self) -> None:
        """Have the next call link the wrapper again."""
        # It may be gone: what calls this may be another thread, or a finaliser.
        wrapper = self.wrapper()
        if wrapper is not None:
            connect(wrapper, self.first_call)

    def call_of(self, entry: Entry, /, *args: Any, **kwargs: Any) -> Call:
        bound = self.bind(args, kwargs)
        call = Call(self.function, self.fun_arrays, *bound, *split(bound))
        if not are_aligned(call.spec, entry.spec):
            raise ValueError(
                "An argument was taken apart twice in one call, with different results. The "
                "flatten of a registered class must depend on nothing but the object."
            )
        call.entry = entry
        return call

    def finish_fast(self, output: Output, call: Call) -> Any:
        __tracebackhide__ = True
        with trimming:
            return self.finish_trace(output, call)

    def failed_fast(self, error: BaseException, call: Call) -> None:
        """Raise what the jitted function raised in a fast path, or a clearer error."""
        __tracebackhide__ = True
        with trimming:
            # Raised here, so that a clearer error has the context that it has in the slow path; and
            # caught by this name, which the frame then drops, because its traceback has the frame.
            try:
                raise error
            except BaseException as error:
                self.failed(error, call)
                raise

    def source(self) -> str | None:
        """Return the fast path of the function's latest call in Python; None without one."""
        try:
            return Writer(self.function, self.table.fasts[0].entry).write()[0]
        except (IndexError, TooLarge):
            return None

    # --- Beside calls -------------------------------------------------------------------------

    def call_unjitted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function itself, on a copy of its arguments, under `jax.disable_jit`."""
        __tracebackhide__ = True
        fun = self.function.combine(self.fun_arrays)
        # As in a trace, where a function that changes a list changes its copy.
        args, kwargs = tree_map(_same, (args, kwargs))
        try:
            return tree_map(_same, fun(*args, **kwargs))
        except Exception as error:
            raise_instead(runtime_error(error))
            raise

    def stage(
        self, stage: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Call, Any, Any]:
        """Return a call, what `stage(jitted)` makes of its arrays, and the trace if it made one."""
        __tracebackhide__ = True
        call, entry = self.take_apart(*self.bind(args, kwargs), is_staged=True)
        entry = call.entry = entry or self.table.add(new_entry(call))
        try:
            staged = make(call, stage(entry.jitted), *call.flat)
        except BaseException as error:
            note_shapes(error, self.function.signature.named(call.args, call.kwargs))
            self.failed(error, call)
            raise
        trace = entry.end()
        # There is no program yet: the first call reads it.
        entry.classify(None)
        if trace is not None:
            jaxpr = None
            # JAX's caches may have been cleared meanwhile.
            with contextlib.suppress(NotInFlight):
                jaxpr = entry.jitted.trace(*call.flat).jaxpr
            self.table.history.finish(trace, jaxpr, staged, self.table.info().hits)
        return call, staged, trace

    # --- Errors -------------------------------------------------------------------------------

    def failed(self, error: BaseException, call: Call) -> None:
        """Drop what a call that raised left behind, and raise a clearer error if there is one."""
        __tracebackhide__ = True
        entry = call.entry
        trace = entry.end()
        # JAX may have compiled it all the same: the next call finds out.
        entry.classify(None)
        if trace is not None and trace._is_made:
            self.table.history.finish(trace, None, None, self.table.info().hits)
        # Or an entry that serves nobody would count, and might take the place of one that does.
        self.table.drop_untraced(entry)
        if isinstance(error, Exception) and (trace is None or trace._is_made):
            self.explain(error, call)

    def explain(self, error: Exception, call: Call) -> None:
        """Raise a clearer error than JAX's, if there is one."""
        __tracebackhide__ = True
        raise_instead(runtime_error(error))
        names = argument_names(call)
        if names is None:
            return
        arrays = [*zip(names, call.flat, strict=True)]
        note_tracers(error, arrays)
        raise_instead(array_error(error, arrays))


def _same(leaf: Any) -> Any:
    return leaf


def _is_dynamic(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or is_array(leaf)


def canonical(array: Any) -> Any:
    """Return a structure with the dtype of its arrays: without x64, float32 for float64."""
    is_struct = isinstance(array, jax.ShapeDtypeStruct)
    # Typed keys have a dtype that only JAX has.
    if not is_struct or jax.numpy.issubdtype(array.dtype, jax.dtypes.extended):
        return array
    return array.update(dtype=jax.dtypes.canonicalize_dtype(array.dtype))
