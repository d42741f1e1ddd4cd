"""The miss path of one wrapper's calls: what no compiled entry serves yet."""

import math
import sys
import time
from collections.abc import Callable
from typing import Any

from jax.tree_util import tree_flatten

from .._compat import JITTED_FRAME_MARK, drop_slow_dispatch
from .._trees.array_layout import ArrayLayout
from .._trees.given import Given
from .._trees.out_spec import Output, arrays_of
from .._trees.partition import (
    DYNAMIC,
    StaticTree,
    has_tracers,
    partition,
    split_leaves,
    with_structs_as_arrays,
)
from .cache import FunctionCache
from .donation import hide_donation_warning
from .entry import CacheEntry, wait_for
from .errors import call_error, named_arguments, note_tracers, raise_for_arguments
from .events import drop_interrupted
from .function import WrappedFunction
from .request import CALL_VARIABLE, BoundArguments, Call
from .traced import new_entry

# Spelled out below, because only a plain local variable shows on the stack.
assert JITTED_FRAME_MARK == "__equinox_jit_id__"
assert CALL_VARIABLE == "__eqxjit_call__"


def _n_arrays_first(static: StaticTree) -> int:
    """Return the number of arrays in the first positional argument of a call."""
    args, _ = static.treedef.children()
    leaves = static.leaves[: args.children()[0].num_leaves]
    return sum([leaf is DYNAMIC for leaf in leaves])


class MissPath:
    """The miss path of one wrapper's calls: split, find or add an entry, trace, compile, classify.

    - `wrapped`: the function, without its arrays.
    - `fun_leaves`: its arrays.
    """

    __slots__ = ("fun_leaves", "wrapped")

    def __init__(self, wrapped: WrappedFunction, fun_leaves: tuple[Any, ...]):
        self.wrapped = wrapped
        self.fun_leaves = fun_leaves

    @property
    def cache(self) -> FunctionCache:
        return self.wrapped.cache

    def miss(self, bound: BoundArguments) -> tuple[CacheEntry, Output, bool]:
        """Trace and compile what a call needs, then make it.

        **Returns:**

        The entry that served it, what JAX returned, and whether this call was the one traced.
        """
        __tracebackhide__ = True
        start = time.perf_counter()
        bound.static.prepare_trace()
        entry = self.find_or_add(bound)
        call = self.request(entry, bound)
        drop_slow_dispatch(entry.jitted)
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
        # Else another thread was first.
        return entry, output, bool(call.traces)

    def stage(
        self,
        stage: Callable[[Any], Callable[..., Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Call, Any]:
        """Return a call, and what `stage(jitted)` makes of its arrays; it isn't run."""
        __tracebackhide__ = True
        bound = self.partition_for_stage(args, kwargs)
        bound.static.prepare_trace()
        entry = self.find_or_add(bound)
        # Who compiles ahead of time wants what comes later to be fast.
        entry.count_seconds(math.inf)
        call = self.request(entry, bound, is_staged=True)
        call.description = call.counter.hook.describe(call)
        try:
            return call, self.run(stage(entry.jitted), call)
        except Exception:
            self.explain(args, kwargs, call)
            raise
        finally:
            self.cache.keep_if_traced(bound.static.key, entry)

    def retrace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a warm call in which JAX wants to trace: a new shape, cleared caches, ..."""
        raise NotImplementedError

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

    # --- Parts -----------------------------------------------------------------------------------

    def partition(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundArguments:
        """Return the arguments with their arrays and static half; an error names a bad argument."""
        try:
            leaves, static = partition((args, kwargs), self.cache.traced)
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

    def find_or_add(self, bound: BoundArguments) -> CacheEntry:
        """Return the entry for a call's static half, new where there is none."""
        static = bound.static

        def make() -> CacheEntry:
            is_split = self.fun_leaves or self.wrapped.options.donates_rest
            n_first = _n_arrays_first(static) if is_split and bound.args else 0
            layout = ArrayLayout(n_first, len(self.fun_leaves))
            donated = self.donated(layout, static)
            return new_entry(self.wrapped.signature, self.wrapped.options, layout, donated)

        try:
            return self.cache.find_or_add(static.key, make)
        except Exception as error:
            self.explain_arguments(error, bound.args, bound.kwargs)
            raise

    def donated(self, layout: ArrayLayout, static: StaticTree) -> tuple[int, ...]:
        """Return the donated arrays' positions among all of a call."""
        n_first, n_all = layout.n_first, layout.n_fun + static.n_arrays
        first = range(n_first) if self.wrapped.options.donates_first else ()
        n_kept = layout.n_fun if self.wrapped.keeps_arrays else 0
        rest = range(n_first + n_kept, n_all) if self.wrapped.options.donates_rest else ()
        return (*first, *rest)

    def request(self, entry: CacheEntry, bound: BoundArguments, is_staged: bool = False) -> Call:
        """Return a call on its way through the miss path, or one that JAX is to be asked about."""
        return Call(self.wrapped, self.fun_leaves, entry, bound.static, bound.leaves, is_staged)

    def flattened(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """Return what came in with a call whose static half is known to have an entry."""
        leaves, treedef = tree_flatten((args, kwargs))
        _, static = split_leaves(leaves)
        return self.wrapped.given(StaticTree(treedef, static, None))

    # --- After a call ----------------------------------------------------------------------------

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
        if entry.unclassified and not has_tracers(arrays_of(output)):
            # The generic path finds out, the next time.
            self.cache.unspecialize(entry)
        wait_for(output)

    # --- Errors ----------------------------------------------------------------------------------

    def explain(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call | None = None
    ) -> None:
        """Raise a clearer error than the one that the caller handles, if there is one.

        Without `call`, which is the one in the miss path, JAX can't have run code of the user's.
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
            try:
                raise clearer from None
            finally:
                # Its traceback has this frame: arrays that it holds would wait for the collector.
                del clearer, error, named, args, kwargs

    def explain_arguments(
        self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raise a clearer error than `error`, if there is one."""
        __tracebackhide__ = True
        raise_for_arguments(error, named_arguments(self.wrapped.signature, args, kwargs))
