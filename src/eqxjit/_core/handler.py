"""The handler of a wrapper's calls: what C and generated Python call where they can't go on."""

import weakref
from typing import Any

from .._compat import connect, native
from .._fast.make import fast_path, link
from .._fast.writer import TooLarge, Writer
from .._places import trim, trimming
from .._text import switch
from .call import Call
from .entry import Entry
from .options import is_disabled
from .program import Output
from .slow import bind_and_split, ending, finish, make_call, run
from .table import Function
from .traced import new_entry

#: `EQXJIT_SPECIALIZE=0` leaves all calls to the slow path.
HAS_FAST_PATHS = switch("EQXJIT_SPECIALIZE") is not False


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
