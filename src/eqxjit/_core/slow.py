"""The slow path: the specification of a call.

Bind the arguments, split them, find the entry of their spec or add one, call its jitted function,
read a new program, wait if it can raise, and combine the output. A fast path is a guarded replay of
this.
"""

import weakref
from typing import Any

from .._compat import ArrayImpl, connect, is_transforming, native
from .._fast.make import link
from .._fast.writer import TooLarge, Writer
from .._places import trim, trimming
from .._spec.arrays import passed, wait_for
from .._spec.tree import Parts, combine, has_tracers
from .._text import comes_from_signal_handler, switch
from .entry import Call, Entry, Out, Output
from .errors import drop_unused, raise_clearer
from .in_flight import make
from .table import Function, fast_path, split_named
from .traced import is_disabled, new_entry

#: `EQXJIT_SPECIALIZE=0` leaves all calls to the slow path.
HAS_FAST_PATHS = switch("EQXJIT_SPECIALIZE") is not False

#: What a call's arguments are, bound to parameters and split: `args`, `kwargs`, and their parts.
BoundParts = tuple[tuple[Any, ...], dict[str, Any], Parts]


def bind_and_split(
    function: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    more_arrays: tuple[type, ...] = (),
) -> BoundParts:
    """Return the arguments of a call, bound and split. An error names the argument at fault."""
    __tracebackhide__ = True
    signature = function.signature
    args, kwargs = signature.bind(args, kwargs)
    named = lambda: signature.named(args, kwargs)  # noqa: E731
    return args, kwargs, split_named((args, kwargs), named, True, more_arrays)


def make_call(
    function: Function,
    fun_arrays: tuple[Any, ...],
    bound: BoundParts,
    entry: Entry,
    is_staged: bool = False,
) -> Call:
    args, kwargs, parts = bound
    return Call(function, fun_arrays, args, kwargs, *parts, entry, is_staged)


class ending:
    """The part of a call in which JAX may trace: however it ends, the call leaves nothing behind.

    If it raises, the error is replaced by a clearer one where there is one.
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
                drop_unused(call)
                raise_clearer(error, call)
        finally:
            # Last, because the log shows the time of all that JAX did for this call.
            call.function.table.history.finish(call)


def run(call: Call) -> Any:
    """Run the program of a call, tracing and compiling it if it is new; return the output."""
    __tracebackhide__ = True
    with ending(call):
        arrays, waits = call.flat, False
        if not {*map(type, arrays)} <= {ArrayImpl}:
            arrays, waits = passed(arrays)
        output = make(call, call.entry.jitted, *arrays)
        if waits:
            # The program reads NumPy arrays in place, which their owner may overwrite.
            wait_for(*output.values())
        return finish(call, output)


def finish(call: Call, output: Output) -> Any:
    """Return the user's output of a call, once its program has run if that can raise."""
    __tracebackhide__ = True
    [(program, arrays)] = output.items()
    call.program = program
    is_part = has_tracers(arrays)
    # A transformed program is a part of another program, which can't be read. So is a program that
    # is called on arrays alone, if it refers to the axis of a `vmap` by name.
    if program.unread and not is_part and not is_transforming():
        call.jaxpr, call.lowered = lower_again(call)
        program.read(call.lowered)
    if program.must_wait or program.unread or is_part:
        wait_for(arrays)
    # Another thread may have traced it, while this call waited within JAX.
    call.entry.n_hits += call.trace is None
    return combine_output(call, call.entry.outs[program.number][0], arrays)


def lower_again(call: Call) -> tuple[Any, Any]:
    """Return the jaxpr of a call's program and JAX's lowering of it, both from JAX's caches.

    Each is `None` if JAX has it no longer, or can't tell.
    """
    jitted = call.entry.jitted
    # `EQX_ON_ERROR=breakpoint` replaces `jax.jit`, and a compiled function has no `trace`.
    if not hasattr(jitted, "trace"):
        return None, None
    # JAX finds it fastest for what says no more of an array than its type. Donated arrays are
    # deleted by now, but still have their types.
    flat = [x.aval if type(x) is ArrayImpl and not x.committed else x for x in call.flat]
    try:
        traced = jitted.trace(*flat)
        return traced.jaxpr, traced.lower()
    except Exception as error:
        # The program has run, so the call mustn't fail because JAX doesn't find it again. No code
        # of the user's runs here, but a signal handler may raise.
        if comes_from_signal_handler(error):
            raise
        return None, None


def combine_output(call: Call, out: Out, arrays: list[Any]) -> Any:
    """Return the user's output, from its arrays and from what else the program returns."""
    statics = out.statics
    # Mostly no static object came in, and a list of all that did takes a while.
    if max(out.slots, default=-1) >= 0:
        came_in = call.all_statics
        statics = [came_in[i] if i >= 0 else v for v, i in zip(statics, out.slots, strict=True)]
    return combine(out.spec, iter(arrays), iter(statics))


# --- What a wrapper calls -------------------------------------------------------------------------


class CallHandler:
    """The calls of one wrapper.

    - `function`: the function without its arrays; `fun_arrays`: these arrays.
    - `fasts`: the fast paths that the wrapper tries: those of the function's table, by default.
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
        # Weakly, so that no cycle keeps arrays alive.
        self.wrapper = weakref.ref(wrapper)
        self.fasts = self.table.fasts if fasts is None else fasts
        if native is None:
            self.unlink()
        else:
            # C reads the list in each call.
            link(wrapper, self)

    # --- The slow path ------------------------------------------------------------------------

    def slow_call(self, /, *args: Any, **kwargs: Any) -> Any:
        """Make a call for which there is no fast path yet; then make one for calls like it."""
        __tracebackhide__ = True
        # Not `with trimming`, because here all calls pass that no fast path matches.
        try:
            call = self.take_apart(args, kwargs)
            result = run(call)
            # Under `jax.disable_jit` nothing was traced.
            if HAS_FAST_PATHS and not is_disabled():
                self.add_fast(call)
            return result
        except BaseException:
            trim()
            raise

    def take_apart(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        more_arrays: tuple[type, ...] = (),
        is_staged: bool = False,
    ) -> Call:
        """Return a call, taken apart, with its entry. An error names the argument at fault."""
        __tracebackhide__ = True
        bound = bind_and_split(self.function, args, kwargs, more_arrays)
        entry = self.entry_of(bound[2][0])
        return make_call(self.function, self.fun_arrays, bound, entry, is_staged)

    def entry_of(self, spec: Any) -> Entry:
        """Return the entry of a spec, a new one if there is none."""
        make = lambda: new_entry(self.function, spec, len(self.fun_arrays))  # noqa: E731
        # Under `jax.disable_jit` the function's output is described for one call alone.
        return make() if is_disabled() else self.table.find(spec, make)

    # --- What fast paths call -----------------------------------------------------------------

    def call_of(self, entry: Entry, /, *args: Any, **kwargs: Any) -> Call:
        """Return a call that a fast path has matched with an entry, taken apart."""
        bound = bind_and_split(self.function, args, kwargs)
        if hash(bound[2][0]) != hash(entry.spec):
            raise ValueError(
                "An argument was taken apart twice in one call, with different results. The "
                "flatten of a registered class must depend on nothing but the object."
            )
        return make_call(self.function, self.fun_arrays, bound, entry)

    def finish_fast(self, output: Output, call: Call) -> Any:
        """Finish a call of a fast path that was traced, or whose program is still to be read."""
        __tracebackhide__ = True
        with trimming, ending(call):
            return finish(call, output)

    def failed_fast(self, error: BaseException, call: Call) -> None:
        """Raise what the jitted function raised in a fast path, or a clearer error."""
        __tracebackhide__ = True
        try:
            with trimming, ending(call):
                # A clearer error then gets it as its context, as in the slow path.
                raise error
        finally:
            # The traceback of the error has this frame, which would be a cycle.
            del error

    # --- Fast paths ---------------------------------------------------------------------------

    def add_fast(self, call: Call) -> None:
        """Add a fast path for calls like this one, if the table wants one."""
        if self.table.wants_fast(call.entry) and (fast := fast_path(call)) is not None:
            self.table.add_fast(fast)
        if native is None:
            self.link()

    def link(self) -> None:
        """Have the wrapper try the fast paths that there are now, in generated Python."""
        table, wrapper = self.table, self.wrapper()
        # Unlike a `WeakSet`, this runs no Python when one dies: what a signal handler raises there
        # is lost.
        ref = weakref.ref(self, table.linked.discard)
        with table.changing():
            if wrapper is not None and ref not in table.linked:
                table.linked.add(ref)
                link(wrapper, self)

    def unlink(self) -> None:
        """Have the next call of the wrapper link it again."""
        # It may be gone: what calls this may be another thread, or a finaliser.
        wrapper = self.wrapper()
        if wrapper is not None:
            connect(wrapper, self.slow_call)

    def source(self) -> str | None:
        """Return the fast path of the function's latest call in Python; None without one."""
        try:
            return Writer(self.function, self.table.fasts[0].entry).write()[0]
        except (IndexError, TooLarge):
            return None
