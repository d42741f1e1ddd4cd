"""The slow path: the specification of a call.

Bind the arguments, split them, find the entry of their spec or add one, call its jitted function,
finish what was traced meanwhile, and combine the output. A fast path is a guarded replay of this.
"""

import weakref
from collections.abc import Callable
from typing import Any

import jax

from .._compat import ArrayImpl, connect, is_transforming, may_raise, native
from .._fast.make import fast_path, link
from .._fast.writer import TooLarge, Writer
from .._places import trim, trimming
from .._spec.arrays import has_tracers, passed, wait_for
from .._spec.tree import combine
from .._text import switch
from .entry import Call, Entry, Out, Output
from .errors import array_error, raise_instead, runtime_error
from .table import Function, split_named
from .traced import NotInFlight, is_disabled, make, new_entry

#: `EQXJIT_SPECIALIZE=0` leaves all calls to the slow path.
HAS_FAST_PATHS = switch("EQXJIT_SPECIALIZE") is not False


class CallHandler:
    """The calls of one wrapper."""

    def __init__(
        self,
        function: Function,
        fun_arrays: tuple[Any, ...],
        wrapper: Any,
        fasts: list[Any] | None = None,
    ):
        self.function = function
        self.table = function.table
        self.fun_arrays = fun_arrays
        # Weakly, so that no cycle keeps arrays alive.
        self.wrapper = weakref.ref(wrapper)
        self.fasts = self.table.fasts if fasts is None else fasts
        if native is None:
            self.unlink()
        else:
            # C reads the list in each call.
            link(wrapper, self)

    # --- A call, from top to bottom -----------------------------------------------------------

    def slow_call(self, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        # Not `with trimming`, because here all calls pass that no fast path matches.
        try:
            return self.call(self.take_apart(args, kwargs))
        except BaseException:
            trim()
            raise

    def take_apart(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], is_staged: bool = False
    ) -> Call:
        """Return a call, taken apart; an error names a bad argument."""
        __tracebackhide__ = True
        signature = self.function.signature
        args, kwargs = signature.bind(args, kwargs)
        # To what is lowered a `ShapeDtypeStruct` is an array.
        more_arrays = (jax.ShapeDtypeStruct,) if is_staged else ()
        named = lambda: signature.named(args, kwargs)  # noqa: E731
        parts = split_named((args, kwargs), named, True, more_arrays)
        return Call(self.function, self.fun_arrays, args, kwargs, *parts, is_staged)

    def call(self, call: Call) -> Any:
        __tracebackhide__ = True
        table = self.table
        if is_disabled():
            # Nothing is traced: what the function returns is described for this call alone.
            call.entry = new_entry(call)
            return self.attempt(call, self.run, call)
        # This compares static objects.
        entry = call.entry = table.find(call.spec, lambda: new_entry(call))
        result = self.attempt(call, self.run, call)
        if HAS_FAST_PATHS:
            if table.wants_fast(entry) and (fast := fast_path(call)) is not None:
                table.add_fast(fast)
            if native is None:
                self.link()
        return result

    def attempt(self, call: Call, action: Callable[..., Any], *args: Any) -> Any:
        """Return what a part of a call returns; if it raises, drop what the call left behind."""
        __tracebackhide__ = True
        try:
            return action(*args)
        except BaseException as error:
            self.failed(error, call)
            raise

    def run(self, call: Call) -> Any:
        """Return the result of a call's program, once that has run if it can raise."""
        __tracebackhide__ = True
        arrays, waits = passed(call.flat)
        output = make(call, call.entry.jitted, *arrays)
        if waits:
            # The program reads memory of the user's.
            wait_for(*output.values())
        return self.finish(output, call)

    def finish(self, output: Output, call: Call) -> Any:
        """Return the result of a call, once its program has run if it can raise."""
        __tracebackhide__ = True
        [(program, arrays)] = output.items()
        # None also where another thread traced it: this call waited for that, within JAX.
        trace, is_part = call.end_traces(), has_tracers(arrays)
        self.table.n_hits += trace is None
        jaxpr = lowered = None
        # A transformed program is a part of another one, which can't be read. So is one that is
        # called on arrays alone, if it refers to the axis of a `vmap` by its name.
        if program.unread and not is_part and not is_transforming():
            jaxpr, lowered = _program(call)
            read(program, lowered)
        if call.is_recompiled and trace is None:
            self.table.history.recompile(call)
        try:
            if program.must_wait or program.unread or is_part:
                wait_for(arrays)
        finally:
            # Last, because its log line shows the time of all that JAX did for it.
            if trace is not None:
                self.table.history.finish(trace, call, jaxpr, lowered)
        return self.combine(call.entry.outs[program.number][0], arrays, call)

    def combine(self, out: Out, arrays: list[Any], call: Call) -> Any:
        statics = out.statics
        # Mostly none came in, and a list of all that did takes a while.
        if max(out.slots, default=-1) >= 0:
            came_in = call.all_statics
            statics = [came_in[i] if i >= 0 else v for v, i in zip(statics, out.slots, strict=True)]
        return combine(out.spec, iter(arrays), iter(statics))

    # --- From fast paths ----------------------------------------------------------------------

    def link(self) -> None:
        """Have the wrapper try the fast paths that there are now, in generated Python."""
        table, wrapper = self.table, self.wrapper()
        # Unlike a `WeakSet`, this runs no Python when one dies: what a signal handler raises there
        # is lost.
        ref = weakref.ref(self, table.linked.discard)
        with table.lock:
            if wrapper is not None and ref not in table.linked:
                table.linked.add(ref)
                link(wrapper, self)

    def unlink(self) -> None:
        """Have the next call of the wrapper link it again."""
        # It may be gone: what calls this may be another thread, or a finaliser.
        wrapper = self.wrapper()
        if wrapper is not None:
            connect(wrapper, self.slow_call)

    def call_of(self, entry: Entry, /, *args: Any, **kwargs: Any) -> Call:
        call = self.take_apart(args, kwargs)
        if hash(call.spec) != hash(entry.spec):
            raise ValueError(
                "An argument was taken apart twice in one call, with different results. The "
                "flatten of a registered class must depend on nothing but the object."
            )
        call.entry = entry
        return call

    def finish_fast(self, output: Output, call: Call) -> Any:
        __tracebackhide__ = True
        with trimming:
            return self.attempt(call, self.finish, output, call)

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

    # --- Ahead of time ------------------------------------------------------------------------

    def stage(
        self, stage: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Call, Any, Any]:
        """Return a call, what `stage(jitted)` makes of its arrays, and the trace if it made one."""
        __tracebackhide__ = True
        call, table = self.take_apart(args, kwargs, is_staged=True), self.table
        entry = call.entry = table.find(call.spec, lambda: new_entry(call))
        staged = self.attempt(call, make, call, stage(entry.jitted), *call.flat)
        trace = call.end_traces()
        if trace is not None:
            table.history.finish(trace, call, *_program(call))
        return call, staged, trace

    # --- Errors -------------------------------------------------------------------------------

    def failed(self, error: BaseException, call: Call) -> None:
        """Drop what a call that raised left behind, and raise a clearer error if there is one."""
        __tracebackhide__ = True
        entry, table = call.entry, self.table
        trace = call.end_traces()
        if trace is not None and trace._is_made:
            table.history.finish(trace, call)
        # Or an entry that serves nobody would count, and might take the place of one that does.
        if not hasattr(entry, "out") and table.entries.get(entry.spec) is entry:
            table.drop(entry.spec)
        if isinstance(error, Exception) and (trace is None or trace._is_made):
            raise_instead(runtime_error(error))
            # Under `jax.disable_jit` it is the function's.
            paths = None if is_disabled() else call.array_paths
            if paths is not None:
                raise_instead(array_error(error, zip(paths, call.flat, strict=True)))


def read(program: Any, lowered: Any) -> None:
    """Note whether a program can raise, so that calls must wait for it."""
    if lowered is None or may_raise(lowered.compiler_ir("stablehlo")):
        program.must_wait = True
    program.unread = False


def _program(call: Call) -> tuple[Any, Any]:
    """Return the jaxpr of a call that JAX has made, and that lowered; None for each without."""
    # `EQX_ON_ERROR=breakpoint` replaces `jax.jit`.
    if not hasattr(call.entry.jitted, "trace"):
        return None, None
    # Served from JAX's caches: fastest for arrays that say no more than their types.
    flat = [x.aval if type(x) is ArrayImpl and not x.committed else x for x in call.flat]
    try:
        traced = call.entry.jitted.trace(*flat)
    except NotInFlight:
        # They were cleared meanwhile.
        return None, None
    return traced.jaxpr, traced.lower()
