"""Gives hot cache entries their specialised calls."""

import os
import sys
import types
from collections.abc import Callable
from typing import Any

from jax.tree_util import tree_flatten

from .._compat import PyTreeDef, is_staging
from .._plan.budget import Budget, TooLong, without_limit
from .._plan.build import Example, build
from .._plan.call_source import Links
from .._plan.native import NativeCall, encode, native_enabled
from .._plan.native_planner import plan_natively
from .._plan.verify import does_the_same
from .._trees.given import NOTHING, Given
from .._trees.mutation import are_repeated
from .._trees.out_spec import Output, arrays_of, index_of
from .._trees.partition import StaticTree, with_arrays
from .._trees.static_key import fields_key
from .entry import CacheEntry
from .frameless import binds_in_order, can_be_frameless, frameless
from .miss import MissPath
from .request import BoundArguments
from .specialized_call import (
    checks_of_function,
    framed_call,
    frameless_call,
    instantiated,
    written,
)
from .state import SpecializedCall

#: `EQXJIT_SPECIALIZE=0` leaves all calls to the generic path.
SPECIALIZING = os.environ.get("EQXJIT_SPECIALIZE", "1") != "0"

# Beyond this size the generic path serves what takes a plan: to make that takes too long.
_MAX_NODES = 100_000

# Larger structures must be called more often before a plan is worth its making.
_NODES_PER_HIT = 10_000

# How many specialised calls of a function are made in first calls, which may be the last.
_MOST_AT_ONCE = 8


def may_be_specialized(entry: CacheEntry) -> bool:
    """Return whether an entry has no specialised call, and may yet get one."""
    return SPECIALIZING and entry.specialized is None and not entry.unspecializable


def is_worth_specializing(entry: CacheEntry, n_arrays: int) -> bool:
    """Return whether the entry is hot enough to specialise."""
    scale = 1.0 if native_enabled() else max(1.0, n_arrays / _NODES_PER_HIT)
    return (
        may_be_specialized(entry)
        # Under an eager `vmap` or `grad` nothing tells what runs: the generic path waits for it.
        and (not entry.unclassified or is_staging())
        and entry.hits >= entry.hits_needed * scale
    )


def specialize(
    dispatcher: MissPath, entry: CacheEntry, bound: BoundArguments, output: Output
) -> None:
    """Give an entry its specialised call, if one can be made.

    **Arguments:**

    - `dispatcher`: that of the wrapper that was called.
    - `entry`: the entry that served the call.
    - `bound`: the call's arguments.
    - `output`: what JAX returned.
    """
    if dispatcher.cache.use_second_chance(entry):
        return
    try:
        call = Specializer(dispatcher, entry, bound, output).call()
    except TooLong:
        entry.postpone()
        return
    if call is not None:
        dispatcher.cache.specialize(entry, call)
    elif dispatcher.partition(bound.args, bound.kwargs).static.key == entry.key:
        # Else what ran has changed the arguments.
        entry.give_up()


def specialize_at_once(
    dispatcher: MissPath, entry: CacheEntry, bound: BoundArguments, output: Output
) -> bool:
    """Give an entry its specialised call in its first call, where that takes no plan.

    **Arguments:** as of `specialize`.

    **Returns:**

    False if a later call may.
    """
    cache = dispatcher.cache
    if (
        not may_be_specialized(entry)
        or entry.traces > 1
        # Most of these have become part of another program, once.
        or entry.unclassified
        or len(cache.specialized) >= _MOST_AT_ONCE
    ):
        return False
    try:
        # A specialised call keeps static objects alive, and with them the entry.
        if not bound.static.holds_only(_may_be_kept):
            return False
        # What ran may have changed static objects in place.
        if not bound.static.still_has(entry.key):
            return False
        call = Specializer(dispatcher, entry, bound, output).frameless_call()
    except Exception:
        # A second call names what raised.
        return False
    if call is not None:
        cache.specialize(entry, call)
    return call is not None


def _may_be_kept(value: Any) -> bool:
    key = fields_key(value)
    if key is None or key.names is None:
        return _stays(value)
    return _holds_fields_only(value, key.names)


def _holds_fields_only(value: Any, names: tuple[str, ...]) -> bool:
    """Return whether a frozen dataclass of constants holds nothing that may be kept alive by it."""
    kind = type(value)
    return (
        kind.__dataclass_params__.frozen
        # Neither in slots, nor where a base in C keeps it.
        and not any(vars(base).get("__slots__") for base in kind.__mro__)
        and kind.__basicsize__ == _Plain.__basicsize__
        and vars(value).keys() == {*names}
    )


class _Plain:
    """A class whose objects hold what is in their `__dict__`, and nothing else."""


def _stays(value: Any) -> bool:
    """Return whether a static object lives as long as its module, as far as one can tell."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module is None:
        return False
    # A module's own `__getattr__` may do anything.
    names = vars(module)
    if names.get(getattr(value, "__qualname__", "")) is value:
        return True
    # Such as `lambda x: x`, a default argument. A loop may make many: they had better hold nothing.
    return (
        type(value) is types.FunctionType
        and "<locals>" not in value.__code__.co_qualname
        and value.__globals__ is names
        and not (value.__closure__ or value.__defaults__ or value.__kwdefaults__ or vars(value))
    )


class Specializer:
    """Makes the specialised call of an entry, if one can be made that does exactly the same.

    A call without a frame, planned in the native back end, if possible; else by a plan.
    """

    __slots__ = ("_budget", "_dispatcher", "_entry", "_example")

    def __init__(
        self, dispatcher: MissPath, entry: CacheEntry, bound: BoundArguments, output: Output
    ):
        """**Arguments:** as of `specialize`."""
        self._dispatcher = dispatcher
        self._entry = entry
        self._example = Example(
            bound.args,
            bound.kwargs,
            bound.static,
            dispatcher.wrapped.given(bound.static),
            entry.flat(dispatcher.fun_leaves, bound.leaves),
            output,
        )
        n_nodes = bound.static.treedef.num_nodes + entry.out_specs[index_of(output)].n_nodes
        self._budget = Budget(entry.seconds_of_first_call, n_nodes)

    def call(self) -> SpecializedCall | None:
        """Return the call; None if the generic path must serve.

        **Raises:**

        - `TooLong`, if making it takes longer than a call may.
        """
        return self._budget.spend(
            lambda: self._planned_natively() or self._planned(self._may_be_frameless())
        )

    def frameless_call(self) -> SpecializedCall | None:
        """Return the call if it takes no plan."""
        return self._budget.spend(self._planned_natively)

    def framed_call(self) -> SpecializedCall | None:
        """Return the same with a frame of its own, for what was compiled ahead of time."""
        return self._budget.spend(lambda: self._planned(False)) if SPECIALIZING else None

    def _may_be_frameless(self) -> bool:
        """Return whether the native back end can do all that there is to do, but for guards."""
        entry, wrapped = self._entry, self._dispatcher.wrapped
        waits = entry.blocks or entry.unclassified
        looks = wrapped.mutable or entry.returns_mutable
        return (
            native_enabled()
            and not (waits or looks or index_of(self._example.output))
            and can_be_frameless(wrapped.signature, entry.jitted)
        )

    def _planned_natively(self) -> SpecializedCall | None:
        """Return the call without a plan; None where something rare takes one."""
        if not self._may_be_frameless():
            return None
        entry, signature = self._entry, self._dispatcher.wrapped.signature
        layout, static = entry.layout, self._example.static
        # Nothing of the function's, which holds the entry.
        given = Given(static, NOTHING)
        if entry.out_specs[0].varies or are_repeated([*static.changeable, *entry.returned]):
            return None
        try:
            leaves, treedef = entry.out_specs[0].resolve(given)
            native = plan_natively(signature, layout.n_first, static, leaves, treedef)
            expected = with_arrays(leaves, arrays_of(self._example.output)), treedef
            if not self._does_the_same(native, expected):
                return None
        except Exception:
            return None
        kept = StaticTree(static.treedef, static.leaves, None, static.traced)
        example = Example((), {}, kept, Given(kept, NOTHING), [], [])
        out_specs = [*entry.out_specs]
        return frameless_call(
            native,
            entry,
            lambda: build(signature, layout, 0, out_specs, example, False, without_limit),
        )

    def _does_the_same(self, native: NativeCall, expected: tuple[list[Any], PyTreeDef]) -> bool:
        def make(links: Links) -> Callable[..., Any]:
            return frameless(native, links, self._entry, self._dispatcher)

        in_order = binds_in_order(native, self._dispatcher.wrapped.signature)
        return in_order and does_the_same(make, self._example, expected)

    def _planned(self, may_be_frameless: bool) -> SpecializedCall | None:
        """Return the call by a plan."""
        entry, dispatcher, example = self._entry, self._dispatcher, self._example
        if example.static.treedef.num_nodes > _MAX_NODES:
            return None
        blocks, checks = entry.blocks or entry.unclassified, checks_of_function(dispatcher.wrapped)
        try:
            expected = tree_flatten(entry.rebuild(example.output, example.given))
            # To try the call takes about as long once more.
            self._budget.reserve_as_much()
            plan = build(
                dispatcher.wrapped.signature,
                entry.layout,
                len(checks),
                entry.out_specs,
                example,
                blocks,
                self._budget.check,
            )
            native = encode(plan, self._budget.check)
            if native and may_be_frameless and self._does_the_same(native, expected):
                return frameless_call(native, entry, lambda: plan)
            generated = written(plan, native, entry, self._budget)
            if does_the_same(
                lambda links: instantiated(generated, links, dispatcher), example, expected
            ):
                is_whole = not (checks or plan.checks_output or blocks or plan.out_index)
                fails_fast = native.fails_fast if native and is_whole else lambda: False
                return framed_call(plan, generated, entry, fails_fast)
        except TooLong:
            raise
        except Exception:
            # Whatever a structure does to defeat code generation, the generic path serves it.
            pass
        return None
