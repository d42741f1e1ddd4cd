"""The slow path: the specification of a call.

Bind the arguments, split them, find the entry of their spec or add one, call its jitted function,
finish what was traced meanwhile, and combine the output. A fast path is a guarded replay of this.
"""

import weakref
from typing import Any

import jax
from jax.tree_util import tree_map

from .._compat import ArrayImpl, connect, may_raise
from .._fast.make import fast_path, link
from .._fast.numpy_inputs import as_array
from .._fast.writer import Writer
from .._interruptions import unless_it_raises
from .._places import trim, trimming
from .._spec.tree import combine, has_tracers, is_array, resplit, split
from .._switches import switch
from .calls import Call, make
from .entry import Entry, Output, arrays_of
from .errors import (
    array_error,
    note_shapes,
    note_tracers,
    raise_instead,
    runtime_error,
    with_argument_errors,
)
from .function import Function
from .table import Table
from .traced import Box, NotInFlight, new_entry

#: `EQXJIT_SPECIALIZE=0` leaves all calls to the slow path.
HAS_FAST_PATHS = switch("EQXJIT_SPECIALIZE") is not False


class Caller:
    """The calls of one wrapper.

    - `function`: the function, without its arrays; `fun_arrays`: its arrays.
    - `wrapper`: what calls this; weakly, so that no cycle keeps arrays alive.
    """

    #: Whether `jax.disable_jit` has an effect.
    can_be_disabled = True

    def __init__(self, function: Function, fun_arrays: tuple[Any, ...], wrapper: Any):
        self.function = function
        self.fun_arrays = fun_arrays
        self.wrapper = weakref.ref(wrapper)

    @property
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
        __tracebackhide__ = True
        call = self.split(args, kwargs)
        if self.can_be_disabled and jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return self.call_unjitted(args, kwargs)
        entry = self.find_or_add(call)
        try:
            output = make(call, entry.jitted, [*map(as_array, call.flat)])
            if entry.blocks and type(output) is not Box:
                entry.wait_for(output)
        except BaseException as error:
            self.failed(error, call)
            raise
        result = self.finish_trace(output, call)
        # While something is pending, each call would leave a fast path for `finish_fast`.
        if HAS_FAST_PATHS and not entry.pending and self.table.wants_fast(entry):
            fast = fast_path(call)
            if fast is not None:
                self.table.add_fast(fast)
        return result

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return a call, taken apart; an error names a bad argument."""
        __tracebackhide__ = True
        named = self.function.signature.named
        parts = with_argument_errors(lambda: split((args, kwargs)), lambda: named(args, kwargs))
        return Call(self.function, self.fun_arrays, args, kwargs, *parts)

    def find_or_add(self, call: Call) -> Entry:
        """Return the entry that serves a call, new where there is none."""
        __tracebackhide__ = True
        call.entry = self.find(call) or self.table.add(new_entry(call))
        return call.entry

    def find(self, call: Call) -> Entry | None:
        """Return the entry of a call's spec, if there is one; an error names a bad argument."""
        __tracebackhide__ = True
        named = self.function.signature.named
        # Looking it up compares static objects.
        return with_argument_errors(
            lambda: self.table.find(call.spec), lambda: named(call.args, call.kwargs)
        )

    def finish_trace(self, output: Output | Box, call: Call) -> Any:
        """Return the result of a call, after the end of a trace that was made in it.

        Finds out whether the program can raise, so that calls must wait for it, and waits if that
        is new: the program has just run, or another thread is still compiling it.
        """
        __tracebackhide__ = True
        entry = call.entry
        if isinstance(output, Box):
            # Its containers are new, as where it is traced.
            return tree_map(_same, output.content)
        if not entry.pending:
            self.table.n_hits += 1
            return self.combine(output, call)
        # None also where another thread traces: this call waited for it, within JAX.
        trace = entry.end()
        self.table.n_hits += trace is None
        jaxpr = can_raise = None
        # A transformed program is a part of another one, which can't be read.
        if not has_tracers(arrays_of(output)) and not has_tracers(call.flat):
            jaxpr, can_raise = self.read_program(call)
        entry.classify(can_raise)
        try:
            entry.wait_for(output)
        except BaseException as error:
            self.failed(error, call)
            raise
        finally:
            # Last, because its log line shows the time of all that JAX did for it.
            if trace is not None:
                self.table.history.finish(trace, jaxpr)
        return self.combine(output, call)

    def read_program(self, call: Call) -> tuple[Any, bool]:
        """Return the jaxpr of a call that JAX has made, and whether its program can raise."""
        jitted = call.entry.jitted
        # `EQX_ON_ERROR=breakpoint` replaces `jax.jit`.
        if not hasattr(jitted, "trace"):
            return None, True
        try:
            # Served from JAX's caches: fastest for arrays that say no more than their types.
            traced = jitted.trace(
                *[x.aval if type(x) is ArrayImpl and not x.committed else x for x in call.flat]
            )
            return traced.jaxpr, may_raise(traced.lower().compiler_ir("stablehlo"))
        except NotInFlight:
            # They were cleared meanwhile.
            return None, True

    def combine(self, output: Output, call: Call) -> Any:
        out = call.entry.outs[next(iter(output)) if type(output) is dict else 0]
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
        call.entry = entry
        return call

    def finish_fast(self, output: Output, entry: Entry, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return self.finish_trace(output, self.call_of(entry, *args, **kwargs))
        except BaseException:
            trim()
            raise

    def failed_fast(self, error: BaseException, entry: Entry, /, *args: Any, **kwargs: Any) -> None:
        """Raise what the jitted function raised in a fast path, or a clearer error."""
        __tracebackhide__ = True
        with trimming:
            # Raised here, so that a clearer error has the context that it has in the slow path; and
            # caught by this name, which the frame then drops, because its traceback has the frame.
            try:
                raise error
            except BaseException as error:
                try:
                    call = self.call_of(entry, *args, **kwargs)
                except Exception:
                    # A node of the user's can't be flattened any more.
                    call = None
                if call is not None:
                    self.failed(error, call)
                raise

    def source(self) -> str | None:
        """Return the fast path of the function's latest call in Python; None without one."""
        fasts = self.table.fasts
        # A large tree's isn't written.
        return unless_it_raises(lambda: Writer(self.function, fasts[0].entry).write()[0], None)

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
        call = self.split(*self.bind(args, kwargs))

        def is_dynamic(leaf: Any) -> bool:
            return isinstance(leaf, jax.ShapeDtypeStruct) or is_array(leaf)

        # A `ShapeDtypeStruct` is a static leaf to a call, and an array to what is lowered.
        call.spec, arrays, call.statics = resplit(call.spec, call.arrays, call.statics, is_dynamic)
        call.arrays = [*map(canonical, arrays)]
        call.is_staged = True
        entry = self.find_or_add(call)
        try:
            staged = make(call, stage(entry.jitted), call.flat)
        except BaseException as error:
            note_shapes(error, self.function.signature.named(call.args, call.kwargs))
            self.failed(error, call)
            raise
        trace = entry.end()
        # There is no program yet: the first call reads it.
        entry.classify(None)
        if trace is not None:
            self.table.history.finish(trace, entry.jitted.trace(*call.flat).jaxpr)
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
            self.table.history.finish(trace, None)
        # Or an entry that serves nobody would count, and might take the place of one that does.
        self.table.drop_untraced(entry)
        if isinstance(error, Exception):
            user_raised = trace is not None and not trace._is_made
            self.explain(error, call.args, call.kwargs, user_raised)

    def explain(
        self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any], user_raised: bool
    ) -> None:
        """Raise a clearer error than JAX's, if there is one; never in place of a user's."""
        __tracebackhide__ = True
        named = self.function.signature.named(args, kwargs)
        if self.fun_arrays:
            named.append(("fun", self.function.combine(self.fun_arrays)))
        note_tracers(error, named)
        if not user_raised:
            raise_instead(runtime_error(error) or array_error(error, named))


def _same(leaf: Any) -> Any:
    return leaf


def canonical(array: Any) -> Any:
    """Return a structure with the dtype of its arrays: without x64, float32 for float64."""
    is_struct = isinstance(array, jax.ShapeDtypeStruct)
    # Typed keys have a dtype that only JAX has.
    if not is_struct or jax.numpy.issubdtype(array.dtype, jax.dtypes.extended):
        return array
    return array.update(dtype=jax.dtypes.canonicalize_dtype(array.dtype))
