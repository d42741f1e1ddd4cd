"""Calls in flight: which call JAX is making of a jitted function, found while it traces.

A static object that a trace compiles in is that of the call in flight, because an equal one of an
earlier handler may have changed since. Each thread has a stack of them: with the native back end in
C, otherwise in Python.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from .._compat import native
from .._diagnostics.description import Description, describe
from .._fast.writer import call_of
from .._fast.writer import in_flight as _stack
from .._spec.tree import Spec

if TYPE_CHECKING:
    from .entry import Entry
    from .function import Function


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a wrapper, taken apart.

    - `function`: the function, without its arrays; `fun_arrays`: its arrays.
    - `args`, `kwargs`: the arguments, bound to the function's parameters.
    - `spec`, `arrays`, `statics`: those of `(args, kwargs)`, as `split` returns them.
    - `entry`: the entry that serves it, once it is looked up.
    - `is_staged`: whether it is lowered rather than run.
    """

    function: "Function"
    fun_arrays: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    spec: Spec
    arrays: list[Any]
    statics: list[Any]
    entry: "Entry" = dataclasses.field(init=False)
    is_staged: bool = False

    @functools.cached_property
    def description(self) -> Description:
        """The parts of the arguments by their paths, as of before the function changed any."""
        return describe(self)

    @property
    def flat(self) -> list[Any]:
        """All arrays, in JAX's order."""
        # Upstream passes the first argument, the function, and the rest.
        n = self.entry.n_first
        return [*self.arrays[:n], *self.fun_arrays, *self.arrays[n:]]

    @property
    def all_statics(self) -> list[Any]:
        """The function's static objects, then those of the arguments: what slots number."""
        return [*self.function.statics, *self.statics]


if native is not None:
    make, in_flight = native.run, native.in_flight

else:

    def make(call: Call, action: Any, *arrays: Any) -> Any:
        """Call a jitted function, or its `lower`, with the arrays of a call in flight."""
        __tracebackhide__ = True
        calls = _stack.calls
        n = len(calls)
        try:
            calls.append([call.entry, None, call])
            return action(*arrays)
        finally:
            del calls[n:]

    def in_flight(entry: "Entry | None" = None) -> Call | None:
        """Return this thread's innermost call in flight, of an entry or of any; or None."""
        for record in reversed(_stack.calls):
            if entry is None or record[0] is entry:
                return call_of(record)
        return None
