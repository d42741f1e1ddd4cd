"""Dispatches the calls of one wrapper: specialised call, cache lookup, cache miss."""

import weakref
from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import tree_map

from .._code.tracebacks import trimming
from .._plan.verify import identical
from .._trees.scan import Scanned, scan
from .entry import ENTRY_VARIABLE, CacheEntry, wait_for
from .function import WrappedFunction, wrap_function
from .miss import MissPath
from .request import BoundArguments, Call
from .specialize import (
    is_worth_specializing,
    may_be_specialized,
    specialize,
    specialize_at_once,
)
from .stack import CacheMiss
from .state import SpecializedCall

# Spelled out below, because only a plain local variable shows on the stack.
assert ENTRY_VARIABLE == "__eqxjit_entry__"


def _same(leaf: Any) -> Any:
    return leaf


class Dispatcher(MissPath):
    """The dispatcher of one wrapper's calls: specialised call, cache lookup, cache miss.

    - `wrapper`: whose `__call__` slot this fills; weakly, so that no cycle keeps arrays alive.
    """

    __slots__ = ("__weakref__", "_own_entry", "wrapper")

    def __init__(self, wrapped: WrappedFunction, fun_leaves: tuple[Any, ...], wrapper: Any):
        super().__init__(wrapped, fun_leaves)
        self.wrapper = weakref.ref(wrapper)
        #: The entry that this wrapper, of all those of the function, specialised last; weakly.
        self._own_entry: Callable[[], CacheEntry | None] = lambda: None

    # --- From the wrapper ---------------------------------------------------------------------

    def first_call(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call: many wrappers are called once, for which linking would take too long."""
        __tracebackhide__ = True
        with trimming:
            self.unlink()
            return self.receive(self._generic, args, kwargs)

    @property
    def _generic(self) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        """The path behind the specialised calls."""
        return self.call_if_unmodified if self.wrapped.mutable else self.call

    def linking_call(self, /, *args: Any, **kwargs: Any) -> Any:
        """Link the wrapper, and call: what its `__call__` slot holds as long as it isn't linked."""
        __tracebackhide__ = True
        with trimming:
            return self._link()(*args, **kwargs)

    def _link(self) -> Callable[..., Any]:
        """Fill the wrapper's `__call__` slot: specialised calls first, the generic path behind."""
        self.cache.linked[id(self)] = self
        with self.cache.lock:
            in_use = self.cache.specialized
            call = self.wrapped.signature.binder(self._generic)
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

    def renew(self) -> None:
        """Wrap the function anew, as a static object in it was changed since it was wrapped."""
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
            # What has been met is found by a scan: at first nothing, as specialised calls serve.
            scanned = self.scan(args, kwargs) if self.cache.meets else None
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
            if scanned is None:
                self.cache.most_nodes = max(self.cache.most_nodes, bound.static.treedef.num_nodes)
            elif entry is not None:
                self.meet(entry, scanned, bound)
        if entry is not None and not entry.is_unmodified():
            entry.invalidate("a static object that it returns was changed in place")
            self.cache.drop(entry)
            entry = None
        if entry is None or not entry.traces:
            # One that another thread is tracing: waits for that trace, and traces if it fails.
            return self.miss_and_link(self.bound_for_trace(args, kwargs, bound))
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
            return self.miss_in_turn(self.bound_for_trace(args, kwargs, bound))
        entry.count_hit()
        next(self.cache.traces.hits)
        if is_worth_specializing(entry, len(leaves)):
            self._own_entry = weakref.ref(entry)
            bound = bound or self.partition(args, kwargs)
            # What ran may have changed static objects in place.
            if bound.static.still_has(entry.key):
                specialize(self, entry, bound, output)
        else:
            self.cache.meets = True
        if bound is not None:
            given = self.wrapped.given(bound.static)
        else:
            given = self.flattened(args, kwargs) if entry.returns_given(output) else None
        return entry.rebuild(output, given)

    def call_if_unmodified(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function that holds static objects which can be changed in place."""
        __tracebackhide__ = True
        if not self.wrapped.is_unmodified():
            self.renew()
        return self.call(args, kwargs)

    def retrace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a warm call in which JAX wants to trace: a new shape, cleared caches, ..."""
        __tracebackhide__ = True
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return self.call_unjitted(args, kwargs)
        return self.miss_in_turn(self.bound_for_trace(args, kwargs))

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
        if not self.wrapped.is_wholly_unmodified():
            self.renew()
        return self.stage(lambda jitted: jitted.lower, args, kwargs)

    def is_settled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether calls with such arguments are as fast as they ever get."""
        entry = self.cache.find(self.partition_for_stage(args, kwargs).static.key)
        return entry is None or not may_be_specialized(entry)

    def miss_in_turn(self, bound: BoundArguments) -> Any:
        """Serve a warm call in the miss path: one thread at a time for each shape."""
        __tracebackhide__ = True
        # To JAX the signal to retrace is a trace that failed, which threads that wait for it then
        # each make for themselves. In turn they find what the first of them has compiled.
        shapes = tuple([(leaf.shape, leaf.dtype) for leaf in bound.leaves])
        with self.cache.retraces.hold((bound.static.key, shapes)):
            return self.miss_and_link(bound)

    def miss_and_link(self, bound: BoundArguments) -> Any:
        """Serve a call in the miss path, and prepare those that are like it."""
        __tracebackhide__ = True
        entry, output, is_traced = self.miss(bound)
        if not is_traced:
            next(self.cache.traces.hits)
        elif specialize_at_once(self, entry, bound, output):
            self._own_entry = weakref.ref(entry)
            self._link()
        return entry.rebuild(output, self.wrapped.given(bound.static))

    # --- Parts --------------------------------------------------------------------------------

    def find(self, bound: BoundArguments) -> CacheEntry | None:
        """Return the entry for a call's static half, if there is one."""
        try:
            return self.cache.find(bound.static.key)
        except Exception as error:
            self.explain_arguments(error, bound.args, bound.kwargs)
            raise

    def bound_for_trace(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        bound: BoundArguments | None = None,
    ) -> BoundArguments:
        """Return the arguments of a call that is about to be traced; `bound`, if they are split.

        A warm call doesn't look into large static objects of the function; a trace must.
        """
        if not self.wrapped.has_large_unmodified():
            self.renew()
            bound = None
        return bound or self.partition(args, kwargs)

    def scan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scanned | None:
        """Scan arguments, as far as the function's structures have gone before."""
        return scan((args, kwargs), self.cache.traced, self.cache.most_nodes)

    def meet(self, entry: CacheEntry, scanned: Scanned, bound: BoundArguments) -> None:
        """Make a scan find an entry, if it finds the arrays that JAX's registry finds."""
        again = self.scan(bound.args, bound.kwargs)
        # Another thread may have changed something meanwhile.
        if again is None or again.key != scanned.key:
            return
        if identical(scanned.arrays, bound.leaves):
            self.cache.meet(entry, scanned.key, scanned.known_by_address)
