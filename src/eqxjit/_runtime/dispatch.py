"""Dispatches the calls of one wrapper: specialised call, cache lookup, cache miss."""

import math
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import tree_flatten, tree_map

from .._code.tracebacks import trimming
from .._compat import JITTED_FRAME_MARK
from .._plan.verify import identical
from .._trees.given import Given
from .._trees.out_spec import Output
from .._trees.partition import (
    DYNAMIC,
    StaticTree,
    partition,
    split_leaves,
    with_structs_as_arrays,
)
from .._trees.scan import Scanned, scan
from .cache import FunctionCache
from .donation import hide_donation_warning
from .entry import ENTRY_VARIABLE, CacheEntry, holds_tracer, wait_for
from .errors import argument_error, call_error, named_arguments, note_tracers
from .events import drop_interrupted
from .function import WrappedFunction, wrap_function
from .request import CALL_VARIABLE, BoundArguments, Call
from .specialize import (
    is_worth_specializing,
    may_be_specialized,
    specialize,
)
from .state import SpecializedCall
from .traced import CacheMiss, new_entry

# Spelled out below, because only a plain local variable shows on the stack.
assert JITTED_FRAME_MARK == "__equinox_jit_id__"
assert ENTRY_VARIABLE == "__eqxjit_entry__"
assert CALL_VARIABLE == "__eqxjit_call__"


def _same(leaf: Any) -> Any:
    return leaf


def _n_arrays_first(static: StaticTree) -> int:
    """Return the number of arrays in the first positional argument of a call."""
    args, _ = static.treedef.children()
    leaves = static.leaves[: args.children()[0].num_leaves]
    return sum([leaf is DYNAMIC for leaf in leaves])


class Dispatcher:
    """The dispatcher of one wrapper's calls: specialised call, cache lookup, cache miss.

    - `wrapped`: the function, without its arrays.
    - `fun_leaves`: its arrays.
    - `wrapper`: whose `__call__` slot this fills; weakly, so that no cycle keeps arrays alive.
    """

    __slots__ = ("__weakref__", "_own_entry", "fun_leaves", "wrapped", "wrapper")

    def __init__(self, wrapped: WrappedFunction, fun_leaves: tuple[Any, ...], wrapper: Any):
        self.wrapped = wrapped
        self.fun_leaves = fun_leaves
        self.wrapper = weakref.ref(wrapper)
        #: The entry that this wrapper, of all those of the function, specialised last; weakly.
        self._own_entry: Callable[[], CacheEntry | None] = lambda: None

    @property
    def cache(self) -> FunctionCache:
        """The cache of the function."""
        return self.wrapped.cache

    # --- From the wrapper ---------------------------------------------------------------------

    def linking_call(self, /, *args: Any, **kwargs: Any) -> Any:
        """Link the wrapper, and call: what its `__call__` slot holds as long as it isn't linked."""
        __tracebackhide__ = True
        with trimming:
            self.cache.linked[id(self)] = self
            return self._link()(*args, **kwargs)

    def _link(self) -> Callable[..., Any]:
        """Fill the wrapper's `__call__` slot: specialised calls first, the generic path behind."""
        with self.cache.lock:
            in_use = self.cache.specialized
            generic = self.call_if_unmodified if self.wrapped.mutable else self.call
            call = self.wrapped.signature.binder(generic)
            for specialized in reversed(self.specialized_calls()):
                call = specialized.instantiate(self, call)
            wrapper = self.wrapper()
            # What died while this ran may have changed them, in this very thread.
            if wrapper is not None and self.cache.specialized is in_use:
                wrapper.__call__ = call
            return call

    def unlink(self) -> None:
        """Reset `__call__`, so that the next call links anew."""
        wrapper = self.wrapper()
        if wrapper is not None:
            wrapper.__call__ = self.linking_call

    def renew_if_changed(self) -> None:
        """Wrap the function anew, if a static object in it was changed since it was wrapped."""
        if not self.wrapped.is_unmodified():
            traces = self.cache.traces
            fun = self.wrapped.fun.combine(self.fun_leaves)
            self.wrapped, _ = wrap_function(fun, self.wrapped.options)
            self.cache.continue_traces(traces)
            self.unlink()

    def specialized_calls(self) -> list[SpecializedCall]:
        """Return those of the function in the order of trial: the wrapper's own first."""
        own = self._own_entry()
        return sorted(self.cache.specialized, key=lambda call: call.entry is not own)

    def receive(
        self, action: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return `action(args, kwargs)`, with the arguments bound to the function's parameters."""
        return self.wrapped.signature.binder(action)(*args, **kwargs)

    # --- With bound arguments -----------------------------------------------------------------

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Split the arguments, look up their static half, and call what is found."""
        __tracebackhide__ = True
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return self.call_unjitted(args, kwargs)
        try:
            scanned = scan((args, kwargs))
            entry = self.cache.find_again(scanned.key) if scanned else None
        except Exception:
            # The long way names what raised.
            scanned = entry = None
        bound: BoundArguments | None = None
        if entry is not None and scanned is not None:
            leaves = scanned.arrays
        else:
            bound = self.partition(args, kwargs)
            leaves = bound.leaves
            entry = self.find(bound)
            if entry is not None and scanned is not None:
                self.meet(entry, scanned, bound)
        if entry is not None and not entry.is_unmodified():
            entry.invalidate("a static object that it returns was changed in place")
            self.cache.drop(entry.key, entry)
            entry = None
        if entry is None or not entry.traces:
            # One that another thread is tracing: waits for that trace, and traces if it fails.
            return self.miss(bound or self.partition(args, kwargs))
        __eqxjit_entry__ = entry  # noqa: F841
        try:
            output = entry.execute(entry.jitted, entry.flat(self.fun_leaves, leaves))
            if entry.blocks or entry.unclassified:
                self.classify(entry, leaves)
                wait_for(output)
        except CacheMiss:
            output = None
        except Exception:
            self.explain(args, kwargs)
            raise
        if output is None:
            return self.miss_in_turn(bound or self.partition(args, kwargs))
        entry.count_hit()
        next(self.cache.traces.hits)
        if is_worth_specializing(entry, len(leaves)):
            self._own_entry = weakref.ref(entry)
            bound = self.partition(args, kwargs)
            # What ran may have changed static objects in place.
            if bound.static.key == entry.key:
                specialize(self, entry, bound, output)
        if bound is not None:
            given = self.wrapped.given(bound.static)
        else:
            given = self.flattened(args, kwargs) if entry.returns_given(output) else None
        return entry.rebuild(output, given)

    def call_if_unmodified(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function that holds static objects which can be changed in place."""
        __tracebackhide__ = True
        self.renew_if_changed()
        return self.call(args, kwargs)

    def retrace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a warm call in which JAX wants to trace: a new shape, cleared caches, ..."""
        __tracebackhide__ = True
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return self.call_unjitted(args, kwargs)
        return self.miss_in_turn(self.partition(args, kwargs))

    def miss_in_turn(self, bound: BoundArguments) -> Any:
        """Serve a warm call as `miss` does: one thread at a time for each shape."""
        __tracebackhide__ = True
        # To JAX the signal to retrace is a trace that failed, which threads that wait for it then
        # each make for themselves. In turn they find what the first of them has compiled.
        shapes = tuple([(leaf.shape, leaf.dtype) for leaf in bound.leaves])
        with self.cache.retraces.hold((bound.static.key, shapes)):
            return self.miss(bound)

    def call_unjitted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function itself, on a copy of its arguments, under `jax.disable_jit`."""
        __tracebackhide__ = True
        fun = self.wrapped.fun.combine(self.fun_leaves)
        args, kwargs = tree_map(_same, (args, kwargs))
        try:
            return tree_map(_same, fun(*args, **kwargs))
        except Exception:
            self.explain(args, kwargs)
            raise

    def lower(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Any]:
        """Trace and lower what a call would run; return the call, and JAX's own `Lowered`."""
        __tracebackhide__ = True
        self.renew_if_changed()
        return self.stage(lambda jitted: jitted.lower, args, kwargs)

    def is_settled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether calls with such arguments are as fast as they ever get."""
        entry = self.cache.find(self.partition_for_stage(args, kwargs).static.key)
        return entry is None or not may_be_specialized(entry)

    def stage(
        self,
        stage: Callable[[Any], Callable[..., Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Call, Any]:
        """Return a call, and what `stage(jitted)` makes of its arrays; it isn't run."""
        __tracebackhide__ = True
        bound = self.partition_for_stage(args, kwargs)
        entry = self.find_or_add(bound)
        # Who compiles ahead of time wants what comes later to be fast.
        entry.count_seconds(math.inf)
        call = self.request(entry, bound, is_staged=True)
        try:
            return call, self.run(stage(entry.jitted), call)
        except Exception:
            self.explain(args, kwargs, call)
            raise
        finally:
            self.cache.keep_if_traced(bound.static.key, entry)

    def miss(self, bound: BoundArguments) -> Any:
        """Trace and compile what a call needs, then make it."""
        __tracebackhide__ = True
        start = time.perf_counter()
        entry = self.find_or_add(bound)
        call = self.request(entry, bound)
        try:
            output = self.run(entry.jitted, call)
            if call.traces:
                # Another thread may have looked at a program of its own meanwhile.
                entry.begin_classifying()
            if entry.blocks or entry.unclassified:
                self.classify(entry, bound.leaves, call.may_raise)
            # It may still be reading NumPy's arrays, which a warm call would have copied.
            wait_for(output)
            entry.count_seconds(time.perf_counter() - start)
        except Exception:
            self.explain(bound.args, bound.kwargs, call)
            raise
        finally:
            self.cache.keep_if_traced(bound.static.key, entry)
        if not call.traces:
            # Another thread was first.
            next(self.cache.traces.hits)
        return entry.rebuild(output, self.wrapped.given(bound.static))

    # --- Parts --------------------------------------------------------------------------------

    def request(self, entry: CacheEntry, bound: BoundArguments, is_staged: bool = False) -> Call:
        """Return a call on its way through the miss path, or one that JAX is to be asked about."""
        return Call(self.wrapped, self.fun_leaves, entry, bound, is_staged)

    def partition(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundArguments:
        """Return the arguments with their arrays and static half; an error names a bad argument."""
        try:
            leaves, static = partition((args, kwargs))
            # Now, as the user's function may change static objects in place.
            _ = static.key
            return BoundArguments(args, kwargs, leaves, static)
        except Exception as error:
            self.explain_arguments(error, args, kwargs)
            raise

    def partition_for_stage(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundArguments:
        """Return the arguments, with arrays in the place of `jax.ShapeDtypeStruct`s."""
        bound = self.partition(args, kwargs)
        leaves, static = with_structs_as_arrays(bound.leaves, bound.static)
        return BoundArguments(args, kwargs, leaves, static)

    def find(self, bound: BoundArguments) -> CacheEntry | None:
        """Return the entry for a call's static half, if there is one."""
        try:
            return self.cache.find(bound.static.key)
        except Exception as error:
            self.explain_arguments(error, bound.args, bound.kwargs)
            raise

    def meet(self, entry: CacheEntry, scanned: Scanned, bound: BoundArguments) -> None:
        """Make a scan find an entry, if it finds the arrays that JAX's registry finds."""
        again = scan((bound.args, bound.kwargs))
        # Another thread may have changed something meanwhile.
        if again is None or again.key != scanned.key:
            return
        if identical(scanned.arrays, bound.leaves):
            self.cache.meet(entry, scanned.key, scanned.known_by_address)

    def flattened(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """As `given`, for arguments whose static half is known to have an entry."""
        leaves, treedef = tree_flatten((args, kwargs))
        _, static = split_leaves(leaves)
        return self.wrapped.given(StaticTree(treedef, static, None))

    def find_or_add(self, bound: BoundArguments) -> CacheEntry:
        """Return the entry for a call's static half, new where there is none."""
        static = bound.static

        def make() -> CacheEntry:
            n_first = _n_arrays_first(static) if bound.args else 0
            donated = self.donated(n_first, static)
            return new_entry(self.wrapped.signature, self.wrapped.options, n_first, donated)

        try:
            return self.cache.find_or_add(static.key, make)
        except Exception as error:
            self.explain_arguments(error, bound.args, bound.kwargs)
            raise

    def donated(self, n_first: int, static: StaticTree) -> tuple[int, ...]:
        """Return the donated arrays' positions among all of a call (see `CacheEntry.flat`)."""
        n_all = len(self.fun_leaves) + static.n_arrays
        first = range(n_first) if self.wrapped.options.donates_first else ()
        n_kept = len(self.fun_leaves) if self.wrapped.keeps_arrays else 0
        rest = range(n_first + n_kept, n_all) if self.wrapped.options.donates_rest else ()
        return (*first, *rest)

    def run(self, action: Callable[..., Any], call: Call) -> Any:
        """Call a jitted function, or its `lower`, while JAX may trace it."""
        __tracebackhide__ = True
        # Equinox looks for this name on the stack, to tell where the jitted part begins.
        __equinox_jit_id__ = b"eqxjit"  # noqa: F841
        # And `stack` for this one.
        __eqxjit_call__ = call
        drop_interrupted()
        flat = call.flat
        show_warning = hide_donation_warning() if call.entry.hides_donation_warning else None
        try:
            return action(*flat)
        finally:
            if show_warning is not None:
                show_warning()
            # The user's function isn't run again, should JAX not have kept its trace.
            __eqxjit_call__ = None  # noqa: F841
            call.finish()

    # --- After a call -------------------------------------------------------------------------

    def classify(self, entry: CacheEntry, leaves: list[Any], may_raise: bool | None = None) -> None:
        """Find out whether the program that has just run can raise, and what it returns."""
        unclassified = entry.unclassified
        if unclassified:
            unclassified = not entry.classify(entry.flat(self.fun_leaves, leaves), may_raise)
        specialized = entry.specialized or entry.second_chance
        if specialized is not None and (
            specialized.blocks != (entry.blocks or unclassified)
            or specialized.checks_output != entry.returns_mutable
        ):
            self.cache.unspecialize(entry)
        # In the end: if an interrupt comes before, the next call does it all again.
        entry.end_classifying(not unclassified)

    def check_recompiled(self, entry: CacheEntry, output: Output) -> None:
        """Wait for a program that a warm call compiled; the generic path will class it."""
        self.cache.unspecialize(entry)
        wait_for(output)

    def wait(self, entry: CacheEntry, output: Output) -> None:
        """Wait for a program that can raise, or that isn't known not to."""
        if entry.unclassified and not holds_tracer(output):
            # The generic path finds out, the next time.
            self.cache.unspecialize(entry)
        wait_for(output)

    # --- Errors -------------------------------------------------------------------------------

    def explain(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call | None = None
    ) -> None:
        """Raise a clearer error than the one that the caller handles, if there is one.

        **Arguments:**

        - `args`, `kwargs`: the call's arguments.
        - `call`: the call in the miss path; None if JAX can't have run any code of the user's.
        """
        __tracebackhide__ = True
        error = sys.exc_info()[1]
        assert error is not None
        named = named_arguments(self.wrapped.signature, args, kwargs)
        if self.fun_leaves:
            named.append(("fun", self.wrapped.fun.combine(self.fun_leaves)))
        if call is not None and call.user_raised:
            note_tracers(error, named)
            return
        clearer = call_error(error, named)
        if clearer is not None:
            raise clearer from None

    def explain_arguments(
        self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raise a clearer error than `error`, if there is one."""
        __tracebackhide__ = True
        clearer = argument_error(error, named_arguments(self.wrapped.signature, args, kwargs))
        if clearer is not None:
            raise clearer from error
