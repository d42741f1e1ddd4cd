"""The specialised call of an entry, for any wrapper of its function: with a frame or without."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .._plan.budget import Budget
from .._plan.call_source import CallSource, Links, generate
from .._plan.native import NativeCall
from .._plan.plan import CallPlan
from .._trees.given import Given
from .._trees.out_spec import Output
from .counter import hit_counter
from .entry import ENTRY_VARIABLE, CacheEntry
from .frameless import frameless
from .function import WrappedFunction
from .miss import MissPath
from .stack import CacheMiss
from .state import SpecializedCall


def frameless_call(
    native: NativeCall, entry: CacheEntry, plan: Callable[[], CallPlan]
) -> SpecializedCall:
    """Return a call that the native back end makes alone; `plan` is for whoever asks for that."""

    def instantiate(dispatcher: MissPath, otherwise: Callable[..., Any]) -> Any:
        links = _links(entry, False, dispatcher, otherwise)
        return frameless(native, links, entry, dispatcher)

    def source() -> str:
        try:
            # The same in Python, which shows what C checks.
            return written(plan(), None, entry, Budget(math.inf, 0)).source
        except Exception:
            # Say, a tree too deep for Python's parser.
            return written(plan(), native, entry, Budget(math.inf, 0)).source

    return SpecializedCall(entry, instantiate, plan, source, native.fails_fast)


def framed_call(
    plan: CallPlan, generated: CallSource, entry: CacheEntry, fails_fast: Callable[[], bool]
) -> SpecializedCall:
    """Return a call in a frame of its own: a generated function.

    Its `instantiate` also takes what the entry's jitted function was compiled to ahead of time.
    """

    def instantiate(
        dispatcher: MissPath,
        otherwise: Callable[..., Any],
        compiled: Callable[..., Output] | None = None,
    ) -> Any:
        signature = dispatcher.wrapped.signature
        links = _links(entry, plan.blocks, dispatcher, otherwise, compiled)
        call = instantiated(generated, links, dispatcher)
        call.__name__, call.__qualname__ = signature.name, signature.qualname
        return call

    return SpecializedCall(
        entry,
        instantiate,
        lambda: plan,
        lambda: generated.source,
        fails_fast,
        plan.blocks,
        plan.checks_output,
    )


def written(
    plan: CallPlan, native: NativeCall | None, entry: CacheEntry, budget: Budget
) -> CallSource:
    """Return a call of an entry as source."""
    return generate(plan, native, entry, ENTRY_VARIABLE, CacheMiss, budget)


def instantiated(generated: CallSource, links: Links, dispatcher: MissPath) -> Any:
    """Return generated source as a function for one wrapper."""
    wrapped = dispatcher.wrapped
    given = Given(wrapped.fun, wrapped.fun)
    return generated.make(
        *links,
        *checks_of_function(wrapped),
        *[given.get(position) for position in generated.fun_statics],
        *dispatcher.fun_leaves,
    )


def checks_of_function(wrapped: WrappedFunction) -> list[Callable[[], bool]]:
    """Return the checks of the static objects that a wrapped function holds."""
    return [wrapped.is_unmodified] if wrapped.mutable else []


def _links(
    entry: CacheEntry,
    blocks: bool,
    dispatcher: MissPath,
    otherwise: Callable[..., Any],
    compiled: Callable[..., Output] | None = None,
) -> Links:
    bound, run = dispatcher.wrapped.signature.binder, compiled or entry.jitted
    holds_numpy = any(issubclass(type(leaf), np.ndarray) for leaf in dispatcher.fun_leaves)
    return Links(
        (lambda *arrays: entry.execute(run, arrays)) if holds_numpy else run,
        otherwise,
        bound(dispatcher.retrace),
        bound(dispatcher.explain),
        bound(dispatcher.flattened),
        functools.partial(dispatcher.wait if blocks else dispatcher.check_recompiled, entry),
        entry.numpy_inputs.own,
        entry.numpy_inputs.own_arrays,
        # What is compiled ahead of time isn't in the cache.
        hit_counter() if compiled else dispatcher.cache.traces.hits,
    )
