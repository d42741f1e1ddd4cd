"""The slow path: a call in plain Python, step by step. It specifies what fast paths do, too.

1. Bind the arguments to the parameters of the function, and split them.
2. Find the entry of their spec. If there is none, add an entry.
3. Call the jitted function of the entry.
4. If its program is new, find out whether the program can raise. If it can, wait for it.
5. Combine the output.

The guards of a fast path check that a call has a known structure. If so, the fast path does what
these steps would do.
"""

import weakref
from typing import Any, NamedTuple

import jax

from .._compat import ArrayImpl, connect, is_jit_disabled, is_transforming, native
from .._fast.make import fast_path, link
from .._fast.writer import TooLarge, Writer
from .._places import trim, trimming
from .._signals import suppressed
from .._spec.arrays import passed, wait_for
from .._spec.static_key import Static
from .._spec.tree import Spec, combine, has_tracers
from .._text import switch
from .entry import Call, Entry, Out, Output
from .errors import raise_clearer
from .in_flight import call_in_flight
from .table import Function, split_named
from .traced import new_entry

#: With `EQXJIT_SPECIALIZE=0`, all calls take the slow path.
HAS_FAST_PATHS = switch("EQXJIT_SPECIALIZE") is not False


class BoundArguments(NamedTuple):
    """The arguments of a call, bound to the parameters of the function, and split.

    - `args`, `kwargs`: the bound arguments.
    - `spec`, `arrays`, `statics`: what `split` returns for `(args, kwargs)`.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    spec: Spec
    arrays: list[Any]
    statics: list[Any]


def bind_and_split(
    function: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_staged: bool = False,
) -> BoundArguments:
    """Bind the arguments of a call and split them. An error names the argument at fault.

    If `is_staged`, a `ShapeDtypeStruct` may stand for an array.
    """
    __tracebackhide__ = True
    signature = function.signature
    args, kwargs = signature.bind(args, kwargs)
    named = lambda: signature.named(args, kwargs)  # noqa: E731
    more_arrays = (jax.ShapeDtypeStruct,) if is_staged else ()
    spec, arrays, statics = split_named((args, kwargs), named, True, more_arrays)
    return BoundArguments(args, kwargs, spec, arrays, statics)


def _are_same(a: Spec, b: Spec) -> bool:
    """Return whether two specs are the same for a fast path, even if their hashes differ.

    A part of a static container is the same if it is the same object. But the container's hash
    follows that of the part, which the user may have changed.
    """
    if isinstance(a, Static) and isinstance(b, Static):
        return a.key == b.key
    if type(a) is tuple and type(b) is tuple:
        return len(a) == len(b) and all(map(_are_same, a, b))
    return a == b


class ending:
    """A context manager around the part of a call in which JAX may trace.

    If that part raises an error, a clearer error is raised instead, if there is one. The entry is
    dropped if none of its traces has completed. At the end, with or without an error, the trace of
    this call is logged, if it has completed.
    """

    # Not a `contextmanager`, because its generator would add frames to the user's traceback.
    __slots__ = ("_call",)

    def __init__(self, call: Call):
        self._call = call

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        __tracebackhide__ = True
        call = self._call
        try:
            if error is not None:
                _drop_unused(call)
                raise_clearer(error, call)
        finally:
            # At the end of the call, because the log shows how long JAX took for the whole call.
            call.function.table.history.finish(call)


def _drop_unused(call: Call) -> None:
    """Drop the entry of a call that raised, if no trace of the entry has completed.

    Otherwise the useless entry would count towards `maxsize`, and might displace a useful entry.
    """
    entry, table = call.entry, call.function.table
    if not hasattr(entry, "out") and table.entries.get(entry.spec) is entry:
        table.drop(entry.spec)


def run(call: Call) -> Any:
    """Run the program of a call and return the output. JAX compiles the program if it is new."""
    __tracebackhide__ = True
    with ending(call):
        arrays, entry = call.flat, call.entry
        n_used = len(entry.used)
        waits = may_wait = False
        if not {*map(type, arrays)} <= {ArrayImpl}:
            arrays, waits, may_wait = passed(arrays, entry.used)
        output = call_in_flight(call, entry.jitted, *arrays)
        [(program, outputs)] = output.items()
        if waits or (may_wait and entry.may_use_more(program, n_used)):
            # The program reads NumPy arrays in place, and their owner may overwrite them later.
            wait_for(outputs)
        return finish(call, output)


def finish(call: Call, output: Output) -> Any:
    """Return the user's output of a call. If its program can raise, wait for the program first."""
    __tracebackhide__ = True
    [(program, arrays)] = output.items()
    call.program = program
    is_part = has_tracers(arrays)
    # Under a transformation the program may become a part of a different program, which can't be
    # read here. That may be so even if no output is a tracer, because a program can refer to the
    # axis of a `vmap` by name.
    if program.unread and not is_part and not is_transforming():
        call.jaxpr, call.lowered = lower_again(call)
        call.entry.read(program, call.lowered, call.jaxpr)
    if program.must_wait or program.unread or is_part:
        wait_for(arrays)
    # A call without a trace is a hit. It may still have an unread program, if another thread traced
    # the program while this call waited within JAX.
    if call.trace is None:
        call.entry.n_hits += 1
    out, _ = call.entry.outs[program.number]
    return combine_output(call, out, arrays)


def lower_again(call: Call) -> tuple[Any, Any]:
    """Return the jaxpr of a call's program and JAX's lowering of it, both from JAX's caches.

    Both are `None` if JAX can't find the program again.
    """
    jitted = call.entry.jitted
    # `EQX_ON_ERROR=breakpoint` replaces `jax.jit`, and a compiled function has no `trace`. Under
    # `jax.disable_jit` there is no program.
    if is_jit_disabled() or not hasattr(jitted, "trace"):
        return None, None
    # JAX finds the program fastest by avals. For a committed array, pass the array itself, because
    # an aval doesn't have the array's devices. Donated arrays are deleted by now, but still have
    # their avals.
    flat = [x.aval if type(x) is ArrayImpl and not x.committed else x for x in call.flat]
    # The program has run, so the call mustn't fail because JAX can't find the program again.
    with suppressed:
        traced = jitted.trace(*flat)
        return traced.jaxpr, traced.lower()
    return None, None


def combine_output(call: Call, out: Out, arrays: list[Any]) -> Any:
    """Return the user's output, combined from its arrays and the other parts in `out`."""
    statics = out.statics
    # Most outputs contain no static object that the call passed in. So usually skip `all_statics`,
    # which builds a list.
    if max(out.slots, default=-1) >= 0:
        came_in = call.all_statics
        statics = [came_in[i] if i >= 0 else v for v, i in zip(statics, out.slots, strict=True)]
    return combine(out.spec, iter(arrays), iter(statics))


# --- The handler of a wrapper ---------------------------------------------------------------------


class CallHandler:
    """Handles the calls of one wrapper for which C or generated Python doesn't suffice.

    - `function`: the wrapped function without its arrays.
    - `fun_arrays`: the arrays of that function.
    - `table`: the table of that function.
    - `wrapper`: a weak reference to the wrapper.
    - `fasts`: the fast paths that the wrapper tries. By default they are those of the table.
    """

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
        # A weak reference, because a cycle would keep arrays alive until garbage collection.
        self.wrapper = weakref.ref(wrapper)
        self.fasts = self.table.fasts if fasts is None else fasts
        if native is None:
            self.unlink()
        else:
            # Linking once is enough, because C reads the list of fast paths in each call.
            link(wrapper, self)

    # --- The slow path ------------------------------------------------------------------------

    def slow_call(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run a call that no fast path matches; then add a fast path for calls like it."""
        __tracebackhide__ = True
        # Not `with trimming`, because a `with` takes time even if nothing is raised, and all calls
        # that no fast path matches pass here.
        try:
            call = self.make_call(args, kwargs)
            result = run(call)
            # Under `jax.disable_jit` there is no program for a fast path to call.
            if HAS_FAST_PATHS and not is_jit_disabled():
                self.add_fast(call)
            return result
        except BaseException:
            trim()
            raise

    def make_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], is_staged: bool = False
    ) -> Call:
        """Return the `Call` for these arguments. An error names the argument at fault.

        If `is_staged`, the function is only lowered or exported, so a `ShapeDtypeStruct` may stand
        for an array.
        """
        __tracebackhide__ = True
        bound = bind_and_split(self.function, args, kwargs, is_staged)
        entry = self.entry_of(bound.spec)
        return Call(self.function, self.fun_arrays, *bound, entry, is_staged)

    def entry_of(self, spec: Spec) -> Entry:
        """Return the entry of a spec; create it if there is none."""
        make_entry = lambda: new_entry(self.function, spec, len(self.fun_arrays))  # noqa: E731
        # Under `jax.disable_jit` there is no program, so each call has an entry of its own.
        return make_entry() if is_jit_disabled() else self.table.find(spec, make_entry)

    # --- Methods that fast paths call ---------------------------------------------------------

    def make_matched_call(self, entry: Entry, /, *args: Any, **kwargs: Any) -> Call:
        """Return the `Call` for these arguments, which a fast path has matched with an entry.

        A fast path needs a `Call` only if JAX traces, if a program is unread, or for an error.
        """
        bound = bind_and_split(self.function, args, kwargs)
        # Usually only hashes are compared, because `==` of keys may run the `==` of user classes.
        if hash(bound.spec) != hash(entry.spec) and not _are_same(bound.spec, entry.spec):
            raise ValueError(
                "An argument was flattened twice in one call, with different results. The flatten "
                "function of a registered class must depend on nothing but the object."
            )
        return Call(self.function, self.fun_arrays, *bound, entry)

    def finish_fast(self, output: Output, call: Call) -> Any:
        """Finish a call of a fast path in which JAX traced, or whose program is unread."""
        __tracebackhide__ = True
        with trimming, ending(call):
            return finish(call, output)

    def failed_fast(self, error: BaseException, call: Call) -> None:
        """Raise the error that the jitted function raised in a fast path, or a clearer error."""
        __tracebackhide__ = True
        try:
            with trimming, ending(call):
                # Raise the error here, so that it becomes the context of a clearer error, as in the
                # slow path.
                raise error
        finally:
            # The traceback of the error refers to this frame, so a local name would be a cycle.
            del error

    # --- Linking fast paths to the wrapper ----------------------------------------------------

    def add_fast(self, call: Call) -> None:
        """Add a fast path for calls like this one, if the table wants a fast path."""
        if self.table.wants_fast(call.entry) and (fast := fast_path(call)) is not None:
            self.table.add_fast(fast)
        if native is None:
            self.link()

    def link(self) -> None:
        """Without C: have the wrapper try all present fast paths, and then the slow path."""
        table = self.table
        wrapper = self.wrapper()
        # Not a `WeakSet`, which runs Python when a handler dies. If a signal handler raised an
        # error there, the error would be lost.
        ref = weakref.ref(self, table.linked.discard)
        with table.changing():
            if wrapper is not None and ref not in table.linked:
                table.linked.add(ref)
                link(wrapper, self)

    def unlink(self) -> None:
        """Have the next call of the wrapper take the slow path, which links the wrapper again."""
        # The wrapper may be dead, because another thread or a finalizer may be calling this.
        wrapper = self.wrapper()
        if wrapper is not None:
            connect(wrapper, self.slow_call)

    def source(self) -> str | None:
        """Return the source of the latest call's fast path in generated Python.

        `None` if there is no fast path, or if its tree is too large for generated Python.
        """
        try:
            return Writer(self.function, self.table.fasts[0].entry).write()[0]
        except (IndexError, TooLarge):
            return None


# Without C, `wrapper.__call__` is this method. If a wrapper is called wrongly, tools such as
# beartype show the method's name in their errors.
CallHandler.slow_call.__module__ = "eqxjit.types"
CallHandler.slow_call.__qualname__ = "JitFunction.__call__"
