"""Gives hot cache entries their specialised calls, and links these to wrappers."""

import functools
import os
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from jax.tree_util import tree_flatten

from .._compat import is_staging
from .._plan.budget import Budget, TooLong
from .._plan.build import Example, build
from .._plan.call_source import CallSource, Links, generate
from .._plan.plan import CallPlan
from .._plan.verify import does_the_same
from .._trees.given import Given, Position
from .._trees.out_spec import Output, index_of
from .counter import hit_counter
from .entry import ENTRY_VARIABLE, CacheEntry
from .frameless import can_be_frameless, frameless
from .function import WrappedFunction
from .request import BoundArguments
from .stack import CacheMiss

#: `EQXJIT_SPECIALIZE=0` leaves all calls to the generic path.
SPECIALIZING = os.environ.get("EQXJIT_SPECIALIZE", "1") != "0"

# Beyond this size the generic path serves: to put an output together, and to take it apart, takes
# longer than making the call may.
_MAX_NODES = 100_000

# Larger structures must be called more often before a specialised call is worth its making.
_NODES_PER_HIT = 10_000


class SlowPath(Protocol):
    """The calls of one wrapper that no specialised call serves."""

    @property
    def wrapped(self) -> WrappedFunction:
        """The function, without its arrays."""
        ...

    @property
    def fun_leaves(self) -> tuple[Any, ...]:
        """Its arrays."""
        ...

    def retrace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a warm call in which JAX wants to trace."""
        ...

    def flattened(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """Return the static objects that come in with a call."""
        ...

    def explain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise a clearer error than the one that the caller handles, if there is one."""
        ...

    def check_recompiled(self, entry: CacheEntry, output: Output) -> None:
        """Wait for a program that a warm call compiled."""
        ...

    def wait(self, entry: CacheEntry, output: Output) -> None:
        """Wait for a program that can raise, or that isn't known not to."""
        ...


class SpecializedCall:
    """The generated function of one entry, for any wrapper of the entry's function.

    - `plan`, `source`: its plan, and that as source.
    - `entry`: the entry that it calls.
    - `fails_fast`: whether its guards fail without running Python.
    """

    __slots__ = ("_generated", "entry", "fails_fast", "plan", "source")

    def __init__(self, plan: CallPlan, generated: CallSource, entry: CacheEntry):
        self.plan = plan
        self.source = generated.source
        self._generated = generated
        self.entry = entry
        self.fails_fast = generated.native is not None and generated.native.fails_fast

    def instantiate(
        self,
        dispatcher: SlowPath,
        otherwise: Callable[..., Any],
        jitted: Callable[..., Output] | None = None,
    ) -> Callable[..., Any]:
        """Return the function for one wrapper.

        **Arguments:**

        - `dispatcher`: that of the wrapper.
        - `otherwise`: what to call if the guards don't hold.
        - `jitted`: what to call in the place of the entry's jitted function.
        """
        signature = dispatcher.wrapped.signature
        run = jitted or self.entry.jitted
        # What is compiled ahead of time isn't in the cache.
        hits = hit_counter() if jitted else dispatcher.wrapped.cache.traces.hits
        if any(issubclass(type(leaf), np.ndarray) for leaf in dispatcher.fun_leaves):
            run = _minding_numpy(self.entry, run)
        links = Links(
            run,
            otherwise,
            signature.binder(dispatcher.retrace),
            signature.binder(dispatcher.explain),
            signature.binder(dispatcher.flattened),
            functools.partial(
                dispatcher.wait if self.plan.blocks else dispatcher.check_recompiled, self.entry
            ),
            self.entry.numpy_inputs.own,
            self.entry.numpy_inputs.own_arrays,
            hits,
        )
        call = self._generated.make(
            *links,
            *_checks_of_function(dispatcher),
            *_fun_statics(dispatcher, self._generated.fun_statics),
            *dispatcher.fun_leaves,
        )
        call.__name__, call.__qualname__ = signature.name, signature.qualname
        native = self._generated.native
        if native is not None and can_be_frameless(native, signature, run):
            return frameless(native, links, self.entry, call, dispatcher)
        return call


def _minding_numpy(entry: CacheEntry, jitted: Callable[..., Output]) -> Callable[..., Output]:
    """Return what to call for a function that itself holds NumPy arrays."""
    return lambda *arrays: entry.execute(jitted, arrays)


def _checks_of_function(dispatcher: SlowPath) -> list[Callable[[], bool]]:
    """Return the checks of the static objects that the wrapped function holds."""
    return [dispatcher.wrapped.is_unmodified] if dispatcher.wrapped.mutable else []


def _fun_statics(dispatcher: SlowPath, positions: list[Position]) -> list[Any]:
    given = Given(dispatcher.wrapped.fun, dispatcher.wrapped.fun)
    return [given.get(position) for position in positions]


def may_be_specialized(entry: CacheEntry) -> bool:
    """Return whether an entry has no specialised call, and may yet get one."""
    return SPECIALIZING and entry.specialized is None and not entry.unspecializable


def is_worth_specializing(entry: CacheEntry, n_arrays: int) -> bool:
    """Return whether the entry is hot enough to specialise."""
    return (
        may_be_specialized(entry)
        # Under an eager `vmap` or `grad` nothing tells what runs: the generic path waits for it.
        and (not entry.unclassified or is_staging())
        and entry.hits >= entry.hits_needed * max(1, n_arrays / _NODES_PER_HIT)
    )


def specialize(
    dispatcher: SlowPath, entry: CacheEntry, bound: BoundArguments, output: Output
) -> None:
    """Give an entry its specialised call, if one can be made.

    **Arguments:** as of `specialized_call`.
    """
    if dispatcher.wrapped.cache.use_second_chance(entry):
        return
    try:
        call = specialized_call(dispatcher, entry, bound, output)
    except TooLong:
        entry.postpone()
        return
    if call is None:
        entry.give_up()
    else:
        dispatcher.wrapped.cache.specialize(entry, call)


def specialized_call(
    dispatcher: SlowPath, entry: CacheEntry, bound: BoundArguments, output: Output
) -> SpecializedCall | None:
    """Return the specialised call of an entry, if one can be made that does exactly the same.

    **Arguments:**

    - `dispatcher`: that of the wrapper that was called.
    - `entry`: the entry that served the call.
    - `bound`: the call's arguments.
    - `output`: what JAX returned.

    **Raises:**

    - `TooLong`, if making it takes longer than a call may.
    """
    n_nodes = bound.static.treedef.num_nodes
    if not SPECIALIZING or n_nodes > _MAX_NODES:
        return None
    n_nodes += entry.out_specs[index_of(output)].n_nodes
    budget = Budget(entry.seconds_of_first_call, n_nodes)
    return budget.spend(lambda: _specialized_call(dispatcher, entry, bound, output, budget))


def _specialized_call(
    dispatcher: SlowPath,
    entry: CacheEntry,
    bound: BoundArguments,
    output: Output,
    budget: Budget,
) -> SpecializedCall | None:
    blocks = entry.blocks or entry.unclassified
    fun_leaves, checks = dispatcher.fun_leaves, _checks_of_function(dispatcher)
    try:
        given = dispatcher.wrapped.given(bound.static)
        flat = entry.flat(fun_leaves, bound.leaves)
        example = Example(bound.args, bound.kwargs, bound.static, given, flat, output)
        expected = tree_flatten(entry.rebuild(output, given))
        # To try the call takes about as long once more.
        budget.reserve_as_much()
        plan = build(
            dispatcher.wrapped.signature,
            entry.layout,
            len(checks),
            entry.out_specs,
            example,
            blocks,
            budget.check,
        )
        generated = generate(plan, entry, ENTRY_VARIABLE, CacheMiss, budget)
        if does_the_same(generated, example, expected, checks, fun_leaves):
            return SpecializedCall(plan, generated, entry)
    except TooLong:
        raise
    except Exception:
        # Whatever a structure does to defeat code generation, the generic path serves it.
        pass
    return None
