"""The specialised call of an entry, for any wrapper of its function: with a frame or without."""

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

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
from .request import BoundArguments
from .stack import CacheMiss


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

    def partition(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundArguments:
        """Return the arguments with their arrays and static half."""
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


class FramelessCall:
    """A call that the native back end makes alone.

    - `entry`: the entry that it calls.
    - `blocks`, `checks_output`: as of a plan.
    - `fails_fast`: whether its guards fail without running Python.
    """

    __slots__ = ("_describe", "_native", "entry", "fails_fast")

    blocks = checks_output = False

    def __init__(self, native: NativeCall, entry: CacheEntry, describe: Callable[[], CallPlan]):
        """`describe`: makes the plan, for whoever asks for that."""
        self._native = native
        self._describe = describe
        self.entry = entry
        self.fails_fast = native.fails_fast

    @property
    def plan(self) -> CallPlan:
        """Its plan, as static objects are now."""
        return self._describe()

    @property
    def source(self) -> str:
        """Its source, as Python."""
        return written(self.plan, self._native, self.entry, Budget(math.inf, 0)).source

    def instantiate(self, dispatcher: SlowPath, otherwise: Callable[..., Any]) -> Any:
        """Return the call for one wrapper; `otherwise` is called if the guards don't hold."""
        hits = dispatcher.wrapped.cache.traces.hits
        links = _links(self.entry, False, dispatcher, otherwise, self.entry.jitted, hits)
        return frameless(self._native, links, self.entry, dispatcher)


class FramedCall:
    """A call in a frame of its own: a generated function.

    - `plan`, `source`: its plan, and that as source.
    - `entry`, `blocks`, `checks_output`, `fails_fast`: as of `FramelessCall`.
    """

    __slots__ = ("_generated", "entry", "fails_fast", "plan", "source")

    def __init__(self, plan: CallPlan, generated: CallSource, entry: CacheEntry, fails_fast: bool):
        self.plan = plan
        self.source = generated.source
        self._generated = generated
        self.entry = entry
        self.fails_fast = fails_fast

    @property
    def blocks(self) -> bool:
        """True if it waits for the computation."""
        return self.plan.blocks

    @property
    def checks_output(self) -> bool:
        """True if it looks at static objects of the output."""
        return self.plan.checks_output

    def instantiate(
        self,
        dispatcher: SlowPath,
        otherwise: Callable[..., Any],
        jitted: Callable[..., Output] | None = None,
    ) -> Any:
        """Return the function for one wrapper.

        **Arguments:**

        - `dispatcher`: that of the wrapper.
        - `otherwise`: what to call if the guards don't hold.
        - `jitted`: what to call in the place of the entry's jitted function.
        """
        signature = dispatcher.wrapped.signature
        # What is compiled ahead of time isn't in the cache.
        hits = hit_counter() if jitted else dispatcher.wrapped.cache.traces.hits
        run = jitted or self.entry.jitted
        links = _links(self.entry, self.blocks, dispatcher, otherwise, run, hits)
        call = instantiated(self._generated, links, dispatcher)
        call.__name__, call.__qualname__ = signature.name, signature.qualname
        return call


def written(
    plan: CallPlan, native: NativeCall | None, entry: CacheEntry, budget: Budget
) -> CallSource:
    """Return a call of an entry as source."""
    return generate(plan, native, entry, ENTRY_VARIABLE, CacheMiss, budget)


def instantiated(generated: CallSource, links: Links, dispatcher: SlowPath) -> Any:
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
    dispatcher: SlowPath,
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
