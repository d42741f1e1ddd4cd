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
        hits = dispatcher.wrapped.cache.traces.hits
        links = _links(entry, False, dispatcher, otherwise, entry.jitted, hits)
        return frameless(native, links, entry, dispatcher)

    def source() -> str:
        return written(plan(), native, entry, Budget(math.inf, 0)).source

    return SpecializedCall(entry, instantiate, plan, source, native.fails_fast)


def framed_call(
    plan: CallPlan, generated: CallSource, entry: CacheEntry, fails_fast: bool
) -> SpecializedCall:
    """Return a call in a frame of its own: a generated function.

    Its `instantiate` takes what to call in the place of the entry's jitted function, too.
    """

    def instantiate(
        dispatcher: MissPath,
        otherwise: Callable[..., Any],
        jitted: Callable[..., Output] | None = None,
    ) -> Any:
        signature = dispatcher.wrapped.signature
        # What is compiled ahead of time isn't in the cache.
        hits = hit_counter() if jitted else dispatcher.wrapped.cache.traces.hits
        run = jitted or entry.jitted
        links = _links(entry, plan.blocks, dispatcher, otherwise, run, hits)
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
    jitted: Callable[..., Output],
    hits: Any,
) -> Links:
    bound = dispatcher.wrapped.signature.binder
    if any(issubclass(type(leaf), np.ndarray) for leaf in dispatcher.fun_leaves):
        jitted = _minding_numpy(entry, jitted)
    return Links(
        jitted,
        otherwise,
        bound(dispatcher.retrace),
        bound(dispatcher.explain),
        bound(dispatcher.flattened),
        functools.partial(dispatcher.wait if blocks else dispatcher.check_recompiled, entry),
        entry.numpy_inputs.own,
        entry.numpy_inputs.own_arrays,
        hits,
    )


def _minding_numpy(entry: CacheEntry, jitted: Callable[..., Output]) -> Callable[..., Output]:
    """Return what to call for a function that itself holds NumPy arrays."""
    return lambda *arrays: entry.execute(jitted, arrays)
