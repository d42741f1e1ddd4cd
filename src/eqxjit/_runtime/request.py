"""One call on its way through the miss path, as a single object."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from .._compat import trace_configuration
from .._plan.signature import Signature
from .._trees.array_part import ArrayPart, array_part
from .._trees.partition import StaticTree
from .counter import TraceCounter
from .entry import CacheEntry
from .function import WrappedFunction

#: The local variable that holds the `Call` in the miss path.
CALL_VARIABLE = "__eqxjit_call__"

#: What JAX compiles a trace for, beside its cache entry: the configuration, and the arrays.
TraceKey = tuple[tuple[tuple[str, str], ...], tuple[ArrayPart, ...]]


class BoundArguments(NamedTuple):
    """The arguments of one call, bound to the function's parameters.

    - `args`, `kwargs`: as they are.
    - `leaves`: the arrays in them.
    - `static`: their static half.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    static: StaticTree


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Call:
    """One call on its way through the miss path.

    - `wrapped`: the function, without its arrays.
    - `fun_leaves`: its arrays.
    - `entry`: the entry that serves the call.
    - `arguments`: the static half of `(args, kwargs)`.
    - `leaves`: their arrays; empty once the call is over.
    - `is_staged`: whether it is lowered, rather than run.
    - `traces`: the hook's records of the traces of the user's function that JAX has made in it.
    - `counter`: counts them, each from its beginning to its end.
    - `is_compiled`: whether JAX has compiled the latest of them.
    - `trace_key`: of a staged call, and of one whose trace JAX hasn't compiled, once it is over.
    - `description`: the hook's, of a staged call.
    - `jaxpr`: the first that JAX lowers then; None once the call is over.
    - `may_raise`: whether a program that JAX compiles then can raise; None where that isn't known.
    - `user_raised`: whether the user's function, or a node of theirs, raised while it was traced.
    """

    wrapped: WrappedFunction
    fun_leaves: Sequence[Any]
    entry: CacheEntry
    arguments: StaticTree
    leaves: Sequence[Any]
    is_staged: bool = False
    counter: TraceCounter = dataclasses.field(init=False)
    traces: list[Any] = dataclasses.field(default_factory=list)
    is_compiled: bool = False
    trace_key: TraceKey | None = None
    description: Any = None
    jaxpr: Any = None
    may_raise: bool | None = None
    user_raised: bool = False

    def __post_init__(self) -> None:
        # What the function has may be replaced meanwhile.
        self.counter = self.wrapped.cache.traces

    @property
    def signature(self) -> Signature:
        return self.wrapped.signature

    @property
    def fun(self) -> StaticTree:
        return self.wrapped.fun

    @property
    def fun_varies(self) -> bool:
        """True where wrappers that share the entry may hold other arrays or static values."""
        return bool(self.fun_leaves or self.wrapped.mutable or self.wrapped.large)

    @property
    def flat(self) -> list[Any]:
        """All arrays, in the order in which JAX is given them."""
        return self.entry.flat(self.fun_leaves, self.leaves)

    def key_of_trace(self) -> TraceKey:
        """Return what JAX compiles a trace for, beside the entry."""
        if self.trace_key is not None:
            return self.trace_key
        configuration = tuple(sorted(trace_configuration().items()))
        return configuration, tuple(map(array_part, self.flat))

    def finish(self) -> None:
        """Publish what was traced, and drop the arrays: the call may be kept."""
        # A program that was traced well and then raised is compiled all the same.
        for record in self.traces:
            self.counter.hook.complete(record, self)
        if self.is_staged or (self.traces and not self.is_compiled):
            # An array that can't be described is compiled in no warm call.
            with contextlib.suppress(Exception):
                self.trace_key = self.key_of_trace()
                for record in self.traces:
                    self.entry.keep_uncompiled(self.trace_key, record)
        self.leaves, self.jaxpr = [], None
